"""Turns on a GPU: tokens are chosen from scores and read, again and again, without the host.

A turn is one CUDA graph, which is kept with the model for the next text: to make one takes as long
as writing a hundred tokens. `writer` draws in its turns, `searcher` goes on with a beam.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, final

import torch
from torch import Tensor, nn

from elman.errors import WorkFailed
from elman.kernels.cuda import graphs
from elman.language_model.captured import Step
from elman.language_model.kept import Kept, alive, key_of, recording, remembered
from elman.language_model.looking import is_hooked
from elman.language_model.model import LanguageModel

MANY = 32
"""Turns that are taken before the host reads what was chosen in them."""
FEW = 8
"""Shorter texts are not worth a graph."""
KEPT = 2
"""Graphs that are kept for a model, if they are not too large."""


def takes(model: nn.Module) -> bool:
    """Whether a model's texts are written so; others may do more in a step."""
    if type(model) is not LanguageModel or not model.bias_q.is_cuda:
        return False
    return model.recurrent and not is_hooked(model) and torch.version.cuda is not None


class Turns(abc.ABC):
    """Chooses a token for every row and reads it, again and again.

    Once it has a graph, which reads the model's weights where they lie, it holds none of them, but
    for weights that were computed for it: then it has no key, and serves one text.
    """

    def __init__(self, model: LanguageModel, rows: int, key: Hashable) -> None:
        self.key, self.device = key, model.bias_q.device
        self.graph: graphs.Graph | None = None
        self.memory: graphs.Memory | None = None
        with remembered():
            self.step = Step(*model.stepped(), None, rows)
            self.logits = torch.zeros(
                rows, model.vocab_size, dtype=model.bias_q.dtype, device=self.device
            )
            self.at = torch.zeros(1, dtype=torch.int64, device=self.device)

    @abc.abstractmethod
    def _choose(self) -> Tensor:
        """The next token of every row, written down at the place `at` of what the host reads."""

    def _turn(self) -> None:
        tokens = self._choose()
        self.at.add_(1)
        self.logits.copy_(self.step(tokens))

    def take(self, count: int) -> None:
        """The next turns, `MANY` at most; the first is written down at place 0."""
        with remembered(), torch.cuda.device_of(self.at):
            self.at.zero_()
            for _ in range(count):
                if self.graph is None:
                    self._turn()
                else:
                    self.graph.launch(torch._C._cuda_getCurrentRawStream(self.device.index))

    def capture(self) -> None:
        """Make a graph of a turn; where that fails turns are taken as they are."""
        try:
            with recording(self.device) as recorder:
                if recorder is None:
                    return
                memory = recorder.memory()
                self._turn()  # as CUDA asks: once before
                self.graph, _ = recorder.record(self._turn, memory)
        except RuntimeError:  # a text is written all the same, more slowly
            return
        self.memory = memory
        if self.key is not None:
            self.step.forget()

    @property
    def nbytes(self) -> int:
        """Of its graph's memory."""
        return self.memory.nbytes if self.memory else 0


Kind = TypeVar("Kind", bound=Turns)


@contextmanager
def lent(
    model: LanguageModel, what: Hashable, length: int, make: Callable[[Hashable], Kind]
) -> Iterator[Kind]:
    """Turns for a text of this length, the model's own from an earlier text where it has some.

    `what` is all that the graph of a turn depends on besides the model, the kind of turns included.
    """
    kept, weights = _KEPT.setdefault(model, KeptTurns()), alive(model)
    with torch.cuda.device_of(model.bias_q):
        key = key_of(model, what, model.recurrence.zoneout)
        turns: Kind = kept.lent(key) or make(key)
        if turns.graph is None and (length >= FEW or kept.slowly >= FEW):
            turns.capture()
    if turns.graph is None:
        kept.slowly += length
    try:
        yield turns
    finally:
        del weights
        if turns.graph is not None and key is not None:
            kept.give_back(turns)


def highest(scores: Tensor, least: Tensor, count: Tensor | int) -> Tensor:
    """Which are the `count` highest of every row, the last of them being `least`.

    Among equals the lower id comes first.
    """
    above, equal = scores > least, scores == least
    room = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def not_numbers() -> WorkFailed:
    """What a diverged model's text ends with."""
    return WorkFailed(
        "the model's scores are not numbers one can draw from (NaN or infinite)",
        hint="its training diverged: train again with a smaller learning rate",
    )


@final
class KeptTurns(Kept[Turns]):
    """The turns of a model that write no text now."""

    def __init__(self) -> None:
        super().__init__(KEPT)
        self.slowly = 0
        """How many tokens were written without a graph."""


_KEPT: weakref.WeakKeyDictionary[LanguageModel, KeptTurns] = weakref.WeakKeyDictionary()


def ids_of(exclude: Sequence[int], device: torch.device) -> Tensor:
    """Token ids that lie where the scores do."""
    return torch.tensor(exclude, dtype=torch.int64, device=device)
