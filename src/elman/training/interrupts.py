"""Ctrl-C between two records, never within the work for one: what a notebook interrupts goes on.

A KeyboardInterrupt can come between any two steps of Python: after the weights have moved, say, and
before it is noted that they did. Whoever then goes on with the training, as one does in a notebook,
would read the same text twice. So it is noted, and raised when the next record is asked for.
"""

import _signal  # the functions that `signal` wraps: its own make enums, 6 µs a call
import contextlib
import signal
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")
_END, _SIGINT = object(), int(signal.SIGINT)


def whole(work: Generator[T, None, None]) -> Iterator[T]:
    """The same records. A second Ctrl-C does not wait for the one that is being made."""
    try:
        record: object = None
        while record is not _END:
            with _noted() as interrupts:
                record = next(work, _END)
            if record is not _END:
                yield record  # pyright: ignore[reportReturnType]
            if interrupts:
                work.throw(KeyboardInterrupt())
    finally:
        work.close()


@contextlib.contextmanager
def _noted() -> Iterator[list[int]]:
    """The interrupts inside this block, where nobody else looks after them: at most one."""
    heard: list[int] = []
    unheeded = _signal.getsignal(_SIGINT) is signal.default_int_handler
    if not unheeded or threading.current_thread() is not threading.main_thread():
        yield heard
        return

    def note(number: int, frame: object) -> None:
        heard.append(number)
        _signal.signal(_SIGINT, signal.default_int_handler)

    _signal.signal(_SIGINT, note)
    try:
        yield heard
    finally:
        _signal.signal(_SIGINT, signal.default_int_handler)
