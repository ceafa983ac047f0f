"""Forecasts drawn: what comes next, past windows, k steps ahead, and error by horizon."""

import datetime as dt
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

from elman.errors import UserError
from elman.figures.style import COLOURS, STYLES, house
from elman.forecasting.accuracy import growth
from elman.forecasting.base import Forecaster, as_values
from elman.forecasting.experiment import Experiment
from elman.forecasting.intervals import nested
from elman.forecasting.scores import Scores
from elman.forecasting.series import Series

_MOST_CURVES = len(COLOURS) - 1


def overview(
    experiment: Experiment, compared: int = 0, horizons: tuple[int, ...] = (1, 4, 16, 64)
) -> Figure:
    """Four panels for one series: the future, past windows, k steps ahead, error by horizon."""
    series = experiment.compared[compared]
    with house():
        figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
        ahead(axes[0, 0], experiment, series)
        windows(axes[0, 1], experiment, compared)
        k_steps(axes[1, 0], experiment, series, horizons)
        error_by_horizon(axes[1, 1], experiment.scores(compared))
        figure.suptitle(plain_text(f"{experiment.series[series].name}: {experiment.published}"))
    plt.close(figure)
    return figure


def from_origin(
    values: Any, model: Forecaster, origin: int = 604, horizons: tuple[int, ...] = (1, 4, 16, 64)
) -> Figure:
    """The notes' two figures of 8.1: one step ahead and fed back from `origin`; k steps ahead.

    `model` has learned from the values before `origin` (604 of the sine make 600 pairs at τ = 4).
    Above, its one-step forecasts of the whole series and the path that feeds on itself from
    x_1 … x_origin; below, x̂_{t+k} from x_1 … x_t for every t, as in the notes without regard to
    where the training part ends. A dotted line marks that end.
    """
    x = as_values(values)
    tau, steps = model.lags, max(horizons)
    if not tau < origin < len(x) - steps:
        raise UserError(
            f"origin={origin} must leave {tau} values before it and {steps} of {len(x)} after it",
            hint="a smaller origin, or shorter horizons",
        )
    time = np.arange(1, len(x) + 1)
    origins = np.arange(tau, len(x) - steps + 1)
    paths = model.forecasts(x, origins.tolist(), steps)[:, :, 0]
    one_step = model.forecasts(x, range(tau, len(x)), 1)[:, 0, 0]
    fed_back = model.predict(x[:origin], len(x) - origin)[:, 0]
    with house():
        figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6.4), layout="constrained")
        above.plot(time, x[:, 0], color="#999999", linestyle="-", lw=0.8, label="data")
        above.plot(time[tau:], one_step, color=COLOURS[0], linestyle="-", label="1 step ahead")
        label = f"fed back from {origin}"
        above.plot(time[origin:], fed_back, color=COLOURS[2], linestyle="--", label=label)
        for k, colour, dash in zip(horizons, COLOURS, STYLES, strict=False):
            at = time[origins + k - 1]
            below.plot(at, paths[:, k - 1], color=colour, linestyle=dash, label=f"k = {k}")
        for axes, title in ((above, "One step, and on from there"), (below, "k steps ahead")):
            axes.axvline(origin, color="black", linestyle=":", linewidth=0.8)
            axes.set(title=title, xlabel="time", ylabel="x", xlim=(1, len(x)))
            axes.legend(loc="lower left", fontsize=8, ncols=4)
    plt.close(figure)
    return figure


def plain_text(words: str) -> str:
    """Words that matplotlib must not read as mathematics."""
    return words.replace("$", r"\$")


def moments(series: Series, first: int, count: int) -> Any:
    """Where steps lie on the axis: dates where the series has them, else numbers of steps."""
    if series.clock is None:
        return np.arange(first, first + count) + 1
    dates = [series.clock.at(first + k) for k in range(count)]
    return np.array([_naive(m) for m in dates])


def _naive(moment: Any) -> Any:
    return moment.replace(tzinfo=None) if isinstance(moment, dt.datetime) else moment


def ahead(axes: Axes, experiment: Experiment, i: int) -> None:
    """The end of the data, the forecast that follows it, and its intervals."""
    series, path, steps = experiment.series[i], experiment.ahead[i], experiment.settings.steps
    shown = min(len(series), max(4 * steps, 60))
    past = moments(series, len(series) - shown, shown)
    future = moments(series, len(series), steps)
    axes.plot(past, series.values[-shown:, 0], color="#333333", linestyle="-", lw=0.9, label="data")
    for level in sorted(path.low, reverse=True):
        axes.fill_between(
            future, path.low[level], path.high[level], color=COLOURS[1], alpha=0.2, linewidth=0,
            label=f"{level:g} % interval",
        )  # fmt: skip
    axes.plot(future, path.point, color=COLOURS[1], linestyle="-", label="forecast")
    _finish(axes, series, "What comes next")


def windows(axes: Axes, experiment: Experiment, compared: int) -> None:
    """What would have been said at the start of each window, and what came."""
    series = experiment.series[experiment.compared[compared]]
    backtest = next(iter(experiment.backtests().values()))[compared]
    first = int(backtest.origins.min())
    start = max(0, first - experiment.settings.steps)
    axes.plot(
        moments(series, start, len(series) - start),
        series.values[start:, 0], color="#333333", linestyle="-", lw=0.9, label="data",
    )  # fmt: skip
    level = experiment.settings.levels[0]
    for n, w in enumerate(sorted(set(backtest.window.tolist()))):
        row = int(np.flatnonzero(backtest.window == w)[0])
        at = moments(series, int(backtest.origins[row]), experiment.settings.steps)
        low, high = nested(backtest.quantiles[row], experiment.ensemble.widen)
        colour = COLOURS[n % 2 + 1]
        axes.fill_between(at, low[level], high[level], color=colour, alpha=0.2, linewidth=0)
        label = "forecast then" if n == 0 else None
        axes.plot(at, backtest.point[row], color=colour, linestyle="-", label=label)
    _finish(axes, series, "Windows it was not shown")


def k_steps(axes: Axes, experiment: Experiment, i: int, horizons: tuple[int, ...]) -> None:
    """The k-step-ahead forecast at every step, for several k, of the first model of series i."""
    series = experiment.series[i]
    label = experiment.ensemble.members[i][0]
    fitted, steps = experiment.ensemble.fitted[label], experiment.settings.steps
    model = fitted.models[i]
    last = len(series) if not series.known.shape[1] else len(series) - steps
    origins = np.arange(model.lags, last + 1)
    origins = origins[:: max(1, len(origins) // 500)]
    fits = [k for k in horizons if k <= steps] or [1]
    paths = fitted.forecast(i, series, origins.tolist(), max(fits)).point
    axes.plot(
        moments(series, 0, len(series)), series.values[:, 0], color="#cccccc", linestyle="-", lw=0.8
    )
    times = moments(series, 0, len(series))
    for k, colour, dash in zip(fits, COLOURS, STYLES, strict=False):
        at = origins + k - 1
        inside = at < len(series)
        axes.plot(
            times[at[inside]], paths[inside, k - 1], color=colour, linestyle=dash,
            label=f"k = {k}",
        )  # fmt: skip
    _finish(axes, series, "k steps ahead, over the whole series")


def error_by_horizon(axes: Axes, scores: Mapping[str, Scores]) -> None:
    """Held-out root mean squared error at each horizon, and the growth the notes predict."""
    rows = [(name, s.rmse) for name, s in scores.items() if s.rmse is not None]
    rest = sorted(rows[1:], key=lambda row: float(row[1].mean()))
    for (name, rmse), colour, dash in zip(
        [*rows[:1], *rest][:_MOST_CURVES], COLOURS, STYLES, strict=False
    ):
        at = np.arange(1, len(rmse) + 1)
        axes.plot(at, rmse, color=colour, linestyle=dash, label=plain_text(name))
    first = rows[0][1]
    if len(first) > 1:
        fitted = growth(first)
        axes.plot(
            np.arange(1, len(first) + 1), fitted.predicted, color="black", linewidth=0.8,
            linestyle=":", label=f"ε̄ + c ε, c = {fitted.factor:.2f}",
        )  # fmt: skip
    axes.set(title="Held-out error by horizon", xlabel="steps ahead", ylabel="RMSE")
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # room for the names, above every curve
    axes.legend(loc="upper left", fontsize=7, ncols=2)


def _finish(axes: Axes, series: Series, title: str) -> None:
    dated = series.clock is not None and not isinstance(series.clock.start, int)
    axes.set(title=title, xlabel="" if dated else "step")
    if dated:
        ticks = AutoDateLocator(minticks=3, maxticks=7)
        axes.xaxis.set_major_locator(ticks)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(ticks))
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.15 * (high - low))  # room for the names, above every curve
    axes.legend(loc="upper left", fontsize=8, ncols=4)
