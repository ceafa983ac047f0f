"""Launches beside each other: streams of our own, which begin after the caller's and end before it.

All memory is the caller's stream's: it is allocated before the lanes begin and not given back
before they have ended. Streams and events belong to one thread: two threads must not record the
same event, nor one launch into a stream that the other is capturing.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import final

from elman.kernels.cuda import driver

NON_BLOCKING = 1  # CUstream_flags: never waits for the legacy stream
SOONER = -1  # priority: before what the caller's stream does meanwhile
NO_TIMING = 2  # CUevent_flags


@final
class Lane:
    """A stream, and the event that says that its work is done."""

    def __init__(self) -> None:
        self.stream, self.done = ctypes.c_void_p(), event()
        where = ctypes.byref(self.stream)
        driver.call("cuStreamCreateWithPriority", where, NON_BLOCKING, SOONER)
        self.number = self.stream.value or 0
        end = weakref.finalize(self, driver.call, "cuStreamDestroy_v2", self.stream)
        end.atexit = False  # the process ends with it


@final
class Lanes:
    """Those of one thread on one device, which is the current one."""

    def __init__(self) -> None:
        self.begun, self.more = event(), list[Lane]()
        self.busy: list[Lane] = []

    def begin(
        self, stream: int, launch: driver.Launches, jobs: Sequence[Sequence[int]], apart: bool
    ) -> None:
        """Launch each of `jobs`, a kernel's arguments, at once, after what `stream` did before.

        One of them runs on `stream` itself, unless it is to do other work meanwhile (`apart`).
        """
        others = jobs if apart else jobs[1:]
        while len(self.more) < len(others):
            self.more.append(Lane())
        self.busy = self.more[: len(others)]
        if others:
            driver.call("cuEventRecord", self.begun, ctypes.c_void_p(stream))
        for lane, arguments in zip(self.busy, others, strict=True):
            driver.call("cuStreamWaitEvent", lane.stream, self.begun, 0)
            launch(lane.number, arguments)
            driver.call("cuEventRecord", lane.done, lane.stream)
        if not apart:
            launch(stream, jobs[0])

    def end(self, stream: int) -> None:
        """Let `stream` go on only after all of them."""
        for lane in self.busy:
            driver.call("cuStreamWaitEvent", ctypes.c_void_p(stream), lane.done, 0)


def event() -> ctypes.c_void_p:
    """An event of the current device."""
    handle = ctypes.c_void_p()
    driver.call("cuEventCreate", ctypes.byref(handle), NO_TIMING)
    return handle


class _Own(threading.local):
    """This thread's, by device."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lanes] = {}


_OWN = _Own()


def lanes(device: int) -> Lanes:
    """This thread's on this device, which is the current one."""
    own = _OWN.lanes
    if device not in own:
        own[device] = Lanes()
    return own[device]
