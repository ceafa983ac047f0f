"""One update of the weights: clip, step, average; and the learning rate over a training.

g ← min(1, θ/‖g‖) g                   clipping to norm θ
w ← optimizer(w, η · g)               η from the schedule
a ← a + (1-d)(w - a)                  averaging (EMA), or the mean since `average_start` (ASGD)
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from elman.errors import UserError
from elman.kernels.cpu import KERNEL, clip_norm
from elman.options import Beside, check, option
from elman.training import optimizers

PANEL = "Updates"
SCHEDULES = ("constant", "cosine", "plateau")
AVERAGES = ("none", "ema", "asgd")
VALIDATED = Beside("validation", such_as=0.1)
"""What an option about validations needs."""
ENOUGH = 1 << 17
"""Weights from which on a second thread is worth waking for one pass over them."""


def _sgd(
    _: torch.optim.Optimizer, group: dict[str, Any], weights: list[Tensor], **guards: Tensor | None
) -> None:
    """w ← w - η (g + λ w)."""
    gradients = [cast(Tensor, w.grad) for w in weights]
    if guards:
        weights, gradients = _pieces(weights), _pieces(gradients)
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
        is_first_step=False,  # nor any other: that is momentum's
        **guards,
    )


def _adam(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    weights: list[Tensor],
    **guards: Tensor | None,
) -> None:
    """m ← β₁ m + (1-β₁) g,  v ← β₂ v + (1-β₂) g²,  w ← w - η m̂ / (√v̂ + ε)."""
    if not all(optimizer.state[w] for w in weights):
        _begin_averages(optimizer)
    fused: Any = (
        torch._fused_adamw_ if isinstance(optimizer, torch.optim.AdamW) else torch._fused_adam_
    )
    states = [optimizer.state[w] for w in weights]
    steps = [s["step"] for s in states]
    torch._foreach_add_(steps, 1)
    tensors = [weights, [cast(Tensor, w.grad) for w in weights]]
    tensors += [[s[name] for s in states] for name in ("exp_avg", "exp_avg_sq")]
    of_each = steps
    if guards:
        of_each = [s for s, w in zip(steps, weights, strict=True) for _ in _cut(w, weights)]
        tensors = [_pieces(each) for each in tensors]
    fused(
        *tensors,
        [],
        of_each,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        **guards,
    )
    if guards and guards["found_inf"] is not None:
        torch._foreach_sub_(steps, [guards["found_inf"]] * len(steps))


def _begin_averages(optimizer: Any) -> None:
    """m = v = 0 where there are none yet, made as torch makes them before a first step."""
    for group in optimizer.param_groups:
        optimizer._init_group(group, [], [], [], [], [], [])


DirectStep = Callable[..., None]


@dataclass(frozen=True)
class Optimizer:
    """One of torch's optimizers: how to build it, and which options are its own."""

    kind: type[torch.optim.Optimizer]
    arguments: dict[str, Any] = field(default_factory=dict)  # the same for every training
    own: tuple[str, ...] = ()  # fields of Optimisation that no other takes
    direct_step: DirectStep | None = None  # its fused operator, called without torch's preparations


FUSED = {"fused": True}
OPTIMIZERS = {
    "sgd": Optimizer(optimizers.SGD, FUSED, own=("momentum",), direct_step=_sgd),
    "adam": Optimizer(optimizers.Adam, FUSED, direct_step=_adam),
    "adamw": Optimizer(optimizers.AdamW, FUSED, direct_step=_adam),
}
"""Every optimizer: a new one is one entry here, an option of its own one field of Optimisation."""


@dataclass(frozen=True)
class Optimisation:
    """How weights follow gradients."""

    optimizer: str = option("adam", "How weights follow gradients", panel=PANEL, choices=OPTIMIZERS)
    learning_rate: float = option(
        1e-3, "Size of a step", panel=PANEL, above=0, hint="0.004 suits adam", later=True
    )
    momentum: float = option(
        0.0, "Of sgd", panel=PANEL, at_least=0, below=1, beside=Beside("optimizer", "sgd")
    )
    weight_decay: float = option(0.0, "On matrices", panel=PANEL, at_least=0)
    clip: float | None = option(
        1.0,
        "Largest ‖gradient‖; 0: any",
        panel=PANEL,
        above=0,
        hint="clip=None never clips",
        zero_is_none=True,
        later=True,
    )
    schedule: str = option(
        "constant",
        "Of the learning rate",
        panel=PANEL,
        choices=SCHEDULES,
        beside=replace(VALIDATED, only="plateau"),
    )
    warm_up: int = option(0, "Updates to full learning rate", panel=PANEL, at_least=0)
    plateau_factor: float = option(
        0.5,
        "Plateau: learning rate × this",
        panel=PANEL,
        at_least=0,
        below=1,
        beside=Beside("schedule", "plateau"),
    )
    plateau_patience: int = option(
        2,
        "Plateau: after so many validations without a better one",
        panel=PANEL,
        at_least=0,
        beside=Beside("schedule", "plateau"),
    )
    average: str = option("none", "Of the weights, to be used", panel=PANEL, choices=AVERAGES)
    average_decay: float = option(
        0.999, "Of ema", panel=PANEL, at_least=0, below=1, beside=Beside("average", "ema")
    )
    average_start: float = option(
        0.5,
        "Of asgd: when, as part of the training",
        panel=PANEL,
        at_least=0,
        below=1,
        beside=Beside("average", "asgd"),
    )

    def __post_init__(self) -> None:
        check(self)


def build_optimizer(model: nn.Module, settings: Optimisation) -> torch.optim.Optimizer:
    """The optimizer over what can be trained; weight decay pulls on matrices, never on biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    entry = OPTIMIZERS[settings.optimizer]
    own = {name: getattr(settings, name) for name in entry.own}
    build: Any = entry.kind
    return build(groups, settings.learning_rate, **entry.arguments, **own)


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, of any optimizer, to the last bit.

    On a CPU torch's fused operator is called directly: what torch does around it at every step
    (grouping by device and more) takes longer than the update of a small network. What the direct
    call does not do (momentum, amsgrad and the like) is left to torch.
    """
    step = _direct_step(optimizer)
    groups = [(g, [p for p in g["params"] if p.grad is not None]) for g in optimizer.param_groups]
    if step is None or not all(_is_plain(*group) for group in groups):
        optimizer.step()
        return
    with torch.no_grad(), _worthwhile_threads([w for _, weights in groups for w in weights]):
        for group, weights in groups:
            if weights:
                step(optimizer, group, weights)


PIECE = 4096


def take_guarded_step(
    optimizer: torch.optim.Optimizer, refuse: Tensor, scale: Tensor | None
) -> None:
    """`optimizer.step()` on a GPU, g divided by `scale`, and nothing moved where `refuse` is 1.

    By two numbers that torch's fused optimizers look for, made for losses that were scaled. They
    give 65,536 weights to one block of threads, which takes 13 µs for them: here weights are cut
    into smaller pieces, whose steps are the same to the last bit.
    """
    step: Any = optimizer
    step.found_inf, step.grad_scale = refuse, scale
    direct = _direct_step(optimizer)
    groups = [(g, [p for p in g["params"] if p.grad is not None]) for g in optimizer.param_groups]
    guards = {"found_inf": refuse, "grad_scale": scale}
    with torch.no_grad():
        if direct is None or not all(_is_plain(*group, "cuda") for group in groups):
            optimizer.step()
            return
        for group, weights in _merged(groups):
            direct(optimizer, group, weights, **guards)


def _merged(groups: list[tuple[dict[str, Any], list[Tensor]]]) -> list[Any]:
    """Groups that differ in nothing but their weights as one."""
    merged: list[tuple[dict[str, Any], list[Tensor]]] = []
    for group, weights in groups:
        for other, more in merged:
            if all(group[k] is other[k] or group[k] == other[k] for k in group if k != "params"):
                more += weights
                break
        else:
            merged += [(group, [*weights])] if weights else []
    return merged


def _pieces(tensors: list[Tensor]) -> list[Tensor]:
    """The same numbers in pieces that keep all SMs of a GPU busy."""
    return [part for t in tensors for part in _cut(t, tensors)]


def _cut(t: Tensor, among: list[Tensor]) -> tuple[Tensor, ...]:
    piece = max(PIECE, sum(other.numel() for other in among) // 128)
    return t.detach().view(-1).split(piece)


@contextmanager
def _worthwhile_threads(weights: list[Tensor]) -> Iterator[None]:
    """One thread for a pass over few weights, or beside programs that keep threads waiting.

    Such a pass sums nothing, so that the number of threads changes no bit.
    """
    threads = torch.get_num_threads()
    few = sum(w.numel() for w in weights) < ENOUGH
    alone = threads > 1 and (few or KERNEL.is_machine_busy())
    if alone:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if alone:
            torch.set_num_threads(threads)


def _direct_step(optimizer: torch.optim.Optimizer) -> DirectStep | None:
    for entry in OPTIMIZERS.values():
        if type(optimizer) is entry.kind:
            return entry.direct_step
    return None


_NOT_DIRECT = ("momentum", "nesterov", "dampening", "amsgrad", "maximize", "differentiable")


def _is_plain(group: dict[str, Any], weights: list[Tensor], device: str = "cpu") -> bool:
    """There, of one type, nothing but the textbook's step."""
    one_type = len({w.dtype for w in weights}) < 2
    textbook = bool(group["fused"]) and not any(group.get(name) for name in _NOT_DIRECT)
    here = all(w.device.type == device for w in weights)
    dense = device == "cpu" or all(
        w.is_contiguous() and cast(Tensor, w.grad).is_contiguous() for w in weights
    )
    return one_type and textbook and here and dense


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """‖g‖ over all parameters together, as one vector."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def clip_gradients(parameters: list[nn.Parameter], theta: float | None) -> float:
    """g ← min(1, θ/‖g‖) g in place; returns ‖g‖ as it was before.

    `torch.nn.utils.clip_grad_norm_` divides by ‖g‖ + 1e-6 instead, and so never clips to θ itself.
    """
    if theta is not None and not theta > 0:
        raise UserError(f"theta={theta} must be above 0", hint="theta=None never clips")
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        raise UserError("no parameter has a gradient to clip", hint="loss.backward() computes them")
    norm = clip_norm(KERNEL, gradients, math.inf if theta is None else theta)
    if norm is None:
        norm = float(gradient_norm(parameters))
        if theta is not None and norm > theta:
            torch._foreach_mul_(gradients, theta / norm)
    return norm


def learning_rate(settings: Optimisation, step: int, progress: float, plateau: float) -> float:
    """η for the update after `step` updates, `progress` of the whole training done.

    constant: η; cosine: η ½(1 + cos π·progress); plateau: η times `plateau`, which shrinks when
    validation stops improving. The first `warm_up` updates rise linearly to it.
    """
    rate = settings.learning_rate
    if settings.schedule == "cosine":
        rate *= 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    elif settings.schedule == "plateau":
        rate *= plateau
    return rate * min(1.0, (step + 1) / (settings.warm_up + 1))


class Average:
    """A running average of the weights, which generalises better than the last ones.

    ema:   a ← d_n a + (1-d_n) w with d_n = min(d, n/(n+9)): the first weights do not linger
    asgd:  the plain mean of every w since `average_start` of the training was done

    Polyak and Juditsky (1992).
    """

    def __init__(self, model: nn.Module, settings: Optimisation) -> None:
        self.settings = settings
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.count = 0
        self.averages = (
            [p.detach().clone() for p in self.weights] if settings.average != "none" else []
        )

    def share(self, progress: float) -> float:
        """The part 1 - d_n of the weights after one more update, which is counted; or 0."""
        if self.settings.average == "none":
            return 0.0
        if self.settings.average == "asgd" and progress < self.settings.average_start:
            return 0.0
        self.count += 1
        keep = 1 - 1 / self.count
        if self.settings.average == "ema":
            keep = min(self.settings.average_decay, (self.count - 1) / (self.count + 8))
        return 1 - keep

    def update(self, progress: float) -> None:
        """Take in the weights after one update."""
        share = self.share(progress)
        if share == 0:
            return
        with torch.no_grad(), _worthwhile_threads(self.averages):
            torch._foreach_lerp_(self.averages, [w.detach() for w in self.weights], share)

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
