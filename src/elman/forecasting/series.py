"""Numbers through time: by name, from a table, a data frame or stdin; nothing guessed at silently.

A series is a `(steps, columns)` array with the names of its columns and, where known, its clock,
the length of its season and the inputs that go with it. Built in: the notes' noisy sine, yearly
sunspot numbers, monthly airline passengers.
"""

import datetime as dt
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from elman.errors import MissingSource, UserError
from elman.forecasting import dates, tables, timestamps
from elman.forecasting.dates import Clock, Moment
from elman.forecasting.gaps import constant, filled_in, last_known, missing_rows, spread
from elman.forecasting.reading import (
    Fill,
    Reading,
    check_times,
    check_totals,
    check_upright,
    counted_dates,
    joined_dates,
    names_of,
    roles,
)
from elman.forecasting.tables import Table
from elman.options import hold_numbers, whole_number
from elman.text.datasets import DATASETS

Values = NDArray[np.float64]
Missing = Literal["error", "interpolate"]

NAMES = tuple(name for name, dataset in DATASETS.items() if dataset.kind == "series")
_SEASONS = {"sunspots": 11, "airline": 12}


@dataclass(frozen=True, eq=False)
class Series:
    """One series: `values[t, j]` is column j at step t.

    `known[t]` holds inputs whose future is known, with as many rows after the values' last as the
    source had; `past[t]` those known only with hindsight; `static` what never changes.
    """

    name: str
    values: Values
    columns: tuple[str, ...]
    times: tuple[str, ...] | None = None
    season: int | None = None
    clock: Clock | None = None
    known: Values = field(default_factory=lambda: np.zeros((0, 0)))
    past: Values = field(default_factory=lambda: np.zeros((0, 0)))
    static: Values = field(default_factory=lambda: np.zeros(0))
    inputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reading: "Reading | None" = None
    """How its table was read, what was decided included."""
    id: Any = None
    """What the group's cells held: a frame gets it back."""

    def __post_init__(self) -> None:
        hold_numbers(self)
        assert self.values.ndim == 2
        assert self.values.shape[1] == len(self.columns)
        if not self.known.shape[1]:
            object.__setattr__(self, "known", np.zeros((len(self.values), 0)))
        if not self.past.shape[1]:
            object.__setattr__(self, "past", np.zeros((len(self.values), 0)))

    def __len__(self) -> int:
        return len(self.values)

    def until(self, step: int) -> "Series":
        """The series as it was known after `step` steps; known inputs keep their future."""
        times = self.times[:step] if self.times else None
        return replace(self, values=self.values[:step], past=self.past[:step], times=times)

    def newest(self, count: int) -> "Series":
        """The series without all but its newest `count` steps; what is known ahead stays."""
        cut = max(0, len(self) - count)
        if not cut:
            return self
        clock = self.clock and replace(self.clock, start=self.clock.at(cut))
        return replace(
            self,
            values=self.values[cut:],
            times=self.times[cut:] if self.times else None,
            clock=clock,
            known=self.known[cut:],
            past=self.past[cut:],
        )

    def time(self, step: int) -> str:
        """The time of a step, within the data or after it; its number where there are no dates."""
        if self.times is not None and step < len(self.times):
            return self.times[step]
        return self.clock.label(step) if self.clock else str(step + 1)

    def each_column(self) -> list["Series"]:
        """One series per column."""
        return [
            replace(self, values=self.values[:, [j]], columns=(c,))
            for j, c in enumerate(self.columns)
        ]


def load(
    source: str,
    *,
    column: str | Sequence[str] = (),
    time: str | None = None,
    group: str | Sequence[str] | None = None,
    missing: Missing = "error",
    season: int | None = None,
    seed: int = 0,
    known: str | Sequence[str] = (),
    past: str | Sequence[str] = (),
    static: str | Sequence[str] = (),
    fill: Fill | None = None,
    date_format: str | None = None,
    timezone: str | None = None,
) -> list[Series]:
    """Every series in `source`: a name of `NAMES`, a CSV or Parquet file, or "-" for CSV on stdin.

    `column` chooses what to read (default: every column of numbers that is not an index), `time`
    the column that labels and orders the steps ("none": the rows are in order), `group` the column
    whose values tell several series apart, or several such columns. `known`, `past` and `static`
    name inputs. A table with columns `unique_id`, `ds` and `y` is read as such.

    >>> [sine] = load("sine")
    >>> sine.values.shape
    (1000, 1)
    """
    reading = Reading(
        names_of(column), time, names_of(group), names_of(known), names_of(past), names_of(static),
        "linear" if fill is None and missing == "interpolate" else fill, date_format, timezone,
        season,
    )  # fmt: skip
    if source == "sine":
        return [replace(_named_sine(reading, seed), season=season)]
    if source in NAMES:
        content = (resources.files("elman") / "data" / f"{source}.csv").read_bytes()
        reading = replace(reading, season=season or _SEASONS.get(source))
        return from_table(tables.read_csv(content, source, source), reading)
    try:
        table = tables.read(source)
    except MissingSource as missing_source:
        raise MissingSource(
            missing_source.message, hint=f"{missing_source.hint}, or one of {', '.join(NAMES)}"
        ) from missing_source
    return from_table(table, reading)


def sine(steps: int = 1000, *, noise: float = 0.2, seed: int = 0) -> Series:
    """The notes' data: x_t = sin(0.01 t) + ε_t, ε_t ~ N(0, noise), t = 1 … steps."""
    seed = whole_number("seed", seed, at_least=0, hint="seed=0")
    t = np.arange(1, steps + 1)
    x = np.sin(0.01 * t) + np.random.default_rng(seed).normal(0, noise, steps)
    return Series("sine", x[:, None], ("x",))


def _named_sine(reading: Reading, seed: int) -> Series:
    shown = Table("sine", {"x": []}, [])
    flags = {"--column": reading.column, "--known": reading.known, "--past": reading.past}
    flags |= {"--static": reading.static, "--time": filter(None, [reading.time])}
    flags |= {"--group": reading.group}
    for flag, names in flags.items():
        for name in names:
            shown.column(name, flag)
    check_times(reading)
    return sine(seed=seed)


def from_frame(frame: Any, reading: Reading | None = None) -> list[Series]:
    """The series in a pandas or polars frame, a pyarrow table, or a mapping of names to columns."""
    return from_table(tables.from_frame(frame), reading or Reading())


def from_table(table: Table, reading: Reading) -> list[Series]:
    """Read a table as series: find the columns, part the groups, order the steps, fill if asked."""
    notes: list[str] = list(table.notes)
    check_upright(table, reading)
    table = joined_dates(table, reading)
    reading = roles(table, reading, notes)
    check_totals(table, reading)
    if reading.time and (kind := counted_dates(table, reading)):
        notes.append(f"{reading.time} holds numbers; if they are dates: --date-format {kind}")
    for name in (*reading.column, *reading.known, *reading.past, *reading.static):
        notes += tables.rounded(table, name)
    parts, ids = _parted(table, reading.group)
    several = len(parts) > 1
    made = [s for name, at in parts.items() for s in _some(name, table.take(at), reading, several)]
    notes += _beats(made, reading) + _early_ends(made, reading)
    return [replace(s, notes=(*notes, *s.notes), reading=reading, id=ids.get(s.name)) for s in made]


def _parted(table: Table, group: tuple[str, ...]) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """The rows of each series, and the cell that it is called by where that is one cell.

    Several columns make one name, as Nixtla's libraries write it: north/1.
    """
    if not group:
        return {table.name: list(range(len(table)))}, {}
    parts: dict[str, list[int]] = {}
    ids: dict[str, Any] = {}
    columns = [table.column(name, "--group") for name in group]
    for i, cells in enumerate(zip(*columns, strict=True)):
        for name, cell in zip(group, cells, strict=True):
            if tables.is_empty(cell):
                raise UserError(
                    f"{table.where(i)}, column {name!r} does not say which series this is",
                    hint="fill in that cell",
                )
        called = "/".join(map(str, cells))
        first = parts.setdefault(called, [i])[0]
        if any(str(c[first]) != str(cell) for c, cell in zip(columns, cells, strict=True)):
            raise UserError(
                f"{table.where(first)} and {table.where(i)} belong to different series, and both "
                f"would be called {called!r}",
                hint=f"write one of them without / in {' or '.join(group)}",
            )
        if first != i:
            parts[called].append(i)
        ids.setdefault(called, cells[0] if len(group) == 1 else called)
    return parts, ids


def _early_ends(made: list[Series], reading: Reading) -> list[str]:
    """The series that end before the newest one does, by name: their forecasts begin earlier."""
    last = [s.clock.at(len(s) - 1) for s in made if s.clock is not None]
    if len(last) < len(made) or len({type(m) for m in last}) > 1:
        return []
    keys = [_sortable(m) for m in last]
    early = [
        f"{s.name} ({s.time(len(s) - 1)})" for s, k in zip(made, keys, strict=True) if k < max(keys)
    ]
    if not early:
        return []
    newest = made[keys.index(max(keys))]
    more = f" and {len(early) - 5} more" if len(early) > 5 else ""
    inputs = "" if reading.group else f" (if {newest.name} is an input: --known {newest.name})"
    return [
        f"forecast from where they end, before {newest.time(len(newest) - 1)}: "
        f"{', '.join(early[:5])}{more}{inputs}"
    ]


def _beats(made: list[Series], reading: Reading) -> list[str]:
    """How the series tick and when they repeat, in words, each way once."""
    words = []
    for s in made:
        if s.clock is not None:
            season = f"a season of {s.season} steps" if s.season else "no season"
            words.append(f"{reading.time}: {s.clock.frequency.name}, {season}")
    return list(dict.fromkeys(words))


def _some(name: str, table: Table, reading: Reading, several: bool) -> list[Series]:
    """All columns as one series; or each as its own where some begin later or end earlier.

    Empty cells before a column's first value and after its last are no gaps then. They are where
    the user fills gaps, or where rows after the last value are the future of inputs.
    """
    gaps = any(tables.is_empty(cell) for c in reading.column for cell in table.columns[c])
    if not gaps or reading.fill or reading.known or reading.past:
        return [_one(name, table, reading, several)]
    if reading.time is not None:  # the first row and the last are those in time
        table = _in_order(table, reading, f"series {name}: " if several else "")[0]
    spans = {c: _span(table.columns[c]) for c in reading.column}
    if len(set(spans.values())) == 1 or not all(spans.values()):
        return [_one(name, table, reading, several)]
    return [
        _one(
            f"{name}, {column}" if several else column,
            table.take(span),
            replace(reading, column=(column,)),
            several=True,
        )
        for column, span in spans.items()
    ]


def _span(cells: Sequence[Any]) -> range:
    """The rows from the first cell that says something to the last."""
    filled = [i for i, cell in enumerate(cells) if not tables.is_empty(cell)]
    return range(filled[0], filled[-1] + 1) if filled else range(0)


def _one(name: str, table: Table, reading: Reading, several: bool) -> Series:
    """One series from the rows that belong to it."""
    of = f"series {name}: " if several else ""
    clock: Clock | None = None
    times: tuple[str, ...] | None = None
    notes: list[str] = []
    steps = list(range(len(table)))
    if reading.time is not None:
        table, placed, clock = _in_order(table, reading, of)
        if clock is None:
            notes.append(f"{of}{reading.time} does not count evenly: used for the order only")
            times = tuple(str(c) for c in table.columns[reading.time])
        else:
            steps = placed
            times = _labels(table, reading.time, clock, steps)
    total = steps[-1] + 1
    columns = {c: spread(table, c, "--column", steps, total) for c in reading.column}
    known = {c: spread(table, c, "--known", steps, total) for c in reading.known}
    last = last_known(columns, total) if known else total
    if not last:
        raise UserError(f"{of}no column has a single value", hint="another --column")
    if gaps := missing_rows(table, steps, total, clock):
        if reading.fill is None:
            raise _unfilled(of + gaps, clock)
        notes.append(f"{of}{gaps}: filled ({reading.fill})")
    where = dict(zip(steps, range(len(table)), strict=True))
    filled = functools.partial(filled_in, table, where, reading.fill, of, notes)
    values = [filled(c, v[:last]) for c, v in columns.items()]
    inputs = [filled(c, v) for c, v in known.items()]
    past = [filled(c, spread(table, c, "--past", steps, total)[:last]) for c in reading.past]
    return Series(
        name,
        values=np.stack(values, axis=1),
        columns=reading.column,
        times=times[:last] if times else None,
        season=reading.season or (clock.frequency.season if clock else None),
        clock=clock,
        known=np.stack(inputs, axis=1) if inputs else np.zeros((0, 0)),
        past=np.stack(past, axis=1) if past else np.zeros((0, 0)),
        static=np.array([constant(table, c, of) for c in reading.static]),
        inputs=(*reading.known, *reading.past, *reading.static),
        notes=tuple(notes),
    )


def _unfilled(gaps: str, clock: Clock | None) -> UserError:
    hint = "--fill forward, linear or zero fills them in"
    if clock and clock.zone is None and clock.frequency.unit == "second":
        hint += "; --timezone Europe/Berlin knows when clocks went forward"
    return UserError(gaps, hint=hint)


def _in_order(table: Table, reading: Reading, of: str) -> tuple[Table, list[int], Clock | None]:
    """Rows sorted by time, no two at the same, the step of each, and the clock they follow.

    Numbers that do not count evenly still order the rows; dates that do not are refused.
    """
    time = reading.time
    assert time is not None
    cells = table.column(time, "--time")
    numbers = timestamps.as_numbers(cells) if reading.date_format is None else None
    pattern, zone = "", None
    moments: Sequence[Moment | float]
    if numbers is not None:
        if reading.timezone is not None:
            raise UserError(
                f"--timezone {reading.timezone!r} means nothing to {time!r}, which holds numbers",
                hint="leave --timezone out, or say how dates are counted: --date-format unix",
            )
        moments = numbers
    else:
        moments, pattern, zone = timestamps.read_times(
            table, time, date_format=reading.date_format, timezone=reading.timezone
        )
    keys = [_sortable(m) for m in moments]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    for before, after in itertools.pairwise(order):
        if keys[before] == keys[after]:
            raise _twice(table, reading, before, after, of)
    table = table.take(order)
    ordered = [m for m in (moments[i] for i in order) if not isinstance(m, float)]
    if len(ordered) < len(order):
        return table, [], None
    frequency = dates.frequency_of(ordered, table, time)
    placed = dates.positions(ordered, frequency)
    steps = [step for step in placed if step is not None]
    if len(steps) < len(placed):
        return table, [], None
    _check_span(table, time, steps, frequency, of)
    days = all(isinstance(c, dt.date) and not isinstance(c, dt.datetime) for c in cells)
    return table, steps, Clock(ordered[0], frequency, zone, pattern, days)


def _check_span(
    table: Table, time: str, steps: list[int], frequency: dates.Frequency, of: str
) -> None:
    """Refuse times that lie so far apart that a table of all steps would be mostly gaps."""
    if steps[-1] < _FAR * len(steps) + 1_000_000:
        return
    row = int(np.argmax(np.diff(np.array(steps, dtype=float)))) + 1
    here, there = (str(table.columns[time][i]) for i in (row - 1, row))
    raise UserError(
        f"{of}{table.where(row)}, column {time!r}: {there!r} is {steps[row] - steps[row - 1]:,} "
        f"steps after {here!r} ({frequency.name} data), and the table has {len(steps):,} rows",
        hint="correct that time, or --time none takes the rows in their order",
    )


_FAR = 100
"""Steps a row beyond which times are taken for mistaken ones."""


def _twice(table: Table, reading: Reading, before: int, after: int, of: str) -> UserError:
    """Two rows of one series at the same time: what to do depends on how they differ."""
    time = reading.time or ""
    one, other = ([cells[i] for cells in table.columns.values()] for i in (before, after))
    hint = "a series has one row a time; "
    if one == other:
        hint += "the two rows are the same: delete one"
    elif reading.group:
        columns = " or ".join(map(repr, reading.group))
        hint += f"delete one, or tell them apart in {columns}, or with another --group beside it"
    else:
        counted = timestamps.as_numbers(table.columns[time]) is not None
        hint += f"{_telling_apart(table, time)} tells several series apart, " + (
            "--time none takes the rows in their order"
            if counted
            else "--timezone the two hours when clocks go back"
        )
    first, second = (repr(str(table.columns[time][row])) for row in (before, after))
    also = "" if first == second else f", written {first} and"
    return UserError(
        f"{of}column {time!r}: {table.unit}s {table.rows[before]} and {table.rows[after]} have the "
        f"same {time}{also} {second}",
        hint=hint,
    )


def _telling_apart(table: Table, time: str) -> str:
    """The column of words that no two rows of one time share, or two columns if none does it alone.

    One of the two may hold whole numbers, as shops are numbered: fewer of them than half the rows.
    """
    columns = {name: list(map(str, cells)) for name, cells in table.columns.items()}
    words = [c for c in columns if c != time and not tables.looks_numeric(table.columns[c])]
    counts = [c for c in columns if c not in (*words, time) and _numbers_things(columns[c])]
    for names in ((c,) for c in [*words, *counts]), itertools.combinations([*words, *counts], 2):
        for some in names:
            rows = set(zip(columns[time], *(columns[c] for c in some), strict=True))
            if len(rows) == len(table):
                return " ".join(f"--group {c}" for c in some)
    return "--group COLUMN"


def _numbers_things(cells: list[str]) -> bool:
    return all(c.strip().isdecimal() for c in cells) and 2 * len(set(cells)) < len(cells)


def _sortable(moment: Moment | float) -> float:
    if not isinstance(moment, dt.datetime):
        return moment
    return (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)).timestamp()


def _labels(table: Table, time: str, clock: Clock, steps: list[int]) -> tuple[str, ...]:
    """The times as the source writes them, and for filled steps as the clock would."""
    cells = zip(steps, table.columns[time], strict=True)
    written = {k: str(c) for k, c in cells if not isinstance(c, dt.date)}
    return tuple(written.get(k) or clock.label(k) for k in range(steps[-1] + 1))
