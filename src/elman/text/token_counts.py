"""How often each token of a text of any size occurs: exactly, and in bounded memory.

Tokens are counted in a table. One that is full is written to disk, sorted, and begun anew; at the
end the sorted runs are merged, where all that was counted of a token meets:

    table  →  run, run, …  →  merged: token, n = Σ n of the runs, first = the least of theirs

`first` numbers the tokens as they first appear, so those that are equally frequent keep an order.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, Self, final

RUNS_AT_ONCE = 64
"""Runs that are merged, and so open, at the same time."""
_BUFFER = 1 << 16


class Counted(NamedTuple):
    """A token, how often it occurs, and a number that is less the earlier it first appears."""

    token: str
    n: int
    first: int


def utf8_length(token: str) -> int:
    """
    >>> utf8_length("née")
    4
    """
    return len(token) if token.isascii() else len(token.encode("utf-8", "surrogatepass"))


@final
class TokenCounts:
    """Counts of tokens, of which at most `room` bytes, at `price(token)` each, are in memory.

    The others lie in files of `folder` that are gone when the block ends.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with TokenCounts(folder, room=2, price=lambda token: 1) as counts:
    ...     for line in ("to be or", "not to be"):
    ...         counts.add({word: 1 for word in line.split()})
    ...     sorted(counts, key=lambda counted: counted.first)[:2]
    [Counted(token='to', n=2, first=0), Counted(token='be', n=2, first=1)]
    """

    def __init__(self, folder: Path, room: int, price: Callable[[str], int]) -> None:
        self._folder, self._room, self._price = folder, room, price
        self._table: dict[str, int] = {}
        self._taken = 0
        self._before = 0  # tokens of the tables before this one
        self._runs: list[Path] = []
        self._made = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs:
            run.unlink(missing_ok=True)

    @property
    def fits(self) -> bool:
        """Whether all that was counted is in memory."""
        return not self._runs

    def add(self, counts: Mapping[str, int]) -> None:
        """Count what another part of the text holds, in the order of first appearance."""
        for token, n in counts.items():
            if token in self._table:
                self._table[token] += n
                continue
            price = self._price(token)
            if self._table and self._taken + price > self._room:
                self._write_table()
            self._table[token] = n
            self._taken += price

    def __iter__(self) -> Iterator[Counted]:
        """Each token once: in the order of appearance if all fit, in that of spelling if not."""
        if self.fits:
            for first, (token, n) in enumerate(self._table.items()):
                yield Counted(token, n, first)
            return
        self._write_table()
        while len(self._runs) > RUNS_AT_ONCE:
            some = self._runs[:RUNS_AT_ONCE]
            self._write_run(_merged(some))
            for run in some:
                run.unlink()
            del self._runs[:RUNS_AT_ONCE]
        for spelled, first, n in _merged(self._runs):
            yield Counted(_token(spelled), n, first)

    def _write_table(self) -> None:
        if not self._table:
            return
        rows = (
            (_spelled(token), self._before + place, n)
            for place, (token, n) in enumerate(self._table.items())
        )
        self._write_run(sorted(rows))
        self._before += len(self._table)
        self._table, self._taken = {}, 0

    def _write_run(self, rows: "Iterable[_Row]") -> None:
        path = self._folder / f".counts-{self._made:05d}.partial"
        self._made += 1
        self._runs.append(path)
        with open(path, "wb", _BUFFER) as file:
            file.writelines(b"%b\t%d\t%d\n" % row for row in rows)


def most_frequent(
    counted: Iterable[Counted], room: int, price: Callable[[str], int], most: int | None = None
) -> list[Counted]:
    """The longest beginning of the tokens by falling frequency that fits into `room` bytes.

    Ties are in the order of first appearance. At most `most` tokens, and never more in memory.
    """
    kept: list[tuple[int, int, str]] = []
    taken, best_left_out = 0, (0, 0, "")
    for token, n, first in counted:
        if (n, -first) < best_left_out[:2]:
            continue
        heapq.heappush(kept, (n, -first, token))
        taken += price(token)
        while taken > room or (most is not None and len(kept) > most):
            best_left_out = heapq.heappop(kept)
            taken -= price(best_left_out[2])
    return [Counted(token, n, -place) for n, place, token in sorted(kept, reverse=True)]


# ---------------------------------------------------------------------- runs on disk

_Row = tuple[bytes, int, int]  # a token as it is written, its `first`, its count
_LINE_END = b"\xff"  # a byte that UTF-8 has no use for, in place of the one that ends a row


def _spelled(token: str) -> bytes:
    return token.encode("utf-8", "surrogatepass").replace(b"\n", _LINE_END)


def _token(spelled: bytes) -> str:
    return spelled.replace(_LINE_END, b"\n").decode("utf-8", "surrogatepass")


def _merged(runs: Iterable[Path]) -> Iterator[_Row]:
    """The rows of sorted runs, those of a token as one."""
    rows = heapq.merge(*map(_rows, runs))
    for spelled, group in groupby(rows, key=itemgetter(0)):
        same = list(group)
        yield spelled, same[0][1], sum(n for _, _, n in same)  # sorted: the least `first` is first


def _rows(run: Path) -> Iterator[_Row]:
    with open(run, "rb", _BUFFER) as file:
        for line in file:
            spelled, first, n = line.rsplit(b"\t", 2)
            yield spelled, int(first), int(n)
