"""Which tokens may follow, and how likely each is.

p_t ∝ exp(o_t / temperature) on the tokens that are allowed
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elman.errors import UserError
from elman.language_model.turns import not_numbers
from elman.options import whole_number

Ids: TypeAlias = Any
"""One-dimensional integers: a tensor, an array or a list."""

Scores: TypeAlias = NDArray[np.float64]
"""One number for each token of the vocabulary, a row for each text: (rows, vocabulary).

In NumPy, because a draw is a dozen operations on a few numbers, and PyTorch takes longer to begin.
"""

UNK = 0
"""The id of `<unk>` in every `Vocab`: what a model should not write unless asked."""

FEW = 1024
"""The likeliest tokens, among which those that top-p keeps are looked for before all are sorted."""


@final
@dataclass(frozen=True)
class Sampling:
    """Which tokens may follow, and how likely each is.

    The rules apply in this order: `exclude` is never written; `temperature` divides the logits
    (below 1 bolder, above 1 more various, 0 always the likeliest token); `top_k` keeps the k
    likeliest tokens; `top_p` keeps the fewest likeliest tokens that hold at least p of the
    probability the rules before it left. Among equals the lower id comes first.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    exclude: Sequence[int] = (UNK,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exclude", ids_to_exclude(self.exclude))
        if not isinstance(self.temperature, Real) or not 0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature={self.temperature} must be a number from 0 up",
                hint="0 takes the likeliest token, 1 the model's own probabilities",
            )
        if self.top_k is not None:
            whole_number("top_k", self.top_k, at_least=1, hint="1 is greedy")
        if self.top_p is not None and not (isinstance(self.top_p, Real) and 0 < self.top_p <= 1):
            raise UserError(
                f"top_p={self.top_p} must be above 0 and at most 1", hint="1 keeps every token"
            )

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution the next token is drawn from, in float64.

        >>> Sampling(top_k=2, exclude=()).probabilities(torch.tensor([[0.0, 0.0, -1.0]]))
        tensor([[0.5000, 0.5000, 0.0000]], dtype=torch.float64)
        """
        return torch.from_numpy(self.odds(logits))

    def odds(self, logits: Tensor) -> Scores:
        """The same as an array."""
        scores = allowed(logits, self.exclude)
        if self.temperature == 0:
            p = np.zeros_like(scores)
            p[np.arange(len(scores)), scores.argmax(-1)] = 1  # of equals, NumPy takes the first
            return p
        with np.errstate(over="ignore"):  # of a temperature near 0: all but the likeliest vanish
            if self.top_k is None and self.top_p is None:
                p = np.exp((scores - scores.max(-1, keepdims=True)) / self.temperature)
                return p / p.sum(-1, keepdims=True)
            p = np.zeros_like(scores)
            for row, share in zip(scores, p, strict=True):
                kept, weights = self._kept(row)
                share[kept] = weights / weights.sum()
        return p

    def _kept(self, scores: Scores) -> tuple[Ids, Scores]:
        """The tokens that top-k and then top-p leave of one row, in their order; their weights."""
        kept: Ids = slice(None)
        if self.top_k is not None and self.top_k < len(scores):
            kept = _likeliest(scores, _highest(scores, self.top_k))
            scores = scores[kept]
        highest = scores.max()
        weights = np.exp((scores - highest) / self.temperature)
        if self.top_p is None or self.top_p == 1:
            return kept, weights
        total = weights.sum()
        for looked_at in (min(FEW, len(scores)), len(scores)):
            best = _highest(scores, looked_at)
            p = np.exp((best - highest) / self.temperature) / total
            within = p.cumsum() - p < self.top_p
            if not within[-1]:
                break
        inside = _likeliest(scores, best[: within.sum()])
        return (inside if isinstance(kept, slice) else kept[inside]), weights[inside]


def _highest(scores: Scores, count: int) -> Scores:
    """The `count` highest of one row of scores, falling."""
    if count * 32 > len(scores):
        return np.sort(scores)[: -count - 1 : -1]
    return torch.from_numpy(scores).topk(count).values.numpy()


def _likeliest(scores: Scores, highest: Scores) -> Ids:
    """Where the highest of one row of scores are, in order; among equals, those of lower ids."""
    at = np.flatnonzero(scores >= highest[-1])
    if len(at) > len(highest):
        equal = at[scores[at] == highest[-1]]
        at = np.setdiff1d(at, equal[len(highest) - len(at) :], assume_unique=True)
    return at


def allowed(logits: Tensor, exclude: Sequence[int]) -> Scores:
    """The logits in float64, -∞ for the tokens that must not be written."""
    scores = logits.detach().to("cpu", torch.float64, copy=True).numpy()
    scores[..., excluded(tuple(exclude), scores.shape[-1])] = -math.inf
    if not np.isfinite(scores.max(-1)).all():  # NaN wins every maximum
        raise not_numbers()
    return scores


@functools.lru_cache(maxsize=16)
def excluded(exclude: tuple[int, ...], size: int) -> list[int]:
    """The tokens of a vocabulary of `size` that must not be written, checked."""
    if outside := [i for i in exclude if not 0 <= i < size]:
        raise UserError(
            f"exclude={outside} names no token of a vocabulary of {size}", hint=f"0 to {size - 1}"
        )
    if len(set(exclude)) == size:
        raise UserError("every token of the vocabulary is excluded", hint="leave at least one")
    return list(exclude)


def ids_to_exclude(exclude: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(index, exclude))
    except TypeError as problem:
        raise UserError(
            f"exclude={exclude!r} must be several token ids", hint="exclude=(0,) excludes one"
        ) from problem
