"""Level `byte`: a token is a byte, of any file."""

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from elman.errors import OutOfRange
from elman.text.levels.base import Ids, Level, as_bytes, byte_chunks, tally

LONGEST = 3
"""Bytes of a character that another is still missing from."""


@final
class Bytes(Level):
    """The bytes of a text's UTF-8, or of any file; an id is the byte's value.

    There are always 256 ids and nothing is ever unknown, so there is no `<unk>`.
    """

    name = "byte"
    units, unit = "bytes", "byte"
    tokens_are = "integers from 0 to 255"
    counting_orders = (5, 7)
    reads_bytes = True

    def tokens(self, text: str | bytes) -> list[Any]:
        return list(as_bytes(text))

    def fits(self, token: Any) -> bool:
        return isinstance(token, int) and 0 <= token < 256

    def stream(self, tokens: Iterable[Any], before: Any = None) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            yield decoder.decode(bytes([token]))  # nothing, until a character is complete
        yield decoder.decode(b"", final=True)

    def cut(self, text: str | bytes) -> bytes:
        return as_bytes(text)

    def count(self, cut: bytes) -> dict[Any, int]:
        return tally(byte_chunks(cut))

    def encode(self, cut: bytes, ids: Mapping[Any, int], dtype: np.dtype[Any]) -> Ids:
        return np.frombuffer(cut, np.uint8).copy()

    def decode(self, ids: NDArray[Any], tokens: Sequence[Any]) -> str:
        return ids.astype(np.uint8).tobytes().decode("utf-8", "replace")

    def characters(self, cut: bytes, before: Any = None) -> int:
        """Those that begin here: one that `before` ends inside of was counted there."""
        begun = _begun(before or b"")
        return _count(begun + cut) - _count(begun)

    def tail(self, cut: bytes, before: Any = None) -> bytes:
        return ((before or b"") + cut[-LONGEST:])[-LONGEST:]

    def lengths(self, tokens: Sequence[Any]) -> NDArray[np.int64]:
        return np.array([token & 0xC0 != 0x80 for token in tokens], np.int64)  # where one begins

    def assign(
        self, special: tuple[str, ...], frequent: Iterable[Any], most: int | None = None
    ) -> tuple[Any, ...]:
        return tuple(range(256))

    def decode_bytes(self, ids: NDArray[Any]) -> bytes:
        return ids.astype(np.uint8).tobytes()

    def code(self, token: Any) -> bytes:
        return bytes([token])

    @property
    def line_end(self) -> Any:
        return ord("\n")

    def read_list(self, tokens: Sequence[Any], ids: Mapping[Any, int], dtype: Any) -> Ids:
        for token in tokens:
            if token not in ids:
                raise OutOfRange(
                    f"{token!r} is not a byte", hint="a byte is an integer from 0 to 255"
                )
        return np.array(tokens, dtype=np.uint8)

    @property
    def unknown(self) -> int | None:
        return None


def _count(text: bytes) -> int:
    return len(text.decode("utf-8", "replace"))


def _begun(text: bytes) -> bytes:
    """What is decoded anew after the last byte that can only be a character's first."""
    for start in reversed(range(max(0, len(text) - LONGEST), len(text))):
        if text[start] >= 0xC0:
            return text[start:]
    return b""
