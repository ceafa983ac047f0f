"""The output layer and its loss in one native call: see `elman.language_model.loss`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from elman.kernels import choice
from elman.kernels.contract import Expected, require
from elman.kernels.cpu import library
from elman.kernels.cpu.library import CPU, HALF, KINDS, HeadArguments, integers, plain, pointer
from elman.kernels.cpu.recurrence import Cpu


def runs(kernel: Cpu, hs: Tensor, W_hq: Tensor, b_q: Tensor | None) -> bool:
    """Whether the output layer runs here, by its types, devices and ELMAN_KERNELS.

    bfloat16 states and float32 weights meet under autocast: multiplied as bfloat16 pairs.
    """
    if kernel.library is None or not hs.is_cpu or not choice.allows(kernel.name):
        return False
    half = hs.dtype == torch.bfloat16
    real = torch.float32 if half else hs.dtype
    known = real == torch.float32 or real == torch.float64
    same = W_hq.dtype == real and (b_q is None or b_q.dtype == real)
    return known and same and (not half or kernel.variant(HALF) is not None)


def mean_nats(
    kernel: Cpu,
    hs: Tensor,
    W_hq: Tensor,
    b_q: Tensor | None,
    targets: Tensor,
    needs: tuple[bool, bool] = (False, False),
) -> tuple[Tensor, list[Tensor | None]]:
    """The mean nats, and their pulls on hs (if the first is needed), W_hq and b_q."""
    real = W_hq.dtype
    dhs = torch.empty(hs.shape, dtype=real, device=CPU) if needs[0] else None
    dW_hq = torch.empty(W_hq.shape, dtype=real, device=CPU) if needs[1] else None
    db_q = torch.empty(b_q.shape, dtype=real, device=CPU) if needs[1] and b_q is not None else None
    mean = _call(kernel, hs, W_hq, b_q, targets, dhs=dhs, dW=dW_hq, db=db_q)
    return mean, [None if dhs is None else dhs.to(hs.dtype), dW_hq, db_q]


def each_nats(kernel: Cpu, hs: Tensor, W_hq: Tensor, b_q: Tensor | None, targets: Tensor) -> Tensor:
    """The nats of every target, in its shape."""
    each = torch.empty(targets.shape, dtype=W_hq.dtype, device=CPU)
    _call(kernel, hs, W_hq, b_q, targets, each=each)
    return each


def _call(
    kernel: Cpu,
    hs: Tensor,
    W_hq: Tensor,
    b_q: Tensor | None,
    targets: Tensor,
    **results: Tensor | None,
) -> Tensor:
    """The mean nats; `results`, by their names in `struct Head`, are written too."""
    assert kernel.library is not None
    require(expected(hs, W_hq, b_q, targets), hs.device)
    real = W_hq.dtype
    nats = torch.empty((), dtype=real, device=CPU)
    states, W, b = plain(hs, real), plain(W_hq, real), plain(b_q, real)
    ids = integers(targets, "targets")
    arguments = HeadArguments(
        **sizes(targets.numel(), W_hq),
        hs=pointer(states),
        W=pointer(W),
        b=pointer(b),
        targets=pointer(ids),
        nats=pointer(nats),
        **{name: pointer(result) for name, result in results.items()},
    )
    status = kernel.library.elman_head(arguments, KINDS[hs.dtype], kernel.level)
    if status == library.BAD_TARGET:
        raise library.out_of_range("targets", targets, len(W_hq), "outputs")
    library.check_memory(status)
    return nats


def expected(
    hs: Tensor, W_hq: Tensor, b_q: Tensor | None, targets: Tensor | None = None
) -> Iterator[Expected]:
    """The shapes that an output layer's tensors must have."""
    outputs = W_hq.shape[0] if W_hq.dim() else 0
    yield "the output weight", W_hq, (outputs, hs.shape[-1])
    yield "the output bias", b_q, (outputs,)
    yield "targets", targets, tuple(hs.shape[:-1])


def sizes(rows: int, W_hq: Tensor) -> dict[str, int]:
    """The sizes of a `HeadArguments` for so many rows of time and batch."""
    batch = _batch(rows)
    outputs, hidden = W_hq.shape
    threads = torch.get_num_threads()
    return {"T": rows // batch, "B": batch, "H": hidden, "V": outputs, "threads": threads}


@functools.cache
def _batch(rows: int) -> int:
    """Rows that are summed together before they are added to the others: a divisor near 64."""
    return next(b for b in range(min(rows, 64), 0, -1) if rows % b == 0)
