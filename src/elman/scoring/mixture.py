"""Mixtures: several models of the same vocabulary, each with its weight.

    P(x_t | past) = Σ_j w_j P_j(x_t | past),        w_j ≥ 0,  Σ_j w_j = 1

Models that err differently are better together than the best of them is alone. The weights are
those under which a text that none of the models was fitted on, and that is not the text the mixture
is judged by, is likeliest. With g_j the mean advantage of model j over the mixture,

    g_j = 1/T Σ_t P_j(x_t | past) / P(x_t | past)

no weights whatever can gain more than max_j g_j - 1 nats per token (the logarithm is concave, and
lies below its tangents), so the fit knows when it is done.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Self, final

import numpy as np
import torch
from torch import nn

from elman.counting.sequence_model import Floats, Ints, SequenceModel
from elman.errors import UserError, WorkFailed
from elman.language_model import read
from elman.language_model.loss import widened
from elman.scoring.metrics import evaluating
from elman.text.vocab import Vocab

PIECE = 1024
"""Tokens a network reads at a time, so that a long text needs no more memory."""

MOST_STEPS = 100
"""Of the fit of weights: 15 was the most that any of 20,000 random problems took."""

ROUNDED_OFF = 1e-6
"""A weight this small is made zero if the mixture is no worse for it."""


@final
class Network(SequenceModel[Any]):
    """A network that maps ids (batch, time) and a state to logits and a state, as `LanguageModel`.

    Before the first token a network has nothing to read; it then holds every token equally likely.
    Its state here is the pair of the network's own and its last logits.
    """

    def __init__(self, network: nn.Module, vocab: Vocab | None = None) -> None:
        self.network = network
        self.vocab = vocab
        self.vocab_size = int(network.vocab_size)  # pyright: ignore[reportArgumentType]

    def score(self, ids: Ints) -> Floats:
        ids = self.encode(ids)
        scores = [np.full(min(1, len(ids)), -np.log(self.vocab_size))]
        for piece, log_p in enumerate(self.distributions(ids)):
            y = ids[1 + piece * PIECE :][: len(log_p)]
            scores.append(log_p[np.arange(len(y)), y])
        return np.concatenate(scores)

    def distributions(self, ids: Ints) -> Iterator[Floats]:
        """log P of every token after each id but the last, piece by piece: (time, vocabulary)."""
        ids, state = self.encode(ids), self.start()
        for start in range(0, len(ids) - 1, PIECE):
            log_p, state = self._run(ids[start : min(start + PIECE, len(ids) - 1)], state)
            yield log_p

    def start(self) -> Any:
        return None, np.full(self.vocab_size, -np.log(self.vocab_size))

    def read(self, state: Any, ids: Ints) -> Any:
        ids = self.encode(ids)
        for start in range(0, len(ids), PIECE):
            _, state = self._run(ids[start : start + PIECE], state)
        return state

    def predict(self, state: Any) -> Floats:
        return state[1].copy()

    def _run(self, ids: Ints, state: Any) -> tuple[Floats, Any]:
        """log P of every token after each of the ids, (time, vocabulary), and the state then."""
        device = next(self.network.parameters()).device
        x = torch.as_tensor(ids.astype(np.int64), device=device)[None]
        with evaluating(self.network):
            logits, inner = read(self.network, x, state[0])
            log_p = widened(logits)[0].log_softmax(-1).cpu().double().numpy()
        return log_p, (inner, log_p[-1])


@final
class Mixture(SequenceModel[tuple[Any, ...]]):
    """A weighted vote of models; networks may be given as they are.

    Equal weights, unless they are given or fitted: `Mixture.fit(models, held_out)`.
    """

    def __init__(
        self, models: Sequence[SequenceModel[Any] | nn.Module], weights: Any = None
    ) -> None:
        self.models = tuple(m if isinstance(m, SequenceModel) else Network(m) for m in models)
        self.weights = _weights(weights, len(self.models))
        self.vocab_size = self.models[0].vocab_size
        vocabs = [m.vocab for m in self.models if m.vocab is not None]
        self.vocab = vocabs[0] if vocabs else None
        self.end = self.models[0].end
        for model in self.models[1:]:
            if (model.vocab_size, model.end) != (self.vocab_size, self.end):
                raise UserError(
                    f"models of {self.vocab_size} and of {model.vocab_size} tokens cannot be mixed",
                    hint="fit them with the same vocab=, all with sentence boundaries or none",
                )
        if any(vocab != self.vocab for vocab in vocabs):
            raise UserError(
                "the models have different vocabularies", hint="fit them with the same vocab="
            )

    def __repr__(self) -> str:
        parts = [f"{w:.3f} × {m}" for w, m in zip(self.weights, self.models, strict=True)]
        return f"<Mixture of {', '.join(parts)}>"

    @classmethod
    def fit(
        cls, models: Sequence[SequenceModel[Any] | nn.Module], held_out: Any, context: Any = ()
    ) -> Self:
        """The weights under which `held_out`, text unknown to every model, is most likely."""
        even = cls(models)
        scores = np.stack([model.log_probabilities(held_out, context) for model in even.models])
        return cls(even.models, fit_weights(scores))

    def score(self, ids: Ints) -> Floats:
        return self._mix([model.score(ids) for model in self.models])

    def start(self) -> tuple[Any, ...]:
        return tuple(model.start() for model in self.models)

    def read(self, state: tuple[Any, ...], ids: Ints) -> tuple[Any, ...]:
        return tuple(m.read(s, ids) for m, s in zip(self.models, state, strict=True))

    def predict(self, state: tuple[Any, ...]) -> Floats:
        return self._mix([m.predict(s) for m, s in zip(self.models, state, strict=True)])

    def _mix(self, log_p: list[Floats]) -> Floats:
        with np.errstate(divide="ignore"):
            weighted = np.stack(log_p) + np.log(self.weights)[:, None]
        return np.logaddexp.reduce(weighted, axis=0)


def fit_weights(log_p: Floats, tolerance: float = 1e-10) -> Floats:
    """The best weights of models, from log P_j of each token, (models, tokens).

    No other weights make the text likelier by more than `tolerance` nats per token, which is
    checked. The problem, with r_jt = P_j / P and the sum of the weights as its own penalty,

        maximise  1/T Σ_t log Σ_j w_j P_jt - Σ_j w_j        where  w ≥ 0

    is solved by a primal-dual interior-point method: Newton's steps on g_j(w) = 1 - z_j and
    w_j z_j = μ, with μ falling. A dozen steps are enough, however many the tokens.

    >>> fit_weights(np.log([[0.9, 0.9, 0.1], [0.1, 0.1, 0.9]])).round(3).tolist()
    [0.708, 0.292]
    """
    best = log_p.max(axis=0)
    if log_p.shape[1] == 0 or not np.isfinite(best).all():
        raise UserError(
            "weights cannot be fitted: the held-out text is empty, or has a token that every model "
            "holds impossible",
            hint="fit on more text, or add a model that is smoothed",
        )
    p = np.exp(log_p - best)
    w = z = np.full(len(p), 1 / len(p))
    for _ in range(MOST_STEPS):
        if possible_gain(w, p) <= tolerance:
            return _rounded(w / w.sum(), p, tolerance)
        w, z = _interior_step(w, z, p)
    raise WorkFailed(
        f"the best weights were not found in {MOST_STEPS} steps: {possible_gain(w, p):.1e} nats "
        "per token may be missing",
        hint="look for models whose probabilities are not numbers",
    )


def possible_gain(w: Floats, p: Floats) -> float:
    """What other weights may gain over these, at most, in nats per token: max_j g_j - 1."""
    w = w / w.sum()
    return float((p / (w @ p)).mean(axis=1).max() - 1)


def _interior_step(w: Floats, z: Floats, p: Floats) -> tuple[Floats, Floats]:
    """One of Newton's steps for w and z, each shortened to stay above zero."""
    models, tokens = p.shape
    r = p / (w @ p)
    mu = 0.1 * (w @ z) / models
    curvature = r @ r.T / tokens + np.diag(z / w)
    dw = np.linalg.solve(curvature, r.mean(axis=1) - 1 + mu / w)
    dz = mu / w - z - z / w * dw
    return w + _reach(w, dw) * dw, z + _reach(z, dz) * dz


def _reach(x: Floats, dx: Floats) -> float:
    """How much of a step leaves every x at least a hundredth of what it was."""
    falling = dx < 0
    return min(1.0, 0.99 * float((-x[falling] / dx[falling]).min(initial=np.inf)))


def _rounded(w: Floats, p: Floats, tolerance: float) -> Floats:
    """The weights with those that are next to nothing left out, where that does no harm."""
    few = np.where(w < ROUNDED_OFF, 0.0, w)
    few /= few.sum()
    return few if (few @ p > 0).all() and possible_gain(few, p) <= tolerance else w


def _weights(weights: Any, models: int) -> Floats:
    if models == 0:
        raise UserError("a mixture of no models", hint="Mixture([model, other])")
    w = np.full(models, 1 / models) if weights is None else np.array(weights, np.float64)
    if w.shape != (models,) or not (w >= 0).all() or not np.isclose(w.sum(), 1):
        raise UserError(
            f"weights={weights} must be {models} numbers, none negative, that sum to one",
            hint="Mixture.fit finds the best ones",
        )
    return w
