"""Take the season away, forecast what is left, and put it back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from elman.forecasting.base import (
    Inputs,
    Paths,
    Values,
    Windows,
    as_values,
    windows_before,
)
from elman.forecasting.transformed import Transformed
from elman.options import hold_numbers, whole_number


@final
@dataclass
class Deseasonalised(Transformed):
    """Any forecaster, on y_t = x_t - s_{t mod m}; then x̂_{t+k} = ŷ_{t+k} + s_{(t+k) mod m}.

    s is found by least squares beside a straight line, from all that is known before an origin: a
    season that repeats itself, where `Differenced` and `Smoothing` follow one that changes.
    """

    season: int

    def __post_init__(self) -> None:
        hold_numbers(self)
        whole_number("season", self.season, at_least=2, hint="12 for monthly data")

    @property
    def lags(self) -> int:
        return max(self.inner.lags, 2 * self.season)

    @property
    def learned(self) -> int:
        return super().learned + self.season

    @property
    def reads_inputs(self) -> bool:
        return self.inner.reads_inputs

    def _fit(self, series: list[Values]) -> None:
        self.inner.fit([self._without(v) for v in series])

    def _fit_with(self, series: list[Values], inputs: list[Inputs]) -> None:
        self.inner.fit([self._without(v) for v in series], inputs)

    def patterns(self, values: Values, origins: NDArray[np.int64]) -> Paths:
        """s_0 … s_{m-1} before each origin, summing to zero, counted from the first value.

        By sums over the steps of season j: slope b = Σ_j cov_j(t, x) / Σ_j var_j(t), and
        s_j = mean_j(x) - b mean_j(t), less their mean.
        """
        t = np.arange(len(values))
        at = np.eye(self.season)[t % self.season][:, :, None]
        when = t[:, None, None]
        n, st, stt, sx, stx = (
            np.cumsum(at * row, axis=0)[origins - 1]
            for row in (1.0, when, when**2.0, values[:, None], when * values[:, None])
        )
        slope = (stx - st * sx / n).sum(1, keepdims=True) / (stt - st**2 / n).sum(1, keepdims=True)
        level = sx / n - slope * st / n
        return level - level.mean(1, keepdims=True)

    def _without(self, values: Values) -> Values:
        pattern = self.patterns(values, np.array([len(values)]))[0]
        return values - pattern[np.arange(len(values)) % self.season]

    def roll(self, windows: Windows, steps: int) -> Paths:
        return np.concatenate([self.forecasts(w, [len(w)], steps) for w in windows])

    def forecasts(
        self, values: Values, origins: Sequence[int], steps: int, inputs: Inputs | None = None
    ) -> Paths:
        values, at = as_values(values), np.asarray(origins)
        past = windows_before(values, origins, self.lags)[:, self.lags - self.inner.lags :]
        pattern = self.patterns(values, at)
        rows = np.arange(len(at))[:, None]
        behind = at[:, None] + np.arange(-self.inner.lags, 0)
        ahead = pattern[rows, (at[:, None] + np.arange(steps)) % self.season]
        if inputs is None:
            return self.inner.roll(past - pattern[rows, behind % self.season], steps) + ahead
        paths = []
        for o, s in zip(at.tolist(), pattern, strict=True):
            known = Inputs(inputs.known, inputs.past[:o], inputs.static)
            rest = values[:o] - s[np.arange(o) % self.season]
            paths.append(self.inner.forecasts(rest, [o], steps, known)[0])
        return np.stack(paths) + ahead
