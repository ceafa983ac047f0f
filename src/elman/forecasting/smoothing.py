"""Exponential smoothing: a level, a slope and a season, each corrected by every error.

    x̂_t = l_{t-1} + φ b_{t-1} + s_{t-m},      e_t = x_t - x̂_t
    l_t = l_{t-1} + φ b_{t-1} + α e_t
    b_t = φ b_{t-1} + β e_t
    s_t = s_{t-m} + γ e_t

Six forms: no slope, a slope, a damped slope (φ < 1), each with and without a season. The form with
the smallest AICc is kept (Hyndman, Koehler, Ord and Snyder, 2008, chapters 2 and 3).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from elman.forecasting.base import (
    Forecaster,
    Inputs,
    Paths,
    State,
    Values,
    Windows,
    as_values,
    check_origins,
)
from elman.options import hold_numbers, whole_number

Candidates = NDArray[np.float64]
"""(candidates, 6): α, β, γ, φ, whether there is a slope, whether there is a season."""

_ALPHAS = (0.01, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 0.99)
_SHARES = (0.01, 0.05, 0.15, 0.4)
_DAMPING = (0.8, 0.9, 0.97)
_WIDTHS, _TRIES = (0.7, 0.35, 0.17), 40


@final
@dataclass
class Smoothing(Forecaster):
    """Exponential smoothing of the form and with the constants that fit the training part best.

    Every value before an origin counts, the newest most. `season` None or 1 means no season.
    """

    season: int | None = None
    _constants: NDArray[np.float64] = field(init=False, repr=False)
    _spread: NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        hold_numbers(self)
        if self.season is not None:
            whole_number("season", self.season, at_least=1, hint="12 for monthly data")

    @property
    def _period(self) -> int:
        return self.season or 1

    @property
    def lags(self) -> int:
        """The fewest values it can start from: two seasons, or enough for a slope."""
        return 2 * self._period if self._period > 1 else 4

    @property
    def learned(self) -> int:
        return 2

    def _fit(self, series: list[Values]) -> None:
        best = [_best([v[:, j] for v in series], self._period) for j in range(series[0].shape[1])]
        self._constants = np.stack([constants for constants, _ in best])
        self._spread = np.array([spread for _, spread in best])

    def roll(self, windows: Windows, steps: int) -> Paths:
        columns = [
            _filtered(windows[:, :, j].T, self._constants[j][None], self._period, steps)
            for j in range(windows.shape[2])
        ]
        return np.stack(columns, axis=2)

    def forecasts(
        self, values: Values, origins: Sequence[int], steps: int, inputs: Inputs | None = None
    ) -> Paths:
        del inputs
        values = as_values(values)
        steps = whole_number("steps", steps, at_least=1, hint="steps=16 looks 16 ahead")
        check_origins(np.asarray(origins), self.lags, len(values))
        paths = np.empty((len(origins), steps, values.shape[1]))
        for j in range(values.shape[1]):
            paths[:, :, j] = self._column(values[:, j], j, origins, steps)
        return paths

    def _column(
        self, x: NDArray[np.float64], j: int, origins: Sequence[int], steps: int
    ) -> NDArray[np.float64]:
        """Filter a column once and read a forecast off the state at each origin."""
        states = _States(x[:, None], self._constants[j][None], self._period, self.lags)
        wanted: dict[int, NDArray[np.float64]] = {}
        asked = set(origins)
        for t in range(max(origins) if len(origins) else 0):
            states.read(x[t : t + 1])
            if t + 1 in asked:
                wanted[t + 1] = states.ahead(steps)[0]
        return np.stack([wanted[o] for o in origins])

    def state(self) -> State:
        return {"constants": self._constants, "spread": self._spread}

    def restore(self, state: State) -> None:
        self._constants, self._spread = state["constants"], state["spread"]

    def deviation(self, steps: int) -> Values:
        """σ_k = σ √(1 + Σ_{j<k} c_j²), c_j = α + β (φ + … + φ^j) + γ [m divides j]."""
        j = np.arange(1, steps)
        rows = []
        for (alpha, beta, gamma, phi, _, _), sigma in zip(
            self._constants, self._spread, strict=True
        ):
            damped = np.cumsum(phi**j)
            c = alpha + beta * damped + gamma * (j % self._period == 0)
            rows.append(sigma * np.sqrt(1 + np.concatenate([[0.0], np.cumsum(c**2)])))
        return np.stack(rows, axis=1)


class _States:
    """Level, slope and season of every candidate on every series, one step at a time."""

    def __init__(
        self, x: NDArray[np.float64], candidates: Candidates, period: int, first: int
    ) -> None:
        """`x` is (steps, 1 or candidates); the states start from its `first` values."""
        self.alpha, self.beta, self.gamma, self.phi, sloped, seasonal = candidates.T
        self.period, self.t = period, 0
        level, slope, season = _start(x[:first], period)
        flat_level, _, flat_season = _start(x[:first], period, sloped=False)
        self.level = np.where(sloped > 0, level, flat_level)
        self.slope = np.where(sloped > 0, slope, 0.0)
        self.season = np.where(seasonal > 0, np.where(sloped > 0, season, flat_season), 0.0)

    def read(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Take in one value; returns the error of having predicted it."""
        place = self.t % self.period
        expected = self.level + self.phi * self.slope
        error = x - expected - self.season[place]
        self.level = expected + self.alpha * error
        self.slope = self.phi * self.slope + self.beta * error
        self.season[place] += self.gamma * error
        self.t += 1
        return error

    def ahead(self, steps: int) -> NDArray[np.float64]:
        """The next `steps` values of each candidate, (candidates, steps)."""
        k = np.arange(1, steps + 1)
        damped = np.cumsum(self.phi[:, None] ** k, axis=1)
        season = self.season[(self.t + k - 1) % self.period].T
        return self.level[:, None] + self.slope[:, None] * damped + season


def _start(
    x: NDArray[np.float64], period: int, *, sloped: bool = True
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Level, slope and season before the first value: least squares on the first few.

    Two whole seasons have their solution in closed form: the slope is the mean rise from one to the
    other over m, each place's effect its mean beyond the line. Without a season: a straight line.
    Returns shapes (series,), (series,), (period, series); seasons sum to zero.
    """
    if period == 1:
        t = np.arange(1, len(x) + 1) - (len(x) + 1) / 2
        slope = t @ x / (t @ t) if sloped else np.zeros(x.shape[1])
        return x.mean(0) - slope * (len(x) + 1) / 2, slope, np.zeros((1, x.shape[1]))
    assert len(x) == 2 * period
    first, second = x[:period], x[period:]
    slope = (second - first).mean(0) / period if sloped else np.zeros(x.shape[1])
    middle = np.arange(1, period + 1)[:, None] + period / 2
    places = (first + second) / 2 - slope * middle
    level = places.mean(0)
    return level, slope, places - level


def _filtered(
    x: NDArray[np.float64], constants: Candidates, period: int, steps: int
) -> NDArray[np.float64]:
    """Forecasts after whole windows, (windows, steps), from windows (lags, windows)."""
    states = _States(x, constants.repeat(x.shape[1], 0), period, len(x))
    for value in x:
        states.read(value)
    return states.ahead(steps)


def _grid(period: int, length: int) -> Candidates:
    """Where the search begins: every form, its constants spread over their ranges."""
    rows = [(a, 0.0, 0.0, 1.0, 0.0, 0.0) for a in _ALPHAS]
    for a, b in itertools.product(_ALPHAS, _SHARES):
        rows.append((a, a * b, 0.0, 1.0, 1.0, 0.0))
        rows += [(a, a * b, 0.0, phi, 1.0, 0.0) for phi in _DAMPING]
    if period > 1 and length >= 2 * period:
        seasonal = [(a, b, (1 - a) * g, phi, slope, 1.0)
                    for a, b, _, phi, slope, _ in rows for g in _SHARES]  # fmt: skip
        rows += seasonal
    return np.array(rows)


def _near(candidates: Candidates, width: float, rng: np.random.Generator) -> Candidates:
    """The candidates and random neighbours of each, inside the same form and the same ranges."""
    around = candidates.repeat(_TRIES, 0)
    alpha = _jitter(around[:, 0], width, rng)
    beta = _jitter(around[:, 1] / around[:, 0], width, rng) * alpha * (around[:, 4] > 0)
    gamma = _jitter(around[:, 2] / (1 - around[:, 0] + 1e-9), width, rng) * (1 - alpha)
    damped = around[:, 3] < 1
    phi = np.where(damped, np.clip(_jitter(around[:, 3], width, rng), 0.7, 0.99), 1.0)
    seasonal = around[:, 5] > 0
    moved = np.stack([alpha, beta, gamma * seasonal, phi, around[:, 4], around[:, 5]], axis=1)
    return np.concatenate([candidates, moved])


def _jitter(share: NDArray[np.float64], width: float, rng: np.random.Generator) -> np.ndarray:
    """A share moved on the scale of log odds, staying between 0 and 1."""
    inside = np.clip(share, 1e-4, 1 - 1e-4)
    odds = np.log(inside / (1 - inside)) + rng.normal(0, width, inside.shape)
    return 1 / (1 + np.exp(-odds))


def _best(series: list[NDArray[np.float64]], period: int) -> tuple[NDArray[np.float64], float]:
    """The constants with the smallest AICc, and the spread of their one-step errors."""
    rng = np.random.default_rng(0)
    length = min(map(len, series))
    candidates, squares = _led(series, _grid(period, length), period)
    for width in _WIDTHS:
        candidates, squares = _led(series, _near(candidates, width, rng), period)
    count = sum(map(len, series))
    fitted = (
        2 + (candidates[:, 4] > 0) * 2 + (candidates[:, 3] < 1) + candidates[:, 5] * (1 + period)
    )
    spare = np.maximum(count - fitted - 1, 0.5)
    score = count * np.log(squares / count + 1e-300) + 2 * fitted * count / spare
    best = int(np.argmin(score))
    sigma = math.sqrt(squares[best] / max(count - fitted[best], 1))
    return candidates[best], sigma


def _led(
    series: list[NDArray[np.float64]], candidates: Candidates, period: int
) -> tuple[Candidates, NDArray[np.float64]]:
    """The best candidate of each form, and its sum of squared errors."""
    squares = _squares(series, candidates, period)
    forms = np.stack([candidates[:, 4], candidates[:, 5], candidates[:, 3] < 1], axis=1)
    leaders = []
    for form in np.unique(forms, axis=0):
        members = np.flatnonzero((forms == form).all(1))
        leaders.append(int(members[np.argmin(squares[members])]))
    return candidates[leaders], squares[leaders]


def _squares(
    series: list[NDArray[np.float64]], candidates: Candidates, period: int
) -> NDArray[np.float64]:
    """The sum of squared one-step errors of every candidate over all series."""
    total = np.zeros(len(candidates))
    for x in series:
        first = min(len(x), 2 * period if period > 1 else 4)
        states = _States(x[:, None], candidates, period, first)
        for value in x:
            total += states.read(value) ** 2
    return total
