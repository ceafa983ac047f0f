"""Which stretch of text each update reads, and how far its losses are carried back.

One pass over the text is a list of segments, a pure function of (text, options, seed, pass):
nothing has to be remembered to continue it but a number.

    truncated    a window; its gradient stops at the window's edge: biased, bounded
    sliding      a window after `history` steps that are read again; each loss goes back at least
                 `history` steps: less biased, and dearer by (history + window)/window. Not the
                 passes of `recurrence/sliding.py`: there one sequence is at hand and the weights
                 stand still; here they move after every window, so each is an update of its own
    randomized,  a stretch of random length, `window` on average, its gradient weighted by
    polynomial   1/P(no cut yet): the mean is the full gradient
    full         the whole lane: exact, one update per pass

Each is a `Carry` (`elman.gradients.carry`), which says where the text is cut and with what ξ.

**Why the randomised gradient is unbiased.** Cut before step t with probability 1-π_t, depending on
nothing but the cuts before, and let ξ_t = 0 at a cut and 1/π_t elsewhere: E[ξ_t | past cuts] = 1.
What the loss at step s tells step r < s is the full gradient's term times ξ_{r+1} ξ_{r+2} … ξ_s,
whose mean is 1: take the conditional mean of the last factor, then of the one before it. A cut
moves no state: the next segment starts from the state the last one reached, so the terms
themselves do not depend on the cuts. Segments are the stretches between cuts, inside which
ξ_t = 1/π_t ≥ 1. A segment's loss is its *sum* over steps divided by `window`, the mean length; to
divide by its own length would weight a token by the cuts around it and spoil the mean. Added over a
pass (weights held still), the segments' gradients have the full gradient as their mean. As with any
truncation, weights that move between segments make it the gradient of an online learner; and
clipping, which is not linear, bends the mean of what it clips.

With π constant the weight grows as π^-(s-r); `polynomial` lets π rise with the steps since the last
cut, so that it grows as a power (Tallec and Ollivier, 2017, "Unbiasing truncated backpropagation
through time").
"""

import abc
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from elman.errors import UserError
from elman.gradients import Carry, Checkpointed, Chunked, Memory, Time
from elman.gradients.carry import CARRIES, checked_carry, name_of, named
from elman.options import Beside, check, option
from elman.text import batches

SAMPLINGS = ("sequential", "random")
PANEL = "Reading"
CUT = Beside("carry", but="full", such_as="truncated")
"""What an option about several segments in a pass needs."""


def bytes_of(text: str) -> int:
    """
    >>> bytes_of("stored"), bytes_of("64M"), bytes_of("1000")
    (0, 67108864, 1000)
    """
    if text == "stored":
        return 0
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper(), 0)
    digits = text[:-1] if unit else text
    if not digits.isdecimal() or len(digits) > 18 or not int(digits):
        raise UserError(f"--memory {text} is not a size", hint="stored, or bytes: 64M, 2G")
    return int(digits) << unit


def as_size(budget: int) -> str:
    """What one types for a budget of so many bytes."""
    return str(budget) if budget else "stored"


@dataclass(frozen=True)
class Reading:
    """How the text is dealt out to updates, how far back their losses are carried, what is kept.

    `carry` is a name in `elman.gradients.carry.CARRIES` (with `window` and `history` for numbers)
    or a `Carry`, which says window and history itself. `memory` is a number of bytes for the states
    that the forward pass keeps (0: what the model keeps, all unless it was told otherwise), or a
    `Memory`. What has a name or a number is held as such: the two spellings are the same reading.

    >>> from elman.gradients import Truncated
    >>> Reading(carry=Truncated(window=20)) == Reading(carry="truncated", window=20)
    True
    """

    batch_size: int = option(32, "Parallel lanes", panel=PANEL, at_least=1)
    window: int = option(35, "Steps per update", panel=PANEL, at_least=1, later=True)
    sampling: str = option("sequential", "Order of the windows", panel=PANEL, choices=SAMPLINGS)
    carry: str | Carry = option(
        "truncated",
        "How far back a loss goes",
        panel=PANEL,
        choices=CARRIES,
        other=Carry,
        later=True,
    )
    history: int = option(
        0,
        "Sliding: steps read again before a window",
        panel=PANEL,
        at_least=0,
        later=True,
        beside=replace(CUT, such_as="sliding"),
    )
    memory: int | Memory = option(
        0,
        "stored, or a budget: 64M keeps few states and recomputes the rest",
        panel=PANEL,
        at_least=0,
        other=Memory,
        hint="memory=64 << 20 for 64 MiB, or memory=0 for all",
        read=bytes_of,
        show=as_size,
        later=True,
    )
    chunks: int = option(
        0, "Stretches of time side by side; 0: step after step", panel=PANEL, at_least=0
    )
    tolerance: float = option(
        1e-5,
        "Chunks: how far apart they may meet, of a state",
        panel=PANEL,
        above=0,
        below=1,
        beside=Beside("chunks", such_as=8),
    )

    def __post_init__(self) -> None:
        if not isinstance(self.carry, str):
            self._take(checked_carry(self.carry))
        if isinstance(self.memory, Memory) and self.memory.bytes is not None:
            object.__setattr__(self, "memory", self.memory.bytes)
        check(self)
        own, _, _ = self.carry_used.reading(), self.memory_used, self.time_used  # built: checked
        if own is not None and own[1] != self.history:
            raise UserError(
                f"history={self.history} with carry={self.carry}: no steps are read again before "
                "its windows",
                hint="history=0, or carry=sliding",
            )
        if self.sampling == "random" and not self.carry_used.windows:
            raise UserError(
                f"carry={self.carry} needs sampling=sequential: windows drawn at random have no "
                "past to carry anything back to",
                hint="sampling=sequential, or carry=truncated",
            )

    def _take(self, carry: Carry) -> None:
        """The window and the history that a carry brings along, and its name where it has one."""
        usual = (Reading.window, Reading.history)
        own = carry.reading() or (self.window, self.history)
        for name, said, default, here in zip(
            ("window", "history"), (self.window, self.history), usual, own, strict=True
        ):
            if said not in (default, here):
                raise UserError(
                    f"{name}={said} with carry={carry}, whose {name} is {here}",
                    hint=f"leave {name} out, or name the carry: carry={carry.name!r}",
                )
            object.__setattr__(self, name, here)
        object.__setattr__(self, "carry", name_of(carry, *own) or carry)

    @cached_property
    def carry_used(self) -> Carry:
        """What is carried back."""
        if isinstance(self.carry, Carry):
            return self.carry
        return named(self.carry, self.window, self.history)

    @cached_property
    def memory_used(self) -> Memory | None:
        """What is kept; None: what the model keeps."""
        if isinstance(self.memory, Memory):
            return self.memory
        return Checkpointed(budget=self.memory) if self.memory else None

    @property
    def cut_by(self) -> dict[str, Any]:
        """What decides where a pass is cut into segments, and may change while a training goes on.

        A carry of your own goes by its words: it can be told from another, not made again.
        """
        carry = self.carry if isinstance(self.carry, str) else self.carry.words
        return {"window": self.window, "carry": carry, "history": self.history}

    @cached_property
    def time_used(self) -> Time | None:
        """In which order steps run; None: as the model has it."""
        return Chunked(self.chunks, tolerance=self.tolerance) if self.chunks else None

    def check_agrees(self, carry: Carry, memory: Memory, time: Time) -> None:
        """Refuse a model that was given another carry, memory or time than this reading's."""
        mine = self.carry_used
        if not carry.exact and carry.seeded(0) != mine.seeded(0):
            raise UserError(
                f"the model was given carry={carry}, but its training reads by {mine}",
                hint=f"leave the model's carry at Full(), or read by it: Reading(carry={carry})",
            )
        kept = self.memory_used
        if kept is not None and not memory.keeps_all and memory != kept:
            raise UserError(
                f"the model was given memory={memory}, but its training keeps by {kept}",
                hint="leave the model's memory at Stored(), or the reading's memory at 0",
            )
        if self.time_used is not None and time.in_chunks and time != self.time_used:
            raise UserError(
                f"the model was given time={time}, but its training reads by {self.time_used}",
                hint="leave the model's time at Stepped(), or the reading's chunks at 0",
            )

    def check_storable(self) -> None:
        """Refuse what config.json, which holds names and numbers, could not say."""
        if isinstance(self.carry, Carry):
            raise UserError(
                f"carry={self.carry} has no name, so a run folder cannot hold it",
                hint="give it one line in elman.gradients.carry.CARRIES, or train without a folder",
            )
        if isinstance(self.memory, Memory):
            raise UserError(
                f"memory={self.memory} is not a number of bytes, so a run folder cannot hold it",
                hint="e.g. memory=64 << 20, or train without a folder",
            )


class Cut(NamedTuple):
    """How a segment that is not a plain window is read; the fields mean what `Segment`'s do."""

    scored: int
    advance: int
    xi: Tensor | None = None
    until: Tensor | None = None  # where each row ends, if not where x does


class Segment(NamedTuple):
    """What one update reads: y is x one step ahead, both (batch, time)."""

    x: Tensor
    y: Tensor
    fresh: bool  # the state before it is the state before any text
    scored: int  # how many of the newest steps have a loss
    advance: int  # the next segment starts this many steps after this one's start
    divisor: float  # steps that the summed loss of a row is divided by
    xi: Tensor | None = None  # weights of what each step hands back; None: 1

    @property
    def cut(self) -> Cut | None:
        """How it is read, where that is not as a plain window."""
        plain = self.xi is None and self.scored == self.advance == self.x.shape[1]
        return None if plain else Cut(self.scored, self.advance, self.xi)


class Pass(abc.ABC):
    """The segments of one pass over the text."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Segment: ...

    @abc.abstractmethod
    def share(self, index: int) -> float:
        """The part of the pass whose losses lie before segment `index`, 0 to 1."""

    def after(self, share: float) -> int:
        """The first segment all of whose losses lie after this part of the pass; `len`: none.

        Where a training goes on when it is cut otherwise from now on: no loss is taken twice, and
        less than one segment is left out.
        """
        return next((i for i in range(len(self)) if self.share(i) >= share), len(self))


def one_pass(
    ids: Any, reading: Reading, *, seed: int, epoch: int, rows: slice = slice(None)
) -> Pass:
    """Deal out the text once, from an offset drawn for this pass as in the notes.

    Of each batch the segments have these rows only: those of one process.
    """
    chance = np.random.default_rng([seed, epoch])
    if reading.sampling == "random":
        return _Shuffled(ids, reading, chance, rows)
    return _Lanes(ids, reading, chance, rows)


def _offset(ids: Any, reading: Reading, chance: np.random.Generator, below: int) -> int:
    """Where a pass begins, drawn; but a text that fills one batch fills one in every pass."""
    room = len(ids) - 1 - reading.batch_size * reading.window
    return min(int(chance.integers(below)), max(room, 0))


@final
class _Shuffled(Pass):
    """Windows in random order, each from the state before any text."""

    def __init__(
        self, ids: Any, reading: Reading, chance: np.random.Generator, rows: slice
    ) -> None:
        offset, seed = _offset(ids, reading, chance, reading.window), int(chance.integers(2**62))
        self.windows = batches.shuffled(
            ids, batch=reading.batch_size, window=reading.window, offset=offset, seed=seed
        )
        self.windows.rows = rows

    def __len__(self) -> int:
        return len(self.windows)

    def share(self, index: int) -> float:
        return index / len(self)

    def __getitem__(self, index: int) -> Segment:
        self.windows.position = index
        x, y = next(iter(self.windows))
        steps = x.shape[1]
        return Segment(x, y, fresh=True, scored=steps, advance=steps, divisor=steps)


@final
class _Lanes(Pass):
    """Parallel lanes of consecutive text, cut into segments; row b continues row b."""

    def __init__(
        self, ids: Any, reading: Reading, chance: np.random.Generator, rows: slice
    ) -> None:
        offset = _offset(ids, reading, chance, reading.window + 1)
        self.lanes = batches.streams(
            ids, batch=reading.batch_size, window=reading.window, offset=offset
        )
        self.reading, self.rows = reading, rows
        whole = isinstance(self.lanes.x, Tensor)  # rows of an array are cut when they are read
        self.x, self.y = (t[rows] if whole else t for t in (self.lanes.x, self.lanes.y))
        carry = reading.carry_used.seeded(int(chance.integers(2**62)))
        self.edges, self.xi = carry.cuts(self.lanes.x.shape[1])

    def __len__(self) -> int:
        return len(self.edges) - 1

    def share(self, index: int) -> float:
        return float(self.edges[index] / self.edges[-1])

    def __getitem__(self, index: int) -> Segment:
        begin, end = self.edges[index : index + 2]
        start = max(0, begin - self.reading.history)
        last = index + 1 == len(self)
        following = end if last else max(0, end - self.reading.history)
        return Segment(
            *self._between(start, end),
            fresh=index == 0,
            scored=end - begin,
            advance=following - start,
            divisor=self.reading.window if self.reading.carry_used.random else end - begin,
            xi=self._weights(begin, end),
        )

    def _between(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        def int64(lanes: Any) -> Tensor:
            if isinstance(lanes, Tensor):
                return lanes.narrow(1, start, end - start).long()
            return torch.from_numpy(lanes[self.rows, start:end].astype("i8"))

        return int64(self.x), int64(self.y)

    def _weights(self, begin: int, end: int) -> Tensor | None:
        """ξ inside one segment; its first step hands back to a state that is cut off anyway."""
        if self.xi is None:
            return None
        xi = self.xi[begin:end].clone()
        xi[0] = 1
        return xi
