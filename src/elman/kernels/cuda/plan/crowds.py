"""As teams, for teams that are no clusters: da is read from device memory (crowds.cuh)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import final

from elman.kernels.cuda.plan.base import CLUSTERS, FAR_ROWS, Layer, Machine, priced
from elman.kernels.cuda.plan.columns import ColumnsPlan

MEMBERS, CHUNK = range(4, 33), 64
"""Blocks of a team; units of a chunk, in which da is read."""
FEWEST_UNITS = 1088
"""Of a layer: at 1024 units teams of clusters were faster throughout."""

# Microseconds per step, over 69 plans (6% rms; of every shape the best is the cheapest, or 1.3%
# slower): the work of columns.py; per KB of da that an SM reads on average; per KB of shares as of
# teams; per KB of da that is filled before, at 2.3 TB/s.
PRICES = (2.466, 0.0069, 0.0038, 0.0212, 0.0117, 0.0078, 0.0086, 0.00044)


@final
class CrowdPlan(ColumnsPlan):
    """Members of a team wait for each other's da as those of a far group do."""

    crowded = True
    barrier_bytes = 1024

    @property
    def neighbours(self) -> int:
        return 1

    def microseconds(self, batch: int) -> float:
        stored = batch * (self.cell.gates + len(self.cell.apart)) * self.size
        da = min(self.rows, batch) * self.summed * self.element / 1024
        work = (
            *self._work,
            da * self._busy(batch),
            self._share_kilobytes(batch) * self._busy(batch),
            stored * self.element / 1024,
        )
        return priced(work, PRICES)


def crowd_plans(layer: Layer, batch: int, machine: Machine) -> Iterator[CrowdPlan]:
    """Every plan of teams that are no clusters, without heads; all on the machine at once.

    Whole teams and whole tiles: where some were half empty, a step took up to twice as long.
    """
    cell, direction, size, element, heads = layer
    gated = direction == "backward" and cell.gates > 1 and cell.heads == heads == 1
    if not (machine.hopper and element == 2 and gated and size % CHUNK == 0):
        return
    for rows, units, members in itertools.product(FAR_ROWS[1:], range(8, 65, 8), MEMBERS):
        blocks, team = size // units, units * members
        most = machine.clusters[1] // -(-batch // rows)
        if size % team or team % CHUNK or not CLUSTERS[-1] < blocks <= most:
            continue
        if cell.gates * team > 32 * CHUNK:  # a lane asks for a chunk
            continue
        for plan in CrowdPlan.of(layer, blocks, rows, units, partners=members).over_warpgroups():
            whole = plan.m == plan.warpgroups * plan.m_tiles * 64
            if whole and plan.shared_bytes <= machine.shared_bytes:
                yield plan


def wide_crowd_plans(layer: Layer, batch: int, machine: Machine) -> Iterator[CrowdPlan]:
    """The same of layers that are wide enough for it."""
    if layer.size >= FEWEST_UNITS:
        yield from crowd_plans(layer, batch, machine)
