"""The language model: ids → embedding or one-hot → recurrence → output, and its parts."""

from elman.language_model.adapted import Reader, read, reader_of
from elman.language_model.masks import Dropout, Masks
from elman.language_model.model import LanguageModel, ModelState

State = ModelState
"""The same under its older name."""

__all__ = [
    "Dropout",
    "LanguageModel",
    "Masks",
    "ModelState",
    "Reader",
    "State",
    "read",
    "reader_of",
]
