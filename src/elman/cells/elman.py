"""The Elman cell: a layer that reads its own previous output.

    a_t = x_t W_ihᵀ + b_ih + h_{t-1} W_hhᵀ + b_hh
    h_t = φ(a_t),   φ = tanh or relu

Elman (1990), "Finding structure in time".
"""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import linear

from elman.cells.base import Cell, Gradients, Slopes, State, Weights, pull_back, read


@final
class Elman(Cell):
    """φ, and φ'(a) written in terms of h = φ(a), which is all that need be kept."""

    kernels = frozenset({"cuda", "cudnn", "cpu", "fused"})
    spares_weights = True

    def __init__(
        self,
        name: str,
        torch_mode: str,
        phi: Callable[[Tensor], Tensor],
        slope: Callable[[Tensor], Tensor],
        public_name: str | None = None,
    ) -> None:
        self.name, self.torch_mode, self.public_name = name, torch_mode, public_name
        self.phi, self.slope = phi, slope

    def step(self, w: Weights, x: Tensor, state: State) -> tuple[State, None]:
        (h,) = state
        return (self.phi(read(w.W_ih, x, w.b_ih) + linear(h, w.W_hh, w.b_hh)),), None

    def step_backward(
        self,
        w: Weights,
        x: Tensor,
        state: State,
        after: State,
        gates: Tensor | None,
        dafter: State,
        dw: Gradients | None,
        dx: Tensor | None,
    ) -> State:
        """Carry dh_t = ∂L/∂h_t one step back.

        da_t     = dh_t ⊙ φ'(a_t)            tanh: 1 - h_t²;  relu: 1 where h_t > 0
        dh_{t-1} = da_t W_hh
        dW_ih   += da_tᵀ x_t,   dW_hh += da_tᵀ h_{t-1},   db_ih, db_hh += Σ_batch da_t
        """
        da = dafter[0] * self.slope(after[0])
        pull_back(w, x, state[0], da, da, dw, dx)
        return (da @ w.W_hh,)

    def slopes(
        self, w: Weights, x: Tensor, state: State, after: State, gates: Tensor | None
    ) -> Slopes:
        """φ'(a_t), and nothing past a_t."""
        slope = self.slope(after[0])[:, None, None]
        return Slopes(slope, torch.zeros_like(slope))


TANH = Elman("tanh", "RNN_TANH", torch.tanh, lambda h: 1 - h * h, public_name="elman")
RELU = Elman("relu", "RNN_RELU", torch.relu, lambda h: (h > 0).to(h.dtype))
