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
from pathlib import Path
from typing import final

import platformdirs
import torch
from torch import Tensor

from elman.cells import Gradients, State
from elman.cells.described import Described
from elman.cells.expressions import Expression, cpp, given, replaced
from elman.files import BLANK_SEAL, seal_holds, sealed
from elman.kernels.contract import Piece, Pull, Trace
from elman.kernels.cpu import library
from elman.kernels.cpu.library import DOUBLE, FLOAT, KINDS, LayerArguments, plain, pointer
from elman.kernels.cpu.recurrence import KERNEL as CPU
from elman.kernels.cpu.recurrence import inputs_of

HOME = Path(library.__file__).parent
FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=fast", "-fvisibility=hidden", "-fno-exceptions"),
    *("-fno-rtti", "-g0", "-w", "-shared", "-fPIC"),
)
MOST_GATES = 4  # as many vectors as a tile of the product finishes at once
OWN = 5  # `enum Cell` of job.h
TARGETS = {
    "avx512": ("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512", 64, 32),
    "avx2": ("avx2,fma", 32, 16),
    "portable": (None, 16, 16),
}
"""What each variant of the kernel asks of the processor, its vectors' bytes, and registers."""


@final
class DescribedKernel:
    """C++ made of a described cell, on torch's threads."""

    name = "described"

    def refuses(self, piece: Piece) -> str | None:
        cell, w, xs, *_ = piece
        if not isinstance(cell, Described):
            return f"{cell.name} is not described by its equations"
        if not xs.is_cpu:
            return f"the input is on {xs.device}"
        if CPU.library is None:
            return "the native CPU kernel was not built"
        if w.W_hr is not None:
            return "a described cell has no proj_size"
        if cell.gates > MOST_GATES:
            return f"{cell.name} has {cell.gates} gates; it takes {MOST_GATES}"
        if w.W_hh.dtype not in (torch.float32, torch.float64):
            return f"the weights are {w.W_hh.dtype}; it runs float32 and float64"
        for t in (*w, *piece.state, xs if xs.is_floating_point() else None):
            if t is not None and t.dtype != w.W_hh.dtype:
                return f"{t.dtype} beside weights of {w.W_hh.dtype}"
        made = _made(cell, KINDS[w.W_hh.dtype])
        return made if isinstance(made, str) else None

    def empty_gates(self, piece: Piece) -> Tensor | None:
        width = self._kept(piece) * piece.w.hidden_size
        return piece.state[0].new_empty(*piece.xs.shape[:2], width)

    def forward(self, piece: Piece, needs_gates: bool = True) -> Trace:
        piece.check()
        state, steps, real = piece.state, len(piece.xs), piece.w.W_hh.dtype
        tensors = inputs_of(piece, real) | {"own": plain(piece.w.own, real)}
        tracks = [s.new_empty(steps + 1, *s.shape) for s in state]
        tensors |= dict(zip(("h_0", "c_0"), (plain(s, real) for s in state), strict=False))
        tensors |= dict(zip(("hs", "cs"), tracks, strict=False))
        tensors["gates"] = gates = self.empty_gates(piece) if needs_gates else None
        self._run("elman_forward", piece, tensors)
        return Trace(tracks[0], tracks[1] if len(tracks) > 1 else None, gates)

    def backward(
        self, piece: Piece, trace: Trace, pull: Pull
    ) -> tuple[Tensor | None, Gradients, State]:
        piece.check()
        w, xs, real = piece.w, piece.xs, piece.w.W_hh.dtype
        pull.check(piece, trace, self._kept(piece) * w.hidden_size)
        fresh = pull.into is None
        dw = pull.into or w.map(torch.empty_like)
        sums = dw.map(lambda d: plain(d, real))
        wanted = pull.needs_dxs and xs.is_floating_point()
        dxs = torch.empty(xs.shape, dtype=real) if wanted else None
        last = [plain(d, real) for d in pull.dstate]
        first = [torch.empty_like(d) for d in last]
        tensors = inputs_of(piece, real) | {
            **dict(zip(("hs", "cs", "gates"), (plain(t, real) for t in trace), strict=True)),
            **dict(zip(("dh_T", "dc_T"), last, strict=False)),
            **dict(zip(("dh_0", "dc_0"), first, strict=False)),
            "dW_ih": sums.W_ih,
            "dW_hh": sums.W_hh,
            "db_ih": sums.b_ih,
            "db_hh": sums.b_hh,
            "own": plain(w.own, real),
            "down": sums.own,
            "dxs": dxs,
            "dhs": plain(pull.dhs, real),
            "xi": (xi := plain(pull.xi, real)),
        }
        rows = xi is not None and xi.dim() == 2
        self._run("elman_backward", piece, tensors, xi_per_row=rows, fresh=fresh)
        for d, total in zip(dw, sums, strict=True):
            if d is not None and total is not None and d is not total:
                d.copy_(total)
        return dxs, dw, tuple(first)

    def _kept(self, piece: Piece) -> int:
        cell = piece.cell
        assert isinstance(cell, Described)
        return cell.gates + cell.summed.count(False)

    def _run(
        self,
        function: str,
        piece: Piece,
        tensors: dict[str, Tensor | None],
        xi_per_row: bool = False,
        fresh: bool = True,
    ) -> None:
        cell, w, (steps, rows) = piece.cell, piece.w, piece.xs.shape[:2]
        assert isinstance(cell, Described)
        made = _made(cell, KINDS[w.W_hh.dtype])
        assert not isinstance(made, str)
        arguments = LayerArguments(
            cell=OWN,
            T=steps,
            B=rows,
            I=w.W_ih.shape[1],
            H=w.W_hh.shape[1],
            threads=torch.get_num_threads(),
            xi_per_row=xi_per_row,
            fresh=fresh,
            **{name: pointer(t) for name, t in tensors.items()},
        )
        status = getattr(made, function)(ctypes.byref(arguments))
        if status == library.BAD_ID:
            low, high = int(piece.xs.min()), int(piece.xs.max())
            raise IndexError(f"ids from {low} to {high} index {w.W_ih.shape[1]} inputs")
        library.check_memory(status)


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
    problem = _compile(text, compiler, file)
    if problem is not None:
        return f"{compiler} could not compile it: {problem}"
    return _opened(file) or f"what {compiler} made of it, {file}, cannot be loaded"


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
            run.argtypes, run.restype = [ctypes.POINTER(LayerArguments)], ctypes.c_int
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
    """Make the file, whole or not at all; returns the compiler's complaint if there is one."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as work:
            code, made = Path(work) / "cell.cpp", Path(work) / "cell.so"
            code.write_text(text)
            sources = [str(code), str(HOME / "threads.cpp")]
            command = [
                compiler,
                *FLAGS,
                f"-I{HOME}",
                *sources,
                "-o",
                str(made),
                "-ldl",
                "-lpthread",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return (done.stderr.strip().splitlines() or ["no message"])[0]
            made.write_bytes(sealed(made.read_bytes() + BLANK_SEAL.encode()))
            made.replace(file)
    except OSError as problem:
        return str(problem)
    return None


def source(cell: Described, kind: int, variant: str) -> str:
    """The C++ of one cell for one number type and processor."""
    target, width, registers = TARGETS[variant]
    assert kind in (FLOAT, DOUBLE)
    summed, equations = cell.summed, cell.equations
    sums = {
        e: given(f"a{g}")
        for g in range(cell.gates)
        if summed[g]
        for e in (cell.a_x[g] + cell.a_h[g], cell.a_h[g] + cell.a_x[g])
    }
    names = {f"a{g}": f"a[{g}]" for g in range(cell.gates)}
    names |= {f"x{g}": f"a[{g}]" for g in range(cell.gates)}
    names |= {f"h{g}": f"a_h[{g}]" for g in range(cell.gates)}
    names |= {f"s{i}": f"before[{i}]" for i in range(cell.count)}
    names |= {f"d{i}": f"dafter[{i}]" for i in range(cell.count)}
    names |= {f"p{i}": f"own[{i}]" for i in range(len(cell.parameters))}

    def body(ends: list[Expression], targets: list[str]) -> str:
        return "\n    ".join(cpp(replaced(ends, sums), targets, names))

    forth = body(equations.after, [f"after[{i}]" for i in range(cell.count)])
    back = body(
        equations.back,
        [
            *(f"da_x[{g}]" for g in range(cell.gates)),
            *(f"da_h[{g}]" for g in range(cell.gates)),
            *(f"dbefore[{i}]" for i in range(cell.count)),
            *(f"down[{i}]" for i in range(len(cell.parameters))),
        ],
    )
    flags = ", ".join("true" if s else "false" for s in summed)
    return f"""/* {cell.name}, written by elman */
{f'#pragma GCC target("{target}")' if target else ""}
#define REAL {"double" if kind == DOUBLE else "float"}
#define VECTOR_BYTES {width}
#define REGISTERS {registers}
#define OWN_CELL
#define OWN_GATES {cell.gates}
#define OWN_APART {summed.count(False)}
#define OWN_STATES {cell.count}
#define OWN_PARAMETERS {len(cell.parameters)}
#include "functions.h"
#include <cstdlib>
namespace {{
constexpr bool OWN_SUMMED[] = {{{flags}}};
INLINE void own_step(const vec *a, const vec *a_h, const vec *before, const vec *own, vec *after) {{
    {forth}
}}
INLINE void own_step_back(const vec *a, const vec *a_h, const vec *before, const vec *own,
                          const vec *dafter, vec *da_x, vec *da_h, vec *dbefore, vec *down) {{
    {back}
}}
}}
#include "backward.h"
void *borrow(int64_t bytes) {{
    void *fresh = nullptr;
    return posix_memalign(&fresh, 64, size_t(bytes)) == 0 ? fresh : nullptr;
}}
void give_back(void *memory, int64_t) {{ free(memory); }}
#define PUBLIC extern "C" __attribute__((visibility("default")))
PUBLIC int elman_forward(const Job *job) {{ return forward(job); }}
PUBLIC int elman_backward(const Job *job) {{
    for (int64_t s = 0; job->ids && s < job->T * job->B; s++)
        if (job->ids[s] < 0 || job->ids[s] >= job->I) return BAD_ID;
    return backward(job);
}}
"""


KERNEL = DescribedKernel()
