"""xLSTM's sLSTM: exponential gates, kept within the numbers by a running maximum, in four heads.

    ĩ_t, f̃_t, z̃_t, õ_t = a_x + a_h of their gates
    m_t = max(log σ(f̃_t) + m_{t-1}, ĩ_t)
    i_t = exp(ĩ_t - m_t),   f_t = exp(log σ(f̃_t) + m_{t-1} - m_t)
    c_t = f_t ⊙ c_{t-1} + i_t ⊙ tanh(z̃_t),   n_t = f_t ⊙ n_{t-1} + i_t
    h_t = σ(õ_t) ⊙ c_t / max(n_t, 1)

W_hh reads, in each of four heads, that head's units alone. Every state is 0 before the first step.
Beck et al. (2024), "xLSTM: extended long short-term memory".
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from elman.cells.described import Described


def slstm(
    a_x: Sequence[Tensor], a_h: Sequence[Tensor], h: Tensor, c: Tensor, n: Tensor, m: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One step of the sLSTM."""
    kept, added = logsigmoid(a_x[1] + a_h[1]) + m, a_x[0] + a_h[0]
    m = torch.maximum(kept, added)
    f, i = torch.exp(kept - m), torch.exp(added - m)
    c = f * c + i * torch.tanh(a_x[2] + a_h[2])
    n = f * n + i
    return torch.sigmoid(a_x[3] + a_h[3]) * c / torch.clamp(n, min=1), c, n, m


SLSTM = Described(slstm, gates=4, states=4, heads=4)
