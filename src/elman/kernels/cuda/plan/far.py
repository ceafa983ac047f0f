"""Groups of more SMs than a cluster has: each streams the vector from device memory (far.cuh)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import final

from elman.kernels.cuda.plan.base import (
    CLUSTERS,
    FAR_ROWS,
    REGISTER_TILES,
    SMS,
    WARPS,
    Layer,
    Machine,
    Plan,
    priced,
)

CHUNKS = ((4, 2), (4, 4), (8, 2), (8, 3), (8, 4), (16, 2), (16, 4))
"""Tiles of one warp that are read at a time, and how many chunks are in flight."""

# Microseconds per step, over 381 plans (9% rms): always; per tile of one warp; per reading of one
# from shared memory; per value a thread reads from device memory; per partial sum; per wait for
# chunks that were not asked for at once; per KB of the vector; per KB that an SM reads on average.
PRICES = (0.776, 0.004, 0.0148, 0.0689, 0.0023, 0.0422, 0.0271, 0.0191)


@final
class FarPlan(Plan):
    """Every SM of a group reads the whole vector, in chunks."""

    @property
    def register_tiles(self) -> int:
        taken = taken_by_sums(self.m_tiles * self.rows)
        return min(self.m_tiles * self.k_tiles, REGISTER_TILES - taken)

    @property
    def _exchange_bytes(self) -> int:
        chunks = self.stages * self.rows * (self.warps_k * self.chunk * 32 + 16)
        sums = 4 * self.warps_k * self.rows * (self.m + 4)  # they take the chunks' place
        return 16 + max(chunks, sums)

    def microseconds(self, batch: int) -> float:
        row_tiles = self.rows // 8
        _, items, wide = self._items
        vector = self.rows * self.summed * self.element / 1024
        chunks = self.k_tiles // self.chunk
        work = (
            1,
            self.m_tiles * self.k_tiles * row_tiles,
            self.shared_tiles * -(-row_tiles // 4),
            items * wide * self._fields,
            items * wide * self.warps_k * self.m // self.units,
            -(-(chunks - 1) // (self.stages - 1)),
            vector,
            vector * self.groups(batch) * self.cluster / SMS,
        )
        return priced(work, PRICES)


def taken_by_sums(sums: int) -> int:
    """Registers that so many sums of a warp take, and addresses, as tiles."""
    return 10 if sums >= 64 else 6 if sums >= 32 else 4


def far_plans(layer: Layer, batch: int, machine: Machine) -> Iterator[FarPlan]:
    """Every plan of groups beyond a cluster that are all on the machine at once.

    A group that waited for one not yet on the machine would wait for ever.
    """
    size = layer.head_size
    if size * layer.element % 16:  # far.cuh copies 16 bytes at a time
        return
    for rows, warps_k in itertools.product(FAR_ROWS, (1, 2, 4, 8)):
        most = machine.clusters[1] // (-(-batch // rows) * layer.heads)
        for units in range(8, size, 8):
            blocks = -(-size // units)
            if not CLUSTERS[-1] < blocks <= most:
                continue
            plan = FarPlan.of(layer, blocks, rows, units, warps_k)
            if plan.m * warps_k % (16 * WARPS):
                continue
            for chunk, stages in CHUNKS:
                plan = replace(plan, chunk=chunk, stages=stages)
                crowded = plan.m_tiles * rows > 96 or plan.m_tiles * plan.k_tiles > 160
                if not crowded and plan.shared_bytes <= machine.shared_bytes:
                    yield plan
