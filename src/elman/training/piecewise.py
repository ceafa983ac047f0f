"""An update segment after segment, by autograd: any model, any segment.

The other ways of `update` make the same one in one go, and are held to this.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from elman.language_model import Masks, State
from elman.language_model.nests import joined, rows_of
from elman.training.optimisation import clip_gradients, take_step
from elman.training.processes import GradientSum
from elman.training.segments import Cut, Segment
from elman.training.state import CarriedState
from elman.training.whole_update import Outcome, Read

if TYPE_CHECKING:
    from elman.training.loop import Training

Prepared = tuple[Segment, Tensor, Tensor, Masks]
"""A segment with its ids and targets, of this process's lanes, as they are read."""


class Latest(NamedTuple):
    """What an update has read."""

    x: Tensor
    state: State
    masks: Masks
    y: Tensor
    cut: Cut | None = None

    @property
    def read(self) -> Read:
        """As a `WholeUpdate` takes it."""
        return Read(self.x, self.y, self.masks, cut=self.cut)


def update(training: "Training", prepared: list[Prepared], rate: float) -> Outcome:
    """Read the segments, clip and step; gives the sum of the losses, and ‖g‖."""
    if training.groups.divided:
        nats = _gradient_of_groups(training, prepared)
    else:
        nats = _gradient(training, prepared, training.carried)
    norm = clip_gradients(training.parameters, training.settings.optimisation.clip)
    if math.isfinite(nats) and math.isfinite(norm):
        for group in training.optimizer.param_groups:
            group["lr"] = rate
        take_step(training.optimizer)
    return lambda: (nats, norm)


def _gradient(
    training: "Training", prepared: list[Prepared], carried: CarriedState, group: int = -1
) -> float:
    """The gradient of the segments in `.grad`, and the sum of their losses."""
    training.optimizer.zero_grad()
    with training.chance_of(group):
        return sum(read(training, *each, 1 / len(prepared), carried) for each in prepared)


def _gradient_of_groups(training: "Training", prepared: list[Prepared]) -> float:
    """The same, one group of lanes after the other, summed with those of other processes."""
    total, dim = GradientSum(training.groups, training.parameters), training.reader.lane_dim
    states = []
    for lanes in training.groups.own:
        rows = lanes.rows
        carried = CarriedState(rows_of(training.carried.value, dim, rows))
        part = [(segment, x[rows], y[rows], masks.of(rows)) for segment, x, y, masks in prepared]
        total.add(lanes, _gradient(training, part, carried, lanes.group))
        states.append(carried.value)
    training.carried.value = joined(states, dim)
    return float(total.finish())


def read(
    training: "Training",
    segment: Segment,
    x: Tensor,
    y: Tensor,
    masks: Masks,
    share: float,
    carried: CarriedState,
) -> float:
    """Forward and backward through one segment; returns the sum of its losses in nats."""
    state = None if segment.fresh else carried.value
    training.latest = Latest(x, state, masks, y)
    if training.settings.reading.carry_used.exact:
        return _read_lanes(training, x, y, masks, share / (len(x) * segment.divisor))
    cut = Cut(segment.scored, segment.advance, segment.xi)
    loss, after = training.read_segment(x, y, state, masks, cut)
    carried.carry(after)
    weight = share * segment.scored / segment.divisor
    (loss if weight == 1 else loss * weight).backward()
    return loss.item() * (len(y) * segment.scored)


def _read_lanes(training: "Training", x: Tensor, y: Tensor, masks: Masks, scale: float) -> float:
    """Forward and backward through whole lanes, the losses taken piece by piece."""

    def loss(hs: Tensor, start: int) -> Tensor:
        piece = y[:, start : start + len(hs)]
        return training.reader.mean_nats(hs, piece.T, masks) * (piece.numel() * scale)

    with training.cast(), training.lent():
        total, _ = training.reader.read_back(x, masks, loss)
    return total.item() / scale


def states_of(
    training: "Training", x: Tensor, state: State, masks: Masks, advance: int
) -> tuple[Tensor, State]:
    """h_t of a segment, time first, and the state where the next segment starts."""
    states = training.reader.states
    if advance == x.shape[1]:
        return states(x, state, masks)
    if advance == 0:  # a sliding window that still reaches back to the text's start
        return states(x, state, masks)[0], state
    early, middle = states(x[:, :advance], state, masks)
    late, _ = states(x[:, advance:], middle, masks)
    return torch.cat([early, late]), middle
