"""The gated recurrent unit, in PyTorch's variant (the reset gate acts after the product).

    r_t = σ(a_ir + a_hr)                 reset
    z_t = σ(a_iz + a_hz)                 update
    n_t = tanh(a_in + r_t ⊙ a_hn)        candidate
    h_t = (1 - z_t) ⊙ n_t + z_t ⊙ h_{t-1}

with (a_ir, a_iz, a_in) = x_t W_ihᵀ + b_ih and (a_hr, a_hz, a_hn) = h_{t-1} W_hhᵀ + b_hh.
Cho et al. (2014), "Learning phrase representations using RNN encoder-decoder".
"""

from typing import final

import torch
from torch import Tensor
from torch.nn.functional import linear

from elman.cells.base import Cell, Gradients, Slopes, State, Weights, pull_back, read


@final
class Gru(Cell):
    """Keeps (r, z, n, a_hn) of each step for the backward pass."""

    name = "gru"
    gates = 3
    keeps = 4
    openings = ("reset", "update")
    apart = (2,)
    torch_mode = "GRU"
    spares_weights = True
    kernels = frozenset({"cuda", "cudnn", "cpu", "fused"})

    def step(self, w: Weights, x: Tensor, state: State) -> tuple[State, Tensor]:
        (h,) = state
        a_i, a_h = read(w.W_ih, x, w.b_ih), linear(h, w.W_hh, w.b_hh)
        size = h.shape[-1]
        a_in, a_hn = a_i[..., 2 * size :], a_h[..., 2 * size :]
        rz = torch.sigmoid(a_i[..., : 2 * size] + a_h[..., : 2 * size])
        r, z = rz.chunk(2, -1)
        n = torch.tanh(a_in + r * a_hn)
        return (n + z * (h - n),), torch.cat([rz, n, a_hn], -1)

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
        """Carry dh_t one step back.

        da_n = dh_t ⊙ (1 - z) ⊙ (1 - n²)
        da_z = dh_t ⊙ (h_{t-1} - n) ⊙ z(1 - z)
        da_r = da_n ⊙ a_hn ⊙ r(1 - r)
        da_ih = (da_r, da_z, da_n),   da_hh = (da_r, da_z, da_n ⊙ r)
        dh_{t-1} = dh_t ⊙ z + da_hh W_hh
        """
        assert gates is not None
        (h,), (dh,) = state, dafter
        r, z, n, a_hn = gates.chunk(4, -1)
        da_n = dh * (1 - z) * (1 - n * n)
        da_z = dh * (h - n) * (z * (1 - z))
        da_r = da_n * a_hn * (r * (1 - r))
        da_ih = torch.cat([da_r, da_z, da_n], -1)
        da_hh = torch.cat([da_r, da_z, da_n * r], -1)
        pull_back(w, x, h, da_ih, da_hh, dw, dx)
        return (torch.addmm(dh * z, da_hh, w.W_hh),)

    def slopes(
        self, w: Weights, x: Tensor, state: State, after: State, gates: Tensor | None
    ) -> Slopes:
        """As in `step_backward`: of h_t by a_hr, a_hz and a_hn, and by h_{t-1} itself."""
        assert gates is not None
        r, z, n, a_hn = gates.chunk(4, -1)
        by_n, by_z = (1 - z) * (1 - n * n), (state[0] - n) * (z * (1 - z))
        a_h = torch.stack([by_n * a_hn * (r * (1 - r)), by_z, by_n * r], 1)
        return Slopes(a_h[:, None], z[:, None, None])


GRU = Gru()
