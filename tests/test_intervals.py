"""How wide: ends of intervals, and how a model errs, against loops anyone can check."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from elman.errors import UserError
from elman.forecasting import Last, Mean, Seasonal, Smoothing, calibrate, intervals
from elman.forecasting.intervals import GRID, MIDDLE, Errors, errors, interval, nested

UNIFORM = 3 + 10 * np.array(GRID)
"""Quantiles of what lies anywhere from 3 to 13, whose middle is 8."""
NORMAL = np.array([NormalDist().inv_cdf(q) for q in GRID])


@pytest.mark.parametrize("level", [20, 37, 80, 95, 99])
def test_an_interval_leaves_as_much_on_either_side(level):
    assert UNIFORM[MIDDLE] == 8
    reach = 5 * level / 100
    for wider in (1.0, 0.5, 3.0):
        low, high = interval(UNIFORM, level, wider)
        assert (low, high) == pytest.approx((8 - wider * reach, 8 + wider * reach))


@pytest.mark.parametrize("level", [20, 37, 80, 95, 98, 99])
def test_an_end_between_two_quantiles_lies_on_the_line_between_them(level):
    low, high = interval(np.stack([NORMAL, 2 * NORMAL]), level)
    end = np.interp((1 + level / 100) / 2, GRID, NORMAL)
    assert high == pytest.approx([end, 2 * end])
    assert low == pytest.approx([-end, -2 * end])


def test_an_interval_holds_every_narrower_one():
    ends = nested(NORMAL, {80.0: 2.0})
    assert ends == tuple({80.0: pytest.approx(sign * 2 * NORMAL[-4])} for sign in (-1, 1))
    low, high = nested(UNIFORM, {95.0: 0.5, 50.0: 1.0, 80.0: 2.0})
    reach = {50.0: 2.5, 80.0: 8.0, 95.0: 8.0}
    assert low == pytest.approx({level: 8 - far for level, far in reach.items()})
    assert high == pytest.approx({level: 8 + far for level, far in reach.items()})


def test_the_quantiles_of_an_error_are_its_spread_times_its_shape():
    known = Errors(np.array([[1.0, 2.0], [3.0, 4.0]]), np.stack([UNIFORM, -UNIFORM[::-1]], 1))
    offsets = known.offsets(4, [0.25, 0.5])
    assert offsets.shape == (4, 2, 2)
    further = [1, 1, math.sqrt(3 / 2), math.sqrt(4 / 2)]
    for k, (spread, more) in enumerate(zip([(1, 2), (3, 4), (3, 4), (3, 4)], further, strict=True)):
        assert offsets[k, 0] == pytest.approx([spread[0] * more * z for z in (5.5, 8)])
        assert offsets[k, 1] == pytest.approx([spread[1] * more * z for z in (-10.5, -8)])


@pytest.mark.parametrize(
    ("length", "steps", "numbers"), [(60, 3, 0), (60, 3, 20), (60, 3, 58), (13, 9, 1)]
)
def test_how_a_model_errs_is_measured_at_every_origin(length, steps, numbers, monkeypatch):
    monkeypatch.setattr(Last, "learned", numbers)
    x = np.cumsum(np.random.default_rng(0).normal(2.0, 1.0, (length, 2)), axis=0)
    found = errors(Last().fit(x), x, steps)
    several = [k for k in range(1, steps + 1) if length - k >= 8]
    hidden = (length - 1) / max(length - 1 - numbers, (length - 1) / 4)
    for j in range(2):
        apart = {k: [x[t + k, j] - x[t, j] for t in range(length - k)] for k in several}
        spread = {k: math.sqrt(np.mean(np.square(r)) * hidden) for k, r in apart.items()}
        assert found.spread[:, j] == pytest.approx(list(spread.values()))
        z = np.concatenate([np.array(apart[k]) / spread[k] for k in several])
        doubt = 20 / (length - 1 + 20) * 2 * np.abs(np.array(GRID) - 0.5)
        assert found.shape[:, j] == pytest.approx(
            (1 - doubt) * np.quantile(z, GRID) + doubt * NORMAL
        )


def test_spreads_never_shrink():
    x = np.tile([0.0, 1.0], 20)[:, None]
    np.testing.assert_allclose(errors(Last().fit(x), x, 4).spread, 1)


def test_one_error_says_nothing_of_the_shape():
    two, three = np.array([[1.0], [5.0]]), np.array([[1.0], [5.0], [3.0]])
    found = errors(Last().fit(two), two, 2)
    assert found.spread.tolist() == [[0]]
    assert found.shape[:, 0] == pytest.approx(NORMAL)
    four = np.array([[1.0, 2.0], [5.0, 2.0], [3.0, 4.0], [4.0, 9.0]])
    found = errors(Seasonal(3).fit(four), four, 2)
    assert found.spread == pytest.approx(np.array([np.std([[4, -2, 1], [0, 2, 5]], axis=1)]))
    found = errors(Last().fit(three), three, 2)
    assert found.spread.tolist() == [[pytest.approx(math.sqrt((16 + 4) / 2))]]


def test_errors_of_what_grows_are_shares_of_the_forecast():
    rng = np.random.default_rng(0)
    x = np.exp(np.cumsum(0.04 + 0.03 * rng.normal(size=(120, 2)), axis=0))
    x[:, 1] = 50 + np.cumsum(rng.normal(size=120))
    model = Last().fit(x)
    found = errors(model, x, 3)
    assert found.relative.tolist() == [True, False]
    shares = x[1:, 0] / x[:-1, 0] - 1
    assert found.spread[0, 0] == pytest.approx(math.sqrt(np.mean(shares**2)))
    path = np.array([[[200.0, 60.0], [-100.0, 60.0]]])
    around = found.around(path, [0.1, 0.9])[0]
    offsets = found.offsets(2, [0.1, 0.9])
    assert around[0, 0] == pytest.approx(200 + 200 * offsets[0, 0])
    assert around[1, 0] == pytest.approx(-100 + 100 * offsets[1, 0])
    assert around[:, 1] == pytest.approx(60 + offsets[:, 1])


@pytest.mark.parametrize("least", [0.0, -1.0])
def test_only_errors_of_what_is_positive_are_shares(least):
    rng = np.random.default_rng(0)
    x = np.exp(np.cumsum(0.04 + 0.03 * rng.normal(size=(120, 1)), axis=0))
    x[0] = least
    assert not errors(Last().fit(x), x, 3).relative.any()


def test_a_forecast_near_zero_does_not_decide_how_wide_intervals_are(monkeypatch):
    rng = np.random.default_rng(0)
    x = np.exp(np.cumsum(0.04 + 0.03 * rng.normal(size=(120, 1)), axis=0))
    model, roll = Last().fit(x), Last.roll
    plain = errors(model, x, 3)

    def near_zero_once(self, windows, steps):
        paths = roll(self, windows, steps)
        paths[0, 2] = 1e-12
        return paths

    monkeypatch.setattr(Last, "roll", near_zero_once)
    once = errors(model, x, 3)
    assert plain.relative.all()
    assert once.relative.all()
    n = len(x) - 3  # one error of three steps is twice what came instead of a little
    assert once.spread[2] == pytest.approx(np.sqrt(plain.spread[2] ** 2 + 4 / n), rel=0.01)


def test_the_interval_of_what_lags_behind_growth_holds_the_forecast():
    x = np.exp(np.cumsum(0.1 + 0.01 * np.random.default_rng(0).normal(size=(60, 1)), axis=0))
    found = errors(Last().fit(x), x, 2)
    assert found.relative.all()
    low, middle, high = found.shape[[GRID.index(0.4), MIDDLE, GRID.index(0.6)], 0]
    assert low < 0 == middle < high
    last = x[-1, 0]
    around = found.around(np.full((1, 2, 1), last), GRID)[0, :, 0]
    assert (interval(around, 20)[0] < last).all()
    assert (last < interval(around, 20)[1]).all()


def test_relative_spreads_of_smoothing_grow_as_it_says_itself():
    rng = np.random.default_rng(0)
    x = np.exp(np.cumsum(0.04 + 0.03 * rng.normal(size=(120, 1)), axis=0))
    model = Smoothing().fit(x)
    found, own = errors(model, x, 4), model.deviation(4)
    assert found.relative.all()
    assert found.spread / found.spread[0] == pytest.approx(own / own[0])
    assert 0.02 < found.spread[0, 0] < 0.05


@pytest.mark.parametrize("level", [0.3, 0.5, 0.8])
def test_the_conformal_radius_is_that_of_all_series_together(level):
    rng = np.random.default_rng(1)
    series = [(5 + rng.normal(size=(n, 2)), first) for n, first in ((20, 6), (12, 4))]
    model = Mean().fit(series[0][0])
    found = calibrate(model, series, 3, level).radius
    for k in range(3):
        for j in range(2):
            mean = series[0][0][:, j].mean()
            apart = sorted(
                abs(x[t + k, j] - mean) for x, first in series for t in range(first, len(x) - k)
            )
            rank = math.ceil((len(apart) + 1) * level)
            assert found[k, j] == pytest.approx(apart[rank - 1])


def test_intervals_reach_as_far_as_they_were_calibrated():
    around = intervals.Intervals(0.8, np.array([[1.0], [2.0]]))
    low, high = around.around(np.full((1, 1, 1), 5.0))
    assert (low.tolist(), high.tolist()) == ([[[4.0]]], [[[6.0]]])
    low, high = around.around(np.full((1, 2, 1), 5.0))
    assert (low.tolist(), high.tolist()) == ([[[4.0], [3.0]]], [[[6.0], [7.0]]])
    with pytest.raises(UserError, match="calibrated for 2 steps, not 3"):
        around.around(np.zeros((1, 3, 1)))
    for level in (0, 1):
        with pytest.raises(UserError, match="must lie between 0 and 1"):
            calibrate(Last(), [], 1, level)
