"""The compiled compressor, and the plain one where there is none: the same bits from either."""

import ctypes
import functools
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from elman import built
from elman.compression import reference
from elman.compression.options import Options
from elman.compression.primer import PRIMER
from elman.resources import check_memory

NAME = "_compressor"
PORTABLE, AVX2, AVX512, FASTEST = 0, 1, 2, 3
MOST = 64
"""Bytes that one byte becomes at most, for a moment: the room that the native code asks for."""

Weights = NDArray[np.float32]
Odds = NDArray[np.uint32]


class Coder(Protocol):
    """Turns bytes into fewer bytes, or back, a piece at a time."""

    def prime(self, data: bytes) -> None:
        """Read what both sides know before they begin."""
        ...

    def predict(self, data: bytes) -> Odds:
        """The odds of a 1 before each bit of data, in 24 bits, (bytes, 8); reads it as `prime`."""
        ...

    def encode(self, data: bytes, last: bool) -> bytes:
        """What is certain of the compressed text after these bytes; after the last, all."""
        ...

    def decode(self, data: bytes, room: int, last: bool) -> tuple[bytes, int]:
        """At most `room` bytes of the text, and how many of the compressed ones were used up.

        Fewer than `room` after the `last` of them: nothing that was encoded goes on there.
        """
        ...


class _Options(ctypes.Structure):
    """`struct Options` of api.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("length", "contexts", "table_bits")),
        *((name, ctypes.c_int64) for name in ("hidden", "window", "lanes")),
        *((name, ctypes.c_double) for name in ("rate", "last_rate", "mixing")),
    ]


@functools.cache
def found() -> tuple[ctypes.CDLL | None, str]:
    """The compiled compressor; or why there is none and what to do, "" where none is wanted."""
    if os.environ.get("ELMAN_KERNELS") == "reference":
        return None, ""
    return built.find(Path(__file__).parent, NAME, load)


def native() -> ctypes.CDLL | None:
    """The compiled compressor; None where the build made none, or it is not wanted."""
    return found()[0]


def remark() -> str:
    """What to say before a long wait; "" where the compiled compressor runs, or is not wanted."""
    library, problem = found()
    if library is not None or not problem:
        return ""
    if problem == built.NOT_BUILT:
        problem = "it was not built: install a C++ compiler, then elman again"
    return f"note: the plain compressor runs, a hundred bytes a second; the compiled one: {problem}"


def load(file: Path) -> ctypes.CDLL:
    """The compiled compressor; an OSError, in words, for a file that is not that of this Python."""
    library, pointer, number = built.load(file), ctypes.c_void_p, ctypes.c_int64
    library.elman_compressor_variant.argtypes = [ctypes.c_int]
    library.elman_compressor_variant.restype = ctypes.c_char_p
    library.elman_compressor_make.argtypes = [ctypes.POINTER(_Options), pointer, ctypes.c_int]
    library.elman_compressor_make.restype = pointer
    library.elman_compressor_free.argtypes = [pointer, ctypes.c_int]
    library.elman_compressor_free.restype = None
    into = [pointer, ctypes.c_int, pointer, number]
    library.elman_compressor_prime.argtypes = into
    library.elman_compressor_prime.restype = None
    library.elman_compressor_predict.argtypes = [*into, pointer]
    library.elman_compressor_predict.restype = None
    library.elman_compressor_encode.argtypes = [*into, pointer, number, ctypes.c_int]
    library.elman_compressor_encode.restype = number
    used = ctypes.POINTER(number)
    library.elman_compressor_decode.argtypes = [*into, used, pointer, number, ctypes.c_int]
    library.elman_compressor_decode.restype = number
    return library


class Native:
    """The compiled compressor; `variant` is for tests, all of them compute the same bits."""

    def __init__(
        self, library: Any, options: Options, trained: Weights | None, variant: int = FASTEST
    ) -> None:
        self._library, self._variant = library, variant
        names = [name for name, *_ in _Options._fields_]
        given = _Options(*(getattr(options, name) for name in names))
        pointer = None
        if trained is not None:
            trained = np.ascontiguousarray(trained, np.float32)
            assert trained.shape == (options.weights,)
            pointer = trained.ctypes.data
        self._handle = library.elman_compressor_make(ctypes.byref(given), pointer, variant)
        if not self._handle:
            raise MemoryError("the compressor found no memory for its tables")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.elman_compressor_free(self._handle, self._variant)

    def prime(self, data: bytes) -> None:
        self._library.elman_compressor_prime(self._handle, self._variant, data, len(data))

    def predict(self, data: bytes) -> Odds:
        odds = np.empty((len(data), 8), np.uint32)
        self._library.elman_compressor_predict(
            self._handle, self._variant, data, len(data), odds.ctypes.data
        )
        return odds

    def encode(self, data: bytes, last: bool) -> bytes:
        out = ctypes.create_string_buffer(MOST * (len(data) + 2))
        n = self._library.elman_compressor_encode(
            self._handle, self._variant, data, len(data), out, len(out), last
        )
        assert n >= 0, "every byte has its room"
        return out.raw[:n]

    def decode(self, data: bytes, room: int, last: bool) -> tuple[bytes, int]:
        out, used = ctypes.create_string_buffer(max(room, 1)), ctypes.c_int64()
        n = self._library.elman_compressor_decode(
            self._handle, self._variant, data, len(data), ctypes.byref(used), out, room, last
        )
        return out.raw[:n], used.value


class Plain:
    """The reference, with the same questions."""

    def __init__(self, options: Options, trained: Weights | None) -> None:
        self._coder = reference.Coder(options, trained)

    def prime(self, data: bytes) -> None:
        self._coder.prime(data)

    def predict(self, data: bytes) -> Odds:
        return self._coder.predict(data)

    def encode(self, data: bytes, last: bool) -> bytes:
        return self._coder.encode(data, last)

    def decode(self, data: bytes, room: int, last: bool) -> tuple[bytes, int]:
        return self._coder.decode(data, room, last)


def coder(options: Options, trained: Weights | None = None) -> Coder:
    """The fastest there is, primed where the options say so."""
    library = native()
    made = Plain(options, trained) if library is None else Native(library, options, trained)
    if options.primed:
        made.prime(PRIMER)
    return made


def check_room(options: Options) -> None:
    """Refuse what memory cannot hold: tables, the network four times, the ring of the past."""
    tables = 8 * options.contexts << options.table_bits
    check_memory(
        tables + 16 * options.weights + (100 << 20),
        f"{options.contexts} tables of 2^{options.table_bits} slots and {options.hidden} units",
        "a lower --level",
    )
