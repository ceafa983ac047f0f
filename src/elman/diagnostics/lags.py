"""How far back the gradient reaches: ‖∂L_t/∂h_{t-k}‖ for every t and k."""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from elman.diagnostics.passage import Moments, Passage, shifted
from elman.errors import UserError
from elman.options import whole_number

Array = NDArray[np.float64]

BEYOND = 1e-3
"""Lags are followed until less than this share lies beyond them: 1 % of the tenth that the lag
within which 90 % lies leaves out, so that looking further would not move it."""
LEAST, MOST = 16, 1024
"""Lags are followed at least so far, where the text allows, and never further than so far."""
EVERY = 4
"""How many lags are followed between two looks at what lies beyond."""
LOSSES = 128
"""How many losses, spread over the second half of the passage, are followed."""


@dataclass(frozen=True, eq=False)
class ByLag:
    """The gradient of each loss by how many steps back it acts.

    `norms[i, k]` is ‖∂L_t/∂S_{t-k}‖ for the i-th loss that was followed, the earliest at t = first:
    S is the carried state of all layers (for an lstm h and c).
    """

    first: int
    norms: Array
    """(losses, lags + 1)"""

    @property
    def lags(self) -> int:
        """How many steps back the losses were followed."""
        return self.norms.shape[1] - 1

    @functools.cached_property
    def mean(self) -> Array:
        """‖∂L_t/∂h_{t-k}‖ at each lag k, averaged over the losses."""
        return self.norms.mean(0)

    def quantile(self, q: float) -> Array:
        """‖∂L_t/∂h_{t-k}‖ at each lag k that a share q of the losses stays below."""
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

    @functools.cached_property
    def share(self) -> Array:
        """share[k]: what part of Σ_k ‖∂L_t/∂h_{t-k}‖ (mean over t) lies at lags 0 … k."""
        summed = np.cumsum(self.mean)
        return summed / summed[-1] if summed[-1] > 0 else np.ones_like(summed)

    @property
    def beyond(self) -> float:
        """The share estimated to lie beyond the measured lags: what follows if the decay goes on.

        Over the last quarter of the lags mean[k] ≈ C qᵏ, so mean[K] q / (1 - q) lies beyond K. A
        gradient that does not decay has no end: ∞.
        """
        return _beyond(self.mean)

    @property
    def settled(self) -> bool:
        """Whether so little lies beyond that shares and horizons would not change by looking on.

        If not, every horizon is a lower bound and every share a window keeps an upper one.
        """
        return self.beyond < BEYOND

    def horizon(self, part: float) -> int:
        """The smallest lag at or below which `part` of the gradient lies."""
        if not 0 < part <= 1:
            raise UserError(f"part={part} must be above 0 and at most 1", hint="0.5, or 0.9")
        return int(np.argmax(self.share >= part - 1e-12))

    def kept(self, window: int) -> float:
        """The share a truncation window keeps: a loss at its p-th step sees lags 0 … p only.

        Losses fall evenly on the window's steps, so this is the mean of share[0 … window-1], lags
        beyond the measured ones counting as nothing.
        """
        window = whole_number("window", window, at_least=1, hint="35 is the notes' window")
        inside = self.share[: min(window, len(self.share))]
        return float((inside.sum() + max(window - len(self.share), 0)) / window)

    def recommend(self, part: float = 0.9) -> int:
        """The shortest window that keeps `part` of the gradient.

        What a window keeps grows with it; beyond the measured lags, L of them, a window of w keeps
        1 - (L - Σ share) / w.
        """
        if not 0 < part < 1:
            raise UserError(
                f"part={part} must lie between 0 and 1: no window keeps all of a gradient",
                hint="0.9, or 0.99",
            )
        measured = np.cumsum(self.share) / np.arange(1, len(self.share) + 1)
        if measured[-1] >= part:
            return int(np.argmax(measured >= part)) + 1
        window = max(1, math.floor((len(self.share) - self.share.sum()) / (1 - part)) - 1)
        while self.kept(window) < part:
            window += 1
        return window

    def words(self, window: int) -> str:
        """The answer in one line, for a truncation window of so many steps."""
        return words(
            self.horizon(0.5), self.horizon(0.9), window, self.kept(window), settled=self.settled
        )


def words(half: int, ninety: int, window: int, keeps: float, *, settled: bool) -> str:
    """Where the gradient lies, in one line; where lags were cut short, its bounds.

    >>> words(2, 14, 64, 0.961, settled=True)
    'half of the gradient lies within 2 steps, 90 % within 14; a window of 64 keeps 96 %'
    """
    least, most = ("", "") if settled else ("at least ", "at most ")
    return (
        f"half of the gradient lies within {least}{half} step{'' if half == 1 else 's'}, "
        f"90 % within {least}{ninety}; a window of {window} keeps {most}{100 * keeps:.0f} %"
    )


def by_lag(passage: Passage, lags: int | None = None) -> ByLag:
    """Exact norms of losses by lag: 0 … `lags`, or as many lags as it takes.

    With `lags`, every loss that has so many steps before it. Without, losses spread over the second
    half of the passage are followed until less than a thousandth lies beyond (`ByLag.settled`), or
    until the start of the passage or lag 1024 is reached.

    All losses go back together: lag k is one batched vector–Jacobian product over the losses, so
    the cost is that many steps of a batch, not one backward pass per loss.
    """
    if lags is not None and not 1 <= lags < len(passage):
        raise UserError(
            f"lags={lags} must be at least 1 and below the {len(passage)} steps of the passage",
            hint="a longer text, or fewer lags",
        )
    if lags is not None and (native := passage.norms_by_lag(lags)) is not None:
        return ByLag(lags, native.numpy())
    most = min(len(passage) // 2, MOST) if lags is None else lags
    at: Moments = slice(most, len(passage))
    if lags is None and len(passage) - most > LOSSES:
        at = torch.linspace(most, len(passage) - 1, LOSSES, device="cpu").long()
    G = passage.on_state(passage.pulls[at])
    norms = [G.norm(dim=1)]
    for k in range(most):
        G = passage.pull_back(shifted(at, -k), G)
        norms.append(G.norm(dim=1))
        look = lags is None and k + 1 >= LEAST and (k + 1) % EVERY == 0
        if look and _beyond(torch.stack(norms).mean(1).numpy()) < BEYOND:
            break
    return ByLag(most, torch.stack(norms, 1).numpy())


def _beyond(mean: Array) -> float:
    """Σ_{k>K} mean[k] as a part of Σ_k mean[k], the decay of the last quarter going on."""
    last = mean[-max(len(mean) // 4, 2) :]
    if not last.all():  # nothing arrives there any more
        return 0.0
    if len(mean) < 2 or not np.isfinite(mean).all():
        return math.inf
    q = math.exp(np.polyfit(np.arange(len(last)), np.log(last), 1)[0])
    if q >= 1:
        return math.inf
    tail = last[-1] * q / (1 - q)
    return float(tail / (mean.sum() + tail))
