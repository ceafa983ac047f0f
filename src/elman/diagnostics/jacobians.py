"""What a step does to a gradient: Jacobians, their products, and how these grow or shrink."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elman.diagnostics.passage import Passage
from elman.errors import UserError

Array = NDArray[np.float64]


def jacobian(passage: Passage, t: int) -> Tensor:
    """∂S_{t+1}/∂S_t, (N, N): row i is the gradient of unit i after the step."""
    size = passage.states.shape[1]
    units = torch.eye(size, dtype=torch.float64, device="cpu")
    return passage.pull_back(torch.full((size,), t, device="cpu"), units)


@dataclass(frozen=True, eq=False)
class SingularValues:
    """Singular values of ∂S_{t+k}/∂S_t, falling, for each k."""

    start: int
    lags: tuple[int, ...]
    values: Array
    """(lags, N)"""


def singular_values(
    passage: Passage, lags: tuple[int, ...] | None = None, start: int = 0
) -> SingularValues:
    """How much a change at `start` can grow or shrink in every direction, k steps later.

    Without `lags`, k is 1, 2, 4, 8, 16 and 32, as far as the passage goes.
    For a linear cell the product is the power W_hhᵏ of equation (9) in the notes.
    """
    if lags is None:
        lags = tuple(k for k in (1, 2, 4, 8, 16, 32) if k == 1 or start + k <= len(passage))
    if not lags or min(lags) < 1 or start + max(lags) > len(passage):
        raise UserError(
            f"lags {lags} from step {start} must lie within the passage of {len(passage)} steps",
            hint="a longer text, or shorter lags",
        )
    product, values = torch.eye(passage.states.shape[1], dtype=torch.float64, device="cpu"), {}
    for k in range(1, max(lags) + 1):
        product = jacobian(passage, start + k - 1) @ product
        if k in lags:
            values[k] = torch.linalg.svdvals(product).numpy()
    return SingularValues(
        start, tuple(sorted(values)), np.stack([values[k] for k in sorted(values)])
    )


def spectral_radius(passage: Passage) -> list[float]:
    """The largest |eigenvalue| of each layer's W_hh; of its gates' blocks, the largest."""
    radii = []
    for w in passage.layers:
        W_hh = w.W_hh if w.W_hr is None else w.W_hh @ w.W_hr
        blocks = W_hh.split(W_hh.shape[1], 0)
        radii.append(max(float(torch.linalg.eigvals(b).abs().max()) for b in blocks))
    return radii


def lyapunov_exponents(passage: Passage, count: int | None = None) -> Array:
    """The mean exponential growth rates of small changes of the state, largest first.

    Q_{t+1} R_{t+1} = ∂S_{t+1}/∂S_t Q_t;   λ_i = mean_t log|R_t[i, i]|   (Benettin et al., 1980)

    Above 0 the passage is chaotic and its gradient explodes; far below 0 it vanishes.
    """
    size = passage.states.shape[1]
    count = size if count is None else count
    if not 1 <= count <= size:
        raise UserError(f"count={count} must be from 1 to {size}, the size of the carried state")
    noise = torch.randn(
        size, count, dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu"
    )
    Q = torch.linalg.qr(noise)[0]
    growth = noise.new_zeros(count)
    for t in range(len(passage)):
        Q, R = torch.linalg.qr(jacobian(passage, t) @ Q)
        growth += R.diagonal().abs().clamp(min=torch.finfo(torch.float64).tiny).log()
    return np.sort((growth / len(passage)).numpy())[::-1]
