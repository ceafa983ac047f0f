"""Which forecaster to use: try them at past origins, keep the best, say how much better it is.

A method is scored by its mean absolute error over the series' own naive error, window by window,
and judged by a mean of logarithms, so that one hard window does not outweigh the others.
Each series judges by its own windows and by everyone's, as much by either as their noise allows.
Windows are few and the best of many methods is partly the luckiest, so what is used is the mean of
the best eight, without those that are worse than the best by more than noise.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.forecasting.catalogue import Method
from elman.forecasting.panel import (
    Backtest,
    Windows,
    average,
    cross_validate,
    in_sequence,
    plan_for,
)
from elman.forecasting.progress import Limit, OutOfTime, Told, listening, tell
from elman.forecasting.series import Series

Scores = NDArray[np.float64]
"""(series, windows): mean absolute error over the naive one; NaN where a series never moves."""

Picked = list[tuple[str, ...]]
"""For each series the labels whose mean forecasts it; one that stands there twice counts twice."""

TOGETHER = 8
"""How many methods are averaged at most."""

NAIVE = ("mean, median", "seasonal", "last")
"""What every method is compared with, so that these are always tried; the median where zeros are
common: the last value, mostly zero as well, is now and then a demand that does not come again."""


def expected_seconds(method: Method, panel: Sequence[Series], windows: int) -> float:
    """Roughly how long trying a method and fitting it again takes on a slow core.

    Networks are fitted once for all windows; others in each.
    """
    fits = 2 if method.of.network else windows + 1
    lengths = [len(panel[0])] if method.of.shared else [len(s) for s in panel]
    return fits * sum(method.of.seconds(n) for n in lengths)


def affordable(
    methods: Sequence[Method], panel: Sequence[Series], windows: int, seconds: float
) -> list[Method]:
    """Without the networks that are not expected to fit into `seconds`.

    The expectation depends on sizes only, so the same data always meets the same candidates.
    """
    kept = []
    for method in methods:
        expected = expected_seconds(method, panel, windows)
        if not method.of.network or expected <= seconds:
            kept.append(method)
            seconds -= expected
    return kept


@dataclass(frozen=True)
class Choice:
    """What was tried, what each series is forecast with, and how that did at past origins."""

    tried: dict[str, list[Backtest]]
    scores: dict[str, Scores]
    members: Picked
    left_out: dict[str, str]
    chosen: list[Backtest]
    """What the choice itself, made at each window from the windows before it, would have said."""
    crossed: list[Backtest]
    """The same, made at each window from all others: as good a choice as the final one, and not
    made by the very windows that it is measured in."""


def naive_errors(panel: list[Series], windows: Windows) -> NDArray[np.float64]:
    """Mean |x_t - x_{t-m}| of each series before the first window: the unit of MASE."""
    units = []
    for s in panel:
        known = s.values[: windows.starts(len(s))[0], 0]
        m = s.season if s.season and len(known) > s.season else 1
        units.append(float(np.abs(known[m:] - known[:-m]).mean()) if len(known) > m else 0.0)
    scales = np.array(units)
    return np.where(scales > 0, scales, np.nan)


def score(backtests: list[Backtest], units: NDArray[np.float64], windows: Sequence[int]) -> Scores:
    """Mean absolute error by series and window, in units of the naive error."""
    rows = []
    for b, unit in zip(backtests, units, strict=True):
        missed = np.abs(b.truth - b.point).mean(1)
        scale = unit if np.isfinite(unit) else 1.0
        rows.append([missed[b.window == w].mean() / scale for w in windows])
    return np.array(rows)


class Kept(Protocol):
    """Where finished backtests outlive an interruption."""

    def recall(self, label: str, series: int) -> list[Backtest] | None:
        """Those of this method, if there are any."""

    def keep(self, label: str, backtests: Sequence[Backtest]) -> None:
        """Keep these."""


def try_all(
    methods: Sequence[Method],
    panel: list[Series],
    windows: Windows,
    *,
    seed: int = 0,
    told: Told | None = None,
    limit: Limit | None = None,
    kept: Kept | None = None,
    needed: str | None = None,
) -> tuple[dict[str, list[Backtest]], dict[str, str]]:
    """Backtest every method; those that cannot be (too little data, no time) are named, with why.

    What `kept` recalls from before is not tried again. The naive ones come first and have no limit.
    Without the method labelled `needed` there is no going on: why it cannot be is raised.
    """
    tried: dict[str, list[Backtest]] = {}
    left_out: dict[str, str] = {}
    for n, method in enumerate(methods):
        label = method.label
        line = f"{n + 1} of {len(methods)}: {label}"
        before = kept.recall(label, len(panel)) if kept else None
        if lack := _lack(method, panel, windows, seed):
            if label == needed:
                raise UserError(f"--model {label} {lack}", hint=_more_to_learn_from(method))
            before_first = min(windows.starts(len(s))[0] for s in panel)
            left_out[label] = (
                f"the {before_first} steps before the first window are too few to learn from; "
                "a longer series, or fewer --steps or --windows, would leave more"
            )
            continue
        try:
            with listening(_watching(line, told, None if label in NAIVE else limit)):
                tell("")
                backtests = before or _tried(method, panel, windows, seed)
        except UserError as refusal:
            if label == needed:
                hint = refusal.hint or "a longer series or a smaller model"
                raise UserError(f"--model {label}: {refusal.message}", hint=hint) from refusal
            left_out[label] = refusal.message
        except OutOfTime as late:
            left_out[label] = str(late)
        else:
            tried[label] = backtests
            if kept and not before:
                kept.keep(label, backtests)
    return tried, left_out


def _watching(line: str, told: Told | None, limit: Limit | None) -> Told:
    """Pass on what a fit says, behind `line`; and stop it when the time is up.

    What was spent on this method is kept in hand: if it is chosen, it must be fitted once more.
    """
    at_first = limit.left if limit else math.inf

    def heard(said: str) -> None:
        if limit and limit.left < at_first - limit.left:
            seconds = limit.seconds or 0
            raise OutOfTime(f"the time was up ({seconds:.0f} s); --minutes allows it more")
        if told:
            told(f"{line}, {said}" if said else line)

    return heard


def _tried(method: Method, panel: list[Series], windows: Windows, seed: int) -> list[Backtest]:
    backtests = cross_validate(method, panel, windows, seed=seed)
    for backtest, series in zip(backtests, panel, strict=True):
        if _runs_away(backtest, series):
            raise UserError(
                f"its forecasts of {series.name} run away from the data",
                hint="--model auto tries others, or --difference 1, or leave that series out",
            )
    return backtests


def _lack(method: Method, panel: list[Series], windows: Windows, seed: int) -> str | None:
    """What a method lacks before the first window of the shortest series; None: nothing."""
    shortest = min((s.until(windows.starts(len(s))[0]) for s in panel), key=len)
    refusal = too_few(method, shortest, windows.steps, seed)
    return f"{refusal} before the first window" if refusal else None


def _more_to_learn_from(method: Method) -> str:
    smaller = "--tau, --steps or --windows" if "tau" in method.options else "--steps or --windows"
    return f"a longer series, or smaller {smaller}"


def too_few(method: Method, series: Series, steps: int, seed: int) -> str | None:
    """Why a method cannot learn from a series that is too short for it; None if it can.

    How far a method looks back may depend on how much there is, and never shrinks with it: so the
    length that is enough is found from below.
    """
    plan, n = plan_for([series], steps, seed), len(series)
    ahead = steps if method.of.network else 1
    while n <= (most := method.make(replace(plan, length=n)).lags + ahead):
        n = most + 1
    if n == len(series):
        return None
    return f"needs {n} steps or more to learn from, and there are {len(series)}"


def _runs_away(backtest: Backtest, series: Series) -> bool:
    """Whether a forecast is NaN, or a thousand times farther out than the data ever was."""
    middle = series.values.mean()
    reach = 1000 * np.abs(series.values - middle).max() + 1e-9 * abs(middle) + 1e-300
    forecasts = np.concatenate([backtest.point[..., None], backtest.quantiles], axis=-1)
    return not bool((np.abs(forecasts - middle) <= reach).all())


def choose(
    tried: dict[str, list[Backtest]],
    left_out: dict[str, str],
    units: NDArray[np.float64],
    count: int,
    first: int,
) -> Choice:
    """Pick for each series the best method, and those that cannot be told from it.

    `first` windows only inform the choice; the choice made at a later one uses those before it.
    Where the seasonal value did better than such choices, the mean of both is taken; where it did
    better than that as well, it alone. So nothing is published that lost to it in the windows that
    are shown.
    """
    scores = {label: score(b, units, range(count)) for label, b in tried.items()}
    every = range(count)
    pick = functools.partial(_no_worse_than_naive, tried, scores, units)
    in_turn = {w: pick(every[:w]) for w in every[first:]}
    yielding, chosen = _no_worse_than_seasonal(tried, units, in_turn)
    others = {w: yielding(pick([v for v in every if v != w])) for w in every}
    return Choice(tried, scores, yielding(pick(every)), left_out, chosen, _as_picked(tried, others))


def _no_worse_than_seasonal(
    tried: dict[str, list[Backtest]], units: NDArray[np.float64], in_turn: dict[int, Picked]
) -> tuple[Callable[[Picked], Picked], list[Backtest]]:
    """How far what is picked must give way to the seasonal value, and what it then said."""
    counted = list(in_turn)
    if "seasonal" not in tried:
        return _unchanged, _as_picked(tried, in_turn)
    seasonal = [b.only(counted) for b in tried["seasonal"]]
    least = _mean_errors(seasonal, units, counted)
    for way in (_unchanged, _half_seasonal):
        chosen = _as_picked(tried, {w: way(p) for w, p in in_turn.items()})
        if (_mean_errors(chosen, units, counted) <= least).all():
            return way, chosen
    return _seasonal, seasonal


def _mean_errors(
    rows: list[Backtest], units: NDArray[np.float64], windows: Sequence[int]
) -> NDArray[np.float64]:
    """The mean over windows, as verdicts have it, and over all origins, as printed scores have it.

    They differ where windows have not as many origins each.
    """
    missed = [
        np.abs(b.truth - b.point).mean(1) / (unit if np.isfinite(unit) else 1.0)
        for b, unit in zip(rows, units, strict=True)
    ]
    return np.array([score(rows, units, windows).mean(), np.concatenate(missed).mean()])


def _unchanged(picked: Picked) -> Picked:
    return picked


def _half_seasonal(picked: Picked) -> Picked:
    """What was picked and the seasonal value in equal parts."""
    return [m if set(m) == {"seasonal"} else (*m, *["seasonal"] * len(m)) for m in picked]


def _seasonal(picked: Picked) -> Picked:
    return [("seasonal",)] * len(picked)


def _as_picked(tried: dict[str, list[Backtest]], by_window: dict[int, Picked]) -> list[Backtest]:
    """What the methods picked for each window said in it, series by series."""
    series = len(next(iter(tried.values())))
    return [
        in_sequence(
            [average([tried[m][i].only([w]) for m in pick[i]]) for w, pick in by_window.items()]
        )
        for i in range(series)
    ]


def _no_worse_than_naive(
    tried: dict[str, list[Backtest]],
    scores: dict[str, Scores],
    units: NDArray[np.float64],
    windows: Sequence[int],
) -> Picked:
    """What these windows pick, or a naive forecast for all, where that did better in them."""
    picked = _picked(scores, windows)
    if not len(windows):
        return picked
    together = score(_as_picked(tried, dict.fromkeys(windows, picked)), units, windows).mean()
    naive = {n: float(scores[n][:, list(windows)].mean()) for n in NAIVE if n in scores}
    best = min(naive, key=naive.__getitem__, default=None)
    return [(best,)] * len(units) if best and naive[best] < together else picked


def _picked(scores: dict[str, Scores], windows: Sequence[int]) -> Picked:
    """Each series' choice by these windows; a naive one where there are none."""
    labels = list(scores)
    series = len(scores[labels[0]])
    if not len(windows):
        naive = next(m for m in (*NAIVE, *labels) if m in labels)
        return [(naive,)] * series
    missed = _logarithms(np.stack([scores[m][:, list(windows)] for m in labels]))
    judged, own = _judged(missed)
    picked = []
    for i in range(series):
        best, *others = np.argsort(judged[:, i], kind="stable")[:TOGETHER]
        near = [j for j in others if judged[j, i] - judged[best, i] <= _noise(
            missed[j] - missed[best], i, own)]  # fmt: skip
        picked.append(tuple(labels[j] for j in (best, *near)))
    return picked


def _logarithms(missed: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(e + ē) of errors (methods, series, windows), ē a series' mean error.

    Without ē a window that was hit by chance would decide: of a demand that comes now and then,
    windows without any.
    """
    mean = missed.mean((0, 2), keepdims=True)
    return np.log(missed + np.where(mean > 0, mean, 1.0))


def _judged(missed: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """How each method does on each series, lower is better, and how much a series trusts itself.

    Own windows are few, everyone's are many. A series' own mean counts with weight w and
    everyone's with 1 - w: w is the share of what differs between series' means that is not the
    noise of a mean over few windows, so w = 1 for a series alone, and 0 where all are alike.
    """
    relative = missed - np.median(missed, axis=0)
    own = relative.mean(2)
    series, windows = missed.shape[1:]
    if series == 1:
        return own, 1.0
    between = own.var(1, ddof=1).sum()
    noise = relative.var(2, ddof=1).mean(1).sum() / windows if windows > 1 else between
    weight = float(np.clip(1 - noise / between, 0, 1)) if between > 0 else 0.0
    return weight * own + (1 - weight) * own.mean(1, keepdims=True), weight


def _noise(difference: Scores, i: int, own: float) -> float:
    """Two standard errors of how two methods differ on series i, judged as in `_judged`."""
    series, windows = difference.shape
    if windows < 2:
        return math.inf
    variance = own**2 * difference[i].var(ddof=1) / windows
    if series > 1:
        variance += (1 - own) ** 2 * difference.mean(1).var(ddof=1) / series
    return 2 * math.sqrt(variance)


@dataclass(frozen=True)
class Verdict:
    """How a forecast compares with a rival over the same windows, and how sure that is."""

    rival: str
    better: float
    """1 - error / rival's error: 0.2 is twenty percent better."""
    noise: float
    """Two standard errors of `better` over windows and series; infinite for fewer than three."""

    @property
    def certain(self) -> bool:
        """Whether the difference is beyond noise."""
        return abs(self.better) > self.noise

    def __str__(self) -> str:
        amount, way = f"{abs(self.better):.1%}", "better" if self.better >= 0 else "worse"
        if math.isinf(self.noise):
            sure = "too few windows to say whether that is more than noise"
        else:
            sure = "beyond" if self.certain else "within"
            sure = f"{sure} noise (±{self.noise:.1%})"
        return f"{amount} {way} than {self.rival}: {sure}"


def compare(own: Scores, rival: Scores, name: str) -> Verdict:
    """Paired by series and window: neither is luckier than the other with its windows."""
    a, b = own.ravel(), rival.ravel()
    keep = np.isfinite(a) & np.isfinite(b)
    a, b = a[keep], b[keep]
    if not len(b) or b.mean() == 0:
        return Verdict(name, 0.0, math.inf)
    difference = (b - a) / b.mean()
    noise = 2 * difference.std(ddof=1) / math.sqrt(len(a)) if len(a) > 2 else math.inf
    return Verdict(name, float(difference.mean()), float(noise))
