"""A module's layers in one native call, and all of its gradient in another.

One step of somebody's own loop takes microseconds, and most of them would go to finding out what
it is. So that is found out once; the next call only looks whether anything has changed.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import NamedTuple, final

import torch
from torch import Tensor

from elman.cells import Cell
from elman.errors import OutOfRange, UserError
from elman.kernels import choice
from elman.kernels.contract import Job, Piece, Trace
from elman.kernels.cpu import library, masks
from elman.kernels.cpu.library import (
    CELLS,
    CPU,
    HALF,
    KINDS,
    LayerArguments,
    SeenArguments,
    StackArguments,
    UseArguments,
    is_plain,
    plain,
    pointer,
)
from elman.kernels.cpu.recurrence import KERNEL

like, is_neg = torch.empty_like, Tensor.is_neg
DTYPES = (torch.float32, torch.float64, torch.int64)
NARROW = (torch.bfloat16, torch.float16)
"""What autocast makes of float32, and what it may find in the input already."""
FEW = 4
"""Rows of all steps together whose weights are read where they lie: in float32, also for autocast,
since to round them takes longer than to multiply them."""


class Asked(NamedTuple):
    """Whose gradients a backward pass is to find."""

    xs: bool
    states: bool
    weights: bool


class Pack(NamedTuple):
    """The rows of a `PackedSequence`."""

    sizes: Tensor  # (T,): how many rows are still running, the longest row first
    order: Tensor | None  # (B,): which of the caller's states each row has; None: as they come
    back: Tensor | None  # (B,): which row has each of the caller's states
    rows: int


class Use(NamedTuple):
    """What else a call may be: packed, or with dropout between its layers."""

    pack: Pack | None
    dropout: float = 0.0
    seed: int = 0

    def kept(self) -> Sequence[Tensor | None]:
        """What autograd keeps of it: see `restored`."""
        return self.pack[:3] if self.pack else NOTHING_KEPT


NOTHING_KEPT = (None, None, None)


def packed(
    xs: Tensor, sizes: Tensor | None, order: Tensor | None, back: Tensor | None
) -> Pack | None:
    """The rows of these inputs; None where they are no proper pack: others say why."""
    if KERNEL.library is None or sizes is None or (order is None) != (back is None):
        return None
    if not all(
        t is None or (t.dim() == 1 and is_plain(t, torch.int64)) for t in (sizes, order, back)
    ):
        return None
    count = 0 if order is None or back is None else len(order)
    if back is not None and len(back) != count:
        return None
    rows = KERNEL.library.elman_packed_rows(
        pointer(sizes), len(sizes), len(xs), pointer(order), pointer(back), count
    )
    return Pack(sizes, order, back, rows) if rows else None


def restored(use: Use | None, xs: Tensor, *places: Tensor | None) -> Use | None:
    """The use of a forward pass, its pack as autograd has kept it: sizes, order and back."""
    if use is None or use.pack is None:
        return use
    now = packed(xs, *places)
    if now is None or now.rows != use.pack.rows:
        raise UserError("the batch sizes of a packed call were changed before its backward pass")
    return use._replace(pack=now)


def prepare(
    xs: Tensor,
    weights: Sequence[Tensor],
    directions: int,
    job: Callable[[], Job],
    pack: Pack | None = None,
    cast: torch.dtype | None = None,
    apart: bool = False,
) -> Prepared | None:
    """What calls with inputs and weights like these need; None where this kernel runs none.

    `cast` is autocast's dtype where that is to be what comes out; the job is in float32 then.
    `apart` has outputs never share memory with what is kept for the backward pass.
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
    return Prepared(asked, weights, directions, pack is not None, cast, apart)


def kind_of(real: torch.dtype, rows: int, cast: torch.dtype | None) -> int:
    """What is multiplied: pairs of bfloat16 for autocast, where they are to be had and faster."""
    if cast is not torch.bfloat16 or rows <= FEW or KERNEL.variant(HALF) is None:
        return KINDS[real]
    return HALF


@final
class Prepared:
    """Calls of one module with inputs of one shape: what threads share is the same for all."""

    seen: SeenArguments | None = None
    """What `suits_again` asks in one native call, once it has been asked otherwise."""

    def __init__(
        self,
        job: Job,
        weights: Sequence[Tensor],
        directions: int,
        is_packed: bool,
        cast: torch.dtype | None,
        apart: bool,
    ) -> None:
        assert KERNEL.library is not None
        xs, h = job.inputs[0], job.states[0][0]
        self.threads, self.native = torch.get_num_threads(), KERNEL.library
        self.call, self.is_seen = KERNEL.library.elman_call, KERNEL.library.elman_is_seen
        self.dtype, self.input_dtype, self.cast, self.apart = h.dtype, xs.dtype, cast, apart
        self.states, self.hidden, self.blocks = len(job.cell.states), h.shape[1], job.cell.keeps
        self.weight_shapes = [w.shape for w in weights]
        self.layers = (LayerArguments * len(job.layers))(*map(_layer, job.pieces()))
        self._read(weights)
        self.stack = StackArguments(
            layers=self.layers,
            count=len(job.layers),
            directions=directions,
            reads_ids=not xs.is_floating_point(),
            level=KERNEL.level,
        )
        self._fit(xs.shape, is_packed)

    def _read(self, weights: Sequence[Tensor]) -> None:
        """Say where the weights lie."""
        self.tensors = [*weights]
        self.weights = [(w, w.data_ptr(), w.shape) for w in weights]
        self.places = _in_fours(weights, len(self.layers))
        _point(self.layers, self.places)

    def _fit(self, shape: Sequence[int], is_packed: bool) -> None:
        """Say all that depends on how many steps and rows there are."""
        steps, rows = shape[:2]
        self.shape, self.is_packed = torch.Size(shape), is_packed
        # one step, or one beside another, is copied sooner than Python cuts it out of its track
        copies = steps == 1 or self.stack.directions > 1 or is_packed or self.apart
        self.width = self.stack.directions * self.hidden
        self.outputs = _without_memory((steps + (not copies), rows, self.width), self.dtype)
        self.stacked = torch.Size((len(self.layers), rows, self.hidden))
        self.state = _without_memory(self.stacked, self.dtype)
        self.input_bytes = math.prod(shape) * self.input_dtype.itemsize
        self.state_bytes = self.stacked.numel() * self.dtype.itemsize
        self.seen = None
        for layer in self.layers:
            layer.T, layer.B = steps, rows
        self.stack.copies, self.stack.kind = copies, kind_of(self.dtype, steps * rows, self.cast)
        self.argument = ctypes.byref(self.stack)
        self.__dict__.pop("kept", None)

    @functools.cached_property
    def kept(self) -> Tensor:
        """What the backward pass reads besides; only of calls that go back, it may be large."""
        return _without_memory((self._kept(math.prod(self.shape[:2])),), self.dtype)

    def _kept(self, rows: int) -> int:
        """How many numbers the backward pass wants of so many rows of time and batch."""
        return self.native.elman_kept(self.argument, rows) // self.dtype.itemsize

    def changed(self, xs: Tensor, weights: Sequence[Tensor], pack: Pack | None) -> Prepared | None:
        """The same for other numbers of steps and rows, or weights elsewhere: for the same kernel.

        Sequences of every length come along, and weights are replaced; asking again would take
        longer than running them.
        """
        shape = padded_shape(xs, pack)
        if shape[2:] != self.shape[2:] or len(shape) != len(self.shape) or 0 in shape:
            return None
        if [w.shape for w in weights] != self.weight_shapes:
            return None
        if not all(is_plain(w, self.dtype) for w in weights):
            return None
        other = self._copied()
        other._read(weights)
        other._fit(shape, pack is not None)
        return other

    def bare(self) -> Prepared:
        """The same without weights, for `changed` alone."""
        other = self._copied()
        other.tensors, other.weights, other.places = [], [], [None] * 4 * len(other.layers)
        _point(other.layers, other.places)
        return other

    def _copied(self) -> Prepared:
        other = object.__new__(Prepared)
        other.__dict__.update(self.__dict__)
        other.layers = type(self.layers)(*self.layers)
        other.stack = StackArguments.from_buffer_copy(self.stack)
        other.stack.layers = other.layers
        return other

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()  # a copied module has weights elsewhere, and prepares its own

    def suits(
        self,
        xs: Tensor,
        state: Sequence[Tensor] | None,
        weights: Iterable[Tensor | None],
        pack: Pack | None = None,
        cast: torch.dtype | None = None,
    ) -> bool:
        """Whether this call is like the one prepared for, its weights being where they were."""
        real = self.dtype
        if cast is not self.cast or not self._suits_inputs(xs, pack):
            return False
        if not (is_plain(xs, self.input_dtype) or self._widens(xs, self.input_dtype)):
            return False
        for (w, where, shape), now in zip(self.weights, weights, strict=True):
            if w is not now or w.data_ptr() != where or w.shape != shape or w.dtype is not real:
                return False
            if not w.is_contiguous() or w.is_neg():
                return False  # `w.data = …` may leave it where it was, and yet not what it was
        if state is not None:
            if not isinstance(state, (tuple, list)) or len(state) != self.states:
                return False
            for s in state:
                if not isinstance(s, Tensor) or s.shape != self.stacked:
                    return False
                if not (is_plain(s, real) or self._widens(s, real)):
                    return False
        return torch.get_num_threads() == self.threads and choice.allows(KERNEL.name)

    def suits_again(
        self,
        xs: Tensor,
        state: Sequence[Tensor] | None,
        weights: Iterable[Tensor | None],
        cast: torch.dtype | None,
    ) -> bool:
        """The same of rows that are not packed, asked in one native call where that can be."""
        if self.seen is None or cast is not None:
            if not self.suits(xs, state, weights, None, cast):
                return False
            if cast is None and not self.is_packed:
                self.seen = library.seen(self.tensors, (self.shape, self.input_dtype), self.stacked)
            return True
        h = c = None
        if state is not None:
            # of anything else, what it is asked for may be gone before it is looked at
            if not isinstance(state, (tuple, list)) or len(state) != self.states:
                return False
            h, c = id(state[0]), id(state[1]) if self.states > 1 else None
        if not all(map(is_, self.tensors, weights)) or any(map(is_neg, self.tensors)):
            return False
        if not self.is_seen(self.seen, id(xs), h, c) or not _is_backed(xs, self.input_bytes):
            return False
        for s in state or ():
            if not _is_backed(s, self.state_bytes):
                return False
        return torch.get_num_threads() == self.threads and choice.allows(KERNEL.name)

    def _widens(self, t: Tensor, dtype: torch.dtype) -> bool:
        """Whether a tensor of another dtype is autocast's to widen to this one."""
        narrow = self.cast is not None and dtype is self.dtype and t.dtype in NARROW
        return narrow and is_plain(t, t.dtype)

    def _suits_inputs(self, xs: Tensor, pack: Pack | None) -> bool:
        if pack is None:
            return xs.shape == self.shape and not self.is_packed
        return padded_shape(xs, pack) == self.shape and self.is_packed

    def __call__(
        self, xs: Tensor, state: Sequence[Tensor] | None, use: Use | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Outputs and last states, stacked as PyTorch does; None where ids are out of range."""
        result = self.forward(xs, state, False, use)
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
        self,
        xs: Tensor,
        state: Sequence[Tensor] | None,
        keep: bool,
        use: Use | None = None,
        weights: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None] | None:
        """`outputs_of` what comes first, the last states, and what `backward` reads besides.

        `weights` are others of the same shapes and dtype, row-major, than it was prepared with.
        """
        two, c, kept = self.states > 1, None, None
        if self.is_packed:
            ys = torch.empty((len(xs), self.width), dtype=self.dtype, device=CPU)
            kept = torch.empty(self._kept(len(xs)), dtype=self.dtype, device=CPU) if keep else None
        else:
            ys = like(self.outputs)
            kept = like(self.kept) if keep else None
        h = like(self.state)
        if two:
            c = like(self.state)
        if self.cast is not None:
            xs = plain(xs, self.input_dtype)
            state = None if state is None else [plain(s, self.dtype) for s in state]
        status = self.call(
            self.argument if weights is None else self._reading(weights),
            None if use is None else self._used(use),
            pointer(xs),
            None if state is None else pointer(state[0]),
            pointer(state[1]) if two and state is not None else None,
            pointer(ys),
            h.data_ptr(),
            None if c is None else c.data_ptr(),
            None if kept is None else kept.data_ptr(),
        )
        if status:
            if status == library.BAD_ID:
                return None
            library.check_memory(status)
        last = (h,) if c is None else (h, c)
        return ys, last if self.cast is None else tuple([s.to(self.cast) for s in last]), kept

    def backward(
        self,
        xs: Tensor,
        weights: Sequence[Tensor],
        track: Tensor | None,
        kept: Tensor,
        dys: Tensor | None,
        dlast: Sequence[Tensor | None],
        asked: Asked,
        use: Use | None = None,
    ) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
        """The pulls on xs, on the first states (stacked) and on the weights, where asked for."""
        self.check_unchanged(xs, weights, track, kept, use and use.pack)
        real, xs = self.dtype, plain(xs, self.input_dtype)
        weights = [plain(w, real) for w in weights]
        track, kept, dys = plain(track, real), plain(kept, real), plain(dys, real)
        pulls = [plain(d, real) for d in dlast]
        dxs = torch.empty(xs.shape, dtype=real, device=CPU) if asked.xs else None
        first = [like(self.state) if asked.states else None for _ in pulls]
        dws = [like(w) if asked.weights else None for w in weights]
        two = self.states > 1
        status = self.native.elman_call_back(
            self._reading(weights),
            use and self._used(use),
            *map(pointer, (xs, kept, track, dys)),
            pointer(pulls[0]),
            pointer(pulls[1]) if two else None,
            pointer(dxs),
            pointer(first[0]),
            pointer(first[1]) if two else None,
            (ctypes.c_void_p * (4 * len(self.layers)))(*_in_fours(dws, len(self.layers))),
        )
        if status == library.BAD_ID:
            raise OutOfRange(
                "the ids of this call were changed before its backward pass",
                hint="change a copy of them, ids.clone()",
            )
        library.check_memory(status)
        return dxs, first, dws

    def check_unchanged(
        self,
        xs: Tensor,
        weights: Sequence[Tensor],
        track: Tensor | None,
        kept: Tensor,
        pack: Pack | None = None,
    ) -> None:
        """Refuse what has other shapes than in the forward pass: native code reads by those."""
        if not self._suits_inputs(xs, pack):
            raise UserError(
                f"inputs of shape {tuple(self.shape)} were changed before the backward pass"
            )
        for w, shape in zip(weights, self.weight_shapes, strict=True):
            _check_shape(w, shape)  # `w.data = …`
        _check_shape(track, self.outputs.shape)
        _check_shape(kept, (self._kept(len(xs)),) if pack else self.kept.shape)

    def check_pulls(self, xs: Tensor, dys: Tensor | None, dlast: Sequence[Tensor | None]) -> None:
        """The same of pulls that autograd has kept for a pass after this one."""
        _check_shape(dys, (*xs.shape[:-1], self.width))
        for d in dlast:
            _check_shape(d, self.stacked)

    @property
    def has_derivative(self) -> bool:
        """Whether the backward pass of such a call can itself be differentiated: see twice.h."""
        return self.cast is None and not self.stack.reads_ids

    def traces(self, track: Tensor | None, kept: Tensor, count: int) -> list[Trace]:
        """What `forward` has kept of every layer and direction, of so many rows of time and batch.

        In PyTorch's order, time as the direction met it: states (B + S, H), those before the first
        step first; gates by blocks, (S, kept, H).
        """
        kept, track = plain(kept, self.dtype), plain(track, self.dtype)
        inside = (ctypes.c_int64 * (3 * len(self.layers)))()
        self.native.elman_places(self.argument, count, inside)
        blocks, whole = self.blocks, (self.shape[1] + count, self.hidden)

        def read(start: int, *shape: int) -> Tensor:
            return kept[start : start + math.prod(shape)].view(shape)

        found = []
        for i in range(len(self.layers)):
            cs, gates, hs = inside[3 * i : 3 * i + 3]
            own = track if i == len(self.layers) - 1 else None  # of one direction: see `track_of`
            found.append(
                Trace(
                    read(hs, *whole) if own is None else own.view(whole),
                    read(cs, *whole) if self.states > 1 else None,
                    read(gates, count, blocks, self.hidden) if blocks else None,
                )
            )
        return found

    def _used(self, use: Use) -> UseArguments:
        below, scale = masks.dropping(use.dropout, self.dtype) if use.dropout else (0, 1.0)
        sizes, order, back, _ = use.pack or (None, None, None, 0)
        places = pointer(sizes), pointer(order), pointer(back)
        return UseArguments(*places, use.seed, below, scale)

    def _reading(self, weights: Sequence[Tensor]) -> StackArguments:
        """The layers with weights that autograd may have brought back from elsewhere."""
        places = _in_fours(weights, len(self.layers))
        if places == self.places:
            return self.stack
        layers = type(self.layers)(*self.layers)
        _point(layers, places)
        moved = StackArguments.from_buffer_copy(self.stack)
        moved.layers = layers  # which keeps them alive
        return moved


def kept_count(
    cell: Cell, layers: int, directions: int, rows: tuple[int, int], hidden: int, size: int
) -> int:
    """How many numbers of so many bytes a call that keeps outputs `apart` keeps for its backward
    pass, of so many (steps, rows); these may be symbols: `Places` of stack.cpp, in lines of 64."""

    def lines(numbers: int) -> int:
        return (numbers * size + 63) // 64 * 64 // size

    every = rows[0] * rows[1]
    track, gates = lines((rows[1] + every) * hidden), lines(every * cell.keeps * hidden)
    each = len(cell.states) * track + gates
    between = (layers - 1) * lines(every * directions * hidden) if directions > 1 else 0
    return layers * directions * each + between


def _check_shape(t: Tensor | None, shape: Sequence[int]) -> None:
    if t is not None and t.shape != shape:
        raise UserError(f"a tensor of shape {tuple(t.shape)} was of shape {tuple(shape)}")


def _in_fours(flat: Sequence[Tensor | None], layers: int) -> list[int | None]:
    """Where W_ih, W_hh, b_ih and b_hh of every layer lie; None for biases it has not."""
    each, places = len(flat) // layers, [pointer(t) for t in flat]
    if each == 4:
        return places
    return [p for i in range(0, len(flat), each) for p in (*places[i : i + each], None, None)]


def _point(layers: Iterable[LayerArguments], places: Sequence[int | None]) -> None:
    """Have layers read weights that lie there, four to a layer."""
    for i, layer in enumerate(layers):
        layer.W_ih, layer.W_hh, layer.b_ih, layer.b_hh = places[4 * i : 4 * i + 4]


def padded_shape(xs: Tensor, pack: Pack | None) -> tuple[int, ...]:
    """(T, B, …) of inputs that may be packed."""
    return xs.shape if pack is None else (len(pack.sizes), pack.rows, *xs.shape[1:])


def _is_backed(t: Tensor, size: int) -> bool:
    """Whether a tensor of so many bytes, row by row, has a storage as long, and no sign to flip."""
    start = t.storage_offset() * t.itemsize
    return t.untyped_storage().nbytes() >= start + size and not t.is_neg()


@functools.lru_cache(4096)
def _without_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor to be like: torch makes one in half the time that it takes to read sizes."""
    with torch.inference_mode(False):
        t = torch.empty(shape, dtype=dtype, device=CPU)
    t.untyped_storage().resize_(0)
    return t


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
    )
