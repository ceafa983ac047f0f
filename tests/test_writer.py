"""Text written on a GPU is the text that the host would have written, and follows the weights."""

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elman import kernels
from elman.errors import UserError, WorkFailed
from elman.generation import Sampling, _generator, _uniform, generate, generate_batch
from elman.generation.reading import read_all
from elman.language_model import writer
from elman.language_model.model import LanguageModel
from elman.language_model.turns import _KEPT
from elman.language_model.writer import Held, Writer

CHOICES = [
    {"temperature": 0},
    {},
    {"temperature": 0.5, "top_k": 7},
    {"top_p": 0.9},
    {"top_k": 9, "top_p": 0.5, "exclude": (2, 5)},
    {"top_k": 1000, "top_p": 1.0, "temperature": 2.0},
]
on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@st.composite
def scores(draw):
    """Rows of logits with equals among them, and rules for drawing from them."""
    size = draw(st.integers(1, 40))
    number = st.sampled_from([-math.inf, -2.0, 0.0, 0.25, 1.0, 3.0]) | st.floats(-5, 5, width=32)
    rows = draw(st.lists(st.lists(number, min_size=size, max_size=size), min_size=1, max_size=4))
    for row in rows:
        row[draw(st.integers(0, size - 1))] = 4.0
    rules = Sampling(
        draw(st.sampled_from([0.1, 1.0, 3.0])),
        draw(st.none() | st.integers(1, 45)),
        draw(st.none() | st.floats(0.01, 1.0)),
        exclude=(),
    )
    return torch.tensor(rows), rules


@given(scores())
@settings(deadline=None)
def test_tokens_are_kept_and_weighed_as_on_the_host(problem):
    logits, rules = problem
    held = Held.like(rules, logits.device)
    held.follow(rules)
    weights = writer.weights(logits, logits.amax(-1, keepdim=True), held)
    found = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(found, rules.probabilities(logits), rtol=1e-12, atol=0)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_turns_write_what_steps_and_draws_write(choice, cell):
    torch.manual_seed(0)
    model = LanguageModel(30, cell=cell, hidden_size=16, embedding_size=8, layers=2)
    prompts = [(1, 2, 3), (4,), (1,)]
    with torch.no_grad():
        logits, state = read_all(model, prompts)
    turns = Writer(model, Sampling(**choice), 3, None)
    turns.begin(logits, state, Sampling(**choice))
    chances = [_uniform(_generator(seed)) for seed in range(3)]
    columns = [*turns.write(20, chances), *turns.write(1, chances), *turns.write(29, chances)]
    assert columns == list(generate_batch(model, prompts, 50, **choice))


def test_a_diverged_model_ends_its_text_where_it_diverges():
    model = LanguageModel(7, hidden_size=4)
    rules = Sampling(temperature=0)
    turns = Writer(model, rules, 2, None)
    logits = torch.zeros(2, 7)
    turns.begin(logits, None, rules)
    text = turns.write(8, [])
    assert next(text) == [1, 1]
    turns.begin(logits.index_fill(0, torch.tensor([1]), math.nan), None, rules)
    with pytest.raises(WorkFailed, match="not numbers one can draw from"):
        next(turns.write(8, []))


@pytest.fixture
def exact_products(monkeypatch):
    """A GPU multiplies as the host does, or the two would not write the same text."""
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LanguageModel(300, cell="lstm", hidden_size=32, embedding_size=8).cuda()


@pytest.mark.usefixtures("exact_products")
class TestOnAGpu:
    pytestmark = on_a_gpu

    @pytest.mark.parametrize("choice", CHOICES)
    @pytest.mark.parametrize("cell", ["elman", "gru", "slstm"])
    @pytest.mark.parametrize("embedding", [None, 12])
    def test_the_text_is_the_hosts(self, choice, cell, embedding):
        torch.manual_seed(0)
        model = LanguageModel(130, cell=cell, hidden_size=16, embedding_size=embedding, layers=2)
        prompts = [[1, 2, 3], [4], []]
        here = list(generate_batch(model, prompts, 60, **choice))
        model.cuda()
        for _ in range(3):
            assert list(generate_batch(model, prompts, 60, **choice)) == here
        with kernels.capturing(False):
            assert list(generate_batch(model, prompts, 60, **choice)) == here
        assert list(generate_batch(model, prompts, 3, **choice)) == here[:3]

    def test_a_graph_is_made_once_and_follows_the_weights(self, model):
        before = list(generate(model, [1], 40))
        (kept,) = _KEPT[model].free
        assert kept.graph is not None
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3)
        after = list(generate(model, [1], 40))
        assert _KEPT[model].free == [kept]
        assert after == list(generate(model.cpu(), [1], 40))
        assert after != before

    def test_one_graph_writes_with_any_temperature_and_any_top_p(self, model):
        choices = [{"temperature": t, "top_p": p} for t, p in [(1.0, 0.9), (0.3, 0.5), (3, 0.99)]]
        texts = [list(generate(model, [1], 40, **choice)) for choice in choices]
        assert len(_KEPT[model].free) == 1
        model.cpu()
        assert texts == [list(generate(model, [1], 40, **choice)) for choice in choices]

    def test_a_text_that_was_begun_keeps_the_weights_it_began_with(self, model):
        expected = list(generate(model, [1], 50))
        text = generate(model, [1], 50)
        begun = [next(text) for _ in range(4)]
        model.cpu()
        others = [torch.full((n,), 7.0, device="cuda") for n in (2400, 4096, 9600, 1024, 128) * 40]
        assert [*begun, *text] == expected
        del others

    def test_computed_weights_last_as_long_as_their_text(self, model):
        torch.nn.utils.parametrizations.weight_norm(model.recurrence, "weight_hh_l0")
        text = generate(model, [1], 50)
        begun = [next(text)]
        others = [torch.full((4096,), 7.0, device="cuda") for _ in range(100)]
        found = [*begun, *text]
        del others
        assert found == list(generate(model.cpu(), [1], 50))

    def test_weights_that_move_or_change_their_type_are_followed(self, model):
        list(generate(model, [1], 40))
        for p in model.parameters():
            p.data = -p.data
        after = list(generate(model, [1], 40))
        assert after == list(generate(model.cpu(), [1], 40))
        model.cuda().double()
        assert list(generate(model, [1], 40)) == list(generate(model.cpu(), [1], 40))
        torch.nn.utils.parametrizations.weight_norm(model.recurrence, "weight_hh_l0")
        found = list(generate(model.cuda(), [1], 40))
        model.recurrence.parametrizations.weight_hh_l0.original0.data.mul_(4)
        assert list(generate(model, [1], 40)) != found
        assert list(generate(model, [1], 40)) == list(generate(model.cpu(), [1], 40))

    def test_casts_of_weights_are_made_anew_in_every_text(self, model):
        found: list[int] = []
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16):
                found = list(generate(model, [1], 40))
            others = [torch.full((n,), 7.0, device="cuda") for n in (2400, 4096, 9600) * 40]
            with torch.autocast("cuda", torch.bfloat16):
                assert list(generate(model, [1], 40)) == found
            del others
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)
        _KEPT[model].free.clear()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        with torch.autocast("cuda", torch.bfloat16):
            assert list(generate(model, [1], 40)) == found

    def test_texts_side_by_side_and_left_unfinished_do_not_disturb_each_other(self, model):
        alone = [list(generate(model, [1], 50, seed=seed)) for seed in range(3)]
        texts = [generate(model, [1], 50, seed=seed) for seed in range(3)]
        assert [*map(list, zip(*zip(*texts, strict=True), strict=True))] == alone
        left = generate(model, [1], 50, seed=0)
        assert [next(left) for _ in range(5)] == alone[0][:5]
        assert list(generate(model, [1], 50, seed=1)) == alone[1]
        del left
        assert list(generate(model, [1], 50, seed=2)) == alone[2]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert list(generate(model, [1], 50, seed=0)) == alone[0]

    def test_a_kept_graph_goes_with_its_model_and_holds_none_of_its_weights(self):
        model = LanguageModel(20_000, hidden_size=128)
        size = sum(p.nbytes for p in model.parameters())
        model.cuda()
        list(generate(model, [1], 40))
        graph = weakref.ref(_KEPT[model].free[0])
        gc.collect()
        before = torch.cuda.memory_allocated()
        model.cpu()
        gc.collect()
        assert before - torch.cuda.memory_allocated() >= size
        assert graph() is not None
        del model
        gc.collect()
        assert graph() is None

    def test_what_cannot_be_drawn_from_is_said(self, model):
        with pytest.raises(UserError, match="names no token"):
            list(generate(model, [1], 20, exclude=[300]))
        with torch.no_grad():
            model.bias_q[5] = math.nan
        with pytest.raises(WorkFailed, match="not numbers"):
            list(generate(model, [1], 20))

    def test_torchs_deterministic_algorithms_are_no_hindrance(self, model, monkeypatch):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        expected = list(generate(model, [1], 40, top_p=0.9))
        torch.use_deterministic_algorithms(True)
        try:
            assert list(generate(model, [1], 40, top_p=0.9)) == expected
        finally:
            torch.use_deterministic_algorithms(False)
