"""Text to vocabulary and ids: elman against the notes' own lists, on the same text.

    python benchmarks/text.py            # 100 MB
    python benchmarks/text.py --quick    # 10 MB

Printed: seconds from text to vocabulary and ids, how many times faster than the notes, and the peak
of memory in bytes per character beyond the text itself. Expect a few minutes: the notes' lists are
slow, and slower while their memory is being traced.
"""

import argparse
import collections
import json
import multiprocessing
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elman import corpus
from elman.text.vocab import learn

LEVELS = ("char", "word", "byte")


def make_text(size: int) -> str:
    """Paragraphs of the Python reference in random order, until there are `size` characters."""
    paragraphs = corpus.load("python-reference").split("\n\n")
    chance, pieces, length = random.Random(0), [], 0
    while length < size:
        piece = chance.choice(paragraphs) + "\n\n"
        pieces.append(piece)
        length += len(piece)
    return "".join(pieces)[:size]


class NotesVocab:
    """The notes' vocabulary, as they write it."""

    def __init__(self, tokens: list[list[Any]]) -> None:
        counter = collections.Counter([token for line in tokens for token in line])
        self.token_freqs = sorted(counter.items(), key=lambda x: x[1], reverse=True)
        self.idx_to_token = ["<unk>"]
        self.token_to_idx = {token: idx for idx, token in enumerate(self.idx_to_token)}
        for token, _ in self.token_freqs:
            if token not in self.token_to_idx:
                self.idx_to_token.append(token)
                self.token_to_idx[token] = len(self.idx_to_token) - 1

    def __getitem__(self, tokens: Any) -> Any:
        if not isinstance(tokens, list | tuple):
            return self.token_to_idx.get(tokens, self.unk)
        return [self.__getitem__(token) for token in tokens]

    @property
    def unk(self) -> int:
        return 0


def notes(text: str, level: str) -> Any:
    lines = text.splitlines(keepends=True)
    if level == "word":
        tokens = [line.split() for line in lines]
    else:
        tokens = [list(line if level == "char" else line.encode()) for line in lines]
    vocab = NotesVocab(tokens)
    return [vocab[token] for line in tokens for token in line]


def elman(text: str, level: str) -> Any:
    return learn(text, level)[1]


WAYS: dict[str, Callable[[str, str], Any]] = {"notes": notes, "elman": elman}


def seconds(way: str, level: str, size: int) -> float:
    """From text in memory to vocabulary and ids in memory; the best of three for what is quick."""
    text, times = make_text(size), []
    while not times or (len(times) < 3 and sum(times) < 5):
        started = time.perf_counter()
        WAYS[way](text, level)
        times.append(time.perf_counter() - started)
    return min(times)


def peak_bytes(way: str, level: str, size: int) -> int:
    """The most that was allocated at once on the way, ids included, text not."""
    text = make_text(size)
    tracemalloc.start()
    WAYS[way](text, level)
    return tracemalloc.get_traced_memory()[1]


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run in a process of its own, so that no row warms or crowds the next."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 MB instead of 100 MB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args()
    size = 10_000_000 if arguments.quick else 100_000_000
    rows = []
    print(f"{size:,} characters\n\n{'level':<6} {'way':<6} {'seconds':>8} {'faster':>8} bytes/char")
    for level in LEVELS:
        for way in WAYS:
            spent = alone(seconds, way, level, size)
            peak = alone(peak_bytes, way, level, size) / size
            rows.append({"level": level, "way": way, "seconds": spent, "bytes_per_char": peak})
            faster = rows[-1 if way == "notes" else -2]["seconds"] / spent
            rows[-1]["faster"] = faster
            print(f"{level:<6} {way:<6} {spent:>8.2f} {faster:>7.1f}x {peak:>10.2f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"characters": size, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
