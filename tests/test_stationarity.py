"""Stationarity: what keeps its habits passes, what wanders or changes its dynamics does not."""

import numpy as np
import pytest

from elman import series
from elman.errors import UserError
from elman.forecasting import stationarity
from elman.forecasting.stationarity import KPSS_TABLE, dynamics, level


def autoregression(coefficients, seed):
    """x_t = c_t x_{t-1} + ε_t."""
    noise, x = np.random.default_rng(seed).normal(size=len(coefficients)), [0.0]
    for c, e in zip(coefficients, noise, strict=True):
        x.append(c * x[-1] + e)
    return np.array(x)


def rejected(check, make, trials=200):
    return np.mean([check(make(seed)).p_value < 0.05 for seed in range(trials)])


@pytest.mark.parametrize("c", [0.0, 0.5])
def test_a_stationary_series_is_seldom_called_otherwise(c):
    def make(seed):
        return autoregression([c] * 400, seed)

    # 5 % by design; 200 trials stay below 11 % with probability above 0.999
    assert rejected(level, make) < 0.11
    assert rejected(lambda x: dynamics(x, 2), make) < 0.11


def test_a_random_walk_wanders():
    assert rejected(level, lambda seed: autoregression([1.0] * 400, seed)) > 0.8


def test_dynamics_that_change_half_way_are_seen_where_the_level_says_nothing():
    def make(seed):
        return autoregression([0.6] * 200 + [-0.6] * 200, seed)

    assert rejected(lambda x: dynamics(x, 2), make) > 0.95
    assert rejected(level, make) < 0.2


def test_the_notes_sine_moves_and_keeps_its_dynamics():
    [sine] = series.load("sine")
    found = stationarity(sine.values)
    assert found.level.p_value < 0.05 < found.dynamics.p_value
    assert not found.keeps()
    assert found.words().startswith("not stationary: level 0.")


def test_level_is_the_papers_formula():
    x = np.random.default_rng(0).normal(size=150)
    lags = int(12 * 1.5**0.25)
    e = x - x.mean()
    covariance = [np.sum(e[j:] * e[: len(e) - j]) / 150 for j in range(lags + 1)]
    long_run = covariance[0] + 2 * sum(
        (1 - j / (lags + 1)) * covariance[j] for j in range(1, lags + 1)
    )
    sums = sum(np.sum(e[:t]) ** 2 for t in range(1, 151))
    assert level(x).statistic == pytest.approx(sums / 150**2 / long_run)
    chances, bounds = zip(*KPSS_TABLE, strict=True)
    assert list(chances) == sorted(chances, reverse=True)
    assert list(bounds) == sorted(bounds)


def test_dynamics_are_chows_ratio_and_its_tail():
    x, tau = np.random.default_rng(3).normal(size=60).cumsum(), 2
    rows = np.array([[1.0, x[i], x[i + 1]] for i in range(58)])
    y = x[2:]

    def error(part):
        fitted = rows[part] @ np.linalg.solve(rows[part].T @ rows[part], rows[part].T @ y[part])
        return np.sum((y[part] - fitted) ** 2)

    halves = error(slice(0, 29)) + error(slice(29, 58))
    chow = (error(slice(0, 58)) - halves) / (halves / (58 - 6))
    found = dynamics(x, tau)
    assert found.statistic == pytest.approx(chow)
    k = 3  # χ² of 3 degrees of freedom, by integrating its density
    grid = np.linspace(chow, chow + 200, 400_001)
    density = np.sqrt(grid) * np.exp(-grid / 2) / (2 ** (k / 2) * np.sqrt(np.pi) / 2)
    assert found.p_value == pytest.approx(density.sum() * (grid[1] - grid[0]), rel=1e-3)


def test_a_series_without_noise_keeps_or_changes_its_dynamics_exactly():
    wave = np.sin(0.3 * np.arange(200))
    assert dynamics(wave, 2).p_value == 1.0  # x_t = 2 cos(0.3) x_{t-1} - x_{t-2}
    faster = np.concatenate([wave[:100], np.sin(0.9 * np.arange(100))])
    assert dynamics(faster, 2).p_value < 1e-6


@pytest.mark.parametrize(
    ("values", "tau", "message"),
    [
        (np.zeros(100), 4, "constant"),
        (np.arange(10.0), 4, "10 steps are too few"),
        (np.arange(100.0), 0, "tau=0"),
        (np.ones((100, 2)), 4, "2 columns"),
    ],
)
def test_refusals(values, tau, message):
    with pytest.raises(UserError, match=message):
        stationarity(values, tau)
