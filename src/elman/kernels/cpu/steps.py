"""Layers and an output layer, one step at a time: see `elman.language_model.stepper`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from elman.cells import Cell
from elman.errors import UserError
from elman.kernels.contract import Job, require
from elman.kernels.cpu import head, library
from elman.kernels.cpu.library import (
    CELLS,
    CPU,
    KINDS,
    LayerArguments,
    RulesArguments,
    integers,
    plain,
    pointer,
)
from elman.kernels.cpu.recurrence import Cpu, real_of


@final
class Steps:
    """Memory and arguments are made once; a call reads one id per row and gives its logits.

    An id is a one-hot row, or the row of an embedding E.
    """

    def __init__(
        self, kernel: Cpu, job: Job, W_hq: Tensor, b_q: Tensor | None, E: Tensor | None = None
    ) -> None:
        assert kernel.library is not None
        kernel.check(job)
        top = job.states[-1][0]
        require(head.expected(top, W_hq, b_q), top.device)
        real, rows = real_of(job.layers[0]), top.shape[0]
        self.states = [tuple(torch.stack([s, s]).to(real) for s in state) for state in job.states]
        self.shape, self.dtype = (rows, len(W_hq)), real
        self.E = _lasting(E, real)
        self.inputs = job.layers[0].W_ih.shape[1] if E is None else len(E)
        self.alive = [[_lasting(p, real) for p in w[:4]] for w in job.layers]
        self.out = (_lasting(W_hq, real), _lasting(b_q, real))
        self.weights = [p for w in (*self.alive, self.out) for p in w if p is not None]
        self.cell, self.native = job.cell, kernel.library
        self.rest = (len(W_hq), KINDS[real], kernel.level)
        self._point()

    def _aim(self) -> None:
        """Say anew where everything lies, if it moved: `share_memory` does that."""
        if [*map(Tensor.data_ptr, self.weights)] != self.places:
            self._point()

    def _point(self) -> None:
        """Say where everything lies."""
        self.places = [*map(Tensor.data_ptr, self.weights)]
        self.layers = (LayerArguments * len(self.alive))(*self._layers(self.cell))
        self.where = (self.layers, len(self.layers), *map(pointer, self.out))

    def _layers(self, cell: Cell) -> Iterator[LayerArguments]:
        below: Tensor | None = None  # what the first layer reads is known at each call
        for (W_ih, W_hh, b_ih, b_hh), (h, *c) in zip(self.alive, self.states, strict=True):
            assert W_ih is not None
            assert W_hh is not None
            yield LayerArguments(
                cell=CELLS.index(cell.name),
                T=1,
                B=self.shape[0],
                I=W_ih.shape[1],
                H=W_hh.shape[1],
                threads=torch.get_num_threads(),
                xs=pointer(below),
                W_ih=pointer(W_ih),
                W_hh=pointer(W_hh),
                b_ih=pointer(b_ih),
                b_hh=pointer(b_hh),
                h_0=pointer(h[1]),
                c_0=pointer(c[0][1]) if c else None,
                hs=pointer(h),
                cs=pointer(c[0]) if c else None,
            )
            below = h[1]

    def __call__(self, ids: Tensor) -> Tensor:
        """The logits (rows, outputs) after reading ids (rows,)."""
        if ids.shape != self.shape[:1]:
            raise UserError(f"ids of shape {tuple(ids.shape)} for {self.shape[0]} rows")
        self._aim()
        ids, y = integers(ids, "ids"), torch.empty(self.shape, dtype=self.dtype, device=CPU)
        xs = None if self.E is None else self._looked_up(ids, self.E)
        self.layers[0].ids, self.layers[0].xs = pointer(ids if xs is None else None), pointer(xs)
        status = self.native.elman_step(*self.where, pointer(y), *self.rest)
        if status == library.BAD_ID:
            raise library.out_of_range("ids", ids, self.inputs, "inputs")
        library.check_memory(status)
        return y

    def write(
        self, logits: Tensor, rules: RulesArguments, last: Tensor | None, chances: Tensor | int
    ) -> Tensor:
        """Draw a token for each row from the logits, read it, and so on: (length, rows) of them.

        For each draw a row of chances, or how many draws if none is needed. The `last` tokens of
        the call before are read first; those of this call are left to the next. The logits, which
        must lie as a step's do, are the last ones afterwards. A row of which some are below 0 is
        none: its scores were not numbers one can draw from.
        """
        self._aim()
        length = chances if isinstance(chances, int) else len(chances)
        tokens = torch.full((length, self.shape[0]), -1, dtype=torch.int64, device=CPU)
        status = self.native.elman_write(
            *(*self.where, pointer(logits), self.rest[0], pointer(self.E), rules, pointer(last)),
            *(length, None if isinstance(chances, int) else pointer(chances), pointer(tokens)),
            *self.rest[1:],
        )
        library.check_memory(status)
        return tokens

    def search(
        self,
        logits: Tensor,
        rules: RulesArguments,
        last: tuple[Tensor, Tensor] | None,
        sums: Tensor,
        length: int,
    ) -> tuple[Tensor, Tensor] | None:
        """Continue the texts of a beam: which row each new one continues, and with what token.

        Both (length, rows); None where scores were not numbers. `sums` of log p (rows,) move on; -∞
        is no text. Of the rules only what is excluded counts. As in `write`, the `last` of the call
        before are read first.
        """
        self._aim()
        rows, tokens = torch.zeros(2, length, self.shape[0], dtype=torch.int64, device=CPU)
        before, read = (None, None) if last is None else last
        status = self.native.elman_search(
            *(*self.where, pointer(logits), self.rest[0], pointer(self.E), rules, pointer(before)),
            *(pointer(read), length, pointer(sums), pointer(rows), pointer(tokens)),
            *self.rest[1:],
        )
        library.check_memory(status)
        return None if status == library.NO_NUMBERS else (rows, tokens)

    def _looked_up(self, ids: Tensor, E: Tensor) -> Tensor:
        if not 0 <= int(ids.min()) <= int(ids.max()) < len(E):
            raise library.out_of_range("ids", ids, len(E), "inputs")
        return E.index_select(0, ids)


def rules_of(
    temperature: float, top_k: int | None, top_p: float | None, exclude: Sequence[int]
) -> RulesArguments:
    """What may be written next, and how likely it is: `struct Rules` of job.h."""
    normal = max(float(temperature), sys.float_info.min)  # smaller numbers count as 0 there
    excluded = (ctypes.c_int64 * len(exclude))(*exclude)
    return RulesArguments(
        temperature=normal if temperature > 0 else 0,
        top_p=1 if top_p is None else float(top_p),
        top_k=2**63 - 1 if top_k is None else top_k,
        exclude=excluded,
        excluded=len(exclude),
    )


def _lasting(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """As `plain`, in memory that stays even if the module is moved or changes its type."""
    return None if t is None else plain(t.detach(), dtype)
