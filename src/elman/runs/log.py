"""metrics.jsonl, the records of a run: written as they come, read whole, or from its end.

Every line is one record and carries a checksum; a last line that a crash cut short is left out.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar, final

from elman import strict_json
from elman.errors import UserError
from elman.files import checked_line, line_holds, read_bytes
from elman.training import Record
from elman.training.records import from_json

R = TypeVar("R", bound=Record)

NAME = "metrics.jsonl"
LATE = 0.5
"""Seconds after which the numbers of a record are waited for."""


@final
class Log:
    """The file while a training goes on; records stand in their order, each once it is known.

    A GPU may still be working on their numbers, and to wait for each would take it longer than a
    small update does: they are told of up to `LATE` seconds later, and before a checkpoint.
    """

    def __init__(self, file: IO[bytes], lasts: bool) -> None:
        self.file, self.lasts = file, lasts
        self.waiting: deque[tuple[float, Record]] = deque()

    def append(self, *records: Record) -> None:
        """Write these once they are known."""
        now = time.monotonic()
        self.waiting += [(now, record) for record in records]
        self._write(lambda since, record: record.is_known or now - since > LATE)

    def write_known(self) -> None:
        """Write the records that are known; after a failure no others ever will be."""
        self._write(lambda since, record: record.is_known)

    def write_all(self) -> int:
        """Wait for every record, and for the disk; the bytes that the file has then."""
        self._write(lambda since, record: True)
        if self.lasts:
            os.fsync(self.file.fileno())
        return self.file.tell()

    def _write(self, may: Callable[[float, Record], bool]) -> None:
        """The first records, as long as they may be written."""
        before = len(self.waiting)
        while self.waiting and may(*self.waiting[0]):
            _, record = self.waiting.popleft()
            self.file.write(checked_line(strict_json.dumps(record.json(), ascii_only=False)))
        if len(self.waiting) < before:
            self.file.flush()


@contextmanager
def writing(folder: Path, writes: bool) -> Iterator[Log]:
    """The log of a run; a process that `writes` nothing has one that goes nowhere."""
    with open(folder / NAME if writes else os.devnull, "ab") as file:
        log = Log(file, lasts=writes)
        try:
            yield log
        finally:
            log.write_known()


def records(folder: Path) -> list[Record]:
    """Every record of a run."""
    read, checked = [], False  # lines of older versions have no checksum
    for number, line in enumerate(_lines(folder), start=1):
        holds = line_holds(line)
        read.append(_record(folder, number, line, holds is False or (checked and holds is None)))
        checked = checked or holds is not None
    return read


def latest(folder: Path, kind: type[R]) -> R | None:
    """The last record of one kind; the lines of other kinds are not made records of."""
    lines, name = _lines(folder), f'"{kind.kind}"'.encode()
    for number in range(len(lines), 0, -1):
        line = lines[number - 1]
        if name in line:
            record = _record(folder, number, line, line_holds(line) is False)
            if isinstance(record, kind):
                return record
    return None


def _lines(folder: Path) -> list[bytes]:
    path = folder / NAME
    return read_bytes(path).split(b"\n")[:-1] if path.exists() else []


def _record(folder: Path, number: int, line: bytes, broken: bool) -> Record:
    try:
        if broken:
            raise ValueError("it is not as it was written")
        return from_json(strict_json.loads(line))
    except ValueError as problem:
        raise UserError(
            f"{folder / NAME} is damaged at line {number}: {problem}",
            hint="restore it from a copy; only figures and reports read it",
        ) from problem


def shorten(folder: Path, length: int) -> bool:
    """Put the file back to so many bytes; one that is gone begins again: whether it is gone."""
    path = folder / NAME
    gone = length > 0 and not path.exists()
    size = length if gone else path.stat().st_size if path.exists() else 0
    if size < length:
        raise UserError(
            f"{path} has {size} bytes, fewer than the {length} it had at the last checkpoint",
            hint="restore it from a copy, or delete it: the training needs nothing of it",
        )
    if size > length:
        os.truncate(path, length)
    return gone
