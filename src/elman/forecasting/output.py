"""Forecasts as a file: CSV, Parquet or JSON, one row a step."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from elman.errors import UserError
from elman.files import atomic, write_text

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
