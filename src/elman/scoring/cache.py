"""A neural cache: what followed the moments of the recent past that were most like this one.

    P(x | h_t) ∝ Σ_{i = t-size}^{t-1} exp(θ h_tᵀ h_i) [x_{i+1} = x]

No weights are learnt: the hidden states that the network passes through anyway are the keys. It
gives nothing to a token that was not read lately, so it is always mixed with the network itself.
Grave, Joulin and Usunier (2017), "Improving neural language models with a continuous cache".
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elman.errors import UserError
from elman.language_model import LanguageModel
from elman.options import whole_number
from elman.scoring.metrics import evaluating
from elman.text.batches import flat_integers

Floats = NDArray[np.float64]

FLATNESSES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""The θ among which validation chooses."""
DEFAULT_FLATNESS = 0.2
PIECE = 256
"""Moments looked at together."""


def hidden_states(model: LanguageModel, ids: Any) -> Tensor:
    """h_t after each id but the last: (time, hidden), on the CPU."""
    if not isinstance(model, LanguageModel) or not model.recurrent:
        raise UserError(
            "a cache remembers hidden states, and this model has none",
            hint="leave out cache, or train a recurrent model",
        )
    text = flat_integers(np.asarray(ids))
    read = torch.as_tensor(text, device=model.bias_q.device).long()[:-1]
    pieces, state = [], None
    with evaluating(model):
        for start in range(0, len(read), 1024):
            hs, state = model.states(read[None, start : start + 1024], state)
            pieces.append(hs[:, 0].float().cpu())
    return torch.cat(pieces).clone()


def cache_scores(hs: Tensor, ids: Any, size: int, theta: float) -> Floats:
    """log P of each token after the first by the cache alone; -inf for one not read lately."""
    size = whole_number("cache", size, at_least=1, hint="cache=2000")
    following = torch.as_tensor(flat_integers(np.asarray(ids)), device="cpu").long()[1:]
    scores = [np.full(min(1, len(hs)), -np.inf)]
    for start in range(1, len(hs), PIECE):
        end, oldest = min(start + PIECE, len(hs)), max(0, start - size)
        likeness = theta * hs[start:end].double() @ hs[oldest : end - 1].double().T
        now = torch.arange(start, end, device="cpu")[:, None]
        then = torch.arange(oldest, end - 1, device="cpu")
        likeness = likeness.masked_fill((then >= now) | (then < now - size), -torch.inf)
        same = following[then] == following[now]
        hit = likeness.masked_fill(~same, -torch.inf).logsumexp(-1)
        scores.append((hit - likeness.logsumexp(-1)).numpy())
    return np.concatenate(scores)
