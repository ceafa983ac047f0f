"""The gradient inside windows of one length."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from elman.gradients.carry.base import Carry, Cuts, check_count
from elman.options import hold_numbers


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
        check_count("window", self.window, "Full() never truncates")

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
