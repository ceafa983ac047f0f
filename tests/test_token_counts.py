"""Counting more tokens than fit into memory: the same counts, in the same order, as a dict has."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman.text import token_counts
from elman.text.token_counts import Counted, TokenCounts, most_frequent, utf8_length

TOKENS = st.text(st.sampled_from("ab\n\t\\é文😀\ud800\xff "), max_size=3)


def ranked(counts):
    """Every token of a dict by falling frequency, ties as they appeared: the plain way."""
    rows = [Counted(token, n, first) for first, (token, n) in enumerate(counts.items())]
    return sorted(rows, key=lambda row: (-row.n, row.first))


@given(
    texts=st.lists(st.lists(TOKENS, max_size=12), max_size=8),
    room=st.integers(0, 40),
    at_once=st.integers(2, 4),
    most=st.none() | st.integers(0, 9),
)
def test_counts_on_disk_are_those_of_a_dict(tmp_path_factory, texts, room, at_once, most):
    folder = tmp_path_factory.mktemp("counts")
    plain = Counter(token for text in texts for token in text)
    with pytest.MonkeyPatch.context() as patch, TokenCounts(folder, room, price) as counts:
        patch.setattr(token_counts, "RUNS_AT_ONCE", at_once)
        for text in texts:
            counts.add(Counter(text))
        assert counts.fits == (not any(folder.iterdir()))
        for _ in range(2):  # they can be read again
            by_rank = sorted(counts, key=lambda row: (-row.n, row.first))
            assert [row[:2] for row in by_rank] == [row[:2] for row in ranked(plain)]
        best = most_frequent(counts, room, price, most)
        assert [row[:2] for row in best] == [
            row[:2] for row in beginning(ranked(plain), room, most)
        ]
        assert len(list(folder.iterdir())) <= at_once
    assert not any(folder.iterdir())


def price(token):
    return 1 + utf8_length(token)


def beginning(rows, room, most):
    """The longest beginning of rows that fits, one row after the other."""
    kept = []
    for row in rows[:most]:
        room -= price(row.token)
        if room < 0:
            break
        kept.append(row)
    return kept


def test_the_table_never_holds_more_than_there_is_room_for(tmp_path):
    chance, widest = random.Random(0), 0
    with TokenCounts(tmp_path, 50, lambda token: len(token)) as counts:
        for _ in range(300):
            counts.add(Counter(str(chance.randrange(500)) for _ in range(7)))
            widest = max(widest, sum(map(len, counts._table)))
        assert 40 < widest <= 50
        assert sum(row.n for row in counts) == 2100
        assert not counts.fits


def test_what_is_on_disk_goes_where_the_counting_fails(tmp_path):
    def failing():
        with TokenCounts(tmp_path, 1, len) as counts:
            counts.add({"a": 1, "b": 2, "c": 3})
            assert len(list(tmp_path.iterdir())) == 2
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert not any(tmp_path.iterdir())
