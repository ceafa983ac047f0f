"""From counts to probabilities: Laplace smoothing and Kneser–Ney.

Both interpolate: a k-gram keeps a share of what was counted, and its context hands the rest, γ, to
the next lower order, the lowest being uniform over the m symbols that can be predicted:

    P_k(x | context) = direct(context, x) + γ(context) · P_{k-1}(x | shorter context),   P_0 = 1/m

Laplace, as the notes write it (every order falls back on the unigram, or with `chain` on the order
below), with n(context) the number of times the context was followed by anything:

    direct = n(context, x) / (n(context) + ε_k),        γ = ε_k / (n(context) + ε_k)

Kneser–Ney, interpolated and modified (Chen and Goodman, 1999): a count c loses a discount D(1),
D(2) or D(3 and more), and below the highest order a k-gram counts as often as there are different
tokens before it, the beginning of the text being one of them:

    direct = (c - D(c)) / Σ_x c,                        γ = Σ_x D(c) / Σ_x c

The last of the symbols that were counted is the mark of beginning: context only, never predicted.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from elman.counting.ngram.backoff import BackoffTable
from elman.counting.ngram.counts import Counts, Ints

Floats = NDArray[np.float64]
Share = Callable[[int], tuple[Floats, Floats]]
"""For order k: `direct` for each k-gram and γ for each of their contexts."""

FALLBACK = (0.5, 1.0, 1.5)
"""Discounts where a corpus is too small, or has too few symbols, to estimate them."""


def laplace(counts: Counts, epsilon: tuple[float, ...], *, chain: bool) -> BackoffTable:
    """The notes' ε1, ε2, ε3, one for each order; 0 trusts the counts, infinity the lower order."""

    def share(k: int) -> tuple[Floats, Floats]:
        n, contexts, eps = _predicted(counts.counts[k - 1], k), counts.contexts(k), epsilon[k - 1]
        total = _sums(counts, k, n)
        return n / (total[contexts] + eps), _left_over(eps, total)

    unseen = [float(eps > 0) for eps in epsilon[1:]]
    lower = None if chain else [counts.last_tokens(k) for k in range(1, counts.order + 1)]
    return _interpolate(counts, share, lower or counts.suffixes(), unseen, to_unigram=not chain)


def kneser_ney(counts: Counts, *, sentences: bool) -> BackoffTable:
    """Interpolated modified Kneser–Ney.

    Only in sentences is the mark of beginning part of the text, and do k-grams that begin with it
    take part in the estimate of the discounts.
    """
    suffixes = counts.suffixes()

    def share(k: int) -> tuple[Floats, Floats]:
        top = k == counts.order
        c = counts.counts[k - 1] if top else continuations(counts, k, suffixes[k])
        c = _predicted(c, k)
        D = discounts(c if sentences else c[: counts.marked(k)])
        removed = np.array((0.0, *D))[np.minimum(c, 3)]
        total = _sums(counts, k, c)
        gamma = np.divide(
            _sums(counts, k, removed), total, out=np.ones_like(total), where=total > 0
        )
        return (c - removed) / total[counts.contexts(k)], gamma

    return _interpolate(counts, share, suffixes, [1.0] * (counts.order - 1), to_unigram=False)


def discounts(counts: Ints) -> tuple[float, float, float]:
    """D(1), D(2), D(3+) from n_1 … n_4, the number of k-grams that count once … four times.

    Y = n_1 / (n_1 + 2 n_2),   D(j) = j - (j+1) Y n_{j+1} / n_j      (Chen and Goodman, 1999)

    Where one of them is zero, or a discount would not be positive, the estimate says nothing (of
    letters: none follows only one other), and 1/2, 1, 3/2 are used instead.

    >>> discounts(np.repeat([1, 2, 3, 4], [40, 20, 10, 5]))
    (0.5, 1.25, 2.0)
    >>> discounts(np.array([7, 9]))
    (0.5, 1.0, 1.5)
    """
    n1, n2, n3, n4 = (int(np.count_nonzero(counts == j)) for j in (1, 2, 3, 4))
    if min(n1, n2, n3, n4) == 0:
        return FALLBACK
    Y = n1 / (n1 + 2 * n2)
    D = (1 - 2 * Y * n2 / n1, 2 - 3 * Y * n3 / n2, 3 - 4 * Y * n4 / n3)
    return D if min(D) > 0 else FALLBACK


def continuations(counts: Counts, k: int, suffixes: Ints) -> Ints:
    """How many different tokens come before each k-gram; `suffixes` are those of the (k+1)-grams.

    Nothing comes before the mark of beginning: k-grams that begin with it keep their own counts.
    """
    left = np.bincount(suffixes, minlength=len(counts.keys[k - 1]))
    first = counts.marked(k)
    left[first:] = counts.counts[k - 1][first:]
    return left


def _interpolate(
    counts: Counts, share: Share, lower: list[Ints], unseen: list[float], *, to_unigram: bool
) -> BackoffTable:
    """P_k = direct + γ P_lower for every k-gram, whose rank in the lower order is in `lower`."""
    uniform = np.full(counts.base, 1 / (counts.base - 1))
    uniform[-1] = 0
    p: list[Floats] = []
    gammas: list[Floats] = []
    for k in range(1, counts.order + 1):
        direct, gamma = share(k)
        below = uniform if k == 1 else p[0 if to_unigram else k - 2][lower[k - 1]]
        p.append(direct + gamma[counts.contexts(k)] * below)
        gammas.append(gamma)
    weights = [np.append(g, u) for g, u in zip(gammas[1:], unseen, strict=True)]
    return BackoffTable(
        base=counts.base,
        keys=counts.keys,
        log_p=tuple(map(_log, p)),
        log_backoff=tuple(map(_log, weights)),
        to_unigram=to_unigram,
    )


def _predicted(c: Ints, k: int) -> Ints:
    """Counts with the mark of beginning, which is never predicted, left out of the unigrams."""
    return np.append(c[:-1], 0) if k == 1 else c


def _sums(counts: Counts, k: int, values: NDArray) -> Floats:
    """The sum of `values` over the k-grams of each context."""
    contexts = 1 if k == 1 else len(counts.keys[k - 2])
    weights = values.astype(np.float64)
    return np.bincount(counts.contexts(k), weights, contexts).astype(np.float64, copy=False)


def _left_over(eps: float, total: Floats) -> Floats:
    """ε / (n + ε), also at its two ends."""
    if math.isinf(eps):
        return np.ones_like(total)
    return eps / (total + eps) if eps > 0 else np.zeros_like(total)


def _log(p: Floats) -> Floats:
    with np.errstate(divide="ignore"):  # log 0 = -inf is meant
        return np.log(p)
