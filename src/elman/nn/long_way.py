"""The long way through a module, which takes every call: checked, time first, and back.

What the caller passes becomes `Inputs` and the module a `Recipe`; then torch's own layers run them,
or `recurrence.operator`, or what stands in for it in a compiled or exported graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from elman.cells import named
from elman.cells.base import diagonal_blocks
from elman.errors import UserError
from elman.kernels import Job, Kernel, named_kernel, runs_whole
from elman.kernels.aten import Aten
from elman.kernels.choice import requested
from elman.kernels.cpu import KERNEL
from elman.kernels.products import HALF
from elman.kernels.torchs import Whole
from elman.nn import arguments
from elman.nn.parameters import Parameters
from elman.recurrence import compiled, packed, piecewise, prepared, traced, whole
from elman.recurrence.chunked import SHORT, InChunks
from elman.recurrence.operator import UNDRAWN, Inputs, recurrence
from elman.recurrence.piecewise import Loss
from elman.recurrence.strand import is_cast
from elman.recurrence.ways import Outputs


class LongWay(Parameters):
    """A module that takes every kind of call."""

    _ends: Tensor | None = None
    """Where the rows of a call end, if not where its input does."""

    # ------------------------------------------------------------------ the caller's layout

    def _time_first(
        self, input: Tensor, state: Sequence[Tensor] | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The caller's input and state, checked, with time before batch."""
        batched = self._is_batched(input)
        arguments.check_input(self, input, time=1 if batched and self.batch_first else 0)
        if not batched:
            state = None if state is None else [s.unsqueeze(1) for s in state]
            first = arguments.checked_state(self, 1, input.device, state, batched=False)
            return input.unsqueeze(1), first
        xs = input.transpose(0, 1) if self.batch_first else input
        return xs, arguments.checked_state(self, xs.shape[1], xs.device, state)

    def _checked_pack(
        self, input: PackedSequence, state: Sequence[Tensor] | None
    ) -> Sequence[Tensor]:
        """The first states of packed rows, in the caller's order."""
        arguments.check_input(self, input.data[None], time=1)
        rows = input.batch_sizes[0]  # in a trace a tensor, so that other batches may run by it
        rows = rows if torch.jit.is_tracing() else int(rows)
        return arguments.checked_state(self, rows, input.data.device, state)

    def _is_batched(self, input: Tensor) -> bool:
        return input.dim() == (3 if input.is_floating_point() else 2)

    def _as_given(self, input: Tensor, ys: Tensor) -> Tensor:
        """Outputs in the layout of the input."""
        if not self._is_batched(input):
            return ys.squeeze(1)
        return ys.transpose(0, 1) if self.batch_first else ys

    def _states_as_given(self, input: Tensor, last: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(last) if self._is_batched(input) else tuple(s.squeeze(1) for s in last)

    def _inputs(self, xs: Tensor, state: Sequence[Tensor], lengths: Tensor | None = None) -> Inputs:
        """All tensors that go into the recurrence, in autocast's dtype where it is on.

        Nothing random is drawn yet: asking what would run must not change what is drawn later.
        """
        weights = self._real_weights()
        dtype = weights[0].dtype
        if is_cast(xs.device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(xs.device.type)
        drops = self.dropout > 0 and self.num_layers > 1
        draws = self.training and (drops or self.is_noisy)
        return Inputs(
            _as(dtype if xs.is_floating_point() else torch.int64, xs),
            [_as(dtype, s) for s in state],
            [_as(dtype, w) for w in weights],
            None if lengths is None else lengths.to(xs.device),
            UNDRAWN if draws else None,
        )

    def _real_weights(self) -> list[Tensor]:
        """The weights; W_hh of a cell with heads is 0 outside of their blocks."""
        weights = [*self._weights()]
        for name, w in zip(self._flat_weights_names, weights, strict=True):
            if not w.is_floating_point():
                raise UserError(
                    f"{name} of {type(self).__name__} has dtype {w.dtype}, weights are real",
                    hint=f"module.{name}.data = module.{name}.data.to(torch.float32)",
                )
        if (heads := named(self.cell).heads) != 1:
            for i, name in enumerate(self._flat_weights_names):
                if name.startswith("weight_hh"):
                    weights[i] = weights[i] * diagonal_blocks(weights[i], heads)
        return weights

    # ------------------------------------------------------------------ the recurrence

    @contextmanager
    def ended_at(self, lengths: Tensor | None) -> Iterator[None]:
        """Inside this block rows hold their state after so many steps (None: after all).

        As packed rows do; but how long they are lies in a tensor, so that a CUDA graph can have
        others at each replay. For carries that are not exact: those take the long way.
        """
        assert lengths is None or not self.carry.exact
        before = self._ends
        self.__dict__["_ends"] = lengths
        try:
            yield
        finally:
            self.__dict__["_ends"] = before

    def _recur(self, xs: Tensor, state: Sequence[Tensor], lengths: Tensor | None = None) -> Outputs:
        """The recurrence itself, everything time first."""
        lengths = self._ends if lengths is None else lengths
        x = self._inputs(xs, state, lengths)
        if traced.listening():
            return traced.recurrence(self._recipe(), x.drawn(), self.training)
        if torch.compiler.is_compiling():
            x = x.drawn()
            out = compiled.recurrence(*x, *self._plain(), self._how, torch.is_grad_enabled())
            return out[0], tuple(out[1 : 1 + len(state)])
        recipe = self._recipe(len(xs))
        if self._may_be_torchs(x.xs) and lengths is None and recipe.chunks is None:
            stack = self._whole(x)
            if runs_whole(stack, xs.device, lambda: self._job(x)):
                return self._by_torch(stack, x)  # which draws by itself
        return recurrence(recipe, x.drawn())

    def _written_down(self, rows: Tensor, first: Sequence[Tensor]) -> Outputs:
        """The recurrence for a tracer, with the batch first throughout.

        Of a transposed input torch's exporters take the example's number of steps for every one's.
        """
        x = self._inputs(rows, first).drawn()
        return traced.recurrence(self._recipe(), x, self.training, batch_first=True)

    def _recur_packed(self, data: Tensor, batch_sizes: Tensor, first: Sequence[Tensor]) -> Outputs:
        """The recurrence of packed rows: packed for torch's own layers, padded for all others."""
        if traced.listening():
            x = self._inputs(data, first).drawn()
            return traced.recurrence(self._recipe(), x, self.training, batch_sizes)
        if not torch.compiler.is_compiling():
            if data.is_cpu:
                arguments.check_pack(len(data), batch_sizes.tolist())
            if self._chunks is None and self._may_be_torchs(data):
                x = self._inputs(data, first)
                if (stack := self._packed_whole(x, batch_sizes)) is not None:
                    return self._by_torch(stack, x, batch_sizes)
            if self._chunks is None and data.is_cuda:
                places = packed.places(batch_sizes, len(data), data.device)
                ys, last = self._recur(places.padded(data), first, places.lengths)
                return places.packed(ys), last
        xs, lengths = pad_packed_sequence(PackedSequence(data, batch_sizes))
        ys, last = self._recur(xs, first, lengths)
        return pack_padded_sequence(ys, lengths).data, last

    def backward_through_time(self, xs: Tensor, loss: Loss, h0: Any = None) -> tuple[Tensor, Any]:
        """See `elman.gradients.backward_through_time`."""
        if self.bidirectional:
            raise UserError(
                "backward_through_time takes the loss piece by piece, but every output of a "
                "bidirectional module depends on both ends of the sequence",
                hint="call the module itself; its memory= applies there too",
            )
        x = self._inputs(*self._time_first(xs, (h0,) if isinstance(h0, Tensor) else h0)).drawn()
        value, last, pulls = piecewise.backward_through_time(
            self._recipe(), x, lambda ys, start: loss(self._as_given(xs, ys), start)
        )
        wanted = [t.requires_grad for t in x.flat()]
        if any(wanted):
            torch.autograd.backward([*compress(x.flat(), wanted)], [*compress(pulls, wanted)])
        return value, as_hx(self._states_as_given(xs, last))

    # ------------------------------------------------------------------ by torch's own layers

    def _asks_torch(self, input: Tensor) -> bool:
        """Whether torch's own layers, which take whole stacks, may be the fastest for this."""
        if input.is_cuda or not input.is_cpu or self.repeatable:
            return input.is_cuda
        if self.proj_size > 0 or input.dtype in HALF or KERNEL.library is None:
            return True
        if named_kernel() is not None and requested() == Aten.name:
            return True
        return not input.numel()  # our kernel takes no empty batch

    def _may_be_torchs(self, input: Tensor) -> bool:
        """The same, but not for forward-mode derivatives on a CPU, which they do not have."""
        return self._asks_torch(input) and (input.is_cuda or forward_ad._current_level < 0)

    def _by_torch(self, stack: Whole, x: Inputs, batch_sizes: Tensor | None = None) -> Outputs:
        if x.xs.is_cpu:
            return whole.recurrence_on_a_cpu(stack, x, batch_sizes)
        return whole.recurrence(stack, x, batch_sizes)

    def _whole(self, x: Inputs) -> Whole:
        """The stack as torch's own layers would be handed it."""
        steps, rows = x.xs.shape[:2]
        return self._described(x, steps, rows)

    def _packed_whole(self, x: Inputs, batch_sizes: Tensor) -> Whole | None:
        """The packed stack, where torch's own layers run it."""
        stack = self._described(x, len(batch_sizes), int(batch_sizes[0]), packed=True)
        runs = runs_whole(stack, x.xs.device, lambda: self._packed_job(x, batch_sizes))
        return stack if runs else None

    def _described(self, x: Inputs, steps: int, rows: int, packed: bool = False) -> Whole:
        recipe = self._recipe(steps)
        stack = whole.described(recipe, self._network(), x, steps, rows, packed)
        if recipe.chunks is not None:
            return stack._replace(apart="time runs in chunks, and it runs a whole sequence")
        if not self.repeatable:
            return stack
        return stack._replace(apart="its bits are not the same in a CUDA graph and outside of one")

    # ------------------------------------------------------------------ what the kernels are asked

    def _job(self, x: Inputs) -> Job:
        stack = self._whole(x)
        job = replace(self._recipe().job(x), whole=stack)
        if x.xs.is_cuda:
            job = replace(job, again=lambda kernel: self._again_words(x, stack, kernel))
        return job if self._chunks is None else replace(job, time=self._time_words(job))

    def _packed_job(self, x: Inputs, batch_sizes: Tensor) -> Job:
        stack = self._described(x, len(batch_sizes), int(batch_sizes[0]), packed=True)
        return replace(self._job(x.padded(batch_sizes)), whole=stack)

    def _again_words(self, x: Inputs, stack: Whole, kernel: str) -> str:
        """How repeated calls run, for `explain`."""
        if self._chunks is not None:
            return ""
        recipe = self._recipe(len(x.xs))
        beside = prepared.beside(recipe, x, stack) if kernel == "cuda" else ""
        words = (beside, self._settled.words(recipe, x, stack, kernel))
        return "; ".join(w for w in words if w)

    def _time_words(self, job: Job) -> Callable[[Kernel], str]:
        """How a kernel would run the job's time now, for `explain`."""

        def words(kernel: Kernel) -> str:
            assert self._chunks is not None
            cut = InChunks(kernel, self._chunks.foreseen()).cut(next(job.pieces()), "forward")
            return f"step after step, {cut}" if isinstance(cut, str) else cut.words

        return words

    def _cuts(self, input: Tensor | PackedSequence) -> bool:
        """Whether the time of this input may be cut into chunks."""
        if self._chunks is None or isinstance(input, PackedSequence):
            return self._chunks is not None
        return input.shape[1 if self.batch_first and self._is_batched(input) else 0] >= SHORT


def as_hx(last: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """The last state as a module returns it: h, or (h, c)."""
    h, *rest = last
    return last if rest else h


def _as(dtype: torch.dtype, t: Tensor) -> Tensor:
    return t if t.dtype == dtype else t.to(dtype)
