"""The gradient of every loss through a window of its own, which slides along."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from elman.errors import UserError
from elman.gradients.carry.base import Block, Carry, Cuts, check_count
from elman.options import hold_numbers


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
        check_count("every", self.every, "every=1 carries each loss back by itself")
        check_count("steps", self.steps, "steps=every is Truncated(window=every)")
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
