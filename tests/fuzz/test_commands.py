"""Command lines that nobody would type, against the rule in `harness.py`."""

import shutil

import pytest
from harness import cases, run_in_process

pytestmark = pytest.mark.fuzz

WORDS = (
    "", "-1", "0", "1", "2", "3", "8", "100000", "1000000000", "9223372036854775807",
    "9223372036854775808", "18446744073709551616", "-9223372036854775809", "1" * 50, "1" * 5000,
    "0.5", "1.5", "-0.5", "nan", "inf", "-inf", "1e300", "1e-300", "²", "٣", "x", "auto", "cpu",
    "cuda", "best", "last", "char", "word", "byte", "lstm", "gru", "elman", "mlp", "sgd", "adam",
    "none", "full", "randomized", "sliding", "64M", "1", "stored", "0x10", "1_000", " 1", "~nouser",
    "/dev/null", "/dev/full", "/proc/x", "/proc/nowhere/at/all", "a\0b", "\udcff", "$\\b$", "{}",
    "é",
    "\u202e", "--json", "-", ".", "..", "a" * 300, "kneser-ney:3", "laplace:2", "kneser-ney:9999",
    "utf-8", "latin-1", "undefined", "punycode", "utf-16", "strict", "replace", "ignore",
)  # fmt: skip
TRAIN = (
    "--level", "--clean", "--max-tokens", "--min-freq", "--validation", "--encoding", "--errors",
    "--model", "--hidden-size", "--layers", "--embedding-size", "--context", "--init",
    "--dropout-tokens", "--dropout-inputs", "--dropout-layers", "--dropout-outputs",
    "--dropout-recurrent", "--batch-size", "--window", "--sampling", "--carry", "--history",
    "--memory", "--epochs", "--accumulate", "--validate-every", "--patience", "--precision",
    "--seed", "--optimizer", "--learning-rate", "--momentum", "--weight-decay", "--clip",
    "--schedule", "--warm-up", "--plateau-factor", "--plateau-patience", "--average",
    "--average-decay", "--average-start", "--out", "--device", "--checkpoint-every",
    "--checkpoint-seconds", "--diagnose", "--preset", "--resume",
)  # fmt: skip
VERBS = {
    "evaluate": ("--mix", "--weights", "--device"),
    "generate": ("--prompt", "--length", "--temperature", "--top-k", "--top-p", "--beam",
                 "--samples", "--seed", "--weights", "--device"),
    "gradients": ("--steps", "--lags", "--draws", "--figure"),
    "report": (),
}  # fmt: skip
SMALL = (
    "--hidden-size=6", "--embedding-size=3", "--batch-size=2", "--window=6", "--epochs=1",
    "--max-tokens=300", "--device=cpu",
)  # fmt: skip
FLAGS = ("--json", "--tied", "--force", "--special", "--no-baselines", "--help", "--nonsense")


@pytest.fixture
def place(tmp_path, tiny_run, monkeypatch):
    """A folder with a text and a run, which is where the commands are typed."""
    shutil.copytree(tiny_run(), tmp_path / "run")
    shutil.copy(tiny_run().parent / "book.txt", tmp_path / "book.txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_train(place):
    for chance in cases(25):
        words = ["train", chance.choice(["book.txt"] * 5 + list(WORDS))]
        for _ in range(chance.choice([1, 1, 2, 3])):
            words += [chance.choice(TRAIN), chance.choice(WORDS)]
        if chance.random() < 0.3:
            words.append(chance.choice(FLAGS))
        out = f"made-{chance.randrange(10**9)}"
        run_in_process([*words[:2], *SMALL, "--out", out, *words[2:]])
        shutil.rmtree(place / out, ignore_errors=True)
        shutil.rmtree(place / "runs", ignore_errors=True)


def test_use(place):
    for chance in cases(25):
        verb = chance.choice(list(VERBS))
        words = [verb, chance.choice(["run"] * 12 + ["", ".", "book.txt", "nowhere", "\udcff"])]
        if verb in ("evaluate", "gradients") and chance.random() < 0.4:
            words.append(chance.choice(["book.txt", *WORDS]))
        for _ in range(chance.choice([0, 1, 1, 2])):
            if VERBS[verb]:
                words += [chance.choice(VERBS[verb]), chance.choice(WORDS)]
        if chance.random() < 0.5:
            words.append(chance.choice(FLAGS))
        if verb == "generate" and "--length" not in words:
            words += ["--length", "20"]
        run_in_process(words)
