"""A cell of your own: any module that maps an input and a state to the state after it.

    cell(x, state) -> state        the first tensor of the state is the output too
    cell(x, state) -> (output, state)

The state is a tensor or any nesting of tuples, lists and dicts of tensors, each batch first. Which
of the two a cell returns is read off the structure: a state has that of the state it was given.
"""

from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from elman.errors import UserError

Nest: TypeAlias = Any
"""A state of any shape: a tensor, None, or a tuple, list or dict of nests."""


def step(cell: nn.Module, x: Tensor, state: Nest) -> tuple[Tensor, Nest]:
    """The output and the state after x."""
    return split(cell(x, state), state, type(cell).__name__)


def step_with(
    cell: nn.Module, weights: dict[str, Tensor], x: Tensor, state: Nest
) -> tuple[Tensor, Nest]:
    """The same with other tensors in the place of the cell's parameters."""
    return split(functional_call(cell, weights, (x, state)), state, type(cell).__name__)


def split(result: Nest, state: Nest, name: str) -> tuple[Tensor, Nest]:
    """(output, state) from what a cell returned, given the state it was called with."""
    wanted = pytree.tree_structure(state)
    if pytree.tree_structure(result) == wanted:
        return pytree.tree_leaves(result)[0], result
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
        output, after = result
        if pytree.tree_structure(after) == wanted:
            return output, after
    raise UserError(
        f"{name} was given a state of structure {wanted} and returned "
        f"{pytree.tree_structure(result)}",
        hint="return a state of the same structure, or (output tensor, such a state)",
    )


def first_state(cell: nn.Module, x: Tensor) -> Nest:
    """The state before the first step: `cell.initial_state(batch)`, or zeros for a torch cell."""
    initial = getattr(cell, "initial_state", None)
    if initial is not None:
        return initial(x.shape[0])  # not len(x): a trace would keep its example's
    if isinstance(cell, nn.RNNCellBase):
        h = cell.weight_hh.new_zeros(x.shape[0], cell.hidden_size)
        return (h, h) if isinstance(cell, nn.LSTMCell) else h
    raise UserError(
        f"{type(cell).__name__} has no initial_state(batch) and no state was passed",
        hint="pass a state, or give the cell a method initial_state(batch) that returns one",
    )
