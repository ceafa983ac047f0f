"""Using a run from the command line: evaluate and generate."""

import functools
import io
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from elman import generation, metrics
from elman.cli import run as elman
from elman.cli.evaluate import _own_text, _settings
from elman.runs import Run, checkpoints
from elman.scoring.dynamic import Adaptation


def spoken(capsys, *words):
    """Run a command that must work; what it said on stdout and on stderr."""
    assert elman([str(word) for word in words]) == 0
    return capsys.readouterr()


def records(capsys, *words):
    return [json.loads(line) for line in spoken(capsys, *words, "--json").out.splitlines()]


def refused(capsys, *words):
    assert elman([str(word) for word in words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert "hint: " in said.err
    return said.err


# ---------------------------------------------------------------------- evaluate


def test_evaluate_scores_what_was_held_out_like_the_training_did(tiny_run, capsys):
    path = tiny_run()
    result = [r for r in Run.open(path).metrics() if r["kind"] == "result"][-1]
    (found,) = records(capsys, "evaluate", path)
    for name in ("tokens", "nats_per_token", "perplexity", "bits_per_char"):
        assert found[name] == pytest.approx(result[name], rel=1e-6)
    assert found["unknown_tokens"] == 0
    assert (found["source"], found["split"]) == (str(path.parent / "book.txt"), "test")
    assert list(found["baselines"]) == ["uniform", "unigram", "kneser-ney:5", "kneser-ney:7"]


def test_evaluate_shows_a_table_and_names_the_next_command(tiny_run, capsys):
    path = tiny_run()
    said = spoken(capsys, "evaluate", path, "--mix", "kneser-ney:3")
    assert "199 chars predicted, none of them unknown" in said.out
    lines = said.out.splitlines()
    nats = [float(line.split()[-3 - line.endswith("←")]) for line in lines[3:]]
    assert len(nats) == 6
    assert nats == sorted(nats, reverse=True)
    assert sum(line.endswith("←") for line in lines) == 1
    assert any(line.startswith("mixture ") and "kneser-ney:3" in line for line in lines)
    assert f"next: elman generate {path}" in said.err


def test_what_is_chosen_is_chosen_on_the_validation_part_and_never_on_what_is_scored(tiny_run):
    opened = Run.open(tiny_run())
    own = opened.splits()
    tested, validated = (_own_text(opened, part, True) for part in ("test", "validation"))
    assert np.array_equal(tested.ids, own.test)
    assert tested.validation is not None
    assert np.array_equal(tested.validation, own.validation)
    assert np.array_equal(validated.ids, own.validation)
    assert validated.validation is None
    assert _own_text(opened, "test", False).train is None


def test_what_is_not_said_of_adapting_is_as_usual():
    usual = Adaptation()
    assert _settings(True, None, None) is True
    assert _settings(True, 0.5, None) == replace(usual, rate=0.5)
    assert _settings(True, None, 0.25) == replace(usual, decay=0.25)


def test_evaluate_reads_another_text_or_stdin_and_counts_what_is_unknown(
    tiny_run, capsys, tmp_path, monkeypatch
):
    path, text = tiny_run(), "the cat ran 文文!\n"
    (tmp_path / "other.txt").write_text(text, encoding="utf-8")
    (other,) = records(capsys, "evaluate", path, tmp_path / "other.txt")
    stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    (piped,) = records(capsys, "evaluate", path, "-")
    assert other["unknown_tokens"] == piped["unknown_tokens"] == 3
    assert (piped["source"], piped["split"]) == ("-", "all")
    assert other["tokens"] == len(text) - 1
    assert {k: v for k, v in other.items() if k != "source"} == {
        k: v for k, v in piped.items() if k != "source"
    }


def test_evaluate_warns_of_bits_per_char_where_words_are_unknown(tiny_run, capsys, tmp_path):
    (tmp_path / "other.txt").write_text("the zebra slept")
    said = spoken(capsys, "evaluate", tiny_run(level="word"), tmp_path / "other.txt")
    assert "2 words predicted, 1 of them unknown" in said.out
    assert "which unknown token it was" in said.err
    assert "flatters" not in spoken(capsys, "evaluate", tiny_run()).err


def test_evaluate_without_baselines_counts_nothing(tiny_run, capsys):
    (found,) = records(capsys, "evaluate", tiny_run(), "--no-baselines")
    assert found["baselines"] == {}
    assert found["mixture"] is None


def test_evaluate_can_take_the_last_weights(tiny_run, tmp_path, capsys):
    opened = Run.open(shutil.copytree(tiny_run(), tmp_path / "run"))
    spoilt = opened.load_model()
    with torch.no_grad():
        spoilt.bias_q.zero_()  # the last weights remain as they are
    weights = {name: p.detach() for name, p in spoilt.named_parameters()}
    checkpoints.write(opened.path / "model.safetensors", "model", weights, {})
    for which in ("best", "last"):
        (scored,) = records(capsys, "evaluate", opened.path, "--weights", which)
        expected = metrics.evaluate(opened.load_model(which=which), opened.splits().test)
        assert scored["nats_per_token"] == expected.nats_per_token
    (usual,) = records(capsys, "evaluate", opened.path)
    assert usual["nats_per_token"] > scored["nats_per_token"], "without --weights, the best"


def test_evaluate_refuses_what_it_cannot_do(tiny_run, capsys, tmp_path):
    path = tiny_run()
    assert "not a run folder" in refused(capsys, "evaluate", tmp_path)
    assert "unknown weights" in refused(capsys, "evaluate", path, "--weights", "worst")
    assert "unknown device" in refused(capsys, "evaluate", path, "--device", "tpu")
    assert "cannot mix" in refused(capsys, "evaluate", path, "--mix", "magic:3")
    assert "--mix counts" in refused(
        capsys, "evaluate", path, "--mix", "kneser-ney:3", "--no-baselines"
    )
    assert "no file" in refused(capsys, "evaluate", path, tmp_path / "nothing.txt")
    (tmp_path / "short.txt").write_text("a")
    assert "nothing to predict" in refused(capsys, "evaluate", path, tmp_path / "short.txt")
    (tmp_path / "latin.txt").write_bytes("naïve café".encode("latin-1"))
    hint = "iconv -f ENCODING -t utf-8"
    for verb in ("evaluate", "gradients"):  # which have no --encoding
        assert hint in refused(capsys, verb, path, tmp_path / "latin.txt")
    assert "held nothing out" in refused(capsys, "evaluate", tiny_run("--validation", "0"))


# ---------------------------------------------------------------------- generate


@pytest.mark.parametrize("level", ["char", "word", "byte"])
def test_generate_writes_the_prompt_and_as_many_tokens_as_asked(tiny_run, capsys, level):
    path = tiny_run(level=level)
    options = ("--prompt", "the naïve", "--length", 40, "--seed", 3)
    out = spoken(capsys, "generate", path, *options).out
    (record,) = records(capsys, "generate", path, *options)
    joint = " " if level == "word" else ""
    assert out == f"the naïve{joint}{record['text']}\n"
    assert (record["prompt"], record["tokens"], record["seed"]) == ("the naïve", 40, 3)
    assert spoken(capsys, "generate", path, *options).out == out
    assert spoken(capsys, "generate", path, *options[:-1], 4).out != out


def test_generate_is_the_library_with_the_runs_vocabulary(tiny_run, capsys):
    run = Run.open(tiny_run())
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
    flags = ["--temperature", 0.7, "--top-k", 5, "--top-p", 0.9]
    (record,) = records(capsys, "generate", run.path, "--length", 30, "--prompt", "a dog", *flags)
    ids = generation.generate(run.load_model(), run.vocab.encode("a dog"), 30, **options)
    assert record["text"] == run.vocab.decode(list(ids))


def test_an_empty_prompt_begins_like_a_line(tiny_run, capsys):
    run = Run.open(tiny_run())
    (record,) = records(capsys, "generate", run.path, "--length", 30)
    ids = generation.generate(run.load_model(), run.vocab.encode("\n"), 30)
    assert record["text"] == run.vocab.decode(list(ids))
    assert record["prompt"] == ""


@pytest.mark.parametrize(
    ("level", "start"), [("char", "\n"), ("byte", 10), ("word", "\n"), ("spaced", "the")]
)
def test_each_level_has_an_opening(tiny_run, level, start):
    vocab = Run.open(tiny_run(level=level)).vocab
    assert vocab.to_tokens(generation.opening(vocab)) == start
    assert generation.unwritten(vocab) == (() if level == "byte" else (0,))


def test_samples_and_prompts_come_together_and_each_as_if_alone(tiny_run, capsys):
    path, common = tiny_run(), ("--length", 25, "--seed", 5)
    together = records(
        capsys, "generate", path, "--prompt", "a", "--prompt", "the", "--samples", 2, *common
    )
    assert [(r["prompt"], r["seed"]) for r in together] == [
        ("a", 5),
        ("a", 6),
        ("the", 5),
        ("the", 6),
    ]
    for record in together:
        prompt, seed = record["prompt"], record["seed"]
        words = ("generate", path, "--prompt", prompt, "--length", 25, "--seed", seed)
        assert records(capsys, *words) == [record]
    said = spoken(capsys, "generate", path, "--samples", 2, *common).out
    assert said.startswith("── seed 5 ──\n")
    assert "\n\n── seed 6 ──\n" in said


def test_beam_search_writes_the_most_probable_text_and_json_all_of_them(tiny_run, capsys):
    path = tiny_run()
    found = records(capsys, "generate", path, "--prompt", "a ", "--length", 8, "--beam", 4)
    scores = [record["log_probability"] for record in found]
    assert len(found) == 4
    assert scores == sorted(scores, reverse=True)
    out = spoken(capsys, "generate", path, "--prompt", "a ", "--length", 8, "--beam", 4).out
    assert out == f"a {found[0]['text']}\n"
    (greedy,) = records(
        capsys, "generate", path, "--prompt", "a ", "--length", 8, "--temperature", 0
    )
    assert found[0]["log_probability"] >= _log_probability(path, "a ", greedy["text"]) - 1e-4


def _log_probability(path, prompt, text):
    from elman.scoring.mixture import Network

    run = Run.open(path)
    model = Network(run.load_model(), run.vocab)
    return model.log_probability(text, context=prompt)


def test_prompt_characters_outside_the_vocabulary_are_reported(tiny_run, capsys):
    said = spoken(capsys, "generate", tiny_run(), "--prompt", "a 文 Q文", "--length", 5)
    assert "read as <unk>: '文' 'Q' (3 of 6 chars)" in said.err
    assert said.out.startswith("a 文 Q文")
    words = spoken(
        capsys, "generate", tiny_run(level="word"), "--prompt", "the zebra", "--length", 5
    )
    assert "read as <unk>: 'zebra' (1 of 2 words)" in words.err


def test_a_prompt_is_cleaned_like_the_text_of_the_run(tiny_run, capsys):
    path = tiny_run("--clean", "letters")
    said = spoken(capsys, "generate", path, "--prompt", "The DOG,", "--length", 5)
    assert said.out.startswith("the dog")
    assert "read as 'the dog '" in said.err


@pytest.mark.parametrize(("level", "shown"), [("char", "a dog "), ("word", "a dog")])
def test_the_space_at_the_end_of_a_prompt_is_kept(tiny_run, capsys, level, shown):
    path = tiny_run(level=level)
    said = spoken(capsys, "generate", path, "--prompt", "a dog ", "--length", 3, "--json")
    assert json.loads(said.out)["prompt"] == shown
    assert "note" not in said.err
    said = spoken(capsys, "generate", path, "--prompt", "a dog ", "--length", 3)
    assert said.out.startswith("a dog ")
    assert not said.out.startswith("a dog  ")
    assert "unk" not in said.err


def test_unknown_is_written_only_when_asked(tiny_run, capsys):
    path = tiny_run("--min-freq", "20", level="word")  # most words are rare: <unk> is common
    words = ("generate", path, "--length", 200, "--temperature", 1)
    assert "<unk>" not in spoken(capsys, *words).out
    assert "<unk>" in spoken(capsys, *words, "--special").out


def test_text_streams_as_it_is_drawn(tiny_run, capsys, monkeypatch):
    path = tiny_run()
    vocab = Run.open(path).vocab

    def one_by_one(model, ids, length, **choices):
        for n, token in enumerate(vocab.encode("abc")):
            assert capsys.readouterr().out.endswith("the" if n == 0 else "abc"[n - 1])
            yield int(token)

    monkeypatch.setattr(generation, "generate", one_by_one)
    assert elman(["generate", str(path), "--prompt", "the"]) == 0


def test_bytes_are_shown_when_their_character_is_whole():
    from elman.cli.generate import Text, _pieces
    from elman.text.vocab import Vocab

    vocab = Vocab.from_text("é", "byte")
    pieces = list(_pieces(Text("", iter([0x61, 0xC3, 0xA9, 0xC3]), {}), vocab))
    assert pieces == ["a", "", "é", "", "\ufffd"]


def test_control_characters_cannot_reach_a_terminal(monkeypatch):
    from elman.cli.generate import _visible

    assert _visible("\x1b[2J") == "\x1b[2J"  # a file or a pipe gets the text as it is
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert _visible("a\x1b[2J\n\t\x07") == "a␛[2J\n\t␇"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-p", 0), "--top-p 0.0"),
        (("--temperature", "nan"), "--temperature"),
        (("--beam", 2, "--top-k", 3), "--top-k belongs to sampling"),
        (("--beam", 2, "--temperature", 0.5), "--temperature belongs to sampling"),
        (("--beam", 2, "--samples", 3), "--samples belongs to sampling"),
        (("--beam", 2, "--top-p", 0), "--top-p belongs to sampling"),
        (("--length", 0), "--length"),
        (("--weights", "worst"), "unknown weights"),
    ],
)
def test_generate_refuses_what_it_cannot_do(tiny_run, capsys, options, message):
    assert message in refused(capsys, "generate", tiny_run(), *options)


def test_greedy_writing_promises_no_other_text(tiny_run, capsys):
    assert "--seed 1 something else" in spoken(capsys, "generate", tiny_run()).err
    assert spoken(capsys, "generate", tiny_run(), "--temperature", 0).err == ""


def test_a_folder_that_is_no_run_is_refused(capsys, tmp_path):
    assert "not a run folder" in refused(capsys, "generate", tmp_path / "nowhere")


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
@pytest.mark.parametrize(
    ("sent", "status", "told"),
    [("SIGINT", 130, b"interrupted"), ("SIGTERM", 143, b"ended by SIGTERM")],
)
def test_a_signal_ends_cleanly_after_what_was_written(tiny_run, sent, status, told):
    words = [sys.executable, "-m", "elman", "generate", str(tiny_run()), "--length", "10000000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell's background job ignores Ctrl-C, and so would its children: give it its meaning back.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(words, preexec_fn=heed, **pipes) as process:
        assert process.stdout is not None
        first = process.stdout.read(5)
        process.send_signal(getattr(signal, sent))
        try:
            rest, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == status
    assert len(first) == 5
    assert rest.endswith(b"\n")
    assert said == b"error: " + told + b"\n"


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
@pytest.mark.parametrize("sent", ["SIGTERM", "SIGHUP"])
def test_a_verb_that_is_ended_leaves_no_half_written_file(tmp_path, sent):
    (tmp_path / "noise").write_bytes(random.Random(0).randbytes(3_000_000))
    words = [sys.executable, "-m", "elman", "compress", "noise", "--level", "best"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not list(tmp_path.glob(".*.partial")):
            time.sleep(0.01)
        process.send_signal(getattr(signal, sent))
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + getattr(signal, sent)
    assert said == f"error: ended by {sent}\n".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["noise"]


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
@pytest.mark.parametrize(("times", "status"), [(1, 2), (2, -signal.SIGTERM)])
def test_a_signal_after_all_was_said_says_nothing_more(times, status):
    """As torchrun sends it to a process that is ending already; a second one ends it at once."""
    leaving = f"""
import os, signal
from elman import cli
cli._leave = lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range({times})]
cli.main(["generate", "nowhere"])
"""
    done = subprocess.run([sys.executable, "-c", leaving], capture_output=True, text=True)
    assert done.returncode == status
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_ctrl_c_before_anything_is_loaded_shows_no_traceback():
    at_once = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class AtOnce:
    def find_spec(self, name, path=None, target=None):
        if name == "elman.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, AtOnce())
from elman.__main__ import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", at_once], capture_output=True)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, b"")


@pytest.mark.skipif(os.name != "posix", reason="pipes as POSIX has them")
@pytest.mark.parametrize("words", ["generate RUN --length 100000", "train"])
def test_a_reader_that_leaves_ends_it_quietly(words, tiny_run, tmp_path):
    """As `| head` does: exit 1, as Python's own advice has it, and not a word on stderr."""
    path = tiny_run()
    train = ["train", str(path.parent / "book.txt"), "--out", str(tmp_path / "run")]
    train += ["--json", "--hidden-size", "4", "--epochs", "1"]
    given = train if words == "train" else words.replace("RUN", str(path)).split()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "elman", *given], **pipes) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read().decode()
    assert process.returncode == 1
    hints = ("preset auto: ", "trains on ", "next: ")  # what a command says anyway
    assert [line for line in said.splitlines() if not line.startswith(hints)] == []


def test_the_perplexity_of_a_uniform_model_is_its_vocabulary(tiny_run, capsys):
    path = tiny_run()
    (found,) = records(capsys, "evaluate", path)
    uniform = found["baselines"]["uniform"]
    assert uniform["perplexity"] == pytest.approx(len(Run.open(path).vocab))
    assert uniform["nats_per_token"] == pytest.approx(math.log(len(Run.open(path).vocab)))


# ---------------------------------------------------------------------- report


def test_report_is_written_again_and_named(tiny_run, capsys):
    path = tiny_run()
    before = (path / "report.html").read_bytes()
    (path / "report.html").unlink()
    assert spoken(capsys, "report", path).out == f"{path / 'report.html'}\n"
    assert (path / "report.html").read_bytes() == before
    (found,) = records(capsys, "report", path)
    assert found == {"run": str(path), "report": str(path / "report.html")}
