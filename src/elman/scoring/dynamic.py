"""Dynamic evaluation: a model that goes on learning from the text it is tested on.

Each window is scored first, with the weights as they are, and only then learnt from: truncated
backpropagation through time that never stops. With w₀ the trained weights and σ the root mean
square of each weight's gradient over the training text,

    w ← w - rate · g / (σ + ε) + decay · min(σ/mean σ, 1/decay) ⊙ (w₀ - w)

so a weight that training still moved moves, and what was learnt from the text fades back towards
what was trained. ε is a tenth of mean σ. Krause, Kahembwe, Murray and Renals (2018), "Dynamic
evaluation of neural sequence models".

    settings = choose(model, sigma, validation)      never on the text that is reported
    log_p = adapted_scores(model, ids, sigma, settings)
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from elman.defaults import learns
from elman.errors import UserError, counted
from elman.language_model import read
from elman.language_model.loss import widened
from elman.language_model.model import known_labels
from elman.language_model.nests import Nest, over
from elman.options import check, option
from elman.text.batches import flat_integers

Floats = NDArray[np.float64]
Sigma = dict[str, Tensor]
Progress = Callable[[int], None]
"""Called with the number of tokens that were just read."""

PANEL = "Adaptation"
EPSILON = 0.1
"""ε as a part of mean σ: weights that training hardly moved are not thrown about."""

LANES, WINDOWS = 16, 200
"""How much of the training text σ is measured on: so many lanes, at most so many windows each."""

MOST_STEPS = 6
"""Doublings, or halvings, of a setting: an untrained model would have no end of them."""

MOST_HALVINGS = 20
"""Halvings of a rate under which the model diverges."""

CHOICE_TOKENS = 8_000
"""How much of the validation text chooses the settings, at most."""


@dataclass(frozen=True)
class Adaptation:
    """How fast a model learns from what it has just been tested on, and how fast it forgets that.

    The defaults were chosen on the training part of The Time Machine (docs/evaluation.md).
    """

    rate: float = option(2e-4, "Step along the scaled gradient", panel=PANEL, at_least=0)
    decay: float = option(4e-3, "Back towards the trained weights", panel=PANEL, at_least=0)
    window: int = option(20, "Tokens scored before they are learnt from", panel=PANEL, at_least=1)

    def __post_init__(self) -> None:
        check(self)


@learns
def gradient_sizes(model: nn.Module, train: Any, window: int = Adaptation.window) -> Sigma:
    """σ: the root mean square of each weight's gradient, over batches of the training text."""
    ids = torch.as_tensor(flat_integers(np.asarray(train)), device="cpu").long()
    lanes = min(LANES, (len(ids) - 1) // window)
    if lanes < 1:
        raise UserError(
            f"{counted(len(ids), 'tokens')} of training text are fewer than a window of {window}",
            hint="a smaller window, or more text",
        )
    steps = (len(ids) - 1) // lanes
    model = _still(model)
    weights = _weights(model)
    device = next(iter(weights.values())).device
    rows = torch.arange(lanes, device="cpu")[:, None] * steps
    squares = {name: torch.zeros_like(w) for name, w in weights.items()}
    count, state = 0, None
    for start in range(0, min(steps - window + 1, WINDOWS * window), window):
        at = rows + torch.arange(start, start + window, device="cpu")
        x, y = ids[at].to(device), ids[at + 1].to(device)
        log_p, state = _log_p(model, x, state)
        known_labels(y, log_p.shape[-1])
        nats = -log_p.gather(-1, y[..., None]).mean()
        for square, g in zip(squares.values(), _gradient(nats, weights), strict=True):
            square.add_(g * g)
        count += 1
    return {name: (square / count).sqrt_() for name, square in squares.items()}


def adapted(
    model: nn.Module, ids: Any, sigma: Sigma, settings: Adaptation, progress: Progress | None = None
) -> Iterator[Tensor]:
    """log P of every token after each id but the last, window by window: (time, vocabulary).

    What is yielded was computed before the model learnt from that window; the model that was given
    is left as it is.
    """
    text = torch.as_tensor(flat_integers(np.asarray(ids)), device="cpu").long()
    model = _still(model)
    weights = _weights(model)
    device = next(iter(weights.values())).device
    rule = [_rule(w, s, settings, _mean(sigma)) for w, s in _paired(weights, sigma)]
    state = None
    for start in range(0, len(text) - 1, settings.window):
        x = text[start : min(start + settings.window, len(text) - 1)][None].to(device)
        y = text[start + 1 : start + 1 + x.shape[1]].to(device)
        log_p, state = _log_p(model, x, state)
        known_labels(y, log_p.shape[-1])
        yield log_p[0].detach()
        gradient = _gradient(-log_p[0].gather(-1, y[:, None]).mean(), weights)
        with torch.no_grad():
            for (w, trained, step, fade), g in zip(rule, gradient, strict=True):
                w.addcmul_(step, g, value=-1).lerp_(trained, fade)
        if progress is not None:
            progress(x.shape[1])


@learns
def adapted_scores(
    model: nn.Module, ids: Any, sigma: Sigma, settings: Adaptation, progress: Progress | None = None
) -> Floats:
    """log P of each token after the first, by a model that learns from them as it goes."""
    following = torch.as_tensor(flat_integers(np.asarray(ids)), device="cpu").long()[1:]
    scores, start = [], 0
    for log_p in adapted(model, ids, sigma, settings, progress):
        y = following[start : start + len(log_p), None].to(log_p.device)
        scores.append(log_p.gather(-1, y)[:, 0].cpu().double().numpy())
        start += len(log_p)
    return np.concatenate(scores) if scores else np.zeros(0)


def choose(
    model: nn.Module,
    sigma: Sigma,
    validation: Any,
    start: Adaptation | None = None,
    progress: Progress | None = None,
) -> Adaptation:
    """The rate, then the decay, under which the validation text is likeliest: up and down by twos.

    A short text leaves little to adapt to, so at most its first tokens are read; the search stops
    where neither neighbour is better.
    """
    start, ids = start or Adaptation(), np.asarray(validation)[:CHOICE_TOKENS]
    if len(ids) < 2:
        raise UserError("there is no validation text to choose by", hint="give rate= and decay=")
    known: dict[Adaptation, float] = {}

    def nats(settings: Adaptation) -> float:
        if settings not in known:
            scores = adapted_scores(model, ids, sigma, settings, progress)
            known[settings] = -float(scores.mean()) if np.isfinite(scores).all() else math.inf
        return known[settings]

    best = start
    for _ in range(MOST_HALVINGS):  # a rate under which it diverges says nothing of its neighbours
        if math.isfinite(nats(best)):
            break
        best = replace(best, rate=best.rate / 2)
    for name, factor in itertools.product(("rate", "decay"), (2.0, 0.5)):
        for _ in range(MOST_STEPS):
            step = replace(best, **{name: getattr(best, name) * factor})
            if nats(step) >= nats(best):
                break
            best = step
    return best


# ---------------------------------------------------------------------- the parts


def _still(model: nn.Module) -> nn.Module:
    """A copy of the model without dropout, to be changed."""
    return copy.deepcopy(model).eval()


def _weights(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _log_p(model: nn.Module, x: Tensor, state: Nest) -> tuple[Tensor, Nest]:
    """log P of every token after each x, (batch, time, vocabulary), and the state, cut off."""
    logits, state = read(model, x, state)
    return F.log_softmax(widened(logits), -1), over(Tensor.detach, state)


def _gradient(loss: Tensor, weights: dict[str, nn.Parameter]) -> tuple[Tensor, ...]:
    """∂loss/∂w of every weight; zero for one that had no part in it."""
    return torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)


def _paired(weights: dict[str, nn.Parameter], sigma: Sigma) -> Iterator[tuple[Tensor, Tensor]]:
    if weights.keys() != sigma.keys():
        raise UserError(
            "the gradient sizes are not those of this model",
            hint="sigma=gradient_sizes(model, train)",
        )
    return ((w, sigma[name].to(w)) for name, w in weights.items())


def _mean(sigma: Sigma) -> float:
    """Over all weights of all tensors."""
    total = math.fsum(float(s.double().sum()) for s in sigma.values())
    return total / sum(s.numel() for s in sigma.values())


def _rule(
    w: Tensor, sigma: Tensor, settings: Adaptation, mean: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A weight, what it was trained to, how far it goes along its gradient, how fast it returns."""
    step = settings.rate / (sigma + EPSILON * mean)
    fade = (settings.decay * sigma / mean).clamp(max=1)
    return w, w.detach().clone(), step, fade
