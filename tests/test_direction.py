"""x_{t+1} = f(x_t) + ε: found in the direction it was made, and only where it can be."""

import numpy as np
import pytest

from elman.errors import UserError
from elman.forecasting import both_directions


def made(f, noise):
    x = [0.1]
    for e in noise:
        x.append(f(x[-1]) + e)
    return np.array(x)


def quadratic(rng, steps=1200):
    return made(lambda x: 1 - x * x, rng.uniform(-0.1, 0.1, steps))


@pytest.mark.parametrize("seed", range(3))
def test_forwards_the_noise_is_noise_and_backwards_it_is_not(seed):
    found = both_directions(quadratic(np.random.default_rng(seed)))
    assert found.forwards.causal
    assert not found.backwards.causal
    assert found.forwards.unexplained < found.backwards.unexplained
    assert "independent" in found.words().splitlines()[0]
    assert "depends" in found.words().splitlines()[1]


@pytest.mark.parametrize("seed", range(3))
def test_a_linear_law_with_gaussian_noise_runs_both_ways(seed):
    """Jointly Gaussian pairs are symmetric, so no test may tell the directions apart."""
    noise = np.random.default_rng(seed).normal(size=1200)
    found = both_directions(made(lambda x: 0.8 * x, noise), degree=1)
    assert found.backwards.causal
    assert found.forwards.unexplained == pytest.approx(found.backwards.unexplained, rel=0.01)
    assert found.forwards.unexplained == pytest.approx(1 - 0.8**2, rel=0.15)


def test_a_linear_law_with_other_noise_does_not():
    noise = np.random.default_rng(0).uniform(-1, 1, 1500)
    found = both_directions(made(lambda x: 0.8 * x, noise), degree=1)
    assert found.forwards.causal
    assert not found.backwards.causal


def test_a_series_read_backwards_swaps_the_directions():
    x = quadratic(np.random.default_rng(1))
    found, turned = both_directions(x), both_directions(x[::-1])
    assert turned.forwards.unexplained == pytest.approx(found.backwards.unexplained)
    assert not turned.forwards.causal
    assert turned.backwards.causal


def test_the_same_seed_gives_the_same_answer_and_p_is_never_below_what_shuffles_can_show():
    x = quadratic(np.random.default_rng(2), 300)
    one, two = both_directions(x, permutations=39), both_directions(x, permutations=39)
    assert one.backwards.p_value == two.backwards.p_value == 1 / 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"degree": 0}, "degree=0"),
        ({"permutations": 5}, "permutations=5"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"values": np.arange(20.0)}, "20 steps are too few"),
        ({"values": np.ones(100)}, "constant"),
        ({"values": np.ones((100, 2))}, "2 columns"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(UserError, match=message):
        both_directions(**{"values": quadratic(np.random.default_rng(0), 200), **change})
