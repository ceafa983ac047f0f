"""A table of k-grams and how to read a probability out of it: Katz's backoff form.

    P(x | context) = p(context, x)                            if that k-gram is listed
                   = backoff(context) · P(x | shorter context)     if not

Every interpolated model has this form (p is then the interpolated probability), and so has every
ARPA file. A context that is not listed hands everything down (weight 1), except in unsmoothed
models, where nothing is known after it (weight 0).
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from elman.counting.ngram.counts import Ints, find

Floats = NDArray[np.float64]
Context = tuple[int, ...]
"""The ranks of the 1-gram, 2-gram, … that end at the last token read; empty before the first."""

PIECE = 1 << 20
"""Tokens scored at a time, so that scoring needs no more memory for a long text."""

INDEXED = 1 << 22
"""Possible keys of an order up to which each has its place in an index (of four bytes)."""


@final
@dataclass(frozen=True)
class BackoffTable:
    """Log probabilities (nats) of the listed k-grams, and log backoff weights of contexts.

    Keys as in `counts.py`; the last of the `base` ids is the mark of beginning. `log_backoff[k-1]`
    has a weight for each k-gram as context and, at its end, the one for contexts that are not
    listed. With `to_unigram` all orders hand down to the unigram directly, as the notes write it.
    """

    base: int
    keys: tuple[Ints, ...]
    log_p: tuple[Floats, ...]
    log_backoff: tuple[Floats, ...]
    to_unigram: bool = False

    @property
    def order(self) -> int:
        return len(self.keys)

    def score(self, ids: Ints, starts: NDArray[np.bool_] | None = None) -> Floats:
        """log P of each id given those before it, back to the last of the `starts`, if any."""
        before = self.order - 1
        pieces = []
        for begin in range(0, len(ids), PIECE):
            lead = max(0, begin - before)
            chosen = slice(lead, begin + PIECE)
            scores = self._score(ids[chosen], None if starts is None else starts[chosen])
            pieces.append(scores[begin - lead :])
        return np.concatenate(pieces) if pieces else np.zeros(0)

    def _score(self, ids: Ints, starts: NDArray[np.bool_] | None) -> Floats:
        tokens = ids.astype(np.int64)
        past = None if starts is None else _past(starts)
        unigram = self.log_p[0][tokens]
        result = unigram.copy()
        ranks = tokens  # of the k-gram that ends at each position
        for k in range(2, self.order + 1):
            contexts, lower = ranks[:-1], (unigram if self.to_unigram else result)[k - 1 :]
            ranks = self._find(k, contexts * self.base + tokens[k - 1 :])
            listed = ranks < len(self.keys[k - 1])
            longer = self.log_backoff[k - 2][contexts] + lower
            longer[listed] = self.log_p[k - 1][ranks[listed]]
            if past is not None:  # a past too short for this order is not one of its contexts
                longer = np.where(past[k - 1 :] < k - 1, result[k - 1 :], longer)
            result[k - 1 :] = longer
        return result

    def _find(self, k: int, keys: Ints) -> Ints:
        index = self._indexes[k - 1]
        return find(self.keys[k - 1], keys) if index is None else index.take(keys, mode="clip")

    @cached_property
    def _indexes(self) -> list[Ints | None]:
        """For orders with few possible keys, the rank of each: one look instead of a search."""
        indexes: list[Ints | None] = [None]
        for above, keys in pairwise(self.keys):
            cells = len(above) * self.base
            indexes.append(None)
            if cells <= INDEXED:
                indexes[-1] = np.full(cells + 1, len(keys), np.int32)
                indexes[-1][keys] = np.arange(len(keys))
        return indexes

    def advance(self, state: Context, token: int) -> Context:
        """The state after one more token; at most order-1 ranks."""
        ranks = [token]
        for keys, context in zip(self.keys[1:-1], state, strict=False):
            ranks.append(int(find(keys, np.array([context * self.base + token]))[0]))
        return tuple(ranks[: self.order - 1])

    def next(self, state: Context) -> Floats:
        """log P of every symbol that can come next (all but the mark of beginning)."""
        unigram = self.log_p[0][:-1]
        result = unigram.copy()
        for keys, log_p, weights, context in zip(
            self.keys[1:], self.log_p[1:], self.log_backoff, state, strict=False
        ):
            result = weights[context] + (unigram if self.to_unigram else result)
            begin, end = np.searchsorted(keys, [context * self.base, (context + 1) * self.base])
            result[keys[begin:end] - context * self.base] = log_p[begin:end]
        return result


def _past(starts: NDArray[np.bool_]) -> Ints:
    """How many tokens of its own sequence come before each position."""
    place = np.arange(len(starts))
    return place - np.maximum.accumulate(np.where(starts, place, 0))
