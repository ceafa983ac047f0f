"""One update of a training as one CUDA graph: launched once, not kernel by kernel.

A small model on a GPU spends its time in Python and in launches: at the notes' sizes an update is
some sixty kernels of a few microseconds. Captured once and replayed, they follow each other without
a gap. What is captured must be the same every time: shapes, and every number that is not in a
tensor (a learning rate that changes lives in a tensor, `optimizer.param_groups[0]["lr"]`).

    def update(x, y, h):                       # ids and state in, what to report and the state out
        optimizer.zero_grad(set_to_none=True)
        logits, h = model(x, h)
        loss = cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), norm, h.detach()

    update = Graphed(update, (x, y, h), changes=tensors_of(model, optimizer))
    for x, y in windows:
        loss, norm, h = update(x, y, h)
"""

import torch
from torch import Tensor

from elman.kernels.cuda.graphed import Graphed, Pool, Update

__all__ = ["Graphed", "Pool", "Update", "tensors_of"]


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that an update changes: parameters, buffers, and the optimizer's state as it is now.

    An optimizer that makes its state at the first step (Adam, momentum) must have made one.
    """
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [*model.parameters(), *model.buffers(), *state]
