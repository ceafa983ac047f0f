"""A cheap look at the gradient while a model trains."""

from dataclasses import asdict, dataclass
from typing import Any

from elman.diagnostics.lags import by_lag
from elman.diagnostics.passage import Passage
from elman.diagnostics.units import SATURATED
from elman.language_model import LanguageModel

STEPS, LAGS = 97, 48


@dataclass(frozen=True)
class Glance:
    """How far back the gradient reached at one moment of a training, over a short passage."""

    half_within: int
    ninety_within: int
    window_keeps: float
    decay_per_step: float | None
    saturation: float
    """share of |h| > 0.97 over the passage"""

    def json(self, step: int) -> dict[str, Any]:
        """The record as it stands in metrics.jsonl."""
        return {"kind": "diagnosis", "step": step, **asdict(self)}


def glance(model: LanguageModel, ids: Any, window: int) -> Glance | None:
    """Measure the first 97 tokens of `ids`, 48 lags back; None for what has no such passage.

    Draws no random number, so a training goes on the same whether it is looked at or not.
    """
    if not model.recurrent or len(ids) < 3:
        return None
    passage = Passage.read(model, ids[:STEPS])
    lags = by_lag(passage, min(LAGS, len(passage) - 1))
    return Glance(
        half_within=lags.horizon(0.5),
        ninety_within=lags.horizon(0.9),
        window_keeps=lags.kept(window),
        decay_per_step=lags.decay if lags.decay > float("-inf") else None,
        saturation=float((passage.top_states().abs() > SATURATED).double().mean()),
    )
