"""Forecasting: windows of the past, models, intervals, measures, and no view of the future."""

import copy
import os
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman import forecasting as f
from elman import series
from elman.errors import NotFitted, UserError
from elman.forecasting import accuracy, autoregressive_errors, smoothing
from elman.forecasting.evaluation import backtest, measure, score, split
from elman.forecasting.saving import Fitted, load, save
from elman.kernels import choice

SMALL = {"epochs": 2, "hidden": 5}
MODELS = [
    f.Last(),
    f.Seasonal(7),
    f.Mean(),
    f.Drift(),
    f.Linear(3),
    f.Linear(3, direct=4),
    f.Window(4, **SMALL),
    f.Window(4, direct=3, gaussian=True, **SMALL),
    f.Recurrent("elman", tau=6, **SMALL),
    f.Recurrent("gru", tau=6, direct=3, **SMALL),
    f.Recurrent("lstm", tau=6, gaussian=True, num_layers=2, **SMALL),
    f.Differenced(f.Linear(3)),
    f.Differenced(f.Recurrent("gru", tau=6, **SMALL), lag=7),
    f.Smoothing(),
    f.Smoothing(7),
    f.Regression(3),
    f.Deseasonalised(f.Linear(3), 7),
    f.Deseasonalised(f.Mean(), 7),
    f.AutoregressiveErrors(3),
    f.AutoregressiveErrors(2, season=7, trend="line"),
    f.AutoregressiveErrors(2, season=7, trend="changes"),
]


def walk(steps=120, columns=2, seed=0):
    return np.random.default_rng(seed).normal(size=(steps, columns)).cumsum(0)


# Windows


@given(steps=st.integers(6, 30), tau=st.integers(1, 4), ahead=st.integers(1, 2))
def test_features_are_the_notes_loop(steps, tau, ahead):
    x = np.arange(float(steps))
    features, labels = f.features(x[:, None], tau, ahead)
    rows = range(steps - tau - ahead + 1)
    assert features[..., 0].tolist() == [x[i : i + tau].tolist() for i in rows]
    assert labels[..., 0].tolist() == [x[i + tau : i + tau + ahead].tolist() for i in rows]


def test_features_are_views_of_the_series():
    x = walk()
    assert all(np.shares_memory(part, x) for part in f.features(x, 4))


# Every model


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_no_forecast_depends_on_the_future(model):
    x, origins, steps = walk(), [30, 50, 70], 5
    model.fit(x[:90])
    before = model.forecasts(x, origins, steps)
    for i, o in enumerate(origins):
        changed = x.copy()
        changed[o:] = 1e6
        np.testing.assert_array_equal(model.forecasts(changed, origins, steps)[i], before[i])


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_predict_is_the_forecast_from_the_end_of_the_history(model):
    x = walk()
    model.fit([x[:60], x[60:]])
    path = model.predict(x[:80], 9)
    assert path.shape == (9, 2)
    np.testing.assert_allclose(path, model.forecasts(x, [40, 80], 9)[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_before_it_is_fitted_a_model_says_so(model):
    unfitted, x = copy.deepcopy(model).set_params(), walk()
    if not isinstance(unfitted, f.Last | f.Seasonal):  # which learn nothing
        if hasattr(unfitted, "inner"):
            unfitted.inner.set_params()
        with pytest.raises(NotFitted, match="is not fitted yet; fit"):
            unfitted.predict(x, 3)
        with pytest.raises(NotFitted, match="is not fitted yet; fit"):
            unfitted.state()
    assert not hasattr(unfitted, "nonsense")


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_what_does_not_go_with_a_fitted_model_is_refused_in_words(model):
    x = walk()
    model.fit(x)
    with pytest.raises(UserError, match=r"history of 1 columns for .* fitted to 2"):
        model.predict(x[:, :1], 3)
    with pytest.raises(UserError, match="steps=0 must be at least 1"):
        model.predict(x, 0)
    before = model.predict(x, 3)
    for name in {"tau", "season", "hidden", "num_layers", "lag"} & set(model.get_params()):
        with pytest.raises(UserError, match=name):
            model.set_params(**{name: -5})
    assert np.array_equal(model.predict(x, 3), before), "nothing has changed"


def test_changed_settings_forget_what_was_fitted():
    model = f.Linear(3).fit(walk())
    with pytest.raises(NotFitted):
        model.set_params(tau=5).predict(walk(), 3)
    assert np.array_equal(
        model.fit(walk()).predict(walk(), 3), f.Linear(5).fit(walk()).predict(walk(), 3)
    )


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_units_are_undone_a_scaled_series_gives_a_scaled_forecast(model):
    x = walk()
    plain = model.fit(x).predict(x, 4)
    scaled = model.fit(1000 * x + 7).predict(1000 * x + 7, 4)
    np.testing.assert_allclose(scaled, 1000 * plain + 7, rtol=1e-3, atol=0.5)


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_a_saved_forecaster_forecasts_the_same(model, tmp_path):
    x = walk()
    intervals = f.calibrate(model.fit(x[:80]), [(x, 80)], 5)
    fitted = Fitted(model, ("a", "b"), intervals, 7)
    again = load(save(fitted, tmp_path / "run"))
    np.testing.assert_array_equal(again.model.predict(x, 5), model.predict(x, 5))
    np.testing.assert_array_equal(again.intervals.radius, intervals.radius)
    assert (again.columns, again.season) == (("a", "b"), 7)


NETWORKS = [
    f.Window(gaussian=True, **SMALL),
    f.Recurrent("gru", tau=6, gaussian=True, **SMALL),
    f.Global(3, tau=6, hidden=5, updates=3),
]


@pytest.mark.parametrize("model", NETWORKS, ids=lambda model: type(model).__name__)
def test_a_network_is_the_same_whatever_torchs_defaults(model, another_default, tmp_path):
    x = walk(columns=1)

    def forecast(name):
        intervals = f.calibrate(model.fit(x[:80]), [(x, 80)], 3)
        again = load(save(Fitted(model, ("a",), intervals, 7), tmp_path / name)).model
        spread = model.quantiles(x, [100], 3, [0.1, 0.9])
        return model.predict(x, 3).tolist(), again.predict(x, 3).tolist(), spread.tolist()

    wanted = forecast("one")
    another_default()
    assert forecast("other") == wanted


def test_stationarity_is_the_same_whatever_torchs_defaults(another_default):
    x = walk(columns=1)[:, 0]
    wanted = f.stationarity(x)
    another_default()
    assert f.stationarity(x) == wanted


@pytest.mark.parametrize("make", [f.Window, lambda **o: f.Recurrent("gru", **o)])
def test_same_seed_same_network_and_the_global_generator_is_left_alone(make):
    import torch

    x, before = walk(), torch.get_rng_state()
    one, two, other = (make(seed=s, **SMALL).fit(x).predict(x, 3) for s in (1, 1, 2))
    np.testing.assert_array_equal(one, two)
    assert np.abs(one - other).max() > 1e-3
    assert torch.equal(torch.get_rng_state(), before)


# What each model is


def test_linear_recovers_an_autoregression_exactly():
    x = np.zeros((60, 2))
    x[:2] = [[1, 0], [0.5, 2]]
    A, B = np.array([[0.6, 0.2], [-0.3, 0.5]]), np.array([[-0.4, 0.1], [0.2, -0.3]])
    for t in range(2, 60):
        x[t] = x[t - 1] @ A + x[t - 2] @ B + [0.3, -0.1]
    np.testing.assert_allclose(f.Linear(2).fit(x[:40]).predict(x[:40], 20), x[40:], atol=1e-9)
    np.testing.assert_allclose(
        f.Linear(2, direct=5).fit(x[:40]).predict(x[:40], 20), x[40:], atol=1e-9
    )


def test_differences_are_added_up_over_the_right_lag():
    t = np.arange(40.0)
    trend_and_season = (3 * t + np.resize([5.0, -1, 0, 8], 40))[:, None]
    for lag in (1, 4):
        model = f.Differenced(f.Linear(4), lag).fit(trend_and_season[:30])
        path = model.predict(trend_and_season[:30], 10)
        np.testing.assert_allclose(path, trend_and_season[30:], atol=1e-11)
    yearly = f.Differenced(f.Mean(), 4).fit(trend_and_season[:30])  # every change over 4 is 12
    np.testing.assert_allclose(yearly.predict(trend_and_season[:30], 10), trend_and_season[30:])


def test_sampled_changes_add_up_to_growing_spread():
    x = np.random.default_rng(0).normal(size=(1500, 1)).cumsum(0)
    model = f.Differenced(f.Window(2, gaussian=True, epochs=10)).fit(x)
    spread = model.sample(x[None, -model.lags :], 16, 400).std((0, 1))[:, 0]
    assert spread[[0, 3, 15]] == pytest.approx([1, 2, 4], rel=0.25)  # √k of a random walk


def test_baselines_are_what_their_names_say():
    x = np.array([1.0, 5, 3, 2, 6, 4])[:, None]
    assert f.Last().fit(x).predict(x, 2)[:, 0].tolist() == [4, 4]
    assert f.Seasonal(3).fit(x).predict(x, 5)[:, 0].tolist() == [2, 6, 4, 2, 6]
    assert f.Mean().fit(x).predict(x[:2], 2)[:, 0].tolist() == [3.5, 3.5]
    assert f.Drift().fit(x).predict(x, 2)[:, 0] == pytest.approx([4.6, 5.2])


def test_the_notes_window_model_predicts_one_step_and_decays_over_many():
    x = series.sine(seed=0).values
    model = f.Window(tau=4, hidden=10, epochs=5, learning_rate=0.01).fit(x[:604])
    one = model.forecasts(x, range(604, 1000), 1)[:, 0]
    many = model.predict(x[:604], 396)
    assert np.sqrt(np.square(one - x[604:]).mean()) < 0.3  # the noise alone is 0.2
    assert np.ptp(many[200:]) < 0.2  # settles to a constant
    assert np.sqrt(np.square(many - x[604:]).mean()) > 0.5  # and misses the wave


def test_a_column_that_reveals_the_target_step_gives_no_gain():
    noise = np.random.default_rng(0).normal(size=(400, 1))
    revealed = np.concatenate([noise, noise], axis=1)  # column 2 at step t is column 1 at step t
    parts = [split(revealed)]
    chance = score(f.Mean().fit(parts[0].train), parts, 2).rmse
    for model in (f.Linear(4), f.Window(4), f.Recurrent("gru", tau=8, epochs=5)):
        error = score(model.fit(parts[0].train), parts, 2).rmse
        assert (error > 0.97 * chance).all()  # white noise cannot be predicted


def test_smoothing_finds_the_constants_that_made_a_series():
    rng = np.random.default_rng(0)
    level, slope, season = 50.0, 0.5, np.array([3.0, -1, -4, 2])
    x = []
    for t in range(1500):
        error = rng.normal()
        x.append(level + slope + season[t % 4] + error)
        level, slope = level + slope + 0.3 * error, slope + 0.02 * error
        season[t % 4] += 0.1 * error
    model = f.Smoothing(4).fit(np.array(x))
    alpha, beta, gamma, phi, sloped, seasonal = model.state()["constants"][0]
    assert (sloped, seasonal, phi) == (1, 1, 1)
    assert [alpha, beta, gamma] == pytest.approx([0.3, 0.02, 0.1], abs=0.05)
    assert model.state()["spread"][0] == pytest.approx(1, rel=0.06)


def test_smoothing_without_slope_or_season_is_the_textbook_recursion():
    x = np.random.default_rng(1).normal(size=80)
    model = f.Smoothing().fit(x)
    alpha, beta, gamma, _, sloped, seasonal = model.state()["constants"][0]
    assert (beta, gamma, sloped, seasonal) == (0, 0, 0, 0)
    level = x[:4].mean()
    for value in x:
        level = alpha * value + (1 - alpha) * level
    np.testing.assert_allclose(model.predict(x, 3)[:, 0], level)


@pytest.mark.parametrize(("period", "rows"), [(1, 4), (2, 4), (5, 10), (12, 24)])
@pytest.mark.parametrize("sloped", [True, False])
def test_smoothing_starts_from_least_squares(period, rows, sloped):
    x = 100 + walk(rows, 3, seed=period)
    level, slope, season = smoothing._start(x, period, sloped=sloped)
    t = np.arange(1, rows + 1)
    places = np.eye(period)[(t - 1) % period]
    line = t[:, None] * np.ones((1, int(sloped)))
    design = np.concatenate([np.ones((rows, 1)), line, places], axis=1)
    sums_to_zero = np.concatenate([np.zeros(1 + sloped), np.ones(period)])  # free of the data
    solved = np.linalg.lstsq(
        np.vstack([design, sums_to_zero]), np.vstack([x, np.zeros(3)]), rcond=None
    )[0]
    np.testing.assert_allclose(level, solved[0], rtol=1e-11)
    np.testing.assert_allclose(slope, solved[1] if sloped else 0, atol=1e-11)
    np.testing.assert_allclose(season, solved[1 + sloped :], atol=1e-11)


def test_a_season_of_a_day_in_minutes_is_smoothed_in_seconds():
    x = np.sin(np.arange(4500) * 2 * np.pi / 1440)
    begun = time.process_time()
    f.Smoothing(1440).fit(x)
    assert time.process_time() - begun < 4  # 0.2 on an idle core; 8.6 by general least squares


def test_the_spread_of_smoothing_is_that_of_its_own_simulated_futures():
    model = f.Smoothing(4).fit(walk(60, 1))
    model.restore({"constants": np.array([[0.4, 0.1, 0.2, 0.9, 1, 1]]), "spread": np.array([2.0])})
    rng = np.random.default_rng(0)
    n, paths = 20000, []
    level, slope, season = np.zeros(n), np.zeros(n), np.zeros((4, n))
    for t in range(9):
        error = rng.normal(0, 2, n)
        paths.append(level + 0.9 * slope + season[t % 4] + error)
        level, slope = level + 0.9 * slope + 0.4 * error, 0.9 * slope + 0.1 * error
        season[t % 4] += 0.2 * error
    np.testing.assert_allclose(model.deviation(9)[:, 0], np.std(paths, axis=1), rtol=0.03)


def driven(steps=200, ahead=12, seed=0):
    """y_t = 2 u_t - u'_t + n_t, n an autoregression with small noise; u known ahead."""
    rng = np.random.default_rng(seed)
    u = rng.normal(size=(steps + ahead, 2))
    n = np.zeros(steps)
    for t in range(1, steps):
        n[t] = 0.7 * n[t - 1] + rng.normal(0, 0.01)
    return (u[:steps] @ [2, -1] + n)[:, None], u


def test_regression_with_known_inputs_forecasts_what_they_drive():
    y, u = driven()
    inputs = f.Inputs(u, np.zeros((180, 0)))
    model = f.Regression(3).fit([y[:180]], [inputs])
    np.testing.assert_allclose(model.predict(y[:180], 12, inputs), y[180:192], atol=0.1)
    blind = f.Linear(3).fit(y[:180]).predict(y[:180], 12)
    assert np.abs(blind - y[180:192]).mean() > 1


def test_regression_with_past_inputs_uses_them_one_horizon_at_a_time():
    rng = np.random.default_rng(0)
    v = rng.normal(size=(300, 1))
    y = np.zeros((300, 1))
    y[2:] = 3 * v[:-2]  # what v is today y will be in two steps
    inputs = f.Inputs(np.zeros((300, 0)), v)
    model = f.Regression(3, direct=2).fit([y], [inputs])
    np.testing.assert_allclose(model.predict(y, 2, inputs)[:, 0], 3 * v[-2:, 0], atol=1e-9)
    with pytest.raises(UserError, match="fitted for 2 steps ahead, not 3"):
        model.predict(y, 3, inputs)


def test_known_inputs_must_reach_the_horizon():
    y, u = driven(ahead=3)
    model = f.Regression(3).fit([y], [f.Inputs(u, np.zeros((200, 0)))])
    with pytest.raises(UserError, match=r"known inputs end after step 203, .* step 205"):
        model.predict(y, 5, f.Inputs(u, np.zeros((200, 0))))


def test_a_season_that_repeats_is_taken_away_and_put_back():
    t = np.arange(60)
    x = (3 * t + np.array([5.0, -1, 0, 8])[t % 4])[:, None]
    drift = f.Deseasonalised(f.Drift(), 4).fit(x[:50])
    np.testing.assert_allclose(drift.predict(x[:50], 10), x[50:], atol=1e-11)
    design = np.concatenate([np.eye(4)[t % 4], t[:, None]], axis=1)
    solved = np.linalg.lstsq(design, x, rcond=None)[0][:4]
    expected = solved - solved.mean(0)
    np.testing.assert_allclose(drift.patterns(x, np.array([60]))[0], expected, atol=1e-9)


def with_season_and_input(rng, steps=240, ahead=12, phi=0.6):
    known = (rng.random((steps + ahead, 1)) < 0.3) * rng.uniform(0.5, 2, (steps + ahead, 1))
    error = rng.normal(size=steps + ahead)
    for k in range(1, len(error)):
        error[k] += phi * error[k - 1]
    season = rng.normal(0, 3, 12)[np.arange(steps + ahead) % 12]
    x = 30 + 8 * known[:, 0] + season + error
    return x[:steps, None], x[steps:], f.Inputs(known, np.zeros((steps, 0))), season[steps:]


def test_season_input_and_errors_are_found_together():
    x, _, inputs, season = with_season_and_input(np.random.default_rng(0), 1200)
    model = f.AutoregressiveErrors(4, season=12).fit([x], [inputs])
    assert model._phi[0, 0] == pytest.approx(0.6, abs=0.08)
    far = model.forecasts(x, [len(x)], 12, inputs)[0, 6:, 0]  # the last error is forgotten by then
    effects = 30 + 8 * inputs.known[1206:, 0] + season[6:]
    np.testing.assert_allclose(far, effects, atol=0.5)


def test_effects_are_those_of_generalised_least_squares():
    x, _, inputs, _ = with_season_and_input(np.random.default_rng(1), 96)
    model = f.AutoregressiveErrors(2, season=12).fit([x], [inputs])
    phi = model._phi[0]
    t = np.arange(108)
    dummies = np.eye(12)[t % 12]
    design = np.concatenate([dummies, inputs.known], axis=1)
    white = [a[2:] - phi[0] * a[1:-1] - phi[1] * a[:-2] for a in (design[:96], x[:, 0])]
    beta = np.linalg.lstsq(*white, rcond=None)[0]
    left = x[:, 0] - design[:96] @ beta
    errors = [*left[-2:]]
    for _ in range(12):
        errors.append(phi[0] * errors[-1] + phi[1] * errors[-2])
    expected = design[96:] @ beta + errors[2:]
    np.testing.assert_allclose(model.forecasts(x, [96], 12, inputs)[0, :, 0], expected, rtol=1e-6)


def test_changes_carry_a_drift_on_and_a_line_its_slope():
    rng = np.random.default_rng(0)
    walk = 100 + np.cumsum(rng.normal(1.0, 0.1, 200))[:, None]
    ahead = f.AutoregressiveErrors(2, trend="changes").fit(walk).predict(walk, 10)
    np.testing.assert_allclose(np.diff(ahead[:, 0]), 1.0, atol=0.1)
    line = (3 + 0.5 * np.arange(200) + rng.normal(0, 0.1, 200))[:, None]
    ahead = f.AutoregressiveErrors(2, trend="line").fit(line).predict(line, 10)
    np.testing.assert_allclose(ahead[:, 0], 3 + 0.5 * np.arange(200, 210), atol=0.2)


@pytest.mark.parametrize("trend", ["level", "line", "changes"])
@pytest.mark.parametrize("told_apart", [True, False])
def test_many_effects_are_found_as_few_are(trend, told_apart, monkeypatch):
    """From sums of products instead of anew for every φ and every origin."""
    r, n, m = np.random.default_rng(3), 300, 40
    known = 100 + np.cumsum(r.normal(size=(n + 5, 2)), axis=0)
    if not told_apart:  # a constant, and an input that is only there before the first rows
        known = np.stack([np.full(n + 5, 5.0), np.arange(n + 5) < 1], axis=1)
    moves = r.normal(size=n)
    for t in range(1, n):
        moves[t] += 0.6 * moves[t - 1]
    x = 20 + r.normal(size=m)[np.arange(n) % m] + 0.1 * np.cumsum(moves) + 0.1 * known[:n, 0]
    x, inputs = x[:, None], f.Inputs(known, np.zeros((n, 0)))
    found = []
    for many in (10**9, autoregressive_errors._MANY):
        monkeypatch.setattr(autoregressive_errors, "_MANY", many)
        model = f.AutoregressiveErrors(3, season=m, trend=trend).fit([x], [inputs])
        origins = [*range(model.lags, n, 7), model.lags]  # in any order
        found.append((model._phi, model.forecasts(x, origins, 5, inputs)))
    (phi, paths), (phi_of_many, paths_of_many) = found
    assert phi.any(), "there is something to whiten with"
    np.testing.assert_allclose(phi_of_many, phi, atol=1e-9)
    np.testing.assert_allclose(paths_of_many, paths, atol=1e-4 * x.std())


def test_newer_data_may_begin_in_another_month():
    x, _, _, _ = with_season_and_input(np.random.default_rng(2), 240)
    model = f.AutoregressiveErrors(2, season=12).fit(x)
    whole, later = (model.predict(rows, 12) for rows in (x, x[5:]))
    np.testing.assert_allclose(later, whole, atol=0.5)


def test_a_network_trains_on_the_kernel_it_is_told_to_and_leaves_the_choice_as_it_was(monkeypatch):
    x = np.sin(0.3 * np.arange(60))
    monkeypatch.delenv("ELMAN_KERNELS", raising=False)
    seen = []
    choose = choice.requested
    monkeypatch.setattr(choice, "requested", lambda: seen.append(choose()) or choose())
    plain = f.Recurrent(tau=8, hidden=4, epochs=2, kernel="reference").fit(x)
    assert set(seen) == {"reference"}
    assert "ELMAN_KERNELS" not in os.environ
    fast = f.Recurrent(tau=8, hidden=4, epochs=2).fit(x)
    np.testing.assert_allclose(fast.predict(x, 3), plain.predict(x, 3), rtol=1e-4)
    with pytest.raises(UserError, match="ELMAN_KERNELS=abacus names no kernel"):
        f.Recurrent(tau=8, epochs=1, kernel="abacus").fit(x)
    assert "ELMAN_KERNELS" not in os.environ


def test_logarithms_turn_percents_into_steps():
    x = 100 * 1.05 ** np.arange(40)
    np.testing.assert_allclose(
        f.Logged(f.Drift()).fit(x[:30]).predict(x[:30], 10)[:, 0], x[30:], rtol=1e-9
    )
    with pytest.raises(UserError, match="-1 has no logarithm"):
        f.Logged(f.Drift()).fit([1.0, -1, 2])


# One network over many series


def waves(count=12, steps=120, seed=0):
    rng = np.random.default_rng(seed)
    t = np.arange(steps)
    return [
        (100 * i + (i + 1) * (np.sin(2 * np.pi * t / 12 + i) + rng.normal(0, 0.1, steps)))[:, None]
        for i in range(count)
    ]


def test_a_shared_network_learns_series_of_every_size_and_says_how_sure_it_is():
    panel = waves()
    model = f.Global(6, tau=24, hidden=16, difference=12, updates=120, learning_rate=0.01)
    model.fit([v[:108] for v in panel])
    assert model.losses[-1] < model.losses[0]
    for i, v in enumerate(panel):
        naive = np.abs(v[96:102] - v[108:114]).mean()
        said = model.quantiles(v[:108], [108], 6, [0.1, 0.5, 0.9])[0, :, 0]
        assert (np.diff(said, axis=1) > 0).all()
        assert np.abs(said[:, 1] - v[108:114, 0]).mean() < 1.3 * naive + 0.02 * (i + 1)


def test_a_shared_network_sees_no_future_and_reads_known_inputs():
    rng = np.random.default_rng(0)
    known = (rng.random((150, 1)) < 0.3).astype(float)
    panel = [10 * i + 5 * known[:120] + rng.normal(0, 0.1, (120, 1)) for i in range(8)]
    inputs = [f.Inputs(known, np.zeros((120, 0)))] * 8
    model = f.Global(4, "gru", tau=12, hidden=12, updates=150, learning_rate=0.01)
    model.fit(panel, inputs)
    before = model.forecasts(panel[0], [60, 100], 4, inputs[0])
    changed = panel[0].copy()
    changed[100:] = 1e6
    np.testing.assert_array_equal(model.forecasts(changed, [60, 100], 4, inputs[0]), before)
    ahead = model.predict(panel[3], 4, inputs[3])[:, 0]
    assert np.abs(ahead - (30 + 5 * known[120:124, 0])).max() < 1.5


def test_a_shared_network_is_saved_whole(tmp_path):
    panel = waves(3)
    model = f.Global(3, tau=12, hidden=4, updates=3).fit(panel)
    fitted = Fitted(model, ("y",), f.Intervals(0.9, np.ones((3, 1))))
    again = load(save(fitted, tmp_path / "run")).model
    np.testing.assert_array_equal(again.predict(panel[0], 3), model.predict(panel[0], 3))
    assert isinstance(again, f.Global)
    assert again.losses == model.losses


# Intervals and distributions


def test_conformal_intervals_cover_as_often_as_they_say():
    x = np.random.default_rng(1).normal(size=(4000, 1))
    model = f.Mean().fit(x[:1000])
    intervals = f.calibrate(model, [(x[:2500], 1000)], 3, level=0.8)
    covered = score(model, [split(x, 0.375, 0.375)], 3, intervals=intervals).coverage
    np.testing.assert_allclose(covered, 0.8, atol=0.04)  # five standard errors


def test_conformal_radius_is_the_right_order_statistic():
    x = np.array([0.0, 0, 0, 0, 3, 1, 2, 4])[:, None]
    model = f.Mean().fit(x[:4])
    # Residuals 3 1 2 4: rank ⌈5·0.6⌉ = 3 of 4; at horizon 2 only 1 2 4 are known: rank ⌈4·0.6⌉ = 3.
    assert f.calibrate(model, [(x, 4)], 2, level=0.6).radius[:, 0].tolist() == [3, 4]


def test_too_few_residuals_give_an_infinite_interval():
    x = walk(20, 1)
    radius = f.calibrate(f.Last().fit(x), [(x, 15)], 2, level=0.9).radius
    assert np.isinf(radius).all()


def test_gaussian_samples_spread_as_the_noise_does():
    x = 3 * np.random.default_rng(0).normal(size=(2000, 1))
    model = f.Window(2, hidden=8, gaussian=True, epochs=20).fit(x)
    drawn = model.sample(x[None, :2].repeat(5, 0), steps=4, samples=500)
    assert drawn.shape == (500, 5, 4, 1)
    assert drawn.std() == pytest.approx(3, rel=0.1)
    np.testing.assert_array_equal(drawn, model.sample(x[None, :2].repeat(5, 0), 4, 500))


def test_crps_of_samples_meets_its_definition():
    rng = np.random.default_rng(0)
    samples, truth = rng.normal(size=(6, 4, 3, 2)), rng.normal(size=(4, 3, 2))
    pairs = [np.abs(samples[i] - samples[j]) for i in range(6) for j in range(6) if i != j]
    expected = np.abs(samples - truth).mean(0) - 0.5 * np.mean(pairs, axis=0)
    np.testing.assert_allclose(accuracy.crps(truth, samples), expected.mean((0, 2)))
    np.testing.assert_allclose(accuracy.crps(truth, samples[:1]), accuracy.mae(truth, samples[0]))


# Measures


def test_measures_by_hand():
    truth, forecast = np.array([[[2.0], [4]], [[0], [0]]]), np.array([[[1.0], [4]], [[3], [0]]])
    assert accuracy.rmse(truth, forecast).tolist() == [np.sqrt(5), 0]
    assert accuracy.mae(truth, forecast).tolist() == [2, 0]
    assert accuracy.smape(truth, forecast) == pytest.approx([(2 / 3 + 2) / 2, 0])
    training = [np.array([[0.0], [1], [0], [3]])]  # naive steps 1 1 3; of lag two 0 2
    assert accuracy.mase(truth, forecast, training) == pytest.approx([2 / (5 / 3), 0])
    assert accuracy.mase(truth, forecast, training, season=2) == pytest.approx([2, 0])
    assert accuracy.coverage(truth, forecast - 1, forecast + 1).tolist() == [0.5, 1]
    assert accuracy.width(forecast - 1, forecast + 1).tolist() == [2, 2]


def test_errors_that_follow_the_notes_recursion_give_back_its_constant():
    errors = [0.3]
    for _ in range(20):
        errors.append(0.3 + 0.7 * errors[-1])
    fitted = accuracy.growth(np.array(errors))
    assert fitted.factor == pytest.approx(0.7)
    np.testing.assert_allclose(fitted.predicted, errors)


def test_backtest_refits_on_the_past_of_each_origin_only():
    seen = []

    class Spy:
        def fit(self, values):
            seen.append(len(values))
            self.end = len(values)
            return self

        def predict(self, history, steps):
            assert len(history) == self.end
            return history[-1:].repeat(steps, 0)

    scores = backtest(Spy, np.arange(20.0)[:, None], folds=3, steps=4)
    assert seen == [8, 12, 16]
    assert scores.mae.tolist() == [1, 2, 3, 4]


# Refusals


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: f.Window(tau=0), "tau=0 must be at least 1"),
        (lambda: f.Window(direct=0), "direct=0 must be at least 1"),
        (lambda: f.Window(learning_rate=-1), "learning_rate=-1 must be positive"),
        (
            lambda: f.Recurrent("transformer"),
            "unknown cell 'transformer'; one of elman, relu, linear, gru, lstm",
        ),
        (lambda: f.Differenced(f.Last(), 0), "lag=0 must be at least 1"),
        (lambda: f.Seasonal(0), "season=0 must be at least 1"),
        (lambda: f.Linear(5).fit([1.0, 2, 3]), "3 steps is too short for Linear, which reads 5"),
        (
            lambda: f.Linear(2, direct=9).fit(walk(10)),
            "10 steps is too short for tau=2 and 9 steps",
        ),
        (lambda: f.Last().fit([1.0, np.nan, 3]), "step 1, column 0 is nan"),
        (lambda: f.Last().fit(np.zeros((2, 3, 4))), r"shape \(2, 3, 4\)"),
        (lambda: f.Last().fit(walk()).predict(walk(), 0), "steps=0 must be at least 1"),
        (
            lambda: f.Linear(5).fit(walk()).predict(walk(3), 1),
            "origin 3: it needs 5 values before it",
        ),
        (lambda: f.Last().sample(np.zeros((1, 1, 1)), 1, 1), "Last gives one path"),
        (lambda: f.calibrate(f.Last(), [], 1, level=1.5), "level=1.5 must lie between 0 and 1"),
        (lambda: split(walk(), 0.6, 0.5), "leave some to train on"),
        (lambda: score(f.Last(), [split(walk(20))], 9), "test part has 4 steps, not enough for 9"),
        (lambda: backtest(f.Last, walk(10), 5, 2), "5 folds of 2 steps need 12 values"),
        (
            lambda: accuracy.mase(np.ones((1, 1, 1)), np.ones((1, 1, 1)), [np.ones((9, 1))]),
            "training part is constant",
        ),
    ],
)
def test_bad_requests_are_refused_by_name(wrong, message):
    with pytest.raises(UserError, match=message):
        wrong()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_no_changed_bit_of_a_saved_forecaster_goes_unnoticed(tmp_path, name):
    x = walk()
    model = f.Linear(3).fit(x)
    folder = save(Fitted(model, ("a", "b"), f.calibrate(model, [(x, 50)], 2)), tmp_path / "run")
    whole = (folder / name).read_bytes()
    for at in np.random.default_rng(0).integers(0, 8 * len(whole), size=60).tolist():
        bits = bytearray(whole)
        bits[at // 8] ^= 1 << at % 8
        (folder / name).write_bytes(bits)
        with pytest.raises(UserError, match="does not hold a whole forecaster"):
            load(folder)
    (folder / name).write_bytes(whole)
    load(folder)


@pytest.mark.parametrize("spoil", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04pickle"])
def test_a_damaged_forecaster_is_refused(tmp_path, spoil, content):
    x = walk()
    model = f.Linear(3).fit(x)
    folder = save(Fitted(model, ("a", "b"), f.calibrate(model, [(x, 50)], 2)), tmp_path / "run")
    (folder / spoil).write_bytes(content)
    with pytest.raises(UserError, match="does not hold a whole forecaster"):
        load(folder)


def test_a_forecaster_of_another_kind_or_version_is_called_that(tmp_path):
    x = walk()
    model = f.Linear(3).fit(x)
    folder = save(Fitted(model, ("a", "b"), f.calibrate(model, [(x, 50)], 2)), tmp_path / "one")
    with pytest.raises(UserError, match="holds one fitted model, not a forecaster of series; elm"):
        f.SeriesForecaster.load(folder)
    series = f.SeriesForecaster("last", 2).fit({"y": list(range(40))}).save(tmp_path / "series")
    with pytest.raises(UserError, match=r"holds a forecaster of series, not .* SeriesForecaster"):
        load(series)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("elman-forecaster-2", "elman-forecaster-1"))
    with pytest.raises(UserError, match="'elman-forecaster-1', of another version of elman"):
        f.SeriesForecaster.load(folder)


def test_effects_are_the_same_summed_in_pieces(monkeypatch):
    from elman.forecasting import autoregressive_errors as regression

    x, _, _, _ = with_season_and_input(np.random.default_rng(4), 90)
    model = f.AutoregressiveErrors(2, season=12).fit(x)
    origins = [80, 60, 61, 90]
    whole = model.forecasts(x, origins, 5)
    monkeypatch.setattr(regression, "_PIECE", 13 * 13 * 7)  # seven rows at a time
    np.testing.assert_allclose(model.forecasts(x, origins, 5), whole, rtol=1e-9)


# Scores, measured as plainly as they are defined


def later(values, first, steps):
    """What followed each origin from the first on, and the value before each."""
    origins = range(first, len(values) - steps + 1)
    truth = np.stack([values[o : o + steps] for o in origins])
    return truth, np.stack([values[o - 1 : o].repeat(steps, 0) for o in origins])


def test_a_score_is_of_every_origin_of_every_test_part(monkeypatch):
    def sample(_, windows, steps, samples, seed):
        return np.stack([windows[:, -1:].repeat(steps, 1) + seed * s for s in range(samples)])

    monkeypatch.setattr(f.Last, "sample", sample)
    series = [split(np.abs(walk(n, 2)) + 1, 0.25, 0.25) for n in (16, 24)]
    assert [(len(p.train), p.validation, p.test) for p in series] == [(8, 8, 12), (12, 12, 18)]
    around = f.Intervals(0.8, np.array([[1.0, 0.5], [2.0, 1.0], [9.0, 9.0]]))
    found = score(f.Last(), series, 3, season=2, intervals=around, samples=4, seed=7)
    parts = [later(p.values, p.test, 3) for p in series]
    truth, forecast = (np.concatenate(each) for each in zip(*parts, strict=True))
    assert found.forecasts == len(truth) == 2 + 4
    drawn = np.stack([forecast + 7 * s for s in range(4)])
    ends = forecast - around.radius, forecast + around.radius
    trained = [p.values[: p.validation] for p in series]
    for measured, wanted in (
        (found.rmse, accuracy.rmse(truth, forecast)),
        (found.mae, accuracy.mae(truth, forecast)),
        (found.smape, accuracy.smape(truth, forecast)),
        (found.mase, accuracy.mase(truth, forecast, trained, 2)),
        (found.crps, accuracy.crps(truth, drawn)),
        (found.coverage, accuracy.coverage(truth, *ends)),
        (found.width, accuracy.width(*ends)),
    ):
        np.testing.assert_array_equal(measured, wanted)
    plain = score(f.Last(), series, 3)
    assert plain.crps is plain.coverage is plain.width is None
    np.testing.assert_array_equal(plain.mase, accuracy.mase(truth, forecast, trained, 1))


def test_what_never_moved_has_no_scale():
    truth, moving = np.ones((3, 2, 2)), walk(5, 2)
    still = moving.copy()
    still[:, 1] = 7
    for training, scaled in (
        ([moving], True),
        ([moving, still], False),
        ([moving, moving[:2]], False),
    ):
        assert (measure(truth, truth + 1, training, season=2).mase is not None) == scaled


@pytest.mark.parametrize("parts", [(0, 0.2), (0.2, 0), (1, 0.2), (0.2, 1), (0.5, 0.5), (-0.1, 0.5)])
def test_each_part_of_a_series_has_something(parts):
    with pytest.raises(UserError, match="must be positive and leave some to train on"):
        split(walk(20, 1), *parts)


def test_a_test_part_as_long_as_the_forecast_is_one_forecast():
    part = split(walk(16, 1), 0.25, 0.25)
    assert score(f.Last(), [part], 4).forecasts == 1
    with pytest.raises(UserError, match="has 4 steps, not enough for 5 ahead"):
        score(f.Last(), [part], 5)


def test_folds_end_with_the_series_and_begin_with_two_values():
    x = walk(10, 1)
    found = backtest(f.Last, x, 2, 4)
    truth = np.stack([x[2:6], x[6:10]])
    forecast = np.stack([x[1:2].repeat(4, 0), x[5:6].repeat(4, 0)])
    np.testing.assert_array_equal(found.mae, accuracy.mae(truth, forecast))
    np.testing.assert_array_equal(found.mase, accuracy.mase(truth, forecast, [x[:2]], 1))
    assert backtest(f.Last, x, 2, 4, season=2).mase is None
    assert backtest(f.Last, x, 1, 4).forecasts == 1
    with pytest.raises(UserError, match="2 folds of 4 steps need 10 values, and there are 9"):
        backtest(f.Last, x[:9], 2, 4)
    for folds in (0, 1.5):
        with pytest.raises(UserError, match=f"backtest={folds} must be"):
            backtest(f.Last, x, folds, 4)
