"""Updates whose numbers are not known yet: a GPU may still be working on them.

An update is made, or on its way, when its record is told; the record's nats and ‖g‖ are waited for
when they are first looked at, and meanwhile the next update can be prepared. One that turns out not
to be finite has moved nothing, nor have those after it: the training goes back to before it.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from elman.errors import WorkFailed
from elman.scoring import metrics
from elman.training.divergence import diverged
from elman.training.piecewise import Latest
from elman.training.records import Epoch, Tally, Update
from elman.training.whole_update import Outcome

if TYPE_CHECKING:
    from elman.training.loop import Training


@dataclass(frozen=True)
class Before:
    """Where a training stood before an update."""

    step: int
    epoch: int
    index: int
    tokens: float  # of the pass so far, as its tally has them
    seconds: float
    averaged: int  # updates whose weights the average has taken in

    @classmethod
    def now(cls, training: "Training") -> "Before":
        """Where it stands."""
        t, tally = training, training.tally
        return cls(t.step, t.epoch, t.index, tally.tokens, tally.seconds, t.average.count)


@dataclass(eq=False)
class Pending:
    """An update that was made, or is being made by a GPU; `numbers` (Σ nats, ‖g‖) once known."""

    outcome: Outcome
    tokens: int
    before: Before
    tally: Tally
    latest: Latest | None
    numbers: tuple[float, float] | None = None
    failure: WorkFailed | None = None


def add(training: "Training", pending: Pending, late: int) -> None:
    """Hear of this update once more than `late` of them are waited for."""
    training._pending.append(pending)
    while len(training._pending) > late:
        _hear(training)


def hear_all(training: "Training") -> None:
    """Wait for the numbers of every update."""
    while training._pending:
        _hear(training)


def update_record(training: "Training", pending: Pending, known: dict[str, Any]) -> Update:
    """The record of an update; what is not known yet is waited for when it is looked at."""
    if pending.numbers is None:
        numbers = partial(_update_numbers, training, pending)
        return Update.late(known, numbers, lambda: pending.numbers is not None)
    known |= _update_numbers(training, pending)
    return Update(**known)


def _update_numbers(training: "Training", pending: Pending) -> dict[str, float]:
    """What the record of an update tells of its loss."""
    while pending.numbers is None:
        _hear(training, pending)
    nats, norm = pending.numbers
    nats /= pending.tokens
    return {"nats": nats, "perplexity": metrics.perplexity(nats), "gradient_norm": norm}


def epoch_record(training: "Training", tally: Tally) -> Epoch:
    """The record of a pass, whose last updates may be pending."""
    tokens = int(tally.tokens)
    known: dict[str, Any] = {"step": training.step, "epoch": training.epoch, "tokens": tokens}
    known["tokens_per_second"] = tokens / tally.seconds
    numbers = partial(_epoch_numbers, training, tally, tokens)
    return Epoch.late(known, numbers, lambda: not _waits_for(training, tally))


def _waits_for(training: "Training", tally: Tally) -> bool:
    """Whether an update of this pass has not been heard of yet."""
    return any(pending.tally is tally for pending in training._pending)


def _epoch_numbers(training: "Training", tally: Tally, tokens: int) -> dict[str, float]:
    while _waits_for(training, tally):
        _hear(training)
    nats = tally.nats / tokens
    return {"nats": nats, "perplexity": metrics.perplexity(nats)}


def _hear(training: "Training", wanted: Pending | None = None) -> None:
    """Wait for the numbers of the oldest pending update."""
    if wanted is not None and wanted.failure is not None:
        raise wanted.failure
    pending = training._pending[0]
    nats, norm = pending.outcome()
    if not (math.isfinite(nats) and math.isfinite(norm)):
        raise _failed(training, pending, nats, norm)
    training._pending.popleft()
    pending.numbers, pending.latest = (nats, norm), None
    pending.tally.nats += nats


def _failed(training: "Training", pending: Pending, nats: float, norm: float) -> WorkFailed:
    """Go back to before this update: neither it nor those after it have moved anything."""
    before, tally = pending.before, pending.tally
    training.step, training.epoch, training.index = before.step, before.epoch, before.index
    training.average.count = before.averaged
    assert pending.latest is not None, "what was heard of is no longer pending"
    training.tally, training.latest = tally, pending.latest
    tally.tokens, tally.seconds = before.tokens, before.seconds
    whole, later = training._choice.update, list(training._pending)[1:]
    if whole is not None:
        if later or pending.latest.cut:  # whose gradients lie where those of this one were
            whole.look_back(pending.latest.read)
        whole.forgive()
    failure = diverged(training, nats, norm)
    for waiting in training._pending:
        waiting.failure = failure
    training._pending.clear()
    return failure
