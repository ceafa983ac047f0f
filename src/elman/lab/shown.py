"""Tokens and numbers in the form in which a page gets them."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from elman.text.vocab import Vocab


def token_text(token: Any) -> str:
    """A token as a page shows it: a byte as the character of Latin-1."""
    return token if isinstance(token, str) else chr(token)


def token_texts(vocab: Vocab, tokens: Sequence[Any]) -> list[str]:
    """The text that each token adds to those before it: joined, they are the text.

    A byte that is part of a character is shown as the character of Latin-1, so that there is
    something to see; a subword that ends inside of one adds nothing, the next one all of it.

    >>> token_texts(Vocab.from_text("a b, c", level="word"), ["a", "b", ", ", "c"])
    ['a', ' b', ', ', 'c']
    """
    level = vocab.level_used
    if level.reads_bytes:
        return [token_text(t) for t in tokens]
    texts = list(level.stream(tokens))
    rest = "".join(texts[len(tokens) :])  # bytes of a character that the text does not complete
    return [*texts[: len(tokens) - 1], texts[len(tokens) - 1] + rest] if len(tokens) else []


def alone(vocab: Vocab, token: Any) -> str:
    """A token that stands by itself, in a list or in a cell."""
    return token_texts(vocab, [token])[0]


def packed(values: Any) -> dict[str, Any]:
    """A table of many numbers, quick to write and to read: float32, little-endian, in base64.

    >>> packed([[1.0, 0.5]])
    {'shape': [1, 2], 'float32': 'AACAPwAAAD8='}
    """
    values = np.asarray(values)
    with np.errstate(over="ignore", under="ignore"):  # what explodes further than that is ∞
        data = values.astype("<f4").tobytes()
    return {"shape": list(values.shape), "float32": base64.b64encode(data).decode()}


def short(values: Any) -> Any:
    """Numbers with four significant digits, what a picture can show, as lists.

    >>> short([[0.123456, 0.0], [-1234567.0, 1e-30]])
    [[0.1235, 0.0], [-1235000.0, 1e-30]]
    """
    values = np.asarray(values, dtype=np.float64)
    size = np.abs(values)
    digits = 3 - np.floor(np.log10(size, out=np.zeros_like(size), where=size > 0))
    scale = 10.0 ** np.clip(digits, -300, 300)
    return (np.round(values * scale) / scale).tolist()
