"""The lstm whose input gate is what its forget gate leaves: forget = 1 - input.

    i_t, o_t = σ(a_x + a_h) of their gates,   g_t = tanh(a_xg + a_hg)
    c_t = (1 - i_t) ⊙ c_{t-1} + i_t ⊙ g_t
    h_t = o_t ⊙ tanh(c_t)

Greff et al. (2017), "LSTM: a search space odyssey", variant CIFG.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from elman.cells.described import Described


def coupled(
    a_x: Sequence[Tensor], a_h: Sequence[Tensor], h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of the lstm with coupled gates."""
    i, o = torch.sigmoid(a_x[0] + a_h[0]), torch.sigmoid(a_x[2] + a_h[2])
    g = torch.tanh(a_x[1] + a_h[1])
    c = c + i * (g - c)
    return o * torch.tanh(c), c


COUPLED = Described(coupled, gates=3, states=2)
