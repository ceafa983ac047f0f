"""What one core can do: the lstm of `elman.nn` and of `torch.nn` beside the processor's own rate.

    python benchmarks/cpu_floor.py [--quick] [--json FILE]

The peak is what a loop of nothing but independent multiply-adds in registers reaches (compiled
here, with AVX-512 or AVX2). One thread, processor time, the best of many turns in
one process. The last column is how much faster than `torch.nn` a kernel could be that made the same
multiply-adds at the peak and everything else in no time: no goal beyond it can be met in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import elman.nn

SUMS = {16: 24, 8: 12}  # independent ones that registers hold, by numbers in one
LOOP = """
#include <stdio.h>
#include <time.h>
static double seconds(void) {{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}}
int main(void) {{
    double best = 0;
    for (int turn = 0; turn < 9; turn++) {{
        long n = 10000000;
        double start = seconds();
        __asm__ volatile("1:\\n" {body} "dec %0\\njnz 1b\\n" : "+r"(n) :: {clobbered});
        double rate = 1e7 * {each} / (seconds() - start);
        if (rate > best) best = rate;
    }}
    printf("%.0f\\n", best);
}}
"""


class Shape(NamedTuple):
    H: int
    B: int
    T: int
    layers: int
    job: str  # "forward", "both" ways, or both for "weights" alone, without the input's gradient

    def __str__(self) -> str:
        return f"lstm H={self.H} B={self.B} T={self.T} layers={self.layers} {self.job}"

    @property
    def multiply_adds(self) -> int:
        """Inputs are as wide as the layer."""
        products = {"forward": 2 * self.layers, "weights": 6 * self.layers - 1}
        return products.get(self.job, 6 * self.layers) * self.T * self.B * 4 * self.H**2


SHAPES = [
    Shape(H, 32, 35, layers, job)
    for job in ("forward", "both", "weights")
    for H, layers in ((64, 1), (128, 1), (256, 1), (256, 2), (512, 1))
]


def peak() -> float:
    """Multiply-adds a second of one core."""
    wide = "avx512f" in Path("/proc/cpuinfo").read_text()
    width, name = (16, "zmm") if wide else (8, "ymm")
    sums, a, b = SUMS[width], *((30, 31) if wide else (14, 15))
    one = f"vfmadd231ps %%{name}{a},%%{name}{b},%%{name}"
    body = "".join(f'"{one}{i}\\n"' for i in range(sums))
    clobbered = ", ".join(f'"xmm{i}"' for i in range(sums))
    text = LOOP.format(body=body, clobbered=clobbered, each=sums * width)
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "peak.c"), Path(folder, "peak")
        source.write_text(text)
        flags = ["-O2", "-mavx512f" if wide else "-mfma"]
        subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", program, source], check=True)
        return float(subprocess.run(program, check=True, capture_output=True).stdout)


def run_of(module: torch.nn.Module, shape: Shape) -> Callable[[], object]:
    x = torch.randn(shape.T, shape.B, shape.H)
    if shape.job == "forward":
        return torch.no_grad()(lambda: module(x))
    x.requires_grad_(shape.job == "both")
    pull = torch.randn_like(x)
    return lambda: module(x)[0].backward(pull)


def best(run: Callable[[], object], turns: int) -> float:
    """Seconds of the processor."""
    found = []
    for _ in range(turns):
        start = time.thread_time()
        run()
        found.append(time.thread_time() - start)
    return min(found)


def row(shape: Shape, rate: float, rounds: int) -> dict[str, object]:
    torch.manual_seed(0)
    ours = elman.nn.LSTM(shape.H, shape.H, shape.layers)
    runs = {"elman": run_of(ours, shape), "torch": run_of(ours.to_torch(), shape)}
    turns = max(3, int(0.3 * rate / shape.multiply_adds))
    seconds = {name: best(run, 2) for name, run in runs.items()}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name] = min(seconds[name], best(run, turns))
    shares = {name: shape.multiply_adds / s / rate for name, s in seconds.items()}
    print(
        f"{shape!s:42}{shares['elman']:8.0%}{shares['torch']:8.0%}"
        f"{seconds['torch'] / seconds['elman']:9.2f}{1 / shares['torch']:9.2f}",
        flush=True,
    )
    return {**shape._asdict(), "seconds": seconds, "of_the_peak": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rate = peak()
    print(f"torch {torch.__version__}, one core: {rate / 1e9:.1f} thousand million multiply-adds/s")
    print(f"{'of the peak':42}{'elman':>8}{'torch':>8}{'ratio':>9}{'at most':>9}")
    rows = [row(shape, rate, 2 if options.quick else 5) for shape in SHAPES]
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "peak": rate, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
