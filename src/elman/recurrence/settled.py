"""Calls of one shape on a GPU, or by torch's own layers: what runs them, settled at the first one.

A small call takes less time than Python takes to find out what is to run it. So a module keeps what
it has found out, by everything that may change the answer: torch.nn's own function, a call of our
kernel that is ready, either of them captured where it is repeated, or the long way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from elman.cells import named
from elman.kernels import aten, cudnn, select
from elman.kernels.cudnn import Cudnn
from elman.kernels.torchs import Whole, as_torch
from elman.recurrence import captured, packed
from elman.recurrence.operator import Inputs, Recipe
from elman.recurrence.prepared import Call, prepare
from elman.recurrence.strand import autocast_on_a_cpu
from elman.recurrence.ways import ByCall, ByCudnn, ByStack, Outputs

LONG_WAY, IN_FLOAT32 = "the long way", "in float32"
MOST = 1000
"""Shapes that a module keeps: sequences may be of every length."""


class Settled(NamedTuple):
    """How calls of one shape are run."""

    how: str | Call | Whole
    """The long way, a call of our kernel that is ready, or the stack for torch.nn's own call."""
    again: captured.Repeated | None = None
    """The same, captured where it is repeated."""

    @property
    def is_short(self) -> bool:
        """Whether there is another way than the long one."""
        return self.how is not LONG_WAY or (self.again is not None and not self.again.given_up)

    def run(
        self,
        input: Tensor,
        state: Sequence[Tensor] | None,
        weights: list[Any],
        batch_first: bool,
    ) -> Outputs | None:
        """Outputs and last states, in the caller's layout; None where it is the long way still."""
        how, again = self
        live = None if again is None or again.given_up else again
        if live is not None and (done := live(input, state or (), weights)):
            return done
        if isinstance(how, Whole):
            return _by_torch(how, input, state, weights, batch_first)
        if not isinstance(how, Call) or not how.suits(weights):
            return None
        return how(input, state or (), weights)

    def run_packed(
        self, input: PackedSequence, first: Sequence[Tensor], weights: list[Any]
    ) -> Outputs | None:
        """The same of packed rows, whose first states are sorted as the rows are."""
        how, (data, sizes) = self.how, input[:2]
        if isinstance(how, Whole):
            return as_torch(how.network, False, data, first, weights, how.dropout, sizes)
        if not isinstance(how, Call) or not how.suits(weights):
            return None
        places = packed.places(sizes, len(data), data.device)
        ys, last = how(places.padded(data), first, weights, places.lengths)
        return places.packed(ys), last


def _by_torch(
    stack: Whole,
    input: Tensor,
    state: Sequence[Tensor] | None,
    weights: list[Any],
    batch_first: bool,
) -> Outputs:
    """By the very function that torch.nn calls."""
    net, cast = stack.network, autocast_on_a_cpu(weights[0].dtype) if input.is_cpu else None
    if state is None:
        state = net.zeros(stack.rows, input.dtype, input.device)
    if cast is not None:  # torch's products are cast, but not all that comes out
        state = [s.float() for s in state]
    ys, last = as_torch(net, batch_first, input, state, weights, stack.dropout)
    return (ys, last) if cast is None else (ys.to(cast), tuple([s.to(cast) for s in last]))


class Latest(NamedTuple):
    """A module's last call on a GPU, and what ran it: the next is mostly like it.

    To compare the two takes a third of the time in which a key is made and looked up.
    """

    how: Settled
    shape: torch.Size
    dtype: torch.dtype
    device: int
    mode: Hashable
    """All that decides besides tensors."""
    states: list[torch.Size] | None
    """Of the input's type and on its device, or none were given."""

    def is_like(self, input: Tensor, state: Sequence[Tensor] | None, mode: Hashable) -> bool:
        """Whether a call with these would be settled as that one was."""
        _, shape, dtype, device, known, states = self
        if input.shape != shape or input.dtype is not dtype or mode != known:
            return False
        if input.get_device() != device:
            return False
        if state is None or states is None:
            return state is states
        return states == [s.shape for s in state if s.dtype is dtype and s.get_device() == device]


@final
class Table(dict[Hashable, Settled]):
    """What one module has settled."""

    latest: Latest | None = None

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return Table, ()  # a copied module settles its own

    def clear(self) -> None:
        """Nothing is settled any more."""
        super().clear()
        self.latest = None

    def settle(self, key: Hashable, settled: Settled) -> Settled:
        """Run calls of this key so from now on."""
        if len(self) > MOST:
            self.clear()
        self[key] = settled
        return settled

    def remember(
        self, how: Settled, input: Tensor, state: Sequence[Tensor] | None, mode: Hashable
    ) -> None:
        """This is the latest call on a GPU: in no dtype but its input's, on no other device."""
        states = None if state is None else [s.shape for s in state]
        latest = Latest(how, input.shape, input.dtype, input.get_device(), mode, states)
        self.latest = latest if latest.is_like(input, state, mode) else None

    def words(self, recipe: Recipe, x: Inputs, stack: Whole, kernel: str) -> str:
        """Whether repeated calls are captured, or why not, for `explain`."""
        reason = captured.refuses(recipe, x, stack, kernel)
        if reason is not None:
            return f"not captured: {reason}"
        known = [again for _, again in self.values() if again is not None]
        words = [again.words() for again in known if again.whole == stack]
        return next((w for w in words if w != captured.WILL_BE), captured.WILL_BE)


def settle(recipe: Recipe, x: Inputs, stack: Whole, theirs: bool, batch_first: bool) -> Settled:
    """How calls like this one are to be run; `theirs`: by torch's own layers."""
    if x.xs.is_cpu:
        return Settled(aten.prepared(stack) if theirs else LONG_WAY)
    how = _as_torch(x, stack) if theirs else prepare(recipe, x, batch_first) or LONG_WAY
    return Settled(how, _repeated(recipe, x, stack, theirs, how, batch_first))


def settle_cast(recipe: Recipe, x: Inputs, theirs: bool, batch_first: bool) -> Settled:
    """The same of calls whose tensors are cast at every call: ready, or the long way."""
    return Settled(LONG_WAY if theirs else prepare(recipe, x, batch_first) or LONG_WAY)


def settle_packed(recipe: Recipe, x: Inputs, batch_sizes: Tensor, stack: Whole | None) -> Settled:
    """The same of packed rows; `stack`: as torch's own layers run it, where they do."""
    if stack is not None:
        return Settled(aten.prepared(stack) if x.xs.is_cpu else _as_torch(x, stack))
    return Settled(prepare(recipe, x.padded(batch_sizes), False) or LONG_WAY)


def _as_torch(x: Inputs, stack: Whole) -> str | Whole:
    """What is handed straight to torch.nn's own function, or the long way there."""
    plain = stack.pieces == 1 and not stack.ids
    return stack if plain and cudnn.lie_together(stack.network, x.weights) else LONG_WAY


def _repeated(
    recipe: Recipe,
    x: Inputs,
    stack: Whole,
    theirs: bool,
    how: str | Call | Whole,
    batch_first: bool,
) -> captured.Repeated | None:
    """What captures these calls where they are repeated; None where nothing does."""
    ours = None if theirs else select(recipe.job(x))
    if captured.refuses(recipe, x, stack, ours.name if ours else Cudnn.name) is not None:
        return None
    if ours is None:
        way = ByCudnn(stack.network, batch_first, how != LONG_WAY)
    elif isinstance(how, Call):
        way = ByCall(how)
    else:
        sizes = named(recipe.cell).state_sizes(stack.network.hidden)
        way = ByStack(recipe, ours, batch_first, sizes)
    return captured.Repeated(way, stack, x.xs.device.index)
