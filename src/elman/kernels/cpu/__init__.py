"""The CPU kernel: the whole recurrence in one native call each way.

The C++ beside this file runs a layer over a piece of time without coming back to Python: the input
product (or the lookup of ids), then the steps, threads splitting the batch; backwards the same, then
each weight gradient as one large product. float32 and float64; weights in bfloat16, multiplied in
pairs and summed in float32, where the processor has the instruction.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from elman.gradients.through_time import Trace
from elman.kernels import Layer, State
from elman.kernels.cpu import library
from elman.kernels.cpu.library import DOUBLE, FASTEST, FLOAT, HALF, Job

_KINDS = {torch.float32: FLOAT, torch.float64: DOUBLE, torch.bfloat16: HALF}


@final
class Cpu:
    """C++, torch's threads; `level` holds it to older processors' instructions (tests)."""

    name = "cpu"

    def __init__(self, level: int = FASTEST) -> None:
        self.level = level
        self.file = library.path()
        self.library = None if self.file is None else library.load(self.file)

    def refuses(self, cell: str, w: Layer, xs: Tensor, state: State) -> str | None:
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

    def empty_gates(self, cell: str, w: Layer, xs: Tensor, state: State) -> Tensor | None:
        if cell not in ("gru", "lstm"):
            return None
        return state[0].new_empty(*xs.shape[:2], 4 * w.hidden_size, dtype=_real(w))

    def forward(
        self,
        cell: str,
        w: Layer,
        xs: Tensor,
        state: State,
        lengths: Tensor | None = None,
        needs_gates: bool = True,
    ) -> Trace:
        real = _real(w)
        gates = self.empty_gates(cell, w, xs, state) if needs_gates else None
        steps, batch = xs.shape[:2]
        tracks = [s.new_empty(steps + 1, batch, s.shape[1], dtype=real) for s in state]
        inputs = _Inputs(cell, w, xs, lengths, real)
        befores = [plain(s, real) for s in state]
        job = inputs.job(
            h_0=befores[0], c_0=_second(befores), hs=tracks[0], cs=_second(tracks), gates=gates
        )
        self._run("elman_forward", job, w, xs)
        hs, cs = tracks[0].to(state[0].dtype), _second(tracks)
        return Trace(hs, None if cs is None else cs.to(state[1].dtype), gates)

    def backward(
        self,
        cell: str,
        w: Layer,
        xs: Tensor,
        trace: Trace,
        dhs: Tensor | None,
        dstate: State,
        xi: Tensor | None,
        lengths: Tensor | None = None,
        needs_dxs: bool = True,
        into: Layer | None = None,
    ) -> tuple[Tensor | None, Layer, State]:
        real = _real(w)
        dw = zeros_like(w, real) if into is None else into
        wanted = needs_dxs and xs.is_floating_point()
        dxs = torch.empty(xs.shape, dtype=real) if wanted else None
        inputs = _Inputs(cell, w, xs, lengths, real)
        hs, pulls = plain(trace.hs, real), [plain(d, real) for d in dstate]
        cs, gates = _optional(trace.cs, real), _optional(trace.gates, real)
        dhs, xi = _optional(dhs, real), _optional(xi, real)
        befores = [torch.empty_like(d) for d in pulls]
        sums = [None if d is None else plain(d, real) for d in dw]
        job = inputs.job(
            **dict(hs=hs, cs=cs, gates=gates, dhs=dhs, xi=xi, dxs=dxs),
            **dict(dh_T=pulls[0], dc_T=_second(pulls), dh_0=befores[0], dc_0=_second(befores)),
            **dict(dW_ih=sums[0], dW_hh=sums[1], db_ih=sums[2], db_hh=sums[3]),
        )
        job.xi_per_row = xi is not None and xi.dim() == 2
        self._run("elman_backward", job, w, xs)
        for d, total in zip(dw, sums, strict=True):
            if d is not None and total is not None and d is not total:
                d.copy_(total)
        dbefore = tuple(d.to(given.dtype) for d, given in zip(befores, dstate, strict=True))
        return None if dxs is None else dxs.to(xs.dtype), dw, dbefore

    def _run(self, function: str, job: Job, w: Layer, xs: Tensor) -> None:
        status = getattr(self.library, function)(job, _KINDS[w.W_hh.dtype], self.level)
        if status == library.BAD_ID:
            low, high = int(xs.min()), int(xs.max())
            raise IndexError(f"ids from {low} to {high} index {w.W_ih.shape[1]} inputs")
        if status == library.NO_MEMORY:
            raise MemoryError("the cpu kernel found no memory for its workspace")


class _Inputs:
    """What forward and backward are both handed, kept alive while the kernel reads it."""

    def __init__(
        self, cell: str, w: Layer, xs: Tensor, lengths: Tensor | None, real: torch.dtype
    ) -> None:
        floating = xs.is_floating_point()
        self.sizes = dict(
            cell=library.CELLS.index(cell),
            **dict(T=xs.shape[0], B=xs.shape[1], I=w.W_ih.shape[1], H=w.W_hh.shape[1]),
            threads=torch.get_num_threads(),
        )
        self.tensors = dict(
            W_ih=plain(w.W_ih, real),
            W_hh=plain(w.W_hh, real),
            b_ih=_optional(w.b_ih, real),
            b_hh=_optional(w.b_hh, real),
            xs=plain(xs, real) if floating else None,
            ids=None if floating else plain(xs, torch.int64),
            lengths=_optional(lengths, torch.int64),
        )

    def job(self, **tensors: Tensor | None) -> Job:
        self.tensors.update(tensors)
        pointers = {k: t.data_ptr() for k, t in self.tensors.items() if t is not None}
        return Job(**self.sizes, **pointers)


def plain(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Row-major, of the kernel's type; itself where it already is."""
    return t.to(dtype).contiguous()


def zeros_like(w: Layer, dtype: torch.dtype) -> Layer:
    """Where weight gradients are summed."""
    return Layer(*(None if p is None else torch.zeros(p.shape, dtype=dtype) for p in w))


def _optional(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if t is None else plain(t, dtype)


def _second(tensors: list[Tensor]) -> Tensor | None:
    return tensors[1] if len(tensors) > 1 else None


def _real(w: Layer) -> torch.dtype:
    """What states and sums are held in: float32 for bfloat16 weights."""
    return torch.promote_types(w.W_hh.dtype, torch.float32)


def _other_dtypes(w: Layer, xs: Tensor, state: State) -> str | None:
    """float32 and float64 do not mix; beside bfloat16 weights float32 states are welcome."""
    allowed = {w.W_hh.dtype, _real(w)}
    for t in (*w, *state, *([xs] if xs.is_floating_point() else [])):
        if t is not None and t.dtype not in allowed:
            return f"{t.dtype} beside weights of {w.W_hh.dtype}"
    return None


KERNEL = Cpu()
