"""The output layer and its loss in one pass: logits never leave the cache before they are used.

    o_t = h_t W_hqᵀ + b_q,   loss = mean_t of -log softmax(o_t)[target_t]
    do_t = softmax(o_t) - one-hot(target_t)          (the notes' ŷ - 1)

On a CPU in float32 or float64 this is native code, and under autocast where the states are already
bfloat16; on a GPU the loss and its gradient are one kernel each. Elsewhere, and where torch
compiles or traces, it is `torch.nn.functional`'s `linear` and `cross_entropy`: the same numbers to
rounding.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from elman.errors import UserError
from elman.kernels import allows
from elman.kernels.cpu import KERNEL, head
from elman.kernels.cuda import small
from elman.recurrence.traced import listening


def linear_cross_entropy(hs: Tensor, W_hq: Tensor, b_q: Tensor | None, targets: Tensor) -> Tensor:
    """The mean nats of `targets` (…) under the output layer read from `hs` (…, hidden).

    >>> hs, W_hq = torch.zeros(3, 2, 5), torch.zeros(4, 5)
    >>> linear_cross_entropy(hs, W_hq, None, torch.zeros(3, 2, dtype=torch.int64))  # log 4
    tensor(1.3863)
    """
    if listening():
        return _plain(hs, W_hq, b_q, targets)
    if hs.shape[:-1] != targets.shape or not targets.numel():
        raise UserError(f"{tuple(hs.shape)} states have no targets of shape {tuple(targets.shape)}")
    if torch.compiler.is_compiling():
        return _plain(hs, W_hq, b_q, targets)
    if hs.is_cuda and targets.dim() == 2 and targets.is_cuda and _takes(hs, W_hq, targets):
        return _OnGpu.apply(hs, W_hq, b_q, targets)  # pyright: ignore[reportReturnType]
    native = head.runs(KERNEL, hs, W_hq, b_q)
    if not native or torch.is_autocast_enabled("cpu") != (hs.dtype == torch.bfloat16):
        return _plain(hs, W_hq, b_q, targets)
    return _Fused.apply(hs, W_hq, b_q, targets)  # pyright: ignore[reportReturnType]


def _plain(hs: Tensor, W_hq: Tensor, b_q: Tensor | None, targets: Tensor) -> Tensor:
    return cross_entropy(linear(hs, W_hq, b_q).flatten(0, -2), targets.flatten())


def _takes(hs: Tensor, W_hq: Tensor, targets: Tensor) -> bool:
    """Whether our kernels on the GPU are allowed and know all of these types."""
    wide = hs.dtype == torch.float32 or torch.is_autocast_enabled("cuda")  # so torch's loss is too
    known = targets.dtype == torch.int64 and small.available(hs) and small.available(W_hq)
    return wide and known and allows("cuda")


class _OnGpu(torch.autograd.Function):
    """Logits by torch, the loss and its gradient by a kernel each; targets are (time, batch)."""

    @staticmethod
    def forward(ctx: Any, hs: Tensor, W_hq: Tensor, b_q: Tensor | None, targets: Tensor) -> Tensor:
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
    def forward(ctx: Any, hs: Tensor, W_hq: Tensor, b_q: Tensor | None, targets: Tensor) -> Tensor:
        needs = (ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3]))
        nats, ctx.gradients = head.mean_nats(KERNEL, hs, W_hq, b_q, targets, needs)
        ctx.save_for_backward(hs, W_hq, b_q, targets)
        return nats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        again = torch.is_grad_enabled()  # create_graph=True: leave a graph behind
        gradients = ctx.gradients
        if again or gradients is None:
            return *_plain_gradient(ctx.saved_tensors, grads[0], again), None
        ctx.gradients, scale = None, grads[0].item()
        if scale != 1:
            gradients = [None if d is None else d.mul_(scale) for d in gradients]
        return *gradients, None


def _plain_gradient(
    saved: tuple[Tensor, Tensor, Tensor | None, Tensor], grad: Tensor, graph: bool
) -> list[Tensor | None]:
    """grad · (dhs, dW_hq, db_q) by autograd; a graph is left behind if asked for."""
    hs, W_hq, b_q, targets = saved

    def own(t: Tensor) -> Tensor:
        return t if graph else t.detach().requires_grad_(t.requires_grad)

    with torch.enable_grad(), torch.autocast(hs.device.type, hs.dtype, hs.dtype != W_hq.dtype):
        inputs = (own(hs), own(W_hq), None if b_q is None else own(b_q))
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        nats = _plain(*inputs, targets)
    gradients = iter(torch.autograd.grad(nats, wanted, grad, create_graph=graph))
    return [next(gradients) if t is not None and t.requires_grad else None for t in inputs]
