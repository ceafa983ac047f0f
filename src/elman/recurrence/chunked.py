"""Time in chunks that run side by side, and what is certain about the result.

T steps are cut into C chunks of L steps; chunk i runs from s_i, a guess of the state before it, and
arrives at e_i = Φ_i(s_i). With S_i the state that step after step would give, the error ε_i =
s_i - S_i obeys

    ε_{i+1} = (s_{i+1} - e_i) + (Φ_i(s_i) - Φ_i(S_i)),        ε_0 = 0

which is exact. The first term is the seam's difference: it is computed. The second is what chunk i
leaves of an error that it began with: at most κ ‖ε_i‖, where κ is how much a chunk contracts. So

    ‖ε_{i+1}‖ ≤ ‖s_{i+1} - e_i‖ + κ ‖ε_i‖                                                  (bound)

κ is measured, as the largest ratio by which two trajectories came closer at any seam: the one from
nothing and the one of the chunk before over the overlap, later those of two sweeps over a chunk.
`diagnostics.forgetting` looks at all directions instead of at this one.

The guess s_i is what the `overlap` last steps of chunk i - 1 lead to from zero. Where the bound is
above the tolerance, chunks run again from the ends just found: every sweep moves what is known by a
whole chunk. A network that does not forget is run step after step.

Backward it is the same from the right, with pulls for states. The pull is linear in what comes from
the right, so a further sweep carries back only what the last one got wrong, and adds. What the
overlap adds to the gradients of the weights is thrown away: every step counts once.

`sweeps.py` has one sweep over all chunks, `seams.py` what is known of them from call to call.
`InChunks` is a kernel around another kernel, so carries, memories, layers, directions, dropout and
rows of different lengths meet it as they meet any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from elman.cells import Gradients, State
from elman.kernels import Kernel, Piece, Pull, Trace, prices
from elman.kernels.choice import arithmetic_name
from elman.recurrence.seams import LEAST, Chunks, Side
from elman.recurrence.sweeps import Backward, Cut, Forward

SHORT = 2 * LEAST
"""Steps below which time is never cut, so that a module need not ask."""
GAIN = 1.2
"""How much cheaper chunks must be expected to be."""
FULL = 1024
"""Rows from which on a GPU's steps take longer in proportion; none more were ever priced."""


def _cuts(steps: int, chunks: int, overlap: int) -> Iterator[Cut]:
    """As many chunks as were asked for, half as many, …; an overlap is within one chunk."""
    while chunks > 1:
        each = steps // chunks
        if each >= LEAST:
            yield Cut(chunks, each, steps - chunks * each, min(overlap, each))
        chunks //= 2


@final
class InChunks:
    """Another kernel, over chunks of time as rows of its batch."""

    def __init__(self, kernel: Kernel, chunks: Chunks) -> None:
        self.kernel, self.chunks, self.name = kernel, chunks, kernel.name

    def refuses(self, piece: Piece) -> str | None:
        return self.kernel.refuses(piece)

    def empty_gates(self, piece: Piece) -> Tensor | None:
        return self.kernel.empty_gates(piece)

    def forward(self, piece: Piece, needs_gates: bool = True) -> Trace:
        """Chunks from guesses, again from what was found, until they meet."""
        cut = self.cut(piece, "forward")
        if isinstance(cut, str):
            self.chunks.note("forward", self._stepped(piece, cut))
            return self.kernel.forward(piece, needs_gates)
        run = Forward(self.kernel, piece, cut, needs_gates)
        if self._sweep("forward", run, piece, cut):
            return run.result()
        return self.kernel.forward(piece, needs_gates)

    def backward(
        self, piece: Piece, trace: Trace, pull: Pull
    ) -> tuple[Tensor | None, Gradients, State]:
        """The same from the right."""
        cut = self.cut(piece, "backward")
        if isinstance(cut, str):
            self.chunks.note("backward", self._stepped(piece, cut))
            return self.kernel.backward(piece, trace, pull)
        run = Backward(self.kernel, piece, trace, pull, cut)
        if self._sweep("backward", run, piece, cut):
            return run.result()
        return self.kernel.backward(piece, trace, pull)

    def cut(self, piece: Piece, side: str) -> Cut | str:
        """Into which chunks this piece of time is cut, or why it is not."""
        if waits := self.chunks.waits(side):
            calls = "this call" if waits == 1 else f"this call and {waits - 1} more"
            return f"chunks did not meet lately, so {calls} of the {side} pass do without"
        steps, rows = piece.xs.shape[:2]
        needed, most = self.chunks.overlap(side), self.chunks.settings.sweeps
        fewest = steps
        best, cost = None, steps * _price(self.kernel, piece, rows) / GAIN
        for cut in _cuts(steps, self.chunks.settings.chunks, needed):
            sweeps = 1 + -(-(needed - cut.overlap) // cut.steps)
            if sweeps > min(most, cut.chunks):
                continue
            run = cut.head + cut.overlap + sweeps * cut.steps
            dear = run * _price(self.kernel, piece, cut.chunks * rows)
            fewest = min(fewest, run)
            if dear < cost:
                best, cost = cut, dear
        if best is not None:
            return best
        if fewest < steps / GAIN:
            return f"{rows:,} rows keep the {self.name} kernel busy: chunks would be no faster"
        return f"{steps:,} steps are too few for chunks that need {needed:,} steps to forget"

    def _stepped(self, piece: Piece, why: str) -> Side:
        return Side(1, 0, 1, 0.0, 0.0, 0.0, self._tolerance(piece), why)

    def _tolerance(self, piece: Piece) -> float:
        return max(self.chunks.settings.tolerance, _rounding(piece))

    def _sweep(self, side: str, run: Forward | Backward, piece: Piece, cut: Cut) -> bool:
        """Sweep until the bound is within the tolerance; False: it would take too many sweeps."""
        tolerance, most = self._tolerance(piece), min(self.chunks.settings.sweeps, cut.chunks)
        gaps = first = run.first()
        hopeless = 1 <= first.contraction < math.inf or not first.largest < math.inf
        sweep = 1
        while not (met := gaps.bound() <= tolerance) and sweep < most and not hopeless:
            before, gaps = gaps, run.again(gaps.rows_above(tolerance / 16))
            sweep += 1
            shrinks = gaps.largest / before.largest  # and so will do, it is assumed, every other
            hopeless = not gaps.largest * shrinks ** (most - sweep) <= tolerance
        result = Side(
            cut.chunks,
            cut.overlap,
            sweep,
            gaps.largest,
            gaps.contraction,
            gaps.bound(),
            tolerance,
        )
        if met:
            self.chunks.met(side, result, first.largest)
            return True
        why = (
            f"after {sweep} of {most} sweeps chunks are apart by {result.difference:.1e} "
            f"and come closer by a factor of {result.contraction:.1e}"
        )
        self.chunks.missed(side, replace(result, stepped=why))
        return False


def _rounding(piece: Piece) -> float:
    """Of the numbers that are multiplied: two trajectories never come closer than this for sure."""
    dtype = piece.w.W_hh.dtype
    if piece.xs.is_cuda and dtype == torch.float32 and arithmetic_name(dtype) == "tf32":
        dtype = torch.bfloat16  # ten bits, but of a state that is on no grid: it never quite meets
    return torch.finfo(dtype).eps


def _price(kernel: Kernel, piece: Piece, rows: int) -> float:
    """What a step of so many rows costs, beside one of other numbers of rows."""
    w, name = piece.w, kernel.name
    if name == "cuda":
        cell = "tanh" if piece.cell.gates == 1 else piece.cell.name
        shape = (cell, arithmetic_name(w.W_hh.dtype), w.hidden_size, rows)
        line = prices.step("cuda", *shape)
        return 1 + rows / 64 if line is None else line * max(1.0, rows / FULL)
    if not piece.xs.is_cpu:
        return 1 + rows / 1024  # kernels of a step each: their number costs, not their size
    return 1 + rows  # measured: 2.1 times dearer for one row alone than for one of eight or more
