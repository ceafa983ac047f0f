"""N-gram models against counting by hand, against nltk, and against what must hold of any model."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elman import MarkovChain, NgramModel, Vocab, corpus
from elman.counting.ngram import backoff, counts, smoothing
from elman.errors import MissingSource, UserError

V = 4
texts = st.lists(st.integers(0, V - 1), min_size=6, max_size=60)
orders = st.integers(1, 6)
MODELS = [
    {"smoothing": "kneser-ney"},
    {"smoothing": "laplace-open", "epsilon": 0.7},
    {"smoothing": "laplace-open", "epsilon": 0.7, "chain": True},
]
NOTES = [
    {"smoothing": "laplace", "epsilon": 0.7},
    {"smoothing": "laplace", "epsilon": 0.7, "chain": True},
]


# Counting


@given(texts, orders, st.sampled_from([0, 2, 1000]))
def test_counts_equal_counting_by_hand(text, order, dense):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "DENSE", dense)  # 0 always sorts, 1000 never does
        patch.setattr(counts, "LARGE", 20)  # and torch sorts all but the shortest
        found = counts.count(np.array(text), order, V)
    for k in range(1, order + 1):
        hand = Counter(tuple(text[i : i + k]) for i in range(len(text) - k + 1))
        rows = map(tuple, counts.grams(found.keys, V, k).tolist())
        listed = dict(zip(rows, found.counts[k - 1].tolist(), strict=True))
        assert {gram: n for gram, n in listed.items() if n} == hand
        assert k == 1 or 0 not in listed.values()


@given(st.lists(texts, min_size=2, max_size=4), orders, st.sampled_from([0, 1000]))
def test_no_kgram_crosses_from_one_sequence_into_the_next(several, order, dense):
    ids = np.concatenate(several)
    starts = np.zeros(len(ids), bool)
    starts[np.cumsum([0, *map(len, several[:-1])])] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "DENSE", dense)
        found = counts.count(ids, order, V, starts)
    hand = Counter(tuple(t[i : i + order]) for t in several for i in range(len(t) - order + 1))
    rows = map(tuple, counts.grams(found.keys, V, order).tolist())
    listed = zip(rows, found.counts[order - 1].tolist(), strict=True)
    assert {gram: n for gram, n in listed if n} == hand


def test_any_order_is_counted_though_its_ngrams_fit_no_machine_word():
    ids = np.arange(5000) % 4999
    found = counts.count(ids, 12, 5000)  # 12 tokens of 13 bits
    assert found.counts[11].tolist() == [1] * 4989
    assert counts.grams(found.keys, 5000, 12, np.array([7])).tolist() == [list(range(7, 19))]


# Probabilities


@pytest.mark.parametrize("options", MODELS, ids=str)
@given(text=texts, order=orders, context=st.lists(st.integers(0, V - 1), max_size=7))
def test_probabilities_sum_to_one_after_every_context(options, text, order, context):
    model = NgramModel.fit(text, order, vocab_size=V, **options)
    p = [model.probability(token, context) for token in range(V)]
    assert math.isclose(sum(p), 1, abs_tol=1e-12)
    assert min(p) > 0  # and so every perplexity is finite


@pytest.mark.parametrize("options", MODELS + NOTES, ids=str)
@given(text=texts, order=orders, other=texts)
def test_the_three_ways_to_ask_agree(options, text, order, other):
    model = NgramModel.fit(text, order, vocab_size=V, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backoff, "PIECE", 5)
        scores = model.log_probabilities(other)
    for t, token in enumerate(other):
        assert math.isclose(model.probability(token, other[:t]), math.exp(scores[t]))
        state = model.read(model.start(), np.array(other[:t], int))
        assert math.isclose(model.predict(state)[token], scores[t])
    assert math.isclose(model.log_probability(other), scores.sum())
    assert math.isclose(model.perplexity(other), math.exp(-scores.mean()))


@given(texts, orders, texts)
def test_searching_and_indexing_find_the_same(text, order, other):
    model = NgramModel.fit(text, order, vocab_size=V)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backoff, "INDEXED", 0)
        searched = NgramModel.fit(text, order, vocab_size=V).log_probabilities(other)
    assert np.array_equal(model.log_probabilities(other), searched)


class ByHand:
    """Chen and Goodman's equation, on dictionaries; sequences may begin with "<s>"."""

    def __init__(self, sequences: list[list], order: int, symbols: int) -> None:
        self.sequences, self.order, self.symbols = sequences, order, symbols

    def counts(self, k: int) -> Counter:
        places = [(s, i) for s in self.sequences for i in range(len(s) - k + 1)]
        raw = Counter(tuple(s[i : i + k]) for s, i in places)
        before = {(s[i - 1] if i else "start", *s[i : i + k]) for s, i in places}
        left = Counter(gram[1:] for gram in before)
        own = raw if k == self.order else {g: raw[g] if g[0] == "<s>" else left[g] for g in raw}
        return Counter({gram: n for gram, n in own.items() if gram != ("<s>",)})

    def probability(self, token, context: tuple) -> float:
        c, k = self.counts(len(context) + 1), len(context) + 1
        D = (0, *smoothing.discounts(np.array(list(c.values()))))
        follow = {gram: n for gram, n in c.items() if gram[:-1] == context}
        lower = 1 / self.symbols if k == 1 else self.probability(token, context[1:])
        if not follow:
            return lower
        total, own = sum(follow.values()), c[(*context, token)]
        gamma = sum(D[min(n, 3)] for n in follow.values()) / total
        return (own - D[min(own, 3)]) / total + gamma * lower


@given(st.lists(st.integers(0, V - 1), min_size=6, max_size=200), st.integers(1, 4), texts)
def test_kneser_ney_is_the_textbooks_equation(text, order, other):
    model, hand = NgramModel.fit(text, order, vocab_size=V), ByHand([text], order, V)
    token, context = other[0], tuple(other[1:order])
    expected = hand.probability(token, context)
    assert math.isclose(model.probability(token, context), expected, rel_tol=1e-12)


@given(st.lists(texts, min_size=1, max_size=6), st.integers(1, 4), texts)
def test_kneser_ney_of_sentences_counts_their_beginnings_as_they_are(sentences, order, other):
    model = NgramModel.fit(sentences, order, vocab_size=V, boundaries=True)
    hand = ByHand([["<s>", *s, "</s>"] for s in sentences], order, V + 1)
    for token, context in ((other[0], ["<s>", *other[2:order]]), ("</s>", other[1:order])):
        context = tuple(context[: order - 1])
        expected = hand.probability(token, context)
        assert math.isclose(model.probability(token, context), expected, rel_tol=1e-12)


def test_discounts_are_estimated_where_the_counts_allow():
    n1, n2, n3, n4 = 100, 40, 20, 15
    Y = n1 / (n1 + 2 * n2)
    D = smoothing.discounts(np.repeat([1, 2, 3, 4, 9], [n1, n2, n3, n4, 3]))
    assert pytest.approx((1 - 2 * Y * n2 / n1, 2 - 3 * Y * n3 / n2, 3 - 4 * Y * n4 / n3)) == D
    negative = np.repeat([1, 2, 3, 4], [100, 4, 90, 1])  # D(2) would be -60
    assert smoothing.discounts(negative) == smoothing.FALLBACK


# Laplace, as the notes write it


def test_laplace_is_the_notes_formula():
    text, (e1, e2, e3), m = [0, 1, 2, 0, 1, 3, 0, 1, 2], (0.5, 2.0, 3.0), 5
    model = NgramModel.fit(text, 3, "laplace", (e1, e2, e3), vocab_size=m)
    p1 = lambda x: (text.count(x) + e1 / m) / (len(text) + e1)  # noqa: E731
    assert model.probability(4) == pytest.approx(p1(4))
    assert NgramModel.fit(text, 2, "laplace", (e1, e2), vocab_size=m).probability(
        1, [0]
    ) == pytest.approx((3 + e2 * p1(1)) / (3 + e2))
    assert model.probability(2, [0, 1]) == pytest.approx((2 + e3 * p1(2)) / (3 + e3))
    assert model.probability(4, [0, 1]) == pytest.approx(e3 * p1(4) / (3 + e3))
    assert model.probability(4, [3, 3]) == pytest.approx(p1(4))  # never seen: the unigram
    chained = NgramModel.fit(text, 3, "laplace", (e1, e2, e3), vocab_size=m, chain=True)
    p2 = (2 + e2 * p1(2)) / (3 + e2)
    assert chained.probability(2, [0, 1]) == pytest.approx((2 + e3 * p2) / (3 + e3))


def test_the_notes_example_of_deep_learning():
    words = ["deep", "learning", "is", "fun", "deep", "learning", "is", "deep"]
    model = NgramModel.fit(words, 2, "laplace", 0)
    assert model.probability("learning", ["deep"]) == pytest.approx(2 / 3)  # n(deep) = 3
    opened = NgramModel.fit(words, 2, "laplace-open", 0)
    assert opened.probability("learning", ["deep"]) == pytest.approx(1)  # which is followed twice
    words = ["the", "time", "machine", "by", "wells"]
    flat = NgramModel.fit(words, 1, "laplace", math.inf)
    assert [flat.probability(word) for word in words] == pytest.approx([1 / 5] * 5)
    assert flat.probability("<unk>") == flat.probability("never") == 0
    assert NgramModel.fit(words, 1, "laplace-open", math.inf).probability("by") == pytest.approx(
        1 / 6
    )


def test_a_context_is_read_as_any_sequence_is():
    words = ["the", "time", "traveller", "came", "to", "the", "time", "machine"]
    model = NgramModel.fit(words, 3, "laplace")
    expected = model.probability("traveller", ["the", "time"])
    assert expected == model.probability("traveller", "the time")  # not eight characters
    assert expected == model.probability("traveller", model.encode("the time"))
    assert model.probability("time", "the") == model.probability("time", ["the"]) > 0.5
    assert model.probability("time", 1) == model.probability("time", [1])
    letters = NgramModel.fit("the time traveller", 3)
    assert letters.probability("e", "th") == letters.probability("e", ["t", "h"])
    sentences = NgramModel.fit([["the", "time"], ["the", "end"]], 2, boundaries=True)
    assert sentences.probability("the", "<s>") == sentences.probability("the", ["<s>"])
    assert sentences.probability("time", "the") == sentences.probability("time", ["the"])


@pytest.mark.parametrize(("text", "token"), [("the time", "the"), (["the", "time"], "the time")])
def test_the_probability_of_several_tokens_is_not_that_of_the_first(text, token):
    with pytest.raises(UserError, match="tokens of this model, not one; log_probability"):
        NgramModel.fit(text, 2).probability(token, "t")


@given(
    text=st.lists(st.sampled_from("abcde"), min_size=3, max_size=40),
    epsilon=st.tuples(*[st.just(0.0) | st.floats(1e-290, 5)] * 3),  # subnormals round coarsely
    gram=st.tuples(*[st.sampled_from("abcde")] * 3),
    min_freq=st.integers(0, 2),
)
def test_laplace_is_the_notes_formula_for_any_text(text, epsilon, gram, min_freq):
    vocab = Vocab(text, min_freq)
    text = [token if token in vocab else "<unk>" for token in text]
    gram = tuple(token if token in vocab else "<unk>" for token in gram)
    m = len(set(text))

    def n(*gram):
        return sum(tuple(text[i : i + len(gram)]) == gram for i in range(len(text)))

    def ratio(above, below):
        return above / below if below else 0.0

    x, y, z = gram
    p1 = {c: ratio(n(c) + epsilon[0] / m, len(text) + epsilon[0]) if n(c) else 0.0 for c in gram}
    expected = [
        p1[x],
        ratio(n(x, y) + epsilon[1] * p1[y], n(x) + epsilon[1]),
        ratio(n(x, y, z) + epsilon[2] * p1[z], n(x, y) + epsilon[2]),
    ]
    for k in (1, 2, 3):
        model = NgramModel.fit(text, k, "laplace", epsilon[:k], vocab=vocab)
        got = model.probability(gram[k - 1], list(gram[: k - 1]))
        assert got == pytest.approx(expected[k - 1], rel=1e-12)


@pytest.mark.parametrize("smoothing", ["laplace", "laplace-open"])
@given(text=texts, order=st.integers(2, 4), other=texts)
def test_epsilon_zero_gives_relative_frequencies(smoothing, text, order, other):
    model = NgramModel.fit(text, order, smoothing, 0, vocab_size=V)
    grams = Counter(tuple(text[i : i + order]) for i in range(len(text) - order + 1))
    gram = tuple(other[:order])
    total = sum(n for g, n in grams.items() if g[:-1] == gram[:-1])
    if smoothing == "laplace":  # the end of the text is one more place
        total += tuple(text[len(text) - order + 1 :]) == gram[:-1]
    expected = grams[gram] / total if total else 0
    assert model.probability(gram[-1], gram[:-1]) == pytest.approx(expected)
    impossible = any(p == 0 for p in np.exp(model.log_probabilities(other)))
    assert (model.perplexity(other) == math.inf) == impossible


@given(texts, st.integers(2, 5), texts)
def test_infinite_epsilon_gives_the_lower_order(text, order, other):
    weights = [0.5] * (order - 1)
    chained = NgramModel.fit(text, order, "laplace", [*weights, math.inf], chain=True, vocab_size=V)
    lower = NgramModel.fit(text, order - 1, "laplace", weights, chain=True, vocab_size=V)
    assert np.allclose(chained.log_probabilities(other), lower.log_probabilities(other))
    nearly = NgramModel.fit(text, order, "laplace", [*weights, 1e12], vocab_size=V)
    unigram = NgramModel.fit(text, 1, "laplace", 0.5, vocab_size=V)
    scores = nearly.log_probabilities(other)[order:]
    assert np.allclose(scores, unigram.log_probabilities(other)[order:])


def test_laplace_and_unsmoothed_counts_agree_with_nltk():
    lm = pytest.importorskip("nltk.lm", reason="the nltk oracle is not installed")
    everygrams = pytest.importorskip("nltk.util").everygrams
    text, other = corpus.load("python-reference")[:4000], corpus.load("python-reference")[4000:4400]
    vocab = Vocab(text)
    for order in (1, 2, 3):
        grams = [list(everygrams(text, max_len=order))]
        add_one, unsmoothed = lm.Laplace(order), lm.MLE(order)
        for oracle in (add_one, unsmoothed):
            oracle.fit(grams, sorted(set(text)))
        epsilon = [*[math.inf] * (order - 1), len(vocab)]  # Σ_y 1 added, evenly
        model = NgramModel.fit(text, order, "laplace-open", epsilon, vocab=vocab)
        bare = NgramModel.fit(text, order, "laplace-open", 0, vocab=vocab)
        for i in range(order - 1, len(other)):
            token, context = other[i], tuple(other[i - order + 1 : i])
            assert model.probability(token, context) == pytest.approx(add_one.score(token, context))
            assert bare.probability(token, context) == pytest.approx(
                unsmoothed.score(token, context)
            )


# The notes' text


@pytest.fixture(scope="module")
def letters(time_machine_file):
    return "".join(corpus.letters(corpus.load(time_machine_file)))


@pytest.mark.parametrize(
    ("order", "nats"),
    [(3, 1.9252), (4, 1.6150), (5, 1.4749), (6, 1.4352), (7, 1.4301), (8, 1.4354)],
)
def test_the_time_machine_in_nats_per_letter(letters, order, nats):
    train, test = letters[:153522], letters[153522:]
    model = NgramModel.fit(train, order, vocab=Vocab(letters))
    assert math.log(model.perplexity(test, context=train[-10:])) == pytest.approx(nats, abs=2e-4)
    assert model.vocab_size == 28


# Levels, unknown tokens, sentences


@pytest.mark.parametrize("level", ["char", "word", "byte"])
def test_every_level_reads_writes_and_scores(level):
    text = "to be or not to be, that is the question — né? to be or not"
    source = text.encode() if level == "byte" else text.split() if level == "word" else text
    model = NgramModel.fit(source, 2)
    written = model.generate(12, prompt=source[:3], seed=3)
    assert len(written) == 12
    assert set(written) <= set(model.vocab.idx_to_token)
    assert 1 < model.perplexity(source) < model.vocab_size


def test_unknown_tokens_are_read_as_unk():
    for a, b, never in (("a", "b", "z"), ("an", "be", "never")):
        model = NgramModel.fit([a, b, a, b, a], 2)
        assert model.probability(never) == model.probability("<unk>") > 0
        assert model.probability(a, [never]) == model.probability(a, ["<unk>"])


def test_tokens_tensors_and_arrays_of_ids_give_the_same_model():
    tokens = list("abracadabra")
    vocab = Vocab(tokens)
    ids = vocab.encode(tokens)
    p = NgramModel.fit(tokens, 3).log_probabilities("abra")
    for source in ("abracadabra", [tokens[:4], [], tokens[4:]], ids, torch.tensor(ids.tolist())):
        assert np.array_equal(NgramModel.fit(source, 3, vocab=vocab).log_probabilities("abra"), p)
    plain = NgramModel.fit(ids.tolist(), 3)
    assert np.array_equal(plain.log_probabilities(vocab.encode("abra")), p)
    assert plain.generate(5, prompt=[1]) == vocab[NgramModel.fit(tokens, 3).generate(5, prompt="a")]


SENTENCES = [["the", "cat", "sat"], ["the", "dog", "sat"], ["a", "cat"], []]


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_sentences_begin_and_end(options):
    model = NgramModel.fit(SENTENCES, 3, boundaries=True, **options)
    for context in (["<s>"], ["<s>", "the"], ["cat", "sat"], ["sat", "</s>"]):
        p = [model.probability(token, context) for token in [*model.vocab.idx_to_token, "</s>"]]
        assert math.isclose(sum(p), 1)
        assert model.probability("<s>", context) == 0
    one, two = model.log_probabilities(SENTENCES[:1]), model.log_probabilities(SENTENCES[1:2])
    assert np.array_equal(model.log_probabilities(SENTENCES[:2]), [*one, *two])
    chain = [
        ("the", ["<s>"]),
        ("cat", ["<s>", "the"]),
        ("sat", ["the", "cat"]),
        ("</s>", ["cat", "sat"]),
    ]
    assert np.allclose(np.exp(one), [model.probability(*step) for step in chain])


def test_unsmoothed_sentences_know_only_their_own_past():
    model = NgramModel.fit(SENTENCES, 3, "laplace", 0, boundaries=True)
    assert model.probability("the", ["<s>"]) == 0.5
    expected = [2 / 4, 1 / 2, 1, 1]  # the | <s>, cat | <s> the, sat | the cat, </s> | cat sat
    scores = model.log_probabilities([["a", "cat"], ["the", "cat", "sat"]])
    assert np.allclose(np.exp(scores[3:]), expected)


def test_generation_ends_with_the_sentence():
    model = NgramModel.fit(SENTENCES, 3, "laplace", 0, boundaries=True)
    written = {tuple(model.generate(10, seed=seed)) for seed in range(40)}
    assert written == {("the", "cat", "sat"), ("the", "dog", "sat"), ("a", "cat"), ()}


def test_generation_is_repeatable_and_follows_the_temperature():
    model = NgramModel.fit("aab" * 50 + "c", 2)
    assert model.generate(30, seed=1) == model.generate(30, seed=1) != model.generate(30, seed=2)
    assert model.generate(6, prompt="b", temperature=0) == list("aaaaaa")
    hot = Counter(model.generate(3000, temperature=1e9, seed=0))
    assert all(abs(n / 3000 - 0.25) < 0.05 for n in hot.values())
    drawn = Counter(NgramModel.fit("aaab", 1, "laplace", 0).generate(4000))
    assert abs(drawn["a"] / 4000 - 0.75) < 0.03  # 4.4 standard errors


# Files


@pytest.mark.parametrize("options", MODELS, ids=str)
@pytest.mark.parametrize(
    "source", ["abracadabra, né", b"bytes \x00\xff", [["a b", "", "\n", "a b"]]]
)
def test_a_saved_model_comes_back_whole(tmp_path, source, options):
    model = NgramModel.fit(source, 3, **options)
    model.save(tmp_path / "model")
    back = NgramModel.load(tmp_path / "model")
    assert (back.vocab, back.about, back.boundaries) == (model.vocab, model.about, model.boundaries)
    assert np.array_equal(back.log_probabilities(source), model.log_probabilities(source))
    assert back.generate(9, seed=4) == model.generate(9, seed=4)


def test_a_saved_model_of_sentences_shorter_than_its_order_comes_back(tmp_path):
    model = NgramModel.fit([["a"], ["b"]], order=5, boundaries=True)  # no sentence has 5-grams
    model.save(tmp_path / "model")
    back = NgramModel.load(tmp_path / "model")
    assert np.array_equal(back.log_probabilities([["a"]]), model.log_probabilities([["a"]]))


def test_a_damaged_or_foreign_file_is_refused(tmp_path):
    from safetensors.numpy import save_file

    model = NgramModel.fit("abracadabra", 2)
    model.save(tmp_path / "model")
    whole = (tmp_path / "model").read_bytes()
    for damaged in (b"", whole[:-9], whole[40:], b"\x80\x04K\x01."):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(UserError, match=r"not an n-gram model|is damaged"):
            NgramModel.load(tmp_path / "damaged")
    save_file({"keys.1": np.zeros(3)}, tmp_path / "foreign")
    with pytest.raises(UserError, match="header does not say"):
        NgramModel.load(tmp_path / "foreign")
    with pytest.raises(MissingSource, match="there is no file"):
        NgramModel.load(tmp_path / "missing")


def test_arrays_that_do_not_fit_together_are_refused(tmp_path):
    model = NgramModel.fit("abracadabra", 2)
    keys = (model.table.keys[0], model.table.keys[1][::-1].copy())
    wrong = backoff.BackoffTable(model.table.base, keys, model.table.log_p, model.table.log_backoff)
    NgramModel(wrong, model.vocab, boundaries=False).save(tmp_path / "model")
    with pytest.raises(UserError, match="do not fit together"):
        NgramModel.load(tmp_path / "model")


def test_every_flipped_bit_is_noticed(tmp_path):
    NgramModel.fit(["to", "be", "or", "not", "to", "be"], 3).save(tmp_path / "model")
    whole = (tmp_path / "model").read_bytes()
    rng = np.random.default_rng(0)
    for bit in rng.choice(8 * len(whole), 600, replace=False).tolist():
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(UserError):
            NgramModel.load(tmp_path / "damaged")


def test_a_model_that_an_older_elman_saved_can_be_read(tmp_path):
    from safetensors.numpy import save_file

    model = NgramModel.fit(["the", "end.", "the", "end"], 2)
    names = ("keys", "log_p", "log_backoff")
    tensors = {
        f"{name}.{k}": array
        for name in names
        for k, array in enumerate(getattr(model.table, name), 1)
    }
    vocab = {"level": "word", "min_freq": 0, "reserved_tokens": []}
    vocab |= {"token_freqs": model.vocab.token_freqs}
    about = {"about": "old", "base": model.table.base, "boundaries": False, "order": 2}
    about |= {"to_unigram": False, "vocab": vocab}
    header = {"format": "elman n-gram model, version 1", "model": json.dumps(about)}
    save_file(tensors, tmp_path / "old", header)
    old = NgramModel.load(tmp_path / "old")
    assert old.vocab == model.vocab
    assert old.log_probability("the end.") == model.log_probability("the end.")


# Refusals


@pytest.mark.parametrize(
    ("sequence", "options", "message"),
    [
        ("abc", {"order": 0}, "order=0 must be at least 1"),
        ("abc", {"order": 4}, "order=4 is longer than the text of 3 tokens"),
        ("", {}, "the text is empty"),
        ([], {}, "the text is empty"),
        ("abc", {"smoothing": "good-turing"}, "unknown smoothing 'good-turing'; one of kneser-ney"),
        ("abc", {"epsilon": 1}, "belong to Laplace"),
        ("abc", {"chain": True}, "belong to Laplace"),
        ("abc", {"smoothing": "laplace", "epsilon": -1}, "epsilon=-1 must be 0 or more"),
        ("abc", {"smoothing": "laplace", "epsilon": [1, 2]}, "one for each of 3 orders"),
        ("abc", {"smoothing": "laplace", "epsilon": math.nan}, "must be 0 or more"),
        ([0, 5, 1], {"vocab_size": 4}, "id 5 is not in a vocabulary of 4 tokens"),
        ([0, -1, 1], {}, "id -1 is not in a vocabulary; ids run from 0 up"),
        ([0, 1], {"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        (["a", "b"], {"vocab_size": 3, "order": 1}, "knows ids only, not tokens such as 'a'"),
        (np.zeros((2, 2), int), {}, "must be one-dimensional"),
        (np.zeros(9), {}, "must be one-dimensional and integer"),
        (None, {}, "a list of tokens or an array of ids, not None"),
        (iter("abc"), {}, "list\\(tokens\\), if they come one by one"),
        ({"a": 1}, {}, "a list of tokens or an array of ids, not {'a': 1}"),
        ([["a", "b"], None], {"boundaries": True}, "not None"),
        (np.array(3), {}, "not array\\(3\\)"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(sequence, options, message):
    with pytest.raises(UserError, match=message):
        NgramModel.fit(sequence, **options)


def test_what_a_model_cannot_do_is_refused():
    model = NgramModel.fit("abc", 2, "laplace", 0)
    with pytest.raises(UserError, match="no token that may come next"):
        model.generate(5, prompt="c")
    with pytest.raises(UserError, match="perplexity of an empty sequence"):
        model.perplexity("")
    with pytest.raises(UserError, match="length=-1"):
        model.generate(-1)
    with pytest.raises(UserError, match="temperature=-2"):
        model.generate(1, temperature=-2)
    with pytest.raises(UserError, match="vocab_size=3 disagrees with a vocabulary of 4"):
        NgramModel.fit("abc", 2, vocab=Vocab("abc"), vocab_size=3)


KINDS = [list, torch.tensor, *(np.dtype(t).type for t in ("i1", "i2", "i4", "i8", "u1", "u8"))]


@given(ids=texts, order=st.integers(1, 3), kind=st.sampled_from(KINDS))
def test_ids_count_and_score_alike_in_whatever_they_are_held(ids, order, kind):
    given = kind(ids) if kind in (list, torch.tensor) else np.array(ids, kind)
    for model in (NgramModel, MarkovChain):
        fitted, usual = (model.fit(x, order, vocab_size=V) for x in (given, np.array(ids)))
        np.testing.assert_array_equal(fitted.score(given), usual.score(np.array(ids)))
        states = fitted.read(fitted.start(), given), usual.read(usual.start(), np.array(ids))
        assert states[0] == states[1]


@pytest.mark.parametrize("model", [NgramModel, MarkovChain])
@pytest.mark.parametrize("wrong", [-1, V])
def test_an_id_outside_the_vocabulary_is_not_scored_as_another(model, wrong):
    fitted = model.fit([0, 1, 2, 3, 0, 1, 2], 2, vocab_size=V)
    with pytest.raises(UserError, match=f"id {wrong} is not in a vocabulary of {V}"):
        fitted.score(np.array([0, wrong]))
