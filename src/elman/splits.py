"""A source made ready for a model: cleaned, cut into train and validation, turned into ids.

The first part of the text trains, the last part is held out; nothing is shuffled. The vocabulary is
that of the training part alone, so what only the held-out text contains is `<unk>` there, as any
later text's news will be.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from elman import corpus
from elman.datasets import DATASETS
from elman.errors import UserError
from elman.tokens import as_bytes, check_level
from elman.vocab import Vocab

CLEANINGS = ("letters", "none")


@dataclass(frozen=True)
class Data:
    """Which text, and how it becomes tokens."""

    source: str = "python-reference"
    level: str = "char"
    clean: str = "none"
    max_tokens: int = 0
    min_freq: int = 0
    validation: float = 0.1
    encoding: str = "utf-8"
    errors: str = "strict"

    def __post_init__(self) -> None:
        check_level(self.level)
        if self.clean not in CLEANINGS:
            raise UserError(f"unknown clean {self.clean!r}", hint=f"one of {', '.join(CLEANINGS)}")
        for name in ("max_tokens", "min_freq"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} must not be negative", hint="0: all")


class Splits(NamedTuple):
    """Ids of the two parts, the vocabulary of the first, and the fingerprint of the source."""

    train: Any
    validation: Any
    vocab: Vocab
    sha256: str


def located(source: str) -> str:
    """The source as it can be found again from anywhere: a name, `-`, or an absolute path."""
    if source == "-" or source in DATASETS:
        return source
    return str(Path(source).expanduser().absolute())


def read(data: Data, source: str | Path | None = None) -> str | bytes:
    """The source as it is, or as kept at `source`: bytes for the byte level, else text."""
    where = source or data.source
    if data.level == "byte" and data.clean == "none":
        return corpus.load_bytes(where)
    return corpus.load(where, encoding=data.encoding, errors=data.errors)


def fingerprint(text: str | bytes) -> str:
    """SHA-256 of the text as read."""
    return hashlib.sha256(as_bytes(text)).hexdigest()


def cleaned(data: Data, text: str | bytes) -> str | bytes:
    """The text as the model reads it."""
    if data.clean != "letters" or isinstance(text, bytes):
        return text
    joint = " " if data.level == "word" else ""  # the notes join characters with nothing
    return joint.join(corpus.letters(text))


def tokens_of(data: Data, text: str | bytes) -> Any:
    """The text cleaned and cut into tokens, as `Vocab.encode` takes them."""
    text = cleaned(data, text)
    if data.level == "byte":
        return as_bytes(text)
    return text.split() if data.level == "word" else text


def prepare(data: Data, text: str | bytes, vocab: Vocab | None = None) -> Splits:
    """Clean, cut, encode; with the vocabulary given, or that of the training part."""
    sha256 = fingerprint(text)
    tokens = tokens_of(data, text)
    tokens = tokens[: data.max_tokens] if data.max_tokens else tokens
    train, validation, _ = corpus.split(tokens, validation=data.validation)
    if vocab is None:
        vocab = _vocabulary(train, data)
    return Splits(vocab.encode(train), vocab.encode(validation), vocab, sha256)


def _vocabulary(train: Any, data: Data) -> Vocab:
    if data.level == "word":
        return Vocab(train, min_freq=data.min_freq, level="word")
    return Vocab.from_text(train, level=data.level, min_freq=data.min_freq)
