"""A GPU on paper: the two CUDA kernels' arguments and results, computed by the reference cells.

It stands in for the driver, so that everything around the launches (the input's share, tables,
gradients of weights, which array goes where) is tested where there is no GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from elman.kernels.cuda import calls
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


@contextlib.contextmanager
def launches_prepared() -> Iterator[None]:
    """The same for calls that hand over addresses (`kernels.cuda.calls`)."""
    with (
        present(),
        mock.patch.object(calls, "prepared", lambda plan, *_: Launch(plan)),
        mock.patch.object(torch._C, "_cuda_getDevice", return_value=None, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True),
    ):
        yield


class Launch:
    """Reads and writes the memory behind the addresses that a kernel would."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.cell = plan, cells.named(plan.cell)
        self.dtype = torch.float64 if plan.element == 8 else torch.float32

    def tensor(self, address: int, *shape: int) -> Any:
        if not address:
            return None
        count = 1
        for size in shape:
            count *= size
        memory = (ctypes.c_char * (count * self.dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)

    def __call__(self, stream: int, words: Any) -> None:
        *rest, flags, T, B = words
        H, G = self.plan.size, self.cell.gates
        assert flags == 0
        t = self.tensor
        if self.plan.forward:
            W, xs, ids, b_n, lengths, h, c, hs, cs, gates, h_last, c_last = rest
            assert ids == lengths == 0
            states = [t(s, B, H) for s in (h, c)]
            states = [torch.zeros(B, H, dtype=self.dtype) if s is None else s for s in states]
            tracks = t(hs, T + 1, B, H), t(cs, T + 1, B, H)
            kept = t(gates, T, B, cuda.KEPT.get(self.cell.name, 1) * H)
            W, xs, b_n = t(W, G * H, H), t(xs, T, B, G * H), t(b_n, H)
            _forward(self.cell.name, W, xs, None, b_n, None, *states, *tracks, kept, 0, 0, T, B)
            for track, last in zip(tracks, (h_last, c_last), strict=True):
                if track is not None:
                    t(last, B, H).copy_(track[-1])
            return
        W, hs, cs, gates, dhs, dh, dc, *none, das, dh_first, dc_first = rest
        assert none == [0, 0, 0, 0]
        none = torch.zeros(B, H, dtype=self.dtype)
        dh, dc = (none if s is None else s for s in (t(dh, B, H), t(dc, B, H)))
        firsts = [none.clone() if s is None else s for s in (t(dh_first, B, H), t(dc_first, B, H))]
        two, width = bool(cs), (G + self.cell.apart) * H
        _backward(
            self.cell.name,
            t(W, G * H, H),
            t(hs, T + 1, B, H),
            t(cs, T + 1, B, H),
            t(gates, T, B, cuda.KEPT.get(self.cell.name, 1) * H),
            t(dhs, T, B, H),
            dh,
            dc if two else None,
            *(None, 0, 0, None),
            t(das, T, B, width),
            firsts[0],
            firsts[1] if two else None,
            T,
            B,
        )


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


def _forward(
    cell, W_hh, xs, ids, b_n, lengths, h, c, hs, cs, gates, h_last, c_last, *sizes
) -> None:
    shares = xs[ids] if ids is not None else xs
    steps, batch = sizes
    assert shares.shape == (steps, batch, len(W_hh))
    state = (h,) if cs is None else (h, c)
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
