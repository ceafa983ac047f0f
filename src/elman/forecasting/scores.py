"""How good forecasts were at past origins, and how wide their intervals must be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.forecasting import accuracy
from elman.forecasting.intervals import GRID, MIDDLE, interval, nested
from elman.forecasting.output import plain
from elman.forecasting.panel import Backtest

_ENOUGH = 200
"""How many windows, all series together, say how wide intervals must be: no more, so that what
happened once, in an older window, stops widening them."""


@dataclass(frozen=True)
class Scores:
    """Errors by horizon on windows that were not learned from. None: not in comparable units."""

    forecasts: int
    rmse: NDArray[np.float64] | None
    mae: NDArray[np.float64] | None
    smape: NDArray[np.float64]
    mase: NDArray[np.float64] | None
    crps: NDArray[np.float64] | None
    scaled_crps: NDArray[np.float64] | None
    coverage: dict[float, NDArray[np.float64]]
    width: dict[float, NDArray[np.float64]] | None

    def plain(self) -> dict[str, Any]:
        """As JSON; the first level's coverage and width under their own names, all under theirs."""
        record = {k: plain(v) for k, v in vars(self).items()}
        first = next(iter(self.coverage), None)
        record["coverage"] = plain(self.coverage[first]) if first is not None else None
        record["width"] = plain(self.width[first]) if self.width and first is not None else None
        record["coverage_by_level"] = {f"{k:g}": plain(v) for k, v in self.coverage.items()}
        return record


def measured(rows: list[Backtest], units: NDArray[np.float64], levels: Sequence[float]) -> Scores:
    """Score backtests of one or several series; several are only pooled in units of their own.

    The intervals of each window are widened by what the windows before it showed, as they would be,
    and each holds the narrower ones, as in the forecast itself.
    """
    one = len(rows) == 1
    truth = np.concatenate([b.truth for b in rows])[..., None]
    point = np.concatenate([b.point for b in rows])[..., None]
    unit = np.concatenate([np.full(len(b.truth), u) for b, u in zip(rows, units, strict=True)])
    moves = np.isfinite(unit)
    quantiles = np.concatenate([b.quantiles for b in rows])
    crps = accuracy.quantile_crps(truth[..., 0], quantiles, GRID)
    missed = np.abs(truth - point)[..., 0]
    low, high = nested(quantiles, {level: _in_turn(rows, level) for level in levels})
    inside = {k: accuracy.coverage(truth, low[k][..., None], high[k][..., None]) for k in low}
    return Scores(
        len(truth),
        accuracy.rmse(truth, point) if one else None,
        accuracy.mae(truth, point) if one else None,
        accuracy.smape(truth, point),
        (missed[moves] / unit[moves, None]).mean(0) if moves.any() else None,
        crps.mean(0) if one else None,
        (crps[moves] / unit[moves, None]).mean(0) if moves.any() else None,
        inside,
        {level: (high[level] - low[level]).mean(0) for level in low} if one else None,
    )


def _in_turn(rows: list[Backtest], level: float) -> NDArray[np.float64]:
    """How much wider every interval is made, window by window, by what was known then."""
    wider: dict[int, float] = {}
    seen = sorted({int(w) for b in rows for w in b.window})
    for w in seen:
        before = [b.only([v for v in seen if v < w]) for b in rows]
        wider[w] = widening(before, level) if w > seen[0] else 1.0
    return np.concatenate([[wider[int(w)] for w in b.window] for b in rows])[:, None]


def widening(rows: list[Backtest], level: float) -> float:
    """How much wider than stated intervals of `level` percent must be to hold what came that often.

    The conformal quantile of |x - middle| over the half-width, all horizons and series together, in
    the newest windows: models say how sure they are from all they know, and know more by now than
    in the first windows. Drawn towards 1 where windows are few: they overlap, and are worth about
    one each. The forecasts must be honest ones: of a model chosen by those very windows the misses
    are too small.
    """
    newest = sorted({int(w) for b in rows for w in b.window})[-math.ceil(_ENOUGH / len(rows)) :]
    ratios = []
    for b in (row.only(newest) for row in rows):
        low, high = interval(b.quantiles, level)
        middle = b.quantiles[..., MIDDLE]
        side = np.where(b.truth < middle, middle - low, high - middle)
        missed = np.abs(b.truth - middle)
        ratios.append(np.divide(missed, side, out=np.ones_like(missed), where=side > 0).ravel())
    ordered = np.sort(np.concatenate(ratios))
    rank = math.ceil((len(ordered) + 1) * level / 100)
    wanted = ordered[min(rank, len(ordered)) - 1]
    worth = len(rows) * len(newest)
    trust = worth / (worth + 10)
    return float(np.clip(wanted, 0.2, 5.0) ** trust)
