"""The lstm whose gates see its memory, each unit its own, by weights p of one number to a unit.

    i_t = σ(a_xi + a_hi + p_i ⊙ c_{t-1}),   f_t = σ(a_xf + a_hf + p_f ⊙ c_{t-1})
    c_t = f_t ⊙ c_{t-1} + i_t ⊙ tanh(a_xg + a_hg)
    o_t = σ(a_xo + a_ho + p_o ⊙ c_t),       h_t = o_t ⊙ tanh(c_t)

Gers and Schmidhuber (2000), "Recurrent nets that time and count".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from elman.cells.described import Described


def peephole(
    a_x: Sequence[Tensor],
    a_h: Sequence[Tensor],
    h: Tensor,
    c: Tensor,
    p_i: Tensor,
    p_f: Tensor,
    p_o: Tensor,
) -> tuple[Tensor, Tensor]:
    """One step of the lstm with peepholes."""
    i = torch.sigmoid(a_x[0] + a_h[0] + p_i * c)
    f = torch.sigmoid(a_x[1] + a_h[1] + p_f * c)
    c = f * c + i * torch.tanh(a_x[2] + a_h[2])
    return torch.sigmoid(a_x[3] + a_h[3] + p_o * c) * torch.tanh(c), c


PEEPHOLE = Described(peephole, gates=4, states=2, parameters=("p_i", "p_f", "p_o"))
