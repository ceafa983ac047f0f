"""The vocabulary: which number each token has, and back.

Ids are assigned as in the notes: `<unk>` is 0, then the reserved tokens in the order given, then
the tokens by falling frequency, ties in the order of first appearance. Tokens rarer than `min_freq`
have no id and read as `<unk>`.

The byte level is different, because it can be: an id *is* the byte's value, there are always 256
of them, and nothing is ever unknown, so there is no `<unk>` and nothing to reserve. So are
subwords: a tokenizer has numbered them already, and each byte is one of them.
"""

import json
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from elman.errors import MissingSource, OutOfRange, Unreadable, UserError
from elman.files import BLANK_SEAL, as_path, check_seal, has_seal, read_bytes, write_sealed
from elman.options import whole_number
from elman.text.levels import LEVELS, Ids, Level, inferred, level_of
from elman.text.tokens import count

UNKNOWN = "<unk>"

_FORMAT = "elman vocabulary"
_VERSION = 2
_LEVELS_OF_VERSION_1 = {"char": "char", "word": "spaced", "byte": "byte"}
"""What the levels of older files are called now: words were cut at white space alone."""


@final
class Vocab:
    """A two-way table between tokens and ids.

    `tokens` is a list of tokens, a list of lines of tokens, a `str` (its characters), `bytes`, or a
    mapping from token to frequency. At most `vocab_size` tokens, the most frequent, have an id (0:
    all of them). The level decides how `encode` reads and `decode` joins; it is
    inferred unless given: integers are bytes, single characters are characters, anything else is
    words (`elman.text.levels.inferred`).

    >>> vocab = Vocab([["the", "time"], ["the", "end"]])
    >>> vocab.idx_to_token
    ('<unk>', 'the', 'time', 'end')
    >>> vocab["the"], vocab[["end", "never"]], vocab.to_tokens([1, 2])
    (1, [3, 0], ['the', 'time'])
    >>> vocab.decode(vocab.encode("the time"))
    'the time'
    """

    level: str
    level_used: Level
    idx_to_token: tuple[Any, ...]
    token_to_idx: dict[Any, int]

    def __init__(
        self,
        tokens: Iterable[Any] | Mapping[Any, int] = (),
        min_freq: int = 0,
        reserved_tokens: Iterable[str] | None = (),
        *,
        level: str | Level | None = None,
        vocab_size: int = 0,
    ) -> None:
        _check_iterable(tokens)
        if level is None:
            tokens = _refuse_lines(tokens)
        counts = count_corpus(tokens)
        self.level_used = inferred(counts) if level is None else level_of(level)
        self.level = self.level_used.name
        self.min_freq = whole_number("min_freq", min_freq, hint="0: all tokens")
        self.vocab_size = whole_number("vocab_size", vocab_size, hint="0: all tokens")
        self.reserved_tokens = _reserved(reserved_tokens)
        _check_tokens(self.level_used, counts)
        _check_options(self.level_used, self.min_freq, self.reserved_tokens)
        _check_size(self.level_used, self.vocab_size, 1 + len(self.reserved_tokens))
        self._token_freqs = sorted(counts.items(), key=lambda item: item[1], reverse=True)
        frequent = (token for token, n in self._token_freqs if n >= self.min_freq)
        special = (UNKNOWN, *self.reserved_tokens)
        self.idx_to_token = self.level_used.assign(special, frequent, self.vocab_size or None)
        self.token_to_idx = {token: idx for idx, token in enumerate(self.idx_to_token)}

    @classmethod
    def from_text(
        cls,
        text: str | bytes | Sequence[str],
        level: str = "char",
        min_freq: int = 0,
        reserved_tokens: Iterable[str] | None = (),
        vocab_size: int = 0,
    ) -> Self:
        """The vocabulary of a whole text, or of its lines, counted without an object per token."""
        used = level_of(level).learned(text, vocab_size)
        counts = used.count(used.cut(used.whole(text)))
        return cls(counts, min_freq, reserved_tokens, level=used, vocab_size=vocab_size)

    # The notes' interface

    def __len__(self) -> int:
        return len(self.idx_to_token)

    def __getitem__(self, tokens: Any) -> Any:
        """The id of a token, or the list of ids of a list (or list of lists) of tokens."""
        if isinstance(tokens, list | tuple):
            return [self[token] for token in tokens]
        if self.unk is None:
            return int(self.level_used.read_list([tokens], self.token_to_idx, self.dtype)[0])
        return self.token_to_idx.get(tokens, self.unk)

    def to_tokens(self, indices: Any) -> Any:
        """The token of an id, or the list of tokens of a list or array of ids."""
        if isinstance(indices, list | tuple) or np.ndim(indices) > 0:
            return [self.idx_to_token[i] for i in self._check_ids(indices).tolist()]
        return self.idx_to_token[self._check_ids([indices]).tolist()[0]]

    @property
    def unk(self) -> int | None:
        """The id of `<unk>`: 0, or None at the byte level, where nothing is unknown."""
        return self.level_used.unknown

    @property
    def token_freqs(self) -> list[tuple[Any, int]]:
        """Every token counted and how often, most frequent first; rare ones included."""
        return self._token_freqs

    # Whole texts

    def encode(self, source: str | bytes | Sequence[Any] | NDArray[Any]) -> Ids:
        """Turn text, its lines, or a list (of lists) of tokens, into one array of ids.

        The array is one-dimensional and of the smallest unsigned type that holds every id. Text is
        read at the vocabulary's level. A list of strings of which one is longer than a token is a
        list of lines; as in the notes they have no line ends, and characters are joined with
        nothing between them, words with a space.
        """
        if isinstance(source, str | bytes):
            return self._encode_text(source)
        _check_iterable(source)
        tokens = _flat(source)
        if self._are_lines(source, tokens):
            return self._encode_text(self.level_used.text_of_lines(tokens))
        return self.level_used.read_list(tokens, self.token_to_idx, self.dtype)

    def _encode_text(self, text: str | bytes) -> Ids:
        return self.encode_cut(self.level_used.cut(text))

    def encode_cut(self, cut: Any) -> Ids:
        """The ids of a text that this vocabulary's level has cut (`Level.cut`)."""
        return self.level_used.encode(cut, self.token_to_idx, self.dtype)

    def _are_lines(self, source: Any, tokens: Sequence[Any]) -> bool:
        """Whether a flat list holds lines of text: strings that are not tokens of this level."""
        if not isinstance(source, list | tuple) or tokens is not source:
            return False
        strange = {token for token in tokens if isinstance(token, str)} - self.token_to_idx.keys()
        return any(map(self.level_used.is_line, strange)) and all(
            isinstance(t, str) for t in tokens
        )

    def decode(self, ids: Any) -> str:
        """Turn ids back into text: characters side by side, words as they stood in the text.

        The notes' words (level "spaced") get a space between them. At the byte level the bytes are
        read as UTF-8 and what is not UTF-8 becomes U+FFFD; `decode_bytes` gives the bytes.
        """
        return self.level_used.decode(self._check_ids(ids), self.idx_to_token)

    def decode_bytes(self, ids: Any) -> bytes:
        """The bytes behind ids of bytes or subwords, exactly, whether or not they are text."""
        return self.level_used.decode_bytes(self._check_ids(ids))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integer type that holds every id."""
        return np.min_scalar_type(len(self) - 1)

    def _check_ids(self, ids: Any) -> NDArray[Any]:
        """`ids` as a one-dimensional array, all of them in range."""
        array = np.asarray(ids.detach().cpu() if hasattr(ids, "cpu") else ids)
        if array.size == 0:
            return np.empty(0, dtype=np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise UserError(
                f"ids must be a flat list of integers, not {array.ndim}-dimensional {array.dtype}",
                hint="decode one row at a time",
            )
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= len(self):
            raise OutOfRange(
                f"id {low if low < 0 else high} is not in a vocabulary of {len(self)} tokens",
                hint=f"ids run from 0 to {len(self) - 1}",
            )
        return array

    # Files

    def record(self) -> dict[str, Any]:
        """What `from_record` makes this vocabulary of: plain values, fit for JSON."""
        return {
            "level": self.level,
            "min_freq": self.min_freq,
            "reserved_tokens": self.reserved_tokens,
            "token_freqs": self._token_freqs,
            **({"vocab_size": self.vocab_size} if self.vocab_size else {}),
            **self.level_used.record(),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], version: int = _VERSION) -> Self:
        """The vocabulary of a record, perhaps of an older version of elman."""
        level = record["level"]
        if version == 1:
            level = _LEVELS_OF_VERSION_1[level]
        used = level_of(level).restored(record)
        counts, size = dict(record["token_freqs"]), record.get("vocab_size", 0)
        return cls(
            counts, record["min_freq"], record["reserved_tokens"], level=used, vocab_size=size
        )

    def save(self, path: Path | str) -> None:
        """Write the vocabulary as one JSON object, atomically."""
        record = {"format": _FORMAT, "version": _VERSION, **self.record()}
        record |= {"tokens": self.idx_to_token, "seal": BLANK_SEAL}
        # Not ASCII escapes, so that vocabularies stay readable; surrogatepass, so that a lone
        # surrogate, which has no UTF-8, comes back as it went.
        written = json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass")
        write_sealed(path, written)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what `save` wrote; refuse anything else."""
        record = _read_record(as_path(path))
        try:
            vocab = cls.from_record(record, record["version"])
            if list(vocab.idx_to_token) != record["tokens"]:
                raise ValueError("its tokens and their frequencies disagree")
        except (KeyError, TypeError, ValueError) as problem:
            raise UserError(
                f"{path} is a damaged vocabulary: {problem}", hint="write it again with Vocab.save"
            ) from problem
        return vocab

    # Small courtesies

    def __contains__(self, token: object) -> bool:
        return token in self.token_to_idx

    def __iter__(self) -> Iterator[Any]:
        return iter(self.idx_to_token)

    def __eq__(self, other: object) -> bool:
        """Two vocabularies are equal when they give every text the same ids."""
        if not isinstance(other, Vocab):
            return NotImplemented
        return (self.level, self.idx_to_token) == (other.level, other.idx_to_token)

    def __hash__(self) -> int:
        return hash((self.level, self.idx_to_token))

    def __repr__(self) -> str:
        common = ", ".join(f"{token!r} {n}" for token, n in self._token_freqs[:3])
        some = f": {common}, …" if common else ""
        return f"<Vocab of {len(self)} {self.level_used.unit}s{some}>"


def learn(
    text: str | bytes | Sequence[str],
    level: str = "char",
    min_freq: int = 0,
    reserved_tokens: Iterable[str] | None = (),
    vocab_size: int = 0,
) -> tuple[Vocab, Ids]:
    """The vocabulary of a text, or of its lines, and the text's ids in it.

    The same as `Vocab.from_text` and then `encode`, but the text is cut into tokens only once.

    >>> vocab, ids = learn("to be or not to be", "word")
    >>> len(vocab), ids.tolist()
    (5, [1, 2, 3, 4, 1, 2])
    """
    chosen = level_of(level).learned(text, vocab_size)
    cut = chosen.cut(chosen.whole(text))
    counts = chosen.count(cut)
    vocab = Vocab(counts, min_freq, reserved_tokens, level=chosen, vocab_size=vocab_size)
    return vocab, vocab.encode_cut(cut)


def count_corpus(tokens: Iterable[Any] | Mapping[Any, int]) -> dict[Any, int]:
    """Frequencies of the tokens of a flat list, a list of lines, a text, or as already counted."""
    if isinstance(tokens, Mapping):
        _check_counts(tokens)
        return dict(tokens)
    if isinstance(tokens, str | bytes):
        return count(tokens, "char" if isinstance(tokens, str) else "byte")
    listed = tokens if isinstance(tokens, list) or hasattr(tokens, "tolist") else list(tokens)
    if isinstance(listed, list) and listed and isinstance(listed[0], tuple):
        # In the notes a line is a list, and a tuple is a pair or triple that counts as one token.
        raise UserError(
            f"{listed[0]!r} is a tuple, neither a token nor a line of them, which is a list",
            hint=f"statistics.frequencies(tokens, {len(listed[0])}) counts runs of tokens",
        )
    return dict(Counter(_flat(listed)))


def _flat(tokens: Iterable[Any]) -> Sequence[Any]:
    """A list of tokens as it is, or the tokens of a list of lines: as in the notes, the first one
    tells."""
    if isinstance(tokens, list | tuple):
        listed = tokens
    else:
        listed = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)  # pyright: ignore
    if listed and isinstance(listed[0], list | tuple):
        return list(chain.from_iterable(listed))
    return listed


def _check_iterable(tokens: Any) -> None:
    if not isinstance(tokens, Iterable):
        raise UserError(
            f"tokens are a list of them, a text or bytes, not {reprlib.repr(tokens)}",
            hint='Vocab(["a", "b"]), Vocab.from_text(text, "word")',
        )


def _refuse_lines(tokens: Any) -> Any:
    """Tokens as they are; a flat list of lines, which does not say what their tokens are, not."""
    if isinstance(tokens, str | bytes | Mapping) or hasattr(tokens, "tolist"):
        return tokens
    listed = list(tokens)
    for item in listed:
        if isinstance(item, str) and " " in item.strip() and LEVELS["word"].is_line(item):
            raise UserError(
                f"{item[:40]!r} is a line of text, not a token",
                hint='Vocab.from_text(lines, "char") or (lines, "word") cuts lines into tokens; '
                'Vocab(lines, level="word") takes each as one token',
            )
    return listed


def _reserved(tokens: Any) -> tuple[Any, ...]:
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Iterable | None):
        raise UserError(
            f"reserved_tokens={tokens!r} must be a list of tokens", hint='such as ["<pad>"]'
        )
    return tuple(tokens or ())


def _check_counts(counts: Mapping[Any, int]) -> None:
    for token, n in counts.items():
        if not isinstance(n, Integral) or isinstance(n, bool) or n < 0:
            raise UserError(
                f"{n!r}, how often {token!r} occurs, must be a whole number from 0 up",
                hint="a mapping given to Vocab is from token to frequency",
            )


def _check_tokens(level: Level, counts: Mapping[Any, int]) -> None:
    """Every token must be of the level's kind."""
    for token in counts:
        if not level.fits(token):
            raise UserError(
                f"{token!r} is not a token of level {level.name!r}, whose tokens are "
                f"{level.tokens_are}",
                hint="reserved_tokens= holds tokens like <pad>; Vocab.from_text cuts text",
            )


def _check_options(level: Level, min_freq: int, reserved: tuple[str, ...]) -> None:
    if level.unknown is None and (min_freq > 0 or reserved):
        raise UserError(
            f"min_freq={min_freq} and reserved_tokens={list(reserved)} make no sense for "
            f"{level.units}",
            hint="each has its id already, so none can be dropped and none is left over",
        )
    for token in reserved:
        if not isinstance(token, str):
            raise UserError(f"reserved token {token!r} must be a string", hint='such as "<pad>"')
    for token, times in Counter([UNKNOWN, *reserved]).items():
        if times > 1:
            raise UserError(
                f"reserved token {token!r} is given {times} times",
                hint=f"give each once; {UNKNOWN} is always there, as id 0",
            )


def _check_size(level: Level, vocab_size: int, special: int) -> None:
    """Room for what must be there and one token more; bytes are always all there."""
    if vocab_size < 0 or (level.unknown is not None and 0 < vocab_size <= special):
        raise UserError(
            f"vocab_size={vocab_size} must be more than the {special} of {UNKNOWN} and its kind",
            hint="0: all tokens",
        )
    if level.reads_bytes and vocab_size not in (0, 256):
        raise UserError(
            f"vocab_size={vocab_size} cannot be asked of level {level.name}, which has 256 tokens",
            hint="leave it out; level bpe makes larger ones out of bytes",
        )


def _read_record(path: Path) -> dict[str, Any]:
    try:
        data = read_bytes(path)
        record = json.loads(data.decode("utf-8", "surrogatepass"))
    except MissingSource as missing:
        raise MissingSource(
            f"there is no vocabulary at {path}", hint="Vocab.save writes one"
        ) from missing
    except Unreadable:
        raise
    except (ValueError, RecursionError) as problem:
        raise UserError(
            f"{path} cannot be read as a vocabulary: {problem}",
            hint="Vocab.load reads the JSON that Vocab.save writes",
        ) from problem
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise UserError(
            f"{path} is JSON, but not an elman vocabulary",
            hint="Vocab.load reads the JSON that Vocab.save writes",
        )
    if "seal" in record or has_seal(data):  # older vocabularies have none
        check_seal(data, path)
    if record.get("version") not in (1, _VERSION):
        raise UserError(
            f"{path} has version {record.get('version')!r}, this elman reads up to {_VERSION}",
            hint="a newer elman may read it",
        )
    return record
