"""The same gradient by every carry, measured against the exact one."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from elman.defaults import learns
from elman.diagnostics.passage import exact_copy, text_of_steps
from elman.errors import UserError, counted
from elman.gradients import Carry, Full, Randomized, Sliding, Truncated
from elman.language_model import LanguageModel


@dataclass(frozen=True)
class CarryScore:
    """One carry against the full gradient g of the recurrent weights.

    With draws g_1 … g_n (one for a carry without chance) of mean ḡ:
    """

    carry: Carry
    cosine: float
    """mean of cos(g_i, g)"""
    norm_ratio: float
    """mean of ‖g_i‖ / ‖g‖"""
    bias: float
    """‖ḡ - g‖ / ‖g‖: for a randomised carry it shrinks as 1/√draws"""
    deviation: float
    """√(mean ‖g_i - ḡ‖²) / ‖g‖"""
    seconds: float
    """mean time of one forward and backward pass"""
    steps_kept: int
    """longest stretch of states that a gradient crosses, so must be kept"""

    @property
    def name(self) -> str:
        """The carry in words."""
        return self.carry.words


def carries(window: int, seed: int = 0) -> list[Carry]:
    """A representative list around one window: exact, truncated, sliding, randomised."""
    half, double = max(window // 2, 1), 2 * window
    keep = 1 - 1 / window if window > 1 else 0.5
    return [
        Full(),
        Truncated(half),
        Truncated(window),
        Truncated(double),
        Sliding(every=half, steps=window),
        Randomized(keep=keep, seed=seed),
        Randomized(keep=1 - 1 / (4 * window), seed=seed),
        Randomized.polynomial(mean=max(window, 2), seed=seed),
    ]


@learns
def compare_carries(
    model: LanguageModel, ids: Any, window: int, draws: int = 30, seed: int = 0
) -> list[CarryScore]:
    """The gradient of the mean loss over `ids` by each of `carries(window)`, in float64."""
    ids = text_of_steps(model, ids, "diagnose")
    if len(ids) <= 2 * window:
        raise UserError(
            f"{counted(len(ids), 'tokens')} are too few to compare windows up to {2 * window}",
            hint="a longer text, or a smaller window",
        )
    exact = _gradient(model, ids, Full())[0]
    return [_score(model, ids, carry, exact, draws) for carry in carries(window, seed)]


def _score(
    model: LanguageModel, ids: Tensor, carry: Carry, exact: Tensor, draws: int
) -> CarryScore:
    times = draws if carry.random else 1
    drawn = [_gradient(model, ids, carry) for _ in range(times)]
    g = torch.stack([gradient for gradient, _ in drawn])
    size, mean = exact.norm(), g.mean(0)
    return CarryScore(
        carry=carry,
        cosine=float(F.cosine_similarity(g, exact[None], dim=1).mean()),
        norm_ratio=float((g.norm(dim=1) / size).mean()),
        bias=float((mean - exact).norm() / size),
        deviation=float((g - mean).square().sum(1).mean().sqrt() / size),
        seconds=sum(seconds for _, seconds in drawn) / times,
        steps_kept=max(stop - start for start, stop in carry.stretches(len(ids) - 1)),
    )


def _gradient(model: LanguageModel, ids: Tensor, carry: Carry) -> tuple[Tensor, float]:
    """The gradient of the recurrence's parameters as one vector, and how long it took."""
    exact: Any = exact_copy(model)
    exact.recurrence.carry = carry
    start = time.perf_counter()
    logits, _ = exact(ids[None, :-1])
    F.cross_entropy(logits[0], ids[1:]).backward()
    seconds = time.perf_counter() - start
    return torch.cat(
        [p.grad.flatten() for p in exact.recurrence.parameters() if p.grad is not None]
    ), seconds
