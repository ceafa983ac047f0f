"""Where a verb computes."""

from elman.cli.console import note


def use_threads(count: int) -> None:
    """Compute on so many threads from now on; 0: as many as there are."""
    from elman.runs import device

    device.use_threads(count)


def pick(name: str) -> str:
    """The device of this name, refused where it is not here; says where no kernel of ours runs."""
    from elman.runs import device

    chosen = device.pick(name)
    if remark := device.remark(chosen):
        note(remark)
    return chosen
