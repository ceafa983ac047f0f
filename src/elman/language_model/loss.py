"""The output layer and its loss in one pass: logits never leave the cache before they are used.

    o_t = h_t W_hqᵀ + b_q,   loss = mean_t of -log softmax(o_t)[target_t]
    do_t = softmax(o_t) - one-hot(target_t)          (the notes' ŷ - 1)

On a CPU in float32 or float64 this is native code, and under autocast where the states are already
bfloat16; on a GPU the loss and its gradient are one kernel each. Elsewhere, and where torch
compiles, traces or sees every operation, it is `torch.nn.functional`'s `linear` and
`cross_entropy`: the same numbers to rounding.

The logits of a window are batch × window × vocabulary numbers. Where those are many (`LARGE`), and
in native code always, they are made a piece at a time, turned into ŷ - 1 in place, multiplied into
both gradients and forgotten, on any device: memory holds one piece, whatever the batch, the window
and the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from elman.errors import UserError
from elman.kernels import allows
from elman.kernels.cpu import KERNEL, head
from elman.kernels.cpu.library import out_of_range
from elman.kernels.cuda import as_switched, small
from elman.recurrence.operator import apart
from elman.recurrence.traced import is_seen, listening

LARGE = 1 << 24
"""Logits that are never in memory all at once, if there are more."""
PIECE = 1 << 22
"""Logits in memory at a time, then."""
PIECE_ON_GPU = 1 << 26
"""The same on a GPU where no gradient is asked for: its products want many rows."""

Pulls = list[Tensor | None]
"""∂loss/∂hs, ∂loss/∂W_hq, ∂loss/∂b_q; None for those that nobody needs."""


def linear_cross_entropy(hs: Tensor, W_hq: Tensor, b_q: Tensor | None, targets: Tensor) -> Tensor:
    """The mean nats of `targets` (…) under the output layer read from `hs` (…, hidden).

    >>> hs, W_hq = torch.zeros(3, 2, 5), torch.zeros(4, 5)
    >>> linear_cross_entropy(hs, W_hq, None, torch.zeros(3, 2, dtype=torch.int64))  # log 4
    tensor(1.3863)
    """
    if listening() or torch.compiler.is_compiling():
        return _plain(hs, W_hq, b_q, targets)
    if hs.shape[:-1] != targets.shape or not targets.numel():
        raise UserError(f"{tuple(hs.shape)} states have no targets of shape {tuple(targets.shape)}")
    large = in_pieces(targets.numel(), len(W_hq))
    if not large and is_seen():
        return _plain(hs, W_hq, b_q, targets)
    if _is_native(hs, W_hq, b_q):
        return _Fused.apply(_native, hs, W_hq, b_q, targets)  # pyright: ignore[reportReturnType]
    if large:
        return _Fused.apply(_pieces, hs, W_hq, b_q, targets)  # pyright: ignore[reportReturnType]
    if hs.is_cuda and targets.dim() == 2 and targets.is_cuda and _takes(hs, W_hq, targets):
        return _OnGpu.apply(hs, W_hq, b_q, targets)  # pyright: ignore[reportReturnType]
    return _plain(hs, W_hq, b_q, targets)


@torch.no_grad()
def nats_of_each(hs: Tensor, W_hq: Tensor, b_q: Tensor | None, targets: Tensor) -> Tensor:
    """-log softmax(o)[target] of every one of the targets, in their shape; no gradient.

    >>> hs, W_hq = torch.zeros(2, 1, 5), torch.zeros(4, 5)
    >>> nats_of_each(hs, W_hq, None, torch.zeros(2, 1, dtype=torch.int64)).T
    tensor([[1.3863, 1.3863]])
    """
    if _is_native(hs, W_hq, b_q) and not (is_seen() or listening()):
        return head.each_nats(KERNEL, hs, W_hq, b_q, targets)
    rows, ids = hs.flatten(0, -2), targets.flatten()
    size = max(1, (PIECE_ON_GPU if hs.is_cuda else PIECE) // len(W_hq))
    pieces = zip(rows.split(size), ids.split(size), strict=True)
    with as_switched(hs):
        nats = [_nats(linear(h, W_hq, b_q), y) for h, y in pieces]
    return (nats[0] if len(nats) == 1 else torch.cat(nats)).view(targets.shape)


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """The same of logits (rows, vocabulary), which are only read on a GPU."""
    if not (small.available(logits) and allows("cuda")) or is_seen() or listening():
        return cross_entropy(widened(logits), targets, reduction="none")
    chosen = logits.gather(1, targets[:, None])[:, 0]
    return small.nats(logits, targets[:, None]).lse[: len(logits)] - chosen.float()


def widened(logits: Tensor) -> Tensor:
    """At least float32, in which a softmax over a vocabulary is exact enough."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _is_native(hs: Tensor, W_hq: Tensor, b_q: Tensor | None) -> bool:
    """Whether native code on the CPU takes the products and the loss in the types asked for."""
    half = hs.dtype == torch.bfloat16
    return head.runs(KERNEL, hs, W_hq, b_q) and torch.is_autocast_enabled("cpu") == half


def in_pieces(rows: int, vocab_size: int) -> bool:
    """Whether the logits of so many rows are too many to be in memory all at once."""
    return rows * vocab_size > LARGE


def _plain(hs: Tensor, W_hq: Tensor, b_q: Tensor | None, targets: Tensor) -> Tensor:
    return cross_entropy(linear(hs, W_hq, b_q).flatten(0, -2), targets.flatten())


def _native(*given: Any) -> tuple[Tensor, Pulls]:
    return head.mean_nats(KERNEL, *given)


def _pieces(
    hs: Tensor, W_hq: Tensor, b_q: Tensor | None, targets: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor, Pulls]:
    """The mean nats and their pulls, `PIECE` logits at a time; sums in float32 or wider."""
    rows, ids = hs.reshape(-1, hs.shape[-1]), targets.reshape(-1)
    real = torch.promote_types(W_hq.dtype, torch.float32)
    if ids.is_cpu and not 0 <= int(ids.min()) <= int(ids.max()) < len(W_hq):
        raise out_of_range("targets", ids, len(W_hq), "outputs")
    nats = torch.zeros((), dtype=real, device=hs.device)
    dhs = torch.empty_like(rows) if needs[0] else None
    dW = torch.zeros_like(W_hq, dtype=real) if needs[1] else None
    db = torch.zeros_like(b_q, dtype=real) if needs[1] and b_q is not None else None
    size = max(1, PIECE // len(W_hq))
    for start in range(0, len(rows), size):
        h, y = rows[start : start + size], ids[start : start + size, None]
        logits = linear(h, W_hq, b_q)
        o = logits.to(real)
        o -= o.amax(1, keepdim=True)
        chosen = o.gather(1, y)
        total = o.exp_().sum(1, keepdim=True)
        nats += (total.log() - chosen).sum()
        if not any(needs):
            continue
        o = o.div_(total.mul_(len(rows))).scatter_add_(1, y, o.new_full(y.shape, -1 / len(rows)))
        do = o.to(logits.dtype)  # the products in the type in which the logits were made
        if dhs is not None:
            dhs[start : start + size] = do @ W_hq.to(do.dtype)
        if dW is not None and dW.dtype == do.dtype:
            dW.addmm_(do.T, h)
        elif dW is not None:
            dW += do.T @ h.to(do.dtype)
        if db is not None:
            db += o.sum(0)
    pulls = [None if dhs is None else dhs.view_as(hs), _as(dW, W_hq), _as(db, b_q)]
    return nats / len(rows), pulls


def _as(pull: Tensor | None, like: Tensor | None) -> Tensor | None:
    return pull if pull is None or like is None else pull.to(like.dtype)


def _takes(hs: Tensor, W_hq: Tensor, targets: Tensor) -> bool:
    """Whether our kernels on the GPU are allowed and know all of these types."""
    wide = hs.dtype == torch.float32 or torch.is_autocast_enabled("cuda")  # so torch's loss is too
    known = targets.dtype == torch.int64 and small.available(hs) and small.available(W_hq)
    return wide and known and allows("cuda")


class _OnGpu(torch.autograd.Function):
    """Logits by torch, the loss and its gradient by a kernel each; targets are (time, batch)."""

    @staticmethod
    def forward(ctx: Any, hs: Tensor, W_hq: Tensor, b_q: Tensor | None, targets: Tensor) -> Tensor:
        with as_switched(hs):
            logits = linear(hs, W_hq, b_q).flatten(0, -2).contiguous()
        found = small.nats(logits, targets)
        ctx.save_for_backward(hs, W_hq, b_q, targets, logits, *found)
        return found.out[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hs, W_hq, b_q, targets, logits, *found = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: leave a graph behind
            return *_plain_gradient((hs, W_hq, b_q, targets), grads[0], True), None
        d = small.nats_back(logits, targets, small.Nats(*found), grads[0])
        dhs = (d @ W_hq.to(d.dtype)).view(hs.shape).to(hs.dtype)
        dW, rows = None, hs.flatten(0, -2).to(d.dtype)
        if ctx.needs_input_grad[1]:
            half = d.dtype != torch.float32
            dW = torch.mm(d.T, rows, out_dtype=torch.float32) if half else d.T @ rows
        return dhs, dW, None if b_q is None else d.sum(0, dtype=b_q.dtype), None


class _Fused(torch.autograd.Function):
    """The forward pass computes the gradient too, once; asked for it again, torch computes it."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[..., tuple[Tensor, Pulls]],
        hs: Tensor,
        W_hq: Tensor,
        b_q: Tensor | None,
        targets: Tensor,
    ) -> Tensor:
        needs = (ctx.needs_input_grad[1], any(ctx.needs_input_grad[2:4]))
        nats, ctx.gradients = compute(hs, W_hq, b_q, targets, needs)
        ctx.save_for_backward(hs, W_hq, b_q, targets)
        return nats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        again = torch.is_grad_enabled()  # create_graph=True: leave a graph behind
        gradients = ctx.gradients
        if again or gradients is None:
            return None, *_plain_gradient(ctx.saved_tensors, grads[0], again), None
        ctx.gradients, scale = None, grads[0]
        if scale.is_cuda or scale.item() != 1:  # a GPU is not asked: it would have to answer
            gradients = [None if d is None else d.mul_(scale) for d in gradients]
        return None, *gradients, None


def _plain_gradient(
    saved: tuple[Tensor, Tensor, Tensor | None, Tensor], grad: Tensor, graph: bool
) -> list[Tensor | None]:
    """grad · (dhs, dW_hq, db_q) by autograd; a graph is left behind if asked for."""
    hs, W_hq, b_q, targets = saved

    def own(t: Tensor) -> Tensor:
        return apart(t) if graph else t.detach().requires_grad_(t.requires_grad)

    with torch.enable_grad(), torch.autocast(hs.device.type, hs.dtype, hs.dtype != W_hq.dtype):
        inputs = (own(hs), own(W_hq), None if b_q is None else own(b_q))
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        nats = _plain(*inputs, targets)
    gradients = iter(torch.autograd.grad(nats, wanted, grad, create_graph=graph))
    return [next(gradients) if t is not None and t.requires_grad else None for t in inputs]
