"""What every plan has: the sizes that a kernel is compiled for, and what follows from them.

Each kind of group has a file of its own here, named as the .cuh that it is compiled from: what it
keeps where, what a step of it takes, and every such plan that fits.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from elman.cells import Cell
from elman.kernels.cuda.equations import OWN, body

WARPS = 8
REGISTER_TILES = 40  # per warp: 160 of a thread's 255 registers
CLUSTERS = range(1, 17)
FAR_ROWS = (8, 16, 32, 64)
SMS = 132  # of the GPU on which prices were measured
HOPPER_REGISTERS = {2: 192, 3: 112, 4: 72}
"""For tiles and sums of a thread that multiplies by `wgmma`, by warpgroups of its SM.

The rest is addresses.
"""


@dataclass(frozen=True)
class Machine:
    """What a plan must fit: clusters held at once, by their size, and shared bytes of a block."""

    clusters: Mapping[int, int]
    shared_bytes: int
    hopper: bool = False  # has what hopper.cuh is made of

    def __hash__(self) -> int:
        return hash((tuple(self.clusters.items()), self.shared_bytes, self.hopper))


class Layer(NamedTuple):
    """What a plan is for: one direction of one layer."""

    cell: Cell
    direction: str
    size: int  # hidden units
    element: int  # bytes
    heads: int = 1  # as which W_hh is run

    @property
    def head_size(self) -> int:
        return self.size // self.heads

    @property
    def reads_one_value(self) -> bool:
        """Whether what a step reads of the one before is one value of each unit: h, or da as h."""
        return self.direction == "forward" or (self.cell.gates == 1 and not self.cell.apart)


@dataclass(frozen=True)
class Plan(abc.ABC):
    """Sizes that a kernel is compiled for; recurrence.cuh says what each means."""

    cell: Cell
    direction: str
    size: int  # hidden units of a head; of the layer, where there is but one
    element: int  # bytes
    cluster: int
    rows: int
    units: int  # hidden units of one SM, rounded up
    warps_k: int  # warps that share one sum
    chunk: int = 0  # tiles of one warp that a far group reads at a time; 0: a cluster
    stages: int = 0  # chunks in shared memory; 0 of a chunk: it goes straight to registers
    heads: int = 1  # blocks along W_hh's diagonal, each run by groups of its own
    partners: int = 0  # SMs of a far group that share their da; 0: each reads the whole vector
    warpgroups: int = 0  # of an SM that multiply, by pairs, teams or crowds.cuh; 0: another kind
    held: int = 0  # chunks (pairs) or tiles (teams) of the matrix that a warpgroup has in registers
    turns: int = 1  # times `rows` that a group has: one is on its way while another is multiplied
    joined: bool = False  # both partners of a pair have the whole vector, and swap no sums
    at_once: int = 0  # groups of a launch, where there are several in turn; 0: one launch of all

    far: ClassVar[bool] = True
    """The SMs of a group meet in device memory: whatever is no cluster."""
    straight: ClassVar[bool] = False
    """straight.cuh: each warp reads its part of the vector into registers."""
    spread: ClassVar[bool] = False
    """Teams of SMs share their da, and store shares of dh (spread, teams, crowds.cuh)."""
    paired: ClassVar[bool] = False
    """pairs.cuh: pairs of SMs read half of the vector each."""
    crowded: ClassVar[bool] = False
    """crowds.cuh: partners are no cluster, and share their da by way of device memory."""
    single: ClassVar[bool] = False
    """single.cuh: one SM, each warp with all gates of its units."""
    hopper: ClassVar[bool] = False
    """Made of what only a Hopper GPU has (hopper.cuh): pairs, teams or crowds.cuh."""

    @classmethod
    def of(
        cls,
        layer: Layer,
        cluster: int,
        rows: int,
        units: int,
        warps_k: int = 1,
        *,
        chunk: int = 0,
        stages: int = 0,
        partners: int = 0,
        turns: int = 1,
    ) -> Self:
        """The layer in groups of so many SMs and rows; the rest is 0 or 1 where a kind has none."""
        cell, direction, _, element, heads = layer
        sizes = layer.head_size, element, cluster, rows, units, warps_k
        kind = chunk, stages, heads, partners
        return cls(cell, direction, *sizes, *kind, turns=turns)

    @property
    def hidden(self) -> int:
        """Hidden units, rounded up."""
        return self.cluster * self.units

    @property
    def forward(self) -> bool:
        return self.direction == "forward"

    @property
    def neighbours(self) -> int:
        """SMs that write into each other's shared memory: a hardware cluster."""
        return max(self.partners, 1)

    @property
    def gathers(self) -> bool:
        """Every SM, or pair, has the whole vector (gather, far, pairs). Else, all the sums."""
        return True

    @property
    def warps(self) -> int:
        """Warps that have units."""
        return WARPS

    @property
    def threads(self) -> int:
        """Threads of an SM."""
        return 32 * self.warps

    @property
    def m(self) -> int:
        """Rows of the SM's slice of the matrix."""
        return self.units * (self.cell.gates if self.forward else 1)

    @property
    def m_tiles(self) -> int:
        """Tiles of one warp down the slice; on Hopper GPUs tiles of 64 rows, of one warpgroup."""
        return -(-self.m * self.warps_k // (16 * WARPS))

    @property
    def k_tiles(self) -> int:
        """Tiles of one warp along the sum: an even number, or whole chunks."""
        whole = self.chunk or 2
        return -(-self.summed * self.element // (32 * self.warps_k * whole)) * whole

    @property
    def summed(self) -> int:
        """Elements of the vector that an SM multiplies its slice with."""
        return self.size if self.forward else self.cell.gates * self.size

    @property
    @abc.abstractmethod
    def register_tiles(self) -> int:
        """Tiles of one warp for which there are registers."""

    @property
    def shared_tiles(self) -> int:
        """Tiles of one warp for which there are no registers."""
        return self.m_tiles * self.k_tiles - self.register_tiles

    @property
    def shared_bytes(self) -> int:
        """As each kind of group lays it out; the kernels assert it."""
        tiles = self._tile_bytes * self.shared_tiles
        return self._exchange_bytes + tiles + self._ring_bytes + 4 * self._numbers * self.units

    @property
    @abc.abstractmethod
    def _exchange_bytes(self) -> int:
        """Room for what the SMs and warps of a group tell each other: barriers, vectors, sums."""

    @property
    def _tile_bytes(self) -> int:
        """Of one tile of each warp."""
        return 512 * WARPS

    @property
    def _items(self) -> tuple[int, int, int]:
        """Bytes of an item, items of a thread, units of an item."""
        values, threads = self.rows * self.units, 32 * self.warps
        wide = 4 if values > 2 * threads else 2
        return wide * self.element, -(-values // (wide * threads)), wide

    @property
    def _fields(self) -> int:
        """Values a thread reads from device memory per unit and step."""
        own = body(self.cell)
        return own.inputs if self.forward else own.past

    @property
    def _numbers(self) -> int:
        """Values of a unit that stay the same, in shared memory: a described cell's parameters."""
        own = body(self.cell)
        return own.numbers if self.forward else own.parameters

    @property
    def _ring_steps(self) -> int:
        """Steps whose values from device memory have room at once; a far group's are longer."""
        return self.turns + 1

    @property
    def _ring_bytes(self) -> int:
        """Room for those values."""
        item_bytes, items, _ = self._items
        return self._ring_steps * self._fields * items * 32 * self.warps * item_bytes

    @abc.abstractmethod
    def microseconds(self, batch: int) -> float:
        """Of one step, all groups of so many rows at once: they share what L2 can give."""

    def batch_microseconds(self, batch: int, machine: Machine) -> float:
        """Of one step of all groups, those that find no room after the others."""
        del machine  # a launch has as many groups as it holds
        launches = len(self.launches(batch))
        return launches * self.microseconds(-(-batch // launches))

    def groups(self, batch: int) -> int:
        return -(-batch // (self.rows * self.turns)) * self.heads

    def launches(self, batch: int) -> list[range]:
        """The blocks of each launch, one after the other."""
        blocks, most = self.groups(batch) * self.cluster, self.at_once * self.cluster
        each = min(blocks, most) or blocks
        return [range(i, min(i + each, blocks)) for i in range(0, blocks, each)]

    def share_words(self, batch: int) -> int:
        """Words of the shares of dh that all groups keep in device memory (shares.cuh)."""
        del batch
        return 0

    @property
    def sums_da(self) -> bool:
        """Whether the loop adds up da over time, for the biases: one reading of all of it less."""
        return False

    def defines(self, dtype: int) -> dict[str, int]:
        """The macros of the source."""
        code = body(self.cell).code
        own = {"OWN_GATES": self.cell.gates, "HEADS": self.heads} if code == OWN else {}
        return own | {
            "CELL": code,
            "DTYPE": dtype,
            "SIZE": self.size,
            "HIDDEN": self.hidden,
            "CLUSTER": self.cluster,
            "ROWS": self.rows,
            "TURNS": self.turns,
            "WARPS": self.warps,
            "MULTIPLIERS": self.warpgroups,
            "LAUNCHED": self.threads,
            "WARPS_K": self.warps_k,
            "REGISTER_TILES": self.register_tiles,
            "SHARED_BYTES": self.shared_bytes,
            "SINGLE": int(self.single),
            "FAR": int(self.far),
            "CHUNK_TILES": self.chunk,
            "STAGES": self.stages,
            "STRAIGHT": int(self.straight),
            "PARTNERS": self.partners,
            "HOPPER": int(self.hopper),
            "PAIRED": int(self.paired),
            "JOINED": int(self.joined),
            "CROWDED": int(self.crowded),
            "REGISTER_CHUNKS": self.held if self.paired else 0,
            "SUMS_DA": int(self.sums_da),
            "PATIENCE": 1 << 35,  # cycles: some 17 seconds
        }


def priced(work: Sequence[float], prices: Sequence[float]) -> float:
    """What so much of each costs in all."""
    return sum(amount * price for amount, price in zip(work, prices, strict=True))
