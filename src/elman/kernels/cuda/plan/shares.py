"""What groups of teams have in common, backward: shares of dh in device memory (shares.cuh).

A team makes the da of some units. Each of its SMs multiplies all of it with a part of the columns
of W_hh and stores this share of dh; the unit's owner adds up the shares of all teams.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar

from elman.kernels.cuda.plan.base import CLUSTERS, FAR_ROWS, Layer, Machine, Plan

PARTNERS = range(1, 9)


class SharesPlan(Plan):
    """A group is made of teams of `partners`."""

    spread = True
    tile_rows: ClassVar[int] = 16

    @property
    def gathers(self) -> bool:
        return False

    @property
    def teams(self) -> int:
        """Of a group: the shares of a unit."""
        return self.cluster // self.partners

    @property
    def m(self) -> int:
        return self.tile_rows * -(-self.size // (self.tile_rows * self.partners))

    @property
    def summed(self) -> int:
        return self.cell.gates * self.units * self.partners

    def share_words(self, batch: int) -> int:
        values = self.teams * self.cluster * self.rows * self.units
        return self.groups(batch) * 2 * values * self.element // 4

    def _share_kilobytes(self, batch: int) -> float:
        """Of shares that an SM stores and reads."""
        return min(self.rows, batch) * (self.m + self.teams * self.units) * self.element / 1024


def team_sizes(layer: Layer, batch: int, machine: Machine) -> Iterator[tuple[int, int, int, int]]:
    """Blocks and rows of a group, units of a block, blocks of a team: all for which there are SMs.

    Teams are clusters.
    """
    size = layer.head_size
    if size * layer.element % 16:  # an item is there or is not
        return
    for rows, partners in itertools.product(FAR_ROWS, PARTNERS):
        most = machine.clusters.get(partners, 0) // (-(-batch // rows) * layer.heads)
        for units in range(8, size, 4):
            count = -(-size // (units * partners))
            blocks = count * partners
            whole = (
                layer.cell.gates * units * layer.element % 16 == 0
            )  # da is copied 16 bytes at a time
            if CLUSTERS[-1] < blocks and count <= most and whole:
                yield blocks, rows, units, partners
