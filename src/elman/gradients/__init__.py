"""Gradients through time: what flows (carry), what is kept (memory), and the one recurrence.

See `docs/gradients.md` for a guide and `docs/equations.md` for the equations behind it.
"""

from elman.gradients import equations
from elman.gradients.carry import Carry, Full, Given, Polynomial, Randomized, Sliding, Truncated
from elman.gradients.forward_accumulation import forward_accumulation
from elman.gradients.memory import Checkpointed, Memory, Stored
from elman.gradients.through_time import backward_through_time

__all__ = [
    "Carry",
    "Checkpointed",
    "Full",
    "Given",
    "Memory",
    "Polynomial",
    "Randomized",
    "Sliding",
    "Stored",
    "Truncated",
    "backward_through_time",
    "equations",
    "forward_accumulation",
]
