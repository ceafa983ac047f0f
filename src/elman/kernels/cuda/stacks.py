"""Layers of one stack beside each other: which piece of time of which layer runs when.

A layer at a piece of time needs the layer below at that piece, and itself at the piece before. One
layer leaves SMs idle, so pieces that need nothing of each other run at once: layer l at piece j
beside layer l + 1 at piece j - 1. Between two such slots lie the products that hand the outputs of
one layer to the next. How many layers run at once, in how many pieces, and how each is spread over
its SMs (fewer than it would take alone) is priced like everything in `plan`, and so is whether it
pays at all: the same for one shape every time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from elman.cells import Cell
from elman.kernels.cuda.equations import OWN, body
from elman.kernels.cuda.plan import (
    Layer,
    Machine,
    Plan,
    cheapest,
    cluster_plans,
    single_plans,
)

PIECES = (2, 3, 4, 6, 8, 12, 16)
"""Any number from 2 to 16 would leave fewer SMs idle on paper, and is slower: in 7, 9, 10, 14 or 15
pieces elman 512 takes 3 to 5 % longer than in their neighbours, and the prices do not know it."""

# Fitted to 131 schedules on an H200 (7% rms):
START, SLOT = 6.0, {"forward": 8.0, "backward": 24.0}
"""Microseconds before a layer's first step, and of a slot beside its steps: launch, fork, join.

Backward also what the products with da take from the longer slots that they could run beside.
"""
PRODUCT, RATE = 2.0, 1.1e9
"""Microseconds of a product before anything, and its multiply-adds, twice, in one; by bytes."""
AFTERWARDS = 3
"""What the gradients of a layer's weights take, by the product that hands outputs on."""
HOST = {"forward": (105.0, 50.0, 42.0), "backward": (800.0, 300.0, 40.0)}
"""Microseconds of Python: of a call, for each further layer, and for each further piece of one."""
SURELY = 0.9
"""How much cheaper it must be than one layer after the other."""


At = tuple[int, int]
"""A layer and a piece of time; of a backward pass both are counted from the last."""


class Schedule(NamedTuple):
    """How layers run beside each other."""

    plan: Plan
    steps: int  # of a piece; the last may be shorter
    layers: int
    pieces: int
    lanes: int  # layers at once

    def span(self, piece: int, steps: int) -> tuple[int, int]:
        """The first step of a piece and the one after its last, of `steps` in all."""
        return piece * self.steps, min((piece + 1) * self.steps, steps)

    def slots(self) -> tuple[tuple[tuple[At, ...], tuple[At, ...]], ...]:
        """Slot by slot: what runs at once, and whose products can run meanwhile."""
        return slots(self.layers, self.pieces, self.lanes)


@functools.lru_cache(maxsize=1024)
def slots(
    layers: int, pieces: int, lanes: int
) -> tuple[tuple[tuple[At, ...], tuple[At, ...]], ...]:
    """All pieces of all layers, at most `lanes` at once, none before what it needs.

    With each slot stand those pieces of the next one that read nothing which it writes.

    >>> for now, meanwhile in slots(3, 2, 2):
    ...     print(now, meanwhile)
    ((0, 0),) ()
    ((0, 1), (1, 0)) ()
    ((1, 1), (2, 0)) ()
    ((2, 1),) ()
    """
    waiting = [(layer, piece) for layer in range(layers) for piece in range(pieces)]
    waiting.sort(key=lambda at: (sum(at), at))  # those with the longest way to go first
    done, found = set[At](), list[tuple[At, ...]]()
    while waiting:
        ready = [at for at in waiting if _needs(*at) <= done]
        found.append(tuple(ready[:lanes]))
        done.update(found[-1])
        waiting = [at for at in waiting if at not in done]
    ahead = [
        tuple((layer, piece) for layer, piece in then if layer and (layer - 1, piece) not in now)
        for now, then in itertools.pairwise((*found, ()))
    ]
    return tuple(zip(found, ahead, strict=True))


def _needs(layer: int, piece: int) -> set[At]:
    below, before = {(layer - 1, piece)}, {(layer, piece - 1)}
    return (below if layer else set()) | (before if piece else set())


@dataclass(frozen=True)
class Stack:
    """What a price depends on."""

    cell: Cell
    size: int
    element: int  # bytes
    batch: int
    layers: int
    steps: int
    machine: Machine

    def product(self, steps: int) -> float:
        """Microseconds of handing so many steps from one layer to the next."""
        flop = 2 * steps * self.batch * self.cell.gates * self.size**2
        return self.element * (PRODUCT + flop / RATE)

    def afterwards(self, direction: str) -> float:
        """Microseconds of the gradients of all weights."""
        return AFTERWARDS * self.layers * self.product(self.steps) * (direction == "backward")

    def alone(self, direction: str) -> float | None:
        """Of the GPU, one layer after the other; None where one does not fit."""
        one = self.cell, direction, self.size, self.element, self.batch
        plan = cheapest(*one, self.machine)
        if plan is None:
            return None
        step = plan.batch_microseconds(self.batch, self.machine)
        each = START + self.steps * step + self.product(self.steps)
        return self.layers * each + self.afterwards(direction)

    def beside(self, s: Schedule) -> float:
        """Of the GPU, layers beside each other."""
        direction, meanwhile = s.plan.direction, sum(len(ahead) for _, ahead in s.slots())
        between = ((self.layers - 1) * s.pieces - meanwhile) * self.product(s.steps)
        slots = len(s.slots()) * (SLOT[direction] + s.steps * s.plan.microseconds(self.batch))
        return slots + self.product(self.steps) + between + self.afterwards(direction)

    def python(self, direction: str, pieces: int) -> float:
        """Of the host, with time in so many pieces."""
        call, layer, piece = HOST[direction]
        return call + (self.layers - 1) * layer + self.layers * (pieces - 1) * piece

    def schedules(self, direction: str) -> Iterator[Schedule]:
        """Every number of layers at once for which there is room, in every number of pieces."""
        layer = Layer(self.cell, direction, self.size, self.element)
        plans = [*single_plans(layer, self.machine), *cluster_plans(layer, self.machine)]
        held = self.machine.clusters
        for lanes in range(2, self.layers + 1):
            roomy = [p for p in plans if lanes * p.groups(self.batch) <= held[p.cluster]]
            plan = min(roomy, key=lambda p: p.microseconds(self.batch), default=None)
            for pieces in PIECES:
                each = -(-self.steps // pieces)
                if plan is not None and pieces >= lanes and -(-self.steps // each) == pieces:
                    yield Schedule(plan, each, self.layers, pieces, lanes)


@functools.lru_cache(maxsize=4096)
def schedule(stack: Stack, direction: str) -> Schedule | None:
    """How the layers of a stack run beside each other; None where that does not pay.

    The GPU must be slower than Python, there and back, also with what Python has to do besides:
    calls that will be captured do not pay that, but nobody promises that a shape comes again.
    """
    both = [stack.alone(d) for d in HOST]
    if None in both or stack.layers < 2 or body(stack.cell).code == OWN:
        return None
    gpu, host = sum(filter(None, both)), sum(stack.python(d, 1) for d in HOST)

    def price(s: Schedule) -> float:
        python = stack.python(direction, s.pieces)
        more = python - stack.python(direction, 1)
        return math.inf if host + 2 * more > SURELY * gpu else max(stack.beside(s), python)

    best = min(stack.schedules(direction), key=price, default=None)
    now = max(stack.alone(direction) or 0.0, stack.python(direction, 1))
    return best if best is not None and price(best) < SURELY * now else None
