"""From text to tokens, at any level: the notes' lists, and counting without them.

`tokenize` gives one Python object per token, which is what one wants to look at; `count` gives the
frequencies in a long text without those objects. `levels/` has the levels themselves.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from elman.errors import UserError
from elman.text.levels import LEVELS, Token, level_of

__all__ = ["LEVELS", "Token", "count", "tokenize"]


def tokenize(lines: Iterable[str | bytes], level: str = "word") -> list[list[Any]]:
    """Cut each line into words, characters or the bytes of its UTF-8.

    Of lines of letters, the notes' words are `line.split()`, and so are these; `"spaced"` cuts any
    other line that way, too.

    >>> tokenize(["the time", "née"], "word")
    [['the', 'time'], ['née']]
    >>> tokenize(["Well, no."], "word"), tokenize(["Well, no."], "spaced")
    ([['Well', ', ', 'no', '.']], [['Well,', 'no.']])
    >>> tokenize(["née"], "char")
    [['n', 'é', 'e']]
    >>> tokenize(["née"], "byte")
    [[110, 195, 169, 101]]
    """
    chosen = level_of(level)
    if isinstance(lines, str | bytes) or not isinstance(lines, Iterable):
        raise UserError(
            f"tokenize takes a list of lines, not one {type(lines).__name__}",
            hint="pass text.splitlines(keepends=True), or [text] for a single line",
        )
    lines = list(lines)
    if other := [line for line in lines if not isinstance(line, str | bytes)]:
        raise UserError(f"{other[0]!r} is not a line of text", hint="a line is a str")
    return [chosen.tokens(line) for line in lines]


def count(text: str | bytes | Sequence[str], level: str) -> dict[Any, int]:
    """How often each token occurs in `text`, in the order of first appearance.

    The same as `Counter(t for line in tokenize([text], level) for t in line)`, without an object
    per token: characters and bytes are counted as integers, words a stretch at a time.

    >>> count("to be or not to be", "word")
    {'to': 2, 'be': 2, 'or': 1, 'not': 1}
    """
    chosen = level_of(level)
    return chosen.count(chosen.cut(chosen.whole(text)))
