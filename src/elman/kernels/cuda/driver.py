"""NVRTC and the CUDA driver through ctypes: compile once, keep on disk, launch.

NVRTC comes with every CUDA build of torch, so no compiler is needed on the user's machine. A kernel
is compiled for the GPU at hand the first time its shape is met (under a second) and kept in the
cache folder under a hash of its source, its options and the versions of compiler and driver.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from elman import files
from elman.errors import UserError, WorkFailed

SOURCES = Path(__file__).parent
MAX_DYNAMIC_SHARED_SIZE, NON_PORTABLE_CLUSTER_SIZE = 8, 14  # CUfunction_attribute
COOPERATIVE, CLUSTER_DIMENSION = 2, 4  # CUlaunchAttributeID
MAP_OF_16_BITS, MAP_SWIZZLES_128 = 1, 3  # CUtensorMapDataType, CUtensorMapSwizzle
NO_CONTEXT = (3, 201)  # CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_INVALID_CONTEXT


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: the cluster's shape, or (1, …) for a cooperative launch."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 3),
        ("unused", ctypes.c_char * 52),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


def configuration(
    blocks: int, cluster: int, threads: int, shared_bytes: int, cooperative: bool = False
) -> LaunchConfig:
    """A one-dimensional grid of `blocks` in clusters of `cluster`; `cooperative`: all at once."""
    attributes = []
    if cluster > 1:  # not on GPUs that have no clusters
        attributes.append(LaunchAttribute(id=CLUSTER_DIMENSION, value=(cluster, 1, 1)))
    if cooperative:
        attributes.append(LaunchAttribute(id=COOPERATIVE, value=(1, 0, 0)))
    array = (LaunchAttribute * max(len(attributes), 1))(*attributes)
    first = ctypes.cast(array, ctypes.POINTER(LaunchAttribute))
    return LaunchConfig((blocks, 1, 1), (threads, 1, 1), shared_bytes, None, first, len(attributes))


class Function:
    """One compiled kernel on one device."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        module, handle = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(module), cubin)
        call("cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
        call("cuFuncSetAttribute", handle, MAX_DYNAMIC_SHARED_SIZE, shared_bytes)
        if torch.cuda.get_device_capability() >= (9, 0):
            call("cuFuncSetAttribute", handle, NON_PORTABLE_CLUSTER_SIZE, 1)
        self.handle = handle
        self.shared_bytes = shared_bytes

    def active_clusters(self, cluster: int, threads: int) -> int:
        """How many clusters of this kernel the device can hold at once."""
        count = ctypes.c_int()
        config = configuration(cluster, cluster, threads, self.shared_bytes)
        call("cuOccupancyMaxActiveClusters", ctypes.byref(count), self.handle, ctypes.byref(config))
        return count.value


class Launch:
    """A kernel and the shape of its launch: all but the arguments, which differ between calls.

    Arguments are words of 8 bytes; the first may be a structure of `first` of them.
    """

    def __init__(
        self, function: Function, config: LaunchConfig, arguments: int, first: int = 1
    ) -> None:
        self.function, self.config = function, config
        self.arguments, self.first = arguments, first
        self.own = threading.local()  # others may launch at the same time

    def __call__(self, stream: int, arguments: Sequence[int]) -> None:
        """Queue the kernel. Arguments: addresses (0: no array) and whole numbers."""
        own = self.own
        if not hasattr(own, "values"):
            words = self.arguments - 1 + self.first
            own.values = (ctypes.c_uint64 * words)()
            begin = ctypes.addressof(own.values)
            offsets = [0, *range(8 * self.first, 8 * words, 8)]
            own.addresses = (ctypes.c_void_p * self.arguments)(*[begin + o for o in offsets])
            own.config = LaunchConfig.from_buffer_copy(self.config)
            own.by_reference = ctypes.byref(own.config)
        own.values[:] = arguments
        own.config.stream = stream
        call("cuLaunchKernelEx", own.by_reference, self.function.handle, own.addresses, None)


@functools.lru_cache(maxsize=256)
def tensor_map(address: int, columns: int, rows: int, steps: int, box_rows: int) -> tuple[int, ...]:
    """An array (steps, rows, columns) of 2-byte elements, for the copy engine of a Hopper GPU.

    Boxes of it are 128 bytes by `box_rows` rows of one step, laid out as `wgmma` reads them.
    """
    memory = ctypes.create_string_buffer(128 + 64)
    begin = -(-ctypes.addressof(memory) // 64) * 64
    call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(begin),
        ctypes.c_int(MAP_OF_16_BITS),
        ctypes.c_uint(3),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 3)(columns, rows, steps),
        (ctypes.c_uint64 * 2)(2 * columns, 2 * columns * rows),
        (ctypes.c_uint * 3)(64, box_rows, 1),
        (ctypes.c_uint * 3)(1, 1, 1),
        ctypes.c_int(0),
        ctypes.c_int(MAP_SWIZZLES_128),
        ctypes.c_int(0),
        ctypes.c_int(0),  # zeros beyond the array
    )
    return tuple((ctypes.c_uint64 * 16).from_address(begin))


class MappedLaunch(Launch):
    """A kernel whose first argument is the tensor map of one of the others, `track`.

    The last arguments are steps, rows and the first block; the array has `more` steps than that.
    """

    def __init__(
        self,
        function: Function,
        config: LaunchConfig,
        arguments: int,
        track: int,
        columns: int,
        more: int,
        box_rows: int,
    ) -> None:
        super().__init__(function, config, arguments + 1, 16)
        self.track, self.columns, self.more, self.box_rows = track, columns, more, box_rows

    def __call__(self, stream: int, arguments: Sequence[int]) -> None:
        steps, rows = arguments[-3] + self.more, arguments[-2]
        words = tensor_map(arguments[self.track], self.columns, rows, steps, self.box_rows)
        super().__call__(stream, (*words, *arguments))


class Launches:
    """A grid whose parts are launched one after the other; each is told where it begins."""

    def __init__(self, parts: Sequence[tuple[int, Launch]]) -> None:
        self.parts = parts

    def __call__(self, stream: int, arguments: Sequence[int]) -> None:
        """Queue them. The kernel's last argument is the first block of its part."""
        for first_block, launch in self.parts:
            launch(stream, (*arguments, first_block))


def call(name: str, *arguments: object) -> None:
    """One driver call, in the context torch uses on the current device."""
    function = getattr(_driver(), name)
    status = function(*arguments)
    if status in NO_CONTEXT:
        _enter_context(torch.cuda.current_device())
        status = function(*arguments)
    if status:
        raise WorkFailed(f"{name} failed: {_reason(status)}")


def end_capture(stream: ctypes.c_void_p, graph: ctypes.c_void_p) -> None:
    """End a recording that has failed: the driver's word for that is no news."""
    _driver().cuStreamEndCapture(stream, ctypes.byref(graph))
    if graph.value:
        call("cuGraphDestroy", graph)


def _reason(status: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    return (text.value or b"unknown").decode() + f" (CUDA error {status})"


def _enter_context(device: int) -> None:
    """Backward passes run in threads of torch's own, which may not have met the GPU yet."""
    driver, context = _driver(), ctypes.c_void_p()
    torch.cuda.init()
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    driver.cuCtxSetCurrent(context)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The NVRTC of torch's CUDA version: already loaded, on the path, or among torch's wheels."""
    major = (torch.version.cuda or "0").split(".")[0]
    name = f"nvrtc64_{major}0_0.dll" if sys.platform == "win32" else f"libnvrtc.so.{major}"
    beside_torch = Path(torch.__file__).parents[1]
    paths = [*beside_torch.glob(f"nvidia/*/lib/{name}"), *beside_torch.glob(f"torch/lib/{name}")]
    for candidate in [name, *map(str, paths)]:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise UserError(
        f"{name} was not found, so CUDA kernels cannot be compiled",
        hint=f"pip install nvidia-cuda-nvrtc for CUDA {major}, or ELMAN_KERNELS=reference",
    )


def compiled(
    source: str,
    defines: Mapping[str, int],
    architecture: str,
    more: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """The machine code of `source` with these macros, from the cache or freshly compiled.

    `more` are headers that are in no file.
    """
    headers = _headers() | dict(more)
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"--define-macro={name}={value}" for name, value in sorted(defines.items())]
    path = cache_folder() / f"{Path(source).stem}-{_fingerprint(source, headers, options)}.cubin"
    if os.path.exists(path):  # `path.exists()` raises where a folder above it may not be entered
        return path.read_bytes()
    cubin = _compile(source, headers, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic(path) as draft:
            draft.write_bytes(cubin)
    except (OSError, UserError) as problem:  # what was compiled serves this process all the same
        warnings.warn(
            f"compiled kernels cannot be kept in {path.parent} ({problem}), so every process "
            "compiles its own; ELMAN_CACHE names another folder",
            stacklevel=2,
        )
    return cubin


def cache_folder() -> Path:
    """ELMAN_CACHE, or the user's cache folder."""
    if named := os.environ.get("ELMAN_CACHE"):
        return Path(named) / "cuda"
    try:
        import platformdirs
    except ModuleNotFoundError:  # machines with torch alone
        return Path.home() / ".cache" / "elman" / "cuda"
    return platformdirs.user_cache_path("elman") / "cuda"


def _headers() -> dict[str, str]:
    return {p.name: p.read_text(encoding="utf-8") for p in sorted(SOURCES.glob("*.cuh"))}


def _fingerprint(source: str, headers: Mapping[str, str], options: Sequence[str]) -> str:
    text = [(SOURCES / source).read_text(encoding="utf-8"), *headers.values(), *options]
    text += [str(_compiler_version()), str(_driver_version())]
    return hashlib.sha256("\0".join(text).encode()).hexdigest()[:32]


def _compiler_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _driver_version() -> int:
    version = ctypes.c_int()
    _driver().cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _compile(source: str, headers: Mapping[str, str], options: Sequence[str]) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    strings = ctypes.c_char_p * len(headers)
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        (SOURCES / source).read_text(encoding="utf-8").encode(),
        source.encode(),
        len(headers),
        strings(*(text.encode() for text in headers.values())),
        strings(*(name.encode() for name in headers)),
    )
    flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), flags)
    if status:
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        raise WorkFailed(f"NVRTC could not compile {source}: {log.decode()}")
    cubin = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin


def _text(size_of, get, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw
