"""Text written in native code on a CPU is the text that draws and steps by turns would write."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elman.errors import WorkFailed
from elman.generation import (
    Sampling,
    _draw,
    beam_search,
    generate,
    generate_batch,
)
from elman.generation.beams import _steps_of_a_beam, _traced
from elman.generation.reading import read_last, rows_of
from elman.kernels import cpu
from elman.kernels.cpu.steps import Steps, rules_of
from elman.language_model import native_writer, stepper
from elman.language_model.model import LanguageModel
from elman.nn import GRU

pytestmark = pytest.mark.skipif(cpu.KERNEL.library is None, reason="needs the native kernel")

CHOICES = [
    {"temperature": 0},
    {},
    {"temperature": 0.3, "top_k": 7},
    {"top_p": 0.9},
    {"top_k": 1},
    {"top_k": 9, "top_p": 0.5, "exclude": (2, 5)},
    {"top_k": 2**63 - 1, "top_p": 1.0, "temperature": 2.0},
]


def steps_of(vocabulary: int, rows: int, **shape) -> Steps:
    model = LanguageModel(vocabulary, hidden_size=8, **shape)
    own = model.stepper(None, rows)
    assert own is not None
    assert own.writer is not None
    return own.writer


def drawn(logits, rules, chances):
    """One token for each row, natively."""
    steps = steps_of(logits.shape[1], len(logits))
    asked = rules_of(rules.temperature, rules.top_k, rules.top_p, rules.exclude)
    scores = logits.to(steps.dtype).contiguous()
    draws = 1 if rules.temperature == 0 else chances[None]
    return steps.write(scores, asked, None, draws)[0].tolist()


@st.composite
def draws(draw):
    """Logits with equals among them, rules for drawing from them, and chances."""
    size = draw(st.integers(1, 90))
    seed = draw(st.integers(0, 2**31))
    rows, few = draw(st.integers(1, 5)), draw(st.sampled_from([2, 8, 1000]))
    chance = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, size, generator=chance)
    logits = (logits * few).round() / few * draw(st.sampled_from([0.1, 1.0, 30.0]))
    logits[torch.rand(rows, size, generator=chance) < draw(st.sampled_from([0, 0.5]))] = -math.inf
    logits[:, -1] = draw(st.sampled_from([0.0, 3.0]))
    rules = Sampling(
        draw(st.sampled_from([0, 1e-320, 1e-9, 0.3, 1.0, 5.0, 1e300])),
        draw(st.none() | st.integers(1, 95)),
        draw(st.none() | st.floats(0.001, 1.0).map(lambda p: p * 0.9317)),  # on no sum of equals
        exclude=tuple(draw(st.lists(st.integers(0, size - 1), max_size=3)) if size > 4 else ()),
    )
    chances = torch.rand(rows, generator=chance, dtype=torch.float64)
    return logits, rules, chances


@given(draws())
def test_a_draw_is_the_first_token_whose_sum_of_odds_exceeds_its_chance(problem):
    logits, rules, chances = problem
    try:
        odds = rules.odds(logits)
    except WorkFailed:  # nothing is left to draw
        assert -1 in drawn(logits, rules, chances)
        return
    expected = _draw(odds, [iter([float(u)]) for u in chances])
    assert drawn(logits, rules, chances) == expected


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("size", [1500, 40_000])
def test_draws_from_large_vocabularies(choice, size):
    chance = torch.Generator().manual_seed(size)
    for spread in (0.01, 1, 4):
        logits = torch.randn(3, size, generator=chance) * spread
        logits = logits.mul(64).round().div(64)  # with equals
        chances = torch.rand(3, generator=chance, dtype=torch.float64)
        rules = Sampling(**choice)
        expected = _draw(rules.odds(logits), [iter([float(u)]) for u in chances])
        assert drawn(logits, rules, chances) == expected


@pytest.mark.parametrize("chance", [0.0, 1 - 2**-53])
def test_the_extreme_chances_fall_on_the_first_and_the_last_token_that_is_kept(chance):
    logits = torch.tensor([[-math.inf, 2.0, 1.0, 2.0, 0.0, -math.inf]] * 2)
    rules, chances = Sampling(top_k=3), torch.full((2,), chance, dtype=torch.float64)
    assert drawn(logits, rules, chances) == [1, 1] if chance == 0 else [3, 3]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("cell", ["elman", "gru", "lstm"])
@pytest.mark.parametrize("embedding", [None, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_text_is_that_of_steps_and_draws(choice, cell, embedding, dtype, monkeypatch):
    torch.manual_seed(0)
    model = LanguageModel(60, cell=cell, hidden_size=16, embedding_size=embedding, layers=2)
    model = model.to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5)  # what was written decides what follows
    monkeypatch.setattr("elman.language_model.model.TABLE", 0)  # an embedding stays one
    prompts = [[1, 2, 3], [4], []]
    for rows in (prompts, prompts[:1]):
        native = list(generate_batch(model, rows, 70, **choice))
        with monkeypatch.context() as patch:
            patch.setattr(stepper.Stepper, "writer", None)
            assert native == list(generate_batch(model, rows, 70, **choice))
    assert len({*map(tuple, native)}) > 1


def test_tokens_come_at_once_and_then_by_the_dozen(monkeypatch):
    counts, write = [], Steps.write

    def watched(self, logits, rules, last, chances):
        counts.append(len(chances))
        return write(self, logits, rules, last, chances)

    monkeypatch.setattr(Steps, "write", watched)
    monkeypatch.setattr(native_writer, "UNNOTICED", math.inf)
    model = LanguageModel(20, hidden_size=8)
    text = generate(model, [1], 1000)
    next(text)
    assert counts == [1]
    assert len(list(text)) == 999
    assert counts == [1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 233]
    counts.clear()
    monkeypatch.setattr(native_writer, "UNNOTICED", 0)
    assert len(list(generate(model, [1], 5))) == 5
    assert counts == [1] * 5


def test_a_model_that_diverges_ends_its_text_where_it_does():
    torch.manual_seed(0)
    model = LanguageModel(9, hidden_size=4)
    text = list(generate(model, [1], 20, temperature=0.5))
    bad = next(token for token in text if token != text[0])
    at = text.index(bad) + 1
    with torch.no_grad():
        model.recurrence.weight_ih_l0[:, bad] = math.nan  # the state after it is no number
    written = generate(model, [1], 20, temperature=0.5)
    assert [next(written) for _ in range(at)] == text[:at]
    with pytest.raises(WorkFailed, match="not numbers one can draw from"):
        next(written)


def beams(model, prompt, length, width, exclude):
    """The texts and scores that native code finds, and those that Python does."""
    with torch.no_grad():
        logits, state = read_last(model, torch.tensor([prompt]), None)
    own = model.stepper(rows_of(state, torch.zeros(width, dtype=torch.int64)), width)
    steps, scores = native_writer.searched(own.writer, logits, length, exclude)
    found = list(zip(_traced(steps), scores.tolist(), strict=True))
    with torch.no_grad():
        steps, scores = _steps_of_a_beam(model, logits, state, length, width, exclude)
    expected = list(zip(_traced(steps), scores.tolist(), strict=True))
    return found, expected


@given(data=st.data())
def test_a_beam_finds_what_python_finds(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    size = data.draw(st.integers(2, 40))
    shape = {
        "cell": data.draw(st.sampled_from(["elman", "gru", "lstm"])),
        "hidden_size": 5,
        "embedding_size": data.draw(st.sampled_from([None, 3])),
        "layers": data.draw(st.integers(1, 2)),
    }
    model = LanguageModel(size, **shape).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5)
    prompt = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
    exclude = data.draw(st.lists(st.integers(0, size - 2), max_size=2))
    length, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 50))
    found, expected = beams(model, prompt, length, width, exclude)
    assert all(score == -math.inf for _, score in found[len(expected) :])
    assert [ids for ids, _ in found[: len(expected)]] == [ids for ids, _ in expected]
    assert [s for _, s in found[: len(expected)]] == pytest.approx([s for _, s in expected], 1e-12)
    both = beam_search(model, prompt, length, width, exclude=exclude)
    assert [text.ids for text in both] == [ids for ids, _ in expected]


def test_of_equal_texts_a_beam_keeps_the_first_and_of_equal_tokens_those_of_lower_ids():
    model = LanguageModel(70, hidden_size=4)
    with torch.no_grad():
        model.weight_hq.zero_()
        model.bias_q.zero_()[40:] = 1
    found = beam_search(model, [1], 2, 33, exclude=[41])
    assert [text.ids for text in found] == [
        *([40, token] for token in range(40, 70) if token != 41),
        *([42, token] for token in (40, 42, 43, 44)),
    ]


def test_a_beam_takes_no_more_room_than_there_are_texts():
    model = LanguageModel(6, hidden_size=4)
    assert len(beam_search(model, [1], 2, 10**12)) == 25
    assert len(beam_search(model, [1], 3, 26, exclude=[0, 0])) == 26
    assert len(beam_search(model, [1], 50, 7, exclude=[0, 1, 2, 3, 4])) == 1


def test_beams_of_large_vocabularies_on_two_threads():
    torch.manual_seed(0)
    model = LanguageModel(9000, hidden_size=16, embedding_size=8).double()
    found, expected = beams(model, [1], 4, 24, [0])
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("exclude", [[], [3]])
def test_a_beam_ends_where_scores_are_not_numbers(value, exclude):
    model = LanguageModel(6, hidden_size=4)
    with torch.no_grad():
        model.bias_q[3] = value
    with pytest.raises(WorkFailed, match="not numbers one can draw from"):
        beam_search(model, [1], 3, 4, exclude=exclude)
    with torch.no_grad():
        model.bias_q[3] = 0
        model.recurrence.weight_ih_l0[:, 2] = math.nan  # read after a step
    with pytest.raises(WorkFailed, match="not numbers one can draw from"):
        beam_search(model, [1], 3, 6)
    assert len(beam_search(model, [1], 3, 6, exclude=[2])) == 6


def test_a_beam_goes_on_from_piece_to_piece(monkeypatch):
    torch.manual_seed(3)
    model = LanguageModel(30, cell="lstm", hidden_size=8, layers=2)
    whole = beam_search(model, [1], 40, 5)
    monkeypatch.setattr(native_writer, "MANY", 3)
    assert beam_search(model, [1], 40, 5) == whole


def test_weights_that_change_while_a_text_is_written_are_read():
    model = LanguageModel(20, hidden_size=8)
    text = generate(model, [1], 300, temperature=0)
    next(text)
    with torch.no_grad():
        model.bias_q[7] += 1e3
    assert next(text) == 7


def test_outputs_that_no_input_has_are_not_written_natively():
    out = torch.nn.Linear(8, 5)
    assert stepper.Stepper(GRU(4, 8).eval(), out).writer is None
    assert stepper.Stepper(GRU(5, 8).eval(), out).writer is not None
    assert stepper.Stepper(GRU(3, 8).eval(), out, embedding=torch.zeros(4, 3)).writer is None
