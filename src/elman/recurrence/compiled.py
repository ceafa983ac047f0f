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

from elman.cells import named
from elman.gradients.carry import Carry
from elman.gradients.memory import Memory
from elman.kernels import Empty, Kernel
from elman.kernels.choice import named_kernel
from elman.kernels.cpu import KERNEL, masks
from elman.kernels.cpu.calls import DTYPES, Asked, Prepared, Use, kept_count, prepare
from elman.kernels.cpu.library import plain
from elman.recurrence import native
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


KEPT = 1
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
    if (call := _call(recipe, x)) is not None and (found := call.forward(keep)) is not None:
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
    if _takes(recipe, x, stack.kernels[0], drops=seed is not None):
        return _shaped(recipe, x, keep)
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
    if (call := _call(recipe, x)) is not None:
        return call.backward(kept, dys, dlast, needs_dxs)
    stack = recipe.stack(x, selected(recipe, x))
    dxs, dstacked, dws = backward(stack, x, list(kept), dys, dlast, needs_dxs)
    return [*dstacked, *dws, *([] if dxs is None else [dxs])]


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


# ---------------------------------------------------------------- in one native call, on a CPU


def _takes(recipe: Recipe, x: Inputs, kernel: Kernel, drops: bool) -> bool:
    """Whether that is so: whoever learns the shapes and whoever computes must agree."""
    if kernel is not KERNEL or not native.takes(recipe) or x.lengths is not None:
        return False
    real = x.weights[0].dtype
    if real not in DTYPES or (drops and not masks.drops_as_torch(real)):
        return False
    return x.xs.dtype in (real, torch.int64) and all(t.dtype is real for t in x.flat()[1:])


def _shaped(recipe: Recipe, x: Inputs, keep: bool) -> list[Tensor]:
    """What comes out, and one tensor that holds what is kept."""
    (steps, rows), h = x.xs.shape[:2], x.stacked[0]
    ys = h.new_empty(steps, rows, recipe.directions * h.shape[2])
    last = [s.new_empty(s.shape) for s in x.stacked]
    if not keep:
        return [ys, *last]
    layers = h.shape[0] // recipe.directions
    size = (layers, recipe.directions, (steps, rows), h.shape[2], h.dtype.itemsize)
    return [ys, *last, h.new_empty(kept_count(named(recipe.cell), *size))]


@final
class _Call:
    """One such call."""

    def __init__(self, prepared: Prepared, recipe: Recipe, x: Inputs) -> None:
        self.prepared, real = prepared, prepared.dtype
        self.xs, self.weights = plain(x.xs, prepared.input_dtype), x.weights
        self.state = [plain(s, real) for s in x.stacked]
        dropout = recipe.dropout if x.seed is not None else 0.0
        self.use = Use(None, dropout, int(x.seed)) if x.seed is not None and dropout else None

    def forward(self, keep: bool) -> list[Tensor] | None:
        """None where ids are out of range, for others to say so."""
        weights = [plain(w, self.prepared.dtype) for w in self.weights]
        found = self.prepared.forward(self.xs, self.state, keep, self.use, weights)
        if found is None:
            return None
        ys, last, kept = found
        return [ys, *last, *([] if kept is None else [kept])]

    def backward(
        self,
        kept: Sequence[Tensor],
        dys: Tensor | None,
        dlast: Sequence[Tensor | None],
        needs_dxs: bool,
    ) -> list[Tensor]:
        asked = Asked(needs_dxs and self.xs.is_floating_point(), True, True)
        pulls = (dys, dlast, asked, self.use)
        dxs, first, dws = self.prepared.backward(self.xs, self.weights, None, kept[0], *pulls)
        return [d for d in (*first, *dws, dxs) if d is not None]


_PREPARED: dict[Hashable, Prepared | None] = {}
"""By all that a call's shapes depend on, without weights; None: another way."""


def _call(recipe: Recipe, x: Inputs) -> _Call | None:
    if not x.xs.is_cpu:
        return None
    shapes = [(t.shape, t.dtype) for t in x.flat()]
    others = torch.get_num_threads(), named_kernel(), x.lengths is None, x.seed is None
    key = (recipe.cell, recipe.directions, native.takes(recipe), *others, *shapes)
    if key not in _PREPARED:
        if len(_PREPARED) > 1000:
            _PREPARED.clear()
        _PREPARED[key] = _prepared(recipe, x)
    known = _PREPARED[key]
    return None if known is None else _Call(known, recipe, x)


def _prepared(recipe: Recipe, x: Inputs) -> Prepared | None:
    if not _takes(recipe, x, selected(recipe, x), drops=x.seed is not None):
        return None
    weights = [plain(w, w.dtype) for w in x.weights]
    call = prepare(x.xs, weights, recipe.directions, lambda: recipe.job(x), apart=True)
    assert call is not None, "shapes were told by `_takes`"
    return call.bare()
