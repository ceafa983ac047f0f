"""What every test and every example of a docstring shares."""

import random
from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def cells_as_they_were() -> Iterator[None]:
    """A cell that a test declares ends with it: the next one is to find the table as shipped."""
    from elman.cells import CELLS

    before = dict(CELLS)
    yield
    CELLS.clear()
    CELLS.update(before)


@pytest.fixture(autouse=True)
def same_chance() -> None:
    """What a test draws without a seed is the same alone, in any order and beside any others."""
    import torch  # late: tests/conftest.py tells it something first

    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
