"""`elman runs`: what lies in a folder, best first, and runs side by side."""

import json
import math
import shutil
from pathlib import Path

import pytest

from elman.cli import run
from elman.runs import Run, comparison
from elman.training import Result


def result_of(path) -> Result:
    result = Run.open(path).records()[-1]
    assert isinstance(result, Result)
    return result


SMALL, LARGE = (), ("--hidden-size", "12")


@pytest.fixture
def folder(tiny_run, tmp_path):
    """Two whole runs, one that has lost its config, one whose config is damaged, and no run."""
    for name, options in {"one": SMALL, "other": LARGE, "lost": SMALL, "damaged": SMALL}.items():
        shutil.copytree(tiny_run(*options), tmp_path / name)
    (tmp_path / "lost" / "config.json").unlink()
    (tmp_path / "damaged" / "config.json").write_text("{")
    (tmp_path / "pictures").mkdir()
    return tmp_path


def said(capsys, *words):
    assert run(["runs", *map(str, words)]) == 0
    return capsys.readouterr()


def test_a_folder_is_listed_best_first_with_what_differs(folder, capsys):
    output = said(capsys, folder)
    heading, *lines = output.out.splitlines()
    assert heading.split()[:2] == ["run", "model"]
    results = {name: result_of(folder / name) for name in ("one", "other")}
    order = sorted(results, key=lambda name: results[name].bits_per_char)
    assert [line.split()[0] for line in lines] == order
    for line in lines:
        name, result = line.split()[0], results[line.split()[0]]
        assert f"{result.nats_per_token:.4f}" in line
        assert f"{result.perplexity:.3f}" in line
        assert f"{result.bits_per_char:.4f}" in line
        assert f"--hidden-size {12 if name == 'other' else 24}" in line
        assert "--epochs" not in line
    assert output.err.splitlines()[-1].startswith(f"next: elman evaluate {folder / order[0]}")


def test_broken_folders_are_listed_with_the_reason(folder, capsys):
    output = said(capsys, folder)
    assert f"{folder / 'lost'}: " in output.err
    assert "has no config.json" in output.err
    assert "config.json is damaged" in output.err
    assert "pictures" not in output.err + output.out


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: (path / "vocab.json").unlink(),
        lambda path: (path / "vocab.json").write_text("[]"),
        lambda path: (path / "config.json").write_text('{"format": 1}'),
        lambda path: (path / "config.json").write_text("[1]"),
        lambda path: (path / "metrics.jsonl").write_text("{\n{\n"),
        lambda path: (path / "metrics.jsonl").write_text('{"kind": "update"}\n'),
        lambda path: _without_hidden_size(path / "config.json"),
    ],
    ids=["no vocab", "odd vocab", "empty config", "a list", "metrics", "a record", "a field"],
)
def test_whatever_is_broken_is_no_crash(spoil, folder, capsys):
    spoil(folder / "one")
    output = said(capsys, folder)
    assert f"{folder / 'one'}: " in output.err
    assert "one" not in [line.split()[0] for line in output.out.splitlines()]


def _without_hidden_size(path):
    record = json.loads(path.read_text())
    del record["model"]["hidden_size"]
    path.write_text(json.dumps(record))


def test_runs_side_by_side_show_what_differs_and_the_scores(folder, capsys):
    output = said(capsys, folder / "one", folder / "other")
    rows = {line.split("  ")[0]: line.split()[-2:] for line in output.out.splitlines()}
    assert rows["--hidden-size"] == ["24", "12"]
    results = [result_of(folder / name) for name in ("one", "other")]
    assert rows["nats/token"] == [f"{r.nats_per_token:.4f}" for r in results]
    assert rows["bits/char"] == [f"{r.bits_per_char:.4f}" for r in results]
    assert "--epochs" not in output.out
    assert "next: " in output.err


@pytest.mark.parametrize("how", [[], ["--json"]], ids=["people", "programs"])
def test_a_run_that_was_named_and_is_not_there_is_an_error_and_the_others_are_shown(
    how, folder, capsys
):
    words = [folder / "one", folder / "lost", folder / "nowhere", folder / "damaged", *how]
    assert run(["runs", *map(str, words)]) == 2
    output = capsys.readouterr()
    assert f"{result_of(folder / 'one').nats_per_token:.4f}"[:5] in output.out
    error = next(line for line in output.err.splitlines() if line.startswith("error: "))
    for name in ("lost", "nowhere", "damaged"):
        assert str(folder / name) in error
    assert str(folder / "one") not in error
    assert "hint: elman runs FOLDER" in output.err
    assert "next: " not in output.err, "what to type is the hint's to say"


def test_a_prepared_text_is_no_broken_run(folder, capsys):
    (folder / "book.txt").write_text("a text to prepare, " * 30)
    assert run(["prepare", str(folder / "book.txt"), "--out", str(folder / "book")]) == 0
    capsys.readouterr()
    assert "book:" not in said(capsys, folder).err


def test_programs_get_every_option_and_score(folder, capsys):
    found = json.loads(said(capsys, folder, "--json").out)
    by_name = {one["run"].rsplit("/", 1)[-1]: one for one in found["runs"]}
    assert set(by_name) == {"one", "other", "lost", "damaged"}
    result = result_of(folder / "one")
    assert by_name["one"]["perplexity"] == result.perplexity
    assert by_name["one"]["options"]["hidden_size"] == 24
    assert by_name["one"]["progress"] == 1
    assert "config.json" in by_name["lost"]["problem"]
    assert found["differ"] == ["source", "hidden_size"]


def test_a_run_on_its_way_shows_its_best_validation(folder, capsys):
    path = folder / "one" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    part = [r for r in map(json.loads, lines) if r["kind"] != "result"][: len(lines) // 2]
    path.write_bytes(b"".join(lines[: len(part)]))
    best = min(r["nats"] for r in part if r["kind"] == "validation")
    summary = comparison.summary(folder / "one")
    assert summary.nats == best
    last = [r for r in map(json.loads, lines[: len(part)]) if r["kind"] == "update"][-1]
    assert (summary.step, summary.progress) == (last["step"], last["progress"])
    assert 0 < summary.progress < 1
    output = said(capsys, folder / "one")
    assert f"~{best:.4f}" in output.out
    assert f"next: elman train --resume {folder / 'one'}" in output.err
    path.write_text("")
    begun = comparison.summary(folder / "one")
    assert math.isnan(begun.nats)
    assert begun.json()["best_validation_nats"] is None
    assert "–" in said(capsys, folder / "one").out


def test_runs_are_ranked_by_bits_then_come_those_without_a_score_and_the_broken():
    result = Result(step=9, tokens=9, nats_per_token=2.0, perplexity=7.4, bits_per_char=1.5)
    ended = comparison.Summary(Path("ended"), {}, result=result, best=0.1)
    going = [comparison.Summary(Path(f"{best}"), {}, best=best) for best in (1.0, 1.35)]
    assert (ended.nats, going[0].nats) == (2.0, 1.0)
    unscored = comparison.Summary(Path("unscored"), {})
    broken = comparison.Summary(Path("broken"), {}, best=0.5, problem="it is gone")
    ranked = [going[0], ended, going[1], unscored, broken]  # 1.44, 1.5 and 1.95 bits
    assert comparison.best_first(ranked[::-1]) == ranked


def test_no_runs_and_no_folder(tmp_path, monkeypatch, capsys):
    assert run(["runs", str(tmp_path)]) == 2
    assert "no runs in" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert run(["runs"]) == 2
    assert "there is no folder runs" in capsys.readouterr().err
    assert json.loads(said(capsys, tmp_path, "--json").out) == {"runs": [], "differ": []}
