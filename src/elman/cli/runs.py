"""`elman runs`: the runs of a folder, or several side by side."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elman.cli.console import emit, note
from elman.cli.limits import a_path
from elman.errors import UserError

if TYPE_CHECKING:
    from elman.runs.comparison import Forecaster, Summary


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A folder of runs to list, or runs to compare",
            parser=a_path,
            metavar="[FOLDER]...",
            show_default="runs",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """List the runs of a folder, best first, or compare several side by side.

    Scores are of the held-out text; a run that has not ended shows its best validation with a ~.
    Forecasters are listed by themselves, with the errors of their backtests.
    """
    from elman.runs import comparison

    given = folders or [Path("runs")]
    listing = len(given) == 1 and not comparison.is_run(given[0])
    paths = comparison.below(given[0]) if listing else given
    opened = {path: comparison.forecaster(path) for path in paths}
    forecasters = [f for f in opened.values() if f is not None]
    summaries = [comparison.summary(path) for path, f in opened.items() if f is None]
    summaries = comparison.best_first(summaries) if listing else summaries
    if as_json:
        record = {
            "runs": [s.json() for s in summaries],
            "differ": comparison.differing(summaries),
        }
        emit(record | ({"forecasters": [f.json() for f in forecasters]} if forecasters else {}))
    elif not summaries and not forecasters:
        raise UserError(f"there are no runs in {given[0]}", hint="elman train BOOK.txt makes one")
    else:
        _show(summaries, forecasters, listing)
    broken = [s.problem for s in (*forecasters, *summaries) if s.problem]
    if broken and not listing:
        raise UserError("; ".join(broken), hint="elman runs FOLDER lists the runs that are there")


def _show(
    summaries: Sequence["Summary"], forecasters: Sequence["Forecaster"], listing: bool
) -> None:
    """Forecasters, then runs, then what is wrong with the rest, then what to type next.

    Of runs that were named, what is wrong is an error, for the caller to raise.
    """
    from elman.runs import comparison

    whole = [s for s in summaries if not s.problem]
    working = [f for f in forecasters if not f.problem]
    tables = [_forecasters(working)] if working else []
    if whole:
        tables.append(_listed(whole) if listing else _side_by_side(whole))
    if tables:
        typer.echo("\n\n".join(tables))
    broken = [s for s in (*forecasters, *summaries) if s.problem]
    if broken and not listing:
        return
    for each in broken:
        note(f"{each.path}: {each.problem}")
    if whole or not working:
        note(_next(comparison.best_first(whole)))
    else:
        note(_next_forecast(working))


def _listed(runs: Sequence["Summary"]) -> str:
    """A line for each run, ended by the options in which it is not like the others."""
    from elman.runs import comparison, presets

    differ = comparison.differing(runs)
    named = [n for n in differ if n not in ("source", "model")]
    rows = [
        ["run", "model", "step", "done", "nats/token", "perplexity", "bits/char", "what differs"]
    ]
    for run in runs:
        options = presets.as_flags({name: run.options[name] for name in named})
        if "source" in differ:
            options = f"{Path(run.options['source']).name} {options}"
        rows.append([run.path.name, str(run.options["model"]), *_scores(run), options])
    return _table(rows, right=range(2, 7))


def _side_by_side(runs: Sequence["Summary"]) -> str:
    """A column for each run: the options that differ, then the scores."""
    from elman.options import flag
    from elman.runs import comparison

    rows = [["", *(str(run.path) for run in runs)]]
    for name in comparison.differing(runs):
        label = "SOURCE" if name == "source" else flag(name)
        rows.append([label, *(str(run.options.get(name, "")) for run in runs)])
    labels = ("step", "done", "nats/token", "perplexity", "bits/char")
    columns = [_scores(run) for run in runs]
    rows += [[label, *values] for label, *values in zip(labels, *columns, strict=True)]
    return _table(rows, right=range(1, len(runs) + 1))


def _scores(run: "Summary") -> list[str]:
    """Step, progress, nats, perplexity, bits per character; ~ before what is not final."""
    from elman.scoring.metrics import perplexity

    far = [f"{run.step:,}", f"{run.progress:.0%}"]
    if run.result is not None:
        result = run.result
        scores = (result.nats_per_token, result.perplexity, result.bits_per_char)
        return [*far, f"{scores[0]:.4f}", f"{scores[1]:.3f}", f"{scores[2]:.4f}"]
    if math.isnan(run.best):
        return [*far, "–", "–", "–"]
    return [*far, f"~{run.best:.4f}", f"~{perplexity(run.best):.3f}", "–"]


def _forecasters(forecasters: Sequence["Forecaster"]) -> str:
    """A line for each forecaster: what it is, how far it looks, how it did at past origins."""
    rows = [["forecaster", "model", "steps", "series", "MASE", "CRPS"]]
    for f in forecasters:
        scores = [f"{x:.3f}" if x is not None else "–" for x in (f.mase, f.crps)]
        series = "–" if f.unfinished else f"{f.series:,}"
        model = f"{f.model} (stopped)" if f.unfinished else f.model
        rows.append([f.path.name, model, str(f.steps), series, *scores])
    return _table(rows, right=range(2, 6))


def _next_forecast(forecasters: Sequence["Forecaster"]) -> str:
    stopped = [f for f in forecasters if f.unfinished]
    path = shlex.quote(str((stopped or forecasters)[0].path))
    if stopped:
        return f"next: elman forecast --resume {path}"
    return f"next: elman forecast NEW.csv --run {path}"


def _table(rows: list[list[str]], right: range) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _next(ranked: Sequence["Summary"]) -> str:
    if not ranked:
        return "next: elman train BOOK.txt"
    path = shlex.quote(str(ranked[0].path))
    if ranked[0].result is not None:
        return f"next: elman evaluate {path}; elman generate {path}"
    if ranked[0].progress < 1:
        return f"next: elman train --resume {path}"
    return f"next: elman generate {path}"  # it has held nothing out
