"""Windows of a text scored on a GPU as CUDA graphs, where windows of their shape come again.

A small model's window takes the GPU less time than Python takes to queue it. Recorded, a window is
a copy of its ids and one launch: the graph reads the weights where they lie, goes on from the state
that the last window left, and adds its nats to a total on the GPU. What is recorded is what would
run anyway, so the score is the same to the bit. Graphs are kept with the model (`kept`), for the
validation after the next epoch.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from elman import kernels
from elman.kernels.cuda import Cuda, graphs
from elman.language_model.embedding import Embedding
from elman.language_model.kept import Kept, alive, key_of, recording
from elman.language_model.looking import is_hooked, parts_of
from elman.language_model.masks import NO_MASKS
from elman.language_model.model import LanguageModel
from elman.language_model.nests import Nest, over, tensors
from elman.language_model.window_model import Window
from elman.nn import GRU, LSTM, RNN, Layers
from elman.recurrence.captured import is_watched

FEW = 4
"""Windows of one shape that are scored as they are: to record one costs as much as many of them."""
WORTH, PATIENCE = 50, 4
"""Windows that a graph must serve to be worth its making; how many times as many come before the
next one is made, where it did not."""
SHAPES = 8
"""Graphs of one scorer. A text has three shapes of window: the first, the last, those between."""
KEPT, LARGE = 2, 4
"""Scorers that are kept for a model, and of how many of the `largest` they may take the memory."""
MANY_SHAPES = 1000
"""Shapes of which it is known how often they came: texts may be of every length."""
PLAIN = {LanguageModel, Embedding, Window, RNN, GRU, LSTM, Layers, nn.Linear, nn.ModuleList}
"""What the parts of a model are that are known to do the same in every call."""

Add = Callable[[nn.Module, Tensor, Tensor | None, Nest, Tensor], Nest]
"""Of a model, a window, which of its steps count (None: all), the state before and a total: adds
the nats to the total and gives the state after."""


class Shape(NamedTuple):
    """What windows of one text have in common that one graph can score."""

    length: int
    is_masked: bool
    is_first: bool
    """Whether no state comes before it."""


@final
@dataclass(eq=False)
class Recorded:
    """A window's work, and where it reads the window."""

    graph: graphs.Graph
    ids: Tensor
    counts: Tensor | None
    held: list[Any]
    """What its launches read besides weights: calls that the model has prepared, and may forget."""
    served: int = 0


@final
class Scorer:
    """Adds up the nats of one text, read window after window in so many lanes.

    It holds no weights, and serves one text at a time. Without a key it records nothing.
    """

    def __init__(self, add: Add, device: torch.device, key: Hashable = None) -> None:
        self.add, self.device, self.key = add, device, key
        self.recorded = dict[Shape, Recorded]()
        """The last used last."""
        self.met, self.refused, self.patience = Counter[Shape](), set[Shape](), FEW
        self.memory: graphs.Memory | None = None
        self.state: Nest = None
        """Where graphs read the state before a window and leave the one after it."""
        with torch.inference_mode(False):  # the next text may be scored in another mode
            self.total = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(
        self, model: nn.Module, window: Tensor, counts: Tensor | None, state: Nest
    ) -> Nest:
        """Add the nats of this window; the state after it, which the next call is given."""
        if self.key is None:
            return self.add(model, window, counts, state, self.total)
        shape = Shape(window.shape[1], counts is not None, state is None)
        ready = self.recorded.pop(shape, None)
        if ready is None:
            if self._comes_again(cast(LanguageModel, model), shape, window, state):
                return self._first_recorded(
                    cast(LanguageModel, model), shape, window, counts, state
                )
            return self.add(model, window, counts, state, self.total)
        self.recorded[shape] = ready
        ready.ids.copy_(window, non_blocking=True)
        if ready.counts is not None and counts is not None:
            ready.counts.copy_(counts, non_blocking=True)
        if state is not None and state is not self.state:
            _copy(self.state, state)
        ready.graph.launch(torch._C._cuda_getCurrentRawStream(self.device.index))
        ready.served += 1
        return self.state

    @property
    def nats(self) -> float:
        """The total, once the GPU has it."""
        return float(self.total)

    @property
    def nbytes(self) -> int:
        """Of its graphs' memory."""
        return self.memory.nbytes if self.memory else 0

    @property
    def was_in_vain(self) -> bool:
        """Whether a graph of it has served too few windows."""
        return any(ready.served < WORTH for ready in self.recorded.values())

    def _comes_again(self, model: LanguageModel, shape: Shape, window: Tensor, state: Nest) -> bool:
        """Whether this window's work is to be recorded."""
        if shape in self.refused:
            return False
        if len(self.met) > MANY_SHAPES:
            self.met.clear()
        self.met[shape] += 1
        if self.met[shape] <= self.patience:
            return False
        logits = window.shape[0] * shape.length * model.vocab_size * model.bias_q.itemsize
        if logits > self._room or not _is_our_kernels(model, window, state):
            self.refused.add(shape)
        return shape not in self.refused

    @property
    def _room(self) -> int:
        return LARGE * kernels.largest(self.device)

    def _first_recorded(
        self,
        model: LanguageModel,
        shape: Shape,
        window: Tensor,
        counts: Tensor | None,
        state: Nest,
    ) -> Nest:
        """Score this window as it is, and record the same work for those like it."""
        with recording(self.device) as recorder:
            if recorder is None:  # another is recording, say
                return self.add(model, window, counts, state, self.total)
            ids = _place_of(window, torch.int64, self.device)
            places = ids, None if counts is None else _place_of(counts, torch.bool, self.device)
            after = self.add(model, *places, state, self.total)  # as CUDA asks: once before
            if self.state is None:
                self.state = over(torch.empty_like, after)
            _copy(self.state, after)

            def work() -> None:
                before = None if shape.is_first else self.state
                _copy(self.state, self.add(model, *places, before, self.total))

            try:
                self.memory = self.memory or recorder.memory()
                graph, _ = recorder.record(work, self.memory)
            except RuntimeError:  # it is scored all the same, more slowly
                self.refused.add(shape)
                return self.state
        self.recorded[shape] = Recorded(graph, *places, _prepared_calls(model))
        self._make_room(shape)
        return self.state

    def _make_room(self, newest: Shape) -> None:
        """Let the graph go that was used longest ago, or all of them if they are too large."""
        if self.nbytes > self._room:
            self.refused.add(newest)
            self.recorded.clear()
            self.memory = None
        if len(self.recorded) > SHAPES:
            oldest = next(iter(self.recorded))
            if self.recorded.pop(oldest).served < WORTH:
                self.patience *= PATIENCE
            del self.met[oldest]


@contextmanager
def lent(model: nn.Module, lanes: int, add: Add) -> Iterator[Scorer]:
    """What scores a text in so many lanes, the model's own from an earlier text where it has some.

    `add` is what it does with a window.
    """
    if not takes(model):
        yield Scorer(add, next(model.parameters()).device)
        return
    model = cast(LanguageModel, model)
    kept, weights = _KEPT.setdefault(model, Scorers()), alive(model)
    with torch.cuda.device_of(model.bias_q):
        key = _key(model, lanes)
        scorer = kept.lent(key) or Scorer(add, model.bias_q.device, key)
        scorer.patience = max(scorer.patience, kept.patience)
        scorer.total.zero_()
        try:
            yield scorer
        finally:
            del weights
            if any(gone.was_in_vain for gone in kept.give_back(scorer)):
                kept.patience *= PATIENCE


def takes(model: nn.Module) -> bool:
    """Whether a model's windows may be recorded; others may do something else in each call."""
    if type(model) is not LanguageModel or not _is_on_a_gpu(model) or not kernels.captures():
        return False
    if any(type(part) not in PLAIN for part in parts_of(model)) or is_hooked(model):
        return False
    if any(type(p) is not nn.Parameter for p in model.parameters()) or is_watched(grad=False):
        return False
    return not model.recurrent or (model.recurrence.repeatable and model.irregular() is None)


def _is_on_a_gpu(model: LanguageModel) -> bool:
    return model.bias_q.is_cuda and torch.version.cuda is not None


def _is_our_kernels(model: LanguageModel, window: Tensor, state: Nest) -> bool:
    """Whether the recurrence is one launch for each layer, and not some for each step."""
    if not model.recurrent:
        return True
    ids = window[:, :-1].to(model.bias_q.device).long()
    job = model.recurrence.job(model.inputs(ids.T, NO_MASKS), state)
    return kernels.select(job).name == Cuda.name


def _prepared_calls(model: LanguageModel) -> list[Any]:
    """What the layers have made for their calls, of which some is read at every launch."""
    if not model.recurrent:
        return []
    return [settled.by for settled in model.recurrence._settled.values()]


def _place_of(t: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(t.shape, dtype=dtype, device=device).copy_(t, non_blocking=True)


def _copy(places: Nest, state: Nest) -> None:
    for place, new in zip(tensors(places), tensors(state), strict=True):
        place.copy_(new)


# ---------------------------------------------------------------------- which text has which scorer


@final
class Scorers(Kept[Scorer]):
    """Those of a model that score no text now."""

    def __init__(self) -> None:
        super().__init__(KEPT, LARGE)
        self.patience = FEW


_KEPT: weakref.WeakKeyDictionary[LanguageModel, Scorers] = weakref.WeakKeyDictionary()


def _key(model: LanguageModel, lanes: int) -> Hashable:
    """All that a scorer depends on."""
    rnn, embedding = model.recurrence, model.embedding
    how = (
        None if rnn is None else rnn.running_cell,
        None if embedding is None else embedding.max_norm,
    )
    return key_of(model, lanes, *how)
