"""A column on the steps of its series: where it has no number, and what to put there."""

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.forecasting import tables
from elman.forecasting.dates import Clock
from elman.forecasting.reading import Fill
from elman.forecasting.tables import Table

Values = NDArray[np.float64]


def spread(table: Table, column: str, flag: str, steps: list[int], total: int) -> Values:
    """A column on its steps, NaN where there is no row or an empty cell."""
    values = np.full(total, np.nan)
    values[steps] = tables.numbers(table, column, flag)
    return values


def last_known(columns: dict[str, Values], total: int) -> int:
    """How many steps there are until every column is empty: rows after them are the future."""
    seen = np.zeros(total, dtype=bool)
    for values in columns.values():
        seen |= ~np.isnan(values)
    return int(np.flatnonzero(seen)[-1]) + 1 if seen.any() else 0


def missing_rows(table: Table, steps: list[int], total: int, clock: Clock | None) -> str:
    """The steps without a row, by date, or "" where there are none."""
    absent = sorted(set(range(total)) - set(steps))
    if not absent or clock is None:
        return ""
    runs: list[tuple[int, int]] = []
    for k in absent:
        if runs and runs[-1][1] == k - 1:
            runs[-1] = (runs[-1][0], k)
        else:
            runs.append((k, k))
    named = [clock.label(a) + (f" … {clock.label(b)}" if b > a else "") for a, b in runs[:5]]
    more = f" and {len(runs) - 5} more gaps" if len(runs) > 5 else ""
    one = len(absent) == 1
    count = "1 time has no row" if one else f"{len(absent)} times have no row"
    if (before := max((k for k in steps if k < absent[0]), default=None)) is not None:
        named[0] += f" (after {table.where(steps.index(before))})"
    return f"{count} ({clock.frequency.name} data): {', '.join(named)}{more}"


def filled_in(
    table: Table,
    where: dict[int, int],
    fill: Fill | None,
    of: str,
    notes: list[str],
    column: str,
    values: Values,
) -> Values:
    """One column without gaps: as it is, or filled as asked and noted, or refused by line."""
    absent = np.flatnonzero(np.isnan(values))
    if not len(absent):
        return values
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        raise UserError(f"{of}column {column!r} has no finite number at all", hint="another column")
    cells = table.columns[column]
    named = [
        f"{table.where(where[k])} ({str(cells[where[k]])!r})" for k in absent.tolist() if k in where
    ]
    more = f" and {len(named) - 5} more" if len(named) > 5 else ""
    places = f"{of}column {column!r} has no finite number at {', '.join(named[:5])}{more}"
    if fill is None:
        hint = "--fill forward, linear or zero fills gaps in"
        if absent[0] > known[-1]:
            hint = "delete the rows after its last value; rows of the future are for --known inputs"
        raise UserError(places, hint=hint)
    if named:
        notes.append(f"{places}: filled ({fill})")
    if fill == "zero":
        return np.nan_to_num(values)
    if fill == "linear":
        return np.interp(np.arange(len(values)), known, values[known])
    if absent[0] < known[0]:
        at = f" ({table.where(where[0])})" if 0 in where else ""
        raise UserError(
            f"{of}column {column!r} begins with a gap{at}, and --fill forward has nothing to "
            "repeat",
            hint="--fill linear or zero, or drop the first rows",
        )
    latest = np.maximum.accumulate(np.where(np.isnan(values), 0, np.arange(len(values))))
    return values[latest]


def constant(table: Table, column: str, of: str) -> float:
    """A static column's one value."""
    values = tables.numbers(table, column, "--static")
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        raise UserError(f"{of}static column {column!r} is empty", hint="another column")
    first = values[known[0]]
    if len(other := known[values[known] != first]):
        here, there = (table.where(int(k)) for k in (known[0], other[0]))
        raise UserError(
            f"{of}static column {column!r} must have one value a series, and has {first:g} at "
            f"{here} and {values[other[0]]:g} at {there}",
            hint="--known or --past are for columns that change",
        )
    return float(first)
