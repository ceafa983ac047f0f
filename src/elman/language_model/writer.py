"""Writing on a GPU: drawing a token and reading it follow each other there, by themselves.

    p ∝ exp(o / temperature) of the tokens that are kept,   x the first token with Σ_{v ≤ x} p_v > u

u is a chance that the host has drawn beforehand, so it need not hear of a token before the next one
is drawn: it reads them by the dozen. A draw and a step are one CUDA graph, which is kept with the
model for the next text, whatever its temperature: to make one takes as long as writing a hundred
tokens.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor, nn

from elman.errors import WorkFailed
from elman.kernels import captures, largest
from elman.kernels.choice import settings
from elman.kernels.cuda import graphs, small
from elman.language_model.captured import Step
from elman.language_model.looking import hears, is_hooked
from elman.language_model.model import LanguageModel, ModelState
from elman.recurrence.captured import current_stream, switches

MANY = 32
"""Tokens of each text that are written before the host reads them."""
FEW = 8
"""Shorter texts are not worth a graph."""
KEPT = 2
"""Writers that are kept for a model, if they are not too large."""
NONE = -1
"""In the place of a token: the scores were not numbers that one can draw from."""


class Rules(Protocol):
    """What may follow, and how likely it is: `generation.Sampling`."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def exclude(self) -> Sequence[int]: ...


@final
@dataclass(frozen=True)
class Held:
    """Rules whose numbers lie on the GPU, where another text may have others."""

    temperature: Tensor
    top_k: int | None
    top_p: Tensor | None

    @classmethod
    def like(cls, rules: Rules, device: torch.device) -> Held:
        """Room for the numbers of these rules, and of others that leave as much out."""
        temperature, top_p = (torch.ones((), dtype=torch.float64, device=device) for _ in range(2))
        return cls(temperature, rules.top_k, top_p if _cuts(rules) else None)

    def follow(self, rules: Rules) -> None:
        """Take the numbers of these."""
        self.temperature.fill_(rules.temperature)
        if self.top_p is not None and rules.top_p is not None:
            self.top_p.fill_(rules.top_p)


def _cuts(rules: Rules) -> bool:
    """Whether top-p leaves anything out."""
    return rules.top_p is not None and rules.top_p != 1


def writes(model: nn.Module) -> bool:
    """Whether a model's texts are written so; others may do more in a step."""
    if type(model) is not LanguageModel or not model.bias_q.is_cuda:
        return False
    return model.recurrent and not is_hooked(model) and torch.version.cuda is not None


def written(
    model: LanguageModel,
    logits: Tensor,
    state: ModelState,
    length: int,
    rules: Rules,
    chances: list[Iterator[float]],
) -> Iterator[list[int]]:
    """One token for each text at every step, from these logits and this state on."""
    kept = _KEPT.setdefault(model, Kept())
    alive = [p.detach() for p in model.parameters()]  # a graph reads them where they lie now
    with torch.cuda.device(model.bias_q.device):
        key = _key(model, rules, len(chances))
        writer = kept.lent(key) or Writer(model, rules, len(chances), key)
        if writer.graph is None and (length >= FEW or kept.slowly >= FEW):
            writer.capture()
    if writer.graph is None:
        kept.slowly += length
    try:
        writer.begin(logits, state, rules)
        done, count = 0, 1
        while done < length:
            count = min(count, length - done)
            yield from writer.write(count, chances)
            done, count = done + count, min(2 * count, MANY)
    finally:
        del alive
        if writer.graph is not None and key is not None:
            kept.give_back(writer)


@final
class Writer:
    """Draws a token of every text and reads it, again and again.

    Once it has a graph, which reads the model's weights where they lie, it holds none of them, but
    for weights that were computed for it: then it has no key, and serves one text.
    """

    def __init__(self, model: LanguageModel, rules: Rules, rows: int, key: Hashable) -> None:
        device, V = model.bias_q.device, model.vocab_size
        self.greedy, self.device, self.key = rules.temperature == 0, device, key
        self.graph: graphs.Graph | None = None
        self.memory: graphs.Memory | None = None
        with torch.inference_mode(False), torch.no_grad():
            self.step = Step(*model.stepped(), None, rows)
            self.logits = torch.zeros(rows, V, dtype=model.bias_q.dtype, device=device)
            self.rules = Held.like(rules, device)
            self.excluded = torch.tensor(rules.exclude, dtype=torch.int64, device=device)
            self.at = torch.zeros(1, dtype=torch.int64, device=device)
            self.told = torch.zeros(MANY, rows, dtype=torch.int64, device=device)
            self.chances = torch.zeros(MANY, rows, dtype=torch.float64, device=device)

    def begin(self, logits: Tensor, state: ModelState, rules: Rules) -> None:
        """Write a text from here on."""
        with torch.inference_mode(False), torch.no_grad():
            self.rules.follow(rules)
            self.logits.copy_(logits)
            self.step.state = state

    def write(self, count: int, chances: list[Iterator[float]]) -> Iterator[list[int]]:
        """The next tokens of all texts, `MANY` of each at most."""
        drawn = [] if self.greedy else [[*map(next, chances)] for _ in range(count)]
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device_of(self.at):
            self.at.zero_()
            if drawn:
                self.chances[:count].copy_(torch.tensor(drawn, dtype=torch.float64, device="cpu"))
            for _ in range(count):
                if self.graph is None:
                    self._turn()
                else:
                    self.graph.launch(torch._C._cuda_getCurrentRawStream(self.device.index))
            told = self.told[:count]
        yield from columns(told)

    def capture(self) -> None:
        """Make a graph of a turn; where that fails turns are taken as they are."""
        stream = current_stream(self.device.index)
        if stream is None or not captures() or not graphs.ONE_AT_A_TIME.acquire(blocking=False):
            return
        try:
            recorder = graphs.recorder(self.device.index, stream)
            memory = recorder.memory()
            with torch.inference_mode(False), torch.no_grad(), recorder.aside():
                self._turn()  # as CUDA asks: once before
                self.graph, _ = recorder.record(self._turn, memory)
        except RuntimeError:  # a text is written all the same, more slowly
            return
        finally:
            graphs.ONE_AT_A_TIME.release()
        self.memory = memory
        if self.key is not None:
            self.step.forget()

    def _turn(self) -> None:
        """Draw a token of every text, tell it, and read it."""
        scores = self.logits
        if len(self.excluded):
            scores = scores.index_fill(1, self.excluded, -math.inf)
        top = scores.amax(-1, keepdim=True)  # NaN wins every maximum
        if self.greedy:
            tokens = scores.argmax(-1)
        else:
            chance = self.chances.index_select(0, self.at)
            tokens = drawn(weights(scores, top, self.rules), chance[0])
        known = top[:, 0].isfinite()
        tokens = tokens.where(known, 0)
        self.told.index_copy_(0, self.at, tokens.where(known, NONE)[None])
        self.at.add_(1)
        self.logits.copy_(self.step(tokens))


def weights(scores: Tensor, top: Tensor, rules: Held) -> Tensor:
    """exp((o - max o) / temperature) of the tokens that top-k and then top-p leave, else 0."""
    top = top.double()
    if rules.top_k is not None and rules.top_k < scores.shape[1]:
        best = scores.topk(rules.top_k).values
        kept = _highest(scores, best[:, -1:], rules.top_k)
        scores = scores.masked_fill(~kept, -math.inf)
    else:
        best = None
    found = _weights(scores, top, rules)
    if rules.top_p is None:
        return found
    if best is None:
        best = scores.sort(descending=True).values
    share = _weights(best, top, rules).div_(found.sum(-1, keepdim=True))
    count = (small.running(share) - share < rules.top_p).sum(-1, keepdim=True)
    return found.masked_fill_(~_highest(scores, best.gather(1, count - 1), count), 0)


def _weights(scores: Tensor, top: Tensor, rules: Held) -> Tensor:
    return scores.double().sub_(top).div_(rules.temperature).exp_()


def _highest(scores: Tensor, least: Tensor, count: Tensor | int) -> Tensor:
    """Which are the `count` highest of every row, the last of them being `least`.

    Among equals the lower id comes first.
    """
    above, equal = scores > least, scores == least
    room = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def drawn(weights: Tensor, chances: Tensor) -> Tensor:
    """One token per row, by the inverse of the cumulative distribution."""
    reached = small.running(weights)
    reached = reached / reached[:, -1:]  # ends at exactly 1, which no chance reaches
    return torch.searchsorted(reached, chances[:, None], right=True)[:, 0]


def columns(tokens: Tensor) -> Iterator[list[int]]:
    """The tokens of every step, up to one where scores were not numbers one can draw from."""
    for column in tokens.tolist():
        if NONE in column:
            raise not_numbers()
        yield column


def not_numbers() -> WorkFailed:
    """What a diverged model's text ends with."""
    return WorkFailed(
        "the model's scores are not numbers one can draw from (NaN or infinite)",
        hint="its training diverged: train again with a smaller learning rate",
    )


# ---------------------------------------------------------------------- which text has which writer


@final
class Kept:
    """The writers of a model that write no text now, the last used first."""

    def __init__(self) -> None:
        self.writers: list[Writer] = []
        self.lock = threading.Lock()
        self.slowly = 0
        """How many tokens were written without a graph."""

    def lent(self, key: Hashable) -> Writer | None:
        """One that is this text's alone."""
        with self.lock:
            for i, writer in enumerate(self.writers):
                if writer.key == key:
                    return self.writers.pop(i)
        return None

    def give_back(self, writer: Writer) -> None:
        """Let another text have it; the last used is kept, however large."""
        with self.lock:
            kept, room = [writer, *self.writers][:KEPT], largest(writer.device)
            while len(kept) > 1 and sum(w.memory.nbytes for w in kept if w.memory) > room:
                kept.pop()
            self.writers = kept


_KEPT: weakref.WeakKeyDictionary[LanguageModel, Kept] = weakref.WeakKeyDictionary()


def _key(model: LanguageModel, rules: Rules, rows: int) -> Hashable:
    """What texts agree in that one writer can write: where the weights lie, and every switch.

    None where weights are computed whenever they are asked for: at another place each time.
    """
    if hears(model):
        return None
    places = [(w.data_ptr(), w.shape, w.stride(), w.dtype) for w in model.parameters()]
    dtype, device = model.bias_q.dtype, model.bias_q.device
    cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    products = torch.backends.cuda.matmul.allow_tf32
    return (
        *(rows, rules.temperature == 0, rules.top_k, _cuts(rules), tuple(rules.exclude)),
        *(current_stream(device.index), cast, products, *settings(dtype), *switches()),
        *(model.recurrence.zoneout, *places),
    )
