"""ATen: torch.nn's own recurrent layers on a CPU, where none of ours is faster.

Our native kernel has no float16 and no projections, and in bfloat16 it rounds all weights at every
call, which is too much for a few steps.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from elman.kernels.torchs import Network, Torchs, Whole, as_torch


@final
class Aten(Torchs):
    """torch's own layers on a CPU."""

    name, device, where = "aten", "cpu", "in main memory"

    def refuses_here(self, whole: Whole) -> str | None:
        """What torch leaves to others."""
        if whole.ids:
            return "it reads no ids"
        if whole.pieces > 1:
            return "a carry that cuts changes the gradient inside its backward pass"
        return whole.apart

    def is_faster(self, whole: Whole) -> bool:
        """Than our native kernel, which could run the stack, too: measured on an AMD EPYC.

        In bfloat16 alone: few steps; and oneDNN's lstm, which is best at widths of whole tiles.
        With dropout, whether a gradient is wanted does not matter: a checkpointed call may be run
        without one first, and its masks must be drawn alike.
        """
        if whole.dtype is not torch.bfloat16:
            return False
        if whole.packed:  # which it runs step by step
            return whole.steps <= 2
        keeps, wide = whole.keeps or whole.dropout > 0, whole.network.hidden
        if whole.network.mode == "GRU":
            return whole.steps < (4 if keeps else 8)
        if whole.network.mode != "LSTM":
            return whole.steps < (8 if not keeps or wide < 64 else 6 if whole.dropout else 4)
        if whole.steps < (4 if keeps else 8) and wide < (256 if keeps else 512):
            return True
        if whole.dropout and whole.steps == 1 and wide < 512:
            return True
        return wide < 160 if keeps else wide < 256 or wide % 16 == 0


KERNEL = Aten()


def run(
    whole: Whole,
    xs: Tensor,
    first: Sequence[Tensor],
    weights: Sequence[Tensor],
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ys and the last states, stacked as PyTorch does, time first; packed with `batch_sizes`."""
    net, dropout = prepared(whole).network, whole.dropout
    return as_torch(net, False, xs, first, list(weights), dropout, batch_sizes)


def prepared(whole: Whole) -> Whole:
    """The stack, as `as_torch` is called with it."""
    if whole.network.projection:
        _warn_unheard()
    return whole


@functools.cache
def _warn_unheard() -> None:
    """Have torch say, which it does once in a process, that oneDNN has no projections."""
    with warnings.catch_warnings(), torch.no_grad(), torch.device("cpu"):
        warnings.simplefilter("ignore")
        weights = [torch.zeros(8, 1), torch.zeros(8, 1), torch.zeros(1, 2)]
        first = [torch.zeros(1, 1, 1), torch.zeros(1, 1, 2)]
        as_torch(Network("LSTM", False, 1, 2, 1, 1, 1), False, torch.zeros(1, 1, 1), first, weights)
