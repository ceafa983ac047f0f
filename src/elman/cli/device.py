"""Where a verb computes."""

from elman.cli.console import note
from elman.runs.device import use_threads as use_threads


def pick(name: str) -> str:
    """The device of this name, refused where it is not here; says where no kernel of ours runs."""
    from elman.runs import device

    chosen = device.pick(name)
    if remark := device.remark(chosen):
        note(remark)
    return chosen
