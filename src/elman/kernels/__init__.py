"""Kernels: the recurrence of `elman.gradients.through_time`, fast; and which one runs.

A kernel runs one layer in one direction over a piece of time, forwards and back. There are four:
`cuda` (compiled at first use), `cpu` (C), `fused` (torch's fused cells step by step, for what
`cuda` refuses on a GPU) and `reference` (plain PyTorch, any dtype and device). The first that does
not refuse the job runs it; `explain` says which, and why not the faster ones. The environment
variable ELMAN_KERNELS (`auto` or a kernel's name) names one, and nothing is substituted for it.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from elman.cells import Gradients, State, Weights
from elman.errors import UserError
from elman.gradients.through_time import Trace

__all__ = [
    "Empty",
    "Explanation",
    "Job",
    "Kernel",
    "State",
    "Trace",
    "Weights",
    "explain",
    "select",
]

FASTEST_FIRST = ("cuda", "cpu", "fused", "reference")


class Kernel(Protocol):
    """One layer, one direction, a piece of time of at least one step and one row.

    Tensors come with any strides, and may be views of one another.
    """

    name: str

    def refuses(self, cell: str, w: Weights, xs: Tensor, state: State) -> str | None:
        """Why this kernel cannot run this job, in words a user understands; None if it can.

        Looks at shapes, dtypes and devices only: `torch.compile` asks with tensors without data.
        """
        ...

    def empty_gates(self, cell: str, w: Weights, xs: Tensor, state: State) -> Tensor | None:
        """An uninitialised `Trace.gates` for this job, time first (None if it keeps none).

        Tells `torch.compile` the shape, and `Checkpointed` the cost, of what `forward` keeps.
        """
        ...

    def forward(
        self,
        cell: str,
        w: Weights,
        xs: Tensor,
        state: State,
        lengths: Tensor | None = None,
        needs_gates: bool = True,
    ) -> Trace:
        """h_0 … h_T from `state` (= h_0) and `xs`: (T, B, input), or (T, B) integer ids.

        `lengths` is (B,), on the device: a row that has ended (t ≥ its length) holds its state.
        Without `needs_gates` no backward will follow and `gates` may be None.
        """
        ...

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
        """(dxs, dw, dstate_0) from the pulls on h_1 … h_T (`dhs`; None: none) and the last state.

        `xi` is (T,) or (T, B), float32 (float64 for float64 jobs), on the device of `xs`: `xi[t]`
        multiplies what step t hands back to the state before it (0 cuts, whatever is handed);
        None means 1 everywhere. A held step passes its pull through untouched and unweighted.
        `dxs` is None for ids or without `needs_dxs`. `into` holds gradients already found for
        later pieces: this piece's are added to them in place, and they are returned as dw. They
        may be wider than the weights (float32 for half precision); without `into` fresh ones are
        made the same way. `dstate` and dstate_0, too, may be wider than the state.
        """
        ...


@dataclass(frozen=True)
class Empty:
    """A kernel's shapes without its work, for `torch.compile`."""

    kernel: Kernel
    name = "empty"

    def forward(
        self,
        cell: str,
        w: Weights,
        xs: Tensor,
        state: State,
        lengths: Tensor | None = None,
        needs_gates: bool = True,
    ) -> Trace:
        tracks = [s.new_empty(xs.shape[0] + 1, *s.shape) for s in state]
        gates = self.kernel.empty_gates(cell, w, xs, state) if needs_gates else None
        return Trace(tracks[0], tracks[1] if len(tracks) > 1 else None, gates)

    def empty_gates(self, cell: str, w: Weights, xs: Tensor, state: State) -> Tensor | None:
        return self.kernel.empty_gates(cell, w, xs, state)


@dataclass(frozen=True)
class Job:
    """What a kernel is asked to run: a cell, its layers' weights, and each layer's xs and state."""

    cell: str
    layers: Sequence[Weights]
    inputs: Sequence[Tensor]
    states: Sequence[State]


@dataclass(frozen=True)
class Explanation:
    """Which kernel runs a job, and why each faster one does not."""

    runs: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        said = [f"{name}: no, {reason}" for name, reason in self.reasons.items()]
        return "\n".join([*said, f"{self.runs}: runs"])


def select(job: Job) -> Kernel:
    """The fastest kernel that takes the job, or the one ELMAN_KERNELS names."""
    kernel, _ = _choose(job)
    return kernel


def explain(
    runner: Any, x: Tensor | None = None, state: Tensor | State | None = None
) -> Explanation:
    """Which kernel runs `module(x)`, and why not the faster ones.

    Anything else that can say how it runs does so itself: `explain(training)` is
    `training.explain()`.
    """
    job, own = getattr(runner, "job", None), getattr(runner, "explain", None)
    if job is None and own is not None:
        return own()
    if job is None or x is None:
        raise UserError(
            f"explain() was given a {type(runner).__name__}"
            + (", which runs on no elman kernel" if job is None else " without an input"),
            hint="explain(module, x) of an elman.nn.RNN, GRU or LSTM, or explain(training)",
        )
    kernel, reasons = _choose(job(x, state))
    return Explanation(kernel.name, reasons)


def _choose(job: Job) -> tuple[Kernel, dict[str, str]]:
    """The kernel that runs, and the reason of every one asked before it."""
    reasons: dict[str, str] = {}
    named = os.environ.get("ELMAN_KERNELS", "auto")
    if named != "auto" and named not in FASTEST_FIRST:
        raise UserError(
            f"ELMAN_KERNELS={named} names no kernel",
            hint=f"choose auto, {', '.join(FASTEST_FIRST)}",
        )
    for name in FASTEST_FIRST if named == "auto" else (named,):
        kernel = _load(name)
        reason = "it is not part of this installation" if kernel is None else _refusal(kernel, job)
        if kernel is not None and reason is None:
            return kernel, reasons
        reasons[name] = str(reason)
    raise UserError(
        f"ELMAN_KERNELS={named}: this kernel cannot run here, {reasons[named]}",
        hint="ELMAN_KERNELS=auto takes the fastest that can",
    )


def _refusal(kernel: Kernel, job: Job) -> str | None:
    if job.inputs[0].shape[1] == 0 and kernel.name != "reference":
        return "the batch is empty"  # so that no other kernel need think of it
    for layer in zip(job.layers, job.inputs, job.states, strict=True):
        if reason := kernel.refuses(job.cell, *layer):
            return reason
    return None


@functools.cache
def _load(name: str) -> Kernel | None:
    """The kernel in `elman.kernels.NAME`; None where that part was not built."""
    home = f"{__name__}.{name}"
    try:
        return importlib.import_module(home).KERNEL
    except ModuleNotFoundError as missing:
        if missing.name != home:
            raise
        return None
