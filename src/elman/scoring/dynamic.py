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
from typing import Any, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from elman.defaults import learns
from elman.errors import UserError, counted
from elman.kernels import captures
from elman.kernels.cuda.graphed import Graphed
from elman.language_model import LanguageModel, read
from elman.language_model.looking import is_hooked
from elman.language_model.loss import widened
from elman.language_model.model import known_labels
from elman.language_model.nests import Nest, over, tensors
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

BEFORE_CAPTURE = 3
"""Windows on a GPU that run as they are, before what comes after them is captured."""

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
        y = ids[at + 1]
        log_p, state = _log_p(model, ids[at].to(device), state)
        known_labels(y, log_p.shape[-1])
        nats = -log_p.gather(-1, y[..., None].to(device)).mean()
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
    windows = _Windows(_still(model), sigma, settings)
    here = text.to(windows.device)
    for start in range(0, len(text) - 1, settings.window):
        end = min(start + settings.window, len(text) - 1)
        at, ahead = slice(start, end), slice(start + 1, end + 1)
        yield windows(here[None, at], here[ahead], text[ahead])
        if progress is not None:
            progress(end - start)


@learns
def adapted_scores(
    model: nn.Module, ids: Any, sigma: Sigma, settings: Adaptation, progress: Progress | None = None
) -> Floats:
    """log P of each token after the first, by a model that learns from them as it goes."""
    following = torch.as_tensor(flat_integers(np.asarray(ids)), device="cpu").long()[1:]
    scores, start = list[Tensor](), 0
    for log_p in adapted(model, ids, sigma, settings, progress):
        following = following.to(log_p.device)
        y = following[start : start + len(log_p), None]
        scores.append(log_p.gather(-1, y)[:, 0])
        start += len(log_p)
    return torch.cat(scores).cpu().double().numpy() if scores else np.zeros(0)


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
    """What learns, by name: all that is not frozen."""
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not weights:
        raise UserError(
            "no weight of this model wants a gradient, so it cannot learn from what it reads",
            hint="model.requires_grad_(True), or of the parts that are to adapt",
        )
    return weights


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


@final
class Rule:
    """How every weight moves along its gradient, and back to where it was trained to."""

    def __init__(
        self, weights: list[Tensor], trained: list[Tensor], steps: list[Tensor], fades: list[Tensor]
    ) -> None:
        self.weights, self.trained, self.steps, self.fades = weights, trained, steps, fades

    @classmethod
    def of(cls, weights: dict[str, nn.Parameter], sigma: Sigma, settings: Adaptation) -> "Rule":
        """The steps and the fading that these settings ask for."""
        mean, pairs = _mean(sigma), [*_paired(weights, sigma)]
        steps = [settings.rate / (s + EPSILON * mean) for _, s in pairs]
        fades = [(settings.decay * s / mean).clamp(max=1) for _, s in pairs]
        return cls([w for w, _ in pairs], [w.detach().clone() for w, _ in pairs], steps, fades)

    @torch.no_grad()
    def learn(self, gradient: tuple[Tensor, ...]) -> None:
        """w ← w - s g, then towards w₀."""
        torch._foreach_addcmul_(self.weights, self.steps, gradient, value=-1)
        torch._foreach_lerp_(self.weights, self.trained, self.fades)


# ---------------------------------------------------------------------- one window after another


@final
class _Windows:
    """Scores windows and learns from each, one after the other, from the state before any text on.

    On a GPU, once a few have been run, those like them are one CUDA graph each.
    """

    def __init__(self, model: nn.Module, sigma: Sigma, settings: Adaptation) -> None:
        self.model, self.weights = model, _weights(model)
        self.device = next(iter(self.weights.values())).device
        self.rule = Rule.of(self.weights, sigma, settings)
        self.state: Nest = None
        self.graph: Graphed | None = None
        self.shape = torch.Size()
        self.before_capture = BEFORE_CAPTURE if _can_be_captured(model) else -1

    def __call__(self, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        """log P of every token after each x, (time, vocabulary); y are the labels, on the GPU."""
        if self.before_capture == 0:
            self.state = over(torch.clone, self.state)
            self.graph, self.shape = Graphed(self._turn, (x, y), warm_up=0), x.shape
        self.before_capture -= 1
        if self.graph is None or x.shape != self.shape:
            return self._run(x, y, labels)
        known_labels(labels, cast(LanguageModel, self.model).vocab_size)
        return self.graph(x, y)[0].clone()

    def _run(self, x: Tensor, y: Tensor, labels: Tensor | None = None) -> Tensor:
        """The same as it is; what autograd kept of it ends here, or nothing could be captured."""
        log_p, self.state = _log_p(self.model, x, self.state)
        if labels is not None:
            known_labels(labels, log_p.shape[-1])
        self.rule.learn(_gradient(-log_p[0].gather(-1, y[:, None]).mean(), self.weights))
        return log_p[0].detach()

    def _turn(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        """What is captured: the state goes on where it lies."""
        held = self.state
        log_p = self._run(x, y)
        for mine, new in zip(tensors(held), tensors(self.state), strict=True):
            mine.copy_(new)
        self.state = held
        return (log_p,)


def _can_be_captured(model: nn.Module) -> bool:
    """Whether its windows are the same work on the same shapes, on a GPU."""
    if type(model) is not LanguageModel or not model.bias_q.is_cuda or is_hooked(model):
        return False
    return captures() and not model.irregular()
