"""Defaults that follow from the text: every size and every option beside them gives a training."""

import itertools

import pytest
import torch

from elman import LanguageModel, Vocab
from elman.cli import run as elman
from elman.errors import UserError
from elman.language_model.model import kinds
from elman.runs import presets
from elman.runs.effort import FOLLOW, Size, _updates, effort, passes
from elman.training.segments import one_pass

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.mark.parametrize("tokens", [1, 500, 20_000, 300_000, 5_000_000, 10**9])
@pytest.mark.parametrize("vocab_size", [2, 80, 500, 5_000])
def test_any_text_gets_settings_that_can_be_built(tokens, vocab_size):
    sizes = ({}, {"hidden_size": 24}, {"embedding_size": 0}, {"embedding_size": 16, "layers": 2})
    for model, beside in itertools.product(kinds(), sizes):
        given = {"model": model, **beside}
        options = presets.expand("auto", given, Size(tokens, vocab_size))
        assert {name: options[name] for name in given} == given, "what is given wins"
        LanguageModel.from_config(presets.model(options, 30))
        presets.settings(options)


@pytest.mark.parametrize("preset", presets.PRESETS)
@pytest.mark.parametrize("model", ["indrnn", "mlp", "gru"])
@pytest.mark.parametrize("embedding", [0, 16])
def test_a_preset_hides_nothing_that_a_model_does_not_have_or_cannot_spare(
    preset, model, embedding
):
    """A diagonal W_hh scaled up by what is hidden of it made the first losses no numbers."""
    given = {"model": model, "embedding_size": embedding}
    options = presets.expand(preset, given, Size(20_000, 80))
    shape = presets.model(options, 30)
    LanguageModel.from_config(shape)
    assert model == "gru" or options["dropout_recurrent"] == 0
    asked = presets.expand(preset, given | {"dropout_recurrent": 0.1}, Size(20_000, 80))
    assert asked["dropout_recurrent"] == 0.1, "what is given wins"


def test_the_options_that_follow_from_the_text_are_those_that_are_shown_so():
    found = {*effort(Size(10_000, 80), {}), *effort(Size(10_000, 5_000), {})}
    assert found == set(FOLLOW)


def test_the_longer_a_text_the_fewer_passes_and_the_less_is_hidden():
    sizes = [Size(n, 80) for n in (100_000, 400_000, 900_000, 3_000_000, 20_000_000)]
    epochs = [effort(size, {})["epochs"] for size in sizes]
    hidden = [effort(size, {})["dropout_outputs"] for size in sizes]
    assert epochs == sorted(epochs, reverse=True)
    assert hidden == sorted(hidden, reverse=True)
    assert (epochs[0], epochs[-1], hidden[0], hidden[-1]) == (46, 1, 0.4, 0.0)
    assert passes(0, reads=10, most=3) == 3


def test_a_brief_text_gets_a_narrower_model_and_more_updates():
    """The widest lstm, moved 240 times, knew 5,000 characters by heart in ten passes of 60."""
    sizes = [Size(n, 80) for n in (1_000, 5_000, 10_000, 20_000, 80_000, 100_000)]
    options = [effort(size, {}) for size in sizes]
    widths = [made["hidden_size"] for made in options]
    updates = [_updates(size.tokens, made) for size, made in zip(sizes, options, strict=True)]
    assert widths == sorted(widths)
    assert updates[1] > 1000
    assert max(widths[:-1]) < widths[-1] == 384
    assert effort(Size(5_000, 80), {"epochs": 4})["dropout_outputs"] == 0


def test_a_brief_text_of_many_tokens_has_one_table_for_the_way_in_and_out():
    many = Size(18_000, 590)
    assert effort(many, {})["tied"]
    assert effort(many, {})["embedding_size"] == effort(many, {})["hidden_size"]
    assert not effort(many, {"embedding_size": 32})["tied"], "what is given wins"
    assert "tied" not in effort(Size(18_000, 256), {}), "bytes are as few as letters"


def test_a_large_vocabulary_of_rare_tokens_gets_what_the_text_would_get_without_them():
    """A list of Chinese words and how they are said: 0.25 nats worse by the settings of Chinese."""
    rare, plain, many = Size(180_000, 1_500, 45.0), Size(180_000, 80), Size(180_000, 1_500, 450.0)
    assert effort(rare, {}) == effort(plain, {}) | {"dropout_inputs": 0.3}
    assert effort(many, {}) == effort(Size(180_000, 1_500), {})
    assert effort(many, {})["tied"]
    for tokens in (60_000, 900_000):  # brief, and long
        assert effort(Size(tokens, 1_500, 45.0), {}) == effort(Size(tokens, 1_500), {})


@pytest.mark.parametrize("tokens", [100_000, 300_000, 500_000])
def test_the_rarer_tokens_there_are_the_fewer_are_read(tokens):
    epochs = [effort(Size(tokens, n, 45.0), {})["epochs"] for n in (1_000, 3_000, 30_000)]
    assert epochs == sorted(epochs, reverse=True)
    assert epochs[0] > epochs[-1] == passes(tokens, 2_000_000, 60)


@pytest.mark.parametrize("tokens", [100_000, 400_000, 900_000, 20_000_000])
def test_a_small_vocabulary_is_not_asked_how_often_its_tokens_occur(tokens):
    assert effort(Size(tokens, 80, 3.0), {}) == effort(Size(tokens, 999), {})


def test_the_perplexity_of_tokens_is_that_of_the_training_part():
    vocab = Vocab([*"aaab"])
    assert Size.of(4, vocab).perplexity == pytest.approx(4 / 27**0.25, abs=0.01)
    assert Size.of(4, Vocab([])) == Size(4, 1)


def test_dropout_follows_the_passes_that_were_asked_for():
    text = Size(100_000, 80)
    assert effort(text, {"epochs": 4})["dropout_outputs"] == 0
    assert effort(text, {})["dropout_outputs"] == 0.4
    assert effort(text, {"epochs": 0})["dropout_outputs"] == 0, "refused later, in words"


def test_a_tied_embedding_is_as_wide_as_the_hidden_layer_or_not_tied():
    words = Size(40_000, 5_000)
    assert effort(words, {"hidden_size": 64})["embedding_size"] == 64
    assert not effort(words, {"embedding_size": 32})["tied"]
    assert effort(words, {})["tied"]


@pytest.mark.parametrize("carry", ["truncated", "sliding", "randomized", "polynomial", "full"])
def test_every_carry_trains_by_default(tmp_path, carry):
    """Options are checked before the text is read, and were those of a text without tokens."""
    text = tmp_path / "lines.txt"
    text.write_text("one two three " * 50)
    asked = ["--epochs", "1", "--hidden-size", "8", "--carry", carry]
    assert elman(["train", str(text), *asked, "--out", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("accumulate", [1, 7])
@pytest.mark.parametrize("carry", ["truncated", "sliding", "randomized", "polynomial", "full"])
def test_the_warm_up_is_a_tenth_of_the_updates_that_there_are(carry, accumulate):
    """With the full carry a pass is one update, and a warm-up of 100 once outlasted all 60."""
    ids = torch.randint(0, 50, (30_000,))
    given = {"carry": carry, "accumulate": accumulate}
    options = presets.expand("auto", given, Size(len(ids), 50))
    reading = presets.settings(options).reading
    updates = len(one_pass(ids, reading, seed=0, epoch=0)) * options["epochs"] // accumulate
    assert options["warm_up"] <= 1.1 * updates / 10
    assert options["average_decay"] <= max(0.9, 1 - 12 / updates)


@pytest.mark.parametrize("tokens", [50, 240, 1_000, 5_000])
def test_a_text_of_a_few_lines_is_trained_on(tmp_path, tokens):
    """Windows of a fixed shape asked for 1,080 tokens before anything was learned."""
    text = tmp_path / "lines.txt"
    text.write_text(("one two three " * 400)[:tokens])
    assert elman(["train", str(text), "--epochs", "1", "--out", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("option", ["window", "batch_size"])
def test_zero_of_what_must_be_something_is_refused_in_words(option):
    with pytest.raises(UserError, match=f"{option}=0 must be at least 1"):
        presets.settings(presets.expand("auto", {option: 0}))
