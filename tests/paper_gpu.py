"""A GPU on paper: the two CUDA kernels' arguments and results, computed by the reference cells.

It stands in for the driver, so that everything around the launches (the input's share, tables,
gradients of weights, which array goes where) is tested where there is no GPU. A described cell is
computed from the expressions its kernel is written from, and what is stored is rounded as there.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from elman.cells import Cell, Weights
from elman.cells.described import Described
from elman.cells.expressions import Expression, evaluate
from elman.cells.keeping import keeping
from elman.gradients import through_time
from elman.gradients.through_time import Trace
from elman.kernels import cuda, products
from elman.kernels.cuda import calls, wider
from elman.kernels.cuda.equations import body
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
        mock.patch.object(calls, "lanes", return_value=Lanes()),
        mock.patch.dict(wider._PREPARED, clear=True),
        mock.patch.object(torch._C, "_cuda_getDevice", return_value=None, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True),
    ):
        yield


@contextlib.contextmanager
def sums_in_the_loop() -> Iterator[None]:
    """Let every backward plan of a built-in cell add up da over time, and nobody else."""
    with (
        mock.patch.object(Plan, "sums_da", property(_sums)),
        mock.patch.object(products, "_total", side_effect=AssertionError("da is read again")),
    ):
        yield


def _sums(plan: Plan) -> bool:
    return not plan.forward and not isinstance(plan.cell, Described)


class Lanes:
    """Launches that may run in any order: the last first."""

    def begin(self, stream: int, launch: Launch, jobs: Any, apart: bool) -> None:
        del apart
        self.jobs = [(launch, stream, arguments) for arguments in jobs]

    def end(self, stream: int) -> None:
        del stream
        for launch, on, arguments in reversed(self.jobs):
            launch(on, arguments)


class Launch:
    """Reads and writes the memory behind the addresses that a kernel would."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.cell = plan, plan.cell
        self.dtype = torch.float64 if plan.element == 8 else torch.float32

    def tensor(self, address: int, *shape: int) -> Any:
        if not address:
            return None
        count = 1
        for size in shape:
            count *= size
        memory = (ctypes.c_char * (count * self.dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)

    def integers(self, address: int, count: int) -> Any:
        if not address:
            return None
        memory = (ctypes.c_char * (count * 8)).from_address(address)
        return torch.frombuffer(memory, dtype=torch.int64)

    def __call__(self, stream: int, words: Any) -> None:
        *rest, T, B = words
        H, G = self.plan.size * self.plan.heads, self.cell.gates
        if not self.plan.forward:
            *rest, shares = rest
            assert shares == 0, "where far groups meet"
        t = self.tensor
        if isinstance(self.cell, Described):
            self.own(rest, T, B)
            return
        if self.plan.forward:
            W, xs, ids, b_n, lengths, h, c, hs, cs, gates, h_last, c_last = rest
            assert ids == 0
            lengths = self.integers(lengths, B)
            states = [t(s, B, H) for s in (h, c)]
            states = [torch.zeros(B, H, dtype=self.dtype) if s is None else s for s in states]
            tracks = t(hs, T + 1, B, H), t(cs, T + 1, B, H)
            kept = t(gates, T, B, (body(self.cell).kept or 1) * H)
            W, xs, b_n = t(W, G * H, H), t(xs, T, B, G * H), t(b_n, H)
            _forward(self.cell, W, xs, None, b_n, lengths, *states, *tracks, kept, 0, 0, T, B)
            for track, last in zip(tracks, (h_last, c_last), strict=True):
                if track is not None and last:
                    t(last, B, H).copy_(track[-1])
            return
        *rest, da_rows = rest if self.plan.sums_da else (*rest, None)
        W, hs, cs, gates, dhs, dh, dc, *none, lengths, das, dh_first, dc_first = rest
        assert none == [0, 0, 0]
        none = torch.zeros(B, H, dtype=self.dtype)
        dh, dc = (none if s is None else s for s in (t(dh, B, H), t(dc, B, H)))
        firsts = [none.clone() if s is None else s for s in (t(dh_first, B, H), t(dc_first, B, H))]
        two, width = bool(cs), (G + len(self.cell.apart)) * H
        _backward(
            self.cell,
            t(W, G * H, H),
            t(hs, T + 1, B, H),
            t(cs, T + 1, B, H),
            t(gates, T, B, (body(self.cell).kept or 1) * H),
            t(dhs, T, B, H),
            dh,
            dc if two else None,
            *(None, 0, 0, self.integers(lengths, B)),
            t(das, T, B, width),
            firsts[0],
            firsts[1] if two else None,
            *([] if da_rows is None else [t(da_rows, B, width)]),
            None,
            T,
            B,
        )

    def own(self, words: Any, T: int, B: int) -> None:
        """The same for a described cell."""
        t, cell, H = self.tensor, self.cell, self.plan.size * self.plan.heads
        assert isinstance(cell, Described)
        G, C, kept = cell.gates, (cell.count - 1) * H, body(cell).kept * H
        numbers = body(cell).numbers, H

        def rows(address: int, width: int, *time: int) -> Any:
            return t(address, *time, B, width) if width else None

        if self.plan.forward:
            W, xs, ids, b_n, lengths, h, c, hs, cs, gates, h_last, c_last, own, drawn = words
            assert ids == b_n == drawn == 0
            lengths = self.integers(lengths, B)
            firsts = [rows(h, H), rows(c, C)]
            firsts = [
                torch.zeros(B, width, dtype=self.dtype) if s is None and width else s
                for s, width in zip(firsts, (H, C), strict=True)
            ]
            tracks = rows(hs, H, T + 1), rows(cs, C, T + 1)
            kept = None if not gates else rows(gates, kept, T)
            shares, none = rows(xs, G * H, T), None
            _own_forward(
                *(cell, t(W, G * H, H), shares, none, none, lengths, *firsts, *tracks, kept),
                *(none, none, t(own, *numbers), none, T, B),
            )
            rows(h_last, H).copy_(tracks[0][-1])
            if C:
                rows(c_last, C).copy_(tracks[1][-1])
            return
        W, hs, cs, gates, dhs, dh, dc, *rest = words
        *none, lengths, das, dh_first, dc_first, own, drawn, down = rest
        assert none == [0, 0, 0]
        assert drawn == 0
        zeros = [torch.zeros(B, width, dtype=self.dtype) for width in (H, C)]
        pulls = [
            z if s is None else s for s, z in zip((rows(dh, H), rows(dc, C)), zeros, strict=True)
        ]
        firsts = [rows(dh_first, H), rows(dc_first, C)]
        firsts = [z.clone() if s is None else s for s, z in zip(firsts, zeros, strict=True)]
        _own_backward(
            *(cell, t(W, G * H, H), rows(hs, H, T + 1), rows(cs, C, T + 1)),
            *(rows(gates, kept, T) if gates else None, rows(dhs, H, T)),
            *(pulls[0], pulls[1] if C else None, None, 0, 0, self.integers(lengths, B)),
            *(rows(das, (G + len(cell.apart)) * H, T), firsts[0], firsts[1] if C else None),
            *(t(own, *numbers), None, t(down, B, len(cell.parameters), H), None, T, B),
        )


def launch(plan: Plan | None, batch: int, W_hh: Tensor, *rest: Any) -> None:
    assert plan is not None
    assert all(x.is_contiguous() for x in (W_hh, *rest) if isinstance(x, Tensor) and x.dim() > 1)
    if isinstance(plan.cell, Described):
        (_own_forward if plan.forward else _own_backward)(plan.cell, W_hh, *rest)
    else:
        (_forward if plan.forward else _backward)(plan.cell, W_hh, *rest)


def _identity(cell: Cell, W_hh: Tensor, b_n: Tensor | None) -> Weights:
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
    room = cell.keeps * W_hh.shape[1]
    kept = hs.new_empty(steps, batch, room) if room else None
    trace = through_time.forward(cell, w, shares, state, lengths, kept)
    hs.copy_(trace.hs)
    if cs is not None:
        cs.copy_(trace.cs)
    if gates is not None:
        _KEPT[gates.data_ptr()] = w, shares, kept


_KEPT: dict[int, tuple[Weights, Tensor, Any]] = {}


def _backward(cell, W_hh, hs, cs, gates, dhs, dh, dc, xi, xi_step, xi_row, lengths, *out) -> None:
    das, dh_first, dc_first, *da_rows, _, steps, batch = out
    bare = (_identity(cell, W_hh, None), hs.new_zeros(steps, batch, len(W_hh)), hs)
    w, shares, kept = bare if gates is None else _KEPT[gates.data_ptr()]
    w = w._replace(W_hh=W_hh)  # the forward pass's own may be gone
    if xi is not None:
        xi = torch.as_strided(xi, (steps, batch), (xi_step, xi_row))
    dxs = torch.empty_like(shares)
    dw = w.map(torch.zeros_like)
    assert all(d is None or d.dtype == torch.float32 for d in (dh, dc, dh_first, dc_first))
    dstate = tuple(d.to(hs) for d in (dh, dc) if d is not None)
    first = through_time.backward(
        cell,
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
    if cell.name == "gru":  # dr dz dn, and du = r dn
        hidden = W_hh.shape[1]
        r = kept[..., :hidden]
        dxs = torch.cat([dxs, r * dxs[..., 2 * hidden :]], -1)
    das.copy_(dxs)
    for rows in da_rows:  # where the plan has them: sums over time
        rows.copy_(dxs.sum(0))


def _own_forward(
    cell: Described, W_hh, xs, ids, b_n, lengths, h, c, hs, cs, gates, h_last, c_last, *rest
) -> None:
    numbers, drawn, steps, batch = rest
    assert b_n is h_last is c_last is None
    halves, H = keeping(cell), W_hh.shape[1]
    shares = (xs[ids] if ids is not None else xs).double()
    assert shares.shape == (steps, batch, len(W_hh))
    own, biases = _numbers(cell, numbers, H)
    tracks = [hs] if cs is None else [hs, *cs.chunk(cell.count - 1, -1)]
    before = [s.double() for s in ([h] if c is None else [h, *c.chunk(cell.count - 1, -1)])]
    for track, s in zip(tracks, before, strict=True):
        track[0] = s
    for t in range(steps):
        a_h = (before[0] @ W_hh.double().T).chunk(cell.gates, -1)
        a_x = shares[t].chunk(cell.gates, -1)
        inputs = own | _named("s", before) | _noise(cell, drawn, t)
        for g in range(cell.gates):
            inputs[f"a{g}"], inputs[f"x{g}"] = a_x[g] + a_h[g], a_x[g]
            inputs[f"h{g}"] = a_h[g] + biases.get(g, torch.nan)  # of a gate that has none there
        ended = torch.zeros(batch, 1).bool() if lengths is None else (t >= lengths)[:, None]
        after = _values(halves.after, inputs, before[0])
        after = [torch.where(ended, b, a) for a, b in zip(after, before, strict=True)]
        for track, s in zip(tracks, after, strict=True):
            track[t + 1] = s
        before = [tracks[0][t + 1].double(), *after[1:]]  # h is what was stored
        if gates is not None:
            kept = torch.cat(_values(halves.kept, inputs, before[0]), -1)
            gates[t] = kept.masked_fill(ended, torch.nan)  # which nobody may read


def _own_backward(
    cell: Described, W_hh, hs, cs, gates, dhs, dh, dc, xi, xi_step, xi_row, lengths, *out
) -> None:
    das, dh_first, dc_first, numbers, drawn, down, _, steps, batch = out
    halves, H, G = keeping(cell), W_hh.shape[1], cell.gates
    own, _ = _numbers(cell, numbers, H)
    tracks = [hs] if cs is None else [hs, *cs.chunk(cell.count - 1, -1)]
    pulls = [d.double() for d in ([dh] if dc is None else [dh, *dc.chunk(cell.count - 1, -1)])]
    if xi is not None:
        xi = torch.as_strided(xi, (steps, batch), (xi_step, xi_row)).double()
    sums = torch.zeros(batch, len(cell.parameters), H, dtype=torch.float64)
    for t in reversed(range(steps)):
        if dhs is not None:
            pulls[0] = pulls[0] + dhs[t].double()
        inputs = own | _named("d", pulls) | _noise(cell, drawn, t)
        inputs |= _named("s", [track[t].double() for track in tracks])
        inputs |= _named("y", [track[t + 1].double() for track in tracks])
        if gates is not None:
            inputs |= _named("k", gates[t].double().chunk(len(halves.kept), -1))
        ended = torch.zeros(batch, 1).bool() if lengths is None else (t >= lengths)[:, None]
        found = [d.masked_fill(ended, 0) for d in _values(halves.back, inputs, pulls[0])]
        das[t] = torch.cat([*found[:G], *(found[G + g] for g in cell.apart)], -1)
        handed = das[t].double().chunk(G + len(cell.apart), -1)
        handed = [handed[products.hidden_blocks(cell)[g]] for g in range(G)]
        befores, more = found[2 * G :][: cell.count], found[2 * G + cell.count :]
        befores[0] = befores[0] + torch.cat(handed, -1) @ W_hh.double()
        if xi is not None:
            befores = [through_time.scale(d, xi[t]) for d in befores]
        pulls = [torch.where(ended, d, b) for d, b in zip(pulls, befores, strict=True)]
        for p, d in enumerate(more):
            sums[:, p] += d
    dh_first.copy_(pulls[0])
    if dc_first is not None:
        dc_first.copy_(torch.cat(pulls[1:], -1))
    if down is not None:
        down.copy_(sums)


def _named(kind: str, values: Any) -> dict[str, Tensor]:
    return {f"{kind}{i}": value for i, value in enumerate(values)}


def _numbers(
    cell: Described, numbers: Tensor | None, H: int
) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """Its parameters by name, and b_hh of the gates that are apart."""
    rows = torch.empty(0, H) if numbers is None else numbers.double().view(-1, H)
    own = len(cell.parameters)
    assert len(rows) == own + len(cell.apart)
    return _named("p", rows[:own]), dict(zip(cell.apart, rows[own:], strict=True))


def _noise(cell: Described, drawn: Tensor | None, t: int) -> dict[str, Tensor]:
    return {} if drawn is None else _named("n", drawn[t].double().chunk(len(cell.noise), -1))


def _values(ends: list[Expression], inputs: dict[str, Tensor], like: Tensor) -> list[Tensor]:
    return [torch.zeros_like(like) + value for value in evaluate(ends, inputs)]
