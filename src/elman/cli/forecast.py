"""`elman forecast`: arguments in, a table or JSON out; `forecasting.experiment` does the work."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from elman.cli import forecast_options as said
from elman.cli.console import emit, note, progress
from elman.cli.device import use_threads
from elman.cli.source import was_typed
from elman.errors import UserError
from elman.options import flag as option_of

if TYPE_CHECKING:
    from elman.forecasting.experiment import Experiment
    from elman.forecasting.saving import Saved
    from elman.forecasting.series import Series
    from elman.forecasting.settings import Settings
    from elman.forecasting.unfinished import Unfinished


def forecast(
    context: typer.Context,
    source: said.Source = None,
    model: said.Model = "auto",
    steps: said.Steps = 16,
    column: said.Column = None,
    time: said.Time = None,
    group: said.Group = None,
    known: said.Known = None,
    past: said.Past = None,
    static: said.Static = None,
    calendar: said.Calendar = False,
    fill: said.Filling = None,
    missing: said.Missing = "error",
    date_format: said.DateFormat = None,
    timezone: said.Timezone = None,
    season: said.Season = None,
    tau: said.Tau = None,
    difference: said.Difference = 0,
    hidden_size: said.HiddenSize = None,
    epochs: said.Epochs = None,
    updates: said.Updates = None,
    learning_rate: said.LearningRate = None,
    gaussian: said.Gaussian = False,
    carry: said.CarryBack = None,
    memory: said.Memory = None,
    kernel: said.Kernel = None,
    level: said.Level = None,
    windows: said.Windows = 5,
    minutes: said.Minutes = 2.0,
    run: said.Saved = None,
    resume: said.Resume = None,
    out: said.Out = None,
    force: said.Force = False,
    output: said.Output = None,
    figure: said.Figure = None,
    seed: said.Seed = 0,
    threads: said.Threads = 0,
    json: said.Json = False,
) -> None:
    """Forecast numbers: with intervals, beside the baselines, measured at past origins."""
    check_files(source, output, figure)
    use_threads(threads)
    if resume is not None:
        go_on(context, resume, figure=figure, output=output, as_json=json)
        return
    if source is None:
        raise UserError("nothing to forecast was named", hint="elman forecast sales.csv")
    asked: dict[str, Any] = {
        "column": column, "time": time, "group": group, "known": known, "past": past,
        "static": static, "fill": fill_of(fill, missing), "date_format": date_format,
        "timezone": timezone, "season": season,
    }  # fmt: skip
    asked = {k: v for k, v in asked.items() if v is not None}
    if run is not None:
        continue_run(context, run, source, steps, asked, seed, output=output, as_json=json)
        return
    options = {
        "tau": tau, "hidden": hidden_size, "epochs": epochs, "updates": updates,
        "learning_rate": learning_rate, "gaussian": gaussian or None, "carry": carry,
        "memory": memory, "kernel": kernel,
    }  # fmt: skip
    settings: dict[str, Any] = {
        "model": model, "steps": steps, "difference": difference,
        "options": {k: v for k, v in options.items() if v is not None},
        "levels": levels_of(level), "windows": windows, "calendar": calendar,
        "minutes": minutes, "seed": seed,
    }  # fmt: skip
    begin(source, asked, settings, out, force=force, figure=figure, output=output, as_json=json)


READ = (
    "source", "column", "time", "group", "known", "past", "static", "fill", "missing",
    "date_format", "timezone", "threads",
)  # fmt: skip
"""Options that say how a table is read."""


def begin(
    source: str,
    asked: dict[str, Any],
    settings: dict[str, Any],
    out: Path | None,
    *,
    force: bool,
    figure: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Read, compare, fit and look ahead; in `out`, so that it can be stopped and resumed."""
    from elman.forecasting import series
    from elman.forecasting.saving import check_place
    from elman.forecasting.settings import Settings
    from elman.forecasting.unfinished import Unfinished

    checked = Settings(**settings)
    if out is not None:
        check_place(out, force=force)
    given = series.load(source, seed=checked.seed, **asked)
    place = str(Path(source).resolve()) if Path(source).is_file() else source
    request = {"source": place, "reading": asked, "settings": settings}
    begun = nullcontext() if out is None else Unfinished.begin(out, request, given, force=force)
    with begun as kept:
        work(source, given, checked, kept, figure=figure, output=output, as_json=as_json)


def go_on(
    context: typer.Context,
    folder: Path,
    *,
    figure: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Continue what was stopped in a folder; it ends as it would have ended."""
    from elman.forecasting import series
    from elman.forecasting.settings import Settings
    from elman.forecasting.unfinished import Unfinished

    refuse_beside(context, "--resume", folder, ("resume", "output", "figure", "threads", "json"))
    with Unfinished.open(folder) as kept:
        asked = kept.request["asked"]
        settings = Settings(**asked["settings"] | {"levels": tuple(asked["settings"]["levels"])})
        given = series.load(asked["source"], seed=settings.seed, **asked["reading"])
        kept.check(given)
        note(f"continuing {folder}: {kept.count} forecasters were compared before")
        work(asked["source"], given, settings, kept, figure=figure, output=output, as_json=as_json)


def work(
    source: str,
    given: list[Series],
    settings: Settings,
    kept: Unfinished | None,
    *,
    figure: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Compare, fit, look ahead, write and print."""
    from elman.forecasting.experiment import fit_and_measure

    out = kept.folder if kept else None
    try:
        with progress() as bar:
            task = bar.add_task("", total=None)
            experiment = fit_and_measure(given, settings, _teller(bar, task), kept)
    except KeyboardInterrupt:
        if out is not None:
            note(f"next: elman forecast --resume {shlex.quote(str(out))}")
        raise
    except UserError:
        if kept is not None:
            kept.abandon()
        raise
    answer = experiment.answer()
    write_files(experiment, answer, out, figure, output, given)
    if kept is not None:
        kept.end()
    report(answer, as_json=as_json)
    say_next(source, answer, out, settings.steps)


def _teller(bar: Any, task: Any) -> Any:
    """Show every line on the bar, and the ones about the whole plan for good."""

    def told(line: str) -> None:
        bar.update(task, description=line)
        if line.startswith("auto:"):
            note(line)

    return told


def check_files(source: str | None, output: Path | None, figure: Path | None) -> None:
    """Refuse names that cannot be written to before any work is done."""
    from elman.figures.style import check_format
    from elman.files import check_target
    from elman.forecasting import output as tables

    if figure is not None:
        check_format(figure)
    if output is not None:
        tables.check_format(output)
    for path in (figure, output):
        if path is not None:
            check_target(path, source)


def refuse_beside(
    context: typer.Context, flag: str, folder: Path, allowed: tuple[str, ...]
) -> None:
    """Refuse options that were typed beside one that has settled them."""
    for name in context.params:
        if was_typed(context, name) and name not in allowed:
            word = "SOURCE" if name == "source" else option_of(name)
            raise UserError(
                f"{word} means nothing with {flag}: {folder} has its own",
                hint=f"leave {word} out, or leave {flag} out and fit again",
            )


def fill_of(fill: str | None, missing: str) -> str | None:
    """--fill, or what the older --missing asks for."""
    if missing not in ("error", "interpolate"):
        raise UserError(f"--missing {missing!r} is unknown", hint="error or interpolate")
    if fill is not None and missing == "interpolate":
        raise UserError(
            f"--missing interpolate is --fill linear, and --fill {fill} was given, too",
            hint="leave out --missing",
        )
    return "linear" if missing == "interpolate" else fill


def levels_of(words: list[str] | None) -> tuple[float, ...]:
    """Percents from words like "80,95"; a number below 1 is a share."""
    levels = []
    for word in ",".join(words or ["90"]).replace(" ", ",").split(","):
        try:
            value = float(word)
        except ValueError:
            raise UserError(f"--level {word!r} is not a number", hint="--level 80,95") from None
        levels.append(round(100 * value, 6) if 0 < value < 1 else value)
    return tuple(dict.fromkeys(levels))


def write_files(
    experiment: Experiment,
    answer: dict[str, Any],
    out: Path | None,
    figure: Path | None,
    output: Path | None,
    given: list[Series],
) -> None:
    """The saved forecaster with its report, the picture and the table that were asked for."""
    from elman.figures import save as save_figure
    from elman.figures.forecast import overview
    from elman.forecasting import output as tables
    from elman.forecasting.experiment import about
    from elman.forecasting.saving import Saved, keep_answer, save_ensemble
    from elman.forecasting.series import Reading
    from elman.reports import forecast_report

    if figure is not None:
        answer["figure"] = str(save_figure(overview(experiment), figure))
    if output is not None:
        rows = tables.rows_ahead(
            experiment.series,
            experiment.ahead,
            experiment.settings.model,
            moments=tables.has_types(output),
        )
        answer["output"] = str(tables.write(rows, output))
    if out is not None:
        reading = given[0].reading or Reading()
        columns = given[0].columns
        saved = Saved(experiment.ensemble, reading, columns, experiment.settings.calendar)
        answer["run"] = str(save_ensemble(saved, out, about(answer)))
        keep_answer(out, answer, experiment.series)
        answer["report"] = str(forecast_report.write(out, experiment, answer, overview(experiment)))


def continue_run(
    context: typer.Context,
    run: Path,
    source: str,
    steps: int,
    asked: dict[str, Any],
    seed: int,
    *,
    output: Path | None,
    as_json: bool,
) -> None:
    """Forecast new data with a forecaster fitted before, reading it as it was read then.

    Networks that are fitted on new series begin from the seed of those before, or from `seed`
    where it was typed.
    """
    from dataclasses import replace

    from elman.forecasting import output as tables
    from elman.forecasting.ensemble import match, notes_of
    from elman.forecasting.saving import load_ensemble

    refuse_beside(context, "--run", run, (*READ, "run", "steps", "output", "seed", "json"))
    saved = load_ensemble(run)
    ensemble = saved.ensemble
    if was_typed(context, "seed"):
        ensemble = replace(ensemble, seed=seed)
    given = read_like(saved, source, asked, ensemble.seed)
    columns, ahead = match(ensemble, given, steps, calendar=saved.calendar)
    answer: dict[str, Any] = {
        "model": saved.ensemble.description(0),
        "notes": notes_of(columns),
        "forecast": tables.look_ahead_plain(columns, ahead),
    }
    if steps > saved.ensemble.steps:
        answer["notes"].append(
            f"{run} was measured {saved.ensemble.steps} steps ahead; beyond that its intervals "
            "grow with the square root of the step"
        )
    if output is not None:
        rows = tables.rows_ahead(columns, ahead, "forecast", moments=tables.has_types(output))
        answer["output"] = str(tables.write(rows, output))
    report(answer, as_json=as_json)
    note(f"next: {fitting_again(saved, source, asked, run)} fits again")


def fitting_again(saved: Saved, source: str, asked: dict[str, Any], run: Path) -> str:
    """The command that reads new data as the run does and fits such a forecaster in its place."""
    named = [label for label, f in saved.ensemble.fitted.items() if label == f.method.kind]
    options = {"model": named[0]} if len(saved.ensemble.fitted) == len(named) == 1 else {}
    options |= reading_of(saved, source, asked) | {"steps": saved.ensemble.steps, "out": run}
    words = ["elman", "forecast", source]
    for name, value in options.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [option_of(name), str(each)]
    return shlex.join([*words, *["--calendar"] * saved.calendar, "--force"])


def reading_of(saved: Saved, source: str, asked: dict[str, Any]) -> dict[str, Any]:
    """How new data is read: with the columns the run knows; what the user says now comes first."""
    from dataclasses import asdict

    from elman.forecasting import series

    reading = {k: v for k, v in asdict(saved.reading).items() if v not in (None, ())}
    if source not in series.NAMES:
        reading.setdefault("column", saved.columns)
    return reading | asked


def read_like(saved: Saved, source: str, asked: dict[str, Any], seed: int) -> list[Series]:
    """Load new data as the run was read."""
    from elman.forecasting import series

    reading = reading_of(saved, source, asked)
    try:
        return series.load(source, seed=seed, **reading)
    except UserError as wrong:
        if "is not a column" not in wrong.message:
            raise
        hint = f"the run was fitted on {', '.join(saved.columns)}; {wrong.hint}"
        raise UserError(wrong.message, hint=hint) from wrong


def report(answer: dict[str, Any], *, as_json: bool) -> None:
    """Print what was found: a table for a person, one object for a program."""
    if as_json:
        emit(answer)
        return
    print(answer["model"])
    for line in answer["notes"]:
        print(line)
    if "scores" in answer:
        print_scores(answer)
    shown = list(answer["forecast"].items())
    for name, columns in shown[:10]:
        for column, path in columns.items():
            print(f"\n{name}, {column}: the next {len(path['mean'])} steps")
            print_path(path)
    if len(shown) > 10:
        print(f"\n… and {len(shown) - 10} more series: --output forecast.csv has them all")


def print_scores(answer: dict[str, Any]) -> None:
    from elman.reports.forecast_report import measure_shown, shown_horizons

    scores, windows = answer["scores"], answer["windows"]
    name, words = measure_shown(scores)
    horizons = shown_horizons(windows["steps"])
    for series, part in list(windows["series"].items())[:5]:
        print(
            f"{series}: {part['train']} steps to learn from, {part['test']} more to look back at, "
            f"in {windows['count']} window{'s' * (windows['count'] != 1)} of {windows['steps']}"
        )
    print(f"\nheld-out {words} by steps ahead")
    first, *rest = scores
    order = [first, *sorted(rest, key=lambda k: sum(scores[k][name] or [0]))]
    width = max(16, *(len(k) + 1 for k in order[:8]))
    print(f"{'':{width}}" + "".join(f"{k:>10}" for k in horizons) + f"{'MASE':>9}{'CRPS':>9}")
    for label in order[:8]:
        score = scores[label]
        cells = "".join(_cell(score[name], k) for k in horizons)
        print(f"{label:{width}}{cells}{_mean(score['mase']):>9}{_mean(score['scaled_crps']):>9}")
    if len(order) > 8:
        print(f"… and {len(order) - 8} others")
    for level, row in scores[first]["coverage_by_level"].items():
        inside = "".join(f"{row[k - 1]:10.0%}" for k in horizons)
        print(f"{f'inside {level} %':{width}}{inside}")
    if answer["growth"]:
        print(f"errors grow as ε_(k+1) = ε_1 + c ε_k with c = {answer['growth']['factor']:.3f}")
    for line in answer["verdicts"]:
        print(f"{first}: {line}")
    for label, rows in answer["losses"].items():
        for name, row in rows.items() if isinstance(rows, dict) else [("", rows)]:
            print(f"loss of {label}{f' on {name}' if name else ''}: {_losses(row)}")
    print("the forecast below is from a model fitted on everything")


def _losses(row: list[float]) -> str:
    """The first and the last, and eight between: "1: 0.9  4: 0.5 …"."""
    shown = sorted({round(k * (len(row) - 1) / 9) for k in range(10)})
    return "  ".join(f"{k + 1}: {row[k]:.3g}" for k in shown)


def _cell(row: list[float] | None, k: int) -> str:
    value = row[k - 1] if row else None
    return f"{value:10.4g}" if value is not None else f"{'–':>10}"


def _mean(row: list[float | None] | None) -> str:
    known = [v for v in row or [] if v is not None]
    return f"{sum(known) / len(known):.3f}" if known else "–"


def print_path(path: dict[str, Any]) -> None:
    levels = path["levels"]
    print(f"{'':20}{'forecast':>12}" + "".join(f"{level + ' %':>26}" for level in levels))
    for k, (when, value) in enumerate(zip(path["time"], path["mean"], strict=True)):
        spans = "".join(f"{_span(ends, k):>26}" for ends in levels.values())
        print(f"{when:20}{value:12.4g}{spans}")


def _span(ends: dict[str, list[float]], k: int) -> str:
    return f"{ends['low'][k]:.4g} … {ends['high'][k]:.4g}"


def say_next(source: str, answer: dict[str, Any], out: Path | None, steps: int) -> None:
    """What to be careful about, what was written, and what to type next."""
    if answer["warning"]:
        note(f"warning: {answer['warning']}")
    alike: dict[str, list[str]] = {}
    for label, why in answer["left_out"].items():
        alike.setdefault(why, []).append(label)
    for why, labels in alike.items():
        note(f"left out of the comparison: {'; '.join(labels)}\n  why: {why}")
    if out is not None:
        note(f"saved {out}; to read in a browser: {answer['report']}")
        note(f"next: elman forecast NEW.csv --run {shlex.quote(str(out))} --steps {steps}")
    else:
        place = Path("runs") / (Path(source).stem if source != "-" else "stdin")
        kept = f"--out {shlex.quote(str(place))}"
        note(f"next: the same with {kept} keeps this forecaster and writes a report")
