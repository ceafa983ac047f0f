"""Gradients through time: what flows (carry), what is kept (memory), and the one recurrence.

See `docs/gradients.md` for a guide.
"""

from elman.gradients.carry import Carry, Full, Polynomial, Randomized, Sliding, Truncated
from elman.gradients.memory import Checkpointed, Memory, Stored

__all__ = [
    "Carry",
    "Checkpointed",
    "Full",
    "Memory",
    "Polynomial",
    "Randomized",
    "Sliding",
    "Stored",
    "Truncated",
]
