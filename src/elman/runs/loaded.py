"""A trained run in your own code: score a text, look inside, ask for the next token, write.

import elman

trained = elman.load("runs/book")
for token, nats in trained.score("The Time Traveller"):
    ...
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elman import generation
from elman.errors import UserError
from elman.language_model import LanguageModel
from elman.runs.config import Config
from elman.runs.device import pick
from elman.runs.folder import Run
from elman.scoring.dynamic import Adaptation, adapted_scores, gradient_sizes
from elman.scoring.metrics import Score, evaluating
from elman.scoring.mixture import PIECE, Network
from elman.text import prepared
from elman.text.vocab import Vocab


@final
@dataclass(frozen=True)
class Scored:
    """Every predicted token with its surprise: nats_t = -log P(x_t | x_1 … x_{t-1})."""

    tokens: list[Any]
    nats: NDArray[np.float64]

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        return iter(zip(self.tokens, self.nats.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total(self) -> Score:
        """All of them as one score: `.nats_per_token`, `.perplexity`, `.bits_per_token`."""
        return Score(len(self.tokens), float(self.nats.sum()))


@final
class Loaded:
    """A run's model with its vocabulary; texts go in as they are, and are cleaned as the run's was.

    Nothing is put before a text: its first token is scored only after a `context`.
    """

    def __init__(self, run: Run, model: LanguageModel) -> None:
        self.run, self.model = run, model

    @property
    def vocab(self) -> Vocab:
        """The tokens, and the id of each."""
        return self.run.vocab

    @property
    def config(self) -> Config:
        """What the run was asked for."""
        return self.run.config

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.bias_q.device

    def to(self, device: torch.device | str) -> Self:
        """Compute there from now on: "cpu", "cuda", "cuda:1", "mps"; "auto" is a GPU if there is
        one."""
        self.model.to(pick(str(device)))
        return self

    def encode(self, text: str | bytes) -> NDArray[Any]:
        """The ids of a text, cleaned the way the run's own was."""
        return self.run.encode(_checked(text))

    def score(
        self, text: str | bytes, context: str | bytes = "", adapt: Adaptation | None = None
    ) -> Scored:
        """How surprising each token of the text is, in nats, given all before it.

        The context is read first and not scored: the text stands right after it, so between two
        words one of them brings the space. Without a context the first token has nothing to be
        predicted from and is left out, as in `elman evaluate`.

        With `adapt` the model learns from each window of context and text once that is scored
        (`elman.scoring.dynamic`), for this call only; that needs the run's own text, too.
        """
        if context and type(context) is not type(text):
            raise UserError("text and context are not of one kind", hint="two str, or two bytes")
        read = self.encode(context + text if context else text)  # pyright: ignore[reportOperatorIssue]
        before = self._opened(context)
        same = read[: len(before)] == before[: len(read)]
        first = max(1, len(before) if same.all() else int(same.argmin()))
        if len(read) <= first:
            raise UserError(
                f"{text!r} has no token that is predicted from one before it",
                hint="give a longer text, or what comes before it as context=",
            )
        if adapt is None:
            log_p = Network(self.model).score(read)[1:]
        else:
            sigma = gradient_sizes(self.model, self.run.splits().train, adapt.window)
            log_p = adapted_scores(self.model, read, sigma, adapt)
        return Scored(self.vocab.to_tokens(read[first:]), -log_p[first - 1 :])

    def hidden(self, text: str | bytes) -> Tensor:
        """h_t of the last layer after each token of the text: (tokens, hidden)."""
        ids = self._nonempty(text)
        pieces, state = [], None
        with evaluating(self.model):
            for start in range(0, len(ids), PIECE):
                hs, state = self.model.states(ids[None, start : start + PIECE], state)
                pieces.append(hs[:, 0])
        return torch.cat(pieces).clone()

    @property
    def embeddings(self) -> Tensor:
        """What each token becomes, a row for each id: (vocabulary, size).

        Of a one-hot model, what its first layer reads of the token: the columns of W_ih.
        """
        model = self.model
        if model.embedding is not None:
            return model.embedding.weight.detach()[: len(self.vocab)].clone()
        if not model.recurrent:
            raise UserError(
                "this model has no embeddings: an mlp of one-hot tokens has other weights for each "
                "place in its window",
                hint="train it with --embedding-size 64",
            )
        return model.recurrence.weight_ih_l0.detach().T.clone()

    def next_token(self, text: str | bytes = "") -> dict[Any, float]:
        """P(next token | text) of every token, likeliest first.

        After no text at all, what follows a line break (or else the most frequent token).
        """
        network = Network(self.model)
        ids = self._opened(text)
        ids = ids if len(ids) else np.array([generation.opening(self.vocab)])
        p = np.exp(network.predict(network.read(network.start(), ids)))
        order = np.argsort(-p, kind="stable")
        return dict(zip(self.vocab.to_tokens(order), p[order].tolist(), strict=True))

    def generate(
        self,
        prompt: str | bytes = "",
        length: int = 300,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str:
        """`length` tokens that continue the prompt, without it; same seed, same text.

        `elman.generation` has more: several texts at once, token by token, beam search.
        """
        written = generation.generate(
            self.model,
            self._opened(prompt),
            length,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            exclude=generation.unwritten(self.vocab),
            start=generation.opening(self.vocab),
        )
        return self.vocab.decode(list(written))

    def _opened(self, text: str | bytes) -> NDArray[Any]:
        """The ids of a text that is to be continued: what follows brings its own space."""
        return self.vocab.encode(prepared.prompt(self.config.data, _checked(text)))

    def _nonempty(self, text: str | bytes) -> NDArray[Any]:
        ids = self.encode(text)
        if len(ids) == 0:
            raise UserError(f"{text!r} has no tokens", hint="give a text of at least one")
        return ids

    def __repr__(self) -> str:
        shape = self.model.shape
        layers = f"{shape.layers} layers of " if shape.layers > 1 else ""
        return (
            f"<elman run {self.run.path}: {layers}{shape.cell} {shape.hidden_size}, "
            f"{len(self.vocab)} {self.vocab.level_used.units}, on {self.device}>"
        )


def _checked(text: Any) -> Any:
    if not isinstance(text, str | bytes):
        raise UserError(f"a text is a str or bytes, not {text!r}", hint="str(text), if it is one")
    return text


def load(
    path: Path | str, device: torch.device | str = "cpu", weights: str | None = None
) -> Loaded:
    """Open the run folder that `elman train` wrote, with its `best` weights or its `last`.

    None: those that the run is known by, the best unless it was trained with `--weights last`.
    """
    device = pick(str(device))
    run = Run.open(path)
    return Loaded(run, run.load_model(device, weights))
