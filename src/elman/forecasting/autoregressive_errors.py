"""Regression on a season and inputs whose errors are an autoregression.

    x_t = a + b t + s_{t mod m} + Σ_j β_j u_{t,j} + e_t,      e_t = Σ_i φ_i e_{t-i} + ε_t

All effects are found together, so that neither an input nor a season is taken for the other, and
by generalised least squares: on z_t = x_t - Σ φ_i x_{t-i}, where the errors are white (Cochrane and
Orcutt, 1949). Whether there is a season, and how many φ, is what the smallest AICc says.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, final, get_args

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
    check_origins,
)
from elman.options import hold_numbers, whole_number

Trend = Literal["level", "line", "changes"]
"""No slope; a straight line; or everything above, of x_t - x_{t-1}, where a is the drift."""

Design = NDArray[np.float64]
"""(steps, effects)"""

_PIECE = 1 << 22
"""Numbers that running sums may take at a time."""

_MANY = 32
"""From so many effects on they are found from sums of products, which φ and later steps change
little: anew each time, those of a season of 168 hours took half a minute."""

_RIDGE = 1e-8
"""What keeps effects finite that the data cannot tell apart, as a part of their squares."""

_ROUNDS = 4
"""How often φ and the effects are found from one another; they settle after two or three."""


@final
@dataclass
class AutoregressiveErrors(Forecaster):
    """Season and inputs by regression, what is left by an autoregression of order at most `tau`.

    What is learned is φ; the effects are found again from all that is known before an origin, so
    that newer data may begin in any month.
    """

    tau: int = 4
    season: int | None = None
    trend: Trend = "level"
    _phi: NDArray[np.float64] = field(init=False, repr=False)
    _form: NDArray[np.float64] = field(init=False, repr=False)
    """Of each column: how many inputs are read, whether it has a season, and a constant (changes:
    a drift)."""

    def __post_init__(self) -> None:
        hold_numbers(self)
        whole_number("tau", self.tau, at_least=0, hint="0: errors are independent")
        if self.season is not None:
            whole_number("season", self.season, at_least=1, hint="12 for monthly data")
        if self.trend not in get_args(Trend):
            raise UserError(
                f"trend={self.trend!r} is unknown", hint=f"one of {', '.join(get_args(Trend))}"
            )

    @property
    def _effects(self) -> int:
        inputs = int(self._form[0, 0]) if hasattr(self, "_form") else 0
        return inputs + (self.season or 1) + 1

    @property
    def lags(self) -> int:
        return max(2 * (self.season or 1), self._effects + self._effects // 2) + self.tau + 2

    @property
    def learned(self) -> int:
        return int((self._phi != 0).sum()) + 1 if hasattr(self, "_phi") else self.tau + 1

    @property
    def reads_inputs(self) -> bool:
        return True

    def _fit(self, series: list[Values]) -> None:
        self._fit_with(series, [Inputs.none(v) for v in series])

    def _fit_with(self, series: list[Values], inputs: list[Inputs]) -> None:
        known = inputs[0].known.shape[1]
        shortest = min(map(len, series))
        if shortest <= known + 2 * (self.season or 1) + self.tau:
            raise UserError(
                f"{shortest} steps are too few for {known} inputs, a season of {self.season or 1} "
                f"and {self.tau} past errors",
                hint="fewer inputs, or a longer series",
            )
        columns = [self._best([v[:, j] for v in series], inputs) for j in range(series[0].shape[1])]
        self._phi = np.stack([phi for phi, _ in columns])
        self._form = np.array([(known, *form) for _, form in columns], dtype=np.float64)

    def _best(
        self, series: list[NDArray[np.float64]], inputs: list[Inputs]
    ) -> tuple[NDArray[np.float64], tuple[bool, bool]]:
        """φ and the form with the smallest AICc."""
        seasons = (True, False) if (self.season or 1) > 1 else (False,)
        drifts = (True, False) if self.trend == "changes" else (True,)
        count = sum(len(x) - self.tau for x in series)
        best, chosen = np.inf, (np.zeros(self.tau), (False, True))
        for seasonal, drift in itertools.product(seasons, drifts):
            rows = [
                _Regressed(*self._rows(x[:, None], i, (seasonal, drift)), self.tau)
                for x, i in zip(series, inputs, strict=True)
            ]
            for order in range(self.tau + 1):
                phi, squares = _solved(rows, order, self.tau)
                fitted = rows[0].design.shape[1] + order + 1
                spare = max(count - fitted - 1, 0.5)
                score = count * np.log(squares / count + 1e-300) + 2 * fitted * count / spare
                if score < best - 1e-9:
                    best, chosen = score, (phi, (seasonal, drift))
        return chosen

    def _rows(
        self, x: Values, inputs: Inputs, form: tuple[bool, bool], ahead: int = 0
    ) -> tuple[Values, Design]:
        """What is regressed, and on what, `ahead` steps beyond the data; or changes of both."""
        seasonal, drift = form
        t = np.arange(len(x) + ahead)
        parts = [np.ones((len(t), 1))]
        if self.trend == "line":
            parts.append(t[:, None].astype(np.float64))
        m = self.season or 1
        if seasonal:
            place = np.eye(m)[t % m]
            parts.append(place[:, 1:] - place[:, :1])
        if inputs.known.shape[1]:
            inputs.check(len(t))
            parts.append(inputs.known[: len(t)])
        design = np.concatenate(parts, axis=1)
        if self.trend != "changes":
            return x, design
        moves = np.diff(design, axis=0)
        moves[:, 0] = 1.0
        return np.diff(x, axis=0), moves if drift else moves[:, 1:]

    def roll(self, windows: Windows, steps: int) -> Paths:
        return np.concatenate([self.forecasts(w, [len(w)], steps) for w in windows])

    def forecasts(
        self, values: Values, origins: Sequence[int], steps: int, inputs: Inputs | None = None
    ) -> Paths:
        values, given = as_values(values), inputs or Inputs.none(values)
        steps = whole_number("steps", steps, at_least=1, hint="steps=16 looks 16 ahead")
        at = np.asarray(origins, dtype=np.int64)
        check_origins(at, self.lags, len(values))
        read = int(self._form[0, 0])
        if given.known.shape[1] != read:
            raise UserError(
                f"fitted with {read} known inputs, and {given.known.shape[1]} are given",
                hint="the same columns as in the fit",
            )
        if not len(at):
            return np.zeros((0, steps, values.shape[1]))
        paths = [
            self._column(values[:, j : j + 1], j, at, steps, given) for j in range(values.shape[1])
        ]
        return np.stack(paths, axis=2)

    def _column(
        self, x: Values, j: int, at: NDArray[np.int64], steps: int, inputs: Inputs
    ) -> NDArray[np.float64]:
        beyond = max(0, int(at.max()) + steps - len(x))
        phi, form = self._phi[j], (bool(self._form[j, 1]), bool(self._form[j, 2]))
        y, design = self._rows(x, inputs, form, beyond)
        origins = at - (self.trend == "changes")
        beta = _effects_before(y, design[: len(y)], phi, origins)
        behind = origins[:, None] + np.arange(-self.tau, 0)
        past = y[behind, 0] - np.einsum("okj,oj->ok", design[behind], beta)
        errors = _continued(past, phi, steps)
        future = origins[:, None] + np.arange(steps)
        path = np.einsum("okj,oj->ok", design[future], beta) + errors
        return x[at - 1] + np.cumsum(path, axis=1) if self.trend == "changes" else path

    def state(self) -> State:
        return {"phi": self._phi, "form": self._form}

    def restore(self, state: State) -> None:
        self._phi, self._form = state["phi"], state["form"]


def _whitened(rows: NDArray[np.float64], phi: NDArray[np.float64]) -> NDArray[np.float64]:
    """z_t = x_t - Σ_i φ_i x_{t-i}, from t = len(φ) on; newest φ first."""
    tau = len(phi)
    white = rows[tau:].copy()
    for i, weight in enumerate(phi, 1):
        if weight:
            white -= weight * rows[tau - i : len(rows) - i]
    return white


def _solved(rows: list["_Regressed"], order: int, tau: int) -> tuple[NDArray[np.float64], float]:
    """φ_1 … φ_order (and zeros up to τ), and the sum of squares that remains."""
    phi = np.zeros(tau)
    beta, squares = _effects(rows, phi)
    if not order:
        return phi, squares
    for _ in range(_ROUNDS):
        lagged, now = [], []
        for row, b in zip(rows, beta, strict=True):
            e = row.y[:, 0] - row.design @ b
            lagged.append(np.stack([e[tau - i : len(e) - i] for i in range(1, order + 1)], axis=1))
            now.append(e[tau:])
        coefficients = np.linalg.lstsq(np.concatenate(lagged), np.concatenate(now), rcond=None)[0]
        phi = np.zeros(tau)
        phi[:order] = _steady(np.asarray(coefficients))
        beta, squares = _effects(rows, phi)
    return phi, squares


def _steady(phi: NDArray[np.float64]) -> NDArray[np.float64]:
    """φ drawn in until errors die out: φ_i ρ^i, whose largest root is at most 0.98."""
    companion = np.eye(len(phi), k=-1)
    companion[0] = phi
    root = float(np.abs(np.linalg.eigvals(companion)).max())
    return phi if root <= 0.98 else phi * (0.98 / root) ** np.arange(1, len(phi) + 1)


@final
class _Regressed:
    """What is regressed, and on what, whitened by one φ after another.

    Many effects are found from sums of products, to which φ comes last. With D = U S Vᵀ, Z = [U x]
    and c = (1, -φ_1, …, -φ_τ), whitened Z have the products

        Σ_t (Σ_i c_i Z_{t-i})ᵀ (Σ_j c_j Z_{t-j}) = Σ_ij c_i c_j Σ_t Z_{t-i}ᵀ Z_{t-j}
    """

    def __init__(self, y: Values, design: Design, tau: int) -> None:
        self.y, self.design = y, design
        self.products: NDArray[np.float64] | None = None
        if design.shape[1] >= _MANY:
            u, sizes, v = np.linalg.svd(design, full_matrices=False)
            told_apart = sizes > sizes[0] * max(design.shape) * np.finfo(np.float64).eps
            self.back = v[told_apart].T / sizes[told_apart]
            self.products = _products_of_lags(np.concatenate([u[:, told_apart], y], axis=1), tau)

    def effects(self, phi: NDArray[np.float64]) -> NDArray[np.float64]:
        """By least squares on whitened rows."""
        if self.products is not None:
            c = np.concatenate([[1.0], -phi])
            sums = np.tensordot(np.outer(c, c), self.products, axes=2)
            gram, drawn = sums[:-1, :-1], sums[:-1, -1]
            if _far_from_singular(gram):
                return self.back @ np.linalg.solve(gram, drawn)
        z, white = _whitened(self.y, phi)[:, 0], _whitened(self.design, phi)
        return np.asarray(np.linalg.lstsq(white, z, rcond=None)[0], dtype=np.float64)


def _products_of_lags(z: NDArray[np.float64], tau: int) -> NDArray[np.float64]:
    """Σ_t Z_{t-i} Z_{t-j}ᵀ over t ≥ τ for i, j = 0 … τ: (lags, lags, columns, columns).

    From one pair of lags to the next the sum moves one step back: a row comes and a row goes.
    """
    lags, n = range(tau + 1), len(z)
    sums = np.empty((tau + 1, tau + 1, z.shape[1], z.shape[1]))
    for i, j in itertools.product(lags, lags):
        if i > j:
            sums[i, j] = sums[j, i].T
        elif i == 0:
            sums[i, j] = z[tau:].T @ z[tau - j : n - j]
        else:
            comes = np.outer(z[tau - i], z[tau - j])
            sums[i, j] = sums[i - 1, j - 1] + comes - np.outer(z[n - i], z[n - j])
    return sums


def _far_from_singular(gram: NDArray[np.float64]) -> bool:
    try:
        pivots = np.diagonal(np.linalg.cholesky(gram))
    except np.linalg.LinAlgError:
        return False
    return bool(pivots.min() > 1e-4 * pivots.max())


def _effects(
    rows: list[_Regressed], phi: NDArray[np.float64]
) -> tuple[list[NDArray[np.float64]], float]:
    """Each series' effects by least squares on whitened rows, and what remains of all."""
    solved = [row.effects(phi) for row in rows]
    left = [
        _whitened(r.y - (r.design @ b)[:, None], phi) for r, b in zip(rows, solved, strict=True)
    ]
    return solved, sum(float((e**2).sum()) for e in left)


def _effects_before(
    y: Values, design: Design, phi: NDArray[np.float64], origins: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The effects that the data before each origin give, (origins, effects).

    By sums of z zᵀ up to every origin, in units taken from what is known before the first of them;
    effects that the data cannot tell apart share what they explain.
    """
    z, white = _whitened(y, phi)[:, 0], _whitened(design, phi)
    upto = origins - len(phi) - 1
    before = slice(0, int(upto.min()) + 1)
    size = np.sqrt((white[before] ** 2).mean(0))
    unit, middle = np.where(size > 0, size, 1.0), z[before].mean()
    white = white / unit
    if design.shape[1] >= _MANY:
        both = _effects_step_by_step(white, np.stack([z - middle, np.ones(len(z))], axis=1), upto)
        return (both[..., 0] + middle * both[..., 1]) / unit
    gram = _grams(white, upto)
    ones = np.cumsum(white, axis=0)[upto]
    drawn = np.cumsum(white * (z - middle)[:, None], axis=0)[upto]
    ridge = _RIDGE * np.maximum(np.einsum("ojj->oj", gram), 1e-3)
    gram = gram + ridge[:, :, None] * np.eye(gram.shape[1])
    both = np.linalg.solve(gram, np.stack([drawn, ones], axis=2))
    return (both[..., 0] + middle * both[..., 1]) / unit


def _effects_step_by_step(
    white: Design, targets: NDArray[np.float64], upto: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The effects on some targets up to each u of `upto`, (origins, effects, targets).

    Recursive least squares: with P the inverse of Σ w wᵀ, a step with the row w and the target z
    adds P w / (1 + wᵀ P w) times what it missed, z - wᵀ β.
    """
    first, last = int(upto.min()), int(upto.max())
    before = white[: first + 1]
    gram = before.T @ before
    inverse = np.linalg.inv(gram + np.diag(_RIDGE * np.maximum(np.diagonal(gram), 1e-3)))
    beta = inverse @ before.T @ targets[: first + 1]
    found = np.empty((last - first + 1, *beta.shape))
    found[0] = beta
    for t in range(first + 1, last + 1):
        w = white[t]
        drawn = inverse @ w
        gain = drawn / (1 + w @ drawn)
        beta = beta + gain[:, None] * (targets[t] - w @ beta)
        inverse -= np.outer(gain, drawn)
        found[t - first] = beta
    return found[upto - first]


def _grams(white: Design, upto: NDArray[np.int64]) -> NDArray[np.float64]:
    """Σ_{t ≤ u} w_t w_tᵀ for each u of `upto`, summed in pieces so that memory stays bounded."""
    effects = white.shape[1]
    rows = max(1, _PIECE // max(1, effects**2))
    grams, carried = np.empty((len(upto), effects, effects)), np.zeros((effects, effects))
    for start in range(0, int(upto.max()) + 1, rows):
        part = white[start : start + rows]
        sums = np.cumsum(part[:, :, None] * part[:, None, :], axis=0)
        here = (start <= upto) & (upto < start + rows)
        grams[here] = carried + sums[upto[here] - start]
        carried = carried + sums[-1]
    return grams


def _continued(
    past: NDArray[np.float64], phi: NDArray[np.float64], steps: int
) -> NDArray[np.float64]:
    """Errors after each row's last ones: e_{t+1} = Σ φ_i e_{t-i+1}, fed back."""
    errors = np.concatenate([past, np.zeros((len(past), steps))], axis=1)
    tau = len(phi)
    for k in range(tau, errors.shape[1]):
        errors[:, k] = errors[:, k - tau : k][:, ::-1] @ phi
    return errors[:, tau:]
