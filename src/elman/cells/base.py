"""What a cell is: one step of a recurrence, and everything that others may ask about it."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

State = tuple[Tensor, ...]
"""What one layer carries from step to step: (h,), or (h, c) for an lstm; each (batch, size)."""


class Weights(NamedTuple):
    """The weights of one layer in one direction."""

    W_ih: Tensor  # (gates · hidden, input)
    W_hh: Tensor  # (gates · hidden, hidden or projection)
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    W_hr: Tensor | None = None  # (projection, hidden): a cell that projects, with proj_size only
    own: Tensor | None = None  # (its parameters, hidden): a cell with numbers of its own

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


class Slopes(NamedTuple):
    """The derivative of a pointwise step: how a unit's states after it change with the unit's own.

    So that, with a_h = h_{t-1} W_hhᵀ + b_hh,  ∂S_t/∂h_{t-1} = before_h + Σ_g diag(a_h[g]) W_hh[g].
    """

    a_h: Tensor
    """∂(each state after)/∂a_h of each gate: (batch, states, gates, hidden)"""
    before: Tensor
    """∂(each state after)/∂(each state before), a_h held: (batch, states, states, hidden)"""


class Cell(abc.ABC):
    """One step of a recurrence. A cell of your own needs a `name`, `gates` and `step`.

    A cell says here all that others ask about it, so nobody else lists cells by name; what it does
    not say has the value of the plainest cell.
    """

    name: str
    """As `elman.cells.named` and the weights' tensors know it."""
    gates: int = 1
    """How many blocks of `hidden` rows W_ih and W_hh have."""
    states: tuple[str, ...] = ("h",)
    """What it carries from step to step, one tensor or two; the first is its output."""
    keeps: int = 0
    """How many blocks of `hidden` columns `step` wants back in `step_backward`."""
    openings: tuple[str, ...] = ()
    """The names of the first kept blocks, for diagnostics; "" for one that is not a gate."""
    apart: tuple[int, ...] = ()
    """The gates that use a_hh alone before adding a_ih, so that b_ih and b_hh differ."""
    parameters: Mapping[str, float | None] = MappingProxyType({})
    """Its own numbers, one to a unit, and what each starts from; None: drawn like the weights."""
    heads: int = 1
    """Into how many blocks along the diagonal W_hh falls; 0: one to a unit, it is diagonal."""
    noise: tuple[float, ...] = ()
    """Of each block of `hidden` numbers drawn for every step, the probability of a 0: `noisy`."""
    fingerprint: str = ""
    """Of its equations, where a cell of the same name may be declared with others."""
    torch_mode: str | None = None
    """The `torch.nn.RNNBase` mode with the same parameters; None: `elman.nn.Layers` runs it."""
    kernels: frozenset[str] = frozenset()
    """The fast kernels that have it; the reference has every cell."""
    public_name: str | None = None
    """What `LanguageModel`, the forecasters and the command line call it, if not by its name."""
    spares_weights: bool = False
    """Whether `step_backward` takes dw=None: the weights' gradients are not wanted."""

    @property
    def model(self) -> str:
        """The name in `LanguageModel(cell=…)` and `elman train --model …`."""
        return self.public_name or self.name

    def state_sizes(self, hidden: int, projection: int = 0) -> tuple[int, ...]:
        """The width of each tensor of the state: only the first is projected."""
        return (projection or hidden, *[hidden] * (len(self.states) - 1))

    def given(self, noise: Tensor) -> Cell:
        """The cell at a step for which these numbers, (batch, noise · hidden), were drawn."""
        raise NotImplementedError(f"{self.name} draws nothing")

    @abc.abstractmethod
    def step(self, w: Weights, x: Tensor, state: State) -> tuple[State, Tensor | None]:
        """The state after x, and the gates that `step_backward` will want (None if none)."""

    def step_backward(
        self,
        w: Weights,
        x: Tensor,
        state: State,
        after: State,
        gates: Tensor | None,
        dafter: State,
        dw: Gradients | None,
        dx: Tensor | None,
    ) -> State:
        """Carry the pull on the state after x one step back; returns that on the state before.

        Adds this step's share to the weight gradients `dw` and writes ∂L/∂x into `dx`, in place.
        A cell without a derivative of its own has this one: the step again, under autograd.
        """
        return _by_autograd(self, w, x, state, dafter, w.zeros() if dw is None else dw, dx)

    def slopes(
        self, w: Weights, x: Tensor, state: State, after: State, gates: Tensor | None
    ) -> Slopes | None:
        """The step's derivative by its states, unit by unit; None: not known in this form."""
        return None


def _by_autograd(
    cell: Cell,
    w: Weights,
    x: Tensor,
    state: State,
    dafter: State,
    dw: Gradients,
    dx: Tensor | None,
) -> State:
    """(∂after/∂(x, state, w))ᵀ dafter."""
    with torch.enable_grad(), _seen_by_autograd():
        w = w.map(_leaf)
        x, state = x if dx is None else _leaf(x), tuple(map(_leaf, state))
        after, _ = cell.step(w, x, state)
        ends = [(a, d.to(a.dtype)) for a, d in zip(after, dafter, strict=True) if a.requires_grad]
    weights = [(p, d) for p, d in zip(w, dw, strict=True) if p is not None and d is not None]
    inputs = [*state, *(p for p, _ in weights), *([] if dx is None else [x])]
    outputs, pulls = [a for a, _ in ends], [d for _, d in ends]
    gradients = torch.autograd.grad(
        outputs, inputs, pulls, allow_unused=True, materialize_grads=True
    )
    for (_, d), more in zip(weights, gradients[len(state) :], strict=False):
        d.add_(more)
    if dx is not None:
        dx.copy_(gradients[-1])
    return tuple(d.to(p.dtype) for d, p in zip(gradients, dafter, strict=False))


def _seen_by_autograd() -> contextlib.AbstractContextManager[object]:
    """A block that autograd records, also inside an operator of `torch.compile`.

    There it is off, and every derivative would be zero.
    """
    unseen = torch._C._dispatch_tls_local_exclude_set()
    key = torch._C.DispatchKey.AutogradFunctionality
    if not unseen.has(key):
        return contextlib.nullcontext()
    seen = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(seen, unseen.remove(key))


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


def read(W_ih: Tensor, x: Tensor, b_ih: Tensor | None) -> Tensor:
    """x W_ihᵀ + b_ih; an integer x is the column it names: a one-hot row, looked up."""
    if x.is_floating_point():
        return torch.nn.functional.linear(x, W_ih, b_ih)
    columns = W_ih.index_select(1, x).T
    return columns if b_ih is None else columns + b_ih


def pull_back(
    w: Weights,
    x: Tensor,
    h: Tensor,
    da_ih: Tensor,
    da_hh: Tensor,
    dw: Gradients | None,
    dx: Tensor | None,
) -> None:
    """From the pulls on a_ih = x W_ihᵀ + b_ih and a_hh = h W_hhᵀ + b_hh those on weights and x.

    dW_ih += da_ihᵀ x,   db_ih += Σ_batch da_ih,   dx = da_ih W_ih
    dW_hh += da_hhᵀ h,   db_hh += Σ_batch da_hh
    """
    if dw is not None:
        add_outer(dw.W_ih, da_ih, x)
        add_outer(dw.W_hh, da_hh, h)
        add_batch(dw.b_ih, da_ih)
        add_batch(dw.b_hh, da_hh)
    if dx is not None:
        torch.mm(da_ih, w.W_ih, out=dx)


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


def diagonal_blocks(W_hh: Tensor, heads: int) -> Tensor:
    """1 where a unit reads a unit of its own head, else 0; the same for every gate."""
    hidden = W_hh.shape[1]
    head = torch.arange(hidden, device=W_hh.device) // (hidden // (heads or hidden))
    return (head[:, None] == head).to(W_hh.dtype).repeat(len(W_hh) // hidden, 1)
