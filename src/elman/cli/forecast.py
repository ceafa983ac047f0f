"""`elman forecast`: fit, measure on held-out steps beside the baselines, and look ahead."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elman.cli.console import emit, note

if TYPE_CHECKING:
    from elman.forecasting import Forecaster
    from elman.forecasting.evaluation import Parts, Scores
    from elman.forecasting.saving import Fitted
    from elman.forecasting.series import Series

PLAIN = ("window", "linear", "last", "seasonal", "mean", "drift")
"""Models that are not recurrent; all others are named after their cell."""


def forecast(
    source: Annotated[
        str, typer.Argument(help="sine, sunspots, airline, a .csv or .parquet file, or - for stdin")
    ],
    model: Annotated[
        str, typer.Option(help=f"{', '.join(PLAIN)}; or a cell: elman, gru, lstm …")
    ] = "window",
    steps: Annotated[int, typer.Option(help="How many steps to look ahead")] = 16,
    column: Annotated[list[str] | None, typer.Option(help="Column to forecast; repeatable")] = None,
    time: Annotated[str | None, typer.Option(help="Column that orders the steps")] = None,
    group: Annotated[str | None, typer.Option(help="Column that tells series apart")] = None,
    missing: Annotated[str, typer.Option(help="Gaps: error, or interpolate")] = "error",
    season: Annotated[int | None, typer.Option(help="Steps in one season")] = None,
    tau: Annotated[int | None, typer.Option(help="Past values one forecast reads")] = None,
    difference: Annotated[int, typer.Option(help="Model changes since this many steps ago")] = 0,
    hidden_size: Annotated[int | None, typer.Option(help="Hidden units of a network")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training part")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Step size of Adam")] = None,
    gaussian: Annotated[bool, typer.Option(help="Model a distribution; adds CRPS")] = False,
    validation: Annotated[float, typer.Option(help="Share that calibrates the intervals")] = 0.2,
    test: Annotated[float, typer.Option(help="Share that is only ever measured on")] = 0.2,
    level: Annotated[float, typer.Option(help="How often intervals should hold")] = 0.9,
    backtest: Annotated[int, typer.Option(help="Refit at this many rolling origins")] = 0,
    run: Annotated[
        Path | None, typer.Option(help="Use the forecaster saved in this folder")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Save the fitted forecaster here")] = None,
    force: Annotated[bool, typer.Option(help="Overwrite --out")] = False,
    figure: Annotated[Path | None, typer.Option(help="Draw to this .svg, .png or .pdf")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same forecast")] = 0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Forecast numbers: one step, many steps and direct, with intervals, beside the baselines."""
    from elman.forecasting import series

    check_requests(missing=missing, steps=steps, out=out, force=force, figure=figure)
    given = series.load(
        source,
        column=column or (),
        time=time,
        group=group,
        missing="interpolate" if missing == "interpolate" else "error",
        season=season,
        seed=seed,
    )
    if run is not None:
        report(continue_run(run, given, steps), as_json=json)
        return
    options = {
        "tau": tau,
        "hidden": hidden_size,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "gaussian": gaussian or None,
        "seed": seed,
    }
    options = {k: v for k, v in options.items() if v is not None}
    maker = Maker(model, given[0].season, difference, options)
    answer = fit_and_measure(given, maker, steps, validation, test, level, backtest, figure, out)
    report(answer, as_json=json)
    if out is not None:
        note(f"saved {out}; to read in a browser: {answer['report']}")
        note(f"next: elman forecast NEW.csv --run {out} --steps {steps}")


def check_requests(
    *, missing: str, steps: int, out: Path | None, force: bool, figure: Path | None
) -> None:
    """Refuse what cannot be served before any work is done."""
    from elman.errors import UserError
    from elman.figures.style import check_format

    if missing not in ("error", "interpolate"):
        raise UserError(f"--missing {missing!r} is unknown", hint="error or interpolate")
    if steps < 1:
        raise UserError(f"--steps {steps} must be at least 1", hint="how far ahead to look")
    if out is not None and out.exists() and not force:
        raise UserError(f"{out} exists already", hint="another --out, or --force to overwrite it")
    if figure is not None:
        check_format(figure)


class Maker:
    """Builds fresh, unfitted models by the name the user typed."""

    def __init__(
        self, name: str, season: int | None, difference: int, options: dict[str, Any]
    ) -> None:
        from elman.cells import models
        from elman.errors import UserError

        self.name, self.season, self.difference, self.options = name, season, difference, options
        if difference < 0:
            raise UserError(f"--difference {difference} is negative", hint="0 leaves values alone")
        known = (*PLAIN, *(cell for cell in models() if cell not in PLAIN))
        if name not in known:
            raise UserError(f"--model {name!r} is unknown", hint=f"one of {', '.join(known)}")
        if name == "seasonal" and not season:
            raise UserError("the seasonal model needs to know the season", hint="--season 12")

    def __call__(self, direct: int = 1) -> Forecaster:
        from elman.forecasting import Differenced

        model = self._plain(direct)
        return Differenced(model, self.difference) if self.difference else model

    def _plain(self, direct: int) -> Forecaster:
        from elman import forecasting as f

        network = {**self.options, "direct": direct}
        if self.name == "window":
            return f.Window(**network)
        if self.name not in PLAIN:
            return f.Recurrent(cell=self.name, **network)
        if self.name == "linear":
            return f.Linear(self.options.get("tau", 4), direct)
        if self.name == "seasonal":
            return f.Seasonal(self.season or 1)
        return {"last": f.Last, "mean": f.Mean, "drift": f.Drift}[self.name]()

    @property
    def can_be_direct(self) -> bool:
        return self.name in ("window", "linear") or self.name not in PLAIN


def fit_and_measure(
    given: list[Series],
    maker: Maker,
    steps: int,
    validation: float,
    test: float,
    level: float,
    backtest: int,
    figure: Path | None,
    out: Path | None,
) -> dict[str, Any]:
    """Fit on the training parts, calibrate on the validation parts, measure on the test parts."""
    from elman.figures import save as save_figure
    from elman.figures.forecast import overview
    from elman.forecasting import calibrate
    from elman.forecasting.baselines import baselines
    from elman.forecasting.evaluation import split
    from elman.forecasting.saving import Fitted, save
    from elman.reports import forecast_report

    parts = [split(s.values, validation, test) for s in given]
    training = [p.train for p in parts]
    season = given[0].season or 1
    model = maker().fit(training)
    unseen = [(p.values[: p.test], p.validation) for p in parts]
    intervals = calibrate(model, unseen, steps, level)
    rivals: dict[str, Forecaster] = {maker.name: model}
    if maker.can_be_direct and steps > 1:
        rivals[f"{maker.name}, direct"] = maker(direct=steps).fit(training)
    for name, rival in baselines(given[0].season).items():
        if name not in rivals and all(len(v) > rival.lags for v in training):
            rivals[name] = rival.fit(training)
    scores = measure_all(rivals, parts, steps, season, model, intervals)
    fitted = Fitted(model, given[0].columns, intervals, given[0].season)
    answer = {
        "model": repr(model),
        "parts": {s.name: _part_sizes(p) for s, p in zip(given, parts, strict=True)},
        "scores": {name: _plain(score) for name, score in scores.items()},
        "growth": _growth(scores[maker.name]),
        "backtest": _backtests(maker, given, backtest, steps, season),
        "forecast": {s.name: look_ahead(fitted, s, steps) for s in given},
    }
    picture = functools.partial(
        overview, given[0].name, given[0].values, model, parts[0].test, scores, intervals
    )
    if figure is not None:
        answer["figure"] = str(save_figure(picture(), figure))
    if out is not None:
        answer["run"] = str(save(fitted, out))
        answer["report"] = str(forecast_report.write(out, given[0].name, answer, picture()))
    return answer


def measure_all(
    rivals: dict[str, Forecaster],
    parts: list[Parts],
    steps: int,
    season: int,
    model: Forecaster,
    intervals: Any,
) -> dict[str, Scores]:
    """Every rival on the same origins; intervals and CRPS for the model itself."""
    from elman.forecasting.evaluation import score

    samples = 100 if model.samples else 0
    return {
        name: score(
            rival,
            parts,
            steps,
            season=season,
            intervals=intervals if rival is model else None,
            samples=samples if rival is model else 0,
        )
        for name, rival in rivals.items()
    }


def continue_run(run: Path, given: list[Series], steps: int) -> dict[str, Any]:
    """Forecast new data with a forecaster that was fitted before."""
    from elman.errors import UserError
    from elman.forecasting.saving import load

    fitted = load(run)
    for s in given:
        if s.columns != fitted.columns:
            raise UserError(
                f"{s.name} has the columns {', '.join(s.columns)}, but {run} was fitted on "
                f"{', '.join(fitted.columns)}",
                hint=" ".join(f"--column {c}" for c in fitted.columns),
            )
    return {
        "model": repr(fitted.model),
        "forecast": {s.name: look_ahead(fitted, s, steps) for s in given},
    }


def look_ahead(fitted: Fitted, given: Series, steps: int) -> dict[str, Any]:
    """The steps after the last known one, with intervals as far as they were calibrated."""
    path = fitted.model.predict(given.values, steps)
    known = min(steps, len(fitted.intervals.radius))
    low, high = fitted.intervals.around(path[None, :known])
    return {
        column: {
            "mean": path[:, j].tolist(),
            "low": _finite(low[0, :, j]),
            "high": _finite(high[0, :, j]),
        }
        for j, column in enumerate(given.columns)
    }


def report(answer: dict[str, Any], *, as_json: bool) -> None:
    """Print what was found: a table for a person, one object for a program."""
    if as_json:
        emit(answer)
        return
    print(answer["model"])
    for name, sizes in answer.get("parts", {}).items():
        print(
            f"{name}: {sizes['train']} steps to train, {sizes['validation']} to calibrate, "
            f"{sizes['test']} to test"
        )
    if "scores" in answer:
        print_scores(answer)
    for name, columns in answer["forecast"].items():
        for column, path in columns.items():
            print(f"\n{name}, {column}: the next {len(path['mean'])} steps")
            print_path(path)


def print_scores(answer: dict[str, Any]) -> None:
    from elman.reports.forecast_report import shown_horizons

    scores = answer["scores"]
    steps = len(next(iter(scores.values()))["rmse"])
    horizons = shown_horizons(steps)
    print("\nheld-out RMSE by steps ahead")
    print(f"{'':16}" + "".join(f"{k:>10}" for k in horizons))
    for name, score in scores.items():
        print(f"{name:16}" + "".join(f"{score['rmse'][k - 1]:10.4g}" for k in horizons))
    first = next(iter(scores.values()))
    if first["coverage"]:
        print(f"{'coverage':16}" + "".join(f"{first['coverage'][k - 1]:10.0%}" for k in horizons))
    if answer["growth"]:
        print(f"errors grow as ε + c ε with c = {answer['growth']['factor']:.3f}")
    for name, score in (answer["backtest"] or {}).items():
        print(
            f"backtest of {name}: RMSE " + " ".join(f"{score['rmse'][k - 1]:.4g}" for k in horizons)
        )


def print_path(path: dict[str, Any]) -> None:
    for k, value in enumerate(path["mean"]):
        known = k < len(path["low"]) and path["low"][k] is not None
        span = f"   {path['low'][k]:.4g} … {path['high'][k]:.4g}" if known else ""
        print(f"{k + 1:>4} {value:10.4g}{span}")


def _part_sizes(part: Parts) -> dict[str, int]:
    return {
        "train": part.validation,
        "validation": part.test - part.validation,
        "test": len(part.values) - part.test,
    }


def _plain(score: Scores) -> dict[str, Any]:
    """Scores as JSON: an infinite width (too few residuals to say) becomes null."""
    return {k: v if v is None or isinstance(v, int) else _finite(v) for k, v in vars(score).items()}


def _finite(values: Any) -> list[float | None]:
    return [v if abs(v) != float("inf") else None for v in values.tolist()]


def _growth(score: Scores) -> dict[str, Any] | None:
    from elman.forecasting.accuracy import growth

    if len(score.rmse) < 2:
        return None
    fitted = growth(score.rmse)
    return {
        "first": fitted.first,
        "factor": fitted.factor,
        "predicted": fitted.predicted.tolist(),
    }


def _backtests(
    maker: Maker, given: list[Series], folds: int, steps: int, season: int
) -> dict[str, Any] | None:
    from elman.forecasting.evaluation import backtest

    if not folds:
        return None
    return {s.name: _plain(backtest(maker, s.values, folds, steps, season=season)) for s in given}
