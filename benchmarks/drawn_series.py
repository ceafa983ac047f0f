"""Series drawn at random from processes that are known, so that what could have come is known too.

A process moves a state one step on, for many futures side by side. `drawn(kind, …)` gives series of
one kind with parameters of their own; `Drawn.series` is what a forecaster sees before a cutoff,
`Drawn.futures` what could come after it, given the very state that the series was in then.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.forecasting.series import Series

Array = NDArray[np.float64]
State = dict[str, Any]
"""Arrays whose first axis is over futures."""
Step = Callable[[int, State, Any], Array]
"""x_t of every future from the state, which it changes; and random numbers."""


@dataclass
class Process:
    """How x_t comes about, from what state, and what a forecaster is told of it."""

    step: Step
    state: State = field(default_factory=dict)
    length: int = 120
    season: int | None = None
    """The true season."""
    told: bool = True
    """Whether a forecaster is told the season."""
    known: Array | None = None


@dataclass
class Drawn:
    """One series, and the state of its process at each cutoff."""

    name: str
    process: Process
    values: Array
    states: dict[int, State]

    def series(self, cutoff: int) -> Series:
        p = self.process
        x = self.values[:cutoff, None]
        given = {} if p.known is None else {"known": p.known, "inputs": ("input",)}
        return Series(self.name, x, ("y",), None, p.season if p.told else None, **given)

    def futures(self, cutoff: int, steps: int, count: int, rng: Any) -> Array:
        """(count, steps)"""
        state = {k: np.repeat(v, count, axis=0) for k, v in self.states[cutoff].items()}
        count_of = {"": np.zeros(count)}
        return _run(self.process.step, state | count_of, cutoff, steps, rng)


def _run(step: Step, state: State, start: int, steps: int, rng: Any) -> Array:
    return np.stack([step(t, state, rng) for t in range(start, start + steps)], axis=1)


def drawn(kind: str, seed: int, count: int, steps: int, cutoffs: int) -> list[Drawn]:
    """Series of a kind: the last cutoff is at their end, the others `steps` apart before it."""
    which = list(KINDS).index(kind)
    rngs = [np.random.default_rng((seed, which, i)) for i in range(count)]
    if kind == RELATED:
        pattern, length = _pattern(np.random.default_rng((seed, which)), 12), 60 + 12 * (seed % 6)
        made = [_alike(rng, pattern, length) for rng in rngs]
    else:
        made = [KINDS[kind](rng) for rng in rngs]
    return [
        _draw(f"{kind} {i}", p, rng, steps, cutoffs)
        for i, (p, rng) in enumerate(zip(made, rngs, strict=True))
    ]


def _draw(name: str, p: Process, rng: Any, steps: int, cutoffs: int) -> Drawn:
    state = {"": np.zeros(1)} | {k: np.array(v, dtype=float)[None] for k, v in p.state.items()}
    at = [p.length - back * steps for back in range(cutoffs - 1, -1, -1)]
    parts, states, before = [], {}, 0
    for cutoff in at:
        parts.append(_run(p.step, state, before, cutoff - before, rng))
        states[cutoff] = {k: v.copy() for k, v in state.items()}
        before = cutoff
    return Drawn(name, p, np.concatenate(parts, axis=1)[0], states)


def _length(rng: Any, least: int = 60, most: int = 400) -> int:
    return int(np.exp(rng.uniform(np.log(least), np.log(most))))


def _size(s: State) -> int:
    return len(s[""])


def arma(
    rng: Any,
    phi: tuple[float, ...] = (),
    theta: tuple[float, ...] = (),
    *,
    mean: Callable[[int], float] = lambda t: 0.0,
    sums: int = 0,
    drift: float = 0.0,
    spread: float = 1.0,
    noise: Callable[[Any, int], Array] = lambda rng, n: rng.normal(size=n),
    **about: Any,
) -> Process:
    """mean(t) + y_t; y_t the `sums`-fold sum of drift + an ARMA(φ, θ)."""

    def step(t: int, s: State, rng: Any) -> Array:
        e = spread * noise(rng, _size(s))
        w = e + s["w"] @ np.array(phi) + s["e"] @ np.array(theta)
        s["w"] = np.concatenate([w[:, None], s["w"]], axis=1)[:, : len(phi)]
        s["e"] = np.concatenate([e[:, None], s["e"]], axis=1)[:, : len(theta)]
        y = w + drift
        for j in range(sums):
            s["y"][:, j] += y
            y = s["y"][:, j]
        return mean(t) + y

    state = {"w": np.zeros(len(phi)), "e": np.zeros(len(theta)), "y": np.zeros(sums)}
    about = {"length": _length(rng)} | about
    return Process(step, state, **about)


def _stable(rng: Any) -> tuple[float, float]:
    """φ of an AR(2) with roots inside the circle."""
    while True:
        a, b = rng.uniform(-1.8, 1.8), rng.uniform(-0.95, 0.9)
        if abs(b) < 0.95 and b + a < 0.97 and b - a < 0.97:
            return a, b


def _around(rng: Any) -> Callable[[int], float]:
    mean = rng.normal(0, 20)
    return lambda t: mean


def _autoregressive(rng: Any) -> Process:
    return arma(rng, _stable(rng), mean=_around(rng))


def _moving(rng: Any) -> Process:
    return arma(rng, (), tuple(rng.uniform(-0.9, 0.9, 2)), mean=_around(rng))


def _noise(rng: Any) -> Process:
    return arma(rng, mean=_around(rng))


def _walk(rng: Any) -> Process:
    return arma(rng, sums=1, mean=lambda t: 50.0)


def _drifting(rng: Any) -> Process:
    phi, theta = (rng.uniform(-0.6, 0.8),), (rng.uniform(-0.6, 0.6),)
    return arma(rng, phi, theta, sums=1, drift=rng.normal(0, 0.5), mean=lambda t: 100.0)


def _doubly(rng: Any) -> Process:
    return arma(rng, (), (rng.uniform(-0.9, -0.4),), sums=2, spread=1.0)


def _pattern(rng: Any, m: int) -> Array:
    """A season made of its first few waves, mean 0, variance 1."""
    waves = min(4, m // 2)
    t = 2 * np.pi * np.arange(m)[:, None] * np.arange(1, waves + 1) / m
    s = np.cos(t) @ rng.normal(size=waves) + np.sin(t) @ rng.normal(size=waves)
    s = s + 0.3 * s.std() * rng.normal(size=m)
    return (s - s.mean()) / s.std()


def _seasonal(m: int, told: bool = True) -> Callable[[Any], Process]:
    def make(rng: Any) -> Process:
        pattern, slope = rng.uniform(0.5, 4) * _pattern(rng, m), rng.choice([0, rng.normal(0, 0.1)])
        length = _length(rng, max(60, 4 * m), max(240, 6 * m))
        return arma(
            rng, (rng.uniform(-0.3, 0.8),), mean=lambda t: 30 + slope * t + pattern[t % m],
            length=length, season=m, told=told,
        )  # fmt: skip

    return make


def _seasonal_arima(m: int) -> Callable[[Any], Process]:
    """(0, 1, 1)(0, 1, 1)_m, which the airline made famous: season and level both wander."""

    def make(rng: Any) -> Process:
        small, large = rng.uniform(0.2, 0.8), rng.uniform(0.3, 0.8)
        pattern = 5 * _pattern(rng, m)

        def step(t: int, s: State, rng: Any) -> Array:
            e = rng.normal(size=_size(s))
            before, a, b = s["x"], s["e"][:, 0], s["e"][:, m - 1]
            x = before[:, 0] + before[:, m - 1] - before[:, m]
            x = x + e - small * a - large * b + small * large * s["e"][:, m]
            s["x"] = np.concatenate([x[:, None], before[:, :-1]], axis=1)
            s["e"] = np.concatenate([e[:, None], s["e"][:, :-1]], axis=1)
            return x

        past = np.resize(pattern, m + 1)[::-1] + 50
        length = _length(rng, max(60, 4 * m), max(240, 6 * m))
        return Process(step, {"x": past, "e": np.zeros(m + 1)}, length, m)

    return make


def _two_seasons(rng: Any) -> Process:
    short, long = (7, 28) if rng.random() < 0.5 else (24, 168)
    a, b = 3 * _pattern(rng, short), rng.uniform(1, 3) * _pattern(rng, long)
    return arma(
        rng, (0.4,), mean=lambda t: 50 + a[t % short] + b[t % long],
        length=int(rng.uniform(3, 6) * long), season=short,
    )  # fmt: skip


def _multiplicative(rng: Any) -> Process:
    m = int(rng.choice([4, 7, 12]))
    pattern, growth = rng.uniform(0.1, 0.3) * _pattern(rng, m), rng.uniform(0, 0.015)
    inner = arma(rng, (0.7,), spread=0.04, length=_length(rng), season=m)

    def step(t: int, s: State, rng: Any) -> Array:
        return np.exp(4 + growth * t + pattern[t % m] + inner.step(t, s, rng))

    return Process(step, inner.state, inner.length, m)


def _shifts(rng: Any) -> Process:
    """A level that jumps now and then, and noise around it."""
    rate = rng.uniform(0.01, 0.04)

    def step(t: int, s: State, rng: Any) -> Array:
        n = _size(s)
        s["level"] += (rng.random(n) < rate) * 8 * rng.normal(size=n)
        return s["level"] + rng.normal(size=n)

    return Process(step, {"level": 40.0}, _length(rng))


def _outliers(rng: Any) -> Process:
    """An autoregression seen through glitches: 3 in 100 are many spreads off."""

    def noise(rng: Any, n: int) -> Array:
        return (rng.random(n) < 0.03) * rng.choice([-1, 1], n) * rng.uniform(8, 20, n)

    inner = arma(rng, (rng.uniform(0.3, 0.9),), mean=lambda t: 30.0)

    def step(t: int, s: State, rng: Any) -> Array:
        return inner.step(t, s, rng) + noise(rng, _size(s))

    return Process(step, inner.state, inner.length)


def _intermittent(rng: Any) -> Process:
    often, size = rng.uniform(0.08, 0.4), rng.uniform(2, 12)

    def step(t: int, s: State, rng: Any) -> Array:
        n = _size(s)
        return (rng.random(n) < often) * (1.0 + rng.poisson(size, n))

    return Process(step, {}, _length(rng))


def _counts(rng: Any) -> Process:
    """Poisson around a rate that wanders a little, with a week in it."""
    pattern, rate = 0.3 * _pattern(rng, 7), np.log(rng.uniform(1, 12))
    inner = arma(rng, (0.8,), spread=0.1)

    def step(t: int, s: State, rng: Any) -> Array:
        return rng.poisson(np.exp(rate + pattern[t % 7] + inner.step(t, s, rng))) * 1.0

    return Process(step, inner.state, inner.length, 7)


def _short(rng: Any) -> Process:
    made = [_noise, _walk, _autoregressive, _drifting][rng.integers(4)](rng)
    made.length = int(rng.integers(8 + 4, 31))
    return made


def _short_seasonal(rng: Any) -> Process:
    m = int(rng.choice([4, 7, 12]))
    made = _seasonal(m)(rng)
    made.length = int(rng.integers(int(1.5 * m) + 8, 3 * m + 9))
    return made


def _long(rng: Any) -> Process:
    made = _seasonal(24)(rng) if rng.random() < 0.5 else _autoregressive(rng)
    made.length = 5000
    return made


def _constant(rng: Any) -> Process:
    level = rng.normal(0, 20)
    return Process(lambda t, s, rng: np.full(_size(s), level), {}, _length(rng))


def _growth(rng: Any) -> Process:
    return _logs(
        arma(rng, sums=1, drift=rng.uniform(0.01, 0.05), spread=0.03, length=_length(rng, 60, 200))
    )


def _logs(inner: Process) -> Process:
    return Process(lambda t, s, rng: 10 * np.exp(inner.step(t, s, rng)), inner.state, inner.length)


def _line(rng: Any) -> Process:
    """A straight line and noise around it."""
    slope = rng.normal(0, 0.3)
    return arma(rng, (rng.uniform(0, 0.5),), mean=lambda t: 20 + slope * t)


def _chaos(rng: Any) -> Process:
    """The logistic map, seen almost exactly."""
    r = rng.uniform(3.6, 4)

    def step(t: int, s: State, rng: Any) -> Array:
        s["z"] = np.clip(r * s["z"] * (1 - s["z"]), 1e-9, 1 - 1e-9)
        return s["z"] + 0.005 * rng.normal(size=_size(s))

    return Process(step, {"z": rng.uniform(0.1, 0.9)}, _length(rng))


def _regimes(rng: Any) -> Process:
    """Two autoregressions taking turns."""
    means, phis, stays = rng.normal(0, 4, 2), rng.uniform(-0.5, 0.9, 2), rng.uniform(0.9, 0.98, 2)

    def step(t: int, s: State, rng: Any) -> Array:
        n = _size(s)
        which = s["which"].astype(int)
        which = np.where(rng.random(n) < stays[which], which, 1 - which)
        s["which"] = which.astype(float)
        s["x"] = means[which] + phis[which] * (s["x"] - means[which]) + rng.normal(size=n)
        return s["x"] + 0.0

    return Process(step, {"which": 0.0, "x": 0.0}, _length(rng))


def _heavy(rng: Any) -> Process:
    def noise(rng: Any, n: int) -> Array:
        return rng.standard_t(2, n)

    return arma(rng, (rng.uniform(0, 0.8),), noise=noise, mean=lambda t: 10.0)


def _volatile(rng: Any) -> Process:
    """Noise whose spread follows its own past, GARCH(1, 1), added up."""
    a, b = rng.uniform(0.05, 0.3), rng.uniform(0.5, 0.65)

    def step(t: int, s: State, rng: Any) -> Array:
        e = np.sqrt(s["v"]) * rng.normal(size=_size(s))
        s["v"] = (1 - a - b) + a * e**2 + b * s["v"]
        s["x"] = s["x"] + e
        return s["x"]

    return Process(step, {"v": 1.0, "x": 60.0}, _length(rng))


def _driven(rng: Any) -> Process:
    length, weight = _length(rng), rng.uniform(2, 8)
    u = (rng.random(length + 60) < 0.3) * rng.uniform(0.5, 2, length + 60)
    made = arma(rng, (rng.uniform(0, 0.8),), mean=lambda t: 30 + weight * u[t], length=length)
    made.known = u[:, None]
    return made


def _stopped(rng: Any) -> Process:
    """A walk that stays where it is for most steps: prices, rates."""

    def step(t: int, s: State, rng: Any) -> Array:
        n = _size(s)
        s["x"] = s["x"] + 0.25 * (rng.random(n) < 0.15) * rng.choice([-1, 1], n)
        return s["x"]

    return Process(step, {"x": 4.0}, _length(rng))


def _alike(rng: Any, pattern: Array, length: int) -> Process:
    """A season of 12 that all related series have, each with a size and a level of its own."""
    size = np.exp(rng.normal(0, 1))
    return arma(
        rng, (0.5,), mean=lambda t: size * (20 + 1.5 * pattern[t % 12]), spread=size,
        length=length, season=12,
    )  # fmt: skip


RELATED = "related series"
"""Forecast together; each of the others alone."""

KINDS: dict[str, Callable[[Any], Process]] = {
    "noise around a mean": _noise,
    "autoregression": _autoregressive,
    "moving average": _moving,
    "random walk": _walk,
    "walk with drift": _drifting,
    "twice integrated": _doubly,
    "straight line": _line,
    **{f"season of {m}": _seasonal(m) for m in (4, 7, 12, 24, 52)},
    **{f"wandering season of {m}": _seasonal_arima(m) for m in (4, 12)},
    "season of 12, not told": _seasonal(12, told=False),
    "two seasons": _two_seasons,
    "multiplicative season": _multiplicative,
    "exponential growth": _growth,
    "level shifts": _shifts,
    "outliers": _outliers,
    "heavy tails": _heavy,
    "volatile": _volatile,
    "steps now and then": _stopped,
    "intermittent": _intermittent,
    "counts": _counts,
    "regime switching": _regimes,
    "chaos": _chaos,
    "driven by an input": _driven,
    RELATED: lambda rng: _alike(rng, _pattern(rng, 12), 120),
    "constant": _constant,
    "short": _short,
    "short with a season": _short_seasonal,
    "long": _long,
}
