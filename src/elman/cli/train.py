"""`elman train`: train a language model in a run folder, or continue one exactly."""

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elman.cli.console import emit, note, progress
from elman.cli.device import pick
from elman.errors import UserError, WorkFailed

if TYPE_CHECKING:
    from elman.runs import Run
    from elman.training import Record, Training

Text, Model, Reading, Updates, Where = "Text", "Model", "Reading", "Updates", "Run"


def _option(help: str, panel: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **limits)


def train(
    source: Annotated[
        str | None,
        typer.Argument(
            help="Name, file, folder or - (default: python-reference)", show_default=False
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="quick, best, or notes: a name for many options below (default: quick)",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        Path | None, _option("Continue this run, exactly where it was", Where)
    ] = None,
    out: Annotated[Path | None, _option("Run folder to write (default: runs/NAME)", Where)] = None,
    force: Annotated[bool, _option("Overwrite the run folder", Where)] = False,
    device: Annotated[str, _option("auto, cpu or cuda", Where)] = "auto",
    seed: Annotated[int | None, _option("Same seed, same model", Where, min=0)] = None,
    checkpoint_every: Annotated[
        int, _option("Updates between checkpoints; 0: by time only", Where, min=0)
    ] = 0,
    checkpoint_seconds: Annotated[
        float, _option("Seconds between checkpoints (30); 0: never", Where, min=0)
    ] = 30.0,
    diagnose: Annotated[
        int, _option("Updates between looks at the gradient (500); 0: never", Where, min=0)
    ] = 500,
    tensorboard: Annotated[bool, _option("Log for TensorBoard too", Where)] = False,
    as_json: Annotated[bool, _option("One JSON record per line", Where, "--json")] = False,
    level: Annotated[str | None, _option("char, word or byte", Text)] = None,
    clean: Annotated[str | None, _option("letters (as the notes), or none", Text)] = None,
    max_tokens: Annotated[int | None, _option("Use the first so many; 0: all", Text, min=0)] = None,
    min_freq: Annotated[int | None, _option("Rarer tokens are <unk>", Text, min=0)] = None,
    validation: Annotated[float | None, _option("Part held out, at the end (0.1)", Text)] = None,
    encoding: Annotated[str | None, _option("Of the text (default: utf-8)", Text)] = None,
    errors: Annotated[
        str | None,
        _option("Bytes that are not text: strict, replace or ignore (default: strict)", Text),
    ] = None,
    model: Annotated[
        str | None, _option("A cell (elman, relu, linear, gru, lstm) or mlp", Model)
    ] = None,
    hidden_size: Annotated[int | None, _option("Units of a layer", Model, min=1)] = None,
    layers: Annotated[int | None, _option("Layers", Model, min=1)] = None,
    embedding_size: Annotated[int | None, _option("0: one-hot", Model, min=0)] = None,
    bidirectional: Annotated[bool, typer.Option(hidden=True)] = False,
    tied: Annotated[
        bool | None, _option("Output uses the embedding", Model, "--tied/--untied")
    ] = None,
    context: Annotated[int | None, _option("Tokens an mlp sees", Model, min=1)] = None,
    init: Annotated[str | None, _option("default, or notes: N(0, 0.01)", Model)] = None,
    dropout_tokens: Annotated[float | None, _option("Whole tokens hidden", Model)] = None,
    dropout_inputs: Annotated[float | None, _option("Variational, embeddings", Model)] = None,
    dropout_layers: Annotated[float | None, _option("Between layers", Model)] = None,
    dropout_outputs: Annotated[float | None, _option("Variational, outputs", Model)] = None,
    dropout_recurrent: Annotated[float | None, _option("DropConnect on W_hh", Model)] = None,
    batch_size: Annotated[int | None, _option("Parallel lanes", Reading, min=1)] = None,
    window: Annotated[int | None, _option("Steps per update", Reading, min=1)] = None,
    sampling: Annotated[str | None, _option("sequential or random", Reading)] = None,
    carry: Annotated[
        str | None, _option("truncated, sliding, randomized, polynomial or full", Reading)
    ] = None,
    history: Annotated[
        int | None,
        _option("Sliding: steps read again before a window (default: as many)", Reading, min=0),
    ] = None,
    memory: Annotated[
        str | None, _option("stored, or a budget: 64M keeps few states, recomputes", Reading)
    ] = None,
    epochs: Annotated[int | None, _option("Passes over the text", Updates, min=1)] = None,
    optimizer: Annotated[str | None, _option("sgd, adam or adamw", Updates)] = None,
    learning_rate: Annotated[float | None, _option("Size of a step", Updates)] = None,
    momentum: Annotated[float | None, _option("Of sgd", Updates)] = None,
    weight_decay: Annotated[float | None, _option("On matrices", Updates)] = None,
    clip: Annotated[float | None, _option("Largest ‖gradient‖; 0: any", Updates, min=0)] = None,
    schedule: Annotated[str | None, _option("constant, cosine or plateau", Updates)] = None,
    warm_up: Annotated[int | None, _option("Updates to full learning rate", Updates, min=0)] = None,
    accumulate: Annotated[int | None, _option("Segments per update", Updates, min=1)] = None,
    average: Annotated[str | None, _option("none, ema or asgd", Updates)] = None,
    average_decay: Annotated[float | None, _option("Of ema (0.999)", Updates)] = None,
    average_start: Annotated[
        float | None, _option("Of asgd: when, as part of the training (0.5)", Updates)
    ] = None,
    plateau_factor: Annotated[float | None, _option("Learning rate × this (0.5)", Updates)] = None,
    plateau_patience: Annotated[
        int | None, _option("after so many validations without a better one (2)", Updates, min=0)
    ] = None,
    validate_every: Annotated[
        int | None, _option("Updates; 0: twenty times, or a tenth of the time", Updates, min=0)
    ] = None,
    patience: Annotated[
        int | None,
        _option("Stop after so many validations without a better one; 0: never", Updates),
    ] = None,
    precision: Annotated[str | None, _option("float32, or bfloat16 autocast", Updates)] = None,
) -> int | None:
    """Train a language model on a text, or continue a run with --resume RUN."""
    given = _given(locals())
    board = _board_kind() if tensorboard else None
    if resume is None:
        run, training = _begin(preset or "quick", given, out, force, pick(device))
    else:
        _refuse_beside_resume(preset=preset, out=out, force=force)
        run, training = _continue(resume, given, None if device == "auto" else pick(device))
    every = {"every_steps": checkpoint_every, "every_seconds": checkpoint_seconds}
    stopped = _work(run, training, every, diagnose, as_json, board)
    if stopped:
        note(f"stopped by {stopped}; saved at step {training.step}")
        note(f"continue with: elman train --resume {shlex.quote(str(run.path))}")
        return 130
    _conclude(run, training, as_json)
    return None


# ---------------------------------------------------------------------- before


def _given(typed: dict[str, Any]) -> dict[str, Any]:
    """Of all that `train` takes, the options of text, model and training that were typed."""
    from elman.language_model import model
    from elman.runs import presets

    if typed["bidirectional"]:
        raise model.both_ways()
    given = {name: typed[name] for name in presets.defaults() if typed[name] is not None}
    if "memory" in given:
        given["memory"] = _bytes(given["memory"])
    return given


def _begin(
    preset: str, given: dict[str, Any], out: Path | None, force: bool, device: str
) -> tuple["Run", "Training"]:
    """A new run folder and its training; a refused request leaves nothing behind."""
    import torch

    from elman import runs
    from elman.runs import presets
    from elman.text import prepared

    options = presets.expand(preset, given)
    options["source"] = prepared.located(options["source"])
    data = presets.data(options)
    text = prepared.read(data)
    parts = prepared.prepare(data, text)
    config = runs.Config(
        data=data,
        model=presets.model(options, len(parts.vocab)),
        training=presets.settings(options, parts.train, len(parts.validation)),
        sha256=parts.sha256,
        device=device,
        threads=torch.get_num_threads(),
        command=shlex.join(["elman", *sys.argv[1:]]),
    )
    training = runs.fresh_training(config, parts, device)
    path = out or _free_folder(data.source, options["model"])
    kept = text if data.source == "-" else None
    run = runs.Run.create(path, config, parts.vocab, source=kept, force=force)
    note(f"preset {preset}: " + _as_flags(presets.PRESETS[preset] | given))
    return run, training


def _continue(path: Path, given: dict[str, Any], device: str | None) -> tuple["Run", "Training"]:
    """The run folder and its training, where it was last saved."""
    import torch

    from elman import runs
    from elman.runs import presets
    from elman.text import prepared

    run = runs.Run.open(path)
    config = run.config
    if "source" in given:
        given = given | {"source": prepared.located(given["source"])}
    stored = presets.flat(config.data, config.model, config.training)
    if changes := presets.changed(stored, given):
        config = runs.with_options(config, stored | changes)
    torch.set_num_threads(config.threads)  # sums in another order would end in other bits
    training = runs.fresh_training(config, run.splits(), device or config.device)
    run.resume(training)
    if changes:
        run.save_config(config)
    other = f" with {_as_flags(changes)}" if changes else ""
    note(f"continuing {run.path} at step {training.step}{other}")
    return run, training


def _refuse_beside_resume(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise UserError(
                f"--{name} belongs to a new run; --resume continues one in its own folder, with "
                "its own options",
                hint=f"leave out --{name}, or --resume",
            )


def _bytes(text: str) -> int:
    """`stored` → 0; `64M` → 64 · 2²⁰."""
    if text == "stored":
        return 0
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper(), 0)
    digits = text[:-1] if unit else text
    if not digits.isdecimal() or not int(digits):
        raise UserError(f"--memory {text} is no size", hint="stored, or bytes: 64M, 2G")
    return int(digits) << unit


def _free_folder(source: str, model: str) -> Path:
    name = "stdin" if source == "-" else Path(source).name.split(".")[0] or "text"
    number, path = 1, Path("runs") / f"{name}-{model}"
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{model}-{number}"
    return path


def _as_flags(options: dict[str, Any]) -> str:
    """The options as one types them."""
    said = []
    for name, value in options.items():
        if name == "tied":
            said.append("--tied" if value else "--untied")
        elif name == "memory":
            said.append(f"--memory {value or 'stored'}")
        elif name != "source":
            said.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(said)


# ---------------------------------------------------------------------- during


@contextmanager
def _gentle_signals() -> Iterator[list[str]]:
    """Note Ctrl-C and SIGTERM, to be heeded between two updates; a second one ends at once."""
    caught: list[str] = []
    signals = (signal.SIGINT, signal.SIGTERM)

    def note_it(number: int, frame: Any) -> None:
        caught.append("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
        for which in signals:
            signal.signal(which, before[which])

    before = {which: signal.signal(which, note_it) for which in signals}
    try:
        yield caught
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _work(
    run: "Run",
    training: "Training",
    every: dict[str, Any],
    diagnose: int,
    as_json: bool,
    board: Any,
) -> str:
    """Train to the end; returns the name of what stopped it, if anything did."""
    from elman import runs

    with _gentle_signals() as caught, _display(training) as show, _board(run, board) as log:
        try:
            look, sample = _onlooker(training, diagnose), _sampler(run, training)
            also = {
                "stop": lambda: bool(caught),
                "remarks": lambda record: filter(None, (look(record), sample(record))),
            }
            for record in runs.train(run, training, **also, **every):
                show(record)
                log(record)
                if as_json:
                    emit(record.json())
        except WorkFailed as failure:
            again = f"elman train --resume {shlex.quote(str(run.path))}"
            raise WorkFailed(
                failure.message,
                hint=f"{failure.hint}; from the last checkpoint: {again} --learning-rate …",
            ) from failure
        except BrokenPipeError:  # whoever read our output has left; the folder is well
            raise
        except OSError as failure:
            raise WorkFailed(
                f"cannot write to {run.path}: {failure.strerror}",
                hint=f"make room, then elman train --resume {shlex.quote(str(run.path))}",
            ) from failure
    return caught[0] if caught else ""


def _onlooker(training: "Training", every: int) -> Callable[["Record"], dict[str, Any] | None]:
    """After every so many updates, how far back the gradient reaches (`diagnostics.glance`)."""
    from elman.diagnostics import glance
    from elman.training import Update

    held_out = training.validation_ids
    ids = training.train_ids if held_out is None else held_out

    def look(record: "Record") -> dict[str, Any] | None:
        if not every or not isinstance(record, Update) or record.step % every:
            return None
        found = glance(training.model, ids, training.settings.reading.window)
        return None if found is None else found.json(record.step)

    return look


def _sampler(run: "Run", training: "Training") -> Callable[["Record"], dict[str, Any] | None]:
    """After validations 1, 2, 4, 8, … and the last, a text of the model's own for the report."""
    from elman import generation
    from elman.training import Validation

    every = training.settings.validate_every

    def sample(record: "Record") -> dict[str, Any] | None:
        number = record.step // every if every else 0
        if not isinstance(record, Validation) or (number & (number - 1) and not training.finished):
            return None
        try:
            with training.average.applied():
                text = generation.specimen(training.model, run.vocab)
        except WorkFailed:  # nothing to draw from: the next update stops and says where it began
            return None
        return {"kind": "sample", "step": record.step, "text": text}

    return sample


@contextmanager
def _display(training: "Training") -> Iterator[Callable[["Record"], None]]:
    """A bar with loss, perplexity, speed, time left; without a terminal, a line per validation."""
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

    from elman.training import Update

    columns = (
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    held_out = ""
    with progress(*columns) as bar:
        task = bar.add_task("reading", total=1.0, completed=training.progress)

        def show(record: "Record") -> None:
            nonlocal held_out
            if isinstance(record, Update):
                said = (
                    f"nats {record.nats:.3f} · perplexity {record.perplexity:.2f}{held_out} · "
                    f"{record.tokens_per_second:,.0f} tokens/s"
                )
                bar.update(task, completed=record.progress, description=said)
                return
            held_out = f" · held out {record.perplexity:.2f}"
            if bar.disable:
                better = " (best so far)" if record.improved else ""
                note(
                    f"step {record.step}: held out {record.nats:.4f} nats, "
                    f"perplexity {record.perplexity:.3f}{better}"
                )

        yield show


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


def _conclude(run: "Run", training: "Training", as_json: bool) -> None:
    """Score the best weights by the definition, and say what was written and what comes next."""
    from elman import runs
    from elman.reports import report

    found = runs.conclude(run, training)
    page = report.write(run)
    if as_json:
        emit({"kind": "result", "run": str(run.path), **found})
        return
    if found:
        typer.echo(
            f"held out, {found['tokens']:,} tokens: {found['nats_per_token']:.4f} nats per token, "
            f"perplexity {found['perplexity']:.3f}, {found['bits_per_char']:.4f} bits per character"
        )
    typer.echo(f"wrote {run.path}; to read in a browser: {page}")
    quoted = shlex.quote(str(run.path))
    typer.echo(f"next: elman generate {quoted}; elman evaluate {quoted}")
