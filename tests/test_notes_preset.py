"""`--preset notes` is 8.5 of the notes, and says afterwards what they never measured."""

import json
import re

import pytest
import torch

import elman
from elman import generation, metrics
from elman.cli import run
from elman.errors import UserError
from elman.reports import report
from elman.runs import Run, options_of, presets
from elman.runs.shown import Shown
from elman.session import RunOptions, Session
from elman.text import corpus, prepared
from elman.text.prepared import Data
from elman.training import Epoch, Result, Sample, Validation

TEXT = "The Time Traveller (for so it will be convenient to speak of him) was expounding.\n" * 60
TINY = [
    *("--hidden-size", "8", "--batch-size", "4", "--window", "10"),
    *("--train-tokens", "600", "--device", "cpu"),
]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def _no_report(monkeypatch):
    monkeypatch.setattr(report, "write", lambda run: run.path / "report.html")


def train(text, out, *more, preset="notes"):
    return run(["train", str(text), "--preset", preset, "--out", str(out), *TINY, *more])


# ---------------------------------------------------------------------- the text


@pytest.mark.parametrize("level", ["char", "word", "byte"])
def test_what_is_held_out_comes_right_after_what_trains(level):
    text, data = TEXT.lower(), Data(level=level, train_tokens=300, validation=0.25)
    parts = prepared.prepare(data, text)
    assert (len(parts.train), len(parts.validation)) == (300, 100)
    whole = prepared.prepare(Data(level=level, validation=0), text, parts.vocab).train.tolist()
    assert parts.train.tolist() == whole[:300]
    assert parts.validation.tolist() == whole[300:400]
    assert text.startswith(parts.vocab.decode(parts.train))
    again = prepared.prepare(data, text, parts.vocab)
    assert again.validation.tolist() == parts.validation.tolist()
    alone = prepared.prepare(Data(level=level, train_tokens=300, validation=0), text)
    assert (len(alone.train), len(alone.validation)) == (300, 0)


@pytest.mark.parametrize("train_tokens", [0, 500, 10_000])
def test_a_short_text_is_divided_as_ever(train_tokens):
    parts = prepared.prepare(Data(train_tokens=train_tokens, validation=0.5), TEXT[:1000])
    assert (len(parts.train), len(parts.validation)) == (500, 500)


def test_the_preset_trains_on_the_notes_ten_thousand_characters(time_machine_file):
    options = presets.expand("notes", {"source": str(time_machine_file)})
    data = presets.data(options)
    parts = prepared.prepare(data, prepared.read(data))
    text = "".join(corpus.letters(corpus.load(time_machine_file)))
    assert parts.vocab.decode(parts.train) == text[:10_000]
    assert parts.vocab.decode(parts.validation) == text[10_000:20_000]
    assert len(parts.vocab) == 28, "as in the notes, whose vocabulary is of the whole book"


# ---------------------------------------------------------------------- the recipe


def test_scratch_and_concise_are_the_notes_two_models():
    scratch, concise = (presets.named(name, {}) for name in ("notes", "notes-concise"))
    assert (scratch["hidden_size"], scratch["init"]) == (512, "notes")
    assert (concise["hidden_size"], concise["init"]) == (256, "default")
    different = {name for name in scratch if scratch[name] != concise[name]}
    assert different == {"hidden_size", "init"}
    reading = presets.settings(presets.expand("notes", {})).reading
    assert (reading.batch_size, reading.window, reading.sampling) == (32, 35, "sequential")


@pytest.mark.usefixtures("_no_report")
@pytest.mark.parametrize("preset", ["notes", "notes-concise"])
@pytest.mark.parametrize("sampling", ["sequential", "random"])
def test_every_ten_epochs_training_perplexity_and_the_time_traveller(
    preset, sampling, text, tmp_path, capsys
):
    out = tmp_path / "run"
    assert train(text, out, "--epochs", "25", "--sampling", sampling, preset=preset) == 0
    said = capsys.readouterr()
    assert "trains on the first 600 characters; the 600 after them are held out" in said.err
    records = Run.open(out).records()
    passes = {r.epoch: r for r in records if isinstance(r, Epoch)}
    samples = [r for r in records if isinstance(r, Sample)]
    assert [r.step for r in samples] == [passes[epoch].step for epoch in (10, 20, 25)]
    assert all(r.text.startswith("time traveller") for r in samples)
    assert all(len(r.text) == len("time traveller") + 50 for r in samples)
    told = re.findall(
        r"epoch (\d+): training perplexity ([\d.]+), .*\n  (time traveller.*)", said.err
    )
    assert [(int(e), p) for e, p, _ in told] == [
        (e, f"{passes[e].perplexity:.3f}") for e in (10, 20, 25)
    ]
    assert f"training perplexity {passes[25].perplexity:.3f} in pass 25\nheld out, 599" in said.out


@pytest.mark.usefixtures("_no_report")
def test_such_a_run_writes_and_is_scored_with_its_last_weights(text, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(text, out, "--epochs", "12", "--learning-rate", "3", "--validate-every", "5") == 0
    said = capsys.readouterr().out
    opened = Run.open(out)
    best, last = opened.load_model(which="best"), opened.load_model(which="last")
    assert not torch.equal(best.bias_q, last.bias_q)
    assert torch.equal(opened.load_model().bias_q, last.bias_q)
    assert torch.equal(elman.load(out).model.bias_q, last.bias_q)
    found = [r for r in opened.records() if isinstance(r, Result)][-1]
    expected = metrics.evaluate(last, opened.splits().validation)
    assert found.nats_per_token == expected.nats_per_token
    assert found.step == [r for r in opened.records() if isinstance(r, Epoch)][-1].step
    bests = [r for r in opened.records() if isinstance(r, Validation) and r.improved][-1]
    assert f"the best on the way, step {bests.step}: perplexity {bests.perplexity:.3f})" in said
    assert "599 tokens, last weights:" in (out / "README.md").read_text()
    ids = opened.vocab.encode("time traveller")
    written = opened.vocab.decode(list(generation.generate(last, ids, 20, temperature=0)))
    command = ["generate", str(out), "--prompt", "time traveller", "--length", "20"]
    assert run([*command, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"time traveller{written}\n"
    assert run([*command, "--temperature", "0", "--weights", "best"]) == 0
    assert run(["evaluate", str(out), "--json", "--no-baselines"]) == 0
    scored = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert scored["nats_per_token"] == expected.nats_per_token


@pytest.mark.usefixtures("_no_report")
def test_nothing_held_out_and_json(text, tmp_path, capsys):
    assert train(text, tmp_path / "run", "--epochs", "11", "--validation", "0", "--json") == 0
    said = capsys.readouterr()
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert {line["kind"] for line in lines} == {"update", "epoch", "sample", "result"}
    assert "trains on the first 600 characters; nothing is held out" in said.err
    assert "epoch 10: training perplexity" in said.err


@pytest.mark.usefixtures("_no_report")
def test_piped_output_has_the_training_perplexity_of_any_preset(text, tmp_path, capsys):
    assert train(text, tmp_path / "run", "--epochs", "2", preset="quick") == 0
    said = capsys.readouterr().err
    assert re.findall(r"epoch (\d): training perplexity", said) == ["1", "2"]
    assert "validation" in said


def test_a_resumed_run_samples_on_as_it_began(text, tmp_path):
    small = {"hidden_size": 8, "batch_size": 4, "window": 10, "train_tokens": 600, "epochs": 20}
    sessions = [
        Session.begin(
            small | {"source": str(text)},
            "notes",
            RunOptions(out=tmp_path / name, device="cpu", diagnose=0),
        )
        for name in ("whole", "stopped")
    ]
    whole = list(sessions[0].records())
    list(sessions[1].records(stop=lambda: sessions[1].training.epoch >= 13))
    list(Session.resume(tmp_path / "stopped").records())
    samples = [
        [r for r in rs if isinstance(r, Sample)] for rs in (whole, sessions[1].run.records())
    ]
    assert samples[0] == samples[1]
    assert len(samples[0]) == 2


def test_the_report_tells_it_as_the_notes_do(text, tmp_path):
    assert train(text, tmp_path / "run", "--epochs", "11") == 0
    page = (tmp_path / "run" / "report.html").read_text()
    opened = Run.open(tmp_path / "run")
    tenth = next(r for r in opened.records() if isinstance(r, Epoch) and r.epoch == 10)
    assert f"after {tenth.step:,} updates, training perplexity {tenth.perplexity:.2f}" in page
    assert "From “time traveller”, always the likeliest token." in page
    assert "trained on 600 characters" in page
    assert "measured on the 600 characters right after them" in page


# ---------------------------------------------------------------------- what is stored


def test_old_runs_keep_their_best_weights_and_samples(tiny_run, tmp_path):
    path = tmp_path / "config.json"
    record = json.loads((tiny_run() / "config.json").read_text())
    del record["shown"], record["ran"], record["data"]["train_tokens"]
    config = type(Run.open(tiny_run()).config).from_json(record, path)
    assert config.shown == Shown()
    assert config.shown.weights == "best"
    assert options_of(config)["train_tokens"] == 0


@pytest.mark.parametrize(
    "wrong",
    [{"weights": "first"}, {"sample_every": -1}, {"sample_length": 0}, {"sample_temperature": -1}],
)
def test_what_a_run_cannot_show_is_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Shown(**wrong)


# ---------------------------------------------------------------------- what ran


def test_card_and_report_say_which_update_and_which_kernel_ran(tiny_run):
    opened = Run.open(tiny_run())
    said = opened.config.ran
    assert re.fullmatch(r"(native|piecewise) updates.*, (cpu|reference) kernel, .* torch .*", said)
    assert f"- ran with: {said}\n" in (opened.path / "README.md").read_text()
    assert f"Ran with {said}." in (opened.path / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": "gru"}, r"native updates, cpu kernel"),
        ({"model": "gru", "embedding_size": 4, "accumulate": 2}, r"native updates, cpu kernel"),
        ({"model": "gru", "carry": "full"}, r"piecewise updates \(carry=full reads whole lanes"),
        ({"model": "mlp"}, r"piecewise updates \(.* has no recurrence\), no kernel of elman's"),
    ],
)
def test_one_line_says_what_runs_and_why_not_faster(options, expected, text, tmp_path):
    small = {"hidden_size": 8, "batch_size": 4, "window": 10, "embedding_size": 0, "epochs": 1}
    kept = RunOptions(out=tmp_path / "run", device="cpu")
    session = Session.begin(small | options | {"source": str(text)}, kept=kept)
    assert re.match(expected, session.training.engine())
    assert Run.open(tmp_path / "run").config.ran == session.training.engine()


def test_another_kernel_on_resume_is_told(text, tmp_path, monkeypatch):
    small = {"hidden_size": 8, "batch_size": 4, "window": 10, "model": "gru", "embedding_size": 0}
    kept = RunOptions(out=tmp_path / "run", device="cpu")
    Session.begin(small | {"source": str(text)}, kept=kept)
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    Session.resume(tmp_path / "run")
    assert "reference kernel" in Run.open(tmp_path / "run").config.ran
    assert "reference kernel" in (tmp_path / "run" / "README.md").read_text()


# ---------------------------------------------------------------------- relu and linear


@pytest.mark.usefixtures("_no_report")
@pytest.mark.parametrize("model", ["relu", "linear"])
def test_relu_and_linear_train_from_the_command_line(model, text, tmp_path):
    out = tmp_path / "run"
    assert train(text, out, "--model", model, "--epochs", "8", preset="quick") == 0
    passes = [r for r in Run.open(out).records() if isinstance(r, Epoch)]
    assert passes[-1].nats < passes[0].nats - 1, "a nat better than after the first pass"
    assert Run.open(out).config.model["cell"] == model
    assert run(["generate", str(out), "--length", "5"]) == 0
