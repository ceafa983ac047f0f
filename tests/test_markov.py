"""Markov chains against sums over every path, and as the yardstick for every other model."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elman import LanguageModel, MarkovChain, NgramModel, Vocab
from elman.errors import UserError
from elman.scoring.mixture import Network


@st.composite
def chains(draw, most=3, stationary=False):
    """Chains of up to that order; with zeros here and there, unless they start stationary."""
    m, order = draw(st.integers(2, 4)), draw(st.integers(1, most))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.ones(m), size=(m,) * order)
    table[rng.random(table.shape) < (0 if stationary else 0.1)] = 0
    table += np.eye(m)[rng.integers(m, size=(m,) * order)] * 0.1
    table /= table.sum(-1, keepdims=True)
    initial = rng.dirichlet(np.ones(m**order)).reshape((m,) * order)
    return MarkovChain(table) if stationary else MarkovChain(table, initial)


def joint(chain: MarkovChain, path: tuple[int, ...]) -> float:
    """P(x_1, …, x_τ) ∏ P(x_t | x_{t-τ}, …, x_{t-1}), for paths of τ symbols and more."""
    tau = chain.order
    steps = [chain.transition[path[t - tau : t + 1]] for t in range(tau, len(path))]
    return float(chain.initial[path[:tau]] * np.prod(steps))


def paths(chain: MarkovChain, length: int):
    return itertools.product(range(chain.vocab_size), repeat=length)


@given(chains())
def test_the_joint_is_the_product_of_the_factors_and_sums_to_one(chain):
    length = chain.order + 2
    for path in itertools.islice(paths(chain, length), 40):
        assert math.isclose(
            math.exp(chain.log_probability(path)), joint(chain, path), abs_tol=1e-15
        )
    assert math.isclose(sum(joint(chain, path) for path in paths(chain, length)), 1)


@given(chains(), st.integers(1, 5))
def test_a_short_beginning_is_a_sum_over_its_continuations(chain, length):
    longest = max(length, chain.order)
    path = tuple(chain.sample(length, seed=3).tolist())
    total = sum(joint(chain, p) for p in paths(chain, longest) if p[:length] == path)
    assert math.isclose(math.exp(chain.log_probability(path)), total)


@given(chains(), st.integers(1, 4))
def test_steps_ahead_are_sums_over_every_path_between(chain, steps):
    window = tuple(chain.sample(chain.order, seed=1).tolist())
    expected = np.zeros(chain.vocab_size)
    for between in paths(chain, steps):
        path = (*window, *between)
        expected[between[-1]] += joint(chain, path) / chain.initial[window]
    assert np.allclose(chain.ahead(steps)[window], expected)


@given(chains(most=1))
def test_two_steps_are_the_notes_sum_over_the_symbol_between(chain):
    P = chain.transition
    notes = [
        [sum(P[b, c] * P[a, b] for b in range(len(P))) for c in range(len(P))]
        for a in range(len(P))
    ]
    assert np.allclose(chain.ahead(2), notes)


@given(chain=chains(most=2), steps=st.integers(1, 200))
def test_many_steps_ahead_are_the_steps_of_those_before(chain, steps):
    m = chain.vocab_size
    table, later = chain.transition.reshape(m, -1, m), chain.ahead(steps)
    once_more = np.einsum("wrx,rxy->wry", table, later.reshape(-1, m, m))
    assert np.allclose(chain.ahead(steps + 1).reshape(once_more.shape), once_more, atol=1e-13)


def test_the_far_future_is_the_stationary_one():
    weather = MarkovChain([[0.9, 0.1], [0.5, 0.5]])
    for steps in (10**9, 2**62):
        assert np.allclose(weather.ahead(steps), weather.stationary(), atol=1e-12)
    big = MarkovChain(np.full((60, 60, 60), 1 / 60), np.full((60, 60), 1 / 3600))
    with pytest.raises(UserError, match=r"steps=1000000000 of 3600 windows .* too much"):
        big.ahead(10**9)


@given(chains(), st.integers(1, 7), st.integers(0, 99))
def test_factored_from_the_end_the_joint_is_the_same(chain, length, seed):
    path = chain.sample(length, seed)
    backward = chain.backward_log_probabilities(path)
    assert len(backward) == length
    assert math.isclose(backward.sum(), chain.log_probability(path), rel_tol=1e-9)


def test_what_cannot_come_is_impossible_from_the_end_too():
    chain = MarkovChain([[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 1]], initial=[0, 1, 0])
    for length in range(1, 5):
        for path in itertools.product(range(3), repeat=length):
            backward = chain.backward_log_probabilities(path)
            total = chain.log_probability(path)
            assert backward.sum() == total or math.isclose(backward.sum(), total), path


def test_ids_of_any_type_are_read_from_either_end():
    chain, ids = MarkovChain([[0.5, 0.5], [0.25, 0.75]]), [0, 1, 1, 0]
    for kind in (np.uint8, np.uint64, np.int32):
        held = np.array(ids, kind)
        assert math.isclose(
            chain.backward_log_probabilities(held).sum(), chain.log_probability(ids)
        )


@given(chains(), st.integers(0, 99))
def test_each_backward_factor_is_a_conditional_probability(chain, seed):
    length = chain.order + 2
    path = tuple(chain.sample(length, seed).tolist())
    for t, factor in enumerate(chain.backward_log_probabilities(path)):
        later = [
            (p[t], joint(chain, p)) for p in paths(chain, length) if p[t + 1 :] == path[t + 1 :]
        ]
        both = sum(p for symbol, p in later if symbol == path[t])
        assert math.isclose(math.exp(factor), both / sum(p for _, p in later), rel_tol=1e-9)


@given(chains(stationary=True), st.integers(0, 99))
def test_read_backwards_a_stationary_chain_is_a_chain_too(chain, seed):
    path = chain.sample(9, seed)
    backwards = chain.reversed()
    joint = backwards.log_probability(path[::-1])
    assert math.isclose(joint, chain.log_probability(path), abs_tol=1e-12)
    backward = chain.backward_log_probabilities(path)
    assert np.allclose(backwards.score(path[::-1])[::-1], backward)


@given(chains(stationary=True))
def test_the_stationary_distribution_stays_as_it_is(chain):
    pi = chain.stationary()
    assert math.isclose(pi.sum(), 1)
    after = (pi[..., None] * chain.transition).sum(0)
    assert np.allclose(after, pi, atol=1e-12)


def test_the_entropy_rate_is_known_in_closed_form():
    flip = 0.2
    chain = MarkovChain([[1 - flip, flip], [flip, 1 - flip]])
    expected = -flip * math.log(flip) - (1 - flip) * math.log(1 - flip)
    assert math.isclose(chain.entropy_rate(), expected)
    assert MarkovChain([[0, 1], [1, 0]]).entropy_rate() == 0
    assert math.isclose(MarkovChain(np.full((3, 3, 3), 1 / 3)).entropy_rate(), math.log(3))


@given(chains(), st.integers(1, 5))
def test_the_next_symbol_is_predicted_as_it_is_scored(chain, length):
    path = chain.sample(length + 1, seed=5)
    state = chain.read(chain.read(chain.start(), path[:1]), path[1:length])
    scores = chain.score(path)
    assert math.isclose(chain.predict(state)[path[-1]], scores[-1])
    assert math.isclose(np.exp(chain.predict(state)).sum(), 1)


def test_samples_follow_the_chain():
    table = np.array([[0.7, 0.3, 0.0], [0.1, 0.2, 0.7], [0.5, 0.25, 0.25]])
    chain = MarkovChain(table)
    found = MarkovChain.fit(chain.sample(40_000, seed=2), vocab_size=3)
    error = np.sqrt(table * (1 - table) / (40_000 * chain.stationary()[:, None]))
    assert (np.abs(found.transition - table) <= 4 * error).all()
    assert np.array_equal(chain.sample(50, seed=7), chain.sample(50, seed=7))
    assert not np.array_equal(chain.sample(50, seed=7), chain.sample(50, seed=8))
    assert [len(chain.sample(n)) for n in (0, 1, 2)] == [0, 1, 2]


def test_fitting_counts_what_follows_what():
    chain = MarkovChain.fit("aabab", epsilon=0.0, vocab=Vocab("aabab"))  # <unk>, a, b
    assert chain.transition.tolist() == [[1 / 3] * 3, [0, 1 / 3, 2 / 3], [0, 1, 0]]
    assert np.allclose(chain.initial, [0, 3 / 5, 2 / 5])
    smooth = MarkovChain.fit("aabab", epsilon=3.0, vocab=Vocab("aabab"))
    assert np.allclose(smooth.transition[1], [1 / 6, 2 / 6, 3 / 6])
    second = MarkovChain.fit([0, 1, 1, 0, 1, 0], order=2)
    assert second.transition[0, 1].tolist() == [0.5, 0.5]
    assert "".join(MarkovChain.fit("abababab").generate(4, prompt="a")) == "baba"


# The yardstick

TRUTH = MarkovChain(
    np.array(
        [
            [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]],
            [[0.1, 0.3, 0.6], [0.9, 0.05, 0.05], [0.3, 0.3, 0.4]],
            [[0.05, 0.9, 0.05], [0.4, 0.1, 0.5], [0.7, 0.2, 0.1]],
        ]
    )
)


def excess(model, fresh: np.ndarray) -> tuple[float, float]:
    """Nats per symbol above the chain's own score of the same text, and its standard error."""
    gap = TRUTH.score(fresh)[2:] - model.score(fresh)[2:]
    return gap.mean(), gap.std() / math.sqrt(len(gap))


def test_the_chain_scores_its_own_samples_at_its_entropy_rate():
    scores = -TRUTH.score(TRUTH.sample(60_000, seed=1))
    error = scores.std() / math.sqrt(len(scores))  # neighbours hardly correlate: allow five of them
    assert abs(scores.mean() - TRUTH.entropy_rate()) < 5 * error < 0.02


@pytest.mark.parametrize(
    "fit",
    [
        lambda text: MarkovChain.fit(text, 1, epsilon=1.0, vocab_size=3),
        lambda text: MarkovChain.fit(text, 2, epsilon=1.0, vocab_size=3),
        lambda text: NgramModel.fit(text, 3, vocab_size=3),
        lambda text: NgramModel.fit(text, 6, vocab_size=3),
        lambda text: NgramModel.fit(text, 3, "laplace", vocab_size=3),
    ],
    ids=["chain 1", "chain 2", "kneser-ney 3", "kneser-ney 6", "laplace 3"],
)
def test_no_model_beats_the_chain_on_fresh_samples(fit):
    model = fit(TRUTH.sample(30_000, seed=2))
    more, error = excess(model, TRUTH.sample(30_000, seed=3))
    assert more > -4 * error


def test_a_model_of_the_right_order_comes_close_to_the_chain():
    text, fresh = TRUTH.sample(30_000, seed=2), TRUTH.sample(30_000, seed=3)
    right = NgramModel.fit(text, 3, vocab_size=3)
    short = NgramModel.fit(text, 2, vocab_size=3)
    assert excess(right, fresh)[0] < 0.003
    assert excess(short, fresh)[0] > 0.1


def test_a_trained_elman_network_comes_close_to_the_chain():
    torch.manual_seed(0)
    network = LanguageModel(3, cell="elman", hidden_size=24)
    text = torch.from_numpy(TRUTH.sample(64 * 400 + 1, seed=4).astype(np.int64))
    x, y = text[:-1].view(64, 400), text[1:].view(64, 400)
    optimiser = torch.optim.Adam(network.parameters(), lr=0.02)
    for start in [*range(0, 400, 20)] * 8:
        logits, _ = network(x[:, start : start + 20])
        loss = torch.nn.functional.cross_entropy(
            logits[:, 2:].flatten(0, 1), y[:, start + 2 : start + 20].flatten()
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    more, error = excess(Network(network), TRUTH.sample(20_000, seed=5))
    assert -4 * error < more < 0.02


# Refusals


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: MarkovChain([[0.5, 0.6], [0.5, 0.5]]), "transition must hold probabilities"),
        (lambda: MarkovChain([[1.5, -0.5], [0.5, 0.5]]), "transition must hold probabilities"),
        (lambda: MarkovChain([[0.5, 0.5]]), r"shape \(1, 2\) must have one side"),
        (lambda: MarkovChain([1.0]), r"shape \(1,\) must have one side"),
        (lambda: MarkovChain(np.eye(2)), "pieces that never meet"),
        (lambda: MarkovChain(np.full((50, 50, 50), 0.02)), "2500 windows is too much"),
        (lambda: MarkovChain(np.eye(2), [0.5, 0.6]), "initial must hold probabilities"),
        (lambda: MarkovChain(np.eye(2), [1.0]), r"initial of shape \(1,\) must be of shape \(2,\)"),
        (
            lambda: MarkovChain([[0, 1], [1, 0]], vocab=Vocab("a, b")),
            "vocabulary of 5 does not fit",
        ),
        (lambda: MarkovChain.fit("ab", 0), "order=0 must be at least 1"),
        (lambda: MarkovChain.fit("ab", 2), "too short for a chain of order 2"),
        (lambda: MarkovChain.fit("ab", epsilon=-1), "epsilon=-1 must be 0 or more"),
        (lambda: MarkovChain.fit([0, 999] * 9, 2), r"1000\^3 numbers; NgramModel keeps"),
        (lambda: MarkovChain.fit([0, 4, 1], vocab_size=3), "id 4 is not in a vocabulary of 3"),
        (lambda: TRUTH.ahead(0), "steps=0 must be at least 1"),
        (lambda: TRUTH.sample(-1), "length=-1 must be at least 0"),
        (lambda: TRUTH.sample(3, seed=-1), "seed=-1 must be at least 0"),
        (lambda: TRUTH.generate(3, seed=0.5), "seed=0.5 must be a whole number"),
        (lambda: MarkovChain([[0.9, 0.1], [1.0]]), "transition must be a table of numbers"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(ask, message):
    with pytest.raises(UserError, match=message):
        ask()
