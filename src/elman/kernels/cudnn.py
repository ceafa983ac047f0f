"""cuDNN: torch.nn's own recurrent layers on a GPU, where none of ours is faster.

It keeps what its backward pass wants in a block of bytes that only it can read, and wants all
weights in another. `prices` says when it is the faster of the two.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from elman.kernels.torchs import Network, Torchs, Whole, as_torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_VOCABULARY = 4096  # ids become one-hot rows, which are multiplied


@final
class Cudnn(Torchs):
    """torch's cuDNN layers."""

    name, device, where = "cudnn", "cuda", "on a CUDA GPU"

    def refuses_here(self, whole: Whole) -> str | None:
        """What cuDNN cannot run, or is not to."""
        if not (torch.backends.cudnn.is_available() and torch.backends.cudnn.enabled):
            return "torch has no cuDNN here, or torch.backends.cudnn.enabled is off"
        if whole.dtype not in DTYPES:
            return f"it has no layers of {whole.dtype}"
        if whole.ids and whole.network.inputs > LARGEST_VOCABULARY:
            return f"ids are one-hot rows to it, and {whole.network.inputs} of them are too wide"
        if whole.twice:
            return "its dropout cannot be drawn twice alike, as a checkpointed call may want"
        return whole.apart or self._refuses_pieces(whole)

    def _refuses_pieces(self, whole: Whole) -> str | None:
        if whole.pieces == 1:
            return None
        if whole.network.directions == 2:
            return "a carry that cuts is run in pieces of time, and both directions need all of it"
        if whole.dropout:
            return "a carry that cuts is run in pieces of time, and dropout is drawn for all of it"
        if whole.dtype.itemsize < 4:
            return "gradients of pieces of time would be summed in half precision"
        return None


KERNEL = Cudnn()


def precision() -> str:
    """How torch multiplies float32 in recurrent layers: tf32, or without it.

    That is `torch.backends.cudnn.rnn.fp32_precision`, which takes Python longer to find.
    """
    return torch._C._get_fp32_precision_getter("cuda", "rnn")


@final
class _Off(contextlib.AbstractContextManager[None]):
    """cuDNN off while any thread is inside, and then as the first of them found it."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before = torch._C._get_cudnn_enabled()
                torch._C._set_cudnn_enabled(False)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                torch._C._set_cudnn_enabled(self.before)


OFF = _Off()
"""A block without cuDNN, whose layers then run in operators that `torch.func` knows.

`torch.backends.cudnn.flags` would set four more switches, and threads would undo each other's.
"""


def run(
    whole: Whole,
    xs: Tensor,
    first: Sequence[Tensor],
    weights: Sequence[Tensor],
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ys and the last states (stacked as PyTorch does), differentiable once.

    With `batch_sizes`, xs and ys are those of a packed sequence. A gradient of a gradient is not to
    be had from cuDNN: torch says so, and to switch `torch.backends.cudnn.flags(enabled=False)` for
    the forward pass, which elman heeds too.
    """
    if whole.ids:
        xs = one_hot(xs, whole.network.inputs, whole.dtype)
    if whole.dropout:
        return _with_dropout(whole, xs, first, weights, batch_sizes)
    if whole.pieces == 1:
        return _piece(whole, xs, first, weights, batch_sizes)
    ys: list[Tensor] = []
    for start in range(0, whole.steps, whole.window or whole.steps):
        state = first if start == 0 else [s.detach() for s in first]  # nothing crosses a cut
        y, first = _piece(whole, xs[start : start + (whole.window or 0)], state, weights)
        ys.append(y)
    return torch.cat(ys), tuple(first)


def one_hot(ids: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The rows that ids stand for."""
    return torch.nn.functional.one_hot(ids.to(torch.int64), size).to(dtype)


def _with_dropout(
    whole: Whole,
    xs: Tensor,
    first: Sequence[Tensor],
    weights: Sequence[Tensor],
    batch_sizes: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """By torch's function, since none but torch can reach the state of its masks."""
    net = whole.network
    if not lie_together(net, weights):  # or torch would warn
        places = _places(net, weights[0].dtype, weights[0].device)
        weights = _Together.apply(places, *weights)
    return as_torch(net, False, xs, first, [*weights], whole.dropout, batch_sizes)


class _Together(torch.autograd.Function):
    """Copies of the weights in one block of memory, as cuDNN wants them."""

    @staticmethod
    def forward(ctx: Any, places: tuple[int, ...], *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(_rooms(_copied(weights, places), weights, places))

    @staticmethod
    def backward(ctx: Any, *dws: Tensor) -> Any:
        return None, *dws


def _piece(
    whole: Whole,
    xs: Tensor,
    first: Sequence[Tensor],
    weights: Sequence[Tensor],
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    sizes = [] if batch_sizes is None else batch_sizes.tolist()
    return _call(whole.network, False, xs, first, weights, whole.keeps, sizes)


def from_copied_weights(
    net: Network,
    batch_first: bool,
    x: Tensor,
    first: Sequence[Tensor],
    weights: Sequence[Tensor],
    dropout: float = 0.0,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As `as_torch`, where weights lie in no one block of memory, of which torch would warn."""
    assert not dropout, "its masks are torch's own"
    return _call(net, batch_first, x, first, weights, torch.is_grad_enabled(), [])


def _call(
    net: Network,
    batch_first: bool,
    x: Tensor,
    first: Sequence[Tensor],
    weights: Sequence[Tensor],
    keeps: bool,
    batch_sizes: list[int],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    outputs = torch._cudnn_rnn(  # pyright: ignore[reportAttributeAccessIssue]
        x,
        list(weights),
        net.each,
        all_weights(net, weights),
        first[0].contiguous(),
        first[1].contiguous() if len(first) > 1 else None,
        *net.sizes(),
        batch_first,
        0.0,  # no dropout
        keeps,
        net.directions == 2,
        batch_sizes,
        None,
    )
    return outputs[0], outputs[1 : 1 + len(first)]


def all_weights(net: Network, weights: Sequence[Tensor]) -> Tensor:
    """The block of memory that all weights lie in, as cuDNN wants it.

    `torch.nn.RNNBase.flatten_parameters` puts them there; where they do not lie so (autocast has
    copied them, say) they are copied at every call.
    """
    w = weights[0]
    places = _places(net, w.dtype, w.device)
    if not _lie_at(weights, places):
        return _copied(weights, places)
    return w.detach().as_strided((places[-1],), (1,), 0)


def lie_together(net: Network, weights: Sequence[Tensor]) -> bool:
    """Whether all weights lie in one block of memory, as cuDNN wants them."""
    return _lie_at(weights, _places(net, weights[0].dtype, weights[0].device))


def _lie_at(weights: Sequence[Tensor], places: tuple[int, ...]) -> bool:
    w, size = weights[0], weights[0].element_size()
    begin, storage = w.data_ptr(), w.untyped_storage()
    if storage.data_ptr() != begin or storage.nbytes() < places[-1] * size:
        return False
    pairs = zip(weights, places, strict=False)
    return all(weight.data_ptr() - begin == place * size for weight, place in pairs)


@torch.no_grad()
def _copied(weights: Sequence[Tensor], places: tuple[int, ...]) -> Tensor:
    order = _in_a_row(places, tuple([w.numel() for w in weights]))
    if order is not None:  # one operation instead of many
        return _flatten_dense_tensors([weights[i] for i in order])
    block = weights[0].new_zeros(places[-1])
    torch._foreach_copy_(_rooms(block, weights, places), list(weights))
    return block


@functools.lru_cache(maxsize=1024)
def _in_a_row(places: tuple[int, ...], sizes: tuple[int, ...]) -> list[int] | None:
    """The order in which weights of these sizes lie there one after the other; None: with gaps."""
    order, end = sorted(range(len(sizes)), key=places.__getitem__), 0
    for i in order:
        if places[i] != end:
            return None
        end += sizes[i]
    return order if end == places[-1] else None


def _rooms(block: Tensor, weights: Sequence[Tensor], places: tuple[int, ...]) -> list[Tensor]:
    """Where in the block the weights are."""
    pairs = zip(weights, places, strict=False)
    return [block.narrow(0, place, w.numel()).view(w.shape) for w, place in pairs]


def flatten_bfloat16(net: Network, weights: Sequence[Tensor]) -> None:
    """What `flatten_parameters` of torch.nn does for all types but this one."""
    cuda = all(w.is_cuda and w.dtype == torch.bfloat16 for w in weights)
    if not cuda or not torch.backends.cudnn.is_available() or not torch.backends.cudnn.enabled:
        return
    if len({w.data_ptr() for w in weights}) == len(weights):  # none is another
        with torch.no_grad(), torch.cuda.device(weights[0].device):
            _flatten(net, weights)


def _flatten(net: Network, weights: Sequence[Tensor]) -> Tensor:
    """Move the weights into one block; the block."""
    return torch._cudnn_rnn_flatten_weight(  # pyright: ignore[reportAttributeAccessIssue]
        list(weights), net.each, net.inputs, *net.sizes(), False, net.directions == 2
    )


@functools.lru_cache(maxsize=1024)
def _places(net: Network, dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """Where each weight begins in cuDNN's block, and the block's size, in elements."""
    assert net.mode is not None
    model = torch.nn.RNNBase(
        net.mode,
        net.inputs,
        net.hidden,
        net.layers,
        net.bias,
        bidirectional=net.directions == 2,
        proj_size=net.projection,
        device="meta",
    )
    weights = [torch.empty(w.shape, dtype=dtype, device=device) for w in model.parameters()]
    block = _flatten(net, weights)
    begins = [(w.data_ptr() - block.data_ptr()) // block.element_size() for w in weights]
    return *begins, block.numel()
