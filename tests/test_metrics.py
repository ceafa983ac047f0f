"""Perplexity, and what it is taken over: every token after the first, exactly once."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elman import LanguageModel, Vocab, metrics
from elman.errors import UserError
from elman.language_model import loss
from elman.scoring.metrics import Score, evaluate, perplexity


class Scripted(nn.Module):
    """Always the same logits; counts what it is shown."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))
        self.read = []

    def forward(self, ids, state=None):
        self.read.append(ids.clone())
        return self.logits.expand(*ids.shape, -1), state


def test_perplexity_is_1_for_a_perfect_model():
    sure = Scripted([0.0, 1000.0, 0.0])
    assert evaluate(sure, torch.ones(50, dtype=torch.int64)).perplexity == 1


def test_perplexity_is_infinite_for_a_zero_probability():
    never = Scripted([0.0, -math.inf, 0.0])
    assert evaluate(never, torch.tensor([0, 2, 1, 0])).perplexity == math.inf
    assert perplexity(1e6) == math.inf


def test_perplexity_is_the_size_of_the_vocabulary_for_a_uniform_model():
    uniform = Scripted([0.5] * 28)
    found = evaluate(uniform, torch.arange(28).repeat(5))
    assert found.perplexity == pytest.approx(28, rel=1e-6)
    assert found.bits_per_token == pytest.approx(math.log2(28), rel=1e-6)
    assert found.tokens == 28 * 5 - 1


def by_definition(model, ids):
    """One step at a time, in float64."""
    total, state = 0.0, None
    with torch.no_grad():
        for now, following in itertools.pairwise(ids):
            logits, state = model(now.view(1, 1), state)
            total -= logits.double().log_softmax(-1)[0, 0, following].item()
    return total


@pytest.mark.parametrize("cell", ["elman", "gru", "lstm", "mlp"])
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_evaluation_is_the_definition_whatever_the_piece(cell, piece):
    torch.manual_seed(0)
    model = LanguageModel(11, cell=cell, hidden_size=6).double().train()
    ids = torch.randint(11, (60,))
    found = evaluate(model, ids, piece=piece)
    assert found.tokens == 59
    assert found.nats == pytest.approx(by_definition(model, ids), rel=1e-12)
    assert model.training, "the mode is put back"


def test_a_piece_of_more_steps_than_logits_are_held_for_is_scored_in_parts(monkeypatch):
    torch.manual_seed(0)
    model = LanguageModel(11, cell="gru", hidden_size=6).double()
    ids = torch.randint(11, (4000,))
    wanted = evaluate(model, ids, lanes=3, warm_up=8, piece=500).nats
    monkeypatch.setattr(loss, "PIECE", 3 * 11 * 100)
    monkeypatch.setattr(loss, "_is_native", lambda *_: False)
    found = evaluate(model, ids, lanes=3, warm_up=8, piece=1200).nats
    assert found == pytest.approx(wanted, rel=1e-12)


@given(
    predictions=st.integers(2, 400),
    lanes=st.integers(1, 9),
    warm_up=st.integers(0, 40),
    piece=st.integers(1, 50),
)
def test_lanes_score_every_prediction_exactly_once(predictions, lanes, warm_up, piece):
    if predictions < 2 * lanes * warm_up:
        return
    windows, counts = [], []
    for window, scored in metrics._windows(
        torch.arange(predictions + 1), lanes, slice(None), warm_up, piece
    ):
        windows.append(window)
        counts.append(torch.ones_like(window[:, 1:]).bool() if scored is None else scored)
    predicted, scored = torch.cat([w[:, 1:] for w in windows], 1), torch.cat(counts, 1)
    assert sorted(predicted[scored].tolist()) == list(range(1, predictions + 1))
    read = torch.cat([w[:, :-1] for w in windows], 1)
    assert (predicted - read <= 1).all()
    assert (read[:, 1:] - read[:, :-1] <= 1).all(), "each lane reads on without a gap"
    for row in range(1, lanes):
        if scored[row].any():
            assert int(scored[row].nonzero()[0]) == warm_up


def test_lanes_agree_with_the_definition_for_a_model_of_short_memory():
    torch.manual_seed(0)
    model = LanguageModel(11, cell="mlp", context=4, hidden_size=6).double()
    ids = torch.randint(11, (500,))
    side_by_side = evaluate(model, ids, lanes=5, warm_up=8)
    assert side_by_side.nats == pytest.approx(evaluate(model, ids).nats, rel=1e-12)


def test_any_one_dimensional_integers_will_do():
    torch.manual_seed(0)
    model = LanguageModel(11, hidden_size=6)
    ids = np.arange(11, dtype=np.uint8)
    assert evaluate(model, ids) == evaluate(model, torch.arange(11))


def test_characters_behind_tokens():
    assert metrics.characters(Vocab("abc"), [1, 2, 3]) == 2
    words = Vocab(["the", "time", "machine"])
    assert metrics.characters(words, words.encode("the time machine")) == len(" time machine")
    assert metrics.characters(Vocab([97], level="byte"), list("né".encode())) == 1


def test_characters_behind_an_unknown_word_are_not_known_but_the_first_is_not_predicted():
    words = Vocab(["the", "time", "machine"])
    assert metrics.characters(words, words.encode("time unheard")) is None
    assert metrics.characters(words, words.encode("unheard time")) == len(" time")


def test_scores_in_their_units():
    score = Score(tokens=10, nats=10 * math.log(8))
    assert score.perplexity == pytest.approx(8)
    assert score.bits_per_token == pytest.approx(3)
    assert score.bits_per_char(60) == pytest.approx(0.5)


@pytest.mark.parametrize("ids", [torch.tensor([1]), torch.zeros(2, 2, dtype=torch.int64)])
def test_a_text_with_nothing_to_predict_is_refused(ids):
    with pytest.raises(UserError, match="nothing to predict"):
        evaluate(LanguageModel(3, hidden_size=2), ids)


@pytest.mark.parametrize("wrong", [5, -1, -100])  # torch gives a label of -100 for nothing
@pytest.mark.parametrize("piece", [None, 2000])
def test_a_last_token_that_the_model_does_not_know_is_refused(wrong, piece):
    """It is predicted and never read, so that the model itself is not asked."""
    ids = torch.tensor([0, 1, 2] * 500 + [wrong])
    with pytest.raises(UserError, match="must lie in 0 to 2"):
        evaluate(LanguageModel(3, hidden_size=2), ids, piece=piece)


@pytest.mark.parametrize("spoil", [lambda t: t[::-1].copy()[::-1], lambda t: t.astype(">i4")])
def test_a_text_may_lie_backwards_or_in_another_byte_order(spoil):
    torch.manual_seed(0)
    model, text = LanguageModel(7, hidden_size=5), np.arange(40) * 5 % 7
    assert evaluate(model, spoil(text)) == evaluate(model, text)
