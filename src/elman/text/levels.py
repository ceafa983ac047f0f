"""The levels at which a text is read: characters, words, bytes; `LEVELS` is the one table of them.

A level says how a text falls into tokens, how tokens become text again, and what a vocabulary of
them looks like. To add one, write a class and add a line to the table: `tokenize`, `Vocab`, every
command and every score then know it.

    char     each Unicode code point                                          exact
    word     words, and what stands between them                              exact
    spaced   what stands between white space, which is how the notes cut      up to white space
    byte     each byte of the UTF-8, or of any file                           exact

A word is letters, digits and underscores, with single apostrophes inside. Between two words a
single space goes without saying; anything else is a token of its own: a line end, a run of other
white space, a punctuation mark (or the same one several times) with the spaces beside it.

    "Well, it's 9 o'clock.\\n"   →   "Well" ", " "it's" "9" "o'clock" "." "\\n"

So words keep one spelling wherever they stand, and the tokens say exactly which text they are.
"""

import abc
import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from elman.errors import OutOfRange, UserError

Token = str | int
"""A character or a word is a `str`; a byte is its value, 0 to 255."""

Ids = NDArray[np.unsignedinteger[Any]]

_CHUNK = 1 << 16  # characters worked on at once: small enough for the cache, large enough for NumPy

_WORD = r"\w+(?:['’]\w+)*"
_GAP = r"\n| ?([^\w\s])\2* ?|[^\S\n]+"
_TOKEN = re.compile(rf"(?:(?<=\w) (?=\w))?({_WORD}|{_GAP})")
_WORD_CHARACTER = re.compile(r"\w")
_WHITE_SPACE = re.compile(r"\s")  # the same characters that `str.split` splits at
_LAST_SPACE = re.compile(r"(?<=\w) \Z")
_BETWEEN_TOKENS = re.compile(r"(?<=\n)|(?<=\w) (?=\w)")


class Level(abc.ABC):
    """One way to cut a text into tokens."""

    name: str
    units: str  # what people call its tokens
    unit: str  # one of them, for a column's head
    tokens_are: str  # what its tokens are, for a refusal
    min_freq: int = 0  # how often a token occurs, unless asked otherwise, to have an id
    counting_orders: tuple[int, ...] = (2, 3)  # of n-grams, near their best and cheap
    reads_bytes: bool = False  # any file, without decoding it

    @abc.abstractmethod
    def tokens(self, text: str | bytes) -> list[Any]:
        """Every token of a text, one Python object each."""

    @abc.abstractmethod
    def fits(self, token: Any) -> bool:
        """Whether this can be a token of this level."""

    def between(self, left: Any, right: Any) -> str:
        """The text that goes without saying between two tokens."""
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

    def open_end(self, text: str) -> str:
        """A text that is to be continued, without the space that its continuation brings along."""
        return text

    def text_of_lines(self, lines: Sequence[str]) -> str:
        """The notes' lines, which have no line ends, as one text: joined with nothing between."""
        return "".join(lines)

    def assign(self, special: tuple[str, ...], frequent: Iterable[Any]) -> tuple[Any, ...]:
        """The tokens of a vocabulary in the order of their ids."""
        return (*special, *(token for token in frequent if token not in special))

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
        """Whether a member of a list is rather a line of text than a token."""
        return isinstance(item, str) and self.tokens(item) != [item]

    def is_content(self, token: Any) -> bool:
        """Whether statistics of a text count this token: not what merely stands between words."""
        return True

    def read_list(self, tokens: Sequence[Any], ids: Mapping[Any, int], dtype: Any) -> Ids:
        """The ids of a list of tokens."""
        return _look_up(tokens, ids, dtype)

    @property
    def unknown(self) -> int | None:
        """The id of tokens that a vocabulary lacks, where that can happen."""
        return 0


@final
class Characters(Level):
    """Unicode code points, lone surrogates included."""

    name = "char"
    units, unit = "characters", "char"
    tokens_are = "single characters"
    counting_orders = (5, 7)

    def tokens(self, text: str | bytes) -> list[Any]:
        return list(as_text(text, self.units))

    def fits(self, token: Any) -> bool:
        return isinstance(token, str) and len(token) == 1

    def cut(self, text: str | bytes) -> str:
        return as_text(text, self.units)

    def count(self, cut: str) -> dict[Any, int]:
        return {chr(code): n for code, n in _tally(code_point_chunks(cut)).items()}

    def encode(self, cut: str, ids: Mapping[Any, int], dtype: np.dtype[Any]) -> Ids:
        known = {ord(token): i for token, i in ids.items() if len(token) == 1}
        table = np.zeros(max(known, default=0) + 2, dtype)
        table[list(known)] = list(known.values())
        result = np.empty(len(cut), dtype)
        done = 0
        for codes in code_point_chunks(cut):
            # clip: every code point above the table's end falls on its last entry, <unk>
            np.take(table, codes, mode="clip", out=result[done : done + len(codes)])
            done += len(codes)
        return result

    def decode(self, ids: NDArray[Any], tokens: Sequence[Any]) -> str:
        codes = np.array([ord(t) if len(t) == 1 else 0x110000 for t in tokens], "<u4")[ids]
        if (codes == 0x110000).any():  # <unk> and its kind are longer than one character
            return "".join(map(tokens.__getitem__, ids.tolist()))
        return codes.tobytes().decode("utf-32-le", "surrogatepass")

    def characters(self, cut: str, before: Any = None) -> int:
        return len(cut)


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
        return _tally(byte_chunks(cut))

    def encode(self, cut: bytes, ids: Mapping[Any, int], dtype: np.dtype[Any]) -> Ids:
        return np.frombuffer(cut, np.uint8).copy()

    def decode(self, ids: NDArray[Any], tokens: Sequence[Any]) -> str:
        return ids.astype(np.uint8).tobytes().decode("utf-8", "replace")

    def characters(self, cut: bytes, before: Any = None) -> int:
        return len(cut.decode("utf-8", "replace"))

    def assign(self, special: tuple[str, ...], frequent: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(range(256))

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


class ManyTokens(Level):
    """What levels have in common whose tokens are too many for a table of all there can be."""

    units, unit = "words", "word"

    @abc.abstractmethod
    def chunks(self, text: str) -> Iterator[list[str]]:
        """The tokens of a text, a stretch at a time."""

    @abc.abstractmethod
    def spaces(self, cut: "Numbered", before: "Numbered | None") -> int:
        """How many of the spaces before these tokens go without saying."""

    def tokens(self, text: str | bytes) -> list[Any]:
        return [token for chunk in self.chunks(as_text(text, self.units)) for token in chunk]

    def cut(self, text: str | bytes) -> "Numbered":
        seen = _FirstSeen()
        chunks = self.chunks(as_text(text, self.units))
        pieces = [np.fromiter(map(seen.__getitem__, chunk), np.uint32) for chunk in chunks]
        return Numbered(list(seen), np.concatenate([np.empty(0, np.uint32), *pieces]))

    def count(self, cut: "Numbered") -> dict[Any, int]:
        # Numbers are given in order of appearance: what a front part lacks comes after its last.
        return {t: n for t, n in zip(cut.words, np.bincount(cut.order).tolist(), strict=False) if n}

    def encode(self, cut: "Numbered", ids: Mapping[Any, int], dtype: np.dtype[Any]) -> Ids:
        return _look_up(cut.words, ids, dtype)[cut.order]

    def decode(self, ids: NDArray[Any], tokens: Sequence[Any]) -> str:
        return self.join([tokens[i] for i in ids.tolist()])

    def characters(self, cut: "Numbered", before: "Numbered | None" = None) -> int:
        lengths = np.fromiter(map(len, cut.words), np.int64, len(cut.words))
        return int(lengths[cut.order].sum()) + self.spaces(cut, before)

    def text_of_lines(self, lines: Sequence[str]) -> str:
        return " ".join(filter(None, lines))


@final
class Words(ManyTokens):
    """Words and what stands between them: every character of the text is in some token."""

    name = "word"
    tokens_are = "strings"
    min_freq = 2  # else no model ever meets <unk> before the held-out text does

    def chunks(self, text: str) -> Iterator[list[str]]:
        for stretch in _stretches(text, _BETWEEN_TOKENS):
            yield [token for token, _ in _TOKEN.findall(stretch)]

    def fits(self, token: Any) -> bool:
        return isinstance(token, str)

    def between(self, left: Any, right: Any) -> str:
        return " " if _is_word(left) and _is_word(right) else ""

    def is_content(self, token: Any) -> bool:
        return _is_word(token)

    def open_end(self, text: str) -> str:
        return _LAST_SPACE.sub("", text)

    def spaces(self, cut: "Numbered", before: "Numbered | None") -> int:
        word = np.fromiter(map(_is_word, cut.words), bool, len(cut.words))[cut.order]
        first = bool(
            before is not None and len(before) and _is_word(before.words[before.order[-1]])
        )
        return int((word[1:] & word[:-1]).sum()) + (first and bool(word[:1].any()))


@final
class SpacedWords(ManyTokens):
    """What stands between white space, punctuation and all: the notes' `line.split()`."""

    name = "spaced"
    tokens_are = "strings"

    def chunks(self, text: str) -> Iterator[list[str]]:
        for stretch in _stretches(text, _WHITE_SPACE):
            yield stretch.split()

    def fits(self, token: Any) -> bool:
        return isinstance(token, str)

    def between(self, left: Any, right: Any) -> str:
        return " "

    def spaces(self, cut: "Numbered", before: "Numbered | None") -> int:
        return len(cut)  # one before each: how much white space there was is not predicted


@final
class Numbered:
    """Tokens as numbers: the distinct ones, in order of appearance, and which each token is.

    >>> cut = LEVELS["word"].cut("to be or not to be")
    >>> cut.words, cut.order.tolist(), cut[1:3].order.tolist()
    (['to', 'be', 'or', 'not'], [0, 1, 2, 3, 0, 1], [1, 2])
    """

    def __init__(self, words: list[str], order: NDArray[np.uint32]) -> None:
        self.words, self.order = words, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, part: slice) -> "Numbered":
        return Numbered(self.words, self.order[part])


class _FirstSeen(dict[str, int]):
    """Numbers words in the order in which they are first asked for."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


LEVELS: dict[str, Level] = {
    level.name: level for level in (Characters(), Words(), SpacedWords(), Bytes())
}


def level_of(name: str) -> Level:
    """The level of that name; an unknown one is refused and the known ones listed."""
    if name not in LEVELS:
        raise UserError(f"unknown level {name!r}", hint=f"levels are {', '.join(LEVELS)}")
    return LEVELS[name]


def inferred(tokens: Iterable[Any]) -> Level:
    """The level of tokens that come without a text.

    Integers are bytes, single characters are characters, strings of which some have white space in
    them are words and what stands between, any others the notes' words.
    """
    kinds = list(tokens)
    if kinds and all(isinstance(token, int) for token in kinds):
        return LEVELS["byte"]
    if all(LEVELS["char"].fits(token) for token in kinds):
        return LEVELS["char"]
    gaps = any(isinstance(token, str) and _WHITE_SPACE.search(token) for token in kinds)
    return LEVELS["word" if gaps else "spaced"]


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
    for start in range(0, len(text), _CHUNK):
        piece = text[start : start + _CHUNK].encode("utf-32-le", "surrogatepass")
        yield np.frombuffer(piece, dtype="<u4")


def byte_chunks(text: str | bytes) -> Iterator[NDArray[np.uint8]]:
    """The bytes of `text`, or of its UTF-8, a stretch at a time."""
    for start in range(0, len(text), _CHUNK):
        yield np.frombuffer(as_bytes(text[start : start + _CHUNK]), dtype=np.uint8)


def _described(value: Any) -> str:
    kind = type(value).__name__
    first = type(value[0]).__name__ if isinstance(value, list | tuple) and value else ""
    return f"a {kind} of {first}" if first else f"a {kind}"


def _stretches(text: str, gap: re.Pattern[str]) -> Iterator[str]:
    """The text in pieces, cut where `gap` matches; what it matches itself is in none of them."""
    start = 0
    while start < len(text):
        match = gap.search(text, start + _CHUNK)
        yield text[start : match.start() if match else None]
        start = match.end() if match else len(text)


def _is_word(token: str) -> bool:
    """Whether a space between this token and a word goes without saying; so for `<unk>`, too."""
    return _WORD_CHARACTER.search(token) is not None


def _look_up(tokens: Sequence[Any], ids: Mapping[Any, int], dtype: Any) -> Ids:
    return np.fromiter(map(ids.get, tokens, repeat(0)), dtype, len(tokens))


def _tally(chunks: Iterable[NDArray[Any]]) -> dict[int, int]:
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
