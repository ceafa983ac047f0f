"""The state that crosses a window's edge, for truncated backpropagation in anyone's loop.

state = CarriedState()
for x, y in batches.streams(ids, batch=32, window=35):
    logits, after = model(x, state.value)
    ...                                    # loss, backward, step
    state.carry(after)                     # the state crosses the edge, the gradient does not
"""

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from elman.errors import UserError
from elman.language_model.nests import Nest, over


@final
class CarriedState:
    """Holds the state of any module between windows: a tensor or any nest of tensors.

    >>> state = CarriedState()
    >>> state.carry((torch.ones(1, 2, 3, requires_grad=True), torch.ones(1, 2, 3)))
    >>> state.value[0].requires_grad
    False
    >>> state.reset(torch.tensor([True, False]))         # row 0 begins a new text
    >>> state.value[0][0].tolist()
    [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """

    def __init__(self, value: Nest = None, *, batch_dim: int = 1) -> None:
        self.value = value
        self.batch_dim = batch_dim

    def carry(self, value: Nest) -> None:
        """Keep `value` for the next window, cut off from the graph that made it."""
        self.value = over(lambda tensor: tensor.detach(), value)

    def reset(self, rows: Tensor | None = None) -> None:
        """Forget everything, or put the marked rows of the batch back to zero."""
        if rows is None:
            self.value = None
            return

        def zeroed(tensor: Tensor) -> Tensor:
            if rows.dtype != torch.bool or rows.shape != tensor.shape[self.batch_dim :][:1]:
                raise UserError(
                    f"rows of shape {tuple(rows.shape)} and type {rows.dtype} must be one bool for "
                    f"each row of dimension {self.batch_dim} of a state {tuple(tensor.shape)}",
                    hint="rows = torch.tensor([True, False, …])",
                )
            shape = [1] * tensor.dim()
            shape[self.batch_dim] = -1
            return tensor.masked_fill(rows.to(tensor.device).view(shape), 0)

        self.value = over(zeroed, self.value)

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of the nest by their paths; namedtuples come back as tuples."""
        tensors: dict[str, Tensor] = {}
        _collect(self.value, "state", tensors)
        return tensors

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Hold again exactly what `state_dict` was taken of."""
        self.value = _restore("state", tensors) if tensors else None

    def to(self, device: torch.device | str) -> None:
        """Move every tensor to `device`."""
        self.value = over(lambda tensor: tensor.to(device), self.value)


# A path says how to rebuild its nest: `(0` an item of a tuple, `[0` of a list, `{name` of a dict,
# `#0` one whose key is a number, divided by `/`. What holds no tensor leaves its mark alone, on an
# empty one.
_EMPTY = {"?": lambda: None, "(": tuple, "[": list, "{": dict}


def _mark(nest: Nest) -> str:
    if nest is None:
        return "?"
    return "{" if isinstance(nest, dict) else "[" if isinstance(nest, list) else "("


def _parts(nest: Any) -> Iterator[tuple[str, Nest]]:
    """What a nest holds, each beside its part of the path."""
    if isinstance(nest, dict):
        return ((_from_key(key), value) for key, value in nest.items())
    return ((f"{_mark(nest)}{i}", value) for i, value in enumerate(nest))


def _from_key(key: object) -> str:
    if isinstance(key, str):  # as in web addresses, where that divides or says nothing
        return "{" + (key.replace("%", "%25").replace("/", "%2F") or "%")
    if type(key) is int:
        return f"#{key}"
    raise UserError(
        f"a state with the key {key!r} cannot be saved", hint="keys that are strings, or numbers"
    )


def _as_key(part: str) -> str | int:
    if part[0] == "#":
        return int(part[1:])
    return "" if part == "{%" else part[1:].replace("%2F", "/").replace("%25", "%")


def _collect(nest: Nest, path: str, tensors: dict[str, Tensor]) -> None:
    if isinstance(nest, Tensor):
        tensors[path] = nest
    elif not nest:
        tensors[f"{path}/{_mark(nest)}"] = torch.empty(0, device="cpu")
    else:
        for part, value in _parts(nest):
            _collect(value, f"{path}/{part}", tensors)


def _restore(path: str, tensors: dict[str, Tensor]) -> Nest:
    if path in tensors:
        return tensors[path]
    inside = list(
        dict.fromkeys(
            name[len(path) + 1 :].split("/")[0] for name in tensors if name.startswith(path + "/")
        )
    )
    if not inside:
        raise UserError(
            f"these tensors are of no carried state: {path} is not among them",
            hint="what CarriedState.state_dict() gave",
        )
    if inside[0] in _EMPTY:
        return _EMPTY[inside[0]]()
    if inside[0][0] in "{#":
        return {_as_key(part): _restore(f"{path}/{part}", tensors) for part in inside}
    values = (_restore(f"{path}/{inside[0][0]}{i}", tensors) for i in range(len(inside)))
    return list(values) if inside[0][0] == "[" else tuple(values)
