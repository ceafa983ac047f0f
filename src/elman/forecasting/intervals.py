"""How wide a forecast must be to hold the truth as often as it says.

Two ways. `Errors` describes how a fitted model errs k steps ahead: a spread that depends on k and a
shape that does not, both from its forecasts of data it knows; held-out windows then say how much
wider they must be. `calibrate` gives split-conformal intervals from held-out residuals alone: the
residuals of a part of the series that the model never learned from are sorted; the radius at
horizon k is the ⌈(n + 1)·level⌉-th smallest of n. If those residuals and the future's are
exchangeable, x_{t+k} lies within x̂_{t+k} ± radius_k with probability at least `level` (Vovk and
others, 2005).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.forecasting.base import Forecaster, Inputs, Paths, Values

GRID = (0.005, 0.025, 0.05, *np.arange(0.1, 0.95, 0.1).round(2).tolist(), 0.95, 0.975, 0.995)
"""Quantiles that stand for a distribution wherever one is stored or scored."""

MIDDLE = GRID.index(0.5)

_MOST_ORIGINS = 300
_FEWEST = 8
_DOUBT = 2.0
"""By how many nats errors must be likelier as shares to be taken for that."""


def interval(
    quantiles: NDArray[np.float64], level: float, wider: float | NDArray[np.float64] = 1.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The two ends of a central interval of `level` percent, its distance to the middle widened."""
    tail = (1 - level / 100) / 2
    middle = quantiles[..., MIDDLE]
    ends = [_at(quantiles, q) for q in (tail, 1 - tail)]
    return middle + wider * (ends[0] - middle), middle + wider * (ends[1] - middle)


def nested(
    quantiles: NDArray[np.float64], widen: Mapping[float, float | NDArray[np.float64]]
) -> tuple[dict[float, NDArray[np.float64]], dict[float, NDArray[np.float64]]]:
    """The lower and upper ends of several intervals by level, each of which holds the narrower.

    How much wider each must be is measured by itself, so that without this one of 80 percent can
    reach farther than one of 95.
    """
    ends = {level: interval(quantiles, level, wider) for level, wider in widen.items()}
    for before, after in itertools.pairwise(sorted(ends)):
        low, high = ends[after]
        ends[after] = np.minimum(low, ends[before][0]), np.maximum(high, ends[before][1])
    return {k: low for k, (low, _) in ends.items()}, {k: high for k, (_, high) in ends.items()}


def _at(quantiles: NDArray[np.float64], q: float) -> NDArray[np.float64]:
    grid = np.array(GRID)
    k = int(np.clip(np.searchsorted(grid, q) - 1, 0, len(grid) - 2))
    share = (q - grid[k]) / (grid[k + 1] - grid[k])
    return quantiles[..., k] + share * (quantiles[..., k + 1] - quantiles[..., k])


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


@dataclass(frozen=True, eq=False)
class Errors:
    """How a model errs: x_{t+k} - x̂_{t+k} is `spread[k]` times a draw with quantiles `shape`.

    Where errors are `relative`, that times |x̂_{t+k}|: of what grows, errors grow too.
    """

    spread: Values
    """(steps, columns)"""
    shape: NDArray[np.float64]
    """(len(GRID), columns)"""
    relative: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(1, dtype=bool))
    """(columns,), or (1,) for all of them"""

    def around(self, paths: Paths, levels: Sequence[float]) -> NDArray[np.float64]:
        """The quantiles of what may come where a model forecasts `paths`, levels last."""
        unit = np.where(self.relative, np.abs(paths), 1.0)
        return paths[..., None] + unit[..., None] * self.offsets(paths.shape[1], levels)

    def offsets(self, steps: int, levels: Sequence[float]) -> NDArray[np.float64]:
        """What to add to a forecast for its quantiles: (steps, columns, levels).

        Beyond the horizon that was measured the spread grows with the square root of the step.
        """
        k = np.arange(1, steps + 1)
        known = len(self.spread)
        spread = self.spread[np.minimum(k, known) - 1]
        spread = spread * np.sqrt(np.maximum(k / known, 1.0))[:, None]
        z = np.stack([np.interp(levels, GRID, column) for column in self.shape.T])
        return spread[:, :, None] * z


def errors(model: Forecaster, values: Values, steps: int, inputs: Inputs | None = None) -> Errors:
    """How a model errs on a series that it was fitted on, k = 1 … steps ahead.

    The spread at k is the root mean square over origins, times √(n / (n - learned)) for what the
    fit has hidden; horizons with fewer than 8 residuals are extended by √step.
    Spreads never shrink with k.
    """
    origins = np.arange(model.lags, len(values))
    if len(origins) < 2:
        naive = np.diff(values, axis=0).std(0, keepdims=True) if len(values) > 2 else values[:1] * 0
        return Errors(naive, _normal(values.shape[1]))
    origins = origins[:: max(1, len(origins) // _MOST_ORIGINS)]
    ahead = np.full((len(values) + steps, values.shape[1]), np.nan)
    ahead[: len(values)] = values
    truth = ahead[origins[:, None] + np.arange(steps)]
    known = inputs
    if inputs is not None and inputs.known.shape[1]:  # past the end only NaN is compared
        short = max(0, len(values) + steps - len(inputs.known))
        padded = np.concatenate([inputs.known, inputs.known[-1:].repeat(short, 0)])
        known = Inputs(padded, inputs.past, inputs.static)
    paths = model.forecasts(values, origins.tolist(), steps, known)
    paths = np.clip(paths, -1e140, 1e140)  # of a model that runs away
    residuals = truth - paths
    relative = _relative(values, residuals[:, 0], paths[:, 0])
    size = np.maximum(np.abs(paths), np.abs(truth) / 2)  # lest forecasts near zero decide
    residuals = residuals / np.where(relative, size, 1.0)
    counts = (~np.isnan(residuals[:, :, 0])).sum(0)
    enough = max(1, int((counts >= _FEWEST).sum()))
    with np.errstate(invalid="ignore"):
        spread = np.sqrt(np.nanmean(residuals[:, :enough] ** 2, axis=0))
    n = len(values) - model.lags
    spread = spread * math.sqrt(n / max(n - model.learned, n / 4))
    own = getattr(model, "deviation", None)
    if own is not None:
        grows = own(steps)
        first = np.where(grows[:1] > 0, grows[:1], 1.0)
        spread = np.where(relative, spread[:1] * grows / first, grows)
        enough = steps
    spread = np.maximum.accumulate(spread, axis=0)
    shape = _shape(residuals[:, : min(enough, steps)], spread)
    return Errors(spread, np.where(relative, _on_both_sides(shape), shape), relative)


def _relative(values: Values, missed: Values, said: Values) -> NDArray[np.bool_]:
    """Whether a column's errors one step ahead, e, are likelier as shares of the forecasts x̂.

    By the likelihood of normal errors whose spread is σ, or σ x̂: n log σ against
    n log σ' + Σ log x̂. Only of what is positive throughout, and beyond doubt.
    """
    here = ~np.isnan(missed).any(1)
    e, x, n = missed[here], said[here], int(here.sum())
    able = (values > 0).all(0) & (x > 0).all(0)
    x = np.where(able, x, 1.0)
    plain = n / 2 * np.log(np.square(e).mean(0) + 1e-300)
    share = n / 2 * np.log(np.square(e / x).mean(0) + 1e-300) + np.log(x).sum(0)
    return share < plain - _DOUBT


def _shape(residuals: Paths, spread: Values) -> NDArray[np.float64]:
    """Quantiles of residuals over their spread, all horizons together.

    Few residuals say little about the tails: there the normal's quantiles count as twenty of them,
    in the middle as none. A demand that is mostly zero has zero for its median.
    """
    normal, outwards = _normal(1)[:, 0], 2 * np.abs(np.array(GRID) - 0.5)
    columns = []
    for j in range(residuals.shape[2]):
        unit = np.where(spread[:, j] > 0, spread[:, j], 1.0)[: residuals.shape[1]]
        z = residuals[:, :, j] / unit
        first = z[:, 0][~np.isnan(z[:, 0])]
        quantiles = np.quantile(z[~np.isnan(z)], GRID)
        doubt = 20 / (len(first) + 20) * outwards
        columns.append((1 - doubt) * quantiles + doubt * normal)
    return np.stack(columns, axis=1)


def _on_both_sides(shape: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same with the forecast in its middle: shares by which it lags behind growth are all on
    one side of it, and an interval of 80 percent would not hold it."""
    side = np.sign(np.array(GRID) - 0.5)[:, None]
    return np.where(side * shape <= 0, 0.1 * _normal(1), shape)


def _normal(columns: int) -> NDArray[np.float64]:
    quantiles = [NormalDist().inv_cdf(q) for q in GRID]
    return np.array(quantiles)[:, None].repeat(columns, 1)
