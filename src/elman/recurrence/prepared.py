"""Calls that have been met before, on our CUDA kernel: one node of autograd, and little Python.

`operator.recurrence` takes any stack; this takes the commonest call again once everything about its
shapes is known (`kernels.cuda.calls`): vectors in (or ids, of which no gradient is asked, where
layers run beside each other), one direction, nothing cut, everything stored.
Dropout between layers multiplies by masks that the long way would draw from the same seed.

Under autocast a call is prepared in its dtype and given tensors of another. They are cast inside
the node, so that autograd sees one operation, and what is pulled on weights is never rounded to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from elman.cells import named
from elman.cells.base import diagonal_blocks
from elman.kernels.cuda import KERNEL, calls, wider
from elman.kernels.cuda.calls import Kept, cast
from elman.kernels.cuda.stacks import Schedule
from elman.kernels.torchs import Whole
from elman.recurrence.operator import (
    Careful,
    Inputs,
    Recipe,
    asks_for_weights,
    backward,
    is_mapped,
    mapped,
    selected,
)
from elman.recurrence.strand import Dropout, draw_seed


@final
class Call:
    """A module's recurrence for inputs of one shape, as the caller lays them out."""

    def __init__(self, recipe: Recipe, x: Inputs, batch_first: bool) -> None:
        self.recipe, self.batch_first = recipe, batch_first
        self.drops = recipe.dropout > 0 and x.seed is not None
        self.prepared = wider.prepared(recipe.job(x), self.drops or x.lengths is not None)
        self.dtype = self.prepared.dtype
        self.inputs = x.weights[0].shape[1]
        heads, W_hh = named(recipe.cell).heads, x.weights[1]
        self.blocks = None if heads == 1 else diagonal_blocks(W_hh.detach(), heads)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()  # a copied module prepares its own

    def __call__(
        self,
        input: Tensor,
        state: Sequence[Tensor],
        weights: Sequence[Tensor],
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Outputs and last states; an empty `state` is zeros."""
        weights, seed = self.in_heads(weights), draw_seed() if self.drops else None
        if torch.is_grad_enabled():
            with torch.no_grad():  # before autograd is told, which takes a while
                xs = self.time_first(input).to(self.dtype).contiguous()
                read = self.prepared.read(weights)
                begun = self.prepared.begin(xs, read)
            given = seed, lengths, xs, begun, read, len(state)
            ys, *last = _Node.apply(self, given, input, *state, *weights)
            return ys, tuple(last)
        xs, masks = self.read(input), self.masks(seed)
        state, read = cast(state, self.dtype), self.prepared.read(weights)
        ys, last, _ = self.prepared.forward(xs, state, read, False, masks, lengths)
        return self.time_first(ys), last

    def read(self, input: Tensor) -> Tensor:
        """The input as the kernel reads it, where no gradient is asked for; ids that name rows."""
        xs = self.time_first(input)
        if xs.is_floating_point():
            return xs.to(self.dtype)
        with Careful(xs, self.inputs):
            return xs.to(torch.int64).contiguous()

    def suits(self, weights: Sequence[Tensor]) -> bool:
        """Whether these weights can be read as those that this was prepared for, once cast."""
        if weights[0].dtype is self.dtype:
            return self.prepared.suits(weights)
        shapes = [shape for shape, _ in self.prepared.shapes]
        return [w.shape for w in weights] == shapes and weights[0].device == self.prepared.device

    def masks(self, seed: Tensor | None) -> list[Tensor]:
        """Of dropout, for all layers but the last; rows are (time, batch)."""
        if seed is None:
            return []
        p, dropout = self.prepared, Dropout(self.recipe.dropout, int(seed))
        like = torch.empty((), dtype=p.dtype, device=p.device).expand(p.steps, p.rows, p.hidden)
        return [dropout.mask(like, layer, 0).flatten(0, 1) for layer in range(p.layers - 1)]

    def in_heads(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """The weights, W_hh of a cell with heads being 0 outside of them; or the pulls on these."""
        if self.blocks is None:
            return weights
        each = len(weights) // self.prepared.layers
        return [w * self.blocks if i % each == 1 else w for i, w in enumerate(weights)]

    def time_first(self, x: Tensor) -> Tensor:
        """Inputs as the kernel reads them; and, since turning twice is nothing, outputs back."""
        return x.transpose(0, 1) if self.batch_first else x

    def backward_by_autograd(
        self,
        input: Tensor,
        state: Sequence[Tensor],
        weights: Sequence[Tensor],
        dys: Tensor | None,
        dlast: Sequence[Tensor | None],
        needs_dxs: bool,
        needs_dws: bool,
        lengths: Tensor | None,
        seed: Tensor | None,
    ) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor | None]]:
        """The same pulls, leaving a graph behind to differentiate them again."""
        p = self.prepared
        stacked = state or [
            torch.zeros((p.layers, p.rows, width), dtype=p.dtype, device=p.device)
            for width in p.widths
        ]
        xs, stacked = self.time_first(input).to(self.dtype), cast(stacked, self.dtype)
        x = Inputs(xs, stacked, cast(weights, self.dtype), lengths, seed)
        stack = self.recipe.stack(x, KERNEL)
        dys = None if dys is None else self.time_first(dys)
        dxs, dstate, dws = backward(stack, x, [], dys, dlast, needs_dxs, needs_dws)
        return dxs, dstate[: len(state)], dws


Given = tuple[Tensor | None, Tensor | None, Tensor, list[Tensor], Sequence[Tensor], int]
"""What autograd does not look at.

A seed, lengths, inputs, what was begun, the weights as the kernel reads them, the number of states.
"""


class _Node(torch.autograd.Function):
    """The call as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        given: Given,
        input: Tensor,
        *tensors: Tensor,
    ) -> Any:
        seed, lengths, xs, begun, read, n = given
        keep, masks = any(ctx.needs_input_grad), call.masks(seed)
        more = masks, lengths, begun
        first = cast(tensors[:n], call.dtype)
        ys, last, kept = call.prepared.forward(xs, first, read, keep, *more)
        if keep:
            traces = [t for trace in kept for t in trace]
            apart = read if read[0] is not tensors[n] else ()
            ctx.save_for_backward(input, xs, *apart, *tensors, *traces, *masks)
            ctx.call, ctx.n, ctx.m, ctx.masks = call, n, len(tensors), len(masks)
            ctx.apart = len(apart)
            ctx.seed, ctx.lengths = seed, lengths
            ctx.set_materialize_grads(False)
        return call.time_first(ys), *last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if is_mapped(grads):
            return mapped(_Node.backward, ctx, grads)
        dys, *dlast = grads
        input, xs, *rest = ctx.saved_tensors
        read, rest = rest[: ctx.apart], rest[ctx.apart :]
        call, n, m, end = ctx.call, ctx.n, ctx.m, len(rest) - ctx.masks
        state, weights, masks = rest[:n], rest[n:m], rest[end:]
        needs_dxs, *needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            drawn, wanted = (ctx.lengths, ctx.seed), (needs_dxs, asks_for_weights(ctx, m - n))
            found = call.backward_by_autograd(input, state, weights, dys, dlast, *wanted, *drawn)
        else:
            kept = [Kept(*rest[i : i + 3]) for i in range(m, end, 3)]
            dys = None if dys is None else call.time_first(dys)
            wanted = needs_dxs, any(needs[:n])
            more = masks, ctx.lengths
            found = call.prepared.backward(xs, read or weights, kept, dys, dlast, *wanted, *more)
        dxs, dstate, dws = found
        dxs = None if dxs is None else call.time_first(dxs)
        return None, None, dxs, *(dstate or [None] * n), *dws


def prepare(recipe: Recipe, x: Inputs, batch_first: bool) -> Call | None:
    """How calls like this one are run from now on; None where they take the long way."""
    if not (is_plain(recipe, x) or ids_pay(recipe, x)) or selected(recipe, x) is not KERNEL:
        return None
    call = Call(recipe, x, batch_first)
    return call if call.prepared.suits(x.weights) else None


def is_plain(recipe: Recipe, x: Inputs) -> bool:
    """Vectors in, one direction, nothing cut or drawn within a layer, everything stored."""
    return x.xs.is_floating_point() and _is_simple(recipe, x)


def ids_pay(recipe: Recipe, x: Inputs) -> bool:
    """Whether ids are looked up beforehand, not inside the first layer's loop: for layers that then
    run beside each other. Without a gradient: that of W_ih is taken from ids."""
    if x.xs.is_floating_point() or torch.is_grad_enabled() or not _is_simple(recipe, x):
        return False
    if x.seed is not None or x.lengths is not None or selected(recipe, x) is not KERNEL:
        return False
    return _schedule(recipe, x, "forward") is not None


def _is_simple(recipe: Recipe, x: Inputs) -> bool:
    plain = recipe.directions == 1 and not recipe.projected and recipe.carry.exact
    noisy = x.seed is not None and named(recipe.cell).noise
    return plain and recipe.memory.keeps_all and not noisy


def _schedule(recipe: Recipe, x: Inputs, direction: str) -> Schedule | None:
    """How layers run beside each other."""
    job, (steps, rows) = recipe.job(x), x.xs.shape[:2]
    return calls.schedule_for(job.cell, direction, job.layers[0], rows, len(job.layers), steps)


def beside(recipe: Recipe, x: Inputs, whole: Whole) -> str:
    """How layers run beside each other by our kernel, for `explain`; empty where they do not."""
    if not (is_plain(recipe, x) or ids_pay(recipe, x)):
        return ""
    if x.seed is not None or x.lengths is not None:
        return ""
    found = list[str]()
    for direction in ("forward", "backward")[: 1 + whole.keeps]:
        s = _schedule(recipe, x, direction)
        found += [f"{direction} {s.lanes} at once in {s.pieces} pieces of time"] if s else []
    return f"layers beside each other: {', '.join(found)}" if found else ""
