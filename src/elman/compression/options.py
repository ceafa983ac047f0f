"""What a compressor is made of, and the three levels: all of it is written into the file's header.

The sizes follow from the length of the text, so that a short one does not pay for large tables.
"""

from dataclasses import dataclass

from elman.compression.primer import PRIMER
from elman.errors import UserError

RATE_UNIT = 1e-4
"""Rates are whole multiples of this, so that a header holds them exactly, in a byte each."""


@dataclass(frozen=True)
class Options:
    """The numbers that decide every bit of a compressed file, besides the text itself."""

    length: int  # bytes of the text
    contexts: int  # how many kinds of context are counted
    table_bits: int  # each has a table of 2^bits slots, 8 bytes each
    hidden: int  # units of the network, a multiple of 16
    window: int  # bytes between two of its updates
    lanes: int  # readers: one in front, the others going over the past again
    rate_units: int  # of its learning, in units of 1e-4
    last_rate_units: int  # what that falls to
    mixing_units: int  # of the mixers' learning
    primed: bool = False  # whether it has read `PRIMER` before it begins

    def __post_init__(self) -> None:
        limits = {
            "length": (0, 2**62),
            "contexts": (1, 24),
            "table_bits": (8, 24),
            "hidden": (16, 1024),
            "window": (1, 255),
            "lanes": (1, 64),
            "rate_units": (0, 255),
            "last_rate_units": (0, 255),
            "mixing_units": (0, 255),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise UserError(f"{name}={getattr(self, name)} must be {low} to {high}")
        if self.hidden % 16:
            raise UserError(f"hidden={self.hidden} must be a multiple of 16")

    @property
    def rate(self) -> float:
        """Of the network's learning at first."""
        return self.rate_units * RATE_UNIT

    @property
    def last_rate(self) -> float:
        """Of the network's learning in the end."""
        return self.last_rate_units * RATE_UNIT

    @property
    def mixing(self) -> float:
        """Of the mixers' learning."""
        return self.mixing_units * RATE_UNIT

    @property
    def weights(self) -> int:
        """How many numbers the network learns."""
        H = self.hidden
        return 256 * 4 * H + H * 4 * H + H * 256 + 256


@dataclass(frozen=True)
class Level:
    """A balance between size, time and memory."""

    contexts: int
    most_table_bits: int
    hidden: int
    lanes: int
    window: int = 16
    rate_units: int = 100
    last_rate_units: int = 40
    mixing_units: int = 28
    primed: bool = True

    def options(self, length: int) -> Options:
        """For a text of so many bytes."""
        read = length + self.primed * len(PRIMER)
        bits = min(max(read.bit_length() + 3, 10), self.most_table_bits)
        return Options(
            length,
            self.contexts,
            bits,
            self.hidden,
            self.window,
            self.lanes,
            self.rate_units,
            self.last_rate_units,
            self.mixing_units,
            self.primed,
        )


LEVELS = {
    "fast": Level(contexts=16, most_table_bits=20, hidden=16, lanes=1),
    "default": Level(contexts=24, most_table_bits=21, hidden=64, lanes=2),
    "best": Level(
        contexts=24,
        most_table_bits=22,
        hidden=128,
        lanes=4,
        window=12,
        rate_units=80,
        last_rate_units=30,
        mixing_units=20,
    ),
}
DEFAULT = "default"


def level_named(name: str) -> Level:
    """The level of this name."""
    if name not in LEVELS:
        raise UserError(f"unknown level {name!r}", hint=f"one of {', '.join(LEVELS)}")
    return LEVELS[name]
