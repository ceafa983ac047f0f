"""The vocabulary: the notes' semantics, exact round trips, files, refusals."""

import io
import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elman import Vocab, corpus, statistics, tokens
from elman.errors import MissingSource, OutOfRange, UserError
from elman.text.vocab import learn

LONE = "\ud83d\ude00\udc80"  # surrogates, the first two of which must not become one emoji
FEW_LETTERS = st.text("ab é\n文😀\u0301\u2003\x1c" + LONE, max_size=60)
TEXTS = st.text() | FEW_LETTERS
OPTIONS = st.fixed_dictionaries(
    {
        "min_freq": st.integers(0, 4),
        "reserved_tokens": st.lists(st.sampled_from(["<pad>", "<bos>", "<eos>", "a"]), unique=True),
    }
)


def notes_vocabulary(flat, min_freq, reserved_tokens):
    """idx_to_token and token_freqs as the notes compute them, word for word in the plainest way."""
    token_freqs = sorted(Counter(flat).items(), key=lambda item: item[1], reverse=True)
    idx_to_token = ["<unk>", *reserved_tokens]
    for token, freq in token_freqs:
        if freq < min_freq:
            break
        if token not in idx_to_token:
            idx_to_token.append(token)
    return idx_to_token, token_freqs


@pytest.mark.parametrize("level", ["char", "word", "spaced"])
@given(text=TEXTS, options=OPTIONS)
def test_every_way_to_a_vocabulary_is_the_notes_vocabulary(level, text, options):
    lines = tokens.tokenize(io.StringIO(text, newline="\n"), level)
    flat = [token for line in lines for token in line]
    expected = notes_vocabulary(flat, **options)
    learned, ids = learn(text, level, **options)
    for vocab in (
        Vocab(lines, **options, level=level),
        Vocab(flat, **options, level=level),
        Vocab.from_text(text, level, **options),
        learned,
    ):
        assert (list(vocab.idx_to_token), vocab.token_freqs) == expected
        assert len(vocab) == len(expected[0])
        notes_ids = [expected[0].index(t) if t in expected[0] else 0 for t in flat]
        assert vocab[flat] == notes_ids
        for source in (text, flat, lines):
            assert vocab.encode(source).tolist() == notes_ids
        assert ids.tolist() == notes_ids


def test_the_notes_interface():
    vocab = Vocab([["a", "b"], ["b"]], reserved_tokens=["<pad>"])
    assert vocab["b"] == 2
    assert vocab["never"] == vocab.unk == 0
    assert vocab[["a", ("b", "<pad>")]] == [3, [2, 1]]
    assert vocab.to_tokens(2) == "b"
    for ids in ([2, 0], (2, 0), np.array([2, 0]), torch.tensor([2, 0])):
        assert vocab.to_tokens(ids) == ["b", "<unk>"]
    assert vocab.token_freqs == [("b", 2), ("a", 1)]
    assert "a" in vocab
    assert "never" not in vocab
    assert list(vocab) == ["<unk>", "<pad>", "b", "a"]
    assert (
        Vocab().idx_to_token == Vocab(None or [], reserved_tokens=None).idx_to_token == ("<unk>",)
    )


@given(TEXTS)
def test_characters_round_trip_any_text(text):
    vocab, ids = learn(text, "char")
    assert (
        vocab.decode(ids) == vocab.decode(ids.tolist()) == vocab.decode(torch.tensor(ids)) == text
    )


@given(TEXTS)
def test_words_round_trip_any_text_and_the_notes_words_up_to_white_space(text):
    vocab, ids = learn(text, "word")
    assert vocab.decode(ids) == vocab.decode(ids.tolist()) == text
    vocab, ids = learn(text, "spaced")
    assert vocab.decode(ids) == " ".join(text.split())


@given(st.binary(max_size=600), st.binary())
def test_bytes_round_trip_any_file_seen_or_not(file, other):
    vocab = Vocab.from_text(file, "byte")
    assert len(vocab) == 256
    assert vocab.unk is None
    ids = vocab.encode(other)
    assert ids.dtype == np.uint8
    assert ids.tolist() == vocab.encode(list(other)).tolist() == vocab[list(other)] == list(other)
    assert vocab.decode_bytes(ids) == other
    assert vocab.decode(ids) == other.decode("utf-8", "replace")


@given(st.text())
def test_text_round_trips_through_bytes(text):
    vocab = Vocab.from_text(text, "byte")
    assert vocab.decode(vocab.encode(text)) == text


def test_what_the_vocabulary_lacks_reads_and_writes_as_unknown():
    vocab = Vocab("aab", min_freq=2, reserved_tokens=["<eos>"])
    ids = vocab.encode("ab\U0010ffff文")
    assert ids.tolist() == [2, 0, 0, 0]
    assert vocab.decode([2, 0, 1, 2]) == "a<unk><eos>a"


@pytest.mark.parametrize(
    ("size", "dtype"), [(255, "u1"), (256, "u2"), (65_535, "u2"), (65_536, "u4")]
)
def test_ids_live_in_the_smallest_type_that_fits(size, dtype):
    text = "".join(map(chr, range(0x10000, 0x10000 + size)))  # and <unk>: size + 1 ids
    vocab, ids = learn(text, "char")
    assert len(vocab) == size + 1
    assert ids.dtype == vocab.encode(list(text)).dtype == np.dtype(dtype)
    assert ids.tolist() == list(range(1, size + 1))


def test_the_level_is_inferred_from_the_tokens_and_can_be_given():
    assert Vocab("ab").level == Vocab(["a", "b"]).level == "char"
    assert Vocab(["a", "of"]).level == "spaced"
    assert Vocab(["a", ", ", "of"]).level == "word"
    assert Vocab(b"ab").level == Vocab([[0, 255]]).level == "byte"
    assert Vocab(["a", "b"], level="word").decode([1, 2]) == "a b"
    assert Vocab({"a": 3, "b": 5}).token_freqs == [("b", 5), ("a", 3)]


@pytest.mark.parametrize("level", tokens.LEVELS)
@given(text=TEXTS, data=st.data())
def test_a_saved_vocabulary_comes_back_whole(tmp_path_factory, level, text, data):
    options = {} if level in ("byte", "bpe") else data.draw(OPTIONS)
    vocab = Vocab.from_text(text, level, **options)
    path = tmp_path_factory.mktemp("vocab") / "vocab.json"
    vocab.save(path)
    loaded = Vocab.load(path)
    assert loaded == vocab
    assert hash(loaded) == hash(vocab)
    assert loaded.token_freqs == vocab.token_freqs
    assert repr(loaded) == repr(vocab)
    assert loaded.encode(text).tolist() == vocab.encode(text).tolist()


@given(st.lists(st.text(min_size=1) | st.text(LONE + '"\\\n', min_size=1), min_size=1))
def test_any_token_survives_the_file(tmp_path_factory, words):
    path = tmp_path_factory.mktemp("vocab") / "vocab.json"
    vocab = Vocab(words, level="word")
    vocab.save(path)
    assert Vocab.load(path).idx_to_token == vocab.idx_to_token


LINES = ["the time machine", "", "by h g wells", "i"]


@pytest.mark.parametrize("level", tokens.LEVELS)
def test_a_list_of_lines_is_text(level):
    text = ("" if level in ("char", "byte") else " ").join(filter(None, LINES))
    vocab, ids = learn(LINES, level)
    assert vocab == Vocab.from_text(LINES, level) == Vocab.from_text(text, level)
    assert ids.tolist() == vocab.encode(LINES).tolist() == vocab.encode(text).tolist()
    assert vocab.unk not in ids.tolist()
    assert vocab.decode(ids) == text


@pytest.mark.parametrize("level", [None, "spaced"])
def test_pairs_of_words_are_not_taken_for_lines(level):
    words = ["the", "time", "traveller"]
    pairs = list(itertools.pairwise(words))
    with pytest.raises(
        UserError, match=r"'time'\) is a tuple.*statistics.frequencies\(tokens, 2\)"
    ):
        Vocab(pairs, level=level)
    assert [pair for pair, _ in statistics.frequencies(words, 2).most_common()] == pairs
    assert Vocab(tuple(words)) == Vocab(words)


def test_lines_do_not_say_what_their_tokens_are():
    with pytest.raises(UserError, match=r"'the time machine' is a line of text, not a token"):
        Vocab(LINES)
    with pytest.raises(UserError, match="is not a token of level 'char'"):
        Vocab(LINES, level="char")
    assert Vocab([["New York"], ["is"]]).encode([["New York"]]).tolist() == [1]
    for wrong in ([*LINES[:1], 3], 7, None):
        with pytest.raises(UserError, match="a text is a str, or a list of lines"):
            learn(wrong)


def test_what_is_cut_already_is_not_cut_again():
    vocab = Vocab([["the", "time"], ["the", "end"]])
    assert vocab.encode(["the time", "end"]).tolist() == [1, 2, 3]
    for cut in ([["the time", "end"]], np.array(["the time", "end"])):
        assert vocab.encode(cut).tolist() == [0, 3]
    with pytest.raises(UserError, match="3 is not a token of level 'spaced'"):
        vocab.encode(["the time", 3])


def test_the_notes_lines_encode_as_the_notes_do(time_machine_file):
    lines = corpus.letters(corpus.load(time_machine_file))
    vocab = Vocab(tokens.tokenize(lines, "char"))
    assert vocab.encode(lines).shape == (170_580,)
    assert np.count_nonzero(vocab.encode(lines) == vocab.unk) == 0
    words = Vocab(tokens.tokenize(lines, "word"))
    assert words.encode(lines).tolist() == words.encode(tokens.tokenize(lines, "word")).tolist()


def test_a_vocabulary_of_an_older_elman_cuts_words_at_white_space(tmp_path):
    path = tmp_path / "vocab.json"
    freqs = [["the", 2], ["end.", 1]]
    old = {"format": "elman vocabulary", "version": 1, "level": "word", "min_freq": 0}
    old |= {"reserved_tokens": [], "token_freqs": freqs, "tokens": ["<unk>", "the", "end."]}
    path.write_text(json.dumps(old))
    assert Vocab.load(path).encode("the\nend. the").tolist() == [1, 2, 1]


def test_vocabularies_are_equal_when_their_ids_are():
    assert Vocab("aab") == Vocab("aaab")
    assert Vocab("aab") != Vocab("abb")
    assert Vocab(["a"], level="word") != Vocab(["a"], level="char")
    assert Vocab("a") != "a"


def test_the_repr_says_size_level_and_what_is_common():
    assert repr(Vocab("aab")) == "<Vocab of 3 chars: 'a' 2, 'b' 1, …>"
    assert repr(Vocab()) == "<Vocab of 1 chars>"


@pytest.mark.parametrize("bad", [3, -1, [0, 3], np.array([-1, 0]), torch.tensor([7])])
def test_ids_out_of_range_are_refused(bad):
    with pytest.raises(OutOfRange, match="is not in a vocabulary of 3 tokens; ids run from 0 to 2"):
        Vocab("ab").to_tokens(bad)
    with pytest.raises(IndexError):
        Vocab("ab").decode(np.atleast_1d(np.asarray(bad)))


@pytest.mark.parametrize("bad", [[[0, 1], [1, 0]], [0.5], 1, [True]])
def test_ids_that_are_not_a_flat_list_of_integers_are_refused(bad):
    with pytest.raises(UserError, match="flat list of integers"):
        Vocab("ab").decode(bad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": "a", "reserved_tokens": ["<pad>", "<pad>"]}, "'<pad>' is given 2 times"),
        ({"tokens": "a", "reserved_tokens": ["<unk>"]}, "'<unk>' is given 2 times"),
        ({"tokens": "a", "reserved_tokens": [7]}, "reserved token 7 must be a string"),
        ({"tokens": ["ab"], "level": "char"}, "'ab' is not a token of level 'char'"),
        ({"tokens": [256]}, "256 is not a token of level 'byte'"),
        ({"tokens": ["a", 1]}, "1 is not a token of level 'spaced'"),
        ({"tokens": b"a", "min_freq": 2}, "make no sense for bytes"),
        ({"tokens": b"a", "reserved_tokens": ["<pad>"]}, "make no sense for bytes"),
        ({"tokens": "a", "level": "letter"}, "levels are char, word, spaced, byte"),
    ],
)
def test_vocabularies_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        Vocab(**arguments)


def test_encoding_refuses_what_the_level_cannot_read():
    with pytest.raises(UserError, match="bytes have no characters"):
        Vocab("ab").encode(b"ab")
    for bad in ([256], [-1], [0.5]):
        with pytest.raises(OutOfRange, match="is not a byte"):
            Vocab(b"ab").encode(bad)
    with pytest.raises(UserError, match="has no bytes"):
        Vocab("ab").decode_bytes([1])


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"not json", "cannot be read as a vocabulary"),
        (b"\xff\xfe", "cannot be read as a vocabulary"),
        (b"[1, 2]", "not an elman vocabulary"),
        (b'{"the": 1}', "not an elman vocabulary"),
        (b'{"format": "elman vocabulary", "version": 99}', "version 99"),
        (b'{"format": "elman vocabulary", "version": 1}', "damaged"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path, written, message):
    path = tmp_path / "vocab.json"
    path.write_bytes(written)
    with pytest.raises(UserError, match=message):
        Vocab.load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", ["<unk>", "b", "a"]),
        ("token_freqs", [["a", "many"], ["b", 1]]),
        ("token_freqs", 7),
        ("level", "letter"),
        ("reserved_tokens", ["<pad>"]),
        ("min_freq", 2),
        ("min_freq", "2"),
    ],
)
def test_a_damaged_vocabulary_is_refused(tmp_path, field, value):
    path = tmp_path / "vocab.json"
    Vocab("aab").save(path)
    record = {**json.loads(path.read_text()), field: value}
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="do not match the checksum"):
        Vocab.load(path)
    del record["seal"]  # as older versions wrote it
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="damaged vocabulary"):
        Vocab.load(path)


def test_a_missing_vocabulary_is_refused(tmp_path):
    with pytest.raises(MissingSource, match="there is no vocabulary at"):
        Vocab.load(tmp_path / "vocab.json")


def test_the_time_machine_has_28_characters_and_4580_words(time_machine_file):
    lines = corpus.letters(corpus.load(time_machine_file))
    chars = tokens.tokenize(lines, "char")
    vocab = Vocab(chars)
    assert len(vocab) == 28
    assert vocab.encode(chars).shape == (170_580,)
    words = tokens.tokenize(lines, "word")
    vocab = Vocab(words)
    assert len(vocab) == 4_580
    assert vocab.encode(words).shape == (32_775,)
    assert vocab.token_freqs[:3] == [("the", 2261), ("i", 1267), ("and", 1245)]
