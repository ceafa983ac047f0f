"""The loops of wide layers by pairs.cuh, without turns and with: µs per step of every plan.

    python benchmarks/cuda_turns.py [--only WORD] [--steps T]

Forward, and backward for one-gate cells. The launch alone, in bfloat16, gates kept: no products
with inputs, no Python. The first plan of a shape is the cheapest of pairs without turns, and what
others compute is compared with its bits; backward, teams, which round otherwise, come last: those
that are clusters, and for gated cells those that are none (crowds.cuh), whose da is filled before.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from elman.cells import named
from elman.kernels.cuda import BF16, awaited, compiled, machine, prepared, shares_of
from elman.kernels.cuda.equations import body
from elman.kernels.cuda.plan import Layer, Plan, crowd_plans, pair_plans, team_plans

SIZES, BATCHES = (1024, 1536, 2048), (64, 128, 256)
SHAPES: list[tuple[str, str, int, int]] = [
    *itertools.product(("lstm", "gru"), ("forward",), SIZES, BATCHES),
    *itertools.product(("tanh",), ("forward", "backward"), (1536, 2048, 3072), BATCHES),
    *itertools.product(("lstm", "gru"), ("backward",), (1536, 2048), (32, *BATCHES)),
]


class Loop:
    """The arrays of one layer, and its steps by any plan."""

    def __init__(self, cell: str, direction: str, size: int, batch: int, steps: int) -> None:
        gates, blocks = named(cell).gates, named(cell).gates + len(named(cell).apart)
        width = body(named(cell)).kept * size
        like = {"device": "cuda", "dtype": torch.bfloat16}
        torch.manual_seed(0)
        self.steps, self.batch = steps, batch
        W_hh = torch.randn(gates * size, size, **like) * size**-0.5
        hs = torch.randn(steps + 1, batch, size, **like).tanh_()
        cs = hs.clone() if cell == "lstm" else None
        kept = torch.rand(steps, batch, width, **like) if width else None
        if direction == "forward":
            xs = torch.randn(steps, batch, gates * size, **like)
            bias = torch.zeros(size, device="cuda") if cell == "gru" else None
            self.before = (W_hh, xs, None, bias, None, None, None)
            self.track, self.after = hs, (cs, kept, None, None)
        else:
            dhs = torch.randn(steps, batch, size, **like)
            das = torch.empty(steps, batch, blocks * size, **like)
            dh = torch.empty(batch, size, device="cuda")
            self.before = (W_hh, hs, cs, kept, dhs, None, None, None, 0, 0, None)
            self.track, self.after = das, (dh, None)

    def microseconds(self, plan: Plan, repeats: int = 3) -> float:
        """Of a step: the least of a few launches."""
        best = float("inf")
        for _ in range(repeats):
            shares = [] if plan.forward else [shares_of(plan, self.batch, self.track)]
            arrays = (*self.before, awaited(plan, self.track), *self.after, *shares)
            words = [x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in arrays]
            words += [self.steps, self.batch]
            launch = prepared(plan, BF16, self.batch, 0, len(words))
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch(torch.cuda.current_stream().cuda_stream, words)
            stop.record()
            stop.synchronize()
            best = min(best, 1000 * start.elapsed_time(stop) / self.steps)
        return best

    def found(self) -> list[Tensor]:
        return [x.clone() for x in (self.track, *self.after) if x is not None]


def plans(cell: str, direction: str, size: int, batch: int) -> list[Plan]:
    """The cheapest pairs without turns, if any fit, then all with; backward the cheapest teams."""
    every: list[Plan] = list(pair_plans(Layer(named(cell), direction, size, 2), batch, machine(0)))
    # pairs that share the vector add up in another order
    alone = [p for p in every if p.turns == 1 and not p.joined]
    found = sorted(alone, key=lambda p: p.microseconds(batch))[:1]
    found += [p for p in every if p.turns > 1]
    if direction == "backward":
        found += cheapest(team_plans, cell, size, batch) + cheapest(crowd_plans, cell, size, batch)
    return found


def cheapest(kind: Callable[..., Iterator[Plan]], cell: str, size: int, batch: int) -> list[Plan]:
    """The cheapest plan of a kind, in as few launches as hold all rows, if there is any."""
    for launches in (1, 2, 4, 8):
        part = -(-batch // launches)
        every = list(kind(Layer(named(cell), "backward", size, 2), part, machine(0)))
        if every:
            best = min(every, key=lambda p: p.microseconds(part))
            return [best if launches == 1 else replace(best, at_once=best.groups(part))]
    return []


def words(plan: Plan) -> str:
    teams = f"{'crowds' if plan.crowded else 'teams'} of {plan.partners}, "
    kind = teams if plan.spread else f"{plan.turns} x "
    return f"{kind}{plan.rows} rows, {plan.units} units, {plan.warpgroups} warpgroups"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="shapes whose name has this: 'tanh backward'")
    parser.add_argument("--steps", type=int, default=512)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing to measure")
        return
    todo = {s: plans(*s) for s in SHAPES if options.only in " ".join(map(str, s))}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda p: compiled(p, BF16), itertools.chain(*todo.values())))
    for shape, every in todo.items():
        loop, first, bits = Loop(*shape, options.steps), 0.0, list[Tensor]()
        for plan in every:
            took, found = loop.microseconds(plan), loop.found()
            first, bits = first or took, bits or found
            same = all(torch.equal(a, b) for a, b in zip(found, bits, strict=True))
            ratio, launches = first / took, len(plan.launches(shape[-1]))
            price = launches * plan.microseconds(-(-shape[-1] // launches))
            said = f"{took:.2f} ({ratio:.2f}x), priced {price:.2f}, same bits: {same}"
            print(*shape, f"{words(plan)}: {said}", flush=True)


if __name__ == "__main__":
    main()
