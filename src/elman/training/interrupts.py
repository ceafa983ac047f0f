"""Ctrl-C between two records, never within the work for one: what a notebook interrupts goes on.

A KeyboardInterrupt can come between any two steps of Python: after the weights have moved, say, and
before it is noted that they did. Whoever then goes on with the training, as one does in a notebook,
would read the same text twice. So it is noted, and raised when the next record is asked for.
"""

import _signal  # the functions that `signal` wraps: its own make enums, 6 µs a call
import signal
import threading
from collections.abc import Generator, Iterator
from typing import Self, TypeVar, final

T = TypeVar("T")
_END, _SIGINT = object(), int(signal.SIGINT)


def whole(work: Generator[T, None, None]) -> Iterator[T]:
    """The same records. A second Ctrl-C does not wait for the one that is being made."""
    try:
        record: object = None
        while record is not _END:
            with _Noted() as interrupts:
                record = next(work, _END)
            if record is not _END:
                yield record  # pyright: ignore[reportReturnType]
            if interrupts.heard:
                work.throw(KeyboardInterrupt())
    finally:
        work.close()


@final
class _Noted:
    """Whether Ctrl-C came inside this block; only where nobody else handles it."""

    def __enter__(self) -> Self:
        self.heard = False
        is_usual = _signal.getsignal(_SIGINT) is signal.default_int_handler
        self.mine = is_usual and threading.get_ident() == threading.main_thread().ident
        if self.mine:
            _signal.signal(_SIGINT, self._note)
        return self

    def _note(self, number: int, frame: object) -> None:
        self.heard = True
        _signal.signal(_SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        if self.mine:
            _signal.signal(_SIGINT, signal.default_int_handler)
