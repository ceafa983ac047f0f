"""The `elman` command: one module per verb, arguments and output only, no mathematics.

Verbs import what they need inside their functions, so `elman --help` never waits for torch.
"""

import errno
import os
import signal
import sys
from typing import Annotated, Any

import typer

from elman import __version__
from elman.cli import (
    compress,
    datasets,
    demo,
    evaluate,
    forecast,
    generate,
    gradients,
    lab,
    made,
    ngram,
    prepare,
    report,
    runs,
    statistics,
    train,
)
from elman.cli.console import complain, silence
from elman.cli.limits import (
    ENDED,
    OVER,
    Stopped,
    check_folder,
    check_streams,
    end_tidily,
    guarded,
    refused,
)
from elman.errors import UserError, WorkFailed
from elman.files import is_full

# typer carries its own click, or the installed one, depending on its version; this finds either's.
UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="elman",
    help="Recurrent sequence models: train, measure, generate, forecast, and see the gradient.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"elman {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which elman.")
    ] = False,
) -> None:
    """Options that belong to no verb."""


app.command("train", cls=made.command(train.train))(made.stand_in(train.work))
app.command("evaluate")(guarded(evaluate.evaluate))
app.command("generate")(guarded(generate.generate))
app.command("report")(guarded(report.report))
app.command("runs")(guarded(runs.runs))
app.command("gradients")(guarded(gradients.gradients))
app.command("prepare")(guarded(prepare.prepare))
app.command("ngram")(guarded(ngram.ngram))
app.command("statistics")(guarded(statistics.statistics))
app.command("forecast")(guarded(forecast.forecast))
app.command("compress")(guarded(compress.compress))
app.command("decompress")(guarded(compress.decompress))
app.command("datasets")(guarded(datasets.datasets))
app.command("lab")(guarded(lab.lab))
app.command("demo")(guarded(demo.demo))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: exit 2 for a bad request, 1 for failed work, 130 after Ctrl-C.

    Ended by another signal, it is 128 and its number, as shells have it.
    """
    _wait_briefly()
    end_tidily()
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; of several processes, one says what is wrong."""
    try:
        return _run(arguments)
    finally:
        _leave()


def _run(arguments: list[str] | None) -> int:
    """The same; what goes wrong on the way is said in words."""
    OVER.clear()
    try:
        check_streams()
        check_folder()
        try:
            status = app(arguments, prog_name="elman", standalone_mode=False)
        finally:
            OVER.append(True)
        sys.stdout.flush()  # what cannot be written should fail here, not while Python shuts down
        if status == 130 and ENDED:  # before a verb began: typer takes it for Ctrl-C
            return _stopped()
    except UserError as refusal:
        _say(refusal.message, refusal.hint)
        return 2
    except WorkFailed as failure:
        _say(failure.message, failure.hint)
        return 1
    except UsageError as refusal:
        if type(refusal).__name__ == "NoArgsIsHelpError":  # bare `elman`: the page, not a complaint
            typer.echo(refusal.format_message())
        else:
            _say(*refused(refusal))
        return 2
    except (Stopped, KeyboardInterrupt, typer.Abort):
        return _stopped()
    except BrokenPipeError:  # the reader of our output has left, as `| head` does: nothing to say
        silence(sys.stdout)
        return 1
    except SystemExit as left:  # as typer leaves where it sees that pipe before we do
        if not isinstance(left.__context__, BrokenPipeError):
            raise
        return 1
    except (MemoryError, RuntimeError) as failure:
        if not _out_of_memory(failure):
            raise
        _say(
            "there is not enough memory for this",
            "a smaller --hidden-size, --batch-size or --window; --memory 64M keeps fewer states",
        )
        return 1
    except OSError as failure:
        return _could_not_write(failure)
    return status if isinstance(status, int) else 0


def _could_not_write(failure: OSError) -> int:
    """A full disk, a folder that is missing or not ours, a name that is too long."""
    where = f"{failure.filename}: " if failure.filename else ""
    if failure.errno == errno.ENAMETOOLONG:
        _say(f"{where}{failure.strerror}", "name something shorter")
        return 2
    _say(
        f"{where}{failure.strerror or failure}",
        "make room and type it again; --resume continues a training"
        if is_full(failure)
        else "check that the place exists and is yours",
    )
    return 1


def _stopped() -> int:
    _say(f"ended by {ENDED[0].name}" if ENDED else "interrupted")
    return 128 + (ENDED[0] if ENDED else signal.SIGINT)


def _say(message: str, hint: str = "") -> None:
    """Complain, unless another process of the same training has done so."""
    processes = _joined()
    if processes is not None:
        first = processes.fails_first()
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # they have not met: an option that does not exist
        from elman.training.processes import fails_first

        first = fails_first()
    else:
        first = True
    if first:
        complain(message, hint)


def _joined() -> Any:
    """The processes that this one has joined, if any; asked without loading torch."""
    module: Any = sys.modules.get("elman.training.processes")
    return module.CURRENT[0] if module is not None and module.CURRENT else None


def _leave() -> None:
    """Take leave of the other processes."""
    if _joined() is not None:
        sys.modules["elman.training.processes"].leave()


def _wait_briefly() -> None:
    """Let torch's threads sleep after a tenth of a millisecond without work, not after several.

    Beside other programs, threads that wait for work would take the processor from the one that
    has some. It must be set before torch is loaded; what the user has set is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def _out_of_memory(failure: Exception) -> bool:
    """Whether this is Python, PyTorch on the CPU or CUDA saying so."""
    named = type(failure).__name__ in ("MemoryError", "OutOfMemoryError")
    return named or "allocate memory" in str(failure)
