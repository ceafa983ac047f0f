"""Gradients of gradients of one layer in one direction, in two native calls: see twice.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from elman.gradients.through_time import Trace
from elman.kernels.cpu import library
from elman.kernels.cpu.calls import Asked
from elman.kernels.cpu.library import KINDS, LayerArguments, TwiceArguments, plain, pointer
from elman.kernels.cpu.recurrence import KERNEL


class Pulled(NamedTuple):
    """What pulls on all that a layer reads."""

    dxs: Tensor | None  # of the loss itself
    ddxs: Tensor | None
    ddfirst: list[Tensor]
    ddws: list[Tensor]


class Sizes(NamedTuple):
    """How many rows go on, of packed ones."""

    running: Tensor  # (1 + T,): at each step, and all of them before
    starts: Tensor  # (T + 1,): where each step's begin


@final
class Strand:
    """A layer in one direction around one forward pass, time in the order in which it met it.

    Rows of all steps lie one after the other; where fewer of them go on, `sizes` says how many.
    """

    def __init__(
        self,
        like: LayerArguments,
        weights: Sequence[Tensor],
        xs: Tensor,
        trace: Trace,
        sizes: Sizes | None,
    ) -> None:
        self.dtype = dtype = trace.hs.dtype
        self.xs, self.trace = plain(xs, dtype), trace
        self.weights = [plain(w, dtype) for w in weights]
        self.states, self.sizes = 1 if trace.cs is None else 2, sizes
        self.job = job = LayerArguments.from_buffer_copy(like)
        job.xs, job.hs, job.cs, job.gates = map(pointer, (self.xs, *trace))
        job.W_ih, job.W_hh, job.b_ih, job.b_hh = map(pointer, _padded(self.weights, 4))
        if sizes is not None:
            job.sizes, job.starts = pointer(sizes.running[1:]), pointer(sizes.starts)

    def along(
        self, xs: Tensor | None, weights: Sequence[Tensor | None], first: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """How its states change, (B + S, H) each, as what it reads changes by these."""
        tracks = [torch.empty_like(self.trace.hs) for _ in range(self.states)]
        kept = None if self.trace.gates is None else torch.empty_like(self.trace.gates)
        read = [plain(t, self.dtype) for t in (xs, *_padded(weights, 4), *_padded(first, 2))]
        self.change = read, tracks, kept
        self.arguments = TwiceArguments(
            *(ctypes.pointer(self.job), *map(pointer, (*read, *_padded(tracks, 2), kept)))
        )
        self._run("elman_along")
        return tracks

    def back(
        self,
        dhs: Tensor | None,
        dlast: Sequence[Tensor | None],
        ddhs: Tensor | None,
        needs_dxs: bool,
        asked: Asked,
    ) -> Pulled:
        """What pulls on all that it reads, after `along`, where these pull on what it wrote."""
        pulls = [plain(t, self.dtype) for t in (dhs, *_padded(dlast, 2), ddhs)]
        dxs = torch.empty_like(self.xs) if needs_dxs else None
        ddxs = torch.empty_like(self.xs) if asked.xs else None
        ddws = [torch.empty_like(w) for w in self.weights] if asked.weights else []
        first = self.trace.hs[: self.job.B]
        ddfirst = [torch.empty_like(h) for h in [first] * self.states * asked.states]
        job, found = self.job, self.arguments
        job.dhs, job.dh_T, job.dc_T, found.ddhs = map(pointer, pulls)
        job.dxs, found.ddxs = pointer(dxs), pointer(ddxs)
        found.ddW_ih, found.ddW_hh, found.ddb_ih, found.ddb_hh = map(pointer, _padded(ddws, 4))
        found.ddh_0, found.ddc_0 = map(pointer, _padded(ddfirst, 2))
        self._run("elman_back_twice")
        return Pulled(dxs, ddxs, ddfirst, ddws)

    def _run(self, entry: str) -> None:
        status = getattr(KERNEL.library, entry)(self.arguments, KINDS[self.dtype], KERNEL.level)
        library.check_memory(status)


def _padded(tensors: Sequence[Tensor | None], n: int) -> list[Tensor | None]:
    return [*tensors, *[None] * (n - len(tensors))]
