"""Text by name, path or stdin; the notes' cleaning; splits.

A source is the name of a dataset (`elman datasets` lists them), a file, a `.gz` of one, a folder
(its `.txt` and `.txt.gz` files, subfolders included, in sorted order) or `-` for stdin. A name wins
over a file of the same name: write `./name` for the file.
"""

import codecs
import errno
import gzip
import io
import re
import reprlib
import shlex
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from elman.errors import MissingSource, NotText, UserError, counted
from elman.files import as_path, contents, drained
from elman.text.datasets import DATASETS, Progress, named, path_of

ERRORS = ("strict", "replace", "ignore")
"""What to do about bytes that are not text: refuse, put U+FFFD, or leave them out."""

TEXTS = (".txt", ".txt.gz")
"""What the files of a folder are called that are its text, in capitals or not."""
SMALL, RATIO = 1 << 24, 100
"""A gzip file may unpack to so many bytes, or to so many times its own size."""


def load(
    source: str | Path,
    *,
    encoding: str = "utf-8",
    errors: str = "strict",
    progress: Progress | None = None,
) -> str:
    r"""The text of a source, exactly as it is: no cleaning, and `\r\n` stays `\r\n`.

    Models should read `unix_newlines` of it, as every command does unless told otherwise.
    A byte-order mark at the start is not part of the text and is dropped. The files of a folder
    follow one another, with a line end between them where a file does not end in one.

    >>> load("python-reference")[:22]
    'The "assert" statement'
    """
    check_encoding(encoding, errors)
    decoded = (_decode(data, where, encoding, errors) for where, data in _pieces(source, progress))
    pieces = [text for text in decoded if text]  # nothing is left of a byte-order mark alone
    if not pieces:
        raise _empty("stdin" if source == "-" else str(source))
    return "".join([p if p.endswith("\n") else p + "\n" for p in pieces[:-1]] + pieces[-1:])


def load_bytes(source: str | Path, *, progress: Progress | None = None) -> bytes:
    """The bytes of a source, whatever they are: for the byte level, where any file will do."""
    pieces = [data for _, data in _pieces(source, progress)]
    return b"".join([p if p.endswith(b"\n") else p + b"\n" for p in pieces[:-1]] + pieces[-1:])


def unix_newlines(text: str) -> str:
    r"""Every line end as `\n`: a `\r\n` is one line end, not two tokens, one of them certain.

    >>> unix_newlines("one\r\ntwo\rthree\n")
    'one\ntwo\nthree\n'
    """
    _check_text(text)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def letters(text: str) -> list[str]:
    r"""The notes' cleaning: each line in lower-case letters a to z, all else become single spaces.

    >>> letters("The Time Machine, by H. G. Wells [1898]\n\nI\r\n")
    ['the time machine by h g wells', '', 'i']
    """
    _check_text(text)
    return [
        re.sub("[^A-Za-z]+", " ", line).strip().lower() for line in io.StringIO(text, newline=None)
    ]


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise UserError(
            f"a text is a str, not a {type(text).__name__}",
            hint="corpus.load reads one; bytes.decode makes one of bytes",
        )


class Split(NamedTuple):
    """Three stretches of one text, in the order in which they are read."""

    train: Any
    validation: Any
    test: Any


def split(text: Any, validation: float = 0.1, test: float = 0.0) -> Split:
    """Cut a text, or its ids, into train, validation and test, in that order and without shuffling.

    Of n tokens the last round(n · test) are the test, the round(n · validation) before them the
    validation, and the rest, at the front, for training. The three joined are the whole; arrays and
    tensors are cut without copying.

    >>> split("abcdefghij", validation=0.2, test=0.1)
    Split(train='abcdefg', validation='hi', test='j')
    """
    if not hasattr(text, "__len__"):
        raise UserError(
            f"{reprlib.repr(text)} has no length to be split by", hint="give a text or its ids"
        )
    total = len(text)
    sizes = [_share(total, "validation", validation), _share(total, "test", test)]
    if sum(sizes) >= total:
        raise UserError(
            f"validation={validation} and test={test} leave nothing of "
            f"{counted(total, 'tokens')} to train on",
            hint="their sum must be below 1; try validation=0.1, test=0.1",
        )
    first, second = total - sum(sizes), total - sizes[1]
    return Split(text[:first], text[first:second], text[second:])


def _share(total: int, name: str, fraction: float) -> int:
    if not isinstance(fraction, Real) or not 0 <= fraction < 1:
        raise UserError(
            f"{name}={fraction!r} must be at least 0 and below 1", hint=f"try {name}=0.1"
        )
    size = round(total * fraction)
    if fraction > 0 and size == 0:
        raise UserError(
            f"{name}={fraction} of {counted(total, 'tokens')} is nothing",
            hint=f"use more text, or {name}=0 for none",
        )
    return size


def _pieces(source: str | Path, progress: Progress | None) -> Iterator[tuple[str, bytes]]:
    """Each file of the source: what to call it, and its bytes."""
    if source == "-":
        yield _not_empty("stdin", _stdin())
    elif isinstance(source, str) and source in DATASETS:
        yield _dataset(source, progress)
    else:
        path = path_from(source)
        if not path.exists():
            named(str(source), "text")
            raise MissingSource(f"there is no file {source}", hint="elman datasets lists names")
        if not path.is_dir():
            yield _not_empty(str(path), _read(path))
            return
        texts = ((str(file), _read(file)) for file in texts_in(path))
        filled = (text for text in texts if text[1])  # an empty file among others is not a text
        yield next(filled, None) or _not_empty(f"every text in the folder {path}", b"")
        yield from filled


def _stdin() -> bytes:
    if sys.stdin is None:  # as `elman … - <&-` leaves it
        raise UserError("stdin is closed", hint="pipe a text in: cat FILE | elman … -")
    return drained(sys.stdin.buffer, "stdin")


def path_from(source: str | Path) -> Path:
    """The path that a source names; one that no file system could hold is refused."""
    path = as_path(source)
    if not str(source):
        raise UserError(
            "an empty source names no text", hint="elman datasets lists names; . is this folder"
        )
    try:
        path = path.expanduser()
        if "\0" in str(source):
            raise ValueError("it holds a NUL")
        path.exists()  # a name too long, a loop of links
    except (RuntimeError, ValueError, OSError) as problem:
        long = getattr(problem, "errno", None) == errno.ENAMETOOLONG
        raise UserError(
            f"{str(source)[:80]!r} is not the path of a file: {problem}",
            hint="name something shorter" if long else "name a file, a folder, - or a dataset",
        ) from problem
    return path


def _dataset(name: str, progress: Progress | None) -> tuple[str, bytes]:
    download = named(name, "text").download
    if download is None:
        assert name == "python-reference"
        return name, _python_reference().encode("utf-8")
    return name, path_of(download, progress).read_bytes()


def _python_reference() -> str:
    """Every topic of Python's own help, in the order of their names."""
    try:
        from pydoc_data.topics import topics
    except ImportError as missing:
        raise MissingSource(
            "this Python comes without pydoc_data, its language reference",
            hint="some systems keep it in a package of its own; or give the path of any text",
        ) from missing
    return "\n".join(topics[name] for name in sorted(topics))


def texts_in(folder: Path) -> list[Path]:
    """The files of a folder that are its text, in the order in which they are read."""
    named = (file for file in folder.rglob("*") if file.name.lower().endswith(TEXTS))
    files = [file for file in named if file.is_file() or is_lost(file)]
    if not files:
        check_no_run(folder)
        raise MissingSource(
            f"the folder {folder} holds no .txt or .txt.gz file",
            hint="name a single file, or pipe others in: cat FILES | elman … -",
        )
    return sorted(files)


def left_out(folder: Path, texts: Iterable[Path]) -> str:
    """Which files of a folder are not read as its texts, in words; "" if all are.

    Hidden files, which systems and editors keep there, and files of runs are not mentioned.
    """
    read = set(texts)
    others = [file for file in folder.rglob("*") if file not in read and _is_no_folder(file)]
    others = [file for file in others if not _is_kept(file.relative_to(folder), folder)]
    if not others:
        return ""
    kinds = Counter(file.suffix or file.name for file in others)
    named = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common(5))
    total = len(others) + len(read)
    return f"{len(others):,} of the {total:,} files in {folder} are not read as text: {named}"


def _is_no_folder(file: Path) -> bool:
    """A file, a pipe, or a link, even to a folder: none is followed, since it may lead back."""
    return file.is_symlink() or not file.is_dir()


def _is_kept(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.parts)
    return hidden or any((folder / above / "config.json").exists() for above in file.parents)


def check_no_run(folder: Path) -> None:
    """A run where a text is wanted: say what can be done with it, and where its text is named."""
    if (folder / "config.json").is_file() and (folder / "metrics.jsonl").is_file():
        raise MissingSource(
            f"{folder} is a run, and a text is wanted",
            hint=f"its README.md names one; elman evaluate {shlex.quote(str(folder))} scores it",
        )


def is_lost(path: Path) -> bool:
    """Whether it is a link to nothing."""
    return path.is_symlink() and not path.exists()


def _read(path: Path) -> bytes:
    try:
        data = contents(path)
        return _unpacked(data, path) if path.suffix.lower() == ".gz" else data
    except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise UserError(
            f"{path} is not a whole gzip file: {problem}", hint="gzip -t FILE checks one"
        ) from problem
    except OSError as problem:
        hint = f"it is a link to {path.readlink()}" if is_lost(path) else "check its permissions"
        raise UserError(f"cannot read {path}: {problem.strerror}", hint=hint) from problem


def _unpacked(data: bytes, path: Path) -> bytes:
    """What a gzip file holds; one that swells beyond all reason is refused before it does."""
    limit = max(SMALL, RATIO * len(data))
    with gzip.open(io.BytesIO(data)) as packed:
        text = packed.read(limit + 1)
    if len(text) > limit:
        raise UserError(
            f"{path} unpacks to more than {limit:,} bytes, {RATIO} times its {len(data):,}: text "
            "packs four times smaller, rarely twenty times",
            hint="if that is what you want, unpack it first: gunzip FILE",
        )
    return text


def _not_empty(where: str, data: bytes) -> tuple[str, bytes]:
    if not data:
        raise _empty(where)
    return where, data


def _empty(where: str) -> UserError:
    return UserError(f"{where} is empty", hint="a model needs some text; elman datasets lists some")


def check_encoding(encoding: str, errors: str) -> None:
    """Refuse the name of an encoding, or of a way to treat its errors, that does not exist."""
    if errors not in ERRORS:
        raise UserError(f"unknown errors={errors!r}", hint=f"choose from {', '.join(ERRORS)}")
    try:
        reads = isinstance(b"a".decode(encoding, "replace"), str)
    except (LookupError, TypeError, ValueError):  # unknown, or not of text: rot13, undefined
        reads = False
    if not reads:
        raise UserError(
            f"unknown encoding {encoding!r}", hint="try utf-8, latin-1, utf-16 or gb18030"
        )


def _decode(data: bytes, where: str, encoding: str, errors: str) -> str:
    try:
        text = data.decode(encoding, errors)
    except ValueError as problem:
        raise not_decoded(where, data, encoding, problem) from problem
    if "\0" in text:
        raise binary(where, data)
    return text.removeprefix("\ufeff")


def not_decoded(
    where: str, data: bytes, encoding: str, problem: ValueError, before: int = 0
) -> UserError:
    """Why bytes are not text in this encoding, and what they may be; `before` bytes came first."""
    if not isinstance(problem, UnicodeDecodeError):  # what some codecs raise instead
        return NotText(f"{where} is not {encoding}: {problem}", hint="try utf-8")
    if not 0 <= problem.start < len(data):  # punycode and idna do not say where
        return NotText(f"{where} is not {encoding}: {problem.reason}", hint="name its encoding")
    if b"\0" in data or (not before and kind_of(data)):
        return binary(where, data, before)
    wrong, offset = data[problem.start], before + problem.start
    message = f"{where} is not {encoding}: byte {wrong:#04x} at offset {offset}"
    return NotText(message, hint=NOT_TEXT)


def binary(where: str, data: bytes, before: int = 0) -> UserError:
    """What bytes with a NUL among them may be; `before`: how many came before them."""
    if not before and (known := kind_of(data)):
        kind, command = known
        name = shlex.quote(where) if where != "stdin" else "FILE"
        return UserError(
            f"{where} is {kind}, not text", hint=f"unpack it first: {command.format(name)}"
        )
    encoding = None if before else _wide_encoding(data[:1000])
    where_from = f", the first at offset {before + data.index(0)}" if b"\0" in data else ""
    hint = f"it looks like encoding={encoding}" if encoding else "level=byte reads any file"
    return NotText(
        f"{where} is a binary file: it holds NUL bytes{where_from}",
        hint=hint,
    )


NOT_TEXT = (
    "name its encoding (encoding=latin-1, encoding=gb18030, …), or errors=replace, or "
    "errors=ignore; level=byte reads any file"
)
"""What to try with bytes that are not text in this encoding."""
PACKED = {
    b"PK\x03\x04": ("a zip file, or a document that is one (.docx, .epub)", "unzip -p {}"),
    b"\x1f\x8b": ("packed by gzip", "gzip -dc {}"),
    b"\xfd7zXZ\0": ("packed by xz", "xz -dc {}"),
    b"BZh": ("packed by bzip2", "bzip2 -dc {}"),
    b"\x28\xb5\x2f\xfd": ("packed by zstd", "zstd -dc {}"),
    b"\x8aELM": ("packed by elman compress", "elman decompress {} -o -"),
    b"%PDF-": ("a PDF document", "pdftotext {} -"),
}
"""How files that hold packed text begin, what they are, and what unpacks them."""


def kind_of(data: bytes) -> tuple[str, str] | None:
    """What a file is that holds text, packed, and the command that makes a text of it."""
    kind = next((what for start, what in PACKED.items() if data.startswith(start)), None)
    if kind is None and data[257:262] == b"ustar":
        kind = "a tar archive", "tar -xOf {}"
    return kind and (kind[0], f"{kind[1]} > TEXT.txt")


def _wide_encoding(data: bytes) -> str | None:
    """The encoding of two or four bytes a character that a text seems to have, by its beginning."""
    if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for name, zeros, others in (("utf-16-le", 1, 0), ("utf-16-be", 0, 1)):  # most of a Latin text
        if data[zeros::2].count(0) > 0.8 * len(data) / 2 and 0 not in data[others::2]:
            return name
    return None
