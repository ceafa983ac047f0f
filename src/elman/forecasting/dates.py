"""Times of a series: given a frequency, checked for gaps, continued.

A `Clock` is where a series starts and how it ticks: step k happens at `clock.at(k)`. Ticks are
calendar ones (month ends, business days) or lengths of time; a step without a date ticks in whole
numbers. `timestamps` reads the moments themselves.
"""

import calendar
import datetime as dt
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from elman.errors import UserError
from elman.forecasting.tables import Table

Unit = Literal["step", "second", "day", "business day", "month"]
Moment = dt.datetime | int
_SEASONS = {"business day": 5, "month": 12}
_YEAR = 365.25
"""Days."""


@dataclass(frozen=True)
class Frequency:
    """`count` units from one step to the next.

    >>> Frequency("month", 3).name, Frequency("second", 900).name, Frequency("day", 7).name
    ('quarterly', 'every 15 minutes', 'weekly')
    """

    unit: Unit
    count: int = 1
    month_end: bool = False

    @property
    def name(self) -> str:
        """In words."""
        known = {
            ("month", 1): "monthly",
            ("month", 3): "quarterly",
            ("month", 12): "yearly",
            ("day", 1): "daily",
            ("day", 7): "weekly",
            ("business day", 1): "every business day",
            ("second", 3600): "hourly",
            ("step", 1): "in single steps",
        }.get((self.unit, self.count))
        if known:
            return known
        count, unit = self.count, self.unit
        if unit == "second":
            size = next(s for s in (86400, 3600, 60, 1) if count % s == 0)
            count, unit = count // size, {86400: "day", 3600: "hour", 60: "minute"}.get(size, unit)
        return f"every {count} {unit}s" if count > 1 else f"every {unit}"

    @property
    def season(self) -> int | None:
        """Steps after which such data usually repeats: a day, a week or a year of them."""
        if self.unit == "month":
            return 12 // self.count if 12 % self.count == 0 and self.count < 12 else None
        if self.unit == "second" and 60 <= self.count < 86400 and 86400 % self.count == 0:
            return 86400 // self.count
        if self.unit == "day":
            return {1: 7, 7: 52}.get(self.count)
        return _SEASONS.get(self.unit) if self.count == 1 else None


@dataclass(frozen=True)
class Clock:
    """Step k is at `at(k)`; `zone` is None for times that name no zone."""

    start: Moment
    frequency: Frequency
    zone: dt.tzinfo | None = None
    pattern: str = ""
    days: bool = False
    """Whether the source has dates without a time of day."""

    def at(self, step: int) -> Moment:
        """The moment of a step, before or after the data too."""
        try:
            return self._moved(self.frequency.count * step)
        except (ValueError, OverflowError) as beyond:
            raise UserError(
                f"step {step + 1} from {self.start} on, {self.frequency.name}, is not within the "
                "years 1 to 9999",
                hint="fewer steps, or --time none takes the rows in their order",
            ) from beyond

    def _moved(self, every: int) -> Moment:
        if isinstance(self.start, int):
            return self.start + every
        if self.frequency.unit == "month":
            return _add_months(self.start, every, self.frequency.month_end)
        if self.frequency.unit == "business day":
            return _add_business_days(self.start, every)
        if self.frequency.unit == "day" or self.zone is None:
            unit = 86400 if self.frequency.unit == "day" else 1
            return self.start + dt.timedelta(seconds=unit * every)
        moved = self.start.astimezone(dt.UTC) + dt.timedelta(seconds=every)
        return moved.astimezone(self.zone)

    def label(self, step: int) -> str:
        """A step's time as the data writes it."""
        moment = self.at(step)
        if isinstance(moment, int):
            return str(moment)
        if self.pattern:
            offset, quarter = moment.strftime("%z"), (moment.month + 2) // 3
            pattern = self.pattern.replace("%:z", f"{offset[:3]}:{offset[3:]}")
            return moment.strftime(pattern.replace("%q", str(quarter)))
        if self.frequency.unit != "second" and moment.time() == dt.time(0):
            return moment.date().isoformat()
        return moment.isoformat(sep=" ", timespec="auto")


def frequency_of(moments: Sequence[Moment], table: Table, column: str) -> Frequency:
    """How a sorted series of distinct moments ticks; refuses one that does not.

    Gaps are allowed here (`gaps.missing_rows` names them): the commonest step decides, and every
    other must be a whole number of it.
    """
    if isinstance(moments[0], int):
        return Frequency("step", _mode(np.diff([m for m in moments if isinstance(m, int)])))
    if len(moments) < 2:
        return Frequency("day")
    dates = [m for m in moments if isinstance(m, dt.datetime)]
    for candidate in (_monthly, _business_daily, _daily):
        frequency = candidate(dates)
        if frequency is not None:
            return _check(frequency, moments, table, column)
    seconds = [int(_utc(b).timestamp() - _utc(a).timestamp()) for a, b in _pairs(dates)]
    if min(seconds) < 1:
        raise UserError(
            f"column {column!r} has several steps in a second", hint="number the steps instead"
        )
    return _check(Frequency("second", _mode(np.array(seconds))), moments, table, column)


def _pairs(moments: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(itertools.pairwise(moments))


def _utc(moment: dt.datetime) -> dt.datetime:
    return moment.astimezone(dt.UTC) if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


def _mode(counts: np.ndarray) -> int:
    """The commonest of some counts, the smallest of the commonest; 1 where there are none."""
    common = Counter(counts.tolist())
    return min((c for c in common if common[c] == max(common.values())), default=1)


def _monthly(dates: list[dt.datetime]) -> Frequency | None:
    """Months or their multiples: the same day of the month throughout, or always the last."""
    if len({d.time() for d in dates}) > 1:
        return None
    same_day = len({d.day for d in dates}) == 1
    at_end = all(d.day == calendar.monthrange(d.year, d.month)[1] for d in dates)
    months = np.diff([12 * d.year + d.month for d in dates])
    if not (same_day or at_end) or months.min() < 1:
        return None
    return Frequency(
        "month", _mode(months), month_end=at_end and not (same_day and dates[0].day < 28)
    )


def _business_daily(dates: list[dt.datetime]) -> Frequency | None:
    """Mondays to Fridays: no weekend among them, and weekends are most of what is skipped."""
    if len({d.time() for d in dates}) > 1 or any(d.weekday() > 4 for d in dates):
        return None
    skips = Counter((b.date() - a.date()).days for a, b in _pairs(dates))
    if skips[1] < len(dates) / 2 or not skips[3]:
        return None
    return Frequency("business day")


def _daily(dates: list[dt.datetime]) -> Frequency | None:
    if len({d.time() for d in dates}) > 1:
        return None
    days = np.array([(b.date() - a.date()).days for a, b in _pairs(dates)])
    return Frequency("day", _mode(days)) if days.min() >= 1 else None


def _check(frequency: Frequency, moments: Sequence[Moment], table: Table, column: str) -> Frequency:
    index = positions(moments, frequency)
    for i, at in enumerate(index):
        if at is None:
            raise UserError(
                f"{table.where(i)}, column {column!r}: {moments[i]} is off the beat: the data is "
                f"{frequency.name} from {moments[0]} on",
                hint=f"correct the time{_clocks(moments)}, or leave --time out if the steps "
                "have no regular beat",
            )
    return frequency


def _clocks(moments: Sequence[Moment]) -> str:
    """What else times with offsets may need: days of a place whose clocks change are not 24 h."""
    aware = isinstance(moments[0], dt.datetime) and moments[0].tzinfo is not None
    return ", or name the place: --timezone Europe/Berlin, if its clocks changed" if aware else ""


def positions(moments: Sequence[Moment], frequency: Frequency) -> list[int | None]:
    """The step of each moment, counted from the first; None for one that is on no step."""
    return [_position(moments[0], m, frequency) for m in moments]


def _position(start: Moment, moment: Moment, frequency: Frequency) -> int | None:
    if isinstance(start, int) or isinstance(moment, int):
        assert isinstance(start, int)
        assert isinstance(moment, int)
        distance = moment - start
    elif frequency.unit == "month":
        distance = 12 * (moment.year - start.year) + moment.month - start.month
    elif frequency.unit == "business day":
        distance = int(np.busday_count(start.date(), moment.date()))
    elif frequency.unit == "day":
        distance = (moment.date() - start.date()).days
    else:
        exact = (_utc(moment) - _utc(start)).total_seconds()
        if not exact.is_integer():
            return None
        distance = int(exact)
    steps, rest = divmod(distance, frequency.count)
    return steps if rest == 0 else None


def _add_months(start: dt.datetime, months: int, month_end: bool) -> dt.datetime:
    year, month = divmod(12 * start.year + start.month - 1 + months, 12)
    last = calendar.monthrange(year, month + 1)[1]
    return start.replace(
        year=year, month=month + 1, day=last if month_end else min(start.day, last)
    )


def _add_business_days(start: dt.datetime, days: int) -> dt.datetime:
    moved = np.busday_offset(np.datetime64(start.date()), days, roll="forward")
    day = dt.date(1970, 1, 1) + dt.timedelta(days=int(moved.astype(np.int64)))
    return dt.datetime.combine(day, start.timetz())


def calendar_features(clock: Clock, first: int, steps: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Where in the day, week and year each step lies, as sines and cosines; only what varies.

    A feature whose cycle is not longer than a step says nothing and is left out.
    """
    moments = [clock.at(first + k) for k in range(steps)]
    if not moments or isinstance(moments[0], int):
        return np.zeros((steps, 0)), ()
    dates = [m for m in moments if isinstance(m, dt.datetime)]
    unit, count = clock.frequency.unit, clock.frequency.count
    length = {"second": count / 86400, "month": _YEAR / 12 * count, "day": count}.get(unit, 1.0)
    cycles: dict[str, tuple[float, Callable[[dt.datetime], float]]] = {
        "day": (1.0, lambda d: (d.hour + d.minute / 60 + d.second / 3600) / 24),
        "week": (7.0, lambda d: (d.weekday() + d.hour / 24) / 7),
        "year": (_YEAR, lambda d: (d.timetuple().tm_yday - 1) / _YEAR),
    }
    columns: list[np.ndarray] = []
    names: list[str] = []
    for name, (days, phase) in cycles.items():
        if days <= length:
            continue
        turn = 2 * np.pi * np.array([phase(d) for d in dates])
        columns += [np.sin(turn), np.cos(turn)]
        names += [f"{name} sine", f"{name} cosine"]
    return np.stack(columns, axis=1) if columns else np.zeros((steps, 0)), tuple(names)
