"""The recurrence as one differentiable PyTorch operation.

Run eagerly it is an `autograd.Function`; inside `torch.compile` it is a custom operator, which the
compiler takes as it is. Both run `elman.stack`. Where the gradient itself is to be differentiated
(`create_graph=True`) it is computed again as a bare loop that autograd can see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from elman import kernels
from elman.cells import Layer
from elman.errors import UserError
from elman.gradients.carry import Carry, Sliding
from elman.gradients.memory import Memory, Stored
from elman.kernels import Job, Kernel
from elman.kernels.bare import Bare
from elman.sliding import slide
from elman.stack import Pulls, Stack
from elman.strand import Dropout, States


@final
@dataclass(frozen=True)
class Recipe:
    """All about a stack that is not a tensor."""

    cell: str
    bias: bool
    projected: bool
    directions: int
    dropout: float
    carry: Carry
    memory: Memory

    def layers(self, weights: Sequence[Tensor]) -> list[Layer]:
        """Flat weights in PyTorch's order, put together as layers."""
        each = 2 + 2 * self.bias + self.projected
        return [self._layer(weights[i : i + each]) for i in range(0, len(weights), each)]

    def _layer(self, w: Sequence[Tensor]) -> Layer:
        b_ih, b_hh = (w[2], w[3]) if self.bias else (None, None)
        return Layer(w[0], w[1], b_ih, b_hh, w[-1] if self.projected else None)

    def job(self, x: Inputs) -> Job:
        """What the kernels are asked to run."""
        layers, h = self.layers(x.weights), x.stacked[0]
        above = [h.new_empty(1).expand(*x.xs.shape[:2], w.W_ih.shape[1]) for w in layers]
        inputs = [x.xs] * self.directions + above[self.directions :]
        return Job(self.cell, layers, inputs, unstack(x.stacked))

    def keeping(self, keep: bool) -> tuple[bool, bool]:
        """Whether the way there keeps anything, and gates too: Sliding wants states only."""
        if not isinstance(self.carry, Sliding):
            return keep, True
        return keep and isinstance(self.memory, Stored), False

    def stack(self, x: Inputs, kernel: Kernel | None = None) -> Stack:
        """The stack that these inputs run through, on the kernel that takes them."""
        kernel = kernels.select(self.job(x)) if kernel is None else kernel
        return Stack(
            self.cell,
            self.layers(x.weights),
            self.directions,
            [kernel] * self.directions,
            self.carry,
            self.memory,
            None if x.seed is None else Dropout(self.dropout, int(x.seed)),
            x.lengths,
        )


class Inputs(NamedTuple):
    """The tensors that go into the operation."""

    xs: Tensor  # (T, B, input), or (T, B) ids
    stacked: Sequence[Tensor]  # h, or h and c, of all layers, stacked as PyTorch does
    weights: Sequence[Tensor]
    lengths: Tensor | None  # (B,), or None where all rows are as long as xs
    seed: Tensor | None  # of the dropout masks, or None where nothing is dropped

    def flat(self) -> list[Tensor]:
        """All that may want a gradient."""
        return [self.xs, *self.stacked, *self.weights]


def unstack(stacked: Sequence[Tensor]) -> States:
    """h (and c) of all layers, stacked as PyTorch does, as one state per layer."""
    return list(zip(*stacked, strict=True))


def restack(states: States) -> tuple[Tensor, ...]:
    """The way back from `unstack`."""
    return tuple(map(torch.stack, zip(*states, strict=True)))


def recurrence(recipe: Recipe, x: Inputs) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ys (T, B, directions · hidden) and the last states, stacked as PyTorch does."""
    ys, *last = _Eager.apply(
        recipe, len(x.stacked), x.lengths, x.seed, x.xs, *x.stacked, *x.weights
    )
    return ys, tuple(last)


class _Eager(torch.autograd.Function):
    """The operation as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe,
        n: int,
        lengths: Tensor | None,
        seed: Tensor | None,
        xs: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        keep = any(ctx.needs_input_grad)
        x = Inputs(xs, tensors[:n], tensors[n:], lengths, seed)
        stack = recipe.stack(x)
        ys, last, kept = forward(recipe, x, stack, keep)
        if keep:
            ctx.save_for_backward(lengths, seed, xs, *tensors, *kept)
            ctx.recipe, ctx.kernel, ctx.n, ctx.m = recipe, stack.kernels[0], n, len(tensors)
            ctx.set_materialize_grads(False)
        return ys, *last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        lengths, seed, xs, *rest = ctx.saved_tensors
        x = Inputs(xs, rest[: ctx.n], rest[ctx.n : ctx.m], lengths, seed)
        stack, (dys, *dlast) = ctx.recipe.stack(x, ctx.kernel), grads
        needs_dxs = ctx.needs_input_grad[4]
        dxs, dstacked, dws = backward(stack, x, rest[ctx.m :], dys, dlast, needs_dxs)
        return None, None, None, None, dxs, *dstacked, *dws


def forward(
    recipe: Recipe, x: Inputs, stack: Stack, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...], list[Tensor]]:
    """ys, the last states, and what is kept for the way back."""
    _check_ids(x)
    ys, last, kept = stack.forward(x.xs, unstack(x.stacked), *recipe.keeping(keep))
    return ys, restack(last), kept


def backward(
    stack: Stack,
    x: Inputs,
    kept: list[Tensor],
    dys: Tensor | None,
    dlast: Sequence[Tensor | None],
    needs_dxs: bool,
) -> tuple[Tensor | None, tuple[Tensor, ...], list[Tensor]]:
    """The pulls on xs, on the first states (stacked) and on the weights (flat)."""
    pulls = [torch.zeros_like(s) if d is None else d for s, d in zip(x.stacked, dlast, strict=True)]
    found = _reversed(stack, x.xs, unstack(x.stacked), kept, dys, unstack(pulls), needs_dxs)
    return found.dxs, state_pulls(found, x), weight_pulls(found, x)


def state_pulls(found: Pulls, x: Inputs) -> tuple[Tensor, ...]:
    """The pulls on the first states, stacked and in their dtype."""
    return tuple(d.to(s.dtype) for d, s in zip(restack(found.dstates), x.stacked, strict=True))


def weight_pulls(found: Pulls, x: Inputs) -> list[Tensor]:
    """The pulls on the weights, flat and in their dtype."""
    flat = [d for dw in found.dws for d in dw if d is not None]
    return [d.to(w.dtype) for d, w in zip(flat, x.weights, strict=True)]


def _reversed(
    stack: Stack,
    xs: Tensor,
    states: States,
    kept: list[Tensor],
    dys: Tensor | None,
    dlast: States,
    needs_dxs: bool,
) -> Pulls:
    """Back by the kernel, or by a loop that can be differentiated again if autograd is watching."""
    watched = torch.is_grad_enabled()
    if isinstance(stack.carry, Sliding):
        once = _bare if watched else _there_and_back
        return slide(stack, xs, states, kept, dys, dlast, needs_dxs, once)
    xi = stack.draw(xs)
    if watched:
        return _bare(stack, xs, states, dys, dlast, needs_dxs, xi)
    return stack.backward(xs, states, kept, dys, dlast, needs_dxs, xi)


def _there_and_back(
    stack: Stack,
    xs: Tensor,
    states: States,
    dys: Tensor | None,
    dlast: States,
    needs_dxs: bool,
) -> Pulls:
    """A whole pass with nothing cut, from nothing but the inputs."""
    kept = stack.forward(xs, states, keep=True)[2]
    return stack.backward(xs, states, kept, dys, dlast, needs_dxs, None)


def _bare(
    stack: Stack,
    xs: Tensor,
    states: States,
    dys: Tensor | None,
    dlast: States,
    needs_dxs: bool,
    xi: Tensor | None = None,
) -> Pulls:
    """The same by autograd, leaving a graph behind."""
    loops = [Bare(stack.turn_xi(xi, d)) for d in range(stack.directions)]
    seen = stack.replaced(kernels=loops, memory=Stored())
    ys, last, _ = seen.forward(xs, states, keep=False)
    outs = zip([ys, *_flat(last)], [dys, *_flat(dlast)], strict=True)
    outs = [(y, d) for y, d in outs if d is not None and y.requires_grad]
    wanted = [t for t in (xs, *_flat(states), *_flat(stack.layers)) if t.requires_grad]
    ends, pulls = ([y for y, _ in outs], [d for _, d in outs])
    found = torch.autograd.grad(ends, wanted, pulls, create_graph=True, allow_unused=True)
    grads = {id(t): g for t, g in zip(wanted, found, strict=True) if g is not None}

    def pull(t: Tensor) -> Tensor:
        return grads[id(t)] if id(t) in grads else torch.zeros_like(t)

    dws = [w.map(pull) for w in stack.layers]
    return Pulls(pull(xs) if needs_dxs else None, [tuple(map(pull, s)) for s in states], dws)


def _flat(tensors: Sequence[Sequence[Tensor | None]]) -> list[Tensor]:
    return [t for some in tensors for t in some if t is not None]


def _check_ids(x: Inputs) -> None:
    """Ids must be columns of W_ih; on a GPU the check waits for nobody."""
    if x.xs.is_floating_point():
        return
    size = x.weights[0].shape[1]
    inside = ((x.xs >= 0) & (x.xs < size)).all()
    if x.xs.is_cuda:
        torch._assert_async(inside)
    elif not inside:
        raise UserError(
            f"input has ids from {int(x.xs.min())} to {int(x.xs.max())}; "
            f"ids are one-hot rows and lie between 0 and input_size - 1 = {size - 1}"
        )
