"""What `auto` would gain from other candidates, on data that no published score is made of.

    python benchmarks/forecasting_trials.py [--kinds NAME …]

For each of 25 kinds of series: CO2 before its last 15 cutoffs, airline, sunspots and the Nile
before their last three, macroeconomic and climate series of statsmodels (which must be installed),
and simulated ones of another seed. At every cutoff `auto` chooses among its forecasters, without
networks, and publishes a mean; then the same with the methods of one line of `TRIALS` beside them.
Shown is 100 log(error with / error without): below zero, they help. To try a forecaster, give it
its line in catalogue.py and one in `TRIALS`.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.forecasting import choice, panel
from elman.forecasting.candidates import candidates
from elman.forecasting.catalogue import Method
from elman.forecasting.panel import Backtest, Windows
from elman.forecasting.series import Series
from forecasting import STEPS, sets, simulated

Panel = list[Series]
Tried = dict[str, list[Backtest]]
_CHOSEN_BY = 8
"""Windows that `auto` looks back at by default."""


def direct(lag: Callable[[int], tuple[int, ...]], *seasons: int) -> Callable[[Panel], list[Method]]:
    """Least squares for each horizon by itself, on a window of so many seasons and a step."""

    def methods(given: Panel) -> list[Method]:
        m = given[0].season or 6
        if given[0].known.shape[1]:
            return []
        return [Method("linear", {"tau": k * m + 1}, lag(m), direct=True) for k in seasons]

    return methods


TRIALS: dict[str, Callable[[Panel], list[Method]]] = {
    "direct, values": direct(lambda m: (), 1, 2),
    "direct, changes": direct(lambda m: (1,), 1, 2),
    "direct, changes over a season": direct(lambda m: (m,), 1, 2),
    "direct, 4 seasons": direct(lambda m: (m,), 4),
}


def kinds() -> dict[str, tuple[Panel, int]]:
    """Series of each kind, and from how many cutoffs to forecast them."""
    import statsmodels.api as sm

    datasets: Any = sm.datasets
    known = sets(1, 0)
    found: dict[str, tuple[Panel, int]] = {}
    for name, published, cutoffs in (
        ("co2", 15, 18), ("airline", 3, 3), ("sunspots", 3, 12), ("nile", 3, 2),
    ):  # fmt: skip
        [whole] = known[name].panel
        found[name] = [whole.until(len(whole) - published * STEPS)], cutoffs

    def add(name: str, values: Any, season: int, cutoffs: int) -> None:
        x = np.asarray(values, dtype=np.float64).reshape(-1, 1)
        found[name] = [Series(name, x, ("y",), None, season)], cutoffs

    macro = datasets.macrodata.load_pandas().data
    for name in macro.columns.drop(["year", "quarter", "pop", "infl", "realint"]):
        add(name, macro[name], 4, 6)
    add("elnino", datasets.elnino.load_pandas().data.drop(columns="YEAR").to_numpy(), 12, 15)
    danish = datasets.danish_data.load_pandas().data
    for name in ["lrm", "lry", "ibo", "ide"]:
        add(name, danish[name], 4, 1)
    rates = datasets.interest_inflation.load_pandas().data
    for name in ["Dp", "R"]:
        add(name, rates[name], 4, 4)
    return found | {f"simulated {k}": (s.panel, 1) for k, s in simulated(16, seed=77).items()}


def look_back(method: Method, given: Panel, windows: Windows) -> list[Backtest] | None:
    """Fitted again before each window, from the first that leaves enough to learn from."""
    parts: list[list[Backtest]] = [[] for _ in given]
    for w in range(windows.count):
        past = [s.until(windows.starts(len(s))[w]) for s in given]
        ahead = 3 * STEPS if method.direct else 1
        try:
            model = method.make(panel.plan_for(past, STEPS))
            if min(map(len, past)) <= model.lags + ahead:
                continue
            fitted = panel.fit(method, past, STEPS)
        except UserError:  # says that this is too little for it; a later window may do
            continue
        for i, s in enumerate(given):
            origins = windows.origins(len(s), w)
            truth = np.stack([s.values[o : o + STEPS, 0] for o in origins])
            said = fitted.forecast(i, s, origins, STEPS)
            which = np.full(len(origins), w)
            parts[i].append(Backtest(np.array(origins), which, truth, *said))
    return [panel.in_sequence(p) for p in parts] if parts[0] else None


def published(given: Panel, tried: Tried, windows: Windows, informing: int) -> NDArray[np.float64]:
    """MASE of what `auto` would have said at each cutoff after the first `informing` windows."""
    errors = []
    for cutoff in range(informing, windows.count):
        start = windows.starts(len(given[0]))[cutoff]
        first = cutoff - informing
        seen = {
            label: [_seen(b, first, start) for b in rows]
            for label, rows in tried.items()
            if rows[0].window.min() <= first
        }
        past = [s.until(start) for s in given]
        units = choice.naive_errors(past, Windows(informing, STEPS, windows.every))
        picked = choice.choose(seen, {}, units, informing, min(3, informing - 1))
        for i, (s, whole) in enumerate(zip(past, given, strict=True)):
            said = [tried[m][i].point[tried[m][i].origins == start][0] for m in picked.members[i]]
            m = s.season or 1
            unit = np.abs(s.values[m:] - s.values[:-m]).mean()
            truth = whole.values[start : start + STEPS, 0]
            errors.append(np.abs(truth - np.mean(said, axis=0)).mean() / unit)
    return np.array(errors)


def _seen(b: Backtest, first: int, start: int) -> Backtest:
    """The windows from `first` on as far as their futures were known at `start`, counted anew."""
    keep = (b.window >= first) & (b.origins + STEPS <= start)
    return Backtest(
        b.origins[keep], b.window[keep] - first, b.truth[keep], b.point[keep], b.quantiles[keep]
    )


def gains(given: Panel, cutoffs: int) -> tuple[float, dict[str, float]]:
    """The error of `auto` as it is, and what each trial changes, in percent."""
    least = max(8, 2 * (given[0].season or 0) + 2)
    informing = min(_CHOSEN_BY, (len(given[0]) - cutoffs * STEPS - least) // STEPS)
    every = STEPS // 6 if len(given) <= 10 else STEPS
    windows = Windows(cutoffs + informing, STEPS, every)

    def backtests(methods: list[Method]) -> Tried:
        found = {m.label: look_back(m, given, windows) for m in methods}
        return {label: rows for label, rows in found.items() if rows is not None}

    plan = panel.plan_for(given, STEPS)
    now = backtests([m for m in candidates(plan, given) if not m.of.network])
    error = published(given, now, windows, informing).mean()
    changed = {}
    for name, methods in TRIALS.items():
        with_them = published(given, now | backtests(methods(given)), windows, informing).mean()
        changed[name] = 100 * float(np.log(with_them / error))
    return float(error), changed


def main() -> None:
    parser = argparse.ArgumentParser(description="Other candidates for elman forecast")
    parser.add_argument("--kinds", nargs="*", help="only these kinds of series")
    arguments = parser.parse_args()
    print(f"{'':26}{'auto':>7}  " + "; ".join(TRIALS))
    rows = []
    for name, (given, cutoffs) in kinds().items():
        if arguments.kinds and name not in arguments.kinds:
            continue
        error, changed = gains(given, cutoffs)
        rows.append(list(changed.values()))
        shown = "; ".join(f"{c:+.1f} %" for c in changed.values())
        print(f"{name:26}{error:7.3f}  {shown}", flush=True)
    noise = np.std(rows, axis=0) / np.sqrt(len(rows))
    pairs = zip(np.mean(rows, axis=0), noise, strict=True)
    print(f"{'mean':33}  " + "; ".join(f"{m:+.2f} ± {s:.2f} %" for m, s in pairs))


if __name__ == "__main__":
    main()
