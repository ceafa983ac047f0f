"""A source made ready for a model: cleaned, cut into parts, turned into ids.

The first part of the text trains and the rest is held out: validation, by which a training chooses
(its best weights, when to stop), then the test, which nothing is chosen by and scores are reported
of. Nothing is shuffled. The vocabulary is that of the training part alone, so what only the
held-out text contains is `<unk>` there, as any later text's news will be.
"""

import hashlib
import math
import os
import shlex
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError, counted
from elman.options import DECODED, check, option
from elman.text import corpus
from elman.text.datasets import DATASETS
from elman.text.levels import LEVELS, Level, as_bytes, byte_chunks, level_of
from elman.text.shards import Index, Shards, is_prepared
from elman.text.vocab import Vocab

__all__ = ["CLEANINGS", "Data", "Splits", "as_bytes", "cleaned", "located", "prepare", "read"]

PANEL = "Text"
CLEANINGS: dict[str, Callable[[str, Level], str]] = {
    "newlines": lambda text, level: corpus.unix_newlines(text),
    "letters": lambda text, level: level.text_of_lines(corpus.letters(text)),
    "none": lambda text, level: text,
}
"""What is done to a text before it is cut: line ends made alike; the notes' way; nothing."""


@dataclass(frozen=True)
class Data:
    """Which text, and how it becomes tokens.

    `min_freq` is, unless given, what suits the level: 2 for words, so that a model meets `<unk>`
    while it trains, and 0 for characters.
    """

    source: str = option("python-reference", "Name, file, folder or -", panel=PANEL)
    level: str = option("char", "What a token is", panel=PANEL, choices=LEVELS)
    clean: str = option(
        "newlines",
        "newlines makes line ends alike; letters is the notes' way",
        panel=PANEL,
        choices=CLEANINGS,
    )
    max_tokens: int = option(
        0, "Use the first so many; 0: all", panel=PANEL, at_least=0, hint="0: all"
    )
    min_freq: int | None = option(
        None, "Rarer tokens are <unk> (words: 2)", panel=PANEL, at_least=0, hint="0: all"
    )
    validation: float = option(
        0.1, "Part held out to choose by, before the test", panel=PANEL, at_least=0, below=1
    )
    encoding: str = option("utf-8", "Of the text", panel=PANEL, beside=DECODED)
    errors: str = option(
        "strict", "Bytes that are not text", panel=PANEL, choices=corpus.ERRORS, beside=DECODED
    )
    lower: bool = option(
        False, "Read the text in lower case", panel=PANEL, flag="--lower/--keep-case"
    )
    train_tokens: int = option(
        0, "Train on the first so many, hold out after them; 0: all", panel=PANEL, at_least=0
    )
    vocab_size: int = option(
        0,
        "Most tokens with an id, the frequent ones; 0: all (bpe: 8192)",
        panel=PANEL,
        at_least=0,
        at_most=10**8,
    )
    tokenizer: str = option("", "bpe: a tokenizer.json; else one is learned", panel=PANEL)
    test: float = option(
        0.0, "Part held out to report, at the end", panel=PANEL, at_least=0, below=1
    )

    def __post_init__(self) -> None:
        if isinstance(self.source, os.PathLike):
            object.__setattr__(self, "source", os.fspath(self.source))
        if self.min_freq is None and self.level in LEVELS:
            object.__setattr__(self, "min_freq", LEVELS[self.level].min_freq)
        check(self)
        if self.tokenizer and self.level != "bpe":
            level_of(self.level).learned("", tokenizer=self.tokenizer)  # refuses it
        if self.raw and self.lower:
            raise UserError(
                "bytes have no lower case", hint='clean="letters", or level="char" and lower=True'
            )

    @property
    def holds_out(self) -> bool:
        """Whether any part of the text is kept from the training."""
        return self.validation + self.test > 0

    @property
    def raw(self) -> bool:
        """Whether the source is read as bytes, whatever they are: nothing is cleaned then."""
        return level_of(self.level).reads_bytes and self.clean != "letters"


Text = str | bytes | Shards
"""A text in memory, or one that `elman prepare` has made ready."""
CUTS = ("validation", "test")
PREPARED = ("level", "clean", "lower", "encoding", "errors", "min_freq", "vocab_size", *CUTS)
"""What has been decided when a text has been prepared."""
PIECE = 1 << 20
"""Ids of a prepared text that are looked through at once."""


class Splits(NamedTuple):
    """Ids of the three parts, the vocabulary of the first, and the fingerprint of the source.

    `characters` says of how many characters of text the reported tokens are made, what reads as
    `<unk>` included; `first`, how many of those belong to the first of them.
    """

    train: Any
    validation: Any
    test: Any
    vocab: Vocab
    sha256: str
    characters: int
    first: int

    @property
    def predicted_characters(self) -> int:
        """The characters of all reported tokens after the first, which nothing comes before."""
        return self.characters - self.first

    @property
    def part(self) -> str:
        """Which part scores are reported of: the test, or validation where there is no test."""
        return "test" if len(self.test) else "validation"

    @property
    def reported(self) -> Any:
        """The ids of that part."""
        return self.test if len(self.test) else self.validation


def located(source: str) -> str:
    """The source as it can be found again from anywhere: a name, or an absolute path.

    `-` stands for what cannot be read a second time: stdin, a pipe.
    """
    if source == "-" or source in DATASETS:
        return source
    path = corpus.path_from(source)
    if path.exists() and not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
        return "-"
    return str(path.absolute())


def read(
    data: Data, source: str | Path | None = None, progress: corpus.Progress | None = None
) -> Text:
    """The source as it is, or as kept at `source`: bytes for the byte level, else text.

    A folder that `elman prepare` has written is opened, not read.
    """
    where = data.source if source is None else source
    level_of(data.level).check_library()
    if is_prepared(where):
        return Shards(where, check=os.environ.get("LOCAL_RANK", "0") == "0")  # once a machine
    if data.raw:
        return corpus.load_bytes(where, progress=progress)
    return corpus.load(where, encoding=data.encoding, errors=data.errors, progress=progress)


def fingerprint(text: Text) -> str:
    """SHA-256 of the text as read."""
    if isinstance(text, Shards):
        return text.sha256
    digest = hashlib.sha256()
    for piece in byte_chunks(text):
        digest.update(piece.data)
    return digest.hexdigest()


def cleaned(data: Data, text: str | bytes) -> str | bytes:
    """The text as the model reads it."""
    if isinstance(text, bytes) or data.raw:
        return text
    text = text.lower() if data.lower else text
    return CLEANINGS[data.clean](text, level_of(data.level))


def prompt(data: Data, text: str | bytes) -> str | bytes:
    """The beginning of a text as the model reads it: cleaned, but with the spaces at its ends.

    >>> prompt(Data(clean="letters"), "The Time, "), prompt(Data(level="word"), "The Time ")
    ('the time ', 'The Time')
    """
    if isinstance(text, bytes):
        return text
    inside = str(cleaned(data, f"x{text}x"))[1:-1]  # as if letters stood before and after it
    return level_of(data.level).open_end(inside)


def adopted(given: dict[str, Any]) -> dict[str, Any]:
    """Options beside a source; with those by which a prepared one was made, which must agree."""
    source = given.get("source", "")
    if not is_prepared(source):
        return given
    index = Shards(source, check=False).index
    cut_later = given.get("test") and not index.test
    if cut_later:
        given = _tested(index, source, given)
    for name in [n for n in PREPARED if n not in CUTS or not cut_later]:
        prepared_with, asked = getattr(index, name), given.get(name)
        if asked is not None and asked != prepared_with:
            raise UserError(
                f"{name}={asked}, but {source} was prepared with {name}={prepared_with}",
                hint="leave it out, or prepare the text with it",
            )
        given = given | {name: prepared_with}
    return given


def _tested(index: Index, source: Any, given: dict[str, Any]) -> dict[str, Any]:
    """A test part was asked for beside a folder that has none: it is the end of what it holds out.

    What it trains on stays as it is, and so does the vocabulary, which is that part's alone.
    """
    test, asked = float(given["test"]), given.get("validation")
    validation = round(index.validation - test, 12) if asked is None else float(asked)
    _check_tested(index, source, validation, test)
    return given | {"validation": validation, "test": test}


def _check_tested(index: Index, source: Any, validation: float, test: float) -> None:
    if validation < 0 or not math.isclose(validation + test, index.validation):
        raise UserError(
            f"validation={max(validation, 0)} and test={test}, but {source} holds out "
            f"{index.validation} in all",
            hint=f"a test of less than that, or {_command(index, source, test)}",
        )
    if level_of(index.level).lengths(()) is None:
        raise UserError(
            f"test={test} cannot be cut off {source} later: at level {index.level} it does not say "
            "of how many characters its rare words were",
            hint=_command(index, source, test),
        )


def _command(index: Index, source: Any, test: float) -> str:
    """The `elman prepare` that makes such a folder with a test part."""
    usual = Data(level=index.level)
    options = {"level": index.level, "validation": index.validation, "test": test}
    for name in ("clean", "lower", "encoding", "errors", "min_freq", "vocab_size"):
        if getattr(index, name) != getattr(usual, name):
            options[name] = getattr(index, name)
    flags = " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in options.items()
    )
    sources = " ".join(map(shlex.quote, index.sources))
    return f"elman prepare {sources} --out {shlex.quote(f'{source}-tested')} {flags}"


def _cut_later(shards: Shards, data: Data) -> Splits:
    """The parts where the end of what was held out is kept to be reported, from a line's end on."""
    _check_tested(shards.index, shards.folder, data.validation, data.test)
    held_out, level = shards.validation, shards.vocab.level_used
    lengths = level.lengths(shards.vocab.idx_to_token)
    assert lengths is not None
    wanted = round(len(shards.ids) * data.test) if data.validation else len(held_out)
    start = max(0, len(held_out) - wanted)
    start = _next_line(held_out, start, level.ends_lines(shards.vocab.idx_to_token))
    test = held_out[start:]
    pieces = (test[at : at + PIECE].read() for at in range(0, len(test), PIECE))
    characters = sum(int(lengths[ids].sum()) for ids in pieces)
    first = int(lengths[test[0]]) if len(test) else 0
    parts = (shards.train, held_out[:start], test)
    return Splits(*parts, shards.vocab, shards.sha256, characters, first)


def _next_line(ids: Any, start: int, ends: NDArray[np.bool_]) -> int:
    """Where the next line begins, if a line ends behind `start`: some tokens end one."""
    for at in range(start - 1, len(ids) - 1, PIECE) if start else ():
        line_ends = np.flatnonzero(ends[ids[at : min(at + PIECE, len(ids) - 1)].read()])
        if len(line_ends):
            return at + int(line_ends[0]) + 1
    return start


def _of_shards(data: Data, shards: Shards, vocab: Vocab | None) -> Splits:
    """The parts of a prepared text, as it was cut, or all of it to train on."""
    index, none = shards.index, shards.ids[:0]
    _check_same_vocabulary(shards, vocab)
    for name in ("max_tokens", "train_tokens", "tokenizer"):
        if getattr(data, name):
            raise UserError(
                f"{name}={getattr(data, name)} cannot be asked of a prepared text",
                hint="prepare less text, or train on the text itself",
            )
    if not data.holds_out:
        return Splits(shards.ids, none, none, shards.vocab, shards.sha256, 0, 0)
    if data.test and not index.test:
        return _cut_later(shards, data)
    for name in CUTS:
        prepared_with, asked = getattr(index, name), getattr(data, name)
        if asked != prepared_with:
            raise UserError(
                f"{name}={asked}, but {shards.folder} was prepared with {name}={prepared_with}",
                hint=f"{name}={prepared_with}, or prepare the text with the other",
            )
    counts = (index.held_out_characters, index.first_characters)
    if index.test_tokens:
        counts = (index.test_characters, index.test_first_characters)
    parts = (shards.train, shards.validation, shards.test)
    return Splits(*parts, shards.vocab, shards.sha256, *counts)


def _check_same_vocabulary(shards: Shards, vocab: Vocab | None) -> None:
    if vocab is not None and vocab != shards.vocab:
        raise UserError(
            f"{shards.folder} was prepared with another vocabulary than this run's",
            hint="score the text itself, or a folder prepared with the run's tokenizer",
        )


def prepare(data: Data, text: Text, vocab: Vocab | None = None) -> Splits:
    """Clean, cut, encode; with the vocabulary given, or that of the training part."""
    if isinstance(text, Shards):
        return _of_shards(data, text, vocab)
    whole = cleaned(data, text)
    if vocab is not None:
        level = vocab.level_used
        parts = _in_parts(data, level.cut(whole), level.units)
    else:
        level, parts = _learned(data, whole)
        assert data.min_freq is not None
        counts, size = level.count(parts.train), data.vocab_size
        vocab = Vocab(counts, data.min_freq, level=level, vocab_size=size)
        check_not_empty(vocab)
    return _splits(level, parts, vocab, text)


def _learned(data: Data, text: str | bytes) -> tuple[Level, corpus.Split]:
    """The level, having learned what it must, and the parts it cuts the text into.

    It learns from nothing but the part that trains. That part is a share of the tokens, and where
    it ends is known once there are tokens: a level that has read on behind that learns again, from
    less.
    """
    end = round(len(text) * (1 - data.validation - data.test))
    while True:
        level = level_of(data.level).learned(text[:end], data.vocab_size, data.tokenizer)
        parts = _in_parts(data, level.cut(text), level.units)
        if data.tokenizer or level.covers(parts.train, text[:end]):
            return level, parts
        end = round(0.95 * level.characters(parts.train))


def _in_parts(data: Data, cut: Any, units: str) -> corpus.Split:
    """The first `max_tokens` in three parts: to train on, to choose by, to report.

    With `train_tokens` the first part has at most so many, and the others, which come right after
    it, as many as make the same shares.
    """
    cut = cut[: data.max_tokens] if data.max_tokens else cut
    _check_holds_out(data, len(cut), units)
    parts = corpus.split(cut, validation=data.validation, test=data.test)
    if not 0 < data.train_tokens < len(parts.train):
        return parts
    first = data.train_tokens
    trained = 1 - data.validation - data.test
    second = first + round(first * data.validation / trained)
    third = second + round(first * data.test / trained)
    _check_holds_out(data, third, units)
    return corpus.Split(cut[:first], cut[first:second], cut[second:third])


def _check_holds_out(data: Data, tokens: int, units: str) -> None:
    if any(share and not round(tokens * share) for share in (data.validation, data.test)):
        raise too_few_to_hold_out(data, tokens, units)


def too_few_to_hold_out(data: Data, tokens: int, units: str) -> UserError:
    """A text of which the smallest part that is held out has no token, or none to predict."""
    shares = {name: getattr(data, name) for name in CUTS if getattr(data, name)}
    share = min(shares.values())
    return UserError(
        f"{named_text(data)}: {counted(tokens, units)}, too few to hold out {100 * share:g} % of "
        "them",
        hint=f"{math.ceil(2 / share):,} are enough; or "
        f"{' '.join(f'{name}=0' for name in shares)} for none",
    )


def named_text(data: Data) -> str:
    """The text, to be named in a refusal: a file below this folder as one types it."""
    source, here = Path(data.source), Path.cwd()
    if str(source) == "-":
        return "the text"
    return str(source.relative_to(here) if source.is_relative_to(here) else source)


def check_not_empty(vocab: Vocab) -> None:
    """Refuse a vocabulary of nothing but `<unk>`."""
    if vocab.token_freqs and all(n < vocab.min_freq for _, n in vocab.token_freqs):
        token, n = vocab.token_freqs[0]
        raise UserError(
            f"min_freq={vocab.min_freq} leaves no token: the most frequent, {token!r}, occurs "
            f"{counted(n, 'times')}",
            hint=f"min_freq={n} keeps it, min_freq=0 keeps all",
        )


def all_held_out(data: Data, text: Text, vocab: Vocab) -> Splits:
    """Another text than the one a vocabulary was made from, cleaned alike: all of it held out."""
    if isinstance(text, Shards):
        _check_same_vocabulary(text, vocab)
        first = vocab.level_used.characters(vocab.level_used.cut(vocab.decode([text.ids[0]])))
        characters = text.index.characters
        none = text.ids[:0]
        return Splits(none, text.ids, none, vocab, text.sha256, characters, first)
    level = vocab.level_used
    cut = level.cut(cleaned(data, text))
    return _splits(level, corpus.Split(cut[:0], cut, cut[:0]), vocab, text)


def _splits(level: Level, parts: corpus.Split, vocab: Vocab, text: str | bytes) -> Splits:
    train, validation, test = parts
    reported, before = (test, validation) if len(test) else (validation, train)
    return Splits(
        vocab.encode_cut(train),
        vocab.encode_cut(validation),
        vocab.encode_cut(test),
        vocab,
        fingerprint(text),
        level.characters(reported, before),
        level.characters(reported[:1], before),
    )
