"""How one direction of one layer is spread over the GPU.

The hidden units are cut into `cluster` slices, one per SM, and each SM's share of the recurrent
matrix into tiles of 16 rows by 32 bytes over its warps; the batch is cut into groups of `rows`.
A group is a cluster of SMs that write into each other's memory, or, for larger layers, any number
of SMs that meet in device memory (far.cuh, straight.cuh, spread.cuh; on Hopper GPUs also pairs.cuh,
teams.cuh, crowds.cuh).
Every way that fits is priced with a small model of the machine, and the cheapest taken.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from elman.cells import Cell
from elman.kernels.cuda.equations import OWN, body

WARPS = 8
REGISTER_TILES = 40  # per warp: 160 of a thread's 255 registers
STRAIGHT_TILES = 52  # by straight.cuh: with the sums and the vector, as if those were tiles too
CLUSTERS = range(1, 17)
FAR_ROWS = (8, 16, 32, 64)
PARTNERS = range(1, 9)
CHUNKS = ((4, 2), (4, 4), (8, 2), (8, 3), (8, 4), (16, 2), (16, 4))
"""Of a far group: tiles of one warp that are read at a time, and how many chunks are in flight."""

# Microseconds per step: always; per tile of one warp; more if it lies in shared memory; per value
# a thread reads from device memory; per partial sum; per delivery; per KB that arrives.
GATHER_PRICES = (0.26, 0.0156, 0.0042, 0.0092, 0.0047, 0.0186, 0.0191)
SCATTER_PRICES = (0.79, 0.0057, 0.0129, 0.0071, 0.0064, 0.0, 0.0303)
# Of a far group, over 381 plans (9% rms): always; per tile of one warp; per reading of one from
# shared memory; per value a thread reads from device memory; per partial sum; per wait for chunks
# that were not asked for at once; per KB of the vector; per KB that an SM reads on average.
FAR_PRICES = (0.776, 0.004, 0.0148, 0.0689, 0.0023, 0.0422, 0.0271, 0.0191)
# Of one by straight.cuh, over 226 plans (8% rms): always; per tile of one warp; per reading of one
# from shared memory; per sum of the warps' sums; per 16 bytes of the vector that a lane reads; per
# KB that an SM reads on average; more per KB of which two SMs write 32 bytes between them.
STRAIGHT_PRICES = (0.72, 0.0102, 0.0051, 0.0429, 0.0366, 0.0201, 0.0037)
# Of a far group of teams, over 265 plans (7% rms): always; per tile of one warp; per reading of one
# from shared memory; per share that a thread adds up; per KB of da that a team has; per KB of
# shares that an SM stores and reads on average.
SPREAD_PRICES = (1.094, 0.0022, 0.0261, 0.0301, 0.0741, 0.0174)
# Of a far group of pairs, over 40 plans (7% rms): always; per product of 64 rows by 32 bytes, 32
# rows; per KB of the matrix that is read from shared memory; per value a thread reads from device
# memory; per KB of sums that partners swap; per KB of the vector that an SM reads on average.
PAIR_PRICES = (1.928, 0.0174, 0.0021, 0.021, 0.0249, 0.0072)
# The same in turns, over 20 plans (7% rms), and 8% more, since one turn is the surer: always; in
# each turn per product of one warpgroup, per product as above, per KB of sums.
TURN_PRICES = (2.31, 0.0147, 0.0038, 0.0623)
# The same backward, of one-gate cells, over 13 plans (5% rms).
BACK_TURN_PRICES = (1.117, 0.0182, 0.0, 0.1196)
# Of a pair that shares the vector, over 36 plans (3% rms), and 2% less, since what straight.cuh
# takes beside it is priced too low: always; per product of one warpgroup, 32 rows; per KB of the
# matrix that is read from shared memory; per value a thread reads from device memory; per KB of the
# vector.
JOINED_PRICES = (1.385, 0.018, 0.0036, 0.0588, 0.0077)
# Of teams by teams.cuh: the first four as of pairs (but 32 rows at least); per share that a thread
# adds up; per KB of da that a team has; per KB of shares as of teams; per time that shares fill
# what shared memory leaves of L1. Fitted over 111 plans, then changed by hand until the cheapest of
# a shape was the best measured (0.6% slower on average), at the cost of prices 6% too high.
TEAM_PRICES = (1.279, 0.0029, 0.0018, 0.0153, 0.0095, 0.0282, 0.0203, 0.7195)
# Beyond so many times they cost no more, where rows lie apart: 8.3 µs were measured (lstm of 1536
# units, 128 rows, teams of two with 24 units) where the price was 13.
APART = 1.85
# Of teams by crowds.cuh, over 69 plans (6% rms; of every shape the best is the cheapest, or 1.3%
# slower): the first five as of teams; per KB of da that an SM reads on average; per KB of shares as
# of teams; per KB of da that is filled before, at 2.3 TB/s.
CROWD_PRICES = (2.466, 0.0069, 0.0038, 0.0212, 0.0117, 0.0078, 0.0086, 0.00044)
DOUBT = 1.08  # prices of far groups are less certain, and they take SMs that others could use
DOUBT_OF_PARTS = 1.25  # several launches: what is off in the price of one is off in all
SMS = 132  # of the GPU on which prices were measured
LAUNCHES, FEWEST_ROWS = (1, 2, 3, 4, 6, 8, 12, 16), 32
"""Of far groups: in how many launches a batch may be cut, and the rows of one that are worth it."""


@dataclass(frozen=True)
class Plan:
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
    crowded: bool = False  # partners are no cluster: they share their da by way of device memory
    at_once: int = 0  # groups of a launch, where there are several in turn; 0: one launch of all

    @property
    def hidden(self) -> int:
        """The same, rounded up."""
        return self.cluster * self.units

    @property
    def forward(self) -> bool:
        return self.direction == "forward"

    @property
    def far(self) -> bool:
        """The SMs of a group meet in device memory: whatever is no cluster."""
        return self.chunk > 0 or self.partners > 0

    @property
    def spread(self) -> bool:
        """Teams of SMs share their da, and store shares of dh (spread, teams, crowds.cuh)."""
        return self.partners > 0 and not self.paired

    @property
    def paired(self) -> bool:
        """pairs.cuh: pairs of SMs read half of the vector each."""
        return self.hopper and self.stages > 0

    @property
    def straight(self) -> bool:
        """straight.cuh: each warp reads its part of the vector into registers."""
        return self.chunk > 0 and self.stages == 0

    @property
    def hopper(self) -> bool:
        """Made of what only a Hopper GPU has (hopper.cuh): pairs, teams or crowds.cuh."""
        return self.warpgroups > 0

    @property
    def neighbours(self) -> int:
        """SMs that write into each other's shared memory: a hardware cluster."""
        if not self.far:
            return self.cluster
        return 1 if self.crowded else max(self.partners, 1)

    @property
    def gathers(self) -> bool:
        """Every SM, or pair, has the whole vector (gather, far, pairs). Else, all the sums."""
        return not self.spread and (self.far or self.forward or self.cell.gates == 1)

    @property
    def warps(self) -> int:
        """Warps that have units; of a group with turns others multiply (pairs.cuh)."""
        return 4 if self.turns > 1 else 4 * self.warpgroups or WARPS

    @property
    def threads(self) -> int:
        """Threads of an SM."""
        return 32 * self.warps + (128 * (self.warpgroups + 1) if self.turns > 1 else 0)

    @property
    def m(self) -> int:
        """Rows of the SM's slice of the matrix."""
        if self.spread:
            tile = 64 if self.hopper else 16
            return tile * -(-self.size // (tile * self.partners))
        if not self.gathers:
            return self.hidden
        return self.units * (self.cell.gates if self.forward else 1)

    @property
    def m_tiles(self) -> int:
        """Tiles of one warp down the slice; on Hopper GPUs tiles of 64 rows, of one warpgroup."""
        if self.joined:
            return -(-self.m // 64)
        if self.hopper:
            return -(-(2 if self.paired else 1) * self.m // (64 * self.warpgroups))
        return -(-self.m * self.warps_k // (16 * WARPS))

    @property
    def k_tiles(self) -> int:
        """Tiles of one warp along the sum: whole chunks, or an even number."""
        if self.spread and self.hopper:
            return -(-self.summed // 16)
        if self.paired:
            return 4 * -(-self.size * self.element // 256)  # of the half, in chunks of 128 bytes
        if self.chunk:
            return -(-self.summed * self.element // (32 * self.warps_k * self.chunk)) * self.chunk
        return -(-self.summed * self.element // (64 * self.warps_k)) * 2

    @property
    def summed(self) -> int:
        """Elements of the vector that an SM multiplies its slice with."""
        if not self.gathers:
            return self.cell.gates * self.units * max(self.partners, 1)
        return self.size if self.forward else self.cell.gates * self.size

    @property
    def register_tiles(self) -> int:
        if self.paired:
            return self.m_tiles * 4 * self.held
        if self.hopper:
            return self.held
        if not self.far:
            return min(self.m_tiles * self.k_tiles, REGISTER_TILES)
        if self.straight:
            row_tiles = self.rows // 8
            taken = max(self.m_tiles * row_tiles, 4) + self.k_tiles // 2 * row_tiles + 2 * row_tiles
            return min(self.m_tiles * self.k_tiles, STRAIGHT_TILES - taken)
        crowd = 2 * min(self.rows, 32) if self.spread else self.m_tiles * self.rows
        taken = 10 if crowd >= 64 else 6 if crowd >= 32 else 4  # by sums, addresses
        taken += 4 * self.spread
        return min(self.m_tiles * self.k_tiles, REGISTER_TILES - taken)

    @property
    def shared_tiles(self) -> int:
        """Tiles of one warp for which there are no registers."""
        return self.m_tiles * self.k_tiles - self.register_tiles

    @property
    def shared_bytes(self) -> int:
        """As each kind of group lays it out; the kernels assert it."""
        if self.hopper:
            tiles = 2048 * self.warpgroups * self.shared_tiles
            rest = tiles + self._ring_bytes + 4 * self._numbers * self.units
            if self.spread:
                return (1024 if self.crowded else 128) + self.k_tiles * self.rows * 32 + rest
            places, sums = self.stages, 4
            if self.turns > 1:
                places, sums = self.stages + 1, 6
            return 1024 + 128 * self.rows * places + 4 * sums * self.rows * (self.m + 4) + rest
        summed = self.warps_k * self.k_tiles * 32
        if self.straight:
            pitch = 16 * (self.m_tiles + 1 - self.m_tiles % 2) + 4
            vectors, sums = 0, 4 * WARPS * self.rows * pitch
        elif self.chunk:
            chunks = self.stages * self.rows * (self.warps_k * self.chunk * 32 + 16)
            vectors = max(chunks, 4 * self.warps_k * self.rows * (self.m + 4))
            sums = 0  # they take the chunks' place
        elif self.gathers:
            vectors = 2 * self.rows * (max(summed, self.hidden * self.element) + 16)
            sums = 4 * 2 * self.warps_k * self.rows * (self.m + 4)
        else:
            vectors = 2 * self.rows * (summed + 16)
            sums = 0 if self.spread else 4 * 2 * self.cluster * self.rows * (self.units + 4)
        tiles = 512 * WARPS * self.shared_tiles
        return 16 + vectors + sums + tiles + self._ring_bytes + 4 * self._numbers * self.units

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
    def _ring_bytes(self) -> int:
        """Room for those of four steps, or of two (a far group's steps are longer), or of one."""
        item_bytes, items, _ = self._items
        if self.spread and self.hopper:
            return self._fields * self.rows * self.units * self.element
        steps = self.turns + 1 if self.far else 4
        return steps * self._fields * items * 32 * self.warps * item_bytes

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
            items * wide * (self.warps_k * self.cell.gates if self.gathers else self.cluster),
            items * self.cluster if apart and self.gathers else 0,
            inbound if apart else 0,
        )
        prices = GATHER_PRICES if self.gathers else SCATTER_PRICES
        return sum(amount * price for amount, price in zip(work, prices, strict=True))

    def batch_microseconds(self, batch: int, machine: Machine) -> float:
        """Of one step of all groups, those that find no room after the others."""
        if not self.far:
            return -(-self.groups(batch) // machine.clusters[self.cluster]) * self.microseconds
        launches = len(self.launches(batch))
        return launches * self.far_microseconds(-(-batch // launches))

    def far_microseconds(self, batch: int) -> float:
        """Of one step of a far group; all groups read at once and share what L2 can give."""
        if self.spread:
            return self._spread_microseconds(batch)
        if self.paired:
            return self._paired_microseconds(batch)
        if self.straight:
            return self._straight_microseconds(batch)
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
        return sum(amount * price for amount, price in zip(work, FAR_PRICES, strict=True))

    def _straight_microseconds(self, batch: int) -> float:
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
        return sum(amount * price for amount, price in zip(work, STRAIGHT_PRICES, strict=True))

    def _spread_microseconds(self, batch: int) -> float:
        row_tiles, teams = self.rows // 8, self.cluster // self.partners
        _, items, wide = self._items
        if self.hopper:
            return self._team_microseconds(batch)
        shares = min(self.rows, batch) * (self.m + teams * self.units) * self.element / 1024
        work = (
            1,
            self.m_tiles * self.k_tiles * row_tiles,
            self.shared_tiles * -(-row_tiles // 4),
            items * wide * teams,
            self.rows * self.summed * self.element / 1024 if self.partners > 1 else 0,
            shares * self.groups(batch) * self.cluster / SMS,
        )
        return sum(amount * price for amount, price in zip(work, SPREAD_PRICES, strict=True))

    def _paired_microseconds(self, batch: int) -> float:
        _, items, wide = self._items
        half = self.rows * self.k_tiles * 32 / 1024
        products = self.warpgroups * self.m_tiles * self.k_tiles
        if self.turns > 1:  # whatever travels does so while another turn is multiplied
            turn = (
                products / self.warpgroups,
                products * self.rows / 32,
                self.rows * self.m * 4 / 1024,
            )
            always, *prices = TURN_PRICES if self.forward else BACK_TURN_PRICES
            turns = min(self.turns, -(-batch // self.rows))
            return always + turns * sum(map(operator.mul, turn, prices))
        if self.joined:
            whole = (
                1,
                products / self.warpgroups * self.rows / 32,
                self.warpgroups * self.shared_tiles * 2,
                items * wide * self._fields,
                2 * half,
            )
            return sum(map(operator.mul, whole, JOINED_PRICES))
        work = (
            1,
            products * max(self.rows, 16) / 32,
            self.warpgroups * self.shared_tiles * 2,
            items * wide * self._fields,
            self.rows * self.m * 4 / 1024,
            half * self.groups(batch) * self.cluster / SMS,
        )
        return sum(amount * price for amount, price in zip(work, PAIR_PRICES, strict=True))

    def _team_microseconds(self, batch: int) -> float:
        teams = self.cluster // self.partners
        _, items, wide = self._items
        rows, busy = min(self.rows, batch), self.groups(batch) * self.cluster / SMS
        shares = rows * (self.m + teams * self.units) * self.element / 1024
        read = self.rows * teams * self.units * self.element / 1024
        values = max(items * wide, self.rows * self.units / 256)  # more threads do not help
        common = (
            1,
            self.warpgroups * self.m_tiles * self.k_tiles * max(self.rows, 32) / 32,
            self.warpgroups * self.shared_tiles * 2,
            values * self._fields,
            values * teams * (1 + items) / 2,  # a second item waits for the first one's shares
        )
        if self.crowded:
            stored = batch * (self.cell.gates + len(self.cell.apart)) * self.size
            da = rows * self.summed * self.element / 1024
            more = da * busy, shares * busy, stored * self.element / 1024
            return sum(map(operator.mul, common + more, CROWD_PRICES))
        fills = read / (256 - self.shared_bytes / 1024)
        if self.units % 16:  # lines of L1 are half empty where rows lie apart, up to a point
            fills = min(2.5 * fills, APART)
        more = (
            self.rows * self.summed * self.element / 1024 if self.partners > 1 else 0,
            shares * busy,
            fills,
        )
        return sum(map(operator.mul, common + more, TEAM_PRICES))

    def share_words(self, batch: int) -> int:
        """Words of the shares of dh that the groups of shares.cuh keep in device memory."""
        teams = self.cluster // self.partners
        return (
            self.groups(batch)
            * 2
            * teams
            * self.cluster
            * self.rows
            * self.units
            * self.element
            // 4
        )

    def groups(self, batch: int) -> int:
        return -(-batch // (self.rows * self.turns)) * self.heads

    def launches(self, batch: int) -> list[range]:
        """The blocks of each launch, one after the other."""
        blocks, most = self.groups(batch) * self.cluster, self.at_once * self.cluster
        each = min(blocks, most) or blocks
        return [range(i, min(i + each, blocks)) for i in range(0, blocks, each)]

    @property
    def sums_da(self) -> bool:
        """Whether the loop adds up da over time, which is one reading of all of it less.

        Only where each thread has registers left for its sums: in teams, by built-in cells.
        """
        _, items, wide = self._items
        sums = items * wide * (self.cell.gates + len(self.cell.apart))
        in_teams = self.hopper and not self.paired and not self.forward
        return in_teams and body(self.cell).code != OWN and sums <= MOST_SUMS

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


MOST_SUMS = 16
"""Of da over time, a thread's: more of them are spilled."""


@dataclass(frozen=True)
class Machine:
    """What a plan must fit: clusters held at once, by their size, and shared bytes of a block."""

    clusters: Mapping[int, int]
    shared_bytes: int
    hopper: bool = False  # has what hopper.cuh is made of

    def __hash__(self) -> int:
        return hash((tuple(self.clusters.items()), self.shared_bytes, self.hopper))


@functools.lru_cache(maxsize=1024)
def cheapest(
    cell: Cell, direction: str, size: int, element: int, batch: int, machine: Machine
) -> Plan | None:
    """The plan with the lowest price, or None where the matrix fits no cluster.

    `size` is the whole layer's. W_hh of a cell with heads must be 0 outside of them.
    """

    def plans() -> Iterator[Plan]:
        for heads in cuts_along_the_diagonal(cell.heads, size):
            yield from fitting(cell, direction, size, element, machine, heads)
        for launches in LAUNCHES:
            part = -(-batch // launches)
            if launches > 1 and part < FEWEST_ROWS:
                return
            every = _beyond_clusters(cell, direction, size, element, part, machine)
            best = min(every, key=lambda p: p.far_microseconds(part), default=None)
            if best is not None:
                yield best if launches == 1 else replace(best, at_once=best.groups(part))

    def price(p: Plan) -> float:
        doubt = 1.0 if not p.far else DOUBT if p.at_once == 0 else DOUBT_OF_PARTS
        return doubt * p.batch_microseconds(batch, machine)

    return min(plans(), key=price, default=None)


def _beyond_clusters(
    cell: Cell, direction: str, size: int, element: int, batch: int, machine: Machine
) -> Iterator[Plan]:
    """Every plan of far groups, all on the machine at once."""
    for heads in cuts_along_the_diagonal(cell.heads, size):
        yield from far_plans(cell, direction, size, element, batch, machine, heads)
        yield from straight_plans(cell, direction, size, element, batch, machine, heads)
        if direction == "backward":
            yield from spread_plans(cell, size, element, batch, machine, heads)
            yield from team_plans(cell, size, element, batch, machine, heads)
    if direction == "backward" and size >= FEWEST_UNITS:
        yield from crowd_plans(cell, size, element, batch, machine)
    yield from pair_plans(cell, direction, size, element, batch, machine)


def cuts_along_the_diagonal(heads: int, size: int) -> list[int]:
    """Into how many equal blocks W_hh can be seen to fall: several heads are one larger one."""
    if heads == 0:  # diagonal: blocks of any size, but of no fewer units than a thread's share
        return [n for n in range(1, size // 8 + 1) if size % n == 0] or [1]
    return [n for n in range(1, heads + 1) if heads % n == 0] if size % heads == 0 else [1]


def fitting(
    cell: Cell, direction: str, size: int, element: int, machine: Machine, heads: int = 1
) -> Iterator[Plan]:
    """Every plan that this machine can hold."""
    for cluster, rows in itertools.product(CLUSTERS, (8, 16)):
        if machine.clusters.get(cluster, 0) > 0:
            for plan in _cuts(cell, direction, size, element, cluster, rows, heads):
                # sums kept in registers, and the length of one, no further than was measured
                crowded = plan.gathers and (plan.m_tiles * rows > 128 or plan.k_tiles > 32)
                if not crowded and plan.shared_bytes <= machine.shared_bytes:
                    yield plan


def _cuts(
    cell: Cell, direction: str, size: int, element: int, cluster: int, rows: int, heads: int
) -> Iterator[Plan]:
    size //= heads
    for warps_k in (1, 2, 4, 8):
        plan = Plan(cell, direction, size, element, cluster, rows, 0, warps_k, heads=heads)
        gates, step = (cell.gates, 16 * WARPS // warps_k) if plan.gathers else (1, 16)
        enough = itertools.count(-(-size // (8 * cluster)) * 8, 8)
        units = next(u for u in enough if u * gates % step == 0)
        yield replace(plan, units=units)
        if not plan.gathers:
            return


def far_plans(
    cell: Cell,
    direction: str,
    size: int,
    element: int,
    batch: int,
    machine: Machine,
    heads: int = 1,
) -> Iterator[Plan]:
    """Every plan of groups beyond a cluster that are all on the machine at once.

    A group that waited for one not yet on the machine would wait for ever.
    """
    size //= heads
    if size * element % 16:  # far.cuh copies 16 bytes at a time
        return
    for rows, warps_k in itertools.product(FAR_ROWS, (1, 2, 4, 8)):
        most = machine.clusters[1] // (-(-batch // rows) * heads)
        for units in range(8, size, 8):
            blocks = -(-size // units)
            plan = Plan(cell, direction, size, element, blocks, rows, units, warps_k, 2, 2, heads)
            if CLUSTERS[-1] < blocks <= most and plan.m * warps_k % (16 * WARPS) == 0:
                for chunk, stages in CHUNKS:
                    plan = replace(plan, chunk=chunk, stages=stages)
                    crowded = plan.m_tiles * rows > 96 or plan.m_tiles * plan.k_tiles > 160
                    if not crowded and plan.shared_bytes <= machine.shared_bytes:
                        yield plan


def straight_plans(
    cell: Cell,
    direction: str,
    size: int,
    element: int,
    batch: int,
    machine: Machine,
    heads: int = 1,
) -> Iterator[Plan]:
    """As far_plans, of straight.cuh, which has registers for few rows."""
    size //= heads
    if size * element % 16 or (direction == "backward" and not _is_one_value(cell)):
        return
    for rows, units in itertools.product((8, 16), range(8, size, 8)):
        blocks = -(-size // units)
        if not CLUSTERS[-1] < blocks <= machine.clusters[1] // (-(-batch // rows) * heads):
            continue
        plan = Plan(cell, direction, size, element, blocks, rows, units, WARPS, 2, 0, heads)
        crowded = plan.m_tiles * rows > 128 or plan.m_tiles * plan.k_tiles > 160
        if not crowded and plan.register_tiles > 0 and plan.shared_bytes <= machine.shared_bytes:
            yield plan


def _is_one_value(cell: Cell) -> bool:
    """Whether all that is stored of da is one value of each unit, which others can read as h."""
    return cell.gates == 1 and not cell.apart


def spread_plans(
    cell: Cell, size: int, element: int, batch: int, machine: Machine, heads: int = 1
) -> Iterator[Plan]:
    """Every plan of far groups made of teams, for a backward pass; all on the machine at once."""
    for plan in teams(cell, size // heads, element, batch, machine, heads):
        if plan.m_tiles * plan.k_tiles <= 160 and plan.shared_bytes <= machine.shared_bytes:
            yield plan


def teams(
    cell: Cell, size: int, element: int, batch: int, machine: Machine, heads: int
) -> Iterator[Plan]:
    """Far groups of teams for which there are SMs, whatever else they need; `size` of one head."""
    if size * element % 16:  # an item is there or is not
        return
    for rows, partners in itertools.product(FAR_ROWS, PARTNERS):
        most = machine.clusters.get(partners, 0) // (-(-batch // rows) * heads)
        for units in range(8, size, 4):
            count = -(-size // (units * partners))
            blocks = count * partners
            whole = cell.gates * units * element % 16 == 0  # da is copied 16 bytes at a time
            if CLUSTERS[-1] < blocks and count <= most and whole:
                sizes = blocks, rows, units, 1, 0, 0, heads, partners
                yield Plan(cell, "backward", size, element, *sizes)


REGISTERS = {2: 192, 3: 112, 4: 72}
"""For tiles and sums of a thread of pairs.cuh, by warpgroups of its SM: the rest is addresses."""
REGISTERS_IN_TURNS = {1: 192, 2: 160}
"""The same, where other warps have the units."""


def pair_plans(
    cell: Cell, direction: str, size: int, element: int, batch: int, machine: Machine
) -> Iterator[Plan]:
    """Every plan of far groups of pairs; all on the machine at once."""
    one_value = direction == "forward" or _is_one_value(cell)
    if not (machine.hopper and element == 2 and one_value and size % 8 == 0 and size <= 4096):
        return
    for turns, rows, units in itertools.product((1, 2, 4), FAR_ROWS, range(8, size, 8)):
        pairs, groups = -(-size // (2 * units)), -(-batch // (rows * turns))
        if pairs <= CLUSTERS[-1] // 2 or pairs * groups > machine.clusters.get(2, 0):
            continue
        if turns > 1 and batch <= rows * turns // 2:
            continue
        registers = REGISTERS if turns == 1 else REGISTERS_IN_TURNS
        for warpgroups in registers:
            plan = Plan(cell, direction, size, element, 2 * pairs, rows, units, 1)
            plan = replace(plan, partners=2, warpgroups=warpgroups, stages=1, turns=turns)
            tiles, chunks = plan.m_tiles, plan.k_tiles // 4
            free = registers[warpgroups] - tiles * rows // 2  # without the sums
            held = min(chunks, free // (16 * tiles), 10 // tiles)
            spare = warpgroups * tiles * 64 - 2 * plan.m  # rows of tiles that are nobody's
            if tiles * rows > 128 or held < 1 or spare >= 64 or not _worth_turns(plan):
                continue
            plan = replace(plan, held=held)
            stages = (machine.shared_bytes - plan.shared_bytes) // (128 * rows) + 1
            if turns > 1 and stages < chunks:  # places are used equally often, and there are five
                stages = max((n for n in range(5, stages + 1) if chunks % n == 0), default=0)
            if stages >= min(chunks, 3):
                yield replace(plan, stages=min(stages, chunks))
        plan = Plan(cell, direction, size, element, 2 * pairs, rows, units, 1)
        if turns == 1 and (joined := _joined(plan, machine)) is not None:
            yield joined


def _joined(plan: Plan, machine: Machine) -> Plan | None:
    """The pair whose blocks both have the whole vector, of a gated cell forward; if it fits.

    A chunk has a place and a lane of its own, and no block is without units, since it says by them
    that it has done with a vector. Blocks of fewer values were slower than other plans throughout.
    """
    if plan.cell.gates == 1 or plan.units < 16 or plan.rows * plan.units < 512:
        return None
    plan = replace(plan, partners=2, warpgroups=2, stages=1, joined=True)
    tiles, chunks = plan.m_tiles, plan.k_tiles // 4
    held = min(chunks, (REGISTERS[2] - tiles * plan.rows // 2) // (16 * tiles), 10 // tiles)
    crowded = chunks > 16 or tiles * plan.rows > 128 or tiles * 64 - plan.m > 32
    if crowded or held < 1 or (plan.cluster - 1) * plan.units >= plan.size:
        return None
    plan = replace(plan, held=held, stages=2 * chunks)
    return plan if plan.shared_bytes <= machine.shared_bytes else None


def _worth_turns(plan: Plan) -> bool:
    """Whether a group has one, or products large enough for more: whole tiles, 32 rows or more.

    Beside two warpgroups that multiply there are few registers for sums, and for units' states.
    """
    if plan.turns == 1:
        return True
    _, items, _ = plan._items
    room = plan.rows == 32 and items * plan.turns <= 4 if plan.warpgroups > 1 else plan.rows >= 32
    return room and plan.m_tiles == 1 and plan.units >= 16 and plan.m >= 32


def team_plans(
    cell: Cell, size: int, element: int, batch: int, machine: Machine, heads: int = 1
) -> Iterator[Plan]:
    """As spread_plans, of teams.cuh."""
    if not (machine.hopper and element == 2):
        return
    every = teams(cell, size // heads, element, batch, machine, heads)
    for plan, warpgroups in itertools.product(every, REGISTERS):
        plan = replace(plan, warpgroups=warpgroups)
        free = REGISTERS[warpgroups] - 32  # without sums, and shares on their way
        held = min(plan.m_tiles * plan.k_tiles, free // 4)
        spare = warpgroups * plan.m_tiles * 64 - plan.m
        plan = replace(plan, held=held)
        if held > 0 and spare <= 64 and plan.shared_bytes <= machine.shared_bytes:
            yield plan


MEMBERS, CHUNK, FEWEST_UNITS = range(4, 33), 64, 1088
"""Of crowds.cuh: blocks of a team; units of a chunk, in which da is read; of a layer.

At 1024 units teams of clusters were faster throughout.
"""


def crowd_plans(
    cell: Cell, size: int, element: int, batch: int, machine: Machine
) -> Iterator[Plan]:
    """Every plan of far groups of teams that are no clusters; all on the machine at once.

    Whole teams and whole tiles: where some were half empty, a step took up to twice as long.
    """
    gated = cell.gates > 1 and cell.heads == 1
    if not (machine.hopper and element == 2 and gated and size % CHUNK == 0):
        return
    for rows, units, members in itertools.product(FAR_ROWS[1:], range(8, 65, 8), MEMBERS):
        blocks, team = size // units, units * members
        most = machine.clusters[1] // -(-batch // rows)
        if size % team or team % CHUNK or not CLUSTERS[-1] < blocks <= most:
            continue
        if cell.gates * team > 32 * CHUNK:  # a lane asks for a chunk
            continue
        for warpgroups in REGISTERS:
            plan = Plan(cell, "backward", size, element, blocks, rows, units, 1)
            plan = replace(plan, partners=members, warpgroups=warpgroups, crowded=True)
            held = min(plan.m_tiles * plan.k_tiles, (REGISTERS[warpgroups] - 32) // 4)
            plan = replace(plan, held=held)
            whole = plan.m == warpgroups * plan.m_tiles * 64
            if whole and plan.shared_bytes <= machine.shared_bytes:
                yield plan
