"""From texts of any size to a folder of ids (`elman.text.shards`), with memory for a piece of them.

The texts are read up to three times: measured (where does the held-out part begin?), counted (the
vocabulary, or the tokenizer, of the training part alone, `learned_vocab.py`), encoded. Each shard
is written whole; then what has been done is noted in `progress.json`. Killed at any moment, the
same request goes on behind the last whole shard and ends in the same files, to the last byte. One
process at a time writes into a folder (`folders/lock.py`); a text that another is to replace lies
in `FOLDER/.replaced` until that one is whole.
"""

import hashlib
import json
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from elman import strict_json
from elman.errors import UserError
from elman.files import BLANK_SEAL, as_path, atomic, read_sealed, write_sealed
from elman.folders import replaced
from elman.folders.lock import NAME as LOCK
from elman.folders.lock import Lock
from elman.text import corpus, learned_vocab, prepared
from elman.text.levels import Level, level_of
from elman.text.prepared import Data
from elman.text.shards import INDEX, VOCABULARY, Index, Shard, sha256_of
from elman.text.streaming import Step, Stream, files_of, is_jsonl
from elman.text.vocab import Vocab

PROGRESS = "progress.json"
CUT = 2
"""How texts are cut into pieces, in which progress is counted; another number is another way."""


@dataclass(frozen=True)
class Request:
    """What to prepare; `data` says how, as for a training."""

    sources: tuple[str, ...]
    data: Data
    field: str = "text"
    shard_tokens: int = 1 << 24

    def __post_init__(self) -> None:
        if self.data.clean == "letters":
            raise UserError(
                "clean=letters joins all lines of a text, which must be in memory for that",
                hint="clean=newlines or none",
            )
        for name in ("max_tokens", "train_tokens"):
            if getattr(self.data, name):
                raise UserError(f"{name} does not belong to preparing", hint="train takes it")
        if self.data.validation + self.data.test >= 1:
            raise UserError(
                f"validation={self.data.validation} and test={self.data.test} leave nothing to "
                "train on",
                hint="their sum must be below 1; try validation=0.1, test=0.1",
            )
        if self.shard_tokens < 1:
            raise UserError(f"shard_tokens={self.shard_tokens} must be positive", hint="16777216")


class Part(NamedTuple):
    """A piece of cleaned text that lies in one part of the split."""

    text: str | bytes
    which: int  # 0 trains, 1 validates, 2 tests
    begins: bool  # a document

    @property
    def trains(self) -> bool:
        """Whether vocabulary and tokenizer may know it."""
        return self.which == 0


@dataclass
class Counters:
    """What is known of the text up to some part of it."""

    parts: int = 0
    tokens: int = 0
    train_tokens: int = 0
    highest: int = 0
    characters: int = 0
    held_out_characters: int = 0
    first_characters: int = 0
    documents: int = 0
    test_tokens: int = 0
    test_characters: int = 0
    test_first_characters: int = 0


def prepare(request: Request, out: Path, *, force: bool = False) -> Generator[Step, None, None]:
    """Prepare the texts in the folder `out`, or go on where this was left; yields now and then.

    `force` replaces the prepared text that is there once this one is whole. Until then the old one
    lies aside; where this one fails it is put back, and where it is stopped the same request
    without `force` goes on.
    """
    out = as_path(out)
    learned_vocab.check_subwords(request.data)
    stream = _stream(request)
    record = _request_record(request, stream)
    _check_room(out, force)
    with _owned(out):
        done = _begin(out, record, force)
        with _put_back_if_it_fails(out):
            yield from _prepared(request, stream, record, out, done)
        replaced.forget(out)


def _prepared(
    request: Request,
    stream: Stream,
    record: dict[str, Any],
    out: Path,
    done: dict[str, Any] | None,
) -> Generator[Step, None, None]:
    """Everything from where it was left to a folder that is whole."""
    if done is None:
        total = 0
        for step in _measured(request, stream):
            total = step.done
            yield step
        _check_unchanged(stream, record)
        done = {"request": record, "total": total, "shards": [], "skip": 0, "counters": {}}
        _note(out, done)
    if not (out / VOCABULARY).exists():
        try:
            yield from _count(request, stream, out, done["total"])
        except UserError:  # the same request will never go on
            replaced.clear(out)
            raise
    yield from _encode(request, stream, out, done)


def _check_unchanged(stream: Stream, record: dict[str, Any]) -> None:
    """Refuse texts that have changed while they were read: what was found in them may be wrong."""
    try:
        files = _files_record(stream)
    except OSError as problem:
        raise UserError(
            f"{problem.filename} has gone while it was read", hint="prepare a copy of it"
        ) from problem
    for then, now in zip(record["files"], files, strict=True):
        if then != now:
            raise UserError(
                f"{now[0]} has changed while it was read: from {then[1]:,} to {now[1]:,} bytes",
                hint="prepare a copy of it, with --force",
            )


def _stream(request: Request) -> Stream:
    data = request.data
    corpus.check_encoding(data.encoding, data.errors)
    files = files_of(list(request.sources))
    anywhere = level_of(data.level).cut_anywhere
    if request.field != Request.field and not any(is_jsonl(file) for file in files):
        raise UserError(
            f"field={request.field} means nothing: none of the files is .jsonl",
            hint="leave it out; other files are text from the first byte to the last",
        )
    return Stream(files, data.raw, request.field, data.encoding, data.errors, anywhere)


def _request_record(request: Request, stream: Stream) -> dict[str, Any]:
    """All that the result depends on."""
    options = asdict(replace(request.data, source="-"))
    return {
        "cut": CUT,
        "files": _files_record(stream),
        "field": request.field,
        "shard_tokens": request.shard_tokens,
        "data": options,
    }


def _files_record(stream: Stream) -> list[list[Any]]:
    files = ((file, file.stat()) for file in stream.files)
    return [[str(file.absolute()), stat.st_size, stat.st_mtime_ns] for file, stat in files]


# ---------------------------------------------------------------------- the folder


def _check_room(out: Path, force: bool) -> None:
    """Refuse a folder that holds anything else, or a whole text that is not to be replaced.

    What a killed process has left beside a whole text does not count: see `_settle`.
    """
    try:
        present = sorted(path.name for path in out.iterdir()) if out.exists() else []
    except OSError as problem:
        raise _unusable(out, problem) from problem
    foreign = [name for name in present if not _is_ours(name)]
    if foreign:
        raise UserError(
            f"{out} holds {foreign[0]}, which is not part of a prepared text",
            hint="name another folder with --out",
        )
    if not force and INDEX in present and not {replaced.NAME, PROGRESS} & set(present):
        raise UserError(
            f"{out} is a prepared text already", hint="--force replaces it, or name another folder"
        )


def _is_ours(name: str) -> bool:
    ours = (INDEX, VOCABULARY, PROGRESS, LOCK, replaced.NAME, replaced.FORGOTTEN)
    return name in ours or name.endswith((".ids", ".documents", ".partial"))


def _unusable(out: Path, problem: OSError) -> UserError:
    return UserError(
        f"cannot make the folder {out}: {problem.strerror}", hint="name another with --out"
    )


@contextmanager
def _owned(out: Path) -> Iterator[None]:
    """A folder in which nobody else writes inside this block; a new one is removed if empty."""
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise _unusable(out, problem) from problem
    lock = None
    try:
        lock = Lock(out, "prepared")
        yield
    finally:
        if lock is not None:
            lock.release()
        if is_new and not any(out.iterdir()):
            out.rmdir()


@contextmanager
def _put_back_if_it_fails(out: Path) -> Iterator[None]:
    """The text that was there before, if there was one; a preparation that is stopped can go on."""
    try:
        yield
    except Exception:
        replaced.put_back(out, INDEX)
        raise


def _begin(out: Path, request: dict[str, Any], force: bool) -> dict[str, Any] | None:
    """Find out how far this request has come in the folder, now ours; None: not begun."""
    _settle(out)
    _check_room(out, force)
    if force or not (out / PROGRESS).exists():
        replaced.set_aside(out, INDEX)
        return None
    done = json.loads(read_sealed(out / PROGRESS))
    if done["request"] != json.loads(json.dumps(request)):
        raise UserError(
            f"{out} holds the beginning of another preparation, or its texts have changed",
            hint="--force begins again, or name another folder with --out",
        )
    for draft in out.glob(".*.partial"):  # what a crash left half written
        draft.unlink()
    return done


def _settle(out: Path) -> None:
    """End what a killed process had begun: setting a text aside, putting it back, finishing."""
    if not replaced.lies_aside(out, INDEX):
        replaced.put_back(out, INDEX)
    if (out / INDEX).exists():
        (out / PROGRESS).unlink(missing_ok=True)
        replaced.forget(out)


def _note(out: Path, done: dict[str, Any]) -> None:
    write_sealed(out / PROGRESS, strict_json.dumps(done | {"seal": BLANK_SEAL}).encode())


# ---------------------------------------------------------------------- reading


def _parts(request: Request, stream: Stream, total: int) -> Iterator[Part]:
    """The text, cleaned, cut where what is held out begins: at the end of a line."""
    ends = _ends(request.data, total)
    seen, which, begins = 0, 0, True
    for piece in stream.pieces():
        text, yielded = prepared.cleaned(request.data, piece.text), False
        while which < len(ends) and seen + len(text) > ends[which]:
            cut = _line_end(text, ends[which] - seen) if seen < ends[which] else 0
            if cut:
                yield Part(text[:cut], which, begins)
                yielded, begins = True, False
            text, seen, which = text[cut:], seen + cut, which + 1
        if text or not yielded:
            yield Part(text, which, begins)
        seen, begins = seen + len(text), piece.ends


def _ends(data: Data, total: int) -> list[int]:
    """Before how many characters the training part ends at the earliest, and that to choose by."""
    held_out = data.validation + data.test
    if not held_out:
        return []
    return [round(total * (1 - held_out)), *([round(total * (1 - data.test))] if data.test else [])]


def _line_end(text: str | bytes, start: int) -> int:
    """The end of the line at `start`, or of the word, or of the text."""
    ends: tuple[Any, ...] = ("\n", " ") if isinstance(text, str) else (b"\n", b" ")
    for end in ends:
        at = text.find(end, max(0, start - 1))
        if 0 <= at < len(text) - 1:
            return at + 1
    return len(text) if isinstance(text, str) else start


def _measured(request: Request, stream: Stream) -> Iterator[Step]:
    done = 0
    for piece in stream.pieces():
        done += len(prepared.cleaned(request.data, piece.text))
        yield Step("measuring", done, None)
    if not done:
        raise UserError(
            f"{', '.join(request.sources)} has no text in it", hint="a model needs some text"
        )


def _count(request: Request, stream: Stream, out: Path, total: int) -> Generator[Step, None, None]:
    """Write the vocabulary of the training part; nothing of it stays in memory."""
    parts = takewhile(lambda part: part.trains, _parts(request, stream, total))
    vocab = yield from learned_vocab.learn(request.data, (part.text for part in parts), out, total)
    vocab.save(out / VOCABULARY)


# ---------------------------------------------------------------------- writing


def _encode(request: Request, stream: Stream, out: Path, done: dict[str, Any]) -> Iterator[Step]:
    vocab = Vocab.load(out / VOCABULARY)
    writer = _Writer(request, out, done, vocab)
    parts = _parts(request, stream, done["total"])
    before = _before(writer.level, islice(parts, writer.counters.parts))
    for part in parts:
        before = writer.take(part, before)
        yield Step("encoding", writer.counters.characters, done["total"], writer.counters.tokens)
    _check_unchanged(stream, done["request"])
    writer.finish()


def _before(level: Level, parts: Iterator[Part]) -> Any:
    """Go through parts that were encoded before; what must be known of them to count what follows.

    The last three that are not empty have it all: of bytes, a character's.
    """
    before: Any = None
    for text in deque((part.text for part in parts if part.text), maxlen=3):
        before = level.tail(level.cut(text), before)
    return before


@final
class _Writer:
    """Ids on their way into shards."""

    def __init__(self, request: Request, out: Path, done: dict[str, Any], vocab: Vocab) -> None:
        self.request, self.out, self.done, self.vocab = request, out, done, vocab
        self.level: Level = vocab.level_used
        self.dtype = vocab.dtype.newbyteorder("<")
        self.counters = Counters(**done["counters"])
        self.shards = [Shard(**shard) for shard in done["shards"]]
        self.written = sum(shard.tokens for shard in self.shards)
        self.waiting = bytearray()  # ids that are in no shard yet
        self.begins = array("Q")  # documents that are in none
        self._skip = int(done["skip"])  # ids of the next part that are in a shard already

    def take(self, part: Part, before: Any) -> Any:
        """Encode one part; returns what must be known of it to count what follows."""
        earlier = replace(self.counters)
        cut = self.level.cut(part.text)
        ids = self.vocab.encode_cut(cut)
        self._count(part, cut, ids, before)
        if part.begins and earlier.tokens >= self.written:
            self.begins.append(earlier.tokens)
        self.waiting += ids[self._skip :].astype(self.dtype, copy=False).tobytes()
        self._skip = 0
        self._fill(earlier)
        return self.level.tail(cut, before)

    def _count(self, part: Part, cut: Any, ids: NDArray[Any], before: Any) -> None:
        counters = self.counters
        characters = self.level.characters(cut, before)
        counters.parts += 1
        counters.tokens += len(ids)
        counters.characters += characters
        counters.documents += part.begins
        counters.highest = max(counters.highest, int(ids.max()) if len(ids) else 0)
        if part.trains:
            counters.train_tokens += len(ids)
            return
        first = self.level.characters(cut[:1], before)
        if counters.tokens - len(ids) == counters.train_tokens:  # nothing is held out before it
            counters.first_characters = first
        counters.held_out_characters += characters
        if part.which == 2:
            if not counters.test_tokens:
                counters.test_first_characters = first
            counters.test_characters += characters
            counters.test_tokens += len(ids)

    def _check_parts(self) -> None:
        """Refuse a cut that leaves one of the parts that were asked for empty."""
        data, counters = self.request.data, self.counters
        validated = counters.tokens - counters.train_tokens - counters.test_tokens
        for name, tokens in (("validation", validated), ("test", counters.test_tokens)):
            if getattr(data, name) and not tokens:
                raise UserError(
                    f"{name}={getattr(data, name)} of this text is nothing: parts end where lines "
                    "do",
                    hint=f"a larger part, or more text, or {name}=0 for none; --force begins again",
                )
        if not counters.train_tokens:
            raise UserError(
                f"validation={data.validation} and test={data.test} leave nothing of this text to "
                "train on: parts end where lines do",
                hint="smaller parts, or more text; --force begins again",
            )

    def _fill(self, earlier: Counters) -> None:
        """Write shards as they become full; `earlier` is what was known before the last part."""
        tokens = self.request.shard_tokens
        while len(self.waiting) >= tokens * self.dtype.itemsize:
            self._write(np.frombuffer(self.waiting, self.dtype, tokens))
            del self.waiting[: tokens * self.dtype.itemsize]
            self.done["counters"] = asdict(earlier)
            self.done["skip"] = self.written - earlier.tokens
            _note(self.out, self.done)

    def _write(self, ids: NDArray[Any]) -> None:
        end = self.written + len(ids)
        count = bisect_left(self.begins, end)
        here, self.begins = self.begins[:count], self.begins[count:]
        name = f"{len(self.shards):05d}"
        shard = Shard(
            f"{name}.ids",
            len(ids),
            _written(self.out / f"{name}.ids", ids),
            len(here),
            f"{name}.documents",
            _written(self.out / f"{name}.documents", np.array(here, "<u8")),
        )
        self.shards.append(shard)
        self.done["shards"] = [asdict(each) for each in self.shards]
        self.written = end

    def finish(self) -> None:
        """The last shard, and the index, which makes the folder whole."""
        rest = np.frombuffer(self.waiting, self.dtype)
        if len(rest) or not self.shards:
            self._write(rest)
        data, counters = self.request.data, self.counters
        self._check_parts()
        Index(
            level=data.level,
            clean=data.clean,
            lower=data.lower,
            encoding=data.encoding,
            errors=data.errors,
            min_freq=data.min_freq or 0,
            vocab_size=data.vocab_size,
            validation=data.validation,
            dtype=str(self.vocab.dtype),
            tokens=counters.tokens,
            train_tokens=counters.train_tokens,
            highest=counters.highest,
            characters=counters.characters,
            held_out_characters=counters.held_out_characters,
            first_characters=counters.first_characters,
            documents=counters.documents,
            vocabulary=sha256_of(self.out / VOCABULARY),
            sources=[str(source) for source in self.request.sources],
            shards=self.shards,
            test=data.test,
            test_tokens=counters.test_tokens,
            test_characters=counters.test_characters,
            test_first_characters=counters.test_first_characters,
        ).save(self.out)
        (self.out / PROGRESS).unlink(missing_ok=True)


def _written(path: Path, values: NDArray[Any]) -> str:
    """Write an array, atomically; its SHA-256."""
    written = np.ascontiguousarray(values).data
    with atomic(path) as draft:
        draft.write_bytes(written)  # values.tofile does not say why it wrote less, on a full disk
    return hashlib.sha256(written).hexdigest()
