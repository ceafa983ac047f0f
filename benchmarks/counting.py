"""What counting can do, how fast, and in how much memory.

    python benchmarks/counting.py            # a few minutes; the last part reads 100 MB
    python benchmarks/counting.py --quick    # the last part reads 10 MB

quality  The Time Machine in letters (or, where it is absent, the Python reference), first nine
         tenths counted, last tenth scored: Laplace as in the notes, chained, and Kneser–Ney.
speed    training and scoring against nltk.lm on the same tokens, in the same run.
size     a character 6-gram and a word trigram Kneser–Ney model of the Python sources installed
         beside this interpreter: seconds, and the process's peak of memory.
"""

import argparse
import json
import math
import multiprocessing
import resource
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from elman import NgramModel, Vocab, corpus
from elman.errors import UserError
from elman.text.vocab import learn

ORDERS = range(1, 9)
KINDS: dict[str, dict[str, Any]] = {
    "laplace": {"smoothing": "laplace", "epsilon": 1.0},
    "laplace, chained": {"smoothing": "laplace", "epsilon": 1.0, "chain": True},
    "kneser-ney": {"smoothing": "kneser-ney"},
}


def book() -> tuple[str, str]:
    """A text in letters, and its name."""
    for name in ("time-machine", "python-reference"):
        try:
            return "".join(corpus.letters(corpus.load(name))), name
        except UserError as absent:
            print(f"{name}: {absent}", file=sys.stderr)
    raise SystemExit(1)


def quality(text: str) -> list[dict[str, Any]]:
    cut = round(len(text) * 0.9)
    train, test = text[:cut], text[cut:]
    vocab, rows = Vocab.from_text(text), []
    for order in ORDERS:
        for kind, options in KINDS.items():
            model = NgramModel.fit(train, order, vocab=vocab, **options)
            nats = math.log(model.perplexity(test, context=train[-order:]))
            row = {"model": kind, "order": order, "nats": nats}
            rows.append(row | {"perplexity": math.exp(nats), "bits_per_char": nats / math.log(2)})
    return rows


def seconds(work: Callable[[], Any], at_least: float = 0.2) -> float:
    """The best of as many repetitions as fit in `at_least` seconds, and of one if none do."""
    best, spent = math.inf, 0.0
    while spent < at_least:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
        spent += time.perf_counter() - start
    return best


def speed(text: str) -> list[dict[str, Any]]:
    """nltk and elman fitted to, and scoring, the same lists of tokens."""
    from nltk.lm import KneserNeyInterpolated, Laplace
    from nltk.util import everygrams

    rows = []
    for level, order in (("char", 3), ("char", 6), ("word", 3)):
        tokens = list(text) if level == "char" else text.split()
        cut = round(len(tokens) * 0.9)
        train, test = tokens[:cut], tokens[cut:]
        vocab = Vocab(tokens)
        for kind, theirs in (("laplace", Laplace), ("kneser-ney", KneserNeyInterpolated)):
            oracle = theirs(order)
            start = time.perf_counter()
            oracle.fit([list(everygrams(train, max_len=order))], vocab)
            their_fit = time.perf_counter() - start
            options: dict[str, Any] = {"order": order, "smoothing": kind, "vocab": vocab}
            our_fit = seconds(partial(NgramModel.fit, train, **options))
            few = test[: 5000 if kind == "laplace" else 200]
            windows = [few[max(0, i - order + 1) : i] for i in range(len(few))]
            start = time.perf_counter()
            for token, window in zip(few, windows, strict=True):
                oracle.logscore(token, window)
            their_score = (time.perf_counter() - start) / len(few)
            model = NgramModel.fit(train, **options)
            our_score = seconds(partial(model.log_probabilities, test)) / len(test)
            row = {"level": level, "order": order, "smoothing": kind, "tokens": len(train)}
            row |= {"nltk_fit_s": their_fit, "elman_fit_s": our_fit}
            row |= {"nltk_score_us": their_score * 1e6, "elman_score_us": our_score * 1e6}
            rows.append(row | {"fit": their_fit / our_fit, "score": their_score / our_score})
    return rows


def sources(size: int) -> str:
    """The Python files beside this interpreter, in sorted order, up to `size` characters."""
    pieces, length = [], 0
    for folder in (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]):
        for path in sorted(Path(folder).rglob("*.py")):
            piece = path.read_text("utf-8", errors="replace")
            pieces.append(piece)
            length += len(piece)
            if length >= size:
                return "".join(pieces)[:size]
    return "".join(pieces)


def big(level: str, order: int, size: int) -> dict[str, Any]:
    """Run in a process of its own, so that the peak of memory is this model's."""
    text = sources(size)
    row: dict[str, Any] = {"level": level, "order": order, "characters": len(text)}
    vocab, ids = learn(text, level)
    del text
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    start = time.perf_counter()
    model = NgramModel.fit(ids, order, vocab=vocab)
    row |= {"tokens": len(ids), "vocabulary": len(vocab), "fit_s": time.perf_counter() - start}
    row["ngrams"] = sum(len(keys) for keys in model.table.keys)
    row["text_peak_gib"] = before
    row["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sample = np.asarray(ids[: min(len(ids), 2_000_000)])
    start = time.perf_counter()
    model.score(sample)
    return row | {"score_us": (time.perf_counter() - start) / len(sample) * 1e6}


def size(characters: int) -> list[dict[str, Any]]:
    rows = []
    for level, order in (("char", 6), ("word", 3)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(big, (level, order, characters)))
    return rows


def table(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n")
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(_shown(value) for value in row.values()) + " |")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="10 MB instead of 100")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="also as JSON")
    options = parser.parse_args()
    text, name = book()
    results = {"text": name, "quality": quality(text)}
    table(f"quality: {name}, letters", results["quality"])
    try:
        results["speed"] = speed(text)
        table("speed: times faster than nltk.lm at fitting and scoring", results["speed"])
    except ImportError:
        print("\nspeed: left out, nltk is not installed")
    results["size"] = size(10**7 if options.quick else 10**8)
    table("size: Kneser–Ney models of Python sources", results["size"])
    if options.json:
        written = json.dumps(results, indent=1)
        print(written) if options.json == "-" else Path(options.json).write_text(written)


if __name__ == "__main__":
    main()
