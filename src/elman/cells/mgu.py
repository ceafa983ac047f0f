"""The minimal gated unit: one gate that both forgets and resets.

    f_t = σ(a_xf + a_hf)
    n_t = tanh(a_xn + f_t ⊙ a_hn)
    h_t = (1 - f_t) ⊙ h_{t-1} + f_t ⊙ n_t

Zhou, Wu, Zhang and Zhou (2016), "Minimal gated unit for recurrent neural networks", with the gate
after the product, as PyTorch's gru has it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from elman.cells.described import Described


def mgu(a_x: Sequence[Tensor], a_h: Sequence[Tensor], h: Tensor) -> Tensor:
    """One step of the minimal gated unit."""
    f = torch.sigmoid(a_x[0] + a_h[0])
    n = torch.tanh(a_x[1] + f * a_h[1])
    return h + f * (n - h)


MGU = Described(mgu, gates=2)
