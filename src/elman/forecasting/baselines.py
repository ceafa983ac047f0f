"""The forecasts that cost nothing, and that every model must beat."""

from dataclasses import dataclass, field
from typing import final

import numpy as np

from elman.forecasting.base import Forecaster, Paths, State, Values, Windows
from elman.options import hold_numbers, whole_number


@final
@dataclass
class Last(Forecaster):
    """Tomorrow is like today: x̂_{t+k} = x_t."""

    @property
    def lags(self) -> int:
        return 1

    def _fit(self, series: list[Values]) -> None:
        """Nothing to learn."""

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        """Nothing was learned."""

    def roll(self, windows: Windows, steps: int) -> Paths:
        return np.repeat(windows[:, -1:], steps, axis=1)


@final
@dataclass
class Seasonal(Forecaster):
    """This season is like the last: x̂_{t+k} = x_{t+k-m}, repeated."""

    season: int

    def __post_init__(self) -> None:
        hold_numbers(self)
        whole_number("season", self.season, at_least=1, hint="12 for monthly data")

    @property
    def lags(self) -> int:
        return self.season

    def _fit(self, series: list[Values]) -> None:
        """Nothing to learn."""

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        """Nothing was learned."""

    def roll(self, windows: Windows, steps: int) -> Paths:
        return windows[:, np.arange(steps) % self.season]


@final
@dataclass
class Mean(Forecaster):
    """Always the mean of the training part."""

    _mean: Values = field(init=False, repr=False)

    @property
    def lags(self) -> int:
        return 1

    def _fit(self, series: list[Values]) -> None:
        self._mean = np.concatenate(series).mean(0)

    def state(self) -> State:
        return {"mean": self._mean}

    def restore(self, state: State) -> None:
        self._mean = state["mean"]

    def roll(self, windows: Windows, steps: int) -> Paths:
        return np.broadcast_to(self._mean, (len(windows), steps, windows.shape[2])).copy()


@final
@dataclass
class Drift(Forecaster):
    """The training part's average slope, continued: x̂_{t+k} = x_t + k (x_T - x_1)/(T - 1)."""

    _slope: Values = field(init=False, repr=False)

    @property
    def lags(self) -> int:
        return 1

    def _fit(self, series: list[Values]) -> None:
        rise = np.sum([v[-1] - v[0] for v in series], axis=0)
        self._slope = rise / sum(len(v) - 1 for v in series)

    def state(self) -> State:
        return {"slope": self._slope}

    def restore(self, state: State) -> None:
        self._slope = state["slope"]

    def roll(self, windows: Windows, steps: int) -> Paths:
        return windows[:, -1:] + np.arange(1, steps + 1)[:, None] * self._slope


def baselines(season: int | None) -> dict[str, Forecaster]:
    """The baselines by name; the seasonal one only where the season is known."""
    models: dict[str, Forecaster] = {"last": Last(), "mean": Mean(), "drift": Drift()}
    if season:
        models["seasonal"] = Seasonal(season)
    return models
