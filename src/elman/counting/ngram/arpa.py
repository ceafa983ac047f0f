"""ARPA files: the text format in which n-gram toolkits exchange models.

Each line is `log10 p`, a tab, the words of the k-gram, and, where it is the context of longer ones,
a tab and the log10 backoff weight; -99 stands for log 0. Words are separated by spaces, so a token
with white space in it (a space or a newline is a token, at the character level) is written with
percent signs as in a web address: `%20`, `%0A`, and `%25` for the percent sign itself. Tokens that
an ARPA file would take for its own marks (`<s>`, `</s>`, `<UNK>`) begin with `%3C`.
"""

import math
import re
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, unquote

import numpy as np

from elman.counting.ngram.backoff import BackoffTable, Floats
from elman.counting.ngram.counts import Ints, find, grams
from elman.errors import MissingSource, UserError
from elman.files import as_path, atomic
from elman.text.vocab import UNKNOWN, Vocab

BEGIN, END = "<s>", "</s>"
MARKS = (BEGIN, END, "<UNK>")
LOG_ZERO = -99.0
LOG10 = float(np.log(10))
Ids = dict[str, int]
PIECE = 1 << 16
"""Lines written at a time."""

_ESCAPED = re.compile(r"[\s\x00-\x20%]")


def escape(token: Any) -> str:
    """A token as one word of an ARPA file.

    >>> escape(" "), escape("100%"), escape("<s>"), escape("time")
    ('%20', '100%25', '%3Cs>', 'time')
    """
    word = str(token)
    if word in MARKS or not word:
        return "%3C" + word[1:] if word else "%"
    return _ESCAPED.sub(lambda match: quote(match[0], safe=""), word)


def unescape(word: str) -> str:
    """The token behind a word; words that `escape` would not have written are left alone.

    >>> unescape("%20"), unescape("100%25"), unescape("100%"), unescape("%41")
    (' ', '100%', '100%', '%41')
    """
    token = "" if word == "%" else unquote(word)
    return token if escape(token) == word else word


def write(path: Path | str, table: BackoffTable, tokens: Iterable[Any], boundaries: bool) -> None:
    """Write a model whose ids stand for `tokens`; refuse one that the format cannot express."""
    if table.to_unigram and table.order > 2:
        raise UserError(
            "in an ARPA file every order backs off to the one below, and this model to the unigram",
            hint="chain=True fits a model that can be exported",
        )
    if any(weights[-1] != 0 for weights in table.log_backoff):
        raise UserError(
            "an unsmoothed model (epsilon=0) knows nothing after a context it has not seen, "
            "which an ARPA file cannot say",
            hint="epsilon above 0, or Kneser–Ney",
        )
    with atomic(path) as draft, open(draft, "w", encoding="utf-8", errors="surrogatepass") as file:
        words = [*map(escape, tokens), *([END] if boundaries else []), BEGIN]
        file.writelines(_lines(table, words))


def _lines(table: BackoffTable, words: list[str]) -> Iterator[str]:
    extra = [word for word in (UNKNOWN, END) if word not in words]  # KenLM asks for both
    sizes = [len(keys) for keys in table.keys]
    sizes[0] += len(extra)
    yield "\\data\\\n"
    yield from (f"ngram {k}={size}\n" for k, size in enumerate(sizes, 1))
    for k in range(1, table.order + 1):
        yield f"\n\\{k}-grams:\n"
        yield from (f"{LOG_ZERO:g}\t{word}\n" for word in extra if k == 1)
        yield from _section(table, words, k)
    yield "\n\\end\\\n"


def _section(table: BackoffTable, words: list[str], k: int) -> Iterator[str]:
    log_p = np.maximum(table.log_p[k - 1] / LOG10, LOG_ZERO)
    weights = None if k == table.order else table.log_backoff[k - 1] / LOG10
    for start in range(0, len(log_p), PIECE):
        rows = np.arange(start, min(start + PIECE, len(log_p)))
        for row, gram in zip(rows, grams(table.keys, table.base, k, rows).tolist(), strict=True):
            backoff = "" if weights is None else f"\t{weights[row]:.7f}"
            yield f"{log_p[row]:.7f}\t{' '.join(words[i] for i in gram)}{backoff}\n"


def read(path: Path | str, vocab: Vocab | None) -> tuple[BackoffTable, Vocab, bool]:
    """The table of an ARPA file, its vocabulary, and whether it predicts the end of sentences."""
    if not as_path(path).is_file():
        raise MissingSource(f"there is no file {path}", hint="NgramModel.to_arpa writes one")
    with open(path, "rb") as file:
        lines = _Lines(path, file)
        sizes = _header(lines)
        unigrams = _unigrams(lines, sizes[0])
        boundaries = unigrams.get(END, (LOG_ZERO,))[0] > LOG_ZERO
        if vocab is None:
            names = [unescape(word) for word in unigrams if word not in (BEGIN, END, UNKNOWN)]
            vocab = Vocab(dict.fromkeys(names, 1))
        ids = _ids(path, vocab, unigrams, boundaries)
        table = _Builder(lines, ids, unigrams)
        for k, size in enumerate(sizes[1:], 2):
            table.add(k, size)
        lines.expect("\\end\\")
    return table.done(), vocab, boundaries


def _ids(path: Path | str, vocab: Vocab, unigrams: Container[str], boundaries: bool) -> Ids:
    """The id of each word: those of the vocabulary, then the end, then the mark of beginning."""
    words = [*map(escape, vocab.idx_to_token), *([END] if boundaries else []), BEGIN]
    for word in words:
        if word not in unigrams and word not in (UNKNOWN, BEGIN):
            raise UserError(
                f"{path} lists no unigram {word!r}, which the vocabulary has",
                hint="without vocab= the file's own words are the vocabulary",
            )
    return {word: i for i, word in enumerate(words)}


class _Lines:
    """The lines of a file that are not blank, and the number of the last one read."""

    def __init__(self, path: Path | str, file: Iterable[bytes]) -> None:
        self.path = path
        self.numbered = ((n, line.strip()) for n, line in enumerate(file, 1) if line.strip())
        self.number = 0

    def next(self, expected: str) -> bytes:
        self.number, line = next(self.numbered, (self.number, b""))
        return line or self.fail(f"the file ends where {expected} should follow")

    def expect(self, line: str) -> None:
        actual = self.next(line).decode("utf-8", "replace")
        if actual != line:
            self.fail(f"{actual!r} where {line!r} should be")

    def fail(self, problem: str, number: int | None = None) -> NoReturn:
        raise UserError(
            f"{self.path}, line {number or self.number}: {problem}",
            hint="an ARPA file has \\data\\, a section for each order, and \\end\\",
        )


def _header(lines: _Lines) -> list[int]:
    """How many k-grams of each order the file announces; leaves `lines` inside \1-grams:."""
    while lines.next("\\data\\") != b"\\data\\":
        pass
    sizes: list[int] = []
    while (line := lines.next("ngram 1=…")) != b"\\1-grams:" or not sizes:
        match = re.fullmatch(rb"ngram\s+(\d+)\s*=\s*(\d+)", line)
        if not match or int(match[1]) != len(sizes) + 1:
            lines.fail(
                f"{line.decode('utf-8', 'replace')!r} where ngram {len(sizes) + 1}=… should be"
            )
        sizes.append(int(match[2]))
    return sizes


def _entries(lines: _Lines, k: int, size: int) -> Iterator[tuple[list[str], float, float]]:
    """The words, log10 p and log10 backoff of each of the `size` k-grams that follow."""
    for row in range(size):
        line = lines.next(f"{k}-gram {row + 1} of {size}")
        fields = line.split()  # at ASCII white space only
        if line.startswith(b"\\"):
            lines.fail(f"{size} {k}-grams were announced, but only {row} are listed")
        if not k + 1 <= len(fields) <= k + 2:
            lines.fail(
                f"a {k}-gram is a number, {k} words and perhaps a number, not {len(fields)} fields"
            )
        p, weight = (_number(lines, field) for field in (fields[0], (fields[k + 1 :] or [b"0"])[0]))
        if p > 0:
            lines.fail(f"log10 p = {p:g} is above 0: no probability is above 1")
        yield [_word(lines, field) for field in fields[1 : k + 1]], p, weight


def _word(lines: _Lines, field: bytes) -> str:
    try:
        return field.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        lines.fail(f"{field!r} is not UTF-8")


def _unigrams(lines: _Lines, size: int) -> dict[str, tuple[float, float]]:
    unigrams: dict[str, tuple[float, float]] = {}
    for (word,), p, weight in _entries(lines, 1, size):
        if word in unigrams:
            lines.fail(f"{word!r} is listed twice")
        unigrams[word] = p, weight
    return unigrams


def _number(lines: _Lines, field: bytes) -> float:
    try:
        value = float(field)
    except ValueError:
        value = math.nan
    if math.isnan(value) or value == math.inf:
        lines.fail(f"{field.decode('utf-8', 'replace')!r} is not a number")
    return value


class _Builder:
    """Turns the sections of a file into the sorted arrays of a table, one order after another."""

    def __init__(self, lines: _Lines, ids: Ids, unigrams: dict[str, tuple[float, float]]) -> None:
        self.lines, self.ids, self.base = lines, ids, len(ids)
        listed = {i: unigrams[word] for word, i in ids.items() if word in unigrams}
        listed[self.base - 1] = (LOG_ZERO, listed.get(self.base - 1, (0.0, 0.0))[1])
        log_p, weights = np.full(self.base, LOG_ZERO), np.zeros(self.base)
        log_p[list(listed)], weights[list(listed)] = zip(*listed.values(), strict=True)
        self.keys: list[Ints] = [np.arange(self.base)]
        self.log_p, self.weights = [log_p], [weights]

    def add(self, k: int, size: int) -> None:
        self.lines.expect(f"\\{k}-grams:")
        tokens, numbers, where = array("q"), array("d"), array("q")
        for words, p, weight in _entries(self.lines, k, size):
            unknown = next((word for word in words if word not in self.ids), None)
            if unknown is not None:
                self.lines.fail(f"{unknown!r} is not among the unigrams")
            tokens.extend(self.ids[word] for word in words)
            numbers.extend((p, weight))
            where.append(self.lines.number)
        keys = self._keys(np.array(tokens, np.int64).reshape(-1, k), where)
        places = np.argsort(keys)
        keys = keys[places]
        twice = np.flatnonzero(keys[1:] == keys[:-1])
        if len(twice):
            self.lines.fail(
                f"this {k}-gram is listed twice", max(where[i] for i in places[twice[0] :][:2])
            )
        log_p, weights = np.array(numbers).reshape(-1, 2)[places].T
        self.keys.append(keys)
        self.log_p.append(log_p)
        self.weights.append(weights)

    def _keys(self, tokens: Ints, where: Sequence[int]) -> Ints:
        """The key of each row, by way of the rank of its context."""
        rank = tokens[:, 0]
        for j in range(1, tokens.shape[1] - 1):
            rank = find(self.keys[j], rank * self.base + tokens[:, j])
            lost = np.flatnonzero(rank == len(self.keys[j]))
            if len(lost):
                self.lines.fail(
                    f"the first {j + 1} words are not among the {j + 1}-grams", where[lost[0]]
                )
        return rank * self.base + tokens[:, -1]

    def done(self) -> BackoffTable:
        return BackoffTable(
            base=self.base,
            keys=tuple(self.keys),
            log_p=tuple(_nats(p) for p in self.log_p),
            log_backoff=tuple(_nats(np.append(w, 0.0)) for w in self.weights[:-1]),
        )


def _nats(log10: Floats) -> Floats:
    """log10 in natural logarithms; -99 and less is log 0."""
    return np.where(log10 <= LOG_ZERO, -np.inf, log10 * LOG10)
