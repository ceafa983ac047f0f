"""What several processes cost and bring, and what a large vocabulary takes.

    python benchmarks/scaling.py                 # processes against threads, on this machine's CPU
    python benchmarks/scaling.py --head          # loss of a large vocabulary: memory and time
    python benchmarks/scaling.py --device cuda   # one process under torchrun (nccl) against none

Every row trains the same model on the same text for the same updates in processes of its own, and
reports the best of several stretches of updates. `alone` is `elman train` as it is; `exact` adds
gradients in a fixed tree of four groups of lanes, on any number of processes. `in torch` is the
share of time spent in torch.distributed during the same run, waiting for the other process
included; `sum` the share that the exchange of gradients takes when nobody has to be waited for, the
most that an overlap with the backward pass could save. Bytes per update are counted. With
`--rounds` the rows are run in turn several times and the best of each counts, for machines that
others use, too.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
STRETCH = 8
"""Updates that are timed together."""


def main() -> None:
    """Run every row in processes of its own, and print the table."""
    arguments = _arguments()
    if arguments.worker:
        _work(arguments)
    elif arguments.head_worker:
        _head(arguments)
    elif arguments.head:
        _head_table(arguments)
    else:
        _table(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hidden", type=int, default=0, help="256 on a CPU, 1024 on a GPU")
    parser.add_argument("--batch", type=int, default=0, help="32 on a CPU, 128 on a GPU")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--cell", default="lstm")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each row")
    parser.add_argument("--rounds", type=int, default=1, help="over all rows, best of each")
    parser.add_argument("--quick", action="store_true", help="three seconds of each row")
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--groups", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--head-worker", default="", help=argparse.SUPPRESS)
    found = parser.parse_args()
    found.seconds = 3.0 if found.quick else found.seconds
    gpu = found.device.startswith("cuda")
    found.hidden = found.hidden or (1024 if gpu else 256)
    found.batch = found.batch or (128 if gpu else 32)
    return found


# ---------------------------------------------------------------------- processes


def _table(a: argparse.Namespace) -> None:
    if a.device.startswith("cuda"):
        rows = [("alone", 0, 1, 0), ("torchrun, 1 process", 1, 1, 0)]
    else:
        rows = [
            ("alone, 1 thread", 0, 1, 0),
            ("alone, 2 threads", 0, 2, 0),
            ("torchrun, 1 process", 1, 1, 0),
            ("torchrun, 2 processes", 2, 1, 0),
            ("alone, exact", 0, 1, 4),
            ("torchrun, 2 processes, exact", 2, 1, 4),
        ]
    print(f"{a.cell}, hidden {a.hidden}, batch {a.batch}, window {a.window}, on {a.device}")
    best: dict[str, dict] = {}
    for _ in range(a.rounds):
        for name, *row in rows:
            found = _row(a, *row)
            speeds = [each["tokens_per_second"] for each in (found, best.get(name, found))]
            best[name] = found if speeds[0] >= speeds[1] else best[name]
    print(f"{'':30} tokens/s  × alone  in torch    sum  bytes/update")
    first = next(iter(best.values()))["tokens_per_second"]
    for name, found in best.items():
        speed = found["tokens_per_second"]
        share = found["exchange"] * speed / (a.batch * a.window)
        print(
            f"{name:30} {speed:8,.0f}  {speed / first:7.2f}  {found['communication']:8.1%}  "
            f"{share:5.1%}  {found['bytes_per_update']:12,.0f}"
        )


def _row(a: argparse.Namespace, processes: int, threads: int, groups: int) -> dict:
    start = [sys.executable]
    if processes:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    options = {
        "device": a.device,
        "hidden": a.hidden,
        "batch": a.batch,
        "window": a.window,
        "cell": a.cell,
        "seconds": a.seconds,
        "threads": threads,
        "groups": groups,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [*start, str(HERE), "--worker", *words],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _work(a: argparse.Namespace) -> None:
    import numpy as np
    import torch

    from elman import LanguageModel
    from elman.training import Processes, Reading, Settings, Training

    torch.set_num_threads(a.threads)
    processes = Processes.from_environment()
    spent = _timed_communication()
    ids = np.random.default_rng(0).integers(0, 96, 4_000_000).astype("u1")
    torch.manual_seed(0)
    model = LanguageModel(96, cell=a.cell, hidden_size=a.hidden).to(processes.place(a.device))
    reading = Reading(batch_size=a.batch, window=a.window)
    settings = Settings(epochs=10**6, lane_groups=a.groups, reading=reading)
    training = Training(model, ids, settings=settings, processes=processes)
    for _ in range(4):
        training.update()
    best, share, sent, began = 0.0, 0.0, 0.0, time.perf_counter()
    while processes.agree(time.perf_counter() - began < a.seconds)[0]:
        spent.clear()
        start = time.perf_counter()
        for _ in range(STRETCH):
            training.update()
        if a.device != "cpu":  # updates are only queued there
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if STRETCH * a.batch * a.window / seconds > best:
            best = STRETCH * a.batch * a.window / seconds
            share = sum(s for s, _ in spent) / seconds
            sent = sum(n for _, n in spent) / STRETCH
    exchange = _exchange(training) if processes.size > 1 else 0.0
    if processes.first:
        found = {"tokens_per_second": best, "communication": share, "bytes_per_update": sent}
        print(json.dumps(found | {"exchange": exchange}))


def _exchange(training: Any) -> float:
    """Seconds of a sum over all processes that begin it at the same time: the shortest of many."""
    from elman.training.processes import GradientSum

    shortest = float("inf")
    for _ in range(50):
        gradients = GradientSum(training.groups, training.parameters)
        for lanes in training.groups.own:
            gradients.add(lanes, 0.0)
        training.processes.wait()
        start = time.perf_counter()
        gradients.finish()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def _timed_communication() -> list[tuple[float, int]]:
    """Seconds and bytes of every call of torch.distributed from here on; a GPU's are not timed."""
    import torch.distributed as dist

    from elman.training.processes import ALL_GATHER

    spent: list[tuple[float, int]] = []

    def timed(name: str) -> None:
        plain = getattr(dist, name)

        def call(*tensors, **options):
            start = time.perf_counter()
            result = plain(*tensors, **options)
            size = sum(t.numel() * t.element_size() for t in tensors if hasattr(t, "numel"))
            spent.append((time.perf_counter() - start, size))
            return result

        setattr(dist, name, call)

    for name in ("all_reduce", "all_to_all_single", ALL_GATHER, "all_gather"):
        timed(name)
    return spent


# ---------------------------------------------------------------------- the output layer


def _head_table(a: argparse.Namespace) -> None:
    print("loss and gradients, V 32,768, H 512, B 32, T 64: beyond the weights, in a process each")
    rows = {way: _head_row(a, way) for way in ("torch", "elman")}
    for way, row in rows.items():
        memory, seconds = row["megabytes"], row["seconds"]
        share, slower = (row[key] / rows["torch"][key] for key in ("megabytes", "seconds"))
        print(f"{way:6} {memory:8,.0f} MB ({share:.0%})  {seconds:.3f} s ({slower:.2f})")


def _head_row(a: argparse.Namespace, way: str) -> dict:
    words = ["--head-worker", way, "--device", a.device, "--threads", str(a.threads)]
    words += ["--quick"] if a.quick else []
    done = subprocess.run(
        [sys.executable, str(HERE), *words], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _head(a: argparse.Namespace) -> None:
    import resource

    import torch
    from torch.nn.functional import cross_entropy, linear

    from elman.language_model.loss import linear_cross_entropy

    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    gpu = a.device.startswith("cuda")
    V, H, B, T = 32768, 512, 32, 64
    hs = torch.randn(T, B, H, device=a.device, requires_grad=True)
    W = (torch.randn(V, H, device=a.device) / 20).requires_grad_()
    b = torch.zeros(V, device=a.device, requires_grad=True)
    y = torch.randint(V, (T, B), device=a.device)

    def update() -> None:
        hs.grad = W.grad = b.grad = None
        if a.head_worker == "elman":
            linear_cross_entropy(hs, W, b, y).backward()
        else:
            cross_entropy(linear(hs, W, b).flatten(0, 1), y.flatten()).backward()
        if gpu:
            torch.cuda.synchronize()

    if gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    times = []
    for _ in range(30 if gpu else 2 if a.quick else 5):
        start = time.perf_counter()
        update()
        times.append(time.perf_counter() - start)
    if gpu:
        most = torch.cuda.max_memory_allocated()
    else:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"megabytes": (most - before) / 1e6, "seconds": min(times)}))


if __name__ == "__main__":
    main()
