"""How far back the gradient reaches: ‖∂L_t/∂h_{t-k}‖ for every t and k."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from elman.diagnostics.passage import Passage
from elman.errors import UserError

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ByLag:
    """The gradient of each loss by how many steps back it acts.

    `norms[i, k]` is ‖∂L_t/∂S_{t-k}‖ with t = first + i: S is the carried state of all layers (for
    an lstm h and c).
    """

    first: int
    norms: Array
    """(losses, lags + 1)"""

    @property
    def mean(self) -> Array:
        return self.norms.mean(0)

    def quantile(self, q: float) -> Array:
        return np.quantile(self.norms, q, axis=0)

    @property
    def decay(self) -> float:
        """r in ‖∂L_t/∂h_{t-k}‖ ≈ C e^{rk}: least squares on the logarithm of the geometric mean.

        Below 0 the gradient vanishes, above 0 it explodes; -∞ where it is exactly zero.
        """
        with np.errstate(divide="ignore"):
            logs = np.log(self.norms).mean(0)
        if not np.isfinite(logs).all():
            return float("-inf")
        lag = np.arange(len(logs))
        return float(np.polyfit(lag, logs, 1)[0]) if len(logs) > 1 else 0.0

    @property
    def share(self) -> Array:
        """share[k]: what part of Σ_k ‖∂L_t/∂h_{t-k}‖ (mean over t) lies at lags 0 … k."""
        summed = np.cumsum(self.mean)
        return summed / summed[-1] if summed[-1] > 0 else np.ones_like(summed)

    def horizon(self, part: float) -> int:
        """The smallest lag at or below which `part` of the gradient lies."""
        return int(np.argmax(self.share >= part - 1e-12))

    def kept(self, window: int) -> float:
        """The share a truncation window keeps: a loss at its p-th step sees lags 0 … p only.

        Losses fall evenly on the window's steps, so this is the mean of share[0 … window-1], lags
        beyond the measured ones counting as nothing.
        """
        if window < 1:
            raise UserError(f"window={window} must be at least 1", hint="35 is the notes' window")
        inside = self.share[: min(window, len(self.share))]
        return float((inside.sum() + max(window - len(self.share), 0)) / window)

    def recommend(self, part: float = 0.9) -> int:
        """The shortest window that keeps `part` of the gradient."""
        window = 1
        while self.kept(window) < part:
            window += 1
        return window


def by_lag(passage: Passage, lags: int = 100) -> ByLag:
    """Exact norms for every loss that has `lags` steps before it.

    All losses go back together: lag k is one batched vector–Jacobian product over the losses, so
    the cost is `lags` steps of a batch, not one backward pass per loss.
    """
    if not 1 <= lags < len(passage):
        raise UserError(
            f"lags={lags} must be at least 1 and below the {len(passage)} steps of the passage",
            hint="a longer text, or fewer lags",
        )
    at = torch.arange(lags, len(passage))
    G = passage.on_state(passage.pulls[at])
    norms = [G.norm(dim=1)]
    for k in range(lags):
        G = passage.pull_back(at - k, G)
        norms.append(G.norm(dim=1))
    return ByLag(lags, torch.stack(norms, 1).numpy())
