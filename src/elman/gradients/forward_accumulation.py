"""The gradient run forwards: real-time recurrent learning.

Equation (3) of d2l 8.7.1 needs nothing from the future and, once a step is done, nothing from the
past but one matrix, the influence J_t = ∂s_t/∂(w, s_0) of the weights and the first state on the
state now:

    J_0 = (0, I)
    J_t = ∂f(x_t, s_{t-1}, w)/∂w + ∂f(x_t, s_{t-1}, w)/∂s_{t-1} J_{t-1}
    ∂l_t/∂w = ∂l_t/∂o_t ∂o_t/∂w,       ∂o_t/∂w by the same rule

The gradient is exact, ready after every step, and its memory does not depend on T, so a stream may
be endless. The price is J: batch × state × weights numbers, and state × J multiplications a step.
For small networks, for checking, and for learning while the data arrives.

Williams and Zipser (1989), "A learning algorithm for continually running fully recurrent neural
networks".
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.utils import _pytree as pytree

from elman import cells
from elman.cells import Cell
from elman.cells import Weights as LayerWeights
from elman.cells.base import diagonal_blocks
from elman.cells.custom import Nest, first_state, step_with
from elman.errors import UserError

Weights: TypeAlias = dict[str, Tensor]

Step: TypeAlias = Callable[[Weights, Tensor, Nest], tuple[Tensor, Nest]]
"""(w, x_t, s_{t-1}) -> (o_t, s_t), a pure function."""

Loss: TypeAlias = Callable[[Tensor, int], Tensor]
"""loss(ys, start): the loss of one step's output, (1, batch, …), after `start` steps before it."""

Recurrence: TypeAlias = nn.Module | tuple[str | Cell, LayerWeights]
"""A one-layer module of `elman.nn` or `torch.nn`, a `Recurrent`, a cell of your own, or a cell of
`elman.cells` (or its name) with its weights."""


class Gradient(NamedTuple):
    """∂L/∂w by the weight's name, and ∂L/∂s_0 in the shape of the first state."""

    weights: Weights
    state: Nest


class Accumulated(NamedTuple):
    """What is known after t steps."""

    loss: Tensor  # l_1 + … + l_t
    gradient: Gradient  # of that sum
    newest: Gradient  # of l_t alone: what an online learner descends
    state: Nest  # s_t


def forward_accumulation(
    recurrence: Recurrence, xs: Tensor, loss: Loss, state: Nest = None
) -> Accumulated:
    """The loss over `xs`, its exact gradient, and the last state, without going back.

    `xs` is what the module takes (time first, unless it is `batch_first`), always with a batch.
    `loss` is called on the output of each step as `backward_through_time` calls it on pieces; its
    own parameters, if it has any, receive their gradients in `.grad`.
    """
    if len(xs) == 0:
        raise UserError("xs has no steps", hint="pass at least one step")
    xs = xs.transpose(0, 1) if getattr(recurrence, "batch_first", False) else xs
    *_, last = deque(online(recurrence, xs, loss, state), maxlen=1)
    return last


def online(
    recurrence: Recurrence, xs: Iterable[Tensor], loss: Loss, state: Nest = None
) -> Iterator[Accumulated]:
    """The same, yielding after every step; `xs` is any stream of steps, (batch, …) each.

    The state is the cell's own, batch first: (h,), or (h, c) for an lstm, each (batch, size).
    Weights may be changed in place between steps, by `newest`, say: the next step uses the new
    ones. J then still holds derivatives taken at the old ones, as always in learning online.
    """
    step, weights, first = _pure(recurrence)
    return _run(step, weights, iter(xs), loss, first if state is None else lambda _: state)


def _run(
    step: Step,
    weights: Weights,
    xs: Iterator[Tensor],
    loss: Loss,
    first: Callable[[Tensor], Nest],
) -> Iterator[Accumulated]:
    state = first_state = J = total = gradient = None
    for t, x in enumerate(xs):
        if J is None:
            state = first_state = pytree.tree_map(Tensor.detach, first(x))
            J = _first_influence(state, sum(w.numel() for w in weights.values()))
        output, state, J, J_output = _advance(step, weights, x, state, J)
        l_t, do = _direct_pull(loss, output, t)
        rows = torch.einsum("bo,bop->bp", do.flatten(1), J_output)
        newest = _named(rows, weights, first_state)
        total = l_t if total is None else total + l_t
        gradient = newest if gradient is None else pytree.tree_map(torch.add, gradient, newest)
        yield Accumulated(total, gradient, newest, state)


def _first_influence(state: Nest, weights: int) -> Tensor:
    """J_0 = (0, I): (batch, state, weights + state)."""
    s = _rows(state)
    identity = torch.eye(s.shape[1], dtype=s.dtype, device=s.device).expand(len(s), -1, -1)
    return torch.cat([s.new_zeros(*s.shape, weights), identity], 2)


@torch.no_grad()
def _advance(
    step: Step, weights: Weights, x: Tensor, state: Nest, J: Tensor
) -> tuple[Tensor, Nest, Tensor, Tensor]:
    """o_t, s_t, J_t, and ∂o_t/∂(w, s_0) by the same rule."""
    (by_weights, by_state), (output, after) = _derivatives(step, weights, x, state)
    b = torch.cat([d.flatten(2) for d in by_weights.values()], 2)
    c = torch.cat([d.flatten(2) for d in pytree.tree_leaves(by_state)], 2)
    influence = c @ J
    influence[..., : b.shape[2]] += b
    size = J.shape[1]
    return output, after, influence[:, :size], influence[:, size:]


def _derivatives(step: Step, weights: Weights, x: Tensor, state: Nest):
    """∂(s_t, o_t)/∂w and ∂(s_t, o_t)/∂s_{t-1} row by row, and (o_t, s_t) themselves."""

    def row(w: Weights, s: Nest, x: Tensor):
        output, after = step(w, x[None], pytree.tree_map(lambda one: one[None], s))
        flat = torch.cat([one.flatten() for one in [*pytree.tree_leaves(after), output]])
        return flat, (output[0], pytree.tree_map(lambda one: one[0], after))

    # One forward pass gives derivatives and values, so a random cell is differentiated as it fell.
    both = jacrev(row, argnums=(0, 1), has_aux=True)
    return vmap(both, in_dims=(None, 0, 0), randomness="different")(weights, state, x)


def _direct_pull(loss: Loss, output: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """l_t and ∂l_t/∂o_t; the loss's own parameters get theirs on the way."""
    o = output.detach().requires_grad_()
    with torch.enable_grad():
        l_t = loss(o[None], t)
    if l_t.requires_grad:
        l_t.backward()
    return l_t.detach(), torch.zeros_like(o) if o.grad is None else o.grad


def _named(rows: Tensor, weights: Weights, state: Nest) -> Gradient:
    """Cut the (batch, weights + state) gradient up: summed over the batch for w, by row for s_0."""
    sizes = [w.numel() for w in weights.values()]
    *dws, ds = rows.split([*sizes, rows.shape[1] - sum(sizes)], 1)
    shaped = zip(weights.items(), dws, strict=True)
    leaves, structure = pytree.tree_flatten(state)
    pieces = ds.split([leaf[0].numel() for leaf in leaves], 1)
    dstate = [d.reshape(leaf.shape) for d, leaf in zip(pieces, leaves, strict=True)]
    return Gradient(
        {name: dw.sum(0).reshape(w.shape) for (name, w), dw in shaped},
        pytree.tree_unflatten(dstate, structure),
    )


def _rows(state: Nest) -> Tensor:
    """The state as one vector per row of the batch."""
    return torch.cat([leaf.flatten(1) for leaf in pytree.tree_leaves(state)], 1)


def _pure(recurrence: Recurrence) -> tuple[Step, Weights, Callable[[Tensor], Nest]]:
    """A recurrence as a pure step, its weights by name, and its first state for a batch of x."""
    if isinstance(recurrence, tuple):
        cell, w = recurrence
        return _pure_cell(
            cell, w, dict(zip(LayerWeights._fields, LayerWeights._fields, strict=True))
        )
    if hasattr(recurrence, "weight_ih_l0"):
        return _pure_layer(cast(nn.RNNBase, recurrence))
    cell = getattr(recurrence, "cell", recurrence)
    names = "cell." if cell is not recurrence else ""
    weights = {names + name: p.detach() for name, p in cell.named_parameters()}

    def step(w: Weights, x: Tensor, state: Nest) -> tuple[Tensor, Nest]:
        bare = {name.removeprefix(names): tensor for name, tensor in w.items()}
        return step_with(cell, bare, x, state)

    return step, weights, lambda x: first_state(cell, x)


def _pure_layer(module: nn.RNNBase) -> tuple[Step, Weights, Callable[[Tensor], Nest]]:
    """The one layer of an `elman.nn` or `torch.nn` RNN, GRU or LSTM."""
    layers = module.num_layers * (2 if module.bidirectional else 1)
    if layers != 1:
        raise UserError(
            f"forward accumulation runs one layer in one direction; this module has {layers}",
            hint="Recurrent takes a cell made of several",
        )
    names = {
        "W_ih": "weight_ih_l0",
        "W_hh": "weight_hh_l0",
        "b_ih": "bias_ih_l0",
        "b_hh": "bias_hh_l0",
        "W_hr": "weight_hr_l0",
        "own": "own_l0",
    }
    weights: dict[str, Any] = {field: getattr(module, name, None) for field, name in names.items()}
    cell: Any = cells.of_mode(module.mode)
    if hasattr(module, "cell"):
        cell = cells.named(str(module.running_cell))
    if cell.noise:
        raise UserError(f"{cell.name} draws numbers for every step", hint="call .eval() first")
    return _pure_cell(cell, LayerWeights(**weights), names)


def _pure_cell(
    cell: str | Cell, w: LayerWeights, names: dict[str, str]
) -> tuple[Step, Weights, Callable[[Tensor], Nest]]:
    """A cell of `elman.cells`; its state is the tuple (h,), or (h, c), each (batch, size)."""
    run = cells.named(cell) if isinstance(cell, str) else cell
    weights = {names[k]: p.detach() for k, p in w._asdict().items() if p is not None}
    fields = {name: field for field, name in names.items()}

    def step(w: Weights, x: Tensor, state: Nest) -> tuple[Tensor, Nest]:
        now = LayerWeights(**{fields[name]: p for name, p in w.items()})
        if run.heads != 1:
            now = now._replace(W_hh=now.W_hh * diagonal_blocks(now.W_hh, run.heads))
        after, _ = run.step(now, x, state)
        return after[0], after

    def first(x: Tensor) -> Nest:
        sizes = run.state_sizes(w.hidden_size, w.W_hh.shape[1])
        return tuple(w.W_hh.new_zeros(len(x), n) for n in sizes)

    return step, weights, first
