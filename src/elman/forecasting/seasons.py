"""How long a season is, where nobody said: a length whose rounds resemble one another.

For each length m what is slower than m is taken away (a moving mean over m steps, the ends of an
even one counted half), and every round of m steps is forecast by the mean of the other rounds. What
share of the variance that explains is negative for what does not repeat, however it wanders.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from elman.errors import counted
from elman.forecasting.series import Series

_ROUNDS = 4
"""How many whole rounds say that something repeats."""
_LONGEST = 400
_ASKED = 50
"""How many series of a panel are asked at most."""
_EXPLAINED, _OF_FEW = 0.35, 2.5
"""The share of variance that other rounds must explain; of n steps at least 2.5 / √n, for few
resemble one another by chance."""
_AS_GOOD = 1.2
"""How much more a part of the best length may leave unexplained: what repeats after 12 steps does
so after 24."""


def found(*panel: NDArray[np.float64]) -> int | None:
    """The season of a series, or of several together, in steps; None where nothing repeats beyond
    doubt. Of several the longer half is asked, and three of four must repeat.

    >>> t = np.arange(60)
    >>> found(np.sin(2 * np.pi * t / 12) + 0.1 * t), found(np.cumsum(np.sin(t**3.0)))
    (12, None)
    """
    middle = sorted(map(len, panel))[len(panel) // 2]
    long = [x for x in panel if len(x) >= middle]
    asked = long[:: -(-len(long) // _ASKED)]
    longest = min(_LONGEST, middle // (_ROUNDS + 1))
    if longest < 2:
        return None
    # one more, for rounds of nearly the right length resemble one another, too
    shares = {m: [_explained(x, m) for x in asked] for m in range(2, longest + 2)}
    left = {m: 1 - float(np.quantile(share, 0.25)) for m, share in shares.items()}
    best = min(left, key=left.__getitem__)
    if best > longest or left[best] > 1 - max(_EXPLAINED, _OF_FEW / math.sqrt(middle)):
        return None
    return next(m for m in left if best % m == 0 and left[m] <= _AS_GOOD * left[best])


def with_season(panel: list[Series]) -> list[Series]:
    """Series whose season nobody said with the one that was found, which the longest one says."""
    if any(s.season is not None for s in panel):
        return panel
    season = found(*(s.values[:, 0] for s in panel))
    if season is None:
        return panel
    longest = max(panel, key=len)
    others = f" and {counted(len(panel) - 1, 'others')}" if len(panel) > 1 else ""
    note = (
        f"{longest.name}{others}: a season of {season} steps, found in the data; "
        "--season 1 for none"
    )
    return [
        replace(s, season=season, notes=(*s.notes, note) if s is longest else s.notes)
        for s in panel
    ]


def _explained(x: NDArray[np.float64], m: int) -> float:
    """1 - Σ (y - ȳ)² / Σ y²: y what is left of x, ȳ the same place in the mean other round."""
    weights = np.ones(m) if m % 2 else np.r_[0.5, np.ones(m - 1), 0.5]
    before = len(weights) // 2
    y = x[before : len(x) - before] - np.convolve(x, weights / m, "valid")
    rounds = y[len(y) % m :].reshape(-1, m)
    others = (rounds.sum(0) - rounds) / (len(rounds) - 1)
    whole = float(np.square(rounds).sum())
    if whole <= rounds.size * (1e-12 * np.abs(x).max()) ** 2:  # rounding errors repeat themselves
        return 0.0
    return 1 - float(np.square(rounds - others).sum()) / whole
