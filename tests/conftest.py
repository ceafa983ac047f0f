"""What every test shares: a quiet hypothesis, and The Time Machine where it can be found."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("elman", deadline=None, print_blob=True)
settings.load_profile("elman")


@pytest.fixture(scope="session")
def time_machine_file() -> Path:
    """The notes' text, looked up in the folders of ELMAN_DATA."""
    for folder in filter(None, os.environ.get("ELMAN_DATA", "").split(os.pathsep)):
        path = Path(folder) / "timemachine.txt"
        if path.exists():
            return path
    pytest.skip("timemachine.txt is in no folder of ELMAN_DATA")
