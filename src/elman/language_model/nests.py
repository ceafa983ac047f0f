"""States of any model: a tensor, None, or a tuple, list or dict of such."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from elman.errors import UserError

Nest = Any
"""A tensor, None, or a tuple, list or dict of nests."""


def over(function: Callable[..., Tensor], *nests: Nest) -> Nest:
    """Apply `function` to the tensors that lie in the same place of each nest.

    >>> over(lambda a, b: a + b, (Tensor([1]), None), (Tensor([2]), None))
    (tensor([3.]), None)
    """
    first = nests[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return function(*nests)
    if isinstance(first, dict):
        return {key: over(function, *(nest[key] for nest in nests)) for key in first}
    if not isinstance(first, tuple | list):
        raise UserError(
            f"a state cannot hold a {type(first).__name__}",
            hint="tensors, and tuples, lists and dicts of them",
        )
    parts = [over(function, *part) for part in zip(*nests, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
