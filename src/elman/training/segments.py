"""Which stretch of text each update reads, and how far its losses are carried back.

One pass over the text is a list of segments, a pure function of (text, options, seed, pass):
nothing has to be remembered to continue it but a number.

    truncated    a window; its gradient stops at the window's edge: biased, bounded
    sliding      a window after `history` steps that are read again; each loss goes back at least
                 `history` steps: less biased, and dearer by (history + window)/window
    randomized,  a stretch of random length, `window` on average, its gradient weighted by
    polynomial   1/P(no cut yet): the mean is the full gradient
    full         the whole lane: exact, one update per pass

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
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from elman.errors import UserError
from elman.gradients import Randomized
from elman.options import check, option
from elman.text import batches

SAMPLINGS = ("sequential", "random")
PANEL = "Reading"
CARRIES = ("truncated", "sliding", "randomized", "polynomial", "full")


def bytes_of(text: str) -> int:
    """
    >>> bytes_of("stored"), bytes_of("64M"), bytes_of("1000")
    (0, 67108864, 1000)
    """
    if text == "stored":
        return 0
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper(), 0)
    digits = text[:-1] if unit else text
    if not digits.isdecimal() or not int(digits):
        raise UserError(f"--memory {text} is no size", hint="stored, or bytes: 64M, 2G")
    return int(digits) << unit


def as_size(budget: int) -> str:
    """What one types for a budget of so many bytes."""
    return str(budget) if budget else "stored"


@dataclass(frozen=True)
class Reading:
    """How the text is dealt out to updates."""

    batch_size: int = option(32, "Parallel lanes", panel=PANEL, at_least=1)
    window: int = option(35, "Steps per update", panel=PANEL, at_least=1)
    sampling: str = option("sequential", "Order of the windows", panel=PANEL, choices=SAMPLINGS)
    carry: str = option("truncated", "How far back a loss goes", panel=PANEL, choices=CARRIES)
    history: int = option(0, "Sliding: steps read again before a window", panel=PANEL, at_least=0)
    memory: int = option(
        0,
        "stored, or a budget: 64M keeps few states and recomputes the rest",
        panel=PANEL,
        at_least=0,
        read=bytes_of,
        show=as_size,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.sampling == "random" and self.carry != "truncated":
            raise UserError(
                f"carry={self.carry} needs sampling=sequential: windows drawn at random have no "
                "past to carry anything back to",
                hint="sampling=sequential, or carry=truncated",
            )
        if (self.history > 0) != (self.carry == "sliding") or self.history < 0:
            raise UserError(
                f"history={self.history} with carry={self.carry}: the steps read again before each "
                "window are at least 1 for carry=sliding and 0 for every other",
                hint=f"carry=sliding history={self.window}, or history=0",
            )
        if self.carry in ("randomized", "polynomial") and self.window < 2:
            raise UserError(
                f"window={self.window} with carry={self.carry} would cut before every step",
                hint="window is the mean length of a segment: at least 2",
            )


class Segment(NamedTuple):
    """What one update reads: y is x one step ahead, both (batch, time)."""

    x: Tensor
    y: Tensor
    fresh: bool  # the state before it is the state before any text
    scored: int  # how many of the newest steps have a loss
    advance: int  # the next segment starts this many steps after this one's start
    divisor: float  # steps that the summed loss of a row is divided by
    xi: Tensor | None = None  # weights of what each step hands back; None: 1


class Pass(abc.ABC):
    """The segments of one pass over the text."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Segment: ...


def one_pass(ids: Any, how: Reading, *, seed: int, epoch: int) -> Pass:
    """Deal out the text once, from an offset drawn for this pass as in the notes."""
    chance = np.random.default_rng([seed, epoch])
    if how.sampling == "random":
        return _Shuffled(ids, how, chance)
    return _Lanes(ids, how, chance)


@final
class _Shuffled(Pass):
    """Windows in random order, each from the state before any text."""

    def __init__(self, ids: Any, how: Reading, chance: np.random.Generator) -> None:
        offset, seed = int(chance.integers(how.window)), int(chance.integers(2**62))
        self.windows = batches.shuffled(
            ids, batch=how.batch_size, window=how.window, offset=offset, seed=seed
        )

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Segment:
        self.windows.position = index
        x, y = next(iter(self.windows))
        steps = x.shape[1]
        return Segment(x, y, fresh=True, scored=steps, advance=steps, divisor=steps)


@final
class _Lanes(Pass):
    """Parallel lanes of consecutive text, cut into segments; row b continues row b."""

    def __init__(self, ids: Any, how: Reading, chance: np.random.Generator) -> None:
        offset = int(chance.integers(how.window + 1))
        self.lanes = batches.streams(ids, batch=how.batch_size, window=how.window, offset=offset)
        self.how = how
        steps = self.lanes.x.shape[1]
        self.xi = None
        if how.carry in ("randomized", "polynomial"):
            self.xi = _draw(how, steps, int(chance.integers(2**62)))
            cuts = torch.nonzero(self.xi == 0).flatten().tolist()
            self.edges = [0, *cuts, steps]
        elif how.carry == "full":
            self.edges = [0, steps]
        else:
            self.edges = list(range(0, steps + 1, how.window))

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __getitem__(self, index: int) -> Segment:
        begin, end = self.edges[index : index + 2]
        start = max(0, begin - self.how.history)
        last = index + 1 == len(self)
        following = end if last else max(0, end - self.how.history)
        return Segment(
            *self._between(start, end),
            fresh=index == 0,
            scored=end - begin,
            advance=following - start,
            divisor=self.how.window if self.xi is not None else end - begin,
            xi=self._weights(begin, end),
        )

    def _between(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        def int64(lanes: Any) -> Tensor:
            piece = lanes[:, start:end]
            return (
                piece.long() if isinstance(piece, Tensor) else torch.from_numpy(piece.astype("i8"))
            )

        return int64(self.lanes.x), int64(self.lanes.y)

    def _weights(self, begin: int, end: int) -> Tensor | None:
        """ξ inside one segment; its first step hands back to a state that is cut off anyway."""
        if self.xi is None:
            return None
        xi = self.xi[begin:end].clone()
        xi[0] = 1
        return xi


def _draw(how: Reading, steps: int, seed: int) -> Tensor:
    """ξ_1 … ξ_T of a whole lane: 0 where a segment begins, 1/π elsewhere."""
    if how.carry == "polynomial":
        return Randomized.polynomial(mean=how.window, seed=seed).weights(steps)
    return Randomized(keep=1 - 1 / how.window, seed=seed).weights(steps)
