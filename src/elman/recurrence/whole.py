"""A stack handed to torch's own layers whole: when its carry and memory allow it, and how.

With nothing cut and everything stored, cuDNN's own backward pass is the recurrence's. A carry that
cuts at moments known beforehand is run in the pieces of time between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elman.kernels import aten, cudnn
from elman.kernels.cudnn import Network, Whole
from elman.recurrence.operator import Careful, Inputs, Recipe
from elman.recurrence.strand import Dropout


def described(
    recipe: Recipe, network: Network, x: Inputs, steps: int, rows: int, packed: bool = False
) -> Whole:
    """The stack as torch's own would be handed it, or why it cannot be."""
    window, apart = None, None
    exact = steps if recipe.carry.exact else recipe.carry.exact_window()
    if exact is None:
        apart = f"carry={recipe.carry} changes the gradient inside its backward pass"
    elif exact < steps:
        window = exact
        apart = "rows of different lengths are not cut into pieces of time" if packed else None
    if not recipe.memory.keeps_all:
        apart = f"memory={recipe.memory} keeps states, and it stores everything"
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in x.flat())
    ids, drops = not x.xs.is_floating_point(), x.seed is not None
    return Whole(network, steps, rows, x.weights[0].dtype, ids, keeps, window, drops, apart)


def recurrence(
    whole: Whole, x: Inputs, dropout: float, batch_sizes: Sequence[int] = ()
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ys and the last states, as `operator.recurrence`; packed where there are `batch_sizes`."""
    masks = None if x.seed is None else Dropout(dropout, int(x.seed))

    def between(ys: Tensor, layer: int) -> Tensor:
        assert masks is not None
        return masks(ys, layer, 0)

    with Careful(x.xs, whole.network.inputs):
        return cudnn.run(
            whole, x.xs, x.stacked, x.weights, None if masks is None else between, batch_sizes
        )


def recurrence_on_a_cpu(
    whole: Whole, x: Inputs, batch_sizes: Sequence[int] = ()
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same by ATen."""
    with Careful(x.xs, whole.network.inputs):
        return aten.run(whole, x.xs, x.stacked, x.weights, batch_sizes)
