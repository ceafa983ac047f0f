"""Masks of dropout: as torch draws them, to the last bit, several times as fast.

`keep` is `tensor.bernoulli_`; `dropping` is for masks between layers, `torch.rand(…) >= p`.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from elman.kernels import choice
from elman.kernels.cpu.library import KINDS
from elman.kernels.cpu.recurrence import KERNEL, Cpu

STATE = 5056
"""Bytes of a generator's state, of which the first 5,016 are read and written here."""


def keep(random: torch.Generator, shape: tuple[int, ...], p: float, dtype: torch.dtype) -> Tensor:
    """1/p with probability p, else 0; `random` is a generator of the CPU."""
    traced = torch.compiler.is_compiling()
    if traced or not choice.allows(KERNEL.name) or not _agrees(KERNEL, dtype):
        mask = torch.empty(shape, dtype=dtype, device="cpu")
        return mask.bernoulli_(p, generator=random).div_(p)
    value = torch.ones((), dtype=dtype, device="cpu").div_(p).item()
    return _drawn(KERNEL, random, shape, p, value, dtype)


def _drawn(
    kernel: Cpu,
    random: torch.Generator,
    shape: tuple[int, ...],
    p: float,
    value: float,
    dtype: torch.dtype,
) -> Tensor:
    assert kernel.library is not None
    state, mask = random.get_state(), torch.empty(shape, dtype=dtype, device="cpu")
    kernel.library.elman_keep(
        state.data_ptr(), mask.data_ptr(), mask.numel(), p, value, KINDS[dtype], kernel.level
    )
    random.set_state(state)
    return mask


@functools.cache
def _agrees(kernel: Cpu, dtype: torch.dtype) -> bool:
    """Whether torch draws as we do: on Intel's processors it may ask Intel's library instead."""
    if kernel.library is None or dtype not in (torch.float32, torch.float64):
        return False
    mine, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    if len(mine.get_state()) != STATE:
        return False
    for size in (5, 1000):  # within the generator's first block of words, and across blocks
        found = _drawn(kernel, mine, (size,), 0.3, 1.0, dtype)
        if not torch.equal(found, torch.empty_like(found).bernoulli_(0.3, generator=theirs)):
            return False
    return torch.equal(mine.get_state(), theirs.get_state())


def drops_as_torch(dtype: torch.dtype) -> bool:
    """Whether native code draws masks between layers of this dtype as torch draws them."""
    return _drops_alike(KERNEL, dtype)


@functools.cache
def dropping(p: float, dtype: torch.dtype) -> tuple[int, float]:
    """Below which number of 2⁻²⁴ a unit is dropped, and what the others are multiplied by."""
    below = math.ceil(torch.tensor(p, dtype=torch.float32, device="cpu").item() * 2**24)
    one = torch.ones((), dtype=dtype, device="cpu")
    return below, (one / (1 - p) if p < 1 else one).item()


@functools.cache
def _drops_alike(kernel: Cpu, dtype: torch.dtype) -> bool:
    if kernel.library is None or dtype not in (torch.float32, torch.float64):
        return False
    p, seed, size = 0.3, 2**62 - 7, 1500  # across blocks of words, of a seed of more than one
    with _disable_current_modes():  # a compiler may be the first to ask, with tensors without data
        random = torch.Generator().manual_seed(seed)
        u = torch.rand(size, generator=random, dtype=torch.float32, device="cpu")
        found, ones = (torch.ones(size, dtype=dtype, device="cpu") for _ in range(2))
        places, how = (ones.data_ptr(), found.data_ptr()), (KINDS[dtype], kernel.level)
        kernel.library.elman_drop(seed, *places, size, *dropping(p, dtype), *how)
        return torch.equal(found, (u >= p).to(dtype) / (1 - p))
