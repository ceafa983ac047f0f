"""Does a series keep its habits? Two checks of stationarity, with p-values.

The notes assume that "the dynamics do not change": x_t may move, but the law by which it follows
from its past stays the same. Two ways to fail are checked apart.

- *Level* (Kwiatkowski, Phillips, Schmidt and Shin, 1992): does the series wander from its mean
  further than its own autocorrelation explains?
- *Dynamics* (Chow, 1960): is one autoregression worse than two, one for each half?
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from elman.defaults import usual
from elman.errors import UserError
from elman.forecasting.base import as_values, features
from elman.options import whole_number

KPSS_TABLE = ((0.10, 0.347), (0.05, 0.463), (0.025, 0.574), (0.01, 0.739))
"""Chances that a stationary series exceeds each value, from the paper's table 1 (level)."""


class Check(NamedTuple):
    """A statistic, and how often a stationary series would exceed it by chance."""

    statistic: float
    p_value: float


@dataclass(frozen=True)
class Stationarity:
    """Two checks; a small p-value speaks against stationarity."""

    level: Check
    dynamics: Check

    def keeps(self, alpha: float = 0.05) -> bool:
        """Whether neither check speaks against it; each errs with probability about `alpha`."""
        return self.level.p_value >= alpha and self.dynamics.p_value >= alpha

    def words(self) -> str:
        """The verdict in a sentence.

        A p-value outside the level's table, 0.01 to 0.1, is given as that bound.
        """
        level = f"level {self.level.statistic:.2f} (p {_bounded(self.level.p_value)})"
        dynamics = f"dynamics {self.dynamics.statistic:.1f} (p {self.dynamics.p_value:.2g})"
        verdict = "nothing against it" if self.keeps() else "not stationary"
        return f"{verdict}: {level}, {dynamics}"


def _bounded(p: float) -> str:
    return "≥ 0.1" if p >= 0.1 else "≤ 0.01" if p <= 0.01 else f"{p:.2g}"


def stationarity(values: ArrayLike, tau: int = 4) -> Stationarity:
    """Both checks of one series; `tau` is how many past values its dynamics read.

    >>> noise = np.random.default_rng(0).normal(size=400)
    >>> stationarity(noise).keeps(), stationarity(noise.cumsum()).keeps()
    (True, False)
    """
    x = as_values(values)
    if x.shape[1] != 1:
        raise UserError(f"{x.shape[1]} columns at once", hint="check each column by itself")
    tau = whole_number("tau", tau, at_least=1, hint="4, as in the notes")
    if len(x) < 4 * (tau + 2):
        raise UserError(
            f"{len(x)} steps are too few to compare the halves of a series with tau={tau}",
            hint=f"at least {4 * (tau + 2)} steps, or a smaller tau",
        )
    if np.ptp(x) == 0:
        raise UserError("the series is constant", hint="a series that moves")
    return Stationarity(level=level(x[:, 0]), dynamics=dynamics(x[:, 0], tau))


def level(x: NDArray[np.float64]) -> Check:
    """Kwiatkowski et al.: partial sums of the series about its mean, over its long-run variance.

    η = 1/T² Σ_t S_t² / s²(l),   S_t = Σ_{i≤t} (x_i - x̄)

    s²(l) is the variance with l autocovariances, weighted 1 - j/(l+1) (Bartlett), and
    l = 12 (T/100)^{1/4}, the longer of the paper's two choices: it keeps the chance of a false
    alarm near its value for autocorrelated series.
    """
    e = x - x.mean()
    T, lags = len(x), min(len(x) - 1, int(12 * (len(x) / 100) ** 0.25))
    variance = e @ e / T
    for j in range(1, lags + 1):
        variance += 2 * (1 - j / (lags + 1)) * (e[j:] @ e[:-j]) / T
    statistic = float(np.square(e.cumsum()).sum() / T**2 / variance)
    chances, bounds = zip(*KPSS_TABLE, strict=True)
    return Check(statistic, float(np.interp(statistic, bounds, chances)))


def dynamics(x: NDArray[np.float64], tau: int) -> Check:
    """Chow: the squared errors of one autoregression, against one for each half.

    F = (S - S_1 - S_2)/k / ((S_1 + S_2)/(T - 2k)),   k = τ + 1

    k F is compared with χ² of k degrees of freedom, which it approaches for long series.
    """
    windows, targets = features(x[:, None], tau)
    design = np.column_stack([np.ones(len(windows)), windows[:, :, 0]])
    y, k, half = targets[:, 0, 0], tau + 1, len(windows) // 2
    parts = [_squared_error(design[:half], y[:half]), _squared_error(design[half:], y[half:])]
    apart = sum(parts)
    scale = apart / (len(y) - 2 * k)
    tiny = np.finfo(np.float64).eps * len(y) * float(np.square(y).sum())
    if apart <= tiny:  # no noise at all: each half is predicted exactly, and so is the whole or not
        together = _squared_error(design, y)
        return Check(0.0, 1.0) if together <= tiny else Check(np.inf, 0.0)
    statistic = max(0.0, (_squared_error(design, y) - apart) / scale)
    with usual():
        tail = torch.special.gammaincc(torch.tensor(k / 2.0), torch.tensor(statistic / 2))
    return Check(statistic, float(tail))


def _squared_error(design: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    weights = np.linalg.lstsq(design, y, rcond=None)[0]
    return float(np.square(y - design @ weights).sum())
