"""How one direction of one layer is spread over the GPU.

The hidden units are cut into `cluster` slices, one per SM, and each SM's share of the recurrent
matrix into tiles of 16 rows by 32 bytes over its warps; the batch is cut into groups of `rows`.
Every way that fits is priced with a small model of the machine, and the cheapest taken.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from elman import cells

# CELL in the sources
CELLS = {"tanh": 0, "relu": 1, "gru": 2, "lstm": 3, "linear": 4}
GATES = {name: cells.named(name).gates for name in CELLS}
WARPS = 8
REGISTER_TILES = 40  # per warp: 160 of a thread's 255 registers
CLUSTERS = range(1, 17)

# Microseconds per step: always; per tile of one warp; more if it lies in shared memory; per value
# a thread reads from device memory; per partial sum; per delivery; per KB that arrives.
GATHER_PRICES = (0.26, 0.0156, 0.0042, 0.0092, 0.0047, 0.0186, 0.0191)
SCATTER_PRICES = (0.79, 0.0057, 0.0129, 0.0071, 0.0064, 0.0, 0.0303)


@dataclass(frozen=True)
class Plan:
    """Sizes that a kernel is compiled for; recurrence.cuh says what each means."""

    cell: str
    direction: str
    size: int  # hidden units of the layer
    element: int  # bytes
    cluster: int
    rows: int
    units: int  # hidden units of one SM, rounded up
    warps_k: int  # warps that share one sum

    @property
    def hidden(self) -> int:
        """Hidden units of the layer, rounded up."""
        return self.cluster * self.units

    @property
    def forward(self) -> bool:
        return self.direction == "forward"

    @property
    def gathers(self) -> bool:
        """gather.cuh: every SM has the whole vector. Else scatter.cuh: it has all the sums."""
        return self.forward or GATES[self.cell] == 1

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def m(self) -> int:
        """Rows of the SM's slice of the matrix."""
        return self.units * GATES[self.cell] if self.gathers else self.hidden

    @property
    def m_tiles(self) -> int:
        """Tiles of one warp down the slice."""
        return -(-self.m * self.warps_k // (16 * WARPS))

    @property
    def k_tiles(self) -> int:
        """Tiles of one warp along the sum, an even number."""
        summed = self.size if self.gathers else GATES[self.cell] * self.units
        return -(-summed * self.element // (64 * self.warps_k)) * 2

    @property
    def register_tiles(self) -> int:
        return min(self.m_tiles * self.k_tiles, REGISTER_TILES)

    @property
    def shared_tiles(self) -> int:
        """Tiles of one warp for which there are no registers."""
        return self.m_tiles * self.k_tiles - self.register_tiles

    @property
    def shared_bytes(self) -> int:
        """As laid out in gather.cuh and scatter.cuh; the kernels assert it."""
        summed = self.warps_k * self.k_tiles * 32
        if self.gathers:
            vectors = 2 * self.rows * (max(summed, self.hidden * self.element) + 16)
            sums = 4 * 2 * self.warps_k * self.rows * (self.m + 4)
        else:
            vectors = 2 * self.rows * (summed + 16)
            sums = 4 * 2 * self.cluster * self.rows * (self.units + 4)
        return 16 + vectors + sums + 512 * WARPS * self.shared_tiles + self._ring_bytes

    @property
    def _items(self) -> tuple[int, int, int]:
        """Bytes of an item, items of a thread, units of an item."""
        wide = 4 if self.rows * self.units > 2 * self.threads else 2
        return wide * self.element, -(-self.rows * self.units // (wide * self.threads)), wide

    @property
    def _fields(self) -> int:
        """Values a thread reads from device memory per unit and step."""
        gates = GATES[self.cell]
        return gates if self.forward else 2 if gates == 1 else 6

    @property
    def _ring_bytes(self) -> int:
        """Room for those of four steps."""
        item_bytes, items, _ = self._items
        return 4 * self._fields * items * self.threads * item_bytes

    @property
    def microseconds(self) -> float:
        """Of one step, as measured on an H200 over some two hundred plans (within 7% rms)."""
        row_tiles = self.rows // 8
        _, items, wide = self._items
        inbound = self.rows * self.hidden * (self.element if self.gathers else 4) / 1024
        apart = self.cluster > 1
        work = (
            1,
            self.m_tiles * self.k_tiles * row_tiles,
            self.shared_tiles,
            items * wide * self._fields,
            items * wide * (self.warps_k * GATES[self.cell] if self.gathers else self.cluster),
            items * self.cluster if apart and self.gathers else 0,
            inbound if apart else 0,
        )
        prices = GATHER_PRICES if self.gathers else SCATTER_PRICES
        return sum(amount * price for amount, price in zip(work, prices, strict=True))

    def groups(self, batch: int) -> int:
        return -(-batch // self.rows)

    def defines(self, dtype: int) -> dict[str, int]:
        """The macros of the source."""
        return {
            "CELL": CELLS[self.cell],
            "DTYPE": dtype,
            "SIZE": self.size,
            "HIDDEN": self.hidden,
            "CLUSTER": self.cluster,
            "ROWS": self.rows,
            "WARPS": WARPS,
            "WARPS_K": self.warps_k,
            "REGISTER_TILES": self.register_tiles,
            "SHARED_BYTES": self.shared_bytes,
            "PATIENCE": 1 << 35,  # cycles: some 17 seconds
        }


@dataclass(frozen=True)
class Machine:
    """What a plan must fit: clusters held at once, by their size, and shared bytes of a block."""

    clusters: Mapping[int, int]
    shared_bytes: int

    def __hash__(self) -> int:
        return hash((tuple(self.clusters.items()), self.shared_bytes))


@functools.lru_cache(maxsize=1024)
def cheapest(
    cell: str, direction: str, size: int, element: int, batch: int, machine: Machine
) -> Plan | None:
    """The plan with the lowest price, or None where the matrix fits no cluster."""

    def price(p: Plan) -> float:
        return -(-p.groups(batch) // machine.clusters[p.cluster]) * p.microseconds

    return min(fitting(cell, direction, size, element, machine), key=price, default=None)


def fitting(cell: str, direction: str, size: int, element: int, machine: Machine) -> Iterator[Plan]:
    """Every plan that this machine can hold."""
    for cluster, rows in itertools.product(CLUSTERS, (8, 16)):
        if machine.clusters.get(cluster, 0) > 0:
            for plan in _cuts(cell, direction, size, element, cluster, rows):
                # sums kept in registers, and the length of one, no further than was measured
                crowded = plan.gathers and (plan.m_tiles * rows > 128 or plan.k_tiles > 32)
                if not crowded and plan.shared_bytes <= machine.shared_bytes:
                    yield plan


def _cuts(
    cell: str, direction: str, size: int, element: int, cluster: int, rows: int
) -> Iterator[Plan]:
    for warps_k in (1, 2, 4, 8):
        plan = Plan(cell, direction, size, element, cluster, rows, 0, warps_k)
        gates, step = (GATES[cell], 16 * WARPS // warps_k) if plan.gathers else (1, 16)
        enough = itertools.count(-(-size // (8 * cluster)) * 8, 8)
        units = next(u for u in enough if u * gates % step == 0)
        yield replace(plan, units=units)
        if not plan.gathers:
            return
