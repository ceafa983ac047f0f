"""States of any model: a tensor, None, or a tuple, list or dict of such."""

from collections.abc import Callable

import torch
from torch import Tensor

from elman.cells.custom import Nest
from elman.errors import UserError


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


def tensors(nest: Nest) -> list[Tensor]:
    """Every tensor of a nest, in order.

    >>> tensors({"h": (Tensor([1]), None), "c": Tensor([2])})
    [tensor([1.]), tensor([2.])]
    """
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    over(note, nest)
    return found


def rows_of(nest: Nest, dim: int, rows: slice) -> Nest:
    """A copy of some rows of every tensor, counted along `dim`.

    A view would lie elsewhere in memory than rows that are a tensor by themselves, and products on
    a CPU may round by that.
    """
    count = rows.stop - rows.start
    return over(lambda tensor: tensor.narrow(dim, rows.start, count).clone(), nest)


def joined(nests: list[Nest], dim: int) -> Nest:
    """The rows of several nests of one kind as one nest."""
    return over(lambda *parts: torch.cat(parts, dim), *nests)
