"""What a carry is: the questions that modules, trainings, tables and figures ask about one."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from elman.errors import UserError


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

        >>> from elman.gradients import Truncated
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


def check_count(name: str, value: object, hint: str) -> None:
    """Refuse a number of steps that is not a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name}={value!r} must be a whole number of at least 1", hint=hint)
