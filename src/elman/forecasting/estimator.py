"""`SeriesForecaster`: fit, predict, score and cross_validation, in the manner of scikit-learn.

It takes what people have: a pandas or polars frame (long, with `unique_id`, `ds` and `y`, or wide,
one column a series), a pyarrow table, a mapping of columns, an array, or a list of `Series`; and
answers in kind: a frame for a frame, a mapping of columns otherwise.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from elman.errors import UserError, counted
from elman.forecasting import ensemble, experiment, output
from elman.forecasting.ensemble import Ensemble
from elman.forecasting.experiment import Experiment
from elman.forecasting.reading import names_of
from elman.forecasting.saving import Saved, load_ensemble, save_ensemble
from elman.forecasting.series import Fill, Reading, Series, from_frame
from elman.forecasting.settings import Settings
from elman.options import whole_number

_AHEAD = "steps=16 looks 16 ahead"


class SeriesForecaster:
    """Forecast one series or many `steps` ahead, with any model of `elman forecast`.

    >>> import numpy as np
    >>> year = np.tile([1.0, 4, 9, 2], 12)
    >>> ahead = SeriesForecaster("seasonal", steps=3, season=4).fit(year).predict()
    >>> ahead["seasonal"]
    [1.0, 4.0, 9.0]

    `levels` are percents of central intervals. `known`, `past` and `static` name input columns.
    `options` go to the model: `{"carry": Truncated(24)}`, `{"hidden": 64}`, `{"tau": 12}`. What
    `elman forecast` would print about the data (what was filled, which series were too short) is in
    `notes_` after `fit` and `predict(data)`.
    """

    def __init__(
        self,
        model: str = "auto",
        steps: int = 12,
        *,
        season: int | None = None,
        levels: Sequence[float] = (80, 95),
        windows: int = 5,
        difference: int = 0,
        options: Mapping[str, Any] | None = None,
        time: str | None = None,
        group: str | Sequence[str] | None = None,
        column: str | Sequence[str] = (),
        known: str | Sequence[str] = (),
        past: str | Sequence[str] = (),
        static: str | Sequence[str] = (),
        calendar: bool = False,
        fill: Fill | None = None,
        date_format: str | None = None,
        timezone: str | None = None,
        minutes: float = 2.0,
        seed: int = 0,
    ) -> None:
        self.model, self.steps, self.season, self.levels = model, steps, season, levels
        self.windows, self.difference, self.options = windows, difference, options
        self.time, self.group, self.column = time, group, column
        self.known, self.past, self.static, self.calendar = known, past, static, calendar
        self.fill: Fill | None = fill
        self.date_format, self.timezone = date_format, timezone
        self.minutes, self.seed = minutes, seed

    # scikit-learn's protocol

    @classmethod
    def _names(cls) -> list[str]:
        return [n for n in inspect.signature(cls.__init__).parameters if n != "self"]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Every setting by name."""
        del deep
        return {name: getattr(self, name) for name in self._names()}

    def set_params(self, **settings: Any) -> Self:
        """Change settings; fit again afterwards."""
        for name, value in settings.items():
            if name not in self._names():
                raise UserError(
                    f"SeriesForecaster has no setting {name!r}",
                    hint=f"it has {', '.join(self._names())}",
                )
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        default = {
            k: p.default for k, p in inspect.signature(type(self).__init__).parameters.items()
        }
        changed = {k: v for k, v in self.get_params().items() if v != default[k]}
        return f"SeriesForecaster({', '.join(f'{k}={v!r}' for k, v in changed.items())})"

    def fit(self, data: Any, y: Any = None) -> Self:
        """Choose or take a model, measure it at past origins, and fit it on everything.

        `y` is there for scikit-learn's sake and must be None: a series is its own target.
        """
        if y is not None:
            raise UserError("a series is its own target: fit(data)", hint="leave y out")
        series, settings = self._series(data), self._settings()
        measured = experiment.fit_and_measure(series, settings)  # or what was fitted before stays
        self._like, self._model, self._calendar = data, settings.model, settings.calendar
        self._read = series[0].reading or self._reading(), series[0].columns
        self.series_: list[Series] = series
        self.experiment_: Experiment = measured
        self.ensemble_: Ensemble = measured.ensemble
        self.notes_: list[str] = measured.notes()
        return self

    def predict(self, data: Any = None, *, steps: int | None = None) -> Any:
        """What comes after the data it was fitted on, or after newer `data`: one row a step.

        Columns are `unique_id`, `ds`, the model's name and its intervals, `auto-lo-80` and so on;
        one that was loaded names them after no model: `forecast`, `forecast-lo-80`.
        A series in `data` that `fit` did not see is forecast by what most others have, fitted on
        it; one that is too short for `fit` has no rows here either. `notes_` names them.
        """
        self._check()
        ahead_of = self._steps if steps is None else whole_number("steps", steps, hint=_AHEAD)
        given = self._fitted() if data is None else self._series(data)
        columns, ahead = ensemble.match(self.ensemble_, given, ahead_of, calendar=self._calendar)
        if data is not None:
            self.notes_ = ensemble.notes_of(columns)
        like = self._like if data is None else data
        rows = output.rows_ahead(columns, ahead, self._model, moments=_home(like) in _FRAMES)
        return _in_kind(rows, like)

    def score(self, data: Any, y: Any = None) -> float:
        """1 - mean |x - x̂| / mean |x - x̂_naive| over the last `steps` of `data`: 1 is exact.

        The naive forecast repeats the season, or the last value. The model sees `data` without
        those steps; it is not fitted again.
        """
        del y
        self._check()
        own, naive, steps = [], [], self._steps
        for s in self._scored(data):
            cut = s.until(len(s) - steps)
            _, [ahead] = ensemble.match(self.ensemble_, [cut], steps, calendar=self._calendar)
            truth, m = s.values[-steps:, 0], s.season or 1
            repeated = cut.values[-m:, 0][np.arange(steps) % min(m, len(cut))]
            own.append(np.abs(truth - ahead.point).mean())
            naive.append(np.abs(truth - repeated).mean())
        return float(1 - np.mean(own) / np.mean(naive)) if np.mean(naive) > 0 else 0.0

    def cross_validation(self, data: Any, *, windows: int | None = None) -> Any:
        """Forecasts at rolling origins beside what came: one row a series, cutoff and step.

        Columns are `unique_id`, `ds`, `cutoff`, `y`, then every rival that was tried.
        """
        settings = self._settings(
            windows=self.windows if windows is None else windows, every=self._steps
        )
        measured = experiment.fit_and_measure(self._series(data), settings)
        typed = _home(data) in _FRAMES
        when = output.moment if typed and output.of_one_kind(measured.series) else Series.time
        rows: dict[str, list[Any]] = {"unique_id": [], "ds": [], "cutoff": [], "y": []}
        backtests = measured.backtests()
        for i, s in enumerate(measured.series[j] for j in measured.compared):
            first = next(iter(backtests.values()))[i]
            for n, o in enumerate(first.origins.tolist()):
                rows["unique_id"] += [output.name_of(s, typed=typed)] * settings.steps
                rows["ds"] += [when(s, o + k) for k in range(settings.steps)]
                rows["cutoff"] += [when(s, o - 1)] * settings.steps
                rows["y"] += first.truth[n].tolist()
                for name, rivals in backtests.items():
                    rows.setdefault(name, []).extend(rivals[i].point[n].tolist())
        return _in_kind(rows, data)

    # Keeping

    def save(self, folder: Path | str) -> Path:
        """Write what was fitted; `SeriesForecaster.load` and `elman forecast --run` read it."""
        self._check()
        saved = Saved(self.ensemble_, *self._read, self._calendar)
        measured = getattr(self, "experiment_", None)  # one that was loaded has not measured
        return save_ensemble(saved, folder, experiment.about(measured.answer()) if measured else {})

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Read what `save` or `elman forecast --out` wrote; `predict(data)` then needs data."""
        saved = load_ensemble(folder)
        names = ("time", "group", "column", "known", "past", "static", "fill", "date_format")
        options = {k: getattr(saved.reading, k) for k in (*names, "timezone", "season")}
        options["column"] = options["column"] or saved.columns
        estimator = cls(
            "forecast", saved.ensemble.steps, levels=tuple(saved.ensemble.widen),
            calendar=saved.calendar, seed=saved.ensemble.seed, **options,
        )  # fmt: skip
        estimator.ensemble_, estimator.series_, estimator._like = saved.ensemble, [], None
        estimator.notes_, estimator._model, estimator._calendar = [], "forecast", saved.calendar
        estimator._read = saved.reading, saved.columns
        return estimator

    # Inside

    def _check(self) -> None:
        if not hasattr(self, "ensemble_"):
            raise UserError("this forecaster is not fitted yet", hint="call fit(data) first")

    def _fitted(self) -> list[Series]:
        """The series that models were fitted on: not those that were too short."""
        if not self.series_:
            raise UserError(
                "a forecaster that was loaded has no series of its own",
                hint="predict(data) forecasts what comes after data",
            )
        known = self.ensemble_.names
        return [s for s in ensemble.single_columns(self.series_) if s.name in known]

    def _scored(self, data: Any) -> list[Series]:
        """The series in `data` that are longer than the steps to be forecast, by at least one."""
        given = ensemble.single_columns(self._series(data))
        long = [s for s in given if len(s) > self._steps]
        if not long:
            longest = max(given, key=len)
            raise UserError(
                f"{longest.name} has {counted(len(longest), 'steps')}: too few to forecast the "
                f"last {self._steps} of them",
                hint="a longer series",
            )
        return [s for s in long if s.name in self.ensemble_.names] or long

    @property
    def _steps(self) -> int:
        return whole_number("steps", self.steps, at_least=1, hint=_AHEAD)

    def _settings(self, **changed: Any) -> Settings:
        return Settings(**{
            "model": self.model, "steps": self.steps, "difference": self.difference,
            "options": dict(self.options or {}), "levels": self.levels,
            "windows": self.windows, "calendar": self.calendar, "minutes": self.minutes,
            "seed": self.seed, **changed,
        })  # fmt: skip

    def _reading(self) -> Reading:
        return Reading(
            names_of(self.column), self.time, names_of(self.group), names_of(self.known),
            names_of(self.past), names_of(self.static), self.fill, self.date_format, self.timezone,
            self.season,
        )  # fmt: skip

    def _series(self, data: Any) -> list[Series]:
        if isinstance(data, Series):
            return [data]
        if isinstance(data, list) and data and isinstance(data[0], Series):
            return data
        if isinstance(data, Tensor):
            data = data.detach().cpu().double().numpy()
        if isinstance(data, np.ndarray | list | tuple):
            try:
                if np.iscomplexobj(data):
                    raise TypeError("these are complex")
                values = np.asarray(data, dtype=np.float64)
            except (TypeError, ValueError) as wrong:
                raise UserError(
                    f"a {type(data).__name__} to forecast must hold numbers: {wrong}",
                    hint="a frame or a mapping of names to columns holds dates and words too",
                ) from wrong
            if values.ndim == 1:
                values = values[:, None]
            if values.ndim != 2:
                raise UserError(
                    f"an array of shape {values.shape} is neither (steps,) nor (steps, series)",
                    hint="a frame, an array or a list of Series",
                )
            names = ["y"] if values.shape[1] == 1 else [f"y{j}" for j in range(values.shape[1])]
            return from_frame(dict(zip(names, values.T, strict=True)), self._reading())
        return from_frame(data, self._reading())


_FRAMES = ("pandas", "polars", "pyarrow")


def _home(table: Any) -> str:
    """The library that a table comes from."""
    return type(table).__module__.split(".")[0]


def _in_kind(rows: dict[str, list[Any]], like: Any) -> Any:
    """Rows as a frame of the library that `like` came from; a mapping where it came from none."""
    home = _home(like)
    if home == "pandas":
        import pandas as pd

        return pd.DataFrame(rows)
    if home == "polars":
        import polars as pl

        return pl.DataFrame(rows)
    if home == "pyarrow":
        import pyarrow as pa

        return pa.table(rows)
    return rows
