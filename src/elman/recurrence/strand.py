"""A strand: the part of a stack that can be run over a piece of time by itself.

That is all the layers of a stack that runs one way, or one direction of one layer of a
bidirectional one (whose next layer has to wait for both ends of time). The memory says into which
pieces its time is cut.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
from collections.abc import Iterator, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from elman.cells import Cell, Gradients, State, Weights
from elman.gradients.memory import Memory, Plan, Sizes, reversed_pieces
from elman.kernels import Kernel, Piece, Pull, Trace

States = list[State]
"""The states of several layers at one moment."""


@final
@dataclass(frozen=True)
class Dropout:
    """Dropout between layers, the same mask however time is cut into pieces.

    Masks are drawn for a few steps at a time, from a seed that names the layer and the moment, so
    they can be drawn again in the backward pass instead of being kept.
    """

    p: float
    seed: int
    origin: int = 0
    grain: int = 16

    def moved(self, start: int) -> Dropout:
        """The same masks for a sequence that begins `start` steps later."""
        return replace(self, origin=self.origin + start)

    def __call__(self, hs: Tensor, layer: int, start: int) -> Tensor:
        """What layer + 1 reads, from what `layer` wrote at the steps start, start + 1, …"""
        return hs * self.mask(hs, layer, start)

    def mask(self, hs: Tensor, layer: int, start: int) -> Tensor:
        """0 with probability p, else 1/(1-p), shaped like hs."""
        if self.p == 0:  # a compiler, which has no numbers, draws none either
            return torch.ones_like(hs)
        start += self.origin
        if self.seed < 0:
            return _given[self.seed].between[layer][start : start + len(hs)].to(hs.dtype)
        first, last = start // self.grain, (start + len(hs) - 1) // self.grain
        random = torch.Generator(hs.device)
        shape = (last + 1 - first) * self.grain, *hs.shape[1:]
        drawn = torch.empty(shape, dtype=torch.float32, device=hs.device)
        for grain, part in enumerate(drawn.split(self.grain), first):
            random.manual_seed((self.seed + layer * 0x9E3779B1 + grain * 0x85EBCA6B) % 2**63)
            part.uniform_(generator=random)
        offset = start - first * self.grain
        kept = drawn[offset : offset + len(hs)].ge_(self.p).to(hs.dtype)
        return kept.div_(1 - self.p) if self.p < 1 else kept

    def whole_mask(self, hs: Tensor, layer: int, sizes: Tensor | None) -> Tensor:
        """The same for a whole sequence; of rows that are packed, as of rows side by side."""
        if sizes is None:
            return self.mask(hs, layer, 0)
        rows, lengths = pad_packed_sequence(PackedSequence(hs.detach(), sizes))
        return pack_padded_sequence(self.mask(rows, layer, 0), lengths).data


class Given(NamedTuple):
    """Numbers that others have drawn for a call, of all its steps."""

    between: Sequence[Tensor] = ()  # masks of dropout between layers, (T, B, H)
    noise: Sequence[Tensor] = ()  # what `Noise` would draw for each layer


_given: dict[int, Given] = {}
_numbers = itertools.count(1)
_seed = contextvars.ContextVar("of the masks that are given", default=0)


@contextmanager
def drawn_before(given: Given) -> Iterator[None]:
    """Inside this block calls draw nothing, neither for dropout nor for noise, and take these.

    So a CUDA graph can have others at each replay. They go by a seed below 0, which none that is
    drawn is: the backward pass, in another thread, finds them by it.
    """
    seed = -next(_numbers)
    _given[seed], before = given, _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(before)
        del _given[seed]


def draw_seed() -> Tensor:
    """The seed of a call's masks, from torch's generator; or that of the masks that are given."""
    if not torch.compiler.is_compiling() and (seed := _seed.get()):
        return torch.tensor(seed, device="cpu")
    return torch.randint(2**62, (), device="cpu")


@final
@dataclass(frozen=True)
class Noise:
    """What a noisy cell draws for every step, the same however time is cut into pieces."""

    p: tuple[float, ...]
    seed: int
    place: int = 0  # of the first layer, in PyTorch's order
    origin: int = 0

    def __call__(self, h: Tensor, layer: int, start: int, stop: int) -> Tensor:
        """(steps, batch, blocks · hidden): 0 with the block's probability p, else 1/(1-p)."""
        if self.seed < 0:
            whole = _given[self.seed].noise[self.place + layer]
            return whole[self.origin + start : self.origin + stop].to(h.dtype)
        like = h.expand(stop - start, *h.shape)
        apart = 0xC2B2AE35  # from dropout between layers, and block from block
        masks = (Dropout(p, self.seed + i * apart, self.origin) for i, p in enumerate(self.p, 1))
        return torch.cat([m.mask(like, self.place + layer, start) for m in masks], -1)


@final
@dataclass(frozen=True)
class Strand:
    """Layers that run one way, over any piece [start, stop) of time."""

    kernel: Kernel
    cell: Cell
    layers: Sequence[Weights]
    dropout: Dropout | None = None
    lengths: Tensor | None = None
    siblings: int = 1  # the strands of the stack, this one included
    noise: Noise | None = None

    def forward(
        self, xs: Tensor, states: States, start: int, stop: int, needs_gates: bool = True
    ) -> list[Trace]:
        """Every layer's trace over the piece, from their states at its start."""
        inputs, traces, lengths = xs[start:stop], [], self._lengths(start, stop)
        with uncast(xs):
            for i, (w, state) in enumerate(zip(self.layers, states, strict=True)):
                noise = self._noise(state, i, start, stop)
                piece = Piece(self.cell, w, inputs, state, lengths, noise)
                trace = self.kernel.forward(piece, needs_gates)
                traces.append(trace)
                inputs = self._read(trace, i, start)
        return traces

    def backward(
        self,
        xs: Tensor,
        traces: list[Trace],
        dys: Tensor | None,
        dstates: States,
        xi: Tensor | None,
        start: int,
        stop: int,
        needs_dxs: bool,
        dws: MutableSequence[Gradients | None],
    ) -> tuple[Tensor | None, States]:
        """The pull on the piece's xs and on the states at its start; adds to `dws` (None: 0)."""
        dstates, xi = list(dstates), None if xi is None else xi[start:stop]
        lengths = self._lengths(start, stop)
        for i in reversed(range(len(self.layers))):
            inputs = xs[start:stop] if i == 0 else self._read(traces[i - 1], i - 1, start)
            with uncast(xs):
                state = traces[i].state(0)
                noise = self._noise(state, i, start, stop)
                piece = Piece(self.cell, self.layers[i], inputs, state, lengths, noise)
                pull = Pull(dys, dstates[i], xi, needs_dxs or i > 0, dws[i])
                dys, dws[i], dstates[i] = self.kernel.backward(piece, traces[i], pull)
            if i > 0 and self.dropout is not None and dys is not None:
                dys = dys * self.dropout.mask(dys, i - 1, start)
        return dys, dstates

    def advance(self, xs: Tensor, states: States, start: int, stop: int) -> States:
        """The states at `stop` from those at `start`, nothing else kept."""
        return self.run_on(xs, states, start, stop)[1]

    def run_on(self, xs: Tensor, states: States, start: int, stop: int) -> tuple[Tensor, States]:
        """What the last layer writes over the piece, and the states at its end."""
        traces = self.forward(xs, states, start, stop, needs_gates=False)
        after = [tuple(s.clone() for s in trace.state(stop - start)) for trace in traces]
        return traces[-1].hs[1:], after

    def plan(self, xs: Tensor, states: States, memory: Memory) -> Plan:
        """How the memory cuts this strand's time."""
        steps = xs.shape[0]  # of any number of steps in compiled code, which `len` would fix
        return memory.plan(steps, lambda: self.sizes(xs, states), self.siblings)

    def sizes(self, xs: Tensor, states: States) -> Sizes:
        """What the states take, and what one step keeps for the backward pass."""
        step = sum(self._step_bytes(i, xs, state) for i, state in enumerate(states))
        return Sizes(sum(_bytes(s) for s in _flat(states)), step)

    def traces(self, kept: list[Tensor]) -> list[Trace]:
        """The traces that `run` kept, put together again."""
        each = len(kept) // len(self.layers)
        return [self._trace(kept[i : i + each]) for i in range(0, len(kept), each)]

    def reversed_pieces(
        self, plan: Plan, xs: Tensor, held: MutableMapping[int, States]
    ) -> Iterator[tuple[int, States]]:
        """Pieces from the last to the first, each with the states it starts from."""

        def advance(states: States, piece: int, later: int) -> States:
            for p in range(piece, later):
                states = self.advance(xs, states, *plan.bounds(p))
            return states

        return reversed_pieces(plan, held, advance)

    def _step_bytes(self, layer: int, xs: Tensor, state: State) -> int:
        """What one step of a layer takes in the backward pass: states, gates, pulls on h and x."""
        w = self.layers[layer]
        one = xs[:1] if layer == 0 else state[0].new_empty(1, len(state[0]), w.W_ih.shape[1])
        gates = self.kernel.empty_gates(Piece(self.cell, w, one, state))
        kept = sum(_bytes(s) for s in state) + (0 if gates is None else _bytes(gates))
        pulls = _bytes(state[0]) + (_bytes(one) if one.is_floating_point() else 0)
        masked = 2 * _bytes(one) if layer > 0 and self.dropout is not None else 0
        drawn = len(self.cell.noise) * _bytes(state[0])
        return kept + pulls + masked + drawn

    def _trace(self, kept: list[Tensor]) -> Trace:
        hs, *rest = kept
        cs = rest.pop(0) if len(self.cell.states) > 1 else None
        return Trace(hs, cs, rest[0] if rest else None)

    def _read(self, trace: Trace, layer: int, start: int) -> Tensor:
        """What the layer above `layer` reads."""
        ys = trace.hs[1:]
        last = layer == len(self.layers) - 1
        return ys if self.dropout is None or last else self.dropout(ys, layer, start)

    def _noise(self, state: State, layer: int, start: int, stop: int) -> Tensor | None:
        return None if self.noise is None else self.noise(state[0], layer, start, stop)

    def _lengths(self, start: int, stop: int) -> Tensor | None:
        return None if self.lengths is None else (self.lengths - start).clamp(0, stop - start)


def run(
    strand: Strand, xs: Tensor, states: States, memory: Memory, keep: bool, gates: bool = True
) -> tuple[Tensor, States, list[Tensor]]:
    """Over all of time: what the last layer writes, the last states, and what the memory keeps."""
    plan = strand.plan(xs, states, memory)
    if plan.pieces == 1:
        traces = strand.forward(xs, states, 0, plan.steps, needs_gates=keep and gates)
        kept = [t for trace in traces for t in trace if t is not None] if keep else []
        return traces[-1].hs[1:], [trace.state(-1) for trace in traces], kept
    rows = {piece: row for row, piece in enumerate(plan.kept())} if keep else {}
    kept = [s.new_empty(len(rows), *s.shape) for s in _flat(states)] if keep else []
    ys = states[-1][0].new_empty(plan.steps, *states[-1][0].shape)
    for piece in range(plan.pieces):
        if piece in rows:
            for k, s in zip(kept, _flat(states), strict=True):
                k[rows[piece]] = s
        start, stop = plan.bounds(piece)
        ys[start:stop], states = strand.run_on(xs, states, start, stop)
    return ys, states, kept


def run_back(
    strand: Strand,
    xs: Tensor,
    states: States,
    memory: Memory,
    kept: list[Tensor],
    dys: Tensor | None,
    dstates: States,
    xi: Tensor | None,
    needs_dxs: bool,
    dws: MutableSequence[Gradients | None],
) -> tuple[Tensor | None, States]:
    """The pull on all xs and on the first states, from the pulls on ys and the last states."""
    plan = strand.plan(xs, states, memory)
    if plan.pieces == 1:
        traces = strand.traces(kept)
        return strand.backward(xs, traces, dys, dstates, xi, 0, plan.steps, needs_dxs, dws)
    dxs = torch.empty_like(xs) if needs_dxs and xs.is_floating_point() else None
    first = {p: _paired([k[i] for k in kept], states) for i, p in enumerate(plan.kept())}
    held = Shelf(states, plan.slots, first)
    for piece, before in strand.reversed_pieces(plan, xs, held):
        start, stop = plan.bounds(piece)
        traces = strand.forward(xs, before, start, stop)
        pull = None if dys is None else dys[start:stop]
        piece_dxs, dstates = strand.backward(
            xs, traces, pull, dstates, xi, start, stop, needs_dxs, dws
        )
        if dxs is not None and piece_dxs is not None:
            dxs[start:stop] = piece_dxs
    return dxs, dstates


@final
class Shelf(MutableMapping[int, States]):
    """Kept states by piece, copied into room that is taken once.

    Kept one by one they would lie scattered over the heap, each above the room left by the trace
    that it was taken from, and pin it: in a million steps several times the budget.
    """

    def __init__(self, like: States, rows: int, first: dict[int, States] | None = None) -> None:
        self.like, self.free = like, list(range(rows))
        self.first, self.row = dict(first or {}), {}

    @functools.cached_property
    def room(self) -> list[Tensor]:
        return [s.new_empty(len(self.free), *s.shape) for s in _flat(self.like)]

    def __setitem__(self, piece: int, states: States) -> None:
        room, self.row[piece] = self.room, self.free.pop()
        for r, s in zip(room, _flat(states), strict=True):
            r[self.row[piece]] = s

    def __getitem__(self, piece: int) -> States:
        if piece in self.first:
            return self.first[piece]
        return _paired([r[self.row[piece]] for r in self.room], self.like)

    def __delitem__(self, piece: int) -> None:
        if self.first.pop(piece, None) is None:
            self.free.append(self.row.pop(piece))

    def __iter__(self) -> Iterator[int]:
        return iter([*self.first, *self.row])

    def __len__(self) -> int:
        return len(self.first) + len(self.row)


def is_cast(device: torch.device) -> bool:
    """Whether autocast is on; torch cannot be asked about tensors without memory."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def autocast_on_a_cpu(dtype: torch.dtype) -> torch.dtype | None:
    """What autocast makes of float32 there; None where it is off, or finds another dtype."""
    if not torch.is_autocast_enabled("cpu") or dtype != torch.float32:
        return None
    return torch.get_autocast_dtype("cpu")


def uncast(xs: Tensor) -> AbstractContextManager[object]:
    """Autocast off: the caller has cast already."""
    if is_cast(xs.device):
        return torch.autocast(xs.device.type, enabled=False)
    return nullcontext()


def _flat(states: States) -> list[Tensor]:
    return [s for state in states for s in state]


def _paired(flat: list[Tensor], like: States) -> States:
    """The inverse of `_flat`."""
    each = len(like[0])
    return [tuple(flat[i : i + each]) for i in range(0, len(flat), each)]


def _bytes(t: Tensor) -> int:
    """What a tensor takes: a number in compiled code, too, where torch's own `nbytes` fails."""
    return int(t.numel()) * t.itemsize
