"""Tokens and numbers in the form in which a page gets them."""

from typing import Any

import numpy as np


def token_text(token: Any) -> str:
    """A token as a page shows it: a byte as the character of Latin-1."""
    return token if isinstance(token, str) else chr(token)


def short(values: Any) -> Any:
    """Numbers with four significant digits, what a picture can show, as lists.

    >>> short([[0.123456, 0.0], [-1234567.0, 1e-30]])
    [[0.1235, 0.0], [-1235000.0, 1e-30]]
    """
    values = np.asarray(values, dtype=np.float64)
    size = np.abs(values)
    digits = 3 - np.floor(np.log10(size, out=np.zeros_like(size), where=size > 0))
    scale = 10.0 ** np.clip(digits, -300, 300)
    return (np.round(values * scale) / scale).tolist()
