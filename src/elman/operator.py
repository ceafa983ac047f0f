"""The recurrence as one differentiable PyTorch operation.

Run eagerly it is an `autograd.Function`; inside `torch.compile` it is a custom operator, which the
compiler takes as it is. Both call `elman.stack`. Where the gradient itself is to be differentiated
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
from elman.gradients.carry import Carry
from elman.gradients.memory import Memory
from elman.kernels import Job
from elman.stack import Stack
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

    def states(self, stacked: Sequence[Tensor]) -> States:
        """h (and c) of all layers, stacked as PyTorch does, as one state per layer."""
        return list(zip(*stacked, strict=True))

    def job(self, xs: Tensor, stacked: Sequence[Tensor], weights: Sequence[Tensor]) -> Job:
        layers, states = self.layers(weights), self.states(stacked)
        inputs = [
            xs if i < self.directions else _above(xs, w, stacked[0]) for i, w in enumerate(layers)
        ]
        return Job(self.cell, layers, inputs, states)

    def stack(
        self,
        xs: Tensor,
        stacked: Sequence[Tensor],
        weights: Sequence[Tensor],
        lengths: Tensor | None,
        seed: Tensor | None,
    ) -> Stack:
        job = self.job(xs, stacked, weights)
        kernel = kernels.select(job)
        dropout = None if seed is None else Dropout(self.dropout, int(seed))
        return Stack(
            self.cell,
            job.layers,
            self.directions,
            [kernel] * self.directions,
            self.carry,
            self.memory,
            dropout,
            lengths,
        )


def _above(xs: Tensor, w: Layer, h: Tensor) -> Tensor:
    """Something shaped like what a layer above the first reads, taking no memory."""
    return h.new_empty(1).expand(*xs.shape[:2], w.W_ih.shape[1])


class Inputs(NamedTuple):
    """Everything that goes into the operation."""

    xs: Tensor
    stacked: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    lengths: Tensor | None
    seed: Tensor | None


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recipe: Recipe, n: int, lengths, seed, xs, *tensors) -> Any:
        stacked, weights = tensors[:n], tensors[n:]
        keep = any(ctx.needs_input_grad)
        with torch.autocast(xs.device.type, enabled=False):
            stack = recipe.stack(xs, stacked, weights, lengths, seed)
            ys, last, kept = stack.forward(xs, recipe.states(stacked), keep)
        if keep:
            ctx.save_for_backward(xs, *tensors, *kept)
            ctx.recipe, ctx.stack, ctx.n, ctx.m = recipe, stack, n, len(weights)
            ctx.set_materialize_grads(False)
        return ys, *map(torch.stack, zip(*last, strict=True))

    @staticmethod
    def backward(ctx: Any, dys: Tensor | None, *dlast: Tensor | None) -> Any:
        xs, *saved = ctx.saved_tensors
        n, m, stack = ctx.n, ctx.m, ctx.stack
        stacked, kept = saved[:n], saved[n + m :]
        states = ctx.recipe.states(stacked)
        pulls = [
            torch.zeros_like(s) if d is None else d for s, d in zip(stacked, dlast, strict=True)
        ]
        with torch.autocast(xs.device.type, enabled=False):
            found = stack.backward(
                xs,
                states,
                kept,
                dys,
                ctx.recipe.states(pulls),
                ctx.needs_input_grad[4],
                stack.draw(xs),
            )
        dstacked = map(torch.stack, zip(*found.dstates, strict=True))
        dweights = [
            d.to(w.dtype)
            for w, d in zip(
                saved[n : n + m], (p for dw in found.dws for p in dw if p is not None), strict=True
            )
        ]
        return None, None, None, None, found.dxs, *dstacked, *dweights


def recurrence(
    recipe: Recipe,
    xs: Tensor,
    stacked: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ys (T, B, directions · hidden) and the last states, stacked as PyTorch does."""
    ys, *last = _Eager.apply(recipe, len(stacked), lengths, seed, xs, *stacked, *weights)
    return ys, tuple(last)
