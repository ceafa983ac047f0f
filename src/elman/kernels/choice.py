"""Which kernel runs: the fastest that does not refuse, or the one that ELMAN_KERNELS names.

Of `cuda` and `cudnn` the cheaper runs, by prices that were measured once (`prices`): which one that
is depends on shapes, types and torch's settings alone, so it is found once for each and kept.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from elman.cells import State
from elman.errors import UserError
from elman.kernels import prices
from elman.kernels.aten import Aten
from elman.kernels.contract import Job, Kernel
from elman.kernels.cudnn import Cudnn, precision
from elman.kernels.torchs import Torchs, Whole

SURELY = 0.95
"""Our CUDA kernel is preferred where it is cheaper than cuDNN by more than prices are off."""

FASTEST_FIRST = ("cuda", "cudnn", "cpu", "described", "aten", "fused", "reference")
WHOLE = (Cudnn.name, Aten.name)
"""Those that take whole stacks: torch's own."""


@dataclass(frozen=True)
class Explanation:
    """Which kernel runs a job, and why each faster one does not."""

    runs: str
    reasons: dict[str, str]
    time: str = ""
    """How chunks of time run, where a module was asked for them."""
    compiled_from: str = ""
    """The cell whose description the kernel was compiled from, where it was."""
    repeated: str = ""
    """What becomes of calls that are repeated, on a GPU."""

    def __str__(self) -> str:
        refusals = [f"{name}: no, {reason}" for name, reason in self.reasons.items()]
        made = f"compiled from {self.compiled_from}" if self.compiled_from else ""
        more = "; ".join(words for words in (made, self.repeated) if words)
        time = [f"time: {self.time}"] if self.time else []
        return "\n".join([*refusals, f"{self.runs}: runs" + (f" ({more})" if more else ""), *time])


def select(job: Job) -> Kernel:
    """The fastest kernel that takes the job, or the one ELMAN_KERNELS names."""
    kernel, _ = _choose(job)
    return cast(Kernel, kernel)  # torch's own refuse jobs that are not handed over whole


_CHOSEN: dict[Hashable, str] = {}


def select_once(key: Hashable, job: Callable[[], Job]) -> Kernel:
    """As `select`, for all jobs of this key: shapes, types and device of their tensors."""
    return cast(Kernel, _load(_once((key, requested()), job)))


def runs_whole(whole: Whole, device: torch.device, job: Callable[[], Job]) -> bool:
    """Whether torch's own layers run this stack; `job` is asked for where that is not settled."""
    return _once((whole, device, settings(whole.dtype)), job) in WHOLE


def settings(dtype: torch.dtype) -> tuple[Hashable, ...]:
    """What else a choice depends on: the environment and torch's switches."""
    float32 = precision() if dtype is torch.float32 else None
    asked = _ENVIRONMENT.get
    return asked(_NAMED), asked(_CAPTURE), torch._C._get_cudnn_enabled(), float32


def named_kernel() -> Hashable:
    """The part of it that a CPU knows: which kernel is asked for, as the environment has it."""
    return _ENVIRONMENT.get(_NAMED)


_ENVIRONMENT = os.environ._data  # pyright: ignore[reportAttributeAccessIssue]
_NAMED, _CAPTURE = map(os.environ.encodekey, ("ELMAN_KERNELS", "ELMAN_CAPTURE"))  # pyright: ignore[reportAttributeAccessIssue]
"""`os.environ.get` takes ten times as long, and this is asked at every call."""


def _once(key: Hashable, job: Callable[[], Job]) -> str:
    name = _CHOSEN.get(key)
    if name is None:
        if len(_CHOSEN) > 10_000:  # sequences of every length
            _CHOSEN.clear()
        name = _CHOSEN[key] = _choose(job())[0].name
    return name


def explain(
    runner: Any,
    x: Tensor | PackedSequence | None = None,
    state: Tensor | State | None = None,
) -> Explanation:
    """Which kernel runs `module(x)`, and why not the faster ones.

    Anything else that can say how it runs does so itself: `explain(training)` is
    `training.explain()`.
    """
    job, own = getattr(runner, "job", None), getattr(runner, "explain", None)
    if job is None and own is not None:
        return own()
    if job is None or x is None:
        raise UserError(
            f"explain() was given a {type(runner).__name__}"
            + (", which runs on no elman kernel" if job is None else " without an input"),
            hint="explain(module, x) of a module of elman.nn, or explain(training)",
        )
    asked: Job = job(x, state)
    kernel, reasons = _choose(asked)
    time = "" if asked.time is None else asked.time(cast(Kernel, kernel))
    compiles = getattr(kernel, "compiles", None)
    made = asked.cell.name if compiles is not None and compiles(asked.cell) else ""
    again = "" if asked.again is None else asked.again(kernel.name)
    return Explanation(kernel.name, reasons, time, made, again)


@contextmanager
def using(name: str | None) -> Iterator[None]:
    """Let the kernel of this name, or `auto`, run what the block computes; None changes nothing.

    As ELMAN_KERNELS does for a whole program: for all threads, and nothing is substituted.
    """
    with _environment("ELMAN_KERNELS", name):
        requested()  # refuses a name that is no kernel's
        yield


@contextmanager
def capturing(on: bool) -> Iterator[None]:
    """Let calls that are repeated on a GPU be captured, or not, in this block.

    As ELMAN_CAPTURE (`auto` or `off`) does for a whole program: for all threads.
    """
    with _environment("ELMAN_CAPTURE", "auto" if on else "off"):
        yield


@contextmanager
def _environment(variable: str, value: str | None) -> Iterator[None]:
    """Another value inside the block; None changes nothing."""
    before = os.environ.get(variable)
    if value is not None:
        os.environ[variable] = value
    try:
        yield
    finally:
        if before is not None:
            os.environ[variable] = before
        elif value is not None:
            del os.environ[variable]


def captures() -> bool:
    """Whether repeated calls may be captured: what ELMAN_CAPTURE says."""
    value = os.environ.get("ELMAN_CAPTURE", "auto")
    if value not in ("auto", "off"):
        raise UserError(
            f"ELMAN_CAPTURE={value} is neither auto nor off", hint="ELMAN_CAPTURE=auto, or unset it"
        )
    return value == "auto"


def requested() -> str:
    """What ELMAN_KERNELS names: `auto` or a kernel."""
    name = os.environ.get("ELMAN_KERNELS") or "auto"
    if name != "auto" and name not in FASTEST_FIRST:
        raise UserError(
            f"ELMAN_KERNELS={name} names no kernel", hint=f"choose auto, {', '.join(FASTEST_FIRST)}"
        )
    return name


def allows(name: str) -> bool:
    """Whether this kernel may run: also asked by what is not a recurrence (output, clipping)."""
    return named_kernel() is None or requested() in ("auto", name)


def _choose(job: Job) -> tuple[Kernel | Torchs, dict[str, str]]:
    """The kernel that runs, and the reason of every one asked before it."""
    kernel, reasons = _first_that_runs(job)
    if kernel is None:
        asked = requested()
        raise UserError(
            f"ELMAN_KERNELS={asked}: this kernel cannot run here, {reasons[asked]}",
            hint="ELMAN_KERNELS=auto takes the fastest that can",
        )
    return kernel, reasons


def _first_that_runs(job: Job) -> tuple[Kernel | Torchs | None, dict[str, str]]:
    """The same; None where one was asked for that cannot."""
    reasons: dict[str, str] = {}
    asked = requested()
    for name in FASTEST_FIRST if asked == "auto" else (asked,):
        kernel = _load(name)
        reason = "it is not part of this installation" if kernel is None else _refusal(kernel, job)
        if name == "cuda" and asked == "auto" and reason is None:
            reason = _dearer(job)
        if name == "cpu" and asked == "auto" and reason is None:
            reason = _dearer_on_a_cpu(job)
        if kernel is not None and reason is None:
            return kernel, reasons
        reasons[name] = str(reason)
    return None, reasons


def _refusal(kernel: Kernel | Torchs, job: Job) -> str | None:
    if isinstance(kernel, Torchs):
        if job.whole is None:
            return "it runs whole stacks only, and here single layers or pieces are asked for"
        return kernel.refuses(job.whole, job.inputs[0].device)
    if job.inputs[0].shape[1] == 0 and kernel.name != "reference":
        return "the batch is empty"  # so that no other kernel need think of it
    for piece in job.pieces():
        if reason := kernel.refuses(piece):
            return reason
    return None


def _dearer(job: Job) -> str | None:
    """Why cuDNN is to run what our CUDA kernel could; None where ours is the faster."""
    whole = job.whole
    if whole is None or _refusal(_cudnn(), job):
        return None
    device = job.inputs[0].device
    ours, theirs = (_repeated_price(engine, whole, device) for engine in ("cuda", "cudnn"))
    now, then = (prices.microseconds(engine, _shape(whole)) for engine in ("cuda", "cudnn"))
    if not _decides(ours, theirs, now, then):
        ours, theirs = now, then
    if theirs is None or (ours is not None and ours <= SURELY * theirs):
        return None
    if ours is None:
        return "no layer like this one was ever timed, so cuDNN is preferred"
    return f"cuDNN is faster at this size ({theirs:,.0f} µs against {ours:,.0f} on an H200)"


def _dearer_on_a_cpu(job: Job) -> str | None:
    """Why torch's own layers are to run what our native kernel could; None where ours is faster."""
    aten = cast(Aten, _load(Aten.name))
    if job.whole is None or _refusal(aten, job) or not aten.is_faster(job.whole):
        return None
    return f"torch's own layers are faster at this size in {job.whole.dtype}"


def _decides(
    ours: float | None, theirs: float | None, now: float | None, then: float | None
) -> bool:
    """Whether what captured calls cost is to choose, and not what the first ones do."""
    if ours is None or theirs is None or now is None or then is None:
        return False
    apart = min(ours, theirs) <= SURELY * max(ours, theirs)
    return apart and now <= PATIENT * then


PATIENT = 1.3
"""How much dearer than cuDNN our kernel may be before its calls are captured."""


def _repeated_price(engine: str, whole: Whole, device: torch.device) -> float | None:
    """Of a call that has been captured, where calls are; whether they may be now is not asked."""
    shape = _shape(whole)
    gpu = prices.gpu_microseconds(engine, shape)
    never = shape.captured or shape.dropout or shape.packed or whole.pieces > 1
    if gpu is None or never or uncaptured(engine, whole, device) is not None:
        return prices.microseconds(engine, shape)
    return max(prices.LAUNCHED["both" if whole.keeps else "forward"], gpu)


def is_sooner(wide: Job, narrow: Job) -> bool:
    """Whether float32 runs sooner than autocast's dtype, for which all weights are cast anew.

    Weights that stay where they are can be captured, so that small jobs are a launch; large ones
    gain more by narrower products. Where both would wait for the launches of single steps, by
    prices, the GPU's own part decides: it may be longer than at the sizes that were measured.
    """
    full, cast = wide.whole, narrow.whole
    if full is None or cast is None or cast.network.mode is None or cast.apart or cast.pieces > 1:
        return False  # calls that are not captured
    kernels = [_first_that_runs(job)[0] for job in (wide, narrow)]
    engines = [kernel.name for kernel in kernels if kernel is not None]
    if len(engines) < 2:  # one was asked for by name that can run only the other, or neither
        return kernels[0] is not None
    if not {*engines} <= {"cuda", Cudnn.name}:
        return False
    states, what = len(narrow.cell.states), "both" if cast.keeps else "forward"
    tensors = 1 + states + len(narrow.layers) * len([w for w in narrow.layers[0] if w is not None])
    device = wide.inputs[0].device
    as_is = _repeated_price(engines[0], full, device)
    when_cast = prices.cast_microseconds(engines[1], _shape(cast), tensors)
    if as_is is None or when_cast is None:
        return False
    if as_is + (1 + states) * prices.CASTS[what] > when_cast:
        return False
    shape = _shape(full)
    alone = engines[0] == Cudnn.name and prices.is_alone(shape)
    if alone or engines[1] != Cudnn.name or uncaptured(engines[0], full, device) is None:
        return True
    gpu = prices.gpu_microseconds(engines[0], shape) or 0.0
    return gpu < (prices.gpu_microseconds(engines[1], _shape(cast)) or 0.0)


def uncaptured(kernel: str, whole: Whole, device: torch.device) -> str | None:
    """Why nothing is gained by capturing a call on this kernel; None where something is."""
    return _uncaptured(kernel, whole, device, precision())


@functools.lru_cache(maxsize=4096)
def _uncaptured(kernel: str, whole: Whole, device: torch.device, _: str) -> str | None:
    """The same, found once for each precision of torch's: `_shape` asks for it."""
    net = whole.network
    strands = net.layers * net.directions
    width = net.inputs + (2 + 2 * GATES.get(net.mode or "", 4)) * net.hidden * strands
    size = whole.steps * whole.rows * width * whole.dtype.itemsize
    if size > largest(device):
        return f"a recording would take {size / 2**20:,.0f} MiB"
    if net.mode is None:
        long = whole.steps * strands > MANY
        return f"{whole.steps} steps take the GPU longer than Python" if long else None
    shape = _shape(whole)
    gpu, host = prices.gpu_microseconds(kernel, shape), prices.host_microseconds(kernel, shape)
    if kernel == Cudnn.name and not prices.is_alone(shape) and whole.steps * strands > MANY:
        return f"{whole.steps} steps are too many launches for one graph"
    if gpu is None or gpu > BUSY * host:
        return f"the GPU takes longer than Python ({gpu or 0:,.0f} µs against {host:,.0f})"
    return None


@functools.cache
def largest(device: torch.device) -> int:
    """Bytes of one recording at most."""
    if device.type != "cuda":
        return LARGEST
    return max(LARGEST, torch.cuda.get_device_properties(device).total_memory // OF_MEMORY)


GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 3}
LARGEST, OF_MEMORY = 2**26, 1024
"""Bytes of one recording at most, or this part of the GPU's memory where that is more."""
MANY, BUSY = 512, 2.0
"""Steps launched one by one; how much longer than Python the GPU may take."""


def arithmetic_name(dtype: torch.dtype) -> str:
    """What a dtype is multiplied in, as `prices` knows it."""
    half = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    return half.get(dtype) or ("tf32" if precision() == "tf32" else "fp32")


def _shape(whole: Whole) -> prices.Shape:
    net = whole.network
    return prices.Shape(
        "tanh" if net.mode in ("RNN_TANH", "RNN_RELU") else str(net.mode).lower(),
        arithmetic_name(whole.dtype),
        net.hidden,
        max(whole.rows, 1),  # a batch may be empty
        whole.steps,
        net.layers,
        net.directions,
        whole.keeps,
        whole.pieces,
        whole.ids and not (whole.packed or whole.dropout),  # a language model's update is a graph
        whole.packed,
        whole.dropout > 0,
        net.inputs,
    )


def _cudnn() -> Cudnn:
    return cast(Cudnn, _load(Cudnn.name))


@functools.cache
def _load(name: str) -> Kernel | Torchs | None:
    """The kernel in `elman.kernels.NAME`; None where that part was not built."""
    home = f"elman.kernels.{name}"
    try:
        return importlib.import_module(home).KERNEL
    except ModuleNotFoundError as missing:
        if missing.name != home:
            raise
        return None
