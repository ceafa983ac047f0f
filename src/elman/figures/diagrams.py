"""The notes' diagrams, drawn from a real model: its shapes, its predictions, its gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from torch.func import functional_call
from torch.nn import functional as F

from elman.errors import UserError
from elman.figures.style import COLOURS, house
from elman.language_model import LanguageModel, Masks

NONE = Masks(None, None, {})


def unrolled(model: LanguageModel, batch: int = 32) -> Figure:
    """The network over three steps, with the shape of everything that flows (8.4.2)."""
    if not model.recurrent:
        raise UserError("an mlp has no hidden state to unroll", hint="a run of --model gru")
    V, H, L = model.vocab_size, model.hidden_size, model.shape.layers
    with house():
        figure, axes = _canvas(11, 4.8, (-1.3, 9.4), (-0.6, 4.4))
        names = ["t-1", "t", "t+1"]
        for i, name in enumerate(names):
            x = 1 + 3 * i
            _box(axes, x, 0, f"x$_{{{name}}}$\n{batch} × {V}", "white")
            _box(axes, x, 2, f"h$_{{{name}}}$\n{L} × {batch} × {H}", COLOURS[4])
            _box(axes, x, 4, f"o$_{{{name}}}$\n{batch} × {V}", "white")
            _arrow(axes, (x, 0.42), (x, 1.58), "W$_{xh}$")
            _arrow(axes, (x, 2.42), (x, 3.58), "W$_{hq}$")
            _arrow(axes, (x - 2.1, 2), (x - 0.9, 2), "W$_{hh}$", above=True)
        _arrow(axes, (7.9, 2), (9.1, 2), "")
        axes.set_title(
            f"{model.cell}: the same W$_{{xh}}$, W$_{{hh}}$, W$_{{hq}}$ at every step "
            f"({sum(p.numel() for p in model.parameters()):,} parameters)"
        )
    plt.close(figure)
    return figure


@torch.no_grad()
def character_model(
    model: LanguageModel, ids: Sequence[int], tokens: Sequence[Any], top: int = 3
) -> Figure:
    """Input, prediction and target at every step of a short text ("machine" in the notes).

    `tokens` names every id of the vocabulary. Under each step: its likeliest next tokens.
    """
    text = torch.as_tensor(ids, dtype=torch.int64)
    logits, _ = model.eval()(text[None, :-1])
    odds = torch.softmax(logits[0], -1)
    with house():
        steps = len(text) - 1
        figure, axes = _canvas(1.6 * steps + 1.5, 4.6, (-1.4, 1.6 * steps), (-0.7, 4.6))
        for t in range(steps):
            x = 1.6 * t
            target = int(text[t + 1])
            _box(axes, x, 0, _shown(tokens[int(text[t])]), "white", 0.55)
            _box(axes, x, 1.4, f"h$_{t + 1}$", COLOURS[4], 0.55)
            _box(axes, x, 4.2, _shown(tokens[target]), "#eeeeee", 0.55)
            for i, v in enumerate(odds[t].topk(min(top, odds.shape[1])).indices.tolist()):
                right = v == target
                axes.text(
                    x,
                    3.35 - 0.36 * i,
                    f"{_shown(tokens[v])} {odds[t, v]:.2f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    weight="bold" if right else "normal",
                    color=COLOURS[2] if right else "black",
                )
            _arrow(axes, (x, 0.35), (x, 1.05), "")
            _arrow(axes, (x, 1.75), (x, 2.35), "")
            if t:
                _arrow(axes, (x - 1.01, 1.4), (x - 0.59, 1.4), "")
        for y, label in ((0, "input"), (1.4, "state"), (3, "predicted"), (4.2, "target")):
            axes.text(-1.35, y, label, va="center", fontsize=9, color="#555555")
        nats = F.cross_entropy(logits[0], text[1:]).item()
        axes.set_title(f"Predicting the next character: {nats:.2f} nats per character")
    plt.close(figure)
    return figure


@dataclass(frozen=True)
class GraphGradients:
    """‖∂L/∂·‖ along every edge of the computational graph of 8.7.2, step by step."""

    loss_to_output: list[float]
    output_to_state: list[float]
    state_to_state: list[float]
    """from h_{t+1} back to h_t; one fewer than the steps"""
    weights: dict[str, list[float]]
    """each step's own share, ∂L/∂W^(t), by parameter name"""


def graph_gradients(model: LanguageModel, ids: Sequence[int]) -> GraphGradients:
    """Give every step its own copy of the weights, W^(t), and ask autograd for each edge."""
    text = torch.as_tensor(ids, dtype=torch.int64)
    recurrence: Any = model.recurrence
    names = ("weight_ih_l0", "weight_hh_l0")
    steps = len(text) - 1
    copies = [
        {n: recurrence.get_parameter(n).detach().clone().requires_grad_() for n in names}
        for _ in range(steps)
    ]
    W_hq = [model.output_weight.detach().clone().requires_grad_() for _ in range(steps)]
    xs = model.inputs(text[:-1, None], NONE)
    before, outs, reads, state = [], [], [], None
    for t in range(steps):
        if state is not None:  # one copy of h_{t} for the next step, one for the output
            state = (
                state.clone() if isinstance(state, torch.Tensor) else (state[0].clone(), state[1])
            )
            before.append(state if isinstance(state, torch.Tensor) else state[0])
        hs, state = functional_call(recurrence, copies[t], (xs[t : t + 1], state))
        reads.append(hs.clone())
        outs.append(F.linear(reads[-1], W_hq[t], model.bias_q))
    loss = F.cross_entropy(torch.cat(outs)[:, 0], text[1:])
    weights = [copies[t][n] for n in names for t in range(steps)]
    found = torch.autograd.grad(loss, [*outs, *reads, *before, *weights, *W_hq])
    norms = [float(g.norm()) for g in found]
    rest = 3 * steps - 1
    named = {n: norms[rest + i * steps : rest + (i + 1) * steps] for i, n in enumerate(names)}
    return GraphGradients(
        loss_to_output=norms[:steps],
        output_to_state=norms[steps : 2 * steps],
        state_to_state=norms[2 * steps : rest],
        weights={**named, "weight_hq": norms[rest + 2 * steps :]},
    )


def graph(model: LanguageModel, ids: Sequence[int]) -> Figure:
    """The computational graph of 8.7.2: parameters shaded, the gradient's norm on every edge."""
    if not model.recurrent or model.shape.layers > 1:
        raise UserError(
            "the graph of 8.7.2 has one recurrent layer",
            hint="a run of --model gru --layers 1",
        )
    found, steps = graph_gradients(model, ids), len(ids) - 1
    with house():
        figure, axes = _canvas(3.6 * steps + 2, 6.4, (-1.2, 3.4 * steps), (-1.0, 6.4))
        last = 3.4 * (steps - 1)
        for t in range(steps):
            x = 3.4 * t
            _box(axes, x, 0, f"x$_{t + 1}$", "white", 0.5)
            _box(axes, x, 2, f"h$_{t + 1}$", COLOURS[4], 0.5)
            _box(axes, x, 4, f"o$_{t + 1}$", "white", 0.5)
            _arrow(axes, (x, 0.35), (x, 1.65), "")
            _arrow(axes, (x, 2.35), (x, 3.65), _number(found.output_to_state[t]))
            _arrow(axes, (x, 4.35), (last / 2, 5.65), _number(found.loss_to_output[t]))
            for y, name, share in (
                (0.9, "W$_{hx}$", "weight_ih_l0"),
                (2.9, "W$_{qh}$", "weight_hq"),
            ):
                _box(axes, x + 1.3, y, name, "#bbbbbb", 0.5)
                _arrow(
                    axes, (x + 0.85, y + 0.2), (x + 0.3, y + 0.9), _number(found.weights[share][t])
                )
            if t:
                _arrow(
                    axes,
                    (x - 2.86, 2),
                    (x - 0.54, 2),
                    _number(found.state_to_state[t - 1]),
                    above=True,
                )
                _box(axes, x - 0.9, 3.15, "W$_{hh}$", "#bbbbbb", 0.5)
                share = found.weights["weight_hh_l0"][t]
                _arrow(axes, (x - 0.75, 2.85), (x - 0.3, 2.3), _number(share), above=True)
        _box(axes, last / 2, 6, "L", COLOURS[5], 0.5)
        axes.set_title(
            "Computational graph; numbers are gradient norms flowing back along the edge"
        )
    plt.close(figure)
    return figure


def _canvas(
    width: float, height: float, xs: tuple[float, float], ys: tuple[float, float]
) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.set(xlim=xs, ylim=ys, xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return figure, axes


def _box(axes: Axes, x: float, y: float, label: str, colour: str, half: float = 0.85) -> None:
    box = FancyBboxPatch(
        (x - half, y - 0.32),
        2 * half,
        0.64,
        boxstyle="round,pad=0.03",
        facecolor=colour,
        edgecolor="black",
    )
    axes.add_patch(box)
    axes.text(x, y, label, ha="center", va="center", fontsize=9)


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    label: str,
    *,
    above: bool = False,
) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color="black"))
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    offset, place = ((0, 5), "center") if above else ((4, 0), "left")
    axes.annotate(
        label,
        middle,
        xytext=offset,
        textcoords="offset points",
        fontsize=8,
        ha=place,
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5} if label else None,
    )


def _shown(token: Any) -> str:
    return {" ": "␣", "\n": "↵", "\t": "⇥"}.get(str(token), str(token)).replace("$", r"\$")


def _number(value: float) -> str:
    return f"{value:.2g}"
