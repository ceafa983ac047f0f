"""What every forecaster promises, and the windows of the past it sees.

A forecaster reads the `lags` newest values before an origin and nothing else, so it cannot see the
future: every forecast is a function of one window x_{t-lags+1} … x_t.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from elman.errors import NotFitted, UserError
from elman.options import whole_number

Values = NDArray[np.float64]
"""(steps, columns)"""

Windows = NDArray[np.float64]
"""(origins, lags, columns)"""

Paths = NDArray[np.float64]
"""(origins, steps, columns)"""

State = dict[str, NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Inputs:
    """What goes with one series: inputs known ahead, known with hindsight only, and never changing.

    `known` may have more rows than the series: the future's. `past` has as many.
    """

    known: Values
    past: Values
    static: Values = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def none(cls, values: Values) -> "Inputs":
        """No inputs beside these values."""
        return cls(np.zeros((len(values), 0)), np.zeros((len(values), 0)))

    @property
    def width(self) -> int:
        """How many inputs there are."""
        return self.known.shape[1] + self.past.shape[1] + len(self.static)

    def check(self, until: int) -> None:
        """Refuse known inputs that do not reach step `until`."""
        if self.known.shape[1] and len(self.known) < until:
            raise UserError(
                f"known inputs end after step {len(self.known)}, and the forecast reaches step "
                f"{until}",
                hint="add rows for the future with those columns filled in, or forecast less far",
            )


class Forecaster(abc.ABC):
    """x̂_{t+1}, x̂_{t+2}, … from x_{t-lags+1}, …, x_t."""

    @property
    @abc.abstractmethod
    def lags(self) -> int:
        """How many past values one forecast reads."""

    @property
    def samples(self) -> bool:
        """Whether the model has a distribution to `sample` from."""
        return False

    @property
    def reads_inputs(self) -> bool:
        """Whether the model uses inputs besides the series' own past."""
        return False

    @property
    def learned(self) -> int:
        """How many numbers per column were fitted: what residuals on the same data hide."""
        return 0

    @abc.abstractmethod
    def _fit(self, series: list[Values]) -> None:
        """Learn from whole series, each longer than `lags`."""

    def _fit_with(self, series: list[Values], inputs: list[Inputs]) -> None:
        """Learn from series and their inputs, for models that read them."""
        del series
        raise UserError(
            f"{type(self).__name__} does not read inputs, and {inputs[0].width} were given",
            hint="Regression and Global do",
        )

    @abc.abstractmethod
    def roll(self, windows: Windows, steps: int) -> Paths:
        """The next `steps` values after each window."""

    def sample(
        self, windows: Windows, steps: int, samples: int, seed: int = 0
    ) -> NDArray[np.float64]:
        """Possible futures, shape (samples, origins, steps, columns), for models that have them."""
        del windows, steps, samples, seed
        raise UserError(
            f"{type(self).__name__} gives one path, not a distribution",
            hint="a Window or Recurrent with gaussian=True can be sampled",
        )

    @abc.abstractmethod
    def state(self) -> State:
        """What was learned, as named arrays."""

    @abc.abstractmethod
    def restore(self, state: State) -> None:
        """Take back what `state` gave."""

    def fit(
        self, values: ArrayLike | Sequence[ArrayLike], inputs: Sequence[Inputs] | None = None
    ) -> Self:
        """Learn from one series, shape (steps,) or (steps, columns), or from a list of them.

        `inputs` holds one entry a series, for models that read them.
        """
        several = isinstance(values, list) and len(values) > 0 and np.ndim(values[0]) > 0
        series = [as_values(v) for v in cast(list[Any], values if several else [values])]
        for v in series:
            if len(v) <= self.lags:
                raise UserError(
                    f"a series of {len(v)} steps is too short for {type(self).__name__}, which "
                    f"reads {self.lags} values to predict the next",
                    hint=f"at least {self.lags + 1} steps, or a smaller tau or window",
                )
        if inputs is None:
            self._fit(series)
        else:
            self._fit_with(series, list(inputs))
        self._columns = series[0].shape[1]
        return self

    def predict(self, history: ArrayLike, steps: int, inputs: Inputs | None = None) -> Values:
        """x̂_{T+1} … x̂_{T+steps} after a history x_1 … x_T, by feeding predictions back."""
        history = as_values(history)
        columns = vars(self).get("_columns", history.shape[1])  # what was restored does not say
        if history.shape[1] != columns:
            raise UserError(
                f"a history of {history.shape[1]} columns for a {type(self).__name__} that was "
                f"fitted to {columns}",
                hint="the columns it was fitted to, in the same order",
            )
        return self.forecasts(history, [len(history)], _checked(steps), inputs)[0]

    def forecasts(
        self, values: Values, origins: Sequence[int], steps: int, inputs: Inputs | None = None
    ) -> Paths:
        """x̂_{o+1} … x̂_{o+steps} for each origin o, from values[:o] and known inputs alone."""
        del inputs
        return self.roll(windows_before(values, origins, self.lags), _checked(steps))

    def quantiles(
        self,
        values: Values,
        origins: Sequence[int],
        steps: int,
        levels: Sequence[float],
        inputs: Inputs | None = None,
    ) -> NDArray[np.float64] | None:
        """The model's own quantiles, (origins, steps, columns, levels); None where it has none.

        A model that can be sampled has those of 400 sampled paths.
        """
        del inputs
        if not self.samples:
            return None
        drawn = self.sample(windows_before(values, origins, self.lags), steps, 400)
        return np.moveaxis(np.quantile(drawn, levels, axis=0), 0, -1)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings by name, as scikit-learn asks for them."""
        del deep
        return {f.name: getattr(self, f.name) for f in fields(cast(Any, self)) if f.init}

    def set_params(self, **settings: Any) -> Self:
        """Change settings, as scikit-learn does it; what was fitted before no longer counts."""
        for name in settings:
            if name not in self.get_params():
                raise UserError(
                    f"{type(self).__name__} has no setting {name!r}",
                    hint=f"it has {', '.join(self.get_params()) or 'none'}",
                )
        other = type(self)(**self.get_params() | settings)  # or refused, and nothing has changed
        vars(self).clear()
        vars(self).update(vars(other))
        return self

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What only `fit` makes is asked for before it is there."""
            fitted = name in getattr(type(self), "__dataclass_fields__", ())
            if fitted or (name.startswith("_") and not name.startswith("__")):
                raise NotFitted(
                    f"this {type(self).__name__} is not fitted yet", hint="fit(values) first"
                )
            return object.__getattribute__(self, name)  # which says what is missing


def _checked(steps: int) -> int:
    return whole_number("steps", steps, at_least=1, hint="steps=16 looks 16 ahead")


def as_values(series: ArrayLike) -> Values:
    """A series as (steps, columns) of finite float64."""
    values = np.asarray(series, dtype=np.float64)
    if values.ndim == 1:
        values = values[:, None]
    if values.ndim != 2:
        raise UserError(
            f"a series of shape {values.shape} is neither (steps,) nor (steps, columns)",
            hint="pass a list of arrays for several series",
        )
    gaps = np.argwhere(~np.isfinite(values))
    if len(gaps):
        t, column = gaps[0]
        raise UserError(
            f"step {t}, column {column} is {values[t, column]}: a series must be finite numbers",
            hint="fill gaps first; series.load(…, missing='interpolate') draws straight lines",
        )
    return values


def windows_before(values: Values, origins: Sequence[int], lags: int) -> Windows:
    """The `lags` values just before each origin."""
    at = np.asarray(origins)
    check_origins(at, lags, len(values))
    return _all_windows(values, lags)[at - lags]


def check_origins(at: NDArray[Any], lags: int, length: int) -> None:
    """Refuse origins with fewer than `lags` values before them, or after the end of a series."""
    if len(at) and (at.min() < lags or at.max() > length):
        wrong = at[(at < lags) | (at > length)][0]
        raise UserError(
            f"no forecast from origin {wrong}: it needs {lags} values before it, "
            f"and the series has {length}",
            hint=f"origins from {lags} to {length}, or a model that reads less"
            if lags <= length
            else "a longer series, or a model that reads less",
        )


def _all_windows(values: Values, width: int) -> Windows:
    return sliding_window_view(values, width, axis=0).transpose(0, 2, 1)


def features(values: Values, tau: int, steps: int = 1) -> tuple[Windows, Paths]:
    """Feature–label pairs of 8.1: x_{t-τ+1} … x_t and the x_{t+1} … x_{t+steps} that follow. Views.

    >>> x, y = features(np.arange(6.0)[:, None], tau=4)
    >>> x[..., 0].tolist(), y[..., 0].tolist()
    ([[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]], [[4.0], [5.0]])
    """
    if len(values) < tau + steps:
        raise UserError(
            f"a series of {len(values)} steps is too short for tau={tau} and {steps} steps ahead",
            hint=f"at least {tau + steps} steps, or a smaller tau or horizon",
        )
    pairs = _all_windows(values, tau + steps)
    return pairs[:, :tau], pairs[:, tau:]
