"""The notes' computational graph of section 8.7.2: what is computed from what.

    h_t = W_hx x_t + W_hh h_{t-1}
    o_t = W_qh h_t
    L = 1/T Σ_t l(o_t, y_t)

Plain boxes are variables, shaded boxes parameters, circles operations. `figures.diagrams.graph`
draws the same network with the gradient of a trained model on every edge.
"""

import math
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from elman.errors import UserError
from elman.figures.style import house

WIDTH = 3.2
"""From one time step to the next."""

ROWS = {"x": 0.0, "W_hx": 1.1, "W_hh": 1.9, "h": 3.0, "W_qh": 4.1, "o": 5.2, "l": 6.3, "L": 7.4}
"""The height of each kind of node; a parameter's line runs at its own height under all steps."""

SHADE = "#b5b5b5"


class Edge(NamedTuple):
    """An arrow: what is read, and the operation or variable that reads it."""

    source: str
    target: str


def edges(steps: int) -> list[Edge]:
    """The graph: variables and parameters by name, operations as "+1" (state), "·1" and "l1".

    >>> [e.source for e in edges(3) if e.target == "+3"]
    ['x3', 'h2', 'W_hx', 'W_hh']
    """
    found = []
    for t in range(1, steps + 1):
        found += [Edge(source, f"+{t}") for source in (f"x{t}", f"h{t - 1}", "W_hx", "W_hh")]
        found += [Edge(f"+{t}", f"h{t}"), Edge(f"h{t}", f"·{t}"), Edge("W_qh", f"·{t}")]
        found += [Edge(f"·{t}", f"o{t}"), Edge(f"o{t}", f"l{t}"), Edge(f"y{t}", f"l{t}")]
        found.append(Edge(f"l{t}", "L"))
    return found


def computational_graph(steps: int = 3) -> Figure:
    """Draw it: h₀ first, every parameter into every step, labels y_t beside the losses."""
    if not 1 <= steps <= 8:
        raise UserError(f"steps={steps} cannot be drawn legibly", hint="from 1 to 8; the notes: 3")
    with house():
        figure, axes = plt.subplots(figsize=(2.6 * steps + 2, 6.6), layout="constrained")
        axes.set(xlim=(-1.6, WIDTH * steps + 1.9), ylim=(-0.6, 8.0), xticks=[], yticks=[])
        axes.set_aspect("equal")
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        places = _places(steps)
        for edge in edges(steps):
            _arrow(axes, edge, places)
        for name, (x, y) in places.items():
            _node(axes, name, x, y)
        axes.set_title("Boxes: variables; shaded: parameters; circles: operations")
    plt.close(figure)
    return figure


def _places(steps: int) -> dict[str, tuple[float, float]]:
    places = {"h0": (0.0, ROWS["h"]), "L": (WIDTH * (steps + 1) / 2, ROWS["L"])}
    places |= {name: (-0.9, ROWS[name]) for name in ("W_hx", "W_hh", "W_qh")}
    for t in range(1, steps + 1):
        x = WIDTH * t
        places |= {
            f"x{t}": (x - 1.5, ROWS["x"]),
            f"+{t}": (x - 1.5, ROWS["h"]),
            f"h{t}": (x, ROWS["h"]),
            f"·{t}": (x, ROWS["W_qh"]),
            f"o{t}": (x, ROWS["o"]),
            f"l{t}": (x, ROWS["l"]),
            f"y{t}": (x + 1.15, ROWS["o"]),
        }
    return places


def _node(axes: Axes, name: str, x: float, y: float) -> None:
    if name[0] in "+·l":
        axes.add_patch(Circle((x, y), 0.26, facecolor="white", edgecolor="black", zorder=3))
        axes.text(
            x, y, {"+": "+", "·": "×", "l": "$l$"}[name[0]], ha="center", va="center", zorder=4
        )
        return
    box = FancyBboxPatch(
        (x - 0.36, y - 0.28), 0.72, 0.56, boxstyle="round,pad=0.03",
        facecolor=SHADE if name.startswith("W") else "white", edgecolor="black", zorder=3,
    )  # fmt: skip
    axes.add_patch(box)
    axes.text(x, y, label(name), ha="center", va="center", zorder=4)


def label(name: str) -> str:
    """A node's name as it is drawn.

    >>> label("h0"), label("W_hx"), label("L")
    ('h$_{0}$', 'W$_{hx}$', 'L')
    """
    if name.startswith("W"):
        return f"W$_{{{name[2:]}}}$"
    return name if len(name) == 1 else f"{name[0]}$_{{{name[1:]}}}$"


def _arrow(axes: Axes, edge: Edge, places: dict[str, tuple[float, float]]) -> None:
    """A straight arrow; from a parameter a line at its height, then an arrow into the circle."""
    (x, y), (to_x, to_y) = places[edge.source], places[edge.target]
    if edge.source.startswith("W"):
        x_bend = to_x + {"W_hx": -0.55, "W_hh": 0.45, "W_qh": -0.6}[edge.source]
        axes.plot([x, x_bend], [y, y], color="#777777", linestyle="-", linewidth=1, zorder=1)
        x = x_bend
    across, up = to_x - x, to_y - y
    width, height = (0.27, 0.27) if edge.target[0] in "+·l" else (0.4, 0.32)
    length = math.hypot(across, up)
    inside = min(width * length / max(abs(across), 1e-9), height * length / max(abs(up), 1e-9))
    inside = width if edge.target[0] in "+·l" else inside  # a circle is as deep from every side
    end = (to_x - across * inside / length, to_y - up * inside / length)
    arrow = FancyArrowPatch(
        (x, y), end, arrowstyle="-|>", mutation_scale=10, linewidth=1, color="black",
        shrinkA=0, shrinkB=0, zorder=2,
    )  # fmt: skip
    axes.add_patch(arrow)
