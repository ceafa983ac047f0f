"""Calls on our CPU kernel that have been met before: one node of autograd, and little Python.

`operator.recurrence` takes any stack; this takes the commonest call again once everything about its
shapes is known (`kernels.cpu.calls`): nothing cut, everything stored, nothing drawn but dropout
between layers; rows may be packed. A small layer takes the processor less time than Python takes to
find out what is to be run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import is_
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from elman.cells import is_torchs, named
from elman.kernels import Job
from elman.kernels.cpu import KERNEL
from elman.kernels.cpu.calls import (
    NOTHING_KEPT,
    Asked,
    Pack,
    Prepared,
    Use,
    padded_shape,
    prepare,
    restored,
)
from elman.kernels.torchs import Network, as_torch
from elman.recurrence import twice
from elman.recurrence.operator import (
    Inputs,
    Recipe,
    apart,
    are_many,
    asks_for_weights,
    backward,
    is_mapped,
    mapped,
)
from elman.recurrence.packed import picked
from elman.recurrence.strand import Dropout, draw_seed, uncast


def takes(recipe: Recipe) -> bool:
    """Whether this is such a stack."""
    plain = recipe.carry.exact and not recipe.carry.in_blocks and recipe.memory.keeps_all
    return plain and recipe.chunks is None and not recipe.projected


def prepared(
    cell: str,
    xs: Tensor,
    state: Sequence[Tensor] | None,
    weights: list[Any],
    directions: int,
    job: Callable[[], Job],
    pack: Pack | None,
    cast: torch.dtype | None,
) -> Prepared | None:
    """What native code needs to know: from any call, if lengths and weights are others alone."""
    shapes = *[w.shape for w in weights], *padded_shape(xs, pack)[2:]
    kind = (cell, directions, xs.dtype, weights[0].dtype, cast, torch.get_num_threads(), shapes)
    known = _KNOWN.get(kind)
    call = known and known.changed(xs, weights, pack)
    if call is not None and call.suits(xs, state, weights, pack, cast):
        return call
    call = prepare(xs, weights, directions, job, pack, cast)
    if call is None or not call.suits(xs, state, weights, pack, cast):
        return None
    if len(_KNOWN) > 1000:
        _KNOWN.clear()
    _KNOWN[kind] = call.bare()
    return call


_KNOWN: dict[Hashable, Prepared] = {}
"""Of every kind of call that any module has made, one without its weights."""


@final
class Prepareds(dict[Hashable, Prepared]):
    """What one module has prepared for its weights, by the shapes that come along."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return Prepareds, ()  # a copied module has weights elsewhere, and prepares its own

    def keep(self, key: Hashable, call: Prepared) -> Prepared:
        """Have it for the next call of this key; those of other weights go."""
        other = next(iter(self.values()), call)
        if len(self) > 100 or not all(map(is_, other.tensors, call.tensors)):
            self.clear()
        self[key] = call
        return call


def use_of(pack: Pack | None, dropout: float) -> Use | None:
    """What else this call is: packed, or with masks whose seed is drawn here; None: neither."""
    if dropout:
        seed = int(draw_seed())
        assert seed >= 0, "masks are given on a GPU alone: native code draws its own"
        return Use(pack, dropout, seed)
    return pack and Use(pack)


def recurrence(
    call: Prepared,
    recipe: Recipe,
    xs: Tensor,
    state: Sequence[Tensor] | None,
    use: Use | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """ys and the last states, as `operator.recurrence`; None where ids are out of range."""
    state = state or ()
    try:
        ys, *last = _Node.apply(call, recipe, use, len(state), xs, *state, *call.tensors)
    except _OutOfRange:
        return None
    return ys, tuple(last)


@final
class _OutOfRange(Exception):
    """Ids that the long way refuses in words."""


class _Node(torch.autograd.Function):
    """The call as autograd sees it."""

    # without what `Function.apply` does for `torch.func`, which is not here: a fifth of the time
    apply: Any = torch._C._FunctionBase.__dict__["apply"]

    @staticmethod
    def forward(
        ctx: Any,
        call: Prepared,
        recipe: Recipe,
        use: Use | None,
        n: int,
        xs: Tensor,
        *tensors: Tensor,
    ) -> Any:
        keep = any(ctx.needs_input_grad)
        result = call.forward(xs, tensors[:n] or None, keep, use)
        if result is None:
            raise _OutOfRange
        ys, last, kept = result
        if keep:
            pack = use.kept() if use else NOTHING_KEPT
            ctx.save_for_backward(xs, call.track_of(ys), kept, *pack, *tensors)
            ctx.call, ctx.recipe, ctx.use, ctx.n = call, recipe, use, n
            ctx.set_materialize_grads(False)
        return call.outputs_of(ys), *last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if is_mapped(grads):
            return mapped(_Node.backward, ctx, grads)
        dys, *dlast = grads
        xs, track, kept, sizes, order, back, *tensors = ctx.saved_tensors
        state, weights = tensors[: ctx.n], tensors[ctx.n :]
        use = restored(ctx.use, xs, sizes, order, back)
        if not torch.is_grad_enabled():
            asked = _asked(ctx, any(ctx.needs_input_grad[5 + ctx.n :]))
            found = ctx.call.backward(xs, weights, track, kept, dys, dlast, asked, use)
        elif ctx.call.has_derivative and not are_many(grads):
            found = _twice(ctx, xs, track, kept, state, weights, use, grads)
        else:
            asked = _asked(ctx, asks_for_weights(ctx, len(weights)))
            found = _by_autograd(ctx.call, ctx.recipe, xs, state, weights, use, grads, asked)
        dxs, dstate, dws = found
        return None, None, None, None, dxs, *dstate[: ctx.n], *dws


def _asked(ctx: Any, weights: bool) -> Asked:
    needs = ctx.needs_input_grad
    return Asked(needs[4], any(needs[5 : 5 + ctx.n]), weights)


def _as_multiplied(
    call: Prepared,
    xs: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    use: Use | None,
    grads: Sequence[Tensor | None],
) -> tuple[Any, ...]:
    """Inputs and pulls in the dtype of the products: autocast may have found narrower ones."""
    real = call.dtype
    stacked = state or [torch.zeros(call.stacked, dtype=real, device=xs.device) for _ in grads[1:]]
    seed = torch.tensor(use.seed, device="cpu") if use and use.dropout else None
    x = Inputs(xs.to(call.input_dtype), [s.to(real) for s in stacked], weights, None, seed)
    return x, *[None if d is None else d.to(real) for d in grads]


def _twice(
    ctx: Any,
    xs: Tensor,
    track: Tensor | None,
    kept: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    use: Use | None,
    grads: Sequence[Tensor | None],
) -> twice.Inputs:
    """The same pulls by native code that has a derivative, and that one's by torch's own layers."""
    call, recipe = ctx.call, ctx.recipe

    def again(x: twice.Inputs, pulls: twice.Outputs) -> twice.Inputs:
        grads = [pulls.ys, *pulls.states]
        dxs, dstate, dws = _by_autograd(call, recipe, *x, use, grads, Asked(True, True, True))
        return twice.Inputs(dxs, dstate[: len(x.states)], dws)  # not of zeros that nobody passed

    asked = _asked(ctx, asks_for_weights(ctx, len(weights)))
    done, (dys, *dlast) = twice.Call(call, use, asked, again), grads
    x, pulls = twice.Inputs(xs, state, weights), twice.Outputs(dys, dlast)
    return twice.backward(done, x, (track, kept), pulls)


def _by_autograd(
    call: Prepared,
    recipe: Recipe,
    xs: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    use: Use | None,
    grads: Sequence[Tensor | None],
    asked: Asked,
) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor | None]]:
    """The same pulls, leaving a graph behind to differentiate them again."""
    x, dys, *dlast = _as_multiplied(call, xs, state, weights, use, grads)
    with uncast(xs):
        return _pulls(recipe, x, use and use.pack, dys, dlast, asked)


def _pulls(
    recipe: Recipe,
    x: Inputs,
    pack: Pack | None,
    dys: Tensor | None,
    dlast: Sequence[Tensor | None],
    asked: Asked,
) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor | None]]:
    """By torch's own layers where they have such a call, else by a bare loop."""
    sizes, order, back, _ = pack or (None, None, None, 0)
    x, dlast = x._replace(stacked=picked(x.stacked, order)), picked(dlast, order)
    cell = named(recipe.cell)
    if is_torchs(cell) and x.xs.is_floating_point():
        found = _pulls_by_torch(recipe, cell.torch_mode, x, sizes, dys, dlast, asked)
    elif sizes is None:
        found = backward(recipe.stack(x, KERNEL), x, [], dys, dlast, asked.xs)
    else:
        found = _pulls_side_by_side(recipe, x, sizes, dys, dlast, asked.xs)
    dxs, dstate, dws = found
    return dxs, picked(dstate, back), dws


def _pulls_side_by_side(
    recipe: Recipe,
    x: Inputs,
    sizes: Tensor,
    dys: Tensor | None,
    dlast: Sequence[Tensor | None],
    needs_dxs: bool,
) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor | None]]:
    """The same by a bare loop over packed rows, each as long as the longest."""
    xs, lengths = pad_packed_sequence(PackedSequence(x.xs, sizes))
    x = x._replace(xs=xs, lengths=lengths)
    dys = None if dys is None else pad_packed_sequence(PackedSequence(dys, sizes))[0]
    dxs, dstate, dws = backward(recipe.stack(x, KERNEL), x, [], dys, dlast, needs_dxs)
    return None if dxs is None else pack_padded_sequence(dxs, lengths).data, dstate, dws


def _pulls_by_torch(
    recipe: Recipe,
    mode: str | None,
    x: Inputs,
    sizes: Tensor | None,
    dys: Tensor | None,
    dlast: Sequence[Tensor | None],
    asked: Asked,
) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor | None]]:
    """The same by torch's own layers, run once more: in as few steps of Python as torch.nn."""
    inputs, hidden = x.xs.shape[-1], x.stacked[0].shape[2]
    layers = len(x.stacked[0]) // recipe.directions
    net = Network(mode, recipe.bias, inputs, hidden, 0, layers, recipe.directions)
    x = x._replace(
        xs=apart(x.xs), stacked=[*map(apart, x.stacked)], weights=[*map(apart, x.weights)]
    )
    ys, last = _outputs(net, x, sizes, recipe.dropout)
    outs = [
        (y, d)
        for y, d in zip((ys, *last), (dys, *dlast), strict=True)
        if d is not None and y.requires_grad
    ]
    read = (x.xs, *x.stacked, *(x.weights if asked.weights else ()))
    wanted = [t for t in read if t.requires_grad]
    ends, pulls = ([y for y, _ in outs], [d for _, d in outs])
    pulled = torch.autograd.grad(ends, wanted, pulls, create_graph=True, allow_unused=True)
    found = {id(t): g for t, g in zip(wanted, pulled, strict=True) if g is not None}
    dxs, *others = [found[id(t)] if id(t) in found else torch.zeros_like(t) for t in read]
    count = len(x.stacked)
    dws = others[count:] if asked.weights else [None] * len(x.weights)
    return dxs if asked.xs else None, others[:count], dws


def _outputs(
    net: Network, x: Inputs, sizes: Tensor | None, p: float
) -> tuple[Tensor, Sequence[Tensor]]:
    """What torch's layers write; one after the other where our masks lie between them."""
    if x.seed is None:
        return as_torch(net, False, x.xs, x.stacked, [*x.weights], batch_sizes=sizes)
    dropout, one, n = Dropout(p, int(x.seed)), net._replace(layers=1), net.directions
    ys, last = x.xs, list[Sequence[Tensor]]()
    for level in range(net.layers):
        if level:
            ys = ys * dropout.whole_mask(ys, level - 1, sizes)
        first = [s[level * n : (level + 1) * n] for s in x.stacked]
        own = x.weights[level * n * net.each : (level + 1) * n * net.each]
        ys, some = as_torch(one, False, ys, first, [*own], batch_sizes=sizes)
        last.append(some)
    return ys, [torch.cat(states) for states in zip(*last, strict=True)]
