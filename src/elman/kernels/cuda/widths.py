"""A layer whose rows are no whole 16 bytes, run as one that is a few units wider.

Groups of SMs that meet in device memory copy 16 bytes at a time. So 1135 units of half precision,
which no cluster holds, run as 1136, and so do layers that run sooner so. A unit that is not the
layer's own has no weights, reads nothing, and stays 0; what is wider for it is cut off again, for a
copy of h and c each way.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import pad

from elman.cells import Cell, Gradients, State, Weights
from elman.gradients.through_time import Trace
from elman.kernels.contract import Piece, Pull

ROW_BYTES = 16
STAY_ZERO = ("tanh", "gru", "lstm")
"""Cells of which a unit without weights stays 0 whatever other units are: they are bounded."""


def rounded(cell: Cell, size: int, element: int) -> int:
    """Units of the wider layer: as many as there are, where no more are needed or can be added."""
    per_row = ROW_BYTES // element
    return -(-size // per_row) * per_row if cell.name in STAY_ZERO else size


def widened(cell: Cell, w: Weights, size: int) -> Weights:
    """The weights of a layer of `size` units; W_ih reads what it did."""
    more = size - w.hidden_size
    w = _of_rows(cell, w, lambda gates: pad(gates, (0, 0, 0, more)))
    return w._replace(W_hh=pad(w.W_hh, (0, more)))


def widened_piece(piece: Piece, size: int) -> Piece:
    """The piece with `size` units."""
    return piece._replace(w=widened(piece.cell, piece.w, size), state=_wide(piece.state, size))


def widened_trace(trace: Trace, size: int) -> Trace:
    """What `narrowed_trace` has cut off, put back."""
    hs, *cs = _wide((trace.hs,) if trace.cs is None else (trace.hs, trace.cs), size)
    return Trace(hs, cs[0] if cs else None, trace.gates)


def narrowed_trace(trace: Trace, size: int) -> Trace:
    """h and c of the layer's own units; what only the kernel reads stays as it is."""
    cs = None if trace.cs is None else trace.cs[..., :size].contiguous()
    return Trace(trace.hs[..., :size].contiguous(), cs, trace.gates)


def widened_pull(pull: Pull, size: int) -> Pull:
    """The pull on `size` units: none on those that are not the layer's own. Nothing is added to."""
    dhs = None if pull.dhs is None else _wide((pull.dhs,), size)[0]
    return pull._replace(dhs=dhs, dstate=_wide(pull.dstate, size), into=None)


def narrowed(cell: Cell, w: Gradients, size: int) -> Gradients:
    """The gradients of the layer's own weights."""
    w = w._replace(W_hh=w.W_hh[:, :size])
    return _of_rows(cell, w, lambda gates: gates[:, :size])


def _of_rows(cell: Cell, w: Weights, change: Callable[[Tensor], Tensor]) -> Weights:
    """Every tensor with `change` of its rows as (gates, hidden, …)."""

    def one(p: Tensor) -> Tensor:
        columns = p[:, None] if p.dim() == 1 else p
        changed = change(columns.unflatten(0, (cell.gates, -1))).flatten(0, 1)
        return changed[:, 0] if p.dim() == 1 else changed

    return w.map(one)


def _wide(tensors: State, size: int) -> State:
    return tuple(pad(t, (0, size - t.shape[-1])) for t in tensors)
