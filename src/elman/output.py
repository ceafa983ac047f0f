"""The output layer and its loss in one pass: logits never leave the cache before they are used.

    o_t = h_t W_hqᵀ + b_q,   loss = mean_t of -log softmax(o_t)[target_t]
    do_t = softmax(o_t) - one-hot(target_t)          (the notes' ŷ - 1)

On a CPU in float32 or float64 this is native code; elsewhere, under autocast or inside
`torch.compile` it is `torch.nn.functional`'s `linear` and `cross_entropy`: the same numbers to
rounding.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from elman.errors import UserError
from elman.kernels.cpu import KERNEL


def linear_cross_entropy(hs: Tensor, W_hq: Tensor, b_q: Tensor | None, targets: Tensor) -> Tensor:
    """The mean nats of `targets` (…) under the output layer read from `hs` (…, hidden).

    >>> hs, W_hq = torch.zeros(3, 2, 5), torch.zeros(4, 5)
    >>> linear_cross_entropy(hs, W_hq, None, torch.zeros(3, 2, dtype=torch.int64))  # log 4
    tensor(1.3863)
    """
    if hs.shape[:-1] != targets.shape or not targets.numel():
        raise UserError(f"{tuple(hs.shape)} states have no targets of shape {tuple(targets.shape)}")
    native = KERNEL.heads(hs, W_hq, b_q) and not torch.compiler.is_compiling()
    if not native or torch.is_autocast_enabled(hs.device.type):
        return _plain(hs, W_hq, b_q, targets)
    return _Fused.apply(hs, W_hq, b_q, targets)  # pyright: ignore[reportReturnType]


def _plain(hs: Tensor, W_hq: Tensor, b_q: Tensor | None, targets: Tensor) -> Tensor:
    return cross_entropy(linear(hs, W_hq, b_q).flatten(0, -2), targets.flatten())


class _Fused(torch.autograd.Function):
    """Forwards already finds dlogits; backwards multiplies it out."""

    @staticmethod
    def forward(ctx: Any, hs: Tensor, W_hq: Tensor, b_q: Tensor | None, targets: Tensor) -> Tensor:
        nats, dlogits = KERNEL.head_forward(hs, W_hq, b_q, targets)
        ctx.save_for_backward(hs, W_hq, b_q, targets, dlogits)
        return torch.tensor(nats, dtype=hs.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hs, W_hq, b_q, targets, dlogits = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: leave a graph behind
            inputs = [t for t in (hs, W_hq, b_q) if t is not None and t.requires_grad]
            nats = _plain(hs, W_hq, b_q, targets)
            found = iter(torch.autograd.grad(nats, inputs, grads[0], create_graph=True))
            wanted = (t is not None and t.requires_grad for t in (hs, W_hq, b_q))
            return *(next(found) if w else None for w in wanted), None
        scale = float(grads[0])
        dlogits = dlogits if scale == 1 else dlogits * scale
        return *KERNEL.head_backward(hs, W_hq, b_q, dlogits, ctx.needs_input_grad[0]), None
