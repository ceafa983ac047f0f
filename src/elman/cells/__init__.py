"""Cells: one step of a recurrence, its equation and its derivative.

A cell reads an input x_t and the state before it, and writes the state after it. All cells hold
PyTorch's tensors in PyTorch's orientation and gate order, so weights interchange with `torch.nn`:

    a_ih = x_t W_ihᵀ + b_ih          (gates · hidden)
    a_hh = h_{t-1} W_hhᵀ + b_hh

and differ in what they make of a_ih and a_hh. `base.py` says what a cell is, `table.py` lists them.
"""

from elman.cells.base import Cell, Gradients, Slopes, State, Weights, pull_back, read
from elman.cells.table import CELLS, is_torchs, models, named, of_mode, of_model, with_noise

__all__ = [
    "CELLS",
    "Cell",
    "Gradients",
    "Slopes",
    "State",
    "Weights",
    "is_torchs",
    "models",
    "named",
    "of_mode",
    "of_model",
    "pull_back",
    "read",
    "with_noise",
]
