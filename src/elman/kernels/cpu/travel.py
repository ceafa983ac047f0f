"""Losses that go back through one layer together, in one native call: see travel.h."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from elman.cells import Slopes
from elman.errors import UserError
from elman.kernels import choice
from elman.kernels.contract import Expected, require
from elman.kernels.cpu import library
from elman.kernels.cpu.library import CPU, DOUBLE, FLOAT, KINDS, TravelArguments, plain, pointer
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
    require(_expected(W_hh, slopes, pulls), W_hh.device)
    assert 1 <= lags <= first < steps
    if any(t.dtype != W_hh.dtype for t in (*slopes, pulls)):
        raise UserError(
            f"slopes and pulls of {slopes.a_h.dtype}, {slopes.before.dtype} and {pulls.dtype} do "
            f"not go through W_hh of {W_hh.dtype}",
            hint="make them of one type",
        )
    norms = torch.empty(steps - first, lags + 1, dtype=W_hh.dtype, device=CPU)
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
    yield "the slopes by gates", slopes.a_h, (steps, states, gates, hidden)
    yield "the slopes by states", slopes.before, (steps, states, states, hidden)
    yield "pulls", pulls, (steps, hidden)
