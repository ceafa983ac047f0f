"""The Elman cell: a layer that reads its own previous output.

    a_t = x_t W_ihᵀ + b_ih + h_{t-1} W_hhᵀ + b_hh
    h_t = φ(a_t),   φ = tanh or relu

Elman (1990), "Finding structure in time".
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import linear

from elman.cells import Gradients, State, Weights, add_batch, add_outer, read


@final
@dataclass(frozen=True)
class Elman:
    """φ, and φ'(a) written in terms of h = φ(a), which is all that need be kept."""

    phi: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    gates: int = 1
    keeps: int = 0

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
        dw: Gradients,
    ) -> tuple[Tensor, State]:
        """Carry dh_t = ∂L/∂h_t one step back.

        da_t     = dh_t ⊙ φ'(a_t)            tanh: 1 - h_t²;  relu: 1 where h_t > 0
        dh_{t-1} = da_t W_hh
        dW_ih   += da_tᵀ x_t,   dW_hh += da_tᵀ h_{t-1},   db_ih, db_hh += Σ_batch da_t
        """
        da = dafter[0] * self.slope(after[0])
        add_outer(dw.W_ih, da, x)
        add_outer(dw.W_hh, da, state[0])
        add_batch(dw.b_ih, da)
        add_batch(dw.b_hh, da)
        return da, (da @ w.W_hh,)


TANH = Elman(torch.tanh, lambda h: 1 - h * h)
RELU = Elman(torch.relu, lambda h: (h > 0).to(h.dtype))
