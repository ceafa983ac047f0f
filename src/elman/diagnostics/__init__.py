"""See the gradient: how far back it reaches, where it dies, what a truncation cuts off.

Everything starts from a `Passage`: a model that has read a piece of text (or any sequence), with
all of its states and the pull of every loss. The functions take a passage and return small
dataclasses of arrays, which `elman.figures.gradients` draws and `elman gradients` puts into words.
"""

from elman.diagnostics.attribution import Attribution, attribute, telling
from elman.diagnostics.carries import CarryScore, compare_carries
from elman.diagnostics.clipping import Clipping, StepBound, clipping, step_bound
from elman.diagnostics.following import correlations, most_similar
from elman.diagnostics.forgetting import Forgetting, forgetting
from elman.diagnostics.glance import Glance, glance
from elman.diagnostics.jacobians import (
    SingularValues,
    jacobian,
    lyapunov_exponents,
    singular_values,
    spectral_radius,
)
from elman.diagnostics.lags import ByLag, by_lag
from elman.diagnostics.passage import Passage
from elman.diagnostics.units import Units, units

__all__ = [
    "Attribution",
    "ByLag",
    "CarryScore",
    "Clipping",
    "Forgetting",
    "Glance",
    "Passage",
    "SingularValues",
    "StepBound",
    "Units",
    "attribute",
    "by_lag",
    "clipping",
    "compare_carries",
    "correlations",
    "forgetting",
    "glance",
    "jacobian",
    "lyapunov_exponents",
    "most_similar",
    "singular_values",
    "spectral_radius",
    "step_bound",
    "telling",
    "units",
]
