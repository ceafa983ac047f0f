"""coder.h: arithmetic coding."""

import numpy as np
from numpy.typing import NDArray

from elman.compression.options import Options
from elman.compression.reference.model import Model
from elman.compression.reference.numbers import Floats

MOST = 64
"""Bytes that one byte can take from the compressed text, at most."""
AHEAD = 8
"""Bytes that are read before they are needed: so many zeros may be read after the coded text."""


class Coder:
    """Arithmetic coding: [low, high] cut in proportion to the odds of every bit."""

    FULL = (1 << 64) - 1

    def __init__(self, options: Options, trained: Floats | None = None) -> None:
        self.model = Model(options, trained)
        self.low, self.high, self.code, self.began = 0, self.FULL, 0, False
        self.beyond = 0  # zeros that were read where the coded text had ended

    def prime(self, data: bytes) -> None:
        """Read what both sides know before they begin."""
        for byte in data:
            for b in range(7, -1, -1):
                self.model.see(byte >> b & 1)

    def predict(self, data: bytes) -> NDArray[np.uint32]:
        """The odds of a 1 before each bit, (bytes, 8); nothing is coded."""
        odds = np.empty((len(data), 8), np.uint32)
        for i, byte in enumerate(data):
            for b in range(7, -1, -1):
                odds[i, 7 - b] = self.model.odds()
                self.model.see(byte >> b & 1)
        return odds

    def encode(self, data: bytes, last: bool) -> bytes:
        """The bytes that are certain after these; with `last`, all that remain."""
        out = bytearray()
        for byte in data:
            for b in range(7, -1, -1):
                self._narrow(byte >> b & 1, out)
        return bytes(out) + (self._end() if last else b"")

    def decode(self, data: bytes, room: int, last: bool) -> tuple[bytes, int]:
        """At most `room` bytes of the text, as long as the next is certain to be whole in `data`.

        Returns them and how many bytes of `data` were used; after the `last` come zeros. A coded
        text ends no earlier than the last byte that left the coder: who needs more zeros than are
        read ahead reads what no encoder wrote, and gets fewer bytes than there is room for.
        """
        coming, out = iter(data), bytearray()
        used = 0

        def shift() -> None:
            nonlocal used
            byte = next(coming, None)
            used, self.beyond = used + (byte is not None), self.beyond + (byte is None)
            self.code = (self.code << 8 | (byte or 0)) & self.FULL

        while len(out) < room and (last or len(data) - used >= MOST):
            if not self.began:
                self.began = True
                for _ in range(AHEAD):
                    shift()
            byte = 1
            while byte < 256:
                bit, gone = int(self.code <= self._cut()), bytearray()
                self._narrow(bit, gone)
                for _ in gone:
                    shift()
                byte = byte << 1 | bit
            if self.beyond > AHEAD:
                break
            out.append(byte & 255)
        return bytes(out), used

    def _cut(self) -> int:
        return self.low + (self.high - self.low >> 24) * self.model.odds()

    def _narrow(self, bit: int, out: bytearray) -> None:
        middle = self._cut()
        self.low, self.high = (self.low, middle) if bit else (middle + 1, self.high)
        while (self.low ^ self.high) >> 56 == 0:
            out.append(self.high >> 56)
            self.low = self.low << 8 & self.FULL
            self.high = (self.high << 8 | 255) & self.FULL
        self.model.see(bit)

    def _end(self) -> bytes:
        """The shortest number inside the interval, with zeros after it."""
        if self.low == 0:
            return b""
        for size in range(1, 9):
            unit = 1 << 64 - 8 * size
            number = -(-self.low // unit) * unit
            if number <= self.high:
                return (number >> 64 - 8 * size).to_bytes(size, "big")
        raise AssertionError("an interval holds its own lower end")
