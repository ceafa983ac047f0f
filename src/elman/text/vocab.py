"""The vocabulary: which number each token has, and back.

Ids are assigned as in the notes: `<unk>` is 0, then the reserved tokens in the order given, then
the tokens by falling frequency, ties in the order of first appearance. Tokens rarer than `min_freq`
have no id and read as `<unk>`.

The byte level is different, because it can be: an id *is* the byte's value, there are always 256
of them, and nothing is ever unknown, so there is no `<unk>` and nothing to reserve.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from elman.errors import MissingSource, OutOfRange, UserError
from elman.files import atomic
from elman.text.tokens import (
    Token,
    as_text,
    byte_chunks,
    check_level,
    code_point_chunks,
    count,
    word_chunks,
)

UNKNOWN = "<unk>"
Ids = NDArray[np.unsignedinteger[Any]]

_FORMAT = "elman vocabulary"
_VERSION = 1


@final
class Vocab:
    """A two-way table between tokens and ids.

    `tokens` is a list of tokens, a list of lines of tokens, a `str` (its characters), `bytes`, or a
    mapping from token to frequency. The level decides how `encode` reads and `decode` joins; it is
    inferred (integers are bytes, single characters are characters, anything else is words) unless
    given.

    >>> vocab = Vocab([["the", "time"], ["the", "end"]])
    >>> vocab.idx_to_token
    ('<unk>', 'the', 'time', 'end')
    >>> vocab["the"], vocab[["end", "never"]], vocab.to_tokens([1, 2])
    (1, [3, 0], ['the', 'time'])
    >>> vocab.decode(vocab.encode("the time"))
    'the time'
    """

    level: str
    idx_to_token: tuple[Any, ...]
    token_to_idx: dict[Any, int]

    def __init__(
        self,
        tokens: Iterable[Any] | Mapping[Any, int] = (),
        min_freq: int = 0,
        reserved_tokens: Iterable[str] | None = (),
        *,
        level: str | None = None,
    ) -> None:
        counts = count_corpus(tokens)
        self.level = _infer_level(counts) if level is None else level
        self.min_freq = min_freq
        self.reserved_tokens = tuple(reserved_tokens or ())
        _check_tokens(self.level, counts)
        _check_options(self.level, min_freq, self.reserved_tokens)
        self._token_freqs = sorted(counts.items(), key=lambda item: item[1], reverse=True)
        self.idx_to_token = self._assign_ids()
        self.token_to_idx = {token: idx for idx, token in enumerate(self.idx_to_token)}

    def _assign_ids(self) -> tuple[Token, ...]:
        if self.level == "byte":
            return tuple(range(256))
        special = (UNKNOWN, *self.reserved_tokens)
        frequent = (t for t, n in self._token_freqs if n >= self.min_freq and t not in special)
        return (*special, *frequent)

    @classmethod
    def from_text(
        cls,
        text: str | bytes,
        level: str = "char",
        min_freq: int = 0,
        reserved_tokens: Iterable[str] | None = (),
    ) -> Self:
        """The vocabulary of a whole text, counted without an object per token."""
        return cls(count(text, level), min_freq, reserved_tokens, level=level)

    # The notes' interface

    def __len__(self) -> int:
        return len(self.idx_to_token)

    def __getitem__(self, tokens: Any) -> Any:
        """The id of a token, or the list of ids of a list (or list of lists) of tokens."""
        if isinstance(tokens, list | tuple):
            return [self[token] for token in tokens]
        if self.level == "byte":
            return int(self._encode_list([tokens])[0])
        return self.token_to_idx.get(tokens, 0)

    def to_tokens(self, indices: Any) -> Any:
        """The token of an id, or the list of tokens of a list or array of ids."""
        if isinstance(indices, list | tuple) or np.ndim(indices) > 0:
            return [self.idx_to_token[i] for i in self._check_ids(indices).tolist()]
        return self.idx_to_token[self._check_ids([indices]).tolist()[0]]

    @property
    def unk(self) -> int | None:
        """The id of `<unk>`: 0, or None at the byte level, where nothing is unknown."""
        return None if self.level == "byte" else 0

    @property
    def token_freqs(self) -> list[tuple[Any, int]]:
        """Every token counted and how often, most frequent first; rare ones included."""
        return self._token_freqs

    # Whole texts

    def encode(self, source: str | bytes | Sequence[Any] | NDArray[Any]) -> Ids:
        """Turn text, or a list (of lists) of tokens, into one array of ids.

        The array is one-dimensional and of the smallest unsigned type that holds every id. A `str`
        is read at the vocabulary's level; lists of lines are joined with nothing between them.
        """
        if isinstance(source, str | bytes):
            return self._encode_text(source)
        return self._encode_list(_flat(source))

    def _encode_text(self, text: str | bytes) -> Ids:
        if self.level == "byte":
            return np.concatenate([np.empty(0, np.uint8), *byte_chunks(text)])
        text = as_text(text, self.level)
        if self.level == "char":
            return self._encode_chars(text)
        return np.concatenate(
            [np.empty(0, self.dtype), *(self._look_up(words) for words in word_chunks(text))]
        )

    def _encode_chars(self, text: str) -> Ids:
        table = self._code_point_table()
        ids = np.empty(len(text), dtype=self.dtype)
        done = 0
        for codes in code_point_chunks(text):
            # clip: every code point above the table's end falls on its last entry, <unk>
            np.take(table, codes, mode="clip", out=ids[done : done + len(codes)])
            done += len(codes)
        return ids

    def _code_point_table(self) -> Ids:
        known = {ord(t): i for t, i in self.token_to_idx.items() if len(t) == 1}
        table = np.zeros(max(known, default=0) + 2, dtype=self.dtype)
        table[list(known)] = list(known.values())
        return table

    def _encode_list(self, tokens: Sequence[Any]) -> Ids:
        if self.level != "byte":
            return self._look_up(tokens)
        for token in tokens:
            if token not in self.token_to_idx:
                raise OutOfRange(
                    f"{token!r} is not a byte", hint="a byte is an integer from 0 to 255"
                )
        return np.array(tokens, dtype=np.uint8)

    def _look_up(self, tokens: Sequence[Any]) -> Ids:
        ids = map(self.token_to_idx.get, tokens, repeat(0))
        return np.fromiter(ids, dtype=self.dtype, count=len(tokens))

    def decode(self, ids: Any) -> str:
        """Turn ids back into text: characters side by side, words with a space between.

        At the byte level the bytes are read as UTF-8 and what is not UTF-8 becomes U+FFFD;
        `decode_bytes` gives the bytes themselves.
        """
        if self.level == "byte":
            return self.decode_bytes(ids).decode("utf-8", "replace")
        checked = self._check_ids(ids)
        if self.level == "word":
            return " ".join(map(self.idx_to_token.__getitem__, checked.tolist()))
        special = 1 + len(self.reserved_tokens)
        if (
            checked.size and checked.min() < special
        ):  # <unk> and its kind are longer than one character
            return "".join(map(self.idx_to_token.__getitem__, checked.tolist()))
        codes = np.fromiter(map(ord, self.idx_to_token[special:]), dtype="<u4")
        return codes[checked - special].tobytes().decode("utf-32-le", "surrogatepass")

    def decode_bytes(self, ids: Any) -> bytes:
        """The bytes behind byte-level ids, exactly, whether or not they are text."""
        if self.level != "byte":
            raise UserError(
                f"a {self.level} vocabulary has no bytes", hint='use decode(ids).encode("utf-8")'
            )
        return self._check_ids(ids).astype(np.uint8).tobytes()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integer type that holds every id."""
        return np.min_scalar_type(len(self) - 1)

    def _check_ids(self, ids: Any) -> NDArray[Any]:
        """`ids` as a one-dimensional array, all of them in range."""
        found = np.asarray(ids.cpu() if hasattr(ids, "cpu") else ids)
        if found.size == 0:
            return np.empty(0, dtype=np.int64)
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise UserError(
                f"ids must be a flat list of integers, not {found.ndim}-dimensional {found.dtype}",
                hint="decode one row at a time",
            )
        low, high = int(found.min()), int(found.max())
        if low < 0 or high >= len(self):
            raise OutOfRange(
                f"id {low if low < 0 else high} is not in a vocabulary of {len(self)} tokens",
                hint=f"ids run from 0 to {len(self) - 1}",
            )
        return found

    # Files

    def save(self, path: Path | str) -> None:
        """Write the vocabulary as one JSON object, atomically."""
        record = {
            "format": _FORMAT,
            "version": _VERSION,
            "level": self.level,
            "min_freq": self.min_freq,
            "reserved_tokens": self.reserved_tokens,
            "tokens": self.idx_to_token,
            "token_freqs": self._token_freqs,
        }
        # Not ASCII escapes, so that vocabularies stay readable; surrogatepass, so that a lone
        # surrogate, which has no UTF-8, comes back as it went.
        written = json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass")
        with atomic(path) as draft:
            draft.write_bytes(written)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what `save` wrote; refuse anything else."""
        record = _read_record(Path(path))
        try:
            vocab = cls(
                dict(record["token_freqs"]),
                record["min_freq"],
                record["reserved_tokens"],
                level=record["level"],
            )
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
        return f"<Vocab of {len(self)} {self.level}s{': ' + common + ', …' if common else ''}>"


def learn(
    text: str | bytes,
    level: str = "char",
    min_freq: int = 0,
    reserved_tokens: Iterable[str] | None = (),
) -> tuple[Vocab, Ids]:
    """The vocabulary of a text and the text's ids in it.

    The same as `Vocab.from_text` and then `encode`, but words are read only once: half the time.

    >>> vocab, ids = learn("to be or not to be", "word")
    >>> len(vocab), ids.tolist()
    (5, [1, 2, 3, 4, 1, 2])
    """
    if level != "word" or isinstance(text, bytes):
        vocab = Vocab.from_text(text, level, min_freq, reserved_tokens)
        return vocab, vocab.encode(text)
    words, order = numbered(text)
    counts = dict(zip(words, np.bincount(order).tolist(), strict=True))
    vocab = Vocab(counts, min_freq, reserved_tokens, level=level)
    return vocab, vocab.encode(words)[order]


def numbered(text: str) -> tuple[list[str], NDArray[np.uint32]]:
    """The distinct words of a text, in order of appearance, and which of them each word is.

    >>> words, order = numbered("to be or not to be")
    >>> words, order.tolist()
    (['to', 'be', 'or', 'not'], [0, 1, 2, 3, 0, 1])
    """
    seen = _FirstSeen()
    pieces = [np.fromiter(map(seen.__getitem__, words), np.uint32) for words in word_chunks(text)]
    return list(seen), np.concatenate([np.empty(0, np.uint32), *pieces])


class _FirstSeen(dict[str, int]):
    """Numbers words in the order in which they are first asked for."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


def count_corpus(tokens: Iterable[Any] | Mapping[Any, int]) -> dict[Any, int]:
    """Frequencies of the tokens of a flat list, a list of lines, a text, or as already counted."""
    if isinstance(tokens, Mapping):
        return dict(tokens)
    if isinstance(tokens, str | bytes):
        return count(tokens, "char" if isinstance(tokens, str) else "byte")
    return dict(Counter(_flat(tokens)))


def _flat(tokens: Iterable[Any]) -> list[Any]:
    """A list of tokens, or the tokens of a list of lines: as in the notes, the first one tells."""
    listed = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)  # pyright: ignore
    if listed and isinstance(listed[0], list | tuple):
        return list(chain.from_iterable(listed))
    return listed


def _infer_level(counts: Mapping[Any, int]) -> str:
    if counts and all(isinstance(token, int) for token in counts):
        return "byte"
    single = all(isinstance(token, str) and len(token) == 1 for token in counts)
    return "char" if single else "word"


def _check_tokens(level: str, counts: Mapping[Any, int]) -> None:
    """Every token must be of the level's kind."""
    check_level(level)
    for token in counts:
        if level == "byte":
            fits = isinstance(token, int) and 0 <= token < 256
        else:
            fits = isinstance(token, str) and (level == "word" or len(token) == 1)
        if not fits:
            kind = {
                "byte": "integers from 0 to 255",
                "char": "single characters",
                "word": "strings",
            }
            raise UserError(
                f"{token!r} is not a token of level {level!r}, whose tokens are {kind[level]}",
                hint="reserved_tokens= holds tokens like <pad>",
            )


def _check_options(level: str, min_freq: int, reserved: tuple[str, ...]) -> None:
    if level == "byte" and (min_freq > 0 or reserved):
        raise UserError(
            f"min_freq={min_freq} and reserved_tokens={list(reserved)} make no sense for bytes",
            hint="every byte has its value as id, so none can be dropped and none is left over",
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


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
    except FileNotFoundError as missing:
        raise MissingSource(
            f"there is no vocabulary at {path}", hint="Vocab.save writes one"
        ) from missing
    except (OSError, ValueError) as problem:
        raise UserError(
            f"{path} cannot be read as a vocabulary: {problem}",
            hint="Vocab.load reads the JSON that Vocab.save writes",
        ) from problem
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise UserError(
            f"{path} is JSON, but not an elman vocabulary",
            hint="Vocab.load reads the JSON that Vocab.save writes",
        )
    if record.get("version") != _VERSION:
        raise UserError(
            f"{path} has version {record.get('version')!r}, this elman reads version {_VERSION}",
            hint="a newer elman may read it",
        )
    return record
