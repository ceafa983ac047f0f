"""Forward and backward through a sequence whose outputs are too many to hold.

A module's output is O(T) by itself. Here the loss is taken piece by piece, in the backward pass, so
that nothing of size T × hidden exists beyond what the memory allows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from elman.cells import Gradients
from elman.errors import UserError
from elman.gradients.through_time import Trace
from elman.recurrence.operator import Inputs, Recipe, restack, state_pulls, unstack, weight_pulls
from elman.recurrence.sliding import edges
from elman.recurrence.stack import Pulls, Stack
from elman.recurrence.strand import Shelf, States, Strand

Loss = Callable[[Tensor, int], Tensor]
"""From a piece of the outputs, time first, and the step it starts at, to a number."""


def backward_through_time(
    recipe: Recipe, x: Inputs, loss: Loss
) -> tuple[Tensor, tuple[Tensor, ...], list[Tensor | None]]:
    """The loss, the last states, and the pulls on xs, the first states and the weights."""
    if recipe.chunks is not None:
        recipe.chunks.begin()
    stack, states = recipe.stack(x), unstack(x.stacked)
    pulls = Pulls.zeros(stack, x.xs, states, x.xs.requires_grad)
    total = Total(pulls, loss)
    run = _slid if stack.carry.in_blocks else _carried
    with torch.no_grad():
        last = run(stack, stack.levels()[0][0], x.xs, states, total)
    flat_pulls = [pulls.dxs, *state_pulls(pulls, x), *weight_pulls(pulls, x)]
    assert total.value is not None
    return total.value, restack(last), flat_pulls


class Total:
    """The loss so far, and the pulls so far."""

    def __init__(self, pulls: Pulls, loss: Loss) -> None:
        self.pulls, self.loss = pulls, loss
        self.value: Tensor | None = None

    def pull(self, ys: Tensor, start: int) -> Tensor:
        """Take the loss of a piece of outputs; what it pulls on them."""
        ys = ys.detach().requires_grad_()
        with torch.enable_grad():
            value = self.loss(ys, start)
            if not isinstance(value, Tensor) or value.dim() != 0:
                raise UserError(
                    f"loss(ys, start) returned {_kind(value)}; it must return one number, a scalar "
                    "tensor",
                    hint="sum (rather than average) over the piece, so that pieces add up",
                )
            if value.requires_grad:
                value.backward()
        self.value = (
            value.detach().clone() if self.value is None else self.value.add_(value.detach())
        )
        return torch.zeros_like(ys) if ys.grad is None else ys.grad

    def add(
        self,
        strand: Strand,
        xs: Tensor,
        traces: list[Trace],
        dys: Tensor,
        dstates: States,
        xi: Tensor | None,
        start: int,
        stop: int,
    ) -> States:
        """Carry one piece back; its pulls are added, that on its first states returned."""
        needs_dxs = self.pulls.dxs is not None
        sums: list[Gradients | None] = [*self.pulls.dws]  # added to in place
        dxs, dstates = strand.backward(xs, traces, dys, dstates, xi, start, stop, needs_dxs, sums)
        if self.pulls.dxs is not None and dxs is not None:
            self.pulls.dxs[start:stop] += dxs
        return dstates


def _carried(stack: Stack, strand: Strand, xs: Tensor, states: States, total: Total) -> States:
    """Forward keeping what the memory keeps; backward piece by piece, last to first."""
    plan = strand.plan(xs, states, stack.memory)
    hold, held = set(plan.kept()), Shelf(states, plan.slots + 1)
    for piece in range(plan.pieces):
        if piece in hold:
            held[piece] = states
        states = strand.advance(xs, states, *plan.bounds(piece))
    xi, dstates = stack.draw(xs)[0], total.pulls.dstates  # of a stack that runs one way
    for piece, before in strand.reversed_pieces(plan, xs, held):
        start, stop = plan.bounds(piece)
        traces = strand.forward(xs, before, start, stop)
        dys = total.pull(traces[-1].hs[1:], start)
        dstates = total.add(strand, xs, traces, dys, dstates, xi, start, stop)
    total.pulls.dstates[:] = dstates
    return states


def _slid(stack: Stack, strand: Strand, xs: Tensor, states: States, total: Total) -> States:
    """Forwards from block to block, each carried back through its own window.

    Not `sliding.slide`: there all outputs are at hand and their pulls given; here a block's loss is
    known only once it has run, and nothing of it is kept for the next. They share `edges`.
    """
    zeros = total.pulls.dstates
    dfirst, last = [tuple(d.clone() for d in s) for s in zeros], states
    for block, before in edges(stack, xs, states, []):
        traces = strand.forward(xs, before, block.start, block.stop)
        inside = block.first - block.start
        dys = torch.zeros_like(traces[-1].hs[1:])
        dys[inside:] = total.pull(traces[-1].hs[1 + inside :], block.first)
        dstates = total.add(strand, xs, traces, dys, zeros, None, block.start, block.stop)
        if block.start == 0:
            dfirst = [
                tuple(a + b for a, b in zip(d, more, strict=True))
                for d, more in zip(dfirst, dstates, strict=True)
            ]
        last = [trace.state(block.stop - block.start) for trace in traces]
    total.pulls.dstates[:] = dfirst
    return last


def _kind(value: object) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"
