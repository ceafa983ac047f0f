"""What a module is: torch.nn's parameters, and what it may be given besides.

What is settled about a module's calls is forgotten when one of these changes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import Tensor

from elman.cells import CELLS, Cell, is_torchs, named, with_noise
from elman.cells.base import diagonal_blocks
from elman.errors import UserError
from elman.gradients.carry import Carry, Full
from elman.gradients.chunks import Chunked, Stepped, Time
from elman.gradients.memory import Memory, Stored
from elman.kernels import cudnn
from elman.kernels.cpu.calls import Prepared
from elman.kernels.cudnn import Cudnn
from elman.kernels.torchs import Network
from elman.options import as_number
from elman.recurrence import compiled, custom
from elman.recurrence.chunked import SHORT
from elman.recurrence.native import Prepareds
from elman.recurrence.operator import Recipe
from elman.recurrence.seams import Chunks, Seams
from elman.recurrence.settled import Table

FULL, STORED, STEPPED = Full(), Stored(), Stepped()
_TOLD = {"carry", "memory", "time", "zoneout", "update_dropout"}
_TOLD |= {"repeatable", "dropout", "training", "batch_first"} | {*custom.CHECKED}
"""Attributes that are checked when they are set, or on which what is settled depends."""

_COMPUTED = ContextVar[tuple[Any, list[Any]]]("a module and its weights", default=(None, []))
"""The module that this thread calls, and what its parametrized weights are in this call."""

Ours = tuple[Carry, Memory, Time, float, float]
"""What torch.nn's modules do not have: carry, memory, time, zoneout and update_dropout."""


@contextlib.contextmanager
def in_eval_mode(module: torch.nn.Module) -> Iterator[None]:
    """Without dropout; every part's mode is put back afterwards."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


class Parameters(torch.nn.RNNBase):
    """Layers of a cell: their parameters and options, but not how they run."""

    cell: str
    carry: Carry
    memory: Memory
    time: Time
    zoneout: float = 0.0
    update_dropout: float = 0.0
    repeatable: bool = False
    """Whether a call must give the same bits in a CUDA graph as outside of one, and the same masks
    from the same state of torch's generators: not cuDNN's."""
    _settled: Table
    _prepared: Prepared | None = None
    """The last call of native code on a CPU, if there was one since the module changed."""
    _prepareds: Prepareds
    """The native calls before it."""
    _exact: Recipe | None = None
    """`_recipe()`, if it was asked for since the module changed."""
    _chunks: Chunks | None = None
    _running: str = ""
    _equations: str = ""
    """Of a declared cell, which equations this module was made for."""

    def __init__(self, cell: str, torchs: tuple[Any, ...], ours: Ours, **placed: Any) -> None:
        mode = named(cell).torch_mode
        super().__init__(mode or "RNN_TANH", *map(as_number, torchs), **placed)
        self.cell, self._equations = cell, named(cell).fingerprint
        if mode is None:
            self._resize(named(cell))
        carry, memory, time, zoneout, update_dropout = ours
        custom.CHECKED["carry"](carry)
        custom.CHECKED["memory"](memory)
        self.__dict__.update(carry=carry, memory=memory)  # a module is made as soon as torch's
        self.time = time
        self._begin_noise(as_number(zoneout), as_number(update_dropout))

    # ------------------------------------------------------------------ noise in every step

    def _begin_noise(self, zoneout: Any, update_dropout: Any) -> None:
        for name, p in (("zoneout", zoneout), ("update_dropout", update_dropout)):
            if not isinstance(p, int | float) or isinstance(p, bool) or not 0 <= p < 1:
                raise UserError(
                    f"{name}={p!r} must be a probability, at least 0 and below 1",
                    hint=f"{name}=0.1, or 0 for none",
                )
        noisy = zoneout > 0 or update_dropout > 0
        if noisy and self.proj_size:
            raise UserError(
                f"zoneout={zoneout} and update_dropout={update_dropout} do not go with "
                f"proj_size={self.proj_size}",
                hint="proj_size=0, or dropout= between layers",
            )
        self._check_noise_goes_with(self.carry, noisy)
        self._run_by(zoneout, update_dropout)
        self.__dict__.update(zoneout=zoneout, update_dropout=update_dropout)

    def _check_noise_goes_with(self, carry: Carry, noisy: bool) -> None:
        if noisy and self.bidirectional and carry.in_blocks:
            raise UserError(
                f"zoneout and update_dropout in both directions do not go with {carry}",
                hint="Truncated() cuts the gradient, too, and goes with both",
            )

    @property
    def is_noisy(self) -> bool:
        """Whether steps have zoneout or recurrent dropout."""
        return self.zoneout > 0 or self.update_dropout > 0

    @property
    def running_cell(self) -> str:
        """The cell by which a call runs now: with noise, one that draws or its expectation."""
        return self._running or self.cell

    def _run_by(self, zoneout: float, updates: float) -> None:
        """Set which cell that is, and forget what was settled for another."""
        running = ""
        if zoneout or updates:
            running = with_noise(self.cell, zoneout, updates, self.training)
        self.__dict__["_running"] = running  # a plain value to torch.compile
        self._forget()

    def _forget(self) -> None:
        """Forget everything that was found out about calls."""
        fresh = {"_settled": Table(), "_prepared": None, "_prepareds": Prepareds(), "_exact": None}
        self.__dict__.update(fresh)

    # ------------------------------------------------------------------ parameters

    def _resize(self, cell: Cell) -> None:
        """Give the parameters as many rows as a cell needs that `torch.nn` does not have."""
        if cell.heads and self.hidden_size % cell.heads:
            raise UserError(
                f"hidden_size={self.hidden_size} does not fall into the {cell.heads} heads of "
                f"{cell.name}",
                hint=f"a multiple of {cell.heads}",
            )
        for name in self._flat_weights_names:
            p = getattr(self, name)
            setattr(self, name, torch.nn.Parameter(p.new_empty(cell.gates * len(p), *p.shape[1:])))
        if cell.parameters:
            for names in self._all_weights:
                name = names[0].replace("weight_ih", "own")
                p = self._first_weight().new_empty(len(cell.parameters), self.hidden_size)
                setattr(self, name, torch.nn.Parameter(p))
                names.append(name)
            self._flat_weights_names = [name for names in self._all_weights for name in names]
            self._init_flat_weights()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `torch.nn`; a cell's own numbers start where the cell says, its heads apart.

        Weights on the meta device have no numbers: torch would take as long to draw none.
        """
        if all(w.is_meta for w in self.parameters()):
            return
        super().reset_parameters()
        cell = named(getattr(self, "cell", "tanh"))
        if not cell.parameters and cell.heads == 1:
            return
        with torch.no_grad():
            for name in self._flat_weights_names:
                if name.startswith("own"):
                    for row, value in zip(
                        getattr(self, name), cell.parameters.values(), strict=True
                    ):
                        row.fill_(value) if value is not None else None
                elif name.startswith("weight_hh") and cell.heads != 1:
                    W_hh = getattr(self, name)
                    if cell.heads == 0:  # one weight, not a sum of many that must be small
                        W_hh.uniform_()
                    W_hh.mul_(diagonal_blocks(W_hh, cell.heads))

    def flatten_parameters(self) -> None:
        """As `torch.nn`, for cells that cuDNN has; bfloat16 too, which torch forgets."""
        if named(getattr(self, "cell", "tanh")).torch_mode is not None:
            super().flatten_parameters()
            weights = [w for w in self._flat_weights if isinstance(w, Tensor) and w.is_cuda]
            if len(weights) == len(self._flat_weights_names):
                cudnn.flatten_bfloat16(self._network(self.mode), weights)

    def to_torch(self) -> Any:
        """The `torch.nn` module of the same name, with these very parameters: shared, not copied.

        For tools that look for torch's own classes (`quantize_dynamic`, profilers). Training one
        trains the other; `copy.deepcopy` parts them. What it computes is the same; its gradient is
        the exact one, whatever the carry here, and it takes no ids.

        >>> from elman.nn import GRU
        >>> GRU(28, 256, num_layers=2).to_torch()
        GRU(28, 256, num_layers=2)
        """
        cell = named(self.cell)
        if self.is_noisy:
            raise UserError(
                f"torch.nn has no {self.running_cell}",
                hint="zoneout=0 and update_dropout=0, once it is trained",
            )
        if not is_torchs(cell):
            has = ", ".join(c.name for c in CELLS.values() if is_torchs(c))
            raise UserError(
                f"torch.nn has no module for the cell {cell.name}",
                hint=f"it has {has}; torch.export and torch.onnx take this module as it is",
            )
        for name in self._flat_weights_names:
            if name not in self._parameters:
                raise UserError(
                    f"{name} is computed at every call, and torch.nn's module shares parameters",
                    hint="torch.nn.utils.parametrize.remove_parametrizations, or prune.remove, "
                    "makes it one",
                )
        kind: Any = {"GRU": torch.nn.GRU, "LSTM": torch.nn.LSTM}.get(self.mode, torch.nn.RNN)
        options: dict[str, Any] = {"nonlinearity": cell.name} if kind is torch.nn.RNN else {}
        if self.proj_size:
            options["proj_size"] = self.proj_size
        twin = kind(
            self.input_size,
            self.hidden_size,
            self.num_layers,
            bias=self.bias,
            batch_first=self.batch_first,
            dropout=self.dropout,
            bidirectional=self.bidirectional,
            device="meta",
            **options,
        )
        for name in self._flat_weights_names:
            setattr(twin, name, getattr(self, name))
        return twin.train(self.training)

    def _is_torch_nns(self) -> bool:
        """Whether torch.nn's module of this name computes all of it: gradient, memory and time."""
        plain = self.carry.exact and not self.carry.in_blocks and self.memory.keeps_all
        plain = plain and self._chunks is None and not self.is_noisy
        return plain and is_torchs(named(self.cell))

    def __prepare_scriptable__(self) -> Any:
        """What `torch.jit.script` asks a module first; it could not read how this one runs."""
        raise UserError(
            f"torch.jit.script cannot compile elman.nn's {self._get_name()}",
            hint="torch.export and torch.jit.trace take it as it is, and script its to_torch()",
        )

    # ------------------------------------------------------------------ what changes later

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _TOLD:
            super().__setattr__(name, value)
            return
        if name in ("zoneout", "update_dropout"):  # refused before anything has changed
            noise = {"zoneout": self.zoneout, "update_dropout": self.update_dropout}
            self._begin_noise(**noise | {name: value})
            return
        if name in custom.CHECKED:
            custom.CHECKED[name](value)
        if name == "carry":
            self._check_noise_goes_with(value, self.is_noisy)
        super().__setattr__(name, value)
        if name == "time":
            self._begin_chunks(value)
        if name in ("repeatable", "dropout", "batch_first"):
            self._forget()
        if name == "training" and self.is_noisy:
            self._run_by(self.zoneout, self.update_dropout)
        if name in ("carry", "memory", "time") and hasattr(self, "carry") and hasattr(self, "time"):
            registered = compiled.register(self.carry, self.memory, self._chunks)
            # its number lives as long as it does, and is a plain value to torch.compile
            self.__dict__.update(_registered=registered, _how=registered.number)
            self._forget()

    @property
    def seams(self) -> Seams:
        """How well the chunks of the last call and of its backward pass met, with `Chunked`."""
        return Seams() if self._chunks is None else self._chunks.seams

    def _begin_chunks(self, time: Time) -> None:
        """Begin without knowing how long this network remembers.

        What is learned is a buffer, so that a training saves it, but not part of the state dict,
        which is torch's.
        """
        self._buffers.pop("chunk_overlaps", None)
        chunks = None
        if isinstance(time, Chunked):
            chunks = Chunks(time, self._first_weight().device)
            self.register_buffer("chunk_overlaps", chunks.state, persistent=False)
        self.__dict__["_chunks"] = chunks

    def _apply(self, *args: Any, **options: Any) -> Any:
        """Move or convert the parameters, and forget what was settled about calls."""
        self._settled.clear()
        moved = super()._apply(*args, **options)
        if self._chunks is not None:
            self._chunks.state = self.get_buffer("chunk_overlaps")
        return moved

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As `copy` does it by itself, of a parametrized module too.

        There torch would give it a way that leaves `__setstate__` out. What the weights were
        computed to be is not copied: it belongs to the graph that made it.
        """
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        own = [self._parameters.get(name) for name in self._flat_weights_names]
        copied.__setstate__(copy.deepcopy({**self.__dict__, "_flat_weights": own}, memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has a carry of its own, with generators of its own."""
        super().__setstate__(state)
        self.__dict__.setdefault("time", STEPPED)  # a module pickled by an older elman has none
        self.memory = self.memory
        self._run_by(self.zoneout, self.update_dropout)

    def extra_repr(self) -> str:
        arguments = super().extra_repr()
        arguments += "" if self.carry == Full() else f", carry={self.carry}"
        arguments += "" if self.memory == Stored() else f", memory={self.memory}"
        arguments += "" if self.time == STEPPED else f", time={self.time}"
        arguments += f", zoneout={self.zoneout:g}" if self.zoneout else ""
        return arguments + (
            f", update_dropout={self.update_dropout:g}" if self.update_dropout else ""
        )

    # ------------------------------------------------------------------ what a call reads

    def _first_weight(self) -> Tensor:
        own = self._parameters.get(self._flat_weights_names[0])
        return self._weights()[0] if own is None else own

    def _weights(self) -> list[Any]:
        own, names = self._parameters, self._flat_weights_names
        try:
            return [*map(own.__getitem__, names)]
        except KeyError:  # parametrized: computed when they are asked for
            if self._is_computed():
                return _COMPUTED.get()[1]
            return [getattr(self, n) for n in names]

    @contextlib.contextmanager
    def _computed_once(self) -> Iterator[None]:
        """For one call, compute weights that are computed when they are asked for (`parametrize`):
        they may draw chance or go a step further each time, and a call asks more than once."""
        token = _COMPUTED.set((self, self._weights()))
        try:
            yield
        finally:
            _COMPUTED.reset(token)

    @contextlib.contextmanager
    def _looked_at(self) -> Iterator[None]:
        """The same for a question about a call, in eval mode: asking changes no weight's state."""
        parts = self._modules.get("parametrizations") or torch.nn.Module()
        with in_eval_mode(parts), self._computed_once():
            yield

    def _is_computed(self) -> bool:
        """Whether the weights of the call that runs were computed so; never in compiled code."""
        return not torch.compiler.is_compiling() and _COMPUTED.get()[0] is self

    def _zeros(self, rows: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """The initial state where the caller passed none."""
        places = self.num_layers * (2 if self.bidirectional else 1)
        sizes = named(self.cell).state_sizes(self.hidden_size, self.proj_size)
        return [torch.zeros(places, rows, n, dtype=dtype, device=device) for n in sizes]

    def _plain(self) -> tuple[str, bool, bool, int, float]:
        """All about the stack that is a plain value."""
        directions = 2 if self.bidirectional else 1
        return self.running_cell, self.bias, self.proj_size > 0, directions, self.dropout

    def _recipe(self, steps: int = SHORT) -> Recipe:
        chunks = self._chunks if steps >= SHORT else None
        return Recipe(*self._plain(), self.carry, self.memory, chunks)

    def _network(self, mode: str | None = None) -> Network:
        cell = named(self._running or getattr(self, "cell", "tanh"))
        return Network(
            mode or (cell.torch_mode if Cudnn.name in cell.kernels else None),
            self.bias,
            self.input_size,
            self.hidden_size,
            self.proj_size,
            self.num_layers,
            2 if self.bidirectional else 1,
        )
