"""Runs beside one another: what each was asked for, how far it is, how well it does."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elman.errors import MissingSource, UserError
from elman.files import check_seal, read_bytes
from elman.runs.config import options_of
from elman.runs.folder import Run
from elman.runs.presets import Options
from elman.text.shards import is_prepared
from elman.training import Result, Update, Validation

_UNFINISHED = "request.json"
MARKS = (
    *("config.json", "vocab.json", "model.safetensors", "state.safetensors", "metrics.jsonl"),
    _UNFINISHED,
)
"""A folder with one of these is a run, or was one."""

FORECAST = "elman-forecast"
"""How the formats of forecasters begin."""

SCORES = ("nats_per_token", "perplexity", "bits_per_char")


@dataclass(frozen=True)
class Summary:
    """One run at a glance; of a folder that cannot be read there is only the `problem`."""

    path: Path
    options: Options
    step: int = 0
    progress: float = 0.0  # 0 to 1
    result: Result | None = None  # of the whole held-out text, when it has ended
    best: float = math.nan  # nats of the best validation so far
    problem: str = ""

    @property
    def nats(self) -> float:
        """Held out, per token: the result, or the best validation so far; NaN: neither."""
        return self.best if self.result is None else self.result.nats_per_token

    def json(self) -> dict[str, Any]:
        """For programs; null stands for what is not known."""
        if self.problem:
            return {"run": str(self.path), "problem": self.problem}
        result = {} if self.result is None else self.result.json()
        return {
            "run": str(self.path),
            "step": self.step,
            "progress": self.progress,
            "best_validation_nats": _known(self.best),
            **{name: _known(result.get(name)) for name in SCORES},
            "options": self.options,
        }


def _known(number: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if number is not None and math.isfinite(number) else None


@dataclass(frozen=True)
class Forecaster:
    """A forecaster at a glance, from what stands beside it for people to read."""

    path: Path
    model: str = ""
    steps: int = 0
    series: int = 0
    mase: float | None = None
    crps: float | None = None
    problem: str = ""
    unfinished: bool = False

    def json(self) -> dict[str, Any]:
        """For programs; null stands for what is not known."""
        if self.problem:
            return {"run": str(self.path), "kind": "forecaster", "problem": self.problem}
        return {
            "run": str(self.path),
            "kind": "forecaster",
            **{k: v for k, v in vars(self).items() if k not in ("path", "problem")},
        }


def forecaster(path: Path) -> Forecaster | None:
    """Read a forecaster's folder; None where it is something else."""
    name = "config.json" if (path / "config.json").is_file() else _UNFINISHED
    try:
        text = read_bytes(path / name)
        record = json.loads(text)
        if not str(record["format"]).startswith(FORECAST):
            return None
    except (UserError, ValueError, KeyError, TypeError, RecursionError):
        return None
    try:
        check_seal(text, path / name)
        if name == _UNFINISHED:
            settings = record["asked"]["settings"]
            return Forecaster(path, settings["model"], settings["steps"], unfinished=True)
        about = record.get("about", {})
        score = about.get("score", {})
        return Forecaster(
            path,
            about.get("published") or "forecaster",
            record.get("steps", 0),
            len(record.get("names", [])) or 1,
            score.get("mase"),
            score.get("scaled_crps"),
        )
    except UserError as refusal:
        return Forecaster(path, problem=refusal.message)
    except (KeyError, TypeError, AttributeError) as problem:
        return Forecaster(path, problem=f"the files of {path} cannot be read: {problem!r}")


def summary(path: Path | str) -> Summary:
    """Read a run folder; one that is broken has the reason for it."""
    try:
        run = Run.open(path)
        options, records = options_of(run.config), run.records()
    except UserError as refusal:
        return Summary(Path(path), {}, problem=refusal.message)
    except (KeyError, OSError) as problem:
        return Summary(Path(path), {}, problem=f"the files of {path} cannot be read: {problem!r}")
    updates = [r for r in records if isinstance(r, Update)]
    results = [r for r in records if isinstance(r, Result)]
    return Summary(
        Path(path),
        options,
        step=updates[-1].step if updates else 0,
        progress=updates[-1].progress if updates else 0.0,
        result=results[-1] if results else None,
        best=min((r.nats for r in records if isinstance(r, Validation)), default=math.nan),
    )


def below(folder: Path) -> list[Path]:
    """The run folders in a folder, whole or broken, by name."""
    if not folder.is_dir():
        raise MissingSource(f"there is no folder {folder}", hint="elman train writes into runs/")
    inside = sorted(p for p in folder.iterdir() if p.is_dir())
    return [p for p in inside if is_run(p) and not is_prepared(p)]


def is_run(folder: Path) -> bool:
    """Whether the folder itself is a run, rather than one that holds them."""
    return any((folder / mark).exists() for mark in MARKS)


def best_first(summaries: Sequence[Summary]) -> list[Summary]:
    """By the held-out score, per character where it is known; then the unscored and the broken."""

    def rank(s: Summary) -> tuple[bool, bool, float]:
        bits = s.nats / math.log(2) if s.result is None else s.result.bits_per_char
        return bool(s.problem), math.isnan(bits), bits

    return sorted(summaries, key=rank)


def differing(summaries: Sequence[Summary]) -> list[str]:
    """The options in which the runs are not all alike, in the order of `elman train --help`."""
    read = [s.options for s in summaries if not s.problem]
    names = dict.fromkeys(name for options in read for name in options)
    return [n for n in names if any(o.get(n) != read[0].get(n) for o in read)]
