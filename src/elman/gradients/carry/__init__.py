"""Carry: what part of the gradient flows back from one moment to the one before.

    dh_t = dhs_t + ξ_{t+1} (∂h_{t+1}/∂h_t)ᵀ dh_{t+1}

A carry is a choice of ξ_1 … ξ_T. ξ_1 = 1 always: the caller's h_0 keeps its gradient, and a caller
that carries a state between calls detaches it, as in PyTorch. All layers and directions share one
ξ: a cut is a moment in time, not a place in the stack.

A carry of your own is one class (a frozen dataclass) that answers what `Carry` asks (`base.py`);
only `weights` has no answer by default. To have a name in `Reading` and on the command line it
needs one line in `CARRIES` (`table.py`).
"""

from elman.gradients.carry.base import Block, Carry, Cuts, checked_carry
from elman.gradients.carry.full import Full
from elman.gradients.carry.given import Given, InTensor
from elman.gradients.carry.randomized import Polynomial, Randomized
from elman.gradients.carry.sliding import Sliding
from elman.gradients.carry.table import CARRIES, Named, name_of, named
from elman.gradients.carry.truncated import Truncated

__all__ = [
    "CARRIES",
    "Block",
    "Carry",
    "Cuts",
    "Full",
    "Given",
    "InTensor",
    "Named",
    "Polynomial",
    "Randomized",
    "Sliding",
    "Truncated",
    "checked_carry",
    "name_of",
    "named",
]
