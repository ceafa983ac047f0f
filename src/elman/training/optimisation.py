"""One update of the weights: clip, step, average; and the learning rate over a training.

g ← min(1, θ/‖g‖) g                   clipping to norm θ
w ← optimizer(w, η · g)               η from the schedule
a ← a + (1-d)(w - a)                  averaging (EMA), or the mean since `average_start` (ASGD)
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from elman.errors import UserError
from elman.kernels.cpu import KERNEL, clip_norm

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "plateau")
AVERAGES = ("none", "ema", "asgd")


@dataclass(frozen=True)
class Optimisation:
    """How weights follow gradients."""

    optimizer: str = "adam"
    learning_rate: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = 1.0
    schedule: str = "constant"
    warm_up: int = 0
    plateau_factor: float = 0.5
    plateau_patience: int = 2
    average: str = "none"
    average_decay: float = 0.999
    average_start: float = 0.5

    def __post_init__(self) -> None:
        for name, known in (
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("average", AVERAGES),
        ):
            if getattr(self, name) not in known:
                raise UserError(
                    f"unknown {name} {getattr(self, name)!r}", hint=f"one of {', '.join(known)}"
                )
        if not 0 < self.learning_rate < math.inf:
            raise UserError(
                f"learning_rate={self.learning_rate} must be positive", hint="0.004 suits adam"
            )
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"clip={self.clip} must be positive", hint="clip=None never clips")
        for name in ("weight_decay", "warm_up", "plateau_patience"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("momentum", "average_decay", "average_start", "plateau_factor"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.momentum and self.optimizer != "sgd":
            raise UserError(
                f"momentum={self.momentum} belongs to sgd, not {self.optimizer}",
                hint="leave momentum at 0, or optimizer='sgd'",
            )


def build_optimizer(model: nn.Module, how: Optimisation) -> torch.optim.Optimizer:
    """The optimizer over what can be trained; weight decay pulls on matrices, never on biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": how.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if how.optimizer == "sgd":
        return torch.optim.SGD(groups, how.learning_rate, momentum=how.momentum, fused=True)
    kind = torch.optim.Adam if how.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, how.learning_rate, fused=True)


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` of an optimizer that `build_optimizer` made.

    On a CPU torch's fused operator is called directly: what torch does around it at every step
    (grouping by device and more) takes longer than the update of a small network.
    """
    groups = [(g, [p for p in g["params"] if p.grad is not None]) for g in optimizer.param_groups]
    update = _sgd if isinstance(optimizer, torch.optim.SGD) else _adam
    if all(_is_plain(optimizer, group, weights) for group, weights in groups):
        with torch.no_grad():
            for group, weights in groups:
                if weights:
                    update(optimizer, group, weights)
    else:
        optimizer.step()


def _is_plain(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], weights: list[Tensor]
) -> bool:
    """On a CPU, of one type, without momentum; torch makes Adam's averages at the first step."""
    ready = "betas" not in group or all(optimizer.state[w] for w in weights)
    one_type = len({w.dtype for w in weights}) < 2
    return ready and one_type and not group.get("momentum") and all(w.is_cpu for w in weights)


def _sgd(_: torch.optim.Optimizer, group: dict[str, Any], weights: list[Tensor]) -> None:
    """w ← w - η (g + λ w)."""
    torch._fused_sgd_(
        weights,
        [cast(Tensor, w.grad) for w in weights],
        [],
        weight_decay=group["weight_decay"],
        momentum=0.0,
        lr=group["lr"],
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )


def _adam(optimizer: torch.optim.Optimizer, group: dict[str, Any], weights: list[Tensor]) -> None:
    """m ← β₁ m + (1-β₁) g,  v ← β₂ v + (1-β₂) g²,  w ← w - η m̂ / (√v̂ + ε)."""
    fused = torch._fused_adamw_
    if not isinstance(optimizer, torch.optim.AdamW):
        fused = torch._fused_adam_
    states = [optimizer.state[w] for w in weights]
    steps = [s["step"] for s in states]
    torch._foreach_add_(steps, 1)
    fused(
        weights,
        [cast(Tensor, w.grad) for w in weights],
        [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
        [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """‖g‖ over all parameters together, as one vector."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def clip_gradients(parameters: list[nn.Parameter], theta: float | None) -> float:
    """g ← min(1, θ/‖g‖) g in place; returns ‖g‖ as it was before.

    `torch.nn.utils.clip_grad_norm_` divides by ‖g‖ + 1e-6 instead, and so never clips to θ itself.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = clip_norm(KERNEL, gradients, math.inf if theta is None else theta)
    if norm is None:
        norm = float(gradient_norm(parameters))
        if theta is not None and norm > theta:
            torch._foreach_mul_(gradients, theta / norm)
    return norm


def learning_rate(how: Optimisation, step: int, progress: float, plateau: float) -> float:
    """η for the update after `step` updates, `progress` of the whole training done.

    constant: η; cosine: η ½(1 + cos π·progress); plateau: η times `plateau`, which shrinks when
    validation stops improving. The first `warm_up` updates rise linearly to it.
    """
    rate = how.learning_rate
    if how.schedule == "cosine":
        rate *= 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    elif how.schedule == "plateau":
        rate *= plateau
    return rate * min(1.0, (step + 1) / (how.warm_up + 1))


class Average:
    """A running average of the weights, which generalises better than the last ones.

    ema:   a ← d_n a + (1-d_n) w with d_n = min(d, n/(n+9)): the first weights do not linger
    asgd:  the plain mean of every w since `average_start` of the training was done

    Polyak and Juditsky (1992).
    """

    def __init__(self, model: nn.Module, how: Optimisation) -> None:
        self.how = how
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.count = 0
        self.averages = [p.detach().clone() for p in self.weights] if how.average != "none" else []

    def update(self, progress: float) -> None:
        """Take in the weights after one update."""
        if self.how.average == "none":
            return
        if self.how.average == "asgd" and progress < self.how.average_start:
            return
        self.count += 1
        keep = 1 - 1 / self.count
        if self.how.average == "ema":
            keep = min(self.how.average_decay, (self.count - 1) / (self.count + 8))
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, [w.detach() for w in self.weights], 1 - keep)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Lend the model its averaged weights inside this block, once there are any."""
        if not self.count:
            yield
            return
        latest = [w.detach().clone() for w in self.weights]
        try:
            self._put(self.averages)
            yield
        finally:
            self._put(latest)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        torch._foreach_copy_([w.detach() for w in self.weights], values)
