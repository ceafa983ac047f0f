"""The one table of cells: a cell is its own file and one line here."""

from __future__ import annotations

from elman.cells.base import Cell
from elman.cells.coupled import COUPLED
from elman.cells.elman import RELU, TANH
from elman.cells.gru import GRU
from elman.cells.indrnn import INDRNN
from elman.cells.janet import JANET
from elman.cells.layer_norm_lstm import LAYER_NORM_LSTM
from elman.cells.linear import LINEAR
from elman.cells.lstm import LSTM
from elman.cells.mgu import MGU
from elman.cells.noisy import noisy
from elman.cells.peephole import PEEPHOLE
from elman.cells.slstm import SLSTM
from elman.cells.ugrnn import UGRNN
from elman.errors import UserError

CELLS: dict[str, Cell] = {
    cell.name: cell
    for cell in (
        *(TANH, RELU, LINEAR, GRU, LSTM),
        *(MGU, UGRNN, JANET, COUPLED, PEEPHOLE, INDRNN, SLSTM, LAYER_NORM_LSTM),
    )
}
"""Every cell by name. One of your own: `@elman.cell(…)`, or `CELLS["name"] = Name()`."""


_NOISY: dict[str, Cell] = {}
"""Cells with noise that modules run now: known by name, but not part of the table."""


def named(name: str) -> Cell:
    """The cell of this name: `tanh`, `relu`, `linear`, `gru`, `lstm` or one that was added."""
    cell = CELLS.get(name) or _NOISY.get(name)
    if cell is None:
        raise UserError(f"unknown cell {name!r}", hint=f"one of {', '.join(CELLS)}")
    return cell


def with_noise(name: str, zoneout: float, updates: float, drawn: bool) -> str:
    """The name of this cell with zoneout and recurrent dropout; not `drawn`: their expectation."""
    cell = noisy(named(name), zoneout, updates, drawn)
    _NOISY[cell.name] = cell
    return cell.name


def models() -> dict[str, Cell]:
    """Every cell by the name that models and the command line use: tanh is `elman` there."""
    return {cell.model: cell for cell in CELLS.values()}


def of_model(name: str) -> Cell:
    """The cell that models call by this name."""
    known = models()
    if name not in known:
        raise UserError(f"unknown cell {name!r}", hint=f"one of {', '.join(known)}")
    return known[name]


def of_mode(mode: str) -> Cell:
    """The cell of a `torch.nn` module, by its `mode`."""
    return next(cell for cell in CELLS.values() if cell.torch_mode == mode)


def is_torchs(cell: Cell) -> bool:
    """Whether a `torch.nn` module computes this very cell, not only has its parameters."""
    return cell.torch_mode is not None and of_mode(cell.torch_mode) is cell
