"""Carry: what part of the gradient flows back from one moment to the one before.

    dh_t = dhs_t + ξ_{t+1} (∂h_{t+1}/∂h_t)ᵀ dh_{t+1}

A carry is a choice of ξ_1 … ξ_T. ξ_1 = 1 always: the caller's h_0 keeps its gradient, and whoever
carries a state between calls detaches it, as in PyTorch. All layers and directions share one ξ: a
cut is a moment in time, not a place in the stack.

A carry of your own is one class (a frozen dataclass) that answers what `Carry` asks; only `weights`
has no answer by default. To have a name in `Reading` and on the command line it needs one line in
`CARRIES`, at the end of this file.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from elman.errors import UserError
from elman.options import as_number, hold_numbers


class Block(NamedTuple):
    """Losses [first, last) carried back within the window [start, stop)."""

    first: int
    last: int
    start: int
    stop: int


class Cuts(NamedTuple):
    """Where a training cuts a long text: segment i is the steps [edges[i], edges[i + 1])."""

    edges: list[int]
    xi: Tensor | None = None  # ξ of every step of the text; None: 1 inside every segment


class Carry(ABC):
    """What part of ∂L/∂h_{t+1} is carried back to h_t."""

    exact: ClassVar[bool] = False
    """ξ = 1 everywhere: the gradient that autograd computes."""
    random: ClassVar[bool] = False
    """Every backward pass draws anew: a measurement takes the mean of many."""
    in_blocks: ClassVar[bool] = False
    """Not one pass back with one ξ, but one pass for each of `blocks`."""
    windows: ClassVar[bool] = False
    """A training reads windows of one length, each carried back by itself."""

    @abstractmethod
    def weights(self, steps: int, rows: int = 1) -> Tensor:
        """ξ_1 … ξ_T in float64, of shape (steps,), or (steps, rows) where rows differ; ξ_1 = 1."""

    def blocks(self, steps: int, both_ways: bool = False) -> Iterator[Block]:
        """The passes over `steps` time steps, in order of time."""
        yield Block(0, steps, 0, steps)

    @property
    def name(self) -> str | None:
        """Its name in `CARRIES`; None: it has none."""
        return None

    @property
    def words(self) -> str:
        """The carry as figures and tables show it."""
        return str(self)

    def stretches(self, steps: int) -> list[tuple[int, int]]:
        """The pieces [start, stop) of time that a gradient crosses: those between cuts.

        >>> Truncated(window=2).stretches(5)
        [(0, 2), (2, 4), (4, 5)]
        """
        return list(itertools.pairwise(_between_cuts(self._shared(steps))))

    def cuts(self, steps: int) -> Cuts:
        """How a training reads `steps` of text: a segment from each cut to the next."""
        xi = self._shared(steps)
        return Cuts(_between_cuts(xi), xi)

    def reading(self) -> tuple[int, int] | None:
        """(window, history) of the segments a training reads: their length, on average where it is
        drawn, and how many steps before them are read again. None: any will do."""
        return None

    def exact_window(self) -> int | None:
        """How long the windows are inside which all is carried, and between which nothing is; None:
        it has none."""
        return None

    def seeded(self, seed: int) -> Carry:
        """The same carry, whose draws (if it has any) begin at `seed`."""
        return self

    def key(self) -> Hashable:
        """What two carries share if code compiled for one serves the other: their value, unless
        each has draws of its own."""
        return id(self) if self.random else self

    def _shared(self, steps: int) -> Tensor:
        """ξ that is the same for all rows."""
        xi = self.weights(steps)
        if xi.dim() != 1:
            raise UserError(
                f"{self} cuts every row at moments of its own; here all rows share them",
                hint="per_row=False",
            )
        return xi


def _between_cuts(xi: Tensor) -> list[int]:
    return [0, *(t for t in torch.nonzero(xi == 0).flatten().tolist() if t > 0), len(xi)]


def checked_carry(carry: object) -> Carry:
    """The carry itself, if it is one."""
    if not isinstance(carry, Carry):
        raise UserError(
            f"carry must be a Carry, got {carry!r}",
            hint="e.g. Full(), Truncated(window=35), Randomized(keep=0.9)",
        )
    return carry


def _at_least_one(name: str, value: object, hint: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name}={value!r} must be a whole number of at least 1", hint=hint)


@final
@dataclass(frozen=True)
class Full(Carry):
    """Everything is carried: ξ = 1 everywhere, the exact gradient."""

    exact: ClassVar[bool] = True

    def weights(self, steps: int, rows: int = 1) -> Tensor:
        """ξ_1 … ξ_T, of shape (steps,)."""
        return torch.ones(1, dtype=torch.float64, device="cpu").expand(steps)

    @property
    def name(self) -> str:
        return "full"

    @property
    def words(self) -> str:
        return "full"

    def cuts(self, steps: int) -> Cuts:
        """One segment: all of the text."""
        return Cuts([0, steps])


@final
@dataclass(frozen=True)
class Truncated(Carry):
    """Exact inside a window of `window` steps; nothing crosses its edge.

    ξ_t = 0 where step t begins a later window (steps k+1, 2k+1, …), else 1

    >>> Truncated(window=2).weights(5).tolist()
    [1.0, 1.0, 0.0, 1.0, 0.0]
    """

    windows: ClassVar[bool] = True

    window: int

    def __post_init__(self) -> None:
        hold_numbers(self)
        _at_least_one("window", self.window, "Full() never truncates")

    def weights(self, steps: int, rows: int = 1) -> Tensor:
        """ξ_1 … ξ_T, of shape (steps,)."""
        xi = torch.ones(steps, dtype=torch.float64, device="cpu")
        xi[self.window :: self.window] = 0
        return xi

    @property
    def name(self) -> str:
        return "truncated"

    @property
    def words(self) -> str:
        return f"truncated, window {self.window}"

    def cuts(self, steps: int) -> Cuts:
        """Whole windows, so that every update has the same shape; what is left over is not read."""
        return Cuts(list(range(0, steps + 1, self.window)))

    def reading(self) -> tuple[int, int]:
        return self.window, 0

    def exact_window(self) -> int:
        return self.window


@final
@dataclass(frozen=True)
class Given(Carry):
    """Exactly these ξ_1 … ξ_T, for a sequence of as many steps."""

    xi: tuple[float, ...]

    def weights(self, steps: int, rows: int = 1) -> Tensor:
        """ξ_1 … ξ_T, of shape (steps,)."""
        if steps != len(self.xi):
            raise UserError(f"{len(self.xi)} weights were given for a sequence of {steps} steps")
        return torch.tensor(self.xi, dtype=torch.float64, device="cpu")

    @property
    def words(self) -> str:
        return f"given, {len(self.xi)} weights"


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


@final
@dataclass(frozen=True)
class Sliding(Carry):
    """Every `every` steps, the newest `every` losses go back through the newest `steps` steps.

    Not one ξ but one pass per block of losses, the state before the window taken as constant, so
    every loss reaches back at least steps - every + 1 steps. every=1 is the notes' sum stopped
    after τ = `steps` terms; every=steps is Truncated(window=steps) over whole windows. With rows of
    different lengths the blocks are the same moments for all of them.
    """

    in_blocks: ClassVar[bool] = True

    every: int
    steps: int

    def __post_init__(self) -> None:
        hold_numbers(self)
        _at_least_one("every", self.every, "every=1 carries each loss back by itself")
        _at_least_one("steps", self.steps, "steps=every is Truncated(window=every)")
        if self.steps < self.every:
            raise UserError(
                f"steps={self.steps} must be at least every={self.every}: "
                "a block's losses lie inside its window",
                hint=f"Sliding(every={self.every}, steps={self.every})",
            )

    def weights(self, steps: int, rows: int = 1) -> Tensor:
        """1 everywhere inside a block's window; see `blocks`."""
        return torch.ones(steps, dtype=torch.float64, device="cpu")

    def blocks(self, steps: int, both_ways: bool = False) -> Iterator[Block]:
        """The passes over `steps` time steps, in order of time.

        >>> [tuple(b) for b in Sliding(every=2, steps=3).blocks(5)]
        [(0, 2, 0, 2), (2, 4, 1, 4), (4, 5, 2, 5)]
        """
        for first in range(0, steps, self.every):
            last = min(first + self.every, steps)
            stop = min(steps, first + self.steps) if both_ways else last
            yield Block(first, last, max(0, last - self.steps), stop)

    @property
    def name(self) -> str:
        return "sliding"

    @property
    def words(self) -> str:
        return f"sliding, {self.steps} every {self.every}"

    def stretches(self, steps: int) -> list[tuple[int, int]]:
        """The window of the last block; those before it overlap."""
        return [(max(0, steps - self.steps), steps)]

    def cuts(self, steps: int) -> Cuts:
        """Whole blocks of losses; what is left over is not read."""
        return Cuts(list(range(0, steps + 1, self.every)))

    def reading(self) -> tuple[int, int]:
        return self.every, self.steps - self.every


# ---------------------------------------------------------------------- by name


class Named(NamedTuple):
    """A carry as `Reading` and the command line know it."""

    make: Callable[[int, int], Carry]
    """The carry for segments of `window` steps and `history` steps read again before them."""
    suggests: Callable[[int], dict[str, int]] = lambda window: {}
    """Options of a reading that it wants in other than their usual values, unless they are said."""
    whole: bool = False
    """Whether all of a lane is one segment, so that a pass over the text is one update."""


def _sliding(window: int, history: int) -> Carry:
    if history < 1:
        raise UserError(
            f"history={history} with carry=sliding: at least 1 step is read again before a window",
            hint=f"history={window}, or carry=truncated",
        )
    return Sliding(every=window, steps=window + history)


def _randomized(window: int, history: int) -> Carry:
    return Randomized(keep=1 - 1 / _mean_length(window), seed=0)


def _polynomial_mean(window: int, history: int) -> Carry:
    return Randomized.polynomial(mean=_mean_length(window), seed=0)


def _mean_length(window: int) -> int:
    if window < 2:
        raise UserError(
            f"window={window} would cut before every step",
            hint="window is the mean length of a segment here: at least 2",
        )
    return window


CARRIES: dict[str, Named] = {
    "truncated": Named(lambda window, history: Truncated(window)),
    "sliding": Named(_sliding, lambda window: {"history": window}),
    "randomized": Named(_randomized),
    "polynomial": Named(_polynomial_mean),
    "full": Named(lambda window, history: Full(), lambda window: {"memory": 64 << 20}, whole=True),
}
"""Every carry with a name. A seed is 0 here: a training draws from a seed of its own."""


def named(name: str, window: int, history: int = 0) -> Carry:
    """The carry of this name, for segments of `window` steps.

    >>> named("sliding", window=35, history=10)
    Sliding(every=35, steps=45)
    """
    if name not in CARRIES:
        raise UserError(f"unknown carry {name!r}", hint=f"one of {', '.join(CARRIES)}")
    return CARRIES[name].make(window, history)


def name_of(carry: Carry, window: int, history: int) -> str | None:
    """The name by which `CARRIES` makes this very carry, whatever its seed; None: it has none."""
    if carry.name not in CARRIES:
        return None
    same = CARRIES[carry.name].make(window, history).seeded(0) == carry.seeded(0)
    return carry.name if same else None
