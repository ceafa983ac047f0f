"""A carry in blocks (`Sliding`) over a whole stack: one pass back per block of losses.

A block's losses go back through the steps of its window alone. The states at the window's edges
are taken as constant, except where an edge is an end of the sequence: there the caller's own first
state enters, and keeps its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from elman.cells import State
from elman.gradients.carry import Block
from elman.gradients.memory import Stored
from elman.gradients.through_time import Trace
from elman.recurrence.stack import Pulls, Stack
from elman.recurrence.strand import States


class Reverse(Protocol):
    """One pass, forwards and back, over a window by itself."""

    def __call__(
        self,
        stack: Stack,
        xs: Tensor,
        states: States,
        dys: Tensor | None,
        dlast: States,
        needs_dxs: bool,
    ) -> Pulls: ...


def slide(
    stack: Stack,
    xs: Tensor,
    states: States,
    kept: list[Tensor],
    dys: Tensor | None,
    dlast: States,
    needs_dxs: bool,
    reverse: Reverse,
) -> Pulls:
    """The sum of one pass per block."""
    total = Pulls.zeros(stack, xs, states, needs_dxs)
    for block, before in edges(stack, xs, states, kept):
        window = slice(block.start, block.stop)
        pull = None if dys is None else only(dys[window], block)
        ends = ending(stack, block, len(xs), dlast)
        sub = stack.within(block.start, block.stop)
        block_pulls = reverse(sub, xs[window], before, pull, ends, needs_dxs)
        total.add(block_pulls, window, beginning(stack, block, len(xs)))
    return total


def edges(
    stack: Stack, xs: Tensor, states: States, kept: list[Tensor]
) -> Iterator[tuple[Block, States]]:
    """Every block with the states that enter its window, found again or taken from `kept`."""
    blocks = stack.carry.blocks(len(xs), both_ways=stack.directions == 2)
    if stack.directions == 1 and not kept:
        return _walked(stack, xs, states, blocks)
    with torch.no_grad():
        kept = kept or stack.replaced(memory=Stored()).forward(xs, states, True, gates=False)[2]
    traces = stack.traces(kept)
    return ((block, _entering(stack, states, traces, block, len(xs))) for block in blocks)


def _walked(
    stack: Stack, xs: Tensor, states: States, blocks: Iterator[Block]
) -> Iterator[tuple[Block, States]]:
    """Walk forwards from window to window; nothing else is kept."""
    strand, at = stack.levels()[0][0], 0
    for block in blocks:
        with torch.no_grad():
            states = strand.advance(xs, states, at, block.start) if block.start > at else states
        at = block.start
        yield block, states


def _entering(stack: Stack, first: States, traces: list[Trace], block: Block, steps: int) -> States:
    """The state with which each layer and direction enters a window."""
    begins = beginning(stack, block, steps)
    return [
        own if here is True else _inside(stack, place, trace, block, steps, own, here)
        for place, (own, trace, here) in enumerate(zip(first, traces, begins, strict=True))
    ]


def _inside(
    stack: Stack,
    place: int,
    trace: Trace,
    block: Block,
    steps: int,
    own: State,
    here: Tensor | bool,
) -> State:
    """The state at a window's edge in the midst of time, but for rows that begin `here`."""
    if place % stack.directions == 0:
        return trace.state(block.start)
    if not isinstance(here, Tensor) or stack.lengths is None:
        return trace.state(steps - block.stop)
    moment = (stack.lengths - block.stop).clamp(min=0)
    rows = torch.arange(len(moment), device=moment.device)
    tracks = [s for s in (trace.hs, trace.cs) if s is not None]
    return tuple(torch.where(here, o, s[moment, rows]) for o, s in zip(own, tracks, strict=True))


def only(dys: Tensor, block: Block) -> Tensor:
    """The pull of the block's own losses; those of its neighbours in the window wait their turn."""
    mine = torch.zeros_like(dys)
    part = slice(block.first - block.start, block.last - block.start)
    mine[part] = dys[part]
    return mine


def ending(stack: Stack, block: Block, steps: int, dlast: States) -> States:
    """The pull on the last states, for the rows whose last step lies in this block."""
    ends = []
    for place, pulls in enumerate(dlast):
        if place % stack.directions == 1:
            here = torch.tensor(block.first == 0, device="cpu")
        elif stack.lengths is None:
            here = torch.tensor(block.last == steps, device="cpu")
        else:
            last = stack.lengths[:, None]
            here = (block.first < last) & (last <= block.last)
        ends.append(tuple(torch.where(here.to(d.device), d, 0) for d in pulls))
    return ends


def beginning(stack: Stack, block: Block, steps: int) -> list[Tensor | bool]:
    """For each layer and direction: do the caller's own first states enter this window?"""
    forward, back = block.start == 0, block.stop == steps
    late = back if stack.lengths is None else (stack.lengths <= block.stop)[:, None]
    return [late if place % stack.directions else forward for place in range(len(stack.layers))]
