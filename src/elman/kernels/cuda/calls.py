"""A stack called again and again with inputs of one shape: what depends on shapes is found once.

The same launches and products as `KERNEL`'s, layer by layer, for the commonest call: vectors in
(or ids, where no gradient is asked for), one direction, nothing cut. A small layer keeps a GPU busy
for less time than Python takes to find out what is to be run; so here Python does nothing that it
did before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, mm
from torch.nn.functional import linear

from elman.cells import Cell, Weights
from elman.cells.described import Described
from elman.kernels import products
from elman.kernels.contract import Job
from elman.kernels.cuda import (
    _plan,
    arithmetic,
    awaited,
    dense,
    large_products,
    own_arguments,
    prepared,
    rows_of_da,
    schedule_for,
    shares_of,
)
from elman.kernels.cuda.driver import Launches
from elman.kernels.cuda.equations import body
from elman.kernels.cuda.lanes import lanes
from elman.kernels.cuda.plan import Plan
from elman.kernels.cuda.stacks import At, Schedule


class Kept(NamedTuple):
    """What one layer's backward pass reads; rows are (time, batch)."""

    hs: Tensor  # ((T+1) · B, hidden)
    cs: Tensor | None
    gates: Tensor | None  # (T · B, kept · hidden)


class Back(NamedTuple):
    """What the backward loop of one layer leaves."""

    das: Tensor  # of all gates, (T · B, blocks · hidden)
    down: Tensor | None = None  # each row's pull on the cell's own numbers
    da_rows: Tensor | None = None  # each row's sum of da over time, where the loop has one


class Ready(NamedTuple):
    """One direction of a stack, ready to be launched."""

    plan: Plan
    launch: Launches
    schedule: Schedule | None  # of layers beside each other; None: one after the other


class Given(NamedTuple):
    """What the steps of one layer read: W_hh, a bias, and a described cell's own numbers."""

    W_hh: int  # its address
    bias_apart: Tensor | None
    own: Sequence[Tensor | None]


NOWHERE = [0, 0]
"""Addresses of two states that are not wanted."""


@final
class Prepared:
    """Calls of one stack with inputs of one shape. Never changes, so that threads may share it."""

    def __init__(self, job: Job, one_by_one: bool = False, own: int | None = None) -> None:
        """With masks or lengths, `one_by_one`: no layer runs beside another.

        Only the first `own` units read anything, where not all do (widths.py).
        """
        xs, h = job.inputs[0], job.states[0][0]
        self.cell: Cell = job.cell
        self.steps, self.rows, self.hidden = len(xs), len(h), h.shape[1]
        self.dtype, self.device = h.dtype, h.device
        self.own = self.hidden if own is None else own
        self.widths, self.layers = job.cell.state_sizes(self.hidden), len(job.layers)
        self.states = len(self.widths)
        self.shapes = [(w.shape, w.dtype) for w in _flat(job.layers)]
        self.biased = job.layers[0].b_ih is not None
        self.wide = torch.promote_types(h.dtype, torch.float32)
        with torch.cuda.device(self.device):
            described = isinstance(self.cell, Described)
            beside = 1 if one_by_one else self.layers
            w = job.layers[0]
            self.forward_launch = self._ready(w, "forward", 16 if described else 14, beside)
            self.backward_launch = self._ready(w, "backward", 20 if described else 17, beside)
        item, kept = self.rows * self.dtype.itemsize, body(self.cell).kept
        blocks = self.cell.gates + len(self.cell.apart)
        widths = (self.hidden, self.widths[-1], kept * self.hidden, blocks * self.hidden)
        self.step_bytes = [width * item for width in widths]
        """Of one step of h, c, what is kept, and da."""
        self.pull_bytes = [self.rows * width * self.wide.itemsize for width in self.widths]
        self.summed = self._summed() if self.biased and self.cell.apart else None

    def _ready(self, w: Weights, direction: str, arguments: int, layers: int) -> Ready:
        sizes = self.rows, layers, self.steps
        beside = schedule_for(self.cell, direction, w, *sizes)
        plan = beside.plan if beside else _plan(self.cell, direction, w, self.rows)
        assert plan is not None, "the kernel refuses jobs without a plan"
        assert not (beside and plan.sums_da), "layers beside each other run in clusters"
        arguments += plan.sums_da
        launch = prepared(plan, arithmetic(self.dtype), self.rows, self.device.index, arguments)
        return Ready(plan, launch, beside)

    def _summed(self) -> Tensor:
        """1 for the gates whose two biases are added up, 0 for the rest."""
        ones = torch.ones(self.cell.gates, self.hidden, dtype=self.dtype, device=self.device)
        for gate in self.cell.apart:
            ones[gate] = 0
        return ones.flatten()

    def suits(self, weights: Sequence[Tensor]) -> bool:
        """Whether these weights can be read as those that this was prepared for."""
        return are_like(weights, self.shapes) and weights[0].device == self.device

    def read(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Weights as the kernel reads them, which the two passes are given."""
        return cast(weights, self.dtype)

    # ------------------------------------------------------------------ forward

    def begin(self, xs: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """Queue the first product, which `forward` then takes out of the list.

        Until it is queued the GPU has nothing to do: whatever can wait comes after it.
        """
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.begin(xs, weights)
        with large_products(self.dtype):
            return [self._shares(xs.reshape(self.steps * self.rows, -1), weights)]

    def forward(
        self,
        xs: Tensor,
        first: Sequence[Tensor],
        weights: Sequence[Tensor],
        keep: bool,
        masks: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
        begun: list[Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...], list[Kept]]:
        """ys, the last states (stacked) and what is kept; without `first`, from zeros.

        `masks` are those of all layers but the last, (T · B, hidden): what a layer writes is
        multiplied by its mask before the next one reads it. `begun` is what `begin` has queued.
        """
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.forward(xs, first, weights, keep, masks, lengths, begun)
        shares = (begun or self.begin(xs, weights)).pop()
        steps, rows, hidden = self.steps, self.rows, self.hidden
        each = len(weights) // self.layers
        own = [weights[i : i + each] for i in range(0, len(weights), each)]
        with large_products(self.dtype):
            first = [dense(s) for s in first]
            last = [
                torch.empty((self.layers, rows, width), dtype=self.dtype, device=self.device)
                for width in self.widths
            ]
            sizes = [rows * width * self.dtype.itemsize for width in self.widths]
            befores = [s.data_ptr() for s in first] or [0] * self.states
            afters = [s.data_ptr() for s in last]
            before = [_layer_of(befores, sizes, layer) for layer in range(self.layers)]
            after = [_layer_of(afters, sizes, layer) for layer in range(self.layers)]
            if self.forward_launch.schedule is not None:
                traces = self._beside(shares, before, after, own, keep)
            else:
                traces = self._one_by_one(shares, before, after, own, keep, masks, lengths)
        ys = traces[-1].hs[rows:]
        return ys.view(steps, rows, hidden), tuple(last), traces

    def _one_by_one(
        self,
        shares: Tensor,
        before: list[list[int]],
        after: list[list[int]],
        weights: list[Sequence[Tensor]],
        keep: bool,
        masks: Sequence[Tensor],
        lengths: Tensor | None,
    ) -> list[Kept]:
        """Layer by layer, from the first one's shares on.

        `before` and `after` are addresses of their first and last states.
        """
        traces = list[Kept]()
        for w, first, last in zip(weights, before, after, strict=True):
            if traces:
                xs = self._above(traces[-1], masks, len(traces) - 1)
                shares = linear(xs, w[0], self._bias(w))
            given, kept = self._given(w), self._room(shares, keep)
            tracks, until = self._places(kept), _address(lengths)
            words = self._words(given, shares, tracks, first, last, self.steps, until)
            self.forward_launch.launch(self._stream(), words)
            traces.append(kept)
        return traces

    def _shares(self, xs: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The input's share of the first layer's gates."""
        if not xs.is_floating_point():
            return products.looked_up(weights[0], self._bias(weights), xs[:, 0])
        shares = linear(xs, weights[0], self._bias(weights))
        if self.own < self.hidden:  # where an infinite input has met a weight of 0
            shares.unflatten(-1, (self.cell.gates, -1))[..., self.own :] = 0
        return shares

    def _above(self, kept: Kept, masks: Sequence[Tensor], layer: int) -> Tensor:
        """What the layer above this one reads."""
        ys = kept.hs[self.rows :]
        return ys * masks[layer] if masks else ys

    def _beside(
        self,
        whole: Tensor,
        before: list[list[int]],
        after: list[list[int]],
        weights: list[Sequence[Tensor]],
        keep: bool,
    ) -> list[Kept]:
        """The same, layers beside each other where they need nothing of each other."""
        _, launch, schedule = self.forward_launch
        assert schedule is not None
        rows, side, stream = self.rows, lanes(self.device.index), self._stream()
        part = schedule.steps * rows
        given, biases = [self._given(w) for w in weights], [None, *map(self._bias, weights[1:])]
        traces = [self._room(whole, keep) for _ in weights]
        shares_of_first = whole.split(part)
        below = [kept.hs[rows:].split(part) for kept in traces]
        begins = [self._places(kept) for kept in traces]

        def shares_at(layer: int, piece: int) -> Tensor:
            if layer == 0:
                return shares_of_first[piece]
            return linear(below[layer - 1][piece], weights[layer][0], biases[layer])

        ahead = dict[At, Tensor]()
        for slot, meanwhile in schedule.slots():
            shares = [ahead[at] if at in ahead else shares_at(*at) for at in slot]
            jobs = list[Sequence[int]]()
            for (layer, piece), share in zip(slot, shares, strict=True):
                start, end = schedule.span(piece, self.steps)
                places = self._after(begins[layer], start)
                first = places if start else before[layer]
                last = after[layer] if end == self.steps else NOWHERE
                jobs.append(self._words(given[layer], share, places, first, last, end - start))
            side.begin(stream, launch, jobs, apart=bool(meanwhile))
            ahead = {at: shares_at(*at) for at in meanwhile}
            side.end(stream)
            del shares  # which other streams have read: only now
        return traces

    def _stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def _room(self, like: Tensor, keep: bool) -> Kept:
        """Memory for the tracks of one layer."""
        steps, rows, hidden = self.steps, self.rows, self.hidden
        hs = awaited(self.forward_launch.plan, like.new_empty(((steps + 1) * rows, hidden)))
        cs = hs.new_empty((len(hs), self.widths[1])) if self.states > 1 else None
        kept = body(self.cell).kept if keep else 0
        gates = hs.new_empty((steps * rows, kept * hidden)) if kept else None
        return Kept(hs, cs, gates)

    def _places(self, kept: Kept) -> list[int]:
        """The addresses of a layer's tracks."""
        return [_address(track) for track in kept]

    def _after(self, places: list[int], steps: int) -> list[int]:
        """Those of its tracks after so many steps; also of those of da, which comes fourth."""
        return [
            at + steps * size if at else 0
            for at, size in zip(places, self.step_bytes, strict=False)
        ]

    def _given(self, weights: Sequence[Tensor]) -> Given:
        return Given(weights[1].data_ptr(), self._bias_apart(weights), self._own(weights))

    def _words(
        self,
        given: Given,
        shares: Tensor,
        tracks: list[int],
        before: list[int],
        after: list[int],
        steps: int,
        lengths: int = 0,
    ) -> Sequence[int]:
        """What the kernel is told: one layer, from the addresses of its tracks on, so far."""
        two = self.states > 1
        return (
            given.W_hh,
            shares.data_ptr(),
            0,  # no ids
            _address(given.bias_apart),
            lengths,
            before[0],
            before[1] if two else 0,
            *tracks,
            after[0],
            after[1] if two else 0,
            *(_address(t) for t in given.own),
            steps,
            self.rows,
        )

    def _bias(self, weights: Sequence[Tensor]) -> Tensor | None:
        """What is added to the input's share."""
        if not self.biased:
            return None
        b_ih, b_hh = weights[2], weights[3]
        return b_ih + b_hh if self.summed is None else torch.addcmul(b_ih, b_hh, self.summed)

    def _bias_apart(self, weights: Sequence[Tensor]) -> Tensor | None:
        """What a gru's n adds to W h; a described cell has it among its numbers."""
        if self.summed is None or isinstance(self.cell, Described):
            return None
        return dense(weights[3][-len(self.cell.apart) * self.hidden :].to(self.wide))

    def _own(self, weights: Sequence[Tensor]) -> list[Tensor | None]:
        """What a described cell is given besides."""
        return own_arguments(self.cell, self._named(weights), None)

    def _named(self, weights: Sequence[Tensor]) -> Weights:
        """A layer's weights in their places."""
        biases = weights[2:4] if self.biased else (None, None)
        own = weights[-1] if self.cell.parameters else None
        return Weights(weights[0], weights[1], *biases, own=own)

    # ------------------------------------------------------------------ backward

    def backward(
        self,
        xs: Tensor,
        weights: Sequence[Tensor],
        kept: Sequence[Kept],
        dys: Tensor | None,
        dlast: Sequence[Tensor | None],
        needs_dxs: bool,
        needs_dstate: bool,
        masks: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
    ) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        """The pulls on xs, on the first states and on the weights; half precision's in float32."""
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                wanted = needs_dxs, needs_dstate
                return self.backward(xs, weights, kept, dys, dlast, *wanted, masks, lengths)
        each, steps, rows = len(weights) // self.layers, self.steps, self.rows
        last = [None if d is None else dense(d.to(self.wide)) for d in dlast]
        dstate = [
            torch.empty((self.layers, rows, width), dtype=self.wide, device=self.device)
            for width in self.widths * needs_dstate
        ]
        own = [weights[i : i + each] for i in range(0, len(weights), each)]
        ends = [self._of(at, [*map(_address, last)]) for at in range(self.layers)]
        firsts = [*map(_address, dstate)] or NOWHERE[: self.states]
        begins = [self._of(at, firsts) for at in range(self.layers)]
        dys = None if dys is None else dense(dys).view(steps * rows, -1)
        if self.backward_launch.schedule is not None:
            backs = self._back_beside(own, kept, dys, ends, begins)
        else:
            backs = self._back_one_by_one(own, kept, dys, ends, begins, masks, lengths)
        dws = list[Tensor]()
        with large_products(self.dtype):
            for layer, back in backs:
                read = xs if layer == 0 else self._above(kept[layer - 1], masks, layer - 1)
                dws[:0] = self._weight_pulls(own[layer], read, kept[layer].hs, back)
                dys = self._down(own[0], back.das) if layer == 0 and needs_dxs else None
        dxs = None if dys is None else dys.view(steps, rows, -1)
        return dxs, dstate, dws

    def _down(self, weights: Sequence[Tensor], das: Tensor) -> Tensor:
        """The pull of these da on what the layer reads."""
        return mm(self._read(das), weights[0])

    def _read(self, das: Tensor) -> Tensor:
        """da as W_ih meets it."""
        return das[:, : self.cell.gates * self.hidden] if self.cell.apart else das

    def _of(self, layer: int, places: Sequence[int]) -> list[int]:
        """Addresses of one layer's pulls on its states, where those of all begin at `places`."""
        return _layer_of(places, self.pull_bytes, layer)

    def _back_one_by_one(
        self,
        weights: list[Sequence[Tensor]],
        kept: Sequence[Kept],
        dys: Tensor | None,
        ends: list[list[int]],
        begins: list[list[int]],
        masks: Sequence[Tensor],
        lengths: Tensor | None,
    ) -> Iterator[tuple[int, Back]]:
        """What the loop leaves of each layer, from the last to the first.

        `ends` and `begins` are addresses of the pulls on their last states and on their first.
        """
        plan, launch, _ = self.backward_launch
        for layer in reversed(range(self.layers)):
            w, trace = weights[layer], kept[layer]
            das = awaited(plan, self._room_back(trace))
            own, down = self._own(w), None
            if self.cell.parameters:
                down = das.new_empty((self.rows, *w[-1].shape), dtype=torch.float32)
            meeting = shares_of(plan, self.rows, das)
            da_rows = rows_of_da(plan, self.rows, das)
            summed = [*own, down] if own else [] if da_rows is None else [da_rows]
            more = [*map(_address, [*summed, meeting])]
            tracks, at = [*self._places(trace), das.data_ptr()], w[1].data_ptr()
            states = ends[layer], begins[layer]
            sizes = self.steps, _address(lengths)
            launch(self._stream(), self._words_back(at, tracks, dys, *states, more, *sizes))
            dys = self._down(w, das) if layer > 0 else None
            if dys is not None and masks:
                dys *= masks[layer - 1]
            yield layer, Back(das, down, da_rows)

    def _back_beside(
        self,
        weights: list[Sequence[Tensor]],
        kept: Sequence[Kept],
        dys: Tensor | None,
        ends: list[list[int]],
        begins: list[list[int]],
    ) -> Iterator[tuple[int, Back]]:
        """The same, layers beside each other where they need nothing of each other.

        A layer that is done is handed out while the others run on, so that the products with its da
        run beside them too.
        """
        _, launch, schedule = self.backward_launch
        assert schedule is not None
        rows, side, stream = self.rows, lanes(self.device.index), self._stream()
        part, top, last_piece = schedule.steps * rows, self.layers - 1, schedule.pieces - 1
        all_das = [self._room_back(trace) for trace in kept]
        das_ih = [self._read(das).split(part) for das in all_das]
        given = None if dys is None else dys.split(part)
        turns = [self._carried(all_das[0]) for _ in range(2)]  # from a piece to the one before it
        carried = [[*map(_address, turn)] for turn in turns]
        places = [[*self._places(k), das.data_ptr()] for k, das in zip(kept, all_das, strict=True)]

        def pull_at(below_top: int, before_last: int) -> Tensor | None:
            layer, piece = top - below_top, last_piece - before_last
            if layer < top:
                return mm(das_ih[layer + 1][piece], weights[layer + 1][0])
            return None if given is None else given[piece]

        ahead, done = dict[At, Tensor | None](), list[int]()
        for slot, meanwhile in schedule.slots():
            pulls = [ahead[at] if at in ahead else pull_at(*at) for at in slot]
            jobs = list[Sequence[int]]()
            for (below_top, before_last), pull in zip(slot, pulls, strict=True):
                layer, piece = top - below_top, last_piece - before_last
                start, end = schedule.span(piece, self.steps)
                at, tracks = weights[layer][1].data_ptr(), self._after(places[layer], start)
                last = ends[layer] if end == self.steps else self._of(layer, carried[piece % 2])
                first = self._of(layer, carried[(piece + 1) % 2]) if start else begins[layer]
                words = self._words_back(at, tracks, pull, last, first, (0,), end - start)
                jobs.append(words)
            side.begin(stream, launch, jobs, apart=bool(done or meanwhile))
            ahead = {at: pull_at(*at) for at in meanwhile}
            yield from ((layer, Back(all_das[layer])) for layer in done)
            side.end(stream)
            del pulls  # as forward
            done = [top - below_top for below_top, n in slot if n == last_piece]
        yield from ((layer, Back(all_das[layer])) for layer in done)

    def _carried(self, like: Tensor) -> list[Tensor]:
        """Memory for the pulls on all layers' states at one moment."""
        sizes = [(self.layers, self.rows, width) for width in self.widths]
        return [like.new_empty(size, dtype=self.wide) for size in sizes]

    def _room_back(self, kept: Kept) -> Tensor:
        """Memory for da of all gates."""
        blocks = self.cell.gates + len(self.cell.apart)
        return kept.hs.new_empty((self.steps * self.rows, blocks * self.hidden))

    def _words_back(
        self,
        W_hh: int,
        tracks: list[int],
        dys: Tensor | None,
        after: list[int],
        before: list[int],
        more: Sequence[int],
        steps: int,
        lengths: int = 0,
    ) -> Sequence[int]:
        """What the kernel is told to carry a gradient back, so many steps."""
        *kept, das = tracks
        two = self.states > 1
        return (
            W_hh,
            *kept,
            _address(dys),
            after[0],
            after[1] if two else 0,
            *(0, 0, 0),  # nothing is cut: no ξ, nor its strides
            lengths,
            das,
            before[0],
            before[1] if two else 0,
            *more,
            steps,
            self.rows,
        )

    def _weight_pulls(
        self,
        weights: Sequence[Tensor],
        xs: Tensor,
        hs: Tensor,
        back: Back,
    ) -> list[Tensor]:
        xs, (das, down, da_rows) = xs.view(self.steps * self.rows, -1), back
        das_ih, das_hh = products.shares(self.cell, das)
        w, totals = self._named(weights), products.totals(self.cell, da_rows)
        pulls = products.weight_pulls(w, xs, hs[: len(das)], das_ih, das_hh, totals=totals)
        pulls = pulls._replace(own=None if down is None else down.sum(0))
        return [d for d in pulls if d is not None]


def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """The same, where they are of this type; else of it, and row by row."""
    if not tensors or tensors[0].dtype is dtype:
        return tensors
    return [t.to(dtype, memory_format=torch.contiguous_format) for t in tensors]


def are_like(weights: Sequence[Tensor], shapes: Sequence[tuple[torch.Size, torch.dtype]]) -> bool:
    """Whether they have these shapes and types, and lie without gaps."""
    if len(weights) != len(shapes):
        return False
    for w, (shape, dtype) in zip(weights, shapes, strict=True):
        if w.shape != shape or w.dtype != dtype or not w.is_contiguous():
            return False
    return True


def _address(t: Tensor | None) -> int:
    """0 where there is none."""
    return 0 if t is None else t.data_ptr()


def _layer_of(places: Sequence[int], sizes: Sequence[int], layer: int) -> list[int]:
    """Addresses of one layer's states, where those of all begin at `places`."""
    return [at + layer * size if at else 0 for at, size in zip(places, sizes, strict=True)]


def _flat(layers: Sequence[Weights]) -> list[Tensor]:
    return [p for w in layers for p in w if p is not None]
