"""How much memory a call of `elman.nn` takes, beside `torch.nn`, over shapes drawn at random.

    python benchmarks/memory.py [--device cpu|cuda] [--random N] [--seed S] [--json FILE]

A case is one of `grid.py --wild`: a module, how it is used, and forward alone or with a backward
pass. What is counted is how far memory rises above what module and input take, at its highest
within its first call: on a CPU that of a process of its own, as the kernel counts it; on a GPU what
torch has allocated, once a small call has been made (cuBLAS's workspace is for all that follow).
Calls that are captured later hold what a graph needs between them, which is not counted here. The
number is torch's rise by ours: above 1 ours takes less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import grid

LEAST = 2**23
"""Bytes that torch's call must take: below them pages are too coarse."""


def maker_of(case: grid.Case, device: str, package: str) -> Callable[[], Callable[[], object]]:
    """What makes a call, gradients being none before it; to make it is to call the module once."""
    modules, x, state = grid.made(case, device)
    module = modules[("torch", "elman").index(package)]

    def make() -> Callable[[], object]:
        call = grid.call_of(case, module, x, state)

        def run() -> None:
            module.zero_grad()
            x.grad = None
            call()

        return run

    return make


def resident(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {name}: this needs Linux")


def maker_after_a_small_call(
    case: grid.Case, device: str, package: str
) -> Callable[[], Callable[[], object]]:
    """The same once all that a first call loads is there."""
    small = case._replace(H=16, B=1 if case.how == grid.ALONE else 2, T=3)
    maker_of(small, device, package)()()
    return maker_of(case, device, package)


def rise_on_a_cpu(case: grid.Case, package: str) -> int:
    """Of the first call: what the C library keeps of later ones' is not to be told apart."""
    make = maker_after_a_small_call(case, "cpu", package)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    before = resident("VmRSS")
    make()()
    return resident("VmHWM") - before


def rise_on_a_gpu(case: grid.Case, package: str) -> int:
    make = maker_after_a_small_call(case, "cuda", package)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    make()()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measured(case: grid.Case, device: str) -> tuple[int, int]:
    """The rises of torch.nn and of elman.nn."""
    if device == "cuda":
        return rise_on_a_gpu(case, "torch"), rise_on_a_gpu(case, "elman")
    found = list[int]()
    for package in ("torch", "elman"):
        command = [sys.executable, __file__, "--alone", package, json.dumps(case)]
        out = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(int(out.stdout.split()[-1]))
    return found[0], found[1]


def main() -> None:
    if sys.argv[1:2] == ["--alone"]:
        torch.set_num_threads(1)
        print(rise_on_a_cpu(grid.Case(*json.loads(sys.argv[3])), sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--random", type=int, metavar="N", default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args()
    rows = list[dict[str, Any]]()
    for case in grid.drawn(options.device, options.random, options.seed, wild=True):
        if case.job == "step" or case.multiply_adds() > 2e10:
            continue
        theirs, ours = measured(case, options.device)
        if theirs < LEAST:
            continue
        ratio = theirs / max(ours, 1)
        rows.append({**case._asdict(), "torch": theirs, "elman": ours, "ratio": ratio})
        print(f"{ratio:7.2f}  {theirs / 2**20:7.0f} MiB  {case}", flush=True)
    ratios = [row["ratio"] for row in rows]
    print(f"{len(rows)} cases, {statistics.geometric_mean(ratios):.2f}, least {min(ratios):.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
