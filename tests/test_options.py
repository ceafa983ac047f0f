"""An option is described once, and checked, shown and stored by that description."""

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch

import elman
from elman import batches, forecasting, nn
from elman.cli import run
from elman.cli.made import BY_TEXT
from elman.errors import UserError
from elman.forecasting import experiment
from elman.gradients import Checkpointed, Chunked, Randomized, Sliding, Truncated
from elman.language_model import Dropout
from elman.options import Beside, as_flag, check, described, option, stored, typed, whole_number
from elman.runs import presets
from elman.runs.effort import FOLLOW
from elman.session import RunOptions, Session
from elman.training import Reading, Settings


@dataclass(frozen=True)
class Oven:
    heat: float = option(180.0, "Degrees", panel="Oven", at_least=0, below=300)
    rack: str = option("middle", "Where", panel="Oven", choices=("top", "middle"))
    minutes: int | None = option(None, "0: until done", panel="Oven", above=0, zero_is_none=True)
    start: int | None = option(None, "The hour; not said: now", panel="Oven", at_least=0)
    seed: int = 3  # no option

    def __post_init__(self) -> None:
        check(self)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"heat": -1.0}, r"heat=-1.0 must be .* below 300; try heat=180.0 \(Degrees\)"),
        ({"heat": 300.0}, "below 300"),
        ({"heat": float("nan")}, "heat=nan"),
        ({"heat": float("inf")}, "heat=inf must be finite"),
        ({"rack": "floor"}, "unknown rack 'floor'; one of top, middle"),
        ({"minutes": 0}, r"minutes=0 must be positive; try minutes=None \(0: until done\)"),
    ],
)
def test_what_breaks_its_rule_is_refused_in_words(given, said):
    with pytest.raises(UserError, match=said):
        Oven(**given)


def test_what_keeps_its_rule_is_taken():
    assert Oven(heat=0.0, rack="top", minutes=1).minutes == 1
    assert Oven().minutes is None


def test_options_are_found_on_the_fields_and_go_there_and_back():
    options = described(Oven, prefix="oven_")
    assert [(o.name, o.field, o.type) for o in options] == [
        ("oven_heat", "heat", float),
        ("oven_rack", "rack", str),
        ("oven_minutes", "minutes", int),
        ("oven_start", "start", int),
    ]
    flat = typed(options, vars(Oven()))
    known = {"oven_heat": 180.0, "oven_rack": "middle"}
    assert flat == {**known, "oven_minutes": 0, "oven_start": None}
    for oven in (Oven(), Oven(minutes=5, start=0)):
        assert Oven(**stored(options, typed(options, vars(oven)))) == oven


@pytest.mark.parametrize(
    ("beside", "options", "said"),
    [
        (Beside("dish", "cake"), {"dish": "soup"}, "heat=9 .* with dish=soup; dish=cake, or leave"),
        (Beside("timer", such_as=5), {"timer": 0}, "heat=9 .* with timer=0; timer=5, or leave it"),
        (Beside("lid", such_as="glass"), {"lid": None}, "means nothing without lid; lid=glass"),
        (Beside("dish", but="ice", such_as="cake"), {"dish": "ice"}, "with dish=ice; dish=cake"),
    ],
)
def test_what_means_nothing_beside_another_option_is_refused_in_words(beside, options, said):
    with pytest.raises(UserError, match=said):
        beside.refuse("heat", 9, options)
    with pytest.raises(UserError, match=r"^heat=9 means nothing") as refused:  # Python's words
        beside.refuse("heat", 9, options, as_flag)
    assert refused.value.message.startswith("--heat 9 means nothing")  # a command line's
    replace(beside, only=8).refuse("heat", 9, options)  # another value does not need it
    replace(beside, unless=Beside("fan")).refuse("heat", 9, {**options, "fan": True})


def test_whatever_an_option_needs_is_another_option_that_can_be_as_the_hint_has_it():
    """And neither a default nor a preset is ever refused."""
    usual = presets.defaults()
    needy = {name: o.option.beside for name, o in presets.OPTIONS.items() if o.option.beside}
    assert {"context", "tolerance", "average_decay", "patience", "encoding"} <= needy.keys()
    for name, beside in needy.items():
        instead = beside.such_as if beside.value is None else beside.value
        value = beside.only or object()
        assert beside.met(value, usual | {beside.name: instead}), name
        presets.OPTIONS[beside.name].option.refuse_outside(beside.name, instead, default=None)
    presets.check_used(usual, usual)
    for preset in presets.PRESETS:
        options = presets.expand(preset, {})
        presets.check_used(presets.named(preset, {}), options)


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_what_a_preset_has_and_the_user_makes_idle_is_as_usual(preset):
    given = {"average": "none", "schedule": "constant", "optimizer": "adam", "carry": "full"}
    made = presets.settings(presets.expand(preset, given))
    assert made.optimisation.average_decay == presets.defaults()["average_decay"]
    assert made.accumulate == 1


def test_every_default_keeps_its_own_rule():
    for o in (*presets.OPTIONS.values(), *described(RunOptions)):
        if o.default is not None:  # None: what suits the text
            o.option.refuse_outside(o.name, o.default, default=o.default)


def test_help_shows_every_option_whole_with_its_default_at_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["train", "--help"]) == 0
    page = capsys.readouterr().out
    assert max(len(line) for line in page.splitlines()) <= 80
    assert "…" not in page
    usual = presets.expand(presets.DEFAULT, {}) | dict.fromkeys(FOLLOW, BY_TEXT)
    words = page.split()
    for o in (*presets.OPTIONS.values(), *described(RunOptions)):
        if o.name == "source":
            continue
        flags = (o.option.flag or "--" + o.name.replace("_", "-")).split("/")
        assert set(flags) <= set(words), o.name
        if o.name in usual and o.type is not bool:
            default = BY_TEXT if o.name in FOLLOW else o.option.show(usual[o.name])
            assert not default or f"[default: ({default})]" in page, o.name
    for panel in ("Text", "Model", "Reading", "Updates", "Samples", "Run"):
        assert f"╭─ {panel} ─" in page


def test_a_shell_completes_options_and_their_choices(capsys, monkeypatch):
    for typed_so_far, expected in (("--optimi", "--optimizer"), ("--optimizer ad", "adamw")):
        monkeypatch.setenv("_ELMAN_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", f"elman train {typed_so_far}")
        monkeypatch.setenv("COMP_CWORD", str(1 + len(typed_so_far.split())))
        with pytest.raises(SystemExit):
            run(None)
        assert expected in capsys.readouterr().out.split()


@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8, torch.tensor])
def test_whole_numbers_of_other_libraries_are_taken_wherever_an_int_is(number):
    """And held as Python's own, so that JSON has them and nothing overflows in eight bits."""
    made = [
        nn.LSTM(number(5), number(7), number(2), proj_size=number(3)),
        elman.LanguageModel(number(9), hidden_size=number(7), embedding_size=number(4)).shape,
        Settings(epochs=number(3), seed=number(4), reading=Reading(window=number(5))),
        Truncated(number(4)),
        Sliding(every=number(2), steps=number(4)),
        Checkpointed(every=number(4)),
        Chunked(chunks=number(2), overlap=number(3)),
        forecasting.Window(tau=number(4), hidden=number(10)),
        experiment.Settings("linear", steps=number(3), options={"tau": number(2)}),
        batches.shuffled(range(99), batch=number(3), window=number(4), seed=number(5)),
        elman.Vocab("hello", min_freq=number(1), vocab_size=number(3)),
    ]
    held = [v for thing in made for v in vars(thing).values()]
    numbers = [v for v in held if hasattr(v, "__index__") and np.ndim(v) == 0]
    assert len(numbers) > 30
    assert {type(v) for v in numbers} <= {int, bool}


def test_real_numbers_and_truths_of_other_libraries_are_taken():
    drop = Dropout(outputs=np.float32(0.5))
    assert type(drop.outputs) is float
    assert type(Chunked(tolerance=np.float32(0.5)).tolerance) is float
    assert Randomized(keep=np.float32(0.5), seed=1) == Randomized(keep=0.5, seed=1)
    assert (
        nn.GRU(3, 4, 2, np.True_, dropout=np.float64(0.5), zoneout=np.float32(0.5)).zoneout == 0.5
    )
    assert Oven(heat=Fraction(181, 2)).heat == 90.5
    assert RunOptions(force=np.True_).force is True


def test_a_run_is_begun_and_continued_with_numbers_of_numpy_and_a_path(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("the time traveller for so it will be convenient to speak of him\n" * 40)
    given = {"source": book, "hidden_size": np.int64(8), "window": np.int32(8)}
    given |= {"batch_size": np.uint8(4), "epochs": np.int16(1), "learning_rate": np.float32(0.01)}
    session = Session.begin(given, kept=RunOptions(out=tmp_path / "run"))
    for _ in session.records():
        pass
    session = Session.resume(tmp_path / "run", {"epochs": np.int64(2), "source": book})
    for _ in session.records():
        pass
    assert session.training.finished
    assert session.run.config.training.epochs == 2


class Third:
    def __index__(self):
        return 3


def test_whatever_counts_is_a_whole_number_of_64_bits():
    assert type(whole_number("steps", Third(), at_least=3, hint="")) is int
    for extreme in (2**63 - 1, -(2**63)):
        assert whole_number("steps", extreme, hint="") == extreme
    for beyond in (2**63, -(2**63) - 1, 10**30):
        with pytest.raises(UserError, match="which fits into 64 bits"):
            whole_number("steps", beyond, hint="")
    with pytest.raises(UserError, match="steps=3 must be at least 4; try 4"):
        whole_number("steps", Third(), at_least=4, hint="try 4")


@pytest.mark.parametrize("window", [True, np.True_, 3.0, np.float64(3.0), "3", np.array([3])])
def test_what_is_no_whole_number_is_not_taken_for_one(window):
    for refused in (
        lambda: Truncated(window),
        lambda: Reading(window=window),
        lambda: batches.streams(range(99), batch=2, window=window),
        lambda: batches.streams(range(99), batch=window, window=2),
        lambda: batches.streams(range(99), batch=2, window=2, offset=window),
        lambda: batches.shuffled(range(99), batch=2, window=2, seed=window),
        lambda: elman.Vocab("hello", min_freq=window),
        lambda: experiment.Settings(steps=window),
    ):
        with pytest.raises(UserError, match="must be a whole number"):
            refused()
