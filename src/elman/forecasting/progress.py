"""News from inside a fit: a listener is told every epoch, and may stop the fit by raising.

A fit can lie several forecasters deep (a network on changes of logarithms), so the listener is not
handed down: it is the latest caller in this thread that listens.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

Told = Callable[[str], None]
"""Called with a line of progress."""

_LISTENER: ContextVar[Told | None] = ContextVar("listener", default=None)


@contextmanager
def listening(told: Told | None) -> Iterator[None]:
    """Hand every line told inside the block to `told`.

    >>> with listening(print):
    ...     tell("epoch 1 of 3: loss 0.5")
    epoch 1 of 3: loss 0.5
    """
    before = _LISTENER.set(told)
    try:
        yield
    finally:
        _LISTENER.reset(before)


def tell(line: str) -> None:
    """Say how far a fit is."""
    if (listener := _LISTENER.get()) is not None:
        listener(line)


class OutOfTime(Exception):
    """A limit was reached in the middle of a fit."""


@dataclass
class Limit:
    """So many seconds of this thread's own work from now on; None: no limit.

    Time in which a busy machine does something else does not count: it is the work that is limited,
    so that what is chosen does not depend on what else is running.
    """

    seconds: float | None
    now: Callable[[], float] = time.thread_time
    _begun: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._begun = self.now()

    @property
    def left(self) -> float:
        """Seconds that are left; infinite where there is no limit."""
        return float("inf") if self.seconds is None else self.seconds - (self.now() - self._begun)
