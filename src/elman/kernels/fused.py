"""The fused kernel: on a GPU, one step at a time with torch's own fused cells.

For what the CUDA kernel refuses there: layers too large for a cluster of SMs, float64, older GPUs.
A step is one matrix product and one pointwise kernel each way; everything that need not wait for
the step before is a single product over all steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from elman.cells import Cell, Gradients, State, Weights
from elman.cells.elman import RELU, TANH
from elman.cells.gru import GRU
from elman.cells.linear import LINEAR
from elman.cells.lstm import LSTM
from elman.gradients.through_time import backward_by, forward_by
from elman.kernels import products
from elman.kernels.contract import Piece, Pull, Trace

KEPT = {"gru": 5, "lstm": 4}  # blocks that torch's cells want back
aten = torch.ops.aten


@final
class Fused:
    """torch's fused cells, step by step, on CUDA."""

    name = "fused"

    def refuses(self, piece: Piece) -> str | None:
        cell, w, xs, *_ = piece
        if self.name not in cell.kernels:
            return f"it has no {cell.name} cell"
        if not xs.is_cuda:
            return f"the tensors are on {xs.device.type}, not on a CUDA GPU"
        if w.W_hr is not None:
            return "it does not project (proj_size)"
        if xs.is_floating_point() and xs.dtype != w.W_hh.dtype:
            return f"inputs are {xs.dtype} but weights {w.W_hh.dtype}"
        return "there is nothing to run" if 0 in xs.shape[:2] else None

    def empty_gates(self, piece: Piece) -> Tensor | None:
        width = KEPT.get(piece.cell.name, 0) * piece.w.hidden_size
        return piece.state[0].new_empty(*piece.xs.shape[:2], width) if width else None

    def forward(self, piece: Piece, needs_gates: bool = True) -> Trace:
        piece.check()
        _, _, xs, state, lengths, _ = piece
        gates = self.empty_gates(piece) if needs_gates else None
        return forward_by(steps_of(piece), len(xs), state, lengths, gates)

    def backward(
        self, piece: Piece, trace: Trace, pull: Pull
    ) -> tuple[Tensor | None, Gradients, State]:
        piece.check()
        pull.check(piece, trace, KEPT.get(piece.cell.name, 0) * piece.w.hidden_size)
        cell, w, xs, _, lengths, _ = piece
        dhs, dstate, xi, needs_dxs, into = pull
        das_ih = trace.hs.new_empty(*xs.shape[:2], len(w.W_hh))
        das_hh = torch.empty_like(das_ih) if cell.apart else das_ih
        if xi is not None and xi.dim() == 1:
            xi = xi[:, None].expand(xs.shape[:2])  # one for each row: asking a GPU for one waits

        def step_back(t: int, after: State) -> State:
            das_ih[t], das_hh[t], before = _step_back(cell, w.W_hh, trace, t, after)
            return before

        dstate = backward_by(step_back, len(xs), dhs, dstate, xi, lengths)
        gradients = products.weight_pulls(w, xs, trace.hs[:-1], das_ih, [das_hh])
        dxs = das_ih @ w.W_ih if needs_dxs and xs.is_floating_point() else None
        return dxs, products.add(into, gradients), dstate


def steps_of(piece: Piece) -> Callable[[int, State], tuple[State, Tensor | None]]:
    """The step at t from the state before it; autograd sees it, and may do so twice."""
    cell, w, xs, *_ = piece
    shares, ids = products.input_share(cell, w, xs)
    W, b_hh = w.W_hh.T, _hidden_bias(cell, w)

    def step(t: int, before: State) -> tuple[State, Tensor | None]:
        share = shares[t] if ids is None else shares[ids[t]]
        return _step(cell, W, b_hh, share, before)

    return step


def _hidden_bias(cell: Cell, w: Weights) -> Tensor | None:
    """What is added to h W_hhᵀ: of a gru, b_hh of the n gate; all else is in the input's share."""
    if not cell.apart or w.b_hh is None:
        return None
    bias = w.b_hh.clone()
    bias[: (cell.gates - len(cell.apart)) * w.hidden_size] = 0
    return bias


def _step(
    cell: Cell, W: Tensor, b_hh: Tensor | None, share: Tensor, state: State
) -> tuple[State, Tensor | None]:
    """The state after one step, and what torch's cell wants back; W is W_hhᵀ."""
    h = state[0]
    if cell is LSTM:
        h, c, kept = aten._thnn_fused_lstm_cell(share, h @ W, state[1])
        return (h, c), kept
    if cell is GRU:
        gates = h @ W if b_hh is None else torch.addmm(b_hh, h, W)
        h, kept = aten._thnn_fused_gru_cell(share, gates, h.contiguous())
        return (h,), kept
    a = torch.addmm(share, h, W)
    return (a if cell is LINEAR else a.tanh() if cell is TANH else a.relu(),), None


def _step_back(
    cell: Cell, W_hh: Tensor, trace: Trace, t: int, pull: State
) -> tuple[Tensor, Tensor, State]:
    """da as W_ih and as W_hh meet it, and the pull on the state before."""
    dh = pull[0].contiguous()
    if cell is LSTM:
        assert trace.cs is not None
        assert trace.gates is not None
        da, dc, _ = aten._thnn_fused_lstm_cell_backward_impl(
            dh, pull[1].contiguous(), trace.cs[t], trace.cs[t + 1], trace.gates[t], False
        )
        return da, da, (da @ W_hh, dc)
    if cell is GRU:
        assert trace.gates is not None
        da_ih, da_hh, direct, _, _ = aten._thnn_fused_gru_cell_backward(dh, trace.gates[t], False)
        return da_ih, da_hh, (torch.addmm(direct, da_hh, W_hh),)
    h = trace.hs[t + 1]
    if cell is TANH:
        dh = aten.tanh_backward(dh, h)
    elif cell is RELU:
        dh = aten.threshold_backward(dh, h, 0)
    return dh, dh, (dh @ W_hh,)


KERNEL = Fused()
