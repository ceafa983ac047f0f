"""Drop-in `RNN`, `GRU` and `LSTM`: `torch.nn`'s modules, plus a carry, a memory and a time.

Constructor, call, outputs, initialisation, parameter names and state dict are those of
`torch.nn`, so a model changes sides by changing an import. What is added:

- `carry=` says what part of the gradient flows back through time (default `Full()`, exact);
- `memory=` says what is kept for the backward pass (default `Stored()`);
- `time=` says whether steps run one after the other (default `Stepped()`) or in chunks side by side
  (`Chunked()`); `seams` then tells how well the chunks of the last call met;
- `zoneout=` and `update_dropout=` put noise into every step of a training (`elman.cells.noisy`);
- an integer input is read as one-hot rows: ids of shape (T, B), or (B, T) with `batch_first`, or
  (T,) unbatched, below `input_size`; they are looked up, never multiplied;
- `RNN(nonlinearity="linear")`, the recurrence without a nonlinearity;
- `Layers(cell, …)`, the same for every cell in `elman.cells.CELLS`, also those torch does not have;
- `Recurrent(…)`, either that, or any module of your own a step at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, final, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from elman.cells import CELLS, Cell, named
from elman.errors import UserError
from elman.gradients.carry import Carry
from elman.gradients.chunks import Time
from elman.gradients.memory import Memory
from elman.nn import compiling
from elman.nn.long_way import as_hx
from elman.nn.module import Module
from elman.nn.parameters import FULL, STEPPED, STORED
from elman.recurrence import custom

__all__ = ["GRU", "LSTM", "RNN", "Layers", "Recurrent", "of"]


@final
class RNN(Module):
    """`torch.nn.RNN` with a carry, a memory and a time; `nonlinearity` may also be "linear".

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
        time: Time = STEPPED,
        zoneout: float = 0.0,
        update_dropout: float = 0.0,
    ) -> None:
        if nonlinearity not in CELLS or _module_of(CELLS[nonlinearity]) is not RNN:
            known = [name for name, cell in CELLS.items() if _module_of(cell) is RNN]
            raise UserError(
                f"nonlinearity={nonlinearity!r} is unknown", hint=f"choose {_one_of(known)}"
            )
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        ours = carry, memory, time, zoneout, update_dropout
        super().__init__(nonlinearity, sizes, ours, device=device, dtype=dtype)
        self.nonlinearity = nonlinearity

    def forward(self, input: Tensor | PackedSequence, hx: Tensor | None = None) -> Any:
        """Every h_t of the last layer, and h_T of every layer."""
        if torch.compiler.is_compiling():
            if compiling.may_break():
                torch._dynamo.graph_break()
                torch._dynamo.skip_frame()
                return compiling.outside(self, input, hx)
            return self._run_inside(input, None if hx is None else (hx,))
        ys, (h,) = self._run(input, None if hx is None else (hx,))
        return ys, h


@final
class GRU(Module):
    """`torch.nn.GRU` with a carry, a memory and a time."""

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
        time: Time = STEPPED,
        zoneout: float = 0.0,
        update_dropout: float = 0.0,
    ) -> None:
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        ours = carry, memory, time, zoneout, update_dropout
        super().__init__("gru", sizes, ours, device=device, dtype=dtype)

    def forward(self, input: Tensor | PackedSequence, hx: Tensor | None = None) -> Any:
        """Every h_t of the last layer, and h_T of every layer."""
        if torch.compiler.is_compiling():
            if compiling.may_break():
                torch._dynamo.graph_break()
                torch._dynamo.skip_frame()
                return compiling.outside(self, input, hx)
            return self._run_inside(input, None if hx is None else (hx,))
        ys, (h,) = self._run(input, None if hx is None else (hx,))
        return ys, h


@final
class LSTM(Module):
    """`torch.nn.LSTM` with a carry, a memory and a time; both h and c are carried."""

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
        time: Time = STEPPED,
        zoneout: float = 0.0,
        update_dropout: float = 0.0,
    ) -> None:
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        ours = carry, memory, time, zoneout, update_dropout
        super().__init__("lstm", (*sizes, proj_size), ours, device=device, dtype=dtype)

    # what torch.nn's users may ask it besides, and every cell but this one has from its base
    get_expected_cell_size: Any = torch.nn.LSTM.get_expected_cell_size
    check_forward_args: Any = torch.nn.LSTM.check_forward_args
    permute_hidden: Any = torch.nn.LSTM.permute_hidden

    def forward(
        self, input: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None = None
    ) -> Any:
        """Every h_t of the last layer, and (h_T, c_T) of every layer."""
        if torch.compiler.is_compiling():
            if compiling.may_break():
                torch._dynamo.graph_break()
                torch._dynamo.skip_frame()
                return compiling.outside(self, input, hx)
            return self._run_inside(input, hx)
        return self._run(input, hx)


@final
class Layers(Module):
    """Layers of any cell: a name in `elman.cells.CELLS`, or what `elman.cell` has declared.

    >>> layers = Layers("gru", 28, 256)
    >>> y, h = layers(torch.zeros(35, 32, 28))
    >>> y.shape, h.shape
    (torch.Size([35, 32, 256]), torch.Size([1, 32, 256]))
    """

    def __init__(
        self,
        cell: str | Cell,
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
        time: Time = STEPPED,
        zoneout: float = 0.0,
        update_dropout: float = 0.0,
    ) -> None:
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        ours = carry, memory, time, zoneout, update_dropout
        super().__init__(
            cell if isinstance(cell, str) else cell.name, sizes, ours, device=device, dtype=dtype
        )

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        """Every h_t of the last layer, and the last state of every layer: h_T, or (h_T, c_T)."""
        if torch.compiler.is_compiling():
            if compiling.may_break():
                torch._dynamo.graph_break()
                torch._dynamo.skip_frame()
                return compiling.outside(self, input, hx)
            return self._run_inside(input, (hx,) if isinstance(hx, Tensor) else hx)
        ys, last = self._run(input, (hx,) if isinstance(hx, Tensor) else hx)
        return ys, as_hx(last)

    def extra_repr(self) -> str:
        """The cell, then torch's own words."""
        return f"{self.cell}, {super().extra_repr()}"


@final
class Recurrent(custom.Recurrent):
    """A cell of your own over time: one that is declared, with its sizes, or any module.

    `Recurrent(cell, input_size, hidden_size, …)`, where `elman.cell` has declared the cell or
    `elman.cells.CELLS` has its name, makes `Layers` with all its options: it runs in a kernel.

    >>> Recurrent("mgu", 28, 256)
    Layers(mgu, 28, 256)

    `Recurrent(module, carry=…, memory=…)` runs `module(x, state) -> state` or `-> (output, state)`
    a step at a time: see `elman.recurrence.custom`.

    >>> ys, h = Recurrent(torch.nn.GRUCell(3, 4))(torch.zeros(5, 2, 3))
    >>> ys.shape, h.shape
    (torch.Size([5, 2, 4]), torch.Size([2, 4]))
    """

    @overload
    def __new__(cls, cell: str | Cell, /, *sizes: int, **options: Any) -> Layers: ...
    @overload
    def __new__(cls, cell: torch.nn.Module, /, **options: Any) -> Self: ...
    def __new__(cls, cell: Any = None, /, *sizes: Any, **options: Any) -> Any:
        if isinstance(cell, str | Cell):
            _check_sizes(cell, sizes, options)
            return Layers(cell, *sizes, **options)
        if sizes:
            raise UserError(
                f"Recurrent(module, {', '.join(map(str, sizes))}): a module has its own sizes",
                hint="Recurrent(module), or Recurrent(cell, input_size, hidden_size) with the name "
                "of a cell",
            )
        return super().__new__(cls)  # a copy is made without a cell


def _check_sizes(cell: str | Cell, sizes: Sequence[Any], options: dict[str, Any]) -> None:
    missing = [n for n in ("input_size", "hidden_size")[len(sizes) :] if n not in options]
    if missing:
        name = cell if isinstance(cell, str) else cell.name
        raise UserError(
            f"Recurrent({name!r}) needs {' and '.join(missing)}",
            hint=f"Recurrent({name!r}, 28, 256)",
        )


def of(cell: str, input_size: int, hidden_size: int, num_layers: int = 1, **options: Any) -> Any:
    """Layers of this cell: `RNN`, `GRU` or `LSTM` where it has that name in torch, else `Layers`.

    >>> of("relu", 28, 256)
    RNN(28, 256)
    """
    module: Any = _module_of(named(cell))
    if module is Layers:
        return Layers(cell, input_size, hidden_size, num_layers, **options)
    chosen = {"nonlinearity": cell} if module is RNN else {}
    return module(input_size, hidden_size, num_layers, **chosen, **options)


def _module_of(cell: Cell) -> type[Module]:
    """The class that has this cell's parameters."""
    mode = cell.torch_mode
    if mode is None:
        return Layers
    return {"GRU": GRU, "LSTM": LSTM}.get(mode, RNN)


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
