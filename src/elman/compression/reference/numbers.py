"""numbers.h: float32 arithmetic, every operation rounded by itself, in the order written."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

F = np.float32
Floats = NDArray[np.float32]
LANES, SYMBOLS = 16, 256
ONE, HALF = F(1), F(0.5)


def exp(x: Any) -> Any:
    """e^x = 2^n e^r by Taylor's polynomial, x held within ±80."""
    x = np.minimum(np.maximum(x, F(-80)), F(80))
    near = x * F(1.44269504) + np.where(x < 0, F(-0.5), F(0.5))
    n = near.astype(np.int32)
    whole = n.astype(F)
    r = x - whole * F(0.693359375)
    r = r - whole * F(-2.12194440e-4)
    p = r * (ONE / F(720)) + (ONE / F(120))
    for term in (ONE / F(24), ONE / F(6), HALF, ONE, ONE):
        p = p * r + term
    return p * ((n + 127) << 23).astype(np.int32).view(F)


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)"""
    return ONE / (ONE + exp(-x))


def tanh(x: Any) -> Any:
    return ONE - F(2) / (ONE + exp(x + x))


def squash(x: Any) -> Any:
    return sigmoid(np.asarray(x, F).reshape(1))[0]


def log(x: Any) -> Any:
    """ln x of a positive, normal x = 2^e m: 2 artanh((m - 1) / (m + 1)) by its series."""
    bits = np.asarray(x, F).reshape(-1).view(np.int32)
    e = (bits >> 23) - 127
    m = ((bits & 0x7FFFFF) | 0x3F800000).astype(np.int32).view(F)
    large = m > F(1.41421356)
    m, e = np.where(large, m * HALF, m), np.where(large, e + 1, e)
    f = (m - ONE) / (m + ONE)
    s = f * f
    p = s * (ONE / F(9)) + (ONE / F(7))
    for term in (ONE / F(5), ONE / F(3), ONE):
        p = p * s + term
    return (f + f) * p + e.astype(F) * F(0.693147182)


def stretch(p: Any) -> Any:
    """ln(p / (1 - p))"""
    return log(p / (ONE - p))


def total(lanes: Floats) -> Any:
    """The sum of the last axis, 16 lanes: halves onto halves."""
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def dot(x: Floats, y: Floats) -> Any:
    """Σ x_i y_i over the last axis, a multiple of 16, block after block."""
    products = x * y
    blocks = products.reshape(*products.shape[:-1], -1, LANES)
    lanes = blocks[..., 0, :]
    for i in range(1, blocks.shape[-2]):
        lanes = lanes + blocks[..., i, :]
    return total(lanes)


def product(x: Floats, W: Floats, y: Floats) -> Floats:
    """y + x W: for every output the inputs one after the other."""
    for x_k, row in zip(x, W, strict=True):
        y = y + row * x_k
    return y
