"""Which forecaster to use: try them at past origins, keep the best, say how much better it is.

A method is scored by its mean absolute error over the series' own naive error, window by window.
Each series judges by its own windows and by everyone's: with few windows of its own it follows the
others. The mean of the three best is a candidate too, and often wins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.forecasting.base import Told
from elman.forecasting.catalogue import Method, Plan
from elman.forecasting.panel import (
    Backtest,
    Windows,
    average,
    cross_validate,
    in_sequence,
    plan_for,
)
from elman.forecasting.series import Series

Scores = NDArray[np.float64]
"""(series, windows): mean absolute error over the naive one; NaN where a series never moves."""

TOGETHER = 3
_OTHERS = 6.0
"""How many windows of its own a series trusts as much as everyone's."""


def candidates(plan: Plan, panel: list[Series], seconds: float) -> list[Method]:
    """What `auto` tries: baselines, smoothing, linear models of values and changes, networks.

    Networks are left out where training them is expected to take longer than `seconds`; the
    estimate depends on sizes only, so the same data always meets the same candidates.
    """
    season = plan.season
    positive = all((s.values > 0).all() for s in panel)
    methods = [Method("last"), Method("mean"), Method("drift"), Method("ets")]
    taus = sorted({plan.window(4), plan.window(8), min(2 * (season or 6) + 1, plan.length // 3)})
    lags: list[tuple[int, ...]] = [(), (1,)]
    if season:
        methods.append(Method("seasonal"))
        lags += [(season,), (season, 1)]
    for tau in (t for t in taus if t >= 1):
        if plan.inputs:
            methods.append(Method("linear", {"tau": tau}))
        else:
            methods += [Method("linear", {"tau": tau}, lag) for lag in lags]
    if season:
        short = Method("linear", {"tau": min(4, plan.length // 3)}, deseasonalised=True)
        methods.append(short)
        if not plan.inputs:
            methods += [replace(short, difference=(1,)), Method("mean", deseasonalised=True)]
            methods += [replace(short, logged=True)] if positive else []
    if any((s.values == 0).mean() > 0.2 for s in panel):  # demand that comes now and then
        methods += [Method("mean", median=True), Method("ets", median=True)]
    if positive and not plan.inputs:
        methods.append(Method("ets", logged=True))
        methods += [Method("linear", {"tau": taus[-1]}, lag, logged=True) for lag in lags]
    for method in _networks(plan, panel):
        if expected_seconds(method, panel) <= seconds:
            methods.append(method)
            seconds -= expected_seconds(method, panel)
    return methods


def _networks(plan: Plan, panel: list[Series]) -> list[Method]:
    """Shared ones for many series or inputs, else one per series."""
    if plan.inputs or len(panel) >= 10:
        return [Method("global-lstm")]
    lag = ((plan.season,),) if plan.season else ((1,),)
    return [Method(cell, {}, d) for cell in ("gru", "lstm") for d in ((), *lag)]


def expected_seconds(method: Method, panel: list[Series]) -> float:
    """Roughly how long a network takes to fit twice (backtest, everything) on a slow core."""
    if not method.of.network:
        return 0.0
    if method.of.shared:
        return 2 * 400 * 0.04
    return sum(2 * 30 * max(1, len(s) // 64) * 0.03 for s in panel)


@dataclass(frozen=True)
class Choice:
    """What was tried, what each series is forecast with, and how that did at past origins."""

    tried: dict[str, list[Backtest]]
    scores: dict[str, Scores]
    members: list[tuple[str, ...]]
    """For each series the labels whose mean forecasts it."""
    left_out: dict[str, str]
    chosen: list[Backtest]
    """What the choice itself, made at each window from the windows before it, would have said."""


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


def try_all(
    methods: Sequence[Method],
    panel: list[Series],
    windows: Windows,
    *,
    seed: int = 0,
    told: Told | None = None,
) -> tuple[dict[str, list[Backtest]], dict[str, str]]:
    """Backtest every method; those that cannot be (too little data, no logarithm) are named."""
    tried: dict[str, list[Backtest]] = {}
    left_out: dict[str, str] = {}
    for n, method in enumerate(methods):
        if told:
            told(f"{n + 1} of {len(methods)}: {method.label}")
        shortest = min((s.until(windows.starts(len(s))[0]) for s in panel), key=len)
        try:
            model = method.make(plan_for([shortest], windows.steps, seed))
            if len(shortest) <= model.lags + (windows.steps if method.of.network else 1):
                left_out[method.label] = f"reads {model.lags} values, and there are too few"
                continue
            backtests = cross_validate(method, panel, windows, seed=seed)
            if any(_runs_away(b, s) for b, s in zip(backtests, panel, strict=True)):
                left_out[method.label] = "its forecasts run away from the data"
                continue
            tried[method.label] = backtests
        except UserError as refusal:
            left_out[method.label] = refusal.message
    return tried, left_out


def _runs_away(backtest: Backtest, series: Series) -> bool:
    """Whether a forecast is no number, or a thousand times farther out than the data ever was."""
    middle = series.values.mean()
    reach = 1000 * np.abs(series.values - middle).max() + 1e-9 * abs(middle) + 1e-300
    said = np.concatenate([backtest.point[..., None], backtest.quantiles], axis=-1)
    return not bool((np.abs(said - middle) <= reach).all())


def choose(
    tried: dict[str, list[Backtest]],
    left_out: dict[str, str],
    units: NDArray[np.float64],
    count: int,
    first: int,
) -> Choice:
    """Pick for each series the best method or the mean of the three best.

    `first` windows only inform the choice; the choice made at a later one uses those before it.
    """
    scores = {label: score(b, units, range(count)) for label, b in tried.items()}
    parts = [_picked(scores, tried, units, w) for w in range(first, count)]
    chosen = [
        in_sequence([average([tried[m][i] for m in part[i]]).only([w]) for w, part in
                      zip(range(first, count), parts, strict=True)])
        for i in range(len(units))
    ]  # fmt: skip
    return Choice(tried, scores, _picked(scores, tried, units, count), left_out, chosen)


def _picked(
    scores: dict[str, Scores],
    tried: dict[str, list[Backtest]],
    units: NDArray[np.float64],
    until: int,
) -> list[tuple[str, ...]]:
    """Each series' choice after the windows before `until`; a naive one where there were none."""
    labels = list(scores)
    if until == 0:
        naive = next(m for m in ("seasonal", "last", *labels) if m in labels)
        return [(naive,)] * len(units)
    single = np.stack([_judged(scores[m], until) for m in labels])  # (methods, series)
    order = np.argsort(single, axis=0, kind="stable")
    picked = []
    together = np.full(len(units), np.inf)
    if len(labels) > TOGETHER:
        mixed = [
            average([tried[labels[k]][i] for k in order[:TOGETHER, i]]) for i in range(len(units))
        ]
        together = _judged(score(mixed, units, range(until)), until)
    for i in range(len(units)):
        best = order[0, i]
        alone = single[best, i]
        group = tuple(labels[k] for k in order[:TOGETHER, i])
        picked.append(group if together[i] < alone else (labels[best],))
    return picked


def _judged(scores: Scores, until: int) -> NDArray[np.float64]:
    """Own mean over the windows so far, drawn towards everyone's: lower is better."""
    own = scores[:, :until].mean(1)
    weight = until / (until + _OTHERS) if len(scores) > 1 else 1.0
    return weight * own + (1 - weight) * own.mean()


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
