"""Where a loss that is no longer a number began."""

import torch
from torch import Tensor, nn

from elman.language_model import Masks, Reader, State
from elman.training.state import CarriedState


@torch.no_grad()
def first_broken_tensor(
    model: nn.Module, reader: Reader, x: Tensor, state: State, masks: Masks
) -> str:
    """The first tensor of an update on x, in the order they are computed, that is not finite."""
    named = [(f"the parameter {n}", p) for n, p in model.named_parameters()]
    named += [("the carried state", t) for t in CarriedState(state).state_dict().values()]
    named += reader.computed(x, state, masks)
    named += [
        (f"the gradient of {n}", p.grad)
        for n, p in reversed(list(model.named_parameters()))
        if p.grad is not None
    ]
    broken = [name for name, tensor in named if not bool(torch.isfinite(tensor).all())]
    return broken[0] if broken else "the sum of the losses"
