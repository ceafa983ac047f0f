"""Cells: one step of a recurrence, its equation and its derivative.

A cell reads an input x_t and the state before it, and writes the state after it. All cells hold
PyTorch's tensors in PyTorch's orientation and gate order, so weights interchange with `torch.nn`:

    a_ih = x_t W_ihᵀ + b_ih          (gates · hidden)
    a_hh = h_{t-1} W_hhᵀ + b_hh

and differ in what they make of a_ih and a_hh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

State = tuple[Tensor, ...]
"""(h,), or (h, c) for an lstm; each (batch, size)."""


class Weights(NamedTuple):
    """The weights of one layer in one direction."""

    W_ih: Tensor  # (gates · hidden, input)
    W_hh: Tensor  # (gates · hidden, hidden or projection)
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    W_hr: Tensor | None = None  # (projection, hidden): an lstm with proj_size only

    @property
    def hidden_size(self) -> int:
        """Units before projection; for a cell with `gates` gates W_ih has gates · hidden rows."""
        return self.W_hh.shape[1] if self.W_hr is None else self.W_hr.shape[1]

    def zeros(self) -> Gradients:
        """Where gradients of these weights are summed: in float32 for half precision."""
        return self.map(
            lambda p: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        )

    def map(self, f: Callable[[Tensor], Tensor]) -> Weights:
        """f of every tensor that is there."""
        W_ih, W_hh, *rest = self
        return Weights(f(W_ih), f(W_hh), *(None if p is None else f(p) for p in rest))


Gradients = Weights
"""∂L/∂ each of the weights, in the place of the weight it belongs to."""


class Cell(Protocol):
    """One step forwards, and the same step backwards."""

    @property
    def gates(self) -> int:
        """How many blocks of `hidden` rows W_ih and W_hh have."""
        ...

    @property
    def keeps(self) -> int:
        """How many blocks of `hidden` columns `step` wants back in `step_backward`."""
        ...

    def step(self, w: Weights, x: Tensor, state: State) -> tuple[State, Tensor | None]:
        """The state after x, and the gates that `step_backward` will want (None if none)."""
        ...

    def step_backward(
        self,
        w: Weights,
        x: Tensor,
        state: State,
        after: State,
        gates: Tensor | None,
        dafter: State,
        dw: Gradients,
    ) -> tuple[Tensor, State]:
        """Carry the pull on the state after x one step back.

        Returns da_ih = ∂L/∂a_ih, from which dx = da_ih W_ih, and the pull on the state before;
        adds this step's share to the weight gradients `dw` in place.
        """
        ...


def read(W_ih: Tensor, x: Tensor, b_ih: Tensor | None) -> Tensor:
    """x W_ihᵀ + b_ih; an integer x is the column it names: a one-hot row, looked up."""
    if x.is_floating_point():
        return torch.nn.functional.linear(x, W_ih, b_ih)
    columns = W_ih.index_select(1, x).T
    return columns if b_ih is None else columns + b_ih


def add_outer(dW: Tensor, da: Tensor, x: Tensor) -> None:
    """dW += daᵀ x, summed over the batch; an integer x adds into the columns it names."""
    if not x.is_floating_point():
        dW.T.index_put_((x,), da.to(dW.dtype), accumulate=True)
    elif dW.dtype == da.dtype:
        dW.addmm_(da.T, x)
    else:  # half-precision steps, summed in float32
        dW.add_(da.T @ x)


def add_batch(db: Tensor | None, da: Tensor) -> None:
    """db += Σ_batch da."""
    if db is not None:
        db.add_(da.sum(0, dtype=db.dtype))


@functools.cache
def named(name: str) -> Cell:
    """The cell called `tanh`, `relu`, `linear`, `gru` or `lstm`."""
    from elman.cells import elman, gru, linear, lstm

    cells: dict[str, Cell] = {
        "tanh": elman.TANH,
        "relu": elman.RELU,
        "linear": linear.LINEAR,
        "gru": gru.GRU,
        "lstm": lstm.LSTM,
    }
    return cells[name]
