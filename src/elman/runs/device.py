"""Where a run computes, and on how many threads."""

from elman.errors import UserError
from elman.options import DEVICES

FAST = ("cpu", "cuda")
"""The kinds of device that elman has kernels for."""
MOST_THREADS = 1024
"""More than any machine has use for; a million makes OpenMP end the process."""


def pick(name: str) -> str:
    """The device that PyTorch knows by this name; `auto` is a CUDA GPU where there is one.

    One that PyTorch does not know, or does not find here, is refused.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}", hint=f"one of {DEVICES}") from None
    if device.type == "cpu":
        return "cpu"
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None or here.type != device.type:
        what = "GPU" if device.type == "cuda" else device.type
        other = f", or --device {here.type}" if here else ""
        raise UserError(
            f"--device {name}: PyTorch finds no {what} here", hint=f"--device cpu{other}"
        )
    count = torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise UserError(
            f"--device {name}: PyTorch finds {count} here, counted from {device.type}:0",
            hint=f"--device {device.type}:{count - 1}",
        )
    return name


def is_here(name: str) -> bool:
    """Whether `pick` takes it."""
    try:
        pick(name)
    except UserError:
        return False
    return True


def remark(device: str) -> str:
    """What to say about computing there; "" where elman's own kernels run."""
    kind = device.split(":")[0]
    if kind == "cpu":
        return _about_the_cpu()
    if kind in FAST:
        return ""
    return f"note: elman has no kernels of its own for {kind}: the reference, plain PyTorch, runs"


def _about_the_cpu() -> str:
    from elman.built import NOT_BUILT
    from elman.kernels import choice
    from elman.kernels.cpu import KERNEL

    if KERNEL.library is None:
        if KERNEL.problem not in ("", NOT_BUILT):
            return f"note: elman's CPU kernel does not run: {KERNEL.problem}"
        return (
            "note: elman's CPU kernel was not built, and plain PyTorch is several times slower: "
            "install a C++ compiler (on Debian, apt install g++), then elman again; pip install -v "
            "shows what a compiler says"
        )
    if not choice.allows(KERNEL.name):
        return (
            f"note: ELMAN_KERNELS={choice.requested()} keeps the CPU kernel from running, which is "
            "several times faster: unset it"
        )
    return ""


def use_threads(count: int) -> None:
    """Compute on so many threads from now on; 0: as many as there are, as torch does by itself."""
    import torch

    if not 0 <= count <= MOST_THREADS:
        raise UserError(
            f"threads={count} must be from 0 to {MOST_THREADS:,}", hint="0: as many as there are"
        )
    if count:
        torch.set_num_threads(count)
