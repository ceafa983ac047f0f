"""The language model: ids → embedding or one-hot → recurrence → output, and its parts."""

from elman.language_model.adapted import Reader, read, reader_of
from elman.language_model.model import (
    Dropout,
    LanguageModel,
    Masks,
    State,
)

__all__ = ["Dropout", "LanguageModel", "Masks", "Reader", "State", "read", "reader_of"]
