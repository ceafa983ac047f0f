"""`elman compress` and `elman decompress`: a file in as few bits as a model that learns needs."""

import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elman.cli.console import emit, note, progress
from elman.cli.limits import a_path
from elman.errors import UserError, counted

if TYPE_CHECKING:
    from elman.compression import Packed

SUFFIX = ".elm"
STDIO, STDOUT = "-", Path("/dev/stdout")
File = Annotated[str, typer.Argument(help="File, or - for stdin", metavar="FILE")]
Out = Annotated[
    str | None,
    typer.Option("--out", "-o", help="File to write, or - for stdout", show_default="FILE.elm"),
]
Back = Annotated[
    str | None,
    typer.Option("--out", "-o", help="File to write, or - for stdout", show_default="without .elm"),
]
From = Annotated[
    Path | None,
    typer.Option(help="The trained run that the network starts from", parser=a_path, metavar="RUN"),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file to write")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout")]


def compress(
    file: File,
    out: Out = None,
    level: Annotated[str, typer.Option(help="fast, default or best")] = "default",
    run: From = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compress any file with a network that learns while it reads, mixed with counting."""
    from elman import compression
    from elman.compression.options import level_named

    level_named(level)
    target = _target(file, out, f"{file}{SUFFIX}", force, as_json)
    _tell_how_fast()
    with _source(file) as source, _bar(source) as show:
        packed = compression.compress(source, target, level, run, show)
    _tell(packed, target, as_json)
    if target.is_file() and target != STDOUT:
        note(f"next: {_way_back(target, run if packed.with_run else None)}")


def decompress(
    file: File, out: Back = None, run: From = None, force: Force = False, as_json: Json = False
) -> None:
    """Write the file that was compressed, every byte of it, or say why not."""
    from elman import compression

    if out is None and file != STDIO and not file.endswith(SUFFIX):
        raise UserError(
            f"{file} does not end in {SUFFIX}, so what to write is not clear",
            hint="name it with -o",
        )
    target = _target(file, out, file.removesuffix(SUFFIX), force, as_json)
    _tell_how_fast()
    with _source(file) as source, _bar(source, decoding=True) as show:
        packed = compression.decompress(source, target, run, show)
    _tell(packed, target, as_json)


def _target(file: str, out: str | None, otherwise: str, force: bool, as_json: bool) -> Path:
    if out is None and file == STDIO:
        raise UserError("what came through a pipe has no name", hint="name the file to write: -o")
    target = STDOUT if out == STDIO else a_path(otherwise if out is None else out)
    if target == STDOUT and as_json:
        raise UserError(
            "both the file and --json would go to stdout", hint="name another file to write: -o"
        )
    if target != STDOUT and target.is_file() and not force:
        raise UserError(f"{target} exists already", hint="name another with -o, or --force")
    return target


def _tell_how_fast() -> None:
    from elman.compression import library

    if remark := library.remark():
        note(remark)


def _way_back(target: Path, run: Path | None) -> str:
    """The command that decompresses what was just written, and overwrites nothing."""
    words = ["elman", "decompress", str(target)]
    back = target.with_suffix("")
    if target.suffix != SUFFIX or back.exists():
        words += ["-o", str(back.with_name(f"{back.stem}.again{back.suffix}"))]
    if run is not None:
        words += ["--run", str(run)]
    return shlex.join(words)


@contextmanager
def _source(file: str) -> Iterator[Path]:
    """The file itself; what comes through a pipe is kept in one first."""
    if file != STDIO:
        yield a_path(file)
        return
    with tempfile.NamedTemporaryFile() as kept:
        shutil.copyfileobj(sys.stdin.buffer, kept)
        kept.flush()
        try:
            yield Path(kept.name)
        except UserError as wrong:  # of what came through the pipe, wherever it is kept
            said = wrong.message.replace(kept.name, "stdin")
            raise type(wrong)(said, hint=wrong.hint) from wrong


@contextmanager
def _bar(source: Path, decoding: bool = False) -> Iterator[Callable[[int, int], None]]:
    """How far it is, with the bits so far."""
    size = source.stat().st_size if source.exists() else 0
    with progress() as bar:
        task = bar.add_task("reading", total=size)

        def show(done: int, packed: int) -> None:
            bits = f"{8 * packed / done:.3f} bits per byte so far"
            bar.update(task, completed=packed if decoding else done, description=bits)

        yield show


def _tell(packed: "Packed", target: Path, as_json: bool) -> None:
    bits = packed.bits_per_byte
    if as_json:
        sizes = {"original_bytes": packed.original, "compressed_bytes": packed.compressed}
        emit({"out": str(target), **sizes, "bits_per_byte": bits})
        return
    rate = "" if bits is None else f", {bits:.4f} bits per byte"
    words = f"{counted(packed.original, 'bytes')}, {packed.compressed:,} compressed{rate}"
    if target == STDOUT:
        note(words)
    else:
        typer.echo(f"{words}: {target}")
