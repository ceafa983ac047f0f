"""As far, of few rows: the vector goes straight from device memory to registers (straight.cuh)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import final

from elman.kernels.cuda.plan.base import CLUSTERS, SMS, WARPS, Layer, Machine, Plan, priced

REGISTER_TILES = 52  # with the sums and the vector, as if those were tiles too

# Microseconds per step, over 226 plans (8% rms): always; per tile of one warp; per reading of one
# from shared memory; per sum of the warps' sums; per 16 bytes of the vector that a lane reads; per
# KB that an SM reads on average; more per KB of which two SMs write 32 bytes between them.
PRICES = (0.72, 0.0102, 0.0051, 0.0429, 0.0366, 0.0201, 0.0037)


@final
class StraightPlan(Plan):
    """Every warp of an SM reads its part of the vector; a chunk is what a lane reads at once."""

    straight = True

    @property
    def register_tiles(self) -> int:
        row_tiles = self.rows // 8
        taken = max(self.m_tiles * row_tiles, 4) + self.k_tiles // 2 * row_tiles + 2 * row_tiles
        return min(self.m_tiles * self.k_tiles, REGISTER_TILES - taken)

    @property
    def _exchange_bytes(self) -> int:
        pitch = 16 * (self.m_tiles + 1 - self.m_tiles % 2) + 4
        return 16 + 4 * WARPS * self.rows * pitch

    def microseconds(self, batch: int) -> float:
        row_tiles = self.rows // 8
        _, items, wide = self._items
        vector = min(self.rows, batch) * self.summed * self.element / 1024
        average = vector * self.groups(batch) * self.cluster / SMS
        work = (
            1,
            self.m_tiles * self.k_tiles * row_tiles,
            self.shared_tiles,
            items * wide * self.m // self.units,
            self.k_tiles // 2 * row_tiles,
            average,
            average if self.units * self.element % 32 else 0,
        )
        return priced(work, PRICES)


def straight_plans(layer: Layer, batch: int, machine: Machine) -> Iterator[StraightPlan]:
    """Every plan of groups that read straight, which have registers for few rows."""
    size = layer.head_size
    if size * layer.element % 16 or not layer.reads_one_value:
        return
    for rows, units in itertools.product((8, 16), range(8, size, 8)):
        blocks = -(-size // units)
        if not CLUSTERS[-1] < blocks <= machine.clusters[1] // (-(-batch // rows) * layer.heads):
            continue
        plan = StraightPlan.of(layer, blocks, rows, units, WARPS, chunk=2)
        crowded = plan.m_tiles * rows > 128 or plan.m_tiles * plan.k_tiles > 160
        if not crowded and plan.register_tiles > 0 and plan.shared_bytes <= machine.shared_bytes:
            yield plan
