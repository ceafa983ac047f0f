"""The most probable texts, by a beam.

log p(y | x) = Σ_t log p(y_t | x, y_1 … y_{t-1})
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from elman.generation.reading import FIRST, Steps, checked_length, prompt_of, read_last, rows_of
from elman.generation.sampling import UNK, Ids, Scores, excluded, ids_to_exclude
from elman.language_model import native_writer, searcher, turns
from elman.language_model.loss import widened
from elman.language_model.nests import Nest
from elman.language_model.turns import not_numbers
from elman.options import whole_number
from elman.scoring.metrics import evaluating


class Continuation(NamedTuple):
    """A text found by beam search and how probable the model finds it, in natural logarithm."""

    ids: list[int]
    log_probability: float


def beam_search(
    model: nn.Module,
    prompt_ids: Ids,
    length: int,
    width: int,
    *,
    exclude: Sequence[int] = (UNK,),
    start: int = FIRST,
) -> list[Continuation]:
    """The most probable continuations of `length` tokens that a beam of `width` finds, best first.

        log p(y | x) = Σ_t log p(y_t | x, y_1 … y_{t-1})

    At each step every text kept so far is continued by every token, and the `width` most probable
    results are kept. A beam of |V|^(length - 1) misses nothing. Excluded tokens are not written,
    and their probability is not handed to the others: the scores are the model's own.
    """
    width = whole_number("width", width, at_least=1, hint="1 is greedy")
    length = checked_length(length)
    text, exclude = prompt_of(prompt_ids, start), ids_to_exclude(exclude)
    if length == 0:
        return [Continuation([], 0.0)]
    with evaluating(model):
        return _search(model, text, length, width, exclude)


def _search(
    model: nn.Module, text: tuple[int, ...], length: int, width: int, exclude: Sequence[int]
) -> list[Continuation]:
    logits, state = read_last(model, torch.tensor([text], device="cpu"), None)
    size = logits.shape[-1]
    without = excluded(tuple(exclude), size)
    width = min(width, _possible(size - len(set(without)), length, width))
    if turns.takes(model):
        own, carried = cast(Any, model), cast(Any, state)
        steps, scores = searcher.searched(own, logits, carried, length, width, without)
    else:
        alike = torch.zeros(width, dtype=torch.int64, device="cpu")
        if (native := Steps(model, rows_of(state, alike), width).writer) is not None:
            steps, scores = native_writer.searched(native, logits, length, without)
        else:
            steps, scores = _steps_of_a_beam(model, logits, state, length, width, without)
    texts = zip(_traced(steps), scores.tolist(), strict=True)
    return [Continuation(ids, score) for ids, score in texts if score > -math.inf]


def _possible(tokens: int, length: int, enough: int) -> int:
    """How many texts of this length there are, or some number above `enough`.

    >>> _possible(28, 2, 10**9), _possible(1, 10**9, 3), _possible(2, 10**9, 3)
    (784, 1, 4)
    """
    return tokens ** min(length, enough.bit_length())


def _steps_of_a_beam(
    model: nn.Module, logits: Tensor, state: Nest, length: int, width: int, exclude: list[int]
) -> tuple[searcher.Beam, Scores]:
    """For every token, which text each new one continues and with what; the last scores."""
    size, step = logits.shape[-1], None
    unwritten = torch.tensor(exclude, dtype=torch.int64, device=logits.device)
    scores: Scores = np.zeros(1)
    steps: searcher.Beam = []
    for remaining in reversed(range(length)):
        log_p, ids = _likeliest_of_each(logits.detach(), unwritten, width)
        reached = (scores[:, None] + log_p).ravel()
        places = (size * np.arange(len(ids))[:, None] + ids).ravel()
        best = np.lexsort((places, -reached))[:width]  # of equals, the first text and lowest id
        best = best[np.isfinite(reached[best])]
        scores, (rows, tokens) = reached[best], divmod(places[best], size)
        steps.append((rows, tokens))
        if remaining:
            chosen = torch.from_numpy(rows)
            if step is None:
                step = Steps(model, rows_of(state, chosen), len(rows))
            else:
                step = step.branch(chosen)
            logits = step(torch.from_numpy(tokens))
    return steps, scores


def _likeliest_of_each(
    logits: Tensor, unwritten: Tensor, count: int
) -> tuple[NDArray[np.floating], Ids]:
    """log p of the `count` likeliest tokens of every row, and which these are.

    Among equals those of lower ids are taken; their order is open.
    """
    log_p = widened(logits).log_softmax(-1)  # one bad number makes all of its row NaN
    if len(unwritten):
        log_p.index_fill_(1, unwritten, -math.inf)
    found, ids = (t.cpu().numpy() for t in log_p.topk(min(count + 1, log_p.shape[1])))
    if not np.isfinite(found[:, 0]).all():  # NaN wins every maximum
        raise not_numbers()
    last = found[:, count - 1 : count]
    if ((last == found[:, count:]) & (last > -math.inf)).any():  # which of equals is torch's affair
        both = log_p.sort(descending=True, stable=True)
        found, ids = (t[:, :count].cpu().numpy() for t in both)
    return found[:, :count], ids[:, :count]


def _traced(steps: searcher.Beam) -> list[list[int]]:
    """Follow every text of the last beam back to the prompt."""
    row = np.arange(len(steps[-1][0]))
    columns = []
    for rows, tokens in reversed(steps):
        columns.append(tokens[row])
        row = rows[row]
    return np.stack(columns[::-1], -1).tolist()
