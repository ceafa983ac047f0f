"""Files that are whole or absent, and that can tell whether they are still what was written.

`atomic` and `write_text` write so that a reader, or a crash, never sees half a file. A *seal* is a
SHA-256 that a file carries inside itself: a writer puts `BLANK_SEAL` anywhere into the file (a
value of its JSON, of a safetensors header), `sealed` fills it in, and `check_seal` later refuses a
file of which any byte, the seal included, is another. A file that grows line by line has a CRC-32
in every line instead (`checked_line`).
"""

import errno
import hashlib
import os
import re
import reprlib
import shutil
import stat
import tempfile
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from elman.errors import MissingSource, Unreadable, UserError

BLANK_SEAL = "elman-sha256:" + 64 * "0"
"""What a writer puts where the seal is to stand."""

ENDLESS = 1 << 30
"""Bytes that a pipe or a device may give."""

_SEAL = re.compile(rb"elman-sha256:([0-9a-f]{64})")
_BLANK = BLANK_SEAL.encode()
_CHECKED = re.compile(rb', "crc32": "([0-9a-f]{8})"\}')
_DESCRIPTORS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")


@contextmanager
def atomic(path: Path | str) -> Iterator[Path]:
    """Lend a temporary path; on success put what was written there into `path`.

    A new or regular file is flushed to disk under its temporary name beside `path` and then renamed
    into place, so that on any error, Ctrl-C included, `path` is as it was before. Where several
    write one file at once, threads of a process too, it is that of the last of them. A link is
    followed: the file it points to is replaced, not the link. Pipes, character devices and what is
    open already (/dev/stdout) are written to directly. Anything else is refused, see
    `check_target`.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic(folder / "a.txt") as draft:
    ...     _ = draft.write_text("whole")
    >>> [p.name for p in folder.iterdir()]
    ['a.txt']
    """
    is_replaced, given = check_target(path), _descriptor(path)
    if given is not None or not is_replaced:
        with tempfile.TemporaryDirectory() as folder:
            draft = Path(folder) / "draft"
            yield draft
            place = path if given is None else os.dup(given)
            with open(draft, "rb") as written, open(place, "wb") as target:
                shutil.copyfileobj(written, target)
        return
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name[:50]}.{uuid.uuid4().hex}.partial")
    try:
        yield draft
        with open(draft, "rb") as written:
            os.fsync(written.fileno())
        if target.exists():
            shutil.copymode(target, draft)
        os.replace(draft, target)
        _flush(target.parent)
    except BaseException as problem:
        if draft.exists():  # or a disk that takes no writing would refuse this, too, and hide why
            draft.unlink()
        if isinstance(problem, OSError) and problem.filename in (None, str(draft)):
            problem.filename = str(path)  # the name that was asked for, not a passing one
        raise


def _descriptor(path: Path | str) -> int | None:
    """What a path such as /dev/stdout names: written to where it stands, as `>>` asks, even if it
    leads to a file."""
    standard = {"/dev/stdout": 1, "/dev/stderr": 2}.get(str(path))
    if standard is not None:
        return standard if os.path.exists(path) else None
    named = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", str(path))
    return int(named[1]) if named and os.path.exists(path) else None


def _flush(folder: Path) -> None:
    """Write the names in a folder to disk, so that a new one, too, survives a power cut."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def is_full(failure: OSError) -> bool:
    """Whether there was no room left: on the disk, in a quota, or in the largest file allowed."""
    return failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def as_path(path: object) -> Path:
    """The path that a caller has passed, a str or a Path; anything else is refused.

    >>> as_path(None)
    Traceback (most recent call last):
    elman.errors.UserError: a path is a str or a Path, not None; name a file or folder
    """
    if isinstance(path, str):
        return Path(path)
    if isinstance(path, os.PathLike) and isinstance(named := os.fspath(path), str):
        return Path(named)
    raise UserError(
        f"a path is a str or a Path, not {reprlib.repr(path)}", hint="name a file or folder"
    )


def write_text(path: Path | str, text: str) -> None:
    """Write `text` as UTF-8, atomically; what has none (an undecodable file name) is escaped."""
    with atomic(path) as draft:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")


def check_target(path: Path | str, source: Path | str | None = None) -> bool:
    """Refuse a path that cannot become a file; True where one is replaced, False for a device.

    So is one that is the file of the `source`, which would be lost. Cheap, so that a long
    computation can ask before it begins.
    """
    as_path(path)
    if not str(path):
        raise UserError("an empty path names no file", hint="give the file a name")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        _check_folder(Path(path))
        return True
    except (OSError, ValueError) as problem:
        raise _unusable(path, problem) from problem
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return False
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "device or socket"
        raise UserError(f"{path} is a {kind}, not a file", hint="name a file to write")
    if str(path).startswith(_DESCRIPTORS):  # output that a shell sent into a file
        return False
    if source is not None and _is_file(path, source):
        raise UserError(
            f"{path} is what is to be read, and would be lost", hint="name another file to write"
        )
    _check_folder(Path(path))
    return True


def _is_file(path: Path | str, source: Path | str) -> bool:
    try:
        return os.path.samefile(path, os.path.expanduser(source))
    except (OSError, ValueError):  # not a file: a dataset's name, or a mistake
        return False


def _check_folder(path: Path) -> None:
    """A new file, which replaces an old one, needs a folder that is there and may be written to."""
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise MissingSource(
            f"{path} cannot be written: there is no folder {folder}", hint=f"mkdir -p {folder}"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(
            f"{path} cannot be written: the folder {folder} may not be written to",
            hint="name a file in another folder",
        )


def check_new_folder(path: Path, flag: str) -> None:
    """Refuse a folder that cannot be made or written to, by the nearest place that exists.

    It makes nothing. `flag` is the option, or the command, that named it.
    """
    asked = nearest = path.absolute()
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        what = "may not be written to" if nearest.is_dir() else "is not a folder"
        is_made = nearest == asked and nearest.is_dir()
        where = path if is_made else f"cannot make the folder {path}: {nearest}"
        raise UserError(f"{where} {what}", hint=f"name another with {flag}")


def _unusable(path: Path | str, problem: OSError | ValueError) -> UserError:
    why = problem.strerror if isinstance(problem, OSError) else problem
    return UserError(f"{str(path)!r} cannot be used as a file: {why}", hint="name another file")


def sealed(data: bytes) -> bytes:
    """The contents of a file with the blank seal in them filled in.

    >>> check_seal(sealed(b'{"seal": "' + BLANK_SEAL.encode() + b'", "answer": 42}'), "a.json")
    """
    if _BLANK not in data:
        raise ValueError("there is no BLANK_SEAL in the data to fill in")
    digest = hashlib.sha256(data).hexdigest().encode()
    return data.replace(_BLANK, b"elman-sha256:" + digest, 1)


def seal_holds(data: bytes) -> bool:
    """Whether the contents are, to the last bit, what `sealed` returned."""
    return any(_fits(data, seal) for seal in _SEAL.finditer(data))


def check_seal(data: bytes, path: Path | str) -> None:
    """Refuse contents that are not, to the last bit, what `sealed` returned."""
    if not seal_holds(data):
        raise UserError(
            f"{path} is damaged: its contents do not match the checksum they were written with",
            hint="restore it from a copy, or make it again",
        )


def has_seal(data: bytes) -> bool:
    """Whether anything in the contents looks like a seal: files of older versions have none."""
    return _SEAL.search(data) is not None


def _fits(data: bytes, seal: re.Match[bytes]) -> bool:
    """Whether this is the SHA-256 of the data with this very seal left blank."""
    digest = hashlib.sha256(data[: seal.start()])
    digest.update(_BLANK)
    digest.update(memoryview(data)[seal.end() :])
    return digest.hexdigest().encode() == seal[1]


def checked_line(record: str) -> bytes:
    """A JSON object as a line that carries the CRC-32 of what stands before it.

    >>> checked_line('{"step": 1}')
    b'{"step": 1, "crc32": "3daa833a"}\\n'
    """
    # What has no UTF-8, half of a surrogate pair, becomes JSON's own escape of it.
    data = record.encode("utf-8", "backslashreplace").removesuffix(b"}")
    return data + b', "crc32": "%08x"}\n' % zlib.crc32(data)


def line_holds(line: bytes) -> bool | None:
    """Whether a line, without its end, is what `checked_line` made; None: it has no CRC-32."""
    if (written := _CHECKED.fullmatch(line, line.rfind(b', "crc32"'))) is None:
        return None
    return zlib.crc32(line[: written.start()]) == int(written[1], 16)


def write_sealed(path: Path | str, data: bytes) -> None:
    """Seal the contents and write them, atomically."""
    with atomic(path) as draft:
        draft.write_bytes(sealed(data))


def read_sealed(path: Path | str) -> bytes:
    """The contents of a sealed file; one that is damaged is refused, and so is one without seal."""
    data = read_bytes(path)
    check_seal(data, path)
    return data


def read_bytes(path: Path | str) -> bytes:
    """The contents of a file; one that is not there, or may not be read, is refused in words."""
    try:
        return contents(path)
    except FileNotFoundError as missing:
        raise MissingSource(f"there is no file {path}", hint="check its name") from missing
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise Unreadable(f"{path} cannot be read: {why}", hint="check its permissions") from problem


def contents(path: Path | str) -> bytes:
    """The contents of a file, or what a pipe or a device gives until it ends."""
    path = as_path(path)
    mode = path.stat().st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        return path.read_bytes()
    with open(path, "rb") as stream:
        return drained(stream, str(path))


def drained(stream: BinaryIO, where: str) -> bytes:
    """What a stream gives until it ends; one that does not is left before it fills the memory."""
    data = bytearray()
    while block := stream.read(1 << 20):
        data += block
        if len(data) > ENDLESS:
            raise UserError(
                f"{where} gave {len(data):,} bytes and has not ended",
                hint="write what it gives into a file first; elman prepare reads files of any size",
            )
    return bytes(data)
