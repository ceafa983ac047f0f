"""The SOURCE that most verbs read, the options that go with it, and its progress bar."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elman.cli.console import note, progress
from elman.options import DECODED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elman.text.datasets import Progress
    from elman.text.prepared import Data, Text

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Dataset name, text file, .gz, folder of .txt files or of `elman prepare`, or -.",
    ),
]
VocabSize = Annotated[
    int, typer.Option(min=0, help="Most tokens with an id, the frequent ones; 0: all (bpe: 8192)")
]
Tokenizer = Annotated[str, typer.Option(help="bpe: a tokenizer.json; else one is learned")]
LEARNED = ("vocab_size", "tokenizer")
Clean = Annotated[
    str,
    typer.Option(help="newlines (line ends made alike), letters (as the notes), or none"),
]
Lower = Annotated[bool, typer.Option("--lower", help="Read the text in lower case")]
Encoding = Annotated[
    str, typer.Option("--encoding", help="How the bytes of SOURCE spell text."), DECODED
]
Errors = Annotated[
    str,
    typer.Option(
        "--errors", help="What to do about bytes that are not text: strict, replace or ignore."
    ),
    DECODED,
]


def was_typed(context: typer.Context, name: str) -> bool:
    """Whether an option was typed, even if with its default value."""
    where = context.get_parameter_source(name)
    return where is not None and where.name == "COMMANDLINE"


def data_of(context: typer.Context, default_level: str, source: str, **given: Any) -> "Data":
    """Which text, and how it is read: as typed, as a prepared text was prepared, or as usual."""
    from elman.text.prepared import Data, adopted

    typed = {name: value for name, value in given.items() if was_typed(context, name)}
    typed = {"source": source} | {n: value for n, value in typed.items() if value is not None}
    options: dict[str, Any] = {"level": default_level} | adopted(typed)
    return Data(**options)


def read(data: "Data") -> "Text":
    """The text that `data` describes; a download shows how far it is."""
    from elman.text import corpus, prepared

    with progress() as bar:
        text = prepared.read(data, progress=_shown(bar, data.source))
    tell_left_out(data.source, corpus.texts_in)
    return text


def read_like(data: "Data", source: str) -> "Text":
    """Another text, read as a run reads its own, which no option changes."""
    from elman.errors import NotText
    from elman.text import prepared

    try:
        return prepared.read(data, source)
    except NotText as wrong:
        file = "FILE" if source == "-" else shlex.quote(source)
        said = f"a run reads every text as {data.encoding}, as it was trained"
        hint = f"{said}: iconv -f ENCODING -t {data.encoding} {file} | elman … -"
        raise NotText(wrong.message, hint=hint) from wrong


def tell_left_out(source: str, texts_in: "Callable[[Path], Iterable[Path]]") -> None:
    """Say which files of a folder are not read: one may think that all are."""
    from elman.text.corpus import left_out, path_from
    from elman.text.datasets import DATASETS
    from elman.text.shards import is_prepared

    folder = path_from(source)
    if source in DATASETS or not folder.is_dir() or is_prepared(folder):
        return
    if said := left_out(folder, texts_in(folder)):
        note(printable(said))


def follow_up(verb: str, data: "Data", **options: object) -> str:
    """The command that goes on with the same text: what a verb ends with."""
    from elman.text.prepared import Data

    plain = Data(data.source, data.level)
    for name in (*("clean", "min_freq", "validation", "encoding", "errors", "lower"), *LEARNED):
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
