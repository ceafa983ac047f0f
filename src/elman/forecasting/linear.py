"""The linear autoregression, solved exactly."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from elman.forecasting.base import Forecaster, Paths, State, Values, Windows, features
from elman.options import hold_numbers, whole_number


@final
@dataclass
class Linear(Forecaster):
    """x̂_{t+1} = b + Σ_i A_i x_{t-i+1}, i = 1 … τ: least squares, no iteration.

    With `direct=K` one solution per horizon predicts x_{t+1} … x_{t+K} straight from the window;
    beyond K, as for K = 1, predictions are fed back. Several columns make a vector autoregression.
    """

    tau: int
    direct: int = 1
    _weights: Values = field(init=False, repr=False)

    def __post_init__(self) -> None:
        hold_numbers(self)
        check_window(self.tau, self.direct)

    @property
    def lags(self) -> int:
        return self.tau

    @property
    def learned(self) -> int:
        return self.tau + 1

    def _fit(self, series: list[Values]) -> None:
        pairs = [features(v, self.tau, self.direct) for v in series]
        X = np.concatenate([_design(x) for x, _ in pairs])
        Y = np.concatenate([y.reshape(len(y), -1) for _, y in pairs])
        self._weights = np.asarray(np.linalg.lstsq(X, Y, rcond=None)[0], dtype=np.float64)

    def roll(self, windows: Windows, steps: int) -> Paths:
        return feed_back(windows, steps, self._next)

    def state(self) -> State:
        return {"weights": self._weights}

    def restore(self, state: State) -> None:
        self._weights = state["weights"]

    def _next(self, windows: Windows) -> Paths:
        columns = windows.shape[2]
        return (_design(windows) @ self._weights).reshape(len(windows), -1, columns)


def _design(windows: Windows) -> Values:
    flat = windows.reshape(len(windows), -1)
    return np.concatenate([flat, np.ones((len(flat), 1))], axis=1)


def check_window(tau: int, direct: int) -> None:
    """Refuse a window or horizon below one."""
    tau = whole_number("tau", tau, at_least=1, hint="how many past values to read")
    direct = whole_number("direct", direct, at_least=1, hint="how many steps one output spans")


def feed_back(
    windows: NDArray[Any], steps: int, ahead: Callable[[NDArray[Any]], NDArray[Any]]
) -> NDArray[Any]:
    """Predict, append the prediction to the window, and predict again (x̂_605, x̂_606, … of 8.1).

    `ahead(windows)` gives the next K values of each; K = 1 is the notes' recursion.
    """
    paths: list[NDArray[Any]] = []
    while sum(p.shape[1] for p in paths) < steps:
        paths.append(ahead(windows))
        windows = np.concatenate([windows, paths[-1]], axis=1)[:, -windows.shape[1] :]
    return np.concatenate(paths, axis=1)[:, :steps]
