"""Sweeps over a piece of time that is cut into chunks: all chunks at once, forward or backward.

A sweep runs every chunk as rows of one batch and says how far apart they end: the differences at
the seams, and how much the chunks contract. `chunked.py` has what follows from these, and decides
how often to sweep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from elman.cells import Gradients, State
from elman.kernels import Kernel, Piece, Pull, Trace, products
from elman.recurrence.seams import LEAST

HELD_CPU, HELD_GPU = 24 << 20, 2 << 30
"""Bytes that the kernel keeps of chunks at a time, about, beside what is kept of all of time."""


class Cut(NamedTuple):
    """`chunks` chunks of `steps` steps after a head of `head`, each from `overlap` steps early."""

    chunks: int
    steps: int
    head: int
    overlap: int

    @property
    def words(self) -> str:
        return (
            f"{self.chunks} chunks of {self.steps:,} steps side by side, "
            f"each from {self.overlap:,} steps early"
        )


class Gaps(NamedTuple):
    """The differences at the seams after a sweep, in order of travel, and how they shrink."""

    differences: Sequence[float]
    contraction: float
    each: Tensor  # of every seam and row, in order of time: ((chunks - 1) · B,)

    @property
    def largest(self) -> float:
        return math.inf if any(map(math.isnan, self.differences)) else max(self.differences)

    def bound(self) -> float:
        """The largest ‖ε_i‖ that ‖ε_{i+1}‖ ≤ difference_i + κ ‖ε_i‖ allows."""
        error = worst = 0.0
        for difference in self.differences:
            error = difference + (self.contraction * error if error else 0.0)
            worst = max(worst, error) if error == error else math.inf
        return worst

    def rows_above(self, limit: float) -> Tensor | None:
        """The seams and rows worth another sweep; None: all, as a GPU takes no longer for them."""
        if not self.each.is_cpu:
            return None
        above = torch.nonzero(~(self.each <= limit)).flatten()
        return above if len(above) else torch.arange(len(self.each), device=above.device)


@dataclass(frozen=True)
class _Layout:
    """(T, B, …) as (steps, chunks · B, …): row c·B + b is chunk c of row b.

    Chunks are run a few steps at a time, so that nothing of the size of T is held twice.
    """

    cut: Cut
    rows: int

    def part(self, x: Tensor, start: int, stop: int, rows: Tensor | None) -> Tensor:
        """Steps [start, stop) of every chunk, or of those of some rows."""
        apart = self._apart(x)[:, start:stop]  # (chunks, steps, B, …)
        if rows is None:
            return apart.transpose(0, 1).flatten(1, 2)
        return apart[rows // self.rows, :, rows % self.rows].transpose(0, 1)

    def piece(
        self,
        piece: Piece,
        start: int,
        stop: int,
        rows: Tensor | None,
        state: State,
        lengths: Tensor | None,
    ) -> Piece:
        """Steps [start, stop) of every chunk, from these states."""
        noise = None if piece.noise is None else self.part(piece.noise, start, stop, rows)
        xs = self.part(piece.xs, start, stop, rows)
        return piece._replace(xs=xs, state=state, lengths=lengths, noise=noise)

    def put(self, out: Tensor, x: Tensor, start: int, rows: Tensor | None, add: bool) -> None:
        """The reverse of `part`: write, or add, steps [start, start + len(x))."""
        apart = self._apart(out)[:, start : start + len(x)]
        if rows is None:
            x = x.unflatten(1, (self.cut.chunks, self.rows)).transpose(0, 1)
            apart.add_(x) if add else apart.copy_(x)
            return
        chunk, row, x = rows // self.rows, rows % self.rows, x.transpose(0, 1)
        apart[chunk, :, row] = apart[chunk, :, row] + x if add else x

    def states(self, track: Tensor, start: int, stop: int, rows: Tensor | None) -> Tensor:
        """The states before, between and after steps [start, stop), from a track of T + 1."""
        L = self.cut.steps
        apart = track[self.cut.head :].unfold(0, L + 1, L)[..., start : stop + 1]
        if rows is None:
            return apart.movedim(-1, 0).flatten(1, 2)  # from (chunks, B, …, steps + 1)
        return apart[rows // self.rows, rows % self.rows].movedim(-1, 0)

    def state(self, track: Tensor, step: int) -> Tensor:
        """The state of every chunk after `step` of its steps."""
        first = self.cut.head + step
        return track[first :: self.cut.steps][: self.cut.chunks].flatten(0, 1)

    def lengths(self, lengths: Tensor | None) -> Tensor | None:
        """How many steps of each chunk its row still has."""
        if lengths is None:
            return None
        chunk = torch.arange(self.cut.chunks, device=lengths.device)
        left = lengths - (self.cut.head + self.cut.steps * chunk[:, None])
        return left.clamp(0, self.cut.steps).flatten()

    def pieces(self, piece: Piece, start: int, stop: int) -> list[tuple[int, int]]:
        """[start, stop) cut so that what the kernel keeps of a piece is small beside the whole."""
        width = piece.cell.gates + 2 * len(piece.cell.states) + 1
        step = width * self.cut.chunks * self.rows * piece.w.hidden_size * piece.w.W_hh.itemsize
        each = max(LEAST, (HELD_CPU if piece.xs.is_cpu else HELD_GPU) // step)
        return [(a, min(a + each, stop)) for a in range(start, stop, each)]

    def _apart(self, x: Tensor) -> Tensor:
        return x[self.cut.head :].unflatten(0, (self.cut.chunks, self.cut.steps))


class Forward:
    """The forward pass over one piece of time, sweep by sweep."""

    def __init__(self, kernel: Kernel, piece: Piece, cut: Cut, needs_gates: bool) -> None:
        self.kernel, self.piece, self.cut, self.needs_gates = kernel, piece, cut, needs_gates
        self.layout = _Layout(cut, piece.xs.shape[1])
        self.lengths = self.layout.lengths(piece.lengths)
        self.every = torch.arange(cut.chunks * self.layout.rows, device=piece.xs.device)
        self.begin = piece.state
        self.whole = self._run_head() if cut.head else None

    def first(self) -> Gaps:
        """From what the overlap leads to."""
        B, w, L = self.layout.rows, self.cut.overlap, self.cut.steps
        guess = tuple(s.new_zeros(len(self.every) - B, *s.shape[1:]) for s in self.begin)
        if w:
            guess = self._run(guess, L - w, self.every[:-B], keep=False)
        self.start = tuple(torch.cat([b, g]) for b, g in zip(self.begin, guess, strict=True))
        self._run(self.start, 0, None)
        began = [s[:-B] for s in self._states(L - w)]  # the guess was 0, this far from it
        return self._gaps(began, None, w > 0)

    def again(self, seams: Tensor | None) -> Gaps:
        """From the ends just found, the chunks after these seams."""
        B, L = self.layout.rows, self.cut.steps
        rows = self.every if seams is None else seams + B
        ends = [e.clone() for e in self._states(L)]  # of a single row they are views of the track
        starts = [torch.cat([s[:B], e[:-B]]) for s, e in zip(self.start, ends, strict=True)]
        moved = [(new - s)[rows] for new, s in zip(starts, self.start, strict=True)]
        for s, new in zip(self.start, starts, strict=True):
            s[rows] = new[rows]
        self._run(tuple(s[rows] for s in self.start), 0, None if seams is None else rows)
        came = [(a - b)[rows] for a, b in zip(self._states(L), ends, strict=True)]
        return self._gaps(moved, came)

    def result(self) -> Trace:
        """The trace of the whole piece of time."""
        assert self.whole is not None
        hs, cs, gates = self.whole
        return Trace(self._held(hs), None if cs is None else self._held(cs), gates)

    def _run_head(self) -> Trace:
        """The steps before the first chunk."""
        head, piece = self.cut.head, self.piece
        lengths = None if piece.lengths is None else piece.lengths.clamp(max=head)
        part = _until(piece, head, lengths)
        trace = self.kernel.forward(part, self.needs_gates)
        self.begin = trace.state(head)
        whole = self._empty(trace)
        for track, known in zip(whole[:2], trace[:2], strict=True):
            if track is not None and known is not None:
                track[: head + 1] = known
        if whole.gates is not None and trace.gates is not None:
            whole.gates[:head] = trace.gates
        return whole

    def _empty(self, part: Trace) -> Trace:
        """Room for the trace of all of time, of the types of a part's."""
        T, B = self.piece.xs.shape[:2]

        def room(x: Tensor | None, steps: int) -> Tensor | None:
            return None if x is None else x.new_empty(steps, B, *x.shape[2:])

        hs, cs = room(part.hs, T + 1), room(part.cs, T + 1)
        assert hs is not None
        for track, first in zip((hs, cs), self.piece.state, strict=False):
            assert track is not None
            track[0] = first
        return Trace(hs, cs, room(part.gates, T))

    def _run(self, state: State, start: int, rows: Tensor | None, keep: bool = True) -> State:
        """Chunks (or those of some rows) from step `start` to their ends; their last state."""
        for a, b in self.layout.pieces(self.piece, start, self.cut.steps):
            part = self.kernel.forward(self._part(state, a, b, rows), self.needs_gates and keep)
            state = part.state(b - a)
            if keep:
                self._write(part, a, rows)
        return state

    def _part(self, state: State, start: int, stop: int, rows: Tensor | None) -> Piece:
        lengths = self.lengths
        if lengths is not None:
            lengths = lengths if rows is None else lengths[rows]
            lengths = (lengths - start).clamp(0, stop - start)
        return self.layout.piece(self.piece, start, stop, rows, state, lengths)

    def _write(self, part: Trace, start: int, rows: Tensor | None) -> None:
        self.whole = self._empty(part) if self.whole is None else self.whole
        for track, x in zip(self.whole[:2], part[:2], strict=True):
            if track is not None and x is not None:
                self.layout.put(track[1:], x[1:], start, rows, add=False)
        if self.whole.gates is not None and part.gates is not None:
            self.layout.put(self.whole.gates, part.gates, start, rows, add=False)

    def _states(self, step: int) -> list[Tensor]:
        """The state of every chunk after `step` of its steps."""
        assert self.whole is not None
        return [self.layout.state(t, step) for t in self.whole[:2] if t is not None]

    def _gaps(self, before: list[Tensor], after: list[Tensor] | None, known: bool = True) -> Gaps:
        B = self.layout.rows
        ends = [e[:-B] for e in self._states(self.cut.steps)]
        gaps = [s[B:] - e for s, e in zip(self.start, ends, strict=True)]
        if self.lengths is not None:
            alive = self.lengths[B:, None] > 0
            gaps = [torch.where(alive, gap, 0) for gap in gaps]
        return _measured(gaps, ends, before, after or gaps, B, known)

    def _held(self, track: Tensor) -> Tensor:
        """A row that has ended holds its state, in chunks that began after its end, too."""
        lengths = self.piece.lengths
        if lengths is None:
            return track
        moments = torch.arange(len(track), device=track.device)[:, None].minimum(lengths)
        return track.gather(0, moments[..., None].expand_as(track))


class Backward:
    """The backward pass over one piece of time, sweep by sweep."""

    def __init__(self, kernel: Kernel, piece: Piece, trace: Trace, pull: Pull, cut: Cut) -> None:
        self.kernel, self.piece, self.trace, self.pull, self.cut = kernel, piece, trace, pull, cut
        self.layout = _Layout(cut, piece.xs.shape[1])
        self.lengths = self.layout.lengths(piece.lengths)
        self.every = torch.arange(cut.chunks * self.layout.rows, device=piece.xs.device)
        self.xi = pull.xi
        if self.xi is not None and self.xi.dim() == 1:
            self.xi = self.xi[:, None].expand(-1, self.layout.rows)
        self.dxs: Tensor | None = None
        self.dw: Gradients | None = None

    def first(self) -> Gaps:
        """From what the overlap hands back."""
        B, w = self.layout.rows, self.cut.overlap
        guess = self._entering(w)
        if w:
            guess = self._run(guess, w, self.every[B:], self.pull.dhs, keep=False)
        ends = zip(guess, self.pull.dstate, strict=True)
        self.used = tuple(torch.cat([g, last.to(g.dtype)]) for g, last in ends)
        handed_back = self._run(self.used, self.cut.steps, None, self.pull.dhs)
        self.handed_back = tuple(d.clone() for d in handed_back)
        return self._gaps(None, None, w > 0)

    def again(self, seams: Tensor | None) -> Gaps:
        """Carry back what the last sweep got wrong at these seams, and add it: it is linear."""
        B, rows = self.layout.rows, self.every if seams is None else seams
        pulls = tuple(
            torch.cat([d[B:] - u[:-B], torch.zeros_like(d[:B])])[rows]
            for d, u in zip(self.handed_back, self.used, strict=True)
        )
        more = self._run(pulls, self.cut.steps, None if seams is None else rows, None)
        for total, d in zip((*self.used, *self.handed_back), (*pulls, *more), strict=True):
            total.index_add_(0, rows, d.to(total.dtype))
        return self._gaps(list(pulls), list(more))

    def result(self) -> tuple[Tensor | None, Gradients, State]:
        """dxs, dw and the pull on the first state."""
        head, B, pull = self.cut.head, self.layout.rows, self.pull
        dstate, dw = tuple(d[:B] for d in self.handed_back), self.dw
        if head:
            lengths = None if self.piece.lengths is None else self.piece.lengths.clamp(max=head)
            piece = _until(self.piece, head, lengths)
            dhs = None if pull.dhs is None else pull.dhs[:head]
            xi = None if pull.xi is None else pull.xi[:head]
            early, dw, dstate = self.kernel.backward(
                piece, self.trace.between(0, head), Pull(dhs, dstate, xi, pull.needs_dxs, dw)
            )
            if self.dxs is not None and early is not None:
                self.dxs[:head] = early
        assert dw is not None
        return self.dxs, products.add(pull.into, dw), dstate

    def _run(
        self,
        dstate: State,
        stop: int,
        rows: Tensor | None,
        dhs: Tensor | None,
        keep: bool = True,
    ) -> State:
        """Chunks (or those of some rows) from step `stop` back to their starts; the pull there.

        What they add to the pulls on inputs and weights is thrown away unless it is to be kept.
        """
        part, pull = self.layout.part, self.pull
        for a, b in reversed(self.layout.pieces(self.piece, 0, stop)):
            trace, lengths = self._trace(a, b, rows), self.lengths
            if lengths is not None:
                lengths = lengths if rows is None else lengths[rows]
                lengths = (lengths - a).clamp(0, b - a)
            piece = self.layout.piece(self.piece, a, b, rows, trace.state(0), lengths)
            pulls = Pull(
                None if dhs is None else part(dhs, a, b, rows),
                dstate,
                None if self.xi is None else part(self.xi, a, b, rows),
                pull.needs_dxs and keep,
                self.dw if keep else None,
            )
            dxs, dw, dstate = self.kernel.backward(piece, trace, pulls)
            if keep:
                self.dw = dw
                self._write(dxs, a, rows, add=dhs is None)
        return dstate

    def _trace(self, start: int, stop: int, rows: Tensor | None) -> Trace:
        hs, cs, gates = self.trace
        return Trace(
            self.layout.states(hs, start, stop, rows),
            None if cs is None else self.layout.states(cs, start, stop, rows),
            None if gates is None else self.layout.part(gates, start, stop, rows),
        )

    def _write(self, dxs: Tensor | None, start: int, rows: Tensor | None, add: bool) -> None:
        if dxs is None:
            return
        if self.dxs is None:
            self.dxs = dxs.new_empty(self.piece.xs.shape)
        self.layout.put(self.dxs, dxs, start, rows, add)

    def _entering(self, after: int) -> State:
        """The pull on the states `after` steps into chunks 1, 2, …: 0, but where a row has ended.

        There it is known: the pull on its last state, and what is pulled at directly since.
        """
        C, B, pull = self.cut.chunks, self.layout.rows, self.pull
        guess = [d.new_zeros((C - 1) * B, *d.shape[1:]) for d in pull.dstate]
        lengths = self.piece.lengths
        if lengths is None:
            return tuple(guess)
        moments = torch.arange(1, C, device=lengths.device) * self.cut.steps + self.cut.head + after
        ended = (lengths <= moments[:, None]).flatten()[:, None]
        known = [d.expand(C - 1, *d.shape).flatten(0, 1) for d in pull.dstate]
        if pull.dhs is not None:
            later = pull.dhs.flip(0).cumsum(0).flip(0)
            later = torch.cat([later, torch.zeros_like(later[:1])])
            known[0] = known[0] + later[moments].flatten(0, 1).to(known[0].dtype)
        return tuple(torch.where(ended, k, g) for k, g in zip(known, guess, strict=True))

    def _gaps(
        self, before: list[Tensor] | None, after: list[Tensor] | None, known: bool = True
    ) -> Gaps:
        B = self.layout.rows
        later = [d[B:] for d in self.handed_back]  # what the chunk before each seam should go by
        gaps = [d - u[:-B] for d, u in zip(later, self.used, strict=True)]
        ends = [torch.cat([d, e.to(d.dtype)]) for d, e in zip(later, self.pull.dstate, strict=True)]
        measured = _measured(gaps, ends, before, after or gaps, B, known)
        return measured._replace(differences=measured.differences[::-1])


def _until(piece: Piece, stop: int, lengths: Tensor | None) -> Piece:
    """The first steps of a piece."""
    noise = None if piece.noise is None else piece.noise[:stop]
    return piece._replace(xs=piece.xs[:stop], lengths=lengths, noise=noise)


def _measured(
    gaps: list[Tensor],
    ends: list[Tensor],
    before: list[Tensor] | None,
    after: list[Tensor],
    rows: int,
    known: bool,
) -> Gaps:
    """The seams' relative differences, and the largest ratio ‖after‖/‖before‖, if it is known.

    h and c are measured apart, each against its own largest norm at the seams of the same row,
    which also stands for what was there before, where that is not known. What moved by no more than
    rounding tells nothing about a ratio.
    """
    each, ratios = [], []
    for gap, end, b, a in zip(gaps, ends, before or [None] * len(gaps), after, strict=True):
        scale = _norms(end).view(-1, rows).amax(0)
        norms = _norms(gap).view(-1, rows)
        each.append(torch.where(norms == 0, 0, norms / scale).flatten())
        if b is None:
            ratios.append(each[-1].amax())
            continue
        moved, came = _norms(b), _norms(a)
        noise = 16 * torch.finfo(gap.dtype).eps * scale.amax()
        ratios.append(torch.where(moved > noise, came / moved, 0).amax())
    worst = torch.stack(each).amax(0)
    numbers = torch.cat([worst.view(-1, rows).amax(1), torch.stack(ratios).amax()[None]])
    *differences, contraction = numbers.tolist()
    return Gaps(differences, contraction if known else math.inf, worst)


def _norms(x: Tensor) -> Tensor:
    return x.norm(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
