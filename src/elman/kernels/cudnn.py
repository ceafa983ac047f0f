"""cuDNN: torch.nn's own recurrent layers, where none of ours is faster.

It takes a whole stack at once (layers and both directions, from one state to another) and gives
back what its own backward pass wants: an opaque block of bytes. So it is no `Kernel`, which runs one
layer in one direction and has every state: `elman.recurrence.cudnn` cuts time into pieces for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MODES = {"relu": 0, "tanh": 1, "lstm": 2, "gru": 3}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Stacked = Sequence[Tensor]
"""h, or h and c, of all layers and directions, stacked as PyTorch does."""


class Network(NamedTuple):
    """All that cuDNN is told about a stack beside its tensors."""

    cell: str
    bias: bool
    inputs: int
    hidden: int
    projection: int
    layers: int
    bidirectional: bool

    @property
    def each(self) -> int:
        """Tensors of one layer in one direction."""
        return 2 + 2 * self.bias + (self.projection > 0)

    def _sizes(self) -> tuple[int, int, int, int]:
        return MODES[self.cell], self.hidden, self.projection, self.layers


class Pass(NamedTuple):
    """What a forward pass found; `reserve` and `buffer` (all weights in one) are for its backward."""

    ys: Tensor
    last: tuple[Tensor, ...]
    reserve: Tensor
    buffer: Tensor


def forward(
    net: Network,
    xs: Tensor,
    first: Stacked,
    weights: Sequence[Tensor],
    buffer: Tensor | None,
    keep: bool,
) -> Pass:
    """ys and the last states; without `keep` no backward will follow."""
    h, c = first[0], first[1] if len(first) > 1 else None
    ys, h, c, reserve, buffer = torch._cudnn_rnn(  # pyright: ignore[reportAttributeAccessIssue]
        xs,
        weights,
        net.each,
        buffer,
        h,
        c,
        *net._sizes(),
        False,  # time comes first
        0.0,  # no dropout
        keep,
        net.bidirectional,
        (),  # all rows are of one length
        None,
    )
    return Pass(ys, (h, c) if net.cell == "lstm" else (h,), reserve, buffer)


def backward(
    net: Network,
    xs: Tensor,
    first: Stacked,
    weights: Sequence[Tensor],
    found: Pass,
    dys: Tensor | None,
    dlast: Sequence[Tensor | None],
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """The pulls on xs, on the first states and on the weights, where `needs` asks for them.

    cuDNN writes into `found.reserve`: a pass that may be asked again hands over a copy.
    """
    h, c = first[0], first[1] if len(first) > 1 else None
    dh, dc = dlast[0], dlast[1] if len(dlast) > 1 else None
    dxs, dh, dc, dws = torch.ops.aten._cudnn_rnn_backward(
        xs,
        weights,
        net.each,
        found.buffer,
        h,
        c,
        found.ys,
        dys,
        dh,
        dc,
        *net._sizes(),
        False,
        0.0,
        True,
        net.bidirectional,
        (),
        None,
        found.reserve,
        (needs[0], needs[1], needs[1] and c is not None, needs[2]),
    )
    return dxs if needs[0] else None, [dh] if c is None else [dh, dc], list(dws)


def whole_buffer(net: Network, weights: Sequence[Tensor]) -> Tensor | None:
    """The block of memory that all weights lie in, if they lie there as cuDNN wants them.

    `torch.nn.RNNBase.flatten_parameters` puts them there; else cuDNN copies them at every call.
    """
    w = weights[0]
    places = _places(net, w.dtype, w.device)
    base = w.data_ptr() - places[0] * w.element_size()
    for weight, place in zip(weights, places[:-1], strict=True):
        if weight.data_ptr() != base + place * w.element_size():
            return None
    storage = w.untyped_storage()
    if storage.data_ptr() != base or storage.nbytes() < places[-1] * w.element_size():
        return None
    return w.new_empty(0).set_(storage, 0, (places[-1],))  # pyright: ignore[reportArgumentType]


@functools.lru_cache(maxsize=256)
def _places(net: Network, dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """Where each weight begins in cuDNN's block, and the block's size, in elements."""
    made = torch.nn.RNNBase(
        {"relu": "RNN_RELU", "tanh": "RNN_TANH"}.get(net.cell, net.cell.upper()),
        net.inputs,
        net.hidden,
        net.layers,
        net.bias,
        bidirectional=net.bidirectional,
        proj_size=net.projection,
        device="meta",
        dtype=dtype,
    )
    weights = [torch.empty(w.shape, dtype=dtype, device=device) for w in made.parameters()]
    block = torch._cudnn_rnn_flatten_weight(  # pyright: ignore[reportAttributeAccessIssue]
        weights,
        net.each,
        net.inputs,
        *net._sizes(),
        False,
        net.bidirectional,
    )
    size = block.element_size()
    begins = [(w.data_ptr() - block.data_ptr()) // size for w in weights]
    return *begins, block.numel()
