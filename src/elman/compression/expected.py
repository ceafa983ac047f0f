"""What the compressor's counting expects of a text, without compressing it."""

import numpy as np
from numpy.typing import NDArray

from elman.compression.library import check_room, coder
from elman.compression.options import Level

COUNTING = Level(
    contexts=24,
    most_table_bits=21,
    hidden=16,
    lanes=1,
    rate_units=0,
    last_rate_units=0,
    primed=False,
)
"""Every context, and of the network only what can never be left out: it learns nothing."""


def expectations(before: bytes, text: bytes) -> NDArray[np.float64]:
    """P(1) for each bit of a text, given all before it, (bytes, 8), by counting.

    `before` is read first, as training. Every bit is predicted before it is counted.

    >>> p = expectations(b"it is " * 50, b"it is")
    >>> bool((np.abs(p - np.unpackbits(np.frombuffer(b"it is", "u1")).reshape(-1, 8)) < 0.1).all())
    True
    """
    options = COUNTING.options(len(before) + len(text))
    check_room(options)
    engine = coder(options)
    engine.prime(before)
    return engine.predict(text) / float(1 << 24)
