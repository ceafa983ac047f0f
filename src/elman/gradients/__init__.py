"""Gradients through time: what flows (carry), what is kept (memory), in which order
steps run (time), and the one recurrence.

See `docs/gradients.md` for a guide and `docs/equations.md` for the equations behind it.
"""

from elman.gradients import equations
from elman.gradients.carry import Carry, Full, Given, Polynomial, Randomized, Sliding, Truncated
from elman.gradients.chunks import Chunked, Stepped, Time
from elman.gradients.forward_accumulation import forward_accumulation
from elman.gradients.memory import Checkpointed, Memory, Stored
from elman.gradients.through_time import backward_through_time

__all__ = [
    "Carry",
    "Checkpointed",
    "Chunked",
    "Full",
    "Given",
    "Memory",
    "Polynomial",
    "Randomized",
    "Sliding",
    "Stepped",
    "Stored",
    "Time",
    "Truncated",
    "backward_through_time",
    "equations",
    "forward_accumulation",
]
