"""The state that crosses a window's edge, for truncated backpropagation in anyone's loop.

state = CarriedState()
for x, y in batches.streams(ids, batch=32, window=35):
    logits, after = model(x, state.value)
    ...                                    # loss, backward, step
    state.carry(after)                     # the state crosses the edge, the gradient does not
"""

from typing import final

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
# divided by `/`. What holds no tensor leaves its mark alone, on an empty one.
_EMPTY = {"?": lambda: None, "(": tuple, "[": list, "{": dict}


def _mark(nest: Nest) -> str:
    return {type(None): "?", dict: "{", list: "["}.get(type(nest), "(")


def _collect(nest: Nest, path: str, tensors: dict[str, Tensor]) -> None:
    if isinstance(nest, Tensor):
        tensors[path] = nest
    elif not nest:
        tensors[f"{path}/{_mark(nest)}"] = torch.empty(0, device="cpu")
    else:
        items = nest.items() if isinstance(nest, dict) else enumerate(nest)
        for key, value in items:
            _collect(value, f"{path}/{_mark(nest)}{key}", tensors)


def _restore(path: str, tensors: dict[str, Tensor]) -> Nest:
    if path in tensors:
        return tensors[path]
    inside = list(
        dict.fromkeys(
            name[len(path) + 1 :].split("/")[0] for name in tensors if name.startswith(path + "/")
        )
    )
    if inside[0] in _EMPTY:
        return _EMPTY[inside[0]]()
    if inside[0][0] == "{":
        return {part[1:]: _restore(f"{path}/{part}", tensors) for part in inside}
    values = (_restore(f"{path}/{inside[0][0]}{i}", tensors) for i in range(len(inside)))
    return list(values) if inside[0][0] == "[" else tuple(values)
