"""torch.nn's own recurrent layers: `cudnn` on a GPU, `aten` on a CPU, where none of ours is faster.

They take a whole stack at once: layers and both directions, from one state to another. So they are
no `Kernel`, which runs one layer in one direction and knows every state: a module asks for them
with a `Whole`, beside the job that it would hand to a kernel.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

MODES = ("RNN_RELU", "RNN_TANH", "LSTM", "GRU")  # as cuDNN counts them


class Network(NamedTuple):
    """A stack of layers, as they are told about it."""

    mode: str | None  # torch.nn's name of the cell; None: it is none of theirs
    bias: bool
    inputs: int
    hidden: int
    projection: int
    layers: int
    directions: int

    @property
    def each(self) -> int:
        """Tensors of one layer in one direction."""
        return 2 + 2 * self.bias + (self.projection > 0)

    def zeros(self, rows: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """The first states of so many rows where the caller passes none."""
        widths = [self.projection or self.hidden, self.hidden][: 2 if self.mode == "LSTM" else 1]
        places = self.layers * self.directions
        return [torch.zeros(places, rows, n, dtype=dtype, device=device) for n in widths]

    def sizes(self) -> tuple[int, int, int, int]:
        """What all of cuDNN's operations ask for in this order."""
        assert self.mode is not None
        return MODES.index(self.mode), self.hidden, self.projection, self.layers


class Whole(NamedTuple):
    """A stack over all of its time: everything about it but its tensors."""

    network: Network
    steps: int
    rows: int
    dtype: torch.dtype
    ids: bool = False
    keeps: bool = True  # a backward pass may follow
    window: int | None = None  # the gradient is cut every so many steps
    dropout: float = 0.0  # between its layers, in this call
    twice: bool = False  # whose masks may be wanted again
    packed: bool = False  # rows of different lengths
    apart: str | None = None  # why this stack cannot be handed over whole

    @property
    def pieces(self) -> int:
        """Pieces of time between cuts."""
        return 1 if self.window is None else -(-self.steps // self.window)


class Torchs(abc.ABC):
    """torch's own layers on one kind of device."""

    name: ClassVar[str]
    device: ClassVar[str]
    where: ClassVar[str]
    """Its device in words."""

    def refuses(self, whole: Whole, device: torch.device) -> str | None:
        """Why they cannot run this stack; None if they can."""
        if device.type != self.device:
            return f"the tensors are on {device.type}, not {self.where}"
        if whole.network.mode is None:
            return "it has no such cell"
        return self.refuses_here(whole)

    @abc.abstractmethod
    def refuses_here(self, whole: Whole) -> str | None:
        """The same of a cell and tensors that are theirs."""


def as_torch(
    net: Network,
    batch_first: bool,
    x: Tensor,
    first: Sequence[Tensor],
    weights: list[Tensor],
    dropout: float = 0.0,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ys and the last states, in the caller's layout, by the very call that `torch.nn` makes.

    With `batch_sizes`, x and ys are those of a packed sequence. Dropout between layers is theirs:
    from torch's generator on a CPU; by cuDNN from a state that torch keeps on the GPU and seeds
    after `manual_seed`.
    """
    assert net.mode is not None
    run, both = TORCHS[net.mode], net.directions == 2
    train = dropout > 0 or torch.is_grad_enabled()
    h: Any = first
    if x.is_cuda:  # to ask is sooner than to be given the same again
        h = [s if s.is_contiguous() else s.contiguous() for s in first]
    h = h if len(h) > 1 else h[0]
    if batch_sizes is None:
        outputs = run(x, h, weights, net.bias, net.layers, dropout, train, both, batch_first)
    else:
        outputs = run(x, batch_sizes, h, weights, net.bias, net.layers, dropout, train, both)
    return outputs[0], outputs[1:]


TORCHS = {
    "RNN_TANH": torch._VF.rnn_tanh,
    "RNN_RELU": torch._VF.rnn_relu,
    "GRU": torch._VF.gru,
    "LSTM": torch._VF.lstm,
}
