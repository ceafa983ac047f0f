"""Forecast the changes and add them up, or the logarithms: what a trend or a season needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.forecasting.base import Inputs, Paths, Values, Windows
from elman.forecasting.transformed import Transformed
from elman.options import hold_numbers, whole_number


@final
@dataclass
class Differenced(Transformed):
    """Any forecaster, on y_t = x_t - x_{t-m}; then x̂_{t+k} = x̂_{t+k-m} + ŷ_{t+k}.

    m = 1 models the step-to-step changes, so a level that training never saw does no harm; m = 12
    on monthly data models the change since the same month last year.
    """

    lag: int = 1

    def __post_init__(self) -> None:
        hold_numbers(self)
        whole_number("lag", self.lag, at_least=1, hint="1, or the season")

    @property
    def lags(self) -> int:
        return self.inner.lags + self.lag

    @property
    def samples(self) -> bool:
        return self.inner.samples

    def _fit(self, series: list[Values]) -> None:
        self.inner.fit([v[self.lag :] - v[: -self.lag] for v in series])

    def roll(self, windows: Windows, steps: int) -> Paths:
        return self._add_up(windows, self.inner.roll(self._changes(windows), steps))

    def sample(
        self, windows: Windows, steps: int, samples: int, seed: int = 0
    ) -> NDArray[np.float64]:
        drawn = self.inner.sample(self._changes(windows), steps, samples, seed)
        return np.stack([self._add_up(windows, changes) for changes in drawn])

    def _changes(self, windows: Windows) -> Windows:
        return windows[:, self.lag :] - windows[:, : -self.lag]

    def _add_up(self, windows: Windows, changes: Paths) -> Paths:
        known = np.concatenate([windows[:, -self.lag :], changes], axis=1)
        for k in range(self.lag, known.shape[1]):
            known[:, k] += known[:, k - self.lag]
        return known[:, self.lag :]


@final
@dataclass
class Logged(Transformed):
    """Any forecaster, on y_t = log x_t; then x̂ = exp ŷ. For what grows by percents.

    The forecast is the middle of the distribution, not its mean: exp of a mean of logs.
    """

    @property
    def lags(self) -> int:
        return self.inner.lags

    @property
    def samples(self) -> bool:
        return self.inner.samples

    def _fit(self, series: list[Values]) -> None:
        self.inner.fit([_log(v) for v in series])

    def roll(self, windows: Windows, steps: int) -> Paths:
        return _exp(self.inner.roll(_log(windows), steps))

    def forecasts(
        self, values: Values, origins: Sequence[int], steps: int, inputs: Inputs | None = None
    ) -> Paths:
        return _exp(self.inner.forecasts(_log(values), origins, steps, inputs))

    def sample(
        self, windows: Windows, steps: int, samples: int, seed: int = 0
    ) -> NDArray[np.float64]:
        return _exp(self.inner.sample(_log(windows), steps, samples, seed))


def _log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    if (values <= 0).any():
        raise UserError(
            f"{values.min():g} has no logarithm: Logged needs values above 0",
            hint="leave the logarithm out",
        )
    return np.log(values)


def _exp(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """exp, as far as numbers reach: a model that runs away is told apart by whoever uses it."""
    return np.exp(np.clip(logs, -700, 700))
