"""Frequencies, stop words, Zipf's law, and the figure."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman import Vocab, corpus, tokens
from elman.counting.statistics import (
    frequencies,
    ranks_to_fit,
    stop_words,
    zipf_least_squares,
    zipf_maximum_likelihood,
)
from elman.errors import UserError
from elman.figures import save
from elman.figures.zipf import zipf


@given(st.text("abcde", min_size=4, max_size=80), st.integers(1, 4))
def test_frequencies_equal_counting_by_hand(text, n):
    found = frequencies(text, n)
    hand = Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1))
    assert dict(found.most_common()) == hand
    assert [count for _, count in found.most_common()] == sorted(hand.values(), reverse=True)
    assert (found.total, found.types) == (sum(hand.values()), len(hand))
    assert found.hapaxes == sum(count == 1 for count in hand.values())


def test_ids_are_counted_like_tokens():
    vocab = Vocab("abracadabra")
    assert (
        frequencies(vocab.encode("abracadabra"), 2, vocab).most_common()
        == frequencies("abracadabra", 2).most_common()
    )
    assert frequencies(np.array([3, 1, 3]), 1).most_common(1) == [((3,), 2)]


@pytest.fixture(scope="module")
def words(time_machine_file):
    return tokens.tokenize(corpus.letters(corpus.load(time_machine_file)), "word")


def test_the_facts_of_the_time_machine(words):
    one, two, three = (frequencies(words, n) for n in (1, 2, 3))
    assert (one.total, one.types) == (32_775, 4_579)
    assert one.most_common(3) == [(("the",), 2261), (("i",), 1267), (("and",), 1245)]
    assert two.types == 20_234
    assert two.most_common(1) == [(("of", "the"), 309)]
    assert three.types == 29_882
    assert three.most_common(1) == [(("the", "time", "traveller"), 59)]


def test_longer_runs_have_the_smaller_exponent(words):
    fits = [zipf_maximum_likelihood(frequencies(words, n).counts) for n in (1, 2, 3)]
    for longer, shorter in zip(fits[1:], fits, strict=False):
        gap = math.hypot(longer.error or 0, shorter.error or 0)
        assert shorter.alpha - longer.alpha > 5 * gap
    assert abs(fits[0].alpha - 1) < 0.02


def test_stop_words_are_the_head_that_makes_up_the_share(words):
    one = frequencies(words)
    head = stop_words(one, 0.25)
    assert head.words[:5] == ["the", "i", "and", "of", "a"]
    counts = dict(one.most_common())
    share = sum(counts[(word,)] for word in head.words) / one.total
    assert head.share == pytest.approx(share)
    assert share >= 0.25 > share - counts[(head.words[-1],)] / one.total
    assert len(stop_words(one, 1.0).words) == one.types


@pytest.mark.parametrize("alpha", [0.4, 1.0, 1.7])
def test_an_exact_power_law_is_found_exactly(alpha):
    counts = 1e6 * np.arange(1, 301) ** -alpha
    for fit in (zipf_least_squares(counts, 3, 200), zipf_maximum_likelihood(counts, 3, 200)):
        assert fit.alpha == pytest.approx(alpha)
        assert fit.expected(7) == pytest.approx(counts[6])
        assert (fit.first, fit.last) == (3, 200)


def test_the_stated_uncertainty_is_that_of_repeated_samples():
    alpha, ranks = 1.2, np.arange(1, 201)
    p = ranks**-alpha / (ranks**-alpha).sum()
    rng = np.random.default_rng(0)
    fits = [zipf_maximum_likelihood(rng.multinomial(5000, p), 1, 200) for _ in range(400)]
    off = np.array([(fit.alpha - alpha) / fit.error for fit in fits if fit.error])
    assert len(off) == 400
    assert abs(off.mean()) < 4 / math.sqrt(400)
    assert abs(off.std() - 1) < 4 / math.sqrt(2 * 400)


def test_the_likeliest_exponent_has_no_likelier_neighbour():
    counts, x = np.array([90, 50, 31, 20, 11, 6, 4, 1]), np.log(np.arange(1, 9))
    fit = zipf_maximum_likelihood(counts, 1, 8)
    likelihood = lambda a: -a * counts @ x - counts.sum() * np.log(np.exp(-a * x).sum())  # noqa: E731
    best = likelihood(fit.alpha)
    assert likelihood(fit.alpha + 1e-3) < best > likelihood(fit.alpha - 1e-3)


def test_the_ranks_that_are_fitted_leave_out_head_and_tail():
    counts = np.sort(np.random.default_rng(0).zipf(1.5, 500))[::-1]
    first, last = ranks_to_fit(counts)
    assert first == 10
    assert counts[last - 1] >= 5 > counts[last]
    assert ranks_to_fit(counts, 2, 30) == (2, 30)


def test_the_figure_has_a_curve_for_each_n_and_is_the_same_each_time(tmp_path):
    text = corpus.load("python-reference")[:50_000].split()
    found = [frequencies(text, n) for n in (1, 2, 3)]
    rows = [(f, zipf_least_squares(f.counts)) for f in found]
    figure = zipf(rows, "word")
    axes = figure.axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[0] == f"single words, α = {rows[0][1].alpha:.2f}"
    assert len(labels) == 4
    for line, f in zip(axes.lines, found, strict=False):
        x, y = (np.asarray(values) for values in line.get_data())
        assert np.array_equal(y, f.counts[x.astype(int) - 1])
    one, two = (save(zipf(rows, "word"), tmp_path / f"{i}.svg").read_bytes() for i in (1, 2))
    assert one == two


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: frequencies("abc", 0), "n=0 must be at least 1"),
        (lambda: frequencies("ab", 3), "a text of 2 tokens has no run of 3; a longer text, or n=2"),
        (lambda: frequencies([], 1), "a text of 0 tokens has no run of 1; a longer text$"),
        (lambda: frequencies("", 1), "a text of 0 tokens"),
        (lambda: stop_words(frequencies("abc", 2)), "not runs of 2"),
        (lambda: stop_words(frequencies("abc"), 0), "share=0 must be above 0"),
        (lambda: zipf_least_squares(np.array([3, 2, 1])), "not 10 to 0"),
        (lambda: zipf_maximum_likelihood(np.array([9, 8, 7]), 0, 3), "not 0 to 3"),
        (lambda: zipf_least_squares(np.array([9, 8, 7]), 1, 4), "first < last ≤ 3, not 1 to 4"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(ask, message):
    with pytest.raises(UserError, match=message):
        ask()
