"""A fitted forecaster as a folder: `config.json` and `model.safetensors`, nothing to unpickle."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from elman.errors import MissingSource, UserError
from elman.files import atomic, write_text
from elman.forecasting.base import Forecaster
from elman.forecasting.baselines import Drift, Last, Mean, Seasonal
from elman.forecasting.differenced import Differenced
from elman.forecasting.intervals import Intervals
from elman.forecasting.linear import Linear
from elman.forecasting.networks import Recurrent, Window

FORMAT = "elman-forecaster-1"

KINDS: dict[str, type[Forecaster]] = {
    k.__name__: k for k in (Last, Seasonal, Mean, Drift, Linear, Window, Recurrent, Differenced)
}


@dataclass(frozen=True, eq=False)
class Fitted:
    """A forecaster, the columns it was fitted on, and its calibrated intervals."""

    model: Forecaster
    columns: tuple[str, ...]
    intervals: Intervals
    season: int | None = None


def save(fitted: Fitted, folder: Path | str) -> Path:
    """Write a fitted forecaster; `load` gives back one with the same forecasts."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {f"model.{k}": v for k, v in fitted.model.state().items()}
    arrays["intervals.radius"] = fitted.intervals.radius
    with atomic(folder / "model.safetensors") as draft:
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, draft)
    config = {
        "format": FORMAT,
        "model": _describe(fitted.model),
        "columns": fitted.columns,
        "season": fitted.season,
        "level": fitted.intervals.level,
    }
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return folder


def load(folder: Path | str) -> Fitted:
    """Read what `save` wrote."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise MissingSource(
            f"{folder} is not a forecaster's folder: it has no config.json",
            hint="elman forecast SOURCE --out FOLDER makes one",
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config.get("format") != FORMAT:
            raise ValueError(f"its format is {config.get('format')!r}, not {FORMAT!r}")
        arrays = load_file(folder / "model.safetensors")
        model = _build(config["model"])
        model.restore({k[6:]: v for k, v in arrays.items() if k.startswith("model.")})
        intervals = Intervals(config["level"], arrays["intervals.radius"])
        return Fitted(model, tuple(config["columns"]), intervals, config["season"])
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as wrong:
        raise UserError(
            f"{folder} does not hold a whole forecaster: {wrong}", hint="fit it again with --force"
        ) from wrong


def _describe(model: Forecaster) -> dict[str, Any]:
    """A model's kind and settings as plain values.

    Carry and memory shape the gradient while fitting; a fitted model predicts without them.
    """
    settings = {f.name: getattr(model, f.name) for f in fields(cast(Any, model)) if f.init}
    settings = {k: v for k, v in settings.items() if k not in ("carry", "memory")}
    if isinstance(model, Differenced):
        settings["inner"] = _describe(model.inner)
    return {"kind": type(model).__name__, **settings}


def _build(described: dict[str, Any]) -> Forecaster:
    """The unfitted model that `_describe` described."""
    settings = dict(described)
    kind = KINDS[settings.pop("kind")]
    if kind is Differenced:
        settings["inner"] = _build(settings["inner"])
    return kind(**settings)
