"""Dates and times as tables write them: read, and how to write them again.

A column is read in one way, the same for all its cells. What could mean two things is refused, and
so is a cell that is not a date, by its line.
"""

import datetime as dt
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np

from elman.errors import UserError
from elman.forecasting.tables import Table, is_empty

_WRITTEN = (
    "%Y/%m/%d", "%Y.%m.%d", "%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S", "%Y/%m", "%b %Y", "%B %Y",
    "%Y %b", "%Y %B", "%d %b %Y", "%d %B %Y", "%d-%b-%Y", "%b %d, %Y", "%B %d, %Y", "%b %d %Y",
    "%Y-%m-%d %I:%M %p", "%a, %d %b %Y", "%YM%m", "%Ym%m", "%Y年%m月%d日", "%Y年%m月", "%Y年",
)  # fmt: skip
"""Ways of writing a date that can mean only one thing."""
_DOUBTFUL = (
    "%b-%y", "%b %y", "%B-%y", "%B %y", "%d-%b-%y", "%d %b %y", "%m/%d/%y", "%d/%m/%y", "%d.%m.%y",
    "%y-%m-%d", "%d-%b", "%b %d", "%m/%Y", "%m-%Y", "%m.%Y", "%m/%y", "%m.%y", "%d/%m", "%d.%m",
    "%H:%M", "%H:%M:%S", "%Y-%m-%d%z", "%Y-%j",
)  # fmt: skip
"""Ways of writing a date that can mean several things, or leave a part of it out."""
_SLASHED = re.compile(
    r"(\d{1,2})([/.-])(\d{1,2})\2(\d{4})([ T]\d{1,2}:\d{2}(:\d{2})?( ?[AP]M)?)?$", re.IGNORECASE
)
_ISO = re.compile(r"\d{4}-\d\d-\d\d([T ])\d\d:\d\d(:\d\d)?(Z| UTC|[+-]\d\d:\d\d)?")
_ISO_DATE = re.compile(r"[\dW-]+([T ]|$)")
"""How a time of ISO 8601 begins; Python takes any sign after the date, even that of an offset."""
_QUARTER = re.compile(r"(\d{4})[ -]?Q([1-4])$", re.IGNORECASE)
_QUARTER_FIRST = re.compile(r"Q([1-4])([ /-]?)(\d{4})$", re.IGNORECASE)
_MONTH = re.compile(r"(\d{4})-(\d{1,2})$")
_WEEK = re.compile(r"(\d{4})-?W(\d{2})$")
COUNTED: dict[str, tuple[dt.datetime, float, float, float]] = {
    "excel": (dt.datetime(1899, 12, 30), 86400.0, 2e4, 8e4),
    "unix": (dt.datetime(1970, 1, 1), 1.0, 6e8, 4e9),
    "unix-ms": (dt.datetime(1970, 1, 1), 1e-3, 6e11, 4e12),
}
"""Dates written as numbers: counted from when, in seconds each, and what such numbers look like."""


def as_numbers(cells: Sequence[Any]) -> list[int | float] | None:
    """Times that are plain numbers (years, counters), or None if they are dates, text or truths.

    Whole ones are whole, of any length: counters of nanoseconds have more digits than a float.
    """
    try:
        values = [float(c) for c in cells if not isinstance(c, dt.date | bool)]
    except (TypeError, ValueError):
        return None
    if len(values) < len(cells) or not np.isfinite(values).all():
        return None
    if in_digits(cells) or _pointed(cells):
        return None
    return [_exact(c, v) if v.is_integer() else v for c, v in zip(cells, values, strict=True)]


def _exact(cell: Any, value: float) -> int:
    """The whole number that a cell says, of which `value` may be a rounded one."""
    try:
        return int(cell)
    except ValueError:  # 1e3, 12.0
        return int(value)


def read_times(
    table: Table, column: str, *, date_format: str | None = None, timezone: str | None = None
) -> tuple[list[dt.datetime], str, dt.tzinfo | None]:
    """Every cell of a column as a date and time that all read the same way.

    Returns the moments, the pattern that writes them again ("" for ISO dates), and the time zone.
    """
    cells = table.column(column, "--time")
    for i, cell in enumerate(cells):
        if is_empty(cell):
            raise UserError(
                f"{table.where(i)}, column {column!r} has no time",
                hint=f"fill in that cell{_last(table, i)}",
            )
    zone = _zone(timezone)
    moments, pattern = _parse(table, column, cells, date_format)
    if zone is not None and _in_utc(date_format):
        moments = [m.replace(tzinfo=dt.UTC) for m in moments]
    return _zoned(table, column, moments, pattern, zone)


_UTC_AT_END = re.compile("(?<!%)(Z| ?UTC| ?GMT)$")
"""What says of a written time, or of its pattern, that it is one in UTC."""


def _in_utc(date_format: str | None) -> bool:
    """Whether times of this format are in UTC: 1970 began there, and a Z or UTC says so."""
    return date_format is not None and (
        date_format.startswith("unix") or bool(_UTC_AT_END.search(date_format))
    )


def _zoned(
    table: Table, column: str, moments: list[dt.datetime], pattern: str, zone: ZoneInfo | None
) -> tuple[list[dt.datetime], str, dt.tzinfo | None]:
    aware = [m.tzinfo is not None for m in moments]
    if any(aware) and not all(aware):
        odd = aware.index(not aware[0])
        raise UserError(
            f"{table.where(odd)}, column {column!r}: {table.columns[column][odd]!r} "
            f"{'names' if aware[odd] else 'lacks'} a time zone, unlike the rows before it",
            hint="write all times with an offset, or none",
        )
    if all(aware):
        offsets = {m.utcoffset() for m in moments}
        alone = moments[0].tzinfo if len(offsets) == 1 else None
        home: dt.tzinfo = zone or _common_zone(moments) or alone or dt.UTC
        if zone is not None:
            pattern = _UTC_AT_END.sub("%:z", pattern)
        return [m.astimezone(home) for m in moments], pattern, home
    if zone is None:
        return list(moments), pattern, None
    return _in_zone(table, column, moments, zone), "", zone


def _common_zone(moments: Sequence[dt.datetime]) -> ZoneInfo | None:
    """The zone that all moments name, as those of a frame do; None for mere offsets."""
    names = {str(m.tzinfo) for m in moments}
    try:
        return ZoneInfo(names.pop()) if len(names) == 1 else None
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None


def _in_zone(
    table: Table, column: str, moments: list[dt.datetime], zone: ZoneInfo
) -> list[dt.datetime]:
    """Wall-clock times in their zone; one of a doubled hour is the first after the row before it.

    A table whose newest row stands first is read from its end. Rows in no order do not tell which
    of the two a doubled hour is.
    """
    direction = -1 if moments[0] > moments[-1] else 1
    placed: list[dt.datetime] = []
    before: dt.datetime | None = None
    doubled: int | None = None
    astray: int | None = None
    for row in range(len(moments))[::direction]:
        local = moments[row].replace(tzinfo=zone)
        instant = local.astimezone(dt.UTC)
        if instant.astimezone(zone).replace(tzinfo=None) != moments[row]:
            raise UserError(
                f"{table.where(row)}, column {column!r}: {moments[row]} does not exist in "
                f"{zone.key}, where the clocks went forward",
                hint="check --timezone; perhaps the times are UTC",
            )
        if local.utcoffset() != local.replace(fold=1).utcoffset():
            doubled = row
        if before is not None and instant <= before:
            local = local.replace(fold=1)
            instant = local.astimezone(dt.UTC)
        if before is not None and instant < before:
            astray = row
        placed.append(local)
        before = instant
    if doubled is not None and astray is not None:
        raise UserError(
            f"{table.where(doubled)}, column {column!r}: {moments[doubled]} came twice in "
            f"{zone.key}, where the clocks went back, and the rows are not in order "
            f"({table.where(astray)}), which would tell the two apart",
            hint="sort the rows by time, or write times with their offset: 02:30+01:00",
        )
    return placed[::direction]


def _zone(name: str | None) -> ZoneInfo | None:
    if name is None:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as unknown:
        raise UserError(
            f"--timezone {name!r} is unknown", hint="a name like Europe/Berlin or UTC"
        ) from unknown


_YEAR = r"(1[7-9]|2[01])\d\d"
_DIGITS = {
    "%Y%m%d": re.compile(_YEAR + r"(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])"),
    "%Y%m": re.compile(_YEAR + r"(0[1-9]|1[0-2])"),
    "%G%V": re.compile(_YEAR + r"(0[1-9]|[1-4]\d|5[0-3])"),
}
"""Days, months and weeks that are written as whole numbers, of the years 1700 to 2199."""
_MONTH_OF_YEAR = re.compile(r"(0[1-9]|1[0-2])\.(19|20)\d\d")
"""01.2020, which is not one and a bit."""


def _pointed(cells: Sequence[Any]) -> bool:
    """Whether all cells are parts of dates with a point between: 01.20, as no number is written."""
    texts = [str(c).strip() for c in cells]
    return all(map(re.compile(r"\d\d\.(\d\d|\d{4})").fullmatch, texts)) and any(
        t.startswith("0") for t in texts
    )


def look_dated(cells: Sequence[Any]) -> bool:
    """Whether cells look like dates, even if they cannot be read without being told how.

    The first half of them decides: a total may stand below.

    >>> look_dated(["31.12.20", "30.12.20"]), look_dated(["Mon Jan 6 09:00:00 2020"])
    (True, True)
    >>> look_dated(["10.0.0.1"]), look_dated(["may be"]), look_dated(["12-345"])
    (False, False, False)
    """
    texts = [str(c).strip() for c in cells if not is_empty(c)]
    texts = texts[: (len(texts) + 1) // 2]
    return bool(texts) and (all(map(_DATED.search, texts)) or bool(formats_of(texts)))


_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_DATED = re.compile(
    r"^(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d\d))(?![-/.\d])"
    rf"|^\d{{4}}.?Q[1-4]$|^(?=.*\d{{4}}).*\b({_MONTHS})[a-z]*\b",
    re.IGNORECASE,
)
"""Three numbers as in a date, whatever follows; a quarter; the name of a month beside a year."""


def in_digits(cells: Sequence[Any]) -> bool:
    """Whether all cells are dates written as numbers; weeks only if a year ends among them.

    >>> in_digits(["202011", "202012", "202101"]), in_digits(["202152", "202201"])
    (True, True)
    >>> in_digits(["01.2020", "02.2020"])
    True
    >>> in_digits(["202012", "202013"])  # counted
    False
    """
    texts = [str(c).strip() for c in cells]
    for pattern, way in _DIGITS.items():
        if all(map(way.fullmatch, texts)):
            return pattern != "%G%V" or len({t[:4] for t in texts}) > 1
    return all(map(_MONTH_OF_YEAR.fullmatch, texts))


def _from_digits(pattern: str) -> Callable[[str], dt.datetime]:
    def read(text: str) -> dt.datetime:
        if not _DIGITS[pattern].fullmatch(text):
            raise ValueError(text)
        return (
            dt.datetime.strptime(f"{text}1", "%G%V%u")
            if pattern == "%G%V"
            else (dt.datetime.strptime(text, pattern))
        )

    return read


def _parse(
    table: Table, column: str, cells: Sequence[Any], date_format: str | None
) -> tuple[list[dt.datetime], str]:
    if all(isinstance(c, dt.date) for c in cells):
        return [_at_midnight(c) for c in cells], ""
    texts = [str(c).strip() for c in cells]
    if date_format in COUNTED:
        return _counted(table, column, texts, date_format), ""
    if date_format is not None:
        return _as_said(table, column, texts, date_format), date_format
    if any(_SLASHED.match(t) for t in texts):
        return _slashed(table, column, texts)
    readers: dict[str, Callable[[str], dt.datetime]] = {
        "": _iso,
        "%Y-%m": _year_month,
        **{pattern: _from_digits(pattern) for pattern in ("%Y%m", "%G%V")},
        "Q": _quarter,
        "%G-W%V": _week,
        **{pattern: _as(pattern) for pattern in _WRITTEN},
    }
    failures: dict[str, int] = {}
    for pattern, reader in readers.items():
        moments = _read_until_wrong(texts, reader)
        if len(moments) == len(texts):
            styles = {_style(t) for t in texts} if pattern in ("", "Q") else {pattern}
            return moments, styles.pop() if len(styles) == 1 else ""
        failures[pattern] = len(moments)
    best = max(failures, key=failures.__getitem__)
    row = failures[best]
    like = f" like {texts[0]!r}" if row else ""
    raise UserError(
        f"{table.where(row)}, column {column!r}: {texts[row]!r} is not a date{like}",
        hint=f"correct that cell{_last(table, row)}, or say how dates are written: --date-format "
        f"{formats_of(texts) or repr('%d/%m/%Y')}",
    )


def _as_said(table: Table, column: str, texts: list[str], date_format: str) -> list[dt.datetime]:
    """Dates as --date-format writes them; without a year, only as far as the rows are in order."""
    if "%Z" in date_format:
        raise UserError(
            f"--date-format {date_format!r}: names of time zones (%Z) are not read",
            hint="%z reads offsets (+01:00); write a name that all times have as it is: "
            + date_format.replace("%Z", "UTC"),
        )
    moments = _all(table, column, texts, lambda t: dt.datetime.strptime(t, date_format))
    if not re.search("%[YyGcx]", date_format):
        later, earlier = (
            [i for i in range(1, len(moments)) if compare(moments[i], moments[i - 1])]
            for compare in (operator.gt, operator.lt)
        )
        if later and earlier:
            row = max(later[0], earlier[0])  # where the rows turn
            raise UserError(
                f"{table.where(row)}, column {column!r}: {texts[row]!r} stands after "
                f"{texts[row - 1]!r}, and --date-format {date_format!r} has no year to put the "
                "rows in order",
                hint="write the year, too, or --time none takes the rows in their order",
            )
    return moments


def _last(table: Table, row: int) -> str:
    """What else the last row of a table may need."""
    return ", or delete the line if it is a total" if row and row == len(table) - 1 else ""


def formats_of(texts: Sequence[str]) -> str:
    """The formats that read all these dates, of those that can mean several things; at most two.

    >>> formats_of(["Jan-18", "Feb-18"]), formats_of(["FY18"])
    ("'%b-%y'", '')
    """
    reads = [p for p in _DOUBTFUL if len(_read_until_wrong(list(texts), _as(p))) == len(texts)]
    return " or ".join(map(repr, reads[:2]))


def _as(pattern: str) -> Callable[[str], dt.datetime]:
    return lambda text: dt.datetime.strptime(text, pattern)


def _style(text: str) -> str:
    """The pattern that writes an ISO time or a quarter as it was written; "" for a date alone.

    >>> _style("2024-01-01T00:00Z"), _style("2024-01-01 00:00:00+01:00"), _style("2024-01-01")
    ('%Y-%m-%dT%H:%MZ', '%Y-%m-%d %H:%M:%S%:z', '')
    >>> _style("2024-Q1"), _style("Q1 2024"), _style("20240101")
    ('%Y-Q%q', 'Q%q %Y', '%Y%m%d')
    """
    if _DIGITS["%Y%m%d"].fullmatch(text):
        return "%Y%m%d"
    if quarter := _QUARTER.match(text):
        return f"%Y{text[4 : quarter.end() - 1]}%q"
    if quarter := _QUARTER_FIRST.match(text):
        return f"{text[0]}%q{quarter[2]}%Y"
    if not (match := _ISO.fullmatch(text)):
        return ""
    between, seconds, zone = match.groups(default="")
    ending = "%:z" if zone[:1] in ("+", "-") else zone
    return f"%Y-%m-%d{between}%H:%M{':%S' if seconds else ''}{ending}"


def _read_until_wrong(texts: list[str], reader: Callable[[str], dt.datetime]) -> list[dt.datetime]:
    moments: list[dt.datetime] = []
    for text in texts:
        try:
            moments.append(reader(text))
        except ValueError:
            break
    return moments


def _all(
    table: Table, column: str, texts: list[str], reader: Callable[[str], dt.datetime]
) -> list[dt.datetime]:
    moments = []
    for i, text in enumerate(texts):
        try:
            moments.append(reader(text))
        except ValueError as wrong:
            raise UserError(
                f"{table.where(i)}, column {column!r}: {text!r} is not a date as --date-format "
                f"says ({wrong})",
                hint="%d day, %m month, %Y year, %H:%M time",
            ) from wrong
    return moments


def _at_midnight(day: dt.date) -> dt.datetime:
    if isinstance(day, dt.datetime):
        convert = getattr(day, "to_pydatetime", None)  # pandas' own kind of datetime
        return convert() if convert else day
    return dt.datetime.combine(day, dt.time(0))


def _year_month(text: str) -> dt.datetime:
    match = _MONTH.match(text)
    if not match:
        raise ValueError(text)
    return dt.datetime(int(match[1]), int(match[2]), 1)


def _iso(text: str) -> dt.datetime:
    """As ISO 8601 has it, but for weeks without a day, which are to be written as weeks again.

    UTC after a time means the same as its Z.
    """
    if _WEEK.match(text) or not _ISO_DATE.match(text):
        raise ValueError(text)
    return dt.datetime.fromisoformat(re.sub(r"(?<=:\d\d) UTC$", "Z", text))


def _week(text: str) -> dt.datetime:
    match = _WEEK.match(text)
    if not match:
        raise ValueError(text)
    return dt.datetime.fromisocalendar(int(match[1]), int(match[2]), 1)


def _counted(table: Table, column: str, texts: list[str], kind: str) -> list[dt.datetime]:
    """Dates that count days or seconds from a beginning; whole seconds, as Excel rounds."""
    start, seconds, least, most = COUNTED[kind]
    moments = []
    for i, text in enumerate(texts):
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise UserError(
                f"{table.where(i)}, column {column!r}: {text!r} is not a date as --date-format "
                f"{kind} counts them",
                hint=f"they lie between {least:g} and {most:g}",
            )
        moments.append(start + dt.timedelta(seconds=round(seconds * value)))
    return moments


def counted_like(numbers: Sequence[float]) -> str | None:
    """The --date-format that some numbers look like, if they look like dates at all."""
    for kind, (_, _, least, most) in COUNTED.items():
        if len(numbers) and least <= min(numbers) and max(numbers) <= most:
            return kind
    return None


def _quarter(text: str) -> dt.datetime:
    if match := _QUARTER.match(text):
        year, quarter = match[1], match[2]
    elif match := _QUARTER_FIRST.match(text):
        year, quarter = match[3], match[1]
    else:
        raise ValueError(text)
    return dt.datetime(int(year), 3 * int(quarter) - 2, 1)


def _slashed(table: Table, column: str, texts: list[str]) -> tuple[list[dt.datetime], str]:
    """Dates like 1/31/2012: the whole column decides which number is the month, or nobody does."""
    matches = [_SLASHED.match(t) for t in texts]
    for i, match in enumerate(matches):
        if match is None:
            raise UserError(
                f"{table.where(i)}, column {column!r}: {texts[i]!r} is not a date like "
                f"{texts[0 if i else 1]!r}",
                hint="write all dates the same way; 2012-01-31 is never misread",
            )
    days_first = [i for i, m in enumerate(matches) if m and int(m[1]) > 12]
    months_first = [i for i, m in enumerate(matches) if m and int(m[3]) > 12]
    if days_first and months_first:
        i, j = days_first[0], months_first[0]
        raise UserError(
            f"column {column!r} mixes two orders: {table.where(i)} has {texts[i]!r} (day first), "
            f"{table.where(j)} has {texts[j]!r} (month first)",
            hint="write 2012-01-31, which cannot be misread",
        )
    separator = matches[0][2] if matches[0] else "/"
    if not days_first and not months_first:
        raise UserError(
            f"column {column!r} can be read in two ways: is {texts[0]!r} ({table.where(0)}) the "
            f"day first or the month first? No value exceeds 12",
            hint=f"--date-format '%m{separator}%d{separator}%Y', or %d{separator}%m{separator}%Y",
        )
    order = ("%d", "%m", "%Y") if days_first else ("%m", "%d", "%Y")
    time = matches[0][5] if matches[0] else None
    half = bool(time) and time[-1] in "mM"
    clock = (
        (f"{time[0]}{'%I' if half else '%H'}:%M" + ":%S" * (time.count(":") == 2)) if time else ""
    )
    clock += (" %p" if time and time[-3] == " " else "%p") if half else ""
    pattern = separator.join(order) + clock
    return _all(table, column, texts, lambda t: dt.datetime.strptime(t, pattern)), pattern
