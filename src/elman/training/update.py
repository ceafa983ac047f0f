"""What an update of a training is, which of three ways runs it, and running it.

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
from elman.training import piecewise
from elman.training.captured_update import CapturedUpdate
from elman.training.native_update import NativeUpdate
from elman.training.piecewise import Latest
from elman.training.segments import Segment
from elman.training.whole_update import Outcome, Read, WholeUpdate

if TYPE_CHECKING:
    from elman.training.loop import Training


Seen = tuple[str | None, tuple[bool, ...]]
"""Why updates are not all the same work, if they are not, and which parameters move."""


class Choice(NamedTuple):
    """How a training updates: in one go, or (None) piece by piece; and why."""

    update: WholeUpdate | None
    explanation: Explanation

    @property
    def averages(self) -> bool:
        """Whether updates take the weights into their average themselves."""
        return self.update is not None and self.update.averages


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


def most_pending(training: "Training") -> int:
    """How many updates may be waited for at once."""
    whole = training._choice.update
    if whole is None or (training.average.averages and not whole.averages):
        return 0
    return whole.late


def run_update(training: "Training", segments: list[Segment], rate: float) -> Outcome:
    """Move the weights once; what is raised meanwhile, by a hook or a model of the caller's, leaves
    all as it was."""
    t, noise, whole = training, training.reader.noise, training._choice.update
    chance, carried, averaged = t.chance, t.carried.value, t.average.count
    drawn = noise.state_dict()
    try:
        if whole is not None:
            return _run_whole(training, whole, segments, rate)
        return piecewise.update(training, [(s, *t.prepare(s)) for s in segments], rate)
    except BaseException:
        t.chance, t.carried.value, t.average.count = chance, carried, averaged
        noise.generators.clear()
        noise.load_state_dict(drawn)
        raise


def _run_whole(
    training: "Training", whole: WholeUpdate, segments: list[Segment], rate: float
) -> Outcome:
    """An update in one go."""
    t, share, first = training, 1 / len(segments), segments[0]
    reads = [Read(*t.prepare(s), s.fresh, share * s.scored / s.divisor, s.cut) for s in segments]
    whole.start_from(None if first.fresh else t.carried.value)
    if whole.averages:
        whole.average(t.average.share(t._progress_after(len(segments))))
    t.latest = Latest(reads[0].x, whole.state, reads[0].masks, reads[0].y, reads[0].cut)
    outcome = whole(reads, rate)
    tokens = t.groups.batch * sum([segment.scored for segment in segments])
    t.carried.value = whole.state
    t._passes.look_ahead(t.epoch, t.index + len(segments))

    def summed() -> tuple[float, float]:
        nats, norm = outcome()
        return nats * tokens, norm

    return summed
