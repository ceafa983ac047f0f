"""torch's defaults as they are before anybody changes them: float32, on the CPU.

A run's first weights, a forecaster and a compressor's network are the same whatever the caller has
told `torch.set_default_dtype` and `torch.set_default_device`, as they are read again elsewhere.
"""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def usual() -> Iterator[None]:
    """What torch makes inside, or inside a function with this decorator, is float32 on the CPU.

    Not around a `yield`: whoever reads the generator would have these defaults, too.

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
        if torch.get_default_device().type == "cpu":  # a device asked for slows every call
            yield
        else:
            with torch.device("cpu"):
                yield
    finally:
        if before is not torch.float32:
            torch.set_default_dtype(before)
