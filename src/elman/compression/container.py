"""The compressed file: what is needed to decode it, the coded text, and two checksums.

    magic 4 | version 1 | flags 1 | length, 7 bits a byte | options 8 | fingerprint of a run, 16
    the coded text
    8 bytes of the text's SHA-256 | 8 bytes of the SHA-256 of all that stands before them

A text that no model makes shorter is stored as it is, without options.
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

from elman.compression.library import Weights, check_room, coder
from elman.compression.options import DEFAULT, Options, level_named
from elman.compression.pretrained import fingerprint, network_of
from elman.errors import MissingSource, UserError
from elman.files import as_path, atomic, check_target

MAGIC, VERSION = b"\x8aELM", 2
DIGEST, NAMED = 8, 16
WITH_RUN, PRIMED, STORED = 1, 2, 4
PIECE = 1 << 12
"""Bytes of text between two reports of progress."""
MOST_TEXT = 1 << 24
"""Bytes of text in a coded byte, at most. No bit has odds better than 2^24 - 1 to 1 (coder.h), so
each costs log2(e) / 2^24 coded bits or more, a byte of text eight times that; and the 64 bits of
the coder's interval hold as much as eight coded bytes."""
TRAINED_RATES = {"rate_units": 20, "last_rate_units": 10}
"""A trained network is adapted more gently than a fresh one is taught, and not primed: the page
would teach it another language than its own."""

Progress = Callable[[int, int], None]
"""Called with the bytes of text done so far and the bytes of the compressed file so far."""


@dataclass(frozen=True)
class Header:
    """All that stands before the coded text."""

    length: int
    options: Options | None  # None: the text is stored as it is
    run: bytes = b""  # the fingerprint of the network it starts from

    def bytes(self) -> bytes:
        """As it stands in the file."""
        start, o = MAGIC + bytes([VERSION]), self.options
        if o is None:
            return start + bytes([STORED]) + _varint(self.length)
        flags = (WITH_RUN if self.run else 0) | (PRIMED if o.primed else 0)
        numbers = (o.contexts, o.table_bits, o.hidden // 16, o.window, o.lanes)
        rates = (o.rate_units, o.last_rate_units, o.mixing_units)
        return start + bytes([flags]) + _varint(self.length) + bytes([*numbers, *rates]) + self.run


@dataclass(frozen=True)
class Packed:
    """What came of a compression."""

    original: int
    compressed: int
    with_run: bool = False  # whether the run that it started from is needed to decode it

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
            options = replace(options, hidden=trained[1], primed=False, **TRAINED_RATES)
        weights = None if trained is None else trained[0]
        header = Header(length, options, b"" if weights is None else fingerprint(weights))
        check_room(options)
        with atomic(target) as draft, open(draft, "wb") as out:
            size = _write(text, out, header, weights, progress)
            as_it_is = Header(length, None)
            if size > len(as_it_is.bytes()) + length + 2 * DIGEST:
                text.seek(0)
                out.seek(0)
                out.truncate()
                header, size = as_it_is, _write(text, out, as_it_is, None, None)
    return Packed(length, size, bool(header.run))


def _write(
    text: IO[bytes],
    out: IO[bytes],
    header: Header,
    weights: Weights | None,
    progress: Progress | None,
) -> int:
    content, whole = hashlib.sha256(), hashlib.sha256()
    done, written, length = 0, 0, header.length

    def put(data: bytes) -> None:
        nonlocal written
        whole.update(data)
        written += out.write(data)

    put(header.bytes())
    engine = coder(header.options, weights) if header.options and length else None
    while done < length:
        piece = text.read(min(PIECE, length - done))
        if not piece:
            raise UserError("the file became shorter while it was read", hint="compress it again")
        content.update(piece)
        done += len(piece)
        put(piece if engine is None else engine.encode(piece, done == length))
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
        if header.options is not None:
            check_room(header.options)
        packed.seek(end)
        expected = packed.read(DIGEST)
        packed.seek(start)
        with atomic(target) as draft, open(draft, "wb") as out:
            content = hashlib.sha256()
            for piece in _decoded(packed, source, header, weights, end - start, progress):
                content.update(piece)
                out.write(piece)
            if content.digest()[:DIGEST] != expected:
                raise UserError(
                    f"{source} does not decode to what it was made from",
                    hint="it was made by an elman whose arithmetic differs; please report this",
                )
    return Packed(header.length, end + 2 * DIGEST, bool(header.run))


def _decoded(
    packed: IO[bytes],
    source: Path | str,
    header: Header,
    weights: Weights | None,
    size: int,
    progress: Progress | None,
) -> Iterator[bytes]:
    """The text, piece by piece."""
    length, waiting, read, done = header.length, b"", 0, 0
    engine = coder(header.options, weights) if header.options and length else None
    while done < length:
        if len(waiting) < PIECE:
            more = packed.read(min(PIECE, size - read))
            if not more and read < size:
                raise UserError(
                    f"{source} became shorter while it was read", hint="decompress it again"
                )
            waiting, read = waiting + more, read + len(more)
        room = min(PIECE, length - done)
        if engine is None:
            text, used = waiting[:room], room
        else:
            text, used = engine.decode(waiting, room, read == size)
            if read == size and len(text) < room:
                raise _too_short(source, length, f"that ends after {done + len(text):,} bytes")
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
            hint="the elman that made it reads it",
        )
    end = size - 2 * DIGEST
    packed.seek(0)
    if end < 0 or _digest(packed, size - DIGEST) != packed.read(DIGEST):
        raise _damaged(source)
    packed.seek(len(opening))
    header = _header(packed, end)
    start = packed.tell()
    if header is None or (header.options is None and end - start != header.length):
        raise _damaged(source)
    if header.length > MOST_TEXT * (end - start + 8):
        raise _too_short(
            source, header.length, f"of {end - start:,} bytes, which hold no such text"
        )
    return header, start, end


def _header(packed: IO[bytes], end: int) -> Header | None:
    """What stands after the version; None where it makes no sense, or goes beyond `end`."""
    flags = packed.read(1)[0]
    length, count = 0, 0
    while (byte := packed.read(1)) and byte[0] & 128 and count < 9:
        length |= (byte[0] & 127) << 7 * count
        count += 1
    length |= (byte[0] if byte else 0) << 7 * count
    if flags == STORED and packed.tell() <= end:
        return Header(length, None)
    numbers = packed.read(8)
    run = packed.read(NAMED) if flags & WITH_RUN else b""
    if flags > WITH_RUN | PRIMED or packed.tell() > end:
        return None
    contexts, bits, sixteens, window, lanes, *rates = numbers
    options = Options(
        *(length, contexts, bits, 16 * sixteens, window, lanes, *rates),
        primed=bool(flags & PRIMED),
    )
    return Header(length, options, run)


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


def _too_short(source: Path | str, length: int, why: str) -> UserError:
    return UserError(
        f"{source} is damaged: it names a text of {length:,} bytes and has a code {why}",
        hint="copy it again from where it came from",
    )


def _network(header: Header, run: Path | str | None, source: Path | str) -> Weights | None:
    """The weights that the file starts from, asked for by their fingerprint.

    A text that is stored as it is may have been compressed with any run, and none made it shorter.
    """
    if header.options is None:
        return None
    if not header.run:
        if run is not None:
            raise UserError(f"{source} does not start from a run", hint="leave out --run")
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


def _opened(source: Path | str) -> IO[bytes]:
    """The file, to be read; of a size that it says itself."""
    try:
        if as_path(source).is_dir():
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
