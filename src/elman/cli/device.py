"""Where a verb computes."""

from elman.device import pick as pick
