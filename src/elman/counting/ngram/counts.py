"""Counting n-grams with sorted arrays: no dictionary, no Python object per token.

Every distinct k-gram has a rank, its place among the k-grams in dictionary order. A k-gram is
then two numbers in one, the rank of its context and its last token:

    key_k = rank_{k-1}(x_1 … x_{k-1}) · V + x_k,        rank_1(x) = x

so all k-grams are one sorted array of 64-bit keys whatever the order, those of one context lie side
by side, and looking one up is a binary search. Ranks are found by counting into a dense array while
that is small, by sorting once it is not. Counting n tokens needs about 35 bytes for each of them
beside the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]
DENSE = 2
"""Count into a dense array while it has at most this many cells per token."""
LARGE = 1 << 22
"""Keys from which on torch sorts them."""


@final
@dataclass(frozen=True)
class Counts:
    """How often each k-gram occurs, k = 1 … order; `keys[k - 1]` and `counts[k - 1]` go together.

    >>> c = count(np.array([0, 1, 0, 1, 1]), order=2, base=2)
    >>> c.keys[1].tolist(), c.counts[1].tolist()          # 0·2+1 twice, 1·2+0 once, 1·2+1 once
    ([1, 2, 3], [2, 1, 1])
    """

    base: int
    keys: tuple[Ints, ...]
    counts: tuple[Ints, ...]

    @property
    def order(self) -> int:
        return len(self.keys)

    def contexts(self, k: int) -> Ints:
        """The rank of each k-gram's context among the (k-1)-grams."""
        return self.keys[k - 1] // self.base

    def last_tokens(self, k: int) -> Ints:
        """The last token of each k-gram."""
        return self.keys[k - 1] % self.base

    def marked(self, k: int) -> int:
        """The first of the k-grams that begin with the last symbol; they have the last ranks."""
        first = self.base - 1
        for j in range(2, k + 1):
            first = int(np.searchsorted(self.keys[j - 1], first * self.base))
        return first

    def suffixes(self) -> list[Ints]:
        """For k = 1 …: the rank of each k-gram without its first token among the (k-1)-grams.

        The suffix of `c·V + x` is `suffix(c)·V + x`, so each order follows from the one before.
        """
        ranks: list[Ints] = [np.zeros(self.base, np.int64)]
        for k in range(2, self.order + 1):
            keys = ranks[-1][self.contexts(k)] * self.base + self.last_tokens(k)
            ranks.append(keys if k == 2 else find(self.keys[k - 2], keys))
        return ranks


def grams(keys: Sequence[Ints], base: int, k: int, rows: Ints | None = None) -> Ints:
    """The k-grams themselves (all, or some by rank), one row of k ids each.

    >>> c = count(np.array([0, 1, 0, 1, 1]), order=2, base=2)
    >>> grams(c.keys, c.base, 2).tolist()
    [[0, 1], [1, 0], [1, 1]]
    """
    rank = np.arange(len(keys[k - 1])) if rows is None else rows
    columns: list[Ints] = []
    for j in range(k, 0, -1):
        rank, last = np.divmod(keys[j - 1][rank], base)
        columns.append(last)
    return np.stack(columns[::-1], axis=1)


def find(sorted_keys: Ints, keys: Ints) -> Ints:
    """The rank of each key in `sorted_keys`; their number where it is not among them.

    >>> find(np.array([2, 5, 9]), np.array([5, 6, 9])).tolist()
    [1, 3, 2]
    """
    size = len(sorted_keys)
    if size == 0:
        return np.zeros(len(keys), np.int64)
    rank = np.searchsorted(sorted_keys, keys)
    rank[sorted_keys[np.minimum(rank, size - 1)] != keys] = size
    return rank


def count(ids: Ints, order: int, base: int, starts: NDArray[np.bool_] | None = None) -> Counts:
    """Count every k-gram of `ids`, k = 1 … order; ids are 0 … base-1.

    Where `starts` marks the first token of each of several sequences, no k-gram crosses into the
    next one. All `base` unigrams are listed, those that never occur with a count of zero.
    """
    keys: list[Ints] = [np.arange(base)]
    counts: list[Ints] = [np.bincount(ids, minlength=base)]
    ranks = ids
    for k in range(2, order + 1):
        bound = len(keys[-1]) * base  # stands for "crosses into the next sequence"
        grams = ranks[:-1].astype(np.int64) * base
        grams += ids[k - 1 :]
        if starts is not None:
            grams[starts[k - 1 :]] = bound
            np.minimum(grams, bound, out=grams)
        distinct, occurrences, ranks = _rank(grams, bound, wanted=k < order)
        keys.append(distinct)
        counts.append(occurrences)
    return Counts(base, tuple(keys), tuple(counts))


def _rank(keys: Ints, bound: int, wanted: bool) -> tuple[Ints, Ints, Ints]:
    """Distinct keys below `bound`, how often each occurs, and (if wanted) the rank of every key.

    A key equal to `bound` is not listed; its rank is the number of those that are.
    """
    if bound < DENSE * len(keys):
        return _rank_by_counting(keys, bound, wanted)
    ranks = np.empty(len(keys), np.int32 if len(keys) < 2**31 else np.int64)
    if wanted:
        keys, places = _sort(keys)
    else:
        places = None
        keys.sort()
    first = np.ones(len(keys), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    if places is not None:
        ranks[places] = np.cumsum(first, dtype=ranks.dtype) - 1
    where = np.flatnonzero(first)
    distinct, counts = keys[where], np.diff(where, append=len(keys))
    listed = np.searchsorted(distinct, bound)
    return distinct[:listed], counts[:listed], ranks


def _sort(keys: Ints) -> tuple[Ints, Ints]:
    """Sorted keys, and the place each came from."""
    if len(keys) < LARGE:
        places = np.argsort(keys)
        return keys[places], places
    import torch  # sorts by radix, on all cores: four times as fast, worth its import by now

    values, places = torch.sort(torch.from_numpy(keys))
    return values.numpy(), places.numpy()


def _rank_by_counting(keys: Ints, bound: int, wanted: bool) -> tuple[Ints, Ints, Ints]:
    cells = np.bincount(keys, minlength=bound + 1)
    cells[bound] = 1  # the last rank, whether or not a key crosses
    distinct = np.flatnonzero(cells)
    counts = cells[distinct[:-1]]
    if wanted:
        cells[distinct] = np.arange(len(distinct))
        keys = cells.astype(np.int32 if len(distinct) < 2**31 else np.int64)[keys]
    return distinct[:-1], counts, keys
