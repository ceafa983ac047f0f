"""A source made ready for a model: cleaned, cut into train and validation, turned into ids.

The first part of the text trains, the last part is held out; nothing is shuffled. The vocabulary is
that of the training part alone, so what only the held-out text contains is `<unk>` there, as any
later text's news will be.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elman.options import check, option
from elman.text import corpus
from elman.text.datasets import DATASETS
from elman.text.tokens import LEVELS, as_bytes, as_text, byte_chunks
from elman.text.vocab import Vocab, numbered

CLEANINGS = ("letters", "none")
PANEL = "Text"


@dataclass(frozen=True)
class Data:
    """Which text, and how it becomes tokens."""

    source: str = option("python-reference", "Name, file, folder or -", panel=PANEL)
    level: str = option("char", "What a token is", panel=PANEL, choices=LEVELS)
    clean: str = option("none", "letters as in the notes, or all", panel=PANEL, choices=CLEANINGS)
    max_tokens: int = option(
        0, "Use the first so many; 0: all", panel=PANEL, at_least=0, hint="0: all"
    )
    min_freq: int = option(0, "Rarer tokens are <unk>", panel=PANEL, at_least=0, hint="0: all")
    validation: float = option(0.1, "Part held out, at the end", panel=PANEL, at_least=0, below=1)
    encoding: str = option("utf-8", "Of the text", panel=PANEL)
    errors: str = option("strict", "Bytes that are not text", panel=PANEL, choices=corpus.ERRORS)
    train_tokens: int = option(
        0, "Train on the first so many, hold out after them; 0: all", panel=PANEL, at_least=0
    )

    def __post_init__(self) -> None:
        check(self)


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
    digest = hashlib.sha256()
    for piece in byte_chunks(text):
        digest.update(piece.data)
    return digest.hexdigest()


def cleaned(data: Data, text: str | bytes) -> str | bytes:
    """The text as the model reads it."""
    if data.clean != "letters" or isinstance(text, bytes):
        return text
    joint = " " if data.level == "word" else ""  # the notes join characters with nothing
    return joint.join(corpus.letters(text))


def prepare(data: Data, text: str | bytes, vocab: Vocab | None = None) -> Splits:
    """Clean, cut, encode; with the vocabulary given, or that of the training part."""
    sha256, text = fingerprint(text), cleaned(data, text)
    if vocab is not None:
        return Splits(*_cut(data, vocab.encode(text)), vocab, sha256)
    if data.level == "word":
        return Splits(*_words(data, as_text(text, "word")), sha256)
    train, validation = _cut(data, as_bytes(text) if data.level == "byte" else text)
    vocab = Vocab.from_text(train, data.level, data.min_freq)
    return Splits(vocab.encode(train), vocab.encode(validation), vocab, sha256)


def _cut(data: Data, tokens: Any) -> tuple[Any, Any]:
    """The first `max_tokens` in two parts; arrays are not copied.

    With `train_tokens` the first part has at most so many, and the second, which comes right after
    it, as many as make the same share.
    """
    tokens = tokens[: data.max_tokens] if data.max_tokens else tokens
    train, validation, _ = corpus.split(tokens, validation=data.validation)
    if 0 < data.train_tokens < len(train):
        end = data.train_tokens
        held_out = round(end * data.validation / (1 - data.validation))
        return tokens[:end], tokens[end : end + held_out]
    return train, validation


def _words(data: Data, text: str) -> tuple[Any, Any, Vocab]:
    """Both parts and the vocabulary of the first, with one object per distinct word."""
    words, order = numbered(text)
    train, validation = _cut(data, order)
    # Numbers are given in order of appearance: the words that train lacks are those after its last.
    counts = dict(zip(words, np.bincount(train).tolist(), strict=False))
    vocab = Vocab(counts, data.min_freq, level="word")
    ids = vocab.encode(words)
    return ids[train], ids[validation], vocab
