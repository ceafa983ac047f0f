"""`Recurrent`: a module of your own, run over time with any carry and any memory.

What `elman.nn.GRU` does for the cells elman knows, for a cell it has never seen: the cell runs
forwards step by step, and each step is a small graph of its own that autograd can walk back. What
flows from one step to the one before is multiplied by the carry's ξ; which steps are kept and which
are run again is the memory's choice.

    ds_t = (direct pull on s_t) + ξ_{t+1} (∂(o_{t+1}, s_{t+1})/∂s_t)ᵀ (do_{t+1}, ds_{t+1})
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from elman.cells import custom
from elman.cells.custom import Nest
from elman.errors import UserError
from elman.gradients.carry import Block, Carry, Full, checked_carry
from elman.gradients.chunks import Stepped, Time, checked_time
from elman.gradients.memory import Memory, Plan, Sizes, Stored, checked_memory, reversed_pieces
from elman.recurrence import traced

FULL, STORED, STEPPED = Full(), Stored(), Stepped()
CHECKED = {"carry": checked_carry, "memory": checked_memory, "time": checked_time}
"""What a module may be given at any time, and what refuses anything else."""


class Recurrent(nn.Module):
    """Any module over time: `cell(x, state) -> state` or `-> (output, state)`.

    Called with xs of shape (time, batch, …), or (batch, time, …) with `batch_first`, and optionally
    the first state (default `cell.initial_state(batch)`), it returns the outputs stacked over time
    and the last state. Every tensor of the state has the batch first. Given a `PackedSequence` it
    returns one; a row that has ended holds its state.

    >>> ys, h = Recurrent(nn.GRUCell(3, 4))(torch.zeros(5, 2, 3))
    >>> ys.shape, h.shape
    (torch.Size([5, 2, 4]), torch.Size([2, 4]))

    Gradients can be taken once, not differentiated again. Under `Checkpointed` a step may run more
    than once: its random numbers repeat, but a cell that counts its calls (the running averages of
    batch normalisation) counts them all.
    """

    def __init__(
        self,
        cell: nn.Module,
        *,
        batch_first: bool = False,
        carry: Carry = FULL,
        memory: Memory = STORED,
        time: Time = STEPPED,
    ) -> None:
        super().__init__()
        if checked_time(time).in_chunks:
            raise UserError(
                f"{time} needs a kernel, and a module of your own runs a step at a time",
                hint="declare its equations with elman.cell, and Recurrent(cell, sizes, time=…)",
            )
        if not isinstance(cell, nn.Module):
            raise UserError(
                f"Recurrent runs modules and cells, and was given {cell!r}",
                hint="Recurrent(module), or Recurrent(cell, input_size, hidden_size) with what "
                "elman.cell declares or a name in elman.cells.CELLS",
            )
        self.cell, self.batch_first = cell, batch_first
        self.carry, self.memory = carry, memory

    def __setattr__(self, name: str, value: Any) -> None:
        if name in CHECKED:
            CHECKED[name](value)
        super().__setattr__(name, value)

    def forward(self, xs: Any, state: Nest = None) -> tuple[Any, Nest]:
        """The output of every step, and the last state."""
        if isinstance(xs, PackedSequence):
            return self._packed(xs, state)
        if traced.listening():
            return self._traced(xs, state)
        walk, xs, leaves = self._begin(xs, state)
        ys, *last = _OverTime.apply(walk, len(leaves), xs, *leaves, *walk.params())
        return self._as_given(ys), pytree.tree_unflatten(last, walk.structure)

    def _packed(self, packed: PackedSequence, state: Nest) -> tuple[PackedSequence, Nest]:
        """Rows of different lengths, from the longest to the shortest, and back in their order."""
        if traced.listening():
            raise traced.unpackable(type(self.cell).__name__)
        xs, lengths = pad_packed_sequence(PackedSequence(packed.data, packed.batch_sizes))
        lengths = lengths.to(xs.device)
        state = custom.first_state(self.cell, xs[0]) if state is None else state
        _check_state(pytree.tree_leaves(state), len(lengths))
        state = _ordered(state, packed.sorted_indices)
        leaves, structure = pytree.tree_flatten((state, lengths))
        walk = self._walk(Ending(self.cell), structure, xs, lengths)
        ys, *last = _OverTime.apply(walk, len(leaves), xs, *leaves, *walk.params())
        state, _ = pytree.tree_unflatten(last, structure)
        data = pack_padded_sequence(ys, lengths.cpu()).data
        return packed._replace(data=data), _ordered(state, packed.unsorted_indices)

    def _traced(self, xs: Tensor, state: Nest) -> tuple[Tensor, Nest]:
        """Step by step, for torch to write down (see `traced`)."""
        traced.check_gradient(self.carry, self.training)
        with traced.quietly():
            walk, xs, leaves = self._begin(xs, state)
        state, ys = pytree.tree_unflatten(leaves, walk.structure), []
        for x in xs.unbind():
            y, state = custom.step(self.cell, x, state)
            ys.append(y)
        return self._as_given(torch.stack(ys)), state

    def backward_through_time(
        self, xs: Tensor, loss: Callable[[Tensor, int], Tensor], state: Nest = None
    ) -> tuple[Tensor, Nest]:
        """See `elman.gradients.backward_through_time`; pieces come from the last to the first."""
        walk, xs, leaves = self._begin(xs, state)
        total = torch.zeros((), device=xs.device)

        def pull(start: int, outputs: list[Tensor]) -> Tensor | None:
            nonlocal total
            ys = torch.stack([o.detach() for o in outputs]).requires_grad_()
            with torch.enable_grad():
                value = loss(self._as_given(ys), start)
            if value.dim() != 0:
                raise UserError(
                    f"loss(ys, start) returned a tensor of shape {tuple(value.shape)}; it must "
                    "return one number",
                    hint="sum (rather than average) over the piece, so that pieces add up",
                )
            if value.requires_grad:
                value.backward()
            total = total + value.detach()
            return ys.grad

        with torch.no_grad():
            kept = walk.forward(xs, leaves, keep=True, outputs=False)
            pulls = walk.backward(xs, kept, pull, [None] * len(leaves))
        inputs = zip([xs, *leaves, *walk.params()], pulls, strict=True)
        pulled = {x: d for x, d in inputs if d is not None and x.requires_grad}
        torch.autograd.backward([*pulled], [*pulled.values()])
        return total, pytree.tree_unflatten(kept.last, walk.structure)

    def _begin(self, xs: Tensor, state: Nest) -> tuple[Walk, Tensor, list[Tensor]]:
        """What the walk needs, time first, checked."""
        if isinstance(xs, PackedSequence):
            raise UserError(
                "backward_through_time reads a tensor, not a packed sequence",
                hint="call the module itself, or pad the sequence",
            )
        if xs.dim() < 2:
            raise UserError(f"xs of shape {tuple(xs.shape)} must be at least (time, batch)")
        xs = xs.transpose(0, 1) if self.batch_first else xs
        if len(xs) == 0:
            raise UserError(f"xs of shape {tuple(xs.shape)} has no time steps")
        state = custom.first_state(self.cell, xs[0]) if state is None else state
        leaves, structure = pytree.tree_flatten(state)
        _check_state(leaves, xs.shape[1])
        return self._walk(self.cell, structure, xs), xs, leaves

    def _walk(
        self,
        cell: nn.Module,
        structure: pytree.TreeSpec,
        xs: Tensor,
        lengths: Tensor | None = None,
    ) -> Walk:
        autocast, needs_dxs = Autocast.now(xs.device.type), xs.requires_grad
        return Walk(cell, structure, self.carry, self.memory, autocast, needs_dxs, lengths)

    def _as_given(self, ys: Tensor) -> Tensor:
        return ys.transpose(0, 1) if self.batch_first else ys

    def extra_repr(self) -> str:
        settings = [f"batch_first={self.batch_first}"] if self.batch_first else []
        settings += [] if self.carry == FULL else [f"carry={self.carry}"]
        return ", ".join(settings + ([] if self.memory == STORED else [f"memory={self.memory}"]))


def _check_state(leaves: list[Any], batch: int) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise UserError(f"the state holds a {type(leaf).__name__}; it must nest tensors only")
        if leaf.is_floating_point() and leaf.shape[:1] != (batch,):
            raise UserError(
                f"the state holds a tensor of shape {tuple(leaf.shape)} for {batch} rows",
                hint="every tensor of the state has the batch first",
            )


def _ordered(state: Nest, rows: Tensor | None) -> Nest:
    """The rows of a state in another order."""
    if rows is None:
        return state
    return pytree.tree_map(
        lambda s: s.index_select(0, rows) if _has_rows(s, len(rows)) else s, state
    )


def _has_rows(leaf: Tensor, batch: int) -> bool:
    """A float tensor has the batch first; of others, those that could."""
    return leaf.shape[:1] == (batch,)


@final
class Ending(nn.Module):
    """A cell for rows of different lengths; its state is (the cell's state, each row's steps left).

    s_t = cell(x_t, s_{t-1}) in the rows that have steps left, s_{t-1} in those that have ended
    """

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, state: Nest) -> tuple[Tensor, Nest]:
        before, left = state
        output, after = custom.step(self.cell, x, before)

        def held(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(_rows(left > 0, new), new, old) if _has_rows(new, len(left)) else new

        return output, (pytree.tree_map(held, after, before), left - 1)


def _rows(each: Tensor, like: Tensor) -> Tensor:
    """One value per row, against a tensor that has the batch first."""
    return each.reshape(-1, *[1] * (like.dim() - 1))


class Autocast(NamedTuple):
    """The autocast in force in the forward pass, to be in force again in the backward pass."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> Autocast:
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def again(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, enabled=self.enabled, dtype=self.dtype)


class Moment(NamedTuple):
    """All that the rest of time depends on: the state, and where the random numbers are."""

    leaves: list[Tensor]
    random: list[Tensor]


class Link(NamedTuple):
    """One step as a graph of its own, from detached inputs to outputs."""

    x: Tensor
    before: list[Tensor]
    output: Tensor
    after: list[Tensor]

    def back(
        self, do: Tensor | None, dafter: Sequence[Tensor | None], params: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], Tensor | None, list[Tensor | None]]:
        """The pulls on the parameters, on x and on the state before; None where there is none."""
        pulls = zip([self.output, *self.after], [do, *dafter], strict=True)
        pulled = [(r, d) for r, d in pulls if d is not None and r.requires_grad]
        into = [*params, self.x, *self.before]
        wanted = [tensor for tensor in into if tensor.requires_grad]
        gradients: list[Tensor | None] = [None] * len(wanted)
        if pulled:
            roots, grads = zip(*pulled, strict=True)
            gradients = list(
                torch.autograd.grad(roots, wanted, grads, retain_graph=True, allow_unused=True)
            )
        each = [gradients.pop(0) if tensor.requires_grad else None for tensor in into]
        n = len(params)
        return each[:n], each[n], each[n + 1 :]


class Kept(NamedTuple):
    """What the forward pass leaves behind."""

    ys: Tensor | None
    last: list[Tensor]
    plan: Plan
    moments: dict[int, Moment]  # the states that the plan keeps
    links: list[Link]  # every step, where the plan keeps all; used up by the backward pass


Pull = Callable[[int, list[Tensor]], Sequence[Tensor | None] | Tensor | None]
"""pull(start, outputs): the loss's direct pull on the outputs of the steps start, start + 1, …"""


@final
@dataclass(frozen=True)
class Walk:
    """A cell's walk over time, forwards and back."""

    cell: nn.Module
    structure: pytree.TreeSpec
    carry: Carry
    memory: Memory
    autocast: Autocast
    needs_dxs: bool
    lengths: Tensor | None = None  # (B,), or None where all rows are as long as xs

    def step(self, x: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        state = pytree.tree_unflatten(leaves, self.structure)
        with self.autocast.again():
            output, after = custom.step(self.cell, x, state)
        return output, pytree.tree_leaves(after)

    def link(self, x: Tensor, leaves: Sequence[Tensor]) -> Link:
        """One step with its graph."""
        x = x.detach().requires_grad_(self.needs_dxs)
        before = [s.detach().requires_grad_(s.is_floating_point()) for s in leaves]
        with torch.enable_grad():
            return Link(x, before, *self.step(x, before))

    def params(self) -> list[nn.Parameter]:
        return [p for p in self.cell.parameters() if p.requires_grad]

    def forward(self, xs: Tensor, leaves: list[Tensor], keep: bool, outputs: bool = True) -> Kept:
        """Over all of time, keeping what the memory says for the backward pass."""
        plan = Plan(len(xs), len(xs), 0)
        if keep:
            plan = self.memory.plan(len(xs), lambda: self.sizes(xs[0], leaves))
        hold = set(plan.kept()) if keep else set()
        moments, links, ys, random = {}, [], None, _random(xs.device)
        for t, x in enumerate(xs):
            piece, into = divmod(t, plan.piece)
            if piece in hold and into == 0:
                random = _moved(random, xs.device)
                moments[piece] = Moment([s.detach().clone() for s in leaves], random)
            if keep and plan.pieces == 1:
                links.append(self.link(x, leaves))
                output, leaves = links[-1].output.detach(), links[-1].after
            else:
                output, leaves = self.step(x, leaves)
            if outputs:
                ys = output.new_empty(len(xs), *output.shape) if ys is None else ys
                ys[t] = output
        return Kept(ys, [s.detach().clone() for s in leaves], plan, moments, links)

    def backward(
        self, xs: Tensor, kept: Kept, pull: Pull, dlast: list[Tensor | None]
    ) -> list[Tensor | None]:
        """The pulls on xs, the first state and the parameters, by the carry."""
        sums = Sums(self.params(), xs, self.needs_dxs)
        pieces = self.pieces(xs, kept)
        if self.carry.in_blocks:
            dfirst = _in_blocks(pieces, sums, pull, dlast, self.carry, len(xs), self.lengths)
        else:
            dfirst = _weighted(pieces, sums, pull, dlast, self.xi(xs))
        kept.links.clear()
        return [sums.dxs, *dfirst, *sums.parameter_pulls()]

    def xi(self, xs: Tensor) -> Tensor | None:
        """ξ of every step, 1 where a row has ended; None where it is 1 everywhere."""
        if self.carry.exact:
            return None
        xi = self.carry.weights(len(xs), xs.shape[1]).to(xs.device)
        if self.lengths is None:
            return xi
        runs = torch.arange(len(xs), device=xs.device)[:, None] < self.lengths
        return torch.where(runs, xi if xi.dim() == 2 else xi[:, None], 1)

    def pieces(self, xs: Tensor, kept: Kept) -> Iterator[tuple[int, list[Link]]]:
        """Every piece of time from the last to the first: where it starts, and its links."""
        plan, links = kept.plan, kept.links

        def advance(moment: Moment, piece: int, later: int) -> Moment:
            leaves = moment.leaves
            with torch.no_grad(), Replay(xs.device, moment.random):
                for x in xs[plan.bounds(piece)[0] : plan.bounds(later)[0]]:
                    _, leaves = self.step(x, leaves)
                return Moment([s.clone() for s in leaves], _moved(moment.random, xs.device))

        for piece, moment in reversed_pieces(plan, kept.moments, advance):
            start, stop = plan.bounds(piece)
            if not links:
                leaves = moment.leaves
                with Replay(xs.device, moment.random):
                    for x in xs[start:stop]:
                        links.append(self.link(x, leaves))
                        leaves = links[-1].after
            yield start, links
            links.clear()

    def sizes(self, x: Tensor, leaves: Sequence[Tensor]) -> Sizes:
        """What a state takes, and what a step keeps for the backward pass: found by running one."""
        kept: dict[int, int] = {p.data_ptr(): 0 for p in self.cell.parameters()}
        random = _random(x.device)

        def count(saved: Tensor) -> Tensor:
            kept.setdefault(saved.data_ptr(), saved.nbytes)
            return saved

        with Replay(x.device, random), saved_tensors_hooks(count, lambda saved: saved):
            link = self.link(x, leaves)
            drawn = [] if _moved(random, x.device) is random else random
        state = sum(s.nbytes for s in [*leaves, *drawn])
        return Sizes(state, state + link.output.nbytes + x.nbytes + sum(kept.values()))


class Sums:
    """Gradients added up in the backward pass, in float32 for half precision."""

    def __init__(self, params: Sequence[Tensor], xs: Tensor, needs_dxs: bool) -> None:
        self.params = params
        self.dparams = [
            torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in params
        ]
        self.dxs = torch.zeros_like(xs) if needs_dxs else None

    def add(
        self, t: int, link: Link, do: Tensor | None, dafter: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Walk one link back: its pulls on parameters and x are added, those on s returned."""
        dparams, dx, dbefore = link.back(do, dafter, self.params)
        for total, d in zip(self.dparams, dparams, strict=True):
            if d is not None:
                total += d
        if self.dxs is not None and dx is not None:
            self.dxs[t] += dx
        return dbefore

    def parameter_pulls(self) -> list[Tensor]:
        return [d.to(p.dtype) for p, d in zip(self.params, self.dparams, strict=True)]


def _weighted(
    pieces: Iterator[tuple[int, list[Link]]],
    sums: Sums,
    pull: Pull,
    dstate: list[Tensor | None],
    xi: Tensor | None,
) -> list[Tensor | None]:
    """One pass back through all of time; ξ_t multiplies what step t hands to the state before."""
    for start, links in pieces:
        dys = pull(start, [link.output for link in links])
        while links:
            t = start + len(links) - 1
            dstate = sums.add(t, links.pop(), None if dys is None else dys[t - start], dstate)
            if xi is not None:
                dstate = [None if d is None else _times(xi[t], d) for d in dstate]
    return dstate


def _times(xi: Tensor, d: Tensor) -> Tensor:
    """ξ d, for one ξ or one per row; 0 cuts, even what is infinite."""
    xi = _rows(xi.to(d), d)
    return torch.where(xi == 0, 0, xi * d)


def _in_blocks(
    pieces: Iterator[tuple[int, list[Link]]],
    sums: Sums,
    pull: Pull,
    dlast: list[Tensor | None],
    carry: Carry,
    steps: int,
    lengths: Tensor | None,
) -> list[Tensor | None]:
    """One pass per block of losses, the state before its window a constant (h_0 excepted).

    The links of one window are held at a time, beside the piece that the memory is running. This is
    `sliding.slide` for links instead of kernels: a link can be walked back more than once, so a
    step that lies in several windows is run forwards once, while a kernel runs it in each window.
    """
    back = ((start + i, links[i]) for start, links in pieces for i in reversed(range(len(links))))
    window: deque[tuple[int, Link]] = deque()  # newest first
    dfirst: list[Tensor | None] = [None] * len(dlast)
    for block in reversed([*carry.blocks(steps)]):
        while not window or window[-1][0] > block.start:
            window.append(next(back))
        while window[0][0] >= block.last:
            window.popleft()
        losses = [link.output for t, link in window if t >= block.first]
        dys = pull(block.first, losses[::-1])
        dstate = _ending(dlast, block, steps, lengths)
        for t, link in window:
            do = dys[t - block.first] if dys is not None and t >= block.first else None
            dstate = sums.add(t, link, do, dstate)
        if block.start == 0:
            dfirst = [_sum(a, b) for a, b in zip(dfirst, dstate, strict=True)]
    return dfirst


def _ending(
    dlast: list[Tensor | None], block: Block, steps: int, lengths: Tensor | None
) -> list[Tensor | None]:
    """The pull on the last state, for the rows whose last step is one of the block's."""
    if lengths is None:
        return dlast if block.last == steps else [None] * len(dlast)
    here = (block.first < lengths) & (lengths <= block.last)
    return [None if d is None else torch.where(_rows(here, d), d, 0) for d in dlast]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


class _OverTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: Walk, n: int, xs: Tensor, *tensors: Tensor) -> Any:
        keep = any(ctx.needs_input_grad)
        kept = walk.forward(xs, list(tensors[:n]), keep)
        ctx.mark_non_differentiable(*(s for s in kept.last if not s.is_floating_point()))
        if keep:
            states = [s for moment in kept.moments.values() for s in moment.leaves]
            ctx.save_for_backward(xs, *states, *tensors[n:])
            ctx.walk, ctx.n = walk, n
            random = {piece: Moment([], m.random) for piece, m in kept.moments.items()}
            ctx.kept = kept._replace(ys=None, last=[], moments=random)
            ctx.set_materialize_grads(False)
        return kept.ys, *kept.last

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dys: Tensor | None, *dlast: Tensor | None
    ) -> Any:
        # Read in any case: autograd notices here what has been freed, or changed in place.
        xs, *saved = ctx.saved_tensors
        states = iter(saved)
        moments = {
            piece: Moment([next(states) for _ in range(ctx.n)], moment.random)
            for piece, moment in ctx.kept.moments.items()
        }

        def pull(start: int, outputs: list[Tensor]) -> Tensor | None:
            return None if dys is None else dys[start : start + len(outputs)]

        # This uses the links up; a second backward (retain_graph=True) runs the steps again.
        kept = ctx.kept._replace(moments=moments)
        return None, None, *ctx.walk.backward(xs, kept, pull, list(dlast))


class Replay:
    """Random numbers drawn inside repeat from `random`; outside nothing has happened."""

    def __init__(self, device: torch.device, random: list[Tensor]) -> None:
        self.device, self.random = device, random

    def __enter__(self) -> None:
        self.outside = _random(self.device)
        _set_random(self.device, self.random)

    def __exit__(self, *_: object) -> None:
        _set_random(self.device, self.outside)


def _random(device: torch.device) -> list[Tensor]:
    """Where the random numbers are."""
    here = [torch.get_rng_state()]
    return [*here, torch.cuda.get_rng_state(device)] if device.type == "cuda" else here


def _moved(before: list[Tensor], device: torch.device) -> list[Tensor]:
    """Where the random numbers are; `before` itself, kept only once, if none has been drawn."""
    now = _random(device)
    return before if all(map(torch.equal, now, before)) else now


def _set_random(device: torch.device, random: list[Tensor]) -> None:
    torch.set_rng_state(random[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(random[1], device)
