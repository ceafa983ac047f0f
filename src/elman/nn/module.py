"""What RNN, GRU, LSTM and Layers have in common: which way a call goes.

A small call takes less time than Python takes to find out what is to run it, and most calls are
like one that came before. So there are short ways: one native call on a CPU (`recurrence.native`);
on a GPU, or where torch's own layers run, what was settled about calls of this shape
(`recurrence.settled`). All others go the long way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Sequence
from operator import is_
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence

from elman.cells import named
from elman.errors import UserError
from elman.kernels import Job
from elman.kernels.cpu import calls, library, masks
from elman.kernels.torchs import Whole, as_torch
from elman.nn.arguments import are_tensors, check_pack
from elman.nn.long_way import as_hx
from elman.nn.settling import Settling, unseen, widened
from elman.recurrence import native, traced, whole
from elman.recurrence.operator import Recipe
from elman.recurrence.settled import Settled, packed_shape, rows_of
from elman.recurrence.strand import autocast_on_a_cpu, uncast
from elman.recurrence.ways import Outputs


def _is_plain_tensor(input: Tensor | PackedSequence) -> TypeGuard[Tensor]:
    """Whether this is a tensor of torch's own classes: another class may compute something else."""
    return type(input) in (Tensor, Parameter)


def _node(module: Module, input: Any, state: Any) -> tuple[Any, tuple[Any, ...]]:
    """A call of this module as one node of a `torch.fx` graph, which else looks into it."""
    tracer, pair = input.tracer, len(named(module.cell).states) > 1
    hx = state[0] if isinstance(state, tuple) and not pair else state
    made = tracer.create_proxy("call_module", tracer.path_of_module(module), (input, hx), {})
    last = made[1]
    return made[0], (last[0], last[1]) if pair else (last,)


class Module(Settling):
    """A module whose calls take a short way where there is one."""

    def _run(
        self, input: Tensor | PackedSequence, state: Sequence[Tensor] | None
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, ...]]:
        """Output and last state, in the caller's layout."""
        if torch.is_inference_mode_enabled() and torch.is_grad_enabled():
            with torch.no_grad():  # a gradient was asked for where torch records none
                return self._run(input, state)
        if "parametrizations" in self._modules and not self._is_computed():
            with self._computed_once():
                return self._run(input, state)
        if self._settled.latest is not None and (done := self._run_again(input, state)):
            return done
        if named(self.cell).fingerprint != self._equations:
            raise UserError(
                f"{self.cell} was declared again, with other equations, after this module was made",
                hint="make the module again, or give the other cell a name of its own",
            )
        if traced.is_seen():
            if traced.is_watched():
                with traced.quietly() if torch.jit.is_tracing() else contextlib.nullcontext():
                    return self._run_long(input, state)
            if self._is_torch_nns():
                return self._run_aloud(input, state)
        if _is_plain_tensor(input):
            if self._is_one_row(input, state):
                return self._run_one_row(input, state)
        elif isinstance(input, Proxy):
            return _node(self, input, state)
        elif isinstance(input, Tensor) and self._is_torch_nns():
            return self._run_aloud(input, state)
        try:
            return self._plain_call(input, state) or self._run_settled(input, state)
        except library.NoMemory:  # a state's numbers, or a weight's
            if not self._is_torch_nns():
                raise
        return self._run_aloud(input, state)

    def _run_aloud(
        self, input: Tensor | PackedSequence, state: Sequence[Tensor] | None
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, ...]]:
        """In torch's own operators, which every mode and every class of tensors knows."""
        with traced.aloud():
            return self._run_long(input, state)

    def _is_one_row(self, input: Tensor, state: Sequence[Tensor] | None) -> bool:
        """Whether this is a valid sequence without a batch; the long way refuses invalid ones."""
        if input.dim() > 2 or self._is_batched(input):
            return False
        width = [self.input_size] if input.is_floating_point() else []
        if [*input.shape[1:]] != width or not len(input):
            return False
        places = self.num_layers * (2 if self.bidirectional else 1)
        sizes = named(self.cell).state_sizes(self.hidden_size, self.proj_size)
        shapes = [(places, size) for size in sizes]
        return state is None or (are_tensors(state) and [s.shape for s in state] == shapes)

    def _run_one_row(
        self, input: Tensor, state: Sequence[Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same as a batch of one, which has short ways."""
        batch, given = self._as_a_batch(input, state)
        done = self._plain_call(batch, given) or self._run_settled(batch, given)
        latest = self._settled.latest
        if latest is not None and not latest.alone:  # it was this call, or this is found out anew
            mode = self._how_called(input)
            if latest.is_like(batch, batch.shape, given, mode):
                self._settled.remember(latest.settled, input, input.shape, state, mode, alone=True)
        return self._without_a_batch(*done)

    def _as_a_batch(
        self, input: Tensor, state: Sequence[Tensor] | None
    ) -> tuple[Tensor, Sequence[Tensor] | None]:
        given = None if state is None else [s.unsqueeze(1) for s in state]
        return input.unsqueeze(0 if self.batch_first else 1), given

    def _without_a_batch(
        self, ys: Any, last: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return ys.squeeze(0 if self.batch_first else 1), tuple([s.squeeze(1) for s in last])

    def _run_settled(
        self, input: Tensor | PackedSequence, state: Sequence[Tensor] | None
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, ...]]:
        """As was settled for such calls, or by the long way. No tracer watches: see `_run`."""
        if isinstance(input, PackedSequence):
            return self._run_packed(input, state, self._packed_key(input, state))
        cast = input.is_cuda and torch.is_autocast_enabled("cuda")
        if cast and (done := self._autocast_call(input, state) or self._cast_call(input, state)):
            return done
        key = self._key(input, state)
        if key is None:
            return self._run_long(input, state)
        settled = self._settled.get(key)
        if settled is None:  # before the first call, which then has the same bits
            with unseen():
                settled = self._settled.settle(key, self._settle(*self._time_first(input, state)))
        if not settled.is_short:
            return self._run_long(input, state)
        if input.is_cuda and not torch.is_autocast_enabled("cuda"):
            self._settled.remember(settled, input, input.shape, state, self._how_called(input))
        done = settled.run(input, state, self._weights(), self.batch_first)
        return done or self._run_long(input, state)

    def _run_again(
        self, input: Any, state: Sequence[Tensor] | None
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, ...]] | None:
        """As one of the last two calls on a GPU ran; None where this one may not be like them.

        A small call waits for Python, so this compares no more than it must, and first what
        differs most often.
        """
        is_packed = isinstance(input, PackedSequence)
        if not is_packed and not _is_plain_tensor(input):
            return None
        data, shape = (input.data, packed_shape(input)) if is_packed else (input, input.shape)
        latest = self._settled.like(data, shape, state, self._how_called(data))
        if latest is None:
            return None
        if traced.is_seen() or torch.is_autocast_enabled("cuda"):
            return None
        if self.dropout and self.training and whole.recomputes():
            return None
        if is_packed:
            return self._packed_call(latest.settled, input, state)
        if not latest.alone:
            return latest.settled.run(input, state, self._weights(), self.batch_first)
        batch, given = self._as_a_batch(input, state)
        done = latest.settled.run(batch, given, self._weights(), self.batch_first)
        return None if done is None else self._without_a_batch(*done)

    def _run_long(
        self, input: Tensor | PackedSequence, state: Sequence[Tensor] | None
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, ...]]:
        """By the long way, which takes every call."""
        if isinstance(input, PackedSequence):
            return self._run_packed(input, state, None)
        xs, first = self._time_first(input, state)
        if self.batch_first and self._is_batched(input) and traced.listening():
            return self._written_down(input, first)
        ys, last = self._recur(xs, first)
        return self._as_given(input, ys), self._states_as_given(input, last)

    def _run_inside(self, input: Tensor | PackedSequence, state: Sequence[Tensor] | None) -> Any:
        """What a module returns, inside a graph that is compiled or exported."""
        ys, last = self._run_long(input, state)
        return ys, as_hx(last)

    def _run_packed(
        self, input: PackedSequence, state: Sequence[Tensor] | None, key: Hashable
    ) -> tuple[PackedSequence, tuple[Tensor, ...]]:
        """Rows of different lengths: a row that has ended holds its state."""
        settled = None if key is None else self._settled.get(key)
        if settled is not None and input.data.is_cpu:
            check_pack(len(input.data), input.batch_sizes.tolist())
        given = state
        if settled is None:
            with unseen():
                state = self._checked_pack(input, state)
                if key is not None:
                    settled = self._settled.settle(key, self._settle_packed(input, state))
        data = input.data
        if settled is not None and settled.is_short and data.is_cuda:
            mode = self._how_called(data)
            self._settled.remember(settled, data, packed_shape(input), given, mode)
        return self._packed_call(settled, input, state)

    def _packed_call(
        self, settled: Settled | None, input: PackedSequence, state: Sequence[Tensor] | None
    ) -> tuple[PackedSequence, tuple[Tensor, ...]]:
        """Packed rows as was settled, or by the long way; states in the caller's order."""
        data, sizes, order, back = input
        if state is None:  # zeros, the same for every row
            state = self._zeros(rows_of(sizes), data.dtype, data.device)
        elif order is not None:
            state = [s.index_select(1, order) for s in state]
        done = None
        if settled is not None and settled.is_short:
            done = settled.run_packed(input, state, self._weights())
        ys, last = done or self._recur_packed(data, sizes, state)
        if back is not None:
            last = tuple([s.index_select(1, back) for s in last])
        return PackedSequence._make((ys, sizes, order, back)), last

    def job(
        self, x: Tensor | PackedSequence, state: Tensor | Sequence[Tensor] | None = None
    ) -> Job:
        """What the kernels are asked to run for this input (see `elman.kernels.explain`)."""
        if "parametrizations" in self._modules and not self._is_computed():
            with self._looked_at():
                return self.job(x, state)
        state = (state,) if isinstance(state, Tensor) else state
        if isinstance(x, PackedSequence):
            return self._packed_job(
                self._inputs(x.data, self._checked_pack(x, state)), x.batch_sizes
            )
        on_gpu = x.is_cuda and torch.is_autocast_enabled("cuda")
        if self._stays_in_float32(x, state) if on_gpu else self._casts_inside(x):
            return self._float32_job(x, state)
        return self._job(self._inputs(*self._time_first(x, state)))

    # ------------------------------------------------------------------ one native call on a CPU

    def _plain_call(
        self, input: Tensor | PackedSequence, state: Sequence[Tensor] | None
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, ...]] | None:
        """The call in native code on a CPU, where nothing is cut; None: it is of another kind."""
        if input.is_cuda or forward_ad._current_level >= 0:  # forward-mode derivatives
            return None
        is_tensor = _is_plain_tensor(input)
        if self._prepared is None and self._is_torchs(input if is_tensor else input.data):
            return self._torchs_again(input, state) if is_tensor else None
        recipe = None
        if torch.is_grad_enabled():
            recipe = self._exact or self._remembered_recipe()
            if not native.takes(recipe):
                return None
        if (found := self._again(input, state)) is None:
            if state is not None and are_tensors(state):
                state = [library.row_by_row(s) for s in state]
            if (found := self._prepare(input, state)) is None:
                return None
        call, xs, pack = found
        drops = self.dropout if self.training and self.num_layers > 1 else 0.0
        if drops and not masks.drops_as_torch(call.dtype):
            return None
        use = native.use_of(pack, drops) if drops or pack is not None else None
        if recipe is None:
            result = call(xs, state, use)
        else:
            result = native.recurrence(call, recipe, xs, state, use)
        if result is None or (pack is None and not self.batch_first):
            return result
        ys, last = result
        if isinstance(input, PackedSequence):
            return input._replace(data=ys), last
        return ys.transpose(0, 1), last

    def _again(
        self, input: Tensor | PackedSequence, state: Sequence[Tensor] | None
    ) -> tuple[calls.Prepared, Tensor, None] | None:
        """The last call, where this one is like it: then all that `_is_plain` asks is known."""
        call = self._prepared
        if call is None or not _is_plain_tensor(input) or self.batch_first:
            return None
        cast = autocast_on_a_cpu(call.dtype) if torch._C._is_any_autocast_enabled() else None
        if call.shape != input.shape or call.cast is not cast:
            call = self._prepareds.get((input.shape, input.dtype, False, cast))
            if call is None:
                return None
        weights = map(self._parameters.get, self._flat_weights_names)
        if not call.suits_again(input, state, weights, cast):
            return None
        self.__dict__["_prepared"] = call  # faster than torch's `__setattr__`
        return call, input, None

    def _prepare(
        self, input: Tensor | PackedSequence, state: Sequence[Tensor] | None
    ) -> tuple[calls.Prepared, Tensor, calls.Pack | None] | None:
        """What native code needs for this call, its inputs, and how they are packed."""
        if not self._is_plain(input):
            return None
        weights = [library.row_by_row(w) for w in self._weights()]
        xs, pack = self._rows_of(input)
        if pack is None and isinstance(input, PackedSequence):
            return None
        cast = autocast_on_a_cpu(weights[0].dtype)
        own = map(self._parameters.get, self._flat_weights_names)
        if not all(map(is_, weights, own)):  # computed, or copied row by row: for this call alone
            call = self._new_call(input, xs, state, weights, pack, cast)
            return None if call is None else (call, xs, pack)
        key = calls.padded_shape(xs, pack), xs.dtype, pack is not None, cast
        call = self._prepareds.get(key)
        if call is None or not call.suits(xs, state, weights, pack, cast):
            call = self._new_call(input, xs, state, weights, pack, cast)
            if call is not None:
                self._prepareds.keep(key, call)
        self.__dict__["_prepared"] = call
        return None if call is None else (call, xs, pack)

    def _new_call(
        self,
        input: Tensor | PackedSequence,
        xs: Tensor,
        state: Sequence[Tensor] | None,
        weights: list[Any],
        pack: calls.Pack | None,
        cast: torch.dtype | None,
    ) -> calls.Prepared | None:
        job = functools.partial(self._asked, input, state)
        cell, directions = self.running_cell, 2 if self.bidirectional else 1
        return native.prepared(cell, xs, state, weights, directions, job, pack, cast)

    def _remembered_recipe(self) -> Recipe:
        self._exact = self._recipe()
        return self._exact

    def _is_plain(self, input: Tensor | PackedSequence) -> bool:
        """Whether this is a batch or a pack on a CPU, and nothing is cut; dropout is allowed."""
        is_packed = isinstance(input, PackedSequence)
        given = input.data if is_packed else input
        if not _is_plain_tensor(given) or not given.is_cpu or self._is_torchs(given):
            return False
        if self.proj_size or self.is_noisy or self._cuts(input):
            return False
        if traced.listening() or forward_ad._current_level >= 0:  # forward-mode derivatives
            return False
        return is_packed or self._is_batched(given)

    def _is_torchs(self, input: Tensor) -> bool:
        """Whether a native call is not worth trying; where autocast has to cast, it is."""
        return self._asks_torch(input) and not self._is_cast_on_a_cpu(input)

    def _rows_of(self, input: Tensor | PackedSequence) -> tuple[Tensor, calls.Pack | None]:
        """Inputs as native code reads them, and how they are packed."""
        if isinstance(input, PackedSequence):
            return input.data, calls.packed(*input)
        return library.row_by_row(input.transpose(0, 1) if self.batch_first else input), None

    def _asked(self, input: Tensor | PackedSequence, state: Sequence[Tensor] | None) -> Job:
        """What native code would run: under autocast, everything in float32."""
        if not isinstance(input, PackedSequence):
            return self.job(input, state)
        data = input.data
        if autocast_on_a_cpu(self._first_weight().dtype):
            data, state = widened(data, state)
        with uncast(data):
            first = self._checked_pack(input._replace(data=data), state)
            return self._packed_job(self._inputs(data, first), input.batch_sizes)

    def _casts_inside(self, input: Tensor) -> bool:
        """Whether the kernel does autocast's work, and is handed everything in float32."""
        if not all(autocast_on_a_cpu(w.dtype) for w in self._weights()):
            return False
        if not self._is_plain(input):
            return False
        return not torch.is_grad_enabled() or native.takes(self._recipe())

    # ------------------------------------------------------------------ what is settled of a shape

    def _torchs_again(self, input: Tensor, state: Sequence[Tensor] | None) -> Outputs | None:
        """By torch's own function on a CPU, where that was settled; faster than by torch.nn."""
        settled = self._settled.get(self._cpu_key(input, state))
        if settled is None or not isinstance(settled.by, Whole):
            return None
        stack, weights = settled.by, self._weights()
        if state is None:
            state = stack.network.zeros(stack.rows, input.dtype, input.device)
        return as_torch(stack.network, self.batch_first, input, state, weights, stack.dropout)

    # ------------------------------------------------------------------ under autocast on a GPU

    def _autocast_call(self, input: Tensor, state: Sequence[Tensor] | None) -> Outputs | None:
        """In float32, only the outputs being cast; None where that is not faster."""
        if not self._stays_in_float32(input, state):
            return None
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind)
        torch.set_autocast_enabled(kind, False)  # the context manager takes 3 µs
        try:
            given = None if state is None else [s.float() for s in state]
            input = input.float() if input.is_floating_point() else input
            ys, last = self._run_settled(input, given)
        finally:
            torch.set_autocast_enabled(kind, True)
        assert isinstance(ys, Tensor)
        return ys.to(dtype), tuple([s.to(dtype) for s in last])

    def _cast_call(self, input: Tensor, state: Sequence[Tensor] | None) -> Outputs | None:
        """In autocast's dtype, by a call that is ready and casts by itself; None: the long way."""
        kind = input.device.type
        key = self._cast_key(input, state, torch.get_autocast_dtype(kind))
        if key is None:
            return None
        settled = self._settled.get(key)
        if settled is None:
            with unseen():
                settled = self._settled.settle(key, self._settle_cast(input, state))
        if not settled.is_short:
            return None
        torch.set_autocast_enabled(kind, False)  # the context manager takes 3 µs
        try:
            return settled.run(input, state, self._weights(), self.batch_first)
        finally:
            torch.set_autocast_enabled(kind, True)
