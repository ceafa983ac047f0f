"""Where a verb computes."""

from elman.runs.device import pick as pick
