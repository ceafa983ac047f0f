"""Tensors and plain numbers in one safetensors file: whole, sealed, and never unpickled.

The seal (`elman.files`) lies in the header and covers every byte: tensors, names, numbers.

Of more than `LARGE` bytes, the tensors lie in pieces beside that file, which names them:

    state.safetensors                         numbers, and the name of its pieces: 5f1c…
    state-5f1c…-00000.safetensors, …          tensors, each piece written by one process, sealed

The pieces of one moment have a name of their own, and are whole before the file that names them is
replaced; those of the moment before are deleted after it. Any number of processes reads them.
"""

import re
import uuid
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
from elman.training.processes import Processes

LARGE = 1 << 30
"""Bytes of tensors in one file, about: with more of them there are several."""
_KEY = "elman"


def write(path: Path, kind: str, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Write atomically; `kind` says what the file is, so that no other is taken for it."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    record = {"kind": kind, "seal": BLANK_SEAL, "numbers": numbers}
    write_sealed(path, save(ready, metadata={_KEY: strict_json.dumps(record)}))


def write_together(
    path: Path,
    kind: str,
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
    processes: Processes,
) -> None:
    """As `write`, of what all processes have: each of them writes some of the pieces, if any."""
    pieces, name = _in_pieces(tensors), ""
    if len(pieces) > 1:
        name = processes.told(uuid.uuid4().hex)
        for i in range(processes.rank, len(pieces), processes.size):
            own = {key: tensors[key] for key in pieces[i]}
            write(_piece(path, name, i), f"{kind} in pieces", own, {"name": name, "piece": i})
        processes.wait()
        tensors, numbers = {}, numbers | {"pieces": {"name": name, "count": len(pieces)}}
    if processes.first:
        write(path, kind, tensors, numbers)
        for old in path.parent.glob(f"{path.stem}-*{path.suffix}"):
            if is_piece(old.name) and not old.name.startswith(f"{path.stem}-{name or '/'}"):
                old.unlink()


def _in_pieces(tensors: dict[str, Tensor]) -> list[list[str]]:
    """The names, by the alphabet; a new piece begins where one more would not fit.

    The order of tensors that were read from a file is another in every process.
    """
    pieces, room = [[]], LARGE
    for name, tensor in sorted(tensors.items()):
        if pieces[-1] and tensor.nbytes > room:
            pieces.append([])
            room = LARGE
        pieces[-1].append(name)
        room -= tensor.nbytes
    return pieces


def _piece(path: Path, name: str, number: int) -> Path:
    return path.with_name(f"{path.stem}-{name}-{number:05d}{path.suffix}")


def is_piece(name: str) -> bool:
    """Whether a file of a run folder goes by the name of a piece."""
    return re.fullmatch(r"state-[0-9a-f]{32}-\d{5}\.safetensors", name) is not None


def _are_pieces(said: Any) -> bool:
    if not isinstance(said, dict) or said.keys() != {"name", "count"}:
        return False
    name, count = said["name"], said["count"]
    known = isinstance(name, str) and is_piece(f"state-{name}-00000.safetensors")
    return known and type(count) is int and 1 < count < 10**5


def read(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write` or `write_together` wrote; what is damaged, or not ours, is refused.

    A training that goes on meanwhile deletes pieces that it has replaced: then the new ones are
    read.
    """
    while True:
        tensors, numbers = _read(path, kind)
        pieces = numbers.pop("pieces", None)
        if pieces is None:
            return tensors, numbers
        if not _are_pieces(pieces):
            raise _damaged(path, "what it says of its pieces makes no sense")
        try:
            return tensors | _read_pieces(path, kind, pieces), numbers
        except MissingSource:
            if _read(path, kind)[1].get("pieces") == pieces:
                raise


def _read_pieces(path: Path, kind: str, pieces: dict[str, Any]) -> dict[str, Tensor]:
    tensors = {}
    for i in range(pieces["count"]):
        where = _piece(path, pieces["name"], i)
        held, header = _read(where, f"{kind} in pieces")
        if header != {"name": pieces["name"], "piece": i}:
            raise _damaged(where, "it is a piece of something else")
        tensors |= held
    return tensors


def _read(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One file. Those of older versions have no seal but a CRC-32 of their tensors."""
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
