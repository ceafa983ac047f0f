"""What every test and every example of a docstring shares."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def cells_as_they_were() -> Iterator[None]:
    """A cell that a test declares ends with it: the next one is to find the table as shipped."""
    from elman.cells import CELLS

    before = dict(CELLS)
    yield
    CELLS.clear()
    CELLS.update(before)
