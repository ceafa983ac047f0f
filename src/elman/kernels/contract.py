"""What a kernel is asked and what it answers.

A kernel runs one layer in one direction over a piece of time, forwards and back. `Piece` is all
that it reads, `Pull` all that the loss hands back to it, `Trace` what it keeps in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from elman.cells import Cell, Gradients, State, Weights
from elman.errors import UserError
from elman.gradients.through_time import Trace
from elman.kernels.torchs import Whole

Expected = tuple[str, Tensor | None, tuple[int, ...]]
"""A tensor, its name and the shape it must have."""


class Piece(NamedTuple):
    """One layer, one direction, a piece of time: what `forward` reads.

    W_hh of a cell with heads is 0 outside of them, which a kernel may rely on. `xs` is
    (T, B, input), or (T, B) integer ids; `state` is the state before the piece; `lengths`
    is (B,), on the device: a row that has ended (t ≥ its length) holds its state. `noise` is
    (T, B, blocks · hidden), drawn for a cell that wants it: `Cell.noise`.
    """

    cell: Cell
    w: Weights
    xs: Tensor
    state: State
    lengths: Tensor | None = None
    noise: Tensor | None = None

    def check(self) -> None:
        """Refuse tensors that do not fit one another: a kernel reads memory by these shapes."""
        xs, w = self.xs, self.w
        if xs.is_floating_point():
            fits = xs.dim() == 3 and xs.shape[2] == w.W_ih.shape[-1]
        else:
            fits = xs.dim() == 2 and not xs.is_complex()
        if not fits or w.W_ih.dim() != 2 or w.W_hh.dim() != 2:
            raise UserError(
                f"input of shape {tuple(xs.shape)} and type {xs.dtype} does not fit weights W_ih "
                f"of shape {tuple(w.W_ih.shape)} and W_hh of shape {tuple(w.W_hh.shape)}",
                hint="input is (time, batch, W_ih's columns), or (time, batch) integer ids",
            )
        self._check_company()
        require(self._expected(), xs.device)

    def _check_company(self) -> None:
        """Refuse one bias without the other, and a cell without its own numbers."""
        w, own = self.w, len(self.cell.parameters)
        if (w.b_ih is None) != (w.b_hh is None):
            raise UserError("weights must have both b_ih and b_hh, or neither")
        if (w.own is not None) != (own > 0):
            raise UserError(f"a {self.cell.name} cell has {own} numbers of its own for every unit")

    def _expected(self) -> Iterator[Expected]:
        w, rows = self.w, self.xs.shape[1]
        hidden, size = w.hidden_size, w.W_hh.shape[1]
        tall = self.cell.gates * hidden
        yield "W_ih", w.W_ih, (tall, w.W_ih.shape[1])
        yield "W_hh", w.W_hh, (tall, size)
        yield "b_ih", w.b_ih, (tall,)
        yield "b_hh", w.b_hh, (tall,)
        yield "W_hr", w.W_hr, (size, hidden)
        yield "own", w.own, (len(self.cell.parameters), hidden)
        yield from self.expected_state(self.state, "")
        yield "lengths", self.lengths, (rows,)
        if (self.noise is None) == bool(self.cell.noise):
            raise UserError(f"{self.cell.name} draws {len(self.cell.noise)} numbers for a unit")
        yield "noise", self.noise, (len(self.xs), rows, len(self.cell.noise) * hidden)

    def expected_state(self, state: State, prefix: str) -> Iterator[Expected]:
        """The tensors of a state, or with the prefix "d" of a pull on it."""
        names, rows = self.cell.states, self.xs.shape[1]
        if len(state) != len(names):
            raise UserError(
                f"the state of a {self.cell.name} cell is ({', '.join(names)}), got {len(state)} "
                "tensors"
            )
        sizes = self.cell.state_sizes(self.w.hidden_size, self.w.W_hh.shape[1])
        for name, s, size in zip(names, state, sizes, strict=True):
            yield prefix + name, s, (rows, size)


class Pull(NamedTuple):
    """What the loss pulls on the outputs of a piece, and what is wanted of it.

    `dhs` is the direct pull on h_1 … h_T (None: none), `dstate` that on the last state. `xi` is
    (T,) or (T, B), float32 (float64 for float64 weights), on the device of `xs`: `xi[t]` multiplies
    what step t hands back to the state before it (0 cuts, whatever is handed); None means 1
    everywhere. A held step passes its pull through untouched and unweighted. `into` holds gradients
    already found for later pieces: this piece's are added to them in place, and they are returned.
    They may be wider than the weights (float32 for half precision); without `into` fresh ones are
    made the same way. `dstate`, and what is returned for it, too, may be wider than the state.
    """

    dhs: Tensor | None
    dstate: State
    xi: Tensor | None = None
    needs_dxs: bool = True
    into: Gradients | None = None

    def check(self, piece: Piece, trace: Trace, kept: int) -> None:
        """As `Piece.check`, for a kernel that keeps `kept` numbers for every step and row."""
        steps, rows = piece.xs.shape[:2]
        xi = self.xi
        if xi is not None and xi.shape not in ((steps,), (steps, rows)):
            raise UserError(
                f"xi of shape {tuple(xi.shape)} must be ({steps},) or ({steps}, {rows})"
            )
        expected = list(self._expected(piece, trace, kept))
        require(iter(expected), piece.xs.device)
        for name, t, _ in expected:
            if t is not None and not t.is_floating_point():
                raise UserError(f"{name} is {t.dtype}; it must be a floating-point type")

    def _expected(self, piece: Piece, trace: Trace, kept: int) -> Iterator[Expected]:
        steps, rows = piece.xs.shape[:2]
        tracks = (trace.hs,) if trace.cs is None else (trace.hs, trace.cs)
        for name, track, shape in piece.expected_state(tracks, ""):
            yield f"{name}s", track, (steps + 1, *shape)
        yield "gates", trace.gates, (steps, rows, kept)
        if kept and trace.gates is None:
            raise UserError("backward needs the gates that forward keeps with needs_gates=True")
        yield from piece.expected_state(self.dstate, "d")
        yield "dhs", self.dhs, (steps, rows, piece.w.W_hh.shape[1])
        yield "xi", self.xi, () if self.xi is None else tuple(self.xi.shape)
        for field, d, p in zip(Weights._fields, self.into or (), piece.w, strict=False):
            if (d is None) != (p is None):
                raise UserError(f"gradients and weights must both have a {field}, or neither")
            yield f"d{field}", d, () if p is None else tuple(p.shape)


def require(expected: Iterator[Expected], device: torch.device) -> None:
    """Refuse, in words, the first tensor of another shape, on another device, or not dense."""
    for name, t, shape in expected:
        if t is None:
            continue
        if t.shape != shape:
            raise UserError(f"{name} has shape {tuple(t.shape)}; it must be {shape}")
        if t.device != device:
            raise UserError(
                f"{name} is on {t.device}, the input on {device}", hint="move both to one device"
            )


class Kernel(Protocol):
    """One layer, one direction, a piece of time of at least one step and one row.

    Tensors come with any strides, and may be views of one another.
    """

    name: str

    def refuses(self, piece: Piece) -> str | None:
        """Why this kernel cannot run this piece, in words a user understands; None if it can.

        Looks at shapes, dtypes and devices only: `torch.compile` asks with tensors without data.
        """
        ...

    def empty_gates(self, piece: Piece) -> Tensor | None:
        """An uninitialised `Trace.gates` for this piece, time first (None if it keeps none).

        Tells `torch.compile` the shape, and `Checkpointed` the cost, of what `forward` keeps.
        """
        ...

    def forward(self, piece: Piece, needs_gates: bool = True) -> Trace:
        """h_0 … h_T. Without `needs_gates` no backward will follow and `gates` may be None."""
        ...

    def backward(
        self, piece: Piece, trace: Trace, pull: Pull
    ) -> tuple[Tensor | None, Gradients, State]:
        """(dxs, dw, dstate_0); `dxs` is None for ids or without `needs_dxs`."""
        ...


@dataclass(frozen=True)
class Empty:
    """A kernel's shapes without its work, for `torch.compile`."""

    kernel: Kernel
    name = "empty"

    def forward(self, piece: Piece, needs_gates: bool = True) -> Trace:
        """Uninitialised states and gates of the shapes that the kernel's own would have."""
        tracks = [s.new_empty(piece.xs.shape[0] + 1, *s.shape) for s in piece.state]
        gates = self.kernel.empty_gates(piece) if needs_gates else None
        return Trace(tracks[0], tracks[1] if len(tracks) > 1 else None, gates)

    def empty_gates(self, piece: Piece) -> Tensor | None:
        """The kernel's own."""
        return self.kernel.empty_gates(piece)


@dataclass(frozen=True)
class Job:
    """What a module asks of the kernels: a cell, its layers' weights, each layer's xs and state."""

    cell: Cell
    layers: Sequence[Weights]
    inputs: Sequence[Tensor]
    states: Sequence[State]
    whole: Whole | None = None  # the same for cuDNN, where a module asks for all of it at once
    time: Callable[[Kernel], str] | None = None  # how a kernel's time runs, where not just in order
    again: Callable[[str], str] | None = None  # what becomes of a kernel's calls that are repeated

    def pieces(self) -> Iterator[Piece]:
        """Every layer's own piece."""
        for w, xs, state in zip(self.layers, self.inputs, self.states, strict=True):
            yield Piece(self.cell, w, xs, state)
