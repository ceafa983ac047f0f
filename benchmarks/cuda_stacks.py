"""Layers of a stack beside each other (kernels/cuda/stacks.py) against one after the other.

    python benchmarks/cuda_stacks.py [--every] [--layers 2 4] [--sizes 256 512] [--batches 16 64]
                                     [--steps 128 1024] [--cells …] [--dtypes …] [--json FILE]

Both by our CUDA kernel, in one process and in turns: as CUDA graphs (the GPU's time, forward and
backward apart) and eagerly, through autograd (`wall`, forward + backward, medians). `--every` also
times every number of layers at once, in 4, 8 and 16 pieces, whatever they are priced at. What the
prices predicted stands in brackets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import elman.nn
from elman.cells import named
from elman.kernels import cuda
from elman.kernels.cuda import calls, stacks, wider
from elman.kernels.cuda.plan import cheapest
from elman.kernels.cuda.stacks import Schedule
from elman.recurrence.prepared import Call

MODULES = {"tanh": "RNN", "gru": "GRU", "lstm": "LSTM"}
DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32}
DIRECTIONS = ("forward", "backward")
ROUNDS = 5


class Job:
    """One stack, run by a schedule or without one."""

    def __init__(self, cell: str, H: int, B: int, T: int, layers: int, dtype: str) -> None:
        torch.manual_seed(0)
        like: dict[str, Any] = {"device": "cuda", "dtype": DTYPES[dtype]}
        self.name = f"{cell} H={H} B={B} T={T} layers={layers} {dtype}"
        element = like["dtype"].itemsize
        self.stack = stacks.Stack(named(cell), H, element, B, layers, T, cuda.machine(0))
        self.module = getattr(elman.nn, MODULES[cell])(H, H, layers, **like)
        self.weights = [*self.module.parameters()]
        self.x, self.dys = (torch.randn(T, B, H, **like) for _ in range(2))

    def schedule(self, direction: str) -> Schedule | None:
        """As priced."""
        return stacks.schedule(self.stack, direction)

    def every(self, direction: str) -> list[Schedule]:
        return [s for s in self.stack.schedules(direction) if s.pieces in (4, 8, 16)]

    def call(self, by: dict[str, Schedule | None]) -> Call:
        scheduled = mock.patch.object(
            calls, "schedule_for", lambda cell, direction, *_: by[direction]
        )
        with scheduled, mock.patch.dict(wider._PREPARED, clear=True):
            m = self.module
            return Call(m._recipe(), m._inputs(*m._time_first(self.x, None)), False)

    def graphs(self, call: Call) -> dict[str, torch.cuda.CUDAGraph]:
        """Both passes, as graphs."""
        found, kept = {}, []
        p, weights = call.prepared, [w.detach() for w in self.weights]

        def forward() -> None:
            kept[:] = p.forward(self.x, (), weights, True)[2]

        def backward() -> None:
            p.backward(self.x, weights, kept, self.dys, [None] * len(p.widths), True, False)

        for direction, work in zip(DIRECTIONS, (forward, backward), strict=True):
            work()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            found[direction] = graph
        return found

    def plans(self, every: bool) -> set[Any]:
        one = self.stack
        at = one.size, one.element, one.batch, one.machine
        found = {cheapest(one.cell, d, *at) for d in DIRECTIONS}
        for d in DIRECTIONS:
            found |= {s.plan for s in [self.schedule(d), *(self.every(d) if every else [])] if s}
        return {(plan, cuda.arithmetic(self.x.dtype)) for plan in found}


def microseconds(graph: torch.cuda.CUDAGraph, replays: int = 3) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / replays


def wall(job: Job, call: Call, calls: int = 3) -> tuple[float, float]:
    """Eagerly, µs: forward alone, and forward + backward."""

    def forward() -> None:
        with torch.no_grad():
            call(job.x, (), job.weights)

    def both() -> None:
        call(job.x, (), job.weights)[0].backward(job.dys)

    found = []
    for work in (forward, both):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
        found.append(1e6 * (time.perf_counter() - begin) / calls)
    return found[0], found[1]


def measure(job: Job) -> dict[str, Any]:
    """One after the other, and beside each other as priced, in turns."""
    chosen = {d: job.schedule(d) for d in DIRECTIONS}
    ways = [job.call(dict.fromkeys(DIRECTIONS)), job.call(chosen)]
    graphs = [job.graphs(call) for call in ways]
    gpu: list[dict[str, list[float]]] = [{d: [] for d in DIRECTIONS} for _ in ways]
    eager: list[list[tuple[float, float]]] = [[], []]
    for call in ways:
        wall(job, call)
    for i, (k, call) in itertools.product(range(ROUNDS), enumerate(ways)):
        for d in DIRECTIONS:
            gpu[k][d].append(microseconds(graphs[k][d]))
        if i < 3:
            eager[k].append(wall(job, call))
    row: dict[str, Any] = {"job": job.name}
    for d in DIRECTIONS:
        s, (a, b) = chosen[d], [statistics.median(g[d]) for g in gpu]
        row[d] = {"before": a, "now": b, "ratio": a / b, "how": described(s)}
        if s is not None:
            row[d]["predicted"] = (job.stack.alone(d) or 0) / job.stack.beside(s)
    for j, what in enumerate(("forward", "both")):
        a, b = (statistics.median(t[j] for t in times) for times in eager)
        row[f"wall {what}"] = {"before": a, "now": b, "ratio": a / b}
    return row


def described(s: Schedule | None) -> str:
    if s is None:
        return "off"
    p = s.plan
    by = f"cluster {p.cluster} rows {p.rows} {p.microseconds(p.rows):.2f}"
    return f"{s.lanes} of {len(s.slots())}×{s.steps}, {by}"


def explore(job: Job) -> None:
    """Every schedule, one direction at a time."""
    alone = job.graphs(job.call(dict.fromkeys(DIRECTIONS)))
    for d in DIRECTIONS:
        microseconds(alone[d])
        before = min(microseconds(alone[d]) for _ in range(3))
        found = []
        for s in job.every(d):
            graph = job.graphs(job.call({**dict.fromkeys(DIRECTIONS), d: s}))[d]
            microseconds(graph)
            found.append((before / min(microseconds(graph) for _ in range(3)), described(s)))
        line = "; ".join(f"{ratio:.2f} ({how})" for ratio, how in sorted(found, reverse=True)[:5])
        worst = min(found, default=(0, ""))
        print(f"  {job.name} {d} {before:.0f} µs: {line} … {worst[0]:.2f} ({worst[1]})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--cells", nargs="+", default=[*MODULES])
    parser.add_argument("--sizes", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--steps", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--dtypes", nargs="+", default=[*DTYPES])
    parser.add_argument("--json")
    o = parser.parse_args()
    print("clusters held", dict(cuda.machine(0).clusters), flush=True)
    jobs = [*itertools.product(o.cells, o.sizes, o.batches, o.steps, o.layers, o.dtypes)]
    plans = set[Any]().union(*(Job(*at).plans(o.every) for at in jobs))
    begin = time.perf_counter()
    with ThreadPoolExecutor(12) as several:
        for _ in several.map(lambda at: cuda.compiled(*at), plans):
            pass
    print(f"{len(plans)} plans compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    rows = []
    for at in jobs:
        rows.append(row := measure(Job(*at)))
        f, b, wf, wb = (row[k] for k in ("forward", "backward", "wall forward", "wall both"))
        print(
            f"{row['job']:44} graph F {f['before']:6.0f} {f['now']:6.0f} {f['ratio']:.2f}"
            f" ({f.get('predicted', 1):.2f})"
            f" B {b['before']:6.0f} {b['now']:6.0f} {b['ratio']:.2f} ({b.get('predicted', 1):.2f})"
            f" | eager F {wf['before']:6.0f} {wf['now']:6.0f} {wf['ratio']:.2f}"
            f" both {wb['before']:6.0f} {wb['now']:6.0f} {wb['ratio']:.2f}"
            f" | {f['how']} | {b['how']}",
            flush=True,
        )
        if o.every:
            explore(Job(*at))
        torch.cuda.empty_cache()
    if o.json:
        where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        Path(o.json).write_text(json.dumps({**where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
