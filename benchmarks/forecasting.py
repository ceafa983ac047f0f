"""`elman forecast` at its defaults beside statsforecast and neuralforecast at theirs.

    python benchmarks/forecasting.py [--series 100] [--sets NAME …] [--rivals NAME …]
                                     [--cutoffs 3] [--json FILE [--missing]] [--limit SECONDS]
    python benchmarks/forecasting.py --json FILE --table | --pairs

Sets: sunspots and airline from the package, monthly CO2 at Mauna Loa and the yearly Nile from
statsmodels where it is installed, and five simulated ones with known answers: seasonal, trend,
regime change, intermittent, driven by an input. Every forecaster sees a series up to a cutoff and
is scored on the 12 steps after it: three cutoffs for a single series (`--cutoffs` for more, 12
steps apart, as far as half of the series is left), one for a simulated set. MASE and CRPS (from
the same 15 quantiles, in units of the seasonal naive error) are means over series, cutoffs and
steps. Coverage is that of 80 % intervals: of what came and, for simulated series, of 1,000 draws
of what could have come, because errors of one future go together (of a random walk a hundred
futures say as much as some 150 coins). Peers that are not installed are left out, and said so.
`--json` keeps what an earlier run wrote there about other sets and rivals, so that slow peers need
not be run again; with `--missing` only what that file lacks is run, so a stopped run goes on.
Forecasters are fitted again at every cutoff, the peers' networks at the first one and then shown
what has come, as neuralforecast's own cross_validation does by default. One that has not ended a
set after `--limit` processor seconds gets a row that says so. `--pairs` shows by how much elman
differs from each rival, cutoff by cutoff, with the standard error of the mean of those
differences. `--quick` is a smoke test: few series, no peers' networks. The published times are of
one thread: OMP_NUM_THREADS=1.
"""

import argparse
import json
import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.forecasting import accuracy, series
from elman.forecasting.dates import Clock, Frequency
from elman.forecasting.experiment import fit_and_measure
from elman.forecasting.intervals import GRID
from elman.forecasting.series import Series
from elman.forecasting.settings import Settings

STEPS = 12
DRAWS = 1000
"""Of what a simulated series could become."""

LEVELS = [round(100 * (1 - 2 * q), 6) for q in GRID if q < 0.5]
Forecast = tuple[NDArray[np.float64], NDArray[np.float64]]
"""(series, steps) and (series, steps, len(GRID))"""


@dataclass(frozen=True)
class Set:
    """Series of one kind, and from how many cutoffs to forecast them."""

    panel: list[Series]
    cutoffs: int
    futures: NDArray[np.float64] | None = None
    """Of simulated series (series, draws, steps): what could have come after the cutoff."""


def simulated(count: int, steps: int = 132, seed: int = 0) -> dict[str, Set]:
    """Five kinds of series whose right forecast is known, and draws of what each could become."""
    rng, onward = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    t, cut = np.arange(steps), steps - STEPS
    made: dict[str, list[Series]] = {}
    futures: dict[str, list[NDArray[np.float64]]] = {}

    def noise(phi: float) -> NDArray[np.float64]:
        e = rng.normal(size=steps)
        for k in range(1, steps):
            e[k] += phi * e[k - 1]
        return e

    def after(e: NDArray[np.float64], phi: float, spread: float = 1.0) -> NDArray[np.float64]:
        """Draws of the noise after the cutoff: e_t = φ e_{t-1} + spread · N(0, 1)."""
        drawn = spread * onward.normal(size=(DRAWS, STEPS))
        drawn[:, 0] += phi * e[cut - 1]
        for k in range(1, STEPS):
            drawn[:, k] += phi * drawn[:, k - 1]
        return drawn

    def season() -> NDArray[np.float64]:
        return rng.normal(size=12)[t % 12]

    def keep(
        name: str,
        x: NDArray[Any],
        could_be: NDArray[Any],
        known: NDArray[np.float64] | None = None,
    ) -> None:
        clock = Clock(_start(), Frequency("month"))
        times = tuple(clock.label(k) for k in range(steps))
        row = Series(f"{name} {len(made.get(name, []))}", x[:, None], ("y",), times, 12, clock)
        if known is not None:
            row = replace(row, known=known, inputs=("promotion",))
        made.setdefault(name, []).append(row)
        futures.setdefault(name, []).append(could_be)

    for _ in range(count):
        mean, e = 50 + 5 * season(), noise(0.5)
        keep("seasonal", mean + e, mean[cut:] + after(e, 0.5))
        slope = rng.normal(0, 0.3)
        walk = 0.5 * np.cumsum(noise(0.0))
        mean = 100 + slope * t + 2 * season()
        keep("trend", mean + walk, mean[cut:] + after(walk, 1.0, 0.5))
        at = rng.integers(40, 90)
        mean = 20 + 15 * rng.normal() * (t >= at) + 3 * season()
        e = noise(0.3)
        keep("regime change", mean + e, mean[cut:] + after(e, 0.3))
        rate = rng.uniform(0.1, 0.5)
        demand = rng.poisson(rate, steps) * rng.integers(1, 6, steps) * 1.0
        could_be = onward.poisson(rate, (DRAWS, STEPS)) * onward.integers(1, 6, (DRAWS, STEPS))
        keep("intermittent", demand, could_be * 1.0)
        known = (rng.random((steps + STEPS, 1)) < 0.3) * rng.uniform(0.5, 2, (steps + STEPS, 1))
        mean, e = 30 + 8 * known[:steps, 0] + 2 * season(), noise(0.6)
        keep("input", mean + e, mean[cut:] + after(e, 0.6), known)
    return {name: Set(panel, 1, np.stack(futures[name])) for name, panel in made.items()}


def _start() -> Any:
    import datetime as dt

    return dt.datetime(2010, 1, 1)


def sets(count: int, seed: int, cutoffs: int = 3) -> dict[str, Set]:
    single = {name: series.load(name)[0] for name in ("sunspots", "airline")}
    if find_spec("statsmodels"):
        import statsmodels.api as sm

        datasets: Any = sm.datasets
        co2 = datasets.co2.load_pandas().data["co2"].resample("MS").mean().interpolate()
        nile = datasets.nile.load_pandas().data["volume"].to_numpy()
        clock = Clock(co2.index[0].to_pydatetime(), Frequency("month"))
        single["co2"] = Series("co2", co2.to_numpy()[:, None], ("co2",), None, 12, clock)
        single["nile"] = Series("nile", nile[:, None], ("volume",))
    found = {name: Set([s], min(cutoffs, len(s) // (2 * STEPS))) for name, s in single.items()}
    return found | simulated(count, seed=seed)


def ours(panel: list[Series]) -> Forecast:
    """What `elman forecast` publishes by default."""
    settings = Settings(steps=STEPS, levels=tuple(LEVELS))
    ahead = fit_and_measure(panel, settings).ahead
    point = np.stack([a.point for a in ahead])
    low = [np.stack([a.low[level] for a in ahead]) for level in LEVELS]
    high = [np.stack([a.high[level] for a in ahead]) for level in reversed(LEVELS)]
    return point, np.stack([*low, point, *high], axis=2)


def frame(panel: list[Series], *, future: bool = False) -> Any:
    """A long frame with whole numbers for dates; the input's past or future beside it."""
    import pandas as pd

    rows = []
    for s in panel:
        start = len(s) if future else 0
        count = STEPS if future else len(s)
        row = pd.DataFrame({"unique_id": s.name, "ds": np.arange(start, start + count)})
        if not future:
            row["y"] = s.values[:, 0]
        for j in range(s.known.shape[1]):
            row[f"x{j}"] = s.known[start : start + count, j]
        rows.append(row)
    return pd.concat(rows, ignore_index=True)


def gathered(table: Any, name: str, middle: str, panel: list[Series]) -> Forecast:
    """A peer's table as arrays in the order of our series."""
    table = table.reset_index() if "unique_id" not in table.columns else table
    by = {k: v.sort_values("ds") for k, v in table.groupby("unique_id", sort=False)}
    low, high = ([_named(table, f"{name}-{end}", x) for x in LEVELS] for end in ("lo", "hi"))
    ends = [*low, middle, *reversed(high)]
    point = np.stack([by[s.name][middle].to_numpy() for s in panel])
    return point, np.stack([by[s.name][ends].to_numpy() for s in panel])


def _named(table: Any, prefix: str, level: float) -> str:
    """The column of one end of an interval: some write -lo-80, some -lo-80.0."""
    names = (f"{prefix}-{level:g}", f"{prefix}-{level:.1f}")
    return next(n for n in names if n in table.columns)


def statistical(kind: str) -> Callable[[list[Series]], Forecast]:
    """statsforecast's AutoARIMA or AutoETS; ARIMA is given the input, ETS cannot read one."""

    def predict(panel: list[Series]) -> Forecast:
        from statsforecast import StatsForecast, models

        model = getattr(models, kind)(season_length=panel[0].season or 1)
        table = frame(panel)
        inputs = frame(panel, future=True) if "x0" in table and kind == "AutoARIMA" else None
        if inputs is None:
            table = table[["unique_id", "ds", "y"]]
        found = StatsForecast([model], freq=1).forecast(
            df=table, h=STEPS, level=[round(x) if x == round(x) else x for x in LEVELS], X_df=inputs
        )
        return gathered(found, kind, kind, panel)

    return predict


def neural(kind: str) -> Callable[[list[Series]], Forecast]:
    """neuralforecast's NHITS or LSTM at their defaults, with the loss that gives quantiles.

    Fitted once for the series of these names; asked again, it is shown their longer past.
    """
    known: dict[tuple[str, ...], Any] = {}

    def fit(table: Any, inputs: list[str]) -> Any:
        from neuralforecast import NeuralForecast, models
        from neuralforecast.losses.pytorch import MQLoss

        model = getattr(models, kind)(
            h=STEPS,
            input_size=2 * STEPS,
            loss=MQLoss(level=LEVELS),
            futr_exog_list=inputs or None,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            enable_checkpointing=False,
            accelerator="cpu",
            devices=1,
        )
        fitted = NeuralForecast([model], freq=1)
        fitted.fit(table)
        return fitted

    def predict(panel: list[Series]) -> Forecast:
        table, names = frame(panel), tuple(s.name for s in panel)
        inputs = [c for c in table.columns if c.startswith("x")]
        if names not in known:
            known[names] = fit(table, inputs)
        future = frame(panel, future=True) if inputs else None
        found: Any = known[names].predict(df=table, futr_df=future)
        return gathered(found, kind, f"{kind}-median", panel)

    return predict


PEERS: dict[str, tuple[str, Callable[[list[Series]], Forecast]]] = {
    "AutoARIMA": ("statsforecast", statistical("AutoARIMA")),
    "AutoETS": ("statsforecast", statistical("AutoETS")),
    "NHITS": ("neuralforecast", neural("NHITS")),
    "LSTM": ("neuralforecast", neural("LSTM")),
}


def held(truth: NDArray[np.float64], quantiles: NDArray[np.float64], level: int) -> float:
    """How much of some futures (…, steps) lies inside the interval of `level` percent."""
    low, high = (quantiles[:, GRID.index(round(0.5 + s * level / 200, 3))] for s in (-1, 1))
    return float(((low <= truth) & (truth <= high)).mean())


Row = dict[str, Any]
"""What one rival did on one set: numbers by name, and `errors`, the MASE of each forecast."""


def score(given: Set, predict: Callable[[list[Series]], Forecast]) -> Row:
    """MASE, CRPS in the same units, coverage of 80 %, and the time: of the clock, of the CPU."""
    errors, crps, inside = [], [], []
    expected: dict[int, list[float]] = {80: [], 95: []}
    begun, worked = time.perf_counter(), time.process_time()
    for back in range(given.cutoffs, 0, -1):
        panel = [s.until(len(s) - back * STEPS) for s in given.panel]
        point, quantiles = predict(panel)
        for i, (s, full) in enumerate(zip(panel, given.panel, strict=True)):
            m = s.season or 1
            unit = np.abs(s.values[m:] - s.values[:-m]).mean()
            truth = full.values[len(s) : len(s) + STEPS, 0]
            errors.append(np.abs(truth - point[i]).mean() / unit)
            crps.append(accuracy.quantile_crps(truth, quantiles[i], GRID).mean() / unit)
            inside.append(held(truth, quantiles[i], 80))
            for level, rows in expected.items():
                if given.futures is not None:
                    rows.append(held(given.futures[i], quantiles[i], level))
    worth = {f"expected_{k}": float(np.mean(rows)) for k, rows in expected.items() if rows}
    return worth | {
        "mase": float(np.mean(errors)),
        "crps": float(np.mean(crps)),
        "coverage_80": float(np.mean(inside)),
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - worked,
        "errors": [round(float(e), 4) for e in errors],
    }


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """TimeoutError inside, once this process has worked for so many processor seconds."""

    def stop(number: int, place: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def row_of(given: Set, predict: Callable[[list[Series]], Forecast], limit: float) -> Row:
    """A rival's score, or after how many processor seconds it was stopped."""
    try:
        with limited(limit):
            return score(given, predict)
    except TimeoutError:
        return {"not_finished_in": limit}


def rows_of(results: dict[str, Any]) -> str:
    """One set's results as a table."""
    titles = ("MASE", "CRPS", "in 80 %", "expected", "seconds", "of CPU")
    lines = [f"{'':14}" + "".join(f"{title:>9}" for title in titles)]
    lines += [
        f"{rival:14}{row['mase']:9.3f}{row['crps']:9.3f}{row['coverage_80']:9.0%}"
        f"{row.get('expected_80', float('nan')):9.1%}{row['seconds']:9.1f}{row['cpu_seconds']:9.1f}"
        if "mase" in row
        else f"{rival:14} not finished in {row['not_finished_in']:g} processor seconds"
        for rival, row in results.items()
    ]
    return "\n".join(lines)


def summary(results: dict[str, dict[str, Row]]) -> str:
    """On how many sets each rival is the best, or within 2 % of it; and the time of all."""
    lines = [
        f"\n{'best or within 2 %':20}{'MASE':>8}{'CRPS':>8}{'sets':>6}{'seconds':>9}{'of CPU':>9}"
    ]
    ended = [{r: row for r, row in rows.items() if "mase" in row} for rows in results.values()]
    for rival in dict.fromkeys(r for rows in ended for r in rows):
        ran = [rows for rows in ended if rival in rows]
        near = [
            sum(rows[rival][m] <= 1.02 * min(r[m] for r in rows.values()) for rows in ran)
            for m in ("mase", "crps")
        ]
        seconds, cpu = (sum(rows[rival][k] for rows in ran) for k in ("seconds", "cpu_seconds"))
        lines.append(f"{rival:20}{near[0]:8}{near[1]:8}{len(ran):6}{seconds:9.0f}{cpu:9.0f}")
    return "\n".join(lines)


def markdown(results: dict[str, dict[str, Row]]) -> str:
    """All results as the table of docs/forecasting.md: MASE, CRPS; bold is best or within 2 %."""
    rivals = list(dict.fromkeys(r for rows in results.values() for r in rows))
    lines = ["| | " + " | ".join(rivals) + " |", "|---" * (len(rivals) + 1) + "|"]
    for name, rows in results.items():
        done = [row for row in rows.values() if "mase" in row]
        best = {m: min((row[m] for row in done), default=0.0) for m in ("mase", "crps")}
        cells = []
        for row in (rows.get(rival, {}) for rival in rivals):
            figures = [
                f"**{row[m]:.3f}**" if row[m] <= 1.02 * least else f"{row[m]:.3f}"
                for m, least in best.items()
                if m in row
            ]
            late = f"not in {row['not_finished_in']:g} s" if "not_finished_in" in row else ""
            cells.append(", ".join(figures) or late)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def difference(row: Row, rival: Row) -> tuple[float, float]:
    """How much higher a row's MASE is than a rival's, and the standard error of that.

    Of the mean of d_i = e_i - r_i over the same cutoffs and series, s / √n: what both find hard
    cancels.
    """
    d = np.subtract(row["errors"], rival["errors"])
    return float(d.mean()), float(d.std(ddof=1) / np.sqrt(len(d)))


def pairs(results: dict[str, dict[str, Row]]) -> str:
    """elman's MASE less that of each rival, ± a standard error, as Markdown; bold: beyond two."""
    rivals = list(dict.fromkeys(r for rows in results.values() for r in rows if r != "elman"))
    lines = ["| | pairs | " + " | ".join(rivals) + " |", "|---" * (len(rivals) + 2) + "|"]
    for name, rows in results.items():
        own = rows["elman"]
        cells = [_apart(own, rows[r]) if "errors" in rows.get(r, {}) else "" for r in rivals]
        lines.append(f"| {name} | {len(own['errors'])} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _apart(own: Row, rival: Row) -> str:
    d, noise = difference(own, rival)
    shown = f"{d:+.3f} ± {noise:.3f}"
    return f"**{shown}**" if abs(d) > 2 * noise else shown


def main() -> None:
    rivals = {"elman": ("elman", ours)} | PEERS
    parser = argparse.ArgumentParser(description="Forecasters against their peers")
    parser.add_argument("--quick", action="store_true", help="few series, one cutoff, no networks")
    parser.add_argument("--series", type=int, default=100, help="series in each simulated set")
    parser.add_argument("--cutoffs", type=int, default=3, help="of each single series")
    parser.add_argument("--seed", type=int, default=0, help="of the simulated sets")
    parser.add_argument("--sets", nargs="*", help="only these sets")
    parser.add_argument("--rivals", nargs="*", default=list(rivals), help="only these rivals")
    parser.add_argument("--json", type=Path, help="write the results here, set by set")
    parser.add_argument("--missing", action="store_true", help="only what FILE does not have")
    parser.add_argument("--limit", type=float, default=900, help="processor seconds for one set")
    parser.add_argument("--table", action="store_true", help="only show FILE, as Markdown")
    parser.add_argument("--pairs", action="store_true", help="only show FILE's differences")
    arguments = parser.parse_args()
    shown = {markdown: arguments.table, pairs: arguments.pairs}
    if (any(shown.values()) or arguments.missing) and arguments.json is None:
        parser.error("--table, --pairs and --missing need --json FILE")
    for table in (table for table, asked in shown.items() if asked):
        print(table(json.loads(arguments.json.read_text())["results"]))
    if any(shown.values()):
        return
    warnings.filterwarnings("ignore")  # the peers' own: convergence, deprecations, few workers
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    count = 3 if arguments.quick else arguments.series
    chosen: dict[str, Callable[[list[Series]], Forecast]] = {}
    for name in arguments.rivals:
        package, predict = rivals[name]
        if not find_spec(package):
            print(f"{package} is not installed, so {name} is left out: pip install {package}")
        elif not (arguments.quick and package == "neuralforecast"):
            chosen[name] = predict
    asked = {"steps": STEPS, "series": count, "cutoffs": arguments.cutoffs, "seed": arguments.seed}
    whole: dict[str, Any] = asked | {"results": {}}
    results = whole["results"] = kept(arguments.json, whole)
    for name, given in sets(count, arguments.seed, arguments.cutoffs).items():
        if arguments.sets and name not in arguments.sets:
            continue
        if arguments.quick:
            given = replace(given, cutoffs=1)
        print(f"\n{name}: {len(given.panel)} series, {given.cutoffs} cutoffs, {STEPS} steps ahead")
        rows = results.setdefault(name, {})
        for rival, predict in chosen.items():
            if arguments.missing and rival in rows:
                continue
            rows[rival] = row_of(given, predict, arguments.limit)
            if arguments.json:
                arguments.json.write_text(json.dumps(whole, indent=2) + "\n")
        print(rows_of(rows), flush=True)
    print(summary(results))


def kept(path: Path | None, whole: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run found on the same sets; nothing where those were other ones."""
    before = json.loads(path.read_text()) if path is not None and path.exists() else {}
    same = all(before.get(k) == value for k, value in whole.items() if k != "results")
    return before["results"] if same else {}


if __name__ == "__main__":
    main()
