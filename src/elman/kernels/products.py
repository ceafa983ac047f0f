"""What lies outside the loop over time, in single products over all steps and rows.

Before it, the input's share of every gate; after it, from da_t, the gradient of every gate's
pre-activation, the gradients of weights and biases. Used by the kernels whose loop leaves them out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elman.cells import Cell, Gradients, Weights

HALF = (torch.float16, torch.bfloat16)
ONE_HOT_LIMIT = 1024  # tokens; beyond it, one-hot rows cost more than sorting


def input_share(cell: Cell, w: Weights, xs: Tensor) -> tuple[Tensor, Tensor | None]:
    """x_t W_ihᵀ + b for all t, None; or, for ids, the table of W_ih's columns, and the ids.

    b is b_ih + b_hh, except that a gru's n gate adds its b_hh inside the product with r.
    """
    bias = w.b_ih
    if w.b_ih is not None and w.b_hh is not None:
        bias = w.b_ih + w.b_hh
        for gate in cell.apart:
            rows = slice(gate * w.hidden_size, (gate + 1) * w.hidden_size)
            bias[rows] = w.b_ih[rows]
    if xs.is_floating_point():
        return torch.nn.functional.linear(xs, w.W_ih, bias).contiguous(), None
    if xs.numel() < w.W_ih.shape[1]:
        return looked_up(w.W_ih, bias, xs.long()), None
    return _table(w.W_ih, bias), xs.to(torch.int64).contiguous()


def looked_up(W_ih: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    """x_t W_ihᵀ + b of ids, the same numbers as in the table: one row for each."""
    if ids.numel() >= W_ih.shape[1]:
        return torch.nn.functional.embedding(ids, _table(W_ih, bias))
    shares = W_ih.T[ids]  # fewer rows than the table would have
    return (shares if bias is None else shares + bias).contiguous()


def _table(W_ih: Tensor, bias: Tensor | None) -> Tensor:
    """W_ihᵀ + b, in one piece."""
    if bias is None or torch.is_grad_enabled():  # which `out` would hide from autograd
        return (W_ih.T if bias is None else W_ih.T + bias).contiguous()
    return torch.add(W_ih.T, bias, out=W_ih.new_empty(W_ih.T.shape))


def weight_pulls(
    w: Weights,
    xs: Tensor,
    hs: Tensor,
    das_ih: Tensor,
    das_hh: list[Tensor],
    read: tuple[Tensor, Tensor] | None = None,
    totals: tuple[Tensor, Tensor] | None = None,
) -> Gradients:
    """dW_ih = Σ_t da_tᵀ x_t, dW_hh = Σ_t da_tᵀ h_{t-1}, db = Σ_t da_t; hs is h_0 … h_{T-1}.

    `das_hh` is da as W_hh meets it, in blocks of its rows: not `das_ih` for a gru's n gate. Half
    precision is summed, and returned, in float32. `read` is dW_ih and db_ih, and `totals` are db_ih
    and db_hh, where known already.
    """
    dW_ih = _outer(das_ih, xs, w.W_ih.shape[1]) if read is None else read[0]
    dW_hh = _rows([_product(block, hs) for block in das_hh])
    if w.b_ih is None:
        return Gradients(dW_ih, dW_hh)
    if totals is not None:
        return Gradients(dW_ih, dW_hh, *totals)
    db_ih = _total(das_ih) if read is None else read[1]
    same = das_hh[0] is das_ih
    db_hh = db_ih.clone() if same else _rows([_total(block) for block in das_hh])
    return Gradients(dW_ih, dW_hh, db_ih, db_hh)


def totals(cell: Cell, da_rows: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """db_ih and db_hh from da summed over time, row by row, where a loop has done that."""
    if da_rows is None:
        return None
    ih, hh = shares(cell, da_rows.sum(0))
    return ih.clone(), _rows(hh).clone()


def shares(cell: Cell, das: Tensor) -> tuple[Tensor, list[Tensor]]:
    """da as W_ih and as W_hh meet it (the latter in pieces): different for gates `apart` alone.

    A gru keeps (dr, dz, dn, du): W_ih's rows are pulled by dr dz dn, W_hh's by dr dz du.
    """
    if not cell.apart:
        return das, [das]
    hidden = das.shape[-1] // (cell.gates + len(cell.apart))
    pieces = [das[..., i * hidden : j * hidden] for i, j in _runs(hidden_blocks(cell))]
    return das[..., : cell.gates * hidden], pieces


def hidden_blocks(cell: Cell) -> list[int]:
    """Of each gate, which block of da W_hh meets: those of gates `apart` come after all others."""
    after = {gate: cell.gates + i for i, gate in enumerate(cell.apart)}
    return [after.get(gate, gate) for gate in range(cell.gates)]


def _runs(blocks: list[int]) -> list[tuple[int, int]]:
    """Blocks that follow one another, as (first, one after the last)."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs


def _rows(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def add(into: Gradients | None, gradients: Gradients) -> Gradients:
    """`gradients`, or `into` with `gradients` added in place."""
    if into is None:
        return gradients
    for total, more in zip(into, gradients, strict=True):
        if total is not None and more is not None:
            total.add_(more)
    return into


def _product(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b over all steps and rows."""
    a, b = _flat(a), _flat(b)
    if a.is_cuda and a.dtype in HALF:
        return torch.mm(a.T, b, out_dtype=torch.float32)
    return a.T @ b


def _total(das: Tensor) -> Tensor:
    return _flat(das).sum(0, dtype=torch.float32 if das.dtype in HALF else None)


def _flat(x: Tensor) -> Tensor:
    """Steps and rows as one."""
    return x if x.dim() == 2 else x.flatten(0, 1)


def _outer(das: Tensor, xs: Tensor, inputs: int) -> Tensor:
    """Σ_t da_tᵀ x_t; ids are one-hot rows."""
    if xs.is_floating_point():
        return _product(das, xs)
    if inputs <= ONE_HOT_LIMIT:
        return _product(das, torch.nn.functional.one_hot(xs.long(), inputs).to(das.dtype))
    rows, ids = das.flatten(0, 1), xs.long().flatten()
    rows = rows.float() if rows.dtype in HALF else rows
    return torch.ops.aten.embedding_dense_backward(rows, ids, inputs, -1, False).T
