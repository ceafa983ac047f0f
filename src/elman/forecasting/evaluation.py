"""Honest errors: train, calibrate and test on consecutive parts; or refit at rolling origins."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from elman.errors import UserError
from elman.forecasting import accuracy
from elman.forecasting.accuracy import ByHorizon
from elman.forecasting.base import Forecaster, Paths, Values, windows_before
from elman.forecasting.intervals import Intervals
from elman.options import whole_number


@dataclass(frozen=True)
class Parts:
    """One series cut in three, in order: steps before `validation`, before `test`, and the rest."""

    values: Values
    validation: int
    test: int

    @property
    def train(self) -> Values:
        """The first part, to fit on."""
        return self.values[: self.validation]


def split(values: Values, validation: float = 0.2, test: float = 0.2) -> Parts:
    """Cut at ⌊T(1 - validation - test)⌋ and ⌊T(1 - test)⌋: no shuffling, nothing twice."""
    if not (validation > 0 and test > 0 and validation + test < 1):
        raise UserError(
            f"validation={validation} and test={test} must be positive and leave some to train on",
            hint="0.2 and 0.2 keep the first 60 % for training",
        )
    steps = len(values)
    return Parts(values, int(steps * (1 - validation - test)), int(steps * (1 - test)))


@dataclass(frozen=True)
class Scores:
    """A model's errors by horizon, on values it never learned from."""

    forecasts: int
    rmse: ByHorizon
    mae: ByHorizon
    smape: ByHorizon
    mase: ByHorizon | None = None
    crps: ByHorizon | None = None
    coverage: ByHorizon | None = None
    width: ByHorizon | None = None


def score(
    model: Forecaster,
    series: list[Parts],
    steps: int,
    *,
    season: int = 1,
    intervals: Intervals | None = None,
    samples: int = 0,
    seed: int = 0,
) -> Scores:
    """Forecast `steps` ahead from every origin of the test parts and measure each horizon."""
    pairs = [_test_paths(model, part, steps) for part in series]
    truth = np.concatenate([t for t, _ in pairs])
    forecast = np.concatenate([f for _, f in pairs])
    drawn = [_test_samples(model, part, steps, samples, seed) for part in series] if samples else []
    return measure(
        truth,
        forecast,
        [part.train for part in series],
        season=season,
        intervals=intervals,
        samples=np.concatenate(drawn, axis=1) if drawn else None,
    )


def measure(
    truth: Paths,
    forecast: Paths,
    training: list[Values],
    *,
    season: int = 1,
    intervals: Intervals | None = None,
    samples: np.ndarray | None = None,
) -> Scores:
    """Every measure of `accuracy` that applies. MASE is left out where training was constant."""
    moves = all((np.ptp(v, axis=0) > 0).all() and len(v) > season for v in training)
    ends = intervals.around(forecast) if intervals else None
    return Scores(
        forecasts=len(truth),
        rmse=accuracy.rmse(truth, forecast),
        mae=accuracy.mae(truth, forecast),
        smape=accuracy.smape(truth, forecast),
        mase=accuracy.mase(truth, forecast, training, season) if moves else None,
        crps=accuracy.crps(truth, samples) if samples is not None else None,
        coverage=accuracy.coverage(truth, *ends) if ends else None,
        width=accuracy.width(*ends) if ends else None,
    )


def _origins(part: Parts, steps: int) -> range:
    """Every origin in the test part whose whole future is known."""
    last = len(part.values) - steps
    if last < part.test:
        raise UserError(
            f"the test part has {len(part.values) - part.test} steps, not enough for {steps} ahead",
            hint="fewer --steps, a larger --test, or a longer series",
        )
    return range(part.test, last + 1)


def _test_paths(model: Forecaster, part: Parts, steps: int) -> tuple[Paths, Paths]:
    origins = _origins(part, steps)
    truth = np.stack([part.values[o : o + steps] for o in origins])
    return truth, model.forecasts(part.values, origins, steps)


def _test_samples(
    model: Forecaster, part: Parts, steps: int, samples: int, seed: int
) -> np.ndarray:
    windows = windows_before(part.values, _origins(part, steps), model.lags)
    return model.sample(windows, steps, samples, seed)


def backtest(
    make: Callable[[], Forecaster], values: Values, folds: int, steps: int, *, season: int = 1
) -> Scores:
    """Rolling origin: at each of `folds` origins refit on all that came before, forecast, move on.

    Fold i tests steps T - (folds - i)·steps … of the series, so the tests do not overlap and end
    with the last value.
    """
    folds = whole_number("backtest", folds, at_least=1, hint="5 is common")
    first = len(values) - folds * steps
    if first < 2:
        raise UserError(
            f"{folds} folds of {steps} steps need {folds * steps + 2} values, and there are "
            f"{len(values)}",
            hint="fewer folds or fewer steps",
        )
    origins = range(first, len(values), steps)
    truth = np.stack([values[o : o + steps] for o in origins])
    forecast = np.stack([make().fit(values[:o]).predict(values[:o], steps) for o in origins])
    return measure(truth, forecast, [values[:first]], season=season)
