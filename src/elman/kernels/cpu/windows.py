"""Whole windows, forwards and back, in three native calls: see `elman.training.native_update`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from elman.errors import OutOfRange, UserError
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


class Ends(NamedTuple):
    """What lies before and after the recurrence; W_hq is E itself where they are tied."""

    E: Tensor | None  # (V, I); None: ids are one-hot rows
    W_hq: Tensor  # (V, H)
    b_q: Tensor  # (V,)

    @property
    def tied(self) -> bool:
        """Whether the output layer uses the embedding."""
        return self.E is self.W_hq


class Hidden(NamedTuple):
    """Factors of what is hidden in one window; None (or nothing): all is seen."""

    inputs: Tensor | None = None  # (B, I), of every step's embeddings
    outputs: Tensor | None = None  # (B, H), of every step's h_t on its way to the output
    recurrent: Sequence[Tensor] = ()  # a layer each, of W_hh
    between: Sequence[Tensor] = ()  # (T, B, H) each, of what a layer hands to the one above


NOTHING = Hidden()


@final
class Windows:
    """Windows of one shape, forwards and back: memory and arguments are made once.

    A call reads (T, B) ids and targets from `state` (h, or h and c, stacked as PyTorch does) on and
    leaves the gradient of the mean nats in `gradients`, beside the `weights` in their order.

    `by_token` multiplies W_ih by every token of the embedding once, instead of at every step, and
    sums the pulls of equal tokens before they are multiplied: fewer products where a window has
    more steps than the vocabulary tokens. No input can then be hidden. h_t keeps its bits; of the
    gradients, those of W_ih and E are summed in another order.
    """

    def __init__(
        self,
        kernel: Cpu,
        job: Job,
        state: Sequence[Tensor],
        ends: Ends,
        kind: int,
        *,
        by_token: bool = False,
    ) -> None:
        assert kernel.library is not None
        self.kernel, self.native, self.rest = kernel, kernel.library, (kind, kernel.level)
        self.state, self.layers = state, job.layers
        self.shape, self.ends = job.inputs[0].shape[:2], ends
        inside = [p for w in job.layers for p in w[:4] if p is not None]
        first = [] if ends.E is None or ends.tied else [ends.E]
        self.weights = [*first, *inside, ends.W_hq, ends.b_q]
        self.gradients = [torch.empty_like(p) for p in self.weights]
        self.dtype = ends.W_hq.dtype
        self._check_job(job)
        self.nats = ends.W_hq.new_empty(())
        self.traces: list[Trace] = []
        self.dhs: list[Tensor] = []
        by_step = ends.E is not None and not by_token
        self.xs = ends.W_hq.new_empty(job.inputs[0].shape) if by_step else None
        self.dxs = None if self.xs is None else torch.empty_like(self.xs)
        self.firsts = [[s[i] for s in state] for i in range(len(job.layers))]
        self.dws: list[list[Tensor | None]] = []
        self.at_hand = [*self.weights, *self.gradients, *state]  # of the caller, who may move them
        self.places: list[int] = []
        self.thinned: list[Tensor] = []
        self.read: list[Tensor] = []
        self.shown: list[Tensor] = []
        self.arguments = self._arguments(job, iter(self.gradients[len(first) :]))
        self.dE: Tensor | None = None
        if ends.E is not None:
            self.dE = torch.empty_like(ends.E) if ends.tied else self.gradients[0]
            self.arguments[0].V = len(ends.E)
        self.head = HeadArguments(
            **head.sizes(self.shape.numel(), ends.W_hq),
            nats=pointer(self.nats),
            dhs=pointer(self.dhs[-1]),
        )

    def _check_job(self, job: Job) -> None:
        self.kernel.check(job)
        top = job.states[-1][0]
        require(head.expected(top, self.ends.W_hq, self.ends.b_q), top.device)
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

    def _arguments(self, job: Job, gradients: Iterator[Tensor]) -> list[LayerArguments]:
        """Those of every layer, each reading the one below."""
        T, B = self.shape
        H, like = job.layers[0].hidden_size, self.weights[0]
        two = len(job.cell.states) > 1
        self.zero = zero = like.new_zeros(B, H)
        layers, below, dbelow = [], self.xs, self.dxs
        for i, w in enumerate(job.layers):
            hs, dhs = like.new_empty(T + 1, B, H), like.new_empty(T, B, H)
            cs = like.new_empty(T + 1, B, H) if two else None
            piece = Piece(job.cell, w, job.inputs[0], job.states[i])
            gates = self.kernel.empty_gates(piece)
            self.traces.append(Trace(hs, cs, gates))
            self.dhs.append(dhs)
            self.dws.append([None if p is None else next(gradients) for p in w[:4]])
            layers.append(
                LayerArguments(
                    cell=CELLS.index(job.cell.name),
                    T=T,
                    B=B,
                    I=w.W_ih.shape[1],
                    H=H,
                    xs=pointer(below),
                    hs=pointer(hs),
                    cs=pointer(cs),
                    gates=pointer(gates),
                    dhs=pointer(dhs),
                    dh_T=pointer(zero),
                    dc_T=pointer(zero) if two else None,
                    fresh=True,
                    dxs=pointer(dbelow),
                )
            )
            below, dbelow = hs[1:], dhs
        return layers

    def __call__(
        self, ids: Tensor, targets: Tensor, hidden: Hidden = NOTHING, weight: float = 1.0
    ) -> float:
        """The mean nats of the targets after the ids, and all gradients, times `weight`."""
        ids, targets = integers(ids, "ids"), integers(targets, "targets")
        self._point(ids, targets)
        with torch.no_grad():
            self._forward(ids, hidden)
            if weight == 1 and hidden.outputs is None:
                self._backward(ids, hidden, targets)
            else:
                self._out(targets, hidden, weight)
                self._backward(ids, hidden)
        return self.nats.item()

    def _forward(self, ids: Tensor, hidden: Hidden) -> None:
        assert hidden.inputs is None or self.xs is not None, "nothing is hidden by token"
        if self.xs is not None and self.ends.E is not None:
            self._check_range(ids, len(self.ends.E))
            torch.index_select(self.ends.E, 0, ids.view(-1), out=self.xs.flatten(0, 1))
            if hidden.inputs is not None:
                self.xs.mul_(hidden.inputs)
        for i, layer in enumerate(self.arguments):
            if hidden.recurrent:
                W_hh = _product(self.thinned, i, self.layers[i].W_hh, hidden.recurrent[i])
                layer.W_hh = W_hh.data_ptr()
            if i > 0 and hidden.between:
                below = self.traces[i - 1].hs[1:]
                layer.xs = _product(self.read, i - 1, below, hidden.between[i - 1]).data_ptr()
            self._check(self.native.elman_forward(layer, *self.rest), ids)

    def _out(self, targets: Tensor, hidden: Hidden, weight: float) -> None:
        """Loss and pull on h_1 … h_T."""
        hs, dhs = self.traces[-1].hs[1:], self.dhs[-1]
        if hidden.outputs is not None:
            hs = _product(self.shown, 0, hs, hidden.outputs)
        self.head.hs = hs.data_ptr()
        self._check(self.native.elman_head(self.head, *self.rest), targets)
        if weight != 1:
            for d in (dhs, *self.gradients[-2:]):
                d.mul_(weight)
        if hidden.outputs is not None:
            dhs.mul_(hidden.outputs)

    def _backward(self, ids: Tensor, hidden: Hidden, targets: Tensor | None = None) -> None:
        """From the pull on h_1 … h_T, or from targets whose loss pulls as it is found."""
        self.arguments[-1].head = None if targets is None else ctypes.addressof(self.head)
        for i in reversed(range(len(self.arguments))):
            status = self.native.elman_backward(self.arguments[i], *self.rest)
            self._check(status, targets if status == library.BAD_TARGET else ids)
            if hidden.recurrent and (dW_hh := self.dws[i][1]) is not None:
                dW_hh.mul_(hidden.recurrent[i])
            if i > 0 and hidden.between:
                self.dhs[i - 1].mul_(hidden.between[i - 1])
        if self.dE is None:
            return
        if self.dxs is not None:
            if hidden.inputs is not None:
                self.dxs.mul_(hidden.inputs)
            back = torch.ops.aten.embedding_dense_backward
            self.dE.copy_(back(self.dxs, ids, len(self.dE), -1, False))
        if self.ends.tied:
            self.gradients[-2].add_(self.dE)

    def carry(self) -> None:
        """Let the next window start where this one ended."""
        for i, trace in enumerate(self.traces):
            for first, last in zip(self.state, trace.state(len(trace.hs) - 1), strict=True):
                first[i].copy_(last)

    def _point(self, ids: Tensor, targets: Tensor) -> None:
        """Say what this call reads; and where it lies, if that has changed since the last one."""
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
        places = [t.data_ptr() for t in self.at_hand]
        if places != self.places:
            self._point_anew()
            self.places = places
        self.head.hs, self.head.targets = self.traces[-1].hs[1:].data_ptr(), pointer(targets)
        if self.xs is None:
            self.arguments[0].ids = pointer(ids)
        self.head.threads = threads = torch.get_num_threads()
        for layer, w in zip(self.arguments, self.layers, strict=True):
            layer.W_hh, layer.threads = pointer(w.W_hh), threads
        for layer, trace in zip(self.arguments[1:], self.traces, strict=False):
            layer.xs = trace.hs[1:].data_ptr()

    def _point_anew(self) -> None:
        """Say where the caller's tensors lie: an assignment to `.data` and `share_memory` move
        them."""
        if self.xs is None:
            self.arguments[0].E = pointer(self.ends.E)
        self.arguments[0].dE = pointer(self.dE)
        self.head.W, self.head.b = map(pointer, self.ends[1:])
        self.head.dW, self.head.db = map(pointer, self.gradients[-2:])
        lists = self.arguments, self.layers, self.dws, self.firsts
        for layer, w, dw, (h, *c) in zip(*lists, strict=True):
            layer.W_ih, layer.W_hh, layer.b_ih, layer.b_hh = map(pointer, w[:4])
            layer.dW_ih, layer.dW_hh, layer.db_ih, layer.db_hh = map(pointer, dw)
            layer.h_0, layer.c_0 = pointer(h), pointer(c[0]) if c else None

    def _check(self, status: int, read: Tensor | None) -> None:
        name = {library.BAD_ID: "ids", library.BAD_TARGET: "targets"}.get(status)
        if name is not None and read is not None:
            raise OutOfRange(
                f"{name} from {int(read.min())} to {int(read.max())} are out of range",
                hint="they are those of the vocabulary that the model was built for",
            )
        library.check_memory(status)

    def _check_range(self, ids: Tensor, size: int) -> None:
        low, high = ids.aminmax()
        self._check(library.BAD_ID if low < 0 or high >= size else library.OK, ids)


def _product(kept: list[Tensor], place: int, a: Tensor, b: Tensor) -> Tensor:
    """a ⊙ b, where the last one lay."""
    if place == len(kept):
        kept.append(torch.empty_like(a))
    return torch.mul(a, b, out=kept[place])
