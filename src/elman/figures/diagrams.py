"""The notes' diagrams, drawn from a real model: its shapes, its predictions, its gradients."""

import itertools
import textwrap
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

from elman import cells
from elman.errors import UserError
from elman.figures.style import COLOURS, house, token_text
from elman.language_model import LanguageModel
from elman.language_model.masks import NO_MASKS

NONE = NO_MASKS


def unrolled(model: LanguageModel, batch: int = 32) -> Figure:
    """The network over three steps, with the shape of everything that flows (8.4.2).

    A gated cell shows its gates, an lstm its memory c, an embedded model its embedding e.
    """
    if not model.recurrent:
        raise UserError("an mlp has no hidden state to unroll", hint="a run of --model gru")
    cell = cells.of_model(model.cell)
    V, H, L, E = model.vocab_size, model.hidden_size, model.shape.layers, model.shape.embedding_size
    flows = {"x": f"{batch} × {V}"}
    if E:
        flows["e"] = f"{batch} × {E}"
    if cell.gates > 1:
        flows["gates"] = "gates " + ", ".join(gate for gate in cell.openings if gate)
    flows |= dict.fromkeys(reversed(cell.states), f"{L} × {batch} × {H}")
    flows["o"] = f"{batch} × {V}"
    at = {name: 1.5 * row for row, name in enumerate(flows)}
    with house():
        figure, axes = _canvas(11, 1.2 * len(flows) + 1, (-1.4, 9.5), (-0.6, at["o"] + 0.6))
        for i, when in enumerate(("t-1", "t", "t+1")):
            _column(axes, 1 + 3 * i, when, flows, at)
        words = ["W$_{xh}$", "W$_{hh}$", "W$_{hq}$"]
        if "e" in flows:
            words.insert(0, "W$_{xe}$")
        axes.set_title(
            f"{model.cell}: the same {', '.join(words)} at every step "
            f"({sum(p.numel() for p in model.parameters()):,} parameters)"
        )
    plt.close(figure)
    return figure


def _column(axes: Axes, x: float, when: str, flows: dict[str, str], at: dict[str, float]) -> None:
    """One step of the unrolled network, and what reaches it from the step before."""
    for name, shape in flows.items():
        label = f"{name}$_{{{when}}}$\n{shape}"
        if name == "gates":
            label = textwrap.fill(shape, 16)
        colour = {"h": COLOURS[4], "c": COLOURS[5], "gates": "#eeeeee"}.get(name, "white")
        _box(axes, x, at[name], label, colour)
    reads = "gates" if "gates" in flows else "h"
    for below, above in itertools.pairwise(flows):
        label = {"e": "W$_{xe}$", reads: "W$_{xh}$", "o": "W$_{hq}$"}.get(above, "")
        _arrow(axes, (x, at[below] + 0.37), (x, at[above] - 0.37), label)
    kept = "c" if "c" in flows else "h"  # what goes straight on; an lstm's h goes to the gates
    label = "" if reads == "gates" else "W$_{hh}$"
    _arrow(axes, (x - 2.1, at[kept]), (x - 0.9, at[kept]), label, above=True)
    if when == "t+1":
        for name in dict.fromkeys((kept, "h")):
            _arrow(axes, (x + 0.9, at[name]), (x + 2.1, at[name]), "")
    if reads == "gates":
        _arrow(axes, (x - 2.1, at["h"] - 0.1), (x - 0.9, at["gates"]), "W$_{hh}$", along=0.7)


def latent_autoregressive() -> Figure:
    """The latent autoregressive model of 8.1: a summary of the past, and what it predicts.

    h_t = g(h_{t-1}, x_{t-1})
    x̂_t is read from P(x_t | h_t)
    """
    with house():
        figure, axes = _canvas(8, 3.6, (-1.6, 9.5), (-0.6, 3.6))
        for i, when in enumerate(("t-1", "t", "t+1")):
            x = 1 + 3 * i
            _box(axes, x, 0, f"x$_{{{when}}}$", "white")
            _box(axes, x, 1.5, f"h$_{{{when}}}$", COLOURS[4])
            _box(axes, x, 3, rf"$\hat{{x}}$$_{{{when}}}$", "white")
            _arrow(axes, (x, 1.87), (x, 2.63), "")
            _arrow(axes, (x - 2.1, 1.5), (x - 0.9, 1.5), "")
            _arrow(axes, (x - 2.1, 0.3), (x - 0.9, 1.3), "")
        _arrow(axes, (7.9, 1.5), (9.1, 1.5), "")
        _arrow(axes, (7.9, 0.3), (9.1, 1.3), "")
        axes.set_title("A summary h of everything before, and what it predicts")
    plt.close(figure)
    return figure


@torch.no_grad()
def character_model(
    model: LanguageModel, ids: Sequence[int], tokens: Sequence[Any], top: int = 3
) -> Figure:
    """Input, prediction and target at every step of a short text ("machine" in the notes).

    `tokens` names every id of the vocabulary. Under each step: its likeliest next tokens.
    """
    text = torch.as_tensor(ids, dtype=torch.int64, device="cpu")
    logits, _ = model.eval()(text[None, :-1])
    odds = torch.softmax(logits[0], -1)
    with house():
        steps = len(text) - 1
        figure, axes = _canvas(1.6 * steps + 1.5, 4.6, (-1.4, 1.6 * steps), (-0.7, 4.6))
        for t in range(steps):
            x = 1.6 * t
            target = int(text[t + 1])
            _box(axes, x, 0, token_text(tokens[int(text[t])]), "white", 0.55)
            _box(axes, x, 1.4, f"h$_{t + 1}$", COLOURS[4], 0.55)
            _box(axes, x, 4.2, token_text(tokens[target]), "#eeeeee", 0.55)
            for i, v in enumerate(odds[t].topk(min(top, odds.shape[1])).indices.tolist()):
                right = v == target
                axes.text(
                    x,
                    3.35 - 0.36 * i,
                    f"{token_text(tokens[v])} {odds[t, v]:.2f}",
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
    memory_to_memory: list[float]
    """from c_{t+1} back to c_t, of an lstm"""
    state_to_embedding: list[float]
    """from h_t back to e_t, where tokens are embedded"""
    weights: dict[str, list[float]]
    """each step's own share, ∂L/∂W^(t), by parameter name"""


def graph_gradients(model: LanguageModel, ids: Sequence[int]) -> GraphGradients:
    """Give every step its own copy of the weights, W^(t), and ask autograd for each edge."""
    text = torch.as_tensor(ids, dtype=torch.int64, device="cpu")
    recurrence: Any = model.recurrence
    names = ("weight_ih_l0", "weight_hh_l0")
    steps = len(text) - 1
    copies = [
        {n: recurrence.get_parameter(n).detach().clone().requires_grad_() for n in names}
        for _ in range(steps)
    ]
    W_hq = [model.output_weight.detach().clone().requires_grad_() for _ in range(steps)]
    xs = model.inputs(text[:-1, None], NONE).detach()
    embedded = [x[None].requires_grad_() for x in xs] if xs.is_floating_point() else []
    befores: list[tuple[torch.Tensor, ...]] = []
    outs, reads, state = [], [], None
    for t in range(steps):
        if state is not None:  # one copy of h_t and c_t for the next step, one for the output
            befores.append(tuple(s.clone() for s in _parts(state)))
            state = befores[-1] if isinstance(state, tuple) else befores[-1][0]
        x = embedded[t] if embedded else xs[t : t + 1]
        hs, state = functional_call(recurrence, copies[t], (x, state))
        reads.append(hs.clone())
        outs.append(F.linear(reads[-1], W_hq[t], model.bias_q))
    loss = F.cross_entropy(torch.cat(outs)[:, 0], text[1:])
    edges = {
        "outs": outs,
        "reads": reads,
        "h": [before[0] for before in befores],
        "c": [before[1] for before in befores if len(before) > 1],
        "e": embedded,
        **{n: [copy[n] for copy in copies] for n in names},
        "weight_hq": W_hq,
    }
    pulls = iter(torch.autograd.grad(loss, [edge for group in edges.values() for edge in group]))
    norms = {name: [float(next(pulls).norm()) for _ in group] for name, group in edges.items()}
    return GraphGradients(
        loss_to_output=norms["outs"],
        output_to_state=norms["reads"],
        state_to_state=norms["h"],
        memory_to_memory=norms["c"],
        state_to_embedding=norms["e"],
        weights={n: norms[n] for n in (*names, "weight_hq")},
    )


def _parts(state: Any) -> tuple[torch.Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def graph(model: LanguageModel, ids: Sequence[int]) -> Figure:
    """The computational graph of 8.7.2: parameters shaded, the gradient's norm on every edge.

    The loss is averaged over T steps, L = 1/T Σ_t l_t, so that ∂L/∂l_t = 1/T on the first edges.
    """
    if not model.recurrent or model.shape.layers > 1:
        raise UserError(
            "the graph of 8.7.2 has one recurrent layer",
            hint="a run of --model gru --layers 1",
        )
    norms, steps = graph_gradients(model, ids), len(ids) - 1
    cell = cells.of_model(model.cell)
    rows = ["x", *("e" if norms.state_to_embedding else ""), *cell.states[1:]]
    at = {name: 2.0 * row for row, name in enumerate([*rows, "h", "o", "l", "L"])}
    with house():
        size = (3.6 * steps + 2, 1.05 * at["L"] + 1)
        figure, axes = _canvas(*size, (-1.2, 3.4 * steps), (-0.6, at["L"] + 0.6))
        for t in range(steps):
            _graph_step(axes, norms, t, at, 3.4 * (steps - 1) / 2)
        _box(axes, 3.4 * (steps - 1) / 2, at["L"], "L", COLOURS[5], 0.5)
        gates = ", ".join(gate for gate in cell.openings if gate)
        axes.set_title(
            "Computational graph: gradient norms flowing back along the edges"
            + (f" (in W$_{{xh}}$ and W$_{{hh}}$ the gates {gates})" if gates else "")
        )
    plt.close(figure)
    return figure


def _graph_step(
    axes: Axes, norms: GraphGradients, t: int, at: dict[str, float], loss: float
) -> None:
    """One step of the computational graph: its variables, its copy of the weights, its edges."""
    x = 3.4 * t
    colours = {"h": COLOURS[4], "c": COLOURS[5]}
    column = [name for name in at if name != "L"]
    for name in column:
        _box(axes, x, at[name], f"{name}$_{t + 1}$", colours.get(name, "white"), 0.5)
    numbers = {"o": norms.output_to_state[t], "l": norms.loss_to_output[t]}
    if norms.state_to_embedding:
        numbers[column[2]] = norms.state_to_embedding[t]
    for below, above in itertools.pairwise(column):
        label = _number(numbers[above]) if above in numbers else {"e": "W$_{xe}$"}.get(above, "")
        _arrow(axes, (x, at[below] + 0.35), (x, at[above] - 0.35), label)
    average = _number(1 / len(norms.loss_to_output))
    _arrow(axes, (x, at["l"] + 0.35), (loss, at["L"] - 0.35), average)
    _box(axes, x + 1.3, at["l"], f"y$_{t + 1}$", "white", 0.5)
    _arrow(axes, (x + 0.8, at["l"]), (x + 0.54, at["l"]), "")
    into = column[2] if norms.state_to_embedding else column[1]
    for name, weight, above in (
        ("W$_{xh}$", "weight_ih_l0", into),
        ("W$_{hq}$", "weight_hq", "o"),
    ):
        y = at[above] - 1.1
        _box(axes, x + 1.3, y, name, "#bbbbbb", 0.5)
        share = _number(norms.weights[weight][t])
        _arrow(axes, (x + 0.85, y + 0.34), (x + 0.54, y + 0.85), share)
    if t:
        state = _number(norms.state_to_state[t - 1])
        _arrow(axes, (x - 2.86, at["h"]), (x - 0.54, at["h"]), state, above=True)
        if norms.memory_to_memory:
            memory = _number(norms.memory_to_memory[t - 1])
            _arrow(axes, (x - 2.86, at["c"]), (x - 0.54, at["c"]), memory, above=True)
        _box(axes, x - 0.9, at["h"] + 1.0, "W$_{hh}$", "#bbbbbb", 0.4)
        share = _number(norms.weights["weight_hh_l0"][t])
        _arrow(axes, (x - 0.8, at["h"] + 0.66), (x - 0.4, at["h"] + 0.36), share)


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
    along: float = 0.5,
) -> None:
    """An arrow with words at a part of its way."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color="black"))
    middle = (
        start[0] + along * (end[0] - start[0]),
        start[1] + along * (end[1] - start[1]),
    )
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


def _number(value: float) -> str:
    return f"{value:.2g}"
