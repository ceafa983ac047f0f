"""Command lines that nobody would type, against the rule in `harness.py`."""

import shutil

import pytest
from harness import WORDS, cases, mutate_bytes, run_in_process

pytestmark = pytest.mark.fuzz

TRAIN = (
    "--level", "--clean", "--max-tokens", "--min-freq", "--validation", "--encoding", "--errors",
    "--model", "--hidden-size", "--layers", "--embedding-size", "--context", "--init",
    "--dropout-tokens", "--dropout-inputs", "--dropout-layers", "--dropout-outputs",
    "--dropout-recurrent", "--batch-size", "--window", "--sampling", "--carry", "--history",
    "--memory", "--epochs", "--accumulate", "--validate-every", "--patience", "--precision",
    "--seed", "--optimizer", "--learning-rate", "--momentum", "--weight-decay", "--clip",
    "--schedule", "--warm-up", "--plateau-factor", "--plateau-patience", "--average",
    "--average-decay", "--average-start", "--out", "--device", "--threads", "--checkpoint-every",
    "--checkpoint-seconds", "--diagnose", "--preset", "--resume",
)  # fmt: skip
VERBS = {
    "evaluate": ("--mix", "--weights", "--device"),
    "generate": ("--prompt", "--length", "--temperature", "--top-k", "--top-p", "--beam",
                 "--samples", "--seed", "--weights", "--device"),
    "gradients": ("--steps", "--lags", "--draws", "--figure"),
    "report": (),
    "runs": (),
    "ngram": ("--order", "--smoothing", "--epsilon", "--level", "--clean", "--validation",
              "--min-freq", "--arpa", "--out", "--generate", "--prompt", "--temperature", "--seed",
              "--encoding", "--errors"),
    "statistics": ("--level", "--clean", "--n", "--top", "--stop", "--first", "--last",
                   "--encoding", "--errors"),
    "datasets": (),
}  # fmt: skip
MADE_OF_TEXTS = {
    "prepare": ("--level", "--vocab-size", "--tokenizer", "--min-freq", "--validation", "--test",
                "--field", "--clean", "--shard-tokens", "--encoding", "--errors", "--out"),
    "compress": ("--level", "--run", "-o"),
    "decompress": ("--run", "-o"),
    "evaluate": ("--adapt-rate", "--adapt-decay", "--cache", "--chunks", "--part", "--threads"),
}  # fmt: skip
PLACES = (
    "",
    "/dev/null",
    "/dev/full",
    "/proc/x",
    "book.txt",
    "run",
    "a\0b",
    "book.txt/x",
)
"""Where nothing can be made, so that `elman demo`, which takes minutes, is refused."""
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
        usual = "book.txt" if verb in ("ngram", "statistics") else "run"
        words = [verb, chance.choice([usual] * 12 + ["", ".", "book.txt", "nowhere", "\udcff"])]
        if verb == "datasets":
            words = [verb]
        if verb in ("evaluate", "gradients", "runs") and chance.random() < 0.4:
            words.append(chance.choice(["book.txt", *WORDS]))
        for _ in range(chance.choice([0, 1, 1, 2])):
            if VERBS[verb]:
                words += [chance.choice(VERBS[verb]), chance.choice(WORDS)]
        if chance.random() < 0.5:
            words.append(chance.choice(FLAGS))
        if verb == "generate" and "--length" not in words:
            words += ["--length", "20"]
        run_in_process(words)


def test_newer_verbs(place):
    """A packed file whose bytes were changed is refused, or what comes out is the book."""
    book = (place / "book.txt").read_bytes()
    run_in_process(["compress", "book.txt", "--level", "fast", "-o", "book.elm"])
    packed = (place / "book.elm").read_bytes()
    for chance in cases(25):
        verb = chance.choice(list(MADE_OF_TEXTS))
        usual = {"evaluate": "run", "decompress": "odd.elm"}.get(verb, "book.txt")
        words = [verb, chance.choice([usual] * 12 + ["", ".", "nowhere", "\udcff", "/dev/null"])]
        odd = mutate_bytes(packed, chance) if chance.random() < 0.7 else packed
        (place / "odd.elm").write_bytes(odd)
        if verb in ("prepare", "compress", "decompress"):
            words += ["--out", "made"]
        if verb == "evaluate":
            words += ["book.txt", "--adapt"]
        if verb == "compress":
            words += ["--level", "fast"]
        for _ in range(chance.choice([0, 1, 1, 2])):
            words += [chance.choice(MADE_OF_TEXTS[verb]), chance.choice(WORDS)]
        if chance.random() < 0.3:
            words.append(chance.choice(FLAGS))
        seen = run_in_process(words)
        whole = verb == "decompress" and words[1] == "odd.elm" and "-o" not in words
        if whole and seen.status == 0 and "--help" not in words:
            assert (place / "made").read_bytes() == book, words
        made = place / "made"
        shutil.rmtree(made) if made.is_dir() else made.unlink(missing_ok=True)


def test_demo(place):
    """Refused at once, or it would take minutes."""
    for chance in cases(10):
        words = ["demo", "--out", chance.choice(PLACES)]
        if chance.random() < 0.5:
            words.append(chance.choice(FLAGS))
        seen = run_in_process(words)
        assert seen.status or "--help" in words
