"""Prepared calls of a stack that is run with more units than it has (`widths`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from torch import Tensor
from torch.nn.functional import pad

from elman.cells import Weights
from elman.kernels.contract import Job
from elman.kernels.cuda import KERNEL
from elman.kernels.cuda.calls import Kept, Prepared, are_like
from elman.kernels.cuda.widths import narrowed, widened


def prepared(job: Job, one_by_one: bool) -> Prepared | Wider:
    """Calls of the job's stack, with as many units as the kernel runs it with."""
    piece = next(job.pieces())
    return Wider(job, one_by_one) if KERNEL.widens(piece) else Prepared(job, one_by_one)


@final
class Wider:
    """As `Prepared`, tensors being of the layer's own width outside and wider inside."""

    def __init__(self, job: Job, one_by_one: bool) -> None:
        piece = next(job.pieces())
        self.cell, self.hidden, self.size = job.cell, piece.w.hidden_size, KERNEL.width(piece)
        self.layers, self.widths = len(job.layers), job.cell.state_sizes(self.hidden)
        flat = [p for w in job.layers for p in w if p is not None]
        self.shapes, self.each = [(p.shape, p.dtype) for p in flat], len(flat) // self.layers
        wide = self._weights(flat)
        layers = [Weights(*wide[i : i + self.each]) for i in range(0, len(wide), self.each)]
        states = [tuple(map(self._pad, state)) for state in job.states]
        inner = replace(job, layers=layers, states=states)
        self.inner = Prepared(inner, one_by_one, self.hidden)
        self.steps, self.rows = self.inner.steps, self.inner.rows
        self.dtype, self.device = self.inner.dtype, self.inner.device

    def suits(self, weights: Sequence[Tensor]) -> bool:
        """Whether these weights can be read as those that this was prepared for."""
        return are_like(weights, self.shapes) and weights[0].device == self.device

    def begin(self, xs: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """Nothing: weights are padded first."""
        return []

    def forward(
        self,
        xs: Tensor,
        first: Sequence[Tensor],
        weights: Sequence[Tensor],
        keep: bool,
        masks: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
        begun: list[Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...], list[Kept]]:
        """As `Prepared.forward`; what is kept is wide."""
        del begun
        states, masks = [*map(self._pad, first)], [*map(self._pad, masks)]
        wide = self._weights(weights)
        ys, last, kept = self.inner.forward(xs, states, wide, keep, masks, lengths)
        return self._cut(ys), tuple(map(self._cut, last)), kept

    def backward(
        self,
        xs: Tensor,
        weights: Sequence[Tensor],
        kept: Sequence[Kept],
        dys: Tensor | None,
        dlast: Sequence[Tensor | None],
        needs_dxs: bool,
        needs_dstate: bool,
        masks: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
    ) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        """As `Prepared.backward`."""
        pulls = [None if d is None else self._pad(d) for d in (dys, *dlast)]
        wide, drops = self._weights(weights), [*map(self._pad, masks)]
        wanted = needs_dxs, needs_dstate, drops, lengths
        dxs, dstate, dws = self.inner.backward(xs, wide, kept, pulls[0], pulls[1:], *wanted)
        return dxs, [*map(self._cut, dstate)], self._own(dws)

    def _pad(self, x: Tensor) -> Tensor:
        return pad(x, (0, self.size - x.shape[-1]))

    def _cut(self, x: Tensor) -> Tensor:
        return x[..., : self.hidden].contiguous()

    def _weights(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Layer after layer, those above the first reading wide outputs."""
        found = list[Tensor]()
        for i in range(0, len(weights), self.each):
            w = widened(self.cell, Weights(*weights[i : i + self.each]), self.size)
            W_ih = self._pad(w.W_ih) if i else w.W_ih
            found += [p for p in w._replace(W_ih=W_ih) if p is not None]
        return found

    def _own(self, pulls: Sequence[Tensor]) -> list[Tensor]:
        """The pulls on the layer's own weights."""
        found = list[Tensor]()
        for i in range(0, len(pulls), self.each):
            w = narrowed(self.cell, Weights(*pulls[i : i + self.each]), self.hidden)
            W_ih = w.W_ih[:, : self.hidden] if i else w.W_ih
            found += [p for p in w._replace(W_ih=W_ih) if p is not None]
        return found
