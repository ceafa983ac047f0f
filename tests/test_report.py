"""The report: one page that says everything, loads nothing and runs nothing."""

import html
import json
import math
import re
import shlex
import shutil
import xml.etree.ElementTree as ET

import pytest
import torch

from elman import diagnostics
from elman.cli import run as elman
from elman.files import checked_line
from elman.reports import page, report, through_time
from elman.runs import Run


@pytest.fixture
def finished(tiny_run):
    return Run.open(tiny_run())


@pytest.fixture
def written(finished):
    return (finished.path / "report.html").read_text(encoding="utf-8")


def test_training_ends_with_a_report_that_can_be_written_again(finished, written):
    assert report.write(finished) == finished.path / "report.html"
    assert (finished.path / "report.html").read_text(encoding="utf-8") == written


def test_the_page_asks_for_nothing_from_outside(written):
    assert "default-src 'none'" in written
    addresses = set(re.findall(r"""(?:https?:)?//[^\s"'<>)]+""", written))
    assert {a for a in addresses if not a.startswith(("http://www.w3.org/", "//www.w3"))} == set()
    assert not re.search(r"<(script|link|img|iframe|object|embed|base)\b", written, re.IGNORECASE)
    assert set(re.findall(r"url\((.)", written)) <= {"#"}


def test_the_headline_is_the_result(finished, written):
    result = [r for r in finished.metrics() if r["kind"] == "result"][-1]
    assert f"<b>{result['perplexity']:.3f}</b><span>test perplexity</span>" in written
    assert f"{result['tokens'] + 1:,} characters held out" in written
    for name in ("uniform", "unigram", "Kneser–Ney order 5", "Kneser–Ney order 7"):
        assert written.count(name) >= 2  # in the table and in the figure
    assert f'<td>uniform</td><td class="number">{math.log(len(finished.vocab)):.4f}' in (written)


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_one_look_at_the_gradient_is_words_and_two_are_a_curve(looks, finished, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(finished.path, copy)
    look = {"kind": "diagnosis", "half_within": 1, "ninety_within": 5}
    look |= {"window_keeps": 0.97, "saturation": 0.033}
    with open(copy / "metrics.jsonl", "ab") as log:
        for number in range(looks):
            log.write(checked_line(json.dumps(look | {"step": 500 + number})))
    page = report.write(Run.open(copy)).read_text(encoding="utf-8")
    said = f"After {499 + looks} updates half lay within 1 step and 90 % within 5 steps"
    assert (said in page) == (looks > 0)
    assert ('id="horizons-' in page) == (looks > 1)


def test_samples_show_the_way_and_are_escaped(finished, written):
    samples = [r for r in finished.metrics() if r["kind"] == "sample"]
    assert len(samples) >= 3
    assert all(f"<pre>{page.text(s['text'])}</pre>" in written for s in samples)


def test_no_text_of_the_users_becomes_markup(finished, tmp_path):
    evil = '<script>alert("1")</script>&<b>'
    copy = tmp_path / evil.replace("/", "\u2215")
    shutil.copytree(finished.path, copy)
    sample = {"kind": "sample", "step": 99, "text": evil + "\x00\x1b[31m"}
    with open(copy / "metrics.jsonl", "ab") as log:
        log.write(checked_line(json.dumps(sample)))
    config = json.loads((copy / "config.json").read_text())
    config["command"] = f"elman train '{evil}'"
    (copy / "config.json").write_text(json.dumps(config))
    written = report.write(Run.open(copy)).read_text(encoding="utf-8")
    assert "<script" not in written
    assert "<b>&" not in written
    assert html.escape(evil) + "␀␛[31m" in written
    assert written.count(html.escape("<script>")) >= 4  # title, heading, sample, commands


def test_every_figure_is_well_formed_and_no_two_parts_share_an_id(written):
    drawings = re.findall(r"<svg.*?</svg>", written, re.DOTALL)
    assert len(drawings) == 6  # perplexity, norms and lags, each for wide and for narrow screens
    assert len(re.findall(r'<svg [^>]*class="narrow"', written)) == 3
    for drawing in drawings:
        ET.fromstring(drawing)
    names = re.findall(r'\bid="([^"]+)"', written)
    assert len(names) == len(set(names))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', written)) <= set(names)


def test_figures_take_the_colours_of_the_page(written):
    for drawing in re.findall(r"<svg.*?</svg>", written, re.DOTALL):
        assert not re.search(r"(fill|stroke): *#", drawing)
        used = set(re.findall(r"var\(--(\w+)\)", drawing))
        assert {"ink", "rule"} <= used
        for name in used:
            assert len(re.findall(rf"--{name}:", written)) == 2  # light and dark


def test_the_page_looks_through_time(finished, written):
    ids, window = finished.splits().validation, finished.config.training.reading.window
    seen = through_time.look(finished, ids)
    assert seen.by_lag.words(window)[1:] in html.unescape(written)
    for score in seen.carries:
        assert f'<td>{score.name}</td><td class="number">{score.cosine:.3f}' in written
    shades = re.findall(r'<span class="(for|against)" style="--much: (\d+)%">(.*?)</span>', written)
    assert html.unescape("".join(t for _, _, t in shades)) == "".join(
        map(through_time.visible, seen.past)
    )
    assert [kind == "for" for kind, _, _ in shades] == [v >= 0 for v in seen.attribution.left_out]
    assert max(int(much) for _, much, _ in shades) == 80


def test_the_explained_prediction_is_the_one_that_needs_its_past_most(finished):
    model, ids = finished.load_model(), torch.as_tensor(finished.splits().validation[:120]).long()
    at = diagnostics.telling(model, ids, context=12, near=3)
    gained = {}
    for t in range(12, len(ids)):  # by the definition, one prediction at a time
        said = [model(ids[None, t - n : t])[0][0, -1].softmax(-1)[ids[t]] for n in (12, 3)]
        gained[t] = (said[0] - said[1]).item()
    assert gained[at] == pytest.approx(max(gained.values()), abs=1e-6)


@pytest.mark.parametrize("options", [("--model", "mlp"), ("--validation", "0.006")])
def test_what_has_nothing_to_see_through_time_has_a_page_without_it(tiny_run, options):
    run = Run.open(tiny_run(*options))
    assert "<h2>Through time</h2>" not in (run.path / "report.html").read_text(encoding="utf-8")


def test_a_model_too_large_to_look_at_in_passing_is_left_to_elman_gradients(finished, monkeypatch):
    monkeypatch.setattr(through_time, "LARGEST", 10)
    assert through_time.look(finished, finished.splits().validation) is None


def test_settings_are_all_there(finished, written):
    config = finished.config
    for name, value in (
        ("hidden size", config.model["hidden_size"]),
        ("window", config.training.reading.window),
        ("learning rate", config.training.optimisation.learning_rate),
        ("seed", config.training.seed),
        ("sha256", config.sha256),
    ):
        assert f"<td>{name}</td><td>{value}</td>" in written


def test_the_commands_work_and_repeat_the_run(finished, written, tmp_path, capsys):
    lines = [html.unescape(c) for c in re.findall(r"<pre>(elman .*?)</pre>", written, re.DOTALL)]
    repeat, further, _, write = lines
    assert elman(shlex.split(repeat)[1:]) == 0
    again = Run.open(f"{finished.path}-again")
    for kind in ("update", "validation", "sample", "result"):
        first, second = (
            [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in run.metrics()]
            for run in (finished, again)
        )
        assert [r for r in first if r["kind"] == kind] == [r for r in second if r["kind"] == kind]
    copy = tmp_path / "copy"
    shutil.copytree(finished.path, copy)
    assert elman([w.replace(str(finished.path), str(copy)) for w in shlex.split(further)[1:]]) == 0
    assert Run.open(copy).metrics()[-1]["step"] > finished.metrics()[-1]["step"]
    assert elman(shlex.split(write)[1:]) == 0
    capsys.readouterr()


def test_a_run_on_its_way_has_a_report_too(finished, tmp_path):
    copy = tmp_path / "halfway"
    shutil.copytree(finished.path, copy)
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(b"".join(lines[:40]))
    written = report.write(Run.open(copy)).read_text(encoding="utf-8")
    assert "has not come to its end yet" in written
    assert "best validation perplexity" in written
    assert "held-out perplexity" not in written


def test_a_run_that_holds_nothing_out_has_a_report(tiny_run):
    run = Run.open(tiny_run("--validation", "0"))
    written = report.write(run).read_text(encoding="utf-8")
    assert "uniform" not in written
    assert "<svg" in written


def test_a_run_that_learned_nothing_but_infinities_has_a_report(tiny_run):
    run = Run.open(tiny_run("--learning-rate", "1e4"))
    assert run.metrics()[-1]["nats_per_token"] > 710  # whose exp is no number
    written = report.write(run).read_text(encoding="utf-8")
    assert '<td class="number">inf</td>' in written


@pytest.mark.parametrize("command", ["elman train a b --out=x --force", "elman train a b --out x"])
def test_repeating_a_run_never_overwrites_it(command, tmp_path):
    words = report.again(command, tmp_path / "a run")
    assert shlex.split(words) == [
        "elman",
        "train",
        "a",
        "b",
        "--out",
        f"{tmp_path / 'a run'}-again",
    ]
