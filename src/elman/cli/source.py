"""The SOURCE that most verbs read, the options that go with it, and its progress bar."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from elman.cli.console import progress

if TYPE_CHECKING:
    from elman.text.datasets import Progress

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Dataset name, text file, .gz, folder of .txt files, or - for stdin.",
    ),
]
Encoding = Annotated[str, typer.Option("--encoding", help="How the bytes of SOURCE spell text.")]
Errors = Annotated[
    str,
    typer.Option(
        "--errors", help="What to do about bytes that are not text: strict, replace or ignore."
    ),
]


def read_text(source: str, encoding: str = "utf-8", errors: str = "strict") -> str:
    """The text of SOURCE; a download shows how far it is."""
    from elman.text import corpus

    with progress() as bar:
        return corpus.load(source, encoding=encoding, errors=errors, progress=_shown(bar, source))


def read_bytes(source: str) -> bytes:
    """The bytes of SOURCE, for the byte level; a download shows how far it is."""
    from elman.text import corpus

    with progress() as bar:
        return corpus.load_bytes(source, progress=_shown(bar, source))


def _shown(bar: Any, source: str) -> "Progress":
    """A bar that appears when the first block arrives, and so never for a file that is here."""
    task = None

    def show(done: int, total: int | None) -> None:
        nonlocal task
        if task is None:
            task = bar.add_task(f"downloading {source}")
        bar.update(task, completed=done, total=total)

    return show
