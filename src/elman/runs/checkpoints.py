"""Tensors and plain numbers in one safetensors file: whole, sealed, and never unpickled.

The seal (`elman.files`) lies in the header and covers every byte: tensors, names, numbers.
"""

import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from elman import strict_json
from elman.errors import MissingSource, UserError
from elman.files import BLANK_SEAL, check_seal, has_seal, read_bytes, write_sealed

_KEY = "elman"


def write(path: Path, kind: str, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Write atomically; `kind` says what the file is, so that no other is taken for it."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    record = {"kind": kind, "seal": BLANK_SEAL, "numbers": numbers}
    write_sealed(path, save(ready, metadata={_KEY: strict_json.dumps(record)}))


def read(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write` wrote; a file that is damaged, or not ours, is refused.

    Files of older versions have no seal but a CRC-32 of their tensors.
    """
    if not path.exists():
        raise MissingSource(f"there is no {path}", hint="is this a finished run folder?")
    data = read_bytes(path)
    if sealed := has_seal(data):
        check_seal(data, path)
    try:
        tensors, record = load(data), _record(data)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise _damaged(path, str(problem)) from problem
    if not isinstance(record, dict) or record.get("kind") != kind:
        raise UserError(
            f"{path} is a safetensors file, but not an elman {kind}",
            hint="it was written by something else, or renamed",
        )
    whole = sealed or record.get("crc32") == _crc32(tensors)
    if not whole or not isinstance(record.get("numbers"), dict):
        raise _damaged(path, "its checksum does not match its contents")
    return tensors, record["numbers"]


def _record(data: bytes) -> Any:
    """Our part of the header: 8 bytes of length, then JSON, in which ours is a string of JSON."""
    header = strict_json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return strict_json.loads(header.get("__metadata__", {}).get(_KEY, "null"))


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
