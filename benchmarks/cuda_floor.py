"""The floor under a recurrent layer on this GPU, measured, for cuda_kernels.py.

    forward            P  + T e        + P S/s
    forward+backward   4P + T (e + e') + P S/s + P S/s'

P      one large product, X W_ihᵀ over all T steps and B rows, by torch in bf16; a forward pass
       needs one, a backward pass three more (dX, dW_ih, dW_hh).
e      the shortest step that a group of SMs can take, whatever it computes (cuda_floor.cu): wait
       for the vector, read it, one `mma`, one barrier, one tanh, one delivery to every SM of the
       group; the group as large as in elman's plan for the forward pass (e': the backward pass).
P S/s  the recurrent products, which have as many operations as X W_ihᵀ, at the speed of that, but
       on the s SMs that the plan occupies of the GPU's S.

Nothing overlaps, so this is the floor of one design (weights stay in SMs, groups of rows), not of
every conceivable one: large products could run beside the loop on SMs that it leaves idle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from elman.kernels.cuda import driver, machine
from elman.kernels.cuda.plan import GATES, Plan, cheapest

SOURCE = Path(__file__).with_name("cuda_floor.cu")
THREADS = 256
SHARED_BYTES = 16 + 2 * 8 * 256 + 2 * THREADS * 4  # mailboxes, two vectors, twice the sums
Timer = Callable[[Callable[[], object]], float]
"""The milliseconds of a call."""


def floors(shape: tuple[str, int, int, int], milliseconds: Timer) -> dict[str, float]:
    """µs per step of a forward pass, and of forward and backward, in bf16."""
    cell, batch, steps, hidden = shape
    product = milliseconds(large_product(shape)) * 1000 / steps
    one_way = []
    for direction in ("forward", "backward"):
        plan = cheapest(cell, direction, hidden, 2, batch, machine(0))
        assert plan is not None, f"no plan for {shape}"
        one_way.append(shortest_step(plan.cluster, milliseconds) + product / used(plan, batch))
    return {"forward": product + one_way[0], "forward+backward": 4 * product + sum(one_way)}


def large_product(shape: tuple[str, int, int, int]) -> Callable[[], object]:
    cell, batch, steps, hidden = shape
    make = {"device": "cuda", "dtype": torch.bfloat16}
    xs, W_ih = (
        torch.randn(steps * batch, hidden, **make),
        torch.randn(GATES[cell] * hidden, hidden, **make),
    )
    return lambda: torch.nn.functional.linear(xs, W_ih)


def used(plan: Plan, batch: int) -> float:
    """The share of the GPU's SMs that compute at once."""
    groups = min(plan.groups(batch), machine(0).clusters[plan.cluster])
    return groups * plan.cluster / machine(0).clusters[1]


@functools.lru_cache
def shortest_step(cluster: int, milliseconds: Timer, steps: int = 4096) -> float:
    """µs of a step in one group of SMs that does nothing but depend on the step before."""
    defines = {"CLUSTER": cluster, "DTYPE": 1, "SIZE": 16, "PATIENCE": 1 << 35}
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    cubin = driver.compiled(str(SOURCE), defines, architecture)
    function = driver.Function(cubin, "floor_of_step", SHARED_BYTES)
    out = torch.zeros(cluster, device="cuda")
    return (
        milliseconds(lambda: function.launch(cluster, cluster, THREADS, out, steps)) * 1000 / steps
    )
