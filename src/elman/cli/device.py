"""Where a verb computes."""

from elman.runs.device import pick as pick
from elman.runs.device import use_threads as use_threads
