"""Units that follow something, and places where the state was alike."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman.diagnostics import following
from elman.errors import UserError


def test_the_unit_that_was_made_to_follow_is_found():
    text = 'He said "well, it is (all) true" and left.\nThen "Nothing" more.\n' * 3
    chance = np.random.default_rng(0)
    hs = chance.standard_normal((len(text), 5))
    for unit, name in enumerate(following.SIGNALS):
        signal = following.SIGNALS[name](text)
        hs[:, unit] = -2 * signal + 0.01 * hs[:, unit]
        r = following.correlations(hs, signal)
        assert np.argmax(np.abs(r)) == unit
        assert r[unit] < -0.99


@given(st.integers(0, 2**31))
def test_correlations_are_numpys(seed):
    chance = np.random.default_rng(seed)
    hs, signal = chance.standard_normal((30, 4)), chance.standard_normal(30)
    wanted = [np.corrcoef(hs[:, i], signal)[0, 1] for i in range(4)]
    assert following.correlations(hs, signal) == pytest.approx(wanted, abs=1e-12)


def test_what_stands_still_follows_nothing():
    assert following.correlations(np.ones((4, 2)), np.arange(4.0)).tolist() == [0, 0]
    with pytest.raises(UserError, match="not of the same steps"):
        following.correlations(np.ones((4, 2)), np.ones(3))
    with pytest.raises(UserError, match="everywhere"):
        following.occurrences("abc", "")


def test_similar_places_are_those_whose_states_point_the_same_way():
    hs = np.random.default_rng(1).standard_normal((40, 6))
    hs[30] = 3 * hs[5]
    found = following.most_similar(hs, 5, count=4)
    assert found[0] == (30, pytest.approx(1))
    assert [c for _, c in found] == sorted((c for _, c in found), reverse=True)
    steps = [5, *(s for s, _ in found)]
    assert all(abs(a - b) >= 3 for i, a in enumerate(steps) for b in steps[:i])
    with pytest.raises(UserError, match="step 40"):
        following.most_similar(hs, 40)
    with pytest.raises(UserError, match="the state at step 9 is zero and points nowhere"):
        following.most_similar(hs * (np.arange(40) != 9)[:, None], 9)


def test_a_signal_of_characters_is_read_at_the_end_of_each_piece():
    signal = following.line_length("ab\ncd e")
    assert following.by_token(signal, ["ab\n", "cd", " e"]).tolist() == [0, 2, 4]
