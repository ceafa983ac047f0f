"""Forecasts drawn: the notes' three pictures, and error by horizon."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from elman.figures.style import COLOURS, STYLES, house
from elman.forecasting.accuracy import growth
from elman.forecasting.base import Forecaster, Values
from elman.forecasting.evaluation import Scores
from elman.forecasting.intervals import Intervals


def overview(
    name: str,
    values: Values,
    model: Forecaster,
    first: int,
    scores: Mapping[str, Scores],
    intervals: Intervals,
    horizons: tuple[int, ...] = (1, 4, 16, 64),
) -> Figure:
    """Four panels: one step, many steps from one origin, k steps over the series, error by horizon.

    `first` is where the test part begins; only the first column is drawn.
    """
    with house():
        figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
        one_step(axes[0, 0], values, model, first)
        many_steps(axes[0, 1], values, model, first, intervals)
        k_steps(axes[1, 0], values, model, horizons)
        error_by_horizon(axes[1, 1], scores)
        figure.suptitle(f"{name}: {type(model).__name__}")
    plt.close(figure)
    return figure


def one_step(axes: Axes, values: Values, model: Forecaster, first: int) -> None:
    """The data, and the prediction of each value from those before it."""
    origins = range(model.lags, len(values))
    axes.plot(values[:, 0], color="#999999", linestyle="-", linewidth=0.8, label="data")
    axes.plot(origins, model.forecasts(values, origins, 1)[:, 0, 0], label="one step ahead")
    axes.axvline(first, color="black", linestyle=":", linewidth=1)
    axes.annotate("test part", (first, 1), xycoords=("data", "axes fraction"), fontsize=8, va="top")
    axes.set(title="One step ahead", xlabel="step")
    axes.legend(loc="lower left")


def many_steps(
    axes: Axes, values: Values, model: Forecaster, first: int, intervals: Intervals
) -> None:
    """What the model says at the start of the test part, fed its own predictions to the end."""
    steps = len(values) - first
    path = model.forecasts(values, [first], steps)[0, :, 0]
    known = min(steps, len(intervals.radius))
    radius = intervals.radius[:known, 0]
    ahead = np.arange(first, first + steps)
    axes.plot(values[:, 0], color="#999999", linestyle="-", linewidth=0.8, label="data")
    axes.plot(ahead, path, color=COLOURS[1], linestyle="-", label="fed its own predictions")
    if np.isfinite(radius).any():
        axes.fill_between(
            ahead[:known],
            path[:known] - radius,
            path[:known] + radius,
            color=COLOURS[1],
            alpha=0.25,
            linewidth=0,
            label=f"{intervals.level:.0%} interval",
        )
    axes.set(title="Many steps from one origin", xlabel="step")
    axes.legend(loc="lower left")


def k_steps(axes: Axes, values: Values, model: Forecaster, horizons: tuple[int, ...]) -> None:
    """The k-step-ahead prediction at every step, for several k."""
    fits = [k for k in horizons if model.lags + k <= len(values)]
    origins = np.arange(model.lags, len(values) + 1)
    paths = model.forecasts(values, origins.tolist(), max(fits))[:, :, 0]
    axes.plot(values[:, 0], color="#cccccc", linestyle="-", linewidth=0.8)
    for k, colour, dash in zip(fits, COLOURS, STYLES, strict=False):
        at = origins + k - 1
        inside = at < len(values)
        axes.plot(at[inside], paths[inside, k - 1], color=colour, linestyle=dash, label=f"k = {k}")
    axes.set(title="k steps ahead, over the whole series", xlabel="step")
    axes.legend(loc="lower left", ncols=2)


def error_by_horizon(axes: Axes, scores: Mapping[str, Scores]) -> None:
    """Held-out root mean squared error at each horizon, and the growth the notes predict."""
    for (name, score), colour, dash in zip(scores.items(), COLOURS, STYLES, strict=False):
        axes.plot(_horizons(score), score.rmse, color=colour, linestyle=dash, label=name)
    first = next(iter(scores.values()))
    if len(first.rmse) > 1:
        fitted = growth(first.rmse)
        label = f"ε̄ + c ε, c = {fitted.factor:.2f}"
        axes.plot(
            _horizons(first),
            fitted.predicted,
            color="black",
            linewidth=0.8,
            linestyle=":",
            label=label,
        )
    axes.set(title="Held-out error by horizon", xlabel="steps ahead", ylabel="RMSE")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _horizons(score: Scores) -> list[int]:
    return list(range(1, len(score.rmse) + 1))
