"""Searching for the most probable text on a GPU, in turns that the host does not wait for.

    log p(y | x) = Σ_t log p(y_t | x, y_1 … y_{t-1})

A beam has as many rows as it is wide from the beginning on: those that no text has yet have a score
of -∞, and so has whatever continues them. `generation.beam_search` says which texts are kept.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elman.language_model.captured import flat
from elman.language_model.kept import remembered
from elman.language_model.loss import widened
from elman.language_model.model import LanguageModel, ModelState
from elman.language_model.turns import MANY, Turns, highest, ids_of, lent, not_numbers

Beam = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""For every token: which text of the step before each new one continues, and with what."""


def searched(
    model: LanguageModel,
    logits: Tensor,
    state: ModelState,
    length: int,
    width: int,
    exclude: Sequence[int],
) -> tuple[Beam, NDArray[np.float64]]:
    """The steps of a beam from these logits and this state of one text on, and its last scores.

    A score of -∞ is of no text.
    """
    what = (Searcher, width, tuple(exclude))
    steps: Beam = []
    with lent(model, what, length, lambda key: Searcher(model, width, exclude, key)) as searcher:
        searcher.begin(logits, state)
        while len(steps) < length:
            steps += searcher.search(min(MANY, length - len(steps)))
        return steps, searcher.scores.cpu().numpy()


@final
class Searcher(Turns):
    """Continues the most probable texts by the most probable tokens, again and again."""

    def __init__(
        self, model: LanguageModel, width: int, exclude: Sequence[int], key: Hashable
    ) -> None:
        super().__init__(model, width, key)
        self.width, self.each = width, min(width, model.vocab_size)
        make: dict[str, Any] = {"dtype": torch.int64, "device": self.device}
        with remembered():
            self.excluded = ids_of(exclude, self.device)
            self.behind = torch.arange(model.vocab_size, 0, -1, device=self.device)
            self.scores = torch.zeros(width, dtype=torch.float64, device=self.device)
            self.numbers = torch.ones((), dtype=torch.bool, device=self.device)
            self.rows, self.tokens = (torch.zeros(MANY, width, **make) for _ in range(2))

    def begin(self, logits: Tensor, state: ModelState) -> None:
        """Search from here on: one text, in the first row."""
        with remembered():
            self.logits.copy_(logits.expand(self.width, -1))
            rows = [s.expand(-1, self.width, -1) for s in flat(state)]
            self.step.state = rows[0] if len(rows) == 1 else tuple(rows)
            self.scores.fill_(-math.inf)[0] = 0
            self.numbers.fill_(True)

    def search(self, count: int) -> Beam:
        """The next steps of the beam, `MANY` at most."""
        self.take(count)
        rows, tokens = (t[:count].to("cpu", copy=True).numpy() for t in (self.rows, self.tokens))
        if not self.numbers:
            raise not_numbers()
        return list(zip(rows, tokens, strict=True))

    def _choose(self) -> Tensor:
        log_p = widened(self.logits).log_softmax(-1)  # one bad number makes all of its row NaN
        if len(self.excluded):
            log_p = log_p.index_fill(1, self.excluded, -math.inf)
        ids, log_p = self._likeliest(log_p)
        reached = (self.scores[:, None] + log_p).flatten()
        scores, places = reached.sort(descending=True, stable=True)  # of equals, the first text
        scores, places = scores[: self.width], places[: self.width]
        places = places.where(scores.isfinite(), places[0])  # no text reads what is not written
        rows, tokens = places // self.each, ids.flatten().index_select(0, places)
        self.scores.copy_(scores)
        self.rows.index_copy_(0, self.at, rows[None])
        self.tokens.index_copy_(0, self.at, tokens[None])
        for s in self.step.states:
            s.copy_(s.index_select(1, rows))
        return tokens

    def _likeliest(self, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """The ids of the likeliest tokens of every row, rising, and their log p.

        Among equals those of lower ids are taken: which ones `topk` takes is torch's affair.
        """
        best = log_p.topk(self.each).values
        self.numbers.logical_and_(best[:, 0].isfinite().all())  # NaN wins every maximum
        kept = highest(log_p, best[:, -1:], self.each)
        behind = self.behind.where(kept, 1).topk(self.each).values
        ids = len(self.behind) - behind
        return ids, log_p.gather(1, ids)
