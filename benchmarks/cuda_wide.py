"""Wide layers on one GPU: elman.nn in bfloat16 against cuDNN's best half precision, µs per step.

    python benchmarks/cuda_wide.py [--only WORD] [--engine cudnn|elman] [--seconds S] [--json FILE]

Forward, and forward with backward, each as people call it (eagerly) and as one CUDA graph, which
hides what Python and launches cost: cuDNN launches the steps of a wide layer one by one.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

import torch

import elman.nn
from cuda_kernels import CLASSES, DTYPES, graphed, milliseconds, work
from elman.kernels import explain

STEPS = 1024
GATED = [(cell, size) for size in (1024, 1536, 2048) for cell in ("lstm", "gru")]
SHAPES = [(c, batch, size) for batch in (64, 16, 256) for c, size in [*GATED, ("tanh", 2048)]]
SHAPES += [("lstm", 16, 768)]
SHAPES += [("lstm", 64, 1135), ("gru", 64, 701), ("lstm", 7, 1155), ("tanh", 32, 1999)]  # odd
ENGINES = {"cudnn": (torch.nn, ("fp16", "bf16")), "elman": (elman.nn, ("bf16",))}


def measure(cell: str, batch: int, size: int, engine: str) -> dict[str, float | str]:
    """µs per step by dtype, passes and mode, and which kernel ran."""
    home, dtypes = ENGINES[engine]
    found: dict[str, float | str] = {}
    for dtype in dtypes:
        like = {"device": "cuda", "dtype": DTYPES[dtype]}
        rnn = getattr(home, CLASSES[cell])(size, size, **like)
        xs = torch.randn(STEPS, batch, size, **like).requires_grad_()
        dys = torch.randn(STEPS, batch, size, **like)
        if engine == "elman":
            found["runs"] = explain(rnn, xs).runs
        for what in ("forward", "both"):
            call = work(rnn, xs, dys, what == "both")
            for mode in ("eager", "graph"):
                ms = milliseconds(call if mode == "eager" else graphed(call), 0.1)
                found[f"{engine} {dtype} {what} {mode}"] = ms * 1000 / STEPS
    torch.cuda.empty_cache()
    return found


def words(row: dict[str, float | str]) -> str:
    """Ours / cuDNN's best, and the ratio, where both were measured."""
    said = []
    for what in ("forward", "both"):
        for mode in ("eager", "graph"):
            ours = row.get(f"elman bf16 {what} {mode}")
            theirs = [t for d in DTYPES if (t := row.get(f"cudnn {d} {what} {mode}")) is not None]
            if isinstance(ours, float) and theirs:
                best = min(float(t) for t in theirs)
                said.append(f"{what} {mode} {ours:.1f} / {best:.1f} = {best / ours:.2f}x")
    return ", ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="shapes whose name has this: 'lstm 64'")
    parser.add_argument("--engine", choices=ENGINES, help="this one alone")
    parser.add_argument("--seconds", type=float, default=300, help="stop after so long")
    parser.add_argument("--json", type=Path, help="put every figure here, beside what it has")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "RNN module weights")  # torch never flattens bf16 for cuDNN
    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing to measure")
        return
    end = time.monotonic() + options.seconds
    file: Path | None = options.json
    rows = json.loads(file.read_text("utf-8")) if file and file.exists() else {}
    for shape in SHAPES:
        name = " ".join(map(str, shape))
        if options.only not in name or time.monotonic() > end:
            continue
        row = rows.setdefault(name, {})
        for engine in ENGINES if options.engine is None else (options.engine,):
            row |= measure(*shape, engine)
        print(f"{name} ({row.get('runs', '')}): {words(row)}", flush=True)
        if file:
            file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
