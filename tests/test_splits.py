"""A source made ready: the plain way is the definition, the fast one must not differ from it."""

import hashlib
import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman import corpus, tokens
from elman.errors import UserError
from elman.text import prepared
from elman.text.prepared import Data
from elman.text.tokens import tokenize
from elman.text.vocab import Vocab

WORDS = ["a", "be", "née", "文", "the", "<unk>", "Time"]
texts = st.lists(
    st.tuples(st.sampled_from(WORDS), st.sampled_from([" ", "\r\n", "  ", "\u2003", ", "]))
)


def plainly(data, text, vocab=None):
    """One Python object per token."""
    text = text.lower() if data.lower else text
    if data.clean == "letters":
        lines = corpus.letters(text)
        text = ("" if data.level in ("char", "byte") else " ").join(filter(None, lines))
    elif data.clean == "newlines" and data.level != "byte":
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    tokens = tokenize([text], data.level)[0]
    tokens = tokens[: data.max_tokens] if data.max_tokens else tokens
    train, validation, _ = corpus.split(tokens, validation=data.validation)
    vocab = vocab or Vocab(train, data.min_freq, level=data.level)
    if train and all(train.count(token) < data.min_freq for token in train):
        raise UserError("nothing but <unk>")
    return vocab[train], vocab[validation], vocab


@pytest.mark.parametrize("level", ["char", "word", "spaced", "byte"])
@given(
    pairs=texts,
    clean=st.sampled_from(["none", "letters", "newlines"]),
    max_tokens=st.sampled_from([0, 5, 17]),
    min_freq=st.integers(0, 3),
    validation=st.sampled_from([0.0, 0.3]),
)
def test_parts_and_vocabulary_are_those_of_the_plain_way(
    level, pairs, clean, max_tokens, min_freq, validation
):
    text = "".join(word + gap for word, gap in pairs)
    min_freq = 0 if level == "byte" else min_freq
    data = Data("x", level, clean, max_tokens, min_freq, validation)
    try:
        train, held_out, vocab = plainly(data, text)
    except UserError:  # too short to cut, or every token too rare
        with pytest.raises(UserError):
            prepared.prepare(data, text)
        return
    found = prepared.prepare(data, text)
    again = prepared.prepare(data, text, found.vocab)
    for parts in (found, again):
        assert (parts.train.tolist(), parts.validation.tolist()) == (train, held_out)
        assert parts.train.dtype == parts.validation.dtype == vocab.dtype
        assert parts.vocab.token_freqs == vocab.token_freqs
        assert parts.vocab == vocab
    other = Vocab("the time", level="char") if level == "char" else None
    if other is not None:
        assert prepared.prepare(data, text, other).train.tolist() == plainly(data, text, other)[0]


@given(text=st.text(st.characters(), max_size=50), times=st.sampled_from([1, 3000]))
def test_the_fingerprint_is_the_sha256_of_the_utf8(text, times):
    expected = hashlib.sha256((text * times).encode("utf-8", "surrogatepass")).hexdigest()
    assert prepared.fingerprint(text * times) == expected


@pytest.mark.parametrize("level", ["char", "word"])
@given(pairs=texts, lower=st.booleans(), clean=st.sampled_from(["none", "newlines"]))
def test_the_characters_are_those_of_the_held_out_text_unknown_ones_included(
    level, pairs, lower, clean
):
    text = "the end. the end. " + "".join(word + gap for word, gap in pairs) + "İ"
    data = Data("x", level, clean, min_freq=2, validation=0.4, lower=lower)
    parts = prepared.prepare(data, text)
    known = prepared.prepare(data, text, Vocab.from_text(prepared.cleaned(data, text), level))
    whole = len(prepared.cleaned(data, text))
    assert parts.characters == known.characters == whole - len(known.vocab.decode(known.train))
    after = known.vocab.decode([*known.train, *known.validation[:1]])
    assert parts.predicted_characters == whole - len(after)
    other = prepared.all_held_out(data, text, parts.vocab)
    assert (other.characters, len(other.train)) == (whole, 0)


@pytest.mark.parametrize("level", ["char", "word", "spaced"])
def test_crlf_is_one_line_end_at_every_level_but_bytes(level):
    unix, dos = "one, two\nthree\n\nfour\n" * 9, "one, two\r\nthree\r\n\r\nfour\r\n" * 9
    data = Data("x", level)
    ours, theirs = prepared.prepare(data, unix), prepared.prepare(data, dos)
    assert ours.train.tolist() == theirs.train.tolist()
    assert (ours.vocab, ours.characters) == (theirs.vocab, theirs.characters)
    if level != "spaced":
        kept = prepared.prepare(Data("x", level, "none"), dos)  # as runs of an older elman read it
        assert "\r" in "".join(kept.vocab.idx_to_token)


def test_rare_words_are_unknown_unless_asked_otherwise():
    assert [Data(level=level).min_freq for level in tokens.LEVELS] == [0, 2, 0, 0, 0]
    assert Data(level="word", min_freq=0).min_freq == 0


@pytest.mark.parametrize(
    ("options", "text", "read"),
    [
        ({}, "The ", "The "),
        ({"clean": "letters"}, " The Time, ", " the time "),
        ({"clean": "letters"}, "", ""),
        ({"clean": "letters", "level": "word"}, "The ", "the"),
        ({"level": "word"}, "The ", "The"),
        ({"level": "word"}, "The, ", "The, "),
        ({"level": "spaced"}, "The ", "The "),
        ({"level": "byte"}, "The \r\n ", "The \r\n "),
        ({"lower": True}, "The\r\n", "the\n"),
    ],
)
def test_a_prompt_keeps_the_space_at_its_end(options, text, read):
    assert prepared.prompt(Data(**options), text) == read


def test_what_cannot_be_asked_of_a_text_is_refused():
    for options, message in (
        ({"clean": "soap"}, "unknown clean 'soap'; one of newlines, letters, none"),
        ({"level": "byte", "lower": True}, "bytes have no lower case"),
        ({"min_freq": -1}, "min_freq=-1 must be at least 0; 0: all"),
    ):
        with pytest.raises(UserError, match=message):
            Data(**options)


def test_a_pipe_cannot_be_found_again(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert prepared.located(str(tmp_path / "pipe")) == "-"
    assert prepared.located("book.txt") == str(Path("book.txt").absolute())
    assert prepared.located("time-machine") == "time-machine"
    for nowhere in ("", "~no-such-user/book.txt", "a\0b"):
        with pytest.raises(UserError):
            prepared.located(nowhere)


def test_words_that_only_the_held_out_part_has_are_unknown_there():
    data = Data("x", "word", min_freq=0, validation=0.25)
    found = prepared.prepare(data, "one two one three two four")
    assert found.vocab.idx_to_token == ("<unk>", "one", "two", "three")
    assert found.validation.tolist() == [2, 0]


def test_a_long_text_of_words_makes_no_object_per_word():
    choose = random.Random(0).choices
    words = [f"word{n}" for n in range(1000)]
    text = " ".join(choose(words, k=300_000))
    tracemalloc.start()
    found = prepared.prepare(Data("x", "word", min_freq=0), text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.train) + len(found.validation) == 300_000
    assert np.asarray(found.train).itemsize == 2
    assert peak < 20 * 300_000  # a list alone takes 8 bytes a word, its strings 50 more


@pytest.mark.parametrize("level", ["char", "word"])
@pytest.mark.parametrize("train_tokens", [0, 40])
def test_three_parts_follow_one_another_and_the_last_is_reported(level, train_tokens):
    text = "the end of the time, one two. " * 40
    data = Data("x", level, min_freq=0, validation=0.2, test=0.1, train_tokens=train_tokens)
    parts = prepared.prepare(data, text)
    whole = prepared.prepare(Data("x", level, min_freq=0, validation=0), text, parts.vocab).train
    joined = [*parts.train, *parts.validation, *parts.test]
    assert joined == whole[: len(joined)].tolist()
    trained = len(parts.train)
    assert trained == (train_tokens or trained)
    assert len(parts.validation) == pytest.approx(trained * 2 / 7, abs=1)
    assert len(parts.test) == pytest.approx(trained / 7, abs=1)
    assert (parts.part, parts.reported.tolist()) == ("test", parts.test.tolist())
    before = parts.vocab.decode(joined[: trained + len(parts.validation) + 1])
    assert parts.predicted_characters == len(parts.vocab.decode(joined)) - len(before)
    two = prepared.prepare(Data("x", level, min_freq=0, validation=0.3), text)
    assert (two.part, len(two.test)) == ("validation", 0)
