"""Recurrent sequence models whose gradient through time you can see, check, choose and afford.

Modules are imported when first touched, so `import elman` costs nothing but its own file.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from elman.cells.declaration import cell as cell
    from elman.counting.markov import MarkovChain as MarkovChain
    from elman.counting.ngram import NgramModel as NgramModel
    from elman.language_model import LanguageModel as LanguageModel
    from elman.runs.loaded import load as load
    from elman.text.vocab import Vocab as Vocab

__all__ = ["LanguageModel", "MarkovChain", "NgramModel", "Vocab", "cell", "load"]

_PUBLIC = {
    "LanguageModel": "elman.language_model",
    "MarkovChain": "elman.counting.markov",
    "NgramModel": "elman.counting.ngram",
    "Vocab": "elman.text.vocab",
    "cell": "elman.cells.declaration",
    "load": "elman.runs.loaded",
}
"""Public classes and functions, and the module each lives in."""

_SHORT = {
    **dict.fromkeys(("batches", "corpus", "datasets", "tokens", "vocab"), "text"),
    **dict.fromkeys(("markov", "ngram", "sequence_model", "statistics"), "counting"),
    **dict.fromkeys(("evaluation", "metrics", "mixture"), "scoring"),
    "series": "forecasting",
}
"""Modules that also go by a short name, `elman.corpus`, and the folder each lies in."""


class _ShortNames(MetaPathFinder, Loader):
    """`import elman.corpus` gives `elman.text.corpus`: one module under two names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        first = name.split(".")[0]
        if package != __name__ or first not in _SHORT:
            return None
        home = f"{package}.{_SHORT[first]}.{name}"
        return ModuleSpec(fullname, self, origin=home) if importlib.util.find_spec(home) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # the import system has just written the short one over it


if not any(type(finder).__name__ == _ShortNames.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _ShortNames())  # before elman.ngram.arpa is found beside elman.ngram


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if importlib.util.find_spec(f"elman.{name}"):  # elman.corpus, without an import of its own
        return importlib.import_module(f"elman.{name}")
    raise AttributeError(f"module 'elman' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC, *_SHORT])
