"""The forward loop of wide layers by pairs.cuh, without turns and with: µs per step of every plan.

    python benchmarks/cuda_turns.py [--only WORD] [--steps T]

The launch alone, in bfloat16, gates kept: no input product, no Python. The first plan of a shape is
the cheapest without turns, and what others compute is compared with its bits.
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from elman.cells import named
from elman.kernels.cuda import BF16, EMPTY, compiled, machine, prepared
from elman.kernels.cuda.equations import body
from elman.kernels.cuda.plan import Plan, pair_plans

SIZES, BATCHES = (1024, 1536, 2048), (64, 128, 256)
SHAPES: list[tuple[str, int, int]] = [
    *itertools.product(("lstm", "gru"), SIZES, BATCHES),
    *(("tanh", 2048, b) for b in BATCHES),
]


class Loop:
    """The arrays of one layer, and its steps by any plan."""

    def __init__(self, cell: str, size: int, batch: int, steps: int) -> None:
        gates, kept = named(cell).gates, body(named(cell)).kept
        like = {"device": "cuda", "dtype": torch.bfloat16}
        torch.manual_seed(0)
        self.steps, self.batch = steps, batch
        self.W_hh = torch.randn(gates * size, size, **like) * size**-0.5
        self.xs = torch.randn(steps, batch, gates * size, **like)
        self.bias = torch.zeros(size, device="cuda") if cell == "gru" else None
        self.hs = torch.empty(steps + 1, batch, size, **like)
        self.cs = torch.empty_like(self.hs) if cell == "lstm" else None
        self.gates = torch.empty(steps, batch, kept * size, **like) if kept else None

    def microseconds(self, plan: Plan, repeats: int = 3) -> float:
        """Of a step: the least of a few launches."""
        launch = prepared(plan, BF16, self.batch, 0, 14)
        arrays = (self.W_hh, self.xs, None, self.bias, None, None, None)
        arrays += (self.hs, self.cs, self.gates, None, None)
        words = [0 if x is None else x.data_ptr() for x in arrays] + [self.steps, self.batch]
        best = float("inf")
        for _ in range(repeats):
            self.hs.view(torch.int32).fill_(EMPTY)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch(torch.cuda.current_stream().cuda_stream, words)
            stop.record()
            stop.synchronize()
            best = min(best, 1000 * start.elapsed_time(stop) / self.steps)
        return best

    def found(self) -> list[Tensor]:
        return [x.clone() for x in (self.hs, self.cs, self.gates) if x is not None]


def plans(cell: str, size: int, batch: int) -> list[Plan]:
    """The cheapest plan without turns, if any fits, then all with."""
    every = list(pair_plans(named(cell), "forward", size, 2, batch, machine(0)))
    alone = [p for p in every if p.turns == 1 and not p.joined]  # which adds up in another order
    cheapest = sorted(alone, key=lambda p: p.far_microseconds(batch))[:1]
    return cheapest + [p for p in every if p.turns > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="shapes whose name has this: 'lstm 2048'")
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
            cut = (
                f"{plan.turns} x {plan.rows} rows, {plan.units} units, {plan.warpgroups} warpgroups"
            )
            print(*shape, f"{cut}: {took:.2f} ({first / took:.2f}x), same bits: {same}", flush=True)


if __name__ == "__main__":
    main()
