"""A stack of layers, one way or both ways, over all of time: forwards, and back with a ξ.

Its strands run one after the other; between them there is only turning time round, joining the two
directions and dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from elman.cells import Cell, Gradients, Weights
from elman.gradients.carry import Carry, Full
from elman.gradients.memory import Memory, Stored
from elman.gradients.through_time import Trace
from elman.kernels import Kernel
from elman.recurrence.strand import Dropout, Noise, States, Strand, run, run_back


class Pulls(NamedTuple):
    """The loss's pull on everything that goes into a stack."""

    dxs: Tensor | None
    dstates: States
    dws: list[Gradients]

    @classmethod
    def zeros(cls, stack: Stack, xs: Tensor, states: States, needs_dxs: bool) -> Pulls:
        dxs = torch.zeros_like(xs) if needs_dxs and xs.is_floating_point() else None
        dstates = [tuple(map(torch.zeros_like, state)) for state in states]
        return cls(dxs, dstates, [w.zeros() for w in stack.layers])

    def add(self, part: Pulls, window: slice, begins: Sequence[Tensor | bool]) -> None:
        """Add the pulls found on a window of time; those on its first states where it begins."""
        if self.dxs is not None and part.dxs is not None:
            self.dxs[window] += part.dxs
        for dw, more in zip(self.dws, part.dws, strict=True):
            for d, m in zip(dw, more, strict=True):
                if d is not None and m is not None:
                    d += m
        for pulls, more, here in zip(self.dstates, part.dstates, begins, strict=True):
            for d, m in zip(pulls, more, strict=True):
                d += m * here


def draw(carry: Carry, xs: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A backward pass's ξ for weights of this dtype; None where it is 1 everywhere."""
    if carry.exact:
        return None
    dtype = torch.promote_types(dtype, torch.float32)
    return carry.weights(len(xs), xs.shape[1]).to(xs.device, dtype)


@final
@dataclass(frozen=True)
class Stack:
    """Layers in PyTorch's order (each layer's forward direction, then its reverse one)."""

    cell: Cell
    layers: Sequence[Weights]
    directions: int
    kernels: Sequence[Kernel]  # one per direction, or one per layer and direction
    carry: Carry
    memory: Memory
    dropout: Dropout | None = None
    lengths: Tensor | None = None
    noise: Noise | None = None

    def levels(self) -> list[list[Strand]]:
        """What can run only after the level below has run over all of time."""
        if self.directions == 1:
            noise, dropout = self.noise, self.dropout
            strand = Strand(
                self.kernels[0], self.cell, self.layers, dropout, self.lengths, noise=noise
            )
            return [[strand]]
        return [[self._strand(i), self._strand(i + 1)] for i in range(0, len(self.layers), 2)]

    def _strand(self, place: int) -> Strand:
        """One direction of one layer."""
        noise = None if self.noise is None else replace(self.noise, place=place)
        kernel, layers = self.kernels[place % len(self.kernels)], self.layers
        own = [layers[place]]
        return Strand(kernel, self.cell, own, None, self.lengths, len(layers), noise)

    def forward(
        self, xs: Tensor, states: States, keep: bool, gates: bool = True
    ) -> tuple[Tensor, States, list[Tensor]]:
        """ys, the last states, and what the memory keeps for `backward`."""
        last, kept, levels = [], [], self.levels()
        if keep and len(levels) > 1 and self.memory.bytes:
            self._check_budget(xs, states, levels)
        for level, strands in enumerate(levels):
            if level > 0:
                kept += [xs] if keep else []
                xs = xs if self.dropout is None else self.dropout(xs, level - 1, 0)
            ys = []
            for d, strand in enumerate(strands):
                before = states[self._slice(level, d)]
                y, after, held = run(strand, self.turn(xs, d), before, self.memory, keep, gates)
                ys.append(self.turn(y, d))
                last += after
                kept += held
            xs = ys[0] if len(ys) == 1 else torch.cat(ys, -1)
        return xs, last, kept

    def draw(self, xs: Tensor) -> list[Tensor | None]:
        """This backward pass's ξ of every layer and direction; None where it is 1 everywhere.

        They share one, as a cut is a moment in time. But through several layers that run both ways
        a path may go back and forth and cross a moment twice, and E[ξ²] is not 1: there chance is
        drawn for each layer and direction, each of which crosses a moment once.
        """
        places, dtype = len(self.layers), self.layers[0].W_hh.dtype
        if self.carry.random and self.directions == 2 and places > 2:
            return [draw(self.carry, xs, dtype) for _ in range(places)]
        return [draw(self.carry, xs, dtype)] * places

    def backward(
        self,
        xs: Tensor,
        states: States,
        kept: list[Tensor],
        dys: Tensor | None,
        dlast: States,
        needs_dxs: bool,
        xis: Sequence[Tensor | None],
    ) -> Pulls:
        """The pulls on xs, the first states and the weights: one pass back through all of time."""
        levels = self.levels()
        inputs, held = self._sorted(kept, xs, levels, self._cut(xs, states, levels))
        dws: list[Gradients | None] = [None for _ in self.layers]
        dstates = list(dlast)
        for level in reversed(range(len(levels))):
            dropout = self.dropout if level > 0 else None
            x = inputs[level] if dropout is None else dropout(inputs[level], level - 1, 0)
            dx = None
            for d, strand in enumerate(levels[level]):
                here = self._slice(level, d)
                own = dws[here]
                dx_d, dstates[here] = run_back(
                    strand,
                    self.turn(x, d),
                    states[here],
                    self.memory,
                    held[level][d],
                    None if dys is None else self.turn(self._half(dys, d), d),
                    dstates[here],
                    self.turn_xi(xis[here.start], d),
                    needs_dxs or level > 0,
                    own,
                )
                dws[here] = own
                if dx_d is not None:
                    dx = self.turn(dx_d, d) if dx is None else dx + self.turn(dx_d, d)
            if dropout is not None and dx is not None:
                dx = dx * dropout.mask(dx, level - 1, 0)
            dys = dx
        return Pulls(dys if needs_dxs else None, dstates, [dw for dw in dws if dw is not None])

    def replaced(self, **changes: Any) -> Stack:
        """The same stack but for some of its fields."""
        return replace(self, **changes)

    def traces(self, kept: list[Tensor]) -> list[Trace]:
        """What `forward` kept with `Stored`, as the trace of every layer in PyTorch's order."""
        levels = self.levels()
        _, held = self._sorted(kept, kept[0], levels, [False] * len(levels))
        return [
            trace
            for strands, kepts in zip(levels, held, strict=True)
            for strand, own in zip(strands, kepts, strict=True)
            for trace in strand.traces(own)
        ]

    def within(self, start: int, stop: int) -> Stack:
        """The same stack on the steps [start, stop) alone, everything stored, nothing cut."""
        lengths = None if self.lengths is None else (self.lengths - start).clamp(0, stop - start)
        dropout = None if self.dropout is None else self.dropout.moved(start)
        noise = self.noise
        noise = None if noise is None else replace(noise, origin=noise.origin + start)
        whole = replace(self, carry=Full(), memory=Stored(), lengths=lengths)
        return replace(whole, dropout=dropout, noise=noise)

    def turn(self, xs: Tensor, direction: int) -> Tensor:
        """Time turned round for the reverse direction, each row within its own length."""
        if direction == 0:
            return xs
        if self.lengths is None:
            return xs.flip(0)
        t = torch.arange(len(xs), device=xs.device)[:, None]
        back = torch.where(t < self.lengths, self.lengths - 1 - t, t)
        return xs[back, torch.arange(xs.shape[1], device=xs.device)]

    def turn_xi(self, xi: Tensor | None, direction: int) -> Tensor | None:
        """ξ as the reverse direction meets it: the same moments, its own first one uncut."""
        if xi is None or direction == 0:
            return xi
        if self.lengths is None:
            return torch.cat([torch.ones_like(xi[:1]), xi[1:].flip(0)])
        steps, rows = len(xi), torch.arange(len(self.lengths), device=xi.device)
        xi = xi if xi.dim() == 2 else xi[:, None].expand(steps, len(rows))
        moment = self.lengths - torch.arange(steps, device=xi.device)[:, None]
        inside = (moment > 0) & (moment < self.lengths)
        return torch.where(inside, xi[moment.clamp(0, steps - 1), rows], 1)

    def _slice(self, level: int, direction: int) -> slice:
        """The places of a strand's layers in PyTorch's order."""
        if self.directions == 1:
            return slice(0, len(self.layers))
        return slice(2 * level + direction, 2 * level + direction + 1)

    def _half(self, dys: Tensor, direction: int) -> Tensor:
        return dys if self.directions == 1 else dys.chunk(2, -1)[direction]

    def _cut(self, xs: Tensor, states: States, levels: list[list[Strand]]) -> list[bool]:
        """Of each level, whether the memory cuts its time: wider inputs fill a budget sooner."""
        above = self._above(xs, states)
        plans = [
            strands[0].plan(above if level else xs, states[self._slice(level, 0)], self.memory)
            for level, strands in enumerate(levels)
        ]
        return [plan.pieces > 1 for plan in plans]

    def _check_budget(self, xs: Tensor, states: States, levels: list[list[Strand]]) -> None:
        """Plan the level that takes most first: what a refusal names must do for all of them."""
        first, above = (xs, states[:1]), (self._above(xs, states), states[2:3])
        both = [(levels[0][0], first), (levels[1][0], above)]
        strand, job = max(both, key=lambda level: level[0].sizes(*level[1]).step)
        strand.plan(*job, self.memory)

    def _above(self, xs: Tensor, states: States) -> Tensor:
        """What the levels above the first read, without its numbers."""
        h = states[0][0]
        return h.new_empty(1).expand(*xs.shape[:2], self.directions * h.shape[-1])

    def _sorted(
        self, kept: list[Tensor], xs: Tensor, levels: list[list[Strand]], cut: list[bool]
    ) -> tuple[list[Tensor], list[list[list[Tensor]]]]:
        """What `forward` kept, as each level's inputs and each strand's own.

        A strand whose time is cut keeps its states alone, all others what a trace has.
        """
        few = len(self.cell.states) * len(levels[0][0].layers)
        whole = len(kept) - (len(levels) - 1) - few * self.directions * sum(cut)
        many = whole // (self.directions * max(1, len(levels) - sum(cut)))
        inputs, held, kept = [xs], [], list(kept)
        for level, each in enumerate([few if c else many for c in cut]):
            if level > 0:
                inputs.append(kept.pop(0))
            held.append([[kept.pop(0) for _ in range(each)] for _ in range(self.directions)])
        return inputs, held
