"""Where a run computes."""

from elman.errors import UserError


def pick(name: str) -> str:
    """`auto` is the GPU where there is one; a GPU that is not there is refused."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"unknown device {name!r}", hint="one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no GPU here", hint="--device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
