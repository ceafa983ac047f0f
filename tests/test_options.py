"""An option is described once, and checked, shown and stored by that description."""

from dataclasses import dataclass, replace

import pytest

from elman.cli import run
from elman.cli.made import BY_TEXT
from elman.errors import UserError
from elman.options import Beside, as_flag, check, described, option, stored, typed
from elman.runs import presets
from elman.runs.effort import FOLLOW
from elman.session import RunOptions


@dataclass(frozen=True)
class Oven:
    heat: float = option(180.0, "Degrees", panel="Oven", at_least=0, below=300)
    rack: str = option("middle", "Where", panel="Oven", choices=("top", "middle"))
    minutes: int | None = option(None, "0: until done", panel="Oven", above=0, zero_is_none=True)
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
    ]
    flat = typed(options, vars(Oven()))
    assert flat == {"oven_heat": 180.0, "oven_rack": "middle", "oven_minutes": 0}
    assert Oven(**stored(options, flat)) == Oven()


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
    with pytest.raises(UserError, match=r"^--heat 9 means nothing"):
        beside.refuse("heat", 9, options, as_flag)
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
