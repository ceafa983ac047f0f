"""`elman train`: train a language model in a run folder, or continue one exactly."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elman.cli.console import emit, note, progress, quiet, silence, terminals
from elman.cli.device import pick
from elman.cli.limits import a_path
from elman.cli.source import tell_left_out
from elman.errors import Diverged, UserError, WorkFailed
from elman.files import is_full

if TYPE_CHECKING:
    from elman.runs import Run
    from elman.session import Session
    from elman.training import Record, Result
    from elman.training.processes import Processes

    Show = Callable[[Record | str], None]


SECONDS_SHOWN = 0.1
"""As long as one state of the bar is seen, at least."""


def train() -> Callable[..., int | None]:
    """The function behind `elman train`: `work` with an option for every field of the settings."""
    from elman.cli.made import BY_TEXT, with_options
    from elman.options import described
    from elman.runs import presets
    from elman.runs.effort import FOLLOW
    from elman.session import RunOptions

    options = [*described(RunOptions), *presets.OPTIONS.values()]
    defaults = {o.name: o.default for o in options} | presets.expand(presets.DEFAULT, {})
    defaults |= dict.fromkeys(FOLLOW, BY_TEXT)
    names = ", ".join(
        f"{name} (by the text's length)" if callable(asked) else name
        for name, asked in presets.PRESETS.items()
    )
    preset = typer.Option(
        help=f"A name for many options below: {names}", show_default=presets.DEFAULT
    )
    typed = (o for o in options if o.name != "source")
    return with_options(work, typed, defaults, preset=preset)


def work(
    source: Annotated[
        str | None,
        typer.Argument(help="Name, file, folder or -", show_default="python-reference"),
    ] = None,
    preset: str | None = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue this run, exactly where it was",
            rich_help_panel="Run",
            parser=a_path,
            metavar="RUN",
        ),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Log for TensorBoard too", rich_help_panel="Run")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON record per line", rich_help_panel="Run")
    ] = False,
    **typed: Any,
) -> int | None:
    """Train a language model on a text, or continue a run with --resume RUN."""
    given = {name: value for name, value in typed.items() if value is not None}
    if source is not None:
        given["source"] = source
    from elman.training.processes import Processes

    board = _board_kind() if tensorboard else None
    processes = Processes.from_environment()
    with quiet(unless=processes.first):
        return _work(preset, resume, given, board, as_json, processes)


def _work(
    preset: str | None,
    resume: Path | None,
    given: dict[str, Any],
    board: Any,
    as_json: bool,
    processes: "Processes",
) -> int | None:
    if resume is None and (again := _to_resume(given, processes)):
        resume, preset, given = again, None, {}
    if resume is None:
        session = _begin(preset, given, processes)
    else:
        session = _resume(resume, preset, given, processes)
    pick(str(session.training.device))  # for what there is to say about it
    result = page = None
    with _display(session) as show:
        stopped = _train(session, show, as_json, board)
        if not stopped:
            show("scoring, and writing the report")
            result, page = session.conclude(), session.report() if processes.first else None
        processes.wait()
    if not processes.first:
        return 128 + stopped if stopped else None
    if stopped:
        note(f"stopped by {STOPS[stopped.name]}; saved at step {session.training.step}")
        note(f"continue with: {_resuming(session.run)}")
        if (aside := session.run.path / ".replaced").is_dir():
            note(f"the run that was there before is in {aside} until the next checkpoint")
        return 128 + stopped
    assert page is not None
    _tell(session, result, page, as_json)
    return None


# ---------------------------------------------------------------------- before


def _to_resume(given: dict[str, Any], processes: "Processes") -> Path | None:
    """The run that this very command has begun before torchrun started it again."""
    restarts = processes.connected and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    out = given.get("out")
    if restarts and out is None:
        raise UserError(
            f"with --max-restarts {restarts} a training must know its run folder",
            hint="name it: --out runs/NAME",
        )
    if out is None or not processes.restarted:
        return None
    found = processes.told("yes" if (out / "config.json").exists() else "")
    return out if found else None


def _begin(preset: str | None, given: dict[str, Any], processes: "Processes") -> "Session":
    from elman.runs import options_of, presets
    from elman.runs.effort import Size
    from elman.session import RunOptions, Session
    from elman.text import corpus

    kept, asked = _divided(given)
    kept = RunOptions(**kept)
    command = shlex.join(["elman", *sys.argv[1:]])
    preset = presets.DEFAULT if preset is None else preset
    session = Session.begin(asked, preset, kept, command, processes)
    size = Size.of(len(session.training.train_ids), session.run.vocab)
    chosen = presets.named(preset, asked, size) | asked
    options = presets.used(options_of(session.run.config))
    flags = presets.as_flags({name: options[name] for name in chosen if name in options})
    note(f"preset {preset}: {flags}")
    tell_left_out(session.run.config.data.source, corpus.texts_in)
    note(_text_words(session))
    return session


def _text_words(session: "Session") -> str:
    """Which part of the text trains and which is held out."""
    training, units = session.training, session.run.vocab.level_used.units
    chosen_by = 0 if training.validation_ids is None else len(training.validation_ids)
    reported = session.test_tokens
    rest = f"the {chosen_by:,} after them are held out" if chosen_by else "nothing is held out"
    if reported:
        chooses = f"the {chosen_by:,} after them choose its weights, " if chosen_by else ""
        rest = f"{chooses}the {reported:,} at the end test it"
    return f"trains on the first {len(training.train_ids):,} {units}; {rest}"


def _resume(
    path: Path, preset: str | None, given: dict[str, Any], processes: "Processes"
) -> "Session":
    from elman.runs import Run, options_of, presets
    from elman.session import Session

    _refuse_beside_resume(preset=preset, out=given.get("out"), force=given.get("force"))
    kept, asked = _divided(given)
    before = options_of(Run.open(path).config)
    session = Session.resume(path, asked, kept, processes)
    after = options_of(session.run.config)
    changes = {name: value for name, value in after.items() if value != before[name]}
    moved = changes.pop("source", None)
    other = f" with {presets.as_flags(changes)}" if changes else ""
    note(f"continuing {session.run.path} at step {session.training.step}{other}")
    if moved:
        note(f"its text is {moved} now: the same, so the run goes on as if it had not moved")
    for caveat in session.caveats:
        note(f"note: {caveat}")
    return session


def _divided(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the run's folder, and those of text, model and training."""
    from elman.runs import presets

    asked = {name: value for name, value in given.items() if name in presets.OPTIONS}
    for name, value in asked.items():
        read = presets.OPTIONS[name].option.read
        asked[name] = read(value) if read else value
    kept = {name: value for name, value in given.items() if name not in presets.OPTIONS}
    return kept, asked


def _refuse_beside_resume(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise UserError(
                f"--{name} belongs to a new run; --resume continues one in its own folder, with "
                "its own options",
                hint=f"leave out --{name}, or --resume",
            )


def _resuming(run: "Run") -> str:
    return f"elman train --resume {shlex.quote(str(run.path))}"


# ---------------------------------------------------------------------- during


STOPS = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM", "SIGHUP": "SIGHUP: the terminal is gone"}
"""What stops a training between two updates, as far as this system knows it."""


@contextmanager
def _gentle_signals() -> Iterator[list[signal.Signals]]:
    """Note a signal, which stops the training between two updates; a second one ends at once.

    What is ignored stays so: a shell protects jobs in the background from Ctrl-C, and `nohup` all
    that it starts from a terminal that is closed.
    """
    caught: list[signal.Signals] = []
    known = [getattr(signal, name) for name in STOPS if hasattr(signal, name)]
    signals = [which for which in known if signal.getsignal(which) is not signal.SIG_IGN]
    screens = terminals()  # asked now: a closed one cannot be told

    def note_it(number: int, frame: Any) -> None:
        caught.append(signal.Signals(number))
        if number == getattr(signal, "SIGHUP", None):
            for screen in screens:
                silence(screen)
        for which in signals:
            signal.signal(which, before[which])

    before = {which: signal.signal(which, note_it) for which in signals}
    try:
        yield caught
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _train(session: "Session", show: "Show", as_json: bool, board: Any) -> signal.Signals | None:
    """Train to the end; returns the signal that stopped it, if one did."""
    run = session.run
    with _gentle_signals() as caught, _board(run, board) as log:
        try:
            for record in session.records(stop=lambda: bool(caught)):
                show(record)
                log(record)
                if as_json:
                    emit(record.json())
        except WorkFailed as failure:
            again = f"from the last checkpoint: {_resuming(run)}"
            if isinstance(failure, Diverged):
                again += " --learning-rate …"
            if run.given_up:
                again = _put_back(run)
            raise WorkFailed(failure.message, hint=f"{failure.hint}; {again}") from failure
        except BrokenPipeError:  # whoever read our output has left; the folder is well
            raise
        except OSError as failure:
            raise _unwritten(run, failure) from failure
    return caught[0] if caught else None


def _unwritten(run: "Run", failure: OSError) -> WorkFailed:
    """Why a run could not be written, and what to do."""
    if not run.path.is_dir():
        return WorkFailed(
            f"{run.path} is no longer there: it was moved or deleted while it was trained",
            hint="elman train --resume continues a run from wherever it lies",
        )
    if isinstance(failure, UserError):
        return WorkFailed(failure.message, hint=failure.hint)
    first = "make room" if is_full(failure) else "correct that"
    again = _put_back(run) if run.given_up else _resuming(run)
    return WorkFailed(
        f"cannot write to {run.path}: {failure.strerror}",
        hint=f"{first}{'; ' if run.given_up else ', then '}{again}",
    )


def _put_back(run: "Run") -> str:
    return f"{run.path} is still the run that it was before"


@contextmanager
def _display(session: "Session") -> Iterator["Show"]:
    """A bar with loss, perplexity, speed, time left; without a terminal, a line now and then."""
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

    from elman.training import Epoch, Sample, Update, Validation

    columns = (
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    held_out, by_epoch, shown_at = "", session.run.config.shown.sample_every > 0, 0.0
    with progress(*columns) as bar:
        task = bar.add_task("reading", total=1.0, completed=session.training.progress)

        def is_due(record: "Update") -> bool:
            """Whether the bar would show it: to look at an update's numbers may wait for a GPU."""
            nonlocal shown_at
            now = time.monotonic()
            if bar.disable or (now - shown_at < SECONDS_SHOWN and record.progress < 1):
                return False
            shown_at = now
            return True

        def show(record: "Record | str") -> None:
            nonlocal held_out
            if isinstance(record, str):
                bar.update(task, description=record)
            elif isinstance(record, Update) and is_due(record):
                numbers = (
                    f"nats {record.nats:.3f} · perplexity {record.perplexity:.2f}{held_out} · "
                    f"{record.tokens_per_second:,.0f} tokens/s"
                )
                bar.update(task, completed=record.progress, description=numbers)
            elif isinstance(record, Validation):
                held_out = f" · validation {record.perplexity:.2f}"
            lasting = bar.disable or (by_epoch and isinstance(record, Epoch | Sample))
            if lasting and not isinstance(record, str) and (line := _line(session, record)):
                note(line)

        yield show


def _line(session: "Session", record: "Record") -> str:
    """What is worth a line where there is no bar: validations, and every tenth pass or so.

    With `sample_every`, the passes after which there is a sample, and the sample under it.
    """
    from elman.training import Epoch, Sample, Validation

    every = session.run.config.shown.sample_every
    if isinstance(record, Validation):
        better = " (best so far)" if record.improved else ""
        return (
            f"step {record.step}: validation {record.nats:.4f} nats, "
            f"perplexity {record.perplexity:.3f}{better}"
        )
    if isinstance(record, Sample) and every:
        return f"  {' '.join(record.text.split())}"
    if isinstance(record, Epoch):
        epochs = session.training.settings.epochs
        every = every or (1 if epochs <= 20 else 10)
        if record.epoch % every == 0 or record.epoch == epochs:
            return (
                f"epoch {record.epoch}: training perplexity {record.perplexity:.3f}, "
                f"{record.tokens_per_second:,.0f} tokens/s"
            )
    return ""


def _board_kind() -> Any:
    """What writes TensorBoard's log; asked for before anything else is done."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as missing:
        raise UserError(
            "--tensorboard needs TensorBoard", hint="pip install 'elman[tensorboard]'"
        ) from missing
    return SummaryWriter


@contextmanager
def _board(run: "Run", kind: Any) -> Iterator[Callable[["Record"], None]]:
    """TensorBoard's log in the run folder, where it is wanted."""
    if kind is None:
        yield lambda record: None
        return
    with kind(str(run.path / "tensorboard")) as board:

        def log(record: "Record") -> None:
            values = record.json()
            kind = values.pop("kind")
            for name in ("nats", "perplexity", "gradient_norm", "learning_rate"):
                if name in values:
                    board.add_scalar(f"{kind}/{name}", values[name], record.step)

        yield log


# ---------------------------------------------------------------------- after


def _tell(session: "Session", result: "Result | None", page: Path, as_json: bool) -> None:
    """Say how good it is, what was written and what comes next."""
    run = session.run
    if as_json:
        emit({"kind": "result", "run": str(run.path), **(result.json() if result else {})})
        return
    other = "" if result else " OTHER.txt"
    if result is not None:
        if run.config.shown.weights == "last":
            typer.echo(_last_pass(run))
        typer.echo(
            f"{_name_of(result)}, {result.tokens:,} tokens: "
            f"{result.nats_per_token:.4f} nats per token, "
            f"perplexity {result.perplexity:.3f}, {result.bits_per_char:.4f} bits per character"
            + _not_the_best(session)
        )
    else:
        typer.echo(f"nothing was held out; {_last_pass(run)}")
    typer.echo(f"wrote {run.path}; to read in a browser: {page}")
    quoted = shlex.quote(str(run.path))
    typer.echo(f"next: elman generate {quoted}; elman evaluate {quoted}{other}")


def _name_of(result: "Result") -> str:
    """The part that was scored, in words."""
    return "held out" if result.part == "validation" else result.part


def _not_the_best(session: "Session") -> str:
    """What validation found on the way, where the run is not known by it."""
    from elman.scoring import metrics

    training = session.training
    if session.run.config.shown.weights == "best" or training.best_step == training.step:
        return ""
    best = metrics.perplexity(training.best)
    return f" (last weights; the best on the way, step {training.best_step}: perplexity {best:.3f})"


def _last_pass(run: "Run") -> str:
    from elman.training import Epoch

    last = run.latest(Epoch)
    if last is None:  # of a finished run whose metrics.jsonl is gone
        return "no record says how well it learned"
    return f"training perplexity {last.perplexity:.3f} in pass {last.epoch}"
