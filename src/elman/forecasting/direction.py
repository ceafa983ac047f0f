"""Which way does time run? x_{t+1} = f(x_t) + ε, fitted forwards and backwards.

The joint distribution of a sequence can be factored from either end, so on paper no direction is
preferred. The notes add that for some additive noise one finds x_{t+1} = f(x_t) + ε but not the
reverse (Hoyer et al., 2009). Here both are fitted and asked two things: how much of the target the
fit leaves unexplained, and whether what is left is independent of the input, as noise must be.
"""

from dataclasses import dataclass

import numpy as np
from numpy.polynomial import Chebyshev
from numpy.typing import ArrayLike, NDArray

from elman.errors import UserError
from elman.forecasting.base import as_values
from elman.options import whole_number

MOST_PAIRS = 500
"""Pairs that the test of independence looks at: it compares each with each."""

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """One direction: target = f(input) + noise, f a polynomial."""

    unexplained: float
    """Var(noise) / Var(target)"""
    dependence: float
    """HSIC of noise and input: 0 where they are independent"""
    p_value: float
    """how often independent noise would look at least as dependent"""
    f: Chebyshev

    @property
    def causal(self) -> bool:
        """Whether the noise could be noise: nothing (at 5 %) says that it knows the input."""
        return self.p_value >= 0.05


@dataclass(frozen=True)
class Directions:
    """x_{t+1} from x_t, and x_t from x_{t+1}."""

    forwards: Fit
    backwards: Fit

    def words(self) -> str:
        """Both directions in a sentence each."""
        lines = (
            f"{name}: {fit.unexplained:.0%} unexplained, noise "
            f"{'independent of' if fit.causal else 'depends on'} its input (p {fit.p_value:.2g})"
            for name, fit in (("forwards", self.forwards), ("backwards", self.backwards))
        )
        return "\n".join(lines)


def both_directions(
    values: ArrayLike, degree: int = 5, permutations: int = 199, seed: int = 0
) -> Directions:
    """Fit a polynomial of each step from the one before, and of each from the one after.

    The p-value comes from `permutations` shuffles of the noise against the input, so it is never
    below 1 / (permutations + 1).
    """
    x = as_values(values)
    if x.shape[1] != 1:
        raise UserError(f"{x.shape[1]} columns at once", hint="one series at a time")
    degree = whole_number("degree", degree, at_least=1, hint="5")
    if permutations < 19:
        raise UserError(f"permutations={permutations} cannot show p = 0.05", hint="at least 19")
    if len(x) < 10 * (degree + 1):
        raise UserError(
            f"{len(x)} steps are too few for a polynomial of degree {degree}",
            hint=f"at least {10 * (degree + 1)} steps, or a lower degree",
        )
    if np.ptp(x) == 0:
        raise UserError("the series is constant", hint="a series that moves")
    now, then = x[:-1, 0], x[1:, 0]
    rng = np.random.default_rng(whole_number("seed", seed, at_least=0, hint="seed=0"))
    return Directions(
        forwards=_fit(now, then, degree, permutations, rng),
        backwards=_fit(then, now, degree, permutations, rng),
    )


def _fit(
    source: Vector, target: Vector, degree: int, permutations: int, rng: np.random.Generator
) -> Fit:
    f = Chebyshev.fit(source, target, degree)
    noise = target - f(source)
    every = -(-len(source) // MOST_PAIRS)
    kernels = _centred(_kernel(source[::every])), _centred(_kernel(noise[::every]))
    dependence = _hsic(*kernels)
    shuffles = (rng.permutation(len(kernels[1])) for _ in range(permutations))
    as_dependent = sum(
        _hsic(kernels[0], kernels[1][np.ix_(order, order)]) >= dependence for order in shuffles
    )
    return Fit(
        unexplained=float(noise.var() / target.var()),
        dependence=dependence,
        p_value=(1 + as_dependent) / (1 + permutations),
        f=f,
    )


def _kernel(x: Vector) -> NDArray[np.float64]:
    """exp(-d²/2m²) of all distances d, m their median."""
    distance = np.abs(x[:, None] - x[None, :])
    scale = float(np.median(distance[distance > 0])) if np.ptp(x) > 0 else 1.0
    return np.exp(-np.square(distance / scale) / 2)


def _centred(kernel: NDArray[np.float64]) -> NDArray[np.float64]:
    return kernel - kernel.mean(0) - kernel.mean(1)[:, None] + kernel.mean()


def _hsic(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The Hilbert–Schmidt independence criterion of two centred kernels (Gretton et al., 2005)."""
    return float((one * other).mean())
