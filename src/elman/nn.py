"""Drop-in `RNN`, `GRU` and `LSTM`: `torch.nn`'s modules, plus a carry and a memory.

Constructor, call, outputs, initialisation, parameter names and state dict are those of
`torch.nn`, so a model changes sides by changing an import. What is added:

- `carry=` says what part of the gradient flows back through time (default `Full()`, exact);
- `memory=` says what is kept for the way back (default `Stored()`);
- an integer input is read as one-hot rows: ids of shape (T, B), or (B, T) with `batch_first`, or
  (T,) unbatched, below `input_size`; they are looked up, never multiplied;
- `RNN(nonlinearity="linear")`, the recurrence without a nonlinearity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from elman.errors import UserError
from elman.gradients.carry import Carry, Full
from elman.gradients.memory import Memory, Stored
from elman.kernels import Job
from elman.operator import Recipe, recurrence

__all__ = ["GRU", "LSTM", "RNN"]

FULL, STORED = Full(), Stored()


class _Module(torch.nn.RNNBase):
    """What the three have in common: from what the caller passes to time-first tensors and back."""

    cell: str
    carry: Carry
    memory: Memory

    def __init__(
        self, mode: str, cell: str, *args: Any, carry: Carry, memory: Memory, **options: Any
    ) -> None:
        super().__init__(mode, *args, **options)
        self.cell = cell
        self.carry = _checked(
            "carry", carry, Carry, "Full(), Truncated(window=35), Randomized(keep=0.9)"
        )
        self.memory = _checked("memory", memory, Memory, "Stored(), Checkpointed(every=100)")

    def _run(
        self, input: Tensor | PackedSequence, state: Sequence[Tensor] | None
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, ...]]:
        """Output and last state, in the caller's layout."""
        if isinstance(input, PackedSequence):
            return self._run_packed(input, state)
        self._check_input(input)
        batched = input.dim() == (3 if input.is_floating_point() else 2)
        time_first = input if batched else input.unsqueeze(1)
        if batched and self.batch_first:
            time_first = input.transpose(0, 1)
        if state is not None and not batched:
            state = [_unbatched(s, f"h{i}") for i, s in enumerate(state)]
        ys, last = self._recur(time_first, state)
        if not batched:
            return ys.squeeze(1), tuple(s.squeeze(1) for s in last)
        return ys.transpose(0, 1) if self.batch_first else ys, last

    def _run_packed(
        self, input: PackedSequence, state: Sequence[Tensor] | None
    ) -> tuple[PackedSequence, tuple[Tensor, ...]]:
        """Rows of different lengths: a row that has ended holds its state."""
        xs, lengths = pad_packed_sequence(PackedSequence(input.data, input.batch_sizes))
        self._check_input(xs)
        if state is not None and input.sorted_indices is not None:
            state = [s.index_select(1, input.sorted_indices) for s in state]
        ys, last = self._recur(xs, state, lengths)
        packed = pack_padded_sequence(ys, lengths)
        if input.unsorted_indices is not None:
            last = tuple(s.index_select(1, input.unsorted_indices) for s in last)
        ys = PackedSequence(
            packed.data, packed.batch_sizes, input.sorted_indices, input.unsorted_indices
        )
        return ys, last

    def _recur(
        self, xs: Tensor, state: Sequence[Tensor] | None, lengths: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The recurrence itself, everything time first."""
        xs, state, weights = self._cast(xs, self._checked_state(xs, state))
        lengths = None if lengths is None or bool((lengths == len(xs)).all()) else lengths
        drops = self.training and self.dropout > 0 and self.num_layers > 1
        seed = torch.randint(2**62, ()) if drops else None
        lengths = None if lengths is None else lengths.to(xs.device)
        return recurrence(self._recipe(), xs, state, weights, lengths, seed)

    def _recipe(self) -> Recipe:
        return Recipe(
            self.cell,
            self.bias,
            self.proj_size > 0,
            2 if self.bidirectional else 1,
            self.dropout,
            self.carry,
            self.memory,
        )

    def job(self, x: Tensor, state: Tensor | Sequence[Tensor] | None = None) -> Job:
        """What the kernels are asked to run for this input (see `elman.kernels.explain`)."""
        xs = x.transpose(0, 1) if self.batch_first else x
        state = [state] if isinstance(state, Tensor) else state
        xs, state, weights = self._cast(xs, self._checked_state(xs, state))
        return self._recipe().job(xs, state, weights)

    def _cast(
        self, xs: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor], list[Tensor]]:
        """Everything in autocast's dtype, where it is on; ids as int64."""
        weights = [getattr(self, name) for name in self._flat_weights_names]
        device, dtype = xs.device.type, weights[0].dtype
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        xs = xs.to(dtype) if xs.is_floating_point() else xs.long()
        return xs, [s.to(dtype) for s in state], [w.to(dtype) for w in weights]

    def _check_input(self, input: Tensor) -> None:
        name = type(self).__name__
        weight = self._parameter_dtype()
        integer = not (input.is_floating_point() or input.is_complex() or input.dtype == torch.bool)
        autocast = torch.is_autocast_enabled(input.device.type)
        if not integer and input.dtype != weight and not (autocast and input.is_floating_point()):
            raise UserError(
                f"input has dtype {input.dtype}, the weights of {name} have {weight}",
                hint=f"input.to({weight}), or integer ids for one-hot rows",
            )
        if input.dim() not in ((1, 2) if integer else (2, 3)):
            layout = "batch, time" if self.batch_first else "time, batch"
            shape = "(time,) or ({})" if integer else "(time, input_size) or ({}, input_size)"
            raise UserError(
                f"input of shape {tuple(input.shape)} has {input.dim()} dimensions: {name} reads "
                f"{'ids ' if integer else ''}{shape.format(layout)}"
            )
        if not integer and input.shape[-1] != self.input_size:
            raise UserError(
                f"input of shape {tuple(input.shape)} must end in input_size={self.input_size}"
            )
        batched = input.dim() == (2 if integer else 3)
        if input.shape[1 if batched and self.batch_first else 0] == 0:
            raise UserError(f"input of shape {tuple(input.shape)} has no time steps")

    def _parameter_dtype(self) -> torch.dtype:
        return getattr(self, self._flat_weights_names[0]).dtype

    def _checked_state(self, xs: Tensor, state: Sequence[Tensor] | None) -> Sequence[Tensor]:
        """The caller's (h,) or (h, c), or zeros."""
        places, rows = self.num_layers * (2 if self.bidirectional else 1), xs.shape[1]
        sizes = [self.proj_size or self.hidden_size]
        sizes += [self.hidden_size] if self.cell == "lstm" else []
        dtype = self._parameter_dtype()
        if state is None:
            return [torch.zeros(places, rows, n, dtype=dtype, device=xs.device) for n in sizes]
        for name, s, n in zip(("h0", "c0"), state, sizes, strict=False):
            if s.shape != (places, rows, n):
                raise UserError(
                    f"{name} has shape {tuple(s.shape)}; expected {(places, rows, n)}: "
                    "(layers · directions, batch, size)"
                )
            if s.dtype != dtype and not torch.is_autocast_enabled(xs.device.type):
                raise UserError(f"{name} has dtype {s.dtype}, the weights have {dtype}")
        return state

    def extra_repr(self) -> str:
        said = super().extra_repr()
        said += "" if self.carry == Full() else f", carry={self.carry}"
        return said + ("" if self.memory == Stored() else f", memory={self.memory}")


def _unbatched(s: Tensor, name: str) -> Tensor:
    if s.dim() != 2:
        raise UserError(
            f"{name} has shape {tuple(s.shape)}; without a batch it is (layers · directions, size)"
        )
    return s.unsqueeze(1)


def _checked(name: str, value: Any, kind: type, examples: str) -> Any:
    if not isinstance(value, kind):
        raise UserError(f"{name}={value!r} is no {kind.__name__}", hint=f"e.g. {examples}")
    return value


@final
class RNN(_Module):
    """`torch.nn.RNN` with a carry and a memory; `nonlinearity` may also be "linear".

    >>> rnn = RNN(28, 256)
    >>> y, h = rnn(torch.zeros(35, 32, 28))
    >>> y.shape, h.shape
    (torch.Size([35, 32, 256]), torch.Size([1, 32, 256]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        carry: Carry = FULL,
        memory: Memory = STORED,
    ) -> None:
        if nonlinearity not in ("tanh", "relu", "linear"):
            raise UserError(
                f"nonlinearity={nonlinearity!r} is unknown", hint="choose tanh, relu or linear"
            )
        mode = "RNN_RELU" if nonlinearity == "relu" else "RNN_TANH"
        super().__init__(
            mode,
            nonlinearity,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device=device,
            dtype=dtype,
            carry=carry,
            memory=memory,
        )
        self.nonlinearity = nonlinearity

    def forward(self, input: Tensor | PackedSequence, hx: Tensor | None = None) -> Any:
        """Every h_t of the last layer, and h_T of every layer."""
        ys, (h,) = self._run(input, None if hx is None else (hx,))
        return ys, h


@final
class GRU(_Module):
    """`torch.nn.GRU` with a carry and a memory."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        carry: Carry = FULL,
        memory: Memory = STORED,
    ) -> None:
        super().__init__(
            "GRU",
            "gru",
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device=device,
            dtype=dtype,
            carry=carry,
            memory=memory,
        )

    def forward(self, input: Tensor | PackedSequence, hx: Tensor | None = None) -> Any:
        """Every h_t of the last layer, and h_T of every layer."""
        ys, (h,) = self._run(input, None if hx is None else (hx,))
        return ys, h


@final
class LSTM(_Module):
    """`torch.nn.LSTM` with a carry and a memory; both h and c are carried."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        carry: Carry = FULL,
        memory: Memory = STORED,
    ) -> None:
        super().__init__(
            "LSTM",
            "lstm",
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            proj_size,
            device=device,
            dtype=dtype,
            carry=carry,
            memory=memory,
        )

    def forward(
        self, input: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None = None
    ) -> Any:
        """Every h_t of the last layer, and (h_T, c_T) of every layer."""
        return self._run(input, hx)
