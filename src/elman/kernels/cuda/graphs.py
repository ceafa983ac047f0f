"""Work on a GPU recorded once and launched as a whole: CUDA graphs, through the driver.

`torch.cuda.graph` records everything that a program does, its random numbers too, and a recording
of it that fails leaves torch's generator as if it still went on. What is recorded here draws
nothing and belongs to a library, so a failure must leave no trace: the work then runs as before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar, final

import torch

from elman.kernels.cuda import driver

THREAD_LOCAL = 1  # CUstreamCaptureMode: what other threads do meanwhile is their own affair
RELAXED = 2  # of a thread: it may call what would spoil most recordings
NO_FLAGS = ctypes.c_ulonglong(0)
NON_BLOCKING = 1  # CUstream_flags: never waits for the legacy stream

CALLS, ROUNDS, LONG_ENOUGH = 4, 7, 4e-3
"""Works are timed so many calls at once, so often at least, and for so many seconds in all."""

Result = TypeVar("Result")
ONE_AT_A_TIME = threading.Lock()
"""Held while something is recorded."""


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python collects no garbage inside: a graph that died just now would spoil a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@final
class Graph:
    """Recorded work. It reads and writes the memory that it was recorded with."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self.handle = handle
        end = weakref.finalize(self, _destroy, handle)
        end.atexit = False  # the process ends with it

    def launch(self, stream: int) -> None:
        """Queue the work on this stream."""
        driver.call("cuGraphLaunch", self.handle, ctypes.c_void_p(stream))


def _destroy(handle: ctypes.c_void_p) -> None:
    """Let a graph go, even while this thread or another records: a graph may die at any moment."""
    mode = ctypes.c_int(RELAXED)
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        driver.call("cuGraphExecDestroy", handle)
    finally:
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@final
class Recorder:
    """Records work that will be launched on one stream of one device.

    The recording itself goes on in a stream of its own, which nobody else has: the products of the
    work keep the scratch memory of that stream, and two streams must not write there at once.
    """

    def __init__(self, device: int) -> None:
        handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            driver.call("cuStreamCreate", ctypes.byref(handle), NON_BLOCKING)
        self.device, self.handle = device, handle
        self.number = handle.value or 0
        self.stream = torch.cuda.ExternalStream(self.number, device=device)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, the current stream is the recorder's; it waits for the caller's and it for it."""
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                yield
        finally:
            caller.wait_stream(self.stream)

    def microseconds(self, *works: tuple[Callable[[], object], float]) -> list[float]:
        """Of one call of each work, among others like it, until the GPU is done. Call it `aside`.

        Beside each work are microseconds of the host that come before every call of it, whether the
        GPU waits or not. Works take turns, since the host's speed changes: medians.
        """
        for work, _ in works:
            work()  # whatever is loaded at first use
        found: list[list[float]] = [[] for _ in works]
        end = time.perf_counter() + LONG_ENOUGH
        while len(found[0]) < ROUNDS or time.perf_counter() < end:
            for times, (work, before) in zip(found, works, strict=True):
                self.stream.synchronize()
                start = time.perf_counter()
                for _ in range(CALLS):
                    work()
                queued = time.perf_counter() - start
                self.stream.synchronize()
                took = time.perf_counter() - start
                times.append(max(1e6 * took / CALLS, 1e6 * queued / CALLS + before))
        return [statistics.median(times) for times in found]

    def memory(self) -> Memory:
        """Room for a recording and for others that follow on it."""
        with torch.cuda.device(self.device):
            return Memory(self.device)

    def record(self, work: Callable[[], Result], memory: Memory) -> tuple[Graph, Result]:
        """The work as a graph, and its result, which every launch overwrites. Call it `aside`."""
        recorded = ctypes.c_void_p()
        with no_collection():  # from before it begins: a collection may be due already
            driver.call("cuStreamBeginCapture_v2", self.handle, THREAD_LOCAL)
            try:
                with memory.used():
                    result = work()
            except BaseException:
                driver.end_capture(self.handle, recorded)  # whatever it says: the work has failed
                raise
            driver.call("cuStreamEndCapture", self.handle, ctypes.byref(recorded))
        try:
            ready = ctypes.c_void_p()
            driver.call("cuGraphInstantiateWithFlags", ctypes.byref(ready), recorded, NO_FLAGS)
        finally:
            driver.call("cuGraphDestroy", recorded)
        return Graph(ready), result


@final
class Memory:
    """Memory that only launches write to: what a recording holds, and what lives only within it.

    What the allocator took back from one recording it may hand to the next in the same memory. So
    recordings share it only where one does not need what it wrote once the other has run.
    """

    def __init__(self, device: int) -> None:
        self.device, self.pool = device, torch.cuda.MemPool()
        self.nbytes = 0
        """What it has taken from the GPU, and at most a little of what other threads took."""

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """What this thread allocates inside lies here."""
        before = torch.cuda.memory_reserved(self.device)
        with torch.cuda.use_mem_pool(self.pool, self.device):
            yield
        # Not `pool.snapshot()`: it gives back references that it never took, and from the 257th
        # pool of a process on that frees Python's memory twice (pytorch/pytorch#196366).
        self.nbytes += max(0, torch.cuda.memory_reserved(self.device) - before)


@functools.lru_cache(maxsize=64)
def recorder(device: int, stream: int) -> Recorder:
    """The one for work that is launched on this stream."""
    del stream
    return Recorder(device)
