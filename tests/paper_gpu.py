"""A GPU on paper: the two CUDA kernels' arguments and results, computed by the reference cells.

It stands in for the driver, so that everything around the launches (the input's share, tables,
gradients of weights, which array goes where) is tested where there is no GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from elman import cells
from elman.cells import Weights
from elman.gradients import through_time
from elman.gradients.through_time import Trace
from elman.kernels import cuda
from elman.kernels.cuda.plan import Machine, Plan

MACHINE = Machine({1: 132, 2: 66, 4: 30, 8: 15, 16: 7}, 232448)


@contextlib.contextmanager
def present() -> Iterator[None]:
    """Let CPU tensors of any dtype pass for jobs of the CUDA kernel."""
    with (
        mock.patch.object(cuda, "machine", return_value=MACHINE),
        mock.patch.object(cuda, "_launch", launch),
        mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()),
    ):
        yield


def launch(plan: Plan | None, batch: int, W_hh: Tensor, *rest: Any) -> None:
    assert plan is not None
    assert all(x.is_contiguous() for x in (W_hh, *rest) if isinstance(x, Tensor) and x.dim() > 1)
    (_forward if plan.forward else _backward)(plan.cell, W_hh, *rest)


def _identity(cell: str, W_hh: Tensor, b_n: Tensor | None) -> Weights:
    """A layer whose inputs are the gates' input shares themselves."""
    rows = len(W_hh)
    b_hh = W_hh.new_zeros(rows)
    if b_n is not None:
        b_hh[2 * W_hh.shape[1] :] = b_n
    return Weights(torch.eye(rows, dtype=W_hh.dtype), W_hh, W_hh.new_zeros(rows), b_hh)


def _forward(cell, W_hh, xs, ids, b_n, lengths, hs, cs, gates, steps, batch) -> None:
    shares = xs[ids] if ids is not None else xs
    assert shares.shape == (steps, batch, len(W_hh))
    state = (hs[0].clone(),) if cs is None else (hs[0].clone(), cs[0].clone())
    w = _identity(cell, W_hh, b_n)
    room = cells.named(cell).keeps * W_hh.shape[1]
    kept = hs.new_empty(steps, batch, room) if room else None
    trace = through_time.forward(cells.named(cell), w, shares, state, lengths, kept)
    hs.copy_(trace.hs)
    if cs is not None:
        cs.copy_(trace.cs)
    if gates is not None:
        _KEPT[gates.data_ptr()] = w, shares, kept


_KEPT: dict[int, tuple[Weights, Tensor, Any]] = {}


def _backward(cell, W_hh, hs, cs, gates, dhs, dh, dc, xi, xi_step, xi_row, lengths, *out) -> None:
    das, dh_first, dc_first, steps, batch = out
    bare = (_identity(cell, W_hh, None), hs.new_zeros(steps, batch, len(W_hh)), hs)
    w, shares, kept = bare if gates is None else _KEPT[gates.data_ptr()]
    if xi is not None:
        xi = torch.as_strided(xi, (steps, batch), (xi_step, xi_row))
    dxs = torch.empty_like(shares)
    dw = w.map(torch.zeros_like)
    assert all(d is None or d.dtype == torch.float32 for d in (dh, dc, dh_first, dc_first))
    dstate = tuple(d.to(hs) for d in (dh, dc) if d is not None)
    first = through_time.backward(
        cells.named(cell),
        w,
        shares,
        Trace(hs, cs, None if gates is None else kept),
        dhs,
        dstate,
        xi,
        lengths,
        dxs,
        dw,
    )
    dh_first.copy_(first[0])
    if dc_first is not None:
        dc_first.copy_(first[1])
    if cell == "gru":  # dr dz dn, and du = r dn
        hidden = W_hh.shape[1]
        r = kept[..., :hidden]
        dxs = torch.cat([dxs, r * dxs[..., 2 * hidden :]], -1)
    das.copy_(dxs)
