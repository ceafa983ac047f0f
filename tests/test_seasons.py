"""Seasons found in data that do not say them, and none where nothing repeats."""

import numpy as np
import pytest

from elman.forecasting import Settings, fit_and_measure, seasons
from elman.forecasting.series import Series


def repeating(m, rounds, noise=0.3, seed=0):
    rng = np.random.default_rng(seed)
    pattern = rng.normal(size=m)
    pattern = (pattern - pattern.mean()) / pattern.std()
    return np.tile(pattern, rounds) + noise * rng.normal(size=m * rounds)


@pytest.mark.parametrize("m", [2, 3, 4, 7, 12, 24])
@pytest.mark.parametrize("trend", ["none", "line", "walk"])
def test_a_season_is_found_beside_a_trend(m, trend):
    x = repeating(m, 9)
    t = np.arange(len(x))
    walk = np.random.default_rng(1).normal(0, 0.1, len(x)).cumsum()
    assert seasons.found(x + {"none": 0 * t, "line": 0.3 * t, "walk": walk}[trend]) == m


@pytest.mark.parametrize("m", [4, 7, 12])
def test_five_times_a_season_are_enough_and_a_step_less_tells_of_none(m):
    t = np.arange(5 * m)
    x = np.sin(2 * np.pi * t / m) + 0.1 * t
    assert seasons.found(x) == m
    assert seasons.found(x[1:]) is None


def test_twice_a_season_is_not_taken_for_it():
    assert [seasons.found(repeating(6, 20, seed=seed)) for seed in range(10)] == [6] * 10


@pytest.mark.parametrize("kind", ["noise", "walk", "line", "constant", "jump"])
def test_nothing_is_found_where_nothing_repeats(kind):
    found = []
    for seed in range(20):
        e = np.random.default_rng(seed).normal(size=120)
        x = {
            "noise": e,
            "walk": e.cumsum(),
            "line": 0.3 * np.arange(120),
            "constant": np.full(120, 0.1),
            "jump": e + 20 * (np.arange(120) > 50),
        }[kind]
        found.append(seasons.found(x))
    assert found.count(None) >= 19


@pytest.mark.parametrize("steps", [12, 16, 20])
def test_few_steps_seldom_repeat_by_chance(steps):
    noise = np.random.default_rng(0).normal(size=(200, steps))
    assert sum(seasons.found(x) is not None for x in noise) <= 8


def test_the_share_that_other_rounds_explain_by_hand():
    x = np.array([0, 2, 0, 4, 0, 2, 0, 4.0])
    # a moving mean of 1/4, 1/2, 1/4 leaves -1.5, 1.5, -1.5, 1.5, ... of 1, 1.5, 2, 1.5, 1, 1.5
    y = x[1:-1] - np.array([1, 1.5, 2, 1.5, 1, 1.5])
    rounds = y.reshape(3, 2)
    misses = [rounds[i] - np.delete(rounds, i, 0).mean(0) for i in range(3)]
    expected = 1 - np.square(misses).sum() / np.square(rounds).sum()
    assert seasons._explained(x, 2) == pytest.approx(expected)


def test_auto_uses_the_season_that_it_found_and_says_so():
    series = Series("x", repeating(7, 14)[:, None], ("y",))
    found = fit_and_measure([series], Settings(steps=7, minutes=0))
    assert found.series[0].season == 7
    assert "x: a season of 7 steps, found in the data; --season 1 for none" in found.notes()
    assert "seasonal" in found.scores()


def test_no_season_is_looked_for_where_one_is_named_or_none_is_wanted():
    x = repeating(7, 14)[:, None]
    for settings, season in ((Settings(steps=7, minutes=0), 1), (Settings("ets", steps=7), None)):
        found = fit_and_measure([Series("x", x, ("y",), season=season)], settings)
        assert found.series[0].season == season
        assert not found.notes()


def test_series_together_have_the_season_that_most_of_them_have():
    alike = [repeating(7, 12, seed=seed) for seed in range(4)]
    walk = np.random.default_rng(0).normal(size=84).cumsum()
    assert seasons.found(*alike, walk) == 7
    assert (
        seasons.found(*alike[:2], *[np.random.default_rng(n).normal(size=84) for n in (1, 2)])
        is None
    )
    assert seasons.found(*alike[:2], repeating(12, 7), repeating(5, 17)[:84]) is None


def test_short_series_among_long_ones_do_not_hide_a_season():
    panel = [repeating(12, 9, seed=seed) for seed in range(3)]
    assert seasons.found(*panel, panel[0][:15], panel[1][:7]) == 12


def test_no_more_than_fifty_series_are_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(seasons, "_explained", lambda x, m: asked.append(len(x)) or 0.0)
    assert seasons.found(*[np.zeros(20)] * 120) is None
    assert len(asked) == 40 * 4  # every third, with 2 to 5 steps


def test_auto_looks_for_the_season_of_a_panel_and_says_so():
    panel = [Series(n, repeating(7, 14, seed=i)[:, None], ("y",)) for i, n in enumerate("abc")]
    found = fit_and_measure([panel[0].until(70), *panel[1:]], Settings(steps=7, minutes=0))
    assert [s.season for s in found.series] == [7, 7, 7]
    assert (
        "b and 2 others: a season of 7 steps, found in the data; --season 1 for none"
        in found.notes()
    )
    told = [Series(s.name, s.values, s.columns, season=12) for s in panel]
    assert [s.season for s in fit_and_measure(told, Settings(steps=7, minutes=0)).series] == [
        12
    ] * 3
