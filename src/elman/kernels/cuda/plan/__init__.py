"""How one direction of one layer is spread over the GPU.

The hidden units are cut into `cluster` slices, one per SM, and each SM's share of the recurrent
matrix into tiles of 16 rows by 32 bytes over its warps; the batch is cut into groups of `rows`.
A group is one SM whose warps have whole units (`single.py`), a cluster of SMs that write into each
other's memory (`clusters.py`), or, for larger layers, any number of SMs that meet in device memory:
one file for each kind of those, one line in KINDS.
Every way that fits is priced with a small model of the machine, and the cheapest taken.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from elman.cells import Cell
from elman.kernels.cuda.plan.base import CLUSTERS, REGISTER_TILES, WARPS, Layer, Machine, Plan
from elman.kernels.cuda.plan.clusters import ClusterPlan, cluster_plans
from elman.kernels.cuda.plan.crowds import crowd_plans, wide_crowd_plans
from elman.kernels.cuda.plan.far import far_plans
from elman.kernels.cuda.plan.pairs import pair_plans
from elman.kernels.cuda.plan.single import single_plans
from elman.kernels.cuda.plan.spread import spread_plans
from elman.kernels.cuda.plan.straight import straight_plans
from elman.kernels.cuda.plan.teams import team_plans

__all__ = [
    "CLUSTERS",
    "REGISTER_TILES",
    "WARPS",
    "ClusterPlan",
    "Layer",
    "Machine",
    "Plan",
    "cheapest",
    "cluster_plans",
    "crowd_plans",
    "cuts_along_the_diagonal",
    "far_plans",
    "pair_plans",
    "single_plans",
    "spread_plans",
    "straight_plans",
    "team_plans",
]

KINDS = (  # of groups beyond a cluster: each gives its plans for a layer, none where it cannot
    far_plans,  # every SM streams the whole vector
    straight_plans,  # the same into registers, of few rows
    spread_plans,  # teams share their da; backward
    team_plans,  # the same by wgmma
    wide_crowd_plans,  # the same, teams being no clusters
    pair_plans,  # pairs of SMs have half of the vector each, by wgmma
)

# Of single SMs: prices of the small clusters beside them are up to 1.3 times too low, and more
# where rows are no whole 16 bytes.
IN_FAVOUR, APART = 0.87, 1.25
DOUBT = 1.08  # prices of far groups are less certain, and they take SMs that others could use
DOUBT_OF_PARTS = 1.25  # several launches: what is off in the price of one is off in all
LAUNCHES, FEWEST_ROWS = (1, 2, 3, 4, 6, 8, 12, 16), 32
"""Of far groups: in how many launches a batch may be cut, and the rows of one that are worth it."""


@functools.lru_cache(maxsize=1024)
def cheapest(
    cell: Cell, direction: str, size: int, element: int, batch: int, machine: Machine
) -> Plan | None:
    """The plan with the lowest price, or None where the matrix fits neither a cluster nor the GPU.

    `size` is the whole layer's. W_hh of a cell with heads must be 0 outside of them.
    """
    cuts = cuts_along_the_diagonal(cell.heads, size)
    layers = [Layer(cell, direction, size, element, heads) for heads in cuts]

    def plans() -> Iterator[Plan]:
        for layer in layers:
            yield from single_plans(layer, machine)
            yield from cluster_plans(layer, machine)
        for launches in LAUNCHES:
            part = -(-batch // launches)
            if launches > 1 and part < FEWEST_ROWS:
                return
            every = (p for layer in layers for kind in KINDS for p in kind(layer, part, machine))
            best = min(every, key=lambda p: p.microseconds(part), default=None)
            if best is not None:
                yield best if launches == 1 else replace(best, at_once=best.groups(part))

    def price(p: Plan) -> float:
        doubt = DOUBT if p.at_once == 0 else DOUBT_OF_PARTS
        single = IN_FAVOUR / (APART if p.size * p.element % 16 else 1)
        factor = doubt if p.far else single if p.single else 1.0
        return factor * p.batch_microseconds(batch, machine)

    return min(plans(), key=price, default=None)


def cuts_along_the_diagonal(heads: int, size: int) -> list[int]:
    """Into how many equal blocks W_hh can be seen to fall: several heads are one larger one."""
    if heads == 0:  # diagonal: blocks of any size, but of no fewer units than a thread's share
        return [n for n in range(1, size // 8 + 1) if size % n == 0] or [1]
    return [n for n in range(1, heads + 1) if heads % n == 0] if size % heads == 0 else [1]
