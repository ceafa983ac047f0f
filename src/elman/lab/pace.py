"""How often the microscope draws: as fast as it can on a core that is free, seldom where none is.

A core is not free where trainings have a thread for each of them, or where the last pictures had to
wait for one: other programs are busy, and what a picture takes it takes from trainings, too.
Niceness does not help there: Linux shares the processor out between sessions first, and a training
is a session of its own.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import final

TAKEN = 0.01
"""The part of a core that pictures may take where none is free."""
CROWDED = 0.5
"""Seconds of waiting for a core, for each second of using it, above which none is free."""
KEPT = 0.5
"""The weight of the pictures before the last one."""


@final
class Pace:
    """What drawing a picture takes."""

    def __init__(self) -> None:
        self.took = self._used = self._waited = 0.0

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Watch this thread draw a picture."""
        used, waited = processor_time()
        yield
        now, waits = processor_time()
        self.took = now - used
        self._used = KEPT * self._used + self.took
        self._waited = KEPT * self._waited + waits - waited

    def every(self, *, trainings_have_all: bool) -> float:
        """Seconds from one picture to the next."""
        crowded = trainings_have_all or self._waited > CROWDED * self._used
        return self.took / TAKEN if crowded else self.took


def processor_time() -> tuple[float, float]:
    """Seconds for which this thread has used a core, and has waited for one that was busy.

    Only Linux counts the latter.
    """
    try:
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    except FileNotFoundError:
        waited = 0.0
    return time.thread_time(), waited
