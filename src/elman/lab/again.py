"""The command line, or the Python, that does again what was done on the page."""

import shlex
from pathlib import Path
from typing import Any

from elman.options import flag
from elman.runs import Run, presets
from elman.training import Change


def training(given: dict[str, Any], preset: str, path: Path) -> str:
    """The `elman train` that makes the run, before any change."""
    rest = {name: value for name, value in given.items() if name != "source"}
    words = ["elman train", shlex.quote(str(given["source"]))]
    words += [f"--preset {preset}"] if preset != presets.DEFAULT else []
    words += [presets.as_flags(rest)] if rest else []
    return " ".join([*words, f"--out {shlex.quote(str(path))}"])


def resuming(path: Path, **options: Any) -> str:
    """The command that goes on with a run."""
    flags = f" {presets.as_flags(options)}" if options else ""
    return f"elman train --resume {shlex.quote(str(path))}{flags}"


def whole(run: Run, asked: dict[str, Any]) -> str:
    """The Python that makes a run of the page again, each change at its own step."""
    again = f"{run.path}-again"
    kept = f"RunOptions(out={again!r}, threads={run.config.threads})"
    lines = [
        "from elman.session import RunOptions, Session",
        "",
        f"session = Session.begin({asked['given']!r}, {asked['preset']!r}, {kept})",
    ]
    step = 0
    for change in (r for r in run.records() if isinstance(r, Change)):
        if change.step > step:  # records() makes at least one
            stop = f"lambda: session.training.step >= {change.step}"
            lines.append(f"list(session.records(stop={stop}))")
        lines.append(f"session = Session.resume({again!r}, {change.options!r})")
        step = change.step
    return "\n".join([*lines, "list(session.records())", "print(session.conclude())"])


def generating(path: Path, prompt: str, length: int, seed: int, **choices: Any) -> str:
    """The `elman generate` that writes the same text."""
    words = ["elman generate", shlex.quote(str(path)), "--prompt", shlex.quote(prompt)]
    words += [f"--length {length} --seed {seed}"]
    words += [f"{flag(name)} {value:g}" for name, value in choices.items() if value is not None]
    return " ".join(words)


def forecasting(path: Path, steps: int) -> str:
    """The command that forecasts from new data with the same models."""
    return f"elman forecast NEW.csv --run {shlex.quote(str(path))} --steps {steps}"


def gradients(path: Path) -> str:
    """The command that measures how far back gradients reach."""
    return f"elman gradients {shlex.quote(str(path))} --figure pictures"


def python(path: Path, call: str) -> str:
    """A call on the loaded run."""
    return f"import elman\n\ntrained = elman.load({str(path)!r})\n{call}"
