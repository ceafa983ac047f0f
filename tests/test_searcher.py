"""A beam in turns on a GPU finds what a beam on the host finds, to the order of equals."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elman import generation
from elman.errors import WorkFailed
from elman.generation.beams import _steps_of_a_beam, _traced, beam_search
from elman.generation.reading import read_last
from elman.language_model.model import LanguageModel
from elman.language_model.searcher import Searcher
from elman.language_model.turns import _KEPT, MANY


def lively(vocabulary: int, *, steps: int = 0, **shape) -> LanguageModel:
    """A model whose guesses depend on what it read; with `steps` many of them are equal."""
    model = LanguageModel(vocabulary, **shape)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5)
        if steps:
            model.output_weight.zero_()
            model.bias_q.mul_(steps).round_().div_(steps)
    return model


def in_turns(model, prompt, length, width, exclude):
    """What the turns of a GPU find, taken here one by one."""
    with torch.no_grad():
        logits, state = read_last(model, torch.tensor([prompt]), None)
    searcher = Searcher(model, width, exclude, None)
    searcher.begin(logits, state)
    steps = searcher.search(min(2, length)) + searcher.search(length - min(2, length))
    return steps, searcher.scores.numpy()


@given(data=st.data())
def test_turns_find_what_the_host_finds(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    cell = data.draw(st.sampled_from(["elman", "gru", "lstm", "mgu"]))
    vocabulary = data.draw(st.integers(2, 12))
    embedding = data.draw(st.sampled_from([None, 3]))
    steps = data.draw(st.sampled_from([0, 2]))
    shape = {"cell": cell, "hidden_size": 5, "embedding_size": embedding}
    model = lively(vocabulary, steps=steps, layers=data.draw(st.integers(1, 2)), **shape).eval()
    prompt = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=4))
    exclude = data.draw(st.lists(st.integers(0, vocabulary - 2), max_size=2))
    length, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 20))
    found, scores = in_turns(model, prompt, length, width, exclude)
    with torch.no_grad():
        logits, state = read_last(model, torch.tensor([prompt]), None)
        expected, best = _steps_of_a_beam(model, logits, state, length, width, exclude)
    texts = len(best)
    assert np.isneginf(scores[texts:]).all()
    np.testing.assert_allclose(scores[:texts], best, rtol=1e-6)
    assert _traced(found)[:texts] == _traced(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_said_excluded_or_not(value):
    model = lively(6, hidden_size=4).eval()
    with torch.no_grad():
        model.bias_q[3] = value
    for exclude in ([], [3]):
        with pytest.raises(WorkFailed, match="not numbers one can draw from"):
            in_turns(model, [1], 3, 4, exclude)


def test_what_is_excluded_is_never_read():
    model = lively(3, hidden_size=4).eval()
    expected = in_turns(model, [1], 4, 20, [2])
    with torch.no_grad():
        model.recurrence.weight_ih_l0[:, 2] = math.nan
    steps, scores = in_turns(model, [1], 4, 20, [2])
    np.testing.assert_array_equal(scores, expected[1])
    assert _traced(steps)[:16] == _traced(expected[0])[:16]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestOnAGpu:
    @pytest.fixture(autouse=True)
    def exact_products(self, monkeypatch):
        """A GPU multiplies as the host does, or the two would not find the same text."""
        monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee")

    @pytest.mark.parametrize("width", [1, 4, 200])
    @pytest.mark.parametrize("length", [1, 20, 2 * MANY + 3])
    @pytest.mark.parametrize("cell", ["elman", "lstm"])
    def test_the_texts_are_the_hosts(self, cell, length, width):
        torch.manual_seed(0)
        model = lively(130, cell=cell, hidden_size=16, embedding_size=8, layers=2)
        here = beam_search(model, [1, 2], length, width)
        model.cuda()
        for _ in range(3):
            there = beam_search(model, [1, 2], length, width)
            assert [text.ids for text in there] == [text.ids for text in here]
            for one, other in zip(there, here, strict=True):
                assert one.log_probability == pytest.approx(other.log_probability, rel=1e-5)

    def test_a_graph_is_made_once_and_follows_the_weights(self):
        torch.manual_seed(0)
        model = lively(300, cell="gru", hidden_size=32).cuda()
        before = beam_search(model, [1], 20, 4)
        (kept,) = _KEPT[model].free
        assert kept.graph is not None
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(-1)
        after = beam_search(model, [1], 20, 4)
        assert _KEPT[model].free == [kept]
        assert after[0].ids == beam_search(model.cpu(), [1], 20, 4)[0].ids
        assert after[0].ids != before[0].ids

    def test_text_between_two_searches_takes_a_graph_of_its_own(self):
        torch.manual_seed(0)
        model = lively(300, hidden_size=32).cuda()
        found = beam_search(model, [1], 20, 4)
        list(generation.generate(model, [1], 20))
        assert beam_search(model, [1], 20, 4) == found
        assert {type(turns).__name__ for turns in _KEPT[model].free} == {"Searcher", "Writer"}
