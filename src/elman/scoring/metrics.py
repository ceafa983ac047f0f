"""How good a model is: nats, perplexity and bits, over a whole held-out text.

nats per token  =  -1/n Σ_t log P(x_t | x_1 … x_{t-1})
perplexity      =  exp(nats per token), the geometric mean of the number of choices left
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from elman.errors import UserError
from elman.language_model import LanguageModel, read
from elman.language_model.adapted import evaluating as evaluating
from elman.language_model.looking import is_hooked
from elman.language_model.loss import widened
from elman.language_model.model import ModelState, known_labels
from elman.language_model.nests import Nest
from elman.recurrence.operator import known_ids
from elman.scoring import captured
from elman.text.batches import flat_integers
from elman.text.shards import ShardedIds
from elman.text.vocab import Vocab

Ids = Tensor | np.ndarray | ShardedIds
PIECE = 1024
"""Steps of text that are held in memory at a time, fewer of a large vocabulary."""
MANY = 1 << 26
"""How many logits are held at a time, of a model that says how many a token has."""
CHUNKED_PIECE = 1 << 17
"""The same where they run in chunks side by side, which wants long stretches."""
LOOKED_AT = 1 << 22
"""Ids that are looked at in one go."""


def perplexity(nats: float) -> float:
    """exp of the mean negative log-likelihood: 1 for a perfect model, |V| for a uniform one.

    >>> perplexity(0.0), round(perplexity(math.log(28))), perplexity(math.inf)
    (1.0, 28, inf)
    """
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Score:
    """The total negative log-likelihood of a text, in nats, and over how many predicted tokens.

    >>> score = Score(tokens=4, nats=4 * math.log(2))
    >>> score.perplexity, score.bits_per_token, score.bits_per_char(characters=8)
    (2.0, 1.0, 0.5)
    """

    tokens: int
    nats: float

    @property
    def nats_per_token(self) -> float:
        """The mean over predicted tokens."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of the mean."""
        return perplexity(self.nats_per_token)

    @property
    def bits_per_token(self) -> float:
        """The mean in bits: what an ideal compressor would spend on a token."""
        return self.nats_per_token / math.log(2)

    def bits_per_char(self, characters: int) -> float:
        """The total in bits over the characters of text that the predicted tokens stand for."""
        return self.nats / math.log(2) / characters


def characters(vocab: Vocab, ids: Any) -> int | None:
    """How many characters of text the predicted tokens, all after the first, stand for.

    None where one of them is `<unk>`, which may have been any word: only the text itself knows
    (`elman.text.prepared.Splits.predicted_characters`).
    """
    if vocab.unk is not None and (np.asarray(ids)[1:] == vocab.unk).any():
        return None
    return len(vocab.decode(ids)) - len(vocab.decode(ids[:1]))


def evaluate(
    model: torch.nn.Module,
    ids: Ids,
    *,
    lanes: int = 1,
    warm_up: int = 256,
    piece: int | None = None,
) -> Score:
    """Score every token of a text after its first, each exactly once, with the state carried on.

    With one lane this is the definition: the text is read from its first token to its last and the
    state is never reset. More lanes read as many stretches of the text side by side, which is
    faster; each but the first reads the `warm_up` tokens before its stretch to reach its state, so
    the score differs from the definition by what a model remembers for longer than that.
    `piece` steps are held in memory at a time and change nothing: 1024, fewer of a large
    vocabulary, or many more for a model that runs them in chunks side by side (`time=Chunked()`).
    """
    nats = nats_of_lanes(model, ids, lanes, slice(None), warm_up=warm_up, piece=piece)
    return Score(len(ids) - 1, nats)


def nats_of_lanes(
    model: torch.nn.Module,
    ids: Ids,
    lanes: int,
    part: slice,
    *,
    warm_up: int = 256,
    piece: int | None = None,
) -> float:
    """The share that some of the lanes have in the nats of `evaluate`: those of all are its score.

    A text too short for so many lanes is read as one, the first.
    """
    ids = ids if isinstance(ids, Tensor | ShardedIds) else np.asarray(ids)
    if ids.ndim != 1:
        raise UserError(
            f"ids of shape {tuple(ids.shape)} have nothing to predict", hint="a text is one row"
        )
    if len(ids) < 2:
        raise UserError(
            f"a text of {len(ids)} token{'s' * (len(ids) != 1)} has nothing to predict",
            hint="a text of at least two",
        )
    flat = flat_integers(ids)
    is_known = isinstance(flat, ShardedIds | Tensor)
    known = flat if is_known else torch.as_tensor(flat, device="cpu")
    predictions = len(known) - 1
    if lanes < 2 or predictions < 2 * lanes * warm_up:
        lanes, warm_up = 1, 0
    rows = len(range(lanes)[part])
    if not rows:
        return 0.0
    chunked = lanes == 1 and in_chunks(model)
    most = MANY // (lanes * int(getattr(model, "vocab_size", 1)))
    piece = piece or (CHUNKED_PIECE if chunked else max(1, min(PIECE, most)))
    size = model.vocab_size if isinstance(model, LanguageModel) else None
    if size is not None and isinstance(known, Tensor):
        for some in known.split(LOOKED_AT):
            known_labels(some, size)
    state: Nest = None
    with evaluating(model), captured.lent(model, rows, _add) as scorer:
        for window, counts in _windows(known, lanes, part, warm_up, piece):
            if size is not None and isinstance(known, ShardedIds):
                known_labels(window, size)
            state = scorer(model, window, counts, state)
        return scorer.nats


def _add(
    model: torch.nn.Module, window: Tensor, counts: Tensor | None, state: Nest, total: Tensor
) -> Nest:
    """Add the nats of a window's steps that count (None: all) to the total; the state after it."""
    nats, state = token_nats(model, window, state)
    nats = nats.double()
    if counts is not None:
        nats = nats.where(counts.to(total.device, non_blocking=True), 0)
    total += nats.sum()
    return state


def token_nats(model: torch.nn.Module, window: Tensor, state: Nest = None) -> tuple[Tensor, Nest]:
    """-log P of each token of a window (batch, 1 + time) after the first, and the state then.

    The ids of a `LanguageModel` are tokens that it knows: the caller has looked at the whole text,
    on the CPU if it lies there, so that no GPU is waited for. What another model knows is seen in
    its logits.
    """
    here = window.to(next(model.parameters()).device, non_blocking=True).long()
    x, y = here[:, :-1], here[:, 1:]
    if isinstance(model, LanguageModel):
        # What a subclass or a hook does in a call is theirs, unless logits would be too many.
        is_plain = type(model) is LanguageModel and not is_hooked(model)
        if is_plain or x.shape[1] > PIECE:
            with known_ids() if is_plain else nullcontext():
                hs, state = model.states(x, cast("ModelState", state))
            return model.each_nats(hs, y.T).T, state
    logits, state = read(model, x, state)
    if not isinstance(model, LanguageModel):
        known_labels(window[:, 1:], logits.shape[-1])
    nats = F.cross_entropy(widened(logits).flatten(0, 1), y.flatten(), reduction="none")
    return nats.view(y.shape), state


def in_chunks(model: torch.nn.Module) -> bool:
    """Whether a language model runs time in chunks side by side."""
    recurrence = model.recurrence if isinstance(model, LanguageModel) else None
    return recurrence is not None and recurrence.time.in_chunks


def _windows(
    ids: Tensor | ShardedIds, lanes: int, part: slice, warm_up: int, piece: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Windows (lanes, 1 + steps) of some of the lanes, `piece` steps each, and which steps count.

    Row b starts at b·stride and has warm_up + stride steps; of row 0 all count, of every other row
    the last stride: together each prediction once. None: all of these do.
    """
    predictions = len(ids) - 1
    stride = math.ceil((predictions - warm_up) / lanes)
    rows = range(lanes)[part]
    first = torch.tensor(rows, device="cpu")[:, None] * stride
    for start in range(0, warm_up + stride, piece):
        end = min(start + piece, warm_up + stride)
        if rows[-1] * stride + end <= predictions and (start >= warm_up or rows[-1] == 0):
            begins = range(rows[0] * stride + start, predictions, rows.step * stride)[: len(rows)]
            yield _read(ids, begins, end - start + 1), None
        else:
            steps = torch.arange(start, end + 1, device="cpu")
            at = first + steps
            counts = (at < predictions) & ((steps >= warm_up) | (first == 0))
            yield _picked(ids, at.clamp(max=predictions)), counts[:, :-1]


def _read(ids: Tensor | ShardedIds, begins: range, steps: int) -> Tensor:
    """So many ids from each place on."""
    if isinstance(ids, Tensor):
        size, each = (len(begins), steps), ids.stride(0)
        start = ids.storage_offset() + begins.start * each
        return ids.as_strided(size, (begins.step * each, each), start).contiguous()
    starts = torch.tensor(begins, device="cpu")
    return _picked(ids, starts[:, None] + torch.arange(steps, device="cpu"))


def _picked(ids: Tensor | ShardedIds, at: Tensor) -> Tensor:
    """The ids at these positions, which rise by one along each row, or stay at the end."""
    if isinstance(ids, Tensor):
        return ids[at]
    rows = [ids[int(row[0]) : int(row[-1]) + 1].read()[(row - row[0]).numpy()] for row in at]
    return torch.from_numpy(np.stack(rows).astype(np.int64))
