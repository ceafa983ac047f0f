"""`elman.nn` against `torch.nn` over a grid of shapes that nobody tuned for.

    python benchmarks/grid.py [--device cpu|cuda] [--quick] [--busy] [--random N] [--seed S]
                              [--wild] [--hidden LOW HIGH] [--rows LOW HIGH] [--dtype NAME]
                              [--steps T] [--only WORD] [--seconds S]
                              [--control] [--json FILE] [--figure FILE]

A case is a cell, a hidden size, a batch, a number of steps, layers, directions, a dtype, and a
job: `forward` (no gradient wanted), `both` (forward and backward), `step` (one step of B rows, no
gradient). Both modules have the same weights and take turns in one process, a few calls each, for
several rounds; a case's number is the median over the rounds of torch's time by elman's: above 1
elman is faster. Every case below 1 is listed, with the kernel that ran. `--random N` draws N
shapes at random instead of walking the grid, because cliffs lie between the shapes one thinks of;
with `--wild` it also draws how wide the inputs are and how the module is used (batch first,
packed, dropout, no bias, projected, under autocast, or a sequence without a batch). `--hidden` and
`--rows` say between which sizes it draws: cliffs are found by looking closely. `--dtype` and
`--steps` measure every case in another dtype, or so long. `--control` lets a second module of
torch.nn take its turns, too, and gives torch's time by that: what the clock makes of a ratio that
is 1. Cases below 0.97 are then measured again, with new modules and six times the rounds. On a GPU
both run as torch runs them by default, and a call is timed until the GPU is done. `--busy` is for
a machine with other work: one thread, and processor time instead of the clock on the wall.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import elman.nn
from elman import kernels

MODULES = {"elman": "RNN", "gru": "GRU", "lstm": "LSTM"}
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
JOBS = ("forward", "both", "step")
WARM = 8  # calls before the clock starts: on a GPU ours are captured by then
SLOWER, AT_LENGTH = 0.97, 6  # what is measured again, and in how many times as many rounds
RESULTS = Path(__file__).parent / "results"


class Case(NamedTuple):
    """One cell of the grid."""

    cell: str
    H: int
    B: int
    T: int
    layers: int
    directions: int
    dtype: str
    job: str
    inputs: int = 0  # 0: as wide as the state
    how: str = ""

    def __str__(self) -> str:
        more = f" layers={self.layers}" if self.layers > 1 else ""
        more += " both ways" if self.directions > 1 else ""
        more += f" I={self.inputs}" if self.inputs else ""
        more += f" {self.how}" if self.how else ""
        return f"{self.cell} H={self.H} B={self.B} T={self.T}{more} {self.dtype} {self.job}"

    def multiply_adds(self) -> float:
        """Of one call, with inputs as wide as the state."""
        gates = {"elman": 1, "gru": 3, "lstm": 4}[self.cell]
        once = (
            gates
            * (self.H + (self.inputs or self.H))
            * self.H
            * self.T
            * self.B
            * self.layers
            * self.directions
        )
        return once * (3 if self.job == "both" else 1)


def walk(device: str, quick: bool) -> Iterator[Case]:
    """The grid: every cell at every size, and around the middle of it every other choice."""
    wide = device == "cuda"
    sizes = (
        (64, 256, 1024) if quick else (32, 64, 128, 256, 512, 1024) + ((1536, 2048) if wide else ())
    )
    batches = (1, 32) if quick else (1, 8, 32, 64) + ((256,) if wide else ())
    steps = (35,) if quick else (35, 256) + ((1024,) if wide else ())
    stacks = ((1, 1),) if quick else ((1, 1), (2, 1), (1, 2)) + (((4, 1),) if wide else ())
    dtypes = ("float32", "bfloat16") if wide else ("float32",)
    for cell, H, B, dtype in itertools.product(MODULES, sizes, batches, dtypes):
        yield Case(cell, H, B, 1, 1, 1, dtype, "step")
        for T, (layers, directions), job in itertools.product(steps, stacks, ("forward", "both")):
            if (layers, directions) == (1, 1) or T in steps[:1]:
                yield Case(cell, H, B, T, layers, directions, dtype, job)


WAYS = ("", "batch first", "packed", "dropout", "no bias", "projected", "autocast")
ALONE = "no batch"  # one of eight, drawn apart: a seed draws the other cases as it did before


def drawn(
    device: str,
    count: int,
    seed: int,
    wild: bool = False,
    hidden: Sequence[int] = (),
    rows: Sequence[int] = (),
) -> Iterator[Case]:
    """Shapes between the shapes: sizes and lengths uniform in their logarithm."""
    draw, alone = random.Random(seed), random.Random(f"{seed} {ALONE}")
    wide = device == "cuda"

    def between(low: int, high: int) -> int:
        return round(math.exp(draw.uniform(math.log(low), math.log(high))))

    for _ in range(count):
        H = between(*(hidden or (16, 2048 if wide else 1024)))
        B = between(*(rows or (1, 512 if wide else 128)))
        job, dtype = (
            draw.choice(JOBS),
            draw.choice(("float32", "bfloat16") if wide else ("float32",)),
        )
        T = 1 if job == "step" else between(2, 1024 if wide else 256)
        stack = draw.choice(((1, 1), (1, 1), (2, 1), (1, 2), (3, 1)))
        case = Case(draw.choice([*MODULES]), H, B, T, *stack, dtype, job)
        if wild:
            how = draw.choice(WAYS)
            case = case._replace(inputs=between(1, 512), how=how)
            if how == "projected":
                case = case._replace(cell="lstm")
            if how == "dropout":
                case = case._replace(layers=2, directions=1)
            if how == "autocast":
                case = case._replace(dtype="float32")
            if alone.random() < 1 / (len(WAYS) + 1):
                case = case._replace(B=1, how=ALONE)
        yield case


def contestants(
    case: Case, device: str, control: bool = False
) -> tuple[list[Callable[[], object]], Callable[[], kernels.Explanation]]:
    """A call of torch's module and one of ours with the same weights; what says how ours ran.

    With `control`, another of torch's comes third.
    """
    modules, x, state = made(case, device, control)

    def ran() -> kernels.Explanation:
        with torch.set_grad_enabled(case.job == "both"), _precision(case, device):
            return kernels.explain(modules[1], _packed(case, x) if case.how == "packed" else x)

    return [call_of(case, module, x, state) for module in modules], ran


def made(
    case: Case, device: str, control: bool = False
) -> tuple[list[torch.nn.Module], torch.Tensor, Any]:
    """The modules, their input and the first state."""
    torch.manual_seed(0)
    like: dict[str, Any] = {"device": device, "dtype": DTYPES[case.dtype]}
    name = MODULES[case.cell]
    inputs = case.inputs or case.H
    shape = (inputs, case.H, case.layers)
    options = {"bidirectional": case.directions > 1, **like, **_options(case)}
    peer = getattr(torch.nn, name)(*shape, **options)
    mine = getattr(elman.nn, name)(*shape, **options)
    modules = [peer, mine, *([getattr(torch.nn, name)(*shape, **options)] if control else [])]
    for module in modules[1:]:
        module.load_state_dict(peer.state_dict())
    size = (case.B, case.T) if case.how == "batch first" else (case.T, case.B)
    x = torch.randn(*size, inputs, **like)
    depth, two = (case.layers * case.directions, case.B), case.cell == "lstm"
    widths = [options.get("proj_size") or case.H, case.H][: 1 + two]
    states = [torch.zeros(*depth, width, **like) for width in widths]
    if case.how == ALONE:
        x, states = x.squeeze(1), [s.squeeze(1) for s in states]
    return modules, x, tuple(states) if two else states[0]


def _options(case: Case) -> dict[str, Any]:
    """Of both modules, for the way they are used."""
    if case.how == "projected":
        return {"proj_size": max(1, case.H // 3)}
    ways = {"batch first": {"batch_first": True}, "dropout": {"dropout": 0.2}}
    return ways.get(case.how, {"bias": False} if case.how == "no bias" else {})


def _packed(case: Case, x: torch.Tensor) -> PackedSequence:
    lengths = torch.randint(1, case.T + 1, (case.B,), generator=torch.Generator().manual_seed(1))
    return pack_padded_sequence(x, lengths, enforce_sorted=False)


def _precision(case: Case, device: str) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, enabled=case.how == "autocast")


def call_of(
    case: Case, module: torch.nn.Module, x: torch.Tensor, state: Any
) -> Callable[[], object]:
    """The case's job by this module."""
    precision = _precision(case, x.device.type)
    x = x.requires_grad_(case.job == "both")

    def call() -> torch.Tensor:
        if case.how == "packed":
            return module(_packed(case, x), state)[0].data
        with precision:
            return module(x, state)[0]

    def forward() -> None:
        with torch.no_grad():
            call()

    if case.job != "both":
        return forward
    dys = torch.randn_like(call().detach())
    return lambda: call().backward(dys)


clock = time.perf_counter


def seconds(run: Callable[[], object], calls: int, device: str) -> float:
    """Of one call, the GPU's part included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    for _ in range(calls):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) / calls


def measure(
    case: Case, device: str, rounds: int, slot: float, control: bool = False
) -> dict[str, Any]:
    """torch's time by ours, taking turns; `slot` is how long one turn lasts, in seconds."""
    runs, ran = contestants(case, device, control)
    for run in runs:
        for _ in range(WARM):
            run()
    turns = [(i, run, max(1, round(slot / seconds(run, 2, device)))) for i, run in enumerate(runs)]
    times = list[list[float]]()
    for i in range(rounds):
        found = {at: seconds(run, calls, device) for at, run, calls in turns[:: 1 if i % 2 else -1]}
        times.append([found[at] for at in range(len(runs))])
    said = ran()
    ratios = [[row[0] / row[at] for row in times] for at in range(1, len(runs))]
    row = {
        **case._asdict(),
        "kernel": said.runs,
        "captured": said.repeated,
        "ratio": statistics.median(ratios[0]),
        "low": min(ratios[0]),
        "high": max(ratios[0]),
        "torch_ms": 1e3 * statistics.median(row[0] for row in times),
        "elman_ms": 1e3 * statistics.median(row[1] for row in times),
    }
    return row | ({"control": statistics.median(ratios[1])} if control else {})


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, object]:
    def of(ratios: list[float]) -> dict[str, object]:
        return {
            "geometric_mean": statistics.geometric_mean(ratios),
            "least": min(ratios),
            "below_1": sum(r < 1 for r in ratios),
            "below_0.97": sum(r < SLOWER for r in ratios),
        }

    found = {"cases": len(rows), **of([row["ratio"] for row in rows])}
    if controls := [row["control"] for row in rows if "control" in row]:
        found |= {f"control_{name}": value for name, value in of(controls).items()}
        again = [row["again"] for row in rows if "again" in row]
        found["below_0.97_again"] = sum(row["ratio"] < SLOWER for row in again)
    return found


def _case(row: dict[str, Any]) -> Case:
    return Case(*(row[name] for name in Case._fields))


def _words(row: dict[str, Any]) -> str:
    """A ratio, how far its rounds lie apart, and the control's."""
    control = f", control {row['control']:.2f}" if "control" in row else ""
    return f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f}{control})"


def draw(rows: Sequence[dict[str, Any]], file: str) -> None:
    """A heat map for every dtype and job: hidden sizes across, batches down, by octaves.

    A field is the geometric mean over its cases, however long and deep; below 1 in red.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import TwoSlopeNorm

    kinds = sorted({row["dtype"] for row in rows})
    size = (11, 3.4 * len(kinds))
    figure, axes = plt.subplots(len(kinds), 3, figsize=size, squeeze=False, layout="constrained")
    norm, colours = TwoSlopeNorm(0, -0.5, 3.0), plt.get_cmap("RdYlGn")
    across, down = (sorted({_octave(row[side]) for row in rows}) for side in ("H", "B"))
    for (i, kind), (j, job) in itertools.product(enumerate(kinds), enumerate(JOBS)):
        ax, fields = axes[i][j], {}
        for row in rows:
            if (row["dtype"], row["job"]) == (kind, job):
                place = (across.index(_octave(row["H"])), down.index(_octave(row["B"])))
                fields.setdefault(place, []).append(row["ratio"])
        for (x, y), ratios in fields.items():
            mean = statistics.geometric_mean(ratios)
            colour = colours(norm(max(-0.5, min(3.0, math.log2(mean)))))
            ax.add_patch(plt.Rectangle((x, y), 1, 1, color=colour))
            ax.text(x + 0.5, y + 0.5, f"{mean:.2g}", ha="center", va="center", fontsize=6)
        ax.set(xlim=(0, len(across)), ylim=(0, len(down)), title=f"{job}, {kind}")
        ax.set_xticks([x + 0.5 for x in range(len(across))], across, fontsize=7)
        ax.set_yticks([y + 0.5 for y in range(len(down))], down, fontsize=7)
    figure.supxlabel("hidden size, to twice as many")
    figure.supylabel("batch, to twice as many")
    figure.savefig(file, dpi=90)


def _octave(n: int) -> int:
    return 2 ** (n.bit_length() - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a smaller grid, shorter turns")
    parser.add_argument("--busy", action="store_true", help="one thread, processor time")
    parser.add_argument("--random", type=int, metavar="N", help="N shapes drawn at random instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wild", action="store_true", help="draw inputs and uses, too")
    sizes: dict[str, Any] = {"type": int, "nargs": 2, "metavar": ("LOW", "HIGH"), "default": ()}
    parser.add_argument("--hidden", help="sizes of layers that are drawn", **sizes)
    parser.add_argument("--rows", help="sizes of batches that are drawn", **sizes)
    parser.add_argument("--control", action="store_true", help="torch.nn against itself, too")
    parser.add_argument("--dtype", choices=DTYPES, help="of all cases")
    parser.add_argument("--steps", type=int, metavar="T", help="of all cases")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--most", type=float, default=2e10, help="multiply-adds of the largest case"
    )
    parser.add_argument(
        "--json", help="default: benchmarks/results/grid-DEVICE.json, full grid only"
    )
    parser.add_argument("--figure", help="draw the heat map into this file")
    parser.add_argument("--drawn-from", help="measure nothing: draw the figure of this JSON file")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many")
    options = parser.parse_args()
    if options.drawn_from:
        draw(json.loads(Path(options.drawn_from).read_text())["rows"], options.figure)
        return
    device = options.device
    if options.busy:
        global clock
        clock = time.process_time
        torch.set_num_threads(1)
    if options.random:
        sized = options.hidden, options.rows
        cases = list(drawn(device, options.random, options.seed, options.wild, *sized))
    else:
        cases = list(walk(device, options.quick))
    if options.dtype:
        cases = [c._replace(dtype=options.dtype) for c in cases]
    if options.steps:
        cases = [c._replace(T=options.steps) for c in cases]
    most = options.most * (100 if device == "cuda" else 1)
    cases = [c for c in cases if options.only in str(c) and c.multiply_adds() <= most]
    rounds, slot = (5, 0.02) if options.quick else (9, 0.05)
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + options.seconds
    for i, case in enumerate(cases):
        if time.monotonic() > end:
            break
        rows.append(row := measure(case, device, rounds, slot, options.control))
        mark = "  <" if row["ratio"] < 1 else ""
        print(
            f"{i + 1:4}/{len(cases)} {row['ratio']:6.2f}  {case} ({row['kernel']}){mark}",
            flush=True,
        )
    if options.control:
        for row in (row for row in rows if row["ratio"] < SLOWER):
            longer = measure(_case(row), device, AT_LENGTH * rounds, slot, control=True)
            row["again"] = {name: longer[name] for name in ("ratio", "low", "high", "control")}
    found = summary(rows)
    print("\nbelow 1:" if found["below_1"] else "\nno case below 1")
    for row in sorted(rows, key=lambda row: row["ratio"]):
        if row["ratio"] < 1:
            again = f"; again {_words(row['again'])}" if "again" in row else ""
            print(f"  {_words(row)}{again}  {_case(row)} ({row['kernel']})")
    print(
        ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
    )
    whole = not (options.quick or options.random or options.only)
    file = options.json or (str(RESULTS / f"grid-{device}.json") if whole else None)
    if file:
        where = (
            torch.cuda.get_device_name()
            if device == "cuda"
            else f"{torch.get_num_threads()} threads"
        )
        record = {"device": where, "torch": torch.__version__, "summary": found, "rows": rows}
        Path(file).write_text(json.dumps(record, indent=1) + "\n")
    if options.figure:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
