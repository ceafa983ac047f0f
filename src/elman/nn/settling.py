"""What decides how a call runs, as a key; and how the calls of a key run, settled once.

A small call takes less time than Python takes to find out what is to run it. So everything that may
change the answer is put into a key, and the answer is kept (`recurrence.settled`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.rnn import PackedSequence

from elman.kernels import Job, is_sooner, named_kernel, runs_whole, settings
from elman.nn.arguments import are_tensors
from elman.nn.long_way import LongWay
from elman.recurrence import settled, traced, whole
from elman.recurrence.settled import IN_FLOAT32, LONG_WAY, Settled, packed_shape
from elman.recurrence.strand import is_cast, uncast


class Settling(LongWay):
    """A module that knows what its calls depend on."""

    # ------------------------------------------------------------------ keys

    def _key(self, input: Tensor, state: Sequence[Tensor] | None) -> Hashable:
        """All that decides what runs a call; None where every call is decided for itself."""
        if not self._asks_torch(input) or not self._is_batched(input) or self._cuts(input):
            return None
        if input.is_cpu and not input.is_floating_point():
            return None
        if forward_ad._current_level >= 0:
            return None
        if input.is_cpu and not self._is_cast_on_a_cpu(input):
            return self._cpu_key(input, state)
        kind = self._kind(input, state)
        return None if kind is None else (input.shape, *kind)

    def _cpu_key(self, input: Tensor, state: Sequence[Tensor] | None) -> Hashable:
        """The same on a CPU, where autocast has nothing to do: little but shapes and modes."""
        drops = self.training and self.dropout > 0
        mode = torch.is_grad_enabled(), input.requires_grad, drops, named_kernel()
        if state is None:
            return input.shape, input.dtype, mode
        if not are_tensors(state) or [s for s in state if s.dtype is not input.dtype]:
            return None
        given = [(s.shape, s.is_cpu) for s in state]
        return input.shape, input.dtype, mode, *given

    def _packed_key(self, input: PackedSequence, state: Sequence[Tensor] | None) -> Hashable:
        """The same for rows of different lengths: how many, how long, but not which."""
        data = input.data
        if not self._asks_torch(data) or data.dim() != 2 or self._chunks is not None:
            return None
        if forward_ad._current_level >= 0 or (data.is_cpu and torch.is_autocast_enabled("cpu")):
            return None
        kind = self._kind(data, state)
        return None if kind is None else (packed_shape(input), *kind)

    def _cast_key(
        self, input: Tensor, state: Sequence[Tensor] | None, dtype: torch.dtype
    ) -> Hashable:
        """The same of a call on a GPU whose tensors autocast makes of this dtype."""
        if input.dim() != 3 or not input.is_floating_point() or self._cuts(input):
            return None
        if forward_ad._current_level >= 0 or not (state is None or are_tensors(state)):
            return None
        if self.dropout and self.training and whole.recomputes():
            return None
        like = None if state is None else tuple([(s.shape, s.dtype, s.device) for s in state])
        mode = *self._mode(input), *settings(dtype)
        return "cast", dtype, input.shape, input.dtype, input.device, mode, like

    def _kind(self, input: Tensor, state: Sequence[Tensor] | None) -> tuple[Hashable, ...] | None:
        """The part of a key that is not the input's shape: one flat tuple, quick to find."""
        cast = None
        if torch._C._is_any_autocast_enabled() and is_cast(input.device):
            cast = torch.get_autocast_dtype(input.device.type)
            if not self._torch_casts(input):
                return None
        if self.dropout and self.training and whole.recomputes():
            return None
        kind = [input.device, cast, *self._how_called(input)]
        if state is not None:
            if not are_tensors(state):
                return None
            for s in state:
                kind += s.shape, s.dtype, s.device
        return tuple(kind)

    def _how_called(self, input: Tensor) -> tuple[Hashable, ...]:
        """All that decides what runs a call, but its tensors' shapes and devices."""
        grad, training, dtype = torch.is_grad_enabled(), self.training, input.dtype
        if not dtype.is_floating_point:  # ids are read in that of the weights
            dtype = self._first_weight().dtype
        return dtype, grad, training, self.dropout, input.requires_grad, settings(dtype)

    def _mode(self, input: Tensor) -> tuple[Hashable, ...]:
        return torch.is_grad_enabled(), self.training, self.dropout, input.requires_grad

    def _torch_casts(self, input: Tensor) -> bool:
        """Whether autocast is left to torch's own function: on a CPU, from float32 weights."""
        kind = self._first_weight().dtype
        return input.is_cpu and kind == torch.float32 and input.dtype != torch.float64

    def _is_cast_on_a_cpu(self, input: Tensor) -> bool:
        """Whether autocast is on there, and finds another dtype than its own."""
        if not torch.is_autocast_enabled("cpu"):
            return False
        dtype = torch.get_autocast_dtype("cpu")
        return input.dtype is not dtype or self._first_weight().dtype is not dtype

    # ------------------------------------------------------------------ answers

    def _settle(self, xs: Tensor, first: Sequence[Tensor]) -> Settled:
        """How calls like this one are to be run."""
        x = self._inputs(xs, first)
        stack = self._whole(x)
        theirs = runs_whole(stack, xs.device, lambda: self._job(x))
        return settled.settle(self._recipe(len(xs)), x, stack, theirs, self.batch_first)

    def _settle_packed(self, input: PackedSequence, first: Sequence[Tensor]) -> Settled:
        """The same of packed rows."""
        x, sizes = self._inputs(input.data, first), input.batch_sizes
        return settled.settle_packed(self._recipe(), x, sizes, self._packed_whole(x, sizes))

    def _settle_cast(self, input: Tensor, state: Sequence[Tensor] | None) -> Settled:
        """How calls like this one are to be run."""
        x = self._inputs(*self._time_first(input, state))
        if self._first_weight().dtype == torch.float64:  # which autocast leaves alone
            return Settled(LONG_WAY)
        with uncast(input):
            theirs = runs_whole(self._whole(x), input.device, lambda: self._job(x))
            return settled.settle_cast(self._recipe(len(x.xs)), x, theirs, self.batch_first)

    def _stays_in_float32(self, input: Tensor, state: Sequence[Tensor] | None) -> bool:
        """Whether that is faster than casting all weights: settled once for each shape."""
        if self.repeatable or traced.listening():  # as `job` may be asked, not `_run`
            return False
        if self._chunks is not None or not (state is None or are_tensors(state)):
            return False
        if self._first_weight().dtype != torch.float32:
            return False
        dtype = torch.get_autocast_dtype(input.device.type)
        mode = *self._mode(input), *settings(torch.float32)
        key = input.shape, input.is_floating_point(), dtype, input.device, *mode
        known = self._settled.get(key)
        if known is None:
            narrow = self._job(self._inputs(*self._time_first(input, state)))
            sooner = is_sooner(self._float32_job(input, state), narrow)
            known = self._settled.settle(key, Settled(IN_FLOAT32 if sooner else LONG_WAY))
        return known.by == IN_FLOAT32

    def _float32_job(self, x: Tensor, state: Sequence[Tensor] | None) -> Job:
        """What the kernels are asked to run under autocast where only what comes out is cast."""
        x, state = widened(x, state)
        with uncast(x):
            return self._job(self._inputs(*self._time_first(x, state)))


def unseen() -> contextlib.AbstractContextManager[object]:
    """A block for the first call of a shape, which makes tensors only to choose what runs.

    `torch.utils.checkpoint` counts saved tensors, and must not count those (such as W_hh with
    zeros outside of its heads).
    """
    if torch.compiler.is_compiling() or not whole.is_hooked():
        return contextlib.nullcontext()
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def widened(x: Tensor, state: Sequence[Tensor] | None) -> tuple[Tensor, Sequence[Tensor] | None]:
    """Input and state in float32; ids stay ids."""
    x = x.float() if x.is_floating_point() else x
    return x, [s.float() for s in state or ()] if are_tensors(state) else state
