"""What a run was asked for, as config.json holds it, and the model and training it describes."""

import shlex
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from elman import __version__
from elman.defaults import learns, usual
from elman.errors import MissingSource, UserError
from elman.language_model import Dropout, LanguageModel
from elman.language_model.model import Shape
from elman.options import heeded
from elman.runs import presets
from elman.runs.device import is_here
from elman.runs.shown import Shown
from elman.text.prepared import CUTS, Data, Splits, too_few_to_hold_out
from elman.training import Optimisation, Reading, Settings, Training
from elman.training.processes import ALONE, Processes
from elman.training.segments import one_pass

FORMAT = 1


@dataclass(frozen=True)
class Config:
    """All that was asked for: enough to make the run again."""

    data: Data
    model: dict[str, Any]  # the arguments of LanguageModel
    training: Settings
    sha256: str  # of the text as read
    device: str = "cpu"
    threads: int = 1
    command: str = ""
    ran: str = ""  # what computed it, in words: `Training.engine`
    shown: Shown = field(default_factory=Shown)
    rhythm: dict[str, Any] = field(default_factory=dict)  # how often it is saved and looked at

    def json(self) -> dict[str, Any]:
        """As config.json holds it."""
        self.training.reading.check_storable()
        return {"format": FORMAT, "elman": __version__, **asdict(self)}

    @classmethod
    def from_json(cls, record: Any, where: Path) -> "Config":
        """Read config.json back; anything else is refused."""
        if isinstance(record, dict) and str(record.get("format")).startswith("elman-forecast"):
            folder = shlex.quote(str(where.parent))
            raise MissingSource(
                f"{where.parent} is a forecaster, not a run of a language model",
                hint=f"elman forecast NEW.csv --run {folder}; elman train BOOK.txt makes a run",
            )
        try:
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']}, this elman reads {FORMAT}")
            kept, others = record["training"], dict(record["data"])
            reading = Reading(**heeded(Reading, kept["reading"], others))
            others["carry"] = reading.carry
            optimisation = heeded(Optimisation, kept["optimisation"], others)
            options = heeded(Settings, kept, others)
            options["reading"], options["optimisation"] = reading, Optimisation(**optimisation)
            return cls(
                data=Data(**heeded(Data, record["data"])),
                model=asdict(shape_of(record["model"])),
                training=Settings(**options),
                sha256=str(record["sha256"]),
                device=str(record["device"]),
                threads=int(record["threads"]),
                command=str(record["command"]),
                ran=str(record.get("ran", "")),  # runs of elman 0.1.0 have none
                shown=Shown(**record.get("shown", {})),
                rhythm=dict(record.get("rhythm", {})),  # older runs do not say
            )
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise UserError(
                f"{where} is not the configuration of an elman run: {problem!r}",
                hint="restore it from a copy, or train the run again",
            ) from problem


def shape_of(model: dict[str, Any]) -> Shape:
    """The shape that config.json holds as plain values, every one of them."""
    if missing := {f.name for f in fields(Shape)} - model.keys():
        raise KeyError(*missing)
    return Shape(**{**heeded(Shape, model), "dropout": Dropout(**model["dropout"])})


def options_of(config: Config) -> presets.Options:
    """The options that make this configuration, as one types them."""
    return presets.flat(config.data, config.model, config.training, config.shown)


def with_options(config: Config, options: presets.Options) -> Config:
    """The configuration with its training, and what it shows, as these options have it."""
    return replace(config, training=presets.settings(options), shown=presets.shown(options))


def fresh_model(config: Config) -> LanguageModel:
    """The model before its first update: from the run's own seed, whatever the global one.

    In float32 on the CPU, whatever torch's defaults: every device draws other numbers, and a run
    is resumed by those who have not changed them.
    """
    with torch.random.fork_rng([]), usual():
        torch.manual_seed(config.training.seed)
        return LanguageModel.from_config(config.model)


@learns
def fresh_training(
    config: Config, parts: Splits, device: str, processes: Processes = ALONE
) -> Training:
    """The training before its first update, on `device` if this machine has it, else on the CPU."""
    device = processes.place(device if is_here(device) else "cpu")
    held_out = parts.validation if len(parts.validation) else None
    check_fits(config, parts)
    model = fresh_model(config).to(device)
    return Training(model, parts.train, held_out, config.training, processes)


def check_fits(config: Config, parts: Splits) -> None:
    """Refuse a text that is too short to train on or to be tested by, and too large a model."""
    _check_affordable(config)
    if any(len(getattr(parts, name)) == 1 for name in CUTS):  # which leaves nothing to predict
        tokens = sum(len(part) for part in (parts.train, parts.validation, parts.test))
        raise too_few_to_hold_out(config.data, tokens, parts.vocab.level_used.units)
    one_pass(parts.train, config.training.reading, seed=config.training.seed, epoch=0)


def _check_affordable(config: Config) -> None:
    """Refuse a training that is sure to need more memory than there is, before it takes any."""
    settings, shape = config.training, shape_of(config.model)
    kept = 2 if settings.optimisation.optimizer.startswith("adam") else 0  # m and v
    copies = 2 + kept + (settings.optimisation.average != "none")
    reading, states = settings.reading, 0
    besides = " (weights, gradients, what the optimizer keeps)"
    if not reading.memory and reading.carry_used.windows:
        states = 4 * reading.batch_size * reading.window * shape.hidden_size * shape.layers
        besides += f" and the states of {reading.batch_size} lanes × {reading.window} steps"
    shape.check_affordable(copies, states, besides)
