"""A run is a folder: everything to use, explain, continue and repeat one training.

    config.json         data, model and training options; the fingerprint of the text
    vocab.json          the tokens
    model.safetensors   the best weights (averaged, where weights are averaged)
    state.safetensors   the training itself, between two updates: exact resume
    state-….safetensors large tensors of it, in pieces
    metrics.jsonl       one record per line: updates, validations, samples, the result
    README.md           the model card;  report.html: the same with figures
    pictures            where `elman gradients` is told to draw, by its own hint and by the demo
    source              the text itself, where it came through a pipe
    .replaced           the run that was here before, until this one has something to show

Every file is written whole or not at all, and nothing is ever unpickled. state.safetensors says how
long metrics.jsonl was when it was written, so after a crash both go back to the same moment. One
process at a time writes here (`folders/lock.py`). docs/reliability.md has the promises.
"""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from elman import strict_json
from elman.defaults import learns
from elman.errors import MissingSource, UserError
from elman.files import (
    BLANK_SEAL,
    as_path,
    atomic,
    check_new_folder,
    has_seal,
    read_bytes,
    seal_holds,
    write_sealed,
    write_text,
)
from elman.folders import replaced
from elman.folders.lock import NAME as LOCK
from elman.folders.lock import Lock
from elman.language_model import LanguageModel
from elman.runs import checkpoints, log, presets
from elman.runs.card import model_card
from elman.runs.config import Config, fresh_model, options_of
from elman.runs.shown import WEIGHTS
from elman.text import prepared
from elman.text.prepared import Splits
from elman.text.vocab import Vocab
from elman.training import Record, Training

FILES = (
    "config.json",
    "vocab.json",
    "model.safetensors",
    "state.safetensors",
    "metrics.jsonl",
    "README.md",
    "report.html",
    "pictures",
    "source",
    "tensorboard",
    LOCK,
    replaced.NAME,
    replaced.FORGOTTEN,
)
MARK = "config.json"  # what has one is a run


class Run:
    """A run folder, opened."""

    def __init__(
        self,
        path: Path,
        config: Config,
        vocab: Vocab,
        *,
        edited: bool = False,
        writes: bool = True,
    ) -> None:
        self.path, self.config, self.vocab = path, config, vocab
        self.edited = edited  # whether someone has changed config.json
        self.writes = writes  # of the processes of one training, only the first one
        self._lock: Lock | None = None
        self._blocks = 0  # of `owned`, one inside another
        self._left: os.stat_result | None = None  # state.safetensors when the lock was released
        self.forgotten = False  # whether metrics.jsonl was gone when the run was resumed
        self.given_up = False  # whether the run that it was to replace is there again
        self.parts: Splits | None = None  # of its text, where a training has read it

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
        """Make the folder; `source` is the text itself, kept where it cannot be read again.

        A folder that cannot be filled, on a full disk, is as it was before. A run that this one
        replaces lies aside until `forget_replaced`.
        """
        path = as_path(path)
        check_room(path, force)
        run, is_new = cls(path, config, vocab), not path.exists()
        try:
            run._make_room(force)
            run._fill(source)
        except BaseException:
            run.release()
            if is_new and path.exists() and not any(path.iterdir()):
                path.rmdir()
            raise
        return run

    def _fill(self, source: str | bytes | None) -> None:
        """Write the first files into the empty folder; none of them if one cannot be written."""
        try:
            if source is not None:
                with atomic(self.path / "source") as draft:
                    draft.write_bytes(prepared.as_bytes(source))
            self.vocab.save(self.path / "vocab.json")
            self.save_config(self.config)  # last: a folder with a config.json is a whole run
        except BaseException:
            replaced.clear(self.path)
            replaced.put_back(self.path, MARK)
            raise

    @classmethod
    def open(cls, path: Path | str, *, writes: bool = True) -> "Run":
        """Open a run folder that exists."""
        path = as_path(path)
        if not (path / "config.json").exists():
            inside = sorted(mark.parent for mark in path.glob(f"*/{MARK}"))
            some = ", ".join(shlex.quote(str(run)) for run in inside[:3])
            raise MissingSource(
                f"{path} is not a run folder: it has no {MARK}",
                hint=f"it holds some: {some}{' …' if len(inside) > 3 else ''}"
                if inside
                else "elman train writes one; name the folder it named",
            )
        written = read_bytes(path / "config.json")
        config = Config.from_json(_json(written, path / "config.json"), path / "config.json")
        try:
            vocab = Vocab.load(path / "vocab.json")
        except UserError as problem:
            hint = "restore it from a copy, or train the run again"
            raise type(problem)(problem.message, hint=hint) from problem
        if len(vocab) != config.model["vocab_size"]:
            raise UserError(
                f"{path} has {len(vocab)} tokens in vocab.json, and a model of "
                f"{config.model['vocab_size']} in config.json",
                hint="the two files come from different runs",
            )
        return cls(
            path, config, vocab, edited=has_seal(written) and not seal_holds(written), writes=writes
        )

    def restore(self) -> None:
        """Write again what someone has deleted while it is trained: a run must say what it is."""
        if self.writes and not (self.path / "vocab.json").exists():
            self.vocab.save(self.path / "vocab.json")
        if self.writes and not (self.path / MARK).exists():
            self.save_config(self.config)

    def save_config(self, config: Config) -> None:
        """Write config.json, and the model card that repeats it for people."""
        self.config = config
        if not self.writes:
            return
        record = strict_json.dumps(config.json() | {"seal": BLANK_SEAL}, indent=2)
        write_sealed(self.path / "config.json", record.encode() + b"\n")
        write_text(self.path / "README.md", model_card(self))

    # ------------------------------------------------------------------ owning

    def own(self) -> None:
        """Be the one who writes here, until `release`; refused while another process is.

        A training that another process has moved on in between is refused, too.
        """
        if self._lock is not None or not self.writes:
            return
        if self.given_up:
            raise UserError(
                f"this training failed: {self.path} is the run before it again",
                hint="begin a new training",
            )
        self._lock = Lock(self.path)
        if self._left is not None and _differ(self._left, self._saved()):
            self.release()
            raise UserError(
                f"{self.path} was trained further by another process",
                hint="resume it: what this process has is older",
            )

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Nobody else writes here inside this block, nor inside the one that this one is in."""
        self.own()
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if self._blocks == 0:
                self.release()

    def release(self) -> None:
        """Let others write here."""
        if self._lock is not None:
            self._left = self._saved()
            self._lock.release()
            self._lock = None

    def _saved(self) -> os.stat_result | None:
        path = self.path / "state.safetensors"
        return path.stat() if path.exists() else None

    def _make_room(self, force: bool) -> None:
        """An empty folder, ours; what `check_room` allowed to be replaced is gone."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UserError(
                f"cannot make the folder {self.path}: {problem.strerror}",
                hint="name another with --out",
            ) from problem
        self.own()
        check_room(self.path, force)  # as it is now that nobody else writes here
        replaced.set_aside(self.path, MARK)

    def forget_replaced(self) -> None:
        """Delete the run that this one replaces: it has something to show now."""
        if self.writes:
            replaced.forget(self.path)

    def give_up(self) -> None:
        """Put the run that this one was to replace back, if this one has no checkpoint yet."""
        if self.writes and self._lock is not None and self._saved() is None:
            self.given_up = replaced.put_back(self.path, MARK)

    # ------------------------------------------------------------------ reading

    def splits(self, source: str | None = None) -> Splits:
        """The ids the model was trained and validated on, exactly; a changed text is refused.

        A training has read them already: whatever became of the file since, it can be concluded.
        `source` is where the same text lies now.
        """
        if self.parts is not None:
            return self.parts
        data = self.config.data if source is None else replace(self.config.data, source=source)
        kept = self.path / "source"
        try:
            text = prepared.read(data, kept if data.source == "-" else None)
        except MissingSource as missing:
            if source is not None:
                raise
            run = shlex.quote(str(self.path))
            raise MissingSource(
                f"the text that {self.path} was trained on is no longer there: {data.source}",
                hint=f"put it back; or say where it is now: elman train WHERE --resume {run}; "
                f"another text is scored without it by elman evaluate {run} OTHER.txt "
                "--no-baselines",
            ) from missing
        sha256 = prepared.fingerprint(text)
        if sha256 != self.config.sha256:
            changed = "has changed since this run was made"
            raise UserError(
                f"the text {data.source} "
                f"{changed if source is None else 'is not the one of this run'}: its SHA-256 is "
                f"{sha256[:12]}…, it was {self.config.sha256[:12]}…",
                hint="put the old text back, or say where it is now: elman train WHERE --resume "
                f"{shlex.quote(str(self.path))}; or train a new run on the new one"
                if source is None
                else f"the run's own is {self.config.data.source}, or wherever it is now; train a "
                "new run on another text",
            )
        return prepared.prepare(data, text, self.vocab)

    def encode(self, text: str | bytes) -> Any:
        """Any text as the run's ids, cleaned the way its own text was."""
        return self.vocab.encode(prepared.cleaned(self.config.data, text))

    @learns
    def load_model(
        self, device: torch.device | str = "cpu", which: str | None = None
    ) -> LanguageModel:
        """The model with its `best` weights or the `last` ones, ready to use (in eval mode).

        None: those that the run is known by (`Shown.weights`).
        """
        which = which or self.config.shown.weights
        if which not in WEIGHTS:
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

    def records(self) -> list[Record]:
        """Every record so far, as what it is: updates, validations, samples, the result.

        A last line that a crash cut short is left out.
        """
        return log.records(self.path)

    def latest(self, kind: type[log.R]) -> log.R | None:
        """The last record of one kind, found without reading all; None: there is none."""
        return log.latest(self.path, kind)

    def metrics(self) -> list[dict[str, Any]]:
        """Every record so far, by the names of its numbers."""
        return [record.json() for record in self.records()]

    # ------------------------------------------------------------------ writing

    def save_best(self, training: Training) -> None:
        """Write model.safetensors: the weights of now, averaged where weights are averaged."""
        if not self.writes:
            return
        with training.average.applied():
            weights = {n: p.detach() for n, p in training.model.named_parameters()}
            checkpoints.write(
                self.path / "model.safetensors",
                "model",
                weights,
                {"step": training.step, "nats": training.best},
            )

    def save_state(self, training: Training, metrics_bytes: int) -> None:
        """Write state.safetensors: where the training is, and how long metrics.jsonl is.

        Every process has some of the lanes; the first one writes them all, or, of a large training,
        each some of the pieces.
        """
        tensors, numbers = training.state_dict()
        numbers["metrics_bytes"] = metrics_bytes
        options = options_of(self.config)
        numbers["options"] = {name: options[name] for name in presets.CHANGEABLE}
        checkpoints.write_together(
            self.path / "state.safetensors", "state", tensors, numbers, training.processes
        )

    @learns
    def resume(self, training: Training) -> presets.Options | None:
        """Put a fresh training where the run was last saved, and metrics.jsonl with it.

        Returns the options it was saved with, of those that may change; None: it does not say.
        """
        self.own()
        path, length, options = self.path / "state.safetensors", 0, None
        if path.exists():  # or it stopped before its first checkpoint: begin again, same seed
            tensors, numbers = checkpoints.read(path, "state")
            try:
                training.load_state_dict(tensors, numbers)
                length = int(numbers["metrics_bytes"])
                options = numbers.get("options")
            except (KeyError, RuntimeError, TypeError, ValueError) as problem:
                raise UserError(
                    f"{path} does not fit {self.path / 'config.json'}: {problem!r}",
                    hint="the two come from different runs",
                ) from problem
        if self.writes:
            self.forgotten = log.shorten(self.path, length)
            for draft in self.path.glob(".*.partial"):  # what a crash left half written
                draft.unlink()
        if any(training.processes.agree(self.forgotten)):
            self.save_state(training, 0)  # before a new record is begun, which is shorter
        return options


# ---------------------------------------------------------------------- small helpers


def check_room(path: Path, force: bool = False) -> None:
    """Refuse a place where no run can be made, before anything is done; it changes nothing there.

    `force` allows what is there to be replaced, if it is a run of elman's and nothing else.
    """
    if not str(path) or "\0" in str(path):
        raise UserError(f"{str(path)!r} names no folder", hint="name one with --out")
    try:
        existing = sorted(p.name for p in path.iterdir()) if path.exists() else []
    except NotADirectoryError as problem:
        raise UserError(
            f"{path} exists and is not a folder", hint="name another with --out"
        ) from problem
    foreign = [n for n in existing if not _belongs(n)]
    if foreign:
        raise UserError(
            f"{path} holds {foreign[0]}, which is not part of a run",
            hint="name another folder with --out",
        )
    if "config.json" in existing and not _is_run(path / "config.json"):
        raise UserError(
            f"{path} holds something other than a run of elman train, and is left as it is",
            hint="name another folder with --out, or delete this one yourself",
        )
    if set(existing) - {LOCK} and not force:
        raise UserError(
            f"{path} is a run already",
            hint="name another folder with --out, or overwrite it with --force",
        )
    check_new_folder(path, "--out")


def _belongs(name: str) -> bool:
    return name in FILES or name.endswith(".partial") or checkpoints.is_piece(name)


def _is_run(path: Path) -> bool:
    """Whether a config.json is one of ours: --force replaces nothing else."""
    try:
        record = strict_json.loads(read_bytes(path))
    except ValueError:
        return False
    return isinstance(record, dict) and {"training", "sha256", "data"} <= set(record)


def _differ(before: os.stat_result, now: os.stat_result | None) -> bool:
    """Whether a file was replaced since."""
    return now is None or (before.st_ino, before.st_mtime_ns) != (now.st_ino, now.st_mtime_ns)


def _json(data: bytes, path: Path) -> Any:
    try:
        return strict_json.loads(data)
    except ValueError as problem:
        raise UserError(
            f"{path} is damaged: {problem}", hint="restore it from a copy, or train the run again"
        ) from problem


def _part(tensors: dict[str, torch.Tensor], first: str) -> dict[str, torch.Tensor]:
    prefix = first + "/"
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _fill(model: LanguageModel, weights: dict[str, torch.Tensor], where: Path) -> None:
    wanted = dict(model.named_parameters())
    shapes = {n: tuple(p.shape) for n, p in wanted.items()}
    given = {n: tuple(t.shape) for n, t in weights.items()}
    if shapes != given:
        odd = sorted(set(shapes.items()) ^ set(given.items()))
        raise UserError(
            f"the weights in {where} do not fit its config.json: {odd[0][0]} differs",
            hint="the two files come from different runs",
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(weights[name])
