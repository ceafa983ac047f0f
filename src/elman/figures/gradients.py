"""The gradient drawn: by lag, by step and unit, its directions, tokens, and what carries keep."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from elman.diagnostics import Attribution, ByLag, CarryScore, SingularValues, Units
from elman.figures.style import COLOURS, STYLES, house

TINY = 1e-12


def lags(found: ByLag, window: int | None = None) -> Figure:
    """‖∂L_t/∂h_{t-k}‖ by lag, and the share of it that a window of each length keeps."""
    with house():
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        k = np.arange(found.norms.shape[1])
        left.fill_between(
            k,
            np.maximum(found.quantile(0.1), TINY),
            np.maximum(found.quantile(0.9), TINY),
            color=COLOURS[0],
            alpha=0.2,
            linewidth=0,
            label="from the 10th to the 90th in a hundred losses",
        )
        left.plot(k, np.maximum(found.mean, TINY), color=COLOURS[0], label="mean")
        left.set(yscale="log", xlabel="lag k (steps back)", ylabel="‖∂L$_t$/∂h$_{t-k}$‖")
        left.set_title("How far back the gradient reaches")
        for part, dash in ((0.5, "--"), (0.9, ":")):
            at = found.horizon(part)
            left.axvline(at, color="black", linestyle=dash, linewidth=1)
            left.annotate(
                f"{part:.0%} within {at}",
                (at, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -2 if part == 0.5 else -14),
                textcoords="offset points",
                fontsize=8,
                va="top",
            )
        left.legend(loc="lower left", fontsize=8)
        _kept(right, found, window)
    plt.close(figure)
    return figure


def _kept(axes: Axes, found: ByLag, window: int | None) -> None:
    windows = np.arange(1, 2 * found.norms.shape[1])
    axes.plot(windows, [found.kept(int(w)) for w in windows], color=COLOURS[1])
    if window is not None:
        kept = found.kept(window)
        axes.plot([window], [kept], "o", color="black")
        axes.annotate(
            f"window {window} keeps {kept:.0%}",
            (window, kept),
            xytext=(8, -12),
            textcoords="offset points",
        )
    axes.set(xlabel="truncation window", ylabel="share of the gradient kept", ylim=(0, 1.02))
    axes.set_title("What a window keeps")


def units(found: Units, text: Sequence[str] | None = None) -> Figure:
    """Heat map of |∂L/∂h_t|: steps across, units down, sorted by how much they receive."""
    with house():
        figure, axes = plt.subplots(figsize=(11, 4.5), layout="constrained")
        order = np.argsort(-found.gradient.sum(0))
        image = np.maximum(found.gradient[:, order].T, TINY)
        high = max(float(image.max()), 10 * TINY)
        drawn = axes.imshow(
            image,
            aspect="auto",
            cmap="cividis",
            interpolation="nearest",
            norm=LogNorm(max(high * 1e-4, TINY), high),
        )
        figure.colorbar(drawn, ax=axes, label="|∂L/∂h$_t$|")
        axes.grid(visible=False)
        axes.set(
            xlabel="step", ylabel="unit, strongest first", title="The gradient by step and unit"
        )
        if text is not None and len(text) <= 80:
            axes.set_xticks(range(len(text)), [_visible(c) for c in text], fontsize=8)
    plt.close(figure)
    return figure


def directions(found: SingularValues) -> Figure:
    """Singular values of ∂h_{t+k}/∂h_t: how many directions survive k steps."""
    with house():
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for k, values, colour, dash in zip(
            found.lags, found.values, _cycle(COLOURS), _cycle(STYLES), strict=False
        ):
            rank = np.arange(1, len(values) + 1)
            axes.plot(
                rank, np.maximum(values, TINY), color=colour, linestyle=dash, label=f"k = {k}"
            )
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set(yscale="log", xlabel="direction", ylabel="singular value of ∂h$_{t+k}$/∂h$_t$")
        axes.set_ylim(bottom=max(TINY, float(found.values[found.values > TINY].min(initial=1))))
        axes.set_title("Directions that survive k steps")
        axes.legend(ncols=2, fontsize=8)
    plt.close(figure)
    return figure


def attribution(found: Attribution, past: Sequence[str], target: str) -> Figure:
    """The past tokens, coloured by what each did for the prediction of the next one."""
    rows = {"exact, left out": found.left_out, "gradient × input": found.gradient}
    with house():
        width = max(7.0, 0.28 * len(past) + 2)
        figure, axes = plt.subplots(figsize=(width, 2.2), layout="constrained")
        values = np.stack(list(rows.values()))
        limit = max(float(np.abs(values).max()), TINY)
        relative = values / np.maximum(np.abs(values).max(1, keepdims=True), TINY)
        drawn = axes.imshow(
            relative,
            cmap="PuOr",
            norm=TwoSlopeNorm(0, -1, 1),
            aspect="auto",
        )
        for row in range(2):
            for s, token in enumerate(past):
                ink = "white" if abs(relative[row, s]) > 0.6 else "black"
                axes.text(s, row, _visible(token), ha="center", va="center", color=ink)
        axes.grid(visible=False)
        axes.set_yticks(range(2), list(rows))
        axes.set_xticks([])
        probability = np.exp(found.log_probability)
        axes.set_title(
            f"Why {_visible(target)!r} next? P = {probability:.3f}; strongest {limit:.2g} nats"
        )
        figure.colorbar(drawn, ax=axes, ticks=[-1, 0, 1]).ax.set_yticklabels(
            ["against", "0", "for"]
        )
    plt.close(figure)
    return figure


def carries(scores: Sequence[CarryScore], text: Sequence[str]) -> Figure:
    """The notes' figure of truncation strategies over real text, with what each costs and misses.

    One row a carry: a bar is a stretch of text that the gradient crosses; it stops at the gaps.
    """
    with house():
        figure, axes = plt.subplots(figsize=(12, 0.55 * len(scores) + 1.4), layout="constrained")
        steps = len(text)
        for row, score in enumerate(scores):
            for start, stop in score.carry.stretches(steps):
                box = FancyBboxPatch(
                    (start + 0.08, row - 0.32),
                    stop - start - 0.16,
                    0.64,
                    boxstyle="round,pad=0,rounding_size=0.2",
                    facecolor=COLOURS[row % len(COLOURS)],
                    alpha=0.25,
                    edgecolor="black",
                    linewidth=0.6,
                )
                axes.add_patch(box)
            for t, token in enumerate(text):
                axes.text(t + 0.5, row, _visible(token), ha="center", va="center", fontsize=8)
            axes.text(
                steps + 0.6,
                row,
                f"cos {score.cosine:.3f}   bias {score.bias:.2f}   noise {score.deviation:.2f}",
                va="center",
                fontsize=8,
                family="monospace",
            )
        axes.set_yticks(range(len(scores)), [s.name for s in scores], fontsize=8)
        axes.set(xlim=(0, steps + 0.45 * steps), ylim=(len(scores) - 0.4, -0.6), xticks=[])
        axes.set_title("What each carry lets the gradient cross")
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    plt.close(figure)
    return figure


def _visible(token: str) -> str:
    return {" ": "␣", "\n": "↵", "\t": "⇥"}.get(token, token)


def _cycle(values: Sequence) -> list:
    return list(values) * 4
