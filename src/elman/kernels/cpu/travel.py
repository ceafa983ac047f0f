"""Losses that go back through one layer together, in one native call: see travel.h."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from elman.cells import Slopes
from elman.kernels import choice
from elman.kernels.contract import Expected, require
from elman.kernels.cpu import library
from elman.kernels.cpu.library import DOUBLE, FLOAT, KINDS, TravelArguments, plain, pointer
from elman.kernels.cpu.recurrence import Cpu


def norms_by_lag(
    kernel: Cpu, W_hh: Tensor, slopes: Slopes, pulls: Tensor, first: int, lags: int
) -> Tensor | None:
    """‖∂L_t/∂S_{t+1-k}‖, (T - first, lags + 1), for t ≥ first ≥ lags and k = 0 … lags.

    `pulls` are ∂L_t/∂h_{t+1}, (T, H), where step t makes h_{t+1}. None: not for this kernel.
    """
    if kernel.library is None or not choice.allows(kernel.name):
        return None
    kind = KINDS.get(W_hh.dtype)
    if kind not in (FLOAT, DOUBLE):
        return None
    steps, states, gates, hidden = slopes.a_h.shape
    assert 1 <= lags <= first < steps
    require(_expected(W_hh, slopes, pulls), W_hh.device)
    norms = torch.empty(steps - first, lags + 1, dtype=W_hh.dtype)
    read = [plain(t, W_hh.dtype) for t in (pulls, slopes.a_h, slopes.before, W_hh)]
    arguments = TravelArguments(
        steps, hidden, states, gates, first, lags, torch.get_num_threads(), *map(pointer, read)
    )
    arguments.norms = pointer(norms)
    library.check_memory(kernel.library.elman_travel(arguments, kind, kernel.level))
    return norms


def _expected(W_hh: Tensor, slopes: Slopes, pulls: Tensor) -> Iterator[Expected]:
    steps, states, gates, hidden = slopes.a_h.shape
    yield "W_hh", W_hh, (gates * hidden, hidden)
    yield "the slopes by states", slopes.before, (steps, states, states, hidden)
    yield "pulls", pulls, (steps, hidden)
