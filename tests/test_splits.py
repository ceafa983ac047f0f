"""A source made ready: the plain way is the definition, the fast one must not differ from it."""

import hashlib
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman import corpus
from elman.errors import UserError
from elman.text import prepared
from elman.text.prepared import Data
from elman.text.vocab import Vocab

WORDS = ["a", "be", "née", "文", "the", "<unk>", "Time"]
texts = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from([" ", "\n", "  ", "\u2003"])))


def plainly(data, text, vocab=None):
    """One Python object per token."""
    text = str(prepared.cleaned(data, text))
    tokens = text.split() if data.level == "word" else list(text)
    tokens = list(text.encode()) if data.level == "byte" else tokens
    tokens = tokens[: data.max_tokens] if data.max_tokens else tokens
    train, validation, _ = corpus.split(tokens, validation=data.validation)
    vocab = vocab or Vocab(train, data.min_freq, level=data.level)
    return vocab[train], vocab[validation], vocab


@pytest.mark.parametrize("level", ["char", "word", "byte"])
@given(
    pairs=texts,
    clean=st.sampled_from(["none", "letters"]),
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
    except UserError:  # too short to cut
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


def test_words_that_only_the_held_out_part_has_are_unknown_there():
    found = prepared.prepare(Data("x", "word", validation=0.25), "one two one three two four")
    assert found.vocab.idx_to_token == ("<unk>", "one", "two", "three")
    assert found.validation.tolist() == [2, 0]


def test_a_long_text_of_words_makes_no_object_per_word():
    choose = random.Random(0).choices
    words = [f"word{n}" for n in range(1000)]
    text = " ".join(choose(words, k=300_000))
    tracemalloc.start()
    found = prepared.prepare(Data("x", "word"), text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.train) + len(found.validation) == 300_000
    assert np.asarray(found.train).itemsize == 2
    assert peak < 20 * 300_000  # a list alone takes 8 bytes a word, its strings 50 more
