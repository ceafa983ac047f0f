"""Which kernel runs: the fastest that does not refuse, or the one that ELMAN_KERNELS names."""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from elman.cells import State
from elman.errors import UserError
from elman.kernels.contract import Job, Kernel

if TYPE_CHECKING:
    import torch

FASTEST_FIRST = ("cuda", "cpu", "fused", "reference")


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


def explain(module: torch.nn.Module, x: Tensor, state: Tensor | State | None = None) -> Explanation:
    """Which kernel runs `module(x)`, and why not the faster ones."""
    job = getattr(module, "job", None)
    if job is None:
        raise UserError(
            f"explain() was given a {type(module).__name__}, which runs on no elman kernel",
            hint="pass a module of elman.nn",
        )
    kernel, reasons = _choose(job(x, state))
    return Explanation(kernel.name, reasons)


def requested() -> str:
    """What ELMAN_KERNELS names: `auto` or a kernel."""
    name = os.environ.get("ELMAN_KERNELS", "auto")
    if name != "auto" and name not in FASTEST_FIRST:
        raise UserError(
            f"ELMAN_KERNELS={name} names no kernel", hint=f"choose auto, {', '.join(FASTEST_FIRST)}"
        )
    return name


def allows(name: str) -> bool:
    """Whether this kernel may run: also asked by what is not a recurrence (output, clipping)."""
    return requested() in ("auto", name)


def _choose(job: Job) -> tuple[Kernel, dict[str, str]]:
    """The kernel that runs, and the reason of every one asked before it."""
    reasons: dict[str, str] = {}
    named = requested()
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
    for piece in job.pieces():
        if reason := kernel.refuses(piece):
            return reason
    return None


@functools.cache
def _load(name: str) -> Kernel | None:
    """The kernel in `elman.kernels.NAME`; None where that part was not built."""
    home = f"elman.kernels.{name}"
    try:
        return importlib.import_module(home).KERNEL
    except ModuleNotFoundError as missing:
        if missing.name != home:
            raise
        return None
