"""Gradients of gradients: a stack's backward pass as an operation that can be differentiated.

A backward pass finds the pulls d on all inputs from the pulls dy on the outputs. Where u pulls on
what it found, let y_u be how the outputs change as the inputs change along u. Then

    ⟨u, d⟩ = ⟨dy, y_u⟩

so y_u, which goes forward through the stack, is the pull on dy; and the pulls of ⟨dy, y_u⟩ on the
inputs go back through it as all pulls do. Around the states of the forward pass every step is
linear but for its bend (`kernels/cpu/twice.h`): no state is found again, and W_hh is met once each
way. Pearlmutter (1994), "Fast exact multiplication by the Hessian".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from elman.kernels.cpu.calls import NOTHING_KEPT, Asked, Pack, Prepared, Use, restored
from elman.kernels.cpu.twice import Sizes, Strand
from elman.recurrence.operator import apart, is_mapped, mapped
from elman.recurrence.packed import picked
from elman.recurrence.strand import Dropout


class Outputs(NamedTuple):
    """What a stack writes; or the pulls on it, or its changes, where there are any."""

    ys: Tensor | None
    states: Sequence[Tensor | None]  # stacked


class Inputs(NamedTuple):
    """What a stack reads; or the pulls on it, or its changes, where there are any."""

    xs: Any
    states: Sequence[Any]  # stacked; none where the caller passed none
    weights: Sequence[Any]  # flat


Again = Callable[[Inputs, Outputs], Inputs]
"""A backward pass in operations of torch, which can be differentiated as often as asked."""


class Call(NamedTuple):
    """All about a call of a module that is not a tensor."""

    prepared: Prepared
    use: Use | None
    asked: Asked
    again: Again

    @property
    def pack(self) -> Pack | None:
        return self.use and self.use.pack

    def check(self, x: Inputs, track: Tensor | None, kept: Tensor, pulls: Outputs) -> None:
        """Refuse what has other shapes than it had: native code reads by those."""
        self.prepared.check_unchanged(x.xs, x.weights, track, kept, self.pack)
        self.prepared.check_pulls(x.xs, *pulls)


def backward(call: Call, x: Inputs, kept: Sequence[Tensor | None], pulls: Outputs) -> Inputs:
    """The pulls on x, by a node of autograd that can be differentiated.

    `kept` is the track and what else the forward pass has kept.
    """
    n, m = len(x.states), len(x.weights)
    tensors = x.xs, *x.states, *x.weights, pulls.ys, *pulls.states
    pack = call.use.kept() if call.use else NOTHING_KEPT
    xs, *rest = _Backward.apply(call, n, m, *kept, *pack, *tensors)
    return Inputs(xs, rest[:n], rest[n:])


class _Backward(torch.autograd.Function):
    """The native backward pass of a call; its own is `Stack`."""

    apply: Any = torch._C._FunctionBase.__dict__["apply"]  # as of `native._Node`

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        n: int,
        m: int,
        track: Tensor | None,
        kept: Tensor,
        sizes: Tensor | None,
        order: Tensor | None,
        back: Tensor | None,
        *tensors: Tensor | None,
    ) -> Any:
        x, pulls = _sorted(tensors, n, m)
        how = call.asked, call.use
        dxs, dstate, dws = call.prepared.backward(x.xs, x.weights, track, kept, *pulls, *how)
        ctx.save_for_backward(track, kept, sizes, order, back, *tensors)
        ctx.call, ctx.n, ctx.m = call, n, m
        ctx.set_materialize_grads(False)
        return dxs, *dstate[:n], *dws

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if is_mapped(grads):
            return mapped(_Backward.backward, ctx, grads)
        track, kept, *pack = ctx.saved_tensors[:5]
        tensors = ctx.saved_tensors[5:]
        if torch.is_grad_enabled():
            return *[None] * 8, *_by_autograd(ctx.call.again, tensors, ctx.n, ctx.m, grads)
        x, pulls = _sorted(tensors, ctx.n, ctx.m)
        call = ctx.call._replace(use=restored(ctx.call.use, x.xs, *pack))
        call.check(x, track, kept, pulls)
        xs, *rest = grads
        needs, u = ctx.needs_input_grad[8:], Inputs(xs, rest[: ctx.n], rest[ctx.n :])
        stack = Stack(call, x, track, kept)
        outputs = stack.along(u)
        of, _ = _sorted(needs, ctx.n, ctx.m)
        found = stack.back(pulls, Asked(of.xs, any(of.states), any(of.weights)))
        dstate, dws = found.states or [None] * ctx.n, found.weights or [None] * ctx.m
        every = found.xs, *dstate, *dws, outputs.ys, *outputs.states
        return *[None] * 8, *[t if need else None for t, need in zip(every, needs, strict=True)]


def _sorted(tensors: Sequence[Any], n: int, m: int) -> tuple[Inputs, Outputs]:
    xs, *rest = tensors
    pulls = Outputs(rest[n + m], rest[n + m + 1 :])
    return Inputs(xs, rest[:n], rest[n : n + m]), pulls


def _by_autograd(
    again: Again, tensors: Sequence[Tensor | None], n: int, m: int, grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The same in operations of torch, leaving a graph behind."""
    own = [None if t is None else apart(t) for t in tensors]
    xs, states, weights = again(*_sorted(own, n, m))
    found = zip((xs, *states, *weights), grads, strict=True)
    ends = [(d, u) for d, u in found if d is not None and u is not None and d.requires_grad]
    wanted = [t for t in own if t is not None and t.requires_grad]
    pulled = iter(
        torch.autograd.grad(
            *([d for d, _ in ends], wanted, [u for _, u in ends]),
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(pulled) if t is not None and t.requires_grad else None for t in own]


@final
class Rows:
    """Rows of time and batch, one step's after the other's: all of one length, or packed.

    States have those before the first step in front of them.
    """

    sizes: Sizes | None = None  # how many go on, where that is not all of them

    def __init__(self, xs: Tensor, steps: int, count: int, pack: Pack | None) -> None:
        self.shape, self.steps, self.count, self.pack = xs.shape[:-1], steps, count, pack
        if pack is not None and int(pack.sizes[-1]) < count:
            running = torch.cat((pack.sizes[:1], pack.sizes))
            self.sizes = Sizes(running, running.cumsum(0).sub_(count))
            each = torch.arange(count, device=xs.device)
            self.lengths = (pack.sizes.unsqueeze(1) > each).sum(0)
            self.ends = self.sizes.starts[self.lengths - 1].add_(each)

    def flat(self, t: Tensor) -> Tensor:
        """All rows, from the caller's layout,"""
        return t.reshape(-1, t.shape[-1])

    def given(self, t: Tensor) -> Tensor:
        """and back."""
        return t.view(*self.shape, t.shape[-1])

    def taken(self, states: Sequence[Tensor | None]) -> list[Any]:
        """Stacked states in the order of the rows, from the caller's,"""
        return picked(states, self.pack and self.pack.order)

    def handed(self, states: Sequence[Tensor]) -> list[Tensor]:
        """and back."""
        return picked(states, self.pack and self.pack.back)

    def written(self, hs: Tensor) -> Tensor:
        """The states after each step."""
        return hs[self.count :]

    def last(self, hs: Tensor) -> Tensor:
        """The state in which each row ended."""
        return hs[-self.count :] if self.sizes is None else self.written(hs)[self.ends]

    def turned(self, t: Tensor, direction: int) -> Tensor:
        """As a direction meets them, from as time runs; or back."""
        if not direction:
            return t
        if self.sizes is None:
            return t.unflatten(0, (self.steps, self.count)).flip(0).flatten(0, 1)
        return t[self._last_first]

    @functools.cached_property
    def _last_first(self) -> Tensor:
        """Of every row's steps the last in the place of the first."""
        assert self.sizes is not None
        running, starts = self.sizes
        steps = torch.arange(self.steps, device=running.device).repeat_interleave(running[1:])
        rows = torch.arange(len(steps), device=running.device).sub_(starts[steps])
        return starts[self.lengths[rows] - 1 - steps].add_(rows)

    def mask(self, dropout: Dropout, t: Tensor, level: int) -> Tensor:
        """What of the outputs of the level below this one reads."""
        sizes = self.pack and self.pack.sizes
        return self.flat(dropout.whole_mask(self.given(t), level - 1, sizes))


@final
class Stack:
    """Layers and directions around one forward pass: once `along`, then once `back`."""

    def __init__(self, call: Call, x: Inputs, track: Tensor | None, kept: Tensor) -> None:
        prepared, use = call.prepared, call.use
        steps, count = prepared.shape[:2]
        self.rows = rows = Rows(x.xs, steps, count, call.pack)
        layers, xs = prepared.layers, rows.flat(x.xs)
        traces = prepared.traces(track, kept, len(xs))
        self.directions, self.each = prepared.stack.directions, len(x.weights) // len(layers)
        dropout = Dropout(use.dropout, use.seed) if use and use.dropout else None
        self.levels, self.masks = list[list[Strand]](), list[Tensor | None]()
        for level, places in enumerate(self._places(len(layers))):
            if level:
                below = places[0] - self.directions
                xs = self._beside([trace.hs for trace in traces[below : places[0]]])
            self.masks.append(rows.mask(dropout, xs, level) if dropout and level else None)
            xs = self._masked(xs, level)
            self.levels.append(
                [
                    Strand(
                        *(layers[i], self._of(x.weights, i)),
                        *(rows.turned(xs, d), traces[i], rows.sizes),
                    )
                    for d, i in enumerate(places)
                ]
            )

    def _places(self, count: int) -> list[range]:
        """Where each level's strands are in PyTorch's order."""
        return [range(i, i + self.directions) for i in range(0, count, self.directions)]

    def _of(self, weights: Sequence[Any], place: int) -> Sequence[Any]:
        return weights[place * self.each : (place + 1) * self.each]

    def _masked(self, t: Tensor, level: int) -> Tensor:
        """What of this passes between a level and what it reads."""
        mask = self.masks[level]
        return t if mask is None else t * mask

    def along(self, u: Inputs) -> Outputs:
        """How the outputs change along u."""
        rows, last = self.rows, list[list[Tensor]]()
        ys, states = None if u.xs is None else rows.flat(u.xs), rows.taken(u.states)
        for level, strands in enumerate(self.levels):
            xs, tracks = None if ys is None else self._masked(ys, level), []
            for d, strand in enumerate(strands):
                place = level * self.directions + d
                first = [None if s is None else s[place] for s in states]
                own = self._of(u.weights, place)
                tracks.append(strand.along(None if xs is None else rows.turned(xs, d), own, first))
            ys = self._beside([hs for hs, *_ in tracks])
            last += [[rows.last(track) for track in some] for some in tracks]
        return Outputs(None if ys is None else rows.given(ys), rows.handed(_stacked(last)))

    def back(self, pulls: Outputs, asked: Asked) -> Inputs:
        """What ⟨dy, y_u⟩ pulls on all inputs with, where these are dy."""
        rows, ddfirst, ddws = self.rows, list[list[Tensor]](), list[Tensor]()
        dys, ddys, states = pulls.ys, None, rows.taken(pulls.states)
        dys = None if dys is None else rows.flat(dys)
        for level, strands in reversed([*enumerate(self.levels)]):
            found = []
            for d, strand in enumerate(strands):
                place = level * self.directions + d
                last = [None if s is None else s[place] for s in states]
                dhs, ddhs = self._half(dys, d), self._half(ddys, d)
                own = asked._replace(xs=level > 0 or asked.xs)
                found.append(strand.back(dhs, last, ddhs, level > 0, own))
            ddfirst[:0] = [pulled.ddfirst for pulled in found]
            ddws[:0] = [dw for pulled in found for dw in pulled.ddws]
            dys = self._below(level, [pulled.dxs for pulled in found])
            ddys = self._below(level, [pulled.ddxs for pulled in found])
        ddxs = None if ddys is None else rows.given(ddys)
        return Inputs(ddxs, rows.handed(_stacked(ddfirst)), ddws)

    def _beside(self, halves: Sequence[Tensor]) -> Tensor:
        """What the directions of a level wrote, time running forwards, from their states."""
        turned = [self.rows.turned(self.rows.written(hs), d) for d, hs in enumerate(halves)]
        return turned[0] if len(turned) == 1 else torch.cat(turned, 1)

    def _half(self, ys: Tensor | None, direction: int) -> Tensor | None:
        """What of the pulls on a level's outputs is one direction's, as it met time."""
        if ys is None or self.directions == 1:
            return ys
        return self.rows.turned(ys.chunk(2, 1)[direction], direction)

    def _below(self, level: int, parts: Sequence[Tensor | None]) -> Tensor | None:
        """The pulls of all directions on what they read, as those on the outputs below."""
        turned = [self.rows.turned(part, d) for d, part in enumerate(parts) if part is not None]
        return self._masked(sum(turned[1:], turned[0]), level) if turned else None


def _stacked(states: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    if len(states) == 1:
        return [s.unsqueeze(0) for s in states[0]]
    return [torch.stack(each) for each in zip(*states, strict=True)]
