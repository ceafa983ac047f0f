"""Writing on a CPU: drawing a token and reading it follow each other in native code.

    p ∝ exp(o / temperature) of the tokens that are kept,   x the first token with Σ_{v ≤ x} p_v > u

A step of a small model takes a processor a few microseconds, and Python ten times as long to ask
for it and to draw from its scores. So Python asks for many tokens at a time, as long as a reader
who waits for them does not notice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from elman.kernels.cpu import Steps
from elman.kernels.cpu.steps import rules_of
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
        count = min(2 * count if 2 * taken < UNNOTICED else count, length, MANY)
