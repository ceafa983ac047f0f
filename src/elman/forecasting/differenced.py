"""Forecast the changes and add them up: what a trend or a season needs."""

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.forecasting.base import Forecaster, Paths, State, Values, Windows


@final
@dataclass
class Differenced(Forecaster):
    """Any forecaster, on y_t = x_t - x_{t-m}; then x̂_{t+k} = x̂_{t+k-m} + ŷ_{t+k}.

    m = 1 models the step-to-step changes, so a level that training never saw is no trouble; m = 12
    on monthly data models the change since the same month last year.
    """

    inner: Forecaster
    lag: int = 1

    def __post_init__(self) -> None:
        if self.lag < 1:
            raise UserError(f"lag={self.lag} must be at least 1", hint="1, or the season")

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

    def state(self) -> State:
        return self.inner.state()

    def restore(self, state: State) -> None:
        self.inner.restore(state)
