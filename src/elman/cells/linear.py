"""The linear cell: the recurrence with no nonlinearity, on which the notes' equations are exact.

h_t = x_t W_ihᵀ + b_ih + h_{t-1} W_hhᵀ + b_hh
"""

from typing import final

import torch
from torch import Tensor
from torch.nn.functional import linear

from elman.cells.base import Cell, Gradients, Slopes, State, Weights, pull_back, read


@final
class Linear(Cell):
    """h_t is the pre-activation itself; to `torch.nn` its parameters are those of a tanh layer."""

    name = "linear"
    torch_mode = "RNN_TANH"
    spares_weights = True
    kernels = frozenset({"cuda", "cpu", "fused"})

    def step(self, w: Weights, x: Tensor, state: State) -> tuple[State, None]:
        (h,) = state
        return (read(w.W_ih, x, w.b_ih) + linear(h, w.W_hh, w.b_hh),), None

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
        """Carry dh_t one step back: da_t = dh_t and dh_{t-1} = dh_t W_hh.

        dW_ih += dh_tᵀ x_t,   dW_hh += dh_tᵀ h_{t-1},   db_ih, db_hh += Σ_batch dh_t
        """
        (dh,) = dafter
        pull_back(w, x, state[0], dh, dh, dw, dx)
        return (dh @ w.W_hh,)

    def slopes(
        self, w: Weights, x: Tensor, state: State, after: State, gates: Tensor | None
    ) -> Slopes:
        """1 by a_t."""
        one = torch.ones_like(after[0])[:, None, None]
        return Slopes(one, torch.zeros_like(one))


LINEAR = Linear()
