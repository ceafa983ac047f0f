"""Kernels: the recurrence of `elman.gradients.through_time`, fast; and which one runs.

A kernel runs one layer in one direction over a piece of time, forwards and back. There are five:
`cuda` (compiled at first use), `cpu` (C++), `described` (the same C++, compiled around a cell that
is described by its equations), `fused` (torch's fused cells step by step, for what neither `cuda`
nor cuDNN can do on a GPU) and `reference` (plain PyTorch, any dtype and device). `cudnn` and `aten`
are torch.nn's own, on a GPU and on a CPU, which run whole stacks, where that is faster. The first
that does not refuse the job runs it; `explain` says which, and why not the faster ones. The
environment variable ELMAN_KERNELS (`auto` or a kernel's name) names one, and nothing is substituted
for it. ELMAN_CAPTURE=off keeps repeated calls on a GPU from being captured (`recurrence.captured`).
"""

from elman.cells import Gradients, State, Weights
from elman.kernels.choice import (
    Explanation,
    allows,
    captures,
    capturing,
    explain,
    is_sooner,
    largest,
    named_kernel,
    runs_whole,
    select,
    select_once,
    settings,
    uncaptured,
    using,
)
from elman.kernels.contract import Empty, Job, Kernel, Piece, Pull, Trace

__all__ = [
    "Empty",
    "Explanation",
    "Gradients",
    "Job",
    "Kernel",
    "Piece",
    "Pull",
    "State",
    "Trace",
    "Weights",
    "allows",
    "captures",
    "capturing",
    "explain",
    "is_sooner",
    "largest",
    "named_kernel",
    "runs_whole",
    "select",
    "select_once",
    "settings",
    "uncaptured",
    "using",
]
