"""What is known of chunks of time: how those of the last call met, and how much they overlap."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch

from elman.gradients.chunks import Chunked

FIRST = 128
"""Steps of overlap before anything has been measured."""
LEAST = 8
"""Steps of a chunk, and of an overlap that is measured, at least."""
AIM, ENOUGH, TOO_MUCH = 1 / 4, 1 / 2, 1 / 8
"""The part of the tolerance at which a measured overlap aims, and parts between which it is left
alone: rounding keeps two trajectories apart, and no overlap brings them closer than that."""
LONGEST_WAIT = 64
"""Calls that are run step after step, at most, before chunks are tried again."""


@dataclass(frozen=True)
class Side:
    """What happened at the seams of one pass, forward or backward; of several, the worst."""

    chunks: int
    overlap: int
    sweeps: int
    difference: float
    """The largest ‖s_{i+1} - e_i‖, relative to the largest ‖e‖ at any seam of the same row."""
    contraction: float
    """κ: the largest ratio by which two trajectories came closer."""
    bound: float
    """What the error at any seam is at most, given κ; relative as `difference`."""
    tolerance: float
    stepped: str = ""
    """Why steps ran one after the other; empty where they did not."""
    in_part: str = ""
    """Why some layer or piece of time did, where others ran in chunks."""

    def joined(self, other: Side) -> Side:
        """Both as one: the worst of each."""
        if self.stepped:
            return self if other.stepped else replace(other, in_part=self.stepped)
        if other.stepped:
            return replace(self, in_part=other.stepped)
        return Side(
            max(self.chunks, other.chunks),
            max(self.overlap, other.overlap),
            max(self.sweeps, other.sweeps),
            max(self.difference, other.difference),
            max(self.contraction, other.contraction),
            max(self.bound, other.bound),
            max(self.tolerance, other.tolerance),
            in_part=self.in_part or other.in_part,
        )

    def __str__(self) -> str:
        if self.stepped:
            return f"step after step: {self.stepped}"
        sweeps = "1 sweep" if self.sweeps == 1 else f"{self.sweeps} sweeps"
        rest = f"; in part step after step: {self.in_part}" if self.in_part else ""
        return (
            f"{self.chunks} chunks, overlap {self.overlap}, {sweeps}; largest difference at a seam "
            f"{self.difference:.1e}, bound {self.bound:.1e}, tolerance {self.tolerance:.1e}{rest}"
        )


class Seams(NamedTuple):
    """What the last call's seams looked like; None: no such pass was made in chunks."""

    forward: Side | None = None
    backward: Side | None = None

    def __str__(self) -> str:
        return f"forward:  {self.forward or 'not run'}\nbackward: {self.backward or 'not run'}"


@final
class Chunks:
    """What a module knows of its chunks between calls: overlaps, and the last call's seams.

    `state` is a tensor, so that it is saved with a training: the next call of a training that is
    resumed runs the same chunks. For each pass: the overlap, the overlap that was found to
    be needed since, calls still to be run step after step, and how many the next time.
    """

    PASSES = ("forward", "backward")

    def __init__(self, settings: Chunked, device: torch.device | None = None) -> None:
        self.settings = settings
        first = FIRST if settings.overlap == "auto" else settings.overlap
        self.state = torch.tensor([first, 0, 0, 1] * 2, dtype=torch.int64, device=device)
        self.numbers = self.state.tolist() if self.state.device.type != "meta" else []
        self.seams = Seams()

    def begin(self) -> None:
        """A new call: from now on the overlap is what the last calls needed."""
        self.numbers = self.state.tolist()
        for i in range(0, len(self.numbers), 4):
            overlap, needed, wait, _ = self.numbers[i : i + 4]
            if needed:
                # at once where more is needed, slowly where less is: it differs from text to text
                overlap = max(needed, overlap - overlap // 8)
            self.numbers[i : i + 3] = overlap, 0, max(0, wait - 1)
            if wait == 1 and self.settings.overlap == "auto":
                self.numbers[i] = FIRST
        self._keep()
        self.seams = Seams()

    def foreseen(self) -> Chunks:
        """What would be known in a call that began now."""
        copy = Chunks(self.settings)
        copy.state = self.state.cpu().clone()
        copy.begin()
        return copy

    def overlap(self, side: str) -> int:
        return self.numbers[4 * self.PASSES.index(side)]

    def waits(self, side: str) -> int:
        """For how many calls yet this pass is run step after step."""
        return self.numbers[4 * self.PASSES.index(side) + 2]

    def met(self, side: str, result: Side, first: float) -> None:
        """A pass whose chunks met, with differences of `first` after the first sweep.

        A difference falls as e^{-rw} with the overlap w; r is what was measured, and the overlap
        that is needed the one at which a part of the tolerance would be left.
        """
        i = 4 * self.PASSES.index(side)
        self.numbers[i + 3] = 1
        if self.settings.overlap == "auto":
            needed = _needed(result.overlap, first, result.tolerance)
            self.numbers[i + 1] = max(self.numbers[i + 1], needed)
        self.note(side, result)

    def missed(self, side: str, result: Side) -> None:
        """A pass whose chunks did not meet: leave it alone for a while."""
        i = 4 * self.PASSES.index(side)
        wait = self.numbers[i + 3]
        self.numbers[i + 2] = 1 + wait  # the call itself counts
        self.numbers[i + 3] = min(2 * wait, LONGEST_WAIT)
        self.note(side, result)

    def note(self, side: str, result: Side) -> None:
        before = getattr(self.seams, side)
        self.seams = self.seams._replace(
            **{side: result if before is None else before.joined(result)}
        )
        self._keep()

    def _keep(self) -> None:
        self.state.copy_(torch.tensor(self.numbers, device="cpu"))


def _needed(overlap: int, difference: float, tolerance: float) -> int:
    """The overlap that leaves a part of the tolerance, were log(difference) a straight line."""
    if overlap == 0 or not difference < 1:
        return max(LEAST, 2 * overlap)
    if difference == 0:
        return max(LEAST, overlap // 2)
    if TOO_MUCH * tolerance <= difference <= ENOUGH * tolerance:
        return max(LEAST, overlap)
    straight = overlap * math.log(AIM * tolerance) / math.log(difference)
    return max(LEAST, min(8 * overlap, math.ceil(straight)))
