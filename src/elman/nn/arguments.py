"""What a caller passes to a module: refused in words where it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elman.cells import named
from elman.errors import Misfit, UserError
from elman.nn.parameters import Parameters
from elman.recurrence.strand import is_cast


def check_input(module: Parameters, input: Tensor, time: int) -> None:
    """Refuse what the module does not read; `time` is the dimension of the steps."""
    name, weight, shape = type(module).__name__, module._first_weight(), tuple(input.shape)
    kind = input.dtype
    if input.device != weight.device:
        raise Misfit(
            f"input is on {input.device}, the weights of {name} are on {weight.device}",
            hint="move both to one device, with .to(device)",
        )
    integer = not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
    autocast = kind.is_floating_point and is_cast(input.device)
    if not (integer or kind == weight.dtype or autocast):
        raise Misfit(
            f"input has dtype {kind}, the weights of {name} have {weight.dtype}",
            hint=f"input.to({weight.dtype}), or integer ids, which are read as one-hot rows",
        )
    if input.dim() not in ((1, 2) if integer else (2, 3)):
        layout = "batch, time" if module.batch_first else "time, batch"
        rule = "ids of shape (time,) or ({})" if integer else "(time, {1}) or ({0}, {1})"
        raise UserError(
            f"input has shape {shape}; {name} reads {rule.format(layout, module.input_size)}"
        )
    if not integer and shape[-1] != module.input_size:
        raise Misfit(f"input has shape {shape}; its last size must be {module.input_size}")
    if shape[time] == 0:
        raise Misfit(f"input has shape {shape}: no time steps")


def checked_state(
    module: Parameters,
    rows: Any,
    device: torch.device,
    state: Sequence[Tensor] | None,
    batched: bool = True,
) -> Sequence[Tensor]:
    """The caller's (h,) or (h, c), or zeros."""
    dtype = module._first_weight().dtype
    if state is None:
        return module._zeros(rows, dtype, device)
    cell, places = named(module.cell), module.num_layers * (2 if module.bidirectional else 1)
    names = [f"{state}0" for state in cell.states]
    sizes = cell.state_sizes(module.hidden_size, module.proj_size)
    if not are_tensors(state) or len(state) != len(sizes):
        name, zeros = type(module).__name__, "leave it out to begin at zero"
        if len(names) == 1:
            raise UserError(f"the initial state of {name} must be one tensor h0", hint=zeros)
        asks = f"; code that asks isinstance(…, torch.nn.{name}) must ask for elman.nn.{name}, too"
        raise Misfit(
            f"the initial state of {name} must be a pair of tensors ({', '.join(names)})",
            hint=zeros + (asks if hasattr(torch.nn, name) else ""),
        )
    for name, s, n in zip(names, state, sizes, strict=True):
        rule = (places, rows, n) if batched else (places, n)
        shape = s.shape if batched else (s.shape[0], *s.shape[2:])
        if tuple(shape) != rule:
            what = "layers · directions, batch, size" if batched else "layers · directions, size"
            raise Misfit(f"{name} has shape {tuple(shape)}; it must be {rule}: ({what})")
        if s.device != device:
            raise Misfit(
                f"{name} is on {s.device}, the input on {device}",
                hint=f"{name}.to({str(device)!r})",
            )
        if s.dtype != dtype and not is_cast(device):
            raise Misfit(
                f"{name} has dtype {s.dtype}; it must be {dtype}, as the weights",
                hint=f"{name}.to({dtype})",
            )
    return state


def check_pack(rows: int, sizes: list[int]) -> None:
    """Refuse batch sizes by which torch would read beyond the rows."""
    if sizes != sorted(sizes, reverse=True) or sizes[-1] < 1 or sum(sizes) != rows:
        raise UserError(
            f"a PackedSequence of {rows} rows has batch_sizes {sizes}: they must not grow, be at "
            f"least 1 and add up to {rows}",
            hint="torch.nn.utils.rnn.pack_padded_sequence makes them from lengths",
        )


def are_tensors(state: Any) -> bool:
    """Whether this is a tuple or list of tensors, as a state must be."""
    return isinstance(state, (tuple, list)) and False not in [isinstance(s, Tensor) for s in state]
