"""Level `bpe`: subwords by Hugging Face's tokenizers, exact for any bytes."""

import json
import random
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman import Vocab, corpus
from elman.cli import run
from elman.errors import OutOfRange, UserError
from elman.scoring.evaluation import evaluate
from elman.text import prepared
from elman.text.levels import Subwords, base, bpe
from elman.text.levels.bpe import NAMES, read_tokenizer
from elman.text.prepared import Data
from elman.text.vocab import learn

tokenizers = pytest.importorskip("tokenizers")

TEXT = "the time traveller (for so it will be convenient to speak of him) née 文 \n" * 20


@pytest.fixture(scope="module")
def level():
    return Subwords().learned(TEXT, vocab_size=300)


def test_the_names_of_bytes_are_the_librarys_own():
    assert sorted(NAMES) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    decoder = tokenizers.decoders.ByteLevel()
    assert all(decoder.decode([NAMES[byte]]) == chr(byte) for byte in range(0x80))


@given(data=st.binary() | st.text().map(str.encode) | st.just(TEXT.encode()))
def test_any_bytes_come_back_exactly(level, data):
    vocab = Vocab(level.count(level.cut(data)), level=level)
    ids = vocab.encode(data)
    assert vocab.decode_bytes(ids) == data
    assert vocab.decode(ids) == data.decode("utf-8", "replace")


@given(text=st.text(st.characters()) | st.text("a\ud800\udfff\n é"))
def test_any_text_comes_back_exactly_lone_surrogates_included(level, text):
    vocab = Vocab({}, level=level)
    assert vocab.decode(vocab.encode(text)) == text
    assert level.join(level.tokens(text)) == text.encode("utf-8", "surrogatepass").decode(
        "utf-8", "replace"
    )


@given(
    lines=st.lists(st.text(st.characters(codec="utf-8"))), chunk=st.sampled_from([1, 5, 1 << 16])
)
def test_a_text_may_be_cut_line_by_line(level, lines, chunk):
    lines = [line + "\n" for line in lines]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "CHUNK", chunk)
        whole = level.cut("".join(lines)).tolist()
    assert whole == [i for line in lines for i in level.cut(line).tolist()]


@given(text=st.text(st.characters(codec="utf-8")), where=st.integers(0, 30))
def test_characters_are_shared_out_between_parts(level, text, where):
    cut = level.cut(text)
    assert level.characters(cut) == len(text)
    assert level.characters(cut[:where]) + level.characters(cut[where:]) == len(text)


def test_learning_is_repeatable_and_keeps_to_the_size():
    first, second = (Subwords().learned(TEXT, vocab_size=280) for _ in range(2))
    assert first.record() == second.record()
    assert len(first.names) == 280
    assert len(first.cut(TEXT)) < 0.7 * len(TEXT.encode())
    with pytest.raises(UserError, match="vocab_size=1000000000000 must be at most 10000000"):
        Subwords().learned("low lower lowest", vocab_size=10**12)
    with pytest.raises(UserError, match="vocab_size=200 must be at least 256"):
        Subwords().learned(TEXT, vocab_size=200)


def test_a_vocabulary_of_subwords_is_saved_with_its_tokenizer(tmp_path):
    vocab = Vocab.from_text(TEXT, "bpe", vocab_size=300)
    vocab.save(tmp_path / "vocab.json")
    again = Vocab.load(tmp_path / "vocab.json")
    assert again == vocab
    assert (
        again.encode(TEXT + "unseen \x00").tolist() == vocab.encode(TEXT + "unseen \x00").tolist()
    )
    assert (len(again), again.unk, again.dtype) == (300, None, "uint16")
    assert again["Ġto"] == vocab.encode(" to").tolist()[0]
    with pytest.raises(OutOfRange, match="'nonesuch' is not a subword"):
        vocab["nonesuch"]
    with pytest.raises(UserError, match="make no sense for subwords"):
        Vocab({}, min_freq=2, level="bpe")


def test_the_tokenizer_is_learned_from_the_training_part_alone():
    """The held-out end repeats a word that occurs nowhere before: it has no token."""
    text = "one two three four\n" * 90 + "zyxzyx zyxzyx zyx\n" * 10
    parts = prepared.prepare(Data("x", "bpe", vocab_size=300), text)
    assert "Ġthree" in parts.vocab
    assert not any("zy" in token for token in parts.vocab.idx_to_token)
    ids = [*parts.train.tolist(), *parts.validation.tolist()]
    assert parts.vocab.decode(ids) == text
    assert parts.characters == len(parts.vocab.decode(parts.validation))


LATE = "one two three four\n" * 60 + "zyxzyx zyxzyx zyx\n" * 40  # words of the last third


@pytest.mark.parametrize("options", [{"train_tokens": 100}, {"max_tokens": 300}, {"test": 0.2}, {}])
def test_a_tokenizer_never_reads_on_behind_the_part_that_trains(options, monkeypatch):
    """The part that trains is a share of the tokens: how far it reaches depends on the tokenizer,
    and here less far than the same share of the characters, as the end is made of long words."""
    texts, learned_from = [], Subwords.learned_from

    def noted(self, read, vocab_size=0):
        texts.append("".join(read))
        return learned_from(self, texts[-1:], vocab_size)

    monkeypatch.setattr(Subwords, "learned_from", noted)
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 400))) + LATE + "longwordsindeed " * 40
    parts = prepared.prepare(Data("x", "bpe", vocab_size=280, validation=0.3, **options), text)
    trains = parts.vocab.decode_bytes(parts.train)
    assert trains.startswith(texts[-1].encode())
    assert len(texts[-1].encode()) > 0.8 * len(trains)
    first = round(len(text) * (0.7 - options.get("test", 0.0)))
    assert texts[0] == text[:first]


def test_a_given_tokenizer_is_used_as_it_is(tmp_path, level):
    path = tmp_path / "tokenizer.json"
    level.tokenizer.save(str(path))
    parts = prepared.prepare(Data("x", "bpe", tokenizer=str(path)), TEXT)
    assert parts.vocab.idx_to_token == level.names
    assert parts.vocab.encode(TEXT).tolist() == level.cut(TEXT).tolist()
    with pytest.raises(UserError, match=r"vocab_size=500, but the tokenizer .* has 300 tokens"):
        prepared.prepare(Data("x", "bpe", tokenizer=str(path), vocab_size=500), TEXT)
    with pytest.raises(UserError, match="is for level bpe, not char"):
        Data("x", "char", tokenizer=str(path))


def test_special_tokens_stand_for_their_own_names(tmp_path, level):
    path = tmp_path / "tokenizer.json"
    other = tokenizers.Tokenizer.from_str(level.tokenizer.to_str())
    other.add_special_tokens(["<|end|>"])
    other.enable_truncation(3)
    other.save(str(path))
    vocab = Vocab({}, level=read_tokenizer(path))
    text = "the time <|end|> the time traveller"
    assert vocab.decode(vocab.encode(text)) == text
    assert vocab["<|end|>"] in vocab.encode(text).tolist()


def _changed(level, change):
    record = json.loads(level.tokenizer.to_str())
    change(record)
    return json.dumps(record)


WRONG = {
    "does not give 'THE' back as it was": lambda r: r.update(normalizer={"type": "Lowercase"}),
    "byte 0x41 is not one of its tokens": lambda r: r["model"]["vocab"].update(
        A_=r["model"]["vocab"].pop("A")
    ),
    "does not stand for bytes": lambda r: r["model"]["vocab"].update({"文": 300}),
    "ids do not run from 0 to": lambda r: r["model"]["vocab"].update({"AA": 999}),
    "is not a tokenizer": lambda r: r.pop("model"),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_tokenizer_that_cannot_give_text_back_is_refused(tmp_path, level, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(_changed(level, WRONG[message]))
    with pytest.raises(UserError, match=message):
        read_tokenizer(path).cut("THE")


def test_without_the_library_the_level_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'elman\[bpe\]'"):
        learn("abc", "bpe")


@pytest.mark.parametrize("verb", ["train", "prepare", "ngram"])
def test_without_the_library_nothing_is_read_before_that_is_said(
    verb, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    out = [] if verb == "ngram" else ["--out", str(tmp_path / "out")]
    assert run([verb, str(tmp_path / "no such text"), "--level", "bpe", *out]) == 2
    assert "hint: pip install 'elman[bpe]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_the_library_a_vocabulary_is_not_called_damaged(level, monkeypatch):
    record = Vocab.from_text(TEXT, "bpe", vocab_size=300).record()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"^level bpe needs Hugging Face's tokenizers"):
        Vocab.from_record(record)


def test_words_can_be_limited_in_number_too():
    vocab, ids = learn("a b b c c c", "word", vocab_size=3)
    assert (vocab.idx_to_token, ids.tolist()) == (("<unk>", "c", "b"), [0, 2, 2, 1, 1, 1])
    again = Vocab.from_record(vocab.record())
    assert again == vocab
    with pytest.raises(UserError, match="vocab_size=1 must be more"):
        Vocab("abc", vocab_size=1)
    with pytest.raises(UserError, match="vocab_size=2 must be more than the 2 of"):
        Vocab("abc", reserved_tokens=["<pad>"], vocab_size=2)
    assert Vocab("abc", reserved_tokens=["<pad>"], vocab_size=3).idx_to_token[1:] == ("<pad>", "a")
    with pytest.raises(UserError, match="which has 256 tokens"):
        Vocab.from_text(b"abc", "byte", vocab_size=10)


def test_bits_per_character_compare_across_levels():
    """A model that knows nothing spends log₂|V| bits on a token, whatever the token is."""
    import math

    from elman import LanguageModel

    text = corpus.load("python-reference")[:20_000]
    for name, size in (("char", 0), ("bpe", 400)):
        parts = prepared.prepare(Data("x", name, vocab_size=size), text)
        model = LanguageModel(len(parts.vocab), hidden_size=4)
        for parameter in model.parameters():
            parameter.data.zero_()
        held_out = text[-parts.characters :]
        scores = evaluate(model, parts.vocab, parts.validation, train=parts.train)
        bits = scores.bits_per_char(scores.model)
        tokens = len(parts.validation) - 1
        chars = len(held_out) - parts.first
        assert bits == pytest.approx(tokens * math.log2(len(parts.vocab)) / chars, rel=1e-6)
        assert parts.vocab.decode(parts.validation) == held_out


SPACED = st.text(st.sampled_from("ab'sé文9.,_ \n\t\r\v\x1c\x85\xa0\u2003\u3000\ud800"), max_size=30)


def words_of(runs):
    """What the library learns from: the words that it cuts texts into, and how often each."""
    cutter = Subwords().tokenizer.pre_tokenizer
    found = Counter(word for run in runs for word, _ in cutter.pre_tokenize_str(run))
    return {word: n for word, n in found.items() if len(word) > 1}  # one byte: nothing to join


@given(st.lists(SPACED, max_size=4))
def test_stretches_have_the_words_of_the_text(texts):
    level, counts = Subwords(), Counter()
    for text in texts:
        counts.update(level.stretches(text))
    fed = [run for stretch, n in counts.items() for run in bpe._repeated(stretch, n)]
    whole = [run for text in texts for run, valid in bpe._runs(text) if valid]
    assert words_of(fed) == words_of(whole)
    assert sum(len(s) * n for s, n in counts.items()) == sum(map(len, whole))


@pytest.mark.parametrize("chunk", [3, 1 << 16])
def test_a_tokenizer_of_counts_is_that_of_the_text(chunk, monkeypatch):
    monkeypatch.setattr(bpe.base, "CHUNK", chunk)
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdé", k=chance.randrange(1, 7))) for _ in range(300)]
    text = "".join(chance.choice(words) + chance.choice("   \n,") for _ in range(5000))
    of_text = Subwords().learned_from([text], 400).tokenizer.to_str()
    of_counts = Subwords().learned_of(Subwords().stretches(text).items(), 400).tokenizer.to_str()
    assert of_counts == of_text
