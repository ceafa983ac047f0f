"""∂L_t/∂h_{t-k} of the window that is being read: losses × lags, and where the truncation cuts.

The numbers are those of `elman.diagnostics`; here is only which text and which weights. The text is
what lane 0 read last, with so much before it that a loss can be followed past the window's edge;
the model reads it from the state before any text, in float64, as `elman gradients` does.
"""

import copy
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch

from elman.diagnostics import (
    ByLag,
    Passage,
    by_lag,
    compare_carries,
    singular_values,
    spectral_radius,
    units,
)
from elman.diagnostics.units import SATURATED
from elman.errors import UserError
from elman.lab import again, moment
from elman.lab.moment import Place
from elman.lab.shown import alone, packed, short
from elman.language_model import LanguageModel
from elman.runs import Run, checkpoints, fresh_model
from elman.training.segments import one_pass

FEWEST, MOST = 16, 64
"""Losses and lags in one picture."""
SPECTRUM = (1, 2, 4, 8, 16, 32)
"""Steps over which the singular values are taken."""
DRAWS = 8
"""Draws of a randomised carry."""


class Window(NamedTuple):
    """What lane 0 read last: ids, the last of them only as a target."""

    ids: Any
    edges: list[int]  # the steps at which a segment begins


@final
class Slide:
    """A run under the microscope: its text is read once, its weights as often as they move."""

    def __init__(self, path: Path) -> None:
        self.run = Run.open(path)
        self.parts = self.run.splits()
        self._config = _changed_at(path / "config.json")
        self._empty: LanguageModel | None = None  # to be filled: making one takes longer

    def refresh(self) -> None:
        """Take note of options that were changed on the way."""
        now = _changed_at(self.run.path / "config.json")
        if now != self._config:
            text = self.run.config.sha256
            self.run, self._config = Run.open(self.run.path), now
            if self.run.config.sha256 != text:  # another run in its place
                self.parts = self.run.splits()

    def model(self, published: Path) -> tuple[LanguageModel, Place]:
        """The weights of a moment ago where a training leaves them, else the last ones saved."""
        saved = self.run.path / "state.safetensors"
        newer = _changed_at(published) >= _changed_at(saved)
        if newer and (left := moment.read(published)) is not None:
            weights, place = left
        elif saved.exists():
            tensors, numbers = checkpoints.read(saved, "state")
            weights = {n.removeprefix("weights/"): t for n, t in tensors.items()}
            place = Place(*(int(numbers[name]) for name in ("step", "epoch", "index")))
        else:
            raise UserError(
                "there are no weights yet",
                hint="they come with the first update; from another process, when it saves them",
            )
        return self._filled(weights), place

    def _filled(self, weights: dict[str, torch.Tensor]) -> LanguageModel:
        if self._empty is None or self._empty.config != self.run.config.model:
            self._empty = fresh_model(self.run.config).double().eval()  # as it is looked at
        model = copy.deepcopy(self._empty)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        return model

    def window(self, place: Place, steps: int | None = None) -> Window:
        """What lane 0 read in the last update, and what it read before: so many steps in all."""
        settings = self.run.config.training
        steps = steps or 2 * min(max(settings.reading.window, FEWEST), MOST)
        epoch = place.epoch if place.index else max(place.epoch - 1, 0)
        reads = one_pass(self.parts.train, settings.reading, seed=settings.seed, epoch=epoch)
        last = min(place.index or len(reads), len(reads)) - 1
        target, pieces = reads[last].y[0, -1:], []
        while last >= 0 and sum(map(len, pieces)) < steps:
            segment = reads[last]
            pieces.append(segment.x[0, -segment.scored :])
            last = last - 1 if settings.reading.sampling == "sequential" else -1
        ids = torch.cat([*reversed(pieces), target])[-steps - 1 :]
        starts = len(ids) - 1 - np.cumsum([len(piece) for piece in pieces])
        return Window(ids.numpy(), sorted(int(s) for s in starts if s >= 0))

    def passage(self, published: Path) -> tuple[Passage, Place, Window]:
        """The model of now, having read the window of now."""
        self.refresh()
        model, place = self.model(published)
        window = self.window(place)
        return Passage.read(model, window.ids), place, window


def frame(slide: Slide, published: Path) -> dict[str, Any]:
    """One picture: norms[i, k] = ‖∂L_t/∂h_{t-k}‖ for the losses of the later half of the text."""
    passage, place, window = slide.passage(published)
    lags = by_lag(passage, len(passage) // 2)
    used = slide.run.config.training.reading.window
    h = passage.top_states()
    return {
        "step": place.step,
        "tokens": [alone(slide.run.vocab, t) for t in slide.run.vocab.to_tokens(window.ids)],
        "edges": window.edges,
        "first": lags.first,
        "norms": packed(lags.norms),
        "nats": short(passage.nats.numpy()),
        "window": used,
        "carry": str(slide.run.config.training.reading.carry),
        "truncates": slide.run.config.training.reading.carry_used.windows,
        "again": again.gradients(slide.run.path),
        "saturation": float((h.abs() > SATURATED).double().mean()),
        **shares(lags, used),
    }


def shares(lags: ByLag, used: int) -> dict[str, Any]:
    """What each window keeps, and the windows that keep 90 and 99 %."""
    most = max(2 * lags.lags, used)
    share = np.append(lags.share, np.ones(most - len(lags.share)))
    return {
        "kept": short(np.cumsum(share) / np.arange(1, most + 1)),  # lags.kept(1), lags.kept(2), …
        "half": lags.horizon(0.5),
        "ninety": lags.horizon(0.9),
        "keep90": lags.recommend(0.9),
        "keep99": lags.recommend(0.99),
        "cut": 1 - lags.kept(used),
        "settled": lags.settled,
    }


def spectrum(slide: Slide, published: Path) -> dict[str, Any]:
    """Singular values of ∂h_{t+k}/∂h_t, saturation of every unit, the spectral radius of W_hh."""
    passage, place, _ = slide.passage(published)
    lags = tuple(k for k in SPECTRUM if k <= len(passage))
    values = singular_values(passage, lags)
    seen = units(passage)
    return {
        "step": place.step,
        "lags": list(values.lags),
        "values": short(values.values),
        "saturation": short(np.concatenate(seen.saturation)),
        "saturated": seen.saturated,
        "dead": seen.dead,
        "units": seen.total,
        "radius": spectral_radius(passage),
    }


def carries(slide: Slide, published: Path) -> dict[str, Any]:
    """Every carry on the same window, against the full gradient."""
    slide.refresh()
    model, place = slide.model(published)
    used = min(slide.run.config.training.reading.window, MOST)
    ids = slide.window(place, steps=4 * used).ids
    used = min(used, (len(ids) - 2) // 2)
    scores = compare_carries(model, ids, used, draws=DRAWS)
    names = ("cosine", "norm_ratio", "bias", "deviation", "steps_kept")
    return {
        "step": place.step,
        "window": used,
        "steps": len(ids) - 1,
        "carries": [
            {"name": s.name, "random": s.carry.random, **{n: getattr(s, n) for n in names}}
            for s in scores
        ],
    }


def _changed_at(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0
