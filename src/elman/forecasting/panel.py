"""Many series at once: fit a method on them, forecast them, and try it at rolling origins.

A panel is a list of series of one column each. A method is fitted series by series, or once for all
where it is shared; either way series i is then forecast by `fitted.models[i]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError, counted
from elman.forecasting.base import Forecaster, Inputs
from elman.forecasting.catalogue import Method, Plan
from elman.forecasting.dates import calendar_features
from elman.forecasting.intervals import GRID, MIDDLE, Errors, errors
from elman.forecasting.progress import tell
from elman.forecasting.series import Series

Points = NDArray[np.float64]
"""(origins, steps)"""

Quantiles = NDArray[np.float64]
"""(origins, steps, len(GRID))"""


class Outlook(NamedTuple):
    """What is expected, and the quantiles of what may come."""

    point: Points
    quantiles: Quantiles


@dataclass(frozen=True)
class Fitted:
    """One method fitted on a panel: a model a series, and how each errs (None: it says itself)."""

    method: Method
    models: list[Forecaster]
    errors: list[Errors | None]

    def forecast(self, i: int, series: Series, origins: Sequence[int], steps: int) -> Outlook:
        """What series i will be after each origin."""
        model, inputs = self.models[i], inputs_of(series, self.models[i])
        own = model.quantiles(series.values, origins, steps, GRID, inputs)
        if own is not None:
            return Outlook(own[:, :, 0, MIDDLE], own[:, :, 0])
        path = model.forecasts(series.values, origins, steps, inputs)
        known = self.errors[i]
        assert known is not None
        quantiles = known.around(path, GRID)[:, :, 0]
        return Outlook(quantiles[..., MIDDLE] if self.method.median else path[:, :, 0], quantiles)


def with_calendar(series: Series, steps: int) -> Series:
    """A series whose known inputs include where in the day, week and year each step lies."""
    if series.clock is None or isinstance(series.clock.start, int):
        raise UserError(
            f"--calendar has no days, weeks or years to tell: the steps of {series.name} have "
            "no dates",
            hint="leave --calendar out, or name the column of dates with --time",
        )
    have = series.known.shape[1]
    rows = max(len(series) + steps, len(series.known)) if not have else len(series.known)
    features, _ = calendar_features(series.clock, 0, rows)
    if not features.shape[1]:
        raise UserError(
            f"--calendar has nothing to tell: {series.name} is {series.clock.frequency.name}, "
            "so that each step is at the same time of the year",
            hint="leave --calendar out",
        )
    known = np.concatenate([series.known[:rows], features], axis=1) if have else features
    return replace(series, known=known)


def inputs_of(series: Series, model: Forecaster | None = None) -> Inputs | None:
    """A series' inputs; None where it has none, or the model does not read any."""
    inputs = Inputs(series.known, series.past, series.static)
    return inputs if inputs.width and (model is None or model.reads_inputs) else None


def plan_for(panel: list[Series], steps: int, seed: int = 0) -> Plan:
    """What a method must know to be made for all of these series."""
    first = panel[0]
    return Plan(
        steps,
        first.season if (first.season or 1) > 1 else None,
        min(map(len, panel)),
        first.known.shape[1],
        first.past.shape[1],
        seed,
    )


def fit(method: Method, panel: list[Series], steps: int, seed: int = 0) -> Fitted:
    """Fit a method on whole series: one model each, or one for all."""
    if method.of.shared:
        model = method.make(plan_for(panel, steps, seed))
        inputs = [inputs_of(s, model) for s in panel]
        read = None if None in inputs else [i for i in inputs if i is not None]
        model.fit([s.values for s in panel], read)
        return Fitted(method, [model] * len(panel), [None] * len(panel))
    models, known = [], []
    for n, s in enumerate(panel, 1):
        if n > 1:
            tell(f"series {n} of {len(panel)}")
        model = method.make(plan_for([s], steps, seed))
        inputs = inputs_of(s, model)
        model.fit([s.values], None if inputs is None else [inputs])
        models.append(model)
        known.append(errors(model, s.values, steps, inputs))
    return Fitted(method, models, known)


@dataclass(frozen=True, eq=False)
class Backtest:
    """What one method said about one series at past origins, and what came."""

    origins: NDArray[np.int64]
    window: NDArray[np.int64]
    """Which window each origin belongs to."""
    truth: NDArray[np.float64]
    """(origins, steps)"""
    point: Points
    quantiles: Quantiles

    def only(self, windows: Sequence[int]) -> "Backtest":
        """The origins of some windows."""
        keep = np.isin(self.window, windows)
        return Backtest(*(getattr(self, f.name)[keep] for f in fields(self)))


def average(members: Sequence[Backtest]) -> Backtest:
    """The mean of several methods' forecasts, quantile by quantile."""
    first = members[0]
    point = np.mean([m.point for m in members], axis=0)
    together = np.mean([m.quantiles for m in members], axis=0)
    return Backtest(first.origins, first.window, first.truth, point, together)


def in_sequence(parts: Sequence[Backtest]) -> Backtest:
    """Backtests of one series in different windows as one."""
    names = [f.name for f in fields(Backtest)]
    return Backtest(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))


@dataclass(frozen=True)
class Windows:
    """Rolling origins: the last `count` times `steps` steps, forecast from each `every`-th."""

    count: int
    steps: int
    every: int

    def starts(self, length: int) -> list[int]:
        """Where each window's training ends."""
        return [length - (self.count - w) * self.steps for w in range(self.count)]

    def origins(self, length: int, w: int) -> range:
        """The origins of window w whose whole future is known."""
        first = self.starts(length)[w]
        return range(first, min(first + self.steps, length - self.steps + 1), self.every)


def windows_for(
    panel: list[Series], steps: int, count: int, *, every: int | None = None
) -> tuple[Windows, list[int]]:
    """As many windows as asked, or as fit, and the series, by number, that have room for them.

    Where series are not as long as each other, windows are as many as there are most of in all: a
    short one among long ones is not looked back at, and does not leave one window to judge by.
    """
    if count < 1:
        raise UserError(f"--windows {count} must be at least 1", hint="5 is common")
    season = panel[0].season
    room = np.array([room_for(s, steps, season) for s in panel])
    if room.max() < 1:
        longest = max(panel, key=len)
        least = _least(len(longest), steps, season)
        left = len(longest) - least
        fewer = f"--steps {max(1, left // 2)}, or " if left > 0 else ""
        raise UserError(
            f"{longest.name} has {counted(len(longest), 'steps')}: too few to forecast {steps} "
            f"ahead and see how well that works, with {least} left to learn from",
            hint=f"{fewer}a longer series",
        )
    spacing = every or (max(1, steps // 6) if len(panel) <= 10 else steps)
    compared = {c: np.flatnonzero(room >= c).tolist() for c in range(1, count + 1)}
    count = max(compared, key=lambda c: c * len(compared[c]))
    return Windows(count, steps, min(spacing, steps)), compared[count]


def _least(length: int, steps: int, season: int | None) -> int:
    """How many steps the first window must leave to learn from."""
    wanted = max(8, 2 * season + 2) if season and season > 1 else 8
    return max(4, length // 4, min(wanted, length - 2 * steps))


def room_for(series: Series, steps: int, season: int | None) -> int:
    """How many windows a series has room for, with enough before the first to learn from."""
    return (len(series) - _least(len(series), steps, season)) // steps


def named(some: Sequence[Series]) -> str:
    """The first three of some series by name, with their lengths."""
    words = ", ".join(f"{s.name} ({len(s):,} steps)" for s in some[:3])
    return words + (f" and {len(some) - 3} others" if len(some) > 3 else "")


def cross_validate(
    method: Method, panel: list[Series], windows: Windows, *, seed: int = 0
) -> list[Backtest]:
    """Forecast every series from past origins, using at each only what was known before it.

    Methods solved exactly are fitted again in every window; networks learn once, before the first,
    and are then shown what has come since.
    """
    fitted: Fitted | None = None
    parts: list[list[Backtest]] = [[] for _ in panel]
    for w in range(windows.count):
        tell(f"window {w + 1} of {windows.count}")
        if fitted is None or not method.of.network:
            past = [s.until(windows.starts(len(s))[w]) for s in panel]
            fitted = fit(method, past, windows.steps, seed)
        for i, s in enumerate(panel):
            origins = windows.origins(len(s), w)
            said = fitted.forecast(i, s, origins, windows.steps)
            truth = np.stack([s.values[o : o + windows.steps, 0] for o in origins])
            which = np.full(len(origins), w)
            parts[i].append(Backtest(np.array(origins), which, truth, *said))
    return [in_sequence(p) for p in parts]
