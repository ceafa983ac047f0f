"""Looking at a model without changing it, and seeing what its owner has changed about it.

What goes round a module's own call, or reads weights where they lie, asks here first: there may be
hooks, and weights that are computed.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor, nn

from elman.nn.parameters import in_eval_mode


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


def parts_of(module: nn.Module) -> list[nn.Module]:
    """The module and all its parts, found three times as fast as by `module.modules()`.

    A small update on a GPU waits for Python. A part that is used twice is here twice.
    """
    parts = [module]
    for part in parts:  # which grows meanwhile
        if part._modules:
            parts += [inner for inner in part._modules.values() if inner is not None]
    return parts


@final
class Watch:
    """Sees what the owner changes about a model: its parts, its weights, where they lie, hooks, and
    how its recurrence carries, keeps and runs.

    It holds the dictionaries in which torch keeps these, so that nobody has to walk through the
    model before every update: a small update on a GPU waits for Python.
    """

    def __init__(self, model: nn.Module, recurrence: nn.Module | None = None) -> None:
        self.parts = parts_of(model)  # held: another part may not get the number of one of them
        self.insides = [part._modules for part in self.parts]
        self.weights = [part._parameters for part in self.parts]
        self.hooks = [
            hooks
            for part in self.parts
            for hooks in (
                *(part._forward_hooks, part._forward_pre_hooks),
                *(part._backward_hooks, part._backward_pre_hooks),
            )
        ]
        self.recurrence = recurrence
        self.before = self._now()

    def sees_a_change(self) -> bool:
        """Whether anything is not as it was when this watch began."""
        return self._now() != self.before

    def _now(self) -> list[Any]:
        now: list[Any] = [id(part) for inside in self.insides for part in inside.values()]
        for weights in self.weights:
            for p in weights.values():
                if p is not None:
                    hooked = p._backward_hooks or p._post_accumulate_grad_hooks
                    place = p.data_ptr() if type(p) is nn.Parameter else 0  # others may have none
                    now += (id(p), place, p.requires_grad, not hooked)
        if self.recurrence is not None:
            now += (self.recurrence.carry, self.recurrence.memory, self.recurrence.time)
        return now + list(map(len, self.hooks))


def is_hooked(module: nn.Module) -> bool:
    """Whether something of the owner's is called with a forward pass of it, or of a part of it."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in parts_of(module))


def hears(model: nn.Module) -> str | None:
    """What an update must go through modules and autograd for, in words; None: nothing."""
    for module in parts_of(model):
        if "parametrizations" in module._modules:
            return f"weights of the {type(module).__name__} are parametrized"
        hooks = module._forward_hooks or module._forward_pre_hooks
        hooks = hooks or module._backward_hooks or module._backward_pre_hooks
        if hooks and module is not model:
            return f"a hook is called with every pass of the {type(module).__name__}"
        for name, p in module._parameters.items():
            if p is not None and (p._backward_hooks or p._post_accumulate_grad_hooks):
                return f"a hook is called with the gradient of {name}"
    return None
