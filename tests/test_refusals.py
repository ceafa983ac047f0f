"""What a caller gets wrong is refused in words: the value, the rule, what to try."""

import numpy as np
import pytest
import torch

import elman
from elman import (
    LanguageModel,
    MarkovChain,
    NgramModel,
    Vocab,
    batches,
    corpus,
    forecasting,
    generation,
    metrics,
    series,
    statistics,
    tokens,
)
from elman.cli import run
from elman.errors import UserError
from elman.forecasting.baselines import Seasonal
from elman.runs.shown import Shown
from elman.session import Session
from elman.text.prepared import Data
from elman.training import Optimisation, Reading, Settings, Training

IDS = np.arange(4000) % 5
MODEL = LanguageModel(5, hidden_size=4)

CALLS = {
    "a word for a number": (lambda: Settings(epochs="three"), "epochs='three' must be a whole"),
    "half an epoch": (lambda: Settings(epochs=2.5), "epochs=2.5 must be a whole number"),
    "a number in quotes": (lambda: Optimisation(learning_rate="0.1"), "'0.1' must be a number"),
    "no number": (lambda: Optimisation(learning_rate=None), "learning_rate=None must be a number"),
    "no batch": (lambda: Reading(batch_size=None), "batch_size=None must be a whole number"),
    "a size in quotes": (
        lambda: Reading(memory="64M"),
        "memory='64M' must be a whole number; memory=64 << 20 for 64 MiB",
    ),
    "a list of words": (lambda: Reading(sampling=["random"]), "one of sequential, random"),
    "a number for a word": (lambda: Shown(sample_prompt=3), "sample_prompt=3 must be a word"),
    "a factor of no plateau": (
        lambda: Optimisation(plateau_factor=0.1),
        "plateau_factor=0.1 means nothing with schedule=constant; schedule=plateau, or leave",
    ),
    "a decay of no average": (lambda: Optimisation(average_decay=0.9), "nothing with average=none"),
    "a start of another": (
        lambda: Optimisation(average="ema", average_start=0.1),
        "average_start=0.1 means nothing with average=ema",
    ),
    "a tolerance of no chunks": (lambda: Reading(tolerance=1e-3), "nothing with chunks=0"),
    "a past of all": (
        lambda: Reading(carry="full", history=3),
        "history=3 means nothing with carry=full; carry=sliding",
    ),
    "segments of one": (
        lambda: Settings(accumulate=2, reading=Reading(carry="full")),
        "accumulate=2 means nothing with carry=full",
    ),
    "a context with a state": (
        lambda: LanguageModel(5, context=3),
        "context=3 means nothing with cell=elman; cell=mlp",
    ),
    "bytes in a code": (lambda: Data(level="byte", encoding="latin-1"), "nothing with level=byte"),
    "patience for nothing": (
        lambda: Training(MODEL, IDS, None, Settings(patience=3)),
        "patience=3 means nothing without held-out tokens",
    ),
    "validations of nothing": (
        lambda: Training(MODEL, IDS, None, Settings(validate_every=7)),
        "validate_every=7 means nothing without held-out tokens; hold some out",
    ),
    "a plateau of nothing": (
        lambda: Training(MODEL, IDS, None, Settings(optimisation=Optimisation(schedule="plateau"))),
        "schedule=plateau means nothing without held-out tokens",
    ),
    "a seed below zero": (lambda: series.load("sine", seed=-1), "seed=-1 must be at least 0"),
    "a seed of no forecast": (
        lambda: forecasting.SeriesForecaster("last", seed=-1).fit(IDS),
        "seed=-1 must be at least 0",
    ),
    "settings of settings": (lambda: Settings(reading={}), "must be of the type Reading"),
    "settings in a dict": (lambda: Training(MODEL, IDS, None, {}), "of the type Settings"),
    "settings too early": (lambda: Training(MODEL, IDS, Settings()), "one-dimensional integers"),
    "text to train on": (lambda: Training(MODEL, "text"), "vocab.encode"),
    "unknown ids": (lambda: Training(MODEL, IDS + 3), "3 to 7 must lie in 0 to 4"),
    "unknown ids held out": (lambda: Training(MODEL, IDS, IDS + 3), "3 to 7 must lie in 0 to 4"),
    "halves held out": (lambda: Training(MODEL, IDS, IDS / 2), "not 1-dimensional float64"),
    "lines held out": (lambda: Training(MODEL, IDS, IDS.reshape(2, -1)), "not 2-dimensional"),
    "a name of a model": (lambda: Training("gru", IDS), r"a str is not a torch\.nn\.Module"),
    "another's state": (
        lambda: Training(MODEL, IDS).load_state_dict({}, {}),
        "bias_q is absent there",
    ),
    "a vocabulary in quotes": (lambda: LanguageModel("5"), r"vocab_size='5' must be at least 1"),
    "units in quotes": (lambda: LanguageModel(5, hidden_size="4"), "must be a whole number"),
    "one dropout": (lambda: LanguageModel(5, dropout=0.5), r"Dropout\(outputs=0.5\)"),
    "score a text": (lambda: metrics.evaluate(MODEL, "text"), "nothing to predict"),
    "score halves": (lambda: metrics.evaluate(MODEL, IDS / 2), "not 1-dimensional float64"),
    "a text as prompt": (lambda: generation.generate(MODEL, "abc", 3), "not the text 'abc'"),
    "a length of half": (
        lambda: generation.generate(MODEL, [1], 6.0),
        "length=6.0 must be a whole",
    ),
    "a length in quotes": (
        lambda: generation.generate(MODEL, [1], "6"),
        "length='6' must be a whole",
    ),
    "half a beam": (
        lambda: generation.beam_search(MODEL, [1], 6, 1.5),
        "width=1.5 must be a whole",
    ),
    "half a token": (
        lambda: generation.generate(MODEL, [1], 6, top_k=1.5),
        "top_k=1.5 must be a wh",
    ),
    "a word for a share": (
        lambda: generation.generate(MODEL, [1], 6, top_p="x"),
        "top_p=x must be",
    ),
    "half a seed": (
        lambda: generation.generate(MODEL, [1], 6, seed=0.5),
        "seed=0.5 must be a whole",
    ),
    "an endless seed": (
        lambda: generation.generate(MODEL, [1], 6, seed=2**70),
        "whole number of 64",
    ),
    "half an order": (lambda: NgramModel.fit(IDS, 2.5), "order=2.5 must be a whole number"),
    "a chain of half": (lambda: MarkovChain.fit(IDS, 1.5), "order=1.5 must be a whole number"),
    "half a symbol": (lambda: MarkovChain.fit(IDS, 1).sample(2.5), "length=2.5 must be a whole"),
    "half a batch": (
        lambda: batches.streams(IDS, batch=2.5, window=3),
        "batch=2.5 must be a whole number",
    ),
    "half a season": (lambda: Seasonal(1.5), "season=1.5 must be a whole number"),
    "a word for a temperature": (
        lambda: generation.generate(MODEL, [1], 3, temperature="hot"),
        "temperature=hot must be a number",
    ),
    "no path": (lambda: elman.load(None), "a path is a str or a Path, not None"),
    "a number for a text": (lambda: corpus.load(3), "a path is a str or a Path, not 3"),
    "bytes for a table": (lambda: series.load(b"a.csv"), "a path is a str or a Path, not b'a.csv'"),
    "no path to write": (lambda: Vocab("ab").save(None), "a path is a str or a Path, not None"),
    "no forecaster": (
        lambda: forecasting.SeriesForecaster.load(None),
        "a path is a str or a Path, not None",
    ),
    "no encoding": (lambda: corpus.load("a", encoding=None), "unknown encoding None"),
    "no text to clean": (lambda: corpus.letters(None), "a text is a str, not a NoneType"),
    "bytes to clean": (lambda: corpus.unix_newlines(b"a"), "a text is a str, not a bytes"),
    "no text to split": (lambda: corpus.split(None), "None has no length"),
    "no tokens": (lambda: Vocab(None), "tokens are a list of them, a text or bytes, not None"),
    "no tokens to encode": (lambda: Vocab("ab").encode(3), "tokens are a list of them"),
    "ids to encode": (lambda: Vocab("ab").encode([1, 2]), "1 is not a token of level 'char'"),
    "one string reserved": (
        lambda: Vocab("ab", reserved_tokens="<pad>"),
        "reserved_tokens='<pad>' must be a list of tokens",
    ),
    "half a frequency": (lambda: Vocab({"a": 1.5}), "1.5, how often 'a' occurs, must be a whole"),
    "lines of numbers": (lambda: tokens.tokenize([3]), "3 is not a line of text"),
    "no lines": (lambda: tokens.tokenize(None), "takes a list of lines, not one NoneType"),
    "a level in a list": (lambda: Vocab.from_text("ab", ["char"]), "unknown level"),
    "an epsilon in quotes": (lambda: MarkovChain.fit("abab", epsilon="1"), "epsilon='1' must be"),
    "a chain of nothing": (lambda: MarkovChain(np.zeros((0, 0))), r"table of shape \(0, 0\)"),
    "tokens in quotes": (lambda: MarkovChain(np.eye(2), [1, 0], vocab="ab"), "must be a Vocab"),
    "one token": (lambda: statistics.frequencies(["a"], 2), "a text of 1 token has no run of 2"),
    "imaginary numbers": (
        lambda: forecasting.SeriesForecaster("last").fit(np.ones(30) * 1j),
        "must hold numbers: these are complex",
    ),
    "too little to read": (
        lambda: forecasting.Linear(tau=3).fit(np.arange(30.0)).predict(np.arange(2.0), 1),
        "the series has 2; a longer series",
    ),
    "one step": (lambda: forecasting.SeriesForecaster("last").fit([1]), "has 1 step: too few"),
}


@pytest.mark.parametrize(("call", "said"), CALLS.values(), ids=CALLS.keys())
def test_it_is_refused_in_words(call, said):
    with pytest.raises(UserError, match=said) as refusal:
        call()
    assert refusal.value.hint


def test_a_number_of_any_library_is_a_number():
    made = Settings(
        epochs=np.int64(2), optimisation=Optimisation(learning_rate=np.float32(1), clip=None)
    )
    assert (made.epochs, made.optimisation.learning_rate) == (2, 1)
    assert Optimisation(learning_rate=1) == Optimisation(learning_rate=1.0)


def test_ids_may_lie_in_any_kind_of_integers():
    for held_out in (IDS.tolist(), IDS.astype("u1"), torch.from_numpy(IDS)):
        assert len(Training(MODEL, IDS, held_out).validation_ids) == len(IDS)


@pytest.mark.parametrize(
    ("call", "typed", "python", "line"),
    [
        (
            lambda: forecasting.SeriesForecaster("last", steps=0).fit(IDS),
            ["forecast", "sine", "--model", "last", "--steps", "0"],
            "steps=0 must be at least 1 and at most 10000; steps=16 looks 16 steps ahead",
            "--steps 0 must be at least 1",
        ),
        (
            lambda: forecasting.SeriesForecaster("best").fit(IDS),
            ["forecast", "sine", "--model", "best"],
            "model='best' is unknown",
            "--model 'best' is unknown",
        ),
        (
            lambda: Session.begin({"momentum": 0.5, "optimizer": "adam"}),
            ["train", "--momentum", "0.5", "--optimizer", "adam"],
            "momentum=0.5 means nothing with optimizer=adam; optimizer=sgd",
            "--momentum 0.5 means nothing with --optimizer adam",
        ),
    ],
    ids=["steps", "model", "momentum"],
)
def test_python_and_the_command_line_are_told_in_the_words_they_type(
    call, typed, python, line, capsys
):
    with pytest.raises(UserError) as refused:
        call()
    assert str(refused.value).startswith(python)
    assert run(typed) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    "written",
    ["drafts--old/part--two.txt", "'2024 --known 3'", '"it\'s --json"', "my --notes.txt", "a -- b"],
)
def test_what_a_user_wrote_stands_in_a_refusal_as_it_was_written(written):
    refusal = UserError(
        f"{written} is no text; --level byte, or --clip -1", hint="leave out --json"
    )
    assert str(refusal) == f"{written} is no text; level byte, or clip=-1; leave out json"
