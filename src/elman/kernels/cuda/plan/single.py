"""Groups that are one SM, each of whose warps has all gates of its own units (single.cuh)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from elman.kernels.cuda.equations import body
from elman.kernels.cuda.plan.base import Layer, Machine, Plan, priced

UNITS_OF_A_WARP = (8, 16)
MOST_WARPS, CARRIERS = 16, 4
"""Of an SM: warps that have units, and warps that copy for them."""
REGISTERS, BESIDES = 65536, 58  # of an SM; of a thread, for all but the matrix
WORDS = 16
"""Steps of which a word a row is known: which row of a table is read, or ξ (WORD_STEPS)."""

# Microseconds per step: always; per tile that a quarter of the SM multiplies; per tile of the
# vector that a warp reads; per value of a quarter's workers that carriers bring; per gate of a
# worker's items. Measured on an H200 over some 180 plans (within 9 to 11% rms).
PRICES = {
    "forward": (0.143, 0.0082, 0.00004, 0.0061, 0.0328),
    "backward": (0.142, 0.0069, 0.0006, 0.0, 0.0365),
}
COPY = 0.024
"""Microseconds of a carrier's copy: what a step takes where rows begin anywhere."""
MOST_UNITS, MOST_IN_FLOAT32 = 128, 96
"""Of more, clusters take less, for the three products of float32 too."""


@final
@dataclass(frozen=True)
class SinglePlan(Plan):
    """A group is one SM, and no sums meet."""

    each: int = 8  # units of a warp

    far = False
    single = True

    @property
    def warps(self) -> int:
        return self.units // self.each

    @property
    def threads(self) -> int:
        return 32 * (self.warps + CARRIERS)

    @property
    def blocks(self) -> int:
        """Eights of rows of the matrix that a warp multiplies."""
        return (self.cell.gates if self.forward else 1) * (self.each // 8)

    @property
    def m_tiles(self) -> int:
        return -(-self.blocks // 2)

    @property
    def summed(self) -> int:
        return self.units * (1 if self.forward else self.cell.gates)

    @property
    def k_tiles(self) -> int:
        return -(-self.summed * self.element // 64) * 2

    @property
    def register_tiles(self) -> int:
        return self.m_tiles * self.k_tiles

    @property
    def fits_registers(self) -> bool:
        """Whether a worker has room for its share of the matrix."""
        sums = 4 * self.m_tiles * (self.rows // 8)
        quarter = -(-self.threads // 128)  # warps that share the registers of a quarter
        most = min(REGISTERS // (128 * quarter) // 8 * 8, 255)
        return 4 * self.register_tiles + sums + BESIDES <= most

    def _pitch(self, fields: int) -> int:
        """Bytes from row to row where so many values of every unit lie (pitch_of)."""
        return -(-fields * self.units * self.element // 128) * 128 + 16

    @property
    def _outputs(self) -> int:
        """Values of a unit that a step leaves in device memory."""
        states, kept = sum(self.cell.state_sizes(1)), body(self.cell).kept
        return states + kept if self.forward else self.cell.gates + len(self.cell.apart)

    @property
    def _exchange_bytes(self) -> int:
        vectors = 2 * self.rows * (32 * self.k_tiles + 16)
        return 16 + vectors + 4 * WORDS * self.rows + 2 * self.rows * self._pitch(self._outputs)

    @property
    def _ring_bytes(self) -> int:
        return 8 * self.rows * self._pitch(self._fields)

    def microseconds(self, batch: int) -> float:
        """Of one step; groups do not hinder each other, however many there are."""
        del batch
        warps, items = -(-self.warps // 4), self.rows * self.each // 64  # of a quarter, of a thread
        tiles = self.k_tiles * (self.rows // 8)
        work = (
            1,
            warps * tiles * self.m_tiles,
            self.warps * tiles,
            warps * items * 2 * self._fields,
            items * self.cell.gates,
        )
        return max(priced(work, PRICES[self.direction]), COPY * self._copies)

    @property
    def _copies(self) -> int:
        """Of a carrier in a step: 16 bytes each, or as many as the place of a row allows."""
        lanes, at_once = 32 * CARRIERS // self.rows, math.gcd(self.size * self.element, 16)
        pieces = -(-self.units * self.element // (at_once * lanes))
        return pieces * (self._fields + self._outputs)

    def batch_microseconds(self, batch: int, machine: Machine) -> float:
        waves = -(-self.groups(batch) // machine.clusters[1])
        return waves * self.microseconds(batch)


def single_plans(layer: Layer, machine: Machine) -> Iterator[SinglePlan]:
    """Every plan of single SMs that this machine can hold."""
    if layer.head_size * layer.element % 4:  # rows that no words begin
        return
    if layer.head_size > (MOST_UNITS if layer.element == 2 else MOST_IN_FLOAT32):
        return
    for each, rows in itertools.product(UNITS_OF_A_WARP, (8, 16)):
        units = -(-layer.head_size // each) * each
        cell, direction, _, element, heads = layer
        plan = SinglePlan(
            *(cell, direction, layer.head_size, element, 1, rows, units, 1), heads=heads, each=each
        )
        fits = plan.fits_registers and plan.shared_bytes <= machine.shared_bytes
        if plan.warps <= MOST_WARPS and fits:
            yield plan
