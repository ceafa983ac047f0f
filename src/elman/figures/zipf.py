"""Zipf's law: how often against rank, on log–log paper."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from elman.counting.statistics import Frequencies, Zipf
from elman.figures.style import COLOURS, STYLES, house

NAMES = {1: "single {}s", 2: "pairs", 3: "triples"}
POINTS = 400
"""Ranks drawn per curve, evenly spaced on the logarithmic axis."""


def zipf(curves: Sequence[tuple[Frequencies, Zipf | None]], token: str = "token") -> Figure:
    """One curve for each n, and the line fitted to it, from the first to the last rank it fits."""
    with house():
        figure = Figure(figsize=(6.4, 4.2))
        axes = figure.subplots()
        for i, (frequencies, _) in enumerate(curves):
            _curve(axes, frequencies, i)
        fits = [fit for _, fit in curves if fit is not None]
        for i, fit in enumerate(fits):
            _line(axes, fit, "fitted between the bars" if i == 0 else "_nolegend_")
        axes.set(xscale="log", yscale="log", xlabel="rank", ylabel="occurrences")
        axes.set_title("Zipf's law: occurrences ∝ 1 / rank$^α$")
        _name(axes, curves, token)
    return figure


def _curve(axes: Axes, frequencies: Frequencies, i: int) -> None:
    ranks = np.logspace(0, np.log10(frequencies.types), POINTS).round().astype(int)
    ranks = np.unique(ranks.clip(1, frequencies.types))
    colour, style = COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]
    axes.plot(ranks, frequencies.counts[ranks - 1], color=colour, linestyle=style, linewidth=1.8)


def _line(axes: Axes, fit: Zipf, label: str) -> None:
    ends = np.array([fit.first, fit.last])
    axes.plot(
        ends, fit.expected(ends), "|-", color="black", linewidth=0.9, markersize=9, label=label
    )


def _name(axes: Axes, curves: Sequence[tuple[Frequencies, Zipf | None]], token: str) -> None:
    for line, (frequencies, fit) in zip(axes.lines, curves, strict=False):
        name = NAMES.get(frequencies.n, f"runs of {frequencies.n}").format(token)
        line.set_label(name if fit is None else f"{name}, α = {fit.alpha:.2f}")
    axes.legend()
