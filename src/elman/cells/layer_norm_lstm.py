"""The lstm whose shares of input and state are each brought to mean 0 and variance 1.

    a_t = n(x_t W_ihᵀ) ⊙ γ_x + n(h_{t-1} W_hhᵀ) ⊙ γ_h + b_ih + b_hh       n(a) = (a - mean a)/σ(a)
    i_t, f_t, o_t = σ of their blocks of a_t,   g_t = tanh of its
    c_t = f_t ⊙ c_{t-1} + i_t ⊙ g_t
    h_t = o_t ⊙ tanh(n(c_t) ⊙ γ_c + β_c)

Mean and σ are those over all gates and units of a row (of c: over its units). That is a sum over
units, which the pointwise kernels do not have: the equations are code, and run a step at a time.
Ba, Kiros and Hinton (2016), "Layer normalization".
"""

from types import MappingProxyType
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from elman.cells.base import Cell, State, Weights, read

GATES = ("i", "f", "g", "o")


@final
class LayerNormLstm(Cell):
    """γ_x and γ_h of each gate, γ_c and β_c are its own numbers; its derivative is autograd's."""

    name = "layer_norm_lstm"
    gates = 4
    states = ("h", "c")
    parameters = MappingProxyType(
        {f"gain_{side}_{gate}": 1.0 for side in "xh" for gate in GATES}
        | {"gain_c": 1.0, "shift_c": 0.0}
    )

    def step(self, w: Weights, x: Tensor, state: State) -> tuple[State, None]:
        h, c = state
        assert w.own is not None
        gain_x, gain_h = w.own[:4].flatten(), w.own[4:8].flatten()
        a = _normal(read(w.W_ih, x, None), gain_x) + _normal(linear(h, w.W_hh), gain_h)
        a = a + w.b_ih + w.b_hh if w.b_ih is not None and w.b_hh is not None else a
        i, f, g, o = a.chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return (torch.sigmoid(o) * torch.tanh(_normal(c, w.own[8]) + w.own[9]), c), None


def _normal(a: Tensor, gain: Tensor) -> Tensor:
    return layer_norm(a, gain.shape, gain)


LAYER_NORM_LSTM = LayerNormLstm()
