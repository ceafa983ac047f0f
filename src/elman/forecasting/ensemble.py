"""What is kept of a forecast: fitted methods, whose mean forecasts each series, and how surely."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.forecasting import panel
from elman.forecasting.base import Forecaster
from elman.forecasting.choice import too_few
from elman.forecasting.intervals import nested
from elman.forecasting.panel import Fitted
from elman.forecasting.series import Series
from elman.forecasting.transformed import Transformed

MOST_STEPS = 10_000


def check_steps(steps: int) -> None:
    """Refuse to look ahead by nothing, or farther than anyone would want to read."""
    if not 1 <= steps <= MOST_STEPS:
        raise UserError(
            f"--steps {steps} must be at least 1 and at most {MOST_STEPS}",
            hint="--steps 16 looks 16 steps ahead",
        )


@dataclass(frozen=True)
class Ahead:
    """What comes after a series: times, the forecast, and an interval for each level."""

    times: tuple[str, ...]
    point: NDArray[np.float64]
    low: dict[float, NDArray[np.float64]]
    high: dict[float, NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Fitted methods by label, and for each series the labels whose mean forecasts it.

    `widen` holds, for each level, how much wider intervals must be than the models say; `seed` is
    what networks were begun from, and are again where one is fitted on a new series.
    """

    fitted: dict[str, Fitted]
    members: list[tuple[str, ...]]
    names: tuple[str, ...]
    widen: dict[float, float]
    steps: int
    seed: int = 0

    def look_ahead(self, series: Sequence[Series], steps: int) -> list[Ahead]:
        """The steps after the last known one of each series, in the order they were fitted."""
        return [self.after(i, s, steps) for i, s in enumerate(series)]

    def after(self, i: int, series: Series, steps: int) -> Ahead:
        """The steps after one series, forecast as series i of those it was fitted on."""
        origin = len(series)
        forecasts = [self.fitted[m].forecast(i, series, [origin], steps) for m in self.members[i]]
        point = np.mean([s.point[0] for s in forecasts], axis=0)
        quantiles = np.mean([s.quantiles[0] for s in forecasts], axis=0)
        low, high = nested(quantiles, self.widen)
        times = tuple(series.time(origin + k) for k in range(steps))
        return Ahead(times, point, low, high)

    def description(self, i: int) -> str:
        """The forecaster of series i in words."""
        labels = self.members[i]
        if len(labels) == 1:
            return repr(self.fitted[labels[0]].models[i])
        counted = Counter(labels)
        return f"the mean of {'; '.join(k if n == 1 else f'{n} × {k}' for k, n in counted.items())}"


def single_columns(series: Sequence[Series]) -> list[Series]:
    """One series a column, named after both where that tells them apart."""
    columns = [c for s in series for c in s.each_column()]
    if any(len(s.columns) > 1 for s in series):
        several = len(series) > 1
        columns = [
            replace(c, name=f"{c.name}, {c.columns[0]}" if several else c.columns[0], id=None)
            for c in columns
        ]
    names = [c.name for c in columns]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two series are called {name!r}", hint="rename one of them")
    return columns


def match(
    ensemble: Ensemble, given: Sequence[Series], steps: int, *, calendar: bool = False
) -> tuple[list[Series], list[Ahead]]:
    """Forecast new series with fitted models, each with the one fitted on the series of its name.

    A forecaster of one series forecasts any one; a network shared by all forecasts any number. A
    series that is new beside others that are known is forecast by what most of those were, fitted
    on it, and a note says so. One that is too short to be fitted on is left out, as it would have
    been then, and a note says why.
    """
    check_steps(steps)
    columns = single_columns(given)
    if calendar:
        columns = [panel.with_calendar(s, steps) for s in columns]
    shared = all(f.method.of.shared for f in ensemble.fitted.values())
    any_one = len(ensemble.names) == 1 and len(columns) == 1
    strangers = [s.name for s in columns if s.name not in ensemble.names and not any_one]
    if len(strangers) == len(columns) and not shared:
        raise UserError(
            f"no model was fitted on a series called {strangers[0]!r}",
            hint=f"it knows {', '.join(ensemble.names[:10])}; fit again for others",
        )
    known, ahead, left_out = [], [], []
    for s in columns:
        if s.name in strangers:
            try:
                s, path = _newcomer(ensemble, s, steps)
            except UserError as refusal:
                left_out.append(f"{s.name} is new and left out: {refusal.message}")
                continue
        else:
            i = ensemble.names.index(s.name) if s.name in ensemble.names else 0
            path = ensemble.after(i, s, steps)
        known.append(s)
        ahead.append(path)
    if not known:
        raise UserError(left_out[0], hint="a longer series")
    known[0] = replace(known[0], notes=(*known[0].notes, *left_out))
    return known, ahead


def _newcomer(ensemble: Ensemble, series: Series, steps: int) -> tuple[Series, Ahead]:
    """What most of the known series are forecast by, fitted on a new one; and a note of that."""
    if panel.room_for(series, ensemble.steps, series.season) < 1:
        raise UserError(
            f"{len(series):,} steps are too few to forecast {ensemble.steps} ahead",
            hint="a longer series",
        )
    usual = Counter(ensemble.members).most_common(1)[0][0]
    methods = [ensemble.fitted[label].method for label in usual]
    lacks = [too_few(m, series, ensemble.steps, ensemble.seed) for m in methods]
    able = tuple(label for label, refusal in zip(usual, lacks, strict=True) if refusal is None)
    if not able:
        raise UserError(str(lacks[0]), hint="a longer series")
    fitted = {label: _anew(ensemble, label, series) for label in able}
    alone = replace(ensemble, fitted=fitted, members=[able], names=(series.name,))
    path = alone.after(0, series, steps)
    if all(f.method.of.shared for f in fitted.values()):
        return series, path
    note = f"{series.name} is new: fitted on it is what most others have, {alone.description(0)}"
    return replace(series, notes=(*series.notes, note)), path


def _anew(ensemble: Ensemble, label: str, series: Series) -> Fitted:
    """A method fitted on another series; a network shared by all serves it as it is."""
    before = ensemble.fitted[label]
    if before.method.of.shared:
        return Fitted(before.method, before.models[:1], before.errors[:1])
    return panel.fit(before.method, [series], ensemble.steps, ensemble.seed)


def notes_of(series: Sequence[Series]) -> list[str]:
    """What there is to say about series: how they were read, what was filled, what is left out."""
    return list(dict.fromkeys(note for s in series for note in s.notes))


def losses(ensemble: Ensemble) -> dict[str, Any]:
    """The training loss of every network, epoch by epoch (a shared one: by tenths of its updates).

    By forecaster, then by series where it has a network for each of several.
    """
    by_forecaster: dict[str, Any] = {}
    for label, fitted in ensemble.fitted.items():
        users = [i for i, labels in enumerate(ensemble.members) if label in labels]
        rows = {ensemble.names[i]: training_losses(fitted.models[i]) for i in users}
        if any(row is not None for row in rows.values()):
            alone = fitted.method.of.shared or len(ensemble.names) == 1
            by_forecaster[label] = next(iter(rows.values())) if alone else rows
    return by_forecaster


def training_losses(model: Forecaster) -> list[float] | None:
    """A network's loss after every epoch, however deep it lies; None: it was not trained."""
    if isinstance(model, Transformed):
        return training_losses(model.inner)
    own = getattr(model, "losses", None)
    return None if own is None else list(own)
