"""Level `bpe`: a token is a subword, a run of bytes that occurs often (byte-pair encoding).

The cutting is Hugging Face's `tokenizers` (`pip install 'elman[bpe]'`): a tokenizer is learned from
the training text, or given as the `tokenizer.json` that every such library writes. It must work on
bytes, as GPT-2's does: then each token stands for certain bytes, the 256 single ones are among
them, and the tokens of any bytes, whether they are text or not, joined, are those bytes exactly.
That is checked whenever something is cut.

    text, or bytes   →   UTF-8   →   ids of the tokenizer   →   bytes of each id, joined

Learned tokenizers never let a token reach beyond a line end, so that a text may be cut line by
line: ids(a + b) = ids(a) + ids(b) where a ends a line. Sennrich, Haddow and Birch (2016).
"""

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from elman.errors import OutOfRange, UserError
from elman.files import read_bytes
from elman.text.levels import base
from elman.text.levels.base import Ids, Level, as_bytes

BYTES = 256
MOST = 10**7
"""Subwords that are learned at most; for 10¹² the library asks for 73 terabytes, and aborts."""
PIECES_AT_ONCE = 64
"""How many stretches of text a tokenizer gets at once, to share them out among threads."""

_NOT_TEXT = re.compile("[\ud800-\udfff]")
_LINE_END = re.compile("(?<=\n)")
_WHITE = (
    "\t\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # as the library has it
)
_STRETCH = re.compile(f"[{_WHITE}]*[^{_WHITE}\n]+|[{_WHITE}]*\n|[{_WHITE}]+")


def _alphabet() -> list[str]:
    """The character that stands for each byte in the names of tokens, as GPT-2 has them.

    Bytes that are visible in Latin-1 stand for themselves, the others are moved beyond it.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(BYTES)]


NAMES = _alphabet()
VALUES = {name: byte for byte, name in enumerate(NAMES)}


@final
class Subwords(Level):
    """What a tokenizer cuts a text into; without one, the single bytes.

    >>> level = Subwords().learned("low lower lowest " * 9, vocab_size=260)
    >>> level.tokens(" lower"), level.join(level.tokens("slower, née"))
    (['Ġlowe', 'r'], 'slower, née')
    """

    name = "bpe"
    units, unit = "subwords", "subword"
    tokens_are = "names of subwords that its tokenizer has"
    counting_orders = (3, 5)
    vocab_size = 8192

    def __init__(self, tokenizer: Any = None) -> None:
        self._given = tokenizer

    def check_library(self) -> None:
        _library()

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer; one that has learned nothing, unless one was given."""
        if self._given is not None:
            return self._given
        blank = _library().Tokenizer(
            _library().models.BPE({name: i for i, name in enumerate(NAMES)}, [])
        )
        blank.pre_tokenizer = _cutting()
        return blank

    def learned(
        self, text: str | bytes | Sequence[str], vocab_size: int = 0, tokenizer: str = ""
    ) -> "Subwords":
        """A tokenizer of the text, or as read from a file; one that is here already is kept."""
        if tokenizer:
            return read_tokenizer(Path(tokenizer), vocab_size)
        if self._given is not None:
            return self
        return self.learned_from([self.whole(text)], vocab_size)

    def learned_from(self, texts: Iterable[str | bytes], vocab_size: int = 0) -> "Subwords":
        """A tokenizer of texts that need not be in memory at the same time."""
        runs = (run for text in texts for run, valid in _runs(text) if valid)
        return self._trained(runs, vocab_size)

    def learned_of(self, stretches: Iterable[tuple[str, int]], vocab_size: int = 0) -> "Subwords":
        """The tokenizer of texts of which only the `stretches` are known, and how often each."""
        runs = (run for stretch, n in stretches for run in _repeated(stretch, n))
        return self._trained(runs, vocab_size)

    def stretches(self, text: str | bytes) -> Counter[str]:
        """What a text consists of that no subword of it reaches across, and how often each occurs.

        >>> list(Subwords().stretches("to be,  or not\\n"))
        ['to', ' be,', '  or', ' not', '\\n']
        """
        counts: Counter[str] = Counter()
        for run, valid in _runs(text):
            if valid:
                counts.update(_STRETCH.findall(run))
        return counts

    def size_of(self, vocab_size: int) -> int:
        """How many subwords are learned where so many are asked for; what cannot be is refused."""
        size = vocab_size or self.vocab_size
        if size < BYTES:
            raise UserError(
                f"vocab_size={size} must be at least {BYTES}: every byte is a subword",
                hint=f"vocab_size={self.vocab_size}",
            )
        if size > MOST:
            raise UserError(
                f"vocab_size={size} must be at most {MOST}: learning makes room for all at once",
                hint=f"vocab_size={self.vocab_size}",
            )
        return size

    def _trained(self, runs: Iterable[str], vocab_size: int) -> "Subwords":
        size, library = self.size_of(vocab_size), _library()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = _cutting()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size, min_frequency=2, initial_alphabet=NAMES, show_progress=False
        )
        tokenizer.train_from_iterator(runs, trainer)
        return Subwords(tokenizer)

    def covers(self, cut: NDArray[Any], text: str | bytes) -> bool:
        sizes = np.array([len(data) for data in self.stands_for])
        return int(sizes[cut].sum()) >= len(as_bytes(text))

    # ------------------------------------------------------------------ the names of tokens

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The name of each token, by its id."""
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        return tuple(sorted(ids, key=ids.__getitem__))

    @cached_property
    def stands_for(self) -> list[bytes]:
        """The bytes of each token, by its id."""
        added = {i: t.content for i, t in self.tokenizer.get_added_tokens_decoder().items()}
        return [
            added[i].encode() if i in added else bytes(map(VALUES.__getitem__, name))
            for i, name in enumerate(self.names)
        ]

    @cached_property
    def _single(self) -> list[int]:
        ids = {name: i for i, name in enumerate(self.names)}
        return [ids[name] for name in NAMES]

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """How many characters begin in each token: UTF-8's other bytes are 10xxxxxx."""
        return np.array([sum(b & 0xC0 != 0x80 for b in data) for data in self.stands_for])

    # ------------------------------------------------------------------ what a level does

    def tokens(self, text: str | bytes) -> list[Any]:
        return [self.names[i] for i in self.cut(text).tolist()]

    def fits(self, token: Any) -> bool:
        return isinstance(token, str) and token in self._ids

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def stream(self, tokens: Iterable[Any], before: Any = None) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            yield decoder.decode(self.stands_for[self._ids[token]])
        yield decoder.decode(b"", final=True)

    def cut(self, text: str | bytes) -> NDArray[np.uint32]:
        runs = _runs(text)
        pieces = [np.empty(0, np.uint32)]
        while some := list(islice(runs, PIECES_AT_ONCE)):
            encoded = iter(
                self.tokenizer.encode_batch_fast(
                    [run for run, valid in some if valid], add_special_tokens=False
                )
            )
            pieces += [
                self._exact(run, next(encoded)) if ok else self._bytes(run) for run, ok in some
            ]
        return np.concatenate(pieces)

    def _bytes(self, run: str) -> NDArray[np.uint32]:
        """Bytes that are not UTF-8, one by one."""
        return np.array([self._single[b] for b in run.encode("utf-8", "surrogateescape")], "u4")

    def _exact(self, run: str, encoding: Any) -> NDArray[np.uint32]:
        ids = np.array(encoding.ids, np.uint32)
        if b"".join(map(self.stands_for.__getitem__, ids.tolist())) != run.encode():
            raise UserError(
                f"the tokenizer does not give {run[:40]!r} back as it was",
                hint="it changes text before it cuts it: take one without a normalizer and without "
                "add_prefix_space, or let one be learned",
            )
        return ids

    def count(self, cut: NDArray[np.uint32]) -> dict[Any, int]:
        ids, first, counts = np.unique(cut, return_index=True, return_counts=True)
        order = np.argsort(first)
        return {self.names[i]: n for i, n in zip(ids[order], counts[order].tolist(), strict=True)}

    def encode(self, cut: NDArray[Any], ids: Mapping[Any, int], dtype: np.dtype[Any]) -> Ids:
        return cut.astype(dtype)

    def decode(self, ids: NDArray[Any], tokens: Sequence[Any]) -> str:
        data = self.decode_bytes(ids)
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return data.decode("utf-8", "replace")

    def decode_bytes(self, ids: NDArray[Any]) -> bytes:
        return b"".join(map(self.stands_for.__getitem__, ids.tolist()))

    def characters(self, cut: NDArray[Any], before: Any = None) -> int:
        return int(self._starts[cut].sum())

    def lengths(self, tokens: Sequence[Any]) -> NDArray[np.int64]:
        return self._starts[[self._ids[token] for token in tokens]]

    def ends_lines(self, tokens: Sequence[Any]) -> NDArray[np.bool_]:
        return np.array([self.stands_for[self._ids[t]].endswith(b"\n") for t in tokens], bool)

    def text_of_lines(self, lines: Sequence[str]) -> str:
        return " ".join(filter(None, lines))

    def assign(
        self, special: tuple[str, ...], frequent: Iterable[Any], most: int | None = None
    ) -> tuple[Any, ...]:
        return self.names

    def read_list(self, tokens: Sequence[Any], ids: Mapping[Any, int], dtype: Any) -> Ids:
        for token in tokens:
            if token not in ids:
                raise OutOfRange(
                    f"{token!r} is not a subword of this tokenizer",
                    hint="vocab.encode(text) cuts a text into those that it has",
                )
        return np.array([ids[token] for token in tokens], dtype)

    @property
    def unknown(self) -> int | None:
        return None

    @property
    def line_end(self) -> Any:
        return NAMES[ord("\n")]

    # ------------------------------------------------------------------ files

    def record(self) -> dict[str, Any]:
        return {"tokenizer": json.loads(self.tokenizer.to_str())}

    def restored(self, record: Mapping[str, Any]) -> Self:
        library = _library()
        try:
            tokenizer = library.Tokenizer.from_str(json.dumps(record["tokenizer"]))
        except Exception as problem:  # the library's own class is Exception itself
            raise ValueError(f"its tokenizer cannot be read: {problem}") from problem
        return type(self)(checked(tokenizer, "the tokenizer"))


def read_tokenizer(path: Path, vocab_size: int = 0) -> Subwords:
    """The level of a `tokenizer.json`; one that does not work on bytes is refused."""
    try:
        tokenizer = _library().Tokenizer.from_str(read_bytes(path).decode())
    except UserError:
        raise
    except Exception as problem:  # the library's own class is Exception itself
        raise UserError(
            f"{path} is not a tokenizer: {str(problem)[:200]}",
            hint="it must be a tokenizer.json, as Hugging Face's libraries write it",
        ) from problem
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if vocab_size not in (0, size):
        raise UserError(
            f"vocab_size={vocab_size}, but the tokenizer {path} has {size} tokens",
            hint="leave out --vocab-size, or --tokenizer",
        )
    return Subwords(checked(tokenizer, str(path)))


def checked(tokenizer: Any, where: str) -> Any:
    """A tokenizer in which every byte is a token, and every token stands for bytes."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    added = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
    lacking = [byte for byte, name in enumerate(NAMES) if name not in ids]
    strange = [name for name in ids if name not in added and not VALUES.keys() >= set(name)]
    why = ""
    if lacking:
        why = f"byte {lacking[0]:#04x} is not one of its tokens"
    elif strange:
        why = f"its token {strange[0]!r} does not stand for bytes"
    elif sorted(ids.values()) != list(range(len(ids))):
        why = f"its {len(ids)} ids do not run from 0 to {len(ids) - 1}"
    if why:
        raise UserError(
            f"{where} does not work on bytes: {why}",
            hint="byte-level BPE, as of GPT-2, gives any text back exactly; or let one be learned",
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _runs(text: str | bytes) -> Iterator[tuple[str, bool]]:
    """The text in stretches of whole lines, and whether each is text; if not, as escaped bytes."""
    if isinstance(text, bytes) or _NOT_TEXT.search(text):
        text = as_bytes(text).decode("utf-8", "surrogateescape")
    start = 0
    while start < len(text):
        match = _LINE_END.search(text, start + base.CHUNK)
        stretch = text[start : match.end() if match else None]
        start += len(stretch)
        if not _NOT_TEXT.search(stretch):
            yield stretch, True
            continue
        for run in re.findall("[\ud800-\udfff]+|[^\ud800-\udfff]+", stretch):
            yield run, not _NOT_TEXT.match(run)


def _repeated(stretch: str, n: int) -> Iterator[str]:
    """A text in which a stretch occurs n times, in pieces.

    Line ends keep them apart: by itself, one has nothing to be learned.
    """
    if stretch[-1:].isspace() and not stretch.endswith("\n"):  # one that a line end would change
        yield from repeat(stretch, n)
        return
    line = stretch if stretch.endswith("\n") else f"{stretch}\n"
    at_once = max(1, base.CHUNK // len(line))
    yield from repeat(line * at_once, n // at_once)
    yield line * (n % at_once)


def _cutting() -> Any:
    """Lines first, then words with the space before them, as GPT-2 cuts."""
    cutters = _library().pre_tokenizers
    lines = cutters.Split("\n", "merged_with_previous")
    return cutters.Sequence([lines, cutters.ByteLevel(add_prefix_space=False)])


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as missing:
        raise UserError(
            "level bpe needs Hugging Face's tokenizers", hint="pip install 'elman[bpe]'"
        ) from missing
    return tokenizers
