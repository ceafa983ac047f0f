"""Fitted forecasters as a folder: `config.json` and `model.safetensors`, nothing to unpickle.

Both are sealed (`elman.files`), and `config.json` knows which weights are its own: a changed bit is
refused rather than forecast from.
"""

import hashlib
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as parse_arrays
from safetensors.numpy import save as write_arrays

from elman import strict_json
from elman.errors import MissingSource, Unreadable, UserError
from elman.files import (
    BLANK_SEAL,
    as_path,
    atomic,
    check_new_folder,
    check_seal,
    read_bytes,
    read_sealed,
    sealed,
    write_sealed,
    write_text,
)
from elman.folders.lock import NAME as LOCK
from elman.forecasting import panel
from elman.forecasting.autoregressive_errors import AutoregressiveErrors
from elman.forecasting.base import Forecaster, State
from elman.forecasting.baselines import Drift, Last, Mean, Seasonal
from elman.forecasting.catalogue import Method
from elman.forecasting.deseasonalised import Deseasonalised
from elman.forecasting.differenced import Differenced, Logged
from elman.forecasting.ensemble import Ensemble
from elman.forecasting.global_network import Global
from elman.forecasting.intervals import Errors, Intervals
from elman.forecasting.linear import Linear
from elman.forecasting.networks import Recurrent, Window
from elman.forecasting.regression import Regression
from elman.forecasting.series import Reading, Series
from elman.forecasting.smoothing import Smoothing

FORMAT = "elman-forecaster-2"
ENSEMBLE = "elman-forecast-1"
_READERS = {
    FORMAT: ("one fitted model", "elman.forecasting.saving.load"),
    ENSEMBLE: ("a forecaster of series", "SeriesForecaster.load, or elman forecast --run,"),
}
"""What a folder of each format holds, and who reads it."""
MOST_SERIES, RECENT = 20, 500
"""How many series, and how many of each one's last values, answer.json has."""

KINDS: dict[str, type[Forecaster]] = {
    k.__name__: k
    for k in (
        Last, Seasonal, Mean, Drift, Smoothing, Linear, Regression,
        AutoregressiveErrors, Window, Recurrent, Global, Differenced, Logged, Deseasonalised,
    )
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Fitted:
    """A forecaster, the columns it was fitted on, and its calibrated intervals."""

    model: Forecaster
    columns: tuple[str, ...]
    intervals: Intervals
    season: int | None = None


@dataclass(frozen=True, eq=False)
class Saved:
    """What `elman forecast --out` keeps: the ensemble, and how its table was read."""

    ensemble: Ensemble
    reading: Reading
    columns: tuple[str, ...]
    calendar: bool = False


def save(fitted: Fitted, folder: Path | str) -> Path:
    """Write a fitted forecaster; `load` gives back one with the same forecasts."""
    arrays = {f"model.{k}": v for k, v in fitted.model.state().items()}
    arrays["intervals.radius"] = fitted.intervals.radius
    config = {
        "format": FORMAT,
        "model": _describe(fitted.model),
        "columns": fitted.columns,
        "season": fitted.season,
        "level": fitted.intervals.level,
    }
    return _write(as_path(folder), config, arrays)


def load(folder: Path | str) -> Fitted:
    """Read what `save` wrote."""
    with _Whole(folder := as_path(folder)):
        config, arrays = _read(folder, FORMAT)
        model = _build(config["model"], _under(arrays, "model."))
        intervals = Intervals(config["level"], arrays["intervals.radius"])
        return Fitted(model, tuple(config["columns"]), intervals, config["season"])
    raise AssertionError


def save_ensemble(saved: Saved, folder: Path | str, extra: Mapping[str, Any] | None = None) -> Path:
    """Write everything that later forecasts need; `extra` is kept in config.json for readers."""
    arrays: State = {}
    parts = []
    ensemble = saved.ensemble
    for n, (label, fitted) in enumerate(ensemble.fitted.items()):
        users = [i for i, labels in enumerate(ensemble.members) if label in labels]
        shared = fitted.method.of.shared
        for i in users[:1] if shared else users:
            arrays |= {f"{n}.{i}.{k}": v for k, v in fitted.models[i].state().items()}
            if (known := fitted.errors[i]) is not None:
                arrays |= {f"{n}.{i}.errors.spread": known.spread}
                arrays |= {f"{n}.{i}.errors.shape": known.shape}
                arrays |= {f"{n}.{i}.errors.relative": known.relative.astype(np.float64)}
        parts.append(
            {
                "label": label,
                "kind": fitted.method.kind,
                "method": _settings_of(fitted.method),
                "series": users,
                "models": [_describe(fitted.models[i]) for i in (users[:1] if shared else users)],
            }
        )
    config = {
        "format": ENSEMBLE,
        "parts": parts,
        "members": ensemble.members,
        "names": ensemble.names,
        "widen": {f"{k:g}": v for k, v in ensemble.widen.items()},
        "steps": ensemble.steps,
        "seed": ensemble.seed,
        "columns": saved.columns,
        "reading": asdict(saved.reading),
        "calendar": saved.calendar,
        "about": dict(extra or {}),
    }
    return _write(as_path(folder), config, arrays)


def keep_answer(folder: Path, answer: Mapping[str, Any], series: Sequence[Series]) -> Path:
    """Write answer.json: what was forecast, how past forecasts did, and the end of each series."""
    kept = {
        k: answer[k] for k in ("model", "published", "windows", "scores", "verdicts", "warning")
    }
    recent: dict[str, Any] = {}
    for s in series[:MOST_SERIES]:
        start = max(0, len(s) - RECENT)
        recent.setdefault(s.name, {})[s.columns[0]] = {
            "time": [s.time(step) for step in range(start, len(s))],
            "values": s.values[start:, 0].tolist(),
        }
    kept["forecast"] = {name: answer["forecast"][name] for name in recent}
    path = folder / "answer.json"
    write_text(path, strict_json.dumps({"series": recent, **kept}))
    return path


def read_answer(folder: Path) -> dict[str, Any]:
    """What `keep_answer` wrote."""
    path = folder / "answer.json"
    if not path.is_file():
        raise MissingSource(
            f"{folder} has no answer.json: an older elman made it",
            hint="fit it again: elman forecast SOURCE --out FOLDER --force",
        )
    try:
        return strict_json.loads(read_bytes(path))
    except ValueError as problem:
        raise UserError(f"{path} is damaged: {problem}", hint="fit it again") from problem


def load_ensemble(folder: Path | str) -> Saved:
    """Read what `save_ensemble` wrote."""
    with _Whole(folder := as_path(folder)):
        config, arrays = _read(folder, ENSEMBLE)
        fitted = {}
        for n, part in enumerate(config["parts"]):
            fitted[part["label"]] = _restored(n, part, arrays, len(config["names"]))
        ensemble = Ensemble(
            fitted,
            [tuple(labels) for labels in config["members"]],
            tuple(config["names"]),
            {float(k): float(v) for k, v in config["widen"].items()},
            int(config["steps"]),
            int(config.get("seed", 0)),  # older folders do not say
        )
        kept = config["reading"].items()
        reading: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in kept}
        return Saved(ensemble, Reading(**reading), tuple(config["columns"]), config["calendar"])
    raise AssertionError


def _errors_of(arrays: State) -> Errors:
    """How a model errs; in older folders none as a share of its forecast."""
    relative = arrays.get("relative", np.zeros(1)).astype(bool)
    return Errors(arrays["spread"], arrays["shape"], relative)


def _restored(n: int, part: Any, arrays: State, series: int) -> panel.Fitted:
    old = {"median": part["label"].endswith(", median")}  # older folders say it there alone
    settings: dict[str, Any] = part.get("method", old)
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    method = Method(part["kind"], **settings, name=part["label"])
    models: dict[int, Forecaster] = {}
    known: dict[int, Errors | None] = {}
    for described, i in zip(part["models"], part["series"], strict=False):
        state = _under(arrays, f"{n}.{i}.")
        errors = _under(state, "errors.")
        models[i] = _build(described, {k: v for k, v in state.items() if "errors." not in k})
        known[i] = _errors_of(errors) if errors else None
    first = part["series"][0]
    return panel.Fitted(
        method,
        [models.get(i, models[first]) for i in range(series)],
        [known.get(i, known[first]) for i in range(series)],
    )


def check_place(folder: Path, *, force: bool) -> None:
    """Refuse a place that is taken, unless `force` and what is there is a forecaster."""
    if not folder.exists():
        check_new_folder(folder, "--out")
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file, not a folder", hint="another --out")
    if not force:
        raise UserError(
            f"{folder} exists already", hint="another --out, or --force to overwrite it"
        )
    if is_taken(folder) and _format_of(folder) is None:
        raise UserError(
            f"{folder} holds something that is not a forecaster, and --force only replaces those",
            hint="another --out, or delete that folder yourself",
        )


def is_taken(folder: Path) -> bool:
    """Whether anything lies in a folder, besides the name of who writes there."""
    return any(path.name != LOCK for path in folder.iterdir())


def is_saved(folder: Path) -> bool:
    """Whether a folder holds a forecaster, of this version or another."""
    return _format_of(folder) is not None


def _format_of(folder: Path) -> str | None:
    """Which of our formats a folder has, if any: a forecaster's, or one's that is not finished."""
    name = "config.json" if (folder / "config.json").exists() else "request.json"
    try:
        config = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    format = config.get("format") if isinstance(config, dict) else None
    ours = isinstance(format, str) and format.startswith(("elman-forecaster-", "elman-forecast-"))
    return format if ours else None


def _write(folder: Path, config: dict[str, Any], arrays: State) -> Path:
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _fill(folder, config, arrays)
    except BaseException:
        if is_new:  # half a forecaster is of no use
            shutil.rmtree(folder)
        raise


def _fill(folder: Path, config: dict[str, Any], arrays: State) -> Path:
    whole = {k: np.ascontiguousarray(v) for k, v in arrays.items()}
    weights = sealed(write_arrays(whole, {"seal": BLANK_SEAL}))
    config |= {"weights": hashlib.sha256(weights).hexdigest(), "seal": BLANK_SEAL}
    with atomic(folder / "model.safetensors") as draft:
        draft.write_bytes(weights)
    text = json.dumps(config, indent=2, allow_nan=False) + "\n"
    write_sealed(folder / "config.json", text.encode())
    return folder


def _read(folder: Path, wanted: str) -> tuple[dict[str, Any], State]:
    if not (folder / "config.json").is_file():
        raise MissingSource(
            f"{folder} is not a forecaster's folder: it has no config.json",
            hint="elman forecast SOURCE --out FOLDER makes one",
        )
    text = read_bytes(folder / "config.json")
    config = json.loads(text)
    if isinstance(config, dict) and isinstance(
        config.get("format"), int
    ):  # as `elman train` has it
        raise MissingSource(
            f"{folder} is a run of a language model, not a forecaster",
            hint=f"elman generate {shlex.quote(str(folder))} uses it; elman forecast SOURCE --out "
            "FOLDER makes a forecaster",
        )
    format = config.get("format") if isinstance(config, dict) else None
    if format != wanted and format in _READERS:
        raise MissingSource(
            f"{folder} holds {_READERS[format][0]}, not {_READERS[wanted][0]}",
            hint=f"{_READERS[format][1]} reads it",
        )
    if not isinstance(config, dict) or format != wanted:
        raise ValueError(
            f"its format is {format!r}, of another version of elman or none; this one reads "
            f"{wanted!r}"
        )
    check_seal(text, folder / "config.json")
    weights = read_sealed(folder / "model.safetensors")
    if hashlib.sha256(weights).hexdigest() != config["weights"]:
        raise ValueError("model.safetensors does not belong to this config.json")
    return config, parse_arrays(weights)


class _Whole:
    """Turn whatever reading a damaged folder raises into one refusal that names the folder."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: Any, wrong: BaseException | None, trace: Any) -> None:
        known = (SafetensorError, ValueError, TypeError, KeyError, IndexError, AttributeError)
        if isinstance(wrong, MissingSource | Unreadable) or not isinstance(
            wrong, (*known, RuntimeError, RecursionError, FileNotFoundError)
        ):
            return
        raise UserError(
            f"{self.folder} does not hold a whole forecaster: {wrong}",
            hint="fit it again with --force",
        ) from wrong


def _under(arrays: State, prefix: str) -> State:
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}


def _settings_of(method: Method) -> dict[str, Any]:
    """How a method is fitted, on a series that it meets later too, besides its kind and name.

    Of its options those that are plain values: a carry or memory of one's own has no words.
    """
    settings = {k: v for k, v in asdict(method).items() if k not in ("kind", "name")}
    plain = {k: v for k, v in method.options.items() if isinstance(v, str | int | float)}
    return settings | {"options": plain}


def _describe(model: Forecaster) -> dict[str, Any]:
    """A model's kind and settings as plain values.

    Carry, memory and kernel are for the fit alone; a fitted model predicts without them.
    """
    settings = {f.name: getattr(model, f.name) for f in fields(cast(Any, model)) if f.init}
    settings = {k: v for k, v in settings.items() if k not in ("carry", "memory", "kernel")}
    settings = {k: _describe(v) if isinstance(v, Forecaster) else v for k, v in settings.items()}
    return {"kind": type(model).__name__, **settings}


def _build(described: dict[str, Any], state: State) -> Forecaster:
    """The fitted model that `_describe` described and whose `state` was kept."""
    model = _made(described)
    model.restore(state)
    return model


def _made(described: dict[str, Any]) -> Forecaster:
    settings: dict[str, Any] = {
        k: _made(v) if isinstance(v, dict) else v for k, v in described.items()
    }
    return KINDS[settings.pop("kind")](**settings)
