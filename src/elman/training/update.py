"""What an update of a training is, and which of three ways runs it.

    h_0 ← the state the last window ended in         cut off from what made it
    L   ← mean nats of the window's tokens           lookup → recurrence → output → loss
    g   ← ∂L/∂w                                      back through time, as far as the carry says
    g   ← min(1, θ/‖g‖) g                            clipping
    w   ← optimizer(w, g)                            unless L or ‖g‖ is not finite

    piecewise   any model, any segment: autograd, part by part (`piecewise.py`)
    native      on a CPU: calls over memory and jobs made once, no autograd (`native_update.py`)
    captured    on a GPU: a CUDA graph for each kind of segment (`captured_update.py`)

At the notes' sizes Python costs a CPU a tenth of an update, and a GPU more than the mathematics. An
update that is the same work on the same shapes every time needs none: what differs from one to the
next (ids, masks, learning rate, state) lies in tensors. `choose` takes the fastest way that suits,
and says why the others do not: `elman.kernels.explain(training)`.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from elman.kernels import Explanation, allows, explain
from elman.kernels.cpu import KERNEL
from elman.language_model.masks import NO_MASKS
from elman.training.captured_update import CapturedUpdate
from elman.training.native_update import NativeUpdate
from elman.training.whole_update import WholeUpdate

if TYPE_CHECKING:
    from elman.training.loop import Training


Seen = tuple[str | None, tuple[bool, ...]]
"""Why updates are not all the same work, if they are not, and which parameters move."""


class Choice(NamedTuple):
    """How a training updates: in one go, or (None) piece by piece; and why."""

    update: WholeUpdate | None
    explanation: Explanation


def seen(training: "Training") -> Seen:
    """What the owner may change about the model while it is trained, as it is now."""
    moves = tuple([p.requires_grad for p in training.parameters])
    return training.reader.irregular(), moves


WAYS = CapturedUpdate, NativeUpdate
"""In one go, the fastest first."""


def choose(training: "Training") -> Choice:
    """The fastest way to run every update of this training, and why not the others."""
    reasons = {}
    for way in WAYS:
        reason = _differs(training) or way.refuses(training)
        if reason is None:
            return Choice(way.of(training), Explanation(way.name, reasons))
        reasons[way.name] = reason
    return Choice(None, Explanation("piecewise", reasons))


def _differs(training: "Training") -> str | None:
    """Why two updates of this training are not the same work on the same shapes."""
    reading = training.settings.reading
    if reading.carry_used.exact:
        return f"carry={reading.carry} reads whole lanes"
    if reading.memory:
        return "a memory budget has states computed again"
    return training.reader.irregular()


def engine(training: "Training", update: Explanation) -> str:
    """All that computes an update of this training, in one line, and why nothing faster does."""
    reasons = dict.fromkeys(r for r in update.reasons.values() if "the model is on" not in r)
    why = f" ({'; '.join(reasons)})" if reasons else ""
    output = "native" if KERNEL.library is not None and allows(KERNEL.name) else "plain"
    where = f"{output} output, {training.device.type}, torch {torch.__version__}"
    return f"{update.runs} updates{why}, {_kernel(training)}, {where}"


def _kernel(training: "Training") -> str:
    if training.reader.recurrence is None:
        return "no kernel of elman's"
    rows = training.settings.reading.batch_size
    ids = torch.zeros(1, rows, dtype=torch.int64, device=training.device)
    with torch.no_grad(), training.cast():
        xs = training.model.inputs(ids, NO_MASKS)
        return f"{explain(training.reader.recurrence, xs).runs} kernel"
