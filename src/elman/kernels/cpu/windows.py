"""Whole windows, forwards and back, in three native calls: see `elman.training.update`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from elman.errors import UserError
from elman.kernels.contract import Job, Piece, Trace, require
from elman.kernels.cpu import head, library
from elman.kernels.cpu.library import (
    CELLS,
    HeadArguments,
    LayerArguments,
    integers,
    is_plain,
    pointer,
)
from elman.kernels.cpu.recurrence import Cpu


@final
class Windows:
    """Windows of one shape, forwards and back: memory and arguments are made once.

    A call reads (T, B) ids and targets from `state` (h, or h and c, stacked as PyTorch does) on and
    leaves the gradient of the mean nats in `gradients`, beside the `weights` in their order.
    """

    def __init__(
        self,
        kernel: Cpu,
        job: Job,
        state: Sequence[Tensor],
        W_hq: Tensor,
        b_q: Tensor,
        kind: int,
    ) -> None:
        assert kernel.library is not None
        self.kernel, self.kind, self.state, self.layers = kernel, kind, state, job.layers
        self.shape = job.inputs[0].shape
        self.weights = [p for w in job.layers for p in w[:4] if p is not None] + [W_hq, b_q]
        self.gradients = [torch.empty_like(p) for p in self.weights]
        self.dtype, self.out = W_hq.dtype, (W_hq, b_q)
        self._check_job(job)
        self.nats = W_hq.new_empty(())
        self.traces: list[Trace] = []
        self.alive: list[Tensor] = []
        self.arguments, dhs = self._arguments(job)
        self.head = HeadArguments(
            **head.sizes(self.shape.numel(), W_hq),
            hs=pointer(self.traces[-1].hs[1:]),
            W=pointer(W_hq),
            b=pointer(b_q),
            nats=pointer(self.nats),
            dhs=pointer(dhs),
            dW=pointer(self.gradients[-2]),
            db=pointer(self.gradients[-1]),
        )

    def _check_job(self, job: Job) -> None:
        self.kernel.check(job)
        top = job.states[-1][0]
        require(head.expected(top, *self.out), top.device)
        shape = (len(job.layers), *top.shape)
        require(((f"state {i}", s, shape) for i, s in enumerate(self.state)), top.device)
        if len(self.state) != len(job.cell.states):
            raise UserError(f"{len(self.state)} states for a {job.cell.name} cell")
        self._check_tensors([*self.weights, *self.state])

    def _check_tensors(self, tensors: Sequence[Tensor]) -> None:
        for t in tensors:
            if not is_plain(t, self.dtype):
                raise UserError(
                    f"a weight is now {t.dtype} on {t.device}, or no longer row-major: "
                    f"it was {self.dtype} on cpu and row-major when training began",
                    hint="begin a new Training after moving a model or changing its type",
                )

    def _arguments(self, job: Job) -> tuple[list[LayerArguments], Tensor]:
        """Those of every layer, each reading the one below, and the last one's dhs."""
        T, B = self.shape
        H, like = job.layers[0].hidden_size, self.weights[0]
        two = len(job.cell.states) > 1
        zero, unused = [like.new_zeros(B, H) for _ in range(2)], like.new_empty(2, B, H)
        layers, below, dbelow, gradients = [], None, None, iter(self.gradients)
        dhs = like.new_empty(T, B, H)
        for i, w in enumerate(job.layers):
            hs, dhs = like.new_empty(T + 1, B, H), like.new_empty(T, B, H)
            cs = like.new_empty(T + 1, B, H) if two else None
            piece = Piece(job.cell, w, job.inputs[0], job.states[i])
            gates = self.kernel.empty_gates(piece)
            self.traces.append(Trace(hs, cs, gates))
            dW_ih, dW_hh, db_ih, db_hh = (None if p is None else next(gradients) for p in w[:4])
            layers.append(
                LayerArguments(
                    cell=CELLS.index(job.cell.name),
                    T=T,
                    B=B,
                    I=w.W_ih.shape[1],
                    H=H,
                    threads=torch.get_num_threads(),
                    xs=pointer(below),
                    W_ih=pointer(w.W_ih),
                    W_hh=pointer(w.W_hh),
                    b_ih=pointer(w.b_ih),
                    b_hh=pointer(w.b_hh),
                    h_0=pointer(self.state[0][i]),
                    c_0=pointer(self.state[1][i]) if two else None,
                    hs=pointer(hs),
                    cs=pointer(cs),
                    gates=pointer(gates),
                    dhs=pointer(dhs),
                    dh_T=pointer(zero[0]),
                    dc_T=pointer(zero[1]),
                    fresh=True,
                    dxs=pointer(dbelow),
                    dW_ih=pointer(dW_ih),
                    dW_hh=pointer(dW_hh),
                    db_ih=pointer(db_ih),
                    db_hh=pointer(db_hh),
                    dh_0=pointer(unused[0]),
                    dc_0=pointer(unused[1]),
                )
            )
            self.alive += [*zero, unused, dhs]
            below, dbelow = hs[1:], dhs
        return layers, dhs

    def __call__(self, ids: Tensor, targets: Tensor) -> float:
        """The mean nats of the targets after the ids, and all gradients."""
        native, rest = self.kernel.library, (self.kind, self.kernel.level)
        assert native is not None
        ids, targets = integers(ids, "ids"), integers(targets, "targets")
        self._point(ids, targets)
        for layer in self.arguments:
            self._check(native.elman_forward(layer, *rest), "ids", ids)
        self._check(native.elman_head(self.head, *rest), "targets", targets)
        for layer in reversed(self.arguments):
            self._check(native.elman_backward(layer, *rest), "ids", ids)
        return self.nats.item()

    def carry(self) -> None:
        """Let the next window start where this one ended."""
        for i, trace in enumerate(self.traces):
            for first, last in zip(self.state, trace.state(len(trace.hs) - 1), strict=True):
                first[i].copy_(last)

    def _point(self, ids: Tensor, targets: Tensor) -> None:
        """Weights may have moved in memory, and threads in number, since the last call."""
        if ids.shape != self.shape or targets.shape != self.shape:
            shapes = f"{tuple(ids.shape)} and targets {tuple(targets.shape)}"
            raise UserError(f"ids {shapes} for windows of {tuple(self.shape)}")
        self._check_tensors(self.weights)
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            if weight.shape != gradient.shape:
                raise UserError(
                    f"a weight has shape {tuple(weight.shape)}; when training began it was "
                    f"{tuple(gradient.shape)}",
                    hint="begin a new Training after changing a model's sizes",
                )
        self.arguments[0].ids, self.head.targets = pointer(ids), pointer(targets)
        self.head.W, self.head.b = map(pointer, self.out)
        self.head.threads = threads = torch.get_num_threads()
        for layer, w in zip(self.arguments, self.layers, strict=True):
            layer.W_ih, layer.W_hh, layer.b_ih, layer.b_hh = map(pointer, w[:4])
            layer.threads = threads

    def _check(self, status: int, name: str, ids: Tensor) -> None:
        if status == library.BAD_ID:
            raise IndexError(f"{name} from {int(ids.min())} to {int(ids.max())} are out of range")
        library.check_memory(status)
