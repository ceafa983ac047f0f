"""Calls on our CPU kernel that have been met before: one node of autograd, and little Python.

`operator.recurrence` takes any stack; this takes the commonest call again once everything about its
shapes is known (`kernels.cpu.calls`): nothing cut, everything stored, nothing drawn. A small layer
takes the processor less time than Python takes to find out what is to be run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from elman.kernels.cpu import KERNEL
from elman.kernels.cpu.calls import Prepared
from elman.recurrence.operator import Inputs, Recipe, backward
from elman.recurrence.strand import uncast


def takes(recipe: Recipe) -> bool:
    """Whether this is such a stack."""
    plain = recipe.carry.exact and not recipe.carry.in_blocks and recipe.memory.keeps_all
    return plain and recipe.chunks is None and not recipe.projected


def recurrence(
    call: Prepared, recipe: Recipe, xs: Tensor, state: Sequence[Tensor] | None, weights: list[Any]
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """ys and the last states, as `operator.recurrence`; None where ids are out of range."""
    state = state or ()
    try:
        ys, *last = _Node.apply(call, recipe, len(state), xs, *state, *weights)
    except _OutOfRange:
        return None
    return ys, tuple(last)


@final
class _OutOfRange(Exception):
    """Ids that the long way refuses in words."""


class _Node(torch.autograd.Function):
    """The call as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any, call: Prepared, recipe: Recipe, n: int, xs: Tensor, *tensors: Tensor
    ) -> Any:
        keep = any(ctx.needs_input_grad)
        result = call.forward(xs, tensors[:n] or None, keep)
        if result is None:
            raise _OutOfRange
        ys, last, kept = result
        if keep:
            ctx.save_for_backward(xs, call.track_of(ys), kept, *tensors)
            ctx.call, ctx.recipe, ctx.n = call, recipe, n
            ctx.set_materialize_grads(False)
        return call.outputs_of(ys), *last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dys, *dlast = grads
        xs, track, kept, *tensors = ctx.saved_tensors
        state, weights = tensors[: ctx.n], tensors[ctx.n :]
        needs_dxs = ctx.needs_input_grad[3]
        if torch.is_grad_enabled():
            dxs, dstate, dws = _by_autograd(ctx, xs, state, weights, dys, dlast, needs_dxs)
        else:
            found = ctx.call.backward(xs, weights, track, kept, dys, dlast, needs_dxs)
            dxs, dstate, dws = found
        return None, None, None, dxs, *dstate[: ctx.n], *dws


def _by_autograd(
    ctx: Any,
    xs: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    dys: Tensor | None,
    dlast: Sequence[Tensor | None],
    needs_dxs: bool,
) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor]]:
    """The same pulls, leaving a graph behind to differentiate them again."""
    real = ctx.call.dtype
    stacked = state or [torch.zeros(ctx.call.stacked, dtype=real) for _ in dlast]
    xs = xs.to(ctx.call.input_dtype)  # which autocast may have found narrower, as all of these
    x = Inputs(xs, [s.to(real) for s in stacked], weights, None, None)
    dys, *dlast = [None if d is None else d.to(real) for d in (dys, *dlast)]
    with uncast(xs):
        return backward(ctx.recipe.stack(x, KERNEL), x, [], dys, dlast, needs_dxs)
