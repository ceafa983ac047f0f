"""The CUDA kernel: a whole sequence in one launch, the recurrent matrix never leaving the SMs.

Before the loop over time, the input's share of every gate is one large matrix product (or, for a
token model, a table looked up inside the loop). After it, so are the gradients of weights, biases
and inputs. The loop itself, forward.cu and backward.cu, is compiled for the shape when first met.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from elman.cells import Cell, Gradients, State, Weights
from elman.cells.described import Described
from elman.errors import UserError
from elman.kernels import products
from elman.kernels.contract import Piece, Pull, Trace
from elman.kernels.cuda import driver, small, widths
from elman.kernels.cuda.equations import body
from elman.kernels.cuda.plan import CLUSTERS, WARPS, Machine, Plan, cheapest
from elman.kernels.cuda.stacks import Schedule, Stack, schedule
from elman.kernels.cudnn import precision

FP16, BF16, TF32, FP32 = range(4)  # as in ptx.cuh
HALF = {torch.float16: FP16, torch.bfloat16: BF16}


@final
class Cuda:
    """Persistent kernels of elman (tanh, relu, linear), gru, lstm and described cells."""

    name = "cuda"

    def compiles(self, cell: Cell) -> bool:
        """Whether its code is made of the cell's description."""
        return isinstance(cell, Described)

    def refuses(self, piece: Piece) -> str | None:
        return _refusal_of_piece(piece) or _refusal_of_device(piece)

    def width(self, piece: Piece) -> int:
        """Units that the piece is run with: its own, or a few more (widths.py).

        Rows that a compiler would leave open are as many as they are: plans are made for a number.
        """
        W_hh = piece.w.W_hh
        shape = W_hh.shape[1], W_hh.element_size(), int(piece.xs.shape[1]), W_hh.get_device()
        return width_for(piece.cell, *shape)

    def widens(self, piece: Piece) -> bool:
        """Whether the piece is run with more units than it has."""
        return self.width(piece) > piece.w.hidden_size

    def empty_gates(self, piece: Piece) -> Tensor | None:
        return _room_for_gates(piece, self.width(piece))

    def forward(self, piece: Piece, needs_gates: bool = True) -> Trace:
        piece.check()
        own, size = piece.w.hidden_size, self.width(piece)
        if size == own:
            return self._forward(piece, needs_gates, size)
        trace = self._forward(widths.widened_piece(piece, size), needs_gates, own)
        return widths.narrowed_trace(trace, own)

    def _forward(self, piece: Piece, needs_gates: bool, own: int) -> Trace:
        """The first `own` units are the layer's."""
        cell, w, xs, state, lengths, noise = piece
        steps, batch = xs.shape[:2]
        plan = _plan(cell, "forward", w, batch)
        hs, *cs = [s.new_empty(steps + 1, *s.shape) for s in state]
        gates = _room_for_gates(piece, w.hidden_size) if needs_gates else None
        with torch.cuda.device(xs.device), large_products(w.W_hh.dtype):
            inputs, ids = products.input_share(cell, w, xs)
            if own < w.hidden_size:  # where an infinite input has met a weight of 0
                inputs.unflatten(-1, (cell.gates, -1))[..., own:] = 0
            _launch(
                plan,
                batch,
                w.W_hh.contiguous(),
                inputs,
                ids,
                None if isinstance(cell, Described) else _bias_apart(cell, w),
                _integers(lengths),
                dense(state[0]),
                dense(state[1]) if cs else None,
                awaited(plan, hs),
                cs[0] if cs else None,
                gates,
                None,  # the last states are the tracks' ends
                None,
                *own_arguments(cell, w, noise),
                steps,
                batch,
            )
        return Trace(hs, cs[0] if cs else None, gates)

    def backward(
        self, piece: Piece, trace: Trace, pull: Pull
    ) -> tuple[Tensor | None, Gradients, State]:
        piece.check()
        own, size = piece.w.hidden_size, self.width(piece)
        pull.check(piece, trace, body(piece.cell).kept * size)
        if size == own:
            dxs, gradients, dstate = self._backward(piece, trace, pull)
        else:
            wide = widths.widened_trace(trace, size), widths.widened_pull(pull, size)
            dxs, gradients, dstate = self._backward(widths.widened_piece(piece, size), *wide)
            gradients = widths.narrowed(piece.cell, gradients, own)
            dstate = tuple(d[:, :own] for d in dstate)
        return dxs, products.add(pull.into, gradients), dstate

    def _backward(
        self, piece: Piece, trace: Trace, pull: Pull
    ) -> tuple[Tensor | None, Gradients, State]:
        """The same, nothing added to `into`."""
        w, xs = piece.w, piece.xs
        with torch.cuda.device(xs.device), large_products(w.W_hh.dtype):
            das, dstate, down, da_rows = _carry_back(piece, trace, pull)
            das_ih, das_hh = products.shares(piece.cell, das)
            read = None if xs.is_floating_point() else _columns(w, xs, das_ih)
            totals = products.totals(piece.cell, da_rows)
            gradients = products.weight_pulls(w, xs, trace.hs[:-1], das_ih, das_hh, read, totals)
            gradients = gradients._replace(own=None if down is None else down.sum(0))
            dxs = das_ih @ w.W_ih if pull.needs_dxs and xs.is_floating_point() else None
        return dxs, gradients, dstate


def _room_for_gates(piece: Piece, units: int) -> Tensor | None:
    width = body(piece.cell).kept * units
    return piece.state[0].new_empty(*piece.xs.shape[:2], width) if width else None


def _refusal_of_piece(piece: Piece) -> str | None:
    cell, w, xs, *_ = piece
    if Cuda.name not in cell.kernels and not isinstance(cell, Described):
        return f"it has no {cell.name} cell"
    if not xs.is_cuda:
        return f"the tensors are on {xs.device.type}, not on a CUDA GPU"
    if w.W_hr is not None:
        return "it does not project (proj_size)"
    if w.W_hh.dtype not in (*HALF, torch.float32):
        return f"{w.W_hh.dtype} is none of float16, bfloat16, float32"
    if xs.is_floating_point() and xs.dtype != w.W_hh.dtype:
        return f"inputs are {xs.dtype} but weights {w.W_hh.dtype}"
    if 0 in xs.shape[:2]:
        return "there is nothing to run"
    return None


def _refusal_of_device(piece: Piece) -> str | None:
    cell, w, xs, *_ = piece
    if torch.version.cuda is None:
        return "this torch was built for another kind of GPU"
    if torch.cuda.get_device_capability(xs.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    try:
        machine(xs.device.index or 0)
    except UserError as missing:
        return missing.message
    shape = KERNEL.width(piece), w.W_hh.element_size(), int(xs.shape[1]), xs.get_device()
    if _microseconds(cell, *shape) == math.inf:
        return f"{w.hidden_size} hidden units of {w.W_hh.dtype} do not fit the GPU's SMs"
    return None


@functools.lru_cache(maxsize=4096)
def width_for(cell: Cell, size: int, element: int, batch: int, device: int) -> int:
    """Units that such a layer is run with: more than its own where only so it fits, or sooner."""
    wider = widths.rounded(cell, size, element)
    if wider == size:
        return size
    own, wide = (_microseconds(cell, n, element, batch, device) for n in (size, wider))
    return wider if wide < WORTH * own else size


WORTH = 0.8
"""How much sooner a wider layer must be, for the copies that it takes."""


def _microseconds(cell: Cell, size: int, element: int, batch: int, device: int) -> float:
    """Of a step there and back; infinite where one of the two does not fit."""
    plans = [plan_for(cell, way, size, element, batch, device) for way in ("forward", "backward")]
    held = machine(max(device, 0))
    return sum(math.inf if p is None else p.batch_microseconds(batch, held) for p in plans)


@functools.cache
def machine(device: int) -> Machine:
    """What the GPU holds at once, asked of the driver: a share of a GPU (MIG, MPS) counts too."""
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = properties.shared_memory_per_block_optin
    if (properties.major, properties.minor) < (9, 0):
        return Machine({1: properties.multi_processor_count}, shared_bytes)
    with torch.cuda.device(device):
        probe = driver.Function(
            driver.compiled("probe.cu", {}, _architecture()), "probe", shared_bytes
        )
        held = {c: probe.active_clusters(c, 32 * WARPS) for c in CLUSTERS if c > 1}
    hopper = (properties.major, properties.minor) == (9, 0)
    return Machine({1: properties.multi_processor_count, **held}, shared_bytes, hopper)


def _architecture() -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def _plan(cell: Cell, direction: str, w: Weights, batch: int) -> Plan | None:
    W_hh = w.W_hh
    size, element = W_hh.shape[1], W_hh.element_size()
    return plan_for(cell, direction, size, element, batch, W_hh.get_device())


@functools.lru_cache(maxsize=4096)
def plan_for(
    cell: Cell, direction: str, size: int, element: int, batch: int, device: int
) -> Plan | None:
    """How one direction of such a layer is spread over this GPU; None where it does not fit."""
    return cheapest(cell, direction, size, element, batch, machine(max(device, 0)))


def schedule_for(
    cell: Cell, direction: str, w: Weights, batch: int, layers: int, steps: int
) -> Schedule | None:
    """How the layers of a stack run beside each other; None where one runs after the other."""
    W_hh, held = w.W_hh, machine(max(w.W_hh.get_device(), 0))
    size, element = W_hh.shape[1], W_hh.element_size()
    return schedule(Stack(cell, size, element, batch, layers, steps, held), direction)


def compiled(plan: Plan, dtype: int) -> bytes:
    """The machine code of a plan for the current device."""
    more = {"own.cuh": text} if (text := body(plan.cell).header) else {}
    architecture = (
        _architecture() + "a" * plan.hopper
    )  # what hopper.cuh is made of is Hopper's alone
    return driver.compiled(f"{plan.direction}.cu", plan.defines(dtype), architecture, more)


@functools.lru_cache(maxsize=1024)
def prepared(plan: Plan, dtype: int, batch: int, device: int, arguments: int) -> driver.Launches:
    function = driver.Function(compiled(plan, dtype), plan.direction, plan.shared_bytes)

    def part(blocks: int) -> driver.Launch:
        shape = blocks, plan.neighbours, plan.threads, plan.shared_bytes
        config = driver.configuration(*shape, cooperative=plan.far)
        if not (plan.paired or plan.crowded):
            return driver.Launch(function, config, arguments + 1)
        track, more = (7, 1) if plan.forward else (11, 0)  # h of steps 0 to T, or da of 1 to T
        columns = plan.size * (1 if plan.forward else plan.cell.gates + len(plan.cell.apart))
        sizes = track, columns, more, plan.rows
        return driver.MappedLaunch(function, config, arguments + 1, *sizes)

    return driver.Launches([(blocks[0], part(len(blocks))) for blocks in plan.launches(batch)])


def _launch(plan: Plan | None, batch: int, W_hh: Tensor, *arguments: Tensor | int | None) -> None:
    """Queue the kernel."""
    assert plan is not None, "refuses() lets only jobs with a plan pass"
    device = W_hh.device.index
    launch = prepared(plan, arithmetic(W_hh.dtype), batch, device, len(arguments) + 1)
    values = [0 if a is None else a if isinstance(a, int) else a.data_ptr() for a in arguments]
    launch(torch._C._cuda_getCurrentRawStream(device), [W_hh.data_ptr(), *values])


EMPTY = -1
"""Of a far group's numbers, as int32: not stored yet (ptx.cuh)."""


def awaited(plan: Plan | None, track: Tensor) -> Tensor:
    """`track`, h or da of all steps, as the kernel has to find it: far.cuh waits for its values."""
    if plan is not None and plan.far and (plan.crowded or not plan.spread):
        track.view(torch.int32).fill_(EMPTY)
    return track


def shares_of(plan: Plan | None, batch: int, like: Tensor) -> Tensor | None:
    """Where the blocks of a backward pass meet (spread.cuh), nothing there yet."""
    if plan is None or not plan.spread:
        return None
    return like.new_zeros(plan.share_words(batch), dtype=torch.int32)


def rows_of_da(plan: Plan | None, batch: int, like: Tensor) -> Tensor | None:
    """Where the loop puts each row's sum of da over time; None where it has none."""
    if plan is None or not plan.sums_da:
        return None
    return like.new_empty((batch, like.shape[-1]), dtype=torch.float32)


def dense(x: Tensor) -> Tensor:
    """Without gaps, and at an address that 16 bytes at once can be read from."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _integers(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.int64).contiguous()


def _bias_apart(cell: Cell, w: Weights) -> Tensor | None:
    """b_hh of the gates that do not add it to b_ih: a gru's n."""
    if not cell.apart or w.b_hh is None:
        return None
    rows = [w.b_hh[g * w.hidden_size : (g + 1) * w.hidden_size] for g in cell.apart]
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).float()


def own_arguments(cell: Cell, w: Weights, noise: Tensor | None) -> list[Tensor | None]:
    """What a described cell is given besides: numbers of its units, and those that were drawn."""
    if not isinstance(cell, Described):
        return []
    apart = _bias_apart(cell, w)
    if apart is None and cell.apart:
        apart = w.W_hh.new_zeros(len(cell.apart) * w.hidden_size, dtype=torch.float32)
    parts = [
        p for p in (None if w.own is None else w.own.float().flatten(), apart) if p is not None
    ]
    numbers = torch.cat(parts) if len(parts) > 1 else dense(parts[0]) if parts else None
    return [numbers, None if noise is None else dense(noise.to(w.W_hh.dtype))]


def _carry_back(
    piece: Piece, trace: Trace, pull: Pull
) -> tuple[Tensor, State, Tensor | None, Tensor | None]:
    """da (T, B, blocks · hidden); in float32 the pulls on the state before, on rows of `own`.

    And each row's sum of da over time, where the plan has one.
    """
    cell, w, xs, _, lengths, noise = piece
    dhs, dstate, xi = pull.dhs, pull.dstate, pull.xi
    steps, batch = xs.shape[:2]
    blocks = cell.gates + len(cell.apart)
    plan = _plan(cell, "backward", w, batch)
    das = trace.hs.new_empty(steps, batch, blocks * w.hidden_size)
    dh = trace.hs.new_empty(trace.hs.shape[1:], dtype=torch.float32)
    cs = trace.cs
    dc = None if cs is None else cs.new_empty(cs.shape[1:], dtype=torch.float32)
    down = None if w.own is None else dh.new_empty(batch, *w.own.shape)
    own = own_arguments(cell, w, noise)
    da_rows = rows_of_da(plan, batch, das)
    weights = None if xi is None else xi.float()
    _launch(
        plan,
        batch,
        w.W_hh.contiguous(),
        trace.hs.contiguous(),
        None if cs is None else cs.contiguous(),
        None if trace.gates is None else trace.gates.contiguous(),
        None if dhs is None else dense(dhs.to(das.dtype)),
        dense(dstate[0].float()),
        None if cs is None else dense(dstate[1].float()),
        weights,
        0 if weights is None else weights.stride(0),
        0 if weights is None or weights.dim() == 1 else weights.stride(1),
        _integers(lengths),
        awaited(plan, das),
        dh,
        dc,
        *([*own, down] if own else []),
        *([] if da_rows is None else [da_rows]),
        shares_of(plan, batch, das),
        steps,
        batch,
    )
    return das, (dh,) if dc is None else (dh, dc), down, da_rows


def _columns(w: Weights, ids: Tensor, das: Tensor) -> tuple[Tensor, Tensor] | None:
    """The gradients of W_ih and b_ih of a layer that reads tokens, where few of them were read."""
    rows, vocabulary = das.flatten(0, 1), w.W_ih.shape[1]
    return small.columns(rows, ids.to(torch.int64).contiguous(), vocabulary)


def arithmetic(dtype: torch.dtype) -> int:
    """What a dtype is multiplied in; float32 by torch's switch for recurrent layers, as cuDNN."""
    return HALF[dtype] if dtype in HALF else TF32 if precision() == "tf32" else FP32


def large_products(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    """Large products of a float32 layer as its loop: the switch of RNNs covers both."""
    return contextlib.nullcontext() if dtype in HALF else _switched()


def as_switched(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A block for products that torch's switch decides about, as the user has set it.

    It is one switch for all threads: while a float32 layer of another thread has its large products
    queued, it stands otherwise. Blocks may lie in each other.
    """
    wide = x.is_cuda and x.dtype == torch.float32
    return _ONE_SWITCH if wide and not torch.compiler.is_compiling() else contextlib.nullcontext()


_ONE_SWITCH = threading.RLock()
"""Held by the thread that has torch's switch for products set otherwise, or must not have it so."""


@contextlib.contextmanager
def _switched() -> Iterator[None]:
    """`torch.backends.cuda.matmul.fp32_precision`, torch's switch for products, as that of RNNs."""
    with _ONE_SWITCH:  # and not acquire, after which an interrupt would leave it held
        before = torch._C._get_fp32_precision_getter("cuda", "matmul")
        wanted = "tf32" if precision() == "tf32" else "ieee"
        if before == wanted:
            yield
            return
        torch._C._set_fp32_precision_setter("cuda", "matmul", wanted)
        try:
            yield
        finally:
            torch._C._set_fp32_precision_setter("cuda", "matmul", before)


KERNEL = Cuda()
