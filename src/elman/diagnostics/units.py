"""Where the gradient dies: by step and unit, saturation, dead units, gates."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from elman.diagnostics.passage import Passage

Array = NDArray[np.float64]
SATURATED = 0.97
STILL = 1e-3


@dataclass(frozen=True, eq=False)
class Units:
    """What the hidden units of every layer do over a passage."""

    gradient: Array
    """|∂L/∂S_t|, L = Σ_t L_t: (T, N)"""
    saturation: list[Array]
    """of each layer and unit: the share of steps with |h| > 0.97"""
    spread: list[Array]
    """of each layer and unit: the standard deviation of h over the steps"""
    openness: list[dict[str, Array]]
    """of each layer, by gate and unit: its mean opening, for cells with gates"""
    names: tuple[str, ...]
    """of each of the N columns of `gradient`: h 3 is unit 3 of h; in a stack h1.3, of layer 1"""

    @property
    def saturated(self) -> int:
        """Units that are saturated in at least nine steps of ten."""
        return int(sum((s >= 0.9).sum() for s in self.saturation))

    @property
    def dead(self) -> int:
        """Units that never move, and so tell the output nothing: spread below 0.001."""
        return int(sum((s < STILL).sum() for s in self.spread))

    @property
    def total(self) -> int:
        """The units of all layers together."""
        return sum(len(s) for s in self.spread)


def units(passage: Passage) -> Units:
    """Measure every unit; the gradient is carried back once through all of the passage."""
    hs = [layer[0].numpy() for layer in passage.parts(passage.states[1:])]
    return Units(
        gradient=_total_gradient(passage),
        saturation=[(np.abs(h) > SATURATED).mean(0) for h in hs],
        spread=[h.std(0) for h in hs],
        openness=[_openness(passage, i) for i in range(len(passage.layers))],
        names=_names(passage),
    )


def _names(passage: Passage) -> tuple[str, ...]:
    parts = [
        letter + ("" if len(passage.layers) == 1 else f"{layer}.")
        for layer in range(1, len(passage.layers) + 1)
        for letter in passage.cell.states
    ]
    gap = " " if len(passage.layers) == 1 else ""
    return tuple(
        f"{part}{gap}{unit}"
        for part, size in zip(parts, passage.sizes, strict=True)
        for unit in range(size)
    )


def _total_gradient(passage: Passage) -> Array:
    """dS_t = dL_t/dS_t + (∂S_{t+1}/∂S_t)ᵀ dS_{t+1}, from the last step to the first."""
    direct = passage.on_state(passage.pulls)
    total = torch.zeros_like(direct)
    carried = torch.zeros_like(direct[:1])
    for t in reversed(range(len(passage))):
        total[t] = direct[t] + carried[0]
        carried = passage.pull_back(torch.tensor([t], device="cpu"), total[t : t + 1])
    return total.abs().numpy()


def _openness(passage: Passage, layer: int) -> dict[str, Array]:
    gates, names = passage.gates[layer], passage.cell.openings
    if gates is None:
        return {}
    size = passage.layers[layer].hidden_size
    blocks = dict(zip(names, gates.split(size, -1), strict=False))
    return {name: g.mean(0).numpy() for name, g in blocks.items() if name}
