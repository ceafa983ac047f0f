"""Models mixed bit by bit: a probability for every token, learnt from nothing but the past."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elman import LanguageModel, Vocab, compression, evaluation
from elman.cli import run as cli
from elman.compression import library
from elman.compression.expected import COUNTING
from elman.errors import UserError
from elman.scoring import bitwise
from elman.scoring.bitwise import LEAST, Codes, mix_bitwise, read_bits, read_tokens, stretch
from elman.scoring.dynamic import Adaptation
from elman.scoring.mixture import Network
from elman.scoring.online import mix_online

TEXT = "naïve — «文字», the time traveller; " * 9
CHARACTERS = Vocab(TEXT, reserved_tokens=["<pad>", "<n>"])
BYTES = Vocab(TEXT.encode())
VOCABS = {"char": CHARACTERS, "byte": BYTES, "two": Vocab("ab"), "unknown": Vocab("", level="char")}


def drawn(vocab, steps, seed=0):
    """log P of every token, as a model might have it, and a text."""
    chance = np.random.default_rng(seed)
    logits = chance.normal(size=(steps, len(vocab))) * 2
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return log_p, chance.integers(len(vocab), size=steps + 1)


def plainly(columns, codes, ids, rate):
    """The mixture, one bit after another, each model's odds summed over the tokens that remain.

    A column is log P of every token, (time, tokens), or the odds of every bit of the text.
    """
    w, scores, at = [1 / len(columns)] * len(columns), [], 0
    written = ["".join(f"{byte:08b}" for byte in code) for code in codes.codes]
    for t, token in enumerate(ids):
        log_p = 0.0
        for i, bit in enumerate(written[token]):
            left = [j for j, code in enumerate(written) if code[:i] == written[token][:i]]
            ones = [j for j in left if written[j][i] == "1"]
            at += 1
            if len(ones) in (0, len(left)):
                continue
            x = []
            for column in columns:
                if column.ndim == 1:
                    p = column[at - 1]
                else:
                    p = sum(math.exp(column[t, j]) for j in ones)
                    p /= sum(math.exp(column[t, j]) for j in left)
                x.append(min(max(math.log(p / (1 - p)), -12.0), 12.0))
            z = sum(w_j * x_j for w_j, x_j in zip(w, x, strict=True))
            p = 1 / (1 + math.exp(-min(max(z, -12.0), 12.0)))
            log_p += math.log(p if bit == "1" else 1 - p)
            w = [w_j + rate * (int(bit) - p) * x_j for w_j, x_j in zip(w, x, strict=True)]
        scores.append(log_p)
    return np.array(scores)


@pytest.mark.parametrize("vocab", VOCABS.values(), ids=VOCABS)
def test_no_code_begins_another_and_text_is_its_own(vocab):
    codes = Codes(vocab)
    for code in codes.codes:
        assert [other for other in codes.codes if other.startswith(code)] == [code]
    if vocab in (CHARACTERS, BYTES):
        assert codes.encode(vocab.encode(TEXT)) == TEXT.encode()


@pytest.mark.parametrize("vocab", VOCABS.values(), ids=VOCABS)
def test_one_model_alone_is_itself(vocab):
    log_p, ids = drawn(vocab, 30)
    codes = Codes(vocab)
    reading = read_tokens([log_p[:7], log_p[7:]], ids, codes)
    np.testing.assert_array_equal(reading.log_p, log_p[np.arange(30), ids[1:]])
    found = mix_bitwise(reading.odds[None], codes.decisions(ids[1:]), 30, rate=0.0)
    expected = np.log((np.exp(reading.log_p) + LEAST) / (1 + LEAST * len(vocab)))
    # a decision is a ratio of sums, LEAST or more, of at most 256 numbers below one
    atol = 24 * 256 * np.finfo(float).eps / LEAST
    np.testing.assert_allclose(found.log_p, expected, rtol=1e-12, atol=atol)


@pytest.mark.parametrize("vocab", [CHARACTERS, VOCABS["two"]], ids=["char", "two"])
@pytest.mark.parametrize("piece", [7, 1 << 16])
def test_the_mixture_is_the_plain_one(vocab, piece, monkeypatch):
    monkeypatch.setattr(bitwise, "PIECE", piece)
    (one, ids), (other, _) = drawn(vocab, 25), drawn(vocab, 25, seed=1)
    codes = Codes(vocab)
    bits = np.random.default_rng(2).uniform(0.01, 0.99, 8 * len(codes.encode(ids[1:])))
    odds = [read_tokens([log_p], ids, codes).odds for log_p in (one, other)]
    decisions = codes.decisions(ids[1:])
    odds.append(read_bits(lambda _, text: bits.reshape(-1, 8), codes, ids[:0], ids))
    found = mix_bitwise(np.stack(odds), decisions, 25, rate=0.05)
    expected = plainly([one, other, bits], codes, ids[1:].tolist(), 0.05)
    np.testing.assert_allclose(found.log_p, expected, rtol=1e-5)
    still = mix_bitwise(np.stack(odds), decisions, 25, rate=0.0)
    assert np.abs(found.log_p - still.log_p).max() > 0.01, "living: the weights have learnt"


@given(seed=st.integers(0, 2**32 - 1), rate=st.floats(0, 0.1))
def test_all_tokens_together_are_certain(seed, rate):
    """Whatever was learnt before: the probabilities of what may come next sum to one."""
    vocab, codes = CHARACTERS, Codes(CHARACTERS)
    (one, ids), (other, _) = drawn(vocab, 4, seed), drawn(vocab, 4, seed + 1)
    total = 0.0
    for last in range(len(vocab)):
        text = np.array([*ids[:-1], last])
        odds = np.stack([read_tokens([log_p], text, codes).odds for log_p in (one, other)])
        total += math.exp(mix_bitwise(odds, codes.decisions(text[1:]), 4, rate).log_p[-1])
    assert total == pytest.approx(1, rel=1e-9)


def test_weights_never_look_ahead_and_find_the_better_model():
    codes, steps = Codes(VOCABS["two"]), 400
    log_p, ids = drawn(VOCABS["two"], steps)
    knows = np.full_like(log_p, math.log(0.1))
    knows[np.arange(steps), ids[1:]] = math.log(0.8)
    odds = np.stack([read_tokens([p], ids, codes).odds for p in (log_p, knows)])
    decisions = codes.decisions(ids[1:])
    found = mix_bitwise(odds, decisions, steps, rate=0.02)
    short = decisions.of(0, 100)
    first = mix_bitwise(odds[:, : len(short.bit)], short, 100, rate=0.02)
    np.testing.assert_array_equal(found.log_p[:100], first.log_p)
    assert found.weights[1] > 0.6 > found.weights[0]


def test_counting_says_what_the_coder_would_spend_and_reads_nothing_ahead():
    before, text = TEXT.encode(), TEXT.encode()[:200] + b"and so on, for no one knows how long"
    odds = compression.expectations(before, text)
    assert odds.shape == (len(text), 8)
    other = text[:50] + bytes(len(text) - 50)  # as long, as tables are as large as the text
    np.testing.assert_array_equal(compression.expectations(before, other)[:50], odds[:50])
    bits = np.unpackbits(np.frombuffer(text, "u1")).reshape(-1, 8)
    spent = -np.log2(np.where(bits == 1, odds, 1 - odds)).sum() / 8
    engine = library.coder(COUNTING.options(len(before) + len(text)))
    engine.prime(before)
    assert len(engine.encode(text, True)) == pytest.approx(spent, abs=2)
    assert spent < len(text) / 4


@pytest.mark.skipif(library.native() is None, reason="the native compressor was not built")
def test_native_counting_is_the_reference_bit_for_bit():
    options, before, text = COUNTING.options(40), b"it was, it was.", "naïve\x00 it was".encode()
    plain = library.Plain(options, None)
    plain.prime(before)
    expected = plain.predict(text)
    for variant in (library.PORTABLE, library.AVX2, library.AVX512):
        engine = library.Native(library.native(), options, None, variant)
        engine.prime(before)
        np.testing.assert_array_equal(engine.predict(text), expected)


def test_evaluation_mixes_what_was_read_after_the_training_text():
    vocab = Vocab("the time traveller")
    ids = vocab.encode("the time traveller, the traveller " * 8)
    torch.manual_seed(0)
    model, read = LanguageModel(len(vocab), hidden_size=5), []

    def reader(before, text):
        read.append((before, text))
        return np.full((len(text), 8), 0.5)

    train, test = ids[:100], ids[100:150]
    found = evaluation.evaluate(model, vocab, test, train=train, counts=reader)
    codes = Codes(vocab)
    assert read == [(codes.encode(ids[:101]), codes.encode(ids[101:150]))]
    odds = read_tokens(Network(model).distributions(test), test, codes).odds
    both = np.stack([odds, np.full_like(odds, 0.5)])
    expected = mix_bitwise(both, codes.decisions(test[1:]), 49)
    assert found.bitwise.score.nats == pytest.approx(-expected.log_p.sum(), rel=1e-12)
    assert found.bitwise.weights.keys() == {"model", "counts"}
    assert found.adapted is found.online is found.mixture is None
    settings = Adaptation(0.01, 0.0, window=5)
    moved = evaluation.evaluate(model, vocab, test, train=train, counts=reader, adapt=settings)
    assert moved.bitwise.weights.keys() == {"adapting model", "counts"}
    assert moved.bitwise.score.nats < found.bitwise.score.nats


def test_a_row_of_its_own(tiny_run, capsys):
    path = str(tiny_run())
    assert cli(["evaluate", path, "--adapt", "--mix", "counts", "--mix", "kneser-ney:3"]) == 0
    said = capsys.readouterr().out
    for row in ("this run: lstm", "adapting (rate", "mixture ", "learning mixture ", "bit by bit "):
        assert row in said
    assert cli(["evaluate", path, "--mix", "counts", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mixture"] is found["adapted"] is found["online_mixture"] is None
    assert found["bitwise_mixture"]["nats_per_token"] < found["nats_per_token"]
    assert found["bitwise_mixture"]["weights"].keys() == {"model", "counts"}


def test_what_cannot_be_mixed_bit_by_bit_is_refused(tiny_run, capsys):
    path = str(tiny_run(level="word"))
    assert cli(["evaluate", path, "--mix", "counts"]) == 2
    assert "words are not mixed bit by bit" in capsys.readouterr().err
    path = str(tiny_run())
    assert cli(["evaluate", path, "--mix", "counts", "--no-baselines"]) == 2
    assert "leave out --no-baselines" in capsys.readouterr().err
    with pytest.raises(UserError, match="a counting model needs the training text"):
        evaluation.evaluate(
            LanguageModel(3), Vocab("ab"), np.zeros(9, int), counts=compression.expectations
        )


def test_stretched_odds_are_never_surer_than_they_may_be():
    assert stretch(np.array([0.0, 1e-30, 0.5, 1 - 1e-16, 1.0])).tolist() == [-12, -12, 0, 12, 12]


# ---------------------------------------------------------------------- other runs


def test_other_runs_are_in_every_mixture(tiny_run, capsys):
    one, other = str(tiny_run()), str(tiny_run("--seed", "5"))
    words = ["evaluate", one, "--mix", other, "--mix", "kneser-ney:3", "--mix", "counts", "--json"]
    assert cli(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["mixture"]["weights"]) == ["model", other, "kneser-ney:3"]
    assert list(found["bitwise_mixture"]["weights"]) == ["model", other, "counts"]
    assert found["online_mixture"] is None
    rates = ["--adapt-rate", "0.0001", "--adapt-decay", "0"]
    assert cli(["evaluate", one, "--mix", other, "--adapt", *rates, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["online_mixture"]["weights"]) == ["adapting model", f"adapting {other}"]
    assert found["bitwise_mixture"] is None


def test_a_mixture_of_two_networks_is_that_of_their_probabilities():
    vocab = Vocab("the time traveller")
    ids = np.asarray(vocab.encode("the time traveller, the traveller " * 8))
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(LanguageModel(len(vocab), hidden_size=5))
    train, ids = ids[:150], ids[150:]
    found = evaluation.evaluate(
        models[0],
        vocab,
        ids,
        train=train,
        others={"b": models[1]},
        counts=lambda _, text: np.full((len(text), 8), 0.5),
        adapt=Adaptation(0.0, 0.0),
    )
    codes, networks = Codes(vocab), [Network(model) for model in models]
    log_p = np.stack([network.score(ids)[1:] for network in networks])
    assert found.mixture == evaluation.mixed(log_p, ("model", "b"))
    online = mix_online(log_p).log_p.sum()
    assert found.online.score.nats == pytest.approx(-online, rel=1e-6)
    odds = [read_tokens(n.distributions(ids), ids, codes).odds for n in networks]
    odds = np.stack([*odds, np.full_like(odds[0], 0.5)])
    expected = mix_bitwise(odds, codes.decisions(ids[1:]), len(ids) - 1).log_p.sum()
    assert found.bitwise.score.nats == pytest.approx(-expected, rel=1e-6)


def test_a_run_mixed_with_itself_is_itself(tiny_run, capsys):
    path = str(tiny_run())
    assert cli(["evaluate", path, "--mix", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mixture"]["nats_per_token"] == pytest.approx(found["nats_per_token"], rel=1e-6)


@pytest.mark.parametrize(
    "how", [("--validation", "0.2"), ("--level", "byte"), ("--max-tokens", "2000")]
)
def test_a_run_that_may_have_seen_the_text_is_not_mixed_in(tiny_run, capsys, how):
    one, other = str(tiny_run()), str(tiny_run(*how))
    assert cli(["evaluate", one, "--mix", other]) == 2
    said = capsys.readouterr().err
    assert f"{other} was not trained on the same part of the same text" in said


def test_a_folder_that_is_no_run_is_not_mixed_in(tiny_run, tmp_path, capsys):
    for name in (str(tmp_path), "kneser-nay:3", "count"):
        assert cli(["evaluate", str(tiny_run()), "--mix", name]) == 2
        assert "error: " in capsys.readouterr().err
