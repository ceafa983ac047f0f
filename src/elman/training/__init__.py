"""Training: what an update reads, how it moves the weights, and the loop that yields records."""

from elman.training.loop import Settings, Training
from elman.training.optimisation import Optimisation
from elman.training.processes import Processes
from elman.training.records import (
    Change,
    Diagnosis,
    Epoch,
    Record,
    Result,
    Sample,
    Update,
    Validation,
)
from elman.training.segments import Reading
from elman.training.state import CarriedState

__all__ = [
    "CarriedState",
    "Change",
    "Diagnosis",
    "Epoch",
    "Optimisation",
    "Processes",
    "Reading",
    "Record",
    "Result",
    "Sample",
    "Settings",
    "Training",
    "Update",
    "Validation",
]
