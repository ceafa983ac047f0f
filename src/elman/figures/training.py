"""How a training went: perplexity against its baselines, gradient norms against the threshold."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from elman.figures.style import COLOURS, house

POINTS = 200
"""A curve is drawn with at most this many points, however long the run was."""

NARROW = 4.4
"""The width in inches of a figure for a telephone, where its letters are as large as the page's."""

INK, FAINT = "#333333", "#767676"

LEAST, GREATEST = 1e-250, 1e250
"""What a logarithmic scale can show: a margin around it must be a number, too."""


class Curve(NamedTuple):
    """One number at each of several steps."""

    steps: Sequence[float]
    values: Sequence[float]


class Bins(NamedTuple):
    """A long curve in few points: where, the geometric mean there, the least and the greatest."""

    steps: NDArray[np.float64]
    middle: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def binned(curve: Curve, points: int = POINTS) -> Bins:
    """Average neighbours until at most `points` are left.

    The mean is geometric: of perplexities, that is the perplexity of the mean nats. Values that a
    logarithmic scale cannot show (not finite, or not above zero) are left out: nothing may be left.

    >>> binned(Curve([1, 2, 3, 4], [1, 4, 2, 8]), points=2).middle.tolist()
    [2.0, 4.0]
    """
    steps, values = np.asarray(curve.steps, float), np.asarray(curve.values, float)
    drawable = (values > LEAST) & (values < GREATEST)
    steps, values = steps[drawable], values[drawable]
    edges = np.linspace(0, len(values), min(points, len(values)) + 1).astype(int)
    spans = [slice(a, b) for a, b in itertools.pairwise(edges)]
    return Bins(
        np.array([steps[s].mean() for s in spans]),
        np.array([math.exp(np.log(values[s]).mean()) for s in spans]),
        np.array([values[s].min() for s in spans]),
        np.array([values[s].max() for s in spans]),
    )


def perplexity(
    train: Curve, validation: Curve, baselines: Mapping[str, float], *, narrow: bool = False
) -> Figure:
    """Perplexity while training, on a logarithmic scale, with each baseline as a level line."""
    with house():
        title = "Perplexity" if narrow else "Perplexity: the choices left open at each token"
        figure, axes = _axes(title, "perplexity", narrow)
        labels = [
            (value, f"{name}: {_short(value)}", FAINT)
            for name, value in baselines.items()
            if LEAST < value < GREATEST
        ]
        for value, _, _ in labels:
            axes.axhline(value, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        if len((bins := binned(train)).steps):
            _draw_band(axes, bins, COLOURS[0])
            labels.append((bins.middle[-1], f"training: {_short(bins.middle[-1])}", COLOURS[0]))
        if len((bins := binned(validation)).steps):
            labels.append(_draw_validation(axes, bins))
        _finish(axes, labels, narrow)
    return figure


def gradient_norms(norms: Curve, clip: float | None, *, narrow: bool = False) -> Figure:
    """‖g‖ before clipping at each update, and θ, above which g is scaled back to length θ."""
    with house():
        figure, axes = _axes("Gradient norm before clipping", "‖g‖", narrow)
        labels = []
        if len((bins := binned(norms)).steps):
            _draw_band(axes, bins, COLOURS[2])
        if clip is not None and LEAST < clip < GREATEST:
            axes.axhline(clip, color=COLOURS[1], linewidth=1.3, linestyle="--", zorder=3)
            share = clipped_share(norms, clip)
            labels.append((clip, f"θ = {_short(clip)}\n{100 * share:.0f} % clipped", COLOURS[1]))
        _finish(axes, labels, narrow)
    return figure


def horizons(half: Curve, ninety: Curve, *, narrow: bool = False) -> Figure:
    """How many steps back half, and 90 %, of the gradient lies, over a training."""
    with house():
        figure, axes = _axes("How far back the gradient reaches", "steps", narrow)
        axes.set_yscale("linear")
        labels = []
        for curve, name, colour, dash in (
            (half, "half", COLOURS[0], "-"),
            (ninety, "90 %", COLOURS[1], "--"),
        ):
            axes.plot(curve.steps, curve.values, color=colour, linestyle=dash, marker="o")
            labels.append((curve.values[-1], f"{name} within {curve.values[-1]:g}", colour))
        axes.set_ylim(bottom=0)
        if narrow:
            _list_below(axes, labels)
        else:
            for value, text, colour in labels:
                axes.annotate(
                    text,
                    (1.02, value),
                    xycoords=("axes fraction", "data"),
                    color=colour,
                    va="center",
                )
    return figure


def clipped_share(norms: Curve, clip: float) -> float:
    """The share of updates whose gradient was longer than `clip`.

    >>> clipped_share(Curve([1, 2, 3, 4], [0.5, 3.0, 1.0, 2.0]), 1.0)
    0.5
    """
    return float(np.mean(np.asarray(norms.values) > clip)) if len(norms.values) else 0.0


def _axes(title: str, quantity: str, narrow: bool) -> tuple[Figure, Axes]:
    """Axes that are alike in all of the figures: labels beside them, or, where `narrow`, below."""
    figure = Figure(figsize=(NARROW, NARROW) if narrow else (8.8, 3.6))
    axes = figure.add_subplot()
    if narrow:
        figure.subplots_adjust(left=0.14, right=0.94)  # and the height by what stands below
    else:
        figure.subplots_adjust(left=0.075, right=0.765, bottom=0.14, top=0.91)
    axes.set_title(title, loc="left", color=INK)
    axes.set_xlabel("update", color=INK)
    axes.set_ylabel(quantity, color=INK)
    axes.set_yscale("log")
    axes.tick_params(colors=INK, which="both")
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    return figure, axes


def _draw_band(axes: Axes, bins: Bins, colour: str) -> None:
    """The mean as a line inside the range of what it averages."""
    axes.fill_between(bins.steps, bins.low, bins.high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(bins.steps, bins.middle, color=colour, linestyle="-", linewidth=1.4, zorder=4)


def _draw_validation(axes: Axes, bins: Bins) -> tuple[float, str, str]:
    """The validation curve, its best point marked; the label for its end."""
    colour, best = COLOURS[1], int(bins.middle.argmin())
    marker = "o" if len(bins.steps) <= 40 else ""
    axes.plot(
        bins.steps,
        bins.middle,
        color=colour,
        linestyle="-",
        linewidth=1.8,
        marker=marker,
        markersize=3.5,
        zorder=5,
    )
    axes.plot(bins.steps[best], bins.middle[best], "o", color=colour, markersize=6.5, zorder=6)
    text = f"validation: {_short(bins.middle[-1])}"
    if best < len(bins.steps) - 1:
        text += f"\n(best {_short(bins.middle[best])})"
    return bins.middle[-1], text, colour


def _finish(axes: Axes, labels: list[tuple[float, str, str]], narrow: bool) -> None:
    """Set the limits and write the labels: below, or each beside its line, clear of the others."""
    axes.margins(x=0.01, y=0.06)
    axes.autoscale_view()
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if narrow:
        _list_below(axes, labels)
        return
    low, high = np.log(axes.get_ylim())
    heights = [(math.log(value) - low) / (high - low) for value, _, _ in labels]
    rows = [0.075 * (1 + text.count("\n")) for _, text, _ in labels]
    place = {"transform": axes.transAxes, "clip_on": False}
    for (_, text, colour), at, y in zip(labels, heights, spread(heights, rows), strict=True):
        axes.plot([1.003, 1.017], [at, y], color=colour, linestyle="-", linewidth=0.7, **place)
        axes.text(1.022, y, text, color=colour, va="center", linespacing=1.15, **place)


def _list_below(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """The labels in two columns under the axes, each after a dash in its colour."""
    rows = -(-len(labels) // 2)
    plot, space = 2.6, 0.62 + 0.26 * rows  # inches, of the axes and below them
    height = plot + space + 0.3
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.set_size_inches(NARROW, height)
    figure.subplots_adjust(bottom=space / height, top=(plot + space) / height)
    place = {"transform": axes.transAxes, "clip_on": False}
    for i, (_, text, colour) in enumerate(labels):
        left, y = 0.55 * (i % 2) - 0.12, -(0.66 + 0.26 * (i // 2)) / plot
        axes.plot([left, left + 0.04], [y, y], color=colour, linestyle="-", linewidth=1.4, **place)
        words = text.replace("\n(", " (").replace("\n", ", ")
        axes.text(left + 0.055, y, words, color=colour, va="center", fontsize=9, **place)


def spread(heights: Sequence[float], rows: Sequence[float]) -> list[float]:
    """Move labels apart, as little as possible, until none overlap and all lie between 0 and 1.

    `heights` is where each would be centred, `rows` how much room it takes.

    >>> [round(y, 3) for y in spread([0.50, 0.52, 0.99], [0.1, 0.1, 0.1])]
    [0.46, 0.56, 0.95]
    """
    placed = list(heights)
    groups: list[list[int]] = []
    for index in sorted(range(len(placed)), key=placed.__getitem__):
        groups.append([index])
        _stack(placed, heights, rows, groups[-1])
        while len(groups) > 1 and _touch(placed, rows, groups[-2][-1], groups[-1][0]):
            groups[-2:] = [groups[-2] + groups[-1]]
            _stack(placed, heights, rows, groups[-1])
    return placed


def _touch(placed: Sequence[float], rows: Sequence[float], below: int, above: int) -> bool:
    return placed[above] - placed[below] < (rows[above] + rows[below]) / 2 - 1e-9


def _stack(
    placed: list[float], heights: Sequence[float], rows: Sequence[float], group: list[int]
) -> None:
    """Pile a group's labels on one another, centred where they wished to be on average."""
    total = sum(rows[i] for i in group)
    wished = sum(heights[i] for i in group) / len(group) - total / 2
    bottom = max(0.0, min(wished, 1 - total))
    for i in group:
        placed[i] = bottom + rows[i] / 2
        bottom += rows[i]


def _short(value: float) -> str:
    """A number as a person says it: three digits, no exponent where that is readable.

    >>> [_short(v) for v in (0.0123, 1.0, 4.567, 28, 96.4, 12345.0)]
    ['0.0123', '1', '4.57', '28', '96.4', '12,345']
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
