"""A stack handed to torch's own layers whole: when its carry and memory allow it, and how.

With nothing cut and everything stored, cuDNN's own backward pass is the recurrence's. A carry that
cuts at moments known beforehand is run in the pieces of time between them.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch._C import _autograd  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils.checkpoint import CheckpointFunction

from elman.kernels import aten, cudnn
from elman.kernels.torchs import Network, Whole
from elman.recurrence.operator import Careful, Inputs, Recipe

_REENTRANT = [f.__code__ for f in (CheckpointFunction.forward, CheckpointFunction.backward)]


def described(
    recipe: Recipe, network: Network, x: Inputs, steps: int, rows: int, packed: bool = False
) -> Whole:
    """The stack as torch's own would be handed it, or why it cannot be."""
    window, apart = None, None
    exact = steps if recipe.carry.exact else recipe.carry.exact_window()
    dropout = 0.0 if x.seed is None else recipe.dropout
    if dropout == 1:
        apart = "it scales by 1 / (1 - dropout)"
    if exact is None:
        apart = f"carry={recipe.carry} changes the gradient inside its backward pass"
    elif exact < steps:
        window = exact
        apart = "rows of different lengths are not cut into pieces of time" if packed else apart
    if not recipe.memory.keeps_all:
        apart = f"memory={recipe.memory} keeps states, and it stores everything"
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in x.flat())
    ids, dtype = not x.xs.is_floating_point(), x.weights[0].dtype
    twice = dropout > 0 and recomputes()
    return Whole(network, steps, rows, dtype, ids, keeps, window, dropout, twice, packed, apart)


def recomputes() -> bool:
    """Whether `torch.utils.checkpoint` runs this call twice, or another hook on saved tensors may.

    With `use_reentrant` it leaves no hooks: it runs a call inside a node of autograd, where
    tangents are off as well as gradients, and then once more inside its own backward pass. To walk
    through all frames takes longer than all else that Python does for a small call.
    """
    if is_hooked():
        return True
    if torch._C._is_fwd_grad_enabled() and torch._C._current_graph_task_id() < 0:
        return False
    if torch.is_inference_mode_enabled():  # in which nothing is run again
        return False
    frame, (forward, backward) = sys._getframe(), _REENTRANT
    while frame is not None:
        if frame.f_code is forward or frame.f_code is backward:  # a set would hash all their code
            return True
        frame = frame.f_back
    return False


def is_hooked() -> bool:
    """Whether there are hooks on the tensors that autograd saves."""
    return _autograd._top_saved_tensors_default_hooks(True) is not None


def recurrence(
    whole: Whole, x: Inputs, batch_sizes: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ys and the last states, as `operator.recurrence`; packed where there are `batch_sizes`."""
    with Careful(x.xs, whole.network.inputs):
        return cudnn.run(whole, x.xs, x.stacked, x.weights, batch_sizes)


def recurrence_on_a_cpu(
    whole: Whole, x: Inputs, batch_sizes: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same by ATen."""
    with Careful(x.xs, whole.network.inputs):
        return aten.run(whole, x.xs, x.stacked, x.weights, batch_sizes)
