"""Time: whether steps run one after the other, or in chunks side by side.

`Stepped` is the definition. `Chunked` cuts T steps into C chunks that run as rows of one batch, as
networks that forget allow: each begins from a state found by reading the `overlap` steps before it,
and what was found is compared with what the chunk before arrives at. `recurrence/chunked.py` does
the work and says what is certain about the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from elman.errors import UserError
from elman.options import hold_numbers


class Time:
    """In which order the steps of a sequence run."""

    in_chunks: ClassVar[bool] = False
    """Several stretches of time run side by side."""


@final
@dataclass(frozen=True)
class Stepped(Time):
    """Step after step: the definition."""


@final
@dataclass(frozen=True)
class Chunked(Time):
    """Up to `chunks` stretches of time side by side, agreeing where they meet within `tolerance`.

    A chunk begins from the state (in the backward pass, the pull) that the `overlap` steps beside
    it lead to from nothing. `overlap="auto"` is measured: as many steps as the network needed to
    forget, kept from call to call. Where two chunks do not meet within the tolerance, they run
    again from what was found, up to `sweeps` times; what has not met then is run step after step.

    The tolerance is relative: of ‖h‖ (and ‖c‖), and of the pulls on them. One below the rounding of
    the numbers (2⁻⁷ for bfloat16) is raised to it. The result is never that of `Stepped` to the
    last bit.
    """

    in_chunks: ClassVar[bool] = True

    chunks: int = 64
    overlap: int | Literal["auto"] = "auto"
    tolerance: float = 1e-5
    sweeps: int = 8

    def __post_init__(self) -> None:
        hold_numbers(self)
        _whole("chunks", self.chunks, 2, "Stepped() runs time in one piece")
        _whole("sweeps", self.sweeps, 1, "sweeps=1 never runs a chunk again")
        if self.overlap != "auto":
            _whole("overlap", self.overlap, 0, 'overlap="auto" measures how much is needed')
        real = isinstance(self.tolerance, (int, float)) and not isinstance(self.tolerance, bool)
        if not real or not 0 < self.tolerance < 1 or not math.isfinite(self.tolerance):
            raise UserError(
                f"tolerance={self.tolerance!r} must be a number above 0 and below 1",
                hint="tolerance=1e-5 is a hundredth of a thousandth of the state",
            )


def checked_time(time: object) -> Time:
    """The time itself, if it is one."""
    if not isinstance(time, Time):
        raise UserError(
            f"time must be a Time, got {time!r}", hint="e.g. Stepped(), Chunked(chunks=64)"
        )
    return time


def _whole(name: str, value: object, least: int, hint: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name}={value!r} must be a whole number of at least {least}", hint=hint)
