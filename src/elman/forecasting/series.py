"""Numbers through time: by name, from a table, or from stdin; gaps reported, never guessed at.

A series is a `(steps, columns)` array with the names of its columns and, where known, the length of
its season. Built in: the notes' noisy sine, yearly sunspot numbers, monthly airline passengers.
"""

import csv
import io
import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from elman.errors import MissingSource, UserError
from elman.text.datasets import DATASETS

Values = NDArray[np.float64]
Missing = Literal["error", "interpolate"]
Row = dict[str, str]

NAMES = tuple(name for name, dataset in DATASETS.items() if dataset.kind == "series")

_SEASONS = {"sunspots": 11, "airline": 12}
_TIMES = {"sunspots": "year", "airline": "month"}


@dataclass(frozen=True, eq=False)
class Series:
    """One series: `values[t, j]` is column j at step t."""

    name: str
    values: Values
    columns: tuple[str, ...]
    times: tuple[str, ...] | None = None
    season: int | None = None

    def __post_init__(self) -> None:
        assert self.values.ndim == 2
        assert self.values.shape[1] == len(self.columns)

    def __len__(self) -> int:
        return len(self.values)


def load(
    source: str,
    *,
    column: Sequence[str] = (),
    time: str | None = None,
    group: str | None = None,
    missing: Missing = "error",
    season: int | None = None,
    seed: int = 0,
) -> list[Series]:
    """Every series in `source`: a name of `NAMES`, a CSV or Parquet file, or "-" for CSV on stdin.

    `column` chooses what to read (default: every column that holds numbers), `time` the column that
    labels and orders the steps, `group` the column whose values tell several series apart.

    >>> [sine] = load("sine")
    >>> sine.values.shape
    (1000, 1)
    """
    if source == "sine":
        row = [(1, {"x": ""})]
        for flag, names in (("--column", column), ("--time", [time]), ("--group", [group])):
            for name in filter(None, names):
                _known(name, row, flag)
        found = [sine(seed=seed)]
    else:
        rows = _read(source)
        time = time or _TIMES.get(source)
        groups = _grouped(rows, group)
        found = [
            _series(label, member, column, time, group, missing) for label, member in groups.items()
        ]
        if source in _SEASONS or not group:
            found = [
                replace(s, name=Path(source).stem if source != "-" else "stdin") for s in found
            ]
    season = season or _SEASONS.get(source)
    return [replace(s, season=season) for s in found]


def sine(steps: int = 1000, *, noise: float = 0.2, seed: int = 0) -> Series:
    """The notes' data: x_t = sin(0.01 t) + ε_t, ε_t ~ N(0, noise), t = 1 … steps."""
    t = np.arange(1, steps + 1)
    x = np.sin(0.01 * t) + np.random.default_rng(seed).normal(0, noise, steps)
    return Series("sine", x[:, None], ("x",))


def _read(source: str) -> list[tuple[int, Row]]:
    """The rows of a table, each with its line number in the file."""
    if source in NAMES:
        text = (resources.files("elman") / "data" / f"{source}.csv").read_text()
        return _csv_rows(io.StringIO(text), source)
    if source == "-":
        return _csv_rows(sys.stdin, "stdin")
    path = Path(source)
    if not path.is_file():
        raise MissingSource(
            f"no series or file named {source!r}",
            hint=f"a .csv or .parquet file, - for stdin, or one of {', '.join(NAMES)}",
        )
    if path.suffix.lower() in (".parquet", ".pq"):
        return _parquet_rows(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            return _csv_rows(lines, source)
    except UnicodeDecodeError as wrong:
        raise UserError(
            f"{source} is not UTF-8 text (byte {wrong.start})", hint="save the table as UTF-8 CSV"
        ) from wrong


def _csv_rows(lines: Iterable[str], source: str) -> list[tuple[int, Row]]:
    reader = csv.DictReader(lines, strict=True)
    rows: list[tuple[int, Row]] = []
    try:
        for row in reader:
            if None in row or None in row.values():
                raise UserError(
                    f"{source}, line {reader.line_num}: the row does not have the "
                    f"{len(reader.fieldnames or ())} cells that the header names",
                    hint="mend that line; every row needs as many cells as the header",
                )
            rows.append((reader.line_num, row))
    except csv.Error as wrong:
        raise UserError(
            f"{source}, line {reader.line_num}: {wrong}", hint="mend that line"
        ) from wrong
    if not rows:
        raise UserError(
            f"{source} holds no rows of data", hint="a header line, then one row a step"
        )
    return rows


def _parquet_rows(path: Path) -> list[tuple[int, Row]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as absent:
        raise UserError(
            f"reading {path.name} needs pyarrow", hint="pip install pyarrow, or save it as .csv"
        ) from absent
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as wrong:
        raise UserError(f"{path} is not a Parquet file: {wrong}", hint="check the file") from wrong
    text = ({k: "" if v is None else str(v) for k, v in row.items()} for row in table.to_pylist())
    return list(enumerate(text, start=1))


def _grouped(rows: list[tuple[int, Row]], group: str | None) -> dict[str, list[tuple[int, Row]]]:
    if group is None:
        return {"": rows}
    _known(group, rows, "--group")
    parts: dict[str, list[tuple[int, Row]]] = {}
    for line, row in rows:
        parts.setdefault(row[group], []).append((line, row))
    return parts


def _series(
    name: str,
    rows: list[tuple[int, Row]],
    column: Sequence[str],
    time: str | None,
    group: str | None,
    missing: Missing,
) -> Series:
    if time is not None:
        _known(time, rows, "--time")
        rows = _in_order(rows, time)
    for wanted in column:
        _known(wanted, rows, "--column")
    columns = tuple(column) or _numeric_columns(rows, {time, group})
    values = np.stack([_numbers(rows, c, missing) for c in columns], axis=1)
    times = tuple(row[time] for _, row in rows) if time else None
    return Series(name, values, columns, times)


def _in_order(rows: list[tuple[int, Row]], time: str) -> list[tuple[int, Row]]:
    """Rows sorted by time: as numbers where all are numbers, else as text (ISO dates sort so)."""
    labels = [_number(row[time]) for _, row in rows]
    keys = labels if not any(np.isnan(labels)) else [row[time] for _, row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    for before, after in itertools.pairwise(order):
        if keys[before] == keys[after]:
            raise UserError(
                f"lines {rows[before][0]} and {rows[after][0]} have the same {time} "
                f"{rows[after][1][time]!r}",
                hint="a series has one row a time; --group COLUMN tells several series apart",
            )
    return [rows[i] for i in order]


def _known(column: str, rows: list[tuple[int, Row]], flag: str) -> None:
    names = list(rows[0][1])
    if column not in names:
        raise UserError(
            f"{flag} {column!r} is not a column", hint=f"the columns are {', '.join(names)}"
        )


def _numeric_columns(rows: list[tuple[int, Row]], taken: set[str | None]) -> tuple[str, ...]:
    """Columns that hold at least one number and are neither the time nor the group."""
    found = tuple(
        c
        for c in rows[0][1]
        if c not in taken and any(not np.isnan(_number(row[c])) for _, row in rows)
    )
    if not found:
        raise UserError(
            f"no column holds numbers among {', '.join(rows[0][1])}", hint="name one with --column"
        )
    return found


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def _numbers(rows: list[tuple[int, Row]], column: str, missing: Missing) -> Values:
    """One column as numbers; a gap is an error that names its line, or is drawn straight across."""
    values = np.array([_number(row[column]) for _, row in rows])
    gaps = np.flatnonzero(~np.isfinite(values))
    if not len(gaps):
        return values
    if missing == "error":
        shown = ", ".join(f"line {rows[i][0]} ({rows[i][1][column]!r})" for i in gaps[:5])
        more = f" and {len(gaps) - 5} more" if len(gaps) > 5 else ""
        raise UserError(
            f"column {column!r} has no finite number at {shown}{more}",
            hint="--missing interpolate draws a straight line across gaps",
        )
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        raise UserError(f"column {column!r} has no finite number at all", hint="another --column")
    return np.interp(np.arange(len(values)), known, values[known])
