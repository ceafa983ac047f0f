"""Where a verb computes."""

<<<<<<< HEAD
from elman.runs.device import pick as pick
from elman.runs.device import use_threads as use_threads
=======
from elman.cli.console import note


def pick(name: str) -> str:
    """The device of this name, refused where it is not here; says where no kernel of ours runs."""
    from elman.runs import device

    chosen = device.pick(name)
    if remark := device.remark(chosen):
        note(remark)
    return chosen
>>>>>>> main
