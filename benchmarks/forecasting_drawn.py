"""`elman forecast` at its defaults on series drawn at random, whose possible futures are known.

    python benchmarks/forecasting_drawn.py [--seeds 1 2 …] [--series 4] [--cutoffs 2] [--minutes 2]
                                           [--kinds NAME …] [--together] [--no-peers] [--json FILE]
                                           [--quick]
    python benchmarks/forecasting_drawn.py --json FILE --table

`drawn_series.py` has the kinds. Every rival is fitted again at every cutoff and scored on 500
futures that the series could have had from there, not on one: MASE and CRPS in units of the
(true) seasonal naive error of the past, and how often 80 and 95 % intervals hold at one step, at
the last and over all. `possible` knows the process: no forecast errs less. Simple rules are the
last value, the last season's (of the true season), the mean and the drift; the best of them is
known with hindsight, one a kind. statsforecast's AutoETS, AutoARIMA and AutoTheta stand beside
where it is installed, but for series of 5,000 steps, and AutoARIMA for the longest seasons.
Horizons are 12 steps, of short series 4, from one cutoff, four times as many series. `--together`
makes the series of a seed one panel, and tells nobody of their season. `--json` keeps what an
earlier run with the same settings wrote about other kinds. The published times are of one thread:
OMP_NUM_THREADS=1.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drawn_series import KINDS, RELATED, Drawn, drawn
from elman.forecasting import Drift, Last, Mean, Seasonal, accuracy
from elman.forecasting.experiment import fit_and_measure
from elman.forecasting.intervals import GRID
from elman.forecasting.series import Series
from elman.forecasting.settings import Settings

DRAWS = 500
LEVELS = [round(100 * (1 - 2 * q), 6) for q in GRID if q < 0.5]
SIMPLE = ("last", "seasonal", "mean", "drift")
PEERS = ("AutoETS", "AutoARIMA", "AutoTheta")
TOO_SLOW = {("AutoARIMA", kind) for kind in ("season of 52", "two seasons")}
"""Minutes for one series."""
HELD = ((80, 0), (80, 1), (80, 2), (95, 2))
"""What the table shows of intervals: at one step, at the last, over all."""

Said = NDArray[np.float64]
"""(series, steps, len(GRID)), the point forecast in the middle."""
Rival = Callable[[list[Series], list[int], int], Said]
"""From series, their true seasons, and how far to look ahead."""
Row = dict[str, Any]


def ours(panel: list[Series], seasons: list[int], steps: int, minutes: float) -> Said:
    """What `elman forecast` publishes by default; it is told the seasons that `panel` says."""
    del seasons
    settings = Settings(steps=steps, levels=tuple(LEVELS), minutes=minutes)
    rows = []
    for a in fit_and_measure(panel, settings).ahead:
        low, high = [a.low[x] for x in LEVELS], [a.high[x] for x in reversed(LEVELS)]
        rows.append(np.stack([*low, a.point, *high], axis=1))
    return np.stack(rows)


def simple(panel: list[Series], seasons: list[int], steps: int, rule: str) -> Said:
    """A baseline's path for all quantiles: it has no intervals."""
    paths = []
    for s, m in zip(panel, seasons, strict=True):
        made = {"last": Last(), "seasonal": Seasonal(m), "mean": Mean(), "drift": Drift()}[rule]
        paths.append(made.fit(s.values).predict(s.values, steps))
    return np.repeat(np.stack(paths), len(GRID), axis=2)


def statistical(panel: list[Series], seasons: list[int], steps: int, kind: str) -> Said:
    """statsforecast's forecasters, one series at a time; ARIMA is given the input."""
    from statsforecast import models

    del seasons
    rows = []
    for s in panel:
        model, n = getattr(models, kind)(season_length=s.season or 1), len(s)
        inputs: dict[str, Any] = {}
        if s.known.shape[1] and kind == "AutoARIMA":
            inputs = {"X": s.known[:n], "X_future": s.known[n : n + steps]}
        levels = [round(x) if x == round(x) else x for x in LEVELS]
        said = model.forecast(y=s.values[:, 0], h=steps, level=levels, **inputs)
        low, high = ([said[f"{end}-{x:g}"] for x in levels] for end in ("lo", "hi"))
        rows.append(np.stack([*low, said["mean"], *high[::-1]], axis=1))
    return np.stack(rows)


def scored(futures: NDArray[np.float64], said: NDArray[np.float64], unit: float) -> Row:
    """Means over all futures of one series; of intervals at one step, at the last, over all."""
    if not np.isfinite(said).all():
        return {"failed": "not finite"}
    point = said[:, GRID.index(0.5)]
    row: Row = {
        "mase": float(np.abs(futures - point).mean() / unit),
        "crps": float(accuracy.quantile_crps(futures, said, GRID).mean() / unit),
    }
    slack = 1e-9 * (np.abs(point) + unit)
    for level in (80, 95):
        low, high = (said[:, GRID.index(round(0.5 + s * level / 200, 3))] for s in (-1, 1))
        inside = ((low - slack <= futures) & (futures <= high + slack)).mean(0)
        row[f"in_{level}"] = [float(x) for x in (inside[0], inside[-1], inside.mean())]
        row[f"width_{level}"] = float((high - low).mean() / unit)
    return row


def rivals(kind: str, peers: bool, minutes: float) -> dict[str, Rival]:
    """Who forecasts a kind."""
    found: dict[str, Rival] = {"elman": partial(ours, minutes=minutes)}
    found |= {rule: partial(simple, rule=rule) for rule in SIMPLE}
    for peer in PEERS if peers and kind != "long" else ():
        if (peer, kind) not in TOO_SLOW:
            found[peer] = partial(statistical, kind=peer)
    return found


def from_cutoffs(some: list[Drawn], back: int, steps: int, given: dict[str, Rival]) -> list[Row]:
    """Every rival from the cutoff that is so many before the last, a row a series."""
    cuts = [list(d.states)[-1 - back] for d in some]
    panel = [d.series(cut) for d, cut in zip(some, cuts, strict=True)]
    seasons = [d.process.season or 1 for d in some]
    said: dict[str, Said] = {}
    seconds, failed = {}, {}
    for name, predict in given.items():
        begun = time.process_time()
        try:
            said[name] = predict(panel, seasons, steps)
        except Exception as wrong:  # that a rival fails is one of the results, and is printed
            failed[name] = f"{type(wrong).__name__}: {wrong}"
        seconds[name] = (time.process_time() - begun) / len(panel)
    rows = []
    for i, (d, cut, s, m) in enumerate(zip(some, cuts, panel, seasons, strict=True)):
        x = s.values[:, 0]
        unit = float(np.abs(x[m:] - x[:-m]).mean()) or 1.0
        rng = np.random.default_rng((cut, i))
        futures = d.futures(cut, steps, DRAWS, rng)
        best = np.quantile(d.futures(cut, steps, 4 * DRAWS, rng), GRID, axis=0).T
        row = {"possible": scored(futures, best, unit)}
        for name in given:
            result = {"failed": failed[name]} if name in failed else None
            row[name] = result or scored(futures, said[name][i], unit)
            row[name]["seconds"] = seconds[name]
        rows.append(row)
    return rows


def measure(
    kind: str, seeds: list[int], count: int, cutoffs: int, given: Any, together: bool = False
) -> dict[str, Row]:
    """What every rival does on a kind: means over series and cutoffs, and each one's MASE."""
    short = kind.startswith("short")
    steps, cutoffs = (4, 1) if short else (12, cutoffs)
    rows: list[Row] = []
    for seed in seeds:
        some = drawn(kind, seed, count * 4 if short else count, steps, cutoffs)
        for d in some if together else []:
            d.process.told = False
        groups = [some] if together or kind == RELATED else [[d] for d in some]
        for group in groups:
            for back in reversed(range(cutoffs)):
                rows += from_cutoffs(group, back, steps, given)
    return {name: _means([row[name] for row in rows]) for name in rows[0]}


def _means(rows: list[Row]) -> Row:
    good = [r for r in rows if "failed" not in r]
    names = [k for k in (good[0] if good else {}) if k != "failed"]
    found: Row = {k: np.round(np.mean([r[k] for r in good], axis=0), 4).tolist() for k in names}
    found["errors"] = [round(r["mase"], 4) if r in good else None for r in rows]
    if len(good) < len(rows):
        found["failed"] = [r["failed"] for r in rows if "failed" in r]
    return found


def best_of(names: tuple[str, ...], results: dict[str, Row]) -> str:
    """Which of these errs least on a kind; none where none was run."""
    ran = [n for n in names if "mase" in results.get(n, {})]
    return min(ran, key=lambda n: results[n]["mase"], default="")


def worst(results: dict[str, Row], rule: str) -> float:
    """elman's error over the rule's at the cutoff where that is largest."""
    pairs = zip(results["elman"]["errors"], results[rule]["errors"], strict=True)
    return max((a / b for a, b in pairs if a is not None and b), default=1.0)


def markdown(whole: dict[str, dict[str, Row]]) -> str:
    """The table of docs/forecasting.md."""
    lines = [
        "| | possible | elman | best simple rule | best peer | worst, of the rule | "
        "in 80 %: first, last, all | in 95 % | CRPS, best peer's | seconds |",
        "|---" * 10 + "|",
    ]
    for kind, results in whole.items():
        own, rule, peer = results["elman"], best_of(SIMPLE, results), best_of(PEERS, results)
        near = best_of(tuple(p for p in PEERS if "crps" in results.get(p, {})), results)
        held = [f"{own[f'in_{level}'][at]:.0%}".replace("%", "") for level, at in HELD]
        cells = [
            kind,
            f"{results['possible']['mase']:.3f}",
            f"{own['mase']:.3f}",
            f"{results[rule]['mase']:.3f} {rule}",
            f"{results[peer]['mase']:.3f} {peer}" if peer else "",
            f"{worst(results, rule):.2f}",
            ", ".join(held[:3]),
            held[3],
            f"{own['crps']:.3f}" + (f", {results[near]['crps']:.3f}" if near else ""),
            f"{own['seconds']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print a table; write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="of what is drawn")
    parser.add_argument("--series", type=int, default=4, help="of each kind and seed")
    parser.add_argument("--cutoffs", type=int, default=2, help="of each series, a horizon apart")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), metavar="NAME", help="only these"
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="as in elman forecast")
    parser.add_argument("--together", action="store_true", help="as panels, no season told")
    parser.add_argument("--no-peers", action="store_true", help="without statsforecast")
    parser.add_argument("--json", type=Path, help="keep the results here")
    parser.add_argument("--table", action="store_true", help="show what --json holds as Markdown")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: one series, no networks"
    )
    given = parser.parse_args()
    asked: Row = {k: getattr(given, k) for k in ("seeds", "series", "cutoffs", "minutes")}
    asked |= {"together": True} if given.together else {}
    if given.quick:
        asked |= {"series": 1, "cutoffs": 1, "minutes": 0.0}
    before = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    alike = all(before.get(k) == v for k, v in ({"together": None} | asked).items())
    same = given.table or alike
    results: dict[str, dict[str, Row]] = before.get("results", {}) if same else {}
    if given.table:
        print(markdown(results))
        return
    warnings.filterwarnings("ignore")  # the peers' own
    peers = bool(find_spec("statsforecast")) and not given.no_peers
    if not peers and not given.no_peers:
        print("statsforecast is not installed and is left out: pip install statsforecast")
    for kind in given.kinds or KINDS:
        who = rivals(kind, peers, asked["minutes"])
        count = (asked["series"], asked["cutoffs"])
        results[kind] = measure(kind, asked["seeds"], *count, who, given.together)
        for name, row in results[kind].items():
            for refusal in row.get("failed", []):
                print(f"{kind}: {name} failed: {refusal}")
        print(markdown({kind: results[kind]}).split("\n")[-1], flush=True)
        if given.json:
            given.json.write_text(json.dumps(asked | {"results": results}) + "\n")


if __name__ == "__main__":
    main()
