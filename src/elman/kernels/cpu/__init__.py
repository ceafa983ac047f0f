"""The CPU kernel: the whole recurrence in one native call each way.

The C++ beside this file runs a layer over a piece of time without coming back to Python: the input
product (or the lookup of ids), then the steps, threads splitting the batch; backwards the same,
then each weight gradient as one large product. float32 and float64; weights in bfloat16, multiplied
in pairs and summed in float32, where the processor has the instruction.

`recurrence.py` is the kernel of the contract; `head.py`, `clip.py`, `steps.py`, `travel.py` and
`windows.py` are the other native entries. Every one checks the shape, device, type and layout of
what it is handed before a pointer leaves Python (`library.py`).
"""

from elman.kernels.cpu.clip import clip_norm
from elman.kernels.cpu.library import DOUBLE, FLOAT, HALF
from elman.kernels.cpu.recurrence import KERNEL, Cpu
from elman.kernels.cpu.steps import Steps
from elman.kernels.cpu.travel import norms_by_lag
from elman.kernels.cpu.windows import Ends, Hidden, Windows

__all__ = [
    "DOUBLE",
    "FLOAT",
    "HALF",
    "KERNEL",
    "Cpu",
    "Ends",
    "Hidden",
    "Steps",
    "Windows",
    "clip_norm",
    "norms_by_lag",
]
