"""The report of a fitted forecaster: its errors, its pictures, and what comes next."""

import shlex
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from elman import __version__
from elman.files import write_text
from elman.reports import page


def write(folder: Path, name: str, answer: dict[str, Any], picture: Figure) -> Path:
    """Write report.html into the folder of a forecaster, from what `elman forecast` found."""
    first = next(iter(answer["scores"].values()))
    parts = answer["parts"][name]
    horizons = shown_horizons(len(first["rmse"]))
    heading = f"{name}: {answer['model'].split('(')[0]}"
    body = [
        f"<h1>{page.text(heading)}</h1>",
        f'<p class="soft">{page.text(answer["model"])}. It learned from the first {parts["train"]} '
        f"steps; its intervals were calibrated on the next {parts['validation']}; everything below "
        f"was measured on the last {parts['test']}.</p>",
        page.tiles(_tiles(first, horizons)),
        page.figure(picture, "forecast", "The data and the model's forecasts of it."),
        "<h2>Error by horizon, beside the baselines</h2>",
        page.table(
            ["RMSE, steps ahead", *map(str, horizons)], _rows(answer["scores"], horizons), 0
        ),
        "<h2>What comes next</h2>",
        *(_ahead(column, path) for column, path in answer["forecast"][name].items()),
        "<h2>Commands</h2>",
        f"<pre>elman forecast NEW.csv --run {page.text(shlex.quote(str(folder)))} "
        f"--steps {horizons[-1]}</pre>",
        f"<footer>Written by elman {page.text(__version__)}.</footer>",
    ]
    path = folder / "report.html"
    write_text(path, page.page(heading, body))
    return path


def shown_horizons(steps: int) -> list[int]:
    """The horizons of the notes, 1, 4, 16 and 64, as far as they go, and the last one."""
    return sorted({k for k in (1, 4, 16, 64) if k <= steps} | {steps})


def _tiles(score: dict[str, Any], horizons: list[int]) -> dict[str, str]:
    facts = {f"RMSE, {k} ahead": f"{score['rmse'][k - 1]:.4g}" for k in horizons[:3]}
    if score["mase"]:
        facts["MASE, 1 ahead"] = f"{score['mase'][0]:.3f}"
    if score["coverage"]:
        facts["interval coverage, 1 ahead"] = f"{score['coverage'][0]:.0%}"
    return facts


def _rows(scores: dict[str, Any], horizons: list[int]) -> list[list[str]]:
    return [
        [name, *(f"{score['rmse'][k - 1]:.4g}" for k in horizons)] for name, score in scores.items()
    ]


def _ahead(column: str, path: dict[str, Any]) -> str:
    rows = []
    for k, value in enumerate(path["mean"]):
        known = k < len(path["low"]) and path["low"][k] is not None
        ends = [f"{path['low'][k]:.4g}", f"{path['high'][k]:.4g}"] if known else ["", ""]
        rows.append([str(k + 1), f"{value:.4g}", *ends])
    return page.table([column, "forecast", "low", "high"], rows)
