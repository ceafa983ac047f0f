"""The levels at which a text is read: characters, words, bytes; `LEVELS` is the one table of them.

A level says how a text falls into tokens, how tokens become text again, and what a vocabulary of
them looks like. To add one, write a class and add a line to the table: `tokenize`, `Vocab`, every
command and every score then know it.

    char     each Unicode code point                                          exact
    word     words, and what stands between them                              exact
    spaced   what stands between white space, which is how the notes cut      up to white space
    byte     each byte of the UTF-8, or of any file                           exact
    bpe      subwords, by a tokenizer that is learned or given                exact
"""

from collections.abc import Iterable
from typing import Any

from elman.errors import UserError
from elman.text.levels.base import Ids, Level, Token, as_bytes, byte_chunks
from elman.text.levels.bpe import Subwords
from elman.text.levels.byte import Bytes
from elman.text.levels.characters import Characters
from elman.text.levels.words import WHITE_SPACE, Numbered, SpacedWords, Words

__all__ = [
    "LEVELS",
    "Ids",
    "Level",
    "Numbered",
    "Subwords",
    "Token",
    "as_bytes",
    "byte_chunks",
    "inferred",
    "level_of",
]

LEVELS: dict[str, Level] = {
    level.name: level for level in (Characters(), Words(), SpacedWords(), Bytes(), Subwords())
}


def level_of(name: str | Level) -> Level:
    """The level of that name; an unknown one is refused and the known ones listed."""
    if isinstance(name, Level):
        return name
    if not isinstance(name, str) or name not in LEVELS:
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
    gaps = any(isinstance(token, str) and WHITE_SPACE.search(token) for token in kinds)
    return LEVELS["word" if gaps else "spaced"]
