"""The compiled kernel: where it lies, and the job it is handed."""

from __future__ import annotations

import ctypes
import importlib.machinery
from pathlib import Path

NAME = "_recurrence"
CELLS = ("tanh", "relu", "linear", "gru", "lstm")
FLOAT, DOUBLE, HALF = 0, 1, 2
PORTABLE, AVX2, AVX512, FASTEST = 0, 1, 2, 3
OK, NO_MEMORY, BAD_ID = 0, 1, 2

_GIVEN = "xs ids W_ih W_hh b_ih b_hh lengths h_0 c_0 hs cs gates dhs dh_T dc_T xi"
_FOUND = "dxs dW_ih dW_hh db_ih db_hh dh_0 dc_0"
_HEAD = "hs W b targets nats dhs dW db"
GIVEN = len(_GIVEN.split())


class Job(ctypes.Structure):
    """`struct Job` of job.h: one layer, one direction, a piece of time."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("cell", "T", "B", "I", "H", "threads")),
        *((name, ctypes.c_void_p) for name in _GIVEN.split()),
        ("xi_per_row", ctypes.c_int64),
        ("fresh", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _FOUND.split()),
    ]


class Head(ctypes.Structure):
    """`struct Head` of job.h: the output layer and its loss."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("T", "B", "H", "V", "threads")),
        *((name, ctypes.c_void_p) for name in _HEAD.split()),
    ]


def path() -> Path | None:
    """Where the build put the kernel; None where it built none."""
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    found = (Path(__file__).with_name(NAME + suffix) for suffix in suffixes)
    return next((file for file in found if file.exists()), None)


def load(file: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(file))
    for run in (library.elman_forward, library.elman_backward):
        run.argtypes = [ctypes.POINTER(Job), ctypes.c_int, ctypes.c_int]
        run.restype = ctypes.c_int
    library.elman_head.argtypes = [ctypes.POINTER(Head), ctypes.c_int, ctypes.c_int]
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
    for squash in (library.elman_tanh, library.elman_sigmoid):
        squash.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_int] * 2]
        squash.restype = None
    library.elman_is_busy.argtypes = []
    library.elman_is_busy.restype = ctypes.c_int
    library.elman_variant.argtypes = [ctypes.c_int, ctypes.c_int]
    library.elman_variant.restype = ctypes.c_char_p
    return library
