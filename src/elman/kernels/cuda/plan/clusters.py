"""Groups that are one cluster of SMs, which write into each other's memory.

Each SM has the whole vector (gather.cuh: forward, and backward of one-gate cells) or all the sums
(scatter.cuh).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import final

from elman.kernels.cuda.plan.base import (
    CLUSTERS,
    REGISTER_TILES,
    WARPS,
    Layer,
    Machine,
    Plan,
    priced,
)

# Microseconds per step: always; per tile of one warp; more if it lies in shared memory; per value
# a thread reads from device memory; per partial sum; per delivery; per KB that arrives. Measured on
# an H200 over some two hundred plans (within 7% rms).
GATHER_PRICES = (0.26, 0.0156, 0.0042, 0.0092, 0.0047, 0.0186, 0.0191)
SCATTER_PRICES = (0.79, 0.0057, 0.0129, 0.0071, 0.0064, 0.0, 0.0303)


@final
class ClusterPlan(Plan):
    """A group is a cluster."""

    far = False

    @property
    def neighbours(self) -> int:
        return self.cluster

    @property
    def gathers(self) -> bool:
        return self.forward or self.cell.gates == 1

    @property
    def m(self) -> int:
        return super().m if self.gathers else self.hidden

    @property
    def summed(self) -> int:
        return super().summed if self.gathers else self.cell.gates * self.units

    @property
    def register_tiles(self) -> int:
        return min(self.m_tiles * self.k_tiles, REGISTER_TILES)

    @property
    def _exchange_bytes(self) -> int:
        summed = self.warps_k * self.k_tiles * 32
        if self.gathers:
            vectors = 2 * self.rows * (max(summed, self.hidden * self.element) + 16)
            sums = 4 * 2 * self.warps_k * self.rows * (self.m + 4)
        else:
            vectors = 2 * self.rows * (summed + 16)
            sums = 4 * 2 * self.cluster * self.rows * (self.units + 4)
        return 16 + vectors + sums

    @property
    def _ring_steps(self) -> int:
        return 4

    def microseconds(self, batch: int) -> float:
        """Of one step; clusters do not hinder each other, however many there are."""
        del batch
        row_tiles = self.rows // 8
        _, items, wide = self._items
        inbound = self.rows * self.hidden * (self.element if self.gathers else 4) / 1024
        apart = self.cluster > 1
        work = (
            1,
            self.m_tiles * self.k_tiles * row_tiles,
            self.shared_tiles,
            items * wide * self._fields,
            items * wide * (self.warps_k * self.cell.gates if self.gathers else self.cluster),
            items * self.cluster if apart and self.gathers else 0,
            inbound if apart else 0,
        )
        return priced(work, GATHER_PRICES if self.gathers else SCATTER_PRICES)

    def batch_microseconds(self, batch: int, machine: Machine) -> float:
        waves = -(-self.groups(batch) // machine.clusters[self.cluster])
        return waves * self.microseconds(batch)


def cluster_plans(layer: Layer, machine: Machine) -> Iterator[ClusterPlan]:
    """Every plan of clusters that this machine can hold."""
    for cluster, rows in itertools.product(CLUSTERS, (8, 16)):
        if machine.clusters.get(cluster, 0) > 0:
            for plan in _cuts(layer, cluster, rows):
                # sums kept in registers, and the length of one, no further than was measured
                crowded = plan.gathers and (plan.m_tiles * rows > 128 or plan.k_tiles > 32)
                if not crowded and plan.shared_bytes <= machine.shared_bytes:
                    yield plan


def _cuts(layer: Layer, cluster: int, rows: int) -> Iterator[ClusterPlan]:
    for warps_k in (1, 2, 4, 8):
        plan = ClusterPlan.of(layer, cluster, rows, 0, warps_k)
        gates, step = (layer.cell.gates, 16 * WARPS // warps_k) if plan.gathers else (1, 16)
        enough = itertools.count(-(-layer.head_size // (8 * cluster)) * 8, 8)
        units = next(u for u in enough if u * gates % step == 0)
        yield replace(plan, units=units)
        if not plan.gathers:
            return
