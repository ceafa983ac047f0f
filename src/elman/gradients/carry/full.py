"""The whole gradient."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from elman.gradients.carry.base import Carry, Cuts


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
