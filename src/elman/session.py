"""A training session in a run folder: begin or continue, train, sample, diagnose, score, report.

    session = Session.begin({"source": "book.txt", "hidden_size": 128})
    for record in session.records():                  # updates, validations, samples, diagnoses
        ...
    result, page = session.conclude(), session.report()

`elman train` is this, with the records printed. Nothing here prints.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, final

import torch

from elman import generation, runs
from elman.diagnostics import glance
from elman.errors import UserError, WorkFailed, counted
from elman.options import DEVICES, check, flag, option
from elman.runs import Config, Run, presets
from elman.runs.device import pick, use_threads
from elman.runs.effort import Size
from elman.runs.folder import check_room
from elman.text import prepared
from elman.text.prepared import Splits, Text
from elman.text.shards import Shards
from elman.training import (
    Change,
    Diagnosis,
    Epoch,
    Record,
    Result,
    Sample,
    Training,
    Update,
    Validation,
)
from elman.training.processes import ALONE, Processes

PANEL = "Run"


@dataclass(frozen=True)
class RunOptions:
    """Where a run is kept and computed, and how often it is saved and looked at."""

    out: Path | None = option(None, "Run folder to write; else runs/NAME", panel=PANEL)
    force: bool = option(False, "Overwrite the run folder", panel=PANEL, flag="--force")
    device: str = option("auto", DEVICES, panel=PANEL)
    threads: int = option(0, "Threads on a CPU; 0: as many as there are", panel=PANEL, at_least=0)
    checkpoint_every: int = option(
        0, "Updates between checkpoints; 0: by time only", panel=PANEL, at_least=0
    )
    checkpoint_seconds: float = option(
        30.0, "Seconds between checkpoints; 0: never", panel=PANEL, at_least=0
    )
    diagnose: int = option(
        500, "Updates between looks at the gradient; 0: never", panel=PANEL, at_least=0
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def rhythm(self) -> dict[str, Any]:
        """What of these belongs to the run, and is the same when it is resumed."""
        return {name: getattr(self, name) for name in RHYTHM}


RHYTHM = ("checkpoint_every", "checkpoint_seconds", "diagnose")


@final
class Session:
    """A run folder and its training, moved on together."""

    def __init__(self, run: Run, training: Training, kept: RunOptions | None = None) -> None:
        self.run, self.training, self.kept = run, training, kept or RunOptions()
        self.test_tokens = 0  # held out to be reported, of a new run
        self.caveats: list[str] = []  # why a continuation is not what it would have been

    @classmethod
    def begin(
        cls,
        given: Mapping[str, Any] | None = None,
        preset: str = presets.DEFAULT,
        kept: RunOptions | Mapping[str, Any] | None = None,
        command: str = "",
        processes: Processes = ALONE,
    ) -> "Session":
        """A new run with the options of a preset and those `given` beside it, which win.

        `kept` may be a mapping of names to values, too. A request that is refused leaves no folder
        behind. `command` is what report and config.json name as the way to make the run again.
        """
        if not isinstance(given, Mapping | None):
            raise UserError(
                f"options are a mapping of names to values, not {given!r}",
                hint='Session.begin({"source": "book.txt", "hidden_size": 128})',
            )
        kept, asked = _run_options(kept), dict(given or {})
        given = prepared.adopted(asked)
        use_threads(kept.threads)
        options = presets.expand(preset, given)
        presets.check_used(asked, options)
        device = pick(kept.device)
        presets.settings(options)  # what is wrong with these is said before the text is read
        path = kept.out or free_folder(presets.data(options).source, options["model"])
        path = Path(processes.told(str(path)))
        if processes.first:
            check_room(path, kept.force)
        config, parts, text = planned(given, preset)
        config = replace(config, device=device, command=command, rhythm=kept.rhythm)
        training = runs.fresh_training(config, parts, device, processes)
        config = replace(config, ran=training.engine())
        source = text if config.data.source == "-" and not isinstance(text, Shards) else None
        processes.wait()  # what any of them refuses leaves no folder behind
        if processes.first:
            run = Run.create(path, config, parts.vocab, source=source, force=kept.force)
        else:
            run = Run(path, config, parts.vocab, writes=False)
        processes.wait()
        run.parts = parts
        session = cls(run, training, kept)
        session.test_tokens = len(parts.test)
        return session

    @classmethod
    def resume(
        cls,
        path: Path | str,
        given: Mapping[str, Any] | None = None,
        kept: RunOptions | Mapping[str, Any] | None = None,
        processes: Processes = ALONE,
    ) -> "Session":
        """A run exactly where it was last saved, with the few options that may change.

        Of `kept` by names, what is not named is as the run has it. A `source` is where the run's
        text lies now, if it was moved or renamed; another text is refused.
        """
        run = Run.open(path, writes=processes.first)
        kept = _run_options(kept, {n: v for n, v in run.config.rhythm.items() if n in RHYTHM})
        given = dict(given or {})
        config, before = run.config, runs.options_of(run.config)
        source = prepared.located(given.get("source", before["source"]))
        if given.get("source") == before["source"] == "-":
            raise UserError(
                f"{path} keeps the text that it read from stdin, and does not read another",
                hint="leave - out, or train a new run",
            )
        if source != "-":  # or it cannot be read again: what the run has kept of it is its text
            given.pop("source", None)
        changes = presets.changed(before, given)
        if changes:
            config = runs.with_options(config, before | changes)
        if kept.threads:
            config = replace(config, threads=kept.threads)
        config = replace(config, rhythm=kept.rhythm)
        use_threads(config.threads)  # torch's own sums in another order would end in other bits
        device = config.device if kept.device == "auto" else pick(kept.device)
        if source != before["source"]:
            run.parts = run.splits(source)
            config = replace(config, data=replace(config.data, source=source))
        else:
            run.parts = run.splits()
        training = runs.fresh_training(config, run.parts, device, processes)
        saved = run.resume(training)
        processes.wait()  # nobody writes before everybody has read
        session = cls(run, training, kept)
        session.caveats = _caveats(run, training)
        config = replace(config, ran=training.engine())
        if config != run.config:
            run.save_config(config)
        if different := presets.continued(saved, runs.options_of(config)):
            runs.tell(run, training, Change(training.step, different))
        return session

    def records(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Record]:
        """Train to the end, or until `stop()`; what is yielded is in metrics.jsonl already, or, of
        a GPU that is still working on it, half a second later."""
        return runs.train(
            self.run,
            self.training,
            every_steps=self.kept.checkpoint_every,
            every_seconds=self.kept.checkpoint_seconds,
            stop=stop,
            remarks=self._remarks,
        )

    def sample(self) -> Sample | None:
        """What the model writes now; None where its probabilities are NaN."""
        shown = self.run.config.shown
        prompt = str(prepared.prompt(self.run.config.data, shown.sample_prompt))
        try:
            with self.training.average.applied():
                text = generation.specimen(
                    self.training.model, self.run.vocab, prompt=prompt, **shown.sampling
                )
        except WorkFailed:  # nothing to draw from: the next update stops and says where it began
            return None
        return Sample(self.training.step, text)

    def diagnose(self) -> Diagnosis | None:
        """How far back the gradient reaches now; None for a model that has no state."""
        training = self.training
        held_out = training.validation_ids
        ids = training.train_ids if held_out is None else held_out
        seen = glance(training.model, ids, training.settings.reading.window)
        return None if seen is None else Diagnosis(training.step, **asdict(seen))

    def conclude(self) -> Result | None:
        """Score the run's weights on the part that is reported, by the definition."""
        return runs.conclude(self.run, self.training)

    def report(self) -> Path:
        """Write report.html; returns its path."""
        from elman.reports import report  # loads matplotlib, which a training can begin without

        return report.write(self.run)

    def _remarks(self, record: Record) -> Iterator[Record]:
        """A diagnosis every so many updates, a sample after validations 1, 2, 4, … and the last.

        Where nothing is held out, a sample after as many passes over the text; with `sample_every`
        after every so many passes.
        """
        remark, every = None, self.run.config.shown.sample_every
        if isinstance(record, Update) and self.kept.diagnose:
            remark = None if record.step % self.kept.diagnose else self.diagnose()
        elif isinstance(record, Epoch) and every:
            due = record.epoch % every == 0 or self.training.finished
            remark = self.sample() if due else None
        elif isinstance(record, Validation) and not every:
            number = record.step // (self.training.settings.validate_every or record.step)
            remark = self._sample_at(number)
        elif isinstance(record, Epoch) and self.training.validation_ids is None:
            remark = self._sample_at(record.epoch)
        if remark is not None:
            yield remark

    def _sample_at(self, number: int) -> Sample | None:
        power_of_two = number & (number - 1) == 0
        return self.sample() if power_of_two or self.training.finished else None


def planned(given: Mapping[str, Any], preset: str) -> tuple[Config, Splits, Text]:
    """What a new run would be asked for, its text in parts, and as it was read."""
    options = presets.expand(preset, dict(given))
    text = prepared.read(presets.data(options))
    source = prepared.located(options["source"])  # - for a pipe, once it is read
    data = presets.data(options | {"source": source})
    parts = prepared.prepare(data, text)
    size = Size.of(len(parts.train), parts.vocab)
    options = presets.expand(preset, dict(given) | {"source": source}, size)
    _check_long_enough(data, parts, options, preset, given)
    config = Config(
        data=data,
        model=presets.model(options, len(parts.vocab)),
        training=presets.settings(options, parts.train, len(parts.validation)),
        sha256=parts.sha256,
        threads=torch.get_num_threads(),
        shown=presets.shown(options),
    )
    return config, parts, text


def _check_long_enough(
    data: prepared.Data,
    parts: Splits,
    options: presets.Options,
    preset: str,
    given: Mapping[str, Any],
) -> None:
    """Refuse a text whose training part does not fill one batch, in words of what was asked for."""
    units, held_out = parts.vocab.level_used.units, data.validation + data.test
    batch, window = options["batch_size"], options["window"]
    tokens, needed = len(parts.train), batch * window + 1
    if tokens >= needed or min(batch, window) < 1:  # less than 1 is refused with the settings
        return
    whole, left = math.ceil(needed / (1 - held_out)), " to train on" if held_out else ""
    hint = f"a text of {whole:,} {units} is long enough"
    shape = [flag(name) for name in ("batch_size", "window") if name in given]
    if preset != presets.DEFAULT:
        hint += f"; --preset {presets.DEFAULT} makes batches that suit this one"
    elif shape:  # what is left out of them would grow with the text
        without = " and ".join(shape)
        hint = f"a longer text; without {without} batches are made that suit this one"
    raise UserError(
        f"{prepared.named_text(data)}: {counted(tokens, units)}{left}, fewer than the {needed:,} "
        f"that fill a batch of {batch} × {window}",
        hint=hint,
    )


def _run_options(
    given: RunOptions | Mapping[str, Any] | None, before: Mapping[str, Any] | None = None
) -> RunOptions:
    """What `kept` says, whole or by names; of what it does not name, what was `before`."""
    if isinstance(given, RunOptions):
        return given
    names = [field.name for field in fields(RunOptions)]
    if not isinstance(given, Mapping | None):
        raise UserError(
            f"kept must be RunOptions or a mapping of its names to values, got {given!r}",
            hint='kept=RunOptions(out="runs/book"), or kept={"out": "runs/book"}',
        )
    if unknown := [name for name in given or {} if name not in names]:
        raise UserError(
            f"kept has an unknown option {unknown[0]!r}", hint=f"one of {', '.join(names)}"
        )
    return RunOptions(**{**(before or {}), **(given or {})})


def _caveats(run: Run, training: Training) -> list[str]:
    """What keeps a continuation from being, to the last bit, what it would have been."""
    caveats = []
    if not (run.path / "state.safetensors").exists():
        caveats.append("there is no state.safetensors: the training begins again")
    if run.forgotten:
        caveats.append("metrics.jsonl is gone: the training goes on, and its record begins here")
    if run.edited:
        caveats.append("config.json is not as elman wrote it; it is used as it is now")
    before, now = run.config.ran, training.engine()
    if not now.startswith(before):  # older runs say the first half, or nothing
        caveats.append(
            f"this run was computed by {before}; it continues with {now}: the numbers agree to "
            "rounding, not to the last bit"
        )
    return caveats


def free_folder(source: str, model: str) -> Path:
    """runs/NAME-MODEL, with a number where that exists already."""
    name = "stdin" if source == "-" else Path(source).name.split(".")[0] or "text"
    number, path = 1, Path("runs") / f"{name}-{model}"
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{model}-{number}"
    return path
