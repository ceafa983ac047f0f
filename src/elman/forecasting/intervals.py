"""Split-conformal intervals: how wide the forecast must be to hold the truth as often as it says.

The residuals of a part of the series that the model never learned from are sorted; the radius at
horizon k is the ⌈(n + 1)·level⌉-th smallest of n. If those residuals and the future's are
exchangeable, x_{t+k} lies within x̂_{t+k} ± radius_k with probability at least `level` (Vovk and
others, 2005).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.forecasting.base import Forecaster, Paths, Values


@dataclass(frozen=True)
class Intervals:
    """x̂ ± radius, one radius per horizon and column."""

    level: float
    radius: NDArray[np.float64]

    def around(self, paths: Paths) -> tuple[Paths, Paths]:
        """The lower and upper ends, for up to as many steps as were calibrated."""
        if paths.shape[1] > len(self.radius):
            raise UserError(
                f"intervals are calibrated for {len(self.radius)} steps, not {paths.shape[1]}",
                hint=f"calibrate with steps={paths.shape[1]}",
            )
        radius = self.radius[: paths.shape[1]]
        return paths - radius, paths + radius


def calibrate(
    model: Forecaster,
    series: Sequence[tuple[Values, int]],
    steps: int,
    level: float = 0.9,
) -> Intervals:
    """Intervals from the residuals of one or more series, each given with its first origin.

    Horizon k uses every origin from the first on whose k-th next value is in the series. Where the
    residuals are too few for the level the radius is infinite: an honest "cannot say".
    """
    if not 0 < level < 1:
        raise UserError(f"level={level} must lie between 0 and 1", hint="0.9 covers nine in ten")
    residuals = [_residuals(model, values, first, steps) for values, first in series]
    radius = [
        _conformal_quantile(np.concatenate([r[: max(len(r) - k, 0), k] for r in residuals]), level)
        for k in range(steps)
    ]
    return Intervals(level, np.stack(radius))


def _residuals(model: Forecaster, values: Values, first: int, steps: int) -> Paths:
    """|x - x̂| at each origin and horizon; the last k origins have no k-th next value (NaN)."""
    origins = range(max(first, model.lags), len(values))
    ahead = np.full((len(values) + steps, values.shape[1]), np.nan)
    ahead[: len(values)] = values
    truth = np.stack([ahead[o : o + steps] for o in origins])
    return np.abs(truth - model.forecasts(values, origins, steps))


def _conformal_quantile(residuals: Values, level: float) -> Values:
    rank = math.ceil((len(residuals) + 1) * level)
    if rank > len(residuals):
        return np.full(residuals.shape[1], math.inf)
    return np.sort(residuals, axis=0)[rank - 1]
