"""Tensors and plain numbers in one safetensors file: whole, checked, and never unpickled."""

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from elman.errors import MissingSource, UserError
from elman.files import atomic

_KEY = "elman"


def write(path: Path, kind: str, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Write atomically; `kind` says what the file is, so that no other is taken for it."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    record = {"kind": kind, "crc32": _crc32(ready), "numbers": numbers}
    data = save(ready, metadata={_KEY: json.dumps(record)})
    with atomic(path) as draft:
        draft.write_bytes(data)


def read(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write` wrote; a file that is damaged, or not ours, is refused."""
    if not path.exists():
        raise MissingSource(f"there is no {path}", hint="is this a finished run folder?")
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            record = json.loads(metadata.get(_KEY, "null"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError, OSError, ValueError) as problem:
        raise _damaged(path, str(problem)) from problem
    if not isinstance(record, dict) or record.get("kind") != kind:
        raise UserError(
            f"{path} is a safetensors file, but not an elman {kind}",
            hint="it was written by something else, or renamed",
        )
    if record.get("crc32") != _crc32(tensors) or not isinstance(record.get("numbers"), dict):
        raise _damaged(path, "its checksum does not match its contents")
    return tensors, record["numbers"]


def _damaged(path: Path, problem: str) -> UserError:
    return UserError(
        f"{path} is damaged: {problem}", hint="restore it from a copy, or train the run again"
    )


def _crc32(tensors: dict[str, Tensor]) -> int:
    """A checksum of names, types, shapes and every byte."""
    total = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), total)
    return total
