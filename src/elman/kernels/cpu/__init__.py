"""The CPU kernel: the whole recurrence in one native call each way.

The C++ beside this file runs a layer over a piece of time without coming back to Python: the input
product (or the lookup of ids), then the steps, threads splitting the batch; backwards the same,
then each weight gradient as one large product. float32 and float64; weights in bfloat16, multiplied
in pairs and summed in float32, where the processor has the instruction.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import final, overload

import torch
from torch import Tensor

from elman import kernels
from elman.errors import UserError
from elman.gradients.through_time import Trace
from elman.kernels import Gradients, State, Weights
from elman.kernels.cpu import library
from elman.kernels.cpu.library import CELLS, DOUBLE, FASTEST, FLOAT, GIVEN, HALF, Head, Job

_KINDS = {torch.float32: FLOAT, torch.float64: DOUBLE, torch.bfloat16: HALF}


@final
class Cpu:
    """C++, torch's threads; `level` holds it to older processors' instructions (tests)."""

    name = "cpu"

    def __init__(self, level: int = FASTEST) -> None:
        self.level = level
        self.file = library.path()
        self.library = None if self.file is None else library.load(self.file)

    def refuses(self, cell: str, w: Weights, xs: Tensor, state: State) -> str | None:
        if self.library is None:
            return "it was not built: the installation found no working C++ compiler"
        if xs.device.type != "cpu":
            return f"the input is on {xs.device}"
        if w.W_hr is not None:
            return "an lstm with proj_size is left to the reference"
        if w.W_hh.dtype not in _KINDS:
            return f"the weights are {w.W_hh.dtype}; it runs float32, float64 and bfloat16"
        if w.W_hh.dtype == torch.bfloat16 and self.variant(HALF) is None:
            return "this processor has no bfloat16 products"
        return _other_dtypes(w, xs, state)

    def variant(self, kind: int = FLOAT) -> str | None:
        """The instruction set in use; None where there is no such kind on this processor."""
        assert self.library is not None
        name = self.library.elman_variant(kind, self.level)
        return name and name.decode()

    def is_machine_busy(self) -> bool:
        """Whether torch's threads were lately kept waiting by other programs."""
        return self.library is not None and bool(self.library.elman_is_busy())

    def empty_gates(self, cell: str, w: Weights, xs: Tensor, state: State) -> Tensor | None:
        if cell not in ("gru", "lstm"):
            return None
        return state[0].new_empty(*xs.shape[:2], 4 * w.hidden_size, dtype=_real(w))

    def forward(
        self,
        cell: str,
        w: Weights,
        xs: Tensor,
        state: State,
        lengths: Tensor | None = None,
        needs_gates: bool = True,
    ) -> Trace:
        real = _real(w)
        shape = (xs.shape[0] + 1, *state[0].shape)
        h_0, c_0 = plain(state[0], real), plain(_memory(state), real)
        hs = torch.empty(shape, dtype=real)
        cs = None if c_0 is None else torch.empty(shape, dtype=real)
        gates = self.empty_gates(cell, w, xs, state) if needs_gates else None
        read = _read(w, xs, lengths, real)
        self._run("elman_forward", cell, w, xs, (*read, h_0, c_0, hs, cs, gates))
        if state[0].dtype == real:
            return Trace(hs, cs, gates)
        return Trace(hs.to(state[0].dtype), None if cs is None else cs.to(state[1].dtype), gates)

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
        real = _real(w)
        if into is None:
            dw = w.map(lambda p: torch.empty(p.shape, dtype=real))
            sums = dw[:4]
        else:
            dw, sums = into, [plain(d, real) for d in into[:4]]
        wanted = needs_dxs and xs.is_floating_point()
        dxs = torch.empty(xs.shape, dtype=real) if wanted else None
        dh_T, dc_T = plain(dstate[0], real), plain(_memory(dstate), real)
        dh_0, dc_0 = torch.empty_like(dh_T), None if dc_T is None else torch.empty_like(dc_T)
        kept = (None, None, *(plain(t, real) for t in trace))
        pulls = (plain(dhs, real), dh_T, dc_T, xi := plain(xi, real))
        found = (dxs, *sums, dh_0, dc_0)
        read = _read(w, xs, lengths, real)
        rows = xi is not None and xi.dim() == 2
        how = (rows, into is None)
        self._run("elman_backward", cell, w, xs, (*read, *kept, *pulls), how, found)
        if into is not None:
            for d, total in zip(into, sums, strict=False):
                if d is not None and total is not None and d is not total:
                    d.copy_(total)
        befores = (dh_0,) if dc_0 is None else (dh_0, dc_0)
        if dstate[0].dtype != real:
            befores = tuple(d.to(dstate[0].dtype) for d in befores)
        return None if dxs is None else dxs.to(xs.dtype), dw, befores

    def steps(self, job: kernels.Job, W_hq: Tensor, b_q: Tensor | None) -> Steps:
        """The same layers and an output layer, one step at a time."""
        return Steps(self, job, W_hq, b_q)

    def heads(self, hs: Tensor, W_hq: Tensor, b_q: Tensor | None) -> bool:
        """Whether the output layer of `elman.language_model.loss` runs here.

        bfloat16 states and float32 weights meet under autocast: multiplied as bfloat16 pairs.
        """
        if self.library is None or not hs.is_cpu:
            return False
        half = hs.dtype == torch.bfloat16
        real = torch.float32 if half else hs.dtype
        known = real == torch.float32 or real == torch.float64
        same = W_hq.dtype == real and (b_q is None or b_q.dtype == real)
        return known and same and (not half or self.variant(HALF) is not None)

    def head(
        self,
        hs: Tensor,
        W_hq: Tensor,
        b_q: Tensor | None,
        targets: Tensor,
        needs: tuple[bool, bool] = (False, False),
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The mean nats, and their pulls on hs (if the first is needed), W_hq and b_q."""
        assert self.library is not None
        real = W_hq.dtype
        nats = torch.empty((), dtype=real)
        given = [plain(hs, real), W_hq.contiguous(), b_q, plain(targets, torch.int64)]
        dhs = torch.empty(hs.shape, dtype=real) if needs[0] else None
        dW_hq = torch.empty(W_hq.shape, dtype=real) if needs[1] else None
        db_q = torch.empty(b_q.shape, dtype=real) if needs[1] and b_q is not None else None
        rows, batch = targets.numel(), _batch(targets.numel())
        head = Head(
            *(rows // batch, batch, hs.shape[-1], len(W_hq), torch.get_num_threads()),
            *map(_pointer, (*given, nats, dhs, dW_hq, db_q)),
        )
        status = self.library.elman_head(head, _KINDS[hs.dtype], self.level)
        if status == library.BAD_ID:
            low, high = int(targets.min()), int(targets.max())
            raise IndexError(f"targets from {low} to {high} index {len(W_hq)} outputs")
        _check_memory(status)
        return nats, [None if dhs is None else dhs.to(hs.dtype), dW_hq, db_q]

    def clip(self, gradients: Sequence[Tensor], theta: float) -> float | None:
        """g ← min(1, θ/‖g‖) g in place, all together; returns ‖g‖. None: not for this kernel."""
        kind = _KINDS.get(gradients[0].dtype) if gradients else None
        if self.library is None or kind not in (FLOAT, DOUBLE):
            return None
        for g in gradients:
            same = g.dtype == gradients[0].dtype and g.device.type == "cpu"
            if not (same and g.layout == torch.strided and g.is_contiguous()):
                return None
        n = len(gradients)
        arrays = (ctypes.c_void_p * n)(*[g.data_ptr() for g in gradients])
        sizes = (ctypes.c_int64 * n)(*[g.numel() for g in gradients])
        threads = torch.get_num_threads()
        norm = self.library.elman_clip(arrays, sizes, n, theta, threads, kind, self.level)
        _check_memory(library.NO_MEMORY if norm < 0 else library.OK)
        return norm

    def _run(
        self,
        function: str,
        cell: str,
        w: Weights,
        xs: Tensor,
        given: Sequence[Tensor | None],
        how: tuple[bool, bool] = (False, True),
        found: Sequence[Tensor | None] = (),
    ) -> None:
        """Call the library; the tensors stay alive in the caller's hands while it runs."""
        steps, batch = xs.shape[:2]
        sizes = (CELLS.index(cell), steps, batch, w.W_ih.shape[1], w.W_hh.shape[1])
        pointers = [None if t is None else t.data_ptr() for t in given]
        pointers += [None] * (GIVEN - len(pointers))
        results = [None if t is None else t.data_ptr() for t in found]
        job = Job(*sizes, torch.get_num_threads(), *pointers, *how, *results)
        status = getattr(self.library, function)(job, _KINDS[w.W_hh.dtype], self.level)
        if status == library.BAD_ID:
            low, high = int(xs.min()), int(xs.max())
            raise IndexError(f"ids from {low} to {high} index {w.W_ih.shape[1]} inputs")
        _check_memory(status)


@final
class Steps:
    """Layers that go one step at a time: memory and jobs are made once (see `stepper.py`)."""

    def __init__(self, kernel: Cpu, job: kernels.Job, W_hq: Tensor, b_q: Tensor | None) -> None:
        assert kernel.library is not None
        real, rows = _real(job.layers[0]), job.states[0][0].shape[0]
        self.states = [tuple(torch.stack([s, s]).to(real) for s in state) for state in job.states]
        self.shape, self.dtype = (rows, len(W_hq)), real
        self.inputs = job.layers[0].W_ih.shape[1]
        self.alive = [[_lasting(p, real) for p in w[:4]] for w in job.layers]
        self.out = (_lasting(W_hq, real), _lasting(b_q, real))
        self.jobs = (Job * len(job.layers))(*self._jobs(job.cell))
        self.run = functools.partial(kernel.library.elman_step, self.jobs, len(self.jobs))
        self.run = functools.partial(self.run, *map(_pointer, self.out))
        self.how = (len(W_hq), _KINDS[real], kernel.level)

    def _jobs(self, cell: str) -> Iterator[Job]:
        below: Tensor | None = None
        for weights, (h, *c) in zip(self.alive, self.states, strict=True):
            W_ih, W_hh = weights[0], weights[1]
            assert W_ih is not None
            assert W_hh is not None
            tracks = (h[1], c[0][1] if c else None, h, c[0] if c else None)
            pointers = map(_pointer, (below, None, *weights, None, *tracks))
            sizes = (CELLS.index(cell), 1, self.shape[0], W_ih.shape[1], W_hh.shape[1])
            yield Job(*sizes, torch.get_num_threads(), *pointers)
            below = h[1]

    def __call__(self, ids: Tensor) -> Tensor:
        """The logits (rows, outputs) after reading ids (rows,)."""
        ids, y = plain(ids, torch.int64), torch.empty(self.shape, dtype=self.dtype)
        self.jobs[0].ids = ids.data_ptr()
        status = self.run(y.data_ptr(), *self.how)
        if status == library.BAD_ID:
            raise IndexError(f"ids {ids.tolist()} index {self.inputs} inputs")
        _check_memory(status)
        return y


@final
class Windows:
    """Windows of one shape, there and back: memory and jobs are made once.

    A call reads (T, B) ids and targets from `state` (h, or h and c, stacked as PyTorch does) on and
    leaves the gradient of the mean nats in `gradients`, beside the `weights` in their order.
    """

    def __init__(
        self,
        kernel: Cpu,
        job: kernels.Job,
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
        self.traces, self.alive = [], []
        self.jobs, dhs = self._jobs(job)
        self.nats, self.out = W_hq.new_empty(()), (W_hq, b_q)
        top, rows = self.traces[-1].hs[1:], self.shape.numel()
        batch = _batch(rows)
        sizes = (rows // batch, batch, W_hq.shape[1], len(W_hq), torch.get_num_threads())
        pointers = map(_pointer, (top, W_hq, b_q, None, self.nats, dhs, *self.gradients[-2:]))
        self.head = Head(*sizes, *pointers)

    def _jobs(self, job: kernels.Job) -> tuple[list[Job], Tensor]:
        """A job for every layer, each reading the one below, and the last one's dhs."""
        T, B = self.shape
        H, like = job.layers[0].hidden_size, self.weights[0]
        lstm = len(self.state) > 1
        unused = [like.new_zeros(B, H) for _ in range(4)]  # dh_T, dc_T = 0; dh_0, dc_0
        jobs, below, dbelow, gradients = [], None, None, iter(self.gradients)
        for i, w in enumerate(job.layers):
            hs, dhs = like.new_empty(T + 1, B, H), like.new_empty(T, B, H)
            cs = like.new_empty(T + 1, B, H) if lstm else None
            gates = self.kernel.empty_gates(job.cell, w, job.inputs[0], job.states[i])
            self.traces.append(Trace(hs, cs, gates))
            first = [self.state[0][i], self.state[1][i] if lstm else None]
            dws = [None if p is None else next(gradients) for p in w[:4]]
            given = (below, None, *w[:4], None, *first, hs, cs, gates, dhs, *unused[:2], None)
            sizes = (CELLS.index(job.cell), T, B, w.W_ih.shape[1], H, torch.get_num_threads())
            found = (dbelow, *dws, *unused[2:])
            jobs.append(Job(*sizes, *map(_pointer, given), False, True, *map(_pointer, found)))
            self.alive += [*unused, dhs]
            below, dbelow = hs[1:], dhs
        return jobs, self.alive[-1]

    def __call__(self, ids: Tensor, targets: Tensor) -> float:
        """The mean nats of the targets after the ids, and all gradients."""
        library, how = self.kernel.library, (self.kind, self.kernel.level)
        assert library is not None
        ids, targets = plain(ids, torch.int64), plain(targets, torch.int64)
        self._point(ids, targets)
        for job in self.jobs:
            self._check(library.elman_forward(job, *how), "ids", ids)
        self._check(library.elman_head(self.head, *how), "targets", targets)
        for job in reversed(self.jobs):
            self._check(library.elman_backward(job, *how), "ids", ids)
        return self.nats.item()

    def carry(self) -> None:
        """Let the next window start where this one ended."""
        for i, trace in enumerate(self.traces):
            for first, track in zip(self.state, trace, strict=False):
                first[i].copy_(track[-1])

    def _point(self, ids: Tensor, targets: Tensor) -> None:
        """Weights may have moved in memory, and threads in number, since the last call."""
        if ids.shape != self.shape or targets.shape != self.shape:
            shapes = f"{tuple(ids.shape)} and targets {tuple(targets.shape)}"
            raise UserError(f"ids {shapes} for windows of {tuple(self.shape)}")
        for weight in self.weights:
            if weight.dtype != self.nats.dtype or not (weight.is_cpu and weight.is_contiguous()):
                raise UserError(
                    f"a weight is now {weight.dtype} on {weight.device}, or no longer row-major: "
                    f"it was {self.nats.dtype} on cpu and row-major when training began",
                    hint="begin a new Training after moving a model or changing its type",
                )
        self.jobs[0].ids, self.head.targets = ids.data_ptr(), targets.data_ptr()
        self.head.W, self.head.b = map(_pointer, self.out)
        self.head.threads = threads = torch.get_num_threads()
        for job, w in zip(self.jobs, self.layers, strict=True):
            job.W_ih, job.W_hh, job.b_ih, job.b_hh = map(_pointer, w[:4])
            job.threads = threads

    def _check(self, status: int, name: str, ids: Tensor) -> None:
        if status == library.BAD_ID:
            raise IndexError(f"{name} from {int(ids.min())} to {int(ids.max())} are out of range")
        _check_memory(status)


def _read(
    w: Weights, xs: Tensor, lengths: Tensor | None, real: torch.dtype
) -> tuple[Tensor | None, ...]:
    """What both ways read, in the order of `Job`: xs, ids, weights, lengths."""
    floating = xs.is_floating_point()
    inputs = (plain(xs, real), None) if floating else (None, plain(xs, torch.int64))
    return (*inputs, *(plain(p, real) for p in w[:4]), plain(lengths, torch.int64))


@overload
def plain(t: Tensor, dtype: torch.dtype) -> Tensor: ...
@overload
def plain(t: Tensor | None, dtype: torch.dtype) -> Tensor | None: ...
def plain(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Row-major, of the kernel's type; itself where it already is."""
    if t is None or (t.dtype == dtype and t.is_contiguous()):
        return t
    return t.to(dtype).contiguous()


def _lasting(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """As `plain`, in memory that stays even if the module is moved or changes its type."""
    return None if t is None else plain(t.detach(), dtype)


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _check_memory(status: int) -> None:
    if status == library.NO_MEMORY:
        raise MemoryError("the cpu kernel found no memory for its workspace")


@functools.cache
def _batch(rows: int) -> int:
    """Rows that are summed together before they are added to the others: a divisor near 64."""
    return next(b for b in range(min(rows, 64), 0, -1) if rows % b == 0)


def _memory(state: State) -> Tensor | None:
    """An lstm's c."""
    return state[1] if len(state) > 1 else None


def _real(w: Weights) -> torch.dtype:
    """What states and sums are held in: float32 for bfloat16 weights."""
    return torch.float64 if w.W_hh.dtype == torch.float64 else torch.float32


def _other_dtypes(w: Weights, xs: Tensor, state: State) -> str | None:
    """float32 and float64 do not mix; beside bfloat16 weights float32 states are welcome."""
    weight, real = w.W_hh.dtype, _real(w)
    for t in (*w, *state, xs if xs.is_floating_point() else None):
        if t is not None and t.dtype != weight and t.dtype != real:
            return f"{t.dtype} beside weights of {weight}"
    return None


KERNEL = Cpu()
