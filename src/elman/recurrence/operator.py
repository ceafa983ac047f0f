"""The recurrence as one differentiable PyTorch operation.

Run eagerly it is an `autograd.Function`; inside `torch.compile` it is a custom operator, which the
compiler takes as it is. Both run a `Stack`. Where the gradient itself is to be differentiated
(`create_graph=True`) it is computed again as a bare loop that autograd can see; and where it is
computed for many pulls at once (`is_grads_batched=True`), which only torch's own operations can be.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from elman import kernels
from elman.cells import Weights, is_torchs, named
from elman.errors import UserError
from elman.gradients.carry import Carry
from elman.gradients.memory import Memory, Stored
from elman.kernels import Job, Kernel, Piece, Pull, Trace, cudnn
from elman.kernels.bare import Bare
from elman.kernels.torchs import Network, as_torch
from elman.recurrence import packed
from elman.recurrence.chunked import InChunks
from elman.recurrence.seams import Chunks
from elman.recurrence.sliding import slide
from elman.recurrence.stack import Pulls, Stack, draw
from elman.recurrence.strand import Dropout, Noise, States, draw_seed, uncast


class Recipe(NamedTuple):
    """All about a stack that is not a tensor."""

    cell: str
    bias: bool
    projected: bool
    directions: int
    dropout: float
    carry: Carry
    memory: Memory
    chunks: Chunks | None = None  # None: step after step

    def layers(self, weights: Sequence[Tensor]) -> list[Weights]:
        """Flat weights in PyTorch's order, put together as layers."""
        each = self.each
        return [self.layer(weights[i : i + each]) for i in range(0, len(weights), each)]

    @property
    def each(self) -> int:
        """How many tensors a layer has."""
        return 2 + 2 * self.bias + self.projected + (len(named(self.cell).parameters) > 0)

    def layer(self, w: Sequence[Tensor]) -> Weights:
        b_ih, b_hh = (w[2], w[3]) if self.bias else (None, None)
        W_hr = w[2 + 2 * self.bias] if self.projected else None
        return Weights(w[0], w[1], b_ih, b_hh, W_hr, w[-1] if named(self.cell).parameters else None)

    def job(self, x: Inputs) -> Job:
        """What the kernels are asked to run."""
        layers, h = self.layers(x.weights), x.stacked[0]
        above = h.new_empty(1).expand(*x.xs.shape[:2], self.directions * h.shape[-1])
        inputs = [x.xs] * self.directions + [above] * (len(layers) - self.directions)
        return Job(named(self.cell), layers, inputs, unstack(x.stacked))

    def is_one_layer(self, x: Inputs) -> bool:
        """One layer, everything stored, one ξ: nothing to do but to call the kernel."""
        one = len(x.weights) == self.each and self.directions == 1
        plain = self.memory.keeps_all and not self.carry.in_blocks and x.seed is None
        return one and plain and self.chunks is None

    def keeping(self, keep: bool) -> tuple[bool, bool]:
        """Whether the forward pass keeps anything, and gates too: blocks want states only."""
        if not self.carry.in_blocks:
            return keep, True
        return keep and self.memory.keeps_all, False

    def stack(self, x: Inputs, kernel: Kernel | None = None) -> Stack:
        """The stack that these inputs run through, on the kernel that takes them."""
        if kernel is None:
            job = self.job(x)
            kernel, layers = kernels.select(job), job.layers
        else:
            layers = self.layers(x.weights)
        if self.chunks is not None:
            kernel = InChunks(kernel, self.chunks)
        cell, seed = named(self.cell), None if x.seed is None else int(x.seed)
        return Stack(
            cell,
            layers,
            self.directions,
            [kernel] * self.directions,
            self.carry,
            self.memory,
            Dropout(self.dropout, seed) if seed is not None and self.dropout else None,
            x.lengths,
            Noise(cell.noise, seed) if seed is not None and cell.noise else None,
        )


UNDRAWN = torch.tensor(0, device="cpu")
"""The seed of a call whose masks are yet to be drawn."""


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

    def padded(self, batch_sizes: Tensor) -> Inputs:
        """Packed rows side by side, outside of any graph: to ask what would run them."""
        places = packed.places(batch_sizes, len(self.xs), self.xs.device)
        return self._replace(xs=places.padded(self.xs.detach()), lengths=places.lengths)

    def drawn(self) -> Inputs:
        """With a seed from torch's generator where masks need one."""
        return self if self.seed is None else self._replace(seed=draw_seed())


def unstack(stacked: Sequence[Tensor]) -> States:
    """h (and c) of all layers, stacked as PyTorch does, as one state per layer."""
    return list(zip(*(s.unbind() for s in stacked), strict=True))


def restack(states: States) -> tuple[Tensor, ...]:
    """The reverse of `unstack`."""
    return tuple(map(torch.stack, zip(*states, strict=True)))


def recurrence(recipe: Recipe, x: Inputs) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ys (T, B, directions · hidden) and the last states, stacked as PyTorch does."""
    operation = _Layer if recipe.is_one_layer(x) else _Eager
    ys, *last = operation.apply(
        recipe, len(x.stacked), x.lengths, x.seed, x.xs, *x.stacked, *x.weights
    )
    return ys, tuple(last)


def is_mapped(pulls: Sequence[Tensor | None]) -> bool:
    """Whether a backward pass runs for many pulls at once, leaving no graph of itself behind."""
    return not torch.is_grad_enabled() and are_many(pulls)


def are_many(pulls: Sequence[Tensor | None]) -> bool:
    """Whether each pull stands for many, and has no memory that a kernel could read."""
    for pull in pulls:
        if pull is not None and _functorch.is_legacy_batchedtensor(pull):
            return True
    return _functorch.peek_interpreter_stack() is not None


def mapped(backward: Callable[..., Any], ctx: Any, pulls: Sequence[Tensor | None]) -> Any:
    """What `backward` finds where it is itself differentiable, and so in torch's operations."""
    with torch.enable_grad():
        found = backward(ctx, *pulls)
    return tuple([None if d is None else d.clone() for d in found])  # such pulls know no detach


def asks_for_weights(ctx: Any, count: int) -> bool:
    """Whether this backward pass is to find any weight's gradient, not that of x alone.

    The weights are the last `count` tensors of the operation.
    """
    nodes = [node for node, _ in ctx.next_functions[-count:] if node is not None]
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # torch's answer for a leaf that `torch.autograd.grad` is asked for
        return True


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
        kernel = selected(recipe, x)
        stack = recipe.stack(x, kernel)
        ys, last, kept = forward(recipe, x, stack, keep)
        if keep:
            ctx.save_for_backward(lengths, seed, xs, *tensors, *kept)
            ctx.recipe, ctx.kernel, ctx.n, ctx.m = recipe, kernel, n, len(tensors)
            ctx.set_materialize_grads(False)
        return ys, *last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if is_mapped(grads):
            return mapped(_Eager.backward, ctx, grads)
        lengths, seed, xs, *rest = ctx.saved_tensors
        x = Inputs(xs, rest[: ctx.n], rest[ctx.n : ctx.m], lengths, seed)
        stack, (dys, *dlast) = ctx.recipe.stack(x, ctx.kernel), grads
        needs = ctx.needs_input_grad[4], _needs_dws(ctx, x)
        dxs, dstacked, dws = backward(stack, x, rest[ctx.m :], dys, dlast, *needs)
        return None, None, None, None, dxs, *dstacked, *dws


def _needs_dws(ctx: Any, x: Inputs) -> bool:
    """Kernels find the weights' gradients with all others; a loop that autograd sees need not."""
    return not torch.is_grad_enabled() or asks_for_weights(ctx, len(x.weights))


def selected(recipe: Recipe, x: Inputs) -> Kernel:
    """The kernel for tensors of these shapes, types and device, chosen once for all of them."""
    return _selected(recipe, x.flat(), lambda: recipe.job(x))


def _selected(recipe: Recipe, tensors: Sequence[Tensor], job: Callable[[], Job]) -> Kernel:
    xs = tensors[0]
    key = (recipe.cell, recipe.directions, xs.device, *[(t.shape, t.dtype) for t in tensors])
    return kernels.select_once(key, job)


class _Layer(torch.autograd.Function):
    """The same for one layer with everything stored: its kernel, with no stack around it.

    A small network's whole update takes a few milliseconds; every object made here is felt.
    """

    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe,
        n: int,
        lengths: Tensor | None,
        _: None,
        xs: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        keep = any(ctx.needs_input_grad)
        w, state = recipe.layer(tensors[n:]), tuple([s[0] for s in tensors[:n]])
        piece = Piece(named(recipe.cell), w, xs, state, lengths)
        ctx.kernel = _selected(recipe, (xs, *tensors), lambda: Job(piece.cell, [w], [xs], [state]))
        with Careful(xs, w.W_ih.shape[1]):
            trace = ctx.kernel.forward(piece, keep)
        if keep:
            ctx.save_for_backward(lengths, xs, *tensors, *trace)
            ctx.recipe, ctx.n, ctx.m = recipe, n, len(tensors)
            ctx.set_materialize_grads(False)
        return trace.hs[1:], *[s[None].clone() for s in trace.state(xs.shape[0])]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if is_mapped(grads):
            return mapped(_Layer.backward, ctx, grads)
        lengths, xs, *rest = ctx.saved_tensors
        recipe, stacked, weights = ctx.recipe, rest[: ctx.n], rest[ctx.n : ctx.m]
        dys, *dlast = grads
        needs_dxs, trace = ctx.needs_input_grad[4], Trace(*rest[ctx.m :])
        if torch.is_grad_enabled():
            x = Inputs(xs, stacked, weights, lengths, None)
            stack = recipe.stack(x, ctx.kernel)
            kept = [t for t in trace if t is not None]
            needs = needs_dxs, _needs_dws(ctx, x)
            dxs, dstacked, dws = backward(stack, x, kept, dys, dlast, *needs)
            return None, None, None, None, dxs, *dstacked, *dws
        xi, w = draw(recipe.carry, xs, weights[1].dtype), recipe.layer(weights)
        pulls = zip(stacked, dlast, strict=True)
        dstate = tuple([torch.zeros_like(s[0]) if d is None else d[0] for s, d in pulls])
        with uncast(xs):
            piece = Piece(named(recipe.cell), w, xs, trace.state(0), lengths)
            pull = Pull(dys, dstate, xi, needs_dxs)
            dxs, dw, dstate = ctx.kernel.backward(piece, trace, pull)
        dws = _as_weights([d for d in dw if d is not None], weights)
        return None, None, None, None, dxs, *[d[None] for d in dstate], *dws


def forward(
    recipe: Recipe, x: Inputs, stack: Stack, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...], list[Tensor]]:
    """ys, the last states, and what is kept for the backward pass."""
    if recipe.chunks is not None:
        recipe.chunks.begin()
    with Careful(x.xs, stack.layers[0].W_ih.shape[1]):
        ys, last, kept = stack.forward(x.xs, unstack(x.stacked), *recipe.keeping(keep))
    return ys, restack(last), kept


def backward(
    stack: Stack,
    x: Inputs,
    kept: list[Tensor],
    dys: Tensor | None,
    dlast: Sequence[Tensor | None],
    needs_dxs: bool,
    needs_dws: bool = True,
) -> tuple[Tensor | None, tuple[Tensor, ...], Sequence[Tensor | None]]:
    """The pulls on xs, on the first states (stacked) and on the weights (flat).

    Without `needs_dws` these are None, where autograd is watching and they cost something.
    """
    pulls = [torch.zeros_like(s) if d is None else d for s, d in zip(x.stacked, dlast, strict=True)]
    states, wanted = unstack(x.stacked), (needs_dxs, needs_dws)
    gradients = _reversed(stack, x.xs, states, kept, dys, unstack(pulls), *wanted)
    dws = weight_pulls(gradients, x) if gradients.dws else [None] * len(x.weights)
    return gradients.dxs, state_pulls(gradients, x), dws


def state_pulls(pulls: Pulls, x: Inputs) -> tuple[Tensor, ...]:
    """The pulls on the first states, stacked and in their dtype."""
    return tuple(d.to(s.dtype) for d, s in zip(restack(pulls.dstates), x.stacked, strict=True))


def weight_pulls(pulls: Pulls, x: Inputs) -> list[Tensor]:
    """The pulls on the weights, flat and in their dtype."""
    return _as_weights([d for dw in pulls.dws for d in dw if d is not None], x.weights)


def _as_weights(dws: list[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(dws, weights, strict=True)
    return [d if d.dtype == w.dtype else d.to(w.dtype) for d, w in pairs]


def _reversed(
    stack: Stack,
    xs: Tensor,
    states: States,
    kept: list[Tensor],
    dys: Tensor | None,
    dlast: States,
    needs_dxs: bool,
    needs_dws: bool,
) -> Pulls:
    """Back by the kernel, or by a loop that can be differentiated again if autograd is watching."""
    watched = torch.is_grad_enabled()
    if stack.carry.in_blocks:
        once = _bare if watched else _there_and_back
        return slide(stack, xs, states, kept, dys, dlast, needs_dxs, once)
    xis = stack.draw(xs)
    if watched:
        return _bare(stack, xs, states, dys, dlast, needs_dxs, xis, needs_dws)
    return stack.backward(xs, states, kept, dys, dlast, needs_dxs, xis)


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
    return stack.backward(xs, states, kept, dys, dlast, needs_dxs, [None] * len(stack.layers))


def _bare(
    stack: Stack,
    xs: Tensor,
    states: States,
    dys: Tensor | None,
    dlast: States,
    needs_dxs: bool,
    xis: Sequence[Tensor | None] = (),
    needs_dws: bool = True,
) -> Pulls:
    """The same by autograd, leaving a graph behind; no `dws` where they are not needed."""
    xis = xis or [None] * len(stack.layers)
    loops = [Bare(stack.turn_xi(xi, i % stack.directions)) for i, xi in enumerate(xis)]
    xs, states = apart(xs), [tuple(map(apart, s)) for s in states]
    layers = [w.map(apart) for w in stack.layers]
    seen = stack.replaced(layers=layers, kernels=loops, memory=Stored())
    if _is_torchs(seen, xs, xis) and not are_many([dys, *_flat(dlast)]):
        rows = _rows_that_run(stack.lengths, len(xs))
        ys, last = _by_torch(seen, xs, rows, states)
        dys = None if dys is None else dys.flatten(0, 1).index_select(0, rows)
    else:
        ys, last, _ = seen.forward(xs, states, keep=False)
    outs = zip([ys, *_flat(last)], [dys, *_flat(dlast)], strict=True)
    outs = [(y, d) for y, d in outs if d is not None and y.requires_grad]
    leaves = xs, *_flat(states), *(_flat(layers) if needs_dws else ())
    wanted = [t for t in leaves if t.requires_grad]
    ends, pulls = ([y for y, _ in outs], [d for _, d in outs])
    pulled = torch.autograd.grad(ends, wanted, pulls, create_graph=True, allow_unused=True)
    grads = {id(t): g for t, g in zip(wanted, pulled, strict=True) if g is not None}

    def pull(t: Tensor) -> Tensor:
        return grads[id(t)] if id(t) in grads else torch.zeros_like(t)

    dws = [w.map(pull) for w in layers] if needs_dws else []
    return Pulls(pull(xs) if needs_dxs else None, [tuple(map(pull, s)) for s in states], dws)


def _is_torchs(stack: Stack, xs: Tensor, xis: Sequence[Tensor | None]) -> bool:
    """Whether rows of different lengths are left to torch's own layers: on a GPU, nothing cut.

    They drop the rows that have ended, where a loop of ours would hold the states of each.
    """
    if stack.lengths is None or not xs.is_cuda or not xs.is_floating_point():
        return False
    drawn = stack.dropout is not None or stack.noise is not None
    return is_torchs(stack.cell) and not drawn and not any(xi is not None for xi in xis)


def _rows_that_run(lengths: Tensor | None, steps: int) -> Tensor:
    """Where in (time · batch) the rows of a `PackedSequence` lie, whose lengths are sorted."""
    assert lengths is not None
    runs = torch.arange(steps, device=lengths.device)[:, None] < lengths
    return runs.flatten().nonzero()[:, 0]


def _by_torch(stack: Stack, xs: Tensor, rows: Tensor, states: States) -> tuple[Tensor, States]:
    """Packed ys and the last states by torch's own layers, in operators that it knows twice."""
    assert stack.lengths is not None
    w, data = stack.layers[0], xs.flatten(0, 1).index_select(0, rows)
    running = (torch.arange(len(xs))[:, None] < stack.lengths.cpu()).sum(1)
    projection, layers = states[0][0].shape[1] if w.W_hr is not None else 0, len(stack.layers)
    sizes = xs.shape[2], w.hidden_size, projection, layers // stack.directions, stack.directions
    net = Network(stack.cell.torch_mode, w.b_ih is not None, *sizes)
    with cudnn.OFF:
        weights, first = _flat(stack.layers), restack(states)
        ys, last = as_torch(net, False, data, first, weights, 0.0, running[running > 0])
    return ys, unstack(last)


def apart(t: Tensor) -> Tensor:
    """The tensor in a place of its own in the graph: a derivative with respect to it stops there.

    An input or a state may be made of the very weights that are differentiated by beside it (a
    module read its own output, a state was carried over); that way is not this operation's.
    """
    return t.view_as(t) if t.requires_grad else t


def _flat(tensors: Sequence[Sequence[Tensor | None]]) -> list[Tensor]:
    return [t for some in tensors for t in some if t is not None]


_KNOWN_IDS = contextvars.ContextVar("known ids", default=False)


@contextlib.contextmanager
def known_ids() -> Iterator[None]:
    """Ids inside this block have been checked before: on a GPU they are not checked again."""
    token = _KNOWN_IDS.set(True)
    try:
        yield
    finally:
        _KNOWN_IDS.reset(token)


def ids_are_known() -> bool:
    """Whether this is such a block."""
    return _KNOWN_IDS.get()


class Careful:
    """Where a kernel runs: autocast off, and ids outside the columns of W_ih refused in words.

    On a CPU the kernels look at every id by themselves, so only ids that they refused are looked at
    again; elsewhere all are, by a check that does not wait for the GPU.
    """

    def __init__(self, xs: Tensor, size: int) -> None:
        self.xs, self.size = xs, size
        self.cast = uncast(xs)

    def __enter__(self) -> None:
        if not self.xs.is_cpu and not ids_are_known():
            self._check()
        self.cast.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self.cast.__exit__(kind, *rest)
        refused = IndexError | RuntimeError  # torch has either
        if kind is not None and issubclass(kind, refused) and self.xs.is_cpu:
            self._check()

    def _check(self) -> None:
        xs = self.xs
        if xs.is_floating_point():
            return
        inside = ((xs >= 0) & (xs < self.size)).all()
        if xs.is_cuda:
            torch._assert_async(inside)
        elif not inside:
            raise UserError(
                f"input has ids from {int(xs.min())} to {int(xs.max())}; "
                f"ids are one-hot rows and lie between 0 and input_size - 1 = {self.size - 1}",
                hint="ids of a vocabulary of input_size tokens",
            )
