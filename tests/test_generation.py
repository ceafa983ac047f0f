"""Generation: what may follow, what does follow, and at what cost."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elman import NgramModel, generation
from elman.errors import OutOfRange, UserError, WorkFailed
from elman.generation import (
    Sampling,
    allowed,
    beam_search,
    beams,
    generate,
    generate_batch,
    reading,
)
from elman.language_model import model as language_model
from elman.language_model.model import Dropout, LanguageModel, kinds
from elman.scoring.metrics import evaluating

V = 5


class Tiny(nn.Module):
    """An LSTM language model with opinions, which counts the tokens it is given to read."""

    def __init__(self, vocabulary: int = V, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 4)
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(6, vocabulary)
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            p.data.normal_(0, 1.5, generator=generator)
        self.double()
        self.read = 0

    def forward(self, ids, state=None):
        self.read += ids.shape[1]
        hs, state = self.lstm(self.embedding(ids), state)
        return self.output(self.dropout(hs)), state


def log_probability(model, prompt, ids):
    """log p(ids | prompt), from one pass over the whole text."""
    with torch.no_grad():
        logits, _ = model.eval()(torch.tensor([[*prompt, *ids]]))
    log_p = logits[0].log_softmax(-1)
    return sum(float(log_p[len(prompt) + t - 1, token]) for t, token in enumerate(ids))


logit_rows = st.lists(st.floats(-8, 8), min_size=2, max_size=9).map(lambda row: torch.tensor([row]))


@given(logits=logit_rows, temperature=st.floats(0.05, 20))
def test_temperature_divides_the_logits(logits, temperature):
    p = Sampling(temperature, exclude=()).probabilities(logits)
    torch.testing.assert_close(p, (logits.double() / temperature).softmax(-1))


@given(logits=logit_rows)
def test_temperature_zero_is_certain_of_the_likeliest_and_lowest_id(logits):
    p = Sampling(0, exclude=()).probabilities(logits)[0]
    row = logits[0].tolist()
    assert p.tolist() == [float(i == row.index(max(row))) for i in range(len(row))]


@given(logits=logit_rows, k=st.integers(1, 12), p=st.floats(0.01, 1))
def test_top_k_then_top_p_keep_what_counting_by_hand_keeps(logits, k, p):
    plain = logits[0].double().softmax(-1).tolist()
    likeliest = sorted(range(len(plain)), key=lambda i: -float(logits[0, i]))[:k]
    left = sum(plain[i] for i in likeliest)
    mass = [sum(plain[i] for i in likeliest[:n]) / left for n in range(len(likeliest))]
    if any(abs(m - p) < 1e-9 for m in mass):
        return  # on the very edge, where rounding decides
    kept = [i for i, before in zip(likeliest, mass, strict=True) if before < p]
    total = sum(plain[i] for i in kept)
    expected = [plain[i] / total if i in kept else 0.0 for i in range(len(plain))]
    actual = Sampling(top_k=k, top_p=p, exclude=()).probabilities(logits)[0]
    assert actual.tolist() == pytest.approx(expected, abs=1e-12)


def test_excluded_tokens_have_no_probability_and_the_rest_share_it():
    p = Sampling(exclude=(0, 2)).probabilities(torch.tensor([[9.0, 1.0, 9.0, 1.0]]))
    assert p.tolist() == [[0.0, 0.5, 0.0, 0.5]]


@pytest.mark.parametrize("exclude", [0, None, ("a",), (0.5,)])
def test_what_to_exclude_is_several_ids(exclude):
    with pytest.raises(UserError, match=r"must be several token ids; exclude=\(0,\) excludes one"):
        generate(Tiny(), [1], 3, exclude=exclude)
    with pytest.raises(UserError, match="must be several token ids"):
        beam_search(Tiny(), [1], 3, 2, exclude=exclude)


def test_draws_follow_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.5]])
    sampling = Sampling(temperature=0.8, exclude=(0,))
    p = sampling.probabilities(logits)
    odds = p.numpy()
    chances = [generation._uniform(torch.Generator().manual_seed(3))]
    n = 4000
    counts = torch.zeros(4, dtype=torch.float64)
    for _ in range(n):
        counts[generation._draw(odds, chances)] += 1
    assert counts[0] == 0
    deviation = (p[0] * (1 - p[0]) / n).sqrt()
    assert ((counts / n - p[0]).abs() <= 4 * deviation).all()


def test_not_even_the_smallest_draw_falls_on_an_excluded_token(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.zeros(*size, dtype=torch.float64))
    assert list(generate(Tiny(), [1], 3)) == [1, 1, 1]


def test_numbers_drawn_many_at_a_time_are_those_drawn_one_by_one():
    one, many = (
        torch.Generator().manual_seed(7),
        generation._uniform(torch.Generator().manual_seed(7)),
    )
    for _ in range(600):
        assert next(many) == torch.rand(1, dtype=torch.float64, generator=one).item()


def test_the_same_seed_writes_the_same_text_and_another_seed_another():
    model = Tiny()
    first, again, other = (list(generate(model, [1, 2], 40, seed=seed)) for seed in (7, 7, 8))
    assert first == again != other


def test_greedy_takes_the_likeliest_token_of_the_whole_text_every_time():
    model, text = Tiny(), [2, 4]
    for token in generate(model, [2, 4], 20, temperature=0, exclude=()):
        with torch.no_grad():
            assert token == int(model.eval()(torch.tensor([text]))[0][0, -1].argmax())
        text.append(token)


def test_each_token_is_read_once_however_long_the_text():
    model = Tiny()
    assert len(list(generate(model, [1, 2, 3], 50))) == 50
    assert model.read == 3 + 49  # the last token is written, not read


def test_a_long_prompt_is_read_in_pieces_to_the_same_effect(monkeypatch):
    whole = list(generate(Tiny(), [1, 2, 3, 4] * 5, 20))
    monkeypatch.setattr(reading, "PIECE", 3)
    assert list(generate(Tiny(), [1, 2, 3, 4] * 5, 20)) == whole


def test_tokens_come_as_they_are_drawn():
    model = Tiny()
    stream = generate(model, [1, 2, 3], 1000)
    next(stream)
    assert model.read == 3


@given(
    prompts=st.lists(st.lists(st.integers(0, V - 1), max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_each_row_of_a_batch_is_what_its_own_seed_writes_alone(prompts, seed):
    model, seeds = Tiny(), [seed + 3 * row for row in range(len(prompts))]
    columns = list(generate_batch(model, prompts, 12, seeds=seeds, top_k=3))
    alone = [
        list(generate(model, ids, 12, seed=s, top_k=3))
        for ids, s in zip(prompts, seeds, strict=True)
    ]
    assert [list(row) for row in zip(*columns, strict=True)] == alone


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cell", kinds())
def test_every_cell_writes_what_reading_the_whole_text_again_would(cell, layers):
    torch.manual_seed(1)
    more = {"context": 3} if cell == "mlp" else {}
    model = LanguageModel(6, cell=cell, hidden_size=8, layers=layers, **more).double()
    for p in model.parameters():
        p.data *= 4
    prompts, draw = [[1, 2, 3, 4], [5]], Sampling(exclude=())
    columns = list(generate_batch(model, prompts, 10, seeds=[3, 4], exclude=()))
    for prompt, seed, row in zip(prompts, (3, 4), zip(*columns, strict=True), strict=True):
        chance, text = generation._uniform(torch.Generator().manual_seed(seed)), list(prompt)
        for token in row:
            with torch.no_grad():
                logits, _ = model.eval()(torch.tensor([text]))
            assert [token] == generation._draw(draw.odds(logits[:, -1]), [chance])
            text.append(token)
    (best,) = beam_search(model, prompts[0], 6, 1, exclude=())
    assert best.log_probability == pytest.approx(log_probability(model, prompts[0], best.ids))


class Plain(nn.Module):
    """A model whose every step goes through the module; it counts them."""

    def __init__(self, model):
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, ids, state=None):
        self.calls += 1
        return self.model(ids, state)


SHAPES = {
    "one-hot": {},
    "embedding": {"embedding_size": 7},
    "tied": {"embedding_size": 19, "tied": True},
    "layers": {"layers": 2, "dropout": Dropout(layers=0.5), "embedding_size": 7},
    "zoneout": {"dropout": Dropout(zoneout=0.4, updates=0.2)},
    "zoneout and embedding": {"dropout": Dropout(zoneout=0.4), "embedding_size": 7},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("cell", ["elman", "gru", "lstm"])
@pytest.mark.usefixtures("hastily")
def test_the_fast_steps_write_what_the_module_writes(cell, shape, monkeypatch):
    if shape.get("dropout", Dropout()).zoneout and cell != "gru":  # compiled for seconds each
        monkeypatch.setenv("ELMAN_KERNELS", "reference")
    torch.manual_seed(2)
    model = LanguageModel(23, cell=cell, hidden_size=19, **shape).double()  # in training mode
    for p in model.parameters():
        p.data *= 2
    ids, chance = torch.randint(23, (3, 9)), torch.get_rng_state()
    with evaluating(model):
        _, state = model(ids[:, :4])
        step, (rest, last) = model.stepper(state, rows=3), model(ids[:, 4:], state)
        assert step is not None
        for t in range(5):
            torch.testing.assert_close(step(ids[:, 4 + t]), rest[:, t], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(step.state, last, rtol=1e-11, atol=1e-11)
    for choices in ({}, {"temperature": 0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}):
        expected = list(generate_batch(Plain(model), [[1, 2], [3]], 60, **choices))
        assert list(generate_batch(model, [[1, 2], [3]], 60, **choices)) == expected
    for width in (1, 4, 30):  # 30: more texts than the first step can give
        beams = [beam_search(m, [1, 2], 6, width) for m in (model, Plain(model))]
        assert [c.ids for c in beams[0]] == [c.ids for c in beams[1]]
        scores = [[c.log_probability for c in found] for found in beams]
        assert scores[0] == pytest.approx(scores[1], abs=1e-10)
    plain = Plain(model)
    expected = list(generate(plain, [1, 2], 30))
    assert plain.calls == 30
    calls = []
    monkeypatch.setattr(LanguageModel, "forward", counted(LanguageModel.forward, calls))
    assert list(generate(model, [1, 2], 30)) == expected
    beam_search(model, [1, 2], 8, 4)
    assert len(calls) == 2, "only the prompts go through the module"
    assert model.training
    step = model.stepper(state, rows=3)
    assert step is not None
    torch.testing.assert_close(step(ids[:, 4]), rest[:, 0], rtol=1e-11, atol=1e-11)
    assert torch.equal(torch.get_rng_state(), chance), "nothing is drawn"


def counted(function, calls):
    def call(*args, **options):
        calls.append(args)
        return function(*args, **options)

    return call


def test_embeddings_of_a_large_vocabulary_are_looked_up_step_by_step(monkeypatch):
    torch.manual_seed(0)
    model = LanguageModel(50, cell="gru", hidden_size=8, layers=2, embedding_size=4).double()
    in_a_table = list(generate_batch(model, [[1, 2], [3]], 40))
    monkeypatch.setattr(language_model, "TABLE", 50 * 3 * 8 - 1)
    steps = model.stepper(rows=2)
    assert steps is not None
    assert steps.embedding is not None
    for written in (model, Plain(model)):
        assert list(generate_batch(written, [[1, 2], [3]], 40)) == in_a_table
    beams = [beam_search(m, [1, 2], 6, 4) for m in (model, Plain(model))]
    assert [c.ids for c in beams[0]] == [c.ids for c in beams[1]]
    again = copy.deepcopy(steps)
    assert torch.equal(steps(torch.tensor([4, 5])), again(torch.tensor([4, 5])))
    for outside in (-1, 50):
        with pytest.raises(OutOfRange, match="inputs"):
            steps(torch.tensor([1, outside]))


@pytest.mark.parametrize("cell", ["lstm", "mgu"])
def test_what_is_frozen_stays_frozen_while_text_is_written(cell):
    model = LanguageModel(9, cell=cell, hidden_size=5)
    for p in model.parameters():
        p.requires_grad_(False)
    assert len(list(generate(model, [1], 5))) == 5
    assert len(beam_search(model, [1], 3, 2)) == 2
    assert not any(p.requires_grad for p in model.parameters())


def test_a_model_without_a_recurrence_goes_through_the_module():
    model = LanguageModel(50, cell="mlp", hidden_size=8)
    assert model.stepper() is None
    assert len(list(generate(model, [1], 20))) == 20


def sorted_and_cut(sampling, logits):
    """The rules of `Sampling` as they are told, on all tokens in order."""
    scores = allowed(logits, sampling.exclude)
    p = np.exp((scores - scores.max(-1, keepdims=True)) / sampling.temperature)
    for row, order in zip(p, np.argsort(-scores, kind="stable"), strict=True):
        row[order[sampling.top_k or len(row) :]] = 0
        share = row[order] / row.sum()
        if sampling.top_p not in (None, 1):
            row[order[share.cumsum() - share >= sampling.top_p]] = 0
    return p / p.sum(-1, keepdims=True)


@given(data=st.data())
@settings(max_examples=80)
def test_what_is_kept_of_a_vocabulary_is_as_if_all_of_it_were_sorted(data):
    size = data.draw(st.sampled_from([2, 30, 300, 3000]))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = torch.from_numpy(random.normal(0, data.draw(st.sampled_from([0.01, 1, 5])), (3, size)))
    if data.draw(st.booleans(), "equal ones"):
        logits = logits.round(decimals=1)
    sampling = Sampling(
        data.draw(st.sampled_from([0.01, 0.7, 3])),
        data.draw(st.none() | st.integers(1, size + 2)),
        data.draw(st.none() | st.sampled_from([0.01, 0.9, 0.999, 1])),
    )
    found, expected = sampling.odds(logits), sorted_and_cut(sampling, logits)
    assert ((found > 0) == (expected > 0)).all()
    np.testing.assert_allclose(found, expected, rtol=1e-12)


class Quiet(LanguageModel):
    """A model that never says 3."""

    def forward(self, ids, state=None, masks=None):
        logits, state = super().forward(ids, state, masks)
        logits[..., 3] = -math.inf
        return logits, state


def test_a_model_that_inherits_writes_its_own_way():
    torch.manual_seed(0)
    assert 3 not in set(generate(Quiet(5, hidden_size=8), [1], 200))
    torch.manual_seed(0)
    assert 3 in set(generate(LanguageModel(5, hidden_size=8), [1], 200))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_writes_the_same_text():
    torch.manual_seed(0)
    model = LanguageModel(30, cell="lstm", hidden_size=32, embedding_size=8)
    prompts = [[1, 2, 3], [4], []]
    here = list(generate_batch(model, prompts, 60))
    found = beam_search(model, [1, 2], 10, 4)
    model.cuda()
    assert list(generate_batch(model, prompts, 60)) == here
    assert [c.ids for c in beam_search(model, [1, 2], 10, 4)] == [c.ids for c in found]


def test_many_samples_of_one_prompt_read_it_once():
    model = Tiny()
    samples = list(zip(*generate_batch(model, [[1, 2, 3]] * 6, 8), strict=True))
    assert model.read == 3 + 7
    assert len(set(samples)) > 1


def test_unknown_and_reserved_tokens_are_written_only_when_asked():
    model = Tiny()
    model.output.bias.data[:2] = 20.0  # the model wants nothing else
    assert set(generate(model, [2], 50, exclude=())) == {0, 1}
    assert set(generate(model, [2], 50)) == {1}
    assert set(generate(model, [2], 50, exclude=(0, 1))) <= {2, 3, 4}


def test_an_empty_prompt_reads_the_start_token_instead():
    model = Tiny()
    assert list(generate(model, [], 20)) == list(generate(model, [1], 20))
    assert list(generate(model, [], 20, start=4)) == list(generate(model, [4], 20))
    assert beam_search(model, [], 3, 2, start=4) == beam_search(model, [4], 3, 2)


def test_the_model_keeps_its_mode_and_dropout_is_off_while_it_writes():
    model = Tiny().train()
    model.dropout.eval()
    modes = [module.training for module in model.modules()]
    noisy = Tiny().train()
    assert list(generate(noisy, [1], 30)) == list(generate(Tiny().eval(), [1], 30))
    assert all(module.training for module in noisy.modules())
    next(generate(model, [1], 5))
    assert [module.training for module in model.modules()] == modes


@given(seed=st.integers(0, 100), length=st.integers(1, 4))
def test_a_beam_wide_enough_finds_what_trying_everything_finds(seed, length):
    model = Tiny(vocabulary=4, seed=seed)
    everything = itertools.product(range(1, 4), repeat=length)
    scored = sorted((log_probability(model, [2, 1], ids), ids) for ids in everything)[::-1]
    found = beam_search(model, [2, 1], length, width=3**length)
    assert len(found) == 3**length
    assert [c.log_probability for c in found] == pytest.approx([s for s, _ in scored], abs=1e-9)
    assert tuple(found[0].ids) == scored[0][1]


@given(
    st.integers(1, 9).flatmap(
        lambda size: st.lists(
            st.lists(st.sampled_from([-math.inf, 0.0, 1.0, 1.5]), min_size=size, max_size=size),
            min_size=1,
            max_size=3,
        )
    ),
    st.integers(1, 12),
)
def test_a_beam_goes_on_with_the_likeliest_and_of_equals_with_those_of_lower_ids(rows, count):
    logits = torch.tensor(rows, dtype=torch.float64)
    logits[:, -1] = 1.25
    none = torch.tensor([], dtype=torch.int64)
    log_p, ids = map(torch.from_numpy, beams._likeliest_of_each(logits, none, count))
    torch.testing.assert_close(log_p, logits.log_softmax(-1).gather(1, ids))
    likeliest = logits.sort(descending=True, stable=True).indices[:, :count]
    for row, expected, scores in zip(ids, likeliest, logits, strict=True):
        possible = [{*of[scores[of] > -math.inf].tolist()} for of in (row, expected)]
        assert possible[0] == possible[1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 2])
def test_a_beam_refuses_what_is_no_number_excluded_or_not(value, at):
    logits = torch.zeros(2, 4)
    logits[1, at] = value
    with pytest.raises(WorkFailed, match="not numbers"):
        beams._likeliest_of_each(logits, torch.tensor([0]), 2)


@given(seed=st.integers(0, 50), width=st.integers(1, 5))
def test_beam_scores_are_the_models_own_log_probabilities_best_first(seed, width):
    model = Tiny(seed=seed)
    found = beam_search(model, [1, 3], 6, width)
    scores = [c.log_probability for c in found]
    assert len(found) == width
    assert scores == sorted(scores, reverse=True)
    assert scores == pytest.approx([log_probability(model, [1, 3], c.ids) for c in found])
    assert len({tuple(c.ids) for c in found}) == width


def test_a_beam_of_one_is_greedy_and_a_narrow_beam_prunes_like_the_definition():
    model = Tiny(seed=3)
    (only,) = beam_search(model, [1], 10, 1)
    assert only.ids == list(generate(model, [1], 10, temperature=0))
    kept: list[tuple[int, ...]] = [()]
    for _ in range(5):
        longer = [(*ids, token) for ids in kept for token in range(1, V)]
        kept = sorted(longer, key=lambda ids: -log_probability(model, [1], ids))[:3]
    assert [tuple(c.ids) for c in beam_search(model, [1], 5, 3)] == kept


def test_states_of_any_nesting_follow_their_rows():
    def state(*rows):
        h = torch.tensor([[[row] for row in rows]])  # (layers, batch, hidden)
        return {"a": (h, [h * 10, None]), "b": h[0] * 100}

    joined = reading.joined([state(1), state(2), state(3)])
    picked = reading.rows_of(joined, torch.tensor([2, 0, 0]))
    assert str(picked) == str(state(3, 1, 1))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": "hot"}, "temperature=hot"),
        ({"top_p": "half"}, "top_p=half"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"length": -1}, "length=-1"),
        ({"prompt_ids": [[1, 2]]}, "line of token ids"),
        ({"prompt_ids": [0.5]}, "line of token ids"),
    ],
)
def test_impossible_requests_are_refused_at_the_call(choices, message):
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        generate(Tiny(), **{"prompt_ids": [1], "length": 5, **choices})


def test_more_refusals():
    with pytest.raises(UserError, match="2 seeds for 1 prompts"):
        generate_batch(Tiny(), [[1]], 5, seeds=[1, 2])
    with pytest.raises(UserError, match="width=0"):
        beam_search(Tiny(), [1], 5, 0)
    with pytest.raises(UserError, match=r"exclude=\[9\] names no token of a vocabulary of 5"):
        next(generate(Tiny(), [1], 5, exclude=(9,)))
    with pytest.raises(UserError, match="every token"):
        next(generate(Tiny(), [1], 5, exclude=range(V)))


def test_a_model_that_has_diverged_is_reported_not_sampled():
    model = Tiny()
    model.output.bias.data[3] = math.nan
    with pytest.raises(WorkFailed, match="NaN or infinite"):
        next(generate(model, [1], 5))


def test_what_is_written_does_not_depend_on_torchs_defaults(another_default):
    torch.manual_seed(0)
    model = LanguageModel(7, hidden_size=5, cell="gru")
    wanted = list(generate(model, [1, 2], 9)), beam_search(model, [1, 2], 4, 2)
    another_default()
    assert (list(generate(model, [1, 2], 9)), beam_search(model, [1, 2], 4, 2)) == wanted


@pytest.mark.parametrize(
    "prompt",
    [
        (1, 2, 3),
        iter([1, 2, 3]),
        range(1, 4),
        map(int, "123"),
        np.array([3, 2, 1])[::-1],
        np.array([1, 2, 3], dtype=">i4"),
        np.array([1, 2, 3], dtype="u1"),
        [np.int64(1), np.uint8(2), torch.tensor(3)],
        torch.tensor([1, 2, 3], dtype=torch.uint8),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_a_prompt_is_whatever_holds_whole_numbers(prompt):
    wanted = list(generate(Tiny(), [1, 2, 3], 5, seed=7))
    assert list(generate(Tiny(), prompt, 5, seed=np.int64(7))) == wanted


@pytest.mark.parametrize("prompt", [[True, False], ["1"], [1.0], [[1]], 5])
def test_a_prompt_of_anything_else_is_refused(prompt):
    with pytest.raises(UserError, match="a prompt is a line of token ids"):
        generate(Tiny(), prompt, 5)


def test_a_temperature_near_zero_takes_the_likeliest():
    odds = Sampling(temperature=1e-320, exclude=()).odds(torch.tensor([[0.0, 2.0, 1.0]]))
    assert odds.tolist() == [[0, 1, 0]]
    text = "abcabcabd" * 20
    model = NgramModel.fit(text, 3)
    assert model.generate(9, temperature=1e-320) == model.generate(9, temperature=0)
