"""Flat options, as people type them, and the frozen settings they become.

A preset only names options: what it expands to is printed and stored, and any option given beside
it wins. Nothing else in elman knows about presets.
"""

from dataclasses import asdict, fields
from typing import Any

from elman.errors import UserError
from elman.gradients.carry import CARRIES
from elman.language_model import Dropout
from elman.text.prepared import Data
from elman.training import Settings
from elman.training.optimisation import Optimisation
from elman.training.segments import Reading, one_pass

Options = dict[str, Any]

PRESETS: dict[str, Options] = {
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
    "notes": {
        "model": "elman",
        "clean": "letters",
        "max_tokens": 10_000,
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
    },
}

MODEL: Options = {
    "model": "lstm",
    "hidden_size": 256,
    "layers": 1,
    "embedding_size": 0,
    "tied": False,
    "context": 8,
    "init": "default",
}
DROPOUT: Options = {f"dropout_{f.name}": f.default for f in fields(Dropout)}
VALIDATIONS = 20
"""How often a training is validated, unless that takes too long or something else is asked for."""
VALIDATION_SHARE = 0.1
"""The part of the time that validations may take."""
VALIDATION_COST = 0.5
"""The time to predict a held-out token as a part of that to learn from one: 0.3 to 0.7 measured."""
CHANGEABLE = ("epochs", "patience", "learning_rate", "clip")
"""What a training may be continued with in another value, and still be a continuation."""


def expand(preset: str, given: Options) -> Options:
    """Every option with its value: as given, or as the preset has it, or as it is by default."""
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}", hint=f"one of {', '.join(PRESETS)}")
    options = defaults() | PRESETS[preset] | given
    carry = CARRIES.get(options["carry"])  # an unknown name is refused with the other settings
    return options | (carry.suggests(options["window"]) if carry else {}) | given


def defaults() -> Options:
    """Every option that there is, in the value it has when nothing is asked."""
    own = asdict(Settings())
    reading, optimisation = own.pop("reading"), own.pop("optimisation")
    return asdict(Data()) | MODEL | DROPOUT | own | reading | optimisation


def data(options: Options) -> Data:
    """The part of the options that says which text."""
    return Data(**_fields(Data, options))


def model(options: Options, vocab_size: int) -> dict[str, Any]:
    """The arguments of LanguageModel."""
    shape = {name: options[name] for name in MODEL if name != "model"}
    shape["embedding_size"] = shape["embedding_size"] or None
    dropout = {name.removeprefix("dropout_"): options[name] for name in DROPOUT}
    return {"vocab_size": vocab_size, "cell": options["model"], **shape, "dropout": dropout}


def settings(options: Options, train_ids: Any, held_out: int = 0) -> Settings:
    """How to train, and, unless that is said, how often to stop and predict `held_out` tokens."""
    reading = Reading(**_fields(Reading, options))
    updating: Options = _fields(Optimisation, options) | {"clip": options["clip"] or None}
    own: Options = _fields(Settings, options)
    own |= {"reading": reading, "optimisation": Optimisation(**updating)}
    if not own["validate_every"]:
        segments = len(one_pass(train_ids, reading, seed=own["seed"], epoch=0))
        updates = -(-segments // own["accumulate"]) * own["epochs"]
        times = validations(len(train_ids) * own["epochs"], held_out)
        own["validate_every"] = -(-updates // times)
    return Settings(**own)


def validations(read: int, held_out: int) -> int:
    """How often to validate while `read` tokens are read: twenty times, or a tenth of the time.

    >>> validations(read=1_000_000, held_out=1_000), validations(read=54_000, held_out=3_000)
    (20, 3)
    """
    affordable = VALIDATION_SHARE * read / (VALIDATION_COST * max(held_out, 1))
    return max(1, min(VALIDATIONS, int(affordable)))


def flat(data: Data, model: dict[str, Any], settings: Settings) -> Options:
    """The options that a stored configuration stands for: `expand` read backwards."""
    own = asdict(settings)
    options = asdict(data) | own.pop("reading") | own.pop("optimisation") | own
    options |= {f"dropout_{name}": value for name, value in model["dropout"].items()}
    options |= {name: model[name] for name in MODEL if name != "model"}
    options["embedding_size"] = options["embedding_size"] or 0
    return options | {"model": model["cell"], "clip": options["clip"] or 0.0}


def changed(stored: Options, given: Options) -> Options:
    """The options that a resume asks to change; one that it cannot change is refused by name."""
    different = {name: value for name, value in given.items() if stored[name] != value}
    for name, value in different.items():
        if name not in CHANGEABLE:
            flag = "SOURCE" if name == "source" else "--" + name.replace("_", "-")
            raise UserError(
                f"{flag} {value} cannot be changed by a resume: this run has {stored[name]}",
                hint=f"leave {flag} out, or train a new run; a resume may change "
                + ", ".join("--" + n.replace("_", "-") for n in CHANGEABLE),
            )
    return different


def _fields(kind: type, options: Options) -> Options:
    return {f.name: options[f.name] for f in fields(kind) if f.name in options}
