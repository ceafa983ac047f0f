"""Writing on a CPU: choosing a token and reading it follow each other in native code.

    p ∝ exp(o / temperature) of the tokens that are kept,   x the first token with Σ_{v ≤ x} p_v > u
    or, by a beam, the texts of the highest log p(y | x) = Σ_t log p(y_t | x, y_1 … y_{t-1})

A step of a small model takes a processor a few microseconds, and Python ten times as long to ask
for it and to draw from its scores. So Python asks for many tokens at a time, as long as a reader
who waits for them does not notice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elman.kernels.cpu import Steps
from elman.kernels.cpu.steps import rules_of
from elman.language_model.searcher import Beam
from elman.language_model.turns import not_numbers
from elman.language_model.writer import Rules, columns

MANY = 256
"""Tokens of each text that are written before Python sees them, at most."""
UNNOTICED = 0.02
"""Seconds that a reader may wait for tokens which are written already."""


def written(
    steps: Steps, logits: Tensor, length: int, rules: Rules, chances: list[Iterator[float]]
) -> Iterator[list[int]]:
    """One token for each text at every step, from these logits and the state of `steps` on."""
    asked = rules_of(rules.temperature, rules.top_k, rules.top_p, rules.exclude)
    scores = logits.detach().to("cpu", steps.dtype, copy=True).contiguous()
    last: Tensor | None = None
    count = 1
    while length:
        begun = time.perf_counter()
        drawn: Tensor | int = count
        if rules.temperature > 0:
            drawn = torch.tensor(
                [[*map(next, chances)] for _ in range(count)], dtype=torch.float64, device="cpu"
            )
        tokens = steps.write(scores, asked, last, drawn)
        taken = time.perf_counter() - begun
        yield from columns(tokens)
        last, length = tokens[-1], length - count
        count = _next(count, taken, length)


def searched(
    steps: Steps, logits: Tensor, length: int, exclude: Sequence[int]
) -> tuple[Beam, NDArray[np.float64]]:
    """The steps of a beam from these logits of one text on, and its last scores: see `searcher`.

    It is as wide as `steps` has rows, which begin in the state of that text.
    """
    rows, asked = steps.shape[0], rules_of(1.0, None, None, exclude)
    scores = logits.detach().to("cpu", steps.dtype).repeat(rows, 1)
    sums = torch.full((rows,), -math.inf, dtype=torch.float64, device="cpu")
    sums[0] = 0
    found: Beam = []
    last: tuple[Tensor, Tensor] | None = None
    count = 1
    while len(found) < length:
        begun = time.perf_counter()
        both = steps.search(scores, asked, last, sums, count)
        taken = time.perf_counter() - begun
        if both is None:
            raise not_numbers()
        found += zip(*(t.numpy() for t in both), strict=True)
        last = both[0][-1], both[1][-1]
        count = _next(count, taken, length - len(found))
    return found, sums.numpy()


def _next(count: int, taken: float, left: int) -> int:
    """How many tokens to ask for after so many, which took so long: twice as many, unnoticed."""
    return min(2 * count if 2 * taken < UNNOTICED else count, left, MANY)
