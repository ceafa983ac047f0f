"""What teams that multiply by `wgmma` have in common: columns of W_hh (columns.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Self

from elman.kernels.cuda.equations import OWN, body
from elman.kernels.cuda.plan.base import HOPPER_REGISTERS, SMS
from elman.kernels.cuda.plan.shares import SharesPlan

MOST_SUMS = 16
"""Of da over time that a thread has registers for: more of them are spilled."""


class ColumnsPlan(SharesPlan):
    """Teams in half precision on Hopper GPUs: a warpgroup has tiles of 64 rows."""

    hopper = True
    tile_rows = 64
    barrier_bytes: ClassVar[int]

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def m_tiles(self) -> int:
        return -(-self.m // (64 * self.warpgroups))

    @property
    def k_tiles(self) -> int:
        return -(-self.summed // 16)

    @property
    def register_tiles(self) -> int:
        return self.held

    @property
    def _exchange_bytes(self) -> int:
        return self.barrier_bytes + self.k_tiles * self.rows * 32

    @property
    def _tile_bytes(self) -> int:
        return 2048 * self.warpgroups

    @property
    def _ring_bytes(self) -> int:
        return self._fields * self.rows * self.units * self.element

    @property
    def sums_da(self) -> bool:
        _, items, wide = self._items
        sums = items * wide * (self.cell.gates + len(self.cell.apart))
        return body(self.cell).code != OWN and sums <= MOST_SUMS

    @property
    def _work(self) -> tuple[float, ...]:
        """Always; products of 64 rows by 32 bytes, 32 rows (32 at least); KB of the matrix that are
        read from shared memory; values a thread reads from device memory; shares it adds up.
        """
        _, items, wide = self._items
        values = max(items * wide, self.rows * self.units / 256)  # more threads do not help
        return (
            1,
            self.warpgroups * self.m_tiles * self.k_tiles * max(self.rows, 32) / 32,
            self.warpgroups * self.shared_tiles * 2,
            values * self._fields,
            values * self.teams * (1 + items) / 2,  # a second item waits for the first one's shares
        )

    def _busy(self, batch: int) -> float:
        """The part of the machine's SMs that have something to do."""
        return self.groups(batch) * self.cluster / SMS

    def over_warpgroups(self) -> Iterator[Self]:
        """The same for each number of warpgroups, with all tiles held for which they have room."""
        for warpgroups, registers in HOPPER_REGISTERS.items():
            plan = replace(self, warpgroups=warpgroups)
            free = registers - 32  # without sums, and shares on their way
            yield replace(plan, held=min(plan.m_tiles * plan.k_tiles, free // 4))
