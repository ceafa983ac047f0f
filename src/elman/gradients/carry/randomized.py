"""The gradient on average: cuts at random, and what survives them weighs more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from elman.errors import UserError
from elman.gradients.carry.base import Carry
from elman.options import as_number, hold_numbers


class Polynomial(NamedTuple):
    """The keep-probability of `Randomized.polynomial`, l steps after the last cut.

        π_l = 1 - α / (l + (α - 1) m)

    Then P(more than l steps between cuts) = Π_{j≤l} π_j falls like l^-α, so the weight Π 1/π_j of
    a gradient that has come l steps grows like l^α (with a constant π it grows like π^-l), and the
    mean distance between cuts, Σ_{l≥0} Π_{j≤l} π_j, is exactly m for every α > 1 (Gauss's sum of
    the hypergeometric series). After Tallec and Ollivier (2017), "Unbiasing truncated
    backpropagation through time".
    """

    mean: float
    alpha: float

    def keep(self, longest: int) -> np.ndarray:
        """π_1 … π_longest."""
        steps = np.arange(1, longest + 1)
        return 1 - self.alpha / (steps + (self.alpha - 1) * self.mean)


@final
@dataclass(frozen=True)
class Randomized(Carry):
    """The gradient on average: cut at random, and what survives weighs more.

        ξ_t = 0 with probability 1 - π, else 1/π,   so that E[ξ_t] = 1

    `keep` is π: one number, or a sequence whose element t is for the moment before step t (the
    first is never used, as ξ_1 = 1). Every backward pass draws anew; `seed` makes the draws
    repeatable (by default it comes from torch's own generator) and `state()` says where they are.
    One ξ serves the whole batch, or with `per_row` each row its own.
    """

    random: ClassVar[bool] = True

    keep: float | Sequence[float] | Polynomial
    seed: int | None = None
    per_row: bool = False
    _draws: list[int] = field(default_factory=lambda: [0], repr=False, compare=False)

    def __post_init__(self) -> None:
        hold_numbers(self)
        if isinstance(self.keep, (Tensor, np.ndarray)):
            object.__setattr__(self, "keep", self.keep.tolist())
        if not isinstance(self.keep, (int, float, Polynomial)):
            object.__setattr__(self, "keep", tuple(self.keep))
        if not self._probabilities() and not isinstance(self.keep, Polynomial):
            raise UserError("keep is empty", hint="give one probability per step, or one for all")
        for p in self._probabilities():
            if not 0 < p <= 1:
                raise UserError(
                    f"keep={p} must be a probability above 0 and at most 1",
                    hint="keep=0.9 cuts every ten steps on average",
                )
        if self.seed is None:
            object.__setattr__(self, "seed", int(torch.randint(2**62, (), device="cpu")))

    @classmethod
    def polynomial(
        cls, mean: float, alpha: float = 4.0, seed: int | None = None, per_row: bool = False
    ) -> Randomized:
        """Cuts `mean` steps apart on average; weights grow polynomially (see `Polynomial`)."""
        mean, alpha = as_number(mean), as_number(alpha)
        if not mean > 1:
            raise UserError(f"mean={mean} must be above 1 step", hint="mean=50 is a common choice")
        if not (alpha > 1 and math.isfinite(alpha)):
            raise UserError(
                f"alpha={alpha} must be above 1, or the mean distance between cuts is infinite",
                hint="alpha=4 keeps the variance low",
            )
        return cls(Polynomial(mean, alpha), seed, per_row)

    @property
    def name(self) -> str:
        return "polynomial" if isinstance(self.keep, Polynomial) else "randomized"

    @property
    def words(self) -> str:
        if isinstance(self.keep, Polynomial):
            return f"randomised, polynomial, mean {self.keep.mean:g}"
        if isinstance(self.keep, (int, float)):
            return f"randomised, keep {self.keep:.3g}"
        return f"randomised, {len(self.keep)} probabilities"

    def reading(self) -> tuple[int, int] | None:
        """The mean distance between cuts, m or 1/(1 - π), where there is one."""
        if isinstance(self.keep, Polynomial):
            return max(2, round(self.keep.mean)), 0
        if isinstance(self.keep, (int, float)) and self.keep < 1:
            return max(2, round(1 / (1 - self.keep))), 0
        return None

    def seeded(self, seed: int) -> Randomized:
        return replace(self, seed=seed, _draws=[0])

    def weights(self, steps: int, rows: int = 1) -> Tensor:
        """A fresh draw of ξ_1 … ξ_T, of shape (steps,), or (steps, rows) with `per_row`.

        >>> Randomized(keep=0.5, seed=1).weights(6).tolist()
        [1.0, 0.0, 2.0, 2.0, 0.0, 2.0]
        """
        random = np.random.Generator(np.random.Philox(key=[self.seed or 0, self._draws[0]]))
        self._draws[0] += 1
        columns = rows if self.per_row else 1
        if isinstance(self.keep, Polynomial):
            xi = np.stack([_polynomial(self.keep, steps, random) for _ in range(columns)], axis=1)
        else:
            keep = np.asarray(self._probabilities())[:, None]
            if len(keep) not in (1, steps):
                raise UserError(
                    f"keep has {len(keep)} probabilities for a sequence of {steps} steps",
                    hint="give one per step, or one number for all",
                )
            xi = (random.random((steps, columns)) < keep) / keep
        xi[:1] = 1
        return torch.from_numpy(xi if self.per_row else xi[:, 0])

    def state(self) -> dict[str, int]:
        """Where the draws are, for a checkpoint; `restore` returns to it."""
        return {"seed": int(self.seed or 0), "draws": self._draws[0]}

    def restore(self, state: dict[str, int]) -> None:
        """Draw next what was drawn next when `state()` was taken."""
        object.__setattr__(self, "seed", int(state["seed"]))
        self._draws[0] = int(state["draws"])

    def _probabilities(self) -> tuple[float, ...]:
        if isinstance(self.keep, Polynomial):
            return ()
        return (self.keep,) if isinstance(self.keep, (int, float)) else tuple(self.keep)


def _polynomial(law: Polynomial, steps: int, random: np.random.Generator) -> np.ndarray:
    """ξ for one row: distances between cuts by inverting their distribution, then 1/π between."""
    keep = law.keep(steps)
    ended = -np.cumprod(keep)  # -P(distance > l), l = 1 … steps, which rises
    last = np.zeros(steps, dtype=np.int64)  # the last cut; the start of the sequence counts as one
    cut = 0
    while cut < steps:
        last[cut] = cut
        cut += 1 + int(np.searchsorted(ended, -random.random(), side="left"))
    since = np.arange(steps) - np.maximum.accumulate(last)
    xi = np.zeros(steps)
    xi[since > 0] = 1 / keep[since[since > 0] - 1]
    return xi
