"""Where a loss began to be infinite or NaN, and what to try instead."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from elman.errors import Diverged
from elman.language_model import Masks, Reader, State
from elman.training.state import CarriedState

if TYPE_CHECKING:
    from elman.training.loop import Training


def diverged(training: "Training", nats: float, norm: float) -> Diverged:
    """What to raise of an update whose loss or ‖g‖ is not finite, with what to try."""
    what = f"the loss became {nats}" if not math.isfinite(nats) else f"‖gradient‖ became {norm}"
    optimisation = training.settings.optimisation
    tries = [f"a smaller learning rate than {optimisation.learning_rate:g}"]
    if optimisation.clip is None or optimisation.clip > 1:
        tries.append("clipping to norm 1")
    if training.half:
        tries.append("float32 instead of bfloat16")
    with training.cast():
        origin = first_broken_tensor(training.model, training.reader, *training.latest[:3])
    return Diverged(
        f"{what} at step {training.step + 1}; it began in {origin}",
        hint="try " + " or ".join(tries),
    )


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
