"""How good a forecast is: error by horizon, intervals, distributions, and how errors grow."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.forecasting.base import Paths, Values

ByHorizon = NDArray[np.float64]
"""(steps,)"""


def rmse(truth: Paths, forecast: Paths) -> ByHorizon:
    """√ mean (x - x̂)², at each horizon."""
    return np.sqrt(np.square(truth - forecast).mean((0, 2)))


def mae(truth: Paths, forecast: Paths) -> ByHorizon:
    """mean |x - x̂|, at each horizon."""
    return np.abs(truth - forecast).mean((0, 2))


def mase(truth: Paths, forecast: Paths, training: list[Values], season: int = 1) -> ByHorizon:
    """Mean |x - x̂| over the training part's mean |x_t - x_{t-m}|, column by column.

    Below 1 beats repeating the value of m steps ago (Hyndman and Koehler, 2006).
    """
    steps = [np.abs(v[season:] - v[:-season]) for v in training if len(v) > season]
    if not steps:
        raise UserError(
            f"MASE needs a training part longer than season={season}", hint="a smaller season"
        )
    unit = np.concatenate(steps).mean(0)
    if (unit == 0).any():
        raise UserError(
            "MASE is undefined: the training part is constant, so its naive error is 0",
            hint="use RMSE or MAE, or a series that moves",
        )
    return (np.abs(truth - forecast) / unit).mean((0, 2))


def smape(truth: Paths, forecast: Paths) -> ByHorizon:
    """Mean 2|x - x̂| / (|x| + |x̂|), from 0 to 2; a pair of zeros is no error."""
    size = np.abs(truth) + np.abs(forecast)
    share = np.divide(2 * np.abs(truth - forecast), size, out=np.zeros_like(size), where=size > 0)
    return share.mean((0, 2))


def crps(truth: Paths, samples: NDArray[np.float64]) -> ByHorizon:
    """E|X - x| - ½ E|X - X'|, X and X' independent draws: the unbiased estimate from samples.

    With one sample path that is its absolute error; lower is better (Gneiting and Raftery, 2007).
    """
    n = len(samples)
    error = np.abs(samples - truth).mean(0)
    ordered = np.sort(samples, axis=0)
    weight = (2 * np.arange(1, n + 1) - n - 1).reshape(-1, 1, 1, 1)
    spread = (weight * ordered).sum(0) * 2 / (n * (n - 1)) if n > 1 else 0.0
    return (error - 0.5 * spread).mean((0, 2))


def pinball(
    truth: NDArray[np.float64], quantiles: NDArray[np.float64], levels: Sequence[float]
) -> NDArray[np.float64]:
    """max(q (x - x̂_q), (q - 1) (x - x̂_q)) for each level q; `quantiles` has levels last."""
    miss = truth[..., None] - quantiles
    q = np.asarray(levels)
    return np.maximum(q * miss, (q - 1) * miss)


def quantile_crps(
    truth: NDArray[np.float64], quantiles: NDArray[np.float64], levels: Sequence[float]
) -> NDArray[np.float64]:
    """2 ∫ pinball_q dq by the trapezoidal rule, the ends continued to 0 and 1: CRPS from quantiles.

    With the median alone that is the absolute error.
    """
    q = np.asarray(levels)
    edges = np.concatenate([[0.0], (q[1:] + q[:-1]) / 2, [1.0]])
    return 2 * (pinball(truth, quantiles, levels) * np.diff(edges)).sum(-1)


def coverage(truth: Paths, low: Paths, high: Paths) -> ByHorizon:
    """The share of values inside their interval, at each horizon."""
    return ((low <= truth) & (truth <= high)).mean((0, 2))


def width(low: Paths, high: Paths) -> ByHorizon:
    """The mean width of the intervals, at each horizon."""
    return (high - low).mean((0, 2))


@dataclass(frozen=True)
class Growth:
    """The notes' account of error accumulation, ε_{k+1} = ε̄ + c ε_k, fitted to measured errors."""

    first: float
    """ε̄: the error of one step."""
    factor: float
    """c: how much of an error is handed on to the next step."""
    predicted: ByHorizon
    """ε̄ (1 - c^k) / (1 - c): the growth that ε̄ and c imply."""


def growth(errors: ByHorizon) -> Growth:
    """Fit c by least squares of ε_{k+1} - ε_1 on ε_k, with ε̄ = ε_1.

    >>> fitted = growth(np.array([1.0, 1.5, 1.75, 1.875]))
    >>> fitted.factor, fitted.predicted.tolist()
    (0.5, [1.0, 1.5, 1.75, 1.875])
    """
    if len(errors) < 2:
        raise UserError(
            f"{len(errors)} horizon cannot show growth", hint="look at least 2 steps ahead"
        )
    first, handed_on = errors[0], errors[:-1]
    factor = float(handed_on @ (errors[1:] - first) / (handed_on @ handed_on)) if first else 0.0
    predicted = np.cumsum(first * factor ** np.arange(len(errors)))
    return Growth(float(first), factor, predicted)
