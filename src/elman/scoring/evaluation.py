"""How well a run predicts a text, beside what guessing and counting do on the same tokens.

    uniform        every token of the vocabulary alike:       p = 1 / |V|
    unigram        as often as in the training text:          p = (count + 1) / (n + |V|)
    kneser-ney:k   from the k - 1 tokens before, by counting the training text

All of them, like the model, predict every token of the text after its first, once, and none is
told anything but the training text. A mixture of the model with counting models needs weights, too:
those that fit the validation text best, where there is one besides the text that is scored; else
each half of the text is mixed with the weights that fit the other half, so that no token has a say
in how it is itself predicted.

Beside that fixed model there can be one that learns from every window once it is scored
(`dynamic.py`), a cache of the recent past (`cache.py`), counting that goes on counting, and a
mixture of all these whose weights learn on the way (`online.py`). The compressor's counting is
mixed in bit by bit (`bitwise.py`); it is handed in, as it comes after this stage.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elman.counting.ngram import NgramModel
from elman.counting.sequence_model import SequenceModel
from elman.errors import UserError
from elman.language_model import LanguageModel
from elman.scoring import metrics
from elman.scoring.bitwise import Codes, Reader, Reading, mix_bitwise, read_bits, read_tokens
from elman.scoring.cache import DEFAULT_FLATNESS, FLATNESSES, cache_scores, hidden_states
from elman.scoring.dynamic import Adaptation, Progress, adapted, choose, gradient_sizes
from elman.scoring.metrics import Score
from elman.scoring.mixture import Network, fit_weights
from elman.scoring.online import mix_online, reading_on
from elman.scoring.overlap import share_seen
from elman.text.vocab import Vocab

Ids = NDArray[Any]

RECOUNTS = 32
"""How often, at most, a counting model that goes on counting counts again."""


class Mixed(NamedTuple):
    """The score of a mixture, and each part's weight in it, averaged over the text."""

    score: Score
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Evaluation:
    """Scores of one model and its rivals over the same predicted tokens."""

    model: Score
    baselines: Mapping[str, Score]
    mixture: Mixed | None
    characters: int | None  # of text, that the predicted tokens stand for; None: unknown
    unknown: int  # tokens of the text that are not in the vocabulary
    adapted: Score | None = None  # by a model that learns from what it has read
    adaptation: Adaptation | None = None  # how fast
    online: Mixed | None = None  # of all that learns on the way
    bitwise: Mixed | None = None  # with counting, bit by bit; its weights need not sum to one
    seen: float | None = None  # the share of the text that stands in the training text (overlap.py)

    def json(self) -> dict[str, Any]:
        """`{"tokens", "nats_per_token", "perplexity", "bits_per_char"}`, for each baseline too."""
        adapted = None
        if self.adapted is not None and self.adaptation is not None:
            adapted = {**self.row(self.adapted), "settings": asdict(self.adaptation)}

        def mixed(mixture: Mixed | None) -> dict[str, Any] | None:
            return mixture and {**self.row(mixture.score), "weights": dict(mixture.weights)}

        return {
            **self.row(self.model),
            "characters": self.characters,
            "unknown_tokens": self.unknown,
            "seen_in_training": self.seen,
            "baselines": {name: self.row(score) for name, score in self.baselines.items()},
            "mixture": mixed(self.mixture),
            "adapted": adapted,
            "online_mixture": mixed(self.online),
            "bitwise_mixture": mixed(self.bitwise),
        }

    def row(self, score: Score) -> dict[str, Any]:
        """The four numbers of one score; null stands for what is infinite or not known."""
        numbers = {
            "tokens": score.tokens,
            "nats_per_token": score.nats_per_token,
            "perplexity": score.perplexity,
            "bits_per_char": self.bits_per_char(score),
        }
        return {n: x if x is not None and math.isfinite(x) else None for n, x in numbers.items()}

    def bits_per_char(self, score: Score) -> float | None:
        """Bits for each character of the text, where their number is known."""
        return score.bits_per_char(self.characters) if self.characters else None


class _Texts(NamedTuple):
    """What is scored, what was trained on, what chooses."""

    ids: Ids
    train: Ids | None
    validation: Ids | None


def evaluate(
    model: LanguageModel,
    vocab: Vocab,
    ids: Ids,
    *,
    train: Ids | None = None,
    mix: Sequence[str] = (),
    characters: int | None = None,
    validation: Ids | None = None,
    adapt: bool | Adaptation = False,
    cache: int = 0,
    counts: Reader | None = None,
    others: Mapping[str, LanguageModel] | None = None,
    progress: Progress | None = None,
    score: Score | None = None,
) -> Evaluation:
    """Score `ids` with the model and, where `train` is given, with baselines that counted it.

    `mix` names counting models, such as "kneser-ney:7", to be mixed with the model. `characters` is
    how many characters of text all ids but the first stand for; ids alone do not say it where some
    of them are `<unk>`. `validation` is a text that is neither trained on nor scored: it chooses
    what has to be chosen. `adapt` also scores the model while it learns from what it has read, by
    the settings given or (True) by those that validation chooses. `cache` is how many of the latest
    hidden states a neural cache remembers. `counts` reads the training text bit by bit, and then
    `ids`, to be mixed with the model, adapting or not (`elman.compression.expectations`). `others`
    are models of the same vocabulary and training text that are in every mixture, too. `score` is
    the model's own, where it is known already.
    """
    orders = {name: order_of(name) for name in mix}
    codes = None if counts is None else Codes(vocab)
    if (mix or adapt or counts) and train is None:
        what = "a counting model" if mix or counts else "adapting"
        raise UserError(f"{what} needs the training text", hint="train=run.splits().train")
    models, texts = {"model": model, **(others or {})}, _Texts(ids, train, validation)
    score = metrics.evaluate(model, ids) if score is None else score
    rivals = {} if train is None else baselines(train, ids, vocab)
    mixture = _fixed(models, orders, texts, len(vocab))
    adapted = settings = online = bitwise = None
    if adapt or cache or counts:
        readings: dict[str, Reading] = {}
        for name, each in models.items():
            how, reading = _read(each, texts, adapt, codes, progress)
            readings[f"adapting {name}" if adapt else name] = reading
            settings = settings or how
        learning = {name: reading.log_p for name, reading in readings.items()}
        adapted = _total(learning["adapting model"]) if adapt else None
        if cache:
            learning["cache"] = _cached(model, ids, cache, validation)
        if cache or (adapt and (mix or others)):
            for name, order in orders.items():
                learning[name] = _counting_on(train, ids, len(vocab), order)
            online = _online(learning)
        if counts is not None and codes is not None:
            bitwise = _bitwise(readings, codes, counts, texts)
    if characters is None:
        characters = metrics.characters(vocab, ids)
    missing = unknown(vocab, ids)
    seen = None if train is None else share_seen(ids, train)
    return Evaluation(
        score, rivals, mixture, characters, missing, adapted, settings, online, bitwise, seen
    )


def _fixed(
    networks: Mapping[str, LanguageModel], orders: Mapping[str, int], texts: _Texts, size: int
) -> Mixed | None:
    """The mixture of models that do not learn, with weights that do not either."""
    if len(networks) + len(orders) == 1:
        return None
    models: list[SequenceModel[Any]] = [Network(network) for network in networks.values()]
    models += [kneser_ney(np.asarray(texts.train), size, order) for order in orders.values()]

    def log_p(text: Ids) -> NDArray[np.float64]:
        return np.stack([m.score(np.asarray(text))[1:] for m in models])

    weights = None if texts.validation is None else fit_weights(log_p(texts.validation))
    return mixed(log_p(texts.ids), (*networks, *orders), weights)


def _read(
    model: LanguageModel,
    texts: _Texts,
    adapt: bool | Adaptation,
    codes: Codes | None,
    progress: Progress | None,
) -> tuple[Adaptation | None, Reading]:
    """What the model makes of a text: as it is, or learning on the way, by the settings returned.

    They are chosen where there is something to choose by.
    """
    ids, train, validation = texts
    if not adapt:
        return None, read_tokens(Network(model).distributions(np.asarray(ids)), ids, codes)
    settings = adapt if isinstance(adapt, Adaptation) else Adaptation()
    sigma = gradient_sizes(model, train, settings.window)
    if adapt is True and validation is not None:
        settings = choose(model, sigma, validation, settings)
    windows = adapted(model, ids, sigma, settings, progress)
    reading = read_tokens((w.cpu().double().numpy() for w in windows), ids, codes)
    if np.isnan(reading.log_p).any():
        raise UserError(
            f"learning on the way with a rate of {settings.rate:g}, weights became NaN",
            hint="a smaller rate: --adapt-rate, Adaptation(rate=)",
        )
    return settings, reading


def _cached(
    model: LanguageModel, ids: Ids, size: int, validation: Ids | None
) -> NDArray[np.float64]:
    """The scores of a cache, its θ the one with which validation is likeliest, mixed."""
    theta = DEFAULT_FLATNESS
    if validation is not None:
        hs = hidden_states(model, validation)
        own = Network(model).score(np.asarray(validation))[1:]

        def nats(theta: float) -> float:
            scores = np.stack([own, cache_scores(hs, validation, size, theta)])
            return -float(mix_online(scores).log_p.sum())

        theta = min(FLATNESSES, key=nats)
    return cache_scores(hidden_states(model, ids), ids, size, theta)


def _counting_on(train: Ids | None, ids: Ids, size: int, order: int) -> NDArray[np.float64]:
    every = max(1000, -(-len(ids) // RECOUNTS))
    return reading_on(lambda text: kneser_ney(text, size, order), train, ids, every)


def _online(learning: Mapping[str, NDArray[np.float64]]) -> Mixed:
    mixture = mix_online(np.stack(list(learning.values())))
    share = dict(zip(learning, mixture.weights.round(6).tolist(), strict=True))
    return Mixed(_total(mixture.log_p), share)


def _bitwise(readings: Mapping[str, Reading], codes: Codes, counts: Reader, texts: _Texts) -> Mixed:
    """Models that have read the text, and one that counts its bits, mixed bit by bit."""
    odds = [reading.odds for reading in readings.values()]
    odds.append(read_bits(counts, codes, texts.train, texts.ids))
    following = np.asarray(texts.ids)[1:]
    mixture = mix_bitwise(np.stack(odds), codes.decisions(following), len(following))
    names = (*readings, "counts")
    weights = dict(zip(names, mixture.weights.round(6).tolist(), strict=True))
    return Mixed(_total(mixture.log_p), weights)


def _total(log_p: NDArray[np.float64]) -> Score:
    return Score(len(log_p), -float(log_p.sum()))


def mixed(
    log_p: NDArray[np.float64], names: Sequence[str], weights: NDArray[np.float64] | None = None
) -> Mixed:
    """Mix models, given log P of each token by each, (models, tokens), without looking ahead.

    With the weights given, or each half with those that fit the other half.

    >>> mixed(np.log([[0.5, 0.5], [0.1, 0.1]]), ("good", "bad")).weights
    {'good': 1.0, 'bad': 0.0}
    """
    tokens = log_p.shape[1]
    halves = np.arange(tokens) < tokens // 2
    total, share = 0.0, np.zeros(len(names))
    for here in (halves, ~halves):
        w = fit_weights(log_p[:, ~here]) if weights is None else weights
        best = log_p[:, here].max(axis=0)
        total += float((best + np.log(w @ np.exp(log_p[:, here] - best))).sum())
        share += w * here.mean()
    return Mixed(Score(tokens, -total), dict(zip(names, share.round(6).tolist(), strict=True)))


def order_of(name: str) -> int:
    """The order in "kneser-ney:7"; anything else is refused."""
    match = re.fullmatch(r"kneser-ney:([1-9][0-9]?)", name)
    if match is None:
        raise UserError(
            f"cannot mix with {name!r}",
            hint="kneser-ney:7 or another order, counts, or another run's folder; from Python "
            "the last two are counts= and others=",
        )
    return int(match[1])


def unknown(vocab: Vocab, ids: Ids) -> int:
    """How many tokens read as `<unk>`; never any at the byte level."""
    return 0 if vocab.unk is None else int(np.count_nonzero(np.asarray(ids) == vocab.unk))


def baselines(train: Ids, ids: Ids, vocab: Vocab) -> dict[str, Score]:
    """Every baseline's score on `ids`, having counted `train`; weakest first."""
    size = len(vocab)
    scores = {"uniform": uniform(ids, size), "unigram": unigram(train, ids, size)}
    for order in vocab.level_used.counting_orders:
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
