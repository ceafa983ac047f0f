"""JANET: an lstm with nothing but its forget gate.

    s_t = a_xf + a_hf
    n_t = tanh(a_xn + a_hn)
    h_t = σ(s_t) ⊙ h_{t-1} + (1 - σ(s_t - 1)) ⊙ n_t

Van der Westhuizen and Lasenby (2018), "The unreasonable effectiveness of the forget gate", β = 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from elman.cells.described import Described


def janet(a_x: Sequence[Tensor], a_h: Sequence[Tensor], h: Tensor) -> Tensor:
    """One step of JANET."""
    s = a_x[0] + a_h[0]
    n = torch.tanh(a_x[1] + a_h[1])
    return torch.sigmoid(s) * h + (1 - torch.sigmoid(s - 1)) * n


JANET = Described(janet, gates=2)
