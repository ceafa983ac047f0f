"""Weights of a mixture that learn as the text goes by, and need no other text to be chosen on.

    P(x_t) = Σ_j w_j P_j(x_t),      log w_j ← log w_j + rate · w_j (P_j(x_t) / P(x_t) - 1)

then made to sum to one: a step along the gradient of log P(x_t) with respect to log w, taken after
x_t was predicted. Kivinen and Warmuth (1997), "Exponentiated gradient versus gradient descent".
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError

Floats = NDArray[np.float64]

RATE = 0.1
"""Fast enough to find the weights within a page, slow enough to keep them."""


class Online(NamedTuple):
    """log P of each token by the mixture, and the weights, averaged over the text."""

    log_p: Floats
    weights: Floats


def mix_online(log_p: Floats, rate: float = RATE) -> Online:
    """Mix models, given log P of each token by each, (models, tokens), weights learnt on the way.

    >>> found = mix_online(np.log([[0.5] * 50, [0.1] * 50]), rate=1.0)
    >>> bool(found.log_p[0] < found.log_p[-1]), found.weights.round(1).tolist()
    (True, [0.9, 0.1])
    """
    best = log_p.max(axis=0)
    if log_p.shape[1] and not np.isfinite(best).all():
        raise UserError(
            "a token that every model holds impossible cannot be mixed", hint="add a smoothed model"
        )
    p = np.exp(log_p - best).T
    w = np.full(len(log_p), 1 / len(log_p))
    mixed, total = np.empty(len(p)), np.zeros(len(w))
    for t, p_t in enumerate(p):
        mixed[t] = w @ p_t
        total += w
        w = w * np.exp(rate * w * (p_t / mixed[t] - 1))
        w /= w.sum()
    return Online(np.log(mixed) + best, total / max(len(p), 1))


def reading_on(fit: Callable[[Any], Any], train: Any, ids: Any, every: int) -> Floats:
    """log P of each of `ids` after the first by a counting model that goes on counting.

    `fit` counts a text; every so many tokens it counts again, with all that was read by then.
    """
    train, ids = np.asarray(train), np.asarray(ids)
    scores = []
    for start in range(1, len(ids), every):
        known = np.concatenate([train, ids[:start]])
        model = fit(known)
        before = known[max(0, len(known) - model.order + 1) :]
        stretch = np.concatenate([before, ids[start : start + every]])
        scores.append(model.score(stretch)[len(before) :])
    return np.concatenate(scores) if scores else np.zeros(0)
