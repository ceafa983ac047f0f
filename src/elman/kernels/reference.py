"""The reference kernel: the recurrence in plain PyTorch, any dtype, any device.

The oracle of the fast kernels, and what runs where there are none. It adds to the weight gradients
step by step, so a gradient does not change by one bit when time is cut into pieces.
"""

from typing import final

import torch
from torch import Tensor

from elman import cells
from elman.cells import Gradients, State, Weights
from elman.gradients import through_time
from elman.gradients.through_time import Trace


@final
class Reference:
    """Plain PyTorch, step by step."""

    name = "reference"

    def refuses(self, cell: str, w: Weights, xs: Tensor, state: State) -> str | None:
        return None

    def empty_gates(self, cell: str, w: Weights, xs: Tensor, state: State) -> Tensor | None:
        width = cells.named(cell).keeps * w.hidden_size
        return state[0].new_empty(*xs.shape[:2], width) if width else None

    def forward(
        self,
        cell: str,
        w: Weights,
        xs: Tensor,
        state: State,
        lengths: Tensor | None = None,
        needs_gates: bool = True,
    ) -> Trace:
        gates = self.empty_gates(cell, w, xs, state) if needs_gates else None
        return through_time.forward(cells.named(cell), w, xs, state, lengths, gates)

    def backward(
        self,
        cell: str,
        w: Weights,
        xs: Tensor,
        trace: Trace,
        dhs: Tensor | None,
        dstate: State,
        xi: Tensor | None,
        lengths: Tensor | None = None,
        needs_dxs: bool = True,
        into: Gradients | None = None,
    ) -> tuple[Tensor | None, Gradients, State]:
        dw = w.zeros() if into is None else into
        floating = needs_dxs and xs.is_floating_point()
        dxs = torch.empty_like(xs, memory_format=torch.contiguous_format) if floating else None
        dstate = through_time.backward(
            cells.named(cell), w, xs, trace, dhs, dstate, xi, lengths, dxs, dw
        )
        return dxs, dw, dstate


KERNEL = Reference()
