"""Flat options, as people type them, and the frozen settings they become.

A preset only names options, or finds them from the size of the text: what it expands to is printed
and stored, and any option given beside it wins. Nothing else in elman knows about presets.
"""

import difflib
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elman import cells
from elman.errors import UserError
from elman.gradients.carry import CARRIES
from elman.language_model import Dropout
from elman.language_model.model import Shape
from elman.options import Described, as_number, described, flag, heeded, stored, typed
from elman.runs.effort import Size, effort
from elman.runs.shown import Shown
from elman.text.prepared import Data
from elman.training import Settings
from elman.training.optimisation import Optimisation
from elman.training.segments import Reading, one_pass

Options = dict[str, Any]

NOTES: Options = {
    "model": "elman",
    "clean": "letters",
    "train_tokens": 10_000,
    "validation": 0.5,
    "test": 0.0,
    "hidden_size": 512,
    "embedding_size": 0,
    "init": "notes",
    "batch_size": 32,
    "window": 35,
    "epochs": 500,
    "optimizer": "sgd",
    "learning_rate": 1.0,
    "schedule": "constant",
    "warm_up": 0,
    "clip": 1.0,
    "weights": "last",
    "sample_every": 10,
    "sample_prompt": "time traveller",
    "sample_length": 50,
    "sample_temperature": 0.0,
}
"""8.5 of the notes, from scratch; afterwards as much text again is held out."""

PRESETS: dict[str, Options | Callable[[Size, Options], Options]] = {
    "auto": effort,
    "quick": {
        "model": "lstm",
        "hidden_size": 256,
        "embedding_size": 64,
        "batch_size": 32,
        "window": 64,
        "epochs": 4,
        "optimizer": "adamw",
        "learning_rate": 4e-3,
        "schedule": "cosine",
        "warm_up": 20,
        "clip": 1.0,
    },
    "best": {
        "model": "lstm",
        "hidden_size": 384,
        "embedding_size": 128,
        "batch_size": 32,
        "window": 50,
        "epochs": 30,
        "optimizer": "adamw",
        "learning_rate": 4e-3,
        "weight_decay": 0.01,
        "schedule": "cosine",
        "warm_up": 100,
        "clip": 1.0,
        "dropout_tokens": 0.05,
        "dropout_inputs": 0.1,
        "dropout_outputs": 0.4,
        "dropout_recurrent": 0.25,
        "average": "ema",
        "average_decay": 0.999,
    },
    "notes": NOTES,
    "notes-concise": NOTES | {"hidden_size": 256, "init": "default"},
}

GROUPS: dict[type, list[Described]] = {
    Data: described(Data),
    Shape: described(Shape),
    Dropout: described(Dropout, prefix="dropout_"),
    Reading: described(Reading),
    Optimisation: described(Optimisation),
    Settings: described(Settings),
    Shown: described(Shown),
}
"""The options of each dataclass of settings, as their fields describe them."""
OPTIONS: dict[str, Described] = {o.name: o for group in GROUPS.values() for o in group}
CHANGEABLE = tuple(name for name, o in OPTIONS.items() if o.option.later)
"""Options that may have another value when a training is continued."""
VALIDATIONS = 20
"""How often a training is validated, unless that takes too long or something else is asked for."""
VALIDATION_SHARE = 0.1
"""The part of the time that validations may take."""
VALIDATION_COST = 0.5
"""The time to predict a token, as a part of the time to learn from one: 0.3 to 0.7 measured."""


DEFAULT = "auto"
HELD_OUT = {"validation": 0.05, "test": 0.05}
"""What a run holds out by default: a twentieth to choose by, and a twentieth to report."""


def named(preset: str, given: Options, size: Size | None = None) -> Options:
    """The options that a preset stands for, beside those that were given.

    Without the size of the text, those that follow from it are those of a short one.
    """
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}", hint=f"one of {', '.join(PRESETS)}")
    options = PRESETS[preset]
    if callable(options):
        options = options(size or Size(10_000, 80), given)
    return options | {name: 0.0 for name in _not_hidden(options | given) if name in options}


def _not_hidden(options: Options) -> list[str]:
    """What no preset hides: parts of one-hot tokens, of a W_hh that is not there or diagonal.

    The weights that are left are scaled up. A unit with a single one, begun below 1, is then above
    it, and grows without end.
    """
    cell = cells.models().get(options["model"])
    inputs = [] if options.get("embedding_size") else ["dropout_inputs"]
    return inputs if cell is not None and cell.heads else [*inputs, "dropout_recurrent"]


def expand(preset: str, given: Options, size: Size | None = None) -> Options:
    """Every option with its value: as given, or as the preset has it, or as it is by default."""
    given = _checked(given)
    asked = named(preset, given, size) | given
    options = defaults() | asked
    if "test" not in asked:  # validation=0 alone: nothing is held out
        options["test"] = min(options["test"], options["validation"])
    options["min_freq"] = data(options).min_freq  # what suits the level, unless given
    carry = CARRIES.get(options["carry"])  # an unknown name is refused with the other settings
    return options | (carry.suggests(options["window"]) if carry else {}) | given


def _checked(given: Options) -> Options:
    """The options that were given, as plain values; one that does not exist is refused."""
    for name in given:
        if name not in OPTIONS:
            like = ", ".join(difflib.get_close_matches(str(name), OPTIONS)) or "elman train --help"
            raise UserError(
                f"unknown option {name!r}",
                hint=f"{like}; where a run is kept is said by kept=RunOptions(out=…)",
            )
    if isinstance(source := given.get("source"), os.PathLike):
        given = given | {"source": os.fspath(source)}
    return {name: as_number(value) for name, value in given.items()}


def check_used(given: Options, options: Options) -> None:
    """Refuse an option that was given and changes nothing, because of another one.

    One that has the value it has anyway asks for nothing, and is let pass.
    """
    usual = defaults()
    for name, value in given.items():
        needed = OPTIONS[name].option.beside
        if needed is not None and value != usual[name]:
            needed.refuse(name, value, options)


def used(options: Options) -> Options:
    """Those of the options that change anything, as the others are."""
    needed = {name: OPTIONS[name].option.beside for name in options}
    return {
        name: value
        for name, value in options.items()
        if (beside := needed[name]) is None or beside.met(value, options)
    }


def defaults() -> Options:
    """Every option that there is, in the value it has when nothing is asked."""
    return {name: o.as_typed(o.default) for name, o in OPTIONS.items()} | HELD_OUT


def data(options: Options) -> Data:
    """The part of the options that says which text."""
    return Data(**heeded(Data, stored(GROUPS[Data], options)))


def model(options: Options, vocab_size: int) -> dict[str, Any]:
    """The arguments of LanguageModel."""
    shape, dropout = (stored(GROUPS[part], options) for part in (Shape, Dropout))
    return {"vocab_size": vocab_size, **shape, "dropout": dropout}


def settings(options: Options, train_ids: Any = None, held_out: int = 0) -> Settings:
    """How to train; with the text, also how often to stop and predict `held_out` tokens.

    A `validate_every` that was given stays as it is.
    """
    parts = {
        part: heeded(part, stored(GROUPS[part], options), options)
        for part in (Settings, Reading, Optimisation)
    }
    chosen = Settings(
        **parts[Settings],
        reading=Reading(**parts[Reading]),
        optimisation=Optimisation(**parts[Optimisation]),
    )
    if train_ids is None or chosen.validate_every or not options["validation"]:
        return chosen
    segments = len(one_pass(train_ids, chosen.reading, seed=chosen.seed, epoch=0))
    updates = -(-segments // chosen.accumulate) * chosen.epochs
    times = validations(len(train_ids) * chosen.epochs, held_out)
    return replace(chosen, validate_every=-(-updates // times))


def validations(read: int, held_out: int) -> int:
    """How often to validate while `read` tokens are read: twenty times, or a tenth of the time.

    >>> validations(read=1_000_000, held_out=1_000), validations(read=54_000, held_out=3_000)
    (20, 3)
    """
    affordable = VALIDATION_SHARE * read / (VALIDATION_COST * max(held_out, 1))
    return max(1, min(VALIDATIONS, int(affordable)))


def shown(options: Options) -> Shown:
    """What the run shows of itself."""
    return Shown(**stored(GROUPS[Shown], options))


def flat(data: Data, model: dict[str, Any], settings: Settings, shown: Shown) -> Options:
    """The options that a stored configuration stands for: `expand` read backwards."""
    parts = {
        Data: vars(data),
        Shape: model,
        Dropout: model["dropout"],
        Reading: vars(settings.reading),
        Optimisation: vars(settings.optimisation),
        Settings: vars(settings),
        Shown: vars(shown),
    }
    return {k: v for part, values in parts.items() for k, v in typed(GROUPS[part], values).items()}


def changed(before: Options, given: Options) -> Options:
    """The options that a resume asks to change; one that it cannot change is refused by name."""
    given = _checked(given)
    different = {name: value for name, value in given.items() if before[name] != value}
    for name, value in different.items():
        if name not in CHANGEABLE:
            named = "SOURCE" if name == "source" else flag(name)
            raise UserError(
                f"{named} {value} cannot be changed by a resume: this run has {before[name]}",
                hint=f"leave {named} out, or train a new run; a resume may change "
                + ", ".join(flag(n) for n in CHANGEABLE),
            )
    check_used(different, before | different)
    return _with_what_carries_want(before, different) | different


def _with_what_carries_want(before: Options, changes: Options) -> Options:
    """Another carry brings what it suggests; what the old one suggested is as usual again."""
    if "carry" not in changes or changes["carry"] not in CARRIES:
        return {}
    old, window = CARRIES[before["carry"]], changes.get("window", before["window"])
    usual = {name: defaults()[name] for name in old.suggests(window)}
    wanted = usual | CARRIES[changes["carry"]].suggests(window)
    return {name: value for name, value in wanted.items() if before[name] != value}


def continued(before: Options | None, now: Options) -> Options:
    """The options that have other values now than when a training was saved.

    None: it was saved by an elman that kept no options beside a training.
    """
    if before is None:
        return {}
    return {name: now[name] for name in CHANGEABLE if before.get(name, now[name]) != now[name]}


def as_flags(options: Options) -> str:
    """The options as one types them."""
    return " ".join(_as_flag(OPTIONS[name], options[name]) for name in options if name != "source")


def _as_flag(option: Described, value: Any) -> str:
    if option.type is bool:
        yes, no = option.option.flag.split("/")
        return yes if value else no
    return f"{flag(option.name)} {shlex.quote(option.option.show(value))}"
