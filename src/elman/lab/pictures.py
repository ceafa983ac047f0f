"""Figures of a run as SVG, by the library's own drawing functions."""

import io
import threading
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from elman.diagnostics import by_lag, singular_values
from elman.errors import UserError
from elman.figures import gradients, house, training
from elman.lab.microscope import SPECTRUM, Slide
from elman.lab.shelf import NotHere
from elman.runs import Run
from elman.training import Update, Validation

_ONE_AT_A_TIME = threading.Lock()
"""matplotlib's settings are the whole process's."""


def draw(path: Path, name: str, published: Path) -> bytes:
    """One of `PICTURES`, as the bytes of an SVG file."""
    if name not in PICTURES:
        raise NotHere(f"there is no picture {name!r}", hint=f"one of {', '.join(PICTURES)}")
    with _ONE_AT_A_TIME, house():
        mpl.use("agg")  # a server draws no windows
        buffer = io.BytesIO()
        figure = PICTURES[name](path, published)
        figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return buffer.getvalue()


def _curves(path: Path, name: str) -> tuple[training.Curve, training.Curve]:
    """A number of every update, and of every validation that has it."""
    records = Run.open(path).records()
    updates = [r for r in records if isinstance(r, Update)]
    if not updates:
        raise UserError("there is nothing to draw yet", hint="wait for the first update")
    validations = [r for r in records if isinstance(r, Validation) and hasattr(r, name)]
    both = ([(r.step, getattr(r, name)) for r in kind] for kind in (updates, validations))
    steps, held_out = (training.Curve([s for s, _ in c], [v for _, v in c]) for c in both)
    return steps, held_out


def _perplexity(path: Path, _: Path) -> Figure:
    return training.perplexity(*_curves(path, "perplexity"), {})


def _norms(path: Path, _: Path) -> Figure:
    clip = Run.open(path).config.training.optimisation.clip
    return training.gradient_norms(_curves(path, "gradient_norm")[0], clip)


def _lags(path: Path, published: Path) -> Figure:
    slide = Slide(path)
    passage, _, _ = slide.passage(published)
    window = slide.run.config.training.reading.window
    return gradients.lags(by_lag(passage, len(passage) // 2), window)


def _directions(path: Path, published: Path) -> Figure:
    passage, _, _ = Slide(path).passage(published)
    return gradients.directions(
        singular_values(passage, tuple(k for k in SPECTRUM if k <= len(passage)))
    )


PICTURES: dict[str, Callable[[Path, Path], Figure]] = {
    "perplexity": _perplexity,
    "gradient-norms": _norms,
    "lags": _lags,
    "directions": _directions,
}
"""Every picture that the page offers: a new one is a function and a name here."""
