"""Which units follow something in a text, and where the state was like this before."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError

Array = NDArray[np.float64]


def inside_quotes(text: str) -> Array:
    """1 from a quotation mark up to the one that ends it, else 0.

    >>> inside_quotes('a "b" c').tolist()
    [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    """
    marks = np.array([c in '"“”„«»' for c in text], dtype=np.int64)
    return (marks.cumsum() % 2).astype(np.float64)


def line_length(text: str) -> Array:
    """How many characters the line has by now.

    >>> line_length("ab\\ncd").tolist()
    [1.0, 2.0, 0.0, 1.0, 2.0]
    """
    lengths, length = np.zeros(len(text)), 0
    for i, c in enumerate(text):
        length = 0 if c == "\n" else length + 1
        lengths[i] = length
    return lengths


def bracket_depth(text: str) -> Array:
    """How many brackets are open.

    >>> bracket_depth("f(x[1])").tolist()
    [0.0, 1.0, 1.0, 2.0, 2.0, 1.0, 0.0]
    """
    steps = [(c in "([{") - (c in ")]}") for c in text]
    depths, depth = np.zeros(len(text)), 0
    for i, step in enumerate(steps):
        depth = max(0, depth + step)
        depths[i] = depth
    return depths


def upper_case(text: str) -> Array:
    """1 at capital letters, else 0."""
    return np.array([c.isupper() for c in text], dtype=np.float64)


SIGNALS: dict[str, Callable[[str], Array]] = {
    "quotes": inside_quotes,
    "line": line_length,
    "brackets": bracket_depth,
    "capitals": upper_case,
}
"""What a unit may follow, by name: one number for each character of a text."""


def occurrences(text: str, pattern: str) -> Array:
    """1 at every character of an occurrence of the pattern, overlapping ones too, else 0.

    >>> occurrences("banana", "ana").tolist()
    [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    if not pattern:
        raise UserError("an empty pattern is everywhere", hint="type the letters to look for")
    marks, at = np.zeros(len(text)), text.find(pattern)
    while at >= 0:
        marks[at : at + len(pattern)] = 1
        at = text.find(pattern, at + 1)
    return marks


def by_token(signal: Array, pieces: Sequence[str]) -> Array:
    """A signal of characters at the last character of each piece of the text."""
    ends = np.cumsum([len(piece) for piece in pieces])
    return signal[np.maximum(ends, 1) - 1]


def correlations(hs: Any, signal: Array) -> Array:
    """Pearson's r of every unit with a signal over the same steps; 0 where either stands still.

    r_i = Σ_t (h_ti - h̄_i)(s_t - s̄) / √(Σ_t (h_ti - h̄_i)² Σ_t (s_t - s̄)²)
    """
    h, s = np.asarray(hs, dtype=np.float64), np.asarray(signal, dtype=np.float64)
    if h.ndim != 2 or s.shape != h.shape[:1]:
        raise UserError(
            f"states of shape {h.shape} and a signal of shape {s.shape} are not of the same steps",
            hint="one number of the signal for each row of the states",
        )
    h, s = h - h.mean(0), s - s.mean()
    size = np.linalg.norm(h, axis=0) * np.linalg.norm(s)
    return np.divide(s @ h, size, out=np.zeros(h.shape[1]), where=size > 0)


def most_similar(hs: Any, at: int, count: int = 8, apart: int = 3) -> list[tuple[int, float]]:
    """The steps whose states point most nearly the same way: (step, cosine), likest first.

    Steps closer than `apart` to `at`, or to one that was found already, say nothing new.
    """
    h = np.asarray(hs, dtype=np.float64)
    if not 0 <= at < len(h):
        raise UserError(f"step {at} is not among the {len(h)} steps", hint="0 is the first")
    size = np.linalg.norm(h, axis=1)
    if size[at] == 0:
        raise UserError(f"the state at step {at} is zero and points nowhere", hint="another step")
    cosine = np.divide(h @ h[at], size * size[at], out=np.full(len(h), -1.0), where=size > 0)
    alike: list[tuple[int, float]] = []
    for step in np.argsort(-cosine, kind="stable"):
        if all(abs(int(step) - other) >= apart for other in (at, *(f for f, _ in alike))):
            alike.append((int(step), float(cosine[step])))
        if len(alike) == count:
            break
    return alike
