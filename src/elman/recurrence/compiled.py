"""The recurrence as a custom operator, for `torch.compile`.

The compiler does not look inside: it learns the shapes of what comes out and calls the operator.
A custom operator takes tensors and plain values only, so a carry and a memory (which may hold a
generator), and what a module knows of its chunks, travel as a number that `register` gave out.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from elman.gradients.carry import Carry
from elman.gradients.memory import Memory
from elman.kernels import Empty
from elman.kernels.choice import named_kernel
from elman.kernels.cpu import KERNEL
from elman.recurrence import compiled_calls
from elman.recurrence.operator import (
    Inputs,
    Recipe,
    backward,
    forward,
    restack,
    selected,
    unstack,
)
from elman.recurrence.seams import Chunks
from elman.recurrence.strand import Dropout


@final
@dataclass(frozen=True)
class Registered:
    """A carry, a memory and chunks, and the number by which the operator knows them."""

    number: int
    carry: Carry
    memory: Memory
    chunks: Chunks | None


KEPT = 2
"""To be changed when the operator keeps anything else for its backward pass."""

_BY_KEY: WeakValueDictionary[Hashable, Registered] = WeakValueDictionary()
_BY_NUMBER: WeakValueDictionary[int, Registered] = WeakValueDictionary()
_COMPILED: dict[int, Registered] = {}


def register(carry: Carry, memory: Memory, chunks: Chunks | None = None) -> Registered:
    """Give them a number. It holds as long as the caller keeps what is returned; once the operator
    has been called with it, compiled code may hold it too, and it stays for good."""
    key = (carry.key(), memory, None if chunks is None else id(chunks))
    registered = _BY_KEY.get(key)
    if registered is None:
        number = _number(carry, memory, chunks)
        while number in _BY_NUMBER:  # of another with draws, or chunks, of its own
            number += 1
        registered = _BY_KEY[key] = Registered(number, carry, memory, chunks)
        _BY_NUMBER[number] = registered
    return registered


def _number(carry: Carry, memory: Memory, chunks: Chunks | None) -> int:
    """A number that is the same in every process where the same is kept for the backward pass.

    Compilers find graphs that other processes left on disk by what a graph says, which is this
    number: what was compiled for other tensors must not be found.
    """
    kind = type(carry), carry.exact, carry.in_blocks, memory, chunks and chunks.settings
    return _digest(repr((KEPT, kind, named_kernel(), KERNEL.library is None)))


@functools.lru_cache(1000)
def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def _recipe(
    cell: str, bias: bool, projected: bool, directions: int, dropout: float, number: int
) -> Recipe:
    how = _COMPILED.get(number) or _COMPILED.setdefault(number, _BY_NUMBER[number])
    return Recipe(cell, bias, projected, directions, dropout, how.carry, how.memory, how.chunks)


@torch.library.custom_op("elman::recurrence", mutates_args=())
def recurrence(
    xs: Tensor,
    stacked: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    seed: Tensor | None,
    cell: str,
    bias: bool,
    projected: bool,
    directions: int,
    dropout: float,
    number: int,
    keep: bool,
) -> list[Tensor]:
    """[ys, h, (c), and what is kept for the backward pass], sharing no memory."""
    recipe = _recipe(cell, bias, projected, directions, dropout, number)
    x = Inputs(xs, stacked, weights, lengths, seed)
    call = compiled_calls.ready(recipe, x)
    if call is not None and (found := call.forward(keep)) is not None:
        return found
    ys, last, kept = forward(recipe, x, recipe.stack(x, selected(recipe, x)), keep)
    return [ys.clone() if kept else ys.contiguous(), *last, *kept]


@recurrence.register_fake
def _(
    xs, stacked, weights, lengths, seed, cell, bias, projected, directions, dropout, number, keep
):
    """The same run with a kernel that computes nothing."""
    recipe = _recipe(cell, bias, projected, directions, dropout, number)
    x = Inputs(xs, stacked, weights, lengths, None)
    stack = recipe.stack(x)
    found = compiled_calls.shaped(recipe, x, stack.kernels[0], keep, drops=seed is not None)
    if found is not None:
        return found
    stack = stack.replaced(
        kernels=[Empty(kernel) for kernel in stack.kernels],
        dropout=Dropout(0.0, 0) if seed is not None and dropout else None,  # a budget counts masks
    )
    ys, last, kept = stack.forward(xs, unstack(stacked), *recipe.keeping(keep))
    return [ys.new_empty(ys.shape), *restack(last), *kept]


@torch.library.custom_op("elman::recurrence_backward", mutates_args=())
def recurrence_backward(
    dys: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    xs: Tensor,
    stacked: Sequence[Tensor],
    weights: Sequence[Tensor],
    kept: Sequence[Tensor],
    lengths: Tensor | None,
    seed: Tensor | None,
    cell: str,
    bias: bool,
    projected: bool,
    directions: int,
    dropout: float,
    number: int,
    needs_dxs: bool,
) -> list[Tensor]:
    """[the pulls on h, (c), the weights, and (where needed) xs], sharing no memory."""
    recipe = _recipe(cell, bias, projected, directions, dropout, number)
    x = Inputs(xs, stacked, weights, lengths, seed)
    dlast = [dh, dc][: len(stacked)]
    if (call := compiled_calls.ready(recipe, x)) is not None:
        return call.backward(kept, dys, dlast, needs_dxs)
    stack = recipe.stack(x, selected(recipe, x))
    dxs, dstacked, dws = backward(stack, x, list(kept), dys, dlast, needs_dxs)
    return [d.contiguous() for d in (*dstacked, *dws, dxs) if d is not None]


@recurrence_backward.register_fake
def _(dys, dh, dc, xs, stacked, weights, *rest):
    needs_dxs = rest[-1] and xs.is_floating_point()
    pulled = [*stacked, *weights, *([xs] if needs_dxs else [])]
    return [t.new_empty(t.shape) for t in pulled]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    xs, stacked, weights, lengths, seed, *plain, _ = inputs
    kept = output[1 + len(stacked) :]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(lengths, seed, xs, *stacked, *weights, *kept)
    ctx.plain, ctx.n, ctx.m = plain, len(stacked), len(stacked) + len(weights)


def _backward(ctx: Any, grads: list[Tensor | None]) -> Any:
    lengths, seed, xs, *rest = ctx.saved_tensors
    stacked, weights, kept = rest[: ctx.n], rest[ctx.n : ctx.m], rest[ctx.m :]
    needs_dxs = ctx.needs_input_grad[0]
    dys, dh, dc = [*grads[: 1 + ctx.n], None][:3]
    if torch.is_grad_enabled():
        x = Inputs(xs, stacked, weights, lengths, seed)
        dlast = [dh, dc][: ctx.n]
        stack = _recipe(*ctx.plain).stack(x)
        dxs, dstacked, dws = backward(stack, x, kept, dys, dlast, needs_dxs)
        pulls = [*dstacked, *dws, dxs]
    else:
        pulls = recurrence_backward(
            dys, dh, dc, xs, stacked, weights, kept, lengths, seed, *ctx.plain, needs_dxs
        )
    dxs = pulls[ctx.m] if len(pulls) > ctx.m else None
    plain = [None] * (len(ctx.plain) + 1)
    return dxs, pulls[: ctx.n], pulls[ctx.n : ctx.m], None, None, *plain


recurrence.register_autograd(_backward, setup_context=_setup)
