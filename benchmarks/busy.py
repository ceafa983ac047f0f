"""Training beside other programs: one thread against several, with a competitor on every core.

    python benchmarks/busy.py [--quick] [--cores 0,1] [--json FILE]
    python benchmarks/busy.py --loaded [--json FILE]    on a machine that others keep busy already

A competitor is a process that never stops computing, held to one core. Each contestant runs in a
process of its own, on one thread and on as many as there are cores, first on the quiet machine,
then beside the competitors; several rounds, of which the table gives the median speed (work per
second, in units of the same contestant on one quiet thread). What is asked: beside competitors more
threads are never slower than one, and keep at least 0.45 of their quiet speed. On a machine that is
not quiet to begin with only the last column means anything: `--loaded` measures that one alone, one
thread and several taking turns in one process. `torch.nn` is the peer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

import elman.nn
from cpu import of_preset
from elman import LanguageModel
from elman.runs.effort import Size
from elman.training import Optimisation, Reading, Settings, Training

VOCAB = 28
SHAPES = {"small": (64, 16, 35), "notes": (256, 32, 35), "wide": (512, 32, 35)}  # H, B, T


def training(H: int, B: int, T: int) -> Callable[[], object]:
    """Updates of elman's trainer."""
    torch.manual_seed(0)
    model = LanguageModel(VOCAB, cell="gru", hidden_size=H)
    settings = Settings(
        epochs=10**6,
        reading=Reading(B, T),
        optimisation=Optimisation(optimizer="adam", learning_rate=1e-3, clip=1.0),
    )
    return Training(model, torch.randint(VOCAB, (100 * B * T + 1,)), None, settings).update


def module(nn: type, H: int, B: int, T: int) -> Callable[[], object]:
    """A module in somebody's own loop: forward, a loss, backward, an optimizer."""
    torch.manual_seed(0)
    rnn, x = nn(H, H), torch.randn(T, B, H)
    optimizer = torch.optim.SGD(rnn.parameters(), lr=1e-3)

    def run() -> None:
        optimizer.zero_grad()
        rnn(x)[0].square().mean().backward()
        optimizer.step()

    return run


CONTESTANTS: dict[str, Callable[[int, int, int], Callable[[], object]]] = {
    "elman training": training,
    "elman.nn.GRU": lambda H, B, T: module(elman.nn.GRU, H, B, T),
    "torch.nn.GRU": lambda H, B, T: module(torch.nn.GRU, H, B, T),
}


def contest(name: str, shape: str, threads: int, seconds: float) -> float:
    """Runs per second in this process."""
    torch.set_num_threads(threads)
    run = CONTESTANTS[name](*SHAPES[shape])
    for _ in range(3):
        run()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        run()
        count += 1
    return count / (time.perf_counter() - start)


def measured(name: str, shape: str, threads: int, seconds: float) -> float:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--contest", name, shape, str(threads), str(seconds)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@contextlib.contextmanager
def competitors(cores: list[int]) -> Iterator[None]:
    code = "import os, sys; os.sched_setaffinity(0, [int(sys.argv[1])])\nwhile True: pass"
    started = [subprocess.Popen([sys.executable, "-c", code, str(core)]) for core in cores]
    try:
        time.sleep(0.3)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def row(name: str, shape: str, cores: list[int], seconds: float, rounds: int) -> dict[str, object]:
    counts = (1, len(cores))
    speeds: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for threads in counts:
            quiet = measured(name, shape, threads, seconds)
            speeds.setdefault(("quiet", threads), []).append(quiet)
        with competitors(cores):
            for threads in counts:
                busy = measured(name, shape, threads, seconds)
                speeds.setdefault(("busy", threads), []).append(busy)
    one, many = ({k: statistics.median(speeds[k, n]) for k in ("quiet", "busy")} for n in counts)
    return {
        "contestant": name,
        "shape": shape,
        "threads": len(cores),
        "quiet_one": 1.0,
        "quiet_many": many["quiet"] / one["quiet"],
        "busy_one": one["busy"] / one["quiet"],
        "busy_many": many["busy"] / one["quiet"],
        "kept": many["busy"] / many["quiet"],
        "many_to_one_when_busy": many["busy"] / one["busy"],
        "per_second": {f"{k} {n}": speeds[k, n] for k, n in speeds},
    }


LOADED: dict[str, Callable[[], Callable[[], object]]] = {
    "elman training, gru 256": lambda: training(*SHAPES["notes"]),
    "elman training, preset quick": lambda: of_preset("quick", Size(200_000, 80))[0]["elman cpu"],
    "elman training, preset best": lambda: of_preset("best", Size(200_000, 80))[0]["elman cpu"],
    "elman.nn.GRU 256": lambda: module(elman.nn.GRU, *SHAPES["notes"]),
    "torch.nn.GRU 256": lambda: module(torch.nn.GRU, *SHAPES["notes"]),
}


def loaded(name: str, threads: int, seconds: float = 4.0, rounds: int = 3) -> dict[str, object]:
    """One thread and several in turns, beside whatever else runs."""
    run = LOADED[name]()
    speeds: dict[int, list[float]] = {1: [], threads: []}
    for _ in range(rounds):
        for count, found in speeds.items():
            torch.set_num_threads(count)
            run()
            done, start = 0, time.perf_counter()
            while (taken := time.perf_counter() - start) < seconds:
                run()
                done += 1
            found.append(done / taken)
    ratio = statistics.median(b / a for a, b in zip(speeds[1], speeds[threads], strict=True))
    load = os.getloadavg()
    print(f"{name:30}{threads} threads {ratio:5.2f} times as fast as one, load {load[0]:.0f}")
    one, two = speeds[1], speeds[threads]
    return {"contestant": name, "one": one, "two": two, "two_to_one": ratio, "load": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cores", help="run on these cores, e.g. 0,1 (default: all)")
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--loaded", action="store_true", help="beside what runs here already")
    parser.add_argument("--contest", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contest:
        name, shape, threads, seconds = options.contest
        print(contest(name, shape, int(threads), float(seconds)))
        return
    if options.loaded:
        rows = [loaded(name, len(os.sched_getaffinity(0))) for name in LOADED]
        if options.json:
            with open(options.json, "w") as file:
                json.dump(rows, file, indent=1)
        return
    if options.cores:
        os.sched_setaffinity(0, [int(core) for core in options.cores.split(",")])
    cores = sorted(os.sched_getaffinity(0))
    seconds, rounds = (1.0, 1) if options.quick else (2.0, 5)
    rows = []
    print(
        f"{'':28} quiet 1  quiet {len(cores)}  busy 1  busy {len(cores)}  kept  busy {len(cores)}/1"
    )
    for shape in SHAPES:
        for name in CONTESTANTS:
            rows.append(r := row(name, shape, cores, seconds, rounds))
            columns = ("quiet_one", "quiet_many", "busy_one", "busy_many", "kept")
            numbers = "  ".join(f"{r[c]:6.2f}" for c in (*columns, "many_to_one_when_busy"))
            print(f"{shape:8}{name:20}{numbers}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"cores": len(cores), "torch": torch.__version__, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
