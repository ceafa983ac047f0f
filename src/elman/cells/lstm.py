"""The long short-term memory, with PyTorch's optional projection of the output.

    i_t = σ(a_i)    input          g_t = tanh(a_g)    candidate
    f_t = σ(a_f)    forget         o_t = σ(a_o)       output
    c_t = f_t ⊙ c_{t-1} + i_t ⊙ g_t
    m_t = o_t ⊙ tanh(c_t)
    h_t = m_t,  or  m_t W_hrᵀ  with a projection

with (a_i, a_f, a_g, a_o) = x_t W_ihᵀ + b_ih + h_{t-1} W_hhᵀ + b_hh.
Hochreiter and Schmidhuber (1997), "Long short-term memory"; forget gate: Gers et al. (2000);
projection: Sak et al. (2014).
"""

from typing import final

import torch
from torch import Tensor
from torch.nn.functional import linear

from elman.cells.base import Cell, Gradients, Slopes, State, Weights, add_outer, pull_back, read


@final
class Lstm(Cell):
    """Keeps (i, f, g, o) of each step for the backward pass."""

    name = "lstm"
    gates = 4
    states = ("h", "c")
    keeps = 4
    openings = ("input", "forget", "", "output")
    torch_mode = "LSTM"
    spares_weights = True
    kernels = frozenset({"cuda", "cudnn", "cpu", "fused"})

    def step(self, w: Weights, x: Tensor, state: State) -> tuple[State, Tensor]:
        h, c = state
        a = read(w.W_ih, x, w.b_ih) + linear(h, w.W_hh, w.b_hh)
        size = c.shape[-1]
        i_f = torch.sigmoid(a[..., : 2 * size])
        g = torch.tanh(a[..., 2 * size : 3 * size])
        o = torch.sigmoid(a[..., 3 * size :])
        i, f = i_f.chunk(2, -1)
        c = f * c + i * g
        m = o * torch.tanh(c)
        h = m if w.W_hr is None else linear(m, w.W_hr)
        return (h, c), torch.cat([i_f, g, o], -1)

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
        """Carry (dh_t, dc_t) one step back.

        dm   = dh_t,  or  dh_t W_hr,   dW_hr += dh_tᵀ m_t
        dc   = dc_t + dm ⊙ o ⊙ (1 - tanh²(c_t))
        da_i = dc ⊙ g ⊙ i(1 - i),          da_f = dc ⊙ c_{t-1} ⊙ f(1 - f)
        da_g = dc ⊙ i ⊙ (1 - g²),          da_o = dm ⊙ tanh(c_t) ⊙ o(1 - o)
        dh_{t-1} = da W_hh,                dc_{t-1} = dc ⊙ f
        """
        assert gates is not None
        (h, c), (dh, dc) = state, dafter
        i, f, g, o = gates.chunk(4, -1)
        tanh_c = torch.tanh(after[1])
        dm = dh
        if w.W_hr is not None:
            dm = dh @ w.W_hr
            if dw is not None and dw.W_hr is not None:
                add_outer(dw.W_hr, dh, o * tanh_c)
        dc = dc + dm * o * (1 - tanh_c * tanh_c)
        da_i = dc * g * (i * (1 - i))
        da_f = dc * c * (f * (1 - f))
        da_g = dc * i * (1 - g * g)
        da_o = dm * tanh_c * (o * (1 - o))
        da = torch.cat([da_i, da_f, da_g, da_o], -1)
        pull_back(w, x, h, da, da, dw, dx)
        return (da @ w.W_hh, dc * f)

    def slopes(
        self, w: Weights, x: Tensor, state: State, after: State, gates: Tensor | None
    ) -> Slopes | None:
        """As in `step_backward`: of c_t, and of h_t through it; a projection mixes the units."""
        if w.W_hr is not None:
            return None
        assert gates is not None
        i, f, g, o = gates.chunk(4, -1)
        tanh_c, none = torch.tanh(after[1]), torch.zeros_like(f)
        by_c = o * (1 - tanh_c * tanh_c)  # of h_t
        c = [g * (i * (1 - i)), state[1] * (f * (1 - f)), i * (1 - g * g), none]
        h = [*(by_c * slope for slope in c[:3]), tanh_c * (o * (1 - o))]
        before = [none, by_c * f, none, f]  # h by h and c, then c by them
        a_h = torch.stack([*h, *c], 1).unflatten(1, (2, 4))
        return Slopes(a_h, torch.stack(before, 1).unflatten(1, (2, 2)))


LSTM = Lstm()
