"""`elman train`: options, presets, progress, refusals, and stopping without losing anything."""

import io
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
from types import SimpleNamespace

import pytest

from elman import generation
from elman.cli import run
from elman.cli.train import _line, _not_the_best
from elman.errors import WorkFailed
from elman.reports import report
from elman.runs import Run, checkpoints, log, options_of, presets
from elman.training import Change, Epoch, Settings, Training

pytestmark = pytest.mark.usefixtures("without_pictures")

TEXT = "the time traveller for so it will be convenient to speak of him " * 15
SMALL = [
    *("--model", "gru", "--hidden-size", "6", "--embedding-size", "0", "--batch-size", "4"),
    *("--window", "8", "--epochs", "2", "--device", "cpu"),
]


@pytest.fixture(autouse=True)
def _quick_report(request, monkeypatch):
    """Report and samples have tests of their own; here, only the test that asks waits for them."""
    if "report" not in request.node.name and "explodes" not in request.node.name:
        monkeypatch.setattr(report, "write", lambda run: run.path / "report.html")
        monkeypatch.setattr(generation, "specimen", lambda model, vocab, **_: "a sample")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def signalled(monkeypatch):
    """Send this process a signal in the middle of a training, during its fifth update."""
    sent, update = [], Training.update

    def during(which):
        def interrupted(training):
            if training.step == 4 and not sent:
                sent.append(which)
                os.kill(os.getpid(), which)
            return update(training)

        monkeypatch.setattr(Training, "update", interrupted)
        return sent

    return during


def train(text, out, *more):
    return run(["train", str(text), "--out", str(out), *SMALL, *more])


def test_a_run_is_trained_scored_named_and_gets_a_report(text, tmp_path, capsys):
    assert train(text, tmp_path / "run") == 0
    said = capsys.readouterr()
    assert "test, 47 tokens:" in said.out
    assert f"elman generate {tmp_path / 'run'}" in said.out
    assert "preset auto: " in said.err
    assert "--model gru" in said.err
    assert "--learning-rate 0.01" in said.err, "what the preset expands to is printed"
    assert (tmp_path / "run" / "report.html").exists()
    assert "sample" in {r["kind"] for r in Run.open(tmp_path / "run").metrics()}


@pytest.mark.parametrize("more", [(), ("--validation", "0"), ("--weights", "last")], ids=str)
def test_the_record_is_read_once_and_for_the_report_alone(more, text, tmp_path, monkeypatch):
    read, all_of = [], log.records
    monkeypatch.setattr(log, "records", lambda folder: read.append(folder) or all_of(folder))
    assert train(text, tmp_path / "run", *more) == 0
    assert read == [tmp_path / "run"]


def test_json_is_one_object_per_line(text, tmp_path, capsys):
    assert train(text, tmp_path / "run", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["kind"] for line in lines} == {"update", "epoch", "validation", "sample", "result"}
    assert lines[-1]["run"] == str(tmp_path / "run")
    update = next(line for line in lines if line["kind"] == "update")
    assert {"step", "epoch", "nats", "perplexity", "gradient_norm"} <= update.keys()
    assert {"tokens_per_second", "learning_rate"} <= update.keys()


OPTIONS = {
    "elman, one-hot, notes": "--model elman --init notes --optimizer sgd --learning-rate 1",
    "mlp": "--model mlp --context 3",
    "words": "--level word --batch-size 2 --window 4",
    "bytes": "--level byte",
    "letters": "--clean letters --max-tokens 500",
    "random": "--sampling random",
    "full": "--carry full --memory 64K",
    "sliding": "--carry sliding --history 5",
    "randomized": "--carry randomized",
    "polynomial": "--carry polynomial",
    "dropout": "--dropout-tokens 0.1 --dropout-outputs 0.2 --dropout-recurrent 0.2",
    "tied": "--embedding-size 6 --tied",
    "averages": "--average asgd --weight-decay 0.1 --schedule plateau --accumulate 2",
    "bfloat16": "--precision bfloat16",
    "nothing held out": "--validation 0",
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_reaches_the_run(options, text, tmp_path):
    given = options.split()
    rhythm = [] if "--validation" in given else ["--validate-every", "20"]
    assert train(text, tmp_path / "run", *rhythm, *given) == 0
    opened = Run.open(tmp_path / "run")
    stored = options_of(opened.config)
    for flag, value in zip(given[::2], given[1::2], strict=False):
        name = flag.removeprefix("--").replace("-", "_")
        if flag == "--memory":
            value = str(64 << 10)
        if flag.startswith("--") and not value.startswith("--"):
            assert str(stored[name]) in (value, f"{value}.0"), flag
    assert opened.load_model() is not None


def test_options_and_settings_are_each_others_inverse():
    ids = list(range(5000))
    for preset in presets.PRESETS:
        options = presets.expand(preset, {"validate_every": 3})
        data, model = presets.data(options), presets.model(options, 28)
        settings = presets.settings(options, ids)
        assert isinstance(settings, Settings)
        assert presets.flat(data, model, settings, presets.shown(options)) == options


def test_a_preset_is_one_line_and_the_help_names_it(monkeypatch, capsys):
    monkeypatch.setitem(presets.PRESETS, "tiny", {"model": "gru", "hidden_size": 8})
    assert run(["train", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "auto (by the text's length), quick, best, notes, notes-concise, tiny" in said
    assert presets.expand("tiny", {})["hidden_size"] == 8


@pytest.mark.parametrize(
    ("epochs", "held_out", "expected"),
    [(30, 1000, 20), (30, 20_000, 13), (2, 1000, 18), (2, 3000, 6), (1, 40_000, 1), (3, 0, 20)],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_validations_are_at_most_twenty_and_at_most_a_tenth_of_the_time(
    epochs, held_out, expected, accumulate
):
    ids, updates = list(range(45_000)), math.ceil(87 / accumulate)
    given = {"epochs": epochs, "batch_size": 8, "window": 64, "accumulate": accumulate}
    settings = presets.settings(presets.expand("quick", given), ids, held_out)
    assert settings.validate_every == math.ceil(updates * epochs / expected)
    times = updates * epochs // settings.validate_every
    assert times * held_out * 0.5 <= 0.1 * len(ids) * epochs or times == 1


def test_a_short_training_is_not_validated_after_every_update(text, tmp_path):
    assert train(text, tmp_path / "run") == 0
    records = Run.open(tmp_path / "run").metrics()
    updates = sum(r["kind"] == "update" for r in records)
    steps = [r["step"] for r in records if r["kind"] == "validation"]
    assert updates >= 26
    assert len(steps) <= 8
    assert steps[-1] == updates, "the end is always validated"


def test_full_carry_is_checkpointed_unless_said_otherwise():
    assert presets.expand("quick", {"carry": "full"})["memory"] == 64 << 20
    assert presets.expand("quick", {"carry": "full", "memory": 0})["memory"] == 0


def test_sliding_reads_a_window_again_unless_said_otherwise():
    assert presets.expand("quick", {"carry": "sliding", "window": 9})["history"] == 9
    assert presets.expand("quick", {"carry": "sliding", "history": 5})["history"] == 5
    assert presets.expand("quick", {})["history"] == 0


def test_a_piped_text_can_be_resumed(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert train("-", out) == 0
    assert run(["train", "--resume", str(out), "--epochs", "3"]) == 0
    assert Run.open(out).metrics()[-2]["kind"] in ("validation", "sample")
    assert Run.open(out).config.training.epochs == 3
    assert run(["train", "-", "--resume", str(out), "--epochs", "4"]) == 2
    assert "keeps the text that it read from stdin, and does not read" in capsys.readouterr().err


REFUSED = {
    "unknown preset": (["--preset", "fast"], "auto, quick, best, notes"),
    "unknown model": (["--model", "transformer"], "elman, relu, linear, gru, lstm, "),
    "unknown device": (["--device", "tpu"], "auto, cpu, cuda"),
    "no memory": (["--memory", "lots"], "64M"),
    "too large a batch": (["--batch-size", "5000"], "a longer text"),
    "mlp carries nothing": (["--model", "mlp", "--carry", "full"], "no state"),
    "rate": (["--learning-rate", "-1"], "--learning-rate -1.0 must be positive"),
    "dropout": (["--dropout-inputs", "2"], "--dropout-inputs 2.0 must be at least 0 and below 1"),
    "no clipping": (["--clip", "-1"], "--clip 0 never clips"),
    "not a number": (["--epochs", "many"], "many"),
    "no epochs": (["--epochs", "0"], "--epochs 0 must be at least 1"),
    "checkpoints": (["--checkpoint-every", "-1"], "--checkpoint-every -1 must be at least 0"),
    "unknown option": (["--bidirectional"], "elman train --help"),
    "context": (["--context", "3"], "--context 3 means nothing with --model gru"),
    "patience": (["--patience", "2", "--validation", "0"], "nothing with --validation 0.0"),
    "plateau": (["--schedule", "plateau", "--validation", "0"], "hint: --validation 0.1, or leave"),
    "bytes": (["--encoding", "latin-1", "--level", "byte"], "--encoding latin-1 means nothing"),
}


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals_say_what_to_type_and_write_nothing(options, said, text, tmp_path, capsys):
    assert train(text, tmp_path / "run", *options) == 2
    complaint = capsys.readouterr().err
    assert "error: " in complaint
    assert "hint: " in complaint
    assert said in complaint
    assert not (tmp_path / "run").exists()


def test_a_pipe_is_kept_in_the_run_and_the_run_goes_on_from_there(text, tmp_path, capsys):
    pipe, path = tmp_path / "pipe", tmp_path / "run"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(TEXT))
    writer.start()
    assert train(pipe, path) == 0
    writer.join()
    assert Run.open(path).config.data.source == "-"
    assert (path / "source").read_text() == TEXT
    pipe.unlink()
    assert run(["train", "--resume", str(path), "--epochs", "3"]) == 0
    assert run(["evaluate", str(path), "--no-baselines"]) == 0


def test_an_empty_source_is_not_this_folder(text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(text.parent)
    assert train("", tmp_path / "run") == 2
    assert "an empty source names no text" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_line_ends_are_made_alike_unless_asked_otherwise(tmp_path, capsys):
    path = tmp_path / "dos.txt"
    path.write_bytes(TEXT.replace("him ", "him\r\n").encode())
    assert train(path, tmp_path / "run") == 0
    assert "\r" not in Run.open(tmp_path / "run").vocab
    assert train(path, tmp_path / "raw", "--clean", "none") == 0
    assert "\r" in Run.open(tmp_path / "raw").vocab


def test_words_are_split_from_punctuation_and_lower_case_on_request(tmp_path, capsys):
    path = tmp_path / "book.txt"
    path.write_text("Well, he said. The end, he said: the END.\n" * 30)
    words = ["--level", "word", "--batch-size", "2", "--window", "4"]
    assert train(path, tmp_path / "run", *words) == 0
    vocab = Run.open(tmp_path / "run").vocab
    assert {"Well", ", ", "The", "the", "END", ".", "\n"} <= set(vocab)
    assert train(path, tmp_path / "low", *words, "--lower") == 0
    run_ = Run.open(tmp_path / "low")
    assert {"The", "END"}.isdisjoint(run_.vocab)
    assert run_.config.data.lower
    assert run_.config.data.min_freq == 2
    capsys.readouterr()
    assert run(["generate", str(run_.path), "--prompt", "THE ", "--length", "4"]) == 0
    assert capsys.readouterr().out.startswith("the")


def test_a_run_that_knows_nothing_of_new_options_reads_its_text_as_before(text, tmp_path, capsys):
    """A config.json and a vocab.json as an older elman wrote them."""
    path = tmp_path / "run"
    text.write_text(TEXT.replace("him ", "him,\r\n"))
    spaced = ["--level", "spaced", "--clean", "none", "--batch-size", "2", "--window", "4"]
    assert train(text, path, *spaced) == 0
    ids = Run.open(path).splits()
    config = json.loads((path / "config.json").read_text())
    del config["data"]["lower"]
    config["data"]["level"] = "word"
    (path / "config.json").write_text(json.dumps(config))
    vocab = json.loads((path / "vocab.json").read_text())
    del vocab["seal"]
    (path / "vocab.json").write_text(json.dumps(vocab | {"version": 1, "level": "word"}))
    old = Run.open(path)
    assert old.splits().train.tolist() == ids.train.tolist()
    assert old.splits().validation.tolist() == ids.validation.tolist()
    assert old.splits().characters == ids.characters
    for verb in (["evaluate"], ["generate", "--length", "4"], ["train", "--resume"]):
        assert run([*verb, str(path)]) == 0


def test_an_existing_run_is_kept_unless_forced(text, tmp_path, capsys):
    assert train(text, tmp_path / "run") == 0
    before = (tmp_path / "run" / "config.json").read_bytes()
    assert train(text, tmp_path / "run", "--seed", "1") == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    assert train(text, tmp_path / "run", "--seed", "1", "--force") == 0
    assert Run.open(tmp_path / "run").config.training.seed == 1


def test_without_a_name_a_free_folder_is_found(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for expected in ("text-gru", "text-gru-2"):
        assert run(["train", "text.txt", *SMALL]) == 0
        assert (tmp_path / "runs" / expected / "model.safetensors").exists()


def test_resume_refuses_by_name_what_it_cannot_change(text, tmp_path, capsys):
    assert train(text, tmp_path / "run") == 0
    for option, value in (("--hidden-size", "7"), ("--seed", "5"), ("--batch-size", "8")):
        assert run(["train", "--resume", str(tmp_path / "run"), option, value]) == 2
        assert f"error: {option} {value} cannot be changed" in capsys.readouterr().err
    assert run(["train", "--resume", str(tmp_path / "run"), "--hidden-size", "6"]) == 0
    assert run(["train", "--resume", str(tmp_path / "nowhere")]) == 2
    for option in (["--force"], ["--preset", "best"], ["--out", str(tmp_path / "other")]):
        assert run(["train", "--resume", str(tmp_path / "run"), *option]) == 2
        assert f"error: {option[0]} belongs to a new run" in capsys.readouterr().err


def test_what_one_carry_has_no_use_for_can_be_asked_for_again_with_the_next(text, tmp_path):
    """`--carry full` reads a pass as one segment, so that nothing is accumulated there."""
    folder = tmp_path / "run"
    assert train(text, folder, "--accumulate", "3") == 0
    for epochs, changes in ((3, "--carry full"), (4, "--carry truncated --accumulate 3")):
        typed = ["--epochs", str(epochs), *changes.split()]
        assert run(["train", "--resume", str(folder), *typed]) == 0
    said = [r.options for r in Run.open(folder).records() if isinstance(r, Change)]
    assert [each["accumulate"] for each in said] == [1, 3]
    assert Run.open(folder).config.training.accumulate == 3


def test_a_text_that_was_only_moved_is_resumed_from_where_it_is_now(
    text, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert train(text, tmp_path / "run") == 0
    assert run(["train", "text.txt", "--resume", "run"]) == 0
    text.rename("moved.txt")
    assert run(["train", "--resume", "run", "--epochs", "3"]) == 2
    assert "elman train WHERE --resume run" in capsys.readouterr().err
    assert run(["train", "moved.txt", "--resume", "run", "--epochs", "3"]) == 0
    said = capsys.readouterr().err
    assert "continuing run at step 52 with --epochs 3\n" in said
    assert f"its text is {tmp_path / 'moved.txt'} now: the same" in said
    assert run(["train", "--resume", "run"]) == 0  # it is remembered
    assert run(["evaluate", "run"]) == 0


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--tied --embedding-size 3 --hidden-size 6", "--embedding-size 6, or no --tied"),
        ("--lower --level byte", "--clean letters, or --level char and --lower"),
        ("--min-freq 100000", "keeps it, --min-freq 0 keeps all"),
        (
            "--window 5000 --batch-size 2",
            "without --batch-size and --window batches are made that suit this one",
        ),
    ],
)
def test_a_hint_is_in_words_that_can_be_typed(text, tmp_path, capsys, typed, hint):
    assert run(["train", str(text), "--out", str(tmp_path / "run"), *typed.split()]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(hint)


HELLO = "hello world, it is a short text\n"


@pytest.mark.parametrize(
    ("written", "typed", "error", "hint"),
    [
        ("ab", "", "s.txt: 2 characters, too few to hold out 5 %", "40 are enough; or"),
        ("Hello there", "", "s.txt: 11 characters, too few to hold out 5 %", "--validation 0"),
        ("ab", "--validation 0", "s.txt: 2 characters, fewer than the 3", "a text of 3 characters"),
        (HELLO, "--max-tokens 10", "s.txt: 10 characters, too few to hold out 5 %", "40 are"),
        (HELLO, "--train-tokens 4", "s.txt: 4 characters, too few to hold out 5 %", "40 are"),
        (HELLO, "--preset quick", "s.txt: 28 characters to train on", "2,277 characters"),
        (HELLO, "--preset quick", "fewer than the 2,049", "--preset auto makes batches"),
        (HELLO, "--batch-size 9", "a batch of 9 × 5", "without --batch-size batches are made"),
    ],
)
def test_a_text_that_is_too_short_is_named_with_the_length_that_is_enough(
    tmp_path, monkeypatch, capsys, written, typed, error, hint
):
    """Refusals once spoke of options that nobody had typed: batch=32, --validation 0.05."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.txt").write_text(written)
    assert run(["train", "s.txt", "--out", "run", *typed.split()]) == 2
    said = capsys.readouterr().err.splitlines()
    assert error in said[-2]
    assert hint in said[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("typed", "enough"),
    [
        ("", 40),
        ("--preset quick --batch-size 9", 642),
        ("--preset quick", 2277),
        ("--validation 0", 3),
    ],
)
def test_a_text_of_the_length_that_was_said_to_be_enough_is(tmp_path, monkeypatch, typed, enough):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.txt").write_text((HELLO * 99)[:enough])
    assert run(["train", "s.txt", "--out", "run", "--epochs", "1", *typed.split()]) == 0


def test_resume_refuses_another_text(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train(text, tmp_path / "run") == 0
    (tmp_path / "other.txt").write_text(TEXT + "!")
    before = (tmp_path / "run" / "config.json").read_bytes()
    assert run(["train", "other.txt", "--resume", "run"]) == 2
    said = capsys.readouterr().err
    assert "other.txt is not the one of this run" in said
    assert f"hint: the run's own is {text}" in said
    assert run(["train", "gone.txt", "--resume", "run"]) == 2
    assert "gone.txt" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_options_are_printed_as_they_are_typed(text, tmp_path, capsys):
    options = ["--embedding-size", "6", "--tied", "--memory", "stored"]
    assert train(text, tmp_path / "run", *options) == 0
    said = next(s for s in capsys.readouterr().err.splitlines() if s.startswith("preset auto: "))
    assert " --tied" in said
    assert " --memory stored" in said
    flags = said.removeprefix("preset auto: ").split()
    assert run(["train", str(text), "--out", str(tmp_path / "again"), *flags]) == 0
    first, again = (Run.open(tmp_path / name).config for name in ("run", "again"))
    assert (first.training, first.model) == (again.training, again.model)


def test_of_the_printed_options_none_is_refused_when_typed(text, tmp_path, capsys):
    """The preset's decay of an average goes with the average that it decays."""
    assert train(text, tmp_path / "run", "--average", "none") == 0
    said = next(s for s in capsys.readouterr().err.splitlines() if s.startswith("preset auto: "))
    assert "--average none" in said
    assert "--average-decay" not in said
    flags = said.removeprefix("preset auto: ").split()
    assert run(["train", str(text), "--out", str(tmp_path / "again"), *flags]) == 0


def test_a_resume_refuses_what_the_run_cannot_heed(text, tmp_path, capsys):
    assert train(text, tmp_path / "run", "--validation", "0") == 0
    assert run(["train", "--resume", str(tmp_path / "run"), "--patience", "2"]) == 2
    assert "--patience 2 means nothing with --validation 0.0" in capsys.readouterr().err


def test_a_resume_refuses_what_belongs_to_a_new_run(text, tmp_path, capsys):
    assert train(text, tmp_path / "run", "--epochs", "1") == 0
    for words in (["--preset", "quick"], ["--force"], ["--out", str(tmp_path / "other")]):
        capsys.readouterr()
        assert run(["train", "--resume", str(tmp_path / "run"), *words]) == 2
        assert f"{words[0]} belongs to a new run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("epochs", "sample_every", "told"),
    [(20, 0, [*range(1, 21)]), (25, 0, [10, 20, 25]), (25, 9, [9, 18, 25])],
)
def test_of_many_passes_every_tenth_is_told_and_the_last(epochs, sample_every, told):
    shown = SimpleNamespace(sample_every=sample_every)
    session = SimpleNamespace(
        run=SimpleNamespace(config=SimpleNamespace(shown=shown)),
        training=SimpleNamespace(settings=Settings(epochs=epochs)),
    )
    passes = [Epoch(9 * e, e, 1.0, math.e, 100, 1000.0) for e in range(1, epochs + 1)]
    assert [r.epoch for r in passes if _line(session, r)] == told


@pytest.mark.parametrize(
    ("weights", "best_step", "said"),
    [
        ("best", 3, ""),
        ("last", 5, ""),
        ("last", 3, "the best on the way, step 3: perplexity 7.389"),
    ],
)
def test_last_weights_are_told_beside_the_best_where_they_are_others(weights, best_step, said):
    shown = SimpleNamespace(weights=weights)
    session = SimpleNamespace(
        run=SimpleNamespace(config=SimpleNamespace(shown=shown)),
        training=SimpleNamespace(best=2.0, best_step=best_step, step=5),
    )
    told = _not_the_best(session)
    assert said in told
    assert bool(said) == bool(told)


def test_without_tensorboard_it_is_named_and_nothing_is_written(
    text, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert train(text, tmp_path / "run", "--tensorboard") == 2
    assert "pip install 'elman[tensorboard]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_too_large_a_model_is_no_traceback(text, tmp_path, capsys):
    assert train(text, tmp_path / "run", "--hidden-size", "100000000") == 2
    said = capsys.readouterr().err
    assert "--hidden-size 100000000" in said
    assert "PB of memory" in said
    assert "are available" in said
    assert not (tmp_path / "run").exists()


def test_resume_of_another_text_is_refused(text, tmp_path, capsys):
    assert train(text, tmp_path / "run") == 0
    text.write_text(TEXT + "more")
    assert run(["train", "--resume", str(tmp_path / "run"), "--epochs", "3"]) == 2
    assert "has changed" in capsys.readouterr().err


@pytest.mark.parametrize("embedding", ["0", "8"])
def test_a_training_that_explodes_says_so_and_keeps_its_checkpoint(
    embedding, text, tmp_path, capsys
):
    options = ["--optimizer", "sgd", "--learning-rate", "1e38", "--clip", "0", "--init", "notes"]
    options += ["--embedding-size", embedding]
    assert train(text, tmp_path / "run", *options, "--validate-every", "1", "--warm-up", "0") == 1
    said = capsys.readouterr().err
    assert "became" in said
    assert re.search(r"at step [23]; it began in", said), (
        "not the sample between two updates, which fails too"
    )
    assert f"elman train --resume {tmp_path / 'run'} --learning-rate" in said
    assert "Traceback" not in said


def test_more_groups_than_lanes_are_refused_in_the_words_that_were_typed(text, tmp_path, capsys):
    assert train(text, tmp_path / "run", "--lane-groups", "9", "--batch-size", "5") == 2
    said = capsys.readouterr().err
    assert "error: --batch-size 5 cannot be cut into 9 groups of lanes\n" in said
    assert "hint: --batch-size 9 or more, or fewer processes" in said


def test_what_no_option_can_mend_is_continued_without_another(text, tmp_path, monkeypatch, capsys):
    def lost(training):
        raise WorkFailed("another process is gone", hint="its own message says why")

    monkeypatch.setattr(Training, "update", lost)
    assert train(text, tmp_path / "run") == 1
    resume = f"from the last checkpoint: elman train --resume {tmp_path / 'run'}\n"
    assert capsys.readouterr().err.endswith(f"hint: its own message says why; {resume}")


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stopping_saves_and_resume_ends_as_if_it_never_stopped(
    which, text, tmp_path, capsys, signalled
):
    assert train(text, tmp_path / "unbroken") == 0
    out, sent = tmp_path / "stopped", signalled(which)
    assert train(text, out) == 128 + which, "as shells have it"
    assert sent == [which]
    assert f"continue with: elman train --resume {out}" in capsys.readouterr().err
    assert Run.open(out).load_model() is not None, "what there is can be used"
    assert run(["train", "--resume", str(out)]) == 0
    models = [(p / "model.safetensors").read_bytes() for p in (tmp_path / "unbroken", out)]
    assert models[0] == models[1]


def test_a_closed_terminal_saves_and_resume_ends_as_if_it_never_was(text, tmp_path):
    """Whoever closes a window, or loses a connection, has not asked for work to be lost."""
    import pty

    out = tmp_path / "stopped"
    words = ["train", str(text), "--out", str(out), *SMALL, "--epochs", "2000"]
    process, terminal = pty.fork()
    if process == 0:
        never = ["--validation", "0", "--test", "0", "--checkpoint-seconds", "0"]
        os.execv(sys.executable, [sys.executable, "-m", "elman", *words, *never])
    record = out / "metrics.jsonl"
    while not record.exists() or record.stat().st_size < 1000:
        os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 128 + signal.SIGHUP
    saved = checkpoints.read(out / "state.safetensors", "state")[1]
    assert saved["metrics_bytes"] == record.stat().st_size, "nothing that was done is lost"


@pytest.mark.parametrize("moved", [False, True])
def test_a_folder_that_goes_while_it_is_trained_is_told_and_can_be_continued(
    moved, text, tmp_path, capsys, monkeypatch
):
    out, steps = tmp_path / "run", iter(range(1000))
    assert train(text, tmp_path / "unbroken", "--checkpoint-every", "5") == 0

    def vanish(run, training, *_):
        if next(steps) == 1:
            out.rename(tmp_path / "moved") if moved else shutil.rmtree(out)
        return save(run, training, *_)

    save = Run.save_state
    monkeypatch.setattr(Run, "save_state", vanish)
    assert train(text, out, "--checkpoint-every", "5") == 1
    said = capsys.readouterr().err
    assert f"error: {out} is no longer there: it was moved or deleted" in said
    assert "make room" not in said
    if moved:
        assert run(["train", "--resume", str(tmp_path / "moved")]) == 0
        models = [tmp_path / name / "model.safetensors" for name in ("moved", "unbroken")]
        assert models[0].read_bytes() == models[1].read_bytes()


def test_what_is_ignored_stays_ignored(text, tmp_path, signalled):
    """A shell protects its jobs in the background from Ctrl-C."""
    before, sent = signal.signal(signal.SIGINT, signal.SIG_IGN), signalled(signal.SIGINT)
    try:
        assert train(text, tmp_path / "run") == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert sent == [signal.SIGINT]


def test_tensorboard_gets_the_curves(text, tmp_path):
    pytest.importorskip("tensorboard")
    assert train(text, tmp_path / "run", "--tensorboard") == 0
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert train(text, tmp_path / "run", "--force") == 0, "its folder is part of the run"


def test_bytes_that_are_not_text_are_refused_or_replaced_as_asked(tmp_path, capsys):
    source = tmp_path / "latin.txt"
    source.write_bytes(TEXT.encode() + b"caf\xe9 " * 20)
    assert train(source, tmp_path / "run") == 2
    assert f"at offset {len(TEXT) + 3}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert train(source, tmp_path / "run", "--errors", "replace") == 0
    assert Run.open(tmp_path / "run").config.data.errors == "replace"


def test_with_nothing_held_out_report_and_training_perplexity_are_told_and_samples_kept(
    text, tmp_path, capsys
):
    assert train(text, tmp_path / "run", "--validation", "0") == 0
    said = capsys.readouterr()
    last = [r for r in Run.open(tmp_path / "run").records() if isinstance(r, Epoch)][-1]
    assert f"epoch 2: training perplexity {last.perplexity:.3f}" in said.err
    assert f"training perplexity {last.perplexity:.3f} in pass 2" in said.out
    assert f"elman evaluate {tmp_path / 'run'} OTHER.txt" in said.out
    kinds = [r["kind"] for r in Run.open(tmp_path / "run").metrics()]
    assert kinds.count("sample") == 2
    card = (tmp_path / "run" / "README.md").read_text()
    assert "Not finished yet" not in card
    assert f"{last.perplexity:.3f}" in card
    page = (tmp_path / "run" / "report.html").read_text()
    assert "nothing was held out." in page
    assert "not come to its end" not in page
    assert run(["evaluate", str(tmp_path / "run"), str(text)]) == 0, "the suggested command works"
