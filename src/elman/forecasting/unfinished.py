"""A comparison that was stopped goes on where it was: what was asked, and every finished backtest.

`elman forecast --out FOLDER` keeps both in FOLDER while it works: `request.json`, and a file of
arrays for each forecaster that was tried. `--resume FOLDER` reads them back, to the bit, and tries
the rest; what it ends with is what it would have ended with. One process at a time works there
(`folders/lock.py`).
"""

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as parse_arrays
from safetensors.numpy import save as write_arrays

from elman.errors import MissingSource, UserError
from elman.files import BLANK_SEAL, read_sealed, write_sealed
from elman.folders.lock import Lock
from elman.forecasting.panel import Backtest
from elman.forecasting.saving import check_place, is_saved, is_taken
from elman.forecasting.series import Series

FORMAT = "elman-forecast-request-1"
REQUEST = "request.json"
_NAMES = tuple(f.name for f in fields(Backtest))


class Unfinished:
    """A folder in which a comparison is under way; inside `with`, nobody else's."""

    def __init__(self, folder: Path, request: dict[str, Any], lock: Lock) -> None:
        self.folder, self.request, self._lock = folder, request, lock

    @classmethod
    def begin(
        cls, folder: Path, asked: dict[str, Any], data: Sequence[Series], *, force: bool
    ) -> "Unfinished":
        """Note what was asked of which data; `asked` must be plain values."""
        is_new, lock = not folder.exists(), None
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = _locked(folder)
            if is_taken(folder):  # now that nobody else writes here
                check_place(folder, force=force)
            begun = cls(folder, {"format": FORMAT, "asked": asked, "data": digest(data)}, lock)
            begun.end()
            text = json.dumps(begun.request | {"seal": BLANK_SEAL}, indent=2) + "\n"
            write_sealed(folder / REQUEST, text.encode())
        except BaseException:
            if lock is not None:
                lock.release()
            if is_new and not any(folder.iterdir()):
                folder.rmdir()
            raise
        return begun

    @classmethod
    def open(cls, folder: Path) -> "Unfinished":
        """Read what `begin` wrote."""
        if not (folder / REQUEST).is_file():
            raise _nothing_to_resume(folder)
        opened = cls(folder, {}, _locked(folder))
        try:
            opened.request = _read(folder)
        except BaseException:
            opened.release()
            raise
        return opened

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.release()

    def release(self) -> None:
        """Let others write there; again is harmless."""
        self._lock.release()

    def check(self, data: Sequence[Series]) -> None:
        """Refuse data that is not what the comparison began with."""
        if digest(data) != self.request["data"]:
            raise UserError(
                f"the data has changed since {self.folder} was begun: its scores are of other "
                "numbers",
                hint=f"begin again: --out {self.folder} --force",
            )

    @property
    def count(self) -> int:
        """How many forecasters have been tried."""
        return len(list(self.folder.glob("tried-*.safetensors")))

    def recall(self, label: str, series: int) -> list[Backtest] | None:
        """A forecaster's backtests, one a series, if they were finished before."""
        path = self._place(label)
        if not path.is_file():
            return None
        try:
            arrays = parse_arrays(read_sealed(path))
            return [Backtest(*(arrays[f"{i}.{n}"] for n in _NAMES)) for i in range(series)]
        except (SafetensorError, KeyError) as wrong:
            raise UserError(
                f"{path} does not hold the backtests of {label!r}: {wrong}", hint="delete it"
            ) from wrong

    def keep(self, label: str, backtests: Sequence[Backtest]) -> None:
        """Keep a finished forecaster's backtests."""
        arrays = {
            f"{i}.{n}": np.ascontiguousarray(getattr(b, n))
            for i, b in enumerate(backtests)
            for n in _NAMES
        }
        write_sealed(self._place(label), write_arrays(arrays, {"seal": BLANK_SEAL, "of": label}))

    def end(self) -> None:
        """Take away what only an unfinished comparison needs."""
        for path in self.folder.glob("tried-*.safetensors"):
            path.unlink()
        (self.folder / REQUEST).unlink(missing_ok=True)

    def abandon(self) -> None:
        """Leave nothing behind of what was refused."""
        self.end()
        self.release()
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _place(self, label: str) -> Path:
        return self.folder / f"tried-{hashlib.sha256(label.encode()).hexdigest()[:16]}.safetensors"


def digest(data: Sequence[Series]) -> str:
    """A checksum of every number and name."""
    total = hashlib.sha256()
    for s in data:
        total.update(repr((s.name, s.columns, s.season, s.inputs)).encode())
        for rows in (s.values, s.known, s.past, s.static):
            total.update(repr(rows.shape).encode())
            total.update(np.ascontiguousarray(rows).tobytes())
    return total.hexdigest()


def _locked(folder: Path) -> Lock:
    return Lock(folder, "written to")


def _read(folder: Path) -> dict[str, Any]:
    if not (folder / REQUEST).is_file():  # another process has ended it in between
        raise _nothing_to_resume(folder)
    request = json.loads(read_sealed(folder / REQUEST))
    if request.get("format") != FORMAT:
        raise UserError(
            f"{folder / REQUEST} has the format {request.get('format')!r}, not {FORMAT!r}",
            hint="it was written by another version: begin again with --force",
        )
    return request


def _nothing_to_resume(folder: Path) -> MissingSource:
    done = is_saved(folder)
    return MissingSource(
        f"{folder} has nothing to resume"
        + (": its forecaster is finished" if done else f": it has no {REQUEST}"),
        hint=f"elman forecast NEW.csv --run {shlex.quote(str(folder))} forecasts with it"
        if done
        else "elman forecast SOURCE --out FOLDER begins one",
    )
