"""A stack called again and again with inputs of one shape: what depends on shapes is found once.

The same launches and products as `KERNEL`'s, layer by layer, for the commonest call: vectors in,
one direction, nothing cut, no lengths. A small layer keeps a GPU busy for less time than Python
takes to find out what is to be run; so here Python does nothing that it did before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

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
    shares_of,
)
from elman.kernels.cuda.driver import Launch
from elman.kernels.cuda.equations import body
from elman.kernels.cuda.plan import Plan


class Kept(NamedTuple):
    """What one layer's backward pass reads; rows are (time, batch)."""

    hs: Tensor  # ((T+1) · B, hidden)
    cs: Tensor | None
    gates: Tensor | None


class Ready(NamedTuple):
    """One direction of one layer, ready to be launched."""

    plan: Plan
    launch: Launch


@final
class Prepared:
    """Calls of one stack with inputs of one shape. Never changes, so that threads may share it."""

    def __init__(self, job: Job) -> None:
        xs, h = job.inputs[0], job.states[0][0]
        self.cell: Cell = job.cell
        self.steps, self.rows, self.hidden = len(xs), len(h), h.shape[1]
        self.dtype, self.device = h.dtype, h.device
        self.widths, self.layers = job.cell.state_sizes(self.hidden), len(job.layers)
        self.states = len(self.widths)
        self.shapes = [(w.shape, w.dtype) for w in _flat(job.layers)]
        self.biased = job.layers[0].b_ih is not None
        self.wide = torch.promote_types(h.dtype, torch.float32)
        with torch.cuda.device(self.device):
            own = isinstance(self.cell, Described)
            self.forward_launch = self._ready(job.layers[0], "forward", 16 if own else 14)
            self.backward_launch = self._ready(job.layers[0], "backward", 20 if own else 17)
        self.summed = self._summed() if self.biased and self.cell.apart else None

    def _ready(self, w: Weights, direction: str, arguments: int) -> Ready:
        plan = _plan(self.cell, direction, w, self.rows)
        assert plan is not None, "the kernel refuses jobs without a plan"
        code = arithmetic(self.dtype)
        return Ready(plan, prepared(plan, code, self.rows, self.device.index, arguments))

    def _summed(self) -> Tensor:
        """1 for the gates whose two biases are added up, 0 for the rest."""
        ones = torch.ones(self.cell.gates, self.hidden, dtype=self.dtype, device=self.device)
        for gate in self.cell.apart:
            ones[gate] = 0
        return ones.flatten()

    def suits(self, weights: Sequence[Tensor]) -> bool:
        """Whether these weights can be read as those that this was prepared for."""
        if len(weights) != len(self.shapes):
            return False
        for w, (shape, dtype) in zip(weights, self.shapes, strict=True):
            if w.shape != shape or w.dtype != dtype or not w.is_contiguous():
                return False
        return weights[0].device == self.device

    # ------------------------------------------------------------------ forward

    def forward(
        self, xs: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor], keep: bool
    ) -> tuple[Tensor, tuple[Tensor, ...], list[Kept]]:
        """ys, the last states (stacked) and what is kept; without `first`, from zeros."""
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.forward(xs, first, weights, keep)
        steps, rows, hidden = self.steps, self.rows, self.hidden
        first = [dense(s) for s in first]
        last = [
            torch.empty((self.layers, rows, width), dtype=self.dtype, device=self.device)
            for width in self.widths
        ]
        sizes = [rows * width * self.dtype.itemsize for width in self.widths]
        befores = [s.data_ptr() for s in first] or [0] * self.states
        afters = [s.data_ptr() for s in last]
        each, traces = len(weights) // self.layers, []
        xs = xs.reshape(steps * rows, -1)
        with large_products(self.dtype):
            for layer in range(self.layers):
                own = weights[layer * each : (layer + 1) * each]
                before = [
                    at + layer * size if at else 0 for at, size in zip(befores, sizes, strict=True)
                ]
                after = [at + layer * size for at, size in zip(afters, sizes, strict=True)]
                trace = self._layer(xs, before, after, own, keep)
                traces.append(trace)
                xs = trace.hs[rows:]
        return xs.view(steps, rows, hidden), tuple(last), traces

    def _layer(
        self,
        xs: Tensor,
        before: list[int],
        after: list[int],
        weights: Sequence[Tensor],
        keep: bool,
    ) -> Kept:
        """One layer; `before` and `after` are addresses of its first and last states."""
        steps, rows, hidden, two = self.steps, self.rows, self.hidden, self.states > 1
        bias, bias_apart = self._biases(weights)
        own = self._own(weights)
        shares = torch.nn.functional.linear(xs, weights[0], bias)
        plan, launch = self.forward_launch
        hs = awaited(plan, shares.new_empty(((steps + 1) * rows, hidden)))
        cs = hs.new_empty((len(hs), self.widths[1])) if two else None
        kept = body(self.cell).kept if keep else 0
        gates = shares.new_empty((steps, rows, kept * hidden)) if kept else None
        launch(
            torch._C._cuda_getCurrentRawStream(self.device.index),
            (
                weights[1].data_ptr(),
                shares.data_ptr(),
                0,  # no ids
                0 if bias_apart is None else bias_apart.data_ptr(),
                0,  # no lengths
                before[0],
                before[1] if two else 0,
                hs.data_ptr(),
                0 if cs is None else cs.data_ptr(),
                0 if gates is None else gates.data_ptr(),
                after[0],
                after[1] if two else 0,
                *(0 if t is None else t.data_ptr() for t in own),
                steps,
                rows,
            ),
        )
        return Kept(hs, cs, gates)

    def _biases(self, weights: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """What is added to the input's share, and what a gru's n adds to W h."""
        if not self.biased:
            return None, None
        b_ih, b_hh = weights[2], weights[3]
        if self.summed is None:
            return b_ih + b_hh, None
        if isinstance(self.cell, Described):  # the rest is among its numbers
            return torch.addcmul(b_ih, b_hh, self.summed), None
        apart = b_hh[-len(self.cell.apart) * self.hidden :]
        return torch.addcmul(b_ih, b_hh, self.summed), dense(apart.to(self.wide))

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
    ) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        """The pulls on xs, on the first states and on the weights; half precision's in float32."""
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.backward(xs, weights, kept, dys, dlast, needs_dxs, needs_dstate)
        each, steps, rows = len(weights) // self.layers, self.steps, self.rows
        last = [None if d is None else dense(d.to(self.wide)) for d in dlast]
        dstate = [
            torch.empty((self.layers, rows, width), dtype=self.wide, device=self.device)
            for width in self.widths * needs_dstate
        ]
        sizes, dws = [rows * width * self.wide.itemsize for width in self.widths] * 2, []
        with large_products(self.dtype):
            for layer in reversed(range(self.layers)):
                before = xs if layer == 0 else kept[layer - 1].hs[rows:]
                own = weights[layer * each : (layer + 1) * each]
                at = [
                    0 if d is None else d.data_ptr() + layer * size
                    for d, size in zip((*last, *dstate), sizes, strict=False)
                ]
                das, down = self._layer_back(own, kept[layer], dys, at)
                dws[:0] = self._weight_pulls(own, before, kept[layer].hs, das, down)
                if layer > 0 or needs_dxs:
                    das_ih = das[:, : self.cell.gates * self.hidden] if self.cell.apart else das
                    dys = das_ih @ own[0]
        dxs = dys.view(steps, rows, -1) if needs_dxs and dys is not None else None
        return dxs, dstate, dws

    def _layer_back(
        self, weights: Sequence[Tensor], kept: Kept, dys: Tensor | None, at: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """da of all gates, (T · B, blocks · hidden), and each row's pull on the cell's numbers."""
        steps, rows, two = self.steps, self.rows, self.states > 1
        blocks = self.cell.gates + len(self.cell.apart)
        dys = None if dys is None else dense(dys)
        plan, launch = self.backward_launch
        das = awaited(plan, kept.hs.new_empty((steps * rows, blocks * self.hidden)))
        own, down = self._own(weights), None
        if self.cell.parameters:
            down = das.new_empty((rows, *weights[-1].shape), dtype=torch.float32)
        meeting = shares_of(plan, rows, das)
        last, first = at[: self.states], at[self.states :]
        launch(
            torch._C._cuda_getCurrentRawStream(self.device.index),
            (
                weights[1].data_ptr(),
                kept.hs.data_ptr(),
                0 if kept.cs is None else kept.cs.data_ptr(),
                0 if kept.gates is None else kept.gates.data_ptr(),
                0 if dys is None else dys.data_ptr(),
                last[0],
                last[1] if two else 0,
                *(0, 0, 0),  # nothing is cut: no ξ, nor its strides
                0,  # no lengths
                das.data_ptr(),
                first[0] if first else 0,
                first[1] if first and two else 0,
                *(0 if t is None else t.data_ptr() for t in ([*own, down] if own else ())),
                0 if meeting is None else meeting.data_ptr(),
                steps,
                rows,
            ),
        )
        return das, down

    def _weight_pulls(
        self,
        weights: Sequence[Tensor],
        xs: Tensor,
        hs: Tensor,
        das: Tensor,
        down: Tensor | None,
    ) -> list[Tensor]:
        xs = xs.view(self.steps * self.rows, -1)
        das_ih, das_hh = products.shares(self.cell, das)
        w = self._named(weights)
        pulls = products.weight_pulls(w, xs, hs[: len(das)], das_ih, das_hh)
        pulls = pulls._replace(own=None if down is None else down.sum(0))
        return [d for d in pulls if d is not None]


def _flat(layers: Sequence[Weights]) -> list[Tensor]:
    return [p for w in layers for p in w if p is not None]
