"""Scoring the held-out text while a training goes on: when, and what follows from the score."""

from typing import TYPE_CHECKING, Any

from elman.scoring import metrics
from elman.training import pending
from elman.training.records import Validation

if TYPE_CHECKING:
    from elman.training.loop import Training

LANES = 16


def is_due(training: "Training") -> bool:
    """Whether the text is scored before the next update: every so many of them, and at the end."""
    t, every = training, training.settings.validate_every
    if t.validation_ids is None or t.validated_at == t.step or t.step == 0:
        return False
    return t.finished or (every > 0 and t.step % every == 0)


def validate(training: "Training") -> Validation:
    """Score the held-out text with the averaged weights, where weights are averaged."""
    assert training.validation_ids is not None
    pending.hear_all(training)
    with training.average.applied():
        nats = _held_out_nats(training, training.validation_ids)
    improved = nats < training.best
    _note(training, nats, improved)
    training._lap()
    perplexity = metrics.perplexity(nats)
    return Validation(training.step, training.epoch, nats, perplexity, improved)


def _note(training: "Training", nats: float, improved: bool) -> None:
    """Remember the best score; lower the learning rate after too many that are no better."""
    t, optimisation = training, training.settings.optimisation
    t.worse = 0 if improved else t.worse + 1
    t.plateau_worse = 0 if improved else t.plateau_worse + 1
    if improved:
        t.best, t.best_step = nats, t.step
    elif t.plateau_worse > optimisation.plateau_patience:
        t.plateau *= optimisation.plateau_factor
        t.plateau_worse = 0
    t.validated_at = t.step


def _held_out_nats(training: "Training", ids: Any) -> float:
    """The mean over the held-out tokens, of which every process scores some lanes."""
    model, groups = training.model, training.groups
    if not groups.divided:
        return metrics.evaluate(model, ids, lanes=LANES).nats_per_token
    mine = [metrics.nats_of_lanes(model, ids, LANES, part) for part in groups.of(LANES)]
    return sum(groups.numbers(mine)) / (len(ids) - 1)
