"""The recurrence of one layer over a piece of time, one native call each way."""

from __future__ import annotations

import abc
from typing import Any, final

import torch
from torch import Tensor

from elman.built import NOT_BUILT
from elman.cells import Cell, Gradients, State, Weights
from elman.errors import UserError
from elman.kernels.contract import Job, Piece, Pull, Trace
from elman.kernels.cpu import library
from elman.kernels.cpu.library import (
    CELLS,
    CPU,
    FASTEST,
    FLOAT,
    HALF,
    KINDS,
    LayerArguments,
    integers,
    plain,
    pointer,
)


class Native(abc.ABC):
    """One layer over a piece of time by one call of native code each way, on torch's threads."""

    name: str

    @abc.abstractmethod
    def refuses(self, piece: Piece) -> str | None:
        """See `Kernel`."""

    @abc.abstractmethod
    def kept(self, cell: Cell) -> int:
        """How many blocks of `hidden` numbers a step keeps for the backward pass."""

    @abc.abstractmethod
    def call(self, function: str, piece: Piece, arguments: dict[str, Any]) -> int:
        """Run `elman_forward` or `elman_backward` on the fields of `LayerArguments`; its status."""

    def empty_gates(self, piece: Piece) -> Tensor | None:
        width, like = self.kept(piece.cell) * piece.w.hidden_size, piece.state[0]
        if not width:
            return None
        return like.new_empty(*piece.xs.shape[:2], width, dtype=real_of(piece.w))

    def forward(self, piece: Piece, needs_gates: bool = True) -> Trace:
        piece.check()
        real, state, steps = real_of(piece.w), piece.state, len(piece.xs)
        tracks = [torch.empty(steps + 1, *s.shape, dtype=real, device=CPU) for s in state]
        gates = self.empty_gates(piece) if needs_gates else None
        tensors = inputs_of(piece, real) | {
            **dict(zip(("h_0", "c_0"), (plain(s, real) for s in state), strict=False)),
            **dict(zip(("hs", "cs"), tracks, strict=False)),
            "gates": gates,
        }
        self._run("elman_forward", piece, tensors)
        hs, *cs = (t.to(s.dtype) for t, s in zip(tracks, state, strict=True))
        return Trace(hs, cs[0] if cs else None, gates)

    def backward(
        self, piece: Piece, trace: Trace, pull: Pull
    ) -> tuple[Tensor | None, Gradients, State]:
        piece.check()
        pull.check(piece, trace, self.kept(piece.cell) * piece.w.hidden_size)
        w, xs, real = piece.w, piece.xs, real_of(piece.w)
        dw = pull.into or w.map(lambda p: torch.empty(p.shape, dtype=real, device=CPU))
        sums = dw.map(lambda d: plain(d, real))
        wanted = pull.needs_dxs and xs.is_floating_point()
        dxs = torch.empty(xs.shape, dtype=real, device=CPU) if wanted else None
        last = [plain(d, real) for d in pull.dstate]
        first = [torch.empty_like(d) for d in last]
        tensors = inputs_of(piece, real) | {
            **dict(zip(("hs", "cs", "gates"), (plain(t, real) for t in trace), strict=True)),
            **dict(zip(("dh_T", "dc_T"), last, strict=False)),
            **dict(zip(("dh_0", "dc_0"), first, strict=False)),
            **dict(zip(("dW_ih", "dW_hh", "db_ih", "db_hh"), sums, strict=False)),
            "down": sums.own,
            "dhs": plain(pull.dhs, real),
            "xi": (xi := plain(pull.xi, real)),
            "dxs": dxs,
        }
        rows = xi is not None and xi.dim() == 2
        self._run("elman_backward", piece, tensors, xi_per_row=rows, fresh=pull.into is None)
        for d, total in zip(dw, sums, strict=True):
            if d is not None and total is not None and d is not total:
                d.copy_(total)
        kinds = [d.dtype for d in pull.dstate]
        befores = tuple(d.to(kind) for d, kind in zip(first, kinds, strict=True))
        return None if dxs is None else dxs.to(xs.dtype), dw, befores

    def _run(
        self,
        function: str,
        piece: Piece,
        tensors: dict[str, Tensor | None],
        xi_per_row: bool = False,
        fresh: bool = True,
    ) -> None:
        """Call the library; the tensors stay alive in the caller's hands while it runs."""
        w, (steps, rows) = piece.w, piece.xs.shape[:2]
        arguments = {
            "T": steps,
            "B": rows,
            "I": w.W_ih.shape[1],
            "H": w.W_hh.shape[1],
            "threads": torch.get_num_threads(),
            "xi_per_row": xi_per_row,
            "fresh": fresh,
            **{name: pointer(t) for name, t in tensors.items()},
        }
        status = self.call(function, piece, arguments)
        if status == library.BAD_ID:
            raise library.out_of_range("ids", piece.xs, w.W_ih.shape[1], "inputs")
        library.check_memory(status)


@final
class Cpu(Native):
    """C++, torch's threads; `level` holds it to older processors' instructions (tests)."""

    name = "cpu"

    def __init__(self, level: int = FASTEST) -> None:
        self.level = level
        self.library, self.problem = library.find()

    def refuses(self, piece: Piece) -> str | None:
        cell, w, xs, *_ = piece
        if self.name not in cell.kernels:
            return f"it has no {cell.name} cell"
        if self.library is None:
            return self.problem or NOT_BUILT
        if not xs.is_cpu:
            return f"the input is on {xs.device}"
        if w.W_hr is not None:
            return "it has no proj_size"
        if w.W_hh.dtype not in KINDS:
            return f"the weights are {w.W_hh.dtype}; it runs float32, float64 and bfloat16"
        if w.W_hh.dtype == torch.bfloat16 and self.variant(HALF) is None:
            return "this processor has no bfloat16 products"
        return other_dtypes(piece)

    def check(self, job: Job) -> None:
        """Refuse, in words, layers that this kernel does not run or that do not fit together."""
        for piece in job.pieces():
            piece.check()
            if reason := self.refuses(piece):
                raise UserError(f"the cpu kernel does not run this: {reason}")

    def variant(self, kind: int = FLOAT) -> str | None:
        """The instruction set in use; None where there is no such kind on this processor."""
        assert self.library is not None
        name = self.library.elman_variant(kind, self.level)
        return name and name.decode()

    def is_machine_busy(self) -> bool:
        """Whether torch's threads were lately kept waiting by other programs."""
        return self.library is not None and bool(self.library.elman_is_busy())

    def kept(self, cell: Cell) -> int:
        return cell.keeps

    def call(self, function: str, piece: Piece, arguments: dict[str, Any]) -> int:
        layer = LayerArguments(cell=CELLS.index(piece.cell.name), **arguments)
        return getattr(self.library, function)(layer, KINDS[piece.w.W_hh.dtype], self.level)


def inputs_of(piece: Piece, real: torch.dtype) -> dict[str, Tensor | None]:
    """What both ways read, by the names of `LayerArguments`."""
    w, xs, lengths = piece.w, piece.xs, piece.lengths
    if w.W_hr is not None:
        raise UserError("native code has no proj_size", hint="ask a kernel what it refuses first")
    floating = xs.is_floating_point()
    return {
        "xs": plain(xs, real) if floating else None,
        "ids": None if floating else integers(xs, "ids"),
        "W_ih": plain(w.W_ih, real),
        "W_hh": plain(w.W_hh, real),
        "b_ih": plain(w.b_ih, real),
        "b_hh": plain(w.b_hh, real),
        "own": plain(w.own, real),
        **({} if piece.noise is None else {"noise": plain(piece.noise, real)}),
        "lengths": None if lengths is None else integers(lengths, "lengths"),
    }


WEIGHTS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""What weights may be stored as."""


def real_of(w: Weights) -> torch.dtype:
    """What states and sums are held in: float32 for weights in half precision."""
    return torch.float64 if w.W_hh.dtype == torch.float64 else torch.float32


def other_dtypes(piece: Piece) -> str | None:
    """float32 and float64 do not mix; beside weights in half precision float32 is welcome."""
    w, xs = piece.w, piece.xs
    weight, real = w.W_hh.dtype, real_of(w)
    if weight not in WEIGHTS:
        return f"weights of {weight}"
    for t in (*w, *piece.state, xs if xs.is_floating_point() else None):
        if t is not None and t.dtype != weight and t.dtype != real:
            return f"{t.dtype} beside weights of {weight}"
    return None


KERNEL = Cpu()
