"""From counts to probabilities; `SMOOTHINGS` is the one table of ways: a class and a line each.

All interpolate: a k-gram keeps a share of what was counted, and its context hands the rest, γ, to
the next lower order, the lowest being uniform over the m symbols that can be predicted:

    P_k(x | context) = direct(context, x) + γ(context) · P_{k-1}(x | shorter context),   P_0 = 1/m

Laplace, as the notes write it: every order falls back on the unigram (or with `chain` on the order
below), m is the number of different words, and n(context) how often the context occurs:

    direct = n(context, x) / (n(context) + ε_k),        γ = ε_k / (n(context) + ε_k)

So `<unk>`, unless it was counted, is impossible, and after the last words of the text, which
nothing follows, the probabilities sum to less than one. *Open* Laplace mends both: `<unk>` is one
of the m, and n(context) is how often anything follows the context.

Kneser–Ney, interpolated and modified (Chen and Goodman, 1999): a count c loses a discount D(1),
D(2) or D(3 and more), and below the highest order a k-gram counts as often as there are different
tokens before it, the beginning of the text being one of them:

    direct = (c - D(c)) / Σ_x c,                        γ = Σ_x D(c) / Σ_x c

The last of the symbols that were counted is the mark of beginning: context only, never predicted.
"""

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from elman.counting.ngram.backoff import BackoffTable
from elman.counting.ngram.counts import Counts, Ints
from elman.errors import UserError

Floats = NDArray[np.float64]
Share = Callable[[int], tuple[Floats, Floats]]
"""For order k: `direct` for each k-gram and γ for each of their contexts."""

FALLBACK = (0.5, 1.0, 1.5)
"""Discounts where a corpus is too small, or has too few symbols, to estimate them."""


class Smoothing(abc.ABC):
    """A way from counts to probabilities."""

    @classmethod
    @abc.abstractmethod
    def of(cls, order: int, epsilon: float | Sequence[float] | None, chain: bool) -> Self:
        """With the options that the user gave, checked."""

    @property
    @abc.abstractmethod
    def about(self) -> str:
        """The way in words, as the model says it of itself."""

    @abc.abstractmethod
    def estimate(self, counts: Counts, special: Ints, *, sentences: bool) -> BackoffTable:
        """The probabilities; `special` are ids that stand for no word, such as that of `<unk>`."""


@final
class KneserNey(Smoothing):
    """Interpolated modified Kneser–Ney: it estimates its discounts and takes no options."""

    @classmethod
    def of(cls, order: int, epsilon: float | Sequence[float] | None, chain: bool) -> Self:
        if epsilon is not None or chain:
            raise UserError(
                "epsilon and chain belong to Laplace smoothing, not to Kneser–Ney",
                hint='smoothing="laplace"',
            )
        return cls()

    @property
    def about(self) -> str:
        return "Kneser–Ney"

    def estimate(self, counts: Counts, special: Ints, *, sentences: bool) -> BackoffTable:
        return kneser_ney(counts, sentences=sentences)


@dataclass(frozen=True)
class _OfLaplace(Smoothing):
    """One ε for each order, and whether an order falls back on the one below or the unigram."""

    epsilon: tuple[float, ...]
    chain: bool

    @classmethod
    def of(cls, order: int, epsilon: float | Sequence[float] | None, chain: bool) -> Self:
        weights = np.atleast_1d(np.asarray(1.0 if epsilon is None else epsilon, np.float64))
        weights = np.repeat(weights, order) if weights.shape == (1,) else weights
        if weights.shape != (order,) or not (weights >= 0).all():
            raise UserError(
                f"epsilon={epsilon} must be 0 or more: one number, or one for each of {order} "
                "orders",
                hint="epsilon=1",
            )
        return cls(tuple(weights.tolist()), chain)

    def _estimate(
        self, counts: Counts, words: NDArray[np.bool_], totals: Callable[[int], Floats]
    ) -> BackoffTable:
        def share(k: int) -> tuple[Floats, Floats]:
            n, eps, total = _predicted(counts.counts[k - 1], k), self.epsilon[k - 1], totals(k)
            with np.errstate(invalid="ignore"):  # 0/0: a context that never occurs, and ε = 0
                direct = n / (total[counts.contexts(k)] + eps)
            return np.nan_to_num(direct, nan=0.0), _left_over(eps, total)

        unseen = [float(eps > 0) for eps in self.epsilon[1:]]
        lower = [counts.last_tokens(k) for k in range(1, counts.order + 1)]
        lower = counts.suffixes() if self.chain else lower
        return _interpolate(counts, share, lower, unseen, words=words, to_unigram=not self.chain)


@final
class Laplace(_OfLaplace):
    """The notes' ε1, ε2, ε3, to the letter; 0 trusts the counts, infinity the lower order."""

    @property
    def about(self) -> str:
        return f"Laplace with ε = {', '.join(f'{e:g}' for e in self.epsilon)}"

    def estimate(self, counts: Counts, special: Ints, *, sentences: bool) -> BackoffTable:
        def occurrences(k: int) -> Floats:
            """How often each context occurs, the last place in the text included."""
            own = _predicted(counts.counts[0], 1).sum(keepdims=True)
            return (own if k == 1 else counts.counts[k - 2]).astype(np.float64)

        words = np.ones(counts.base, bool)
        words[special] = counts.counts[0][special] > 0
        return self._estimate(counts, words, occurrences)


@final
class OpenLaplace(_OfLaplace):
    """Laplace over all of the vocabulary, `<unk>` too, summing to one after every context."""

    @property
    def about(self) -> str:
        return f"open Laplace with ε = {', '.join(f'{e:g}' for e in self.epsilon)}"

    def estimate(self, counts: Counts, special: Ints, *, sentences: bool) -> BackoffTable:
        def followed(k: int) -> Floats:
            """How often each context is followed by anything."""
            return _sums(counts, k, _predicted(counts.counts[k - 1], k))

        return self._estimate(counts, np.ones(counts.base, bool), followed)


SMOOTHINGS: dict[str, type[Smoothing]] = {
    "kneser-ney": KneserNey,
    "laplace": Laplace,
    "laplace-open": OpenLaplace,
}


def chosen(
    name: str, order: int, epsilon: float | Sequence[float] | None, chain: bool
) -> Smoothing:
    """The smoothing of that name with these options, or a refusal in words."""
    if name not in SMOOTHINGS:
        raise UserError(f"unknown smoothing {name!r}", hint=f"one of {', '.join(SMOOTHINGS)}")
    return SMOOTHINGS[name].of(order, epsilon, chain)


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
    counts: Counts,
    share: Share,
    lower: list[Ints],
    unseen: list[float],
    *,
    words: NDArray[np.bool_] | None = None,
    to_unigram: bool,
) -> BackoffTable:
    """P_k = direct + γ P_lower for every k-gram, whose rank in the lower order is in `lower`.

    The lowest order is uniform over all symbols but the mark of beginning, or over the `words`.
    """
    uniform = np.ones(counts.base) if words is None else words.astype(np.float64)
    uniform[-1] = 0
    uniform /= uniform.sum()
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
    """ε / (n + ε), also at its two ends; 0 where nothing is smoothed."""
    if math.isinf(eps):
        return np.ones_like(total)
    return eps / (total + eps) if eps > 0 else np.zeros_like(total)


def _log(p: Floats) -> Floats:
    with np.errstate(divide="ignore"):  # log 0 = -inf is meant
        return np.log(p)
