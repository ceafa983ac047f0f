"""torch's defaults as they are before anybody changes them: float32, on the CPU.

A run's first weights, a forecaster and a compressor's network are the same whatever the caller has
told `torch.set_default_dtype` and `torch.set_default_device`, as they are read again elsewhere.
What learns does so even where the caller has switched gradients off.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def recording() -> contextlib.AbstractContextManager[Any]:
    """Gradients are recorded inside, under `torch.no_grad` and `torch.inference_mode`, too.

    >>> with torch.no_grad(), recording():
    ...     torch.is_grad_enabled()
    True
    """
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    on = contextlib.ExitStack()
    on.enter_context(torch.inference_mode(False))
    on.enter_context(torch.enable_grad())
    return on


def learns(function: Callable[P, R]) -> Callable[P, R]:
    """A function that learns, or makes what will: gradients are recorded inside, whatever is said
    outside. Not a generator."""

    @functools.wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        with recording():
            return function(*args, **kwargs)

    return recorded


@contextlib.contextmanager
def usual() -> Iterator[None]:
    """What torch makes inside, or inside a function with this decorator, is float32 on the CPU.

    Gradients are recorded.

    Not around a `yield`: the reader of the generator would have these defaults, too.

    >>> torch.set_default_dtype(torch.float64)
    >>> with usual():
    ...     torch.zeros(1).dtype
    torch.float32
    >>> torch.set_default_dtype(torch.float32)
    """
    before = torch.get_default_dtype()
    if before is not torch.float32:
        torch.set_default_dtype(torch.float32)
    try:
        with recording():
            if torch.get_default_device().type == "cpu":  # a device asked for slows every call
                yield
            else:
                with torch.device("cpu"):
                    yield
    finally:
        if before is not torch.float32:
            torch.set_default_dtype(before)
