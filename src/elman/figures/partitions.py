"""The ways to cut a text into windows: the notes' figure of section 8.3.3."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from elman.errors import UserError
from elman.figures.style import COLOURS, house, token_text


def windows(text: str, window: int, offset: int) -> list[str]:
    """The windows of a text that begin at `offset`, each of `window` characters; the rest is left.

    >>> windows("the time", 3, 1)
    ['he ', 'tim']
    """
    last = len(text) - window
    return [text[start : start + window] for start in range(offset, last + 1, window)]


def offsets(text: str, window: int = 5) -> Figure:
    """One row for every offset from 0 to window - 1: the same text, cut at other places.

    Characters that no window of a row holds stand outside its boxes: an offset alone never shows a
    model what they are followed by.
    """
    if window < 1 or len(text) < 2 * window:
        raise UserError(
            f"a text of {len(text)} characters has no two windows of {window}",
            hint="a longer text, or a smaller window",
        )
    with house():
        size = (0.24 * len(text) + 1.6, 0.42 * window + 0.8)
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        for offset in range(window):
            _row(axes, text, window, offset)
        axes.set(
            xlim=(-0.2, len(text) + 0.2),
            ylim=(window - 0.3, -0.9),
            xticks=[],
            yticks=range(window),
            yticklabels=[f"offset {offset}" for offset in range(window)],
            title=f"Every way to cut the text into windows of {window}",
        )
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    plt.close(figure)
    return figure


def _row(axes: Axes, text: str, window: int, offset: int) -> None:
    for at, character in enumerate(text):
        axes.text(at + 0.5, offset, token_text(character), ha="center", va="center", fontsize=9)
    for number in range(len(windows(text, window, offset))):
        axes.add_patch(
            Rectangle(
                (offset + number * window + 0.04, offset - 0.36),
                window - 0.08,
                0.72,
                facecolor=COLOURS[4] if number % 2 else "white",
                alpha=0.35,
                edgecolor="black",
            )
        )
