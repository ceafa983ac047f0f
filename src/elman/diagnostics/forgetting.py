"""How soon a network forgets where it began: what running time in chunks rests on.

Two things are followed over k steps, from many moments of a passage side by side:

    distance[k]   ‖S'_{t+k} - S_{t+k}‖ / ‖S_t‖, where S' began at t from zero: one direction
    norm[k]       a bound of ‖∂S_{t+k}/∂S_t‖: all directions, but of small changes only

The norm is bounded by chance, with how small a chance chosen: for G of independent N(0, 1) entries,

    ‖J‖ ≤ 10 √(2/π) max_j ‖Jᵀ G_j‖        but for a probability of 10^-probes

(Halko, Martinsson and Tropp 2011, "Finding structure with randomness", lemma 4.1). Pulls are linear
in what is pulled at, so for the backward pass this is a bound of any error, for the forward pass of
an error so small that its square does not count.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from elman.diagnostics.passage import Passage
from elman.errors import UserError
from elman.options import whole_number

Array = NDArray[np.float64]

MOMENTS = 32
"""From how many moments of the passage changes are followed."""


@dataclass(frozen=True, eq=False)
class Forgetting:
    """What is left of a change after 0, 1, 2, … steps; of all moments, the most."""

    distance: Array
    """From a zero state, relative to the state that it left out."""
    norm: Array
    """Of the product of Jacobians, at most, but for a small probability."""
    probability: float
    """That some norm is larger than that."""

    def steps(self, part: float) -> int | None:
        """After how many steps less than `part` of a zero state's distance is left; None: never.

        >>> Forgetting(np.array([1.0, 0.5, 0.25]), np.ones(3), 0.0).steps(0.5)
        2
        """
        above = np.flatnonzero(~(self.distance < part))
        first = int(above[-1]) + 1 if len(above) else 0
        return first if first < len(self.distance) else None

    @property
    def rate(self) -> float:
        """r in distance ≈ C e^{rk}, by least squares over the lags above rounding."""
        alive = np.flatnonzero(self.distance > 1e-13)
        if len(alive) < 2:
            return -math.inf
        return float(np.polyfit(alive, np.log(self.distance[alive]), 1)[0])


def forgetting(
    passage: Passage, lags: int | None = None, probes: int = 6, seed: int = 0
) -> Forgetting:
    """Follow changes for `lags` steps from moments spread evenly over the passage.

    None: 256, or as many as the passage has.
    """
    lags = max(1, min(256, len(passage) - 1)) if lags is None else lags
    if not 1 <= lags < len(passage):
        raise UserError(
            f"lags={lags} must be at least 1 and below the {len(passage)} steps of the passage",
            hint="a longer text, or fewer lags",
        )
    probes = whole_number("probes", probes, at_least=1, hint="6: one chance in a million")
    first, last = 1, len(passage) - lags  # S_0 is zero itself
    begins = torch.linspace(first, last, MOMENTS, device="cpu").long().unique()
    S = passage.states.new_zeros(len(begins), passage.states.shape[1])
    apart = passage.states[begins].norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    distance = [1.0]
    for k in range(lags):
        with torch.no_grad():
            S = passage.step(begins + k, S)
        distance.append(float(((S - passage.states[begins + k + 1]).norm(dim=1) / apart).max()))
    norm, chance = _norms(passage, begins + lags, lags, probes, seed)
    return Forgetting(np.array(distance), norm, chance)


def _norms(
    passage: Passage, ends: torch.Tensor, lags: int, probes: int, seed: int
) -> tuple[Array, float]:
    """Bounds of ‖∂S_m/∂S_{m-k}‖ for k = 0 … lags, the largest over the ends m."""
    at = ends.repeat(probes)
    random = torch.Generator().manual_seed(seed)
    G = torch.randn(
        len(at), passage.states.shape[1], dtype=torch.float64, generator=random, device="cpu"
    )
    factor, largest = 10 * math.sqrt(2 / math.pi), [1.0]
    for k in range(1, lags + 1):
        G = passage.pull_back(at - k, G)
        largest.append(factor * float(G.norm(dim=1).max()))
    return np.array(largest), min(1.0, len(ends) * lags * 10.0**-probes)
