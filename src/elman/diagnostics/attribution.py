"""Which past tokens a prediction depends on."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from elman.defaults import learns
from elman.diagnostics.passage import text_of_steps
from elman.errors import UserError
from elman.language_model import LanguageModel
from elman.language_model.looking import evaluating
from elman.language_model.masks import NO_MASKS
from elman.language_model.model import known_labels
from elman.nn.parameters import in_eval_mode
from elman.text.batches import flat_integers

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Attribution:
    """What each token x_1 … x_t did for log P(x_{t+1} | x_1 … x_t), in nats."""

    log_probability: float
    gradient: Array
    """gradient × input: ∂log P/∂x_s · x_s (one-hot or embedding)"""
    left_out: Array
    """exact: log P with all tokens, less log P without token s"""


@learns
def attribute(model: LanguageModel, ids: Any) -> Attribution:
    """Explain the prediction of the last token of `ids` by those before it."""
    ids = text_of_steps(model, ids, "explain")
    past, target = ids[:-1], int(ids[-1])
    with in_eval_mode(model), model.lent(None, None):  # the whole gradient, whatever its carry
        xs = model.inputs(past[:, None], NO_MASKS)
        if not xs.is_floating_point():
            xs = F.one_hot(xs, model.vocab_size).to(model.bias_q.dtype)
        xs = xs.detach().requires_grad_()
        hs, _ = model.recur(xs, None, NO_MASKS)
        log_probability = F.log_softmax(model.project(hs[-1], NO_MASKS), -1)[0, target]
        (pull,) = torch.autograd.grad(log_probability, xs)
        without = _without_each(model, past, target)
    gradient = (pull * xs.detach()).sum(-1)[:, 0]
    return Attribution(
        log_probability.item(), gradient.double().numpy(), log_probability.item() - without
    )


def telling(model: LanguageModel, ids: Any, context: int = 40, near: int = 6) -> int:
    """The t at which remembering helps most: P(x_t | last `context`) - P(x_t | last `near` tokens).

    A good moment to ask `attribute(model, ids[t - context : t + 1])` what the model remembered.
    """
    ids = torch.as_tensor(flat_integers(ids), device="cpu").long()
    known_labels(ids, model.vocab_size)
    if not 0 < near < context < len(ids):
        raise UserError(
            f"{len(ids)} tokens hold no prediction from {context} tokens before it",
            hint="a longer text, or a shorter context",
        )
    windows = ids.unfold(0, context + 1, 1)
    target = windows[:, -1:]

    def probability(past: torch.Tensor) -> torch.Tensor:
        return torch.softmax(model(past)[0][:, -1], -1).gather(1, target)[:, 0]

    with evaluating(model):
        gained = probability(windows[:, :-1]) - probability(windows[:, -1 - near : -1])
    return context + int(gained.argmax())


@torch.no_grad()
def _without_each(model: LanguageModel, past: torch.Tensor, target: int) -> Array:
    """log P(target) of every text with one token taken out, all in one batch."""
    steps = len(past)
    if steps == 1:  # nothing is left: the state before any text says nothing, so say uniform
        return np.array([-np.log(model.vocab_size)])
    left, out = past.new_tensor(range(steps - 1)), past.new_tensor(range(steps))[:, None]
    others = left + (left >= out).long()
    logits, _ = model(past[others])
    return F.log_softmax(logits[:, -1], -1)[:, target].double().numpy()
