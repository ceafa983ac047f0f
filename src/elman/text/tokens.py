"""From text to tokens: characters, words or bytes.

`tokenize` gives the notes' lists, one Python object per token, which is what one wants to look at.
`count` and the two iterators below it do the same over a long text without those objects: what
`Vocab` uses for a hundred megabytes.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError

Token = str | int
"""A character or a word is a `str`; a byte is its value, 0 to 255."""

LEVELS = ("char", "word", "byte")

_CHUNK = 1 << 16  # characters worked on at once: small enough for the cache, large enough for NumPy
_WHITESPACE = re.compile(r"\s")  # the same characters that `str.split` splits at


def tokenize(lines: Iterable[str | bytes], level: str = "word") -> list[list[Any]]:
    """Split each line into words, characters or the bytes of its UTF-8.

    >>> tokenize(["the time", "née"], "word")
    [['the', 'time'], ['née']]
    >>> tokenize(["née"], "char")
    [['n', 'é', 'e']]
    >>> tokenize(["née"], "byte")
    [[110, 195, 169, 101]]
    """
    check_level(level)
    if isinstance(lines, str | bytes):
        raise UserError(
            f"tokenize takes a list of lines, not one {type(lines).__name__}",
            hint="pass text.splitlines(keepends=True), or [text] for a single line",
        )
    if level == "byte":
        return [list(as_bytes(line)) for line in lines]
    if level == "word":
        return [as_text(line, level).split() for line in lines]
    return [list(as_text(line, level)) for line in lines]


def count(text: str | bytes, level: str) -> dict[Any, int]:
    """How often each token occurs in `text`, in the order of first appearance.

    The same as `Counter(t for line in tokenize([text], level) for t in line)`, without an object
    per token: characters and bytes are counted as integers, words a stretch at a time.

    >>> count("to be or not to be", "word")
    {'to': 2, 'be': 2, 'or': 1, 'not': 1}
    """
    check_level(level)
    if level == "byte":
        return _tally(byte_chunks(text))
    text = as_text(text, level)
    if level == "char":
        return {chr(code): n for code, n in _tally(code_point_chunks(text)).items()}
    words: Counter[str] = Counter()
    for stretch in word_chunks(text):
        words.update(stretch)
    return dict(words)


def _tally(chunks: Iterable[NDArray[Any]]) -> dict[int, int]:
    """Count small integers, keeping the order in which they were first seen."""
    counts = np.zeros(
        0x110000, dtype=np.int64
    )  # every Unicode code point; pages never touched are free
    seen: list[int] = []
    for codes in chunks:
        found = np.bincount(codes)
        if np.any((found > 0) & (counts[: len(found)] == 0)):
            values, first = np.unique(codes, return_index=True)
            seen += [int(c) for c in values[np.argsort(first)] if counts[c] == 0]
        counts[: len(found)] += found
    return {code: int(counts[code]) for code in seen}


def code_point_chunks(text: str) -> Iterator[NDArray[np.uint32]]:
    """The Unicode code points of `text`, lone surrogates included, a stretch at a time."""
    for start in range(0, len(text), _CHUNK):
        piece = text[start : start + _CHUNK].encode("utf-32-le", "surrogatepass")
        yield np.frombuffer(piece, dtype="<u4")


def byte_chunks(text: str | bytes) -> Iterator[NDArray[np.uint8]]:
    """The bytes of `text`, or of its UTF-8, a stretch at a time."""
    for start in range(0, len(text), _CHUNK):
        yield np.frombuffer(as_bytes(text[start : start + _CHUNK]), dtype=np.uint8)


def word_chunks(text: str) -> Iterator[list[str]]:
    """The words of `text`, a stretch at a time; no stretch ends inside a word."""
    start = 0
    while start < len(text):
        gap = _WHITESPACE.search(text, start + _CHUNK)
        stop = gap.end() if gap else len(text)
        yield text[start:stop].split()
        start = stop


def as_bytes(text: str | bytes) -> bytes:
    """UTF-8, in which a lone surrogate (no text, but possible in a `str`) keeps its three bytes."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def as_text(text: str | bytes, level: str) -> str:
    """Refuse bytes where characters or words are wanted."""
    if isinstance(text, bytes):
        raise UserError(
            f"bytes have no {level}s until they are decoded",
            hint='bytes.decode gives their text; level="byte" takes them as they are',
        )
    return text


def check_level(level: str) -> None:
    """Refuse a level that does not exist, and list those that do."""
    if level not in LEVELS:
        raise UserError(f"unknown level {level!r}", hint=f"levels are {', '.join(LEVELS)}")
