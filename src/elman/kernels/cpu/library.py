"""The compiled kernel: where it lies, and what it is handed, filled in by name."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from elman import built
from elman.errors import OutOfRange, UserError

NAME = "_recurrence"
CELLS = ("tanh", "relu", "linear", "gru", "lstm")  # `enum Cell` of job.h
FLOAT, DOUBLE, HALF = 0, 1, 2
PORTABLE, AVX2, AVX512, FASTEST = 0, 1, 2, 3
OK, NO_MEMORY, BAD_ID, BAD_TARGET, NO_NUMBERS = 0, 1, 2, 3, 4

_GIVEN = "xs ids W_ih W_hh b_ih b_hh lengths sizes starts h_0 c_0 hs cs gates dhs dh_T dc_T xi"
_FOUND = "dxs dW_ih dW_hh db_ih db_hh dh_0 dc_0"
_HEAD = "hs W b targets nats each dhs dW db"
_TRAVEL_SIZES = "T H states gates first lags threads"
_TWICE_FIELDS = (
    "xs_u W_ih_u W_hh_u b_ih_u b_hh_u h_0_u c_0_u hs_u cs_u as_u ddhs "
    "ddxs ddW_ih ddW_hh ddb_ih ddb_hh ddh_0 ddc_0"
)
_TRAVEL = "pulls slopes before W norms"
CPU = torch.device("cpu")
"""Where everything lies that a kernel here makes, whatever torch's default device is."""

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
        ("V", ctypes.c_int64),
        ("E", ctypes.c_void_p),
        ("dE", ctypes.c_void_p),
        ("head", ctypes.c_void_p),
        ("c_in_place", ctypes.c_int64),
    ]


class OwnArguments(LayerArguments):
    """The same for a described cell, compiled by itself: `struct Job` with OWN_CELL."""

    _fields_ = [("noise", ctypes.c_void_p)]


class HeadArguments(ctypes.Structure):
    """`struct Head` of job.h: the output layer and its loss."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("T", "B", "H", "V", "threads")),
        *((name, ctypes.c_void_p) for name in _HEAD.split()),
    ]


class TravelArguments(ctypes.Structure):
    """`struct Travel` of job.h: losses that go back through one layer."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _TRAVEL_SIZES.split()),
        *((name, ctypes.c_void_p) for name in _TRAVEL.split()),
    ]


class StackArguments(ctypes.Structure):
    """`struct Stack` of job.h: layers that read one another."""

    _fields_ = [
        ("layers", ctypes.POINTER(LayerArguments)),
        *((name, ctypes.c_int64) for name in ("count", "directions", "reads_ids", "copies")),
        *((name, ctypes.c_int64) for name in ("kind", "level")),
    ]


class UseArguments(ctypes.Structure):
    """`struct Use` of job.h: what else a call of a stack may be."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("sizes", "order", "back")),
        *((name, ctypes.c_int64) for name in ("seed", "below")),
        ("scale", ctypes.c_double),
    ]


class TwiceArguments(ctypes.Structure):
    """`struct Twice` of job.h: one layer along a change of what it reads."""

    _fields_ = [
        ("job", ctypes.POINTER(LayerArguments)),
        *((name, ctypes.c_void_p) for name in _TWICE_FIELDS.split()),
    ]


class TensorArguments(ctypes.Structure):
    """`struct Tensor` of job.h: what a tensor was."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("object", "data")),
        *((name, ctypes.c_int64) for name in ("code", "bits", "dims")),
        ("shape", ctypes.c_int64 * 3),
    ]


class SeenArguments(ctypes.Structure):
    """`struct Seen` of job.h: the tensors of calls of one kind."""

    _fields_ = [
        ("describe", ctypes.c_void_p),
        ("weights", ctypes.POINTER(TensorArguments)),
        ("count", ctypes.c_int64),
        ("x", TensorArguments),
        ("state", TensorArguments),
    ]


class RulesArguments(ctypes.Structure):
    """`struct Rules` of job.h: what may be written next, and how likely it is."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("temperature", "top_p")),
        ("top_k", ctypes.c_int64),
        ("exclude", ctypes.POINTER(ctypes.c_int64)),
        ("excluded", ctypes.c_int64),
    ]


def path() -> Path | None:
    """Where the build put the kernel; None where it built none."""
    return built.path(Path(__file__).parent, NAME)


INT, INT64, REAL, POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_LAYER, _HEAD_POINTER = ctypes.POINTER(LayerArguments), ctypes.POINTER(HeadArguments)
_STACK, _USE = ctypes.POINTER(StackArguments), ctypes.POINTER(UseArguments)
_TWICE, _RULES = ctypes.POINTER(TwiceArguments), ctypes.POINTER(RulesArguments)
ENTRIES: dict[str, tuple[Any, list[Any]]] = {
    "elman_size": (INT64, [INT]),
    "elman_forward": (INT, [_LAYER, INT, INT]),
    "elman_backward": (INT, [_LAYER, INT, INT]),
    "elman_head": (INT, [_HEAD_POINTER, INT, INT]),
    "elman_travel": (INT, [ctypes.POINTER(TravelArguments), INT, INT]),
    "elman_along": (INT, [_TWICE, INT, INT]),
    "elman_back_twice": (INT, [_TWICE, INT, INT]),
    "elman_clip": (REAL, [POINTER, POINTER, INT64, REAL, INT64, INT, INT]),
    "elman_step": (INT, [POINTER, INT64, POINTER, POINTER, POINTER, INT64, INT, INT]),
    "elman_write": (
        INT,
        [
            *(POINTER, INT64, POINTER, POINTER, POINTER, INT64, POINTER, _RULES),
            *(POINTER, INT64, POINTER, POINTER, INT, INT),
        ],
    ),
    "elman_search": (
        INT,
        [
            *(POINTER, INT64, POINTER, POINTER, POINTER, INT64, POINTER, _RULES),
            *(POINTER, POINTER, INT64, POINTER, POINTER, POINTER, INT, INT),
        ],
    ),
    "elman_call": (INT, [_STACK, _USE, *[POINTER] * 7]),
    "elman_call_back": (INT, [_STACK, _USE, *[POINTER] * 10]),
    "elman_packed_rows": (INT64, [POINTER, INT64, INT64, POINTER, POINTER, INT64]),
    "elman_kept": (INT64, [_STACK, INT64]),
    "elman_places": (None, [_STACK, INT64, POINTER]),
    "elman_keep": (None, [POINTER, POINTER, INT64, REAL, REAL, INT, INT]),
    "elman_drop": (None, [INT64, POINTER, POINTER, INT64, INT64, REAL, INT, INT]),
    "elman_tanh": (None, [POINTER, POINTER, INT64, INT, INT]),
    "elman_sigmoid": (None, [POINTER, POINTER, INT64, INT, INT]),
    "elman_is_seen": (INT, [ctypes.POINTER(SeenArguments), *[POINTER] * 3]),
    "elman_is_busy": (INT, []),
    "elman_variant": (ctypes.c_char_p, [INT, INT]),
}
"""Every function of kernel.cpp, stack.cpp and seen.cpp: what it returns and what it takes."""

WITH_PYTHONS_LOCK = ("elman_is_seen",)
"""Those that look at Python's objects, and are over at once."""

STRUCTS = (
    *(LayerArguments, HeadArguments, StackArguments, TravelArguments, UseArguments),
    *(SeenArguments, TwiceArguments, RulesArguments),
)
"""In the order of `elman_size`."""


def load(file: Path) -> ctypes.CDLL:
    """The compiled kernel; an OSError, in words, for a file that is not the one of this Python."""
    library = built.load(file)
    for name, (result, arguments) in ENTRIES.items():
        entry = getattr(library, name, None)
        if entry is None:
            raise OSError(f"it has no {name}")
        if name in WITH_PYTHONS_LOCK:
            entry = getattr(ctypes.PyDLL(str(file)), name)
            setattr(library, name, entry)
        entry.restype, entry.argtypes = result, arguments
    expected = list(map(ctypes.sizeof, STRUCTS))
    sizes = [library.elman_size(which) for which in range(len(expected))]
    if sizes != expected:
        raise OSError(f"its structures have {sizes} bytes, not {expected}")
    return library


def find() -> tuple[ctypes.CDLL | None, str]:
    """The compiled kernel, or why there is none and what to do."""
    return built.find(Path(__file__).parent, NAME, load)


def _describing() -> int | None:
    """Torch's function that says what a tensor is, by DLPack's C exchange; None: it has none."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = POINTER, [ctypes.py_object, ctypes.c_char_p]
    table = get(capsule, b"dlpack_exchange_api")
    version = ctypes.c_uint32.from_address(table).value
    # the version, the table of an older one, and functions of which this is the fourth
    return POINTER.from_address(table + 16 + 3 * 8).value if version == 1 else None


DESCRIBING = _describing()


def seen(
    weights: Sequence[Tensor], x: tuple[Sequence[int], torch.dtype], state: Sequence[int]
) -> SeenArguments | None:
    """What `elman_is_seen` compares later tensors with; None where torch does not describe them."""
    if DESCRIBING is None:
        return None
    known = [_tensor(w.shape, w.dtype, id(w), w.data_ptr()) for w in weights]
    each = (TensorArguments * len(known))(*known)
    return SeenArguments(
        DESCRIBING, each, len(known), _tensor(*x), _tensor(state, weights[0].dtype)
    )


def _tensor(
    shape: Sequence[int], dtype: torch.dtype, where: int | None = None, data: int | None = None
) -> TensorArguments:
    code = 2 if dtype.is_floating_point else 0  # of DLPack
    return TensorArguments(where, data, code, 8 * dtype.itemsize, len(shape), tuple(shape))


@overload
def plain(t: Tensor, dtype: torch.dtype) -> Tensor: ...
@overload
def plain(t: Tensor | None, dtype: torch.dtype) -> Tensor | None: ...
def plain(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Row-major memory of the kernel's type: the tensor itself where it already is that."""
    if t is None or is_plain(t, dtype):
        return t
    if t.is_cpu and t.layout == torch.strided and not _is_backed(t):
        raise UserError(
            f"a tensor of shape {tuple(t.shape)} has lost its memory: its storage was resized to "
            f"{t.untyped_storage().nbytes()} bytes"
        )
    if not t.is_cpu or t.layout != torch.strided or t.is_complex():
        raise UserError(
            f"the cpu kernel cannot read a {t.dtype} tensor of layout {t.layout} on {t.device}",
            hint="pass dense, real tensors on the CPU",
        )
    return t.to(dtype).contiguous().resolve_neg()


def is_plain(t: Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory at `t.data_ptr()` is the tensor, whole, row by row, no sign to flip."""
    return (
        t.dtype == dtype
        and t.is_cpu
        and t.layout == torch.strided
        and t.is_contiguous()
        and not t.is_neg()
        and t.untyped_storage().nbytes() >= (t.storage_offset() + t.numel()) * t.itemsize
    )


def row_by_row(t: Tensor) -> Tensor:
    """The same numbers row by row; the tensor itself where they lie so, or cannot be read."""
    if t.layout != torch.strided or t.is_contiguous() or not _is_backed(t):
        return t
    return t.contiguous()


def _is_backed(t: Tensor) -> bool:
    """Whether the storage is as long as the tensor: `untyped_storage().resize_` may shorten it."""
    extent = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) + 1
    needed = (t.storage_offset() + extent) * t.itemsize if t.numel() else 0
    return t.untyped_storage().nbytes() >= needed


def integers(t: Tensor, name: str) -> Tensor:
    """Ids as the kernel reads them."""
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise UserError(f"{name} are {t.dtype}; they must be integers")
    return plain(t, torch.int64)


def out_of_range(name: str, read: Tensor, size: int, of: str) -> OutOfRange:
    """What to say of ids or targets that point outside what they index."""
    low, high = int(read.min()), int(read.max())
    words = f"{name} from {low} to {high} index {size} {of}"
    return OutOfRange(words, hint=f"they lie between 0 and {size - 1}")


class NoMemory(UserError):
    """A tensor whose numbers lie nowhere, or elsewhere: of a class of its own."""


def pointer(t: Tensor | None) -> int | None:
    """Where the numbers lie; whoever asks keeps the tensor alive."""
    if t is None:
        return None
    where = t.data_ptr()
    if not where and t.numel():  # a FakeTensor says that it is on the CPU
        raise NoMemory(
            f"a {type(t).__name__} of shape {tuple(t.shape)} has no memory of its own",
            hint="ELMAN_KERNELS=reference runs without native code",
        )
    return where


def check_memory(status: int) -> None:
    """Raise where the kernel found no room for its workspace."""
    if status == NO_MEMORY:
        raise MemoryError("the cpu kernel found no memory for its workspace")
