"""Memory: which states are kept for the backward pass, and which are computed again.

`Stored` keeps everything. `Checkpointed` cuts time into pieces, keeps the state at the start of
some of them, and in the backward pass runs each piece forwards again from the nearest state kept.
The gradient is the same; only time and memory are traded.

With room for s states beside the first, reversing n pieces takes at least

    cost(n, s) = min_{0<j<n}  j + cost(n - j, s - 1) + cost(j, s)
    cost(1, s) = 0,   cost(n, 0) = n(n - 1)/2

pieces run forwards: advance j pieces and keep that state; reverse what lies behind it with the
s - 1 states left; then the j pieces before it. Griewank and Walther (2000), "Algorithm 799:
revolve", solve this dynamic program in closed form, so that a million steps can be planned;
Gruslys et al. (2016), "Memory-efficient backpropagation through time", use it for recurrent
networks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar, final

from elman.errors import UserError
from elman.options import hold_numbers

S = TypeVar("S")


class Plan(NamedTuple):
    """Time cut into pieces of `piece` steps, with room for `slots` states beside the first."""

    steps: int
    piece: int
    slots: int

    @property
    def pieces(self) -> int:
        """How many pieces the steps make; the last may be shorter."""
        return -(-self.steps // self.piece)

    def bounds(self, piece: int) -> tuple[int, int]:
        """The steps [start, stop) of a piece."""
        return piece * self.piece, min((piece + 1) * self.piece, self.steps)

    def kept(self) -> list[int]:
        """The pieces whose first states the forward pass keeps: 0, then further and further on."""
        held = [0]
        while (base := held[-1]) < self.pieces - 1 and len(held) <= self.slots:
            held.append(base + split(self.pieces - base, self.slots - len(held) + 1))
        return held


class Sizes(NamedTuple):
    """Bytes of one state, and of what one step needs in the backward pass."""

    state: int
    step: int


class Memory(ABC):
    """What the forward pass keeps for the backward pass."""

    keeps_all: ClassVar[bool] = False
    """Everything is kept, in one piece: nothing is ever run again."""

    @abstractmethod
    def plan(self, steps: int, sizes: Callable[[], Sizes], strands: int = 1) -> Plan:
        """How to cut `steps` of time; `sizes` is asked only where there is a budget.

        What is kept for several strands of a stack is kept at once, so they share the budget.
        """

    @property
    def bytes(self) -> int | None:
        """The number that stands for it in a configuration: 0 keeps all, else a budget; None: it
        has no number."""
        return None


@final
@dataclass(frozen=True)
class Stored(Memory):
    """Every state is kept, O(T): one piece."""

    keeps_all: ClassVar[bool] = True

    def plan(self, steps: int, sizes: Callable[[], Sizes], strands: int = 1) -> Plan:
        return Plan(steps, steps, 0)

    @property
    def bytes(self) -> int:
        return 0


@final
@dataclass(frozen=True)
class Checkpointed(Memory):
    """The state every `every` steps is kept, or as many as fit in `budget` bytes.

    A budget holds the kept states and the trace of the one piece being reversed; the lengths of
    the pieces and the states to keep are those that recompute least.
    """

    every: int | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        hold_numbers(self)
        if (self.every is None) == (self.budget is None):
            raise UserError(
                f"every={self.every}, budget={self.budget}: Checkpointed takes one of the two",
                hint="Checkpointed(every=100) or Checkpointed(budget=64 << 20)",
            )
        for name, value in (("every", self.every), ("budget", self.budget)):
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and (not whole or value < 1):
                unit = "steps" if name == "every" else "bytes"
                raise UserError(
                    f"{name}={value!r} must be a whole number of {unit}, at least 1",
                    hint="Checkpointed(every=100) or Checkpointed(budget=64 << 20)",
                )

    def plan(self, steps: int, sizes: Callable[[], Sizes], strands: int = 1) -> Plan:
        if self.every is not None:
            piece = min(self.every, steps)
            return Plan(steps, piece, -(-steps // piece) - 1)
        steps, size = int(steps), sizes()  # compiled code has a symbol for it
        return min(
            self._fitting(steps, size, strands),
            key=lambda p: (_recomputed(p), p.slots * size.state + p.piece * size.step),
        )

    @property
    def bytes(self) -> int | None:
        return self.budget

    def _fitting(self, steps: int, size: Sizes, strands: int) -> list[Plan]:
        """Every plan worth comparing that fits the budget: piece lengths in a geometric series."""
        assert self.budget is not None
        # beside the first state and the one being advanced
        room = self.budget // strands - 2 * size.state
        longest = min(
            steps, room // max(1, size.step)
        )  # a step takes 0 bytes where there are no rows
        if longest < 1:
            each = f" in each of {strands} directed layers" if strands > 1 else ""
            raise UserError(
                f"budget={self.budget} bytes is too small: two states take {2 * size.state} "
                f"and one step of the backward pass {size.step}{each}",
                hint=f"the smallest budget here is {strands * (2 * size.state + size.step)}",
            )
        series = range(1 + math.ceil(math.log(longest + 1, 1.1)))
        plans = []
        for piece in sorted({min(longest, math.ceil(1.1**i)) for i in series}):
            room_left = room - piece * size.step
            slots = min(-(-steps // piece) - 1, room_left // max(1, size.state))
            plans.append(Plan(steps, piece, slots))
        return plans


def checked_memory(memory: object) -> Memory:
    """The memory itself, if it is one."""
    if not isinstance(memory, Memory):
        raise UserError(
            f"memory must be a Memory, got {memory!r}",
            hint="e.g. Stored(), Checkpointed(every=100)",
        )
    return memory


def _recomputed(plan: Plan) -> int:
    """Steps run again in the backward pass, beyond the one run that reverses each piece."""
    if plan.pieces == 1:
        return -plan.steps  # nothing is run again: the trace itself is kept
    return (cost(plan.pieces, plan.slots) - (plan.pieces - 1)) * plan.piece  # less the first run


def cost(pieces: int, slots: int) -> int:
    """The least number of pieces run forwards to reverse `pieces` with `slots` kept states.

        cost(n, s) = r n - C(s + 1 + r, s + 2),   r the least with C(s + 1 + r, s + 1) ≥ n

    >>> cost(10, 9), cost(10, 1), cost(10, 0)
    (9, 20, 45)
    """
    r, reach = 0, 1  # reach = C(s + 1 + r, s + 1): what r runs of each piece can reverse
    while reach < pieces:
        r += 1
        reach = reach * (slots + 1 + r) // r
    return r * pieces - math.comb(slots + 1 + r, slots + 2)


def split(pieces: int, slots: int) -> int:
    """How far to advance before keeping a state: the j that makes `cost` least.

    What is minimised is convex in j, so the least is found by bisection.
    """

    def total(j: int) -> int:
        return j + cost(pieces - j, slots - 1) + cost(j, slots)

    low, high = 1, pieces - 1
    while low < high:
        middle = (low + high) // 2
        if total(middle) <= total(middle + 1):
            high = middle
        else:
            low = middle + 1
    return low


def reversed_pieces(
    plan: Plan, kept: MutableMapping[int, S], advance: Callable[[S, int, int], S]
) -> Iterator[tuple[int, S]]:
    """Every piece from the last to the first, each with the state it starts from.

    `kept` has the states of `plan.kept()`; `advance(state, piece, later)` runs from the start of
    one piece to the start of a later one. At most `plan.slots` + 1 states are held at a time.
    """
    held = sorted(kept)
    for piece in reversed(range(plan.pieces)):
        while held[-1] > piece:
            del kept[held.pop()]
        while (base := held[-1]) < piece and len(held) <= plan.slots:
            held.append(base + split(piece + 1 - base, plan.slots - len(held) + 1))
            kept[held[-1]] = advance(kept[base], base, held[-1])
        yield piece, kept[base] if base == piece else advance(kept[base], base, piece)
