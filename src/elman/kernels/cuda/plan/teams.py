"""As spread, by `wgmma`: teams are clusters (teams.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from elman.kernels.cuda.plan.base import Layer, Machine, priced
from elman.kernels.cuda.plan.columns import ColumnsPlan
from elman.kernels.cuda.plan.shares import team_sizes

# Microseconds per step: the work of columns.py; per KB of da that a team has; per KB of shares that
# an SM stores and reads on average; per time that shares fill what shared memory leaves of L1.
# Fitted over 111 plans, then changed by hand until the cheapest of a shape was the best measured
# (0.6% slower on average), at the cost of prices 6% too high.
PRICES = (1.279, 0.0029, 0.0018, 0.0153, 0.0095, 0.0282, 0.0203, 0.7195)
# Beyond so many times they cost no more, where rows lie apart: 8.3 µs were measured (lstm of 1536
# units, 128 rows, teams of two with 24 units) where the price was 13.
APART = 1.85


@final
class TeamPlan(ColumnsPlan):
    """Partners write their da into each other's shared memory."""

    barrier_bytes = 128

    def microseconds(self, batch: int) -> float:
        read = self.rows * self.teams * self.units * self.element / 1024
        fills = read / (256 - self.shared_bytes / 1024)
        if self.units % 16:  # lines of L1 are half empty where rows lie apart, up to a point
            fills = min(2.5 * fills, APART)
        work = (
            *self._work,
            self.rows * self.summed * self.element / 1024 if self.partners > 1 else 0,
            self._share_kilobytes(batch) * self._busy(batch),
            fills,
        )
        return priced(work, PRICES)


def team_plans(layer: Layer, batch: int, machine: Machine) -> Iterator[TeamPlan]:
    """Every plan of teams by `wgmma`; all on the machine at once."""
    if not (machine.hopper and layer.element == 2 and layer.direction == "backward"):
        return
    for blocks, rows, units, partners in team_sizes(layer, batch, machine):
        for plan in TeamPlan.of(layer, blocks, rows, units, partners=partners).over_warpgroups():
            spare = plan.warpgroups * plan.m_tiles * 64 - plan.m
            if plan.held > 0 and spare <= 64 and plan.shared_bytes <= machine.shared_bytes:
                yield plan
