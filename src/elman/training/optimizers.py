"""torch's optimizers, to the last bit, that do not load torch's compiler.

torch hides what an optimizer does from its compiler, and loads the compiler for that, which takes
longer than loading torch. Before anybody has loaded it there is nothing to hide from.
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch

HIDDEN = "__dynamo_disable"
"""Under this name torch keeps a method as it is hidden from its compiler."""


class _Light(torch.optim.Optimizer):
    """What keeps one of torch's optimizers, the base beside it, from loading the compiler."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _leave_compiler_unloaded()
        super().__init__(*arguments, **options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] torch has overloads
        decorated: Any = super().step
        step = inspect.unwrap(decorated.__func__)  # it is the decorator that loads the compiler
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, closure)


@final
class SGD(_Light, torch.optim.SGD):
    """`torch.optim.SGD`."""


@final
class Adam(_Light, torch.optim.Adam):
    """`torch.optim.Adam`."""


@final
class AdamW(_Light, torch.optim.AdamW):
    """`torch.optim.AdamW`."""


def _leave_compiler_unloaded() -> None:
    """Have the methods that torch would hide, and load its compiler for, called as they are."""
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, HIDDEN):
            setattr(method, HIDDEN, partial(_hidden, method))


def _hidden(method: Any, *arguments: Any, **options: Any) -> Any:
    """The method itself; once the compiler is there, hidden from it, as torch would have it."""
    if "torch._dynamo" not in sys.modules:
        return method(*arguments, **options)
    hidden = torch._dynamo.disable(method, True, wrapping=False)
    setattr(method, HIDDEN, hidden)
    return hidden(*arguments, **options)
