"""Recurrent layers on one GPU: elman against cuDNN and other peers, µs per time step.

    python benchmarks/cuda_kernels.py                  # every shape of the table in docs/cuda.md
    python benchmarks/cuda_kernels.py --quick          # two shapes
    python benchmarks/cuda_kernels.py --compile --jax --flashrnn  # the slow-to-compile peers too
    python benchmarks/cuda_kernels.py --json benchmarks/results/cuda-h200.json

Needs torch alone; --jax needs JAX, --flashrnn an importable `flashrnn` and nvcc. Times are medians
of whole calls through the public modules: forward alone (no gradient), and forward and backward
with gradients of inputs, weights and biases, eager and as one CUDA graph. The last column is the
measured floor (cuda_floor.py says what it is made of) over elman's time in bf16. The job of the
notes (500 epochs of 10,000 characters) is in cuda_notes_job.py.
(Not cuda.py: that would hide NVIDIA's own `cuda` from every script in this folder.)
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import elman.nn
from cuda_floor import Shape, floors
from cuda_peers import CompiledLoop, FlashRNN, jax_calls
from elman.kernels import explain

SHAPES = [
    ("tanh", 64, 1024, 256),
    ("tanh", 64, 1024, 512),
    ("tanh", 64, 1024, 1024),
    ("gru", 64, 1024, 256),
    ("gru", 64, 1024, 512),
    ("lstm", 64, 1024, 256),
    ("lstm", 64, 1024, 512),
    ("lstm", 16, 1024, 768),
]
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "fp32": torch.float32,  # TF32 switched off
}
CLASSES = {"tanh": "RNN", "gru": "GRU", "lstm": "LSTM"}
FLASHRNN = [SHAPES[0], SHAPES[1], SHAPES[5]]  # each takes nvcc a minute or two
Floors = dict[Shape, dict[str, float]]
Make = Callable[[str, int, torch.dtype], torch.nn.Module]


@dataclass(frozen=True)
class Result:
    """One contender on one shape."""

    cell: str
    batch: int
    steps: int
    hidden: int
    contender: str
    dtype: str
    mode: str  # eager or graph
    what: str  # forward, or forward+backward
    us_per_step: float
    tokens_per_s: float


def name_of(shape: Shape) -> str:
    return " ".join(map(str, shape))


def modules_of(home: object) -> Make:
    """How to make a layer of torch.nn or elman.nn."""
    return lambda cell, hidden, dtype: getattr(home, CLASSES[cell])(
        hidden, hidden, device="cuda", dtype=dtype
    )


def work(rnn: torch.nn.Module, xs: Tensor, dys: Tensor, backward: bool) -> Callable[[], None]:
    """One call: forward, or forward and backward, gradients replaced rather than added to."""
    params = [*rnn.parameters(), xs]

    def forward() -> None:
        with torch.no_grad():
            rnn(xs)

    def both() -> None:
        for p in params:
            p.grad = None
        rnn(xs)[0].backward(dys)

    return both if backward else forward


def graphed(call: Callable[[], None]) -> Callable[[], None]:
    """The same call, captured once and replayed."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        call()
    return graph.replay


def milliseconds(call: Callable[[], object], seconds: float, wall: bool = False) -> float:
    """The median over repeats that fill about `seconds`, after a warm-up."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 50):
        began = time.perf_counter()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        passed = (time.perf_counter() - began) * 1000
        times.append(passed if wall else start.elapsed_time(stop))
    return statistics.median(times)


def measure(shape: Shape, contender: tuple[str, Make, str], seconds: float) -> Iterable[Result]:
    cell, batch, steps, hidden = shape
    name, make, dtype = contender
    torch.manual_seed(0)
    torch.backends.cudnn.rnn.fp32_precision = "ieee" if dtype == "fp32" else "tf32"  # pyright: ignore[reportAttributeAccessIssue]
    rnn = make(cell, hidden, DTYPES[dtype])
    how = {"device": "cuda", "dtype": DTYPES[dtype]}
    xs = torch.randn(steps, batch, hidden, **how).requires_grad_()
    dys = torch.randn(steps, batch, hidden, **how)
    if name == "elman" and (runs := explain(rnn, xs).runs) != "cuda":
        print(f"  elman {dtype} {shape}: runs on {runs}, not timed")
        return
    for what in ("forward", "forward+backward"):
        call = work(rnn, xs, dys, what == "forward+backward")
        for mode in ("eager", "graph") if name != "FlashRNN" else ("eager",):  # never captured
            ms = milliseconds(call if mode == "eager" else graphed(call), seconds)
            us, rate = ms * 1000 / steps, batch * steps / ms * 1000
            yield Result(*shape, name, dtype, mode, what, us, rate)


def attempted(peer: str, results: Iterable[Result]) -> list[Result]:
    """The results; a peer that fails says so and has none."""
    try:
        return list(results)
    except Exception as failed:
        reason = str(failed).strip().splitlines() or [repr(failed)]
        print(f"  {peer}: {reason[-1]}", flush=True)
        return []


def every_result(options: argparse.Namespace, shapes: list[Shape]) -> Iterable[list[Result]]:
    """cuDNN and elman; then what compiles for long; last FlashRNN, which may spoil the GPU."""
    for shape, dtype in itertools.product(shapes, DTYPES):
        yield list(measure(shape, ("cuDNN", modules_of(torch.nn), dtype), options.seconds))
        yield list(measure(shape, ("elman", modules_of(elman.nn), dtype), options.seconds))
    for shape in shapes if options.compile else []:
        found = measure(shape, ("compiled loop", CompiledLoop, "bf16"), options.seconds)
        yield attempted(f"compiled loop {name_of(shape)}", found)
    for shape in shapes if options.jax else []:
        yield attempted(f"JAX {name_of(shape)}", measure_jax(shape, options.seconds))
    for shape in FLASHRNN if options.flashrnn else []:
        if shape in shapes:
            found = measure(shape, ("FlashRNN", FlashRNN, "bf16"), options.seconds)
            yield attempted(f"FlashRNN {name_of(shape)}", found)


def measure_jax(shape: Shape, seconds: float) -> Iterable[Result]:
    """JAX by the wall clock: it has no CUDA events, and its calls are long."""
    _, batch, steps, _ = shape
    for what, call in jax_calls(*shape).items():
        ms = milliseconds(call, seconds, wall=True)
        us, rate = ms * 1000 / steps, batch * steps / ms * 1000
        yield Result(*shape, "JAX scan", "bf16", "eager", what, us, rate)


def best_times(results: list[Result], shape: Shape, what: str) -> dict[tuple[str, str], float]:
    """Each contender's better of eager and graph."""
    best: dict[tuple[str, str], float] = {}
    for r in results:
        if (r.cell, r.batch, r.steps, r.hidden) == shape and r.what == what:
            key = (r.contender, r.dtype)
            best[key] = min(best.get(key, r.us_per_step), r.us_per_step)
    return best


def _column(contender: tuple[str, str]) -> tuple[bool, str, int]:
    name, dtype = contender
    return name == "elman", name, list(DTYPES).index(dtype)


def table(results: list[Result], floor: Floors, what: str) -> str:
    """A row per shape: each contender's best, and elman's bf16 against best peer and floor."""
    columns = sorted(dict.fromkeys((r.contender, r.dtype) for r in results), key=_column)
    heads = [f"{c} {d}" for c, d in columns]
    heads += ["best peer / elman bf16", "elman bf16, tokens/s", "floor", "floor / elman bf16"]
    lines = [f"{what}, µs per step (the better of eager and graph)"]
    lines += ["| cell, B, T, H | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for shape in floor:
        best, under = best_times(results, shape, what), floor[shape][what]
        cells = [f"{best[c]:.2f}" if c in best else "–" for c in columns]
        ours = best["elman", "bf16"]
        peer = min(us for (name, _), us in best.items() if name != "elman")
        cells += [f"{peer / ours:.2f}×", f"{shape[1] / ours * 1e6:,.0f}"]
        cells += [f"{under:.2f}", f"{under / ours:.0%}"]
        lines.append(f"| {name_of(shape)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def commit() -> str:
    """The commit measured, where git can tell."""
    try:
        said = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two shapes, short timings")
    parser.add_argument("--compile", action="store_true", help="also a torch.compile'd loop")
    parser.add_argument("--jax", action="store_true", help="also jax.lax.scan")
    parser.add_argument("--flashrnn", action="store_true", help="also FlashRNN (tanh, lstm 256)")
    parser.add_argument("--only", nargs="+", default=[""], help="shapes named so: lstm 'gru 64'")
    parser.add_argument("--seconds", type=float, default=0.2, help="per timing")
    parser.add_argument("--commit", default=commit(), help="recorded in the JSON")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "RNN module weights")  # torch never flattens bf16 for cuDNN
    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing to measure")
        return
    shapes = SHAPES[1:4:2] if options.quick else SHAPES
    shapes = [s for s in shapes if any(part in name_of(s) for part in options.only)]
    timer = functools.partial(milliseconds, seconds=options.seconds)
    floor = floors(shapes, timer)
    results: list[Result] = []
    for found in every_result(options, shapes):
        results += found
        if options.json:
            write(options, results, floor)
    for what in ("forward", "forward+backward"):
        print(table(results, floor, what), end="\n\n", flush=True)


def write(options: argparse.Namespace, results: list[Result], floor: Floors) -> None:
    """Put the shapes measured into the file, in place of what it had about them."""
    record = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {}
    record |= {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    for shape, under in floor.items():
        own = [asdict(r) for r in results if (r.cell, r.batch, r.steps, r.hidden) == shape]
        record.setdefault("shapes", {})[name_of(shape)] = {
            "date": datetime.date.today().isoformat(),
            "commit": options.commit,
            "floor_us_per_step": under,
            "results": own,
        }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
