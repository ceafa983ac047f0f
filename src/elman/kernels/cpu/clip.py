"""Clipping in one native call: g ← min(1, θ/‖g‖) g."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from elman.kernels import choice
from elman.kernels.cpu import library
from elman.kernels.cpu.library import DOUBLE, FLOAT, KINDS, is_plain, pointer
from elman.kernels.cpu.recurrence import Cpu


def clip_norm(kernel: Cpu, gradients: Sequence[Tensor], theta: float) -> float | None:
    """Scale all gradients together, in place; returns ‖g‖ before. None: not for this kernel."""
    if kernel.library is None or not gradients or not choice.allows(kernel.name):
        return None
    dtype = gradients[0].dtype
    kind = KINDS.get(dtype)
    if kind not in (FLOAT, DOUBLE) or not all(is_plain(g, dtype) for g in gradients):
        return None
    n = len(gradients)
    arrays = (ctypes.c_void_p * n)(*[pointer(g) for g in gradients])
    sizes = (ctypes.c_int64 * n)(*[g.numel() for g in gradients])
    threads = torch.get_num_threads()
    norm = kernel.library.elman_clip(arrays, sizes, n, theta, threads, kind, kernel.level)
    library.check_memory(library.NO_MEMORY if norm < 0 else library.OK)
    return norm
