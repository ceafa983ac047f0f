"""Chance that belongs to a training, whatever else draws from PyTorch's global generators."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from elman.training.loop import Training


def fresh(device: torch.device, seed: int) -> dict[str, Tensor]:
    """States for PyTorch's global generators, from our seed and not from theirs."""
    states = {"cpu": torch.Generator().manual_seed(seed).get_state()}
    if device.type == "cuda":
        states["cuda"] = torch.Generator(device).manual_seed(seed).get_state()
    return states


@contextmanager
def lent(training: "Training", group: int) -> Iterator[None]:
    """Inside this block the global generators have the training's states, which go on with them.

    A group of lanes (-1: none) draws from its own, whichever process has it.
    """
    if not training.reader.draws_globally:
        yield
        return
    device = training.device
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        if group >= 0:
            key = np.random.SeedSequence([training.settings.seed, training.step, group])
            torch.manual_seed(int(key.generate_state(1, np.uint64)[0] >> 1))
            yield
            return
        torch.set_rng_state(training.chance["cpu"])
        if cuda:
            torch.cuda.set_rng_state(training.chance["cuda"], device)
        yield
        training.chance = {"cpu": torch.get_rng_state()}
        if cuda:
            training.chance["cuda"] = torch.cuda.get_rng_state(device)
