"""Runs: a training as a folder that can be read, resumed and compared."""

from elman.runs.folder import (
    Config,
    Run,
    conclude,
    fresh_model,
    fresh_training,
    train,
    with_options,
)

__all__ = [
    "Config",
    "Run",
    "conclude",
    "fresh_model",
    "fresh_training",
    "train",
    "with_options",
]
