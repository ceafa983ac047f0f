"""Groups of teams, each a cluster that shares its da (spread.cuh); backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from elman.kernels.cuda.plan.base import REGISTER_TILES, SMS, Layer, Machine, priced
from elman.kernels.cuda.plan.far import taken_by_sums
from elman.kernels.cuda.plan.shares import SharesPlan, team_sizes

# Microseconds per step, over 265 plans (7% rms): always; per tile of one warp; per reading of one
# from shared memory; per share that a thread adds up; per KB of da that a team has; per KB of
# shares that an SM stores and reads on average.
PRICES = (1.094, 0.0022, 0.0261, 0.0301, 0.0741, 0.0174)


@final
class SpreadPlan(SharesPlan):
    """Teams that multiply by `mma`: on any GPU, in any arithmetic."""

    @property
    def register_tiles(self) -> int:
        taken = taken_by_sums(2 * min(self.rows, 32)) + 4
        return min(self.m_tiles * self.k_tiles, REGISTER_TILES - taken)

    @property
    def _exchange_bytes(self) -> int:
        return 16 + 2 * self.rows * (self.warps_k * self.k_tiles * 32 + 16)

    def microseconds(self, batch: int) -> float:
        row_tiles = self.rows // 8
        _, items, wide = self._items
        work = (
            1,
            self.m_tiles * self.k_tiles * row_tiles,
            self.shared_tiles * -(-row_tiles // 4),
            items * wide * self.teams,
            self.rows * self.summed * self.element / 1024 if self.partners > 1 else 0,
            self._share_kilobytes(batch) * self.groups(batch) * self.cluster / SMS,
        )
        return priced(work, PRICES)


def spread_plans(layer: Layer, batch: int, machine: Machine) -> Iterator[SpreadPlan]:
    """Every plan of teams; all on the machine at once."""
    if layer.direction == "forward":
        return
    for blocks, rows, units, partners in team_sizes(layer, batch, machine):
        plan = SpreadPlan.of(layer, blocks, rows, units, partners=partners)
        if plan.m_tiles * plan.k_tiles <= 160 and plan.shared_bytes <= machine.shared_bytes:
            yield plan
