"""Text to tokens: the notes' lists, and the same counted without them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman import corpus, tokens
from elman.errors import UserError
from elman.text import levels, prepared
from elman.text.levels import base, words
from elman.text.vocab import learn

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
        patch.setattr(base, "CHUNK", chunk)
        counted = tokens.count(text, level)
    assert list(counted.items()) == list(Counter(tokens.tokenize([text], level)[0]).items())
    assert all(type(n) is int for n in counted.values())


@given(st.binary(max_size=300))
def test_counting_bytes_is_counting_their_values(data):
    assert list(tokens.count(data, "byte").items()) == list(Counter(data).items())


def test_an_unknown_level_is_refused_and_the_known_ones_listed():
    for refused in (lambda: tokens.tokenize(["a"], "syllable"), lambda: tokens.count("a", "chars")):
        with pytest.raises(
            UserError, match=r"unknown level .*; levels are char, word, spaced, byte"
        ):
            refused()


def test_lines_may_come_one_by_one():
    assert tokens.tokenize(iter(["the time", "flies"]), "word") == [["the", "time"], ["flies"]]


def test_one_string_is_not_a_list_of_lines():
    with pytest.raises(UserError, match="list of lines, not one int"):
        tokens.tokenize(3, "char")
    with pytest.raises(UserError, match="3 is not a line of text"):
        tokens.tokenize(["a line", 3], "char")
    with pytest.raises(UserError, match="list of lines, not one str"):
        tokens.tokenize("the time machine", "char")


@pytest.mark.parametrize(
    ("level", "units"), [("char", "characters"), ("word", "words"), ("spaced", "words")]
)
def test_bytes_have_no_characters_or_words(level, units):
    for refused in (lambda: tokens.tokenize([b"a b"], level), lambda: tokens.count(b"a b", level)):
        with pytest.raises(UserError, match=f"no {units} until they are decoded"):
            refused()


# Words, and what stands between them


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Well, it's 9 o'clock.\n", ["Well", ", ", "it's", "9", "o'clock", ".", "\n"]),
        ("a  b", ["a", "  ", "b"]),
        (" a ", [" ", "a", " "]),
        ("(so) he said: “no—never!”", ["(", "so", ") ", "he", "said", ": ", "“", "no", "—"]),
        ("wait... what", ["wait", "... ", "what"]),
        ("one\n\n  two - three", ["one", "\n", "\n", "  ", "two", " - ", "three"]),
    ],
)
def test_punctuation_is_split_from_words(text, expected):
    assert tokens.tokenize([text], "word")[0][: len(expected)] == expected


MARKED = st.lists(st.sampled_from([*"ab'’_1.-,\n \t\r\u2003é\u0301文"])).map("".join)


@pytest.mark.parametrize("chunk", [1, 3, 1 << 16])
@given(text=st.text() | FEW_LETTERS | MARKED)
def test_words_and_what_stands_between_them_are_the_text_exactly(chunk, text):
    level = levels.LEVELS["word"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "CHUNK", chunk)
        cut = level.tokens(text)
    assert level.join(cut) == text
    assert level.characters(level.cut(text)) == len(text)
    assert cut == [token for line in text.split("\n") for token in [*level.tokens(line), "\n"]][:-1]


@given(text=MARKED, where=st.integers(0, 60))
def test_the_characters_of_a_cut_text_are_shared_out_between_its_parts(text, where):
    for level in levels.LEVELS.values():
        cut = level.cut(text)
        first, second = cut[:where], cut[where:]
        parts = level.characters(first) + level.characters(second, first)
        if level.name != "byte":  # a cut inside a character leaves two halves that decode to more
            assert parts == level.characters(cut)


def test_of_lines_of_letters_the_words_are_the_notes(time_machine_file):
    lines = corpus.letters(corpus.load(time_machine_file))
    notes = [line.split() for line in lines]
    assert tokens.tokenize(lines, "word") == tokens.tokenize(lines, "spaced") == notes
    assert sum(map(len, notes)) == 32_775


@pytest.mark.parametrize("level", tokens.LEVELS)
def test_a_list_of_lines_is_counted_as_text(level):
    lines = ["the time", "", "machine"]
    whole = "the timemachine" if level in ("char", "byte") else "the time machine"
    assert tokens.count(lines, level) == tokens.count(whole, level)
    with pytest.raises(UserError, match="a text is a str, or a list of lines, not a list of list"):
        tokens.count([["the"]], level)


def test_a_level_added_from_outside_is_known_everywhere(monkeypatch):
    """One class and one line: what issue after issue will do."""

    class Sentences(words.ManyTokens):
        name, units, unit, tokens_are = "sentence", "sentences", "sentence", "strings"

        def chunks(self, text):
            yield [piece for piece in text.split(".") if piece]

        def fits(self, token):
            return isinstance(token, str)

        def between(self, left, right):
            return "."

        def spaces(self, cut, before):
            return len(cut)

    monkeypatch.setitem(levels.LEVELS, "sentence", Sentences())
    text = "one two.three.one two"
    vocab, ids = learn(text, "sentence")
    assert (vocab.decode(ids), ids.tolist()) == (text, [1, 2, 1])
    parts = prepared.prepare(prepared.Data("x", "sentence", validation=0.3), text)
    assert (parts.train.tolist(), parts.validation.tolist()) == ([1, 2], [1])
