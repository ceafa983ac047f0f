"""One update of the weights: clip, step, average; and the learning rate over a training.

g ← min(1, θ/‖g‖) g                   clipping to norm θ
w ← optimizer(w, η · g)               η from the schedule
a ← a + (1-d)(w - a)                  averaging (EMA), or the mean since `average_start` (ASGD)
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from elman.errors import UserError
from elman.kernels.cpu import KERNEL

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
        return Sgd(groups, how.learning_rate, momentum=how.momentum, fused=True)
    kind = Adam if how.optimizer == "adam" else AdamW
    return kind(groups, how.learning_rate, fused=True)


class _Direct(torch.optim.Optimizer):
    """torch's optimizer, its fused operator called at once.

    What torch does around that operator at every step (grouping by device and more) takes
    longer than the update of a small network. Anything but the plain case is left to torch.
    """

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            return super().zero_grad(set_to_none)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None
        return None

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        jobs = [(group, self._trained(group)) for group in self.param_groups]
        if closure is not None or self._told() or not all(self._is_plain(w) for _, w in jobs):
            torchs: Any = super().step.__func__  # pyright: ignore[reportAttributeAccessIssue]
            hooked = getattr(torchs, "hooked", False)
            return (torchs if hooked else self.profile_hook_step(torchs))(self, closure)
        with torch.no_grad():
            for group, weights in jobs:
                if weights:
                    self._update(group, weights, [w.grad for w in weights])
        return None

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def _told(self) -> bool:
        """Whether there are hooks to call, or gradients that are scaled or may be skipped."""
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        scaled = hasattr(self, "grad_scale") or hasattr(self, "found_inf")
        return bool(hooks or scaled or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)

    def _trained(self, group: dict[str, Any]) -> list[Tensor]:
        return [p for p in group["params"] if p.grad is not None]

    def _is_plain(self, weights: list[Tensor]) -> bool:
        """Whether `_update` can take these: on a CPU, of one type."""
        told = hasattr(self, "found_inf") or hasattr(self, "grad_scale")
        return not told and all(w.is_cpu for w in weights) and len({w.dtype for w in weights}) < 2

    def _update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Any]) -> None:
        raise NotImplementedError


class Sgd(_Direct, torch.optim.SGD):
    """w ← w - η (g + λ w); with momentum, torch's own."""

    def _is_plain(self, weights: list[Tensor]) -> bool:
        return not self.defaults["momentum"] and super()._is_plain(weights)

    def _update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Any]) -> None:
        torch._fused_sgd_(
            weights,
            gradients,
            [],
            weight_decay=group["weight_decay"],
            momentum=0.0,
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
        )


class _DirectAdam(_Direct):
    """m ← β₁ m + (1-β₁) g,  v ← β₂ v + (1-β₂) g²,  w ← w - η m̂ / (√v̂ + ε)."""

    _fused: Any

    def _is_plain(self, weights: list[Tensor]) -> bool:
        known = all(self.state[w] for w in weights)  # torch makes m and v at the first step
        return known and super()._is_plain(weights)

    def _update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Any]) -> None:
        states = [self.state[w] for w in weights]
        steps = [s["step"] for s in states]
        torch._foreach_add_(steps, 1)
        self._fused(
            weights,
            gradients,
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


class Adam(_DirectAdam, torch.optim.Adam):
    """Decay, where there is any, added to the gradient."""

    _fused = staticmethod(torch._fused_adam_)


class AdamW(_DirectAdam, torch.optim.AdamW):
    """Decay taken from the weights themselves."""

    _fused = staticmethod(torch._fused_adamw_)


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """‖g‖ over all parameters together, as one vector."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def clip_gradients(parameters: list[nn.Parameter], theta: float | None) -> float:
    """g ← min(1, θ/‖g‖) g in place; returns ‖g‖ as it was before.

    `torch.nn.utils.clip_grad_norm_` divides by ‖g‖ + 1e-6 instead, and so never clips to θ itself.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = KERNEL.clip(gradients, math.inf if theta is None else theta)
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
