"""How much work a text gets when nobody says: settings that follow from its length and vocabulary.

A default that fixes the number of passes starves a short text and spends minutes on a long one. So
the tokens read in all are fixed instead, to what two cores of a CPU read in about three minutes,
and the passes follow. A long text is read a few times by a wide gru, which learns most from each
token; a short one many times by an lstm, from which the more is hidden the more often it reads, or
it learns the text by heart:

    E = reads / n                                    passes over a text of n tokens
    dropout of outputs = 0.4 · ln(E/7) / ln(40/7)    between 0 and 0.4: nothing below 7 passes
    dropout of W_hh    = 3/4 of that

A brief text (below 100,000 tokens) has fewer updates in a pass than a training needs, and a wide
lstm knows it by heart before the learning rate has come down: its best weights were those of the
10th of 60 passes. It gets fewer lanes and shorter windows, so more updates, a narrower lstm, a
stronger pull on its weights, and 0.5 and 0.4 in the place of the 0.4 and 0.3 above:

    hidden = 64 + √n, to a multiple of 32            128 of 4,500 tokens, 384 of 100,000
    batch  = n / 2,500                               between 4 and 16

With more than 300 different tokens (words, Chinese) most of them are rare, and a table for the way
in beside one for the way out is too much to learn: there, too, the embedding is used again as the
output, and parts of it are hidden.

Words, and characters of a large script, have vocabularies where the output layer is most of the
work: there the embedding is used again as the output (tied), and fewer tokens are read. A text of
a small script beside a thousand characters of others, each now and then, is none of these: where
all of its tokens by their frequencies are no harder to guess than 64 equally frequent ones, it
gets what it would get without them, and parts of its embedding are hidden. (English beside Chinese,
code with emoji, a file in fifty languages: unigram perplexity 31 to 53. Chinese has 450 to 680,
words 90 to 370.) Four such texts of 120 to 200 kB are 0.06 to 0.25 nats better for it; one of
60 kB, with the recipe of brief texts, was 0.14 worse, and no long one was measured, so those keep
the recipe of large vocabularies.

The numbers were chosen by random search on seven texts of 0.1 to 1.9 MB that are in no table of the
README (the King James Bible in three parts, An Anarchist FAQ in three parts, the Debian
Administrator's Handbook): held-out nats against Kneser–Ney of the best order up to 13, which the
search's settings beat on all of them, by 0.02 to 0.07 nats. Those of brief texts were chosen on
English and Italian sayings, Python, Japanese manual pages and tunes, 4,500 to 92,000 characters of
each, by characters and by words; texts that chose nothing are in `benchmarks/results/kinds.json`.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from elman.gradients.carry import CARRIES
from elman.text.vocab import Vocab

LARGE = 1000
"""Tokens in a vocabulary from which on the output layer is most of the work."""

LONG = 550_000
"""Tokens of a small vocabulary from which on a text is long: few passes, and nothing hidden."""

BRIEF = 100_000
"""Tokens of a small vocabulary below which a text is brief: more updates, a narrower model."""

COMMON = 64
"""The perplexity of tokens by their frequencies below which those of a large vocabulary, in a text
neither brief nor long, are mostly rare."""

MANY = 300
"""Tokens in a vocabulary above which those of a brief text are mostly rare."""

SHORT_TEXT: dict[str, Any] = {
    "model": "lstm",
    "hidden_size": 384,
    "embedding_size": 64,
    "batch_size": 16,
    "window": 64,
    "learning_rate": 1e-2,
    "weight_decay": 0.05,
    "dropout_tokens": 0.03,
}
BRIEF_TEXT = SHORT_TEXT | {"window": 32, "weight_decay": 0.2, "dropout_tokens": 0.05}
LONG_TEXT: dict[str, Any] = {
    "model": "gru",
    "hidden_size": 512,
    "embedding_size": 128,
    "batch_size": 32,
    "window": 64,
    "learning_rate": 4e-3,
    "weight_decay": 0.1,
    "dropout_tokens": 0.0,
}
LARGE_VOCABULARY: dict[str, Any] = {
    "model": "lstm",
    "hidden_size": 256,
    "embedding_size": 256,
    "tied": True,
    "batch_size": 16,
    "window": 32,
    "learning_rate": 4e-3,
    "weight_decay": 0.1,
    "dropout_inputs": 0.3,
    "dropout_outputs": 0.5,
    "dropout_recurrent": 0.3,
}
SHARED: dict[str, Any] = {
    "optimizer": "adamw",
    "schedule": "cosine",
    "clip": 1.0,
    "average": "ema",
}


class Size(NamedTuple):
    """How long a text is, how many different tokens it has, and their perplexity by frequency."""

    tokens: int
    vocab_size: int
    perplexity: float = math.inf

    @classmethod
    def of(cls, tokens: int, vocab: Vocab) -> "Size":
        """The size of a training part of so many tokens, which the vocabulary counted.

        >>> Size.of(8, Vocab([*"aabbccdd"])).perplexity
        4.0
        """
        counts = np.array([n for _, n in vocab.token_freqs], dtype=np.float64)
        if not counts.sum():
            return cls(tokens, len(vocab))
        p = counts[counts > 0] / counts.sum()
        return cls(tokens, len(vocab), round(math.exp(-float(p @ np.log(p))), 2))

    @property
    def large(self) -> bool:
        """Whether the vocabulary is large, and not mostly of rare tokens."""
        rare = BRIEF <= self.tokens < LONG and self.perplexity < COMMON
        return self.vocab_size >= LARGE and not rare


def effort(size: Size, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a training on a text of this size, beside those that were `given`.

    >>> [effort(Size(tokens, 80), {})["epochs"] for tokens in (60_000, 180_000, 900_000, 10**7)]
    [40, 26, 5, 1]
    >>> [effort(Size(tokens, 80), {})["hidden_size"] for tokens in (5_000, 20_000, 100_000)]
    [128, 192, 384]
    >>> effort(Size(40_000, 5_000), {"hidden_size": 128})["embedding_size"]
    128
    >>> [effort(Size(180_000, 2_000, p), {})["hidden_size"] for p in (45, 450)]
    [384, 256]
    """
    if size.large:
        recipe = LARGE_VOCABULARY | {"epochs": passes(size.tokens, reads=2_000_000, most=40)}
    else:
        recipe = _small(size, given)
    recipe = SHARED | _consistent(_shaped(recipe, size.tokens), given)
    updates = _updates(size.tokens, recipe | given)
    return recipe | {
        "warm_up": min(100, updates // 10),
        "average_decay": round(min(0.998, max(0.9, 1 - 14 / updates)), 4),
    }


def _updates(tokens: int, used: dict[str, Any]) -> int:
    """How often the weights move: once a pass where nothing cuts the text into windows.

    >>> used = {"batch_size": 4, "window": 25, "epochs": 30}
    >>> _updates(10_000, used), _updates(10_000, used | {"accumulate": 5})
    (3000, 600)
    >>> _updates(10_000, used | {"carry": "full"})
    30
    """
    each = max(1, used["batch_size"] * used["window"])  # 0 is refused with the other settings
    carry = CARRIES.get(used.get("carry", "truncated"))
    whole = carry is not None and carry.whole  # an unknown one, too, is refused with the others
    segments = used["epochs"] if whole else used["epochs"] * tokens // each
    return max(1, segments // max(1, used.get("accumulate", 1)))


def _small(size: Size, given: dict[str, Any]) -> dict[str, Any]:
    if size.tokens < BRIEF:
        return _brief(size) | _hidden(given.get("epochs", 40), outputs=0.5, recurrent=0.4)
    recipe, reads = (SHORT_TEXT, 4_600_000) if size.tokens < LONG else (LONG_TEXT, 4_400_000)
    reads = max(2_000_000, min(reads, 9_200_000_000 // size.vocab_size))  # rare tokens cost, too
    epochs = passes(size.tokens, reads, most=60)
    often = _hidden(given.get("epochs", epochs), outputs=0.4, recurrent=0.3)
    rare = {"dropout_inputs": 0.3} if size.vocab_size >= LARGE else {}
    return recipe | {"epochs": epochs} | often | rare


def _brief(size: Size) -> dict[str, Any]:
    """The recipe of a text so brief that a pass over it makes few updates.

    >>> made = [_brief(Size(tokens, 80)) for tokens in (2_000, 9_000, 45_000)]
    >>> [(recipe["hidden_size"], recipe["batch_size"]) for recipe in made]
    [(96, 4), (160, 4), (288, 16)]
    """
    hidden = 64 + 32 * round(math.sqrt(size.tokens) / 32)
    rare = {"tied": True, "embedding_size": hidden, "dropout_inputs": 0.25}
    return BRIEF_TEXT | {
        "epochs": 40,
        "hidden_size": hidden,
        "batch_size": min(16, max(4, size.tokens // 2500)),
        **(rare if size.vocab_size > MANY else {}),
    }


def _hidden(epochs: int, outputs: float, recurrent: float) -> dict[str, float]:
    """How much is hidden from a model that reads a text so often; the most from 40 passes on."""
    share = min(1, max(0, math.log(epochs / 7) / math.log(40 / 7))) if epochs > 0 else 0
    return {
        "dropout_outputs": round(outputs * share, 2),
        "dropout_recurrent": round(recurrent * share, 2),
    }


def _shaped(recipe: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The recipe with windows of a shape that a short text fills, four to a lane.

    >>> [_shaped(LONG_TEXT, n)["batch_size"] for n in (100, 400, 2_000, 10_000)]
    [1, 1, 7, 32]
    """
    window = max(2, min(recipe["window"], tokens // 5))
    most = max(1, (tokens // window - 1) // 4)
    return recipe | {"window": window, "batch_size": min(recipe["batch_size"], most)}


def _consistent(recipe: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The recipe without what the given options leave no room for."""
    used = recipe | given
    if used.get("tied") and "embedding_size" not in given:
        recipe = recipe | {"embedding_size": used["hidden_size"]}
    elif recipe.get("tied") and used["embedding_size"] != used["hidden_size"]:
        recipe = recipe | {"tied": False}
    return recipe


def passes(tokens: int, reads: int, most: int) -> int:
    """How often to read a text of this length so that `reads` tokens are read in all."""
    return max(1, min(most, round(reads / max(tokens, 1))))


FOLLOW = (*SHARED, *SHORT_TEXT, *LARGE_VOCABULARY, "epochs", "warm_up", "average_decay")
"""The options that follow from the text."""
