"""How much of a text stands in another: whether what is scored was held out at all.

A token was *seen* if it lies in a stretch of `span` tokens that the training text has, too.
Stretches are compared by a hash of 64 bits, made for every place at once by doubling:

    H₁(i) = v(x_i),        H₂ₛ(i) = b^s Hₛ(i) + Hₛ(i + s)        mod 2⁶⁴
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

SPAN = 32
"""Tokens in a row, a power of two: prose repeats shorter ones by chance."""
PIECE = 1 << 20
"""Tokens of the training text that are hashed at once."""
BASE = 0x9E3779B97F4A7C15

Hashes = NDArray[np.uint64]


def share_seen(ids: Any, train: Any, span: int = SPAN) -> float:
    """The share of `ids` that lies in stretches of `span` tokens which `train` has as well.

    >>> share_seen([1, 2, 3, 4, 9, 9], [0, 1, 2, 3, 4], span=4)
    0.6666666666666666
    """
    own = _hashes(np.asarray(ids), span)
    if not len(own):
        return 0.0
    known = np.zeros(len(own), bool)
    for start in range(0, max(len(train) - span + 1, 0), PIECE):
        known |= np.isin(own, _hashes(np.asarray(train[start : start + PIECE + span - 1]), span))
    edges = np.zeros(len(own) + span, np.int64)  # +1 where a stretch begins, -1 behind its end
    np.add.at(edges, np.flatnonzero(known), 1)
    np.add.at(edges, np.flatnonzero(known) + span, -1)
    return float((edges.cumsum()[:-1] > 0).mean())


def _hashes(ids: NDArray[Any], span: int) -> Hashes:
    """One for every stretch of `span` tokens; equal stretches have equal ones."""
    if len(ids) < span:
        return np.zeros(0, np.uint64)
    hashes, s = _scattered(ids), 1
    while s < span:
        hashes = hashes[:-s] * np.uint64(pow(BASE, s, 1 << 64)) + hashes[s:]
        s *= 2
    return hashes


def _scattered(ids: NDArray[Any]) -> Hashes:
    """v: an id as 64 bits without a pattern (Steele, Lea and Flood's SplitMix)."""
    v = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(BASE)
    v = (v ^ (v >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    v = (v ^ (v >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return v ^ (v >> np.uint64(31))
