"""`Recurrent`: a module of your own, run over time with any carry and any memory.

What `elman.nn.GRU` does for the cells elman knows, for a cell it has never seen: the cell runs
forwards step by step, and each step is a small graph of its own that autograd can walk back
(`walk.py`). What flows from one step to the one before is multiplied by the carry's ξ; which steps
are kept and which are run again is the memory's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from elman.cells import custom
from elman.cells.custom import Nest
from elman.errors import UserError
from elman.gradients.carry import Carry, Full, checked_carry
from elman.gradients.chunks import Stepped, Time, checked_time
from elman.gradients.memory import Memory, Stored, checked_memory
from elman.recurrence import traced
from elman.recurrence.replay import Autocast
from elman.recurrence.walk import OverTime, Walk, per_row

FULL, STORED, STEPPED = Full(), Stored(), Stepped()
CHECKED = {"carry": checked_carry, "memory": checked_memory, "time": checked_time}
"""What a module may be given at any time, and what refuses anything else."""
TORCHS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)


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
        if torch.is_inference_mode_enabled() and torch.is_grad_enabled():
            with torch.no_grad():  # a gradient was asked for where torch records none
                return self.forward(xs, state)
        if isinstance(xs, PackedSequence):
            return self._packed(xs, state)
        if traced.listening():
            return self._traced(xs, state)
        walk, xs, leaves = self._begin(xs, state)
        ys, *last = OverTime.apply(walk, len(leaves), xs, *leaves, *walk.params())
        return self._as_given(ys), pytree.tree_unflatten(last, walk.structure)

    def _packed(self, packed: PackedSequence, state: Nest) -> tuple[PackedSequence, Nest]:
        """Rows of different lengths, from the longest to the shortest, and back in their order."""
        if traced.listening():
            raise traced.unpackable(type(self.cell).__name__)
        xs, lengths = pad_packed_sequence(PackedSequence(packed.data, packed.batch_sizes))
        _check_input(self.cell, xs, batch_first=False)
        lengths = lengths.to(xs.device)
        state = custom.first_state(self.cell, xs[0]) if state is None else state
        _check_state(pytree.tree_leaves(state), len(lengths))
        state = _ordered(state, packed.sorted_indices)
        leaves, structure = pytree.tree_flatten((state, lengths))
        walk = self._walk(Ending(self.cell), structure, xs, lengths)
        ys, *last = OverTime.apply(walk, len(leaves), xs, *leaves, *walk.params())
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
        _check_input(self.cell, xs, self.batch_first)
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


def _check_input(cell: nn.Module, xs: Tensor, batch_first: bool) -> None:
    """Refuse to torch's cells what they would not: their native code reads beyond such a row."""
    if type(cell) in TORCHS and xs.dim() != 3:
        raise UserError(
            f"xs has shape {tuple(map(int, xs.shape))}; a {type(cell).__name__} reads "
            f"({'batch, time' if batch_first else 'time, batch'}, {cell.input_size})",
            hint=f"one sequence is a batch of one: xs.unsqueeze({0 if batch_first else 1})",
        )


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
            return (
                torch.where(per_row(left > 0, new), new, old) if _has_rows(new, len(left)) else new
            )

        return output, (pytree.tree_map(held, after, before), left - 1)
