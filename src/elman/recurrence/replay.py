"""What a step needs to be run again as it was: the same random numbers, the same autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Autocast(NamedTuple):
    """The autocast in force in the forward pass, to be in force again in the backward pass."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> Autocast:
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def again(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, enabled=self.enabled, dtype=self.dtype)


class Replay:
    """Random numbers drawn inside repeat from `random`; outside nothing has happened."""

    def __init__(self, device: torch.device, random: list[Tensor]) -> None:
        self.device, self.random = device, random

    def __enter__(self) -> None:
        self.outside = random_now(self.device)
        _set_random(self.device, self.random)

    def __exit__(self, *_: object) -> None:
        _set_random(self.device, self.outside)


def random_now(device: torch.device) -> list[Tensor]:
    """Where the random numbers are."""
    here = [torch.get_rng_state()]
    return [*here, torch.cuda.get_rng_state(device)] if device.type == "cuda" else here


def random_after(before: list[Tensor], device: torch.device) -> list[Tensor]:
    """Where the random numbers are; `before` itself, kept only once, if none has been drawn."""
    now = random_now(device)
    return before if all(map(torch.equal, now, before)) else now


def _set_random(device: torch.device, random: list[Tensor]) -> None:
    torch.set_rng_state(random[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(random[1], device)
