"""How well a run predicts a text, beside what guessing and counting do on the same tokens.

    uniform        every token of the vocabulary alike:       p = 1 / |V|
    unigram        as often as in the training text:          p = (count + 1) / (n + |V|)
    kneser-ney:k   from the k - 1 tokens before, by counting the training text (`elman.ngram`)

All of them, like the model, predict every token of the text after its first, once, and none is
told anything but the training text.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman import metrics, splits
from elman.language_model import LanguageModel
from elman.metrics import Score
from elman.ngram import NgramModel
from elman.runs import Run
from elman.vocab import Vocab

Ids = NDArray[Any]

ORDERS = {"char": (5, 7), "byte": (5, 7), "word": (2, 3)}
"""How far the counting baselines look, by level: near their best and cheap."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of one model and its baselines over the same predicted tokens."""

    model: Score
    baselines: Mapping[str, Score]
    characters: int  # of text, that the predicted tokens stand for
    unknown: int  # tokens of the text that are not in the vocabulary

    def json(self) -> dict[str, Any]:
        """`{"tokens", "nats_per_token", "perplexity", "bits_per_char"}`, for each baseline too."""
        return {
            **self.row(self.model),
            "characters": self.characters,
            "unknown_tokens": self.unknown,
            "baselines": {name: self.row(score) for name, score in self.baselines.items()},
        }

    def row(self, score: Score) -> dict[str, Any]:
        """The four numbers of one score; null stands for a perplexity beyond all numbers."""
        numbers = {
            "tokens": score.tokens,
            "nats_per_token": score.nats_per_token,
            "perplexity": score.perplexity,
            "bits_per_char": score.bits_per_char(self.characters),
        }
        return {name: n if math.isfinite(n) else None for name, n in numbers.items()}


def evaluate(
    model: LanguageModel, vocab: Vocab, ids: Ids, *, train: Ids | None = None
) -> Evaluation:
    """Score `ids` with the model and, where `train` is given, with baselines that counted it."""
    score = metrics.evaluate(model, ids)
    rivals = {} if train is None else baselines(train, ids, vocab)
    return Evaluation(score, rivals, metrics.characters(vocab, ids), unknown(vocab, ids))


def encode(run: Run, text: str | bytes) -> Ids:
    """Any text as the run's ids, cleaned the way its own text was."""
    return run.vocab.encode(splits.tokens_of(run.config.data, text))


def unknown(vocab: Vocab, ids: Ids) -> int:
    """How many tokens read as `<unk>`; never any at the byte level."""
    return 0 if vocab.unk is None else int(np.count_nonzero(np.asarray(ids) == vocab.unk))


def baselines(train: Ids, ids: Ids, vocab: Vocab) -> dict[str, Score]:
    """Every baseline's score on `ids`, having counted `train`; weakest first."""
    size = len(vocab)
    scores = {"uniform": uniform(ids, size), "unigram": unigram(train, ids, size)}
    for order in ORDERS[vocab.level]:
        if len(train) > order:
            scores[f"kneser-ney:{order}"] = counting(kneser_ney(train, size, order), ids)
    return scores


def title(name: str) -> str:
    """A baseline's name for people.

    >>> title("kneser-ney:5")
    'Kneser–Ney order 5'
    """
    return name.replace("kneser-ney:", "Kneser–Ney order ")


def uniform(ids: Ids, size: int) -> Score:
    """Every token alike: the perplexity is the size of the vocabulary."""
    return Score(len(ids) - 1, (len(ids) - 1) * math.log(size))


def unigram(train: Ids, ids: Ids, size: int) -> Score:
    """p = (count + 1) / (n + |V|): each token as often as in the training text, none impossible."""
    counts = np.bincount(np.asarray(train), minlength=size) + 1
    nats = math.log(counts.sum()) - np.log(counts)
    return Score(len(ids) - 1, float(nats[np.asarray(ids)[1:]].sum()))


def kneser_ney(train: Ids, size: int, order: int) -> NgramModel:
    """The counting model of the training text that other models have to beat."""
    return NgramModel.fit(train, order=order, smoothing="kneser-ney", vocab_size=size)


def counting(model: NgramModel, ids: Ids) -> Score:
    """What a counting model makes of every token after the first."""
    return Score(len(ids) - 1, -float(model.score(np.asarray(ids))[1:].sum()))
