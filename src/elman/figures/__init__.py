"""Pictures: each function takes a small result and returns a matplotlib figure.

One module per subject, all in the house style of `style.py`.
"""

from elman.figures.style import COLOURS, STYLES, house, save

__all__ = ["COLOURS", "STYLES", "house", "save"]
