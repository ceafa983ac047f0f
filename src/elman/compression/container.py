"""The compressed file: what is needed to decode it, the coded text, and two checksums.

    magic 4 | version 1 | flags 1 | options 8 | length, 7 bits a byte | fingerprint of a run, 16
    the coded text
    8 bytes of the text's SHA-256 | 8 bytes of the SHA-256 of all that stands before them

A file is checked against its last eight bytes before anything of it is decoded, and what was
decoded against the eight before them before it is given its name.
"""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from elman.compression.library import Weights, coder
from elman.compression.options import DEFAULT, Options, level_named
from elman.compression.pretrained import fingerprint, network_of
from elman.errors import MissingSource, UserError
from elman.files import atomic, check_target
from elman.resources import check_memory

MAGIC, VERSION = b"\x8aELM", 1
DIGEST, NAMED = 8, 16
WITH_RUN = 1
PIECE = 1 << 12
"""Bytes of text between two reports of progress."""
TRAINED_RATES = {"rate_units": 20, "last_rate_units": 10}
"""A trained network is adapted more gently than a fresh one is taught."""

Progress = Callable[[int, int], None]
"""Called with the bytes of text done so far and the bytes of the compressed file so far."""


@dataclass(frozen=True)
class Header:
    """All that stands before the coded text."""

    options: Options
    run: bytes = b""  # the fingerprint of the network it starts from

    def bytes(self) -> bytes:
        """As it stands in the file."""
        o = self.options
        numbers = (o.contexts, o.table_bits, o.hidden // 16, o.window, o.lanes)
        rates = (o.rate_units, o.last_rate_units, o.mixing_units)
        flags = WITH_RUN if self.run else 0
        return MAGIC + bytes([VERSION, flags, *numbers, *rates]) + _varint(o.length) + self.run


@dataclass(frozen=True)
class Packed:
    """What came of a compression."""

    original: int
    compressed: int

    @property
    def bits_per_byte(self) -> float | None:
        """Of everything in the file; None for an empty text."""
        return 8 * self.compressed / self.original if self.original else None


def compress(
    source: Path | str,
    target: Path | str,
    level: str = DEFAULT,
    run: Path | str | None = None,
    progress: Progress | None = None,
) -> Packed:
    """Compress a file into another, which exists whole or not at all."""
    chosen, trained = level_named(level), None if run is None else network_of(run)
    check_target(target)
    with _opened(source) as text:
        length = os.fstat(text.fileno()).st_size
        options = chosen.options(length)
        if trained is not None:
            options = replace(options, hidden=trained[1], **TRAINED_RATES)
        weights = None if trained is None else trained[0]
        header = Header(options, b"" if weights is None else fingerprint(weights))
        _check_room(options)
        with atomic(target) as draft, open(draft, "wb") as out:
            size = _write(text, out, header, weights, progress)
    return Packed(length, size)


def _write(
    text: IO[bytes],
    out: IO[bytes],
    header: Header,
    weights: Weights | None,
    progress: Progress | None,
) -> int:
    content, whole = hashlib.sha256(), hashlib.sha256()
    done, written, length = 0, 0, header.options.length

    def put(data: bytes) -> None:
        nonlocal written
        whole.update(data)
        written += out.write(data)

    put(header.bytes())
    engine = coder(header.options, weights) if length else None
    while engine is not None and done < length:
        piece = text.read(min(PIECE, length - done))
        if not piece:
            raise UserError("the file became shorter while it was read", hint="compress it again")
        content.update(piece)
        done += len(piece)
        put(engine.encode(piece, done == length))
        if progress is not None:
            progress(done, written)
    put(content.digest()[:DIGEST])
    return written + out.write(whole.digest()[:DIGEST])


def decompress(
    source: Path | str,
    target: Path | str,
    run: Path | str | None = None,
    progress: Progress | None = None,
) -> Packed:
    """Write the file that `compress` was given, every byte of it, or refuse."""
    check_target(target)
    with _opened(source) as packed:
        header, start, end = _checked(packed, source)
        weights = _network(header, run, source)
        _check_room(header.options)
        packed.seek(end)
        expected = packed.read(DIGEST)
        packed.seek(start)
        with atomic(target) as draft, open(draft, "wb") as out:
            content = hashlib.sha256()
            for piece in _decoded(packed, header.options, weights, end - start, progress):
                content.update(piece)
                out.write(piece)
            if content.digest()[:DIGEST] != expected:
                raise UserError(
                    f"{source} does not decode to what it was made from",
                    hint="it was made by an elman whose arithmetic differs; please report this",
                )
    return Packed(header.options.length, end + 2 * DIGEST)


def _decoded(
    packed: IO[bytes],
    options: Options,
    weights: Weights | None,
    size: int,
    progress: Progress | None,
) -> Iterator[bytes]:
    """The text, piece by piece."""
    if options.length == 0:
        return
    engine, waiting, read, done = coder(options, weights), b"", 0, 0
    while done < options.length:
        if len(waiting) < PIECE:
            more = packed.read(min(PIECE, size - read))
            waiting, read = waiting + more, read + len(more)
        text, used = engine.decode(waiting, min(PIECE, options.length - done), read == size)
        waiting, done = waiting[used:], done + len(text)
        yield text
        if progress is not None:
            progress(done, read)


def _checked(packed: IO[bytes], source: Path | str) -> tuple[Header, int, int]:
    """The header, and where the coded text begins and ends; refuses what is not whole."""
    size = os.fstat(packed.fileno()).st_size
    opening = packed.read(len(MAGIC) + 1)
    if opening[: len(MAGIC)] != MAGIC:
        raise UserError(
            f"{source} is not a file that elman compressed", hint="elman compress FILE makes one"
        )
    if opening[len(MAGIC) :] not in (b"", bytes([VERSION])):
        raise UserError(
            f"{source} is of version {opening[-1]}, or damaged; this elman reads {VERSION}",
            hint="a newer elman may read it",
        )
    end = size - 2 * DIGEST
    packed.seek(0)
    if end < 0 or _digest(packed, size - DIGEST) != packed.read(DIGEST):
        raise _damaged(source)
    packed.seek(len(opening))
    flags, *numbers = packed.read(9)
    length, count = 0, 0
    while (byte := packed.read(1)) and byte[0] & 128:
        length |= (byte[0] & 127) << 7 * count
        count += 1
    length |= (byte[0] if byte else 0) << 7 * count
    run = packed.read(NAMED) if flags & WITH_RUN else b""
    if flags > WITH_RUN or packed.tell() > end or len(numbers) != 8:
        raise _damaged(source)
    contexts, bits, sixteens, window, lanes, *rates = numbers
    options = Options(length, contexts, bits, 16 * sixteens, window, lanes, *rates)
    return Header(options, run), packed.tell(), end


def _digest(packed: IO[bytes], size: int) -> bytes:
    digest = hashlib.sha256()
    while size > 0 and (piece := packed.read(min(size, 1 << 20))):
        digest.update(piece)
        size -= len(piece)
    return digest.digest()[:DIGEST]


def _damaged(source: Path | str) -> UserError:
    return UserError(
        f"{source} is damaged or not whole: it does not match its checksum",
        hint="copy it again from where it came from",
    )


def _network(header: Header, run: Path | str | None, source: Path | str) -> Weights | None:
    """The weights that the file starts from, asked for by their fingerprint."""
    if not header.run:
        if run is not None:
            raise UserError(f"{source} starts from no run", hint="leave out --run")
        return None
    if run is None:
        raise UserError(
            f"{source} starts from a trained run, whose fingerprint is {header.run.hex()}",
            hint="name that run with --run",
        )
    weights, _ = network_of(run)
    if fingerprint(weights) != header.run:
        raise UserError(
            f"{run} is not the run that {source} starts from: its fingerprint is "
            f"{fingerprint(weights).hex()}, not {header.run.hex()}",
            hint="the run may have been trained further since; use the one it was made with",
        )
    return weights


def _check_room(options: Options) -> None:
    """Refuse what memory cannot hold: tables, the network four times, the ring of the past."""
    tables = 8 * options.contexts << options.table_bits
    check_memory(
        tables + 16 * options.weights + (100 << 20),
        f"{options.contexts} tables of 2^{options.table_bits} slots and {options.hidden} units",
        "a lower --level",
    )


def _opened(source: Path | str) -> IO[bytes]:
    """The file, to be read; of a size that it says itself."""
    try:
        if Path(source).is_dir():
            raise UserError(f"{source} is a folder", hint="name a file; tar makes one of a folder")
        file = open(source, "rb")  # noqa: SIM115, whoever asked closes it
        return file if os.fstat(file.fileno()).st_size else _whole(file, source)
    except FileNotFoundError as missing:
        raise MissingSource(f"there is no file {source}", hint="check its name") from missing
    except UserError:
        raise
    except (OSError, ValueError) as problem:
        raise UserError(f"cannot read {source}: {problem}", hint="check its permissions") from None


def _whole(file: IO[bytes], source: Path | str) -> IO[bytes]:
    """What has no size before it is read, kept: a pipe, a file of /proc; or it is empty."""
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        file.close()
        raise UserError(f"{source} is a device, which has no end", hint="name a file")
    kept = tempfile.TemporaryFile()  # noqa: SIM115, whoever opened the source closes it
    with file:
        shutil.copyfileobj(file, kept)
    kept.seek(0)
    return kept


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first.

    >>> _varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])
