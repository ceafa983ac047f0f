"""Recurrent layers on one GPU: elman against cuDNN, a compiled loop and JAX, µs per time step.

    python benchmarks/cuda_kernels.py                  # every shape of the table in docs/cuda.md
    python benchmarks/cuda_kernels.py --quick          # two shapes
    python benchmarks/cuda_kernels.py --compile --jax  # the slow-to-compile peers too
    python benchmarks/cuda_kernels.py --json benchmarks/results/cuda-h200.json

Needs torch alone. Times are medians of whole calls through the public modules: forward alone (no
gradient), and forward and backward with gradients of inputs, weights and first state, eager and as
one CUDA graph. The job of the notes (500 epochs of 10,000 characters) is in cuda_notes_job.py.
(Not cuda.py: that would hide NVIDIA's own `cuda` from every script in this folder.)
"""

from __future__ import annotations

import argparse
import datetime
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
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}
CLASSES = {"tanh": "RNN", "relu": "RNN", "gru": "GRU", "lstm": "LSTM"}


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


def module(home: object, cell: str, hidden: int, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return getattr(home, CLASSES[cell])(hidden, hidden, device="cuda", dtype=dtype)


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


def milliseconds(call: Callable[[], object], seconds: float) -> float:
    """The median over repeats that fill about `seconds`, after a warm-up."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 50):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def contenders(options: argparse.Namespace) -> Iterable[tuple[str, object, str]]:
    for name in DTYPES:
        yield "cuDNN", torch.nn, name
    for name in DTYPES:
        yield "elman", elman.nn, name
    if options.compile:
        yield "compiled loop", CompiledLoop, "bf16"


def measure(
    shape: tuple[str, int, int, int], contender: tuple[str, object, str], seconds: float
) -> Iterable[Result]:
    cell, batch, steps, hidden = shape
    name, home, dtype = contender
    make = {"device": "cuda", "dtype": DTYPES[dtype]}
    xs = torch.randn(steps, batch, hidden, **make).requires_grad_()
    dys = torch.randn(steps, batch, hidden, **make)
    rnn = module(home, cell, hidden, DTYPES[dtype])
    if name == "elman" and (runs := explain(rnn, xs).runs) != "cuda":
        print(f"  elman {dtype} {shape}: runs on {runs}, not timed")
        return
    for backward in (False, True):
        call = work(rnn, xs, dys, backward)
        for mode in ("eager", "graph"):
            ms = milliseconds(call if mode == "eager" else graphed(call), seconds)
            what = "forward+backward" if backward else "forward"
            us = ms * 1000 / steps
            yield Result(*shape, name, dtype, mode, what, us, batch * steps / ms * 1000)


class CompiledLoop:
    """A loop over time under `torch.compile`, one step a compiled function."""

    @staticmethod
    def RNN(inputs: int, hidden: int, device: str, dtype: torch.dtype) -> torch.nn.Module:  # noqa: N802
        return _CompiledRNN(inputs, hidden, device, dtype)


class _CompiledRNN(torch.nn.Module):
    def __init__(self, inputs: int, hidden: int, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.cell = torch.nn.RNNCell(inputs, hidden, device=device, dtype=dtype)
        self.step = torch.compile(self._step)

    def _step(self, a: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(a + torch.nn.functional.linear(h, self.cell.weight_hh))

    def forward(self, xs: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.cell.bias_ih + self.cell.bias_hh
        shares = torch.nn.functional.linear(xs, self.cell.weight_ih, bias)
        h, hs = xs.new_zeros(xs.shape[1], shares.shape[-1]), []
        for a in shares.unbind(0):
            h = self.step(a, h)
            hs += [h]
        return torch.stack(hs), h


def jax_scan(shape: tuple[str, int, int, int], seconds: float) -> Iterable[Result]:
    """`lax.scan`, jitted, forward and backward in bf16; the elman cell alone."""
    import jax
    import jax.numpy as jnp

    cell, batch, steps, hidden = shape
    if cell != "tanh":
        return
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    xs = jax.random.normal(keys[0], (steps, batch, hidden), jnp.bfloat16)
    w = [jax.random.normal(k, (hidden, hidden), jnp.bfloat16) / hidden**0.5 for k in keys[1:3]]
    dys = jax.random.normal(keys[3], xs.shape, jnp.bfloat16)

    def run(w, xs):
        def step(h, a):
            h = jnp.tanh(a + h @ w[1])
            return h, h

        return jax.lax.scan(step, jnp.zeros((batch, hidden), jnp.bfloat16), xs @ w[0], unroll=4)[1]

    both = jax.jit(jax.grad(lambda w, xs: (run(w, xs) * dys).sum(), argnums=(0, 1)))
    jax.block_until_ready(both(w, xs))
    times, end = [], time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        jax.block_until_ready(both(w, xs))
        times.append((time.perf_counter() - start) * 1000)
    ms = statistics.median(times)
    us, rate = ms * 1000 / steps, batch * steps / ms * 1000
    yield Result(*shape, "JAX scan", "bf16", "eager", "forward+backward", us, rate)


def table(results: list[Result], what: str) -> str:
    """A row per shape: each contender's best, and elman's bf16 against the best peer."""
    columns = sorted({(r.contender, r.dtype) for r in results})
    lines = [f"{what}, µs per step (the better of eager and graph)"]
    heads = [f"{c} {d}" for c, d in columns] + ["best peer / elman bf16"]
    lines.append("| cell, B, T, H | " + " | ".join(heads) + " |")
    lines.append("|---" * (len(heads) + 1) + "|")
    for shape in dict.fromkeys((r.cell, r.batch, r.steps, r.hidden) for r in results):
        best: dict[tuple[str, str], float] = {}
        for r in results:
            if (r.cell, r.batch, r.steps, r.hidden) == shape and r.what == what:
                key = (r.contender, r.dtype)
                best[key] = min(best.get(key, r.us_per_step), r.us_per_step)
        peers = [us for (name, _), us in best.items() if name != "elman"]
        ours = best.get(("elman", "bf16"))
        ratio = f"{min(peers) / ours:.2f}×" if peers and ours else "–"
        cells = [f"{best[c]:.2f}" if c in best else "–" for c in columns]
        lines.append(f"| {' '.join(map(str, shape))} | " + " | ".join([*cells, ratio]) + " |")
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
    parser.add_argument("--compile", action="store_true", help="also a torch.compile'd loop (tanh)")
    parser.add_argument("--jax", action="store_true", help="also jax.lax.scan (tanh)")
    parser.add_argument("--seconds", type=float, default=0.3, help="per timing")
    parser.add_argument("--commit", default=commit(), help="recorded in the JSON")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "RNN module weights")  # torch never flattens bf16 for cuDNN
    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing to measure")
        return
    shapes = SHAPES[1:4:2] if options.quick else SHAPES
    results: list[Result] = []
    for shape in shapes:
        for contender in contenders(options):
            if contender[0] == "compiled loop" and shape[0] != "tanh":
                continue
            results += measure(shape, contender, options.seconds)
        if options.jax:
            results += jax_scan(shape, options.seconds)
    for what in ("forward", "forward+backward"):
        print(table(results, what), end="\n\n", flush=True)
    if options.json:
        record = {
            "date": datetime.date.today().isoformat(),
            "commit": options.commit,
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "results": [asdict(r) for r in results],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
