"""The linear autoregression with inputs, solved exactly."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.forecasting.base import (
    Forecaster,
    Inputs,
    Paths,
    State,
    Values,
    Windows,
    as_values,
    windows_before,
)
from elman.forecasting.linear import check_window
from elman.options import hold_numbers, whole_number


@final
@dataclass
class Regression(Forecaster):
    """x̂_{t+1} = b + Σ_i A_i x_{t-i+1} + Σ_i B_i u_{t-i+2} + Σ_i C_i v_{t-i+1}: least squares.

    u are inputs known ahead (so u_{t+1} counts), v those known with hindsight, i = 1 … τ (one more
    for u). An autoregression of the errors of a regression on u is of this form. v is unknown
    beyond the next step, so with past inputs there is one solution per horizon, `direct` of them.
    """

    tau: int
    direct: int = 1
    _weights: NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        hold_numbers(self)
        check_window(self.tau, self.direct)

    @property
    def lags(self) -> int:
        return self.tau

    @property
    def reads_inputs(self) -> bool:
        return True

    @property
    def learned(self) -> int:
        return self._weights.shape[1] if hasattr(self, "_weights") else self.tau + 1

    def _fit(self, series: list[Values]) -> None:
        self._fit_with(series, [Inputs.none(v) for v in series])

    def _fit_with(self, series: list[Values], inputs: list[Inputs]) -> None:
        if inputs[0].past.shape[1] == 0 and self.direct > 1:
            raise UserError(
                f"direct={self.direct} is for past inputs, and there are none", hint="leave it out"
            )
        solved = []
        for k in range(1, self.direct + 1):
            rows, targets = [], []
            for values, given in zip(series, inputs, strict=True):
                origins = np.arange(self.tau, len(values) - k + 1)
                rows.append(self._design(values, origins, k, given))
                targets.append(values[origins + k - 1])
            X, Y = np.concatenate(rows), np.concatenate(targets)
            solved.append(np.linalg.lstsq(X, Y, rcond=None)[0])
        self._weights = np.stack(solved)

    def _design(self, values: Values, origins: Any, k: int, inputs: Inputs) -> Values:
        """What is known at each origin about its k-th next step."""
        windows = windows_before(values, origins, self.tau)
        if inputs.known.shape[1]:
            inputs.check(int(origins.max()) + k)
        return self._rows(windows, origins, k, inputs)

    def _rows(self, windows: Windows, origins: Any, k: int, inputs: Inputs) -> Values:
        """The τ values before each origin, its inputs as far as its k-th next step, and a one."""
        n, before = len(origins), origins[:, None] + np.arange(-self.tau, 0)
        parts = [windows.reshape(n, -1)]
        if inputs.known.shape[1]:
            parts += [inputs.known[before].reshape(n, -1), inputs.known[origins + k - 1]]
        if inputs.past.shape[1]:
            parts.append(inputs.past[before].reshape(n, -1))
        return np.concatenate([*parts, np.ones((n, 1))], axis=1)

    def roll(self, windows: Windows, steps: int) -> Paths:
        paths = [self.forecasts(w, [len(w)], steps)[0] for w in windows]
        return np.stack(paths)

    def forecasts(
        self, values: Values, origins: Sequence[int], steps: int, inputs: Inputs | None = None
    ) -> Paths:
        values, given = as_values(values), inputs or Inputs.none(values)
        steps = whole_number("steps", steps, at_least=1, hint="steps=16 looks 16 ahead")
        at = np.asarray(origins)
        windows_before(values, origins, self.tau)  # refuses origins that are too early or too late
        if given.known.shape[1] and len(at):
            given.check(int(at.max()) + steps)
        if given.past.shape[1]:
            return self._straight(values, at, steps, given)
        return self._fed_back(values, at, steps, given)

    def _straight(self, values: Values, at: NDArray[Any], steps: int, inputs: Inputs) -> Paths:
        if steps > self.direct:
            raise UserError(
                f"fitted for {self.direct} steps ahead, not {steps}: past inputs are unknown there",
                hint=f"direct={steps}",
            )
        paths = [self._design(values, at, k, inputs) @ self._weights[k - 1] for k in _one_to(steps)]
        return np.stack(paths, axis=1)

    def _fed_back(self, values: Values, at: NDArray[Any], steps: int, inputs: Inputs) -> Paths:
        window = windows_before(values, at.tolist(), self.tau)
        paths: list[NDArray[np.float64]] = []
        for k in range(steps):
            paths.append(self._rows(window, at + k, 1, inputs) @ self._weights[0])
            window = np.concatenate([window[:, 1:], paths[-1][:, None]], axis=1)
        return np.stack(paths, axis=1)

    def state(self) -> State:
        return {"weights": self._weights}

    def restore(self, state: State) -> None:
        self._weights = state["weights"]


def _one_to(steps: int) -> range:
    return range(1, steps + 1)
