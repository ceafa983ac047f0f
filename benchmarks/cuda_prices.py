"""What a recurrent layer costs on this GPU by elman's CUDA kernel and by cuDNN.

    python benchmarks/cuda_prices.py --json src/elman/kernels/prices.json --rows rows.json
    python benchmarks/cuda_prices.py --json src/elman/kernels/prices.json --sizes 192 384

Every cell, arithmetic, hidden size and batch of a grid, forward alone and with the backward pass,
as a CUDA graph (so without Python), at two lengths: what a call costs before its first step, and
what each step costs. `elman.kernels.prices` reads the result. `--engine`, `--cells`,
`--arithmetics`, `--sizes` and `--batches` measure some of them alone and leave the others as they
are; a batch that is new to the table and was not measured is priced between its neighbours. Stacks
and both directions are timed at some of the sizes, for the rule about them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

import elman.nn
from elman.cells import named
from elman.kernels.cuda import arithmetic, compiled, machine
from elman.kernels.cuda.plan import cheapest

CELLS = {"tanh": "RNN", "gru": "GRU", "lstm": "LSTM"}
ARITHMETICS = {
    "fp16": (torch.float16, "tf32"),
    "bf16": (torch.bfloat16, "tf32"),
    "tf32": (torch.float32, "tf32"),
    "fp32": (torch.float32, "ieee"),
}
SIZES = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
BATCHES = (1, 8, 16, 32, 64, 256)
STEPS = (32, 160)
STACKS = ((1, 1), (2, 1), (4, 1), (1, 2))  # layers, directions
STACK_SIZES, STACK_BATCHES = (64, 256, 512, 1024), (1, 64)


class Case(NamedTuple):
    """One shape, timed at both lengths."""

    engine: str
    cell: str
    arithmetic: str
    hidden: int
    batch: int
    layers: int
    directions: int


def cases(sizes: Sequence[int], batches: Sequence[int]) -> Iterator[Case]:
    for layers, directions in STACKS if (sizes, batches) == (SIZES, BATCHES) else STACKS[:1]:
        one = (layers, directions) == (1, 1)
        grid = (sizes, batches) if one else (STACK_SIZES, STACK_BATCHES)
        kinds = ARITHMETICS if one else ("bf16", "tf32")
        for cell, kind, hidden, batch in itertools.product(CELLS, kinds, *grid):
            for engine in ("cuda", "cudnn"):
                if engine == "cudnn" or fits(cell, kind, hidden, batch):
                    yield Case(engine, cell, kind, hidden, batch, layers, directions)


def plans(cell: str, kind: str, hidden: int, batch: int) -> list:
    size, ways = ARITHMETICS[kind][0].itemsize, ("forward", "backward")
    return [cheapest(named(cell), way, hidden, size, batch, machine(0)) for way in ways]


def fits(cell: str, kind: str, hidden: int, batch: int) -> bool:
    return None not in plans(cell, kind, hidden, batch)


def switch(kind: str) -> None:
    torch.backends.cudnn.rnn.fp32_precision = ARITHMETICS[kind][1]  # pyright: ignore[reportAttributeAccessIssue]


def compile_all(
    some: Iterable[str], kinds: Iterable[str], sizes: Sequence[int], batches: Sequence[int]
) -> None:
    """Every kernel of the grid, on all cores."""
    needed = set()
    for cell, kind, hidden, batch in itertools.product(some, kinds, sizes, batches):
        switch(kind)
        if fits(cell, kind, hidden, batch):
            code = arithmetic(ARITHMETICS[kind][0])
            needed |= {(plan, code) for plan in plans(cell, kind, hidden, batch)}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda need: compiled(*need), needed))
    print(f"{len(needed)} kernels compiled", flush=True)


def captured(call: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            call()
    return graph.replay


def microseconds(replay: Callable[[], None], repeats: int = 3) -> float:
    """The least of a few replays."""
    replay()
    best = float("inf")
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        best = min(best, 1000 * start.elapsed_time(stop))
    return best


def measured(case: Case) -> dict[str, list[float]]:
    """Microseconds at each length, forward and with the backward pass."""
    dtype, home = ARITHMETICS[case.arithmetic][0], torch.nn if case.engine == "cudnn" else elman.nn
    rnn = getattr(home, CELLS[case.cell])(
        case.hidden,
        case.hidden,
        case.layers,
        bidirectional=case.directions == 2,
        device="cuda",
        dtype=dtype,
    )
    found: dict[str, list[float]] = {"forward": [], "both": []}
    for steps in STEPS:
        xs = torch.randn(steps, case.batch, case.hidden, device="cuda", dtype=dtype)
        dys = torch.randn(steps, case.batch, case.hidden * case.directions, device="cuda").to(dtype)
        xs.requires_grad_()

        def forward(xs: torch.Tensor = xs) -> None:
            with torch.no_grad():
                rnn(xs)

        def both(xs: torch.Tensor = xs, dys: torch.Tensor = dys) -> None:
            xs.grad = None
            rnn.zero_grad()
            rnn(xs)[0].backward(dys)

        for what, call in (("forward", forward), ("both", both)):
            found[what].append(round(microseconds(captured(call)), 1))
    return found


def packed(rows: list[dict], sizes: Sequence[int], batches: Sequence[int]) -> dict:
    """[start, step] by engine, cell, arithmetic, size and batch, for `elman.kernels.prices`."""
    table: dict = {"sizes": list(sizes), "batches": list(batches)}
    for row in rows:
        if (row["layers"], row["directions"]) != (1, 1):
            continue
        for what in ("forward", "both"):
            (first, last), (early, late) = row["steps"], row[what]
            step = max((late - early) / (last - first), 0.01)
            grid = table.setdefault(row["engine"], {}).setdefault(row["cell"], {})
            grid = grid.setdefault(row["arithmetic"], {})
            grid = grid.setdefault(what, [[None] * len(batches) for _ in sizes])
            place = sizes.index(row["hidden"]), batches.index(row["batch"])
            grid[place[0]][place[1]] = [round(max(early - first * step, 1), 1), round(step, 3)]
    return table


def joined(before: dict, more: dict) -> dict:
    """The table with the sizes and batches of both; where both have a place, that of `more`."""
    sizes, batches = (sorted({*before[axis], *more[axis]}) for axis in ("sizes", "batches"))

    def places(table: dict, grid: list[list] | None) -> dict[tuple[int, int], list | None]:
        every = itertools.product(table["sizes"], table["batches"])
        return dict(zip(every, itertools.chain(*grid), strict=True)) if grid else {}

    def merged(one: Any, other: Any) -> Any:
        if isinstance(one, dict):
            return {key: merged(one[key], (other or {}).get(key)) for key in one}
        lines = places(before, one)
        lines |= {place: line for place, line in places(more, other).items() if line}
        return [[_between(lines, size, batch) for batch in batches] for size in sizes]

    engines = {name: merged(before[name], more.get(name)) for name in ("cudnn", "cuda")}
    return {"sizes": sizes, "batches": batches, **engines}


def _between(lines: dict[tuple[int, int], list | None], size: int, batch: int) -> list | None:
    """The line there; of a batch without one, that of its neighbours, straight in logarithms."""
    if (size, batch) in lines:
        return lines[size, batch]
    known = [b for s, b in lines if s == size]
    low, high = max(b for b in known if b < batch), min(b for b in known if b > batch)
    one, other = lines[size, low], lines[size, high]
    if one is None or other is None:
        return None
    far = math.log(batch / low) / math.log(high / low)
    return [round(a ** (1 - far) * b**far, 3) for a, b in zip(one, other, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the prices go")
    parser.add_argument("--rows", type=Path, help="where every measurement goes")
    parser.add_argument("--engine", choices=("cuda", "cudnn"), help="this one alone")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS)
    parser.add_argument("--arithmetics", nargs="+", choices=ARITHMETICS, default=ARITHMETICS)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="these sizes alone")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="these alone")
    parser.add_argument("--seconds", type=float, default=300, help="stop after so long")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "RNN module weights")  # torch never flattens bf16
    os.environ["ELMAN_KERNELS"] = "cuda"
    began = time.monotonic()
    if options.engine != "cudnn":
        compile_all(options.cells, options.arithmetics, options.sizes, options.batches)
    rows = []
    for case in cases(options.sizes, options.batches):
        if options.engine not in (None, case.engine) or case.arithmetic not in options.arithmetics:
            continue
        if case.cell not in options.cells:
            continue
        if time.monotonic() - began > options.seconds:
            print(f"stopped before {case}")
            break
        switch(case.arithmetic)
        try:
            rows.append({**case._asdict(), "steps": STEPS, **measured(case)})
        except RuntimeError as failure:
            print(case, str(failure).splitlines()[0], flush=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    table = packed(rows, options.sizes, options.batches)
    whole = (SIZES, BATCHES, ARITHMETICS, CELLS)
    if (options.sizes, options.batches, options.arithmetics, options.cells) != whole:
        table = joined(json.loads(options.json.read_text(encoding="utf-8")), table)
    options.json.write_text(json.dumps({**about, **table}) + "\n", encoding="utf-8")
    if options.rows:
        options.rows.write_text(json.dumps({**about, "rows": rows}) + "\n", encoding="utf-8")
    print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
