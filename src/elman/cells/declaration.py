"""`elman.cell`: declare a cell, and it is one like any other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elman.cells.described import Described
from elman.cells.table import CELLS
from elman.errors import UserError
from elman.options import as_number


def cell(
    gates: int = 1,
    states: int = 1,
    parameters: Mapping[str, float | None] | Sequence[str] = (),
    *,
    name: str | None = None,
    heads: int = 1,
    derivative: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Described]:
    """Declare a cell: see `elman.cells.described`. Its name is the function's own.

    `parameters` are the cell's own numbers, one to a unit: names, or names with the value they
    start from (None: drawn like the weights). `heads` keeps W_hh in that many blocks along its
    diagonal, 0 keeps it diagonal. `derivative` may be given: a function of the same arguments and
    the pull on each state that returns the pulls on all of them; it is compared with the chain
    rule's, and takes its place in the kernels.

    Once declared it is a cell like any other: `elman.nn.Recurrent(leaky, 28, 256)`,
    `LanguageModel(vocab_size, cell="leaky")`.

    >>> import torch
    >>> @cell(gates=1)
    ... def leaky(a_x, a_h, h):
    ...     return 0.9 * h + 0.1 * torch.tanh(a_x[0] + a_h[0])
    >>> leaky
    <cell leaky: 1 gate, 1 state>
    """
    gates, states, heads = map(as_number, (gates, states, heads))
    sizes = (("gates", gates, 1, 16), ("states", states, 1, 8), ("heads", heads, 0, 4096))
    for what, value, least, most in sizes:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise UserError(f"{what}={value!r} must be a whole number from {least} to {most}")

    def declare(function: Callable[..., Any]) -> Described:
        if not hasattr(function, "__code__"):
            raise UserError(
                f"a cell must be a function, not {type(function).__name__}",
                hint="@elman.cell(gates=1) above def NAME(a_x, a_h, h): …",
            )
        described = Described(function, name, gates, states, parameters, heads, derivative)
        known = CELLS.get(described.name)
        if known is not None and not (isinstance(known, Described) and known.is_users):
            raise UserError(f"{described.name} is a cell of elman's", hint="choose another name")
        _check_signature(function, described.name, 2 + states + len(described.parameters))
        if derivative is not None:
            wanted = 2 + 2 * states + len(described.parameters)
            _check_signature(derivative, f"{described.name}'s derivative", wanted)
        described.check_derivative()
        described.is_users = True
        described.fingerprint = described.digest()
        CELLS[described.name] = described
        return described

    return declare


def _check_signature(function: Callable[..., Any], name: str, wanted: int) -> None:
    try:
        inspect.signature(function).bind(*[None] * wanted)
    except TypeError:
        raise UserError(
            f"the cell {name} takes {tuple(inspect.signature(function).parameters)}; it is called "
            f"with {wanted} arguments: a_x, a_h, every state, every parameter",
            hint="declare how many with @elman.cell(gates=…, states=…, parameters=…)",
        ) from None
