"""Evaluation: every token once, beside baselines that read the same text and nothing else."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elman import evaluation, metrics
from elman.cli import run as cli
from elman.counting.ngram import NgramModel
from elman.errors import UserError
from elman.language_model import LanguageModel
from elman.runs import Run
from elman.scoring.metrics import Score
from elman.scoring.mixture import fit_weights
from elman.text import prepared
from elman.text.prepared import Data
from elman.text.vocab import Vocab

texts = st.lists(st.integers(0, 5), min_size=2, max_size=30).map(np.array)


@given(ids=texts, size=st.integers(6, 50))
def test_uniform_perplexity_is_the_size_of_the_vocabulary(ids, size):
    score = evaluation.uniform(ids, size)
    assert score.tokens == len(ids) - 1
    assert score.perplexity == pytest.approx(size)


@given(train=texts, ids=texts)
def test_unigram_is_counting_by_hand_with_one_more_of_each(train, ids):
    seen = train.tolist()
    by_hand = -sum(math.log((seen.count(i) + 1) / (len(seen) + 7)) for i in ids.tolist()[1:])
    assert evaluation.unigram(train, ids, 7).nats == pytest.approx(by_hand)


def test_counting_baselines_predict_every_token_after_the_first_from_those_before_it():
    train, ids = np.array([1, 2, 3, 1, 2, 4, 1, 2, 3, 5] * 5), np.array([1, 2, 3, 3, 0, 1, 2])
    vocab = Vocab("aabbcdefff")
    found = evaluation.baselines(train, ids, vocab)
    assert list(found) == ["uniform", "unigram", "kneser-ney:5", "kneser-ney:7"]
    model = NgramModel.fit(train, order=5, vocab_size=len(vocab))
    by_hand = -sum(math.log(model.probability(int(ids[t]), ids[:t].tolist())) for t in range(1, 7))
    assert found["kneser-ney:5"].nats == pytest.approx(by_hand)
    assert {score.tokens for score in found.values()} == {6}


def test_a_text_too_short_for_an_order_goes_without_it():
    assert list(evaluation.baselines(np.arange(6), np.arange(3), Vocab("abcdef"))) == [
        "uniform",
        "unigram",
        "kneser-ney:5",
    ]


def test_characters_are_those_of_the_text():
    text = "naïve café 文\n"
    char, word, byte = (Vocab.from_text(text, level) for level in ("char", "word", "byte"))
    assert metrics.characters(char, char.encode(text)) == len(text) - 1
    assert metrics.characters(byte, byte.encode(text)) == len(text) - 1
    assert metrics.characters(word, word.encode(text)) == len(" café 文\n")
    spaced = Vocab.from_text(text, "spaced")
    assert metrics.characters(spaced, spaced.encode(text)) == len(" café 文")


def test_an_unknown_word_has_as_many_characters_as_the_text_says_and_without_it_nobody_knows():
    vocab = Vocab.from_text("a bb ccc", "word")
    ids = vocab.encode("a supercalifragilistic bb")
    assert metrics.characters(vocab, ids) is None
    assert evaluation.unknown(vocab, ids) == 1
    model = LanguageModel(len(vocab), hidden_size=2)
    assert evaluation.evaluate(model, vocab, ids).json()["bits_per_char"] is None
    known = evaluation.evaluate(model, vocab, ids, characters=len(" supercalifragilistic bb"))
    assert known.json()["bits_per_char"] == pytest.approx(known.model.nats / math.log(2) / 24)
    data = Data("x", "word", validation=0.5)
    parts = prepared.all_held_out(data, "a supercalifragilistic bb", vocab)
    assert parts.predicted_characters == 24


def test_counting_and_evaluating_measure_in_the_same_characters(tmp_path, capsys):
    text = "the cat sat on a mat, the dog on another. " * 90 + "quux the cat zyzzyva sat. " * 9
    (tmp_path / "book.txt").write_text(text)
    source = [str(tmp_path / "book.txt"), "--level", "word"]
    assert cli(["ngram", *source, "--order", "3", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)["models"][0]
    data = Data(source[0], "word")
    parts = prepared.prepare(data, text)
    assert evaluation.unknown(parts.vocab, parts.validation) > 0
    whole = parts.vocab.decode(prepared.prepare(data, text).train)
    bits = counted["nats_per_token"] * counted["tokens"] / math.log(2)
    assert counted["bits_per_char"] == pytest.approx(bits / parts.characters)
    assert parts.characters + len(whole) == len(text)
    model = LanguageModel(len(parts.vocab), hidden_size=2)
    told = {"train": parts.train, "characters": parts.predicted_characters}
    scores = evaluation.evaluate(model, parts.vocab, parts.validation, **told)
    rival = scores.baselines["kneser-ney:3"]
    first = len(text) - len(whole) - parts.predicted_characters
    assert 0 < first < 10
    assert scores.bits_per_char(rival) == pytest.approx(
        rival.nats / math.log(2) / (parts.characters - first)
    )


def test_byte_models_are_measured_in_bits_per_character_not_per_byte():
    vocab = Vocab.from_text("é", "byte")
    ids = vocab.encode("eéé")
    model = LanguageModel(256, hidden_size=4)
    for p in model.parameters():
        torch.nn.init.zeros_(p)  # every byte alike: 8 bits for each
    row = evaluation.evaluate(model, vocab, ids).json()
    assert row["tokens"] == 4
    assert row["perplexity"] == pytest.approx(256)
    assert row["bits_per_char"] == pytest.approx(16)


@pytest.mark.parametrize("level", ["char", "byte", "word"])
def test_a_run_is_scored_token_by_token_with_the_state_carried(tiny_run, level):
    run = Run.open(tiny_run(level=level))
    model, parts = run.load_model("cpu", "best").double(), run.splits()
    nats, state = 0.0, None
    ids = parts.validation.astype(int).tolist()
    for token, following in itertools.pairwise(ids):
        with torch.no_grad():
            logits, state = model(torch.tensor([[token]]), state)
        nats -= float(logits[0, 0].log_softmax(-1)[following])
    found = evaluation.evaluate(model, run.vocab, parts.validation, train=parts.train)
    assert found.model.tokens == len(ids) - 1
    assert found.model.nats == pytest.approx(nats, rel=1e-9)
    assert found.model.nats < found.baselines["uniform"].nats


def test_json_has_the_four_numbers_for_the_model_and_each_baseline(tiny_run):
    run = Run.open(tiny_run())
    parts = run.splits()
    found = evaluation.evaluate(
        run.load_model(), run.vocab, parts.validation, train=parts.train, mix=["kneser-ney:3"]
    )
    record = json.loads(json.dumps(found.json(), allow_nan=False))
    numbers = {"tokens", "nats_per_token", "perplexity", "bits_per_char"}
    assert numbers <= record.keys()
    assert all(row.keys() == numbers for row in record["baselines"].values())
    assert numbers <= record["mixture"].keys()
    assert record["mixture"]["weights"].keys() == {"model", "kneser-ney:3"}
    assert record["baselines"]["uniform"]["perplexity"] == pytest.approx(len(run.vocab))
    assert record["perplexity"] == pytest.approx(math.exp(record["nats_per_token"]))
    bits = record["nats_per_token"] / math.log(2) * record["tokens"] / record["characters"]
    assert record["bits_per_char"] == pytest.approx(bits)


def test_a_perplexity_beyond_all_numbers_is_null_in_json():
    score = Score(3, math.inf)
    found = evaluation.Evaluation(score, {}, None, 3, 0)
    assert found.json()["perplexity"] is None
    json.dumps(found.json(), allow_nan=False)


@given(
    log_p=st.lists(st.tuples(*[st.floats(-9, -0.01)] * 2), min_size=4, max_size=20).map(
        lambda rows: np.array(rows).T
    )
)
def test_a_mixture_gives_each_half_the_best_weights_of_the_other(log_p):
    half = log_p.shape[1] // 2
    first, second = log_p[:, :half], log_p[:, half:]
    by_hand = sum(
        -np.log(fit_weights(other) @ np.exp(here)).sum()
        for here, other in ((first, second), (second, first))
    )
    found = evaluation.mixed(log_p, ("a", "b"))
    assert found.score.tokens == log_p.shape[1]
    assert found.score.nats == pytest.approx(by_hand)
    assert sum(found.weights.values()) == pytest.approx(1, abs=1e-5)


def test_a_mixture_of_good_halves_beats_both():
    rng = np.random.default_rng(0)
    right = rng.random(2000) < 0.6
    log_p = np.log(np.where([right, ~right], 0.9, 0.1))
    found = evaluation.mixed(log_p, ("a", "b"))
    assert found.score.nats < -log_p.sum(axis=1).max()
    assert found.weights["a"] > found.weights["b"]


@pytest.mark.parametrize("name", ["kneser-ney", "kneser-ney:0", "kneser-ney:x", "laplace:3"])
def test_what_cannot_be_mixed_is_refused(name, tiny_run):
    run = Run.open(tiny_run())
    with pytest.raises(UserError, match=f"cannot mix with '{name}'"):
        evaluation.evaluate(run.load_model(), run.vocab, np.array([1, 2, 3]), mix=[name])


def test_a_mixture_without_the_training_text_is_refused(tiny_run):
    run = Run.open(tiny_run())
    with pytest.raises(UserError, match="needs the training text"):
        evaluation.evaluate(run.load_model(), run.vocab, np.array([1, 2]), mix=["kneser-ney:3"])


def test_foreign_text_is_cleaned_like_the_runs_own(tiny_run):
    run = Run.open(tiny_run("--clean", "letters"))
    ids = run.encode("The CAT,\nsat!")
    assert run.vocab.decode(ids) == "the catsat"
    assert evaluation.unknown(run.vocab, ids) == 0
