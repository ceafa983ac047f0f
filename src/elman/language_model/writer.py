"""Drawing text on a GPU, in turns that the host does not wait for: see `turns`.

    p ∝ exp(o / temperature) of the tokens that are kept,   x the first token with Σ_{v ≤ x} p_v > u

u is a chance that the host has drawn beforehand, so it need not hear of a token before the next one
is drawn: it reads them by the dozen. A graph serves texts of any temperature.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from elman.kernels.cuda import small
from elman.language_model.kept import remembered
from elman.language_model.model import LanguageModel, ModelState
from elman.language_model.turns import MANY, Turns, highest, ids_of, lent, not_numbers

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


def written(
    model: LanguageModel,
    logits: Tensor,
    state: ModelState,
    length: int,
    rules: Rules,
    chances: list[Iterator[float]],
) -> Iterator[list[int]]:
    """One token for each text at every step, from these logits and this state on."""
    rows = len(chances)
    what = (Writer, rows, rules.temperature == 0, rules.top_k, _cuts(rules), tuple(rules.exclude))
    with lent(model, what, length, lambda key: Writer(model, rules, rows, key)) as writer:
        writer.begin(logits, state, rules)
        done, count = 0, 1
        while done < length:
            count = min(count, length - done)
            yield from writer.write(count, chances)
            done, count = done + count, min(2 * count, MANY)


@final
class Writer(Turns):
    """Draws a token of every text and reads it, again and again."""

    def __init__(self, model: LanguageModel, rules: Rules, rows: int, key: Hashable) -> None:
        super().__init__(model, rows, key)
        self.greedy, device = rules.temperature == 0, self.device
        with remembered():
            self.rules = Held.like(rules, device)
            self.excluded = ids_of(rules.exclude, device)
            self.told = torch.zeros(MANY, rows, dtype=torch.int64, device=device)
            self.chances = torch.zeros(MANY, rows, dtype=torch.float64, device=device)

    def begin(self, logits: Tensor, state: ModelState, rules: Rules) -> None:
        """Write a text from here on."""
        with remembered():
            self.rules.follow(rules)
            self.logits.copy_(logits)
            self.step.state = state

    def write(self, count: int, chances: list[Iterator[float]]) -> Iterator[list[int]]:
        """The next tokens of all texts, `MANY` of each at most."""
        if not self.greedy:
            drawn = [[*map(next, chances)] for _ in range(count)]
            with remembered():
                self.chances[:count].copy_(torch.tensor(drawn, dtype=torch.float64, device="cpu"))
        self.take(count)
        yield from columns(self.told[:count])

    def _choose(self) -> Tensor:
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
        return tokens


def weights(scores: Tensor, top: Tensor, rules: Held) -> Tensor:
    """exp((o - max o) / temperature) of the tokens that top-k and then top-p leave, else 0."""
    top = top.double()
    if rules.top_k is not None and rules.top_k < scores.shape[1]:
        best = scores.topk(rules.top_k).values
        kept = highest(scores, best[:, -1:], rules.top_k)
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
    return found.masked_fill_(~highest(scores, best.gather(1, count - 1), count), 0)


def _weights(scores: Tensor, top: Tensor, rules: Held) -> Tensor:
    return scores.double().sub_(top).div_(rules.temperature).exp_()


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
