"""The SOURCE that most verbs read, the options that go with it, and its progress bar."""

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elman.cli.console import progress

if TYPE_CHECKING:
    from elman.text.datasets import Progress
    from elman.text.prepared import Data

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Dataset name, text file, .gz, folder of .txt files, or - for stdin.",
    ),
]
Clean = Annotated[
    str,
    typer.Option(help="newlines (line ends made alike), letters (as the notes), or none"),
]
Lower = Annotated[bool, typer.Option("--lower", help="Read the text in lower case")]
Encoding = Annotated[str, typer.Option("--encoding", help="How the bytes of SOURCE spell text.")]
Errors = Annotated[
    str,
    typer.Option(
        "--errors", help="What to do about bytes that are not text: strict, replace or ignore."
    ),
]


def read(data: "Data") -> str | bytes:
    """The text that `data` describes; a download shows how far it is."""
    from elman.text import prepared

    with progress() as bar:
        return prepared.read(data, progress=_shown(bar, data.source))


def follow_up(verb: str, data: "Data", **options: object) -> str:
    """The command that goes on with the same text: what a verb ends with."""
    from elman.text.prepared import Data

    plain = Data(data.source, data.level)
    for name in ("clean", "min_freq", "validation", "encoding", "errors", "lower"):
        if getattr(data, name) != getattr(plain, name):
            options[name] = getattr(data, name)
    options = {"level": data.level, **options} if data.level != "char" else options
    words = [f"--{name.replace('_', '-')}" + _value(value) for name, value in options.items()]
    before = "cat TEXT | " if data.source == "-" else ""
    return " ".join([f"{before}elman {verb} {shlex.quote(data.source)}", *words])


def _value(value: object) -> str:
    return "" if value is True else f" {shlex.quote(str(value))}"


def printable(text: str) -> str:
    """Text that any stream can write: what has no UTF-8 becomes a backslash escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _shown(bar: Any, source: str) -> "Progress":
    """A bar that appears when the first block arrives, and so never for a file that is here."""
    task = None

    def show(done: int, total: int | None) -> None:
        nonlocal task
        if task is None:
            task = bar.add_task(f"downloading {source}")
        bar.update(task, completed=done, total=total)

    return show
