"""What a stack costs on a GPU, by our CUDA kernel and by cuDNN, as measured on one H200.

    microseconds = max(host, pieces · start + steps · step)

`prices.json` has start and step for a grid of cells, arithmetics, hidden sizes and batches, forward
and with the backward pass (`benchmarks/cuda_prices.py` measured them); between the points of the
grid both are interpolated, straight lines in the logarithms. The same shape always costs the same:
nothing is timed when a model runs, and other GPUs are assumed to rank the two alike.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
from importlib import resources
from typing import NamedTuple

HOST = {  # microseconds of Python and launches: of a call, and more for each further directed layer
    ("cuda", "forward"): (105, 50),
    ("cuda", "both"): (1050, 460),
    ("long way", "forward"): (300, 200),  # cuda, where no call is prepared: `takes_the_long_way`
    ("long way", "both"): (1500, 1200),
    ("cudnn", "forward"): (85, 30),
    ("cudnn", "both"): (930, 360),
}
MASK = {"forward": 110.0, "both": 250.0}  # dropout by our kernel: of a layer's mask
MASKED = 12.0  # to draw 16 steps of it
PADDING = {"forward": 320.0, "both": 600.0}  # packed rows by our kernel: padded, and packed again
CASTS = {"forward": 10.0, "both": 35.0}  # of the host, for every tensor cast (as launches cost)
CAST_INSIDE = 15.0  # the same by a call that is ready, which autograd does not see
CAST_BEFORE = {"forward": 350.0, "both": 500.0}  # and more where all is cast before the long way
WIDENED, BY_MILLIONS = 100.0, 20.0  # to copy weights, and millions of them, into a wider layer's
LAUNCHES = {"forward": 15.0, "both": 28.0}  # of cuDNN's slower way: of the host, for every step
LAUNCHES_IN_HALVES = 34.0  # the same of a gru or lstm in half precision, both
LAUNCHED = {"forward": 55.0, "both": 310.0}  # the host's part of a captured call
ALONE = 7.0  # cuDNN's steps, there and back, below so many microseconds are of one kernel per layer


GATES = {"tanh": 1, "gru": 3, "lstm": 4}

AT_ONCE = {"tanh": 256, "gru": 128, "lstm": 128}
"""Up to so many units of float32 cuDNN is fast, there and back; one more unit, and it is not."""

WHOLE, WIDE = 8, 128
"""Of what cuDNN's kernels of float16 want multiples: of all sizes, of widths beyond those units."""


class Apart(NamedTuple):
    """How much longer a step takes cuDNN where rows of h begin anywhere: at 1024 units, 64 rows."""

    times: float
    by_rows: float  # exponents
    by_units: float
    widest: int = 2048  # beyond so many units it is the same


ODD, EVEN = Apart(2.8, 0.22, 0.55), Apart(1.85, 0.15, 0.25)
IN_FLOAT32 = Apart(1.65, 0.12, 0.4, 1024)
"""Of half precision at odd widths and at even ones that are no whole 16 bytes, and of float32.

Fitted to forward passes of gru and lstm, 512 to 1508 units, 8 to 256 rows: 1.0 to 4.3 times, within
11 % (odd) and 24 % rms, and up to 1.7 times too low at 8 rows; in float32 701 to 1999 units, 64 to
512 rows: 1.4 to 2.8 times, within 19 % rms. One gate: some 15 % too high."""
MOST_APART = 4.2
OURS_APART = 1.2
"""The same of our kernel, seen at gru 93 beside 88 and 96, one row: 1.2 (float32) to 1.24 times."""
SHARE_OF_A_PACK = 0.6
"""Of all steps of all rows of a pack: cuDNN runs no others, but lengths are not in a price."""


IN_CLUSTERS = {"tanh": 1536, "gru": 768, "lstm": 768}
"""Units of half precision up to which our kernel runs in clusters, whose groups have 8 rows."""

FEW_VALUES, MANY_VALUES = 200_000, 350_000
"""Of gates in a step: up to so many, cuDNN runs layers beside each other; from so many on not."""


class Line(NamedTuple):
    """Microseconds of a call of one layer: `start` + steps · `step`."""

    start: float
    step: float


class Shape(NamedTuple):
    """What a price depends on."""

    cell: str  # tanh (for relu too), gru or lstm
    arithmetic: str  # fp16, bf16, tf32 or fp32
    hidden: int
    rows: int
    steps: int
    layers: int
    directions: int
    backward: bool
    pieces: int = 1
    captured: bool = False  # the host's time does not count
    packed: bool = False
    dropout: bool = False  # between layers
    inputs: int = 0


def microseconds(engine: str, shape: Shape) -> float | None:
    """The price of a call on `engine`, cuda or cudnn; None where nothing like it was measured."""
    gpu = gpu_microseconds(engine, shape)
    if gpu is None or shape.captured:
        return gpu
    return max(host_microseconds(engine, shape), gpu)


def gpu_microseconds(engine: str, shape: Shape) -> float | None:
    """What the GPU takes of it."""
    what = "both" if shape.backward else "forward"
    arithmetic = cudnns_kernels(shape) if engine == "cudnn" else shape.arithmetic
    rows = _whole_rows(shape) if engine == "cuda" else shape.rows
    line = _line(engine, shape.cell, arithmetic, what, shape.hidden, rows)
    if line is None:
        return None
    strands = shape.layers * shape.directions
    if engine == "cuda":
        return strands * (line.start + shape.steps * line.step * _ours_apart(shape))
    if is_alone(shape):
        return strands * (shape.pieces * line.start + shape.steps * line.step)
    there = SHARE_OF_A_PACK if shape.packed else 1.0
    one_layer = shape.pieces * line.start + shape.steps * line.step * _apart(shape) * there
    return _beside_each_other(shape) * one_layer


def _whole_rows(shape: Shape) -> int:
    """Rows as the groups of our kernel have them: beyond clusters, in sixty-fours at large batches.

    A batch of 260 takes as long as one of 320; prices were measured at 128 and 256.
    """
    in_clusters = shape.hidden <= _in_clusters(shape)
    return shape.rows if in_clusters or shape.rows <= 128 else -(-shape.rows // 64) * 64


def _in_clusters(shape: Shape) -> int:
    """Units up to which our kernel runs in clusters: half as many of float32."""
    return IN_CLUSTERS[shape.cell] // (2 if shape.arithmetic in ("tf32", "fp32") else 1)


def _beside_each_other(shape: Shape) -> float:
    """How many times longer all layers and directions take cuDNN than one does.

    It runs them beside each other, until a step of one keeps the whole GPU busy.
    """
    values = shape.rows * GATES[shape.cell] * shape.hidden  # of a step
    share = min(max((values - FEW_VALUES) / (MANY_VALUES - FEW_VALUES), 0.0), 1.0)
    by_layers, by_directions = (alone + (1 - alone) * share for alone in (0.45, 0.3))
    return shape.layers**by_layers * shape.directions**by_directions


def _apart(shape: Shape) -> float:
    """How much longer a step of cuDNN's slower way takes than at the widths that were priced."""
    whole, width = _whole_units(shape), shape.hidden
    if width <= AT_ONCE[shape.cell] or width % whole == 0:
        return 1.0
    it = IN_FLOAT32 if whole == 4 else ODD if width % 2 else EVEN
    units = min(width, it.widest) / 1024
    times = it.times * (shape.rows / 64) ** it.by_rows * units**it.by_units
    return min(max(times, 1.0), MOST_APART)


def _ours_apart(shape: Shape) -> float:
    """The same of our kernel; beyond clusters it has units of its own that make rows whole."""
    is_whole = shape.hidden % _whole_units(shape) == 0
    return 1.0 if is_whole or is_widened(shape) else OURS_APART


def host_microseconds(engine: str, shape: Shape) -> float:
    """What Python and the launches take, while the GPU may work already."""
    what, strands = "both" if shape.backward else "forward", shape.layers * shape.directions
    long = engine == "cuda" and takes_the_long_way(shape)
    first, more = HOST["long way" if long else engine, what]
    host = first + more * (strands - 1)
    if engine == "cuda":
        host += WIDENED + BY_MILLIONS * _weights(shape) / 1e6 if is_widened(shape) else 0
        return host + _masks(shape, what) + (PADDING[what] if shape.packed else 0)
    in_halves = shape.backward and shape.cell != "tanh" and shape.arithmetic in ("fp16", "bf16")
    launch = LAUNCHES_IN_HALVES if in_halves else LAUNCHES[what]
    return shape.pieces * host + (0 if is_alone(shape) else strands * shape.steps * launch)


def takes_the_long_way(shape: Shape) -> bool:
    """Whether our kernel's calls of this shape are not prepared."""
    return shape.directions > 1 or shape.pieces > 1


def _masks(shape: Shape, what: str) -> float:
    """What our kernel's masks take; cuDNN's are its own."""
    if not shape.dropout:
        return 0
    times = 3 if shape.backward and takes_the_long_way(shape) else 1  # not kept, but drawn again
    return (shape.layers - 1) * (MASK[what] + times * MASKED * -(-shape.steps // 16))


def cudnns_kernels(shape: Shape) -> str:
    """The arithmetic whose prices are those of the kernels by which cuDNN runs this shape.

    Packed rows it runs step by step, as it does bfloat16. Its kernels of float16 take sizes in
    whole eights alone; others it runs as it does float32, up to `AT_ONCE` units. Beyond them one
    layer in one direction has a kernel for all steps, if it is wide in whole 128s.
    """
    small, widths = shape.hidden <= AT_ONCE[shape.cell], (shape.hidden, shape.inputs)
    if shape.packed and (small or shape.arithmetic == "fp16"):
        return "bf16"
    if shape.arithmetic != "fp16":
        return shape.arithmetic
    whole = not any(size % WHOLE for size in (*widths, shape.rows))
    if small:
        return "fp16" if whole else "tf32"
    one = shape.layers == shape.directions == 1 and not any(width % WIDE for width in widths)
    return "fp16" if whole and one else "bf16"


def cast_microseconds(engine: str, shape: Shape, tensors: int) -> float | None:
    """The price of the same call where so many tensors are cast first."""
    gpu, what = gpu_microseconds(engine, shape), "both" if shape.backward else "forward"
    if gpu is None:
        return None
    host = host_microseconds(engine, shape) + tensors * CAST_INSIDE
    if engine != "cuda" or takes_the_long_way(shape):
        host += CAST_BEFORE[what]
    return max(host, gpu)


def _weights(shape: Shape) -> int:
    """How many there are in all layers."""
    read = shape.inputs + (2 * shape.layers - 1) * shape.hidden
    return GATES[shape.cell] * shape.hidden * read * shape.directions


def is_widened(shape: Shape) -> bool:
    """Whether our kernel runs a layer with more units: beyond clusters, in whole 16 bytes."""
    return shape.hidden > _in_clusters(shape) and shape.hidden % _whole_units(shape) > 0


def _whole_units(shape: Shape) -> int:
    """Of how many units rows are whole 16 bytes."""
    return 4 if shape.arithmetic in ("tf32", "fp32") else 8


def is_alone(shape: Shape) -> bool:
    """Whether cuDNN runs one layer after the other, all of its steps in one kernel."""
    kernels = cudnns_kernels(shape)
    line = _line("cudnn", shape.cell, kernels, "both", shape.hidden, shape.rows)
    most = AT_ONCE[shape.cell] if shape.backward or shape.cell == "tanh" else 192
    small = kernels == "fp16" or shape.hidden <= most  # as seen of float32
    return not shape.packed and small and line is not None and line.step < ALONE


def step(engine: str, cell: str, arithmetic: str, hidden: int, rows: int) -> float | None:
    """Microseconds of a step of one layer, forward and backward; None where none was measured."""
    line = _line(engine, cell, arithmetic, "both", hidden, rows)
    return None if line is None else line.step


@functools.lru_cache(maxsize=4096)
def _line(
    engine: str, cell: str, arithmetic: str, what: str, hidden: int, rows: int
) -> Line | None:
    tables = _tables()
    grid = tables[engine][cell][arithmetic][what]
    i, u = _between(tables["sizes"], hidden, 1.0)
    if (engine, what) == ("cudnn", "both") and arithmetic in ("tf32", "fp32"):
        u = 1.0 if u > 0 and tables["sizes"][i] == AT_ONCE[cell] else u
    j, v = _between(tables["batches"], rows, 2.0)
    corners = [(grid[i + a][j + b], (u if a else 1 - u) * (v if b else 1 - v)) for a, b in CORNERS]
    known = [(line, weight) for line, weight in corners if line is not None and weight != 0]
    total = sum(weight for _, weight in known)
    if total < 0.75:  # too far from anything that was measured
        return None
    sums = [sum(w * math.log(line[k]) for line, w in known) for k in range(2)]
    return Line(*(math.exp(s / total) for s in sums))


CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))


def _between(grid: list[int], value: int, most: float) -> tuple[int, float]:
    """The place before `value` in the grid, and how far it is to the next, in logarithms."""
    i = min(max(bisect.bisect_right(grid, value) - 1, 0), len(grid) - 2)
    low, high = math.log(grid[i]), math.log(grid[i + 1])
    return i, min(max((math.log(value) - low) / (high - low), 0.0), most)


@functools.cache
def _tables() -> dict:
    text = resources.files("elman.kernels").joinpath("prices.json").read_text(encoding="utf-8")
    return json.loads(text)
