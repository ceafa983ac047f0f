"""ARPA files: KenLM reads what we write, we read it back, and say where a file is wrong."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elman import NgramModel, Vocab, corpus
from elman.counting.ngram.arpa import escape, unescape
from elman.errors import MissingSource, UserError

TEXT = "The cat's 100% here,\n\tthe cat\u00a0is <s> not </s> there %20 %\n" * 3
EXPORTABLE = [{}, {"smoothing": "laplace-open", "epsilon": 0.4, "chain": True}]


@given(st.text())
def test_escaping_is_undone_and_leaves_no_white_space(token):
    assert unescape(escape(token)) == token
    assert escape(token).split() == [escape(token)] == [escape(token).strip()]
    assert escape(token) not in ("<s>", "</s>")


@example("%41")
@example("100%")
@given(st.text(min_size=1).filter(lambda word: word.split() == [word]))
def test_words_of_other_toolkits_are_left_alone_or_come_back(word):
    assert escape(unescape(word)) == word or unescape(word) == word


@pytest.fixture
def kenlm():
    return pytest.importorskip("kenlm", reason="the kenlm oracle is not installed")


def by_kenlm(kenlm, path, sentences, **marks) -> np.ndarray:
    """log P of every token, in nats, as KenLM has it."""
    oracle = kenlm.Model(str(path))
    rows = [oracle.full_scores(" ".join(map(escape, s)), **marks) for s in sentences]
    return np.array([p for row in rows for p, _, _ in row]) * math.log(10)


@pytest.mark.parametrize("options", EXPORTABLE, ids=str)
@pytest.mark.parametrize("order", [2, 4, 6])  # the package is built for orders up to 6
def test_kenlm_scores_every_character_as_we_do(kenlm, tmp_path, order, options):
    text = corpus.load("python-reference")
    train, test = text[:30_000], text[30_000:33_000] + "\u0416"  # and one it has never seen
    model = NgramModel.fit(train, order, **options)
    model.to_arpa(tmp_path / "model.arpa")
    theirs = by_kenlm(kenlm, tmp_path / "model.arpa", [test], bos=False, eos=False)
    assert np.abs(theirs - model.log_probabilities(test)).max() < 1e-4


@pytest.mark.parametrize("options", EXPORTABLE, ids=str)
def test_kenlm_scores_every_word_of_a_sentence_as_we_do(kenlm, tmp_path, options):
    lines = [line.split() for line in corpus.load("python-reference").splitlines()[:1500]]
    lines = [line for line in lines if line]
    model = NgramModel.fit(lines[:1000], 3, boundaries=True, **options)
    model.to_arpa(tmp_path / "model.arpa")
    theirs = by_kenlm(kenlm, tmp_path / "model.arpa", lines[900:], bos=True, eos=True)
    assert np.abs(theirs - model.log_probabilities(lines[900:])).max() < 1e-4


@pytest.mark.parametrize("options", EXPORTABLE, ids=str)
@pytest.mark.parametrize("level", ["char", "word", "byte"])
def test_a_file_written_and_read_gives_the_same_scores(tmp_path, level, options):
    source = {"char": TEXT, "word": TEXT.split(), "byte": TEXT.encode()}[level]
    model = NgramModel.fit(source, 4, **options)
    model.to_arpa(tmp_path / "model.arpa")
    back = NgramModel.from_arpa(tmp_path / "model.arpa", vocab=model.vocab)
    assert np.abs(back.log_probabilities(source) - model.log_probabilities(source)).max() < 1e-6
    if level != "byte":  # a byte is written as its number: without vocab= it reads as a word
        alone = NgramModel.from_arpa(tmp_path / "model.arpa")
        assert (alone.order, alone.boundaries) == (4, False)
        assert set(alone.vocab) == set(model.vocab)
        assert alone.log_probability(source) == pytest.approx(model.log_probability(source))


def test_sentences_and_bare_ids_are_read_back(tmp_path):
    sentences = [["a", "b"], ["b", "a", "a"]]
    model = NgramModel.fit(sentences, 3, boundaries=True)
    model.to_arpa(tmp_path / "model.arpa")
    back = NgramModel.from_arpa(tmp_path / "model.arpa")
    assert back.boundaries
    assert back.log_probability(sentences) == pytest.approx(model.log_probability(sentences))
    NgramModel.fit([0, 1, 2, 1, 0], 2).to_arpa(tmp_path / "ids.arpa")
    assert set(NgramModel.from_arpa(tmp_path / "ids.arpa").vocab) == {"<unk>", "0", "1", "2"}


FILE = """
some toolkits write a remark here
\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-1.0\t<unk>
-99\t<s>\t-0.5
-0.3\ta\t-0.2
-0.6\t</s>

\\2-grams:
-0.1\t<s> a
-0.4 a </s>

\\end\\
"""


def test_a_file_of_another_toolkit_is_read_by_the_definition(tmp_path):
    (tmp_path / "file.arpa").write_text(FILE)
    model = NgramModel.from_arpa(tmp_path / "file.arpa")
    assert model.boundaries
    scores = model.log_probabilities([["a"], ["b", "a"]]) / math.log(10)
    #  a | <s>, </s> | a, then <unk> | <s> by backing off, a | <unk>, </s> | a
    assert np.allclose(scores, [-0.1, -0.4, -0.5 - 1.0, -0.3, -0.4])
    (tmp_path / "file.arpa").write_text(FILE.replace("-99\t<s>", "-1.3\t<s>"))  # so do some
    assert NgramModel.from_arpa(tmp_path / "file.arpa").probability("<s>", ["a"]) == 0


@pytest.mark.parametrize(
    ("old", "new", "line", "problem"),
    [
        ("\\data\\\n", "", 16, "the file ends where"),
        ("ngram 2=2", "ngram 3=2", 5, "'ngram 3=2' where ngram 2=… should be"),
        ("ngram 1=4", "ngram one=4", 4, "where ngram 1=… should be"),
        ("ngram 1=4\nngram 2=2\n", "", 5, "where ngram 1=… should be"),
        ("-0.3\ta", "minus\ta", 10, "'minus' is not a number"),
        ("-0.3\ta", "nan\ta", 10, "'nan' is not a number"),
        ("-0.3\ta", "0.3\ta", 10, "log10 p = 0.3 is above 0"),
        ("-0.3\ta\t-0.2", "-0.3", 10, "a 1-gram is a number, 1 words"),
        ("-0.3\ta\t-0.2\n", "", 12, "4 1-grams were announced, but only 3 are listed"),
        ("-0.3\ta", "-0.3\t\udce9", 10, "is not UTF-8"),
        ("-0.3\ta", "-0.3\t<s>", 10, "'<s>' is listed twice"),
        ("\\2-grams:", "\\3-grams:", 13, "'\\\\3-grams:' where '\\\\2-grams:' should be"),
        ("<s> a\n", "<s> b\n", 14, "'b' is not among the unigrams"),
        ("-0.4 a </s>", "-0.4 <s> a", 15, "this 2-gram is listed twice"),
        ("\\end\\", "-0.4 a a", 17, "where '\\\\end\\\\' should be"),
        ("\\end\\\n", "", 15, "the file ends where \\\\end\\\\ should follow"),
    ],
)
def test_a_malformed_file_is_refused_with_the_line(tmp_path, old, new, line, problem):
    assert old in FILE
    (tmp_path / "file.arpa").write_text(FILE.replace(old, new, 1), errors="surrogateescape")
    with pytest.raises(UserError) as refusal:
        NgramModel.from_arpa(tmp_path / "file.arpa")
    assert f"line {line}: " in refusal.value.message
    assert problem.replace("\\\\", "\\") in refusal.value.message.replace("\\\\", "\\")


def test_a_context_that_is_not_listed_is_refused_with_the_line(tmp_path):
    text = FILE.replace("ngram 2=2", "ngram 2=2\nngram 3=1")
    text = text.replace("\\end\\", "\\3-grams:\n-0.1 a a a\n\n\\end\\")
    (tmp_path / "file.arpa").write_text(text)
    with pytest.raises(UserError, match="line 19: the first 2 words are not among the 2-grams"):
        NgramModel.from_arpa(tmp_path / "file.arpa")


def test_what_an_arpa_file_cannot_say_is_refused(tmp_path):
    with pytest.raises(UserError, match="chain=True"):
        NgramModel.fit("abcab", 3, "laplace", 1).to_arpa(tmp_path / "a")
    with pytest.raises(UserError, match="epsilon=0"):
        NgramModel.fit("abcab", 2, "laplace", 0).to_arpa(tmp_path / "a")
    with pytest.raises(MissingSource, match="there is no file"):
        NgramModel.from_arpa(tmp_path / "a")
    NgramModel.fit("abcab", 2).to_arpa(tmp_path / "a")
    with pytest.raises(UserError, match="lists no unigram 'd'"):
        NgramModel.from_arpa(tmp_path / "a", vocab=Vocab("abcd"))
