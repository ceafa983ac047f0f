"""Forecasters against statsmodels and neuralforecast: accuracy and time, one run, same splits.

    python benchmarks/forecasting.py [--quick] [--json FILE]

Series: sunspots and airline from the package; CO2 at Mauna Loa by month and the yearly flow of the
Nile from statsmodels. The first 60 % trains, the next 20 % is left for calibration, errors are on
the last 20 %, from every origin, averaged over 12 steps ahead. "changes" means that the network
forecasts the changes since one season ago (`Differenced`). statsmodels' AutoReg and exponential
smoothing are fitted on the same training part and then filtered over the rest with their parameters
fixed; neuralforecast's GRU and NHITS train on it for 300 steps at their own default settings.
Peers that are not installed are left out, and said so.
"""

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from elman import forecasting as f
from elman import series
from elman.forecasting import accuracy
from elman.forecasting.base import Paths, Values
from elman.forecasting.evaluation import Parts, split

STEPS = 12
Predict = Callable[[Values, range], Paths]


def data() -> dict[str, tuple[Values, int]]:
    """Each series with its season."""
    import statsmodels.api as sm

    datasets: Any = sm.datasets
    co2 = datasets.co2.load_pandas().data["co2"].resample("MS").mean().interpolate()
    nile = datasets.nile.load_pandas().data["volume"]
    return {
        "sunspots": (series.load("sunspots")[0].values, 11),
        "airline": (series.load("airline")[0].values, 12),
        "co2 (monthly)": (co2.to_numpy()[:, None], 12),
        "nile": (nile.to_numpy()[:, None], 1),
    }


def elman_models(season: int, quick: bool) -> dict[str, Callable[[], f.Forecaster]]:
    """Ours: baselines, exact linear, window and recurrent networks."""
    tau, epochs = max(2 * season, 8), 5 if quick else 30
    networks: dict[str, Callable[[], f.Forecaster]] = {
        "elman window": lambda: f.Window(tau, 16, epochs=epochs),
        "elman window, direct": lambda: f.Window(tau, 16, direct=STEPS, epochs=epochs),
        "elman gru": lambda: f.Recurrent("gru", tau=tau, epochs=epochs),
        "elman lstm": lambda: f.Recurrent("lstm", tau=tau, epochs=epochs),
    }
    changes: dict[str, Callable[[], f.Forecaster]] = {
        f"{name}, changes": lambda make=make: f.Differenced(make(), season)
        for name, make in networks.items()
    }
    return {
        "last": f.Last,
        "seasonal last": lambda: f.Seasonal(season),
        "drift": f.Drift,
        "elman linear": lambda: f.Linear(tau),
        "elman linear, direct": lambda: f.Linear(tau, direct=STEPS),
        **networks,
        **changes,
    }


def auto_reg(train: Values, season: int) -> Predict:
    """statsmodels' AutoReg with as many lags as our linear model, rolled from each origin."""
    from statsmodels.tsa.ar_model import AutoReg

    fitted = AutoReg(train[:, 0], lags=max(2 * season, 8)).fit()

    def predict(values: Values, origins: range) -> Paths:
        paths = []
        for o in origins:
            past = AutoReg(values[:o, 0], lags=max(2 * season, 8))
            paths.append(past.predict(fitted.params, start=o, end=o + STEPS - 1, dynamic=True))
        return np.stack(paths)[..., None]

    return predict


def exponential_smoothing(train: Values, season: int) -> Predict:
    """statsmodels' additive ETS: level, trend, and season where there is one."""
    from statsmodels.tsa.exponential_smoothing.ets import ETSModel

    options = {"error": "add", "trend": "add", "damped_trend": True}
    if season > 1:
        options |= {"seasonal": "add", "seasonal_periods": season}
    fitted: Any = ETSModel(train[:, 0], **options).fit(disp=False)

    def predict(values: Values, origins: range) -> Paths:
        paths = []
        for o in origins:
            model: Any = ETSModel(values[:o, 0], **options)
            paths.append(model.smooth(fitted.params).forecast(STEPS))
        return np.stack(paths)[..., None]

    return predict


def neural(train: Values, season: int, validation: int, quick: bool, kind: str) -> Predict:
    """neuralforecast's GRU or NHITS; it trains and forecasts in one call, so its fit time is 0."""
    import pandas as pd
    from neuralforecast import NeuralForecast, models

    def predict(values: Values, origins: range) -> Paths:
        model = getattr(models, kind)(
            h=STEPS,
            input_size=max(2 * season, 8),
            max_steps=30 if quick else 300,
            scaler_type="standard",
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        frame = pd.DataFrame({"unique_id": "x", "ds": range(len(values)), "y": values[:, 0]})
        folds: Any = NeuralForecast([model], freq=1).cross_validation(
            frame,
            n_windows=None,
            val_size=validation,
            test_size=len(values) - origins[0],
            step_size=1,
        )
        return folds[kind].to_numpy().reshape(len(origins), STEPS, 1).astype(np.float64)

    return predict


def peers(part: Parts, season: int, quick: bool) -> dict[str, Callable[[], Predict]]:
    """The rivals that are installed."""
    found: dict[str, Callable[[], Predict]] = {
        "statsmodels AutoReg": lambda: auto_reg(part.train, season),
        "statsmodels ETS": lambda: exponential_smoothing(part.train, season),
    }
    if find_spec("neuralforecast"):
        validation = part.test - part.validation
        for kind in ("GRU", "NHITS"):
            found[f"neuralforecast {kind}"] = lambda kind=kind: neural(
                part.train, season, validation, quick, kind
            )
    return found


def ours(make: Callable[[], f.Forecaster], train: Values) -> Predict:
    model = make().fit(train)
    return lambda values, origins: model.forecasts(values, origins, STEPS)


def compare(values: Values, season: int, quick: bool) -> dict[str, dict[str, float]]:
    """Every forecaster on one series: fit time, forecast time, MASE and RMSE over the horizons."""
    part = split(values)
    origins = range(part.test, len(values) - STEPS + 1)
    truth = np.stack([values[o : o + STEPS] for o in origins])
    rivals: dict[str, Callable[[], Predict]] = {
        name: (lambda make=make: ours(make, part.train))
        for name, make in elman_models(season, quick).items()
    }
    rivals |= peers(part, season, quick)
    rows = {}
    for name, fit in rivals.items():
        start = time.perf_counter()
        predict = fit()
        fitted = time.perf_counter()
        paths = predict(values, origins)
        rows[name] = {
            "mase": float(accuracy.mase(truth, paths, [part.train], season).mean()),
            "rmse": float(accuracy.rmse(truth, paths).mean()),
            "fit_seconds": fitted - start,
            "forecast_seconds": time.perf_counter() - fitted,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Forecasters against their peers")
    parser.add_argument("--quick", action="store_true", help="few epochs")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")  # the peers' own: convergence, deprecations, few workers
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    if not find_spec("neuralforecast"):
        print("neuralforecast is not installed and is left out: pip install neuralforecast")
    results = {}
    for name, (values, season) in data().items():
        results[name] = compare(values, season, arguments.quick)
        print(f"\n{name}: {len(values)} steps, season {season}")
        print(f"{'':31}{'MASE':>8}{'RMSE':>10}{'fit s':>9}{'forecast s':>12}")
        for rival, row in sorted(results[name].items(), key=lambda item: item[1]["mase"]):
            print(
                f"{rival:31}{row['mase']:8.3f}{row['rmse']:10.3g}"
                f"{row['fit_seconds']:9.3f}{row['forecast_seconds']:12.3f}"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"steps": STEPS, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
