"""Where a loss that is no longer a number began."""

import torch
from torch import Tensor

from elman.language_model import LanguageModel, Masks, State
from elman.training.state import CarriedState


@torch.no_grad()
def first_broken_tensor(model: LanguageModel, x: Tensor, state: State, masks: Masks) -> str:
    """The first tensor of an update on x, in the order they are computed, that is not finite."""
    hs, _ = model.states(x, state, masks)
    logits = model.project(hs, masks)
    named = [(f"the parameter {n}", p) for n, p in model.named_parameters()]
    named += [("the carried state", t) for t in CarriedState(state).state_dict().values()]
    named += [("the hidden states h_t", hs), ("the logits o_t", logits)]
    named += [
        (f"the gradient of {n}", p.grad)
        for n, p in reversed(list(model.named_parameters()))
        if p.grad is not None
    ]
    broken = [name for name, tensor in named if not bool(torch.isfinite(tensor).all())]
    return broken[0] if broken else "the sum of the losses"
