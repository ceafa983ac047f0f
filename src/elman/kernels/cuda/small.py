"""The small kernels of update.cu: what an update or a draw does beside its recurrence.

A small model's update is a chain of some fifty kernels of torch's that take two microseconds each
whatever they do. These do the work of thirty of them in five.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from elman.errors import UserError
from elman.kernels.cuda import driver

ELEMENTS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}  # as update.cu has them
THREADS, WARPS = 256, 8
MOST_THREADS = 1024  # of `running`
MOST_ARRAYS, CHUNK = 64, 1024  # of `judge` and `take_in`
MANY_TOKENS = 2048  # of which a warp would read a row for too long
FEW_ROWS, FEW_TOKENS = 8192, 256  # beyond which matrix products are faster than `columns`


def available(t: Tensor) -> bool:
    """Whether these kernels run on the tensor's GPU, and read its type."""
    return t.is_cuda and t.dtype in ELEMENTS and _can_compile(t.device.index)


@functools.cache
def _can_compile(device: int) -> bool:
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        driver._nvrtc()
    except UserError:
        return False
    return True


@functools.lru_cache(maxsize=256)
def _launch(
    name: str,
    element: int,
    device: int,
    blocks: int,
    arguments: int,
    threads: int = THREADS,
    shared_bytes: int = 0,
    first: int = 1,
) -> driver.Launch:
    with torch.cuda.device(device):
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
        cubin = driver.compiled("update.cu", {"ELEMENT": element}, architecture)
        function = driver.Function(cubin, name, shared_bytes)
    config = driver.configuration(blocks, 1, threads, shared_bytes)
    return driver.Launch(function, config, arguments, first)


def _queue(launch: driver.Launch, device: int, *arguments: Tensor | int) -> None:
    words = [a if isinstance(a, int) else a.data_ptr() for a in arguments]
    with torch.cuda.device(device):
        launch(torch._C._cuda_getCurrentRawStream(device), words)


class Nats(NamedTuple):
    """What `nats` found: the mean and how many rows count; log Σ exp of every row."""

    out: Tensor  # (2,)
    lse: Tensor  # (rows,)


def nats(logits: Tensor, targets: Tensor) -> Nats:
    """-log softmax(o)[y], the mean over the rows of logits (T · B, V) with targets (T, B)."""
    rows, vocabulary = logits.shape
    each = 1 if vocabulary > MANY_TOKENS else WARPS  # rows of a block at a time
    device, blocks = logits.device.index, max(1, min(2048 // each, -(-rows // each)))
    lse = torch.empty(rows + 2, dtype=torch.float32, device=logits.device)
    room = torch.zeros(2 * blocks + 1, dtype=torch.float64, device=logits.device)
    _queue(
        _launch("nats", ELEMENTS[logits.dtype], device, blocks, 12),
        device,
        logits,
        targets,
        *targets.stride(),
        lse,
        room,
        room.data_ptr() + 16 * blocks,  # how many blocks have arrived
        lse.data_ptr() + 4 * rows,
        rows,
        targets.shape[1],
        vocabulary,
        each,
    )
    return Nats(lse[rows:], lse)


def nats_back(logits: Tensor, targets: Tensor, found: Nats, pull: Tensor) -> Tensor:
    """The pull on the logits, from that on the mean: (softmax(o) - one-hot(y)) · pull / count."""
    rows, vocabulary = logits.shape
    device, blocks = logits.device.index, max(1, min(1024, -(-rows * vocabulary // THREADS)))
    d = torch.empty_like(logits)
    _queue(
        _launch("nats_back", ELEMENTS[logits.dtype], device, blocks, 11),
        device,
        logits,
        targets,
        *targets.stride(),
        found.lse,
        found.out,
        pull,
        d,
        rows,
        targets.shape[1],
        vocabulary,
    )
    return d


def columns(das: Tensor, ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor] | None:
    """dW (width, vocabulary) and db (width,) in float32, from da (rows, width) and the rows' ids.

    None where large products do it faster.
    """
    if not sums_tokens(das, len(das), vocabulary):
        return None
    dW = torch.empty((das.shape[1], vocabulary), dtype=torch.float32, device=das.device)
    db = torch.empty(das.shape[1], dtype=torch.float32, device=das.device)
    _sum_tokens(das, ids, dW, db, vocabulary, by_token=False)
    return dW, db


def rows_of_tokens(das: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """The same sums as rows (vocabulary, width): the gradient of embeddings."""
    dE = torch.empty((vocabulary, das.shape[1]), dtype=torch.float32, device=das.device)
    _sum_tokens(das, ids, dE, None, vocabulary, by_token=True)
    return dE


def sums_tokens(das: Tensor, rows: int, vocabulary: int) -> bool:
    """Whether both of these take so many rows of `das`, or of what is like it."""
    few = rows <= FEW_ROWS and vocabulary <= FEW_TOKENS
    return few and available(das) and das.stride(-1) == 1


def _sum_tokens(
    das: Tensor, ids: Tensor, dW: Tensor, db: Tensor | None, vocabulary: int, by_token: bool
) -> None:
    rows, width = das.shape
    table, device = 128 * vocabulary, das.device.index
    shared_bytes = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    warps = max(1, min(32, shared_bytes // table))
    blocks, element = -(-width // 32), ELEMENTS[das.dtype]
    launch = _launch("columns", element, device, blocks, 9, 32 * warps, warps * table)
    arrays = das, das.stride(0), ids, dW, 0 if db is None else db
    _queue(launch, device, *arrays, rows, width, vocabulary, int(by_token))


def _chunks(sizes: Sequence[int]) -> int:
    """What blocks of threads have to do, in pieces of equal size."""
    return sum(-(-size // CHUNK) for size in sizes)


def take_in(
    averages: Sequence[Tensor], weights: Sequence[Tensor], share: Tensor, broken: Tensor
) -> None:
    """a ← a + s (w - a) of every array, to the bits of torch's `lerp_`; none where `broken`."""
    sizes, none = [w.numel() for w in weights], [0] * (MOST_ARRAYS - len(weights))
    device, blocks = share.device.index, max(1, min(8 * 132, _chunks(sizes)))
    launch = _launch("take_in", 2, device, blocks, 4, first=3 * MOST_ARRAYS)
    arrays = (*weights, *none, *sizes, *none, *averages, *none)
    _queue(launch, device, *arrays, len(sizes), share, broken)


def running(x: Tensor) -> Tensor:
    """Σ of every row of x (rows, size), in float64, up to each place.

    The same bits at every call, which torch's `cumsum` does not promise on a GPU.
    """
    if not (x.is_cuda and _can_compile(x.device.index)):
        return x.cumsum(-1)
    sums, device = torch.empty_like(x), x.device.index
    launch = _launch("running", 2, device, len(x), 3, MOST_THREADS)
    _queue(launch, device, x, sums, x.shape[1])
    return sums


@final
class Judge:
    """‖g‖ over all gradients, and what follows from it, in one kernel.

    `scale` is what g is to be divided by and `refuse` 1 where no step may be taken: when nats or
    norm are not finite, and from then on until `forgive`. Both numbers go to a place of their own
    in `told`, memory of the host, `places` updates in turn.
    """

    def __init__(self, device: torch.device, clip: float | None, places: int) -> None:
        self.device, self.clip, self.places = device, clip or 0.0, places
        self.verdict = torch.zeros(5, dtype=torch.float32, device=device)
        self.scale, self.refuse = self.verdict[0], self.verdict[1]
        self.broken = torch.zeros((), dtype=torch.bool, device=device)
        self.partials = torch.empty(132, dtype=torch.float64, device=device)
        self.told = torch.zeros(places, 2, dtype=torch.float32, pin_memory=True)
        self.numbers = self.told.numpy()  # the same memory, read in a tenth of the time

    @staticmethod
    def takes(weights: Sequence[Tensor]) -> bool:
        """Whether it can look at the gradients of these weights."""
        plain = all(w.dtype == torch.float32 and available(w) for w in weights)
        return plain and 0 < len(weights) <= MOST_ARRAYS

    def __call__(self, gradients: Sequence[Tensor], loss: Tensor) -> None:
        """Queue the kernel."""
        gradients = [g.contiguous() for g in gradients]
        sizes, none = [g.numel() for g in gradients], [0] * (MOST_ARRAYS - len(gradients))
        device, blocks = self.device.index, max(1, min(132, _chunks(sizes)))
        launch = _launch("judge", 2, device, blocks, 9, first=2 * MOST_ARRAYS)
        _queue(
            launch,
            device,
            *gradients,
            *none,
            *sizes,
            *none,
            len(sizes),
            loss,
            struct.unpack("<I", struct.pack("<f", self.clip))[0],
            self.partials,
            self.verdict,
            self.broken,
            self.told,
            self.places,
        )

    def forgive(self) -> None:
        """Let the next update step again."""
        self.verdict[2] = 0
        self.broken.zero_()
