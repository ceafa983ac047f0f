"""Word statistics: how often tokens, and runs of n tokens, occur; and Zipf's law.

The i-th most frequent of them occurs about n_i ∝ 1/i^α times, a straight line on log–log paper:

    log n_i = -α log i + c

Lists of lines are joined before runs are counted, as in the notes, so a run may cross a line's end.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from elman.counting.ngram.counts import count, grams
from elman.counting.sequence_model import encode, vocabulary_of
from elman.errors import UserError, counted
from elman.options import whole_number
from elman.text.vocab import Vocab

Ints = NDArray[np.integer]

FIRST, LEAST = 10, 5
"""Zipf's law is fitted from this rank to the last one that occurs at least so many times."""


@final
@dataclass(frozen=True)
class Frequencies:
    """How often each run of n tokens occurs, most frequent first; equals in the order of their ids.

    >>> f = frequencies("abracadabra", n=2)
    >>> f.total, f.types, f.hapaxes
    (10, 7, 4)
    >>> f.most_common(2)
    [(('a', 'b'), 2), (('b', 'r'), 2)]
    """

    n: int
    counts: Ints
    ids: Ints
    vocab: Vocab | None

    @property
    def total(self) -> int:
        """How many runs there are in the text."""
        return int(self.counts.sum())

    @property
    def types(self) -> int:
        """How many different ones."""
        return len(self.counts)

    @property
    def hapaxes(self) -> int:
        """How many of those occur only once."""
        return int(np.count_nonzero(self.counts == 1))

    def most_common(self, k: int | None = None) -> list[tuple[tuple[Any, ...], int]]:
        """The k most frequent (all, if k is not given), each with its count."""
        rows = self.ids[:k].tolist()
        named = rows if self.vocab is None else [self.vocab.to_tokens(row) for row in rows]
        return [(tuple(row), int(n)) for row, n in zip(named, self.counts[:k], strict=True)]


def frequencies(sequence: Any, n: int = 1, vocab: Vocab | None = None) -> Frequencies:
    """Count the runs of n tokens in a text, a list (of lists) of tokens, or an array of ids."""
    n = whole_number("n", n, at_least=1, hint="1 counts single tokens")
    vocab, size = vocabulary_of(sequence, vocab, None)
    ids = encode(sequence, vocab, size)
    if len(ids) < n:
        shorter = f", or n={len(ids)}" if len(ids) else ""
        raise UserError(
            f"a text of {counted(len(ids), 'tokens')} has no run of {n}",
            hint=f"a longer text{shorter}",
        )
    table = count(ids, n, size)
    occurrences = table.counts[-1]
    order = np.argsort(-occurrences, kind="stable")[: np.count_nonzero(occurrences)]
    rows = grams(table.keys, table.base, n, order)
    return Frequencies(n, occurrences[order], rows, vocab)


class StopWords(NamedTuple):
    """The head of the distribution, and what part of the text it makes up."""

    words: list[Any]
    share: float


def stop_words(tokens: Frequencies, share: float = 1 / 3) -> StopWords:
    """The fewest of the most frequent tokens that make up at least `share` of the text.

    They are derived from the text, not from a fixed list: so frequent that they say little about
    what is being talked of. With a third, a book has about fifteen.

    >>> stop_words(frequencies("to be or not to be".split()), 0.6)
    StopWords(words=['to', 'be'], share=0.6666666666666666)
    """
    if tokens.n != 1:
        raise UserError(f"stop words are single tokens, not runs of {tokens.n}", hint="n=1")
    if not 0 < share <= 1:
        raise UserError(f"share={share} must be above 0 and at most 1", hint="share=0.33")
    covered = np.cumsum(tokens.counts) / tokens.total
    k = int(np.searchsorted(covered, share * (1 - 1e-12))) + 1
    return StopWords([gram[0] for gram, _ in tokens.most_common(k)], float(covered[k - 1]))


class Zipf(NamedTuple):
    """log n_i = -alpha log i + c over the ranks first … last, both included.

    `error` is the standard error of alpha: for least squares there is none to give (neighbouring
    ranks are not independent), but how much of the variance of log n_i is explained, `r2`.
    """

    alpha: float
    c: float
    first: int
    last: int
    error: float | None = None
    r2: float | None = None

    def expected(self, rank: Any) -> Any:
        """n_i on the fitted line."""
        return np.exp(self.c) * np.asarray(rank, np.float64) ** -self.alpha


def ranks_to_fit(
    counts: Ints, first: int | None = None, last: int | None = None
) -> tuple[int, int]:
    """The ranks a fit uses: as given, or those between the exceptional head and the stepped tail.

    The few most frequent words lie off the line (the notes leave them out), and where counts are
    small whole stretches of ranks share one: from rank 10 to the last that occurs five times.
    """
    first = FIRST if first is None else first
    last = int(np.count_nonzero(counts >= LEAST)) if last is None else last
    if not 1 <= first < last <= len(counts):
        raise UserError(
            f"Zipf's law needs ranks 1 ≤ first < last ≤ {len(counts)}, not {first} to {last}",
            hint="more text, or ranks inside that: first=1 and last=100",
        )
    return first, last


def zipf_least_squares(counts: Ints, first: int | None = None, last: int | None = None) -> Zipf:
    """The straight line through (log i, log n_i) over a range of ranks, every rank alike.

    >>> fit = zipf_least_squares(1000 * np.arange(1, 50) ** -1.5, 1, 49)
    >>> round(fit.alpha, 6), round(fit.r2, 6)
    (1.5, 1.0)
    """
    first, last = ranks_to_fit(counts, first, last)
    x, y = np.log(np.arange(first, last + 1)), np.log(counts[first - 1 : last])
    dx, dy = x - x.mean(), y - y.mean()
    slope = float(dx @ dy / (dx @ dx))
    spread = float(dy @ dy)
    r2 = 1.0 if spread == 0 else slope**2 * float(dx @ dx) / spread
    return Zipf(-slope, float(y.mean() - slope * x.mean()), first, last, r2=r2)


def zipf_maximum_likelihood(
    counts: Ints, first: int | None = None, last: int | None = None
) -> Zipf:
    """The α under which the tokens of a range of ranks are likeliest, each token alike.

    Takes them as independent draws of a rank, P(i) = i^{-α} / Σ_j j^{-α} over first … last. The
    log-likelihood is concave; Newton's method solves E_α[log i] = mean of log i, and

        standard error = 1 / √(N · Var_α[log i])         (N tokens; Fisher information)

    Words come in bursts, and the ranks are the same text's, so the true uncertainty is larger.
    """
    first, last = ranks_to_fit(counts, first, last)
    x, n = np.log(np.arange(first, last + 1)), counts[first - 1 : last]
    total, target = float(n.sum()), float(n @ x / n.sum())
    alpha = 1.0
    for _ in range(100):
        mean, variance = _moments(alpha, x)
        step = (mean - target) / variance
        alpha += max(-1.0, min(1.0, step))
        if abs(step) < 1e-12:
            break
    c = math.log(total) - float(np.log(np.exp(-alpha * x).sum()))
    return Zipf(alpha, c, first, last, error=1 / math.sqrt(total * _moments(alpha, x)[1]))


def _moments(alpha: float, x: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and variance of x = log i under P(i) ∝ i^{-α}."""
    p = np.exp(-alpha * x)
    p /= p.sum()
    mean = float(p @ x)
    return mean, float(p @ (x - mean) ** 2)
