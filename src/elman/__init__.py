"""Recurrent sequence models whose gradient through time you can see, check, choose and afford.

Modules are imported when first touched, so `import elman` costs nothing but its own file.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from elman.language_model import LanguageModel as LanguageModel
    from elman.markov import MarkovChain as MarkovChain
    from elman.ngram import NgramModel as NgramModel
    from elman.vocab import Vocab as Vocab

_HOMES = {
    "LanguageModel": "elman.language_model",
    "MarkovChain": "elman.markov",
    "NgramModel": "elman.ngram",
    "Vocab": "elman.vocab",
}
"""Public classes and the module each lives in."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if importlib.util.find_spec(f"elman.{name}"):  # elman.corpus, without an import of its own
        return importlib.import_module(f"elman.{name}")
    raise AttributeError(f"module 'elman' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
