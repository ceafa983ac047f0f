"""Reading a prompt, and then one token after another.

The hidden state is carried, so each token costs one step of the model however long the text
already is. Any model will do that `elman.language_model.read` can read, with a state that is None
or a nest of tensors whose last dimension but one is the batch.
"""

from collections.abc import Iterator, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from elman.errors import UserError
from elman.generation.sampling import Ids
from elman.kernels.cpu import Steps as NativeSteps
from elman.language_model import LanguageModel, read
from elman.language_model.looking import is_hooked
from elman.language_model.nests import Nest, over
from elman.options import whole_number
from elman.scoring.metrics import evaluating

FIRST = 1
"""The id that follows `<unk>`: without reserved tokens, a `Vocab`'s most frequent token."""

PIECE = 1024
"""Prompts are read in pieces of this many tokens, so that a long one needs no more memory."""


@final
class Steps:
    """Reads one token per row, call after call, by the quickest way the model has."""

    def __init__(self, model: nn.Module, state: Nest, rows: int) -> None:
        self.model, self.state, self.rows = model, state, rows
        self.stepper = None
        if type(model) is LanguageModel and not is_hooked(model):  # others may do more in a step
            self.stepper = model.stepper(state, rows)

    def __call__(self, tokens: Tensor) -> Tensor:
        """The logits (rows, vocabulary) after the tokens (rows,)."""
        if self.stepper is not None:
            return self.stepper(tokens)
        with evaluating(self.model):
            logits, self.state = read_last(self.model, tokens[:, None], self.state)
        return logits

    @property
    def writer(self) -> NativeSteps | None:
        """What draws and reads by itself, if anything does."""
        return None if self.stepper is None else self.stepper.writer

    def branch(self, rows: Tensor) -> "Steps":
        """Go on from these rows, in this order, each as often as it is named."""
        if self.stepper is not None and len(rows) == self.rows:
            self.stepper.take(rows)
            return self
        state = rows_of(self.state if self.stepper is None else self.stepper.state, rows)
        if self.stepper is not None:
            return Steps(self.model, state, len(rows))
        self.state = state
        return self


def read_all(model: nn.Module, prompts: list[tuple[int, ...]]) -> tuple[Tensor, Nest]:
    """Read each distinct prompt once; the last logits and the state, one row per prompt."""
    distinct = list(dict.fromkeys(prompts))
    readings = [read_last(model, torch.tensor([text], device="cpu"), None) for text in distinct]
    rows = torch.tensor([distinct.index(text) for text in prompts], device="cpu")
    logits = torch.cat([logits for logits, _ in readings])
    return logits[rows.to(logits.device)], rows_of(joined([state for _, state in readings]), rows)


def read_last(model: nn.Module, ids: Tensor, state: Nest) -> tuple[Tensor, Nest]:
    """The logits after the last of `ids`, and the state there."""
    logits = torch.empty(0, device="cpu")
    for piece in ids.to(_device(model)).split(PIECE, dim=1):
        logits, state = read(model, piece, state)
    return logits[:, -1], state


def joined(states: Sequence[Nest]) -> Nest:
    """Several states of one row as one state of several rows."""
    return over(lambda *tensors: torch.cat(tensors, dim=-2), *states)


def rows_of(state: Nest, rows: Tensor) -> Nest:
    """The chosen rows of a state, in the order given, as often as they are named."""
    return over(lambda tensor: tensor.index_select(-2, rows.to(tensor.device)), state)


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def prompt_of(ids: Ids, start: int) -> tuple[int, ...]:
    hint = "vocab.encode(tokens) makes one"
    if isinstance(ids, str | bytes):
        raise UserError(f"a prompt is a line of token ids, not the text {ids!r}", hint=hint)
    ids = list(ids) if isinstance(ids, Iterator) else ids
    text = np.asarray(ids.tolist() if isinstance(ids, Tensor) else ids)
    if text.size and (text.ndim != 1 or text.dtype.kind not in "iu"):
        raise UserError(
            f"a prompt is a line of token ids, not {text.dtype} of shape {tuple(text.shape)}",
            hint=hint,
        )
    return tuple(text.tolist()) or (start,)


def checked_length(length: int) -> int:
    return whole_number("length", length, at_least=0, hint="length=200 writes 200 tokens")
