"""Mixtures: several models of the same vocabulary, each with its weight.

    P(x_t | past) = Σ_j w_j P_j(x_t | past),        w_j ≥ 0,  Σ_j w_j = 1

Models that err differently are better together than the best of them is alone. The weights are
fitted by expectation–maximisation on text that none of the models was fitted on, and that is not
the text the mixture is judged by: each token is shared out among the models that may have written
it, and a model's weight is its share of the text (Jelinek and Mercer, 1980):

    r_jt = w_j P_j(x_t | past) / Σ_i w_i P_i(x_t | past),        w_j ← 1/T Σ_t r_jt
"""

from collections.abc import Sequence
from typing import Any, Self, final

import numpy as np
import torch
from torch import nn

from elman.counting.sequence_model import Floats, Ints, SequenceModel
from elman.errors import UserError
from elman.language_model import read
from elman.scoring.metrics import evaluating, widened
from elman.text.vocab import Vocab

PIECE = 1024
"""Tokens a network reads at a time, so that a long text needs no more memory."""


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
        scores = [np.full(min(1, len(ids)), -np.log(self.vocab_size))]
        state = self.start()
        for start in range(0, len(ids) - 1, PIECE):
            x, y = ids[start : start + PIECE], ids[start + 1 : start + 1 + PIECE]
            log_p, state = self._run(x[: len(y)], state)
            scores.append(log_p[np.arange(len(y)), y])
        return np.concatenate(scores)

    def start(self) -> Any:
        return None, np.full(self.vocab_size, -np.log(self.vocab_size))

    def read(self, state: Any, ids: Ints) -> Any:
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


def fit_weights(log_p: Floats, tolerance: float = 1e-9, most: int = 10_000) -> Floats:
    """Weights of models by expectation–maximisation, from log P_j of each token, (models, tokens).

    Starts from equal weights and stops once a step gains less than `tolerance` nats per token; each
    step gains something, and there is only one maximum to climb.

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
    w = np.full(len(p), 1 / len(p))
    before = -np.inf
    for _ in range(most):
        total = w @ p
        nats = float(np.log(total).mean())
        if nats - before < tolerance:
            break
        before, w = nats, w * (p / total).mean(axis=1)
    return w / w.sum()


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
