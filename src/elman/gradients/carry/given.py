"""The gradient by weights that the caller has chosen."""

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from elman.errors import UserError
from elman.gradients.carry.base import Carry


@final
@dataclass(frozen=True)
class Given(Carry):
    """Exactly these ξ_1 … ξ_T, for a sequence of as many steps."""

    xi: tuple[float, ...]

    def weights(self, steps: int, rows: int = 1) -> Tensor:
        """ξ_1 … ξ_T, of shape (steps,)."""
        if steps != len(self.xi):
            raise UserError(
                f"{len(self.xi)} weights were given for a sequence of {steps} steps",
                hint="one for each step; a Carry of your own has as many as it is asked for",
            )
        return torch.tensor(self.xi, dtype=torch.float64, device="cpu")

    @property
    def words(self) -> str:
        return f"given, {len(self.xi)} weights"


@final
@dataclass(frozen=True, eq=False)
class InTensor(Carry):
    """The ξ_1 … ξ_T that a tensor holds when they are asked for: a CUDA graph reads them there."""

    xi: Tensor = field(repr=False)  # showing it would wait for the GPU

    def weights(self, steps: int, rows: int = 1) -> Tensor:
        """ξ_1 … ξ_T, of shape (steps,)."""
        assert len(self.xi) == steps
        return self.xi
