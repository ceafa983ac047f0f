"""A forecast from beginning to end: choosing, looking back, looking ahead, keeping."""

import datetime as dt
import itertools
import json
import re
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman import forecasting as f
from elman.errors import UserError
from elman.forecasting import choice, ensemble, intervals, panel, scores
from elman.forecasting.candidates import candidates
from elman.forecasting.catalogue import FORECASTERS, Kind, Method, Plan
from elman.forecasting.dates import Clock, Frequency
from elman.forecasting.experiment import fit_and_measure
from elman.forecasting.intervals import GRID
from elman.forecasting.panel import Backtest, Windows
from elman.forecasting.progress import Limit
from elman.forecasting.saving import Saved, load_ensemble, save_ensemble
from elman.forecasting.series import Reading, Series
from elman.forecasting.settings import Settings

QUICK = {"minutes": 0.0}


def seasonal(count=3, steps=80, noise=0.3, seed=0):
    rng = np.random.default_rng(seed)
    t = np.arange(steps)
    shape = np.array([0.0, 3, 1, -4])
    return [
        Series(
            f"s{i}",
            (10 * i + (i + 1) * (shape[t % 4] + rng.normal(0, noise, steps)))[:, None],
            ("y",),
            season=4,
        )
        for i in range(count)
    ]


def test_a_named_model_that_runs_away_says_which_series_it_lost(monkeypatch):
    monkeypatch.setattr(choice, "_runs_away", lambda backtest, series: series.name == "s1")
    with pytest.raises(UserError, match="model linear: its forecasts of s1 run away"):
        fit_and_measure(seasonal(3), Settings("linear", steps=4))


# Rolling origins


def test_windows_end_with_the_last_value_and_do_not_overlap():
    windows = Windows(3, 4, 4)
    assert windows.starts(20) == [8, 12, 16]
    assert [list(windows.origins(20, w)) for w in range(3)] == [[8], [12], [16]]
    assert list(Windows(2, 4, 1).origins(20, 0)) == [12, 13, 14, 15]
    assert list(Windows(2, 4, 1).origins(20, 1)) == [16]  # the others' futures are not known


@pytest.mark.parametrize("model", ["auto", "linear"])
def test_a_short_series_among_long_ones_leaves_them_their_windows(model):
    panel_of = [*seasonal(3), replace(seasonal(1)[0].newest(20), name="short")]
    settings = Settings(model, steps=4, windows=3, minutes=0)
    found = fit_and_measure(panel_of, settings)
    alone = fit_and_measure(panel_of[:3], settings)
    assert found.windows == alone.windows
    assert found.compared == [0, 1, 2]
    np.testing.assert_array_equal(found.ahead[0].point, alone.ahead[0].point)
    assert found.ahead[3].point.shape == found.ahead[0].point.shape
    assert np.isfinite(found.ahead[3].point).all()
    assert any("short (20 steps)" in note for note in found.answer()["notes"])


def test_series_of_some_lengths_have_the_windows_there_are_most_of_in_all():
    [s] = seasonal(1, steps=100)
    lengths = lambda *n: [s.newest(k) for k in n]  # noqa: E731
    assert panel.windows_for(lengths(40, 60, 40), 5, 8)[1] == [0, 1, 2]
    assert panel.windows_for(lengths(100, 20, 100), 5, 8) == (Windows(8, 5, 1), [0, 2])
    assert panel.windows_for(lengths(20), 5, 8)[0].count == 2


def test_no_window_is_shown_its_future():
    class Spy(f.Forecaster):
        seen: ClassVar[list[int]] = []

        @property
        def lags(self):
            return 1

        def _fit(self, series):
            Spy.seen.append(len(series[0]))

        def roll(self, windows, steps):
            return np.repeat(windows[:, -1:], steps, axis=1)

        def state(self):
            return {}

        def restore(self, state):
            raise AssertionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORECASTERS, "spy", Kind(lambda plan, o: Spy()))  # a class and one line
        x = np.arange(20.0)
        [found] = panel.cross_validate(
            Method("spy"), [Series("x", x[:, None], ("x",))], Windows(3, 4, 4)
        )
    assert Spy.seen == [8, 12, 16]
    np.testing.assert_array_equal(found.truth, [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]])
    np.testing.assert_array_equal(found.point, [[7] * 4, [11] * 4, [15] * 4])


# Choosing


def backtest(points, truth=0.0):
    """One origin a window; the forecast of window w is points[w]."""
    points = np.array(points, dtype=float)[:, None]
    n = len(points)
    quantiles = points[..., None] + np.zeros(len(GRID))
    return Backtest(np.arange(n), np.arange(n), np.full((n, 1), truth), points, quantiles)


def test_the_choice_at_each_window_uses_only_the_windows_before_it():
    tried = {"a": [backtest([1, 1, 9, 9])], "b": [backtest([2, 2, 0, 0])]}
    found = choice.choose(tried, {}, np.ones(1), count=4, first=1)
    # After window 0 nothing is known about noise: both. After 0 and 1 a is always better by 1: a.
    # After 0 … 2 b is better on the mean (11/3 against 4/3), but that may be chance: both.
    np.testing.assert_array_equal(found.chosen[0].point[:, 0], [1.5, 9, 4.5])
    assert found.members == [("b", "a")]


def noisy(mean, rng, count=4):
    return backtest(mean + rng.normal(0, 1, count))


def test_series_that_differ_by_noise_alone_follow_all_of_them():
    rng = np.random.default_rng(0)
    tried = {
        "a": [noisy(5.0, rng) for _ in range(40)],
        "b": [noisy(5.5, rng) for _ in range(40)],
    }
    found = choice.choose(tried, {}, np.ones(40), count=4, first=1)
    own = [tried["a"][i].point.mean() < tried["b"][i].point.mean() for i in range(40)]
    together = sum(labels[0] == "a" for labels in found.members)
    assert sum(own) < 35 < together  # by their own windows alone many would choose b, wrongly


def test_a_series_that_is_truly_different_chooses_for_itself():
    rng = np.random.default_rng(0)
    better = [0] * 20 + [1] * 20  # a is right for half of the series, b for the other half
    tried = {
        name: [noisy(2.0 if kind == which else 9.0, rng) for kind in better]
        for which, name in enumerate("ab")
    }
    found = choice.choose(tried, {}, np.ones(40), count=4, first=1)
    assert found.members == [("a",)] * 20 + [("b",)] * 20


def test_what_cannot_be_told_from_the_best_is_averaged_with_it():
    rng = np.random.default_rng(1)
    alike = {name: [noisy(5.0, rng, 6)] for name in "abcdefg"}
    found = choice.choose(alike | {"far": [noisy(50.0, rng, 6)]}, {}, np.ones(1), 6, 1)
    assert 1 < len(found.members[0]) <= choice.TOGETHER
    assert "far" not in found.members[0]


def test_one_hard_window_does_not_outweigh_the_others():
    tried = {"a": [backtest([0.8] * 5 + [13.0])], "b": [backtest([1.0] * 5 + [10.0])]}
    found = choice.choose(tried, {}, np.ones(1), count=6, first=1)
    assert found.members[0][0] == "a"  # though its mean error is 2.8 and that of b 2.5


def test_windows_that_are_hit_by_chance_do_not_decide():
    sparse = {"zero": [backtest([0, 0, 0, 9, 9, 9])], "mean": [backtest([3, 3, 3, 3, 3, 3])]}
    found = choice.choose(sparse, {}, np.ones(1), count=6, first=1)
    assert found.members[0][0] == "mean"


def test_a_naive_forecast_that_did_better_than_the_choice_takes_its_place():
    tried = {"a": [backtest([0.8] * 5 + [13.0])], "last": [backtest([1.0] * 5 + [10.0])]}
    found = choice.choose(tried, {}, np.ones(1), count=6, first=1)
    assert found.members == [("last",)]


@pytest.mark.parametrize(
    ("value", "members", "said"),
    [
        ([3, 2.5, 3, 2.5, 3, 4.5], ("a",), 4),  # a is better
        ([3, 2.5, 3, 2.5, 3, -2.5], ("a", "seasonal"), 0.75),  # a is worse, their mean is better
        ([3, 2.5, 3, 2.5, 3, 2.5], ("seasonal",), 2.5),  # and so is their mean
    ],
)
def test_choices_made_in_turn_give_way_to_the_seasonal_value(value, members, said):
    # a wins over all windows, and misses by 4 in the one that is scored
    tried = {"a": [backtest([0, 0, 0, 0, 0, 4])], "seasonal": [backtest(value)]}
    found = choice.choose(tried, {}, np.ones(1), count=6, first=5)
    assert found.members == [members]
    np.testing.assert_array_equal(found.chosen[0].point, [[said]])
    assert (found.crossed[0].point[:, 0] == value).all() == (members == ("seasonal",))


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_published_that_lost_to_the_seasonal_value_in_its_own_backtest(seed):
    weeks = np.random.default_rng(seed).normal(size=(12, 7)).cumsum(0)  # x_t = x_{t-7} + noise
    one = Series("weeks", weeks.reshape(-1, 1), ("x",), season=7)
    found = fit_and_measure([one], Settings(steps=6, **QUICK))
    own = {k: v.mase.mean() for k, v in found.scores().items()}
    assert own["auto"] <= own["seasonal"] * (1 + 1e-12)  # summed in another order
    [verdict] = [v for v in found.verdicts if v.rival == "seasonal"]
    assert verdict.better >= -1e-12
    assert found.ensemble.description(0).count("seasonal") <= 1


def test_time_that_runs_out_ends_a_fit_and_is_said():
    ticks = iter(range(1000))
    limit = Limit(8.0, now=lambda: float(next(ticks)))
    methods = [Method("last"), Method("gru", {"epochs": 50, "tau": 8}), Method("mean")]
    tried, left_out = choice.try_all(methods, seasonal(1), Windows(2, 4, 4), limit=limit)
    assert list(tried) == ["last"]  # the naive ones have no limit
    assert left_out.keys() == {"gru, epochs=50, tau=8", "mean"}
    assert all("time was up (8 s); --minutes allows" in why for why in left_out.values())


def test_what_lacks_data_is_named_with_what_it_needs_and_what_to_do():
    short = seasonal(1, steps=22)
    methods = [Method("last"), Method("gru", {"tau": 20}), Method("linear", {"tau": 13})]
    tried, left_out = choice.try_all(methods, short, Windows(2, 4, 4))
    assert list(tried) == ["last"]
    assert set(left_out) == {"gru, tau=20", "linear, tau=13"}
    for why in left_out.values():
        assert why.startswith("the 14 steps before the first window are too few to learn from; ")
        assert why.endswith("a longer series, or fewer --steps or --windows, would leave more")
    needs = r"--model gru, tau=20 needs 25 steps or more to learn from, and there are 14 before"
    with pytest.raises(UserError) as refused:
        choice.try_all(methods, short, Windows(2, 4, 4), needed="gru, tau=20")
    assert re.match(needs, refused.value.message)
    assert refused.value.hint == "a longer series, or smaller --tau, --steps or --windows"


@pytest.mark.parametrize("kind", ["gru", "linear", "ets", "seasonal", "global-lstm"])
def test_what_a_method_is_said_to_need_is_enough_and_one_less_is_not(kind):
    method, [long] = Method(kind), seasonal(1, steps=60)
    for length in range(1, 12):
        said = choice.too_few(method, long.until(length), 6, 0)
        if said is None:
            continue
        needed = int(re.match(r"needs (\d+) steps", said)[1])
        assert choice.too_few(method, long.until(needed), 6, 0) is None
        assert choice.too_few(method, long.until(needed - 1), 6, 0)


def test_every_epoch_of_every_series_is_told_and_kept():
    lines = []
    settings = Settings("gru", steps=2, options={"epochs": 3, "tau": 8}, windows=1)
    found = fit_and_measure(seasonal(2), settings, lines.append)
    assert [line for line in lines if "fitting gru" in line and "epoch 3 of 3: loss" in line]
    rows = found.answer()["losses"]["gru"]
    assert list(rows) == ["s0", "s1"]
    assert all(len(row) == 3 and row[2] < row[0] for row in rows.values())
    changed = Settings("gru", steps=2, difference=4, options={"epochs": 2, "tau": 8}, windows=1)
    assert len(fit_and_measure(seasonal(1), changed).answer()["losses"]["gru"]) == 2


def test_auto_finds_the_season_and_the_same_seed_gives_the_same_answer():
    first, again = (
        fit_and_measure(seasonal(), Settings(steps=4, **QUICK)).answer() for _ in range(2)
    )
    assert first == again
    assert first["scores"]["auto"]["mase"] < first["scores"]["last"]["mase"]
    ahead = first["forecast"]["s2"]["y"]["mean"]
    assert ahead == pytest.approx([20, 29, 23, 8], abs=1.5)
    assert first["warning"] is None


def test_auto_is_never_worse_than_naive_over_its_windows():
    walk = np.random.default_rng(3).normal(size=(90, 1)).cumsum(0)
    found = fit_and_measure([Series("walk", walk, ("x",))], Settings(steps=3, **QUICK))
    labels = found.ensemble.members[0]
    together = panel.average([found.choice.tried[m][0] for m in labels])
    units = choice.naive_errors(found.series, found.windows)
    own = choice.score([together], units, range(found.windows.count)).mean()
    assert own <= found.choice.scores["last"].mean()


def test_a_verdict_says_whether_a_difference_is_noise():
    rng = np.random.default_rng(0)
    rival = 1 + 0.1 * rng.random((10, 5))
    assert choice.compare(rival * 0.8, rival, "seasonal").certain
    verdict = choice.compare(rival * 0.8, rival, "seasonal")
    assert verdict.better == pytest.approx(0.2)
    assert "20.0% better than seasonal: beyond noise" in str(verdict)
    noisy = rival + rng.normal(0, 0.5, rival.shape)
    assert not choice.compare(noisy, rival, "seasonal").certain
    assert "too few windows" in str(choice.compare(rival[:1, :2], rival[:1, :2], "last"))


# Intervals


def normal_backtest(n, claimed, seed=0):
    from statistics import NormalDist

    rng = np.random.default_rng(seed)
    z = np.array([NormalDist(0, claimed).inv_cdf(q) for q in GRID])
    truth = rng.normal(size=(n, 1))
    quantiles = np.broadcast_to(z, (n, 1, len(GRID)))
    return Backtest(np.arange(n), np.arange(n), truth, np.zeros((n, 1)), quantiles)


@pytest.mark.parametrize("claimed", [0.5, 1.0, 2.0])
def test_intervals_that_are_too_narrow_or_too_wide_are_put_right(claimed):
    wider = scores.widening([normal_backtest(4000, claimed)], 80)
    assert wider == pytest.approx(1 / claimed, rel=0.06)
    unseen = normal_backtest(4000, claimed, seed=1)
    low, high = intervals.interval(unseen.quantiles, 80, wider)
    assert ((low <= unseen.truth) & (unseen.truth <= high)).mean() == pytest.approx(0.8, abs=0.03)


def test_one_window_hardly_moves_an_interval():
    assert scores.widening([normal_backtest(1, 0.1)], 80) < 1.4


def test_published_intervals_hold_as_often_as_they_say():
    rng = np.random.default_rng(0)
    series = [Series(f"s{i}", rng.normal(size=(60, 1)), ("y",)) for i in range(60)]
    found = fit_and_measure(
        [s.until(54) for s in series], Settings("mean", steps=6, levels=(80.0, 95.0))
    )
    for level, slack in ((80.0, 0.06), (95.0, 0.04)):
        inside = [
            (a.low[level] <= s.values[54:, 0]) & (s.values[54:, 0] <= a.high[level])
            for a, s in zip(found.ahead, series, strict=True)
        ]
        assert np.mean(inside) == pytest.approx(level / 100, abs=slack)


# Inputs


def driven(future=6):
    rng = np.random.default_rng(0)
    known = (rng.random((100 + future, 1)) < 0.4).astype(float)
    values = 5 + 10 * known[:100] + rng.normal(0, 0.1, (100, 1))
    return Series("x", values, ("y",), known=known, inputs=("promo",)), known


@pytest.mark.parametrize("model", ["auto", "linear"])
def test_known_inputs_drive_the_forecast(model):
    series, known = driven()
    found = fit_and_measure([series], Settings(model, steps=6, **QUICK))
    np.testing.assert_allclose(found.ahead[0].point, 5 + 10 * known[100:, 0], atol=0.5)


def test_inputs_that_cannot_be_read_or_do_not_reach_are_refused():
    series, _ = driven(future=2)
    with pytest.raises(
        UserError,
        match="model ets does not read inputs of the kind known, and promo were given",
    ):
        fit_and_measure([series], Settings("ets", steps=2))
    with pytest.raises(UserError, match="x: known inputs end after step 102"):
        fit_and_measure([series], Settings("linear", steps=6))


def test_calendar_features_show_a_linear_model_the_day_of_the_week():
    import datetime as dt

    from elman.forecasting.dates import Clock, Frequency

    clock = Clock(dt.datetime(2024, 1, 1), Frequency("day"))
    t = np.arange(90)
    values = (5 + 3 * np.sin(2 * np.pi * (t % 7) / 7))[:, None]
    series = Series("x", values, ("y",), season=7, clock=clock)
    settings = Settings("linear", steps=7, options={"tau": 1}, calendar=True)
    ahead = fit_and_measure([series], settings).ahead[0].point
    np.testing.assert_allclose(ahead, 5 + 3 * np.sin(2 * np.pi * ((90 + t[:7]) % 7) / 7), atol=1e-6)


# Keeping


@pytest.mark.parametrize("model", ["auto", "global-gru"])
def test_what_was_fitted_is_kept_and_forecasts_the_same(model, tmp_path):
    series = seasonal()
    options = {"updates": 5, "hidden": 4} if model != "auto" else {}
    found = fit_and_measure(series, Settings(model, steps=4, options=options, **QUICK))
    saved = Saved(found.ensemble, Reading(column=("y",)), ("y",))
    again = load_ensemble(save_ensemble(saved, tmp_path / "run"))
    for before, after in zip(found.ahead, again.ensemble.look_ahead(series, 4), strict=True):
        np.testing.assert_array_equal(before.point, after.point)
        np.testing.assert_array_equal(before.low[90.0], after.low[90.0])
    assert again.reading == saved.reading


def test_errors_that_are_shares_of_the_forecast_are_kept_as_such(tmp_path):
    x = np.exp(0.05 * np.arange(80) + 0.05 * np.random.default_rng(0).normal(size=80))
    series = Series("x", x[:, None], ("y",))
    found = fit_and_measure([series], Settings("drift", steps=3, **QUICK))
    assert found.ensemble.fitted["drift"].errors[0].relative.all()
    saved = Saved(found.ensemble, Reading(column=("y",)), ("y",))
    again = load_ensemble(save_ensemble(saved, tmp_path / "run")).ensemble
    assert again.look_ahead([series], 3)[0].low == {
        90.0: pytest.approx(found.ahead[0].low[90.0], rel=1e-12)
    }


def test_a_series_that_was_not_fitted_is_refused_by_name():
    fitted = fit_and_measure(seasonal(), Settings("seasonal", steps=2)).ensemble
    [other] = seasonal(1)
    with pytest.raises(UserError, match="no model was fitted on a series called 'new'"):
        ensemble.match(fitted, [Series("new", other.values, ("y",))], 2)


def test_a_new_series_beside_known_ones_is_forecast_by_what_most_of_them_are(tmp_path):
    *known, new = seasonal(4)
    fitted = fit_and_measure(known, Settings("ets", steps=3, **QUICK)).ensemble
    saved = save_ensemble(Saved(fitted, Reading(column=("y",)), ("y",)), tmp_path / "run")
    fitted = load_ensemble(saved).ensemble
    columns, ahead = ensemble.match(fitted, [known[1], new], 3)
    assert [s.name for s in columns] == ["s1", "s3"]
    np.testing.assert_array_equal(ahead[0].point, fitted.after(1, known[1], 3).point)
    plain = f.Smoothing(4).fit(new.values)
    np.testing.assert_array_equal(ahead[1].point, plain.predict(new.values, 3)[:, 0])
    assert columns[0].notes == ()
    [said] = columns[1].notes
    assert said.startswith("s3 is new: fitted on it is what most others have, Smoothing(")


def test_a_new_series_that_is_too_short_is_left_out_and_named():
    known = seasonal(2)
    settings = Settings("linear", steps=2, options={"tau": 8}, **QUICK)
    fitted = fit_and_measure(known, settings).ensemble
    short = Series("new", np.zeros((3, 1)), ("y",), season=4)
    columns, ahead = ensemble.match(fitted, [short, *known], 2)
    assert [s.name for s in columns] == ["s0", "s1"]
    np.testing.assert_array_equal(ahead[1].point, fitted.after(1, known[1], 2).point)
    assert columns[0].notes[0].startswith("new is new and left out: 3 steps are too few")


@pytest.mark.parametrize(
    ("model", "options", "length"),
    [("auto", {}, 1), ("auto", {}, 5), ("ets", {}, 5), ("linear", {"tau": 9}, 10)],
)
def test_a_series_too_short_for_any_window_or_for_its_model_is_left_out_and_named(
    model, options, length
):
    known = seasonal(3)
    short = replace(known[0].newest(length), name="short")
    settings = Settings(model, steps=4, windows=3, minutes=0, options=options)
    alone, found = (fit_and_measure(p, settings) for p in (known, [short, *known]))
    assert [s.name for s in found.series] == ["s0", "s1", "s2"]
    assert found.windows == alone.windows
    for here, there in zip(found.ahead, alone.ahead, strict=True):
        np.testing.assert_array_equal(here.point, there.point)
    named = [note for note in found.answer()["notes"] if f"short ({length} steps)" in note]
    assert named == [f"left out, too short to forecast 4 ahead: short ({length} steps)"]


def test_where_every_series_is_too_short_the_longest_is_named():
    short = [replace(s.newest(3 + i), name=f"s{i}") for i, s in enumerate(seasonal(3))]
    with pytest.raises(UserError, match="s2 has 5 steps: too few to forecast 4 ahead"):
        fit_and_measure(short, Settings("last", steps=4))


def test_a_series_with_room_for_a_window_but_not_for_its_model_there_is_not_measured():
    known = seasonal(3)
    short = replace(known[0].newest(14), name="short")
    settings = Settings("linear", steps=3, windows=2, options={"tau": 9})
    found = fit_and_measure([*known, short], settings)
    assert found.compared == [0, 1, 2]
    assert [s.name for s in found.series] == ["s0", "s1", "s2", "short"]
    assert any("short (14 steps); forecast as" in note for note in found.answer()["notes"])


def test_a_saved_forecaster_of_rare_demand_forecasts_as_it_did(tmp_path):
    """`auto` then counts with medians, of which the fitted models themselves do not know."""
    sold = np.array([1, 0, 0, 1, 2, 1, 0, 0, 2, 2, 0, 2, 2, 0, 1, 2, 2, 0, 0, 2.0])
    rare = [Series("rare", sold[:, None], ("y",))]
    methods = [Method("ets", median=True), Method("mean", median=True), Method("mean")]
    fitted = {m.label: panel.fit(m, rare, 3) for m in methods}
    for labels in (("ets, median",), ("mean, median", "mean")):
        used = {label: fitted[label] for label in labels}
        made = ensemble.Ensemble(used, [labels], ("rare",), {90.0: 1.0}, 3)
        saved = Saved(made, Reading(column=("y",)), ("y",))
        again = load_ensemble(save_ensemble(saved, tmp_path / labels[0])).ensemble
        before, after = made.after(0, rare[0], 3), again.after(0, rare[0], 3)
        np.testing.assert_array_equal(before.point, after.point)
    plain = fitted["ets, median"].models[0].predict(rare[0].values, 3)
    assert (fitted["ets, median"].forecast(0, rare[0], [20], 3).point != plain[:, 0]).all()


@pytest.mark.parametrize(
    ("model", "changed"),
    [("linear", {"options": {"tau": 3}}), ("linear", {"difference": 4}), ("ets", {})],
)
def test_a_saved_forecaster_fits_a_new_series_as_it_would_have(tmp_path, model, changed):
    *known, new = seasonal(3)
    fitted = fit_and_measure(known, Settings(model, steps=3, **QUICK, **changed)).ensemble
    saved = Saved(fitted, Reading(column=("y",)), ("y",))
    again = load_ensemble(save_ensemble(saved, tmp_path / "run")).ensemble
    (_, before), (_, after) = (ensemble.match(e, [*known, new], 3) for e in (fitted, again))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one.point, other.point)


@pytest.mark.parametrize("model", ["last", "seasonal", "mean", "drift", "ets"])
def test_a_baseline_of_changes_is_not_taken_for_the_baseline_itself(model):
    [series] = seasonal(1)
    found = fit_and_measure([series], Settings(model, steps=3, difference=1))
    label = f"{model}, changes over 1"
    assert next(iter(found.backtests())) == label
    assert model in found.backtests()
    [plain] = fit_and_measure([series], Settings(model, steps=3)).ahead
    assert (found.ahead[0].point != plain.point).any()
    if model == "last":
        x = series.values[:, 0]
        expected = x[-1] + (x[-1] - x[-2]) * np.arange(1, 4)
        np.testing.assert_allclose(found.ahead[0].point, expected)


@pytest.mark.parametrize("levels", [80, "80", ("many",), None])
def test_levels_that_are_no_percents_are_refused(levels):
    with pytest.raises(UserError, match="must"):
        f.SeriesForecaster("last", 2, levels=levels).fit(np.arange(30.0))


def test_levels_are_told_apart_by_what_tables_call_them():
    levels = (33.33333, 33.3333333, 99.9999, 50)
    forecaster = f.SeriesForecaster("last", 2, levels=levels).fit(np.sin(np.arange(30.0)))
    ahead = forecaster.predict()
    assert {len(column) for column in ahead.values()} == {2}
    assert [c for c in ahead if "-hi-" in c] == ["last-hi-33.3333", "last-hi-50", "last-hi-99.9999"]


@pytest.mark.parametrize("steps", [0, 10_001])
def test_a_fitted_forecaster_looks_no_farther_than_one_that_is_fitted_for_it(steps):
    forecaster = f.SeriesForecaster("last", 2).fit(np.sin(np.arange(30.0)))
    with pytest.raises(UserError, match=f"steps={steps} must be at least 1 and at most 10000"):
        forecaster.predict(steps=steps)


def test_one_column_needs_no_list():
    rows = {"yy": np.sin(np.arange(30.0)).tolist(), "zz": np.cos(np.arange(30.0)).tolist()}
    ahead = f.SeriesForecaster("last", 2, column="yy").fit(rows).predict()
    assert ahead["last"] == [rows["yy"][-1]] * 2


def test_a_network_fitted_on_a_new_series_follows_the_seed(tmp_path):
    *known, new = seasonal(3, steps=40)
    settings = Settings("window", steps=2, seed=7, options={"epochs": 1, "hidden": 4})
    fitted = fit_and_measure(known, settings).ensemble
    saved = Saved(fitted, Reading(column=("y",)), ("y",))
    again = load_ensemble(save_ensemble(saved, tmp_path / "run")).ensemble
    alone = f.Window(4, hidden=4, epochs=1, seed=7).fit(new.values).predict(new.values, 2)
    for found in (fitted, again):
        _, [*_, path] = ensemble.match(found, [*known, new], 2)
        np.testing.assert_array_equal(path.point, alone[:, 0])


@pytest.mark.parametrize(
    ("model", "options", "steps", "why"),
    [
        ("last", {}, 6, "7 steps are too few to forecast 6 ahead"),
        ("linear", {"tau": 6}, 2, "needs 8 steps or more to learn from, and there are 7"),
    ],
)
def test_what_fit_leaves_out_predict_leaves_out_and_both_name_it(model, options, steps, why):
    rows = {"unique_id": [], "ds": [], "y": []}
    for name, count in (("long", 40), ("longer", 44), ("short", 7)):
        rows["unique_id"] += [name] * count
        rows["ds"] += range(count)
        rows["y"] += np.random.default_rng(count).normal(size=count).tolist()
    forecaster = f.SeriesForecaster(model, steps, options=options).fit(rows)
    assert f"left out, too short to forecast {steps} ahead: short (7 steps)" in forecaster.notes_
    before, after = forecaster.predict(), forecaster.predict(rows)
    assert before == after
    assert set(before["unique_id"]) == {"long", "longer"}
    assert f"short is new and left out: {why}" in forecaster.notes_


def test_a_shared_network_leaves_out_what_is_too_short_and_refuses_nothing_else():
    options = {"updates": 3, "hidden": 4, "tau": 6}
    *known, new = seasonal(3, steps=40)
    found = fit_and_measure(known, Settings("global-gru", steps=3, options=options)).ensemble
    given, ahead = ensemble.match(found, [known[0], new.until(5), replace(new, name="other")], 3)
    assert [s.name for s in given] == ["s0", "other"]
    assert len(ahead) == 2
    assert "s2 is new and left out: 5 steps are too few" in " ".join(given[0].notes)
    with pytest.raises(UserError, match="s2 is new and left out"):
        ensemble.match(found, [new.until(5)], 3)


@pytest.mark.parametrize(
    ("clock", "refused"),
    [
        (Clock(dt.datetime(1900, 3, 1), Frequency("month", 12)), "each step is at the same time"),
        (Clock(1900, Frequency("step")), "have no dates"),
        (None, "have no dates"),
    ],
    ids=["yearly", "counted", "none"],
)
def test_calendar_is_refused_where_it_has_nothing_to_tell(clock, refused):
    series = replace(seasonal(1)[0], clock=clock)
    with pytest.raises(UserError, match=refused):
        fit_and_measure([series], Settings("linear", steps=2, calendar=True))


@given(
    widen=st.dictionaries(st.floats(1, 99.9), st.floats(0.2, 5), min_size=2, max_size=4),
    seed=st.integers(0, 99),
)
def test_a_wider_interval_holds_the_narrower_ones_whatever_widens_them(widen, seed):
    quantiles = np.sort(np.random.default_rng(seed).normal(size=(3, len(GRID))), axis=-1)
    low, high = intervals.nested(quantiles, widen)
    levels = sorted(widen)
    assert list(low) == list(widen)
    for a, b in itertools.pairwise(levels):
        assert (low[b] <= low[a]).all()
        assert (high[a] <= high[b]).all()
    plain = intervals.interval(quantiles, levels[0], widen[levels[0]])
    np.testing.assert_array_equal((low[levels[0]], high[levels[0]]), plain)


def test_the_coverage_that_is_published_is_of_intervals_as_they_are_delivered():
    narrow, wide = 80.0, 95.0
    z = np.interp(GRID, (0.025, 0.1, 0.9, 0.975), (-1.1, -1, 1, 10))
    truth = np.full((60, 1), 3.0)  # nearer than 95 % on that side, farther than 80 %
    truth[40::8] = -2
    quantiles = np.broadcast_to(z, (60, 1, len(GRID)))
    backtest = Backtest(np.arange(60), np.arange(60), truth, np.zeros((60, 1)), quantiles)
    apart = {k: scores._in_turn([backtest], k) for k in (narrow, wide)}
    alone = intervals.interval(quantiles, wide, apart[wide])
    low, high = intervals.nested(quantiles, apart)
    assert (alone[0] > low[wide]).any()  # or there is nothing to tell them apart by
    found = scores.measured([backtest], np.ones(1), (narrow, wide))
    assert found.width is not None
    for k in (narrow, wide):
        held = ((low[k] <= truth) & (truth <= high[k])).mean()
        assert found.coverage[k][0] == pytest.approx(held)
        assert found.width[k][0] == pytest.approx((high[k] - low[k]).mean())
    assert found.coverage[wide][0] >= found.coverage[narrow][0]


def test_a_run_saved_when_one_column_told_series_apart_reads_as_before(tmp_path):
    fitted = fit_and_measure(seasonal(2), Settings("last", steps=2)).ensemble
    saved = Saved(fitted, Reading(("y",), group=("shop",)), ("y",))
    folder = save_ensemble(saved, tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    assert load_ensemble(folder).reading.group == ("shop",)
    for then, now in (("shop", ("shop",)), (None, ())):
        assert Reading(**config["reading"] | {"group": then}).group == now


def test_the_loss_of_every_epoch_is_kept():
    settings = Settings("gru", steps=2, options={"epochs": 3, "hidden": 4, "tau": 8})
    answer = fit_and_measure(seasonal(1), settings).answer()
    assert len(answer["losses"]["gru"]) == 3
    json.dumps(answer, allow_nan=False)


# scikit-learn's way


def test_the_estimator_can_be_cloned_and_answers_in_kind():
    year = np.tile([1.0, 4, 9, 2], 12)
    model = f.SeriesForecaster("seasonal", steps=3, season=4, levels=(80,))
    assert model.fit(year).predict()["seasonal"] == [1, 4, 9]
    sklearn = pytest.importorskip("sklearn.base")
    copy = sklearn.clone(model)
    assert copy.get_params() == model.get_params()
    with pytest.raises(UserError, match="not fitted yet"):
        copy.predict()
    with pytest.raises(UserError, match="has no setting 'sesaon'"):
        model.set_params(sesaon=3)


@pytest.mark.parametrize(
    "other", [np.array([1.0]), np.full(50, np.nan), {"q": ["a", "b"]}], ids=["short", "nan", "text"]
)
def test_a_fit_that_is_refused_leaves_what_was_fitted(other):
    model = f.SeriesForecaster("linear", steps=3, season=4).fit(np.tile([1.0, 4, 9, 2], 12))
    before, notes = model.predict(), model.notes_
    with pytest.raises(UserError):
        model.fit(other)
    assert model.predict() == before
    assert model.notes_ == notes


def test_a_forecast_has_the_name_of_the_model_that_made_it():
    model = f.SeriesForecaster("linear", steps=3, season=4).fit(np.tile([1.0, 4, 9, 2], 12))
    before = model.predict()
    assert model.set_params(model="mean", calendar=True).predict() == before
    assert "linear" in before


def test_a_forecaster_that_was_loaded_is_saved_again_and_asks_for_data(tmp_path):
    year = np.tile([1.0, 4, 9, 2], 12)
    f.SeriesForecaster("linear", steps=3, season=4).fit(year).save(tmp_path / "one")
    one = f.SeriesForecaster.load(tmp_path / "one")
    one.save(tmp_path / "two")
    assert f.SeriesForecaster.load(tmp_path / "two").predict(year) == one.predict(year)
    with pytest.raises(UserError, match=r"no series of its own; predict\(data\)"):
        one.predict()


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames_in_frames_out(library):
    module = pytest.importorskip(library)
    import datetime as dt

    days = [dt.datetime(2024, 1, 1) + dt.timedelta(days=k) for k in range(40)]
    y = [float(k % 7) for k in range(40)]
    frame = module.DataFrame(
        {"unique_id": ["a"] * 40 + ["b"] * 40, "ds": days * 2, "y": [*y, *[10 * v for v in y]]}
    )
    model = f.SeriesForecaster("seasonal", steps=2).fit(frame)
    ahead = model.predict()
    assert type(ahead) is module.DataFrame
    ends = ["seasonal-lo-95", "seasonal-lo-80", "seasonal-hi-80", "seasonal-hi-95"]
    assert list(ahead.columns) == ["unique_id", "ds", "seasonal", *ends]
    assert list(ahead["seasonal"]) == [5, 6, 50, 60]
    assert next(iter(ahead["ds"])) == dt.datetime(2024, 2, 10)
    folds = model.cross_validation(frame, windows=2)
    assert list(folds.columns)[:4] == ["unique_id", "ds", "cutoff", "y"]
    assert list(folds["seasonal"]) == list(folds["y"])
    assert len(folds) == 2 * 2 * 2


def test_score_is_the_share_of_the_naive_error_that_is_gone():
    trend = np.arange(60.0)
    assert f.SeriesForecaster("drift", steps=4).fit(trend).score(trend) == pytest.approx(1)
    assert f.SeriesForecaster("last", steps=4).fit(trend).score(trend) == 0


def test_an_estimator_is_saved_with_the_way_its_table_was_read(tmp_path):
    rows = {"when": list(range(40)), "shop": ["a"] * 40, "sold": [float(k % 5) for k in range(40)]}
    model = f.SeriesForecaster("seasonal", steps=2, season=5, time="when", group="shop")
    model.fit(rows)
    again = f.SeriesForecaster.load(model.save(tmp_path / "run"))
    assert again.predict(rows)["forecast"] == model.predict()["seasonal"]


def test_a_very_long_series_is_forecast_from_its_newest_steps_and_says_so(monkeypatch):
    from elman.forecasting import experiment
    from elman.forecasting.series import from_frame

    monkeypatch.setattr(experiment, "LONGEST", 40)
    days = [str(np.datetime64("2024-01-01") + k) for k in range(60)]
    rows = {
        "day": [*days, "2024-03-01", "2024-03-02"],
        "u": [*(np.arange(60) % 5).tolist(), 0, 1],
        "y": [*(np.arange(60) % 7).tolist(), None, None],
    }
    reading = Reading(column=("y",), known=("u",))
    found = fit_and_measure(from_frame(rows, reading), Settings("linear", steps=2))
    [s] = found.series
    assert s.times[0] == "2024-01-21"
    assert len(s) == 40
    assert len(s.known) == 42
    assert found.ahead[0].times == ("2024-03-01", "2024-03-02")
    np.testing.assert_allclose(found.ahead[0].point, [4, 5], atol=1e-6)
    assert any("60 steps, the newest 40 are learned from" in n for n in found.answer()["notes"])


def test_smoothing_leaves_out_a_season_that_the_data_is_too_short_for():
    weekly = [Series("w", np.arange(90.0)[:, None] + 1, ("y",), season=52)]
    found = fit_and_measure(weekly, Settings("ets", steps=4, windows=2))
    assert found.ensemble.fitted["ets"].models[0].get_params() == {"season": None}
    np.testing.assert_allclose(found.ahead[0].point, [91, 92, 93, 94], rtol=1e-6)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_frame_gets_back_ids_and_times_of_the_types_it_has(library):
    frames = pytest.importorskip(library, reason=f"{library} frames")
    rows = {
        "unique_id": [7] * 20 + [8] * 20,
        "ds": list(range(101, 121)) * 2,
        "y": [float(k % 4) for k in range(40)],
    }
    frame = frames.DataFrame(rows)
    model = f.SeriesForecaster("seasonal", 2, season=4, windows=1).fit(frame)
    for found in (model.predict(), model.cross_validation(frame)):
        assert found["unique_id"].dtype == frame["unique_id"].dtype
        assert found["ds"].dtype == frame["ds"].dtype
        assert sorted(set(found["unique_id"].to_list())) == [7, 8]
    assert model.predict()["ds"].to_list() == [121, 122] * 2
    merged = (
        frame.merge(found, on=["unique_id", "ds"])
        if library == "pandas"
        else frame.join(found, on=["unique_id", "ds"])
    )
    assert len(merged) == 4


def test_every_named_level_of_a_pandas_index_is_read():
    pd = pytest.importorskip("pandas", reason="pandas frames")
    days = pd.date_range("2024-01-01", periods=20)
    index = pd.MultiIndex.from_product([["a", "b"], days], names=["unique_id", "ds"])
    frame = pd.DataFrame({"y": [float(k % 7) for k in range(40)]}, index=index)
    found = f.SeriesForecaster("seasonal", 2, windows=1).fit(frame).predict()
    assert found["unique_id"].tolist() == ["a", "a", "b", "b"]
    assert found["ds"].tolist() == [*pd.date_range("2024-01-21", periods=2)] * 2
    alone = pd.Series([float(k % 7) for k in range(20)], days, name="sales")
    assert f.SeriesForecaster("last", 1).fit(alone).predict()["unique_id"].tolist() == ["sales"]


def test_pandas_missing_value_is_a_gap_like_any_other():
    pd = pytest.importorskip("pandas", reason="pandas frames")
    rows = {
        "ds": pd.date_range("2024-01-01", periods=20),
        "y": pd.array([*range(19), None], "Int64"),
    }
    frame = pd.DataFrame(rows)
    with pytest.raises(UserError, match="'y' has no finite number at row 20"):
        f.SeriesForecaster("last", 1).fit(frame)
    assert f.SeriesForecaster("last", 1, fill="zero").fit(frame).predict()["last"].tolist() == [0]


def test_days_without_hours_come_back_as_such():
    pl = pytest.importorskip("polars", reason="polars frames")
    days = pl.date_range(pl.date(2024, 1, 1), pl.date(2024, 1, 20), eager=True)
    found = f.SeriesForecaster("last", 1).fit(pl.DataFrame({"ds": days, "y": range(20)})).predict()
    assert found["ds"].dtype == pl.Date


def test_a_list_of_something_else_than_numbers_is_refused():
    with pytest.raises(UserError, match="must hold numbers"):
        f.SeriesForecaster("last", 1).fit([{"y": 1.0}, {"y": 2.0}])


@pytest.mark.parametrize(("season", "taus"), [(12, {13, 25}), (96, {97, 193}), (1440, {400})])
def test_auto_reads_a_season_or_two_but_no_day_of_minutes(season, taus):
    panel = [Series("x", np.arange(6000.0)[:, None], ("y",), season=season)]
    tried = candidates(Plan(60, season, 6000), panel)
    assert {m.options["tau"] for m in tried if m.kind == "linear"} - {4} == taus
    assert any(m.difference == (season,) for m in tried)


def test_auto_reads_at_most_a_third_of_the_changes_that_there_are():
    panel = [Series("x", np.arange(34.0)[:, None], ("y",), season=12)]
    tried = [m for m in candidates(Plan(4, 12, 34), panel) if m.kind == "linear" and m.difference]
    taus = {m.difference: m.options["tau"] for m in tried if not m.deseasonalised}
    assert taus == {(1,): 11, (12,): 7, (12, 1): 7}
    short = candidates(Plan(4, 12, 13), panel)
    assert min(m.options["tau"] for m in short if m.kind == "linear") == 1


def test_the_median_of_a_demand_that_is_mostly_zero_is_zero():
    demand = np.where(np.arange(60) % 4 == 0, 5.0, 0.0)[:, None]
    model = f.Mean().fit(demand)
    offsets = intervals.errors(model, demand, 3).offsets(3, [0.025, 0.5])[:, 0]
    middle = model.predict(demand, 3)[:, 0] + offsets[:, 1]
    assert np.abs(middle).max() < 0.01 * demand.mean()  # horizons share a shape, not their spread
    normal = -1.96 * intervals.errors(model, demand, 3).spread[:, 0]
    assert (offsets[:, 0] < offsets[:, 1]).all()  # the tails lean towards the normal's, still
    assert (offsets[:, 0] > normal).all()


def test_smoothing_and_a_mean_can_forecast_the_median_of_a_sparse_demand():
    rng = np.random.default_rng(0)
    panel = [
        Series(f"s{i}", (rng.poisson(0.3, 90) * rng.integers(1, 6, 90))[:, None] * 1.0, ("y",))
        for i in range(4)
    ]
    ahead = fit_and_measure(panel, Settings(steps=6, **QUICK)).ahead
    assert max(np.abs(a.point).max() for a in ahead) < 0.05 * panel[0].values.mean()


def test_a_demand_that_came_last_is_not_taken_for_what_comes():
    demand = np.zeros(75)
    demand[[12, 15, 20, 22, 31, 37, 54, 61, 64, 69, 72, 74]] = [
        7,
        13,
        12,
        8,
        8,
        4,
        4,
        8,
        6,
        9,
        8,
        7,
    ]
    found = fit_and_measure([Series("x", demand[:, None], ("y",))], Settings(steps=12, minutes=0))
    scores = {n: found.choice.scores[n].mean() for n in ("mean, median", "last")}
    assert scores["mean, median"] < scores["last"]
    assert np.abs(found.ahead[0].point).max() < 0.05 * demand.mean()


def test_inputs_that_nothing_chosen_reads_are_named():
    from elman.forecasting.series import from_frame

    rows = {
        "shop": ["a"] * 30 + ["b"] * 30,
        "y": [float(k % 4) for k in range(60)],
        "promo": [float(k % 3 == 0) for k in range(60)],
        "size": [1.0] * 30 + [2.0] * 30,
    }
    reading = Reading(("y",), group=("shop",), past=("promo",), static=("size",), season=4)
    settings = Settings(steps=2, windows=2, **QUICK)  # no network, so nothing reads --static
    found = fit_and_measure(from_frame(rows, reading), settings)
    assert "not read by what was chosen: --static size" in found.answer()["notes"]
    read = {kind for m in found.ensemble.fitted.values() for kind in m.method.of.inputs}
    assert any("--past promo" in note for note in found.unread()) == ("past" not in read)


def test_an_index_of_dates_is_written_as_dates():
    pd = pytest.importorskip("pandas", reason="pandas frames")
    from elman.forecasting.series import from_frame

    frame = pd.DataFrame({"y": [1.0, 2.0, 4.0]}, index=pd.date_range("2024-01-01", periods=3))
    [found] = from_frame(frame)
    assert (found.times[0], found.time(3)) == ("2024-01-01", "2024-01-04")
