"""The update-gate recurrent network: a plain network that may leave its state as it is.

    g_t = σ(a_xg + a_hg)
    n_t = tanh(a_xn + a_hn)
    h_t = g_t ⊙ h_{t-1} + (1 - g_t) ⊙ n_t

Collins, Sohl-Dickstein and Sussillo (2017), "Capacity and trainability in recurrent neural
networks".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from elman.cells.described import Described


def ugrnn(a_x: Sequence[Tensor], a_h: Sequence[Tensor], h: Tensor) -> Tensor:
    """One step of the update-gate network."""
    g = torch.sigmoid(a_x[0] + a_h[0])
    n = torch.tanh(a_x[1] + a_h[1])
    return n + g * (h - n)


UGRNN = Described(ugrnn, gates=2)
