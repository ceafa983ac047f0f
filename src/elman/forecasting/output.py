"""Forecasts as columns, as plain values, and as a file: CSV, Parquet or JSON, one row a step."""

import csv
import datetime as dt
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elman.errors import UserError
from elman.files import atomic, write_text
from elman.forecasting.ensemble import Ahead
from elman.forecasting.series import Series

FORMATS = (".csv", ".parquet", ".json")


def check_format(path: Path) -> None:
    """Refuse, before any work, a name that no table can be written to."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(
            f"cannot write a table to {str(path)!r}: it must end in {', '.join(FORMATS)}",
            hint=f"--output {path.stem or 'forecast'}.csv",
        )
    if has_types(path):
        _pyarrow(path)


def has_types(path: Path) -> bool:
    """Whether a file of this name keeps dates as dates, not as text."""
    return path.suffix.lower() == ".parquet"


def write(columns: dict[str, list[Any]], path: Path) -> Path:
    """Write columns of equal length, by the ending of `path`."""
    check_format(path)
    if has_types(path):
        pyarrow, parquet = _pyarrow(path)
        with atomic(path) as draft:
            parquet.write_table(pyarrow.table(columns), draft)
        return path
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if path.suffix.lower() == ".json":
        write_text(path, json.dumps(rows, indent=1, allow_nan=False) + "\n")
        return path
    text = io.StringIO()
    table = csv.DictWriter(text, list(columns), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_text(path, text.getvalue())
    return path


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as absent:
        raise UserError(
            f"writing {path.name} needs pyarrow",
            hint="pip install 'elman[forecast]', or name it .csv",
        ) from absent
    return pyarrow, parquet


def rows_ahead(
    series: Sequence[Series], ahead: Sequence[Ahead], name: str, *, moments: bool = False
) -> dict[str, list[Any]]:
    """Forecasts as columns of a long table, called as Nixtla's libraries call them.

    Times are written as the data writes them; with `moments` they are dates where all have dates,
    whole numbers where all count, and series are called by their `id`.
    """
    typed = moments and of_one_kind(series)
    table: dict[str, list[Any]] = {"unique_id": [], "ds": [], name: []}
    levels = sorted(ahead[0].low)
    ends = [f"{name}-lo-{x:g}" for x in reversed(levels)] + [f"{name}-hi-{x:g}" for x in levels]
    table |= {c: [] for c in ends}
    for s, path in zip(series, ahead, strict=True):
        table["unique_id"] += [name_of(s, typed=moments)] * len(path.times)
        steps = range(len(s), len(s) + len(path.times))
        table["ds"] += [moment(s, k) for k in steps] if typed else list(path.times)
        table[name] += path.point.tolist()
        for level in levels:
            table[f"{name}-lo-{level:g}"] += path.low[level].tolist()
            table[f"{name}-hi-{level:g}"] += path.high[level].tolist()
    return table


def look_ahead_plain(series: list[Series], ahead: list[Ahead]) -> dict[str, Any]:
    """Forecasts as JSON: by series, then by column."""
    nested: dict[str, Any] = {}
    for s, path in zip(series, ahead, strict=True):
        first = next(iter(path.low), None)
        nested.setdefault(s.name, {})[s.columns[0]] = {
            "time": list(path.times),
            "mean": plain(path.point),
            "low": plain(path.low[first]) if first is not None else [],
            "high": plain(path.high[first]) if first is not None else [],
            "levels": {
                f"{level:g}": {"low": plain(path.low[level]), "high": plain(path.high[level])}
                for level in path.low
            },
        }
    return nested


def plain(value: Any) -> Any:
    """NumPy as JSON; a number that is not finite becomes null."""
    if isinstance(value, np.ndarray):
        return [plain(v) for v in value.tolist()]
    if isinstance(value, dict):
        return {f"{k:g}" if isinstance(k, float) else k: plain(v) for k, v in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def of_one_kind(series: Sequence[Series]) -> bool:
    """Whether the steps of all series have dates, or all are counted."""
    return (
        len({type(moment(s, 0)) for s in series} | {type(moment(s, len(s))) for s in series}) == 1
    )


def moment(series: Series, step: int) -> Any:
    """When a step is: a date and time, a whole number, or as the data writes it without a clock."""
    if (clock := series.clock) is not None:
        at = clock.at(step)
        return at.date() if clock.days and isinstance(at, dt.datetime) else at
    return step + 1 if series.times is None else series.time(step)


def name_of(series: Series, *, typed: bool) -> Any:
    """What a table calls a series: its name, or what the frame it came from called it."""
    return series.id if typed and series.id is not None else series.name
