"""Work that a model does again and again on a GPU, as CUDA graphs that are kept with the model.

A graph reads the weights where they lie, so it follows a training, and holds none of them. It
serves for as long as its key is the same, one text at a time. `turns` chooses and reads tokens so,
`scoring.captured` scores windows.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from elman.kernels import captures, largest
from elman.kernels.choice import settings
from elman.kernels.cuda import as_switched, graphs
from elman.language_model.looking import hears
from elman.language_model.model import LanguageModel
from elman.recurrence.captured import current_stream, switches


def key_of(model: LanguageModel, *what: Hashable) -> Hashable:
    """What texts agree in that one graph can serve: where the weights lie, and every switch.

    `what` is all that it depends on besides the model. None where weights are computed whenever
    they are asked for: at another place each time.
    """
    if hears(model):
        return None
    places = [(w.data_ptr(), w.shape, w.stride(), w.dtype) for w in model.parameters()]
    dtype, device = model.bias_q.dtype, model.bias_q.device
    cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    with as_switched(model.bias_q):
        products = torch._C._get_fp32_precision_getter("cuda", "matmul")
    rest = current_stream(device.index), cast, products, *settings(dtype), *switches()
    return (*what, *rest, *places)


@contextmanager
def remembered() -> Iterator[None]:
    """Around tensors that are made once and written again, whatever the caller's mode is."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def recording(device: torch.device) -> Iterator[graphs.Recorder | None]:
    """A block that may record work for the current stream, in another one; None where none may."""
    stream = current_stream(device.index)
    if stream is None or not captures() or not graphs.ONE_AT_A_TIME.acquire(blocking=False):
        yield None
        return
    try:
        recorder = graphs.recorder(device.index, stream)
        with remembered(), _cast_anew(), recorder.aside():
            yield recorder
    finally:
        graphs.ONE_AT_A_TIME.release()


@contextmanager
def _cast_anew() -> Iterator[None]:
    """Casts of weights are part of the work: autocast's own copies are gone when its block ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class Lendable(Protocol):
    """What is kept."""

    key: Hashable
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Of its graphs' memory."""
        ...


Kind = TypeVar("Kind", bound=Lendable)


class Kept(Generic[Kind]):
    """What a model has for its next texts, the last used first; not what a text has now."""

    def __init__(self, most: int, large: int = 1) -> None:
        """So many at most, and in all so many times the bytes of a `largest` recording."""
        self.most, self.large = most, large
        self.free: list[Kind] = []
        self.lock = threading.Lock()

    def lent(self, key: Hashable) -> Any:
        """The one with this key, which is now this text's alone; None where there is none."""
        with self.lock:
            for i, one in enumerate(self.free):
                if one.key == key:
                    return self.free.pop(i)
        return None

    def give_back(self, one: Kind) -> list[Kind]:
        """Let another text have it, and those go for which there is no room; these are returned.

        The last used is kept, however large.
        """
        with self.lock:
            kept, room = [one, *self.free], self.large * largest(one.device)
            count = min(len(kept), self.most)
            while count > 1 and sum(each.nbytes for each in kept[:count]) > room:
                count -= 1
            self.free = kept[:count]
            return kept[count:]


def alive(model: nn.Module) -> list[torch.Tensor]:
    """The weights' memory as it is now, for a text that a graph reads it for."""
    return [p.detach() for p in model.parameters()]
