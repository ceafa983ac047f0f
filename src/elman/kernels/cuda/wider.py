"""Prepared calls of a stack that is run with more units than it has (`widths`)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from elman.cells import Weights
from elman.kernels.contract import Job
from elman.kernels.cuda import KERNEL, arithmetic
from elman.kernels.cuda.calls import Kept, Prepared, are_like
from elman.kernels.cuda.widths import narrowed


def prepared(job: Job, one_by_one: bool) -> Prepared | Wider:
    """Calls of the job's stack, with as many units as the kernel runs it with.

    They are found once for all modules with such a stack, and keep no weight but its shape.
    """
    xs, h = job.inputs[0], job.states[0][0]
    shapes = [(p.shape, p.dtype) for w in job.layers for p in w if p is not None]
    biased, how = job.layers[0].b_ih is not None, (arithmetic(h.dtype), one_by_one)
    piece = next(job.pieces())
    key = job.cell, KERNEL.width(piece), xs.shape, xs.dtype, xs.device, biased, *how, *shapes
    found = _PREPARED.get(key)
    if found is None:
        wide = KERNEL.widens(piece)
        found = Wider(job, one_by_one) if wide else Prepared(job, one_by_one)
        if not is_recorded(xs):
            if len(_PREPARED) > MOST:
                _PREPARED.clear()
            _PREPARED[key] = found
    return found


def is_recorded(xs: Tensor) -> bool:
    """Whether a graph is being recorded: what is made meanwhile is there when it is launched."""
    return xs.is_cuda and torch.cuda.is_current_stream_capturing()


_PREPARED: dict[Hashable, Prepared | Wider] = {}
MOST = 1000
"""Shapes that are kept: sequences may be of every length."""


@final
class Wider:
    """As `Prepared`, tensors being of the layer's own width outside and wider inside."""

    def __init__(self, job: Job, one_by_one: bool) -> None:
        piece = next(job.pieces())
        self.cell, self.hidden, self.size = job.cell, piece.w.hidden_size, KERNEL.width(piece)
        self.layers, self.widths = len(job.layers), job.cell.state_sizes(self.hidden)
        flat = [p for w in job.layers for p in w if p is not None]
        self.shapes, self.each = [(p.shape, p.dtype) for p in flat], len(flat) // self.layers
        self.dtype, self.device = flat[0].dtype, flat[0].device
        self.wide = [self._wide(at, p.shape) for at, p in enumerate(flat)]
        wide = self.read(flat)
        layers = [Weights(*wide[i : i + self.each]) for i in range(0, len(wide), self.each)]
        states = [tuple(map(self._pad, state)) for state in job.states]
        inner = replace(job, layers=layers, states=states)
        self.inner = Prepared(inner, one_by_one, self.hidden)
        self.steps, self.rows = self.inner.steps, self.inner.rows

    def _wide(self, at: int, shape: torch.Size) -> tuple[int, ...]:
        """The shape of the weight at this place: layers above the first read wide outputs."""
        layer, place = divmod(at, self.each)
        reads_wide = place == 1 or (place == 0 and layer > 0)
        columns = [self.size if reads_wide else n for n in shape[1:]]
        return (self.cell.gates * self.size, *columns)

    def suits(self, weights: Sequence[Tensor]) -> bool:
        """Whether these weights can be read as those that this was prepared for."""
        return are_like(weights, self.shapes) and weights[0].device == self.device

    @torch.no_grad()
    def read(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """The wider layers' weights, of the kernel's type; units that were added have none."""
        sizes = [math.prod(shape) for shape in self.wide]
        room = torch.zeros(sum(sizes), dtype=self.dtype, device=self.device)
        found = [p.view(shape) for p, shape in zip(room.split(sizes), self.wide, strict=True)]
        for wide, w in zip(found, weights, strict=True):
            own = wide.unflatten(0, (self.cell.gates, -1))[:, : self.hidden]
            own = own[..., : w.shape[1]] if w.dim() == 2 else own
            own.copy_(w.unflatten(0, (self.cell.gates, -1)))
        return found

    def begin(self, xs: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """As `Prepared.begin`, of what `read` gives."""
        return self.inner.begin(xs, weights)

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
        states, masks = [*map(self._pad, first)], [*map(self._pad, masks)]
        ys, last, kept = self.inner.forward(xs, states, weights, keep, masks, lengths, begun)
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
        wanted = needs_dxs, needs_dstate, [*map(self._pad, masks)], lengths
        dxs, dstate, dws = self.inner.backward(xs, weights, kept, pulls[0], pulls[1:], *wanted)
        return dxs, [*map(self._cut, dstate)], self._own(dws)

    def _pad(self, x: Tensor) -> Tensor:
        return pad(x, (0, self.size - x.shape[-1]))

    def _cut(self, x: Tensor) -> Tensor:
        return x[..., : self.hidden].contiguous()

    def _own(self, pulls: Sequence[Tensor]) -> list[Tensor]:
        """The pulls on the layer's own weights."""
        found = list[Tensor]()
        for i in range(0, len(pulls), self.each):
            w = narrowed(self.cell, Weights(*pulls[i : i + self.each]), self.hidden)
            W_ih = w.W_ih[:, : self.hidden] if i else w.W_ih
            found += [p for p in w._replace(W_ih=W_ih) if p is not None]
        return found
