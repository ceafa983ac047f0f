"""What is hidden from a model while it trains: how much, which parts, and by what chance."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elman.kernels.cpu import masks
from elman.options import check, option

PANEL = "Model"
PROBABILITY: dict[str, Any] = {
    "panel": PANEL,
    "at_least": 0,
    "below": 1,
    "hint": "it is the probability of hiding; 0 hides nothing",
}


@dataclass(frozen=True)
class Dropout:
    """What is hidden from the model while it trains; each number is a probability in [0, 1).

    tokens:     an input token is read as `<unk>` (id 0), drawn for each token
    inputs:     a component of the embedding is zero, one mask per row for all steps
    layers:     a component between two layers is zero, drawn for each step, as in torch.nn
    outputs:    a component of h_t is zero on its way to the output, one mask per row for all steps
    recurrent:  an entry of W_hh is zero, one mask per window (DropConnect)
    zoneout:    a unit of a state stays what it was, drawn for each step; measured, the expectation
    updates:    what a step adds to a unit's state is zero, drawn for each step (recurrent dropout)

    Gal and Ghahramani (2016) for the masks that hold through time, Merity et al. (2018) for W_hh,
    Krueger et al. (2017) for zoneout, Semeniuta et al. (2016) for updates: `elman.cells.noisy`.
    """

    tokens: float = option(0.0, "Whole tokens hidden", **PROBABILITY)
    inputs: float = option(0.0, "Variational, embeddings", **PROBABILITY)
    layers: float = option(0.0, "Between layers", **PROBABILITY)
    outputs: float = option(0.0, "Variational, outputs", **PROBABILITY)
    recurrent: float = option(0.0, "DropConnect on W_hh", **PROBABILITY)
    zoneout: float = option(0.0, "States that stay as they were", **PROBABILITY)
    updates: float = option(0.0, "What a step adds to a state", **PROBABILITY)

    def __post_init__(self) -> None:
        check(self, "dropout of {}")


class Masks(NamedTuple):
    """One draw of the masks that hold for a whole window."""

    inputs: Tensor | None  # (batch, embedding)
    outputs: Tensor | None  # (batch, hidden)
    recurrent: dict[str, Tensor]  # by parameter name, each of that parameter's shape

    def of(self, rows: slice) -> "Masks":
        """The masks of some rows of the batch; W_hh is the same for all.

        Copies: where rows lie in memory may not matter, as it does for some products of a CPU.
        """
        both = (self.inputs, self.outputs)
        inputs, outputs = (m if m is None else m[rows].clone() for m in both)
        return Masks(inputs, outputs, self.recurrent)


NO_MASKS = Masks(None, None, {})
"""Nothing hidden."""


class Noise:
    """Random numbers that can be saved: one generator per kind of device, from one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generators: dict[str, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        """The generator of this device."""
        if device.type not in self.generators:
            self.generators[device.type] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device.type]

    def keep(self, shape: tuple[int, ...], drop: float, like: Tensor) -> Tensor:
        """A mask of 0 (with probability `drop`) and 1/(1-drop), so that its mean is 1."""
        if like.is_cpu:
            return masks.keep(self.on(like.device), shape, 1 - drop, like.dtype)
        mask = torch.empty(shape, device=like.device, dtype=like.dtype)
        return mask.bernoulli_(1 - drop, generator=self.on(like.device)).div_(1 - drop)

    def state_dict(self) -> dict[str, Tensor]:
        """Every generator's state, by kind of device."""
        return {device: g.get_state() for device, g in self.generators.items()}

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Continue exactly where `state_dict` was taken; a device absent here is left out."""
        for device, state in states.items():
            if device == "cpu" or torch.cuda.is_available():
                self.on(torch.device(device)).set_state(state.cpu())
