"""Texts read as a stream: any number of files, a piece at a time, whatever their size.

    file.txt   file.txt.gz   file.txt.zst      one document each
    file.jsonl (.gz, .zst)                     a document in each line: the value of one field
    folder                                     all of these in it, subfolders included, sorted

Pieces are whole lines, a megabyte or so of them, so that whatever cuts lines cuts them as it would
cut the whole; only a line of more than that is cut itself, between words. What is read is what
`corpus.load` gives for the same files: byte-order marks are dropped, and a document that does not
end a line gets a line end before the next.
"""

import codecs
import gzip
import io
import json
import re
import shlex
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from elman.errors import MissingSource, UserError
from elman.text import corpus
from elman.text.datasets import DATASETS, named, path_of
from elman.text.shards import is_prepared

BLOCK = 1 << 20
"""Bytes read, and characters handed on, at a time."""
PACKED_BLOCK = 1 << 14
"""Bytes of a .zst file unpacked at a time."""
LONGEST = 1 << 22
"""How many letters may follow one another without a space: more is not a text of words."""
LONGEST_LINE = 1 << 25
"""Characters of a line of JSON that can be held."""
KINDS = (".txt", ".jsonl")
PACKED = (".gz", ".zst")


class Piece(NamedTuple):
    """Some lines of a document, and whether it ends with them."""

    text: str | bytes
    ends: bool


class Step(NamedTuple):
    """How far a preparation (`preparation.py`) has come."""

    stage: str  # measuring, counting, encoding
    done: int  # characters (bytes at the byte level)
    total: int | None
    tokens: int = 0


@dataclass(frozen=True)
class Stream:
    """Sources that can be read again and again, always the same pieces."""

    files: tuple[Path, ...]
    raw: bool = False  # bytes, whatever they are
    field: str = "text"  # of the objects in .jsonl files
    encoding: str = "utf-8"
    errors: str = "strict"
    anywhere: bool = False  # tokens are single characters: no cut goes through one

    def pieces(self) -> Iterator[Piece]:
        """Every document of every file, in order."""
        before: Piece | None = None  # held back, until it is known whether it is the last
        for file in self.files:
            for piece in self._of(file):
                if before is not None:
                    yield _closed(before)
                before = piece
        if before is not None:
            yield before

    def _of(self, file: Path) -> Iterator[Piece]:
        try:
            with _opened(file) as data:
                if is_jsonl(file):
                    yield from self._lines(data, file)
                elif self.raw:
                    yield from _ended(_blocks(data))
                else:
                    yield from _ended(self._cut(self._text(data, file), file))
        except (gzip.BadGzipFile, EOFError, zlib.error, *_zstandard_errors(file)) as problem:
            name = {".gz": "gzip", ".zst": "zstd"}.get(_packing(file), "packed")
            raise UserError(
                f"{file} is not a whole {name} file: {problem}", hint=f"{name} -t FILE checks one"
            ) from problem
        except OSError as problem:
            raise UserError(
                f"cannot read {file}: {problem.strerror or problem}", hint="check its permissions"
            ) from problem

    def _lines(self, data: IO[bytes], file: Path) -> Iterator[Piece]:
        """The field of each line of JSON."""
        for number, line in enumerate(_whole_lines(self._text(data, file), file), 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[self.field]
                if not isinstance(text, str):
                    raise TypeError(f"its {self.field!r} is not a string")
            except (ValueError, KeyError, TypeError, RecursionError) as problem:
                raise UserError(
                    f"{file}, line {number}: no object with a text in its field {self.field!r} "
                    f"({type(problem).__name__}: {str(problem)[:80]})",
                    hint="--field NAME says which field holds the text",
                ) from problem
            if text:
                yield from _ended(self._document(text, file))

    def _document(self, text: str, file: Path) -> Iterator[str | bytes]:
        if self.raw:
            return _blocks(io.BytesIO(text.encode("utf-8", "surrogatepass")))
        if len(text) <= BLOCK:
            return iter((text,))
        return self._cut((text[i : i + BLOCK] for i in range(0, len(text), BLOCK)), file)

    def _text(self, data: IO[bytes], file: Path) -> Iterator[str]:
        """A file's characters, as many at a time as come."""
        decoder = codecs.getincrementaldecoder(self.encoding)(self.errors)
        first, before = True, 0
        for block in _blocks(data, last=True):
            try:
                new = decoder.decode(block, final=not block)
            except ValueError as problem:
                left = getattr(problem, "object", block)  # with what the block before it left over
                start = before + len(block) - len(left)
                why = corpus.not_decoded(str(file), left, self.encoding, problem, start)
                raise why from problem
            if "\0" in new:
                raise corpus.binary(str(file), block, before)
            yield new.removeprefix("\ufeff") if first else new
            first, before = first and not new, before + len(block)

    def _cut(self, blocks: Iterable[str], file: Path) -> Iterator[str]:
        """The blocks of a text in pieces that can go on without what follows."""
        held = ""
        for block in blocks:
            held += block
            end = _last_end(held, self.anywhere)
            if len(held) - end > LONGEST:
                raise _too_long(file)
            if end:
                yield held[:end]
                held = held[end:]
        if held:
            yield held


def files_of(sources: list[str]) -> tuple[Path, ...]:
    """The files of files, folders and names of datasets, in this order; nothing is refused."""
    return tuple(file for source in sources for file in _files(source))


def _files(source: str) -> list[Path]:
    if source in DATASETS:
        download = named(source, "text").download
        if download is None:
            raise UserError(
                f"{source} is made, not read from a file, so it cannot be streamed",
                hint="elman train takes it as it is",
            )
        return [path_of(download)]
    path = corpus.path_from(source)
    if not path.exists():
        raise MissingSource(f"there is no file {source}", hint="elman datasets lists names")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(
            f"{source} is a pipe or a device, and a text is read up to three times",
            hint="write it into a file first",
        )
    corpus.check_no_run(path)  # whose metrics.jsonl would be read as a text
    if is_prepared(path):
        raise UserError(
            f"{path} has been prepared already, and its text is not kept there",
            hint=f"elman train {shlex.quote(str(path))} reads it; prepare takes files",
        )
    named_so = (file for file in path.rglob("*") if _kind(file) in KINDS)
    found = sorted(file for file in named_so if file.is_file() or corpus.is_lost(file))
    for lost in filter(corpus.is_lost, found):
        raise UserError(
            f"cannot read {lost}: No such file or directory",
            hint=f"it is a link to {lost.readlink()}",
        )
    if not found:
        raise MissingSource(
            f"the folder {path} holds no .txt or .jsonl file, plain or packed (.gz, .zst)",
            hint="name single files",
        )
    return found


def is_jsonl(file: Path) -> bool:
    """Whether each line of it is a document, in JSON."""
    return _kind(file) == ".jsonl"


def _kind(file: Path) -> str:
    """The suffix below that of the packing, in lower case."""
    return (Path(file.stem) if _packing(file) else file).suffix.lower()


def _packing(file: Path) -> str:
    """What its name says about how it is packed, in lower case; "": not at all."""
    suffix = file.suffix.lower()
    return suffix if suffix in PACKED else ""


def _opened(file: Path) -> IO[bytes]:
    packing = _packing(file)
    if packing == ".gz":
        return gzip.open(file, "rb")  # pyright: ignore[reportReturnType]
    if packing == ".zst":
        return _zstandard(file)
    return open(file, "rb")


def _zstandard_errors(file: Path) -> tuple[type[Exception], ...]:
    return (_library(file).ZstdError,) if _packing(file) == ".zst" else ()


def _library(file: Path) -> Any:
    try:
        import zstandard
    except ImportError as missing:
        raise UserError(
            f"{file} needs the package zstandard", hint="pip install 'elman[zstd]'"
        ) from missing
    return zstandard


def _zstandard(file: Path) -> Any:
    zstandard = _library(file)
    return io.BufferedReader(_Unpacked(file, zstandard.ZstdDecompressor()), BLOCK)


class _Unpacked(io.RawIOBase):
    """What is in a .zst file; unlike the library's own reader it notices that a file was cut."""

    def __init__(self, file: Path, packing: Any) -> None:
        self._file, self._packing = open(file, "rb"), packing  # noqa: SIM115 - closed below
        self._frame, self._held = packing.decompressobj(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            block = self._frame.unused_data or self._file.read(PACKED_BLOCK)
            if self._frame.eof and block:
                self._frame = self._packing.decompressobj()
            if not block:
                if not self._frame.eof:
                    raise EOFError("it ends in the middle")
                return 0
            self._held = self._frame.decompress(block)
        count = min(len(buffer), len(self._held))
        buffer[:count], self._held = self._held[:count], self._held[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _blocks(data: IO[bytes], last: bool = False) -> Iterator[bytes]:
    """What is in a file, and nothing once more at the end if asked for."""
    while block := data.read(BLOCK):
        yield block
    if last:
        yield b""


_WORD_AFTER_GAP = re.compile(r"[^\w '’](?=[^\W_])")  # no apostrophe: it may be inside of a word


def _whole_lines(blocks: Iterable[str], file: Path) -> Iterator[str]:
    """The lines of a text that comes in blocks, without their ends."""
    held, number = "", 1
    for block in blocks:
        *lines, held = (held + block).split("\n")
        yield from lines
        number += len(lines)
        if len(held) > LONGEST_LINE:
            raise UserError(
                f"{file}, line {number} is longer than {LONGEST_LINE >> 20} million characters",
                hint="a line of .jsonl is one document, and is read as a whole: cut it",
            )
    if held:
        yield held


def _last_end(text: str, anywhere: bool = False) -> int:
    """How much of a text can go on without what follows: whole lines; of a long one, whole words.

    A carriage return at the end waits: the line feed that belongs to it may be next.

    >>> _last_end("one\\ntwo "), _last_end("one two"), _last_end("a,b " * BLOCK) == 4 * BLOCK
    (4, 0, True)
    """
    end = text.rfind("\n") + 1
    if end or len(text) <= BLOCK:
        return end
    end = text.rfind(" ") + 1 or _last_word(text)
    return len(text) - text.endswith("\r") if anywhere and not end else end


def _last_word(text: str) -> int:
    """Where the last word begins that follows a sign or other white space, not far from the end."""
    matches = _WORD_AFTER_GAP.finditer(text, max(0, len(text) - 2 * BLOCK))
    return next((match.end() for match in deque(matches, maxlen=1)), 0)


def _ended(texts: Iterator[Any]) -> Iterator[Piece]:
    """The pieces of one document, the last of them marked."""
    before = None
    for text in texts:
        if before is not None:
            yield Piece(before, False)
        before = text
    if before is not None:
        yield Piece(before, True)


def _closed(piece: Piece) -> Piece:
    """A piece that another follows: at the end of its document, it ends a line."""
    end: Any = "\n" if isinstance(piece.text, str) else b"\n"
    if piece.ends and not piece.text.endswith(end):
        return Piece(piece.text + end, True)
    return piece


def _too_long(file: Path) -> UserError:
    return UserError(
        f"{file} has more than {LONGEST >> 20} million letters without anything between them",
        hint="level char or byte reads files without lines and words",
    )
