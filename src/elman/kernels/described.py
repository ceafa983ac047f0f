"""The kernel of described cells: the native CPU kernel, compiled around a cell's own equations.

The equations and their derivative, found when the cell was declared, are written as C++ and take
the place of a built-in cell's in the headers of `kernels/cpu`: products, threads, lengths, ξ and
weight gradients are the same code. It is compiled once for each cell, number type and processor by
the C++ compiler of this machine, and kept under the hash of all that went in.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any, final

import platformdirs

from elman.cells import Cell
from elman.cells.described import Described
from elman.cells.expressions import Expression, cpp, given, hoisted, replaced
from elman.errors import UserError
from elman.files import BLANK_SEAL, atomic, seal_holds, sealed
from elman.kernels.contract import Piece
from elman.kernels.cpu import library
from elman.kernels.cpu.library import DOUBLE, FLOAT, KINDS, OwnArguments
from elman.kernels.cpu.recurrence import KERNEL as CPU
from elman.kernels.cpu.recurrence import Native, other_dtypes, real_of

HOME = Path(library.__file__).parent
FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=fast", "-fvisibility=hidden", "-fno-exceptions"),
    *("-fno-rtti", "-g0", "-w", "-shared", "-fPIC"),
)
OWN = 5  # `enum Cell` of job.h
TARGETS = {
    "avx512": ("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512", 64, 32),
    "avx2": ("avx2,fma", 32, 16),
    "portable": (None, 16, 16),
}
"""What each variant of the kernel asks of the processor, its vectors' bytes, and registers."""


@final
class DescribedKernel(Native):
    """C++ made of a described cell, on torch's threads."""

    name = "described"

    def compiles(self, cell: Cell) -> bool:
        """Whether its code is made of the cell's description: all that it runs."""
        return True

    def refuses(self, piece: Piece) -> str | None:
        cell, xs = piece.cell, piece.xs
        if not isinstance(cell, Described):
            return f"{cell.name} is not described by its equations"
        if not xs.is_cpu:
            return f"the input is on {xs.device}"
        if CPU.library is None:
            return "the native CPU kernel was not built"
        if piece.w.W_hr is not None:
            return "a described cell has no proj_size"
        if reason := other_dtypes(piece):
            return reason
        made = _made(cell, _kind(piece))
        return made if isinstance(made, str) else None

    def kept(self, cell: Cell) -> int:
        assert isinstance(cell, Described)
        return cell.gates + len(cell.apart)

    def call(self, function: str, piece: Piece, arguments: dict[str, Any]) -> int:
        assert isinstance(piece.cell, Described)
        made = _made(piece.cell, _kind(piece))
        assert not isinstance(made, str)
        return getattr(made, function)(ctypes.byref(OwnArguments(cell=OWN, **arguments)))


def _kind(piece: Piece) -> int:
    """The numbers it computes in: float32 for half precision, too."""
    return KINDS[real_of(piece.w)]


@functools.lru_cache(maxsize=256)
def _made(cell: Described, kind: int) -> ctypes.CDLL | str:
    """The compiled cell; or, in words, why there is none."""
    compiler = _compiler()
    if compiler is None:
        return "no C++ compiler was found (c++, g++, clang++, or what CXX names)"
    text = source(cell, kind, CPU.variant(kind) or "portable")
    file = _cached(text, compiler)
    if made := _opened(file):
        return made
    try:
        with tempfile.TemporaryDirectory() as folder:
            fresh = Path(folder) / file.name
            problem = _compile(text, compiler, fresh)
            if problem is not None:
                return f"{compiler} could not compile it: {problem}"
            file = file if _keep(fresh, file) else fresh
            return _opened(file) or f"what {compiler} made of it, {file}, cannot be loaded"
    except OSError as problem:
        return f"it cannot be compiled in a temporary folder: {problem.strerror}"


def _keep(fresh: Path, file: Path) -> bool:
    """Whether what was compiled now lies in the cache, for other processes; a warning if not."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic(file) as draft:
            shutil.copyfile(fresh, draft)
    except (OSError, UserError) as problem:  # it serves this process all the same
        why = problem.strerror if isinstance(problem, OSError) else problem
        warnings.warn(
            f"compiled cells cannot be kept in {file.parent} ({why}), so every process compiles "
            "its own; XDG_CACHE_HOME names another folder",
            stacklevel=2,
        )
        return False
    return True


def _opened(file: Path) -> ctypes.CDLL | None:
    """A compiled cell; None where there is none, or only what is left of one.

    The loader believes whatever an ELF file says of itself: one that was cut short ends the process
    with a signal. So the file carries a seal behind what the loader reads.
    """
    try:
        if not seal_holds(file.read_bytes()):
            return None
        made = ctypes.CDLL(str(file))
        for run in (made.elman_forward, made.elman_backward):
            run.argtypes, run.restype = [ctypes.POINTER(OwnArguments)], ctypes.c_int
    except (OSError, AttributeError):
        return None
    return made


def _compiler() -> str | None:
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _cached(text: str, compiler: str) -> Path:
    """Where the result lies: under the hash of the source, the headers, compiler and flags."""
    parts = [text, compiler, *FLAGS, *(p.read_text() for p in sorted(HOME.glob("*.h")))]
    name = hashlib.sha256("\0".join([*parts, (HOME / "threads.cpp").read_text()]).encode())
    return Path(platformdirs.user_cache_dir("elman")) / "cells" / f"{name.hexdigest()[:32]}.so"


def _compile(text: str, compiler: str, file: Path) -> str | None:
    """Make the file; returns the compiler's complaint if there is one."""
    code = file.with_suffix(".cpp")
    code.write_text(text)
    sources = [str(code), str(HOME / "threads.cpp")]
    command = [compiler, *FLAGS, f"-I{HOME}", *sources, "-o", str(file), "-ldl", "-lpthread"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as problem:  # it is no program
        return str(problem)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[0]
    file.write_bytes(sealed(file.read_bytes() + BLANK_SEAL.encode()))
    return None


def source(cell: Described, kind: int, variant: str) -> str:
    """The C++ of one cell for one number type and processor.

    It has nothing of the cell's name: cells with the same equations, one zoneout and another, are
    compiled once.
    """
    target, width, registers = TARGETS[variant]
    assert kind in (FLOAT, DOUBLE)
    forward, backward = _bodies(cell)
    flags = ", ".join("true" if s else "false" for s in cell.summed)
    return f"""/* Written by elman from the equations of a cell. */
{f'#pragma GCC target("{target}")' if target else ""}
#define REAL {"double" if kind == DOUBLE else "float"}
#define VECTOR_BYTES {width}
#define REGISTERS {registers}
#define OWN_CELL
#define OWN_GATES {cell.gates}
#define OWN_APART {len(cell.apart)}
#define OWN_STATES {cell.count}
#define OWN_PARAMETERS {len(cell.parameters)}
#define OWN_NOISE {len(cell.noise)}
#include "functions.h"
#include <cstdlib>
namespace {{
constexpr bool OWN_SUMMED[] = {{{flags}}};
INLINE void own_step(const vec *a, const vec *a_h, const vec *before, const vec *own,
                     const vec *drawn, vec *after, vec *kept) {{
    {forward}
}}
INLINE void own_step_back(const vec *kept, const vec *before, const vec *own,
                          const vec *drawn, const vec *dafter, vec *da_x, vec *da_h,
                          vec *dbefore, vec *down) {{
    {backward}
}}
}}
#include "backward.h"
#include "subnormals.h"
void *borrow(int64_t bytes) {{
    void *fresh = nullptr;
    return posix_memalign(&fresh, 64, size_t(bytes)) == 0 ? fresh : nullptr;
}}
void give_back(void *memory, int64_t) {{ free(memory); }}
#define PUBLIC extern "C" __attribute__((visibility("default")))
PUBLIC int elman_forward(const Job *job) {{
    NoSubnormals here;
    return forward(job);
}}
PUBLIC int elman_backward(const Job *job) {{
    NoSubnormals here;
    for (int64_t s = 0; job->ids && s < job->T * job->B; s++)
        if (job->ids[s] < 0 || job->ids[s] >= job->I) return BAD_ID;
    return backward(job);
}}
"""


def _bodies(cell: Described) -> tuple[str, str]:
    """What is inside `own_step` and `own_step_back`: the equations, and the derivative.

    The backward step finds in `kept` what the forward step has left for it (`hoisted`).
    """
    gates, states, own = range(cell.gates), range(cell.count), range(len(cell.parameters))
    sums = {
        e: given(f"a{g}")
        for g in gates
        if cell.summed[g]
        for e in (cell.a_x[g] + cell.a_h[g], cell.a_h[g] + cell.a_x[g])
    }
    slots = [given(f"a{g}" if cell.summed[g] else f"x{g}") for g in gates]
    slots += [given(f"h{g}") for g in gates if not cell.summed[g]]
    derivative = replaced(cell.equations.back, sums)
    kept = hoisted(derivative, slots, {f"d{i}" for i in states})
    names = _variables(cell, len(kept))

    def body(ends: list[Expression], targets: list[str]) -> str:
        return "\n    ".join(cpp(replaced(ends, sums), targets, names))

    forward = body(
        [*cell.equations.after, *kept],
        [*(f"after[{i}]" for i in states), *(f"kept[{i}]" for i in range(len(kept)))],
    )
    backward = body(
        replaced(derivative, {e: given(f"k{i}") for i, e in enumerate(kept)}),
        [
            *(f"da_x[{g}]" for g in gates),
            *(f"da_h[{g}]" for g in gates),
            *(f"dbefore[{i}]" for i in states),
            *(f"down[{i}]" for i in own),
        ],
    )
    return forward, backward


def _variables(cell: Described, kept: int) -> dict[str, str]:
    """What each input of the equations is called in C++."""
    arrays = (
        *(("a", "a", cell.gates), ("x", "a", cell.gates), ("h", "a_h", cell.gates)),
        *(("s", "before", cell.count), ("d", "dafter", cell.count), ("k", "kept", kept)),
        *(("p", "own", len(cell.parameters)), ("n", "drawn", len(cell.noise))),
    )
    return {f"{input}{i}": f"{array}[{i}]" for input, array, n in arrays for i in range(n)}


KERNEL = DescribedKernel()
