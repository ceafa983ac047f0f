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
from elman.kernels import aten, cudnn
from elman.kernels.cudnn import Cudnn
from elman.kernels.torchs import Network, Whole, as_torch
from elman.recurrence import captured, packed
from elman.recurrence.operator import Inputs, Recipe, selected
from elman.recurrence.prepared import Call, prepare
from elman.recurrence.strand import autocast_on_a_cpu
from elman.recurrence.ways import ByCall, ByCudnn, ByStack, Outputs

Form = tuple[int | str, ...]
"""An input's shape; of packed rows "packed", how many steps, rows and numbers."""
FEW_SIZES = 64
LONG_WAY, IN_FLOAT32 = "the long way", "in float32"
MOST = 1000
"""Shapes that a module keeps: sequences may be of every length."""


class Apart(NamedTuple):
    """A stack for cuDNN whose weights, passed by `functional_call` say, lie in no one block of
    memory: they are copied into one at every call."""

    stack: Whole


class Settled(NamedTuple):
    """How calls of one shape are run."""

    by: str | Call | Whole | Apart
    """The long way, a call of our kernel that is ready, or the stack for torch.nn's own call."""
    again: captured.Repeated | None = None
    """The same, captured where it is repeated."""

    @property
    def is_short(self) -> bool:
        """Whether there is another way than the long one."""
        return self.by is not LONG_WAY or (self.again is not None and not self.again.given_up)

    def run(
        self,
        input: Tensor,
        state: Sequence[Tensor] | None,
        weights: list[Any],
        batch_first: bool,
    ) -> Outputs | None:
        """Outputs and last states, in the caller's layout; None where it is the long way still."""
        by, again = self
        if again is not None and not again.given_up and (done := again(input, state, weights)):
            return done
        run = as_torch if input.is_cuda else _by_torch_on_a_cpu
        if isinstance(by, Apart):
            by, run = by.stack, cudnn.from_copied_weights
        if isinstance(by, Whole):
            if state is None:
                state = by.network.zeros(by.rows, by.dtype, input.device)
            if by.ids:  # a GPU asserts that there is a row for each
                input = cudnn.one_hot(input, by.network.inputs, by.dtype)
            return run(by.network, batch_first, input, state, weights, by.dropout)
        if not isinstance(by, Call) or not by.suits(weights):
            return None
        return by(input, state or (), weights)

    def run_packed(
        self, input: PackedSequence, first: Sequence[Tensor], weights: list[Any]
    ) -> Outputs | None:
        """The same of packed rows, whose first states are sorted as the rows are."""
        by, (data, sizes) = self.by, input[:2]
        if isinstance(by, Whole):
            return as_torch(by.network, False, data, first, weights, by.dropout, sizes)
        if not isinstance(by, Call) or not by.suits(weights):
            return None
        places = packed.places(sizes, len(data), data.device)
        ys, last = by(places.padded(data), first, weights, places.lengths)
        return places.packed(ys), last


def _by_torch_on_a_cpu(
    net: Network,
    batch_first: bool,
    x: Tensor,
    first: Sequence[Tensor],
    weights: list[Any],
    dropout: float,
) -> Outputs:
    """As `as_torch`, under autocast as well: torch casts its products, not all that comes out."""
    cast = autocast_on_a_cpu(weights[0].dtype)
    if cast is None:
        return as_torch(net, batch_first, x, first, weights, dropout)
    first = [s.float() for s in first]
    ys, last = as_torch(net, batch_first, x, first, weights, dropout)
    return ys.to(cast), tuple([s.to(cast) for s in last])


def packed_shape(input: PackedSequence) -> Form:
    """What is settled of packed rows goes by this: how many they are and how long, not which."""
    data, sizes = input[:2]
    return "packed", sizes.numel(), rows_of(sizes), *data.shape[1:]


def rows_of(sizes: Tensor) -> int:
    """The first of a pack's batch sizes, the soonest way."""
    return sizes.tolist()[0] if sizes.numel() < FEW_SIZES else int(sizes[0])


class Latest(NamedTuple):
    """A module's last call on a GPU, and what ran it: the next is mostly like it.

    To compare the two takes a third of the time in which a key is made and looked up.
    """

    settled: Settled
    shape: Form
    dtype: torch.dtype
    device: int
    mode: Hashable
    """All that decides besides tensors."""
    states: list[torch.Size] | None
    """On the input's device, or none were given."""
    states_dtype: torch.dtype | None
    """The input's, unless that is of ids."""
    alone: bool = False
    """Whether it was a sequence without a batch, run as a batch of one."""

    def is_like(
        self, data: Tensor, shape: Form, state: Sequence[Tensor] | None, mode: Hashable
    ) -> bool:
        """Whether a call with these would be settled as that one was."""
        _, known, dtype, device, known_mode, states, states_dtype, _ = self
        if shape != known or data.dtype is not dtype or mode != known_mode:
            return False
        if data.get_device() != device:
            return False
        if state is None or states is None:
            return state is states
        if not isinstance(state, (tuple, list)) or len(state) != len(states):
            return False
        for s, known in zip(state, states, strict=True):
            if not isinstance(s, Tensor) or s.shape != known:
                return False
            if s.dtype is not states_dtype or s.get_device() != device:
                return False
        return True


@final
class Table(dict[Hashable, Settled]):
    """What one module has settled."""

    latest: Latest | None = None
    earlier: Latest | None = None
    """One before it: a loop over time passes no state to its first call, and one to the next."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return Table, ()  # a copied module settles its own

    def clear(self) -> None:
        """Nothing is settled any more."""
        super().clear()
        self.latest = self.earlier = None

    def settle(self, key: Hashable, settled: Settled) -> Settled:
        """Run calls of this key so from now on."""
        if len(self) > MOST:
            self.clear()
        self[key] = settled
        return settled

    def remember(
        self,
        settled: Settled,
        data: Tensor,
        shape: Form,
        state: Sequence[Tensor] | None,
        mode: Hashable,
        alone: bool = False,
    ) -> None:
        """This is the latest call on a GPU: with states of one dtype, on no other device."""
        shapes, of = (None, None) if state is None else ([s.shape for s in state], state[0].dtype)
        latest = Latest(settled, shape, data.dtype, data.get_device(), mode, shapes, of, alone)
        if not alone:  # then it is the same call, told otherwise
            self.earlier = self.latest
        self.latest = latest if latest.is_like(data, shape, state, mode) else None

    def like(
        self, data: Tensor, shape: Form, state: Sequence[Tensor] | None, mode: Hashable
    ) -> Latest | None:
        """The latest call, or the one before it, where one with these would be settled alike."""
        latest, earlier = self.latest, self.earlier
        if latest is not None and latest.is_like(data, shape, state, mode):
            return latest
        if earlier is None or not earlier.is_like(data, shape, state, mode):
            return None
        self.latest, self.earlier = earlier, latest
        return earlier

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
    by = _as_torch(x, stack) if theirs else prepare(recipe, x, batch_first) or LONG_WAY
    return Settled(by, _repeated(recipe, x, stack, theirs, by, batch_first))


def settle_cast(recipe: Recipe, x: Inputs, theirs: bool, batch_first: bool) -> Settled:
    """The same of calls whose tensors are cast at every call: ready, or the long way."""
    return Settled(LONG_WAY if theirs else prepare(recipe, x, batch_first) or LONG_WAY)


def settle_packed(recipe: Recipe, x: Inputs, batch_sizes: Tensor, stack: Whole | None) -> Settled:
    """The same of packed rows; `stack`: as torch's own layers run it, where they do."""
    if stack is not None:
        by = aten.prepared(stack) if x.xs.is_cpu else _as_torch(x, stack)
        return Settled(LONG_WAY if isinstance(by, Apart) else by)
    return Settled(prepare(recipe, x.padded(batch_sizes), False) or LONG_WAY)


def _as_torch(x: Inputs, stack: Whole) -> str | Whole | Apart:
    """A call that goes straight to torch.nn's own function, or to cuDNN; or the long way."""
    if stack.pieces > 1:
        return LONG_WAY
    if cudnn.lie_together(stack.network, x.weights):
        return stack
    return LONG_WAY if stack.dropout else Apart(stack)


def _repeated(
    recipe: Recipe,
    x: Inputs,
    stack: Whole,
    theirs: bool,
    by: str | Call | Whole | Apart,
    batch_first: bool,
) -> captured.Repeated | None:
    """What captures these calls where they are repeated; None where nothing does."""
    ours = None if theirs else selected(recipe, x)
    if captured.refuses(recipe, x, stack, ours.name if ours else Cudnn.name) is not None:
        return None
    if ours is None:
        way = ByCudnn(stack, batch_first, isinstance(by, Whole))
    elif isinstance(by, Call):
        way = ByCall(by)
    else:
        sizes = named(recipe.cell).state_sizes(stack.network.hidden)
        way = ByStack(recipe, ours, batch_first, sizes)
    return captured.Repeated(way, stack, x.xs.device.index)
