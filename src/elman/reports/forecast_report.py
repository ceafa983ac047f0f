"""The report of a fitted forecaster: its errors, its pictures, and what comes next."""

import shlex
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from elman import __version__
from elman.files import write_text
from elman.forecasting.experiment import Experiment
from elman.reports import page

_MOST_SERIES = 20


def write(folder: Path, found: Experiment, answer: dict[str, Any], picture: Figure) -> Path:
    """Write report.html into the folder of a forecaster, from what `elman forecast` found."""
    name = found.series[0].name if len(found.series) == 1 else f"{len(found.series)} series"
    scores, windows = answer["scores"], answer["windows"]
    measure, words = measure_shown(scores)
    horizons = shown_horizons(windows["steps"])
    heading = f"{name}: {answer['published']}"
    body = [
        f"<h1>{page.text(heading)}</h1>",
        f'<p class="soft">{page.text(answer["model"])}. Errors are those of {windows["count"]} '
        f"past windows of {windows['steps']} steps, each forecast from what came before it. The "
        f"forecast is from a model fitted on everything.</p>",
        *(f"<p>{page.text(line)}</p>" for line in answer["verdicts"]),
        *([f"<p><b>{page.text(answer['warning'])}</b></p>"] if answer["warning"] else []),
        page.tiles(_tiles(next(iter(scores.values())), measure, words, horizons)),
        page.figure(picture, "forecast", "The data, the forecast, and past forecasts of it."),
        "<h2>Error by horizon, beside the baselines</h2>",
        page.table(
            [f"{words}, steps ahead", *map(str, horizons)], _rows(scores, measure, horizons), 0
        ),
        "<h2>What comes next</h2>",
        *(
            _ahead(f"{name}, {column}", path)
            for name, columns in list(answer["forecast"].items())[:_MOST_SERIES]
            for column, path in columns.items()
        ),
        "<h2>Commands</h2>",
        f"<pre>elman forecast NEW.csv --run {page.text(shlex.quote(str(folder)))} "
        f"--steps {windows['steps']}</pre>",
        f"<footer>Written by elman {page.text(__version__)}.</footer>",
    ]
    path = folder / "report.html"
    write_text(path, page.page(heading, body))
    return path


def shown_horizons(steps: int) -> list[int]:
    """The horizons of the notes, 1, 4, 16 and 64, as far as they go, and the last one."""
    return sorted({k for k in (1, 4, 16, 64) if k <= steps} | {steps})


def measure_shown(scores: dict[str, Any]) -> tuple[str, str]:
    """RMSE for one series; MASE where series of different units are pooled."""
    first = next(iter(scores.values()))
    if first["rmse"] is not None:
        return "rmse", "RMSE"
    return ("mase", "MASE") if first["mase"] is not None else ("smape", "sMAPE")


def _tiles(score: dict[str, Any], measure: str, words: str, horizons: list[int]) -> dict[str, str]:
    facts = {f"{words}, {k} ahead": f"{score[measure][k - 1]:.4g}" for k in horizons[:3]}
    if score["mase"]:
        facts["MASE"] = f"{sum(score['mase']) / len(score['mase']):.3f}"
    for level, row in score["coverage_by_level"].items():
        facts[f"inside {level} % intervals"] = f"{sum(row) / len(row):.0%}"
    return facts


def _rows(scores: dict[str, Any], measure: str, horizons: list[int]) -> list[list[str]]:
    first, *rest = scores
    order = [first, *sorted(rest, key=lambda k: sum(scores[k][measure]))]
    return [[name, *(f"{scores[name][measure][k - 1]:.4g}" for k in horizons)] for name in order]


def _ahead(title: str, path: dict[str, Any]) -> str:
    levels = path["levels"]
    rows = []
    for k, (when, value) in enumerate(zip(path["time"], path["mean"], strict=True)):
        ends = [f"{e['low'][k]:.4g} … {e['high'][k]:.4g}" for e in levels.values()]
        rows.append([when, f"{value:.4g}", *ends])
    return page.table([title, "forecast", *(f"{level} %" for level in levels)], rows)
