"""A run is a folder: everything to use, explain, continue and repeat one training.

    config.json         data, model and training options; the fingerprint of the text
    vocab.json          the tokens
    model.safetensors   the best weights (averaged, where weights are averaged)
    state.safetensors   the training itself, between two updates: exact resume
    metrics.jsonl       one record per line: updates, validations, samples, the result
    README.md           the model card;  report.html: the same with figures
    source              the text itself, where it came through a pipe

Every file is written whole or not at all, and nothing is ever unpickled. state.safetensors says how
long metrics.jsonl was when it was written, so after a crash both go back to the same moment.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from elman import __version__
from elman.errors import MissingSource, UserError
from elman.files import atomic, write_text
from elman.language_model import LanguageModel
from elman.runs import checkpoints
from elman.scoring import metrics
from elman.text import prepared
from elman.text.prepared import Data, Splits
from elman.text.vocab import Vocab
from elman.training import Record, Settings, Training, Validation
from elman.training.optimisation import Optimisation
from elman.training.segments import Reading

FORMAT = 1
FILES = (
    "config.json",
    "vocab.json",
    "model.safetensors",
    "state.safetensors",
    "metrics.jsonl",
    "README.md",
    "report.html",
    "source",
    "tensorboard",
)


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

    def json(self) -> dict[str, Any]:
        """As config.json holds it."""
        self.training.reading.check_storable()
        return {"format": FORMAT, "elman": __version__, **asdict(self)}

    @classmethod
    def from_json(cls, record: Any, where: Path) -> "Config":
        """Read config.json back; anything else is refused."""
        try:
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']}, this elman reads {FORMAT}")
            options = dict(record["training"])
            options["reading"] = Reading(**options["reading"])
            options["optimisation"] = Optimisation(**options["optimisation"])
            return cls(
                data=Data(**record["data"]),
                model=dict(record["model"]),
                training=Settings(**options),
                sha256=str(record["sha256"]),
                device=str(record["device"]),
                threads=int(record["threads"]),
                command=str(record["command"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise UserError(
                f"{where} is not the configuration of an elman run: {problem!r}",
                hint="restore it from a copy, or train the run again",
            ) from problem


class Run:
    """A run folder, opened."""

    def __init__(self, path: Path, config: Config, vocab: Vocab) -> None:
        self.path, self.config, self.vocab = path, config, vocab

    # ------------------------------------------------------------------ making and opening

    @classmethod
    def create(
        cls,
        path: Path | str,
        config: Config,
        vocab: Vocab,
        *,
        source: str | bytes | None = None,
        force: bool = False,
    ) -> "Run":
        """Make the folder; `source` is the text itself, kept where it cannot be read again."""
        path = Path(path)
        _make_room(path, force)
        run = cls(path, config, vocab)
        if source is not None:
            with atomic(path / "source") as draft:
                draft.write_bytes(prepared.as_bytes(source))
        vocab.save(path / "vocab.json")
        run.save_config(config)  # last: a folder with a config.json is a whole run
        return run

    @classmethod
    def open(cls, path: Path | str) -> "Run":
        """Open a run folder that exists."""
        path = Path(path)
        if not (path / "config.json").exists():
            raise MissingSource(
                f"{path} is not a run folder: it has no config.json",
                hint="elman train writes one; name the folder it named",
            )
        config = Config.from_json(_read_json(path / "config.json"), path / "config.json")
        try:
            vocab = Vocab.load(path / "vocab.json")
        except UserError as problem:
            hint = "restore it from a copy, or train the run again"
            raise type(problem)(problem.message, hint=hint) from problem
        return cls(path, config, vocab)

    def save_config(self, config: Config) -> None:
        """Write config.json, and the model card that repeats it for people."""
        self.config = config
        write_text(self.path / "config.json", json.dumps(config.json(), indent=2) + "\n")
        write_text(self.path / "README.md", model_card(self))

    # ------------------------------------------------------------------ reading

    def splits(self) -> Splits:
        """The ids the model was trained and validated on, exactly; a changed text is refused."""
        data = self.config.data
        kept = self.path / "source"
        text = prepared.read(data, kept if data.source == "-" else None)
        found = prepared.fingerprint(text)
        if found != self.config.sha256:
            raise UserError(
                f"the text {data.source} has changed since this run was made: its SHA-256 is "
                f"{found[:12]}…, it was {self.config.sha256[:12]}…",
                hint="put the old text back, or train a new run on the new one",
            )
        return prepared.prepare(data, text, self.vocab)

    def encode(self, text: str | bytes) -> Any:
        """Any text as the run's ids, cleaned the way its own text was."""
        return self.vocab.encode(prepared.cleaned(self.config.data, text))

    def load_model(self, device: torch.device | str = "cpu", which: str = "best") -> LanguageModel:
        """The model with its best weights, or the last ones, ready to use (in eval mode)."""
        if which not in ("best", "last"):
            raise UserError(f"unknown weights {which!r}", hint="best or last")
        if which == "best":
            weights, _ = checkpoints.read(self.path / "model.safetensors", "model")
        else:
            tensors, numbers = checkpoints.read(self.path / "state.safetensors", "state")
            weights = _part(tensors, "weights")
            if numbers.get("averaged"):
                weights |= _part(tensors, "average")
        model = fresh_model(self.config)
        _fill(model, weights, self.path)
        return model.to(device).eval()

    def metrics(self) -> list[dict[str, Any]]:
        """Every record so far; a last line that a crash cut short is left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        records = []
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            try:
                records.append(json.loads(line))
            except ValueError as problem:
                raise UserError(
                    f"{path} is damaged at line {number}: {problem}",
                    hint="delete the line; only figures and reports read it",
                ) from problem
        return records

    # ------------------------------------------------------------------ writing

    def save_best(self, training: Training) -> None:
        """Write model.safetensors: the weights of now, averaged where weights are averaged."""
        with training.average.applied():
            weights = {n: p.detach() for n, p in training.model.named_parameters()}
            checkpoints.write(
                self.path / "model.safetensors",
                "model",
                weights,
                {"step": training.step, "nats": training.best},
            )

    def save_state(self, training: Training, metrics_bytes: int) -> None:
        """Write state.safetensors: where the training is, and how long metrics.jsonl is."""
        tensors, numbers = training.state_dict()
        numbers["metrics_bytes"] = metrics_bytes
        checkpoints.write(self.path / "state.safetensors", "state", tensors, numbers)

    def resume(self, training: Training) -> None:
        """Put a fresh training where the run was last saved, and metrics.jsonl with it."""
        path, length = self.path / "state.safetensors", 0
        if path.exists():  # or it stopped before its first checkpoint: begin again, same seed
            tensors, numbers = checkpoints.read(path, "state")
            try:
                training.load_state_dict(tensors, numbers)
                length = int(numbers["metrics_bytes"])
            except (KeyError, RuntimeError, TypeError, ValueError) as problem:
                raise UserError(
                    f"{path} does not fit {self.path / 'config.json'}: {problem!r}",
                    hint="the two come from different runs",
                ) from problem
        self._shorten_metrics(length)
        for draft in self.path.glob(".*.partial"):  # what a crash left half written
            draft.unlink()

    def _shorten_metrics(self, length: int) -> None:
        path = self.path / "metrics.jsonl"
        found = path.stat().st_size if path.exists() else 0
        if found < length:
            raise UserError(
                f"{path} has {found} bytes, fewer than the {length} it had at the last checkpoint",
                hint="restore it from a copy, or train the run again",
            )
        if found > length:
            os.truncate(path, length)


# ---------------------------------------------------------------------- training in a folder


def fresh_model(config: Config) -> LanguageModel:
    """The model before its first update: from the run's own seed, whatever the global one."""
    with torch.random.fork_rng([]):
        torch.manual_seed(config.training.seed)
        try:
            return LanguageModel.from_config(config.model)
        except (KeyError, TypeError) as problem:
            raise UserError(
                f"config.json describes no model of this elman: {problem!r}",
                hint="restore it from a copy, or train the run again",
            ) from problem


def fresh_training(config: Config, parts: Splits, device: str) -> Training:
    """The training before its first update, on `device`."""
    if device == "cuda" and not torch.cuda.is_available():
        device = "cpu"
    held_out = parts.validation if len(parts.validation) else None
    return Training(fresh_model(config).to(device), parts.train, held_out, config.training)


def with_options(config: Config, options: dict[str, Any]) -> Config:
    """The configuration with some training options in other values."""
    how = config.training.optimisation
    clip = options["clip"] or None
    how = replace(how, learning_rate=options["learning_rate"], clip=clip)
    settings = replace(
        config.training,
        epochs=options["epochs"],
        patience=options["patience"],
        optimisation=how,
    )
    return replace(config, training=settings)


def train(
    run: Run,
    training: Training,
    *,
    every_steps: int = 0,
    every_seconds: float = 30.0,
    stop: Callable[[], bool] = lambda: False,
    remarks: Callable[[Record], Iterable[dict[str, Any]]] = lambda record: (),
) -> Iterator[Record]:
    """Train to the end, or until `stop()`, keeping the folder in step; yields every record.

    The `remarks` on a record, such as a sample of the model's writing, are kept after it.

    A checkpoint is written every so many updates, every so many seconds, with each better
    validation, when stopped and at the end.
    """
    saved_at = time.monotonic()
    with open(run.path / "metrics.jsonl", "ab") as log:
        for record in training.records():
            _append(log, record.json())
            for remark in remarks(record):
                _append(log, remark)
            better = isinstance(record, Validation) and record.improved
            late = every_seconds > 0 and time.monotonic() - saved_at >= every_seconds
            if better or late or (every_steps and training.step % every_steps == 0):
                _checkpoint(run, training, log, better)
                saved_at = time.monotonic()
            yield record
            if stop():
                break
        _checkpoint(run, training, log, better=False)


def _append(log: IO[bytes], record: dict[str, Any]) -> None:
    log.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    log.flush()


def _checkpoint(run: Run, training: Training, log: IO[bytes], better: bool) -> None:
    log.flush()
    os.fsync(log.fileno())
    if better or math.isinf(training.best):  # never validated: the latest weights are the best
        run.save_best(training)
    run.save_state(training, log.tell())


def conclude(run: Run, training: Training) -> dict[str, Any]:
    """Score the best weights on the whole held-out text, and add that to the record and the card.

    The score is by the definition: one lane, the state never reset.
    """
    found = {}
    if training.validation_ids is not None:
        score = metrics.evaluate(run.load_model(training.device), training.validation_ids)
        characters = metrics.characters(run.vocab, training.validation_ids)
        found = {
            "step": training.best_step,
            "tokens": score.tokens,
            "nats_per_token": score.nats_per_token,
            "perplexity": score.perplexity,
            "bits_per_char": score.bits_per_char(characters),
        }
        with open(run.path / "metrics.jsonl", "ab") as log:
            _append(log, {"kind": "result", **found})
    write_text(run.path / "README.md", model_card(run))
    return found


def model_card(run: Run) -> str:
    """README.md: what the model is, what it was trained on, how well it does, how to use it."""
    config = run.config
    found = [r for r in run.metrics() if r.get("kind") == "result"]
    score = (
        f"Held-out text, {found[-1]['tokens']:,} tokens: "
        f"{found[-1]['nats_per_token']:.4f} nats per token, perplexity "
        f"{found[-1]['perplexity']:.3f}, {found[-1]['bits_per_char']:.4f} bits per character."
        if found
        else "Not finished yet: there is no held-out score."
    )
    model = ", ".join(f"{k} {v}" for k, v in config.model.items() if k != "dropout")
    return (
        f"# {run.path.name}\n\n"
        f"A {config.data.level}-level language model made with elman {__version__}.\n\n"
        f"- model: {model}\n"
        f"- text: {config.data.source}, SHA-256 {config.sha256}, the last "
        f"{config.data.validation:.0%} held out\n"
        f"- seed: {config.training.seed}; every option is in config.json\n\n"
        f"{score}\n\n"
        "```sh\n"
        f"elman evaluate {run.path}\n"
        f"elman generate {run.path}\n"
        f"elman train --resume {run.path}\n"
        "```\n"
    )


# ---------------------------------------------------------------------- small helpers


def _make_room(path: Path, force: bool) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} exists and is no folder", hint="name another with --out")
    existing = sorted(p.name for p in path.iterdir()) if path.exists() else []
    foreign = [n for n in existing if n not in FILES and not n.endswith(".partial")]
    if foreign or (existing and not force):
        what = f"holds {foreign[0]}, which is no part of a run" if foreign else "is a run already"
        hint = "name another folder with --out"
        raise UserError(
            f"{path} {what}", hint=hint if foreign else hint + ", or overwrite it with --force"
        )
    for name in existing:
        shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(
            f"cannot make the folder {path}: {problem.strerror}", hint="name another with --out"
        ) from problem


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UserError(
            f"{path} is damaged: {problem}", hint="restore it from a copy, or train the run again"
        ) from problem


def _part(tensors: dict[str, torch.Tensor], first: str) -> dict[str, torch.Tensor]:
    prefix = first + "/"
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _fill(model: LanguageModel, weights: dict[str, torch.Tensor], where: Path) -> None:
    wanted = dict(model.named_parameters())
    shapes = {n: tuple(p.shape) for n, p in wanted.items()}
    found = {n: tuple(t.shape) for n, t in weights.items()}
    if shapes != found:
        odd = sorted(set(shapes.items()) ^ set(found.items()))
        raise UserError(
            f"the weights in {where} do not fit its config.json: {odd[0][0]} differs",
            hint="the two files come from different runs",
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(weights[name])
