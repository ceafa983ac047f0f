"""Perplexity proved as a file: a text in as many bits as a model that learns on the way needs.

    elman compress book.txt              elman decompress book.txt.elm

An arithmetic coder spends -log₂ P(bit) on every bit; P comes from an LSTM that is trained while it
reads and from counts of many contexts, mixed in the logistic domain. The decoder makes the same
predictions from what it has decoded so far, so nothing but the coded bits is stored, and every
operation is rounded the same way everywhere.
"""

from elman.compression.container import Packed, compress, decompress
from elman.compression.expected import expectations
from elman.compression.options import LEVELS

__all__ = ["LEVELS", "Packed", "compress", "decompress", "expectations"]
