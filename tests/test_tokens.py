"""Text to tokens: the notes' lists, and the same counted without them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman import tokens
from elman.errors import UserError

LONE = "\ud83d\ude00\udc80"  # surrogates, the first two of which must not become one emoji
FEW_LETTERS = st.text(
    "ab é\n文😀\u0301\u2003\x1c" + LONE, max_size=60
)  # many ties, many kinds of space


def test_words_and_characters_are_the_notes():
    lines = ["the time machine", "", "by h g wells"]
    assert tokens.tokenize(lines, "word") == [line.split() for line in lines]
    assert tokens.tokenize(lines, "char") == [list(line) for line in lines]
    assert tokens.tokenize(lines) == tokens.tokenize(lines, "word")


@given(st.lists(st.binary()))
def test_bytes_are_their_values(lines):
    assert [bytes(line) for line in tokens.tokenize(lines, "byte")] == lines


@given(st.text())
def test_text_at_the_byte_level_is_its_utf8(text):
    assert bytes(tokens.tokenize([text], "byte")[0]) == text.encode("utf-8")


@pytest.mark.parametrize("level", tokens.LEVELS)
@pytest.mark.parametrize("chunk", [1, 3, 1 << 16])
@given(text=st.text() | FEW_LETTERS)
def test_counting_a_text_is_counting_its_tokens_in_the_same_order(level, chunk, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "_CHUNK", chunk)
        counted = tokens.count(text, level)
    assert list(counted.items()) == list(Counter(tokens.tokenize([text], level)[0]).items())
    assert all(type(n) is int for n in counted.values())


@given(st.binary(max_size=300))
def test_counting_bytes_is_counting_their_values(data):
    assert list(tokens.count(data, "byte").items()) == list(Counter(data).items())


def test_an_unknown_level_is_refused_and_the_known_ones_listed():
    for refused in (lambda: tokens.tokenize(["a"], "syllable"), lambda: tokens.count("a", "chars")):
        with pytest.raises(UserError, match=r"unknown level .*; levels are char, word, byte"):
            refused()


def test_one_string_is_not_a_list_of_lines():
    with pytest.raises(UserError, match="list of lines, not one str"):
        tokens.tokenize("the time machine", "char")


@pytest.mark.parametrize("level", ["char", "word"])
def test_bytes_have_no_characters_or_words(level):
    for refused in (lambda: tokens.tokenize([b"a b"], level), lambda: tokens.count(b"a b", level)):
        with pytest.raises(UserError, match=f"no {level}s until they are decoded"):
            refused()
