"""The weights of a moment ago: a training leaves them between two updates, for the views.

One file is written over in place, each parameter straight from its own memory. A number in front
says whether it is whole: odd while it is being written, another even one after that. What was read
while it was even and did not move is of one moment.

    number, step, epoch, index (int64, little-endian), then a safetensors file
"""

import io
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import load, save
from torch import Tensor

from elman import strict_json

FRONT = struct.Struct("<4q")
EVERY = 0.1
"""Seconds from one moment to the next, while someone looks."""
PATIENCE = 0.1
"""Seconds after which a file that is not whole, and has not moved, was left so by a process that is
gone. They begin at the first look: a reader may be kept from running for longer than that."""


@dataclass(frozen=True)
class Place:
    """Where a training is: after `step` updates, before segment `index` of pass `epoch`."""

    step: int
    epoch: int
    index: int


@final
class Moment:
    """The file, for the one process that writes it; the tensors' shapes stay what they are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None
        self._number = 0
        self._header = b""
        self._order: list[str] = []

    def leave(self, weights: Mapping[str, Tensor], place: Place) -> None:
        """Write weights over those of the moment before."""
        file = self._file or self._begin(weights)
        self._count_on(file, place)
        _write(file, self._header)
        for name in self._order:
            _write(file, _memory(weights[name]))
        file.truncate()
        self._count_on(file, place)

    def close(self) -> None:
        """What was left stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self, weights: Mapping[str, Tensor]) -> io.FileIO:
        """What stands before the numbers, and in which order they do, is the format's."""
        data = save({name: t.detach().cpu().contiguous() for name, t in weights.items()})
        end = 8 + int.from_bytes(data[:8], "little")
        self._header, described = data[:end], strict_json.loads(data[8:end])
        self._order = sorted(weights, key=lambda name: described[name]["data_offsets"])
        file = io.FileIO(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
        before = file.read(FRONT.size)  # of a process before this one
        self._number = FRONT.unpack(before)[0] // 2 * 2 if len(before) == FRONT.size else 0
        self._file = file
        return file

    def _count_on(self, file: io.FileIO, place: Place) -> None:
        """From even to odd, or from odd to even."""
        self._number += 1
        file.seek(0)
        _write(file, FRONT.pack(self._number, *astuple(place)))


def read(path: Path) -> tuple[dict[str, Tensor], Place] | None:
    """The weights of one moment; None where there are none, or none that are whole."""
    if not path.exists():
        return None
    with open(path, "rb", buffering=0) as file:
        last, until = None, 0.0
        while True:
            file.seek(0)
            front, data = file.read(FRONT.size), file.read()
            file.seek(0)
            if len(front) == FRONT.size and front == file.read(FRONT.size):
                number, *place = FRONT.unpack(front)
                if number % 2 == 0:
                    return load(data), Place(*place)
            if front != last:  # somebody writes
                last, until = front, time.monotonic() + PATIENCE
            elif time.monotonic() >= until:
                return None
            time.sleep(0.001)


def _write(file: io.FileIO, data: Any) -> None:
    left = memoryview(data)
    while len(left):
        left = left[file.write(left) :]


def _memory(tensor: Tensor) -> Any:
    """The bytes of a tensor, where they lie."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
