"""A module's layers in one native call, and all of its gradient in another.

One step of somebody's own loop takes microseconds, and most of them would go to finding out what
it is. So that is found out once; the next call only looks whether anything has changed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from elman.errors import UserError
from elman.kernels import choice
from elman.kernels.contract import Job, Piece
from elman.kernels.cpu import library
from elman.kernels.cpu.library import (
    CELLS,
    HALF,
    KINDS,
    LayerArguments,
    StackArguments,
    is_plain,
    plain,
    pointer,
)
from elman.kernels.cpu.recurrence import KERNEL

DTYPES = (torch.float32, torch.float64, torch.int64)
NARROW = (torch.bfloat16, torch.float16)
"""What autocast makes of float32, and what it may find in the input already."""
FEW = 4
"""Rows of all steps together whose weights are read where they lie: in float32, also for autocast,
since to round them takes longer than to multiply them."""


def prepare(
    xs: Tensor,
    weights: Sequence[Tensor],
    directions: int,
    job: Callable[[], Job],
    cast: torch.dtype | None = None,
) -> Prepared | None:
    """What calls with inputs and weights like these need; None where this kernel runs none.

    `cast` is autocast's dtype where that is to be what comes out; the job is in float32 then.
    """
    if KERNEL.library is None or xs.dtype not in (*DTYPES, *(NARROW if cast else ())):
        return None
    kind = weights[0].dtype  # a weight of another would be cast, and the copy gone after the call
    if kind not in DTYPES or not all(is_plain(w, kind) for w in weights):
        return None
    asked = job()
    if choice.select(asked) is not KERNEL:
        return None
    for piece in asked.pieces():
        piece.check()
    return Prepared(asked, weights, directions, cast)


def kind_of(real: torch.dtype, rows: int, cast: torch.dtype | None) -> int:
    """What is multiplied: pairs of bfloat16 for autocast, where they are to be had and faster."""
    if cast is not torch.bfloat16 or rows <= FEW or KERNEL.variant(HALF) is None:
        return KINDS[real]
    return HALF


@final
class Prepared:
    """Calls of one module with inputs of one shape. Never changes, so that threads may share it."""

    def __init__(
        self,
        job: Job,
        weights: Sequence[Tensor],
        directions: int,
        cast: torch.dtype | None = None,
    ) -> None:
        assert KERNEL.library is not None
        xs, h = job.inputs[0], job.states[0][0]
        self.shape, self.threads = xs.shape, torch.get_num_threads()
        self.dtype, self.input_dtype, self.cast = h.dtype, xs.dtype, cast
        self.states = len(job.cell.states)
        # one step, or one beside another, is copied sooner than Python cuts it out of its track
        copies = len(xs) == 1 or directions > 1
        self.outputs = torch.Size((len(xs) + (not copies), len(h), directions * h.shape[1]))
        self.stacked = torch.Size((len(job.layers), *h.shape))
        self.weights = [(w, w.data_ptr(), w.shape) for w in weights]
        self.weight_shapes = [w.shape for w in weights]
        self.places = _in_fours(weights, len(job.layers))
        self.layers = (LayerArguments * len(job.layers))(*map(_layer, job.pieces()))
        self.stack = StackArguments(
            layers=self.layers,
            count=len(job.layers),
            directions=directions,
            copies=copies,
            reads_ids=not xs.is_floating_point(),
            kind=kind_of(h.dtype, xs.shape[0] * xs.shape[1], cast),
            level=KERNEL.level,
        )
        self.argument, self.native = ctypes.byref(self.stack), KERNEL.library
        self.kept = self.native.elman_kept(self.argument) // self.dtype.itemsize

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()  # a copied module has weights elsewhere, and prepares its own

    def suits(
        self,
        xs: Tensor,
        state: Sequence[Tensor] | None,
        weights: Sequence[Tensor],
        cast: torch.dtype | None = None,
    ) -> bool:
        """Whether this call is like the one prepared for, its weights being where they were."""
        if xs.shape != self.shape or cast is not self.cast or not self._reads(xs, self.input_dtype):
            return False
        for (w, where, shape), now in zip(self.weights, weights, strict=True):
            if w is not now or now.data_ptr() != where or now.shape != shape:
                return False
            if now.dtype is not self.dtype or not now.is_contiguous() or now.is_neg():
                return False  # `w.data = …` may leave it where it was, and yet not what it was
        for s in state or ():
            if s.shape != self.stacked or not self._reads(s, self.dtype):
                return False
        if state is not None and len(state) != self.states:
            return False
        return torch.get_num_threads() == self.threads and choice.allows(KERNEL.name)

    def _reads(self, t: Tensor, dtype: torch.dtype) -> bool:
        """Whether a tensor is of this dtype, or autocast's to widen."""
        if is_plain(t, dtype):
            return True
        narrow = self.cast is not None and dtype is self.dtype and t.dtype in NARROW
        return narrow and is_plain(t, t.dtype)

    def __call__(
        self, xs: Tensor, state: Sequence[Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Outputs and last states, stacked as PyTorch does; None where ids are out of range."""
        result = self.forward(xs, state, keep=False)
        return result and (self.outputs_of(result[0]), result[1])

    def outputs_of(self, ys: Tensor) -> Tensor:
        """The outputs in what `forward` wrote: all of it, or all but the first state."""
        return self._narrowed(ys if self.stack.copies else ys[1:])

    def _narrowed(self, t: Tensor) -> Tensor:
        return t if self.cast is None else t.to(self.cast)

    def track_of(self, ys: Tensor) -> Tensor | None:
        """What `forward` wrote, where that is the last layer's states and not a copy of them."""
        return None if self.stack.copies else ys

    def forward(
        self, xs: Tensor, state: Sequence[Tensor] | None, keep: bool
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None] | None:
        """`outputs_of` what comes first, the last states, and what `backward` reads besides."""
        ys = torch.empty(self.outputs, dtype=self.dtype)
        last = tuple([torch.empty(self.stacked, dtype=self.dtype) for _ in range(self.states)])
        kept = torch.empty(self.kept, dtype=self.dtype) if keep else None
        if self.cast is not None:
            xs = plain(xs, self.input_dtype)
            state = None if state is None else [plain(s, self.dtype) for s in state]
        first = (None, None) if state is None else [pointer(s) for s in state]
        two = self.states > 1
        status = self.native.elman_call(
            self.argument,
            pointer(xs),
            first[0],
            first[1] if two else None,
            pointer(ys),
            pointer(last[0]),
            pointer(last[1]) if two else None,
            pointer(kept),
        )
        if status == library.BAD_ID:
            return None
        library.check_memory(status)
        return ys, last if self.cast is None else tuple([s.to(self.cast) for s in last]), kept

    def backward(
        self,
        xs: Tensor,
        weights: Sequence[Tensor],
        track: Tensor | None,
        kept: Tensor,
        dys: Tensor | None,
        dlast: Sequence[Tensor | None],
        needs_dxs: bool,
    ) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        """The pulls on xs, on the first states (stacked) and on the weights."""
        real, xs = self.dtype, plain(xs, self.input_dtype)
        for t, shape in ((xs, self.shape), *zip(weights, self.weight_shapes, strict=True)):
            if t.shape != shape:  # `w.data = …` since the forward pass
                raise UserError(f"a tensor of shape {tuple(t.shape)} was of shape {tuple(shape)}")
        weights = [plain(w, real) for w in weights]
        track, kept, dys = plain(track, real), plain(kept, real), plain(dys, real)
        pulls = [plain(d, real) for d in dlast]
        dxs = torch.empty(self.shape, dtype=real) if needs_dxs else None
        first = [torch.empty(self.stacked, dtype=real) for _ in pulls]
        dws = [torch.empty(shape, dtype=real) for shape in self.weight_shapes]
        two = self.states > 1
        status = self.native.elman_call_back(
            self._reading(weights),
            *map(pointer, (xs, kept, track, dys)),
            pointer(pulls[0]),
            pointer(pulls[1]) if two else None,
            pointer(dxs),
            pointer(first[0]),
            pointer(first[1]) if two else None,
            (ctypes.c_void_p * (4 * len(self.layers)))(*_in_fours(dws, len(self.layers))),
        )
        if status == library.BAD_ID:
            raise IndexError("the ids of this call were changed before its backward pass")
        library.check_memory(status)
        return dxs, first, dws

    def _reading(self, weights: Sequence[Tensor]) -> StackArguments:
        """The layers with weights that autograd may have brought back from elsewhere."""
        places = _in_fours(weights, len(self.layers))
        if places == self.places:
            return self.stack
        layers = type(self.layers)(*self.layers)
        for i, layer in enumerate(layers):
            layer.W_ih, layer.W_hh, layer.b_ih, layer.b_hh = places[4 * i : 4 * i + 4]
        moved = StackArguments.from_buffer_copy(self.stack)
        moved.layers = layers  # which keeps them alive
        return moved


def _in_fours(flat: Sequence[Tensor], layers: int) -> list[int | None]:
    """Where W_ih, W_hh, b_ih and b_hh of every layer lie; None for biases it has not."""
    each, places = len(flat) // layers, [pointer(t) for t in flat]
    if each == 4:
        return places
    return [p for i in range(0, len(flat), each) for p in (*places[i : i + each], None, None)]


def _nothing() -> None:
    return None


def _layer(piece: Piece) -> LayerArguments:
    w, (steps, rows) = piece.w, piece.xs.shape[:2]
    return LayerArguments(
        cell=CELLS.index(piece.cell.name),
        T=steps,
        B=rows,
        I=w.W_ih.shape[1],
        H=w.W_hh.shape[1],
        threads=torch.get_num_threads(),
        W_ih=pointer(w.W_ih),
        W_hh=pointer(w.W_hh),
        b_ih=pointer(w.b_ih),
        b_hh=pointer(w.b_hh),
    )
