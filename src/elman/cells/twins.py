"""The built-in cells as descriptions, for what is made of descriptions (`noisy`).

Their own kernels have them by heart, and no description is faster; a test holds the two equal.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from elman.cells.described import Described


def _tanh(a_x: Sequence[Tensor], a_h: Sequence[Tensor], h: Tensor) -> Tensor:
    return torch.tanh(a_x[0] + a_h[0])


def _relu(a_x: Sequence[Tensor], a_h: Sequence[Tensor], h: Tensor) -> Tensor:
    return torch.relu(a_x[0] + a_h[0])


def _linear(a_x: Sequence[Tensor], a_h: Sequence[Tensor], h: Tensor) -> Tensor:
    return a_x[0] + a_h[0]


def _gru(a_x: Sequence[Tensor], a_h: Sequence[Tensor], h: Tensor) -> Tensor:
    r, z = torch.sigmoid(a_x[0] + a_h[0]), torch.sigmoid(a_x[1] + a_h[1])
    n = torch.tanh(a_x[2] + r * a_h[2])
    return n + z * (h - n)


def _lstm(
    a_x: Sequence[Tensor], a_h: Sequence[Tensor], h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    i, f, g, o = (x + y for x, y in zip(a_x, a_h, strict=True))
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


TWINS = {
    "tanh": Described(_tanh, "tanh"),
    "relu": Described(_relu, "relu"),
    "linear": Described(_linear, "linear"),
    "gru": Described(_gru, "gru", gates=3),
    "lstm": Described(_lstm, "lstm", gates=4, states=2),
}
