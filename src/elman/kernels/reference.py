"""The reference kernel: the recurrence in plain PyTorch, any dtype, any device.

The oracle of the fast kernels, and what runs where there are none. It adds to the weight gradients
step by step, so a gradient does not change by one bit when time is cut into pieces.
"""

from typing import final

import torch
from torch import Tensor

from elman.cells import Gradients, State
from elman.gradients import through_time
from elman.kernels.contract import Piece, Pull, Trace


@final
class Reference:
    """Plain PyTorch, step by step."""

    name = "reference"

    def refuses(self, piece: Piece) -> str | None:
        return None

    def empty_gates(self, piece: Piece) -> Tensor | None:
        width = piece.cell.keeps * piece.w.hidden_size
        return piece.state[0].new_empty(*piece.xs.shape[:2], width) if width else None

    def forward(self, piece: Piece, needs_gates: bool = True) -> Trace:
        piece.check()
        cell, w, xs, state, lengths, noise = piece
        gates = self.empty_gates(piece) if needs_gates else None
        return through_time.forward(cell, w, xs, state, lengths, gates, noise)

    def backward(
        self, piece: Piece, trace: Trace, pull: Pull
    ) -> tuple[Tensor | None, Gradients, State]:
        piece.check()
        pull.check(piece, trace, piece.cell.keeps * piece.w.hidden_size)
        cell, w, xs, _, lengths, noise = piece
        dhs, dstate, xi, needs_dxs, into = pull
        dw = w.zeros() if into is None else into
        floating = needs_dxs and xs.is_floating_point()
        dxs = torch.empty_like(xs, memory_format=torch.contiguous_format) if floating else None
        dstate = through_time.backward(cell, w, xs, trace, dhs, dstate, xi, lengths, dxs, dw, noise)
        return dxs, dw, dstate


KERNEL = Reference()
