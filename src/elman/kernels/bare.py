"""The recurrence as a bare loop that autograd sees: for gradients of gradients.

Where the gradient is itself differentiated (`create_graph=True`) a kernel will not do: its backward
leaves no graph. This loop scales the gradient by ξ at each moment and leaves the rest to PyTorch,
on a GPU to its fused cells; it is slow, holds everything, and differentiates as often as asked.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from elman.cells import State
from elman.gradients.through_time import scale
from elman.kernels import fused
from elman.kernels.contract import Piece, Trace


class _ScaleGradient(torch.autograd.Function):
    """h forwards; ξ dh backwards, differentiably."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, xi: float | Tensor) -> Tensor:
        ctx.xi = xi
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return scale(grads[0], ctx.xi), None


def _steps_of(piece: Piece) -> Callable[[int, State], tuple[State, Tensor | None]]:
    """The step at t from the state before it, as the cell has it."""
    cell, w, xs, _, _, noise = piece

    def step(t: int, before: State) -> tuple[State, Tensor | None]:
        now = cell if noise is None else cell.given(noise[t])
        return now.step(w, xs[t], before)

    return step


@final
class Bare:
    """A kernel's `forward` with the carry ξ built in; autograd is its backward."""

    name = "bare"

    def __init__(self, xi: Tensor | None) -> None:
        self.xi = xi.tolist() if xi is not None and xi.dim() == 1 else xi

    def forward(self, piece: Piece, needs_gates: bool = True) -> Trace:
        xs, state, lengths, states = piece.xs, piece.state, piece.lengths, [piece.state]
        step = _steps_of(piece) if fused.KERNEL.refuses(piece) else fused.steps_of(piece)
        for t in range(len(xs)):
            before = state if self.xi is None else tuple(self._scaled(s, t) for s in state)
            after, _ = step(t, before)
            if lengths is not None:
                runs = (t < lengths)[:, None]
                after = tuple(torch.where(runs, a, s) for a, s in zip(after, state, strict=True))
            states.append(state := after)
        return Trace(*(torch.stack(s) for s in zip(*states, strict=True)))

    def _scaled(self, h: Tensor, t: int) -> Tensor:
        assert self.xi is not None
        return _ScaleGradient.apply(h, self.xi[t])  # pyright: ignore[reportReturnType]
