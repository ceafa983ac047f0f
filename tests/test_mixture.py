"""Mixtures: the weights that make held-out text likeliest, and a model like any other."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from elman import LanguageModel, NgramModel, Vocab, corpus
from elman.errors import UserError
from elman.scoring.mixture import PIECE, Mixture, Network, fit_weights, possible_gain


@pytest.fixture(scope="module")
def texts():
    text = corpus.load("python-reference")
    return text[:40_000], text[40_000:44_000], text[44_000:48_000]


@pytest.fixture(scope="module")
def models(texts):
    vocab = Vocab.from_text(texts[0])
    torch.manual_seed(0)
    network = LanguageModel(len(vocab), cell="gru", hidden_size=8)
    counting = [NgramModel.fit(texts[0], order, vocab=vocab) for order in (2, 5)]
    return [*counting, Network(network, vocab)]


@given(
    seed=st.integers(0, 2**31),
    models=st.integers(1, 4),
    tokens=st.integers(1, 30),
)
@example(seed=15867, models=2, tokens=2)
def test_no_other_weights_make_the_text_likelier(seed, models, tokens):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(5), size=(models, tokens))[:, :, 0]
    w = fit_weights(np.log(p))
    assert math.isclose(w.sum(), 1)
    best = np.log(w @ p).mean()
    for other in [*np.eye(models), *rng.dirichlet(np.ones(models), size=50)]:
        # the promise, and the rounding of two means of logarithms of sums
        bound = 1e-10 + 8 * np.finfo(float).eps * (1 + np.abs(np.log(p)).max())
        assert np.log(other @ p + 1e-300).mean() <= best + bound


@given(
    log_p=st.integers(1, 5).flatmap(
        lambda models: st.lists(
            st.tuples(st.floats(-2, 0), *[st.floats(-800, 0) | st.just(-np.inf)] * (models - 1)),
            min_size=1,
            max_size=25,
        ).map(lambda rows: np.array(rows).T)
    )
)
def test_the_certificate_holds_for_models_that_differ_as_much_as_they_can(log_p):
    w = fit_weights(log_p)
    p = np.exp(log_p - log_p.max(axis=0))
    assert (w >= 0).all()
    assert math.isclose(w.sum(), 1)
    assert possible_gain(w, p) <= 1e-10 + 4 * np.finfo(float).eps


@given(
    rows=st.lists(
        st.tuples(st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0, 1)), min_size=1, max_size=9
    )
)
def test_nothing_gains_more_than_the_certificate_says(rows):
    p, w, other = np.array(rows)[:, :2].T, np.array([0.3, 0.7]), rows[0][2]
    gain = np.log([other, 1 - other] @ p).mean() - np.log(w @ p).mean()
    assert gain <= possible_gain(w, p) + 1e-14 * 10


def test_a_model_that_adds_nothing_has_no_weight():
    assert fit_weights(np.log([[0.5, 0.5], [0.1, 0.1]])).tolist() == [1, 0]
    assert fit_weights(np.log([[0.5, 0.2]])).tolist() == [1]


def test_a_mixture_is_the_weighted_sum_of_its_models(models, texts):
    mixture = Mixture(models, [0.2, 0.5, 0.3])
    parts = [np.exp(model.log_probabilities(texts[1])) for model in models]
    expected = 0.2 * parts[0] + 0.5 * parts[1] + 0.3 * parts[2]
    assert np.allclose(np.exp(mixture.log_probabilities(texts[1])), expected)


def test_mixing_beats_the_best_alone_on_text_it_was_not_fitted_on(models, texts):
    train, held_out, test = texts
    halves = [train[:20_000], train[20_000:]]  # each model knows what the other does not
    pair = [NgramModel.fit(half, 5, vocab=models[0].vocab) for half in halves]
    mixture = Mixture.fit(pair, held_out)
    assert mixture.perplexity(test) < 0.95 * min(model.perplexity(test) for model in pair)
    assert mixture.perplexity(held_out) <= Mixture(pair).perplexity(held_out)
    assert Mixture.fit([*models, *pair], held_out).weights[0] < 0.01  # the bigram adds nothing


def test_it_predicts_what_it_scores_and_writes(models, texts):
    mixture = Mixture(models, [0.2, 0.5, 0.3])
    ids = mixture.encode(texts[1][:12])
    state = mixture.start()
    for token, score in zip(ids, mixture.score(ids), strict=True):
        log_p = mixture.predict(state)
        assert math.isclose(np.exp(log_p).sum(), 1, rel_tol=1e-6)
        assert math.isclose(log_p[token], score, rel_tol=1e-5)
        state = mixture.read(state, np.array([token]))
    written = mixture.generate(40, prompt="the ", seed=3)
    assert written == mixture.generate(40, prompt="the ", seed=3)
    assert len(written) == 40


def test_a_weight_of_zero_leaves_a_model_out(models, texts):
    alone = Mixture(models, [0, 1, 0]).log_probabilities(texts[1])
    assert np.allclose(alone, models[1].log_probabilities(texts[1]))
    impossible = NgramModel.fit(texts[0], 5, "laplace", 0, vocab=models[0].vocab)
    assert impossible.perplexity(texts[2]) == math.inf
    assert Mixture([impossible, models[1]]).perplexity(texts[2]) < math.inf


def test_a_network_is_scored_in_one_go_however_long_the_text(models):
    network = models[2]
    ids = np.random.default_rng(0).integers(1, network.vocab_size, 2 * PIECE + 7)
    x = torch.from_numpy(ids)[None]
    with torch.no_grad():
        logits, _ = network.network(x[:, :-1])
    log_p = logits[0].log_softmax(-1)[torch.arange(len(ids) - 1), x[0, 1:]]
    scores = network.score(ids)
    assert np.allclose(scores[1:], log_p, atol=1e-5)
    assert math.isclose(scores[0], -math.log(network.vocab_size))
    state = network.read(network.start(), ids[:-1])
    assert math.isclose(network.predict(state)[ids[-1]], scores[-1], rel_tol=1e-4)
    assert len(network.score(ids[:0])) == 0


def test_scoring_leaves_a_training_network_in_training(models):
    models[2].network.train()
    models[2].score(np.array([1, 2, 3]))
    assert models[2].network.training


def test_a_bare_network_may_be_mixed(models, texts):
    bare = Mixture([models[1], models[2].network])
    assert np.allclose(
        bare.log_probabilities(texts[1][:50]),
        Mixture([models[1], models[2]]).log_probabilities(texts[1][:50]),
    )


def test_what_cannot_be_mixed_is_refused(models):
    other = NgramModel.fit([0, 1, 2], 2)
    with pytest.raises(UserError, match="cannot be mixed; fit them with the same vocab="):
        Mixture([models[0], other])
    size = models[0].vocab_size
    stranger = NgramModel.fit("ab", 1, vocab=Vocab([chr(200 + i) for i in range(size - 1)]))
    with pytest.raises(UserError, match="different vocabularies"):
        Mixture([models[0], stranger])
    with pytest.raises(UserError, match="no models"):
        Mixture([])
    for weights in ([1], [0.5, 0.6], [1.5, -0.5]):
        with pytest.raises(UserError, match="must be 2 numbers, none negative, that sum to one"):
            Mixture(models[:2], weights)
    with pytest.raises(UserError, match="holds impossible"):
        Mixture.fit([NgramModel.fit([0, 1, 0], 1, "laplace", 0, vocab_size=3)], [2])
    with pytest.raises(UserError, match="held-out text is empty"):
        Mixture.fit(models[:2], "")


def test_a_model_reads_ids_however_they_are_held(models, texts):
    ids = models[0].encode(texts[1][:50])
    held = [ids, ids.tolist(), tuple(ids.tolist()), torch.tensor(ids), ids.astype(np.uint64)]
    for model in (*models, Mixture(models)):
        wanted = model.score(ids)
        ahead = model.predict(model.read(model.start(), ids))
        for other in held:
            assert np.array_equal(model.score(other), wanted)
            assert np.array_equal(model.predict(model.read(model.start(), other)), ahead)
        with pytest.raises(UserError, match="is not in a vocabulary"):
            model.score([len(models[0].vocab)])
