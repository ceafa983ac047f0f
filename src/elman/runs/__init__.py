"""Runs: a training as a folder that can be read, resumed and compared."""

from elman.runs.config import (
    Config,
    check_fits,
    fresh_model,
    fresh_training,
    options_of,
    with_options,
)
from elman.runs.folder import Run
from elman.runs.training import conclude, tell, train

__all__ = [
    "Config",
    "Run",
    "check_fits",
    "conclude",
    "fresh_model",
    "fresh_training",
    "options_of",
    "tell",
    "train",
    "with_options",
]
