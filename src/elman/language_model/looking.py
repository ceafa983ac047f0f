"""Looking at a model without changing it, and seeing what its owner has changed about it.

What goes round a module's own call, or reads weights where they lie, asks here first: there may be
hooks, and weights that are computed.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor, nn

from elman.nn.parameters import in_eval_mode

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
"""Where a module keeps what its owner wants called."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and without gradients; every part's mode is put back afterwards."""
    with in_eval_mode(model), torch.inference_mode():
        yield


def weights_of(module: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """These weights as they are used.

    Those that a parametrization computes, or that are pruned, are no parameters, and no state dict
    has them by their names.
    """
    with in_eval_mode(module), torch.no_grad():  # spectral_norm goes on whenever it is asked
        return {name: attrgetter(name)(module).detach() for name in names}


def is_hooked(module: nn.Module) -> bool:
    """Whether something of the owner's is called with a forward pass of it, or of a part of it."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def hears(model: nn.Module) -> str | None:
    """What an update must go through modules and autograd for, in words; None: nothing."""
    for module in model.modules():
        if "parametrizations" in module._modules:
            return f"weights of the {type(module).__name__} are parametrized"
        if module is not model and any(getattr(module, hooks) for hooks in HOOKS):
            return f"a hook is called with every pass of the {type(module).__name__}"
        for name, p in module._parameters.items():
            if p is not None and (p._backward_hooks or p._post_accumulate_grad_hooks):
                return f"a hook is called with the gradient of {name}"
    return None
