"""The floor under a recurrent layer on this GPU, measured, for cuda_kernels.py. µs per step:

    forward            P  + e      + r
    forward+backward   4P + e + e' + r + r'

P    one large product, X W_ihᵀ over all T steps and B rows, by torch in bf16; a forward pass needs
     one, a backward pass three more (dX, dW_ih, dW_hh).
e    the shortest step that a group of SMs can take, whatever it computes (cuda_floor.cu): wait for
     the vector, read it, one `mma`, one barrier, one tanh, one delivery to every SM of the group;
     the group as large as in elman's plan for the forward pass (e': the backward pass).
r    the recurrent product's 2 B gates H² operations at the speed of the fastest large product of
     the run, on those SMs of the GPU that the plan occupies (r': the backward pass).

Nothing overlaps, so this is the floor of one design (weights stay in SMs, groups of rows), not of
every conceivable one: large products could run beside the loop on SMs that it leaves idle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from elman.cells import named
from elman.kernels.cuda import driver, machine
from elman.kernels.cuda.plan import Plan, cheapest

SOURCE = Path(__file__).with_name("cuda_floor.cu")
THREADS = 256
SHARED_BYTES = 16 + 2 * 8 * 256 + 2 * THREADS * 4  # mailboxes, two vectors, twice the sums
Shape = tuple[str, int, int, int]
"""Cell, batch, steps, hidden units."""
Timer = Callable[[Callable[[], object]], float]
"""The milliseconds of a call."""


def floors(shapes: list[Shape], milliseconds: Timer) -> dict[Shape, dict[str, float]]:
    """The floors of each shape in bf16, and what they are made of."""
    product = {s: milliseconds(large_product(s)) * 1000 / s[2] for s in shapes}
    speed = max(operations(s) / product[s] for s in shapes)
    found = {}
    for shape in shapes:
        there, back = (one_way(shape, way, speed, milliseconds) for way in ("forward", "backward"))
        found[shape] = {
            "forward": product[shape] + sum(there),
            "forward+backward": 4 * product[shape] + sum(there) + sum(back),
            "large product": product[shape],
            "shortest step": there[0],
            "shortest step back": back[0],
            "recurrent product": there[1],
            "recurrent product back": back[1],
        }
    return found


def one_way(shape: Shape, direction: str, speed: float, milliseconds: Timer) -> tuple[float, float]:
    """e and r of one direction."""
    cell, batch, _, hidden = shape
    plan = cheapest(named(cell), direction, hidden, 2, batch, machine(0))
    assert plan is not None, f"no plan for {shape}"
    e = shortest_step(plan.cluster, milliseconds)
    return e, operations(shape) / (speed * used(plan, batch))


def operations(shape: Shape) -> int:
    """Of one step's recurrent product, and (the input being as wide as the state) of X W_ihᵀ."""
    cell, batch, _, hidden = shape
    return 2 * batch * named(cell).gates * hidden**2


def large_product(shape: Shape) -> Callable[[], object]:
    cell, batch, steps, hidden = shape
    make = {"device": "cuda", "dtype": torch.bfloat16}
    xs = torch.randn(steps * batch, hidden, **make)
    W_ih = torch.randn(named(cell).gates * hidden, hidden, **make)
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
    config = driver.configuration(cluster, cluster, THREADS, SHARED_BYTES)
    out, launch = torch.zeros(cluster, device="cuda"), driver.Launch(function, config, 2)
    stream = torch.cuda.current_stream().cuda_stream
    ms = milliseconds(lambda: launch(stream, [out.data_ptr(), steps]))
    return ms * 1000 / steps
