"""Groups of pairs of SMs that read half of the vector each, by `wgmma` (pairs.cuh).

Forward, and backward of one-gate cells. A group may have several times `rows`, multiplied in turns;
or both SMs of a pair have the whole vector, `joined`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import final

from elman.kernels.cuda.plan.base import (
    CLUSTERS,
    FAR_ROWS,
    HOPPER_REGISTERS,
    SMS,
    Layer,
    Machine,
    Plan,
    priced,
)

REGISTERS_IN_TURNS = {1: 192, 2: 160}
"""As HOPPER_REGISTERS, where other warps have the units."""

# Microseconds per step, over 40 plans (7% rms): always; per product of 64 rows by 32 bytes, 32
# rows; per KB of the matrix that is read from shared memory; per value a thread reads from device
# memory; per KB of sums that partners swap; per KB of the vector that an SM reads on average.
PRICES = (1.928, 0.0174, 0.0021, 0.021, 0.0249, 0.0072)
# The same in turns, over 20 plans (7% rms), and 8% more, since one turn is the surer: always; in
# each turn per product of one warpgroup, per product as above, per KB of sums.
TURN_PRICES = (2.31, 0.0147, 0.0038, 0.0623)
# The same backward, of one-gate cells, over 13 plans (5% rms).
BACK_TURN_PRICES = (1.117, 0.0182, 0.0, 0.1196)
# Of a pair that shares the vector, over 36 plans (3% rms), and 2% less, since what straight.cuh
# takes beside it is priced too low: always; per product of one warpgroup, 32 rows; per KB of the
# matrix that is read from shared memory; per value a thread reads from device memory; per KB of the
# vector.
JOINED_PRICES = (1.385, 0.018, 0.0036, 0.0588, 0.0077)


@final
class PairPlan(Plan):
    """Every pair of a group has the whole vector."""

    paired = True
    hopper = True

    @property
    def warps(self) -> int:
        """Warps that have units; of a group with turns others multiply."""
        return 4 if self.turns > 1 else 4 * self.warpgroups

    @property
    def threads(self) -> int:
        return 32 * self.warps + (128 * (self.warpgroups + 1) if self.turns > 1 else 0)

    @property
    def m_tiles(self) -> int:
        return -(-self.m // 64) if self.joined else -(-2 * self.m // (64 * self.warpgroups))

    @property
    def k_tiles(self) -> int:
        return 4 * -(-self.size * self.element // 256)  # of the half, in chunks of 128 bytes

    @property
    def register_tiles(self) -> int:
        return self.m_tiles * 4 * self.held

    @property
    def _exchange_bytes(self) -> int:
        places, sums = (self.stages + 1, 6) if self.turns > 1 else (self.stages, 4)
        return 1024 + 128 * self.rows * places + 4 * sums * self.rows * (self.m + 4)

    @property
    def _tile_bytes(self) -> int:
        return 2048 * self.warpgroups

    def microseconds(self, batch: int) -> float:
        _, items, wide = self._items
        half = self.rows * self.k_tiles * 32 / 1024
        products = self.warpgroups * self.m_tiles * self.k_tiles
        if self.turns > 1:  # whatever travels does so while another turn is multiplied
            turn = (
                products / self.warpgroups,
                products * self.rows / 32,
                self.rows * self.m * 4 / 1024,
            )
            always, *prices = TURN_PRICES if self.forward else BACK_TURN_PRICES
            return always + min(self.turns, -(-batch // self.rows)) * priced(turn, prices)
        if self.joined:
            whole = (
                1,
                products / self.warpgroups * self.rows / 32,
                self.warpgroups * self.shared_tiles * 2,
                items * wide * self._fields,
                2 * half,
            )
            return priced(whole, JOINED_PRICES)
        work = (
            1,
            products * max(self.rows, 16) / 32,
            self.warpgroups * self.shared_tiles * 2,
            items * wide * self._fields,
            self.rows * self.m * 4 / 1024,
            half * self.groups(batch) * self.cluster / SMS,
        )
        return priced(work, PRICES)


def pair_plans(layer: Layer, batch: int, machine: Machine) -> Iterator[PairPlan]:
    """Every plan of pairs, of the matrix as a whole; all on the machine at once."""
    size = layer.size
    whole = layer.heads == 1 and size % 8 == 0 and size <= 4096
    if not (machine.hopper and layer.element == 2 and layer.reads_one_value and whole):
        return
    for turns, rows, units in itertools.product((1, 2, 4), FAR_ROWS, range(8, size, 8)):
        pairs, groups = -(-size // (2 * units)), -(-batch // (rows * turns))
        if pairs <= CLUSTERS[-1] // 2 or pairs * groups > machine.clusters.get(2, 0):
            continue
        if turns > 1 and batch <= rows * turns // 2:
            continue
        plan = PairPlan.of(layer, 2 * pairs, rows, units, stages=1, partners=2, turns=turns)
        for warpgroups in HOPPER_REGISTERS if turns == 1 else REGISTERS_IN_TURNS:
            swapping = _swapping(replace(plan, warpgroups=warpgroups), machine)
            if swapping is not None:
                yield swapping
        if turns == 1 and (joined := _joined(plan, machine)) is not None:
            yield joined


def _swapping(plan: PairPlan, machine: Machine) -> PairPlan | None:
    """The pair whose blocks have half of the vector each, and swap sums; if it fits."""
    registers = HOPPER_REGISTERS if plan.turns == 1 else REGISTERS_IN_TURNS
    tiles, chunks = plan.m_tiles, plan.k_tiles // 4
    free = registers[plan.warpgroups] - tiles * plan.rows // 2  # without the sums
    held = min(chunks, free // (16 * tiles), 10 // tiles)
    spare = plan.warpgroups * tiles * 64 - 2 * plan.m  # rows of tiles that are nobody's
    if tiles * plan.rows > 128 or held < 1 or spare >= 64 or not _worth_turns(plan):
        return None
    plan = replace(plan, held=held)
    stages = (machine.shared_bytes - plan.shared_bytes) // (128 * plan.rows) + 1
    if plan.turns > 1 and stages < chunks:  # places are used equally often, and there are five
        stages = max((n for n in range(5, stages + 1) if chunks % n == 0), default=0)
    return replace(plan, stages=min(stages, chunks)) if stages >= min(chunks, 3) else None


def _worth_turns(plan: PairPlan) -> bool:
    """Whether a group has one, or products large enough for more: whole tiles, 32 rows or more.

    Beside two warpgroups that multiply there are few registers for sums, and for units' states.
    """
    if plan.turns == 1:
        return True
    _, items, _ = plan._items
    room = plan.rows == 32 and items * plan.turns <= 4 if plan.warpgroups > 1 else plan.rows >= 32
    return room and plan.m_tiles == 1 and plan.units >= 16 and plan.m >= 32


def _joined(plan: PairPlan, machine: Machine) -> PairPlan | None:
    """The pair whose blocks both have the whole vector, of a gated cell forward; if it fits.

    A chunk has a place and a lane of its own, and no block is without units, since it says by them
    that it has done with a vector. Blocks of fewer values were slower than other plans throughout.
    """
    if plan.cell.gates == 1 or plan.units < 16 or plan.rows * plan.units < 512:
        return None
    plan = replace(plan, warpgroups=2, joined=True)
    tiles, chunks = plan.m_tiles, plan.k_tiles // 4
    held = min(chunks, (HOPPER_REGISTERS[2] - tiles * plan.rows // 2) // (16 * tiles), 10 // tiles)
    crowded = chunks > 16 or tiles * plan.rows > 128 or tiles * 64 - plan.m > 32
    if crowded or held < 1 or (plan.cluster - 1) * plan.units >= plan.size:
        return None
    plan = replace(plan, held=held, stages=2 * chunks)
    return plan if plan.shared_bytes <= machine.shared_bytes else None
