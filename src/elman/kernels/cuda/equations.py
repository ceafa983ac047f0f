"""What the CUDA kernels have to know of a cell: its sizes, and of a described one its equations.

The equations and their derivative become a header, own.cuh, that forward.cu and backward.cu read in
place of a built-in cell's: products, exchange, lengths and ξ are the same code.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from elman.cells import Cell
from elman.cells.described import Described
from elman.cells.expressions import ZERO, Expression, cpp, ordered
from elman.cells.keeping import Kept, keeping
from elman.kernels.products import hidden_blocks

CELLS = {"tanh": 0, "relu": 1, "gru": 2, "lstm": 3, "linear": 4}
"""CELL in the sources."""
OWN = 5
KEPT = {"gru": 5, "lstm": 4}
"""Blocks of values that a built-in cell keeps of a step."""


SPELLED = {"div": "quotient({}, {})"}
"""Operations that functions.cuh has a faster way for."""


class Body(NamedTuple):
    """A cell as the kernels see it; what is counted is values of one unit."""

    code: int
    kept: int  # of a step, for the backward pass
    inputs: int  # read from device memory at every step forward
    past: int  # and backward
    numbers: int = 0  # the same at every step, forward
    parameters: int = 0  # those of them that are learned
    header: str = ""  # own.cuh


@functools.lru_cache(maxsize=256)
def body(cell: Cell) -> Body:
    """The cell as the kernels see it."""
    if isinstance(cell, Described):
        return _own(cell)
    kept = KEPT.get(cell.name, 0)
    return Body(CELLS[cell.name], kept, cell.gates, 2 if cell.gates == 1 else 6)


def _own(cell: Described) -> Body:
    halves = keeping(cell)
    looks, drawn = _looks(halves.back), len(cell.noise)
    kept, parameters = len(halves.kept), len(cell.parameters)
    return Body(
        OWN,
        kept,
        cell.gates + drawn,
        1 + kept + len(looks) + drawn,
        parameters + len(cell.apart),
        parameters,
        _header(cell, halves, looks),
    )


def _looks(back: Sequence[Expression]) -> list[str]:
    """The states before (s0) and after (y0) a step that its derivative is made of."""
    return sorted(name for name in _names(back) if name[0] in "sy")


def _names(ends: Iterable[Expression]) -> list[str]:
    return [e.name for e in ordered(list(ends)) if e.name]


def _header(cell: Described, halves: Kept, looks: list[str]) -> str:
    sizes = {
        "GATES": cell.gates,
        "APART": len(cell.apart),
        "EXTRA": cell.count - 1,
        "DRAWN": len(cell.noise),
        "PARAMETERS": len(cell.parameters),
        "KEPT": len(halves.kept),
        "LOOKS": len(looks),
    }
    return f"""// Written by elman from the equations of a cell.
#pragma once
#include "functions.cuh"

constexpr int {", ".join(f"{name} = {value}" for name, value in sizes.items())};

{_table("block_of", hidden_blocks(cell))}
{_table("looked_at", [int(name[1:]) for name in looks])}
{_table("looks_after", [int(name[0] == "y") for name in looks])}
{_table("hands_back", [int(d != ZERO) for d in _dbefore(cell, halves.back)])}

template <int A, int X, int N, int C, int K, int W>
DEVICE void own_step(int v, const float (&a)[A][W], const float (&x)[X][W],
                     const float (&own)[N][W], float (&h)[W], float (&c)[C][W],
                     float (&kept)[K][W]) {{
    {_forwards(cell, halves)}
}}

template <int P, int N, int C, int D, int B, int Q, int W>
DEVICE void own_step_back(int v, const float (&past)[P][W], const float (&own)[N][W],
                          const float (&dh)[W], const float (&dc)[C][W], float (&da)[D][W],
                          float (&dbefore)[B][W], float (&down)[Q][W]) {{
    {_backwards(cell, halves, looks)}
}}
"""


def _dbefore(cell: Described, back: list[Expression]) -> list[Expression]:
    """The pulls on the states before a step, of all that there are."""
    return back[2 * cell.gates :][: cell.count]


def _table(name: str, values: Sequence[int]) -> str:
    """A function from 0, 1, … to the values: device code may read it where it may read no array."""
    chosen = "".join(f"i == {i} ? {value} : " for i, value in enumerate(values))
    return f"DEVICE constexpr int {name}(int i) {{ return {chosen}0; }}"


def _forwards(cell: Described, halves: Kept) -> str:
    own = len(cell.parameters)
    apart = {g: i for i, g in enumerate(cell.apart)}
    known = {f"a{g}": f"a[{g}][v] + x[{g}][v]" for g in range(cell.gates)}
    known |= {f"x{g}": f"x[{g}][v]" for g in range(cell.gates)}
    known |= {f"h{g}": f"a[{g}][v] + own[{own + i}][v]" for g, i in apart.items()}
    known |= {f"s{i}": f"c[{i - 1}][v]" if i else "h[v]" for i in range(cell.count)}
    known |= {f"p{i}": f"own[{i}][v]" for i in range(own)}
    known |= {f"n{i}": f"x[{cell.gates + i}][v]" for i in range(len(cell.noise))}
    targets = [f"c[{i - 1}][v]" if i else "h[v]" for i in range(cell.count)]
    targets += [f"kept[{i}][v]" for i in range(len(halves.kept))]
    return _body([*halves.after, *halves.kept], targets, known)


def _backwards(cell: Described, halves: Kept, looks: list[str]) -> str:
    kept, own = len(halves.kept), len(cell.parameters)
    known = {f"k{i}": f"past[{1 + i}][v]" for i in range(kept)}
    known |= {name: f"past[{1 + kept + i}][v]" for i, name in enumerate(looks)}
    drawn = 1 + kept + len(looks)
    known |= {f"n{i}": f"past[{drawn + i}][v]" for i in range(len(cell.noise))}
    known |= {f"p{i}": f"own[{i}][v]" for i in range(own)}
    known |= {f"d{i}": f"dc[{i - 1}][v]" if i else "dh[v]" for i in range(cell.count)}
    G, rest = cell.gates, halves.back[2 * cell.gates :]
    ends = [*halves.back[:G], *(halves.back[G + g] for g in cell.apart), *rest]
    targets = [f"da[{g}][v]" for g in range(G + len(cell.apart))]
    targets += [f"dbefore[{i}][v]" for i in range(cell.count)]
    sums = [f"const float down{i}" for i in range(own)]
    added = [f"down[{i}][v] += down{i};" for i in range(own)]
    return "\n    ".join([_body(ends, [*targets, *sums], known), *added])


def _body(ends: list[Expression], targets: list[str], known: dict[str, str]) -> str:
    """Statements that put every end into its target, everything they read being read before."""
    names = _names(ends)
    read = [f"const float {name} = {known[name]};" for name in names]
    return "\n    ".join([*read, *cpp(ends, targets, {name: name for name in names}, SPELLED)])
