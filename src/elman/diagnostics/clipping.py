"""How often clipping bites: the norms of the gradient over a training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
