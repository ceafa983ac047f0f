"""How often clipping bites, and the bound on one step's damage that it rests on."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from elman.defaults import learns
from elman.errors import UserError


@dataclass(frozen=True)
class Clipping:
    """The distribution of gradient norms before clipping, and the share above θ."""

    updates: int
    threshold: float | None
    median: float
    ninety: float
    largest: float
    clipped: float
    """share of updates whose norm exceeds the threshold"""


def clipping(norms: Sequence[float], threshold: float | None) -> Clipping:
    """Summarise gradient norms; g ← min(1, θ/‖g‖) g changes exactly those above θ."""
    values = np.asarray(norms, dtype=np.float64)
    if not len(values):
        raise UserError("there are no gradient norms yet", hint="train for at least one update")
    return Clipping(
        updates=len(values),
        threshold=threshold,
        median=float(np.median(values)),
        ninety=float(np.quantile(values, 0.9)),
        largest=float(values.max()),
        clipped=0.0 if threshold is None else float((values > threshold).mean()),
    )


@dataclass(frozen=True)
class StepBound:
    """What one step w ← w - η g did to the loss, and what it could have done at most.

    |f(w) - f(w - η g)| ≤ L η ‖g‖
    """

    change: float
    """|f(w) - f(w - η g)|, g after clipping"""
    length: float
    """η ‖g‖, g after clipping"""
    constant: float
    """L on the way: the largest ‖∇f‖ found between w and w - η g"""
    norm: float
    """‖g‖ before clipping"""

    @property
    def bound(self) -> float:
        """L η ‖g‖."""
        return self.constant * self.length


@learns
def step_bound(
    loss: Callable[[], Tensor],
    parameters: Iterable[Tensor],
    rate: float,
    theta: float | None = None,
    points: int = 33,
) -> StepBound:
    """Take a step of gradient descent, measure it, and put the parameters back.

    g = ∇f(w),   g ← min(1, θ/‖g‖) g

    A function that is smooth between two points changes by no more than the largest norm of its
    gradient between them, times their distance: that norm is the notes' Lipschitz constant L, for
    this step. It is looked for at `points` places, ends included, so a needle between two of them
    is missed. `loss` computes f from the parameters as they are; it must draw no random numbers.
    Frozen parameters stay where they are.
    """
    if rate <= 0:
        raise UserError(f"rate={rate} must be positive: a step has a length", hint="rate=0.1")
    if points < 2:
        raise UserError(
            f"points={points} must be at least 2: a step has two ends", hint="points=33"
        )
    if theta is not None and theta <= 0:
        raise UserError(f"theta={theta} must be positive", hint="None does not clip")
    moved = [p for p in parameters if p.requires_grad]
    if not moved:
        raise UserError(
            "none of the parameters wants a gradient, so no step can be taken",
            hint="model.requires_grad_(True), or of the parts that are to move",
        )
    before = [p.detach().clone() for p in moved]
    first, g = _value_and_gradient(loss, moved)
    norm = _norm(g)
    scale = rate * (1.0 if theta is None or norm <= theta else theta / norm)
    steepest, last = norm, first
    try:
        for k in range(1, points):
            _move(moved, before, g, -scale * k / (points - 1))
            last, there = _value_and_gradient(loss, moved)
            steepest = max(steepest, _norm(there))
    finally:
        _move(moved, before, g, 0.0)
    return StepBound(abs(first - last), scale * norm, steepest, norm)


def _value_and_gradient(
    loss: Callable[[], Tensor], parameters: Sequence[Tensor]
) -> tuple[float, Sequence[Tensor]]:
    value = loss()
    return value.item(), torch.autograd.grad(value, list(parameters), materialize_grads=True)


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt())


@torch.no_grad()
def _move(
    parameters: Sequence[Tensor], start: Sequence[Tensor], g: Sequence[Tensor], by: float
) -> None:
    for p, w, direction in zip(parameters, start, g, strict=True):
        p.copy_(w if by == 0 else w + by * direction)
