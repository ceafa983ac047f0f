"""Which column of a table means what: as the user says, otherwise as it looks, and noted."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from elman.errors import UserError
from elman.forecasting import tables, timestamps
from elman.forecasting.tables import Table
from elman.options import hold_numbers, whole_number

Fill = Literal["forward", "linear", "zero"]
FILLS: tuple[Fill, ...] = ("forward", "linear", "zero")
_LONG = {"unique_id", "ds", "y"}
_TIME_NAMES = frozenset(
    {
        *("ds", "date", "datetime", "time", "timestamp", "year", "month", "day", "week"),
        *("quarter", "period", "hour", "minute", "t", "dt"),
        *("datum", "zeit", "zeitpunkt", "zeitstempel", "jahr", "monat", "woche", "quartal"),
        *("fecha", "año", "mes", "semana", "année", "mois", "semaine", "jour", "horodatage"),
        *("日期", "时间", "年份", "月份"),
    }
)
_INDEX_NAMES = _TIME_NAMES | frozenset(
    ["id", "index", "row", "no", "nr", "unnamed: 0", "unique_id"]
)
_SEASON = "12 for monthly data, 1 for none"


@dataclass(frozen=True)
class Reading:
    """Which columns mean what, and what to do about gaps: everything `load` can be told."""

    column: tuple[str, ...] = ()
    time: str | None = None
    group: tuple[str, ...] = ()
    """The columns whose cells, taken together, tell series apart."""
    known: tuple[str, ...] = ()
    past: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    fill: Fill | None = None
    date_format: str | None = None
    timezone: str | None = None
    season: int | None = None

    def __post_init__(self) -> None:
        hold_numbers(self)
        for name in ("column", "group", "known", "past", "static"):
            object.__setattr__(self, name, names_of(getattr(self, name)))
        if self.fill is not None and self.fill not in FILLS:
            raise UserError(f"--fill {self.fill!r} is unknown", hint=f"one of {', '.join(FILLS)}")
        if self.season is not None and whole_number("season", self.season, hint=_SEASON) < 1:
            raise UserError(f"--season {self.season} must be at least 1", hint=_SEASON)
        named = [*self.column, *self.group, *self.known, *self.past, *self.static]
        named += [self.time] if self.time not in (None, "none") else []
        for name in named:
            if named.count(name) > 1:
                raise UserError(
                    f"column {name!r} is asked for twice", hint="a column has one role in a model"
                )


def names_of(said: str | Sequence[str] | None) -> tuple[str, ...]:
    """One name, several or none, as a tuple of them.

    >>> names_of("shop"), names_of(["region", "shop"]), names_of(None)
    (('shop',), ('region', 'shop'), ())
    """
    return (said,) if isinstance(said, str) else tuple(said or ())


def counted_dates(table: Table, reading: Reading) -> str | None:
    """The --date-format that a time column of plain numbers looks like."""
    numbers = timestamps.as_numbers(table.column(reading.time or "", "--time"))
    return timestamps.counted_like(numbers) if numbers and reading.date_format is None else None


def roles(table: Table, reading: Reading, notes: list[str]) -> Reading:
    """Decide which column is what where the user did not say, and say what was decided."""
    if set(table.columns) >= _LONG and not (reading.group or reading.time or reading.column):
        reading = replace(reading, group=("unique_id",), time="ds", column=("y",))
    for flag, names in (
        ("--column", reading.column),
        ("--known", reading.known),
        ("--past", reading.past),
        ("--static", reading.static),
        ("--group", reading.group),
    ):
        for name in names:
            table.column(name, flag)
    taken: set[str | None] = {*reading.column, *reading.group}
    taken |= {*reading.known, *reading.past, *reading.static}
    if reading.time == "none":
        reading = replace(reading, time=None)
    elif reading.time is None:
        reading = replace(reading, time=_time_column(table, taken, reading.date_format, notes))
        if reading.time:
            notes.append(f"time: column {reading.time!r} (--time none would ignore it)")
    check_times(reading)
    if not reading.column:
        if not {*table.columns} - taken - {reading.time} and taken - {*reading.group}:
            raise UserError(
                f"every column of {table.name} has another role, which leaves none to forecast",
                hint="leave one of --known, --past or --static out",
            )
        reading = replace(reading, column=_target_columns(table, {*taken, reading.time}, notes))
    return reading


def check_totals(table: Table, reading: Reading) -> None:
    """Refuse a last row that sums up those above it, where no date tells that it does."""
    if reading.time is not None:
        return
    for name, cells in table.columns.items():
        *above, last = (str(cell).strip().lower() for cell in cells)
        if name not in reading.group and last in _TOTALS and last not in above:
            raise UserError(
                f"{table.where(len(table) - 1)}, column {name!r}: {cells[-1]!r} looks like a sum "
                "of the rows above, not like one of them",
                hint="delete the line, or call it something else",
            )


_TOTALS = frozenset(
    ["total", "totals", "grand total", "subtotal", "sum", "average", "mean", "summe", "gesamt",
     "insgesamt", "totale", "合计", "总计"]
)  # fmt: skip
"""What spreadsheets call a row below the others."""


def check_times(reading: Reading) -> None:
    """Refuse what says how times are written where there is no column of times."""
    for flag, value in (
        ("--date-format", reading.date_format),
        ("--timezone", reading.timezone),
    ):
        if value is not None and reading.time is None:
            raise UserError(
                f"{flag} {value!r} means nothing without a column of times",
                hint=f"name it with --time, or leave {flag} out",
            )


_PARTS = {("month", "day"): "{}-{:02}-{:02}", ("month",): "{}-{:02}", ("quarter",): "{}-Q{}"}
"""What may stand beside a year in columns of its own, and how the two are one date."""


def joined_dates(table: Table, reading: Reading) -> Table:
    """A table with its year and month (or quarter, or month and day) in one column of dates.

    Only where those are whole numbers and nothing else could be the time, and only as long as
    nobody asks for one of them.
    """
    called = {name.strip().lower(): name for name in table.columns}
    times = [name for name in called if name in _TIME_NAMES]
    asked = {*reading.column, *reading.group, *reading.known, *reading.past, *reading.static}
    for parts, pattern in _PARTS.items():
        names = [called[part] for part in ("year", *parts) if part in called]
        title = "-".join(names)
        if set(times) != {"year", *parts} or asked & {*names}:
            continue
        if reading.time not in (None, title) or _holds_dates(table, asked):
            continue
        cells = [_date(pattern, row) for row in zip(*map(table.columns.get, names), strict=True)]
        if all(cells):
            rest = {n: cells for n, cells in table.columns.items() if n not in names}
            return replace(table, columns={title: cells} | rest)
    return table


def _holds_dates(table: Table, asked: set[str]) -> bool:
    others = {n: cells for n, cells in table.columns.items() if n not in asked}
    return any(
        not tables.looks_numeric(cells) and _dates_begin(table, n, None)
        for n, cells in others.items()
    )


def _date(pattern: str, numbers: tuple[Any, ...]) -> str:
    """A year and the number beside it as a date; "" if they do not make one."""
    texts = [str(n).strip().removesuffix(".0") for n in numbers]
    if not all(map(str.isdecimal, texts)) or not 1000 <= int(texts[0]) <= 3000:
        return ""
    return pattern.format(*map(int, texts)) if int(texts[1]) <= 12 else ""


def _time_column(
    table: Table, taken: set[str | None], date_format: str | None, notes: list[str]
) -> str | None:
    """The one column that is called like a time or holds dates, if there is exactly one."""
    names = []
    for name, cells in table.columns.items():
        numeric = tables.looks_numeric(cells) and not timestamps.in_digits(cells)
        called = name.strip().lower() in _TIME_NAMES
        dated = not numeric and not _is_counted(cells) and _dates_begin(table, name, date_format)
        doubtful = not numeric and date_format is None and timestamps.look_dated(cells)
        if name not in taken and (called or dated or doubtful):
            names.append(name)
    if len(names) > 1:
        notes.append(
            f"each of {', '.join(names)} could be the time: the rows are taken in their order "
            "(--time names the one, or none)"
        )
    if len(names) != 1:
        return None
    cells = table.columns[names[0]]
    numeric = tables.looks_numeric(cells) and not timestamps.in_digits(cells)
    if not numeric and not _dates_begin(table, names[0], date_format):
        if date_format is not None:
            timestamps.read_times(table, names[0], date_format=date_format)  # says what is wrong
        raise UserError(
            f"{table.where(0)}, column {names[0]!r}: {str(cells[0])!r} is not a date that can be "
            "read in one way only",
            hint="say how dates are written: --date-format "
            f"{_formats_of(cells) or repr('%m/%d/%y')}; or "
            "--time none takes the rows in their order",
        )
    return names[0]


def _formats_of(cells: Sequence[Any]) -> str:
    """The formats that may be meant, by the first half of a column: a total may stand below."""
    return timestamps.formats_of([str(c).strip() for c in cells[: (len(cells) + 1) // 2]])


def _is_counted(cells: Sequence[Any]) -> bool:
    """Whether a column begins with a number that is not a date."""
    return timestamps.as_numbers(cells[:1]) is not None


def check_upright(table: Table, reading: Reading) -> None:
    """Refuse a table that lies on its side: times across the top, one series a row."""
    if reading.column:
        return
    times = [name for name in table.columns if _ACROSS.fullmatch(name)]
    if len(times) > 2 and 2 * len(times) > len(table.columns):
        raise UserError(
            f"the header of {table.name} names times ({', '.join(times[:3])} …): a series is a "
            "column here, one row a time",
            hint="turn the table (pandas: frame.melt), or name each --column to forecast it as it "
            "is",
        )


_ACROSS = re.compile(r"(19|20)\d\d([-/. ]?(\d{1,2}|Q[1-4]|W\d\d)([-/.]\d{1,2})?)?", re.IGNORECASE)
"""Years, months, quarters, weeks and days, as they stand in a header."""


def _dates_begin(table: Table, name: str, date_format: str | None) -> bool:
    """Whether the first cell of a column reads as a date, even an ambiguous one."""
    first = table.take([0])
    if tables.is_empty(first.columns[name][0]):
        return False
    if timestamps.as_numbers(first.columns[name]) is not None:
        return True
    try:
        timestamps.read_times(first, name, date_format=date_format)
    except UserError as wrong:
        return "can be read in two ways" in wrong.message
    return True


def _target_columns(table: Table, taken: set[str | None], notes: list[str]) -> tuple[str, ...]:
    """Columns of numbers that are not an index: neither called like one nor counting evenly."""
    numeric = [
        c for c, cells in table.columns.items() if c not in taken and tables.looks_numeric(cells)
    ]
    if not numeric:
        raise _no_numbers(table, taken)
    named = [c for c in numeric if c.strip().lower() in _INDEX_NAMES]
    rest = [c for c in numeric if c not in named]
    counting = [c for c in rest if _counts(table.columns[c])] if len(rest) > 1 else []
    targets = [c for c in rest if c not in counting]
    if not targets:
        raise UserError(
            f"only columns that look like an index hold numbers: {', '.join(numeric)}",
            hint=f"--column {numeric[0]} forecasts it anyway",
        )
    if named or counting:
        notes.append(f"not forecast, as they look like an index: {', '.join(named + counting)}")
    if None in taken:
        notes += [n for c in rest if (n := _may_order(table, c, counts=c in counting))]
    others = [c for c in table.columns if c not in taken and c not in numeric]
    if others:
        notes.append(f"not forecast, as they hold no numbers: {', '.join(others)}")
    return tuple(targets)


def _may_order(table: Table, name: str, *, counts: bool) -> str:
    """A note on a column that may be the time where no other is: it counts, or looks like seconds.

    Days of a spreadsheet look like anything; they are told from other numbers by counting only.
    """
    numbers = timestamps.as_numbers(table.columns[name]) or ()
    kind = timestamps.counted_like(numbers)
    if kind and (counts or kind != "excel"):
        return f"if {name} holds dates: --time {name} --date-format {kind}"
    if counts and numbers and numbers[0] > numbers[-1]:
        return f"{name} counts down: if the newest row stands first, --time {name}"
    return ""


def _no_numbers(table: Table, taken: set[str | None]) -> UserError:
    """Why no column can be forecast: all are taken, or what is in the others is not numbers."""
    rest = [c for c in table.columns if c not in taken]
    if not rest:
        named = ", ".join(c for c in table.columns if c in taken)
        return UserError(
            f"only columns that look like an index hold numbers: {named}",
            hint=f"--column {named.split(', ')[-1]} --time none forecasts it anyway",
        )
    message = f"no column holds numbers among {', '.join(table.columns)}"
    for name in reversed(rest):
        try:
            tables.numbers(table, name)
        except UserError as wrong:
            return UserError(f"{message}: {wrong.message}", hint=wrong.hint)
    return UserError(f"{message}: every cell of {rest[-1]!r} is empty", hint="fill them in")


def _counts(cells: list[Any]) -> bool:
    """Whether a column goes up or down by the same amount each row."""
    try:
        steps = np.diff([float(c) for c in cells])
    except (TypeError, ValueError):
        return False
    return len(steps) > 1 and steps[0] != 0 and bool((steps == steps[0]).all())
