"""The linear cell: the recurrence with no nonlinearity, on which the notes' equations are exact.

h_t = x_t W_ihᵀ + b_ih + h_{t-1} W_hhᵀ + b_hh
"""

from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.nn.functional import linear

from elman.cells import Gradients, State, Weights, add_batch, add_outer, read


@final
@dataclass(frozen=True)
class Linear:
    """h_t is the pre-activation itself."""

    gates: int = 1
    keeps: int = 0

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
        dw: Gradients,
    ) -> tuple[Tensor, State]:
        """Carry dh_t one step back: da_t = dh_t and dh_{t-1} = dh_t W_hh.

        dW_ih += dh_tᵀ x_t,   dW_hh += dh_tᵀ h_{t-1},   db_ih, db_hh += Σ_batch dh_t
        """
        (dh,) = dafter
        add_outer(dw.W_ih, dh, x)
        add_outer(dw.W_hh, dh, state[0])
        add_batch(dw.b_ih, dh)
        add_batch(dw.b_hh, dh)
        return dh, (dh @ w.W_hh,)


LINEAR = Linear()
