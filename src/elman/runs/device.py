"""Where a run computes, and on how many threads."""

from elman.errors import UserError


def pick(name: str) -> str:
    """`auto` is the GPU where there is one; a GPU that is not there is refused."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"unknown device {name!r}", hint="one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no GPU here", hint="--device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def use_threads(count: int) -> None:
    """Compute on so many threads from now on; 0: as many as there are, as torch does by itself."""
    import torch

    if count < 0:
        raise UserError(f"threads={count} must not be negative", hint="0: as many as there are")
    if count:
        torch.set_num_threads(count)
