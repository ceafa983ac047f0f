"""From ids to mini-batches of windows: which row continues which, and where we are.

Two ways to cut a long text into windows of `window` steps. `streams` reads it as parallel lanes, so
that a hidden state carried from one window meets the tokens that follow it; `shuffled` deals the
windows out in random order. Both return an object that can be iterated, saved and restored:

- `for x, y in batches` goes on from the position, so a loop that was left early continues where it
  stopped; after the last batch the position returns to the start and the next `for` reads the text
  again (`shuffled` in the same order: a new order is a new object with another seed).
- `state()` is a small dictionary fit for JSON; `restore(state)`, on an object made the same way
  over the same text, continues with exactly the batches that would have come next.

With `world_size` above 1 each rank reads its share of every batch: consecutive rows, as many as any
other rank's or one fewer. The position is the same on all ranks, so one saved state serves them
all.
"""

import abc
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elman.errors import OutOfRange, UserError, counted
from elman.options import whole_number
from elman.text.shards import ShardedIds

Ids = Sequence[int] | NDArray[Any] | ShardedIds | Tensor
"""One-dimensional integers: a list, an array, a memory map or several, a tensor on any device."""


def shares(total: int, parts: int) -> list[slice]:
    """`total` rows in so many consecutive parts, whose sizes differ by at most one.

    >>> shares(10, 4)
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None)]
    """
    small, larger = divmod(total, parts)
    edges = [i * small + min(i, larger) for i in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def streams(
    ids: Ids, *, batch: int, window: int, offset: int = 0, rank: int = 0, world_size: int = 1
) -> "Streams":
    """Read one long text as `batch` parallel lanes, `window` steps at a time.

    Row b of each window continues row b of the window before, so a hidden state carried across
    windows always meets the tokens that follow it. The first `offset` tokens are skipped; the notes
    draw it at random from 0 to `window` for each pass. Of an int64 tensor the windows are views.

    >>> for x, y in streams(torch.arange(13), batch=2, window=3):
    ...     print(x.tolist(), y.tolist())
    [[0, 1, 2], [6, 7, 8]] [[1, 2, 3], [7, 8, 9]]
    [[3, 4, 5], [9, 10, 11]] [[4, 5, 6], [10, 11, 12]]
    """
    return Streams(ids, batch, window, offset, rank, world_size)


def shuffled(
    ids: Ids,
    *,
    batch: int,
    window: int,
    offset: int = 0,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> "Shuffled":
    """Cut the text into windows after `offset` tokens and deal them out in random order.

    Every window comes at most once per pass. The windows that do not fill a last batch are left
    out: fewer than `batch` of them, and with each seed others.

    >>> batches = shuffled(torch.arange(13), batch=2, window=3, seed=1)
    >>> sorted(row for x, _ in batches for row in x.tolist())
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    """
    return Shuffled(ids, batch, window, offset, seed, rank, world_size)


class Batches(abc.ABC):
    """Mini-batches (x, y) of shape (rows, window), int64, y one step ahead, and a position."""

    seed: int | None = None

    def __init__(
        self, ids: Ids, batch: int, window: int, offset: int, rank: int, world_size: int
    ) -> None:
        self.ids = flat_integers(ids)
        self.batch, self.window, self.offset = _shape(batch, window, offset)
        self.rows = _rows(self.batch, rank, world_size)
        self.position = 0

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many batches one pass has."""

    @abc.abstractmethod
    def _windows(self, position: int) -> tuple[Any, Any]:
        """The batch at `position`, still of the type of `ids`."""

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        """The batch at `position`, wherever the reading stands."""
        if not 0 <= position < len(self):
            raise OutOfRange(
                f"there is no batch {position} in a pass of {len(self)}",
                hint=f"batches run from 0 to {len(self) - 1}",
            )
        x, y = self._windows(position)
        return _int64(x), _int64(y)

    def _made_with(self) -> dict[str, Any]:
        """What a saved position depends on; not the ranks, which share it."""
        return {
            "sampling": type(self).__name__.lower(),
            "tokens": len(self.ids),
            "batch": self.batch,
            "window": self.window,
            "offset": self.offset,
            "seed": self.seed,
        }

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.position < len(self):
            x, y = self[self.position]
            self.position += 1  # before the yield: a state saved now continues after this batch
            yield x, y
        self.position = 0

    def state(self) -> dict[str, Any]:
        """The position, and what it is a position in: plain values, fit for JSON."""
        return {"position": self.position, **self._made_with()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position that `state` gave."""
        position = state.get("position")
        for name, mine in self._made_with().items():
            theirs = state.get(name)
            if theirs != mine:
                raise UserError(
                    f"the saved position belongs to {name}={theirs!r}, not {name}={mine!r}",
                    hint="restore into batches made the same way, over the same text",
                )
        if not isinstance(position, int) or not 0 <= position <= len(self):
            raise UserError(
                f"position {position!r} must be an integer from 0 to {len(self)}",
                hint="pass what state() returned",
            )
        self.position = position


@final
class Streams(Batches):
    """Sequential partitioning; made by `streams`."""

    def __init__(
        self, ids: Ids, batch: int, window: int, offset: int, rank: int, world_size: int
    ) -> None:
        super().__init__(ids, batch, window, offset, rank, world_size)
        batch, window, offset = self.batch, self.window, self.offset
        lane = max(len(self.ids) - offset - 1, 0) // batch
        if lane < window:
            raise UserError(
                f"{_tokens(self.ids, offset)} over batch={batch} lanes leave {lane} steps per lane "
                f"(the last token is only a label), fewer than window={window}",
                hint=_enough(batch, window, offset, fits=lane),
            )
        self.x = self.ids[offset : offset + batch * lane].reshape(batch, lane)
        self.y = self.ids[offset + 1 : offset + 1 + batch * lane].reshape(batch, lane)

    def __len__(self) -> int:
        return self.x.shape[1] // self.window

    def _windows(self, position: int) -> tuple[Any, Any]:
        steps = slice(position * self.window, (position + 1) * self.window)
        return self.x[self.rows, steps], self.y[self.rows, steps]


@final
class Shuffled(Batches):
    """Random sampling; made by `shuffled`."""

    def __init__(
        self, ids: Ids, batch: int, window: int, offset: int, seed: int, rank: int, world_size: int
    ) -> None:
        super().__init__(ids, batch, window, offset, rank, world_size)
        batch, window, offset = self.batch, self.window, self.offset
        seed = whole_number("seed", seed, at_least=0, hint="any whole number will do")
        windows = max(len(self.ids) - offset - 1, 0) // window
        if windows < batch:
            raise UserError(
                f"{_tokens(self.ids, offset)} make {windows} windows of {window} steps "
                f"(the last token is only a label), fewer than batch={batch}",
                hint=_enough(batch, window, offset),
            )
        self.seed = seed
        self.x = self.ids[offset : offset + windows * window].reshape(windows, window)
        self.y = self.ids[offset + 1 : offset + 1 + windows * window].reshape(windows, window)
        order = np.random.default_rng(seed).permutation(windows)
        beside = isinstance(self.x, Tensor)  # copied once: each copy waits for all a GPU has to do
        self.order = torch.from_numpy(order).to(self.x.device) if beside else order

    def __len__(self) -> int:
        return len(self.order) // self.batch

    def _windows(self, position: int) -> tuple[Any, Any]:
        chosen = self.order[position * self.batch : (position + 1) * self.batch][self.rows]
        return self.x[chosen], self.y[chosen]


def flat_integers(ids: Ids) -> Any:
    """A 1-D tensor as it is, else a 1-D array, over the same memory where torch can read that."""
    if isinstance(ids, ShardedIds):
        return ids
    try:
        flat = ids if isinstance(ids, Tensor) else np.asarray(ids)
    except ValueError as ragged:
        raise UserError(
            "ids must be one flat list, not lines of different lengths",
            hint="vocab.encode(tokens) makes one flat array of the tokens of all lines",
        ) from ragged
    if isinstance(flat, Tensor):
        whole = not (flat.is_floating_point() or flat.is_complex() or flat.dtype == torch.bool)
    else:
        whole = flat.dtype.kind in "iu" or flat.size == 0
    if flat.ndim != 1 or not whole:
        raise UserError(
            f"ids must be one-dimensional integers, not {flat.ndim}-dimensional {flat.dtype}",
            hint="vocab.encode(text) makes them",
        )
    if isinstance(flat, np.ndarray) and (flat.strides[0] < 0 or not flat.dtype.isnative):
        return flat.astype(flat.dtype.newbyteorder("="), order="C")  # torch cannot read these
    return flat


def _int64(window: Any) -> Tensor:
    if isinstance(window, Tensor):
        return window.long()
    return torch.from_numpy(window.astype(np.int64, order="C"))


def _shape(batch: int, window: int, offset: int) -> tuple[int, int, int]:
    """The three as they were asked for, checked."""
    batch = whole_number("batch", batch, at_least=1, hint="try batch=32")
    window = whole_number("window", window, at_least=1, hint="try window=32")
    offset = whole_number("offset", offset, hint="offset=0 begins at the first token")
    if not 0 <= offset <= window:
        raise UserError(
            f"offset={offset} must be from 0 to window={window}",
            hint="it only shifts where windows begin; corpus.split or a slice skips more text",
        )
    return batch, window, offset


def _rows(batch: int, rank: int, world_size: int) -> slice:
    """The rows of every batch that one of several processes reads."""
    alone = "rank=0, world_size=1 is a single process"
    rank = whole_number("rank", rank, hint=alone)
    world_size = whole_number("world_size", world_size, hint=alone)
    if not 0 <= rank < world_size:
        raise UserError(
            f"rank={rank} must be from 0 to world_size - 1, and world_size={world_size} at least 1",
            hint=alone,
        )
    if batch < world_size:
        raise UserError(
            f"batch={batch} rows are too few for world_size={world_size} ranks",
            hint=f"batch={world_size} gives each of them one",
        )
    return shares(batch, world_size)[rank]


def _tokens(ids: Any, offset: int) -> str:
    return counted(len(ids), "tokens") + (f" after offset={offset}" if offset else "")


def _enough(batch: int, window: int, offset: int, fits: int = 0) -> str:
    needed = offset + batch * window + 1
    smaller = f"window={fits} fits" if fits else "a smaller window"
    return (
        f"offset + batch × window + 1 = {needed} tokens are enough: "
        f"use more text, a smaller batch, or {smaller}"
    )
