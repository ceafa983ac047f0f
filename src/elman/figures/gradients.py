"""The gradient drawn: by lag, by step and unit, its directions, tokens, and what carries keep."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from numpy.typing import NDArray

from elman.diagnostics import Attribution, ByLag, CarryScore, SingularValues, Units
from elman.figures.style import COLOURS, STYLES, house, token_text

TINY = 1e-12
STRONGEST = 24
"""How many units are drawn, each with its name."""


def lags(by_lag: ByLag, window: int | None = None, *, narrow: bool = False) -> Figure:
    """‖∂L_t/∂h_{t-k}‖ by lag, and the share of it that a window of each length keeps.

    Side by side, or `narrow`: one above the other.
    """
    with house():
        # By hand: a layout that is worked out takes ten times as long as the drawing.
        if narrow:
            figure = Figure(figsize=(4.4, 6.4))
            first, second = figure.subplots(2, 1)
            figure.subplots_adjust(left=0.15, right=0.97, bottom=0.075, top=0.955, hspace=0.36)
        else:
            figure = Figure(figsize=(9.6, 3.8))
            first, second = figure.subplots(1, 2)
            figure.subplots_adjust(left=0.08, right=0.985, bottom=0.13, top=0.92, wspace=0.22)
        _by_lag(first, by_lag)
        _kept(second, by_lag, window)
    return figure


def _by_lag(axes: Axes, by_lag: ByLag) -> None:
    k = np.arange(by_lag.lags + 1)
    axes.fill_between(
        k,
        np.maximum(by_lag.quantile(0.1), TINY),
        np.maximum(by_lag.quantile(0.9), TINY),
        color=COLOURS[0],
        alpha=0.2,
        linewidth=0,
        label="eight losses in ten",
    )
    axes.plot(k, np.maximum(by_lag.mean, TINY), color=COLOURS[0], label="mean over the losses")
    axes.set(yscale="log", xlabel="lag k (steps back)", ylabel="‖∂L$_t$/∂h$_{t-k}$‖")
    axes.set_title("How far back the gradient reaches")
    least = "" if by_lag.settled else "at least "
    for part, dash in ((0.5, "--"), (0.9, ":")):
        at = by_lag.horizon(part)
        axes.axvline(at, color="black", linestyle=dash, linewidth=1)
        axes.annotate(
            f"{100 * part:.0f} % within {least}{at}",
            (at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -2 if part == 0.5 else -16),
            textcoords="offset points",
            va="top",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.82), fontsize=9)


def _kept(axes: Axes, by_lag: ByLag, window: int | None) -> None:
    last = max(2 * by_lag.lags, round(1.25 * (window or 1)))
    windows = np.unique(np.linspace(1, last, min(last, 200)).astype(int))
    axes.plot(windows, [by_lag.kept(int(w)) for w in windows], color=COLOURS[1])
    if window is not None:
        kept, most = by_lag.kept(window), "" if by_lag.settled else "at most "
        axes.plot([window], [kept], "o", color="black")
        axes.annotate(
            f"window {window} keeps {most}{100 * kept:.0f} %",
            (window, kept),
            xytext=(0, -26),
            textcoords="offset points",
            ha="right" if window > last / 2 else "left",
            va="top",
        )
    axes.set(xlabel="truncation window", ylabel="share of the gradient kept", ylim=(0, 1.04))
    axes.set_title("What a window keeps")


def units(by_unit: Units, text: Sequence[str] | None = None) -> Figure:
    """|∂L/∂S_t| by step: of the whole state above, of the units that receive most below."""
    order = np.argsort(-by_unit.gradient.sum(0))[:STRONGEST]
    with house():
        figure, (whole, each) = plt.subplots(
            2,
            1,
            figsize=(11, 6),
            layout="constrained",
            sharex=True,
            gridspec_kw={"height_ratios": (1, 4)},
        )
        steps = np.arange(len(by_unit.gradient))
        whole.bar(steps, np.linalg.norm(by_unit.gradient, axis=1), color=COLOURS[0])
        whole.set(ylabel="‖∂L/∂S$_t$‖")
        total = by_unit.gradient.shape[1]
        whole.set_title(f"The gradient that reaches all {total} units of the state, step by step")
        image = np.maximum(by_unit.gradient[:, order].T, TINY)
        high = max(float(image.max()), 10 * TINY)
        drawn = each.imshow(
            image,
            aspect="auto",
            cmap="cividis",
            interpolation="nearest",
            norm=LogNorm(max(high * 1e-4, TINY), high),
        )
        figure.colorbar(drawn, ax=each, label="|∂L/∂S$_t$| of one unit")
        for axes in (whole, each):
            axes.grid(visible=False)
        each.set_yticks(range(len(order)), [by_unit.names[i] for i in order], fontsize=8)
        held = share_of(by_unit.gradient, order)
        memory = ", c: the memory of an lstm" if any(n[0] == "c" for n in by_unit.names) else ""
        each.set_title(
            f"The {len(order)} that receive most, {held:.0%} of it together (h: output{memory})",
            fontsize=10,
        )
        each.set_xlabel("the text that was read")
        if text is not None and len(text) <= 80:
            each.set_xticks(range(len(text)), [token_text(c) for c in text], fontsize=8)
    plt.close(figure)
    return figure


def share_of(gradient: NDArray[np.float64], chosen: NDArray[np.intp]) -> float:
    """What part of Σ|∂L/∂S_t| the chosen units receive."""
    return float(gradient[:, chosen].sum() / max(gradient.sum(), TINY))


def directions(singular: SingularValues) -> Figure:
    """Singular values of ∂h_{t+k}/∂h_t: how many directions survive k steps."""
    with house():
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for k, values, colour, dash in zip(
            singular.lags, singular.values, _cycle(COLOURS), _cycle(STYLES), strict=False
        ):
            rank = np.arange(1, len(values) + 1)
            axes.plot(
                rank, np.maximum(values, TINY), color=colour, linestyle=dash, label=f"k = {k}"
            )
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set(yscale="log", xlabel="direction", ylabel="singular value of ∂h$_{t+k}$/∂h$_t$")
        axes.set_ylim(
            bottom=max(TINY, float(singular.values[singular.values > TINY].min(initial=1)))
        )
        axes.set_title("Directions that survive k steps")
        axes.legend(ncols=2, fontsize=8)
    plt.close(figure)
    return figure


def attribution(shares: Attribution, past: Sequence[str], target: str) -> Figure:
    """The past tokens, coloured by what each did for the prediction of the next one."""
    rows = {"exact, left out": shares.left_out, "gradient × input": shares.gradient}
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
                axes.text(s, row, token_text(token), ha="center", va="center", color=ink)
        axes.grid(visible=False)
        axes.set_yticks(range(2), list(rows))
        axes.set_xticks([])
        probability = np.exp(shares.log_probability)
        axes.set_title(
            f"Why '{token_text(target)}' next? P = {probability:.3f}; strongest {limit:.2g} nats"
        )
        figure.colorbar(drawn, ax=axes, ticks=[-1, 0, 1]).ax.set_yticklabels(
            ["against", "0", "for"]
        )
    plt.close(figure)
    return figure


def carries(
    scores: Sequence[CarryScore],
    text: Sequence[str],
    title: str = "What each carry lets the gradient cross",
) -> Figure:
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
                axes.text(t + 0.5, row, token_text(token), ha="center", va="center", fontsize=8)
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
        axes.set_title(title)
        axes.set_xlabel(
            "a bar is text that the gradient crosses, a gap cuts it; cos: of the angle to the full "
            "gradient, bias: ‖mean - full‖ / ‖full‖, noise: the spread over draws",
            fontsize=8,
        )
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    plt.close(figure)
    return figure


def _cycle(values: Sequence) -> list:
    return list(values) * 4
