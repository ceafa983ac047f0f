"""The one table of carries that have names: a carry is its own file and one line here."""

from collections.abc import Callable
from typing import NamedTuple

from elman.errors import UserError
from elman.gradients.carry.base import Carry
from elman.gradients.carry.full import Full
from elman.gradients.carry.randomized import Randomized
from elman.gradients.carry.sliding import Sliding
from elman.gradients.carry.truncated import Truncated


class Named(NamedTuple):
    """A carry as `Reading` and the command line know it."""

    make: Callable[[int, int], Carry]
    """The carry for segments of `window` steps and `history` steps read again before them."""
    suggests: Callable[[int], dict[str, int]] = lambda window: {}
    """Options of a reading that it wants in other than their usual values, unless they are said."""
    whole: bool = False
    """Whether all of a lane is one segment, so that a pass over the text is one update."""


def _sliding(window: int, history: int) -> Carry:
    if history < 1:
        raise UserError(
            f"history={history} with carry=sliding: at least 1 step is read again before a window",
            hint=f"history={window}, or carry=truncated",
        )
    return Sliding(every=window, steps=window + history)


def _randomized(window: int, history: int) -> Carry:
    return Randomized(keep=1 - 1 / _mean_length(window), seed=0)


def _polynomial_mean(window: int, history: int) -> Carry:
    return Randomized.polynomial(mean=_mean_length(window), seed=0)


def _mean_length(window: int) -> int:
    if window < 2:
        raise UserError(
            f"window={window} would cut before every step",
            hint="window is the mean length of a segment here: at least 2",
        )
    return window


CARRIES: dict[str, Named] = {
    "truncated": Named(lambda window, history: Truncated(window)),
    "sliding": Named(_sliding, lambda window: {"history": window}),
    "randomized": Named(_randomized),
    "polynomial": Named(_polynomial_mean),
    "full": Named(lambda window, history: Full(), lambda window: {"memory": 64 << 20}, whole=True),
}
"""Every carry with a name. A seed is 0 here: a training draws from a seed of its own."""


def named(name: str, window: int, history: int = 0) -> Carry:
    """The carry of this name, for segments of `window` steps.

    >>> named("sliding", window=35, history=10)
    Sliding(every=35, steps=45)
    """
    if name not in CARRIES:
        raise UserError(f"unknown carry {name!r}", hint=f"one of {', '.join(CARRIES)}")
    return CARRIES[name].make(window, history)


def name_of(carry: Carry, window: int, history: int) -> str | None:
    """The name by which `CARRIES` makes this very carry, whatever its seed; None: it has none."""
    if carry.name not in CARRIES:
        return None
    same = CARRIES[carry.name].make(window, history).seeded(0) == carry.seeded(0)
    return carry.name if same else None
