"""Levels `word` and `spaced`: a token is a word, or what stands between words.

A word is letters, digits and underscores, with single apostrophes inside. Between two words a
single space goes without saying; anything else is a token of its own: a line end, a run of other
white space, a punctuation mark (or the same one several times) with the spaces beside it.

    "Well, it's 9 o'clock.\\n"   →   "Well" ", " "it's" "9" "o'clock" "." "\\n"

So words keep one spelling wherever they stand, and the tokens say exactly which text they are.
"""

import abc
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from elman.text.levels import base
from elman.text.levels.base import Ids, Level, as_text, look_up

_WORD = r"\w+(?:['’]\w+)*"
_GAP = r"\n| ?([^\w\s])\2* ?|[^\S\n]+"
_TOKEN = re.compile(rf"(?:(?<=\w) (?=\w))?({_WORD}|{_GAP})")
_WORD_CHARACTER = re.compile(r"\w")
WHITE_SPACE = re.compile(r"\s")  # the same characters that `str.split` splits at
_LAST_SPACE = re.compile(r"(?<=\w) \Z")
_BETWEEN_TOKENS = re.compile(r"(?<=\n)|(?<=\w) (?=\w)")


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
        return look_up(cut.words, ids, dtype)[cut.order]

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
        for stretch in _stretches(text, WHITE_SPACE):
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

    >>> cut = Words().cut("to be or not to be")
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


def _stretches(text: str, gap: re.Pattern[str]) -> Iterator[str]:
    """The text in pieces, cut where `gap` matches; what it matches itself is in none of them."""
    start = 0
    while start < len(text):
        match = gap.search(text, start + base.CHUNK)
        yield text[start : match.start() if match else None]
        start = match.end() if match else len(text)


def _is_word(token: str) -> bool:
    """Whether a space between this token and a word goes without saying; so for `<unk>`, too."""
    return _WORD_CHARACTER.search(token) is not None
