"""A text of any size as a folder of ids, made by `elman prepare` and read a window at a time.

    index.json           how many tokens, of which level, cut where; the checksum of every file
    vocab.json           the tokens, and at level bpe the tokenizer
    00000.ids, …         the ids, in the smallest type that holds them, little-endian, raw
    00000.documents, …   where documents begin: positions in the whole text, 8 bytes each

The ids are memory-mapped: a training touches the windows that it reads. A file that is missing, was
cut or changed is refused by its name.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from elman import strict_json
from elman.errors import UserError
from elman.files import BLANK_SEAL, as_path, check_seal, read_bytes, write_sealed
from elman.text.vocab import Vocab

INDEX, VOCABULARY = "index.json", "vocab.json"
FORMAT, VERSION = "elman shards", 1


@dataclass(frozen=True)
class Shard:
    """One file of ids, and the file beside it that says where documents begin."""

    file: str
    tokens: int
    sha256: str
    documents: int
    documents_file: str
    documents_sha256: str


@dataclass(frozen=True)
class Index:
    """What index.json says."""

    level: str
    clean: str
    lower: bool
    encoding: str
    errors: str
    min_freq: int
    vocab_size: int
    validation: float
    dtype: str
    tokens: int  # in all shards
    train_tokens: int  # of them, at the front; the others are held out, the test at the end
    highest: int  # the largest id
    characters: int  # of text, in all
    held_out_characters: int
    first_characters: int  # of the first held-out token
    documents: int
    vocabulary: str  # SHA-256 of vocab.json
    sources: list[str]
    shards: list[Shard] = field(default_factory=list)
    test: float = 0.0  # folders of older versions have none
    test_tokens: int = 0  # of the held-out ones, at the end
    test_characters: int = 0
    test_first_characters: int = 0

    @property
    def sha256(self) -> str:
        """The fingerprint of the text: of every shard, and of the vocabulary."""
        digest = hashlib.sha256(self.vocabulary.encode())
        for shard in self.shards:
            digest.update(shard.sha256.encode())
        digest.update(str(self.train_tokens).encode())
        if self.test_tokens:
            digest.update(f" {self.test_tokens}".encode())
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write index.json, sealed: a folder that has one is whole."""
        record = {"format": FORMAT, "version": VERSION, **asdict(self), "seal": BLANK_SEAL}
        write_sealed(folder / INDEX, strict_json.dumps(record, indent=1).encode() + b"\n")

    @classmethod
    def load(cls, folder: Path) -> "Index":
        """Read what `save` wrote; anything else is refused."""
        path = folder / INDEX
        data = read_bytes(path)
        check_seal(data, path)
        try:
            record = strict_json.loads(data)
            if (record["format"], record["version"]) != (FORMAT, VERSION):
                raise ValueError(f"its format is {record['format']} {record['version']}")
            known = {f.name: record[f.name] for f in fields(cls) if f.name in record}
            known["shards"] = [Shard(**shard) for shard in record["shards"]]
            return cls(**known)
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise UserError(
                f"{path} is not the index of a prepared text: {problem!r}",
                hint="prepare the text again",
            ) from problem


def is_prepared(source: Any) -> bool:
    """Whether a source is a folder that `elman prepare` has written."""
    try:
        return source != "-" and (Path(str(source)).expanduser() / INDEX).is_file()
    except (OSError, RuntimeError, ValueError):
        return False


@final
class Shards:
    """A prepared text, opened: every file checked, none in memory."""

    def __init__(self, folder: Path | str, *, check: bool = True) -> None:
        self.folder = as_path(folder).expanduser()
        self.index = Index.load(self.folder)
        if sha256_of(self.folder / VOCABULARY) != self.index.vocabulary:
            raise _changed(self.folder / VOCABULARY)
        self.vocab = Vocab.load(self.folder / VOCABULARY)
        dtype = np.dtype(self.index.dtype).newbyteorder("<")
        files = [self._mapped(s.file, dtype, s.tokens, s.sha256, check) for s in self.index.shards]
        self._positions = [
            self._mapped(s.documents_file, np.dtype("<u8"), s.documents, s.documents_sha256, check)
            for s in self.index.shards
        ]
        self.ids = ShardedIds(files, self.index.highest)

    def _mapped(
        self, name: str, dtype: np.dtype[Any], count: int, sha256: str, check: bool
    ) -> NDArray[Any]:
        path = self.folder / name
        size = path.stat().st_size if path.is_file() else -1
        if size != count * dtype.itemsize:
            what = "is missing" if size < 0 else f"has {size:,} bytes"
            raise UserError(
                f"the shard {path} {what}, and should have {count * dtype.itemsize:,}",
                hint="copy it again, or prepare the text again",
            )
        if check and sha256_of(path) != sha256:
            raise _changed(path)
        return np.memmap(path, dtype, "r") if count else np.empty(0, dtype)

    @property
    def sha256(self) -> str:
        """The fingerprint of the text and its vocabulary."""
        return self.index.sha256

    @property
    def train(self) -> "ShardedIds":
        """The ids to train on."""
        return self.ids[: self.index.train_tokens]

    @property
    def validation(self) -> "ShardedIds":
        """The ids held out to choose by."""
        return self.ids[self.index.train_tokens : self.index.tokens - self.index.test_tokens]

    @property
    def test(self) -> "ShardedIds":
        """The ids held out to report, at the end."""
        return self.ids[self.index.tokens - self.index.test_tokens :]

    @property
    def documents(self) -> NDArray[np.uint64]:
        """Where each document begins, as a position among the ids."""
        return np.concatenate([np.empty(0, "<u8"), *self._positions])


@final
class ShardedIds:
    """The ids of several files as one array, of which only what is asked for is read.

    >>> ids = ShardedIds([np.arange(3, dtype="u1"), np.arange(3, 7, dtype="u1")], highest=6)
    >>> len(ids), int(ids[2]), np.asarray(ids[1:5]).tolist()
    (7, 2, [1, 2, 3, 4])
    >>> ids[:6].reshape(2, 3)[:, 1:].tolist()
    [[1, 2], [4, 5]]
    """

    ndim = 1

    def __init__(
        self, parts: Sequence[NDArray[Any]], highest: int, start: int = 0, stop: int | None = None
    ) -> None:
        self._parts, self._highest = parts, highest
        self._edges = np.cumsum([0, *map(len, parts)])
        self._start = start
        self._stop = int(self._edges[-1]) if stop is None else stop

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the ids."""
        return self._parts[0].dtype if self._parts else np.dtype("u1")

    @property
    def shape(self) -> tuple[int]:
        """One dimension."""
        return (len(self),)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                return self.read()[key]
            return ShardedIds(
                self._parts, self._highest, self._start + start, self._start + max(start, stop)
            )
        if np.ndim(key):
            return self.read()[key]
        at = range(len(self))[key]
        return self[at : at + 1].read()[0]

    def read(self) -> NDArray[Any]:
        """The ids themselves, in memory."""
        first = max(0, int(np.searchsorted(self._edges, self._start, "right")) - 1)
        pieces = []
        for part, edge in zip(self._parts[first:], self._edges[first:], strict=False):
            if edge >= self._stop:
                break
            pieces.append(part[max(0, self._start - edge) : self._stop - edge])
        return np.concatenate([np.empty(0, self.dtype), *pieces])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        ids = self.read()
        return ids if dtype is None else ids.astype(dtype)

    def reshape(self, rows: int, length: int) -> "Rows":
        """As so many rows, each of them read only where it is asked for."""
        return Rows(self, rows, length)

    def min(self) -> int:
        """No id is smaller."""
        return 0

    def max(self) -> int:
        """No id is larger: known since the ids were written."""
        return self._highest


@final
class Rows:
    """Stretches of ids of one length, one after the other."""

    def __init__(self, ids: ShardedIds, rows: int, length: int) -> None:
        self.ids, self.shape = ids, (rows, length)

    def __getitem__(self, key: Any) -> NDArray[Any]:
        which, steps = key if isinstance(key, tuple) else (key, slice(None))
        start, stop, _ = steps.indices(self.shape[1])
        begins = np.arange(self.shape[0])[which] * self.shape[1]
        stretches = [self.ids[b + start : b + stop].read() for b in begins.tolist()]
        return np.stack(stretches) if stretches else np.empty((0, stop - start), self.ids.dtype)


def sha256_of(path: Path) -> str:
    """Of a file that is read a block at a time."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise UserError(
            f"cannot read {path}: {problem.strerror}", hint="prepare the text again"
        ) from problem


def _changed(path: Path) -> UserError:
    return UserError(
        f"{path} is damaged: its contents do not match the checksum they were written with",
        hint="copy it again, or prepare the text again",
    )
