"""The compiled kernel: where it lies, and what it is handed, filled in by name."""

from __future__ import annotations

import ctypes
import importlib.machinery
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from elman.errors import UserError

NAME = "_recurrence"
CELLS = ("tanh", "relu", "linear", "gru", "lstm")  # `enum Cell` of job.h
FLOAT, DOUBLE, HALF = 0, 1, 2
PORTABLE, AVX2, AVX512, FASTEST = 0, 1, 2, 3
OK, NO_MEMORY, BAD_ID = 0, 1, 2

_GIVEN = "xs ids W_ih W_hh b_ih b_hh lengths h_0 c_0 hs cs gates dhs dh_T dc_T xi"
_FOUND = "dxs dW_ih dW_hh db_ih db_hh dh_0 dc_0"
_HEAD = "hs W b targets nats dhs dW db"
KINDS = {torch.float32: FLOAT, torch.float64: DOUBLE, torch.bfloat16: HALF}


class LayerArguments(ctypes.Structure):
    """`struct Job` of job.h: one layer, one direction, a piece of time."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("cell", "T", "B", "I", "H", "threads")),
        *((name, ctypes.c_void_p) for name in _GIVEN.split()),
        ("xi_per_row", ctypes.c_int64),
        ("fresh", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _FOUND.split()),
        ("own", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
    ]


class HeadArguments(ctypes.Structure):
    """`struct Head` of job.h: the output layer and its loss."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("T", "B", "H", "V", "threads")),
        *((name, ctypes.c_void_p) for name in _HEAD.split()),
    ]


class StackArguments(ctypes.Structure):
    """`struct Stack` of job.h: layers that read one another."""

    _fields_ = [
        ("layers", ctypes.POINTER(LayerArguments)),
        *((name, ctypes.c_int64) for name in ("count", "directions", "reads_ids", "copies")),
        *((name, ctypes.c_int64) for name in ("kind", "level")),
    ]


def path() -> Path | None:
    """Where the build put the kernel; None where it built none."""
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    candidates = (Path(__file__).with_name(NAME + suffix) for suffix in suffixes)
    return next((file for file in candidates if file.exists()), None)


def load(file: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(file))
    for run in (library.elman_forward, library.elman_backward):
        run.argtypes = [ctypes.POINTER(LayerArguments), ctypes.c_int, ctypes.c_int]
        run.restype = ctypes.c_int
    library.elman_head.argtypes = [ctypes.POINTER(HeadArguments), ctypes.c_int, ctypes.c_int]
    library.elman_head.restype = ctypes.c_int
    library.elman_clip.argtypes = [
        *[ctypes.c_void_p] * 2,
        ctypes.c_int64,
        ctypes.c_double,
        ctypes.c_int64,
        *[ctypes.c_int] * 2,
    ]
    library.elman_clip.restype = ctypes.c_double
    library.elman_step.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        *[ctypes.c_void_p] * 3,
        ctypes.c_int64,
        *[ctypes.c_int] * 2,
    ]
    library.elman_step.restype = ctypes.c_int
    library.elman_call.argtypes = [ctypes.POINTER(StackArguments), *[ctypes.c_void_p] * 6]
    library.elman_call.restype = ctypes.c_int
    for squash in (library.elman_tanh, library.elman_sigmoid):
        squash.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_int] * 2]
        squash.restype = None
    library.elman_is_busy.argtypes = []
    library.elman_is_busy.restype = ctypes.c_int
    library.elman_variant.argtypes = [ctypes.c_int, ctypes.c_int]
    library.elman_variant.restype = ctypes.c_char_p
    return library


@overload
def plain(t: Tensor, dtype: torch.dtype) -> Tensor: ...
@overload
def plain(t: Tensor | None, dtype: torch.dtype) -> Tensor | None: ...
def plain(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Row-major memory of the kernel's type: the tensor itself where it already is that."""
    if t is None or is_plain(t, dtype):
        return t
    if not t.is_cpu or t.layout != torch.strided or t.is_complex():
        raise UserError(
            f"the cpu kernel cannot read a {t.dtype} tensor of layout {t.layout} on {t.device}",
            hint="pass dense, real tensors on the CPU",
        )
    return t.to(dtype).contiguous().resolve_neg()


def is_plain(t: Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory at `t.data_ptr()` is the tensor, row by row, no sign left to flip."""
    return (
        t.dtype == dtype
        and t.is_cpu
        and t.layout == torch.strided
        and t.is_contiguous()
        and not t.is_neg()
    )


def integers(t: Tensor, name: str) -> Tensor:
    """Ids as the kernel reads them."""
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise UserError(f"{name} are {t.dtype}; they must be integers")
    return plain(t, torch.int64)


def pointer(t: Tensor | None) -> int | None:
    """Where the numbers lie; whoever asks keeps the tensor alive."""
    return None if t is None else t.data_ptr()


def check_memory(status: int) -> None:
    """Raise where the kernel found no room for its workspace."""
    if status == NO_MEMORY:
        raise MemoryError("the cpu kernel candidates no memory for its workspace")
