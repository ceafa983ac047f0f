"""Any module that maps ids and a state to logits and a state, read like a language model.

    logits, state = model(ids, state)          ids (batch, time)

`logits` are (batch, time, vocabulary), or as the notes have them (time · batch, vocabulary), time
first. `state` is a nest of tensors; before any text it is `model.begin_state(batch_size=…,
device=…)` where the model has that, as the notes' models do, else None.

    read        one such call, the logits (batch, time, vocabulary) whatever the model's way
    Reader      what a training asks of a model: a `LanguageModel` answers it itself
    Adapted     the same answers for any other module
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elman.errors import UserError
from elman.gradients import Carry, Memory
from elman.language_model.looking import evaluating
from elman.language_model.masks import NO_MASKS, Masks, Noise
from elman.language_model.model import LanguageModel, known_range
from elman.language_model.nests import Nest, over, tensors


def read(model: nn.Module, ids: Tensor, state: Nest = None) -> tuple[Tensor, Nest]:
    """Logits (batch, time, vocabulary) of the token after each id, and the state at the end."""
    begin: Any = getattr(model, "begin_state", None)
    if state is None and begin is not None:
        state = begin(batch_size=len(ids), device=ids.device)
    answer = model(ids, state)
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], Tensor):
        raise UserError(
            f"{_name(model)} gave a {type(answer).__name__} where logits and a state were expected",
            hint="its forward(ids, state) must return (logits, state)",
        )
    return _batch_first(answer[0], ids, model), answer[1]


def _batch_first(logits: Tensor, ids: Tensor, model: nn.Module) -> Tensor:
    batch, time = ids.shape
    if logits.dim() == 3 and logits.shape[:2] == (batch, time):
        return logits
    if logits.dim() == 2 and len(logits) == time * batch:
        return logits.unflatten(0, (time, batch)).transpose(0, 1)
    raise UserError(
        f"{_name(model)} gave logits of shape {tuple(logits.shape)} for ids of shape "
        f"{(batch, time)}",
        hint=f"({batch}, {time}, vocabulary), or ({time * batch}, vocabulary) with time first",
    )


def _name(model: nn.Module) -> str:
    return f"the model, a {type(model).__name__},"


Loss = Callable[[Tensor, int], Tensor]
"""The loss of the steps from a number on, given what `Reader.states` found there."""


class Reader(Protocol):
    """What a training asks of a model, besides its parameters."""

    noise: Noise
    """What the masks are drawn from: part of a checkpoint."""

    @property
    def recurrence(self) -> Any:
        """The `elman.nn` module inside, if there is one."""
        ...

    @property
    def lane_dim(self) -> int:
        """Which dimension of a state's tensors counts the rows of the batch."""
        ...

    @property
    def draws_globally(self) -> bool:
        """Whether reading may draw from torch's global generators, as torch's dropout does."""
        ...

    def refusal(self, carry: Carry, memory: Memory | None) -> tuple[str, str] | None:
        """Why it cannot be trained so, and what to try; None if it can."""
        ...

    def irregular(self) -> str | None:
        """Why two of its windows are not the same work on the same shapes; None if they are."""
        ...

    def check_range(self, low: int, high: int) -> None:
        """Refuse ids from `low` to `high` that name no token."""
        ...

    def draw_masks(self, batch: int) -> Masks:
        """The masks of one window."""
        ...

    def hide_tokens(self, ids: Tensor, lanes: int | None = None, first: int = 0) -> Tensor:
        """The ids as the model shall read them: rows of a batch of `lanes`, from `first` on."""
        ...

    def lent(
        self, xi: Tensor | None, memory: Memory | None, until: Tensor | None = None
    ) -> AbstractContextManager[None]:
        """Inside this block, step t hands ξ_t times its gradient back (None: 1)."""
        ...

    def states(self, ids: Tensor, state: Nest, masks: Masks) -> tuple[Tensor, Nest]:
        """What the predictions are made from, time first, and the state after the last step."""
        ...

    def mean_nats(self, hs: Tensor, targets: Tensor, masks: Masks) -> Tensor:
        """The mean of -log P(target_t), from what `states` found, both time first."""
        ...

    def read_back(self, ids: Tensor, masks: Masks, loss: Loss) -> tuple[Tensor, Nest]:
        """Read whole lanes from the beginning and carry all losses back; their sum."""
        ...

    def computed(self, ids: Tensor, state: Nest, masks: Masks) -> list[tuple[str, Tensor]]:
        """What an update computes before its loss, by name and in order."""
        ...


def reader_of(model: nn.Module) -> Reader:
    """The model itself where it answers to `Reader`, else adapted."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"a {type(model).__name__} is not a torch.nn.Module, so its weights cannot be found",
            hint="inherit from nn.Module, with the weights as self.params = nn.ParameterList(…)",
        )
    if next(model.parameters(), None) is None:
        raise UserError(f"{_name(model)} has no parameters to train", hint="nn.Parameter(tensor)")
    native = isinstance(getattr(model, "_orig_mod", model), LanguageModel)  # compiled or not
    return cast("Reader", model) if native else Adapted(model)


@final
class Adapted:
    """Any other module, with the answers that a training asks for.

    It is called with a stretch of text at a time, and knows nothing of masks. Where a carry gives
    a step a weight ξ_t ≠ 1, the module is called up to there and again from there on, and what is
    handed back between the two calls is multiplied by ξ_t.
    """

    recurrence = None
    draws_globally = True

    def __init__(self, module: nn.Module) -> None:
        self.module, self.noise = module, Noise(0)
        self._xi: Tensor | None = None

    def refusal(self, carry: Carry, memory: Memory | None) -> tuple[str, str] | None:
        """Any carry will do, as any state can be handed on; autograd decides what is kept."""
        if memory is None or memory.keeps_all:
            return None
        why = f"a {type(self.module).__name__}: elman does not know what its steps keep"
        return why, "memory=0, or an elman.LanguageModel"

    def irregular(self) -> str | None:
        """Nobody knows what it does from one window to the next."""
        return f"{_name(self.module)} is not an elman.LanguageModel"

    def check_range(self, low: int, high: int) -> None:
        """Ask it about two short rows of the first token, which also shows what it returns."""
        logits, _ = self._tried(rows=2)
        known_range(low, high, logits.shape[-1])

    def _tried(self, rows: int) -> tuple[Tensor, Nest]:
        device = next(self.module.parameters()).device
        ids = torch.zeros(rows, 3, dtype=torch.int64, device=device)
        cuda = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(cuda), evaluating(self.module):
            return read(self.module, ids)

    @property
    def lane_dim(self) -> int:
        """Found out by asking, once: the dimension that grows with the rows."""
        return self._lane_dim

    @cached_property
    def _lane_dim(self) -> int:
        shapes = [[t.shape for t in tensors(self._tried(rows)[1])] for rows in (2, 3)]
        dims = {
            next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), -1)
            for pair in zip(*shapes, strict=True)
        }
        if dims - {0, 1} or len(dims) > 1:
            raise UserError(
                f"{_name(self.module)} has a state whose tensors are {[*map(tuple, shapes[0])]} "
                "for two rows: which dimension of them counts the rows?",
                hint="(rows, …) for all tensors, or (layers, rows, …) for all",
            )
        return dims.pop() if dims else 0

    def draw_masks(self, batch: int) -> Masks:
        """None: what it hides is its own affair."""
        return NO_MASKS

    def hide_tokens(self, ids: Tensor, lanes: int | None = None, first: int = 0) -> Tensor:
        """None are hidden."""
        return ids

    @contextmanager
    def lent(
        self, xi: Tensor | None, memory: Memory | None, until: Tensor | None = None
    ) -> Iterator[None]:
        """Inside this block `states` weighs what each step hands back."""
        assert until is None, "only an update of a LanguageModel has room to spare"
        self._xi = xi
        try:
            yield
        finally:
            self._xi = None

    def states(self, ids: Tensor, state: Nest, masks: Masks) -> tuple[Tensor, Nest]:
        """The logits, time first, and the state after the last step."""
        steps, xi = ids.shape[1], self._xi
        inner = [] if xi is None else [t for t in range(1, steps) if xi[t] != 1]
        pieces = []
        for start, end in itertools.pairwise([0, *inner, steps]):
            if start and xi is not None:
                state = _weighed(state, float(xi[start]))
            logits, state = read(self.module, ids[:, start:end], state)
            pieces.append(logits.transpose(0, 1))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces), state

    def mean_nats(self, hs: Tensor, targets: Tensor, masks: Masks) -> Tensor:
        """The mean of -log softmax(logits_t)[target_t]."""
        return F.cross_entropy(hs.flatten(0, 1), targets.flatten())

    def read_back(self, ids: Tensor, masks: Masks, loss: Loss) -> tuple[Tensor, Nest]:
        """In one go, by autograd."""
        logits, state = self.states(ids, None, masks)
        total = loss(logits, 0)
        total.backward()
        return total.detach(), state

    def computed(self, ids: Tensor, state: Nest, masks: Masks) -> list[tuple[str, Tensor]]:
        """Only the logits are seen from outside."""
        return [("the logits o_t", self.states(ids, state, masks)[0])]


def _weighed(state: Nest, xi: float) -> Nest:
    """The same state, whose gradient is multiplied by ξ in the backward pass; ξ = 0 cuts."""

    def one(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or xi == 0:
            return tensor.detach()
        alias = tensor.view_as(tensor)
        alias.register_hook(lambda gradient: gradient * xi)
        return alias

    return over(one, state)
