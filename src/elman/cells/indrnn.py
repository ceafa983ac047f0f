"""The independently recurrent network: a unit reads its own past alone, through one number.

    h_t = relu(x_t W_ihᵀ + b + u ⊙ h_{t-1}),        W_hh = diag(u)

Units meet in the next layer only. A unit's gradient through time is a power of u, which starts
uniform in [0, 1). Li et al. (2018), "Independently recurrent neural network (IndRNN): building a
longer and deeper RNN".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from elman.cells.described import Described


def indrnn(a_x: Sequence[Tensor], a_h: Sequence[Tensor], h: Tensor) -> Tensor:
    """One step of the independently recurrent network."""
    return torch.relu(a_x[0] + a_h[0])


INDRNN = Described(indrnn, heads=0)
