"""What a level is: how a text falls into tokens, and how tokens become text again."""

import abc
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError

Token = str | int
"""A character, a word or a subword is a `str`; a byte is its value, 0 to 255."""

Ids = NDArray[np.unsignedinteger[Any]]

CHUNK = 1 << 16  # characters worked on at once: small enough for the cache, large enough for NumPy


class Level(abc.ABC):
    """One way to cut a text into tokens."""

    name: str
    units: str  # what people call its tokens
    unit: str  # one of them, for a column's head
    tokens_are: str  # what its tokens are, for a refusal
    min_freq: int = 0  # how often a token occurs, unless asked otherwise, to have an id
    counting_orders: tuple[int, ...] = (2, 3)  # of n-grams, near their best and cheap
    reads_bytes: bool = False  # any file, without decoding it
    cut_anywhere: bool = False  # a text in two parts has the tokens of both, wherever it is cut
    vocab_size: int = 0  # how many tokens a vocabulary has, unless asked otherwise; 0: all

    @abc.abstractmethod
    def tokens(self, text: str | bytes) -> list[Any]:
        """Every token of a text, one Python object each."""

    @abc.abstractmethod
    def fits(self, token: Any) -> bool:
        """Whether this can be a token of this level."""

    def between(self, left: Any, right: Any) -> str:
        """The text between two tokens that is not a token itself."""
        return ""

    def stream(self, tokens: Iterable[Any], before: Any = None) -> Iterator[str]:
        """The text of tokens that follow on the token `before`, a piece at a time."""
        for token in tokens:
            yield token if before is None else self.between(before, token) + token
            before = token

    def join(self, tokens: Sequence[Any]) -> str:
        """The text that the tokens stand for."""
        return "".join(self.stream(tokens))

    @abc.abstractmethod
    def cut(self, text: str | bytes) -> Any:
        """The text as a sequence that can be sliced between any two tokens, without an object each.

        What the methods below take as `cut`.
        """

    @abc.abstractmethod
    def count(self, cut: Any) -> dict[Any, int]:
        """How often each token occurs, in the order of first appearance."""

    @abc.abstractmethod
    def encode(self, cut: Any, ids: Mapping[Any, int], dtype: np.dtype[Any]) -> Ids:
        """The id of each token; 0, `<unk>`, for those that have none."""

    @abc.abstractmethod
    def decode(self, ids: NDArray[Any], tokens: Sequence[Any]) -> str:
        """The text of ids, of which each is an index into `tokens`."""

    @abc.abstractmethod
    def characters(self, cut: Any, before: Any = None) -> int:
        """How many characters of text the tokens stand for, following on the cut text `before`."""

    def tail(self, cut: Any, before: Any = None) -> Any:
        """What `characters` must know of a cut text, and of that before it, for what follows."""
        return cut[len(cut) - 1 :] if len(cut) else before

    def lengths(self, tokens: Sequence[Any]) -> NDArray[np.int64] | None:
        """How many characters of text each token stands for; None: that depends on others."""
        return None

    def ends_lines(self, tokens: Sequence[Any]) -> NDArray[np.bool_]:
        """Which of these tokens end a line."""
        return np.array([token == self.line_end for token in tokens], bool)

    def check_library(self) -> None:
        """Refuse a level that needs a library which is not installed; most need none."""
        return

    def learned(
        self, text: "str | bytes | Sequence[str]", vocab_size: int = 0, tokenizer: str = ""
    ) -> "Level":
        """The level as it will cut texts like this one; most have nothing to learn.

        `vocab_size` and `tokenizer` are for those that have (`bpe`).
        """
        if tokenizer:
            raise UserError(
                f"tokenizer={tokenizer!r} is for level bpe, not {self.name}",
                hint="level=bpe, or leave the tokenizer out",
            )
        return self

    def covers(self, cut: Any, text: "str | bytes") -> bool:
        """Whether the cut text reaches as far as `text`, from which the level has learned."""
        return True

    def record(self) -> dict[str, Any]:
        """What it has learned, fit for JSON."""
        return {}

    def restored(self, record: Mapping[str, Any]) -> "Level":
        """The level that has learned what `record` gave."""
        return self

    @property
    def line_end(self) -> Any:
        """The token of a line end, where there is one."""
        return "\n"

    def decode_bytes(self, ids: NDArray[Any]) -> bytes:
        """The bytes that ids stand for, where tokens are made of bytes."""
        raise UserError(
            f"a {self.name} vocabulary has no bytes", hint='use decode(ids).encode("utf-8")'
        )

    def code(self, token: Any) -> bytes | None:
        """The bytes of a token, where no token's begin another's; None: they may."""
        del token
        return None

    def open_end(self, text: str) -> str:
        """A text that is to be continued, without the space that its continuation brings along."""
        return text

    def text_of_lines(self, lines: Sequence[str]) -> str:
        """The notes' lines, which have no line ends, as one text: joined with nothing between."""
        return "".join(lines)

    def assign(
        self, special: tuple[str, ...], frequent: Iterable[Any], most: int | None = None
    ) -> tuple[Any, ...]:
        """The tokens of a vocabulary in the order of their ids, at most so many."""
        others = (token for token in frequent if token not in special)
        return tuple(islice((*special, *others), most))

    def whole(self, text: "str | bytes | Sequence[str]") -> str | bytes:
        """A text, or a list of its lines, as one text; anything else is refused."""
        if isinstance(text, str | bytes):
            return text
        if isinstance(text, list | tuple) and all(isinstance(line, str) for line in text):
            return self.text_of_lines(text)
        raise UserError(
            f"a text is a str, or a list of lines, not {_described(text)}",
            hint="Vocab takes lists of tokens; Vocab.encode takes those, too",
        )

    def is_line(self, item: Any) -> bool:
        """Whether a member of a list looks like a line of text, not like a token."""
        return isinstance(item, str) and self.tokens(item) != [item]

    def is_content(self, token: Any) -> bool:
        """Whether statistics of a text count this token: not what merely stands between words."""
        return True

    def read_list(self, tokens: Sequence[Any], ids: Mapping[Any, int], dtype: Any) -> Ids:
        """The ids of a list of tokens."""
        if others := [token for token in tokens if not isinstance(token, str)]:
            raise UserError(
                f"{reprlib.repr(others[0])} is not a token of level {self.name!r}, whose tokens "
                f"are {self.tokens_are}",
                hint="to_tokens takes ids; encode takes text, or lists of tokens",
            )
        return look_up(tokens, ids, dtype)

    @property
    def unknown(self) -> int | None:
        """The id of tokens that a vocabulary lacks, where that can happen."""
        return 0


def as_bytes(text: str | bytes) -> bytes:
    """UTF-8, in which a lone surrogate (no text, but possible in a `str`) keeps its three bytes."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def as_text(text: str | bytes, units: str) -> str:
    """Refuse bytes where characters or words are wanted."""
    if isinstance(text, bytes):
        raise UserError(
            f"bytes have no {units} until they are decoded",
            hint='bytes.decode gives their text; level="byte" takes them as they are',
        )
    return text


def code_point_chunks(text: str) -> Iterator[NDArray[np.uint32]]:
    """The Unicode code points of `text`, lone surrogates included, a stretch at a time."""
    for start in range(0, len(text), CHUNK):
        piece = text[start : start + CHUNK].encode("utf-32-le", "surrogatepass")
        yield np.frombuffer(piece, dtype="<u4")


def byte_chunks(text: str | bytes) -> Iterator[NDArray[np.uint8]]:
    """The bytes of `text`, or of its UTF-8, a stretch at a time."""
    for start in range(0, len(text), CHUNK):
        yield np.frombuffer(as_bytes(text[start : start + CHUNK]), dtype=np.uint8)


def _described(value: Any) -> str:
    kind = type(value).__name__
    first = type(value[0]).__name__ if isinstance(value, list | tuple) and value else ""
    return f"a {kind} of {first}" if first else f"a {kind}"


def look_up(tokens: Sequence[Any], ids: Mapping[Any, int], dtype: Any) -> Ids:
    """The id of each token, 0 for those that have none."""
    return np.fromiter(map(ids.get, tokens, repeat(0)), dtype, len(tokens))


def tally(chunks: Iterable[NDArray[Any]]) -> dict[int, int]:
    """Count small integers, keeping the order in which they were first seen."""
    # Every Unicode code point; pages never touched are free.
    counts = np.zeros(0x110000, dtype=np.int64)
    seen: list[int] = []
    for codes in chunks:
        here = np.bincount(codes)
        if np.any((here > 0) & (counts[: len(here)] == 0)):
            values, first = np.unique(codes, return_index=True)
            seen += [int(c) for c in values[np.argsort(first)] if counts[c] == 0]
        counts[: len(here)] += here
    return {code: int(counts[code]) for code in seen}
