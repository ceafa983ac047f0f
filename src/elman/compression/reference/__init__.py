"""The compressor in NumPy: the same model as the native code, file for file, and the same bits.

This is the specification that the native code is tested against, and what runs where there is no
native code: a hundred bytes a second. All numbers are float32, added in the order written here; an
array of 16 lanes is added up halves onto halves.
"""

from elman.compression.reference.coder import Coder
from elman.compression.reference.network import Network
from elman.compression.reference.numbers import exp, stretch, tanh

__all__ = ["Coder", "Network", "exp", "stretch", "tanh"]
