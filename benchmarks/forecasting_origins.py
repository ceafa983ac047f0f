"""Fitted once, forecasting from every origin: `elman forecast` beside neuralforecast's NHITS.

    python benchmarks/forecasting_origins.py [--sets co2 …] [--train 0.5 0.6 0.7] [--seeds 1 2 3]
                                             [--updates 300] [--json FILE]

Every forecaster is fitted on the first part of a series (`--train`: several, 60 % unless told
otherwise) and never again. From every step of the last 20 % on it is shown what has come so far and
forecasts 12 steps; MASE is the mean over all of them, in units of the seasonal naive error of the
first 60 %. A cutoff every twelfth step, as
`forecasting.py` has it, asks a monthly series for the same season each time; this asks for all of
them. NHITS reads two seasons and takes so many updates with each seed; 1 is its default.
"""

import argparse
import json
import logging
import time
import warnings
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from elman.forecasting import accuracy
from elman.forecasting.experiment import fit_and_measure
from elman.forecasting.series import Series
from elman.forecasting.settings import Settings
from forecasting import STEPS, sets

UNIT, TEST = 0.6, 0.2


def ours(series: Series, train: int, origins: list[int]) -> Any:
    """The forecaster that `elman forecast` chooses for the training part, at its defaults."""
    times = None if series.times is None else series.times[:train]
    known = replace(series, values=series.values[:train], times=times)
    ensemble = fit_and_measure([known], Settings(steps=STEPS)).ensemble
    chosen = [ensemble.fitted[label] for label in ensemble.members[0]]
    points = [model.forecast(0, series, origins, STEPS).point for model in chosen]
    return np.mean(points, axis=0).reshape(len(origins), STEPS, 1)


def nhits(series: Series, train: int, origins: list[int], seed: int, updates: int) -> Any:
    """neuralforecast's own cross-validation: it trains before the first origin, once."""
    import pandas as pd
    from neuralforecast import NeuralForecast, models

    model = models.NHITS(
        h=STEPS,
        input_size=max(2 * (series.season or 1), 8),
        max_steps=updates,
        scaler_type="standard",
        random_seed=seed,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    y = series.values[:, 0]
    frame = pd.DataFrame({"unique_id": "x", "ds": range(len(y)), "y": y})
    folds: Any = NeuralForecast([model], freq=1).cross_validation(
        frame,
        n_windows=None,
        val_size=origins[0] - train,  # set apart: nothing is stopped early by it
        test_size=len(y) - origins[0],
        step_size=1,
    )
    return folds["NHITS"].to_numpy().reshape(len(origins), STEPS, 1).astype(np.float64)


def main() -> None:
    """Print a table; write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sets", nargs="+", default=["co2"], help="co2, sunspots, airline, nile")
    parser.add_argument("--train", nargs="+", type=float, default=[0.6], help="fitted on")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3], help="of NHITS")
    parser.add_argument("--updates", type=int, default=300, help="of NHITS")
    parser.add_argument("--json", type=Path, help="write the results here")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")  # the peers' own
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    if not find_spec("neuralforecast"):
        print("neuralforecast is not installed and is left out: pip install neuralforecast")
        given.seeds = []
    single, results = sets(0, 0), {}
    if missing := [name for name in given.sets if name not in single]:
        parser.error(f"{', '.join(missing)} comes with statsmodels: pip install statsmodels")
    for name in given.sets:
        [series] = single[name].panel
        test = round((1 - TEST) * len(series))
        origins = list(range(test, len(series) - STEPS + 1))
        truth = np.stack([series.values[o : o + STEPS] for o in origins])
        unit = [series.values[: round(UNIT * len(series))]]
        rows = results[name] = []
        labels = [("elman", None), *((f"NHITS, seed {s}", s) for s in given.seeds)]
        for part, (label, seed) in product(given.train, labels):
            start, train = time.process_time(), round(part * len(series))
            if seed is None:
                paths = ours(series, train, origins)
            else:
                paths = nhits(series, train, origins, seed, given.updates)
            error = float(accuracy.mase(truth, paths, unit, series.season or 1).mean())
            seconds = time.process_time() - start
            rows.append({"train": part, "model": label, "mase": error, "cpu_seconds": seconds})
            print(f"{name:10} {part:4.0%}  {label:14} {error:.4f}  {seconds:.0f} s", flush=True)
    if given.json:
        document = {"steps": STEPS, "updates": given.updates, "results": results}
        given.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
