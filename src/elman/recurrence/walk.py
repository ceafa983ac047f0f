"""A cell's walk over time, a link at a time: each step is a graph of its own that is walked back.

    ds_t = (direct pull on s_t) + ξ_{t+1} (∂(o_{t+1}, s_{t+1})/∂s_t)ᵀ (do_{t+1}, ds_{t+1})

Which links are kept and which are made again is the memory's choice, ξ the carry's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from elman.cells import custom
from elman.gradients.carry import Block, Carry
from elman.gradients.memory import Memory, Plan, Sizes, reversed_pieces
from elman.recurrence.replay import Autocast, Replay, random_after, random_now


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
        moments, links, ys, random = {}, [], None, random_now(xs.device)
        for t, x in enumerate(xs):
            piece, into = divmod(t, plan.piece)
            if piece in hold and into == 0:
                random = random_after(random, xs.device)
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
                return Moment([s.clone() for s in leaves], random_after(moment.random, xs.device))

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
        random = random_now(x.device)

        def count(saved: Tensor) -> Tensor:
            kept.setdefault(saved.data_ptr(), saved.nbytes)
            return saved

        with Replay(x.device, random), saved_tensors_hooks(count, lambda saved: saved):
            link = self.link(x, leaves)
            drawn = [] if random_after(random, x.device) is random else random
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
    xi = per_row(xi.to(d), d)
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
    return [None if d is None else torch.where(per_row(here, d), d, 0) for d in dlast]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


class OverTime(torch.autograd.Function):
    """A walk as one operation that autograd sees."""

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


def per_row(each: Tensor, like: Tensor) -> Tensor:
    """One value per row, against a tensor that has the batch first."""
    return each.reshape(-1, *[1] * (like.dim() - 1))
