"""The language model of the notes: token → recurrence → the odds of every next token.

    h_t = cell(x_t, h_{t-1})          x_t: the one-hot row of token t, or its learned embedding
    o_t = h_t W_hqᵀ + b_q             softmax(o_t)_v = P(x_{t+1} = v | x_1 … x_t)

A one-hot row times a matrix is a row of that matrix, so it is looked up and never multiplied.
`cell="mlp"` is the model without a hidden state (Bengio et al., 2003): h_t sees the last `context`
tokens and nothing else. It answers the same calls, so everything that trains, measures or samples
one of these models does so for all of them.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from elman import cells
from elman.errors import UserError
from elman.gradients import (
    Carry,
    Chunked,
    Full,
    Given,
    Memory,
    Stepped,
    Stored,
    Time,
    backward_through_time,
)
from elman.gradients.carry import InTensor
from elman.language_model.embedding import Embedding
from elman.language_model.looking import hears, is_hooked, weights_of
from elman.language_model.loss import linear_cross_entropy, nats_of_each
from elman.language_model.masks import NO_MASKS, PANEL, Dropout, Masks, Noise
from elman.language_model.stepper import Stepper
from elman.language_model.window_model import Window
from elman.nn import compiling, of
from elman.options import Beside, check, option
from elman.recurrence.traced import listening
from elman.resources import check_memory

ModelState = Tensor | tuple[Tensor, Tensor] | None
"""The state of a `LanguageModel`: h, (h, c), the last ids of an mlp; None before any text."""
Ids = Tensor | np.ndarray
"""Integers of shape (batch, time): a tensor on the model's device, or an array."""
WINDOWED = "mlp"
"""The `cell` of the model that has none: it reads a window of tokens and carries no state."""
INITS = ("default", "notes")
TABLE = 1 << 24
"""How many products E W_ihᵀ may take for a `stepper` to work it out beforehand: what some forty
steps gain by it. A text need not be longer."""


def kinds() -> tuple[str, ...]:
    """What `cell` may be: every cell by its name in models, or the model without a state."""
    return (*cells.models(), WINDOWED)


@dataclass(frozen=True)
class Shape:
    """What a language model is made of; checked when built, stored with every run."""

    vocab_size: int
    cell: str = option(
        "elman", "What the hidden layer is", panel=PANEL, choices=kinds, name="model"
    )
    hidden_size: int = option(256, "Units of a layer", panel=PANEL, at_least=1)
    layers: int = option(1, "Layers", panel=PANEL, at_least=1, at_most=1000)
    embedding_size: int | None = option(
        None, "Numbers a token becomes; 0: one-hot", panel=PANEL, at_least=1, zero_is_none=True
    )
    tied: bool = option(False, "Output uses the embedding", panel=PANEL, flag="--tied/--untied")
    context: int = option(
        8, "Tokens an mlp sees", panel=PANEL, at_least=1, beside=Beside("model", "mlp")
    )
    dropout: Dropout = field(default_factory=Dropout)
    init: str = option(
        "default", "First weights, as torch's or N(0, 0.01)", panel=PANEL, choices=INITS
    )

    def __post_init__(self) -> None:
        check(self)
        if not isinstance(self.vocab_size, int) or self.vocab_size < 1:
            raise UserError(
                f"vocab_size={self.vocab_size!r} must be at least 1, a whole number",
                hint="vocab_size=len(vocab)",
            )
        if not isinstance(self.dropout, Dropout):
            raise UserError(
                f"dropout={self.dropout!r} must say what it hides",
                hint="dropout=Dropout(outputs=0.5), or another part of the model",
            )
        if self.tied and self.embedding_size != self.hidden_size:
            raise UserError(
                f"tied weights need embedding_size equal to hidden_size={self.hidden_size}, not "
                f"{self.embedding_size}: the embedding is used again as the output layer",
                hint=f"embedding_size={self.hidden_size}, or tied=False",
            )
        self._check_dropout()

    @property
    def recurrent(self) -> bool:
        """Whether a hidden state is carried from token to token."""
        return self.cell != WINDOWED

    @property
    def weights(self) -> int:
        """How many numbers such a model learns.

        >>> model = LanguageModel(28, cell="gru", hidden_size=16, layers=2)
        >>> model.shape.weights, sum(p.numel() for p in model.parameters())
        (4316, 4316)
        """
        V, H, E = self.vocab_size, self.hidden_size, self.embedding_size or 0
        output = V if self.tied else V * H + V
        if self.recurrent:
            cell = cells.of_model(self.cell)
            inputs = (E or V) + (self.layers - 1) * H
            own = self.layers * len(cell.parameters) * H
            return V * E + cell.gates * H * (inputs + self.layers * (H + 2)) + own + output
        first = self.context * (E or V + 1) * H + H
        return (V + 1) * E + first + (self.layers - 1) * (H + 1) * H + output

    def check_affordable(self, copies: int = 1, besides: int = 0, what: str = "") -> None:
        """Refuse a model of which so many copies, and `besides` bytes, are more than memory holds.

        A training has a gradient for each weight, and what its optimizer keeps.
        """
        size = torch.get_default_dtype().itemsize
        times = f" × {copies}" if copies > 1 else ""
        check_memory(
            copies * size * self.weights + besides,
            f"hidden_size={self.hidden_size} and layers={self.layers} over {self.vocab_size} "
            f"tokens: {self.weights} weights × {size} bytes{times}{what}",
            "a smaller hidden_size or embedding_size, fewer layers",
        )

    def _check_dropout(self) -> None:
        mlp = not self.recurrent
        reasons = {
            "inputs": "a one-hot input has no components" if self.embedding_size is None else "",
            "layers": "nothing lies between layers of one" if self.layers == 1 or mlp else "",
            "recurrent": "an mlp has no W_hh" if mlp else "",
            "zoneout": "an mlp has no state" if mlp else "",
            "updates": "an mlp has no state" if mlp else "",
        }
        for name, reason in reasons.items():
            if reason and getattr(self.dropout, name):
                raise UserError(
                    f"dropout of {name} {getattr(self.dropout, name)} hides nothing: {reason}",
                    hint="dropout of tokens and outputs suits every model",
                )


class LanguageModel(nn.Module):
    """The odds of the next token, for every position of a batch of token ids.

    >>> _ = torch.manual_seed(0)
    >>> model = LanguageModel(28, cell="gru", hidden_size=16)
    >>> logits, state = model(torch.zeros(2, 5, dtype=torch.int64))
    >>> logits.shape, state.shape
    (torch.Size([2, 5, 28]), torch.Size([1, 2, 16]))

    The state has PyTorch's shape: (layers, batch, hidden), a pair of them for an lstm; for an mlp
    it is the last `context` ids, (batch, context). `None` is the state before any text.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        cell: str = "elman",
        hidden_size: int = 256,
        layers: int = 1,
        embedding_size: int | None = None,
        tied: bool = False,
        context: int = 8,
        dropout: Dropout | None = None,
        init: str = "default",
        bidirectional: bool = False,
        carry: Carry | None = None,
        memory: Memory | None = None,
        time: Time | None = None,
    ) -> None:
        super().__init__()
        dropout = dropout or Dropout()
        self.shape = Shape(
            vocab_size, cell, hidden_size, layers, embedding_size, tied, context, dropout, init
        )
        if bidirectional:
            raise both_ways()
        self.shape.check_affordable()
        vocab_size, hidden_size = self.shape.vocab_size, self.shape.hidden_size
        layers, context = self.shape.layers, self.shape.context
        embedding_size = self.shape.embedding_size
        self.vocab_size, self.cell, self.hidden_size = vocab_size, cell, hidden_size
        self.recurrence: Any = None
        self.noise = Noise(int(torch.randint(2**62, (), device="cpu")))
        start = 0 if self.recurrent else 1  # a window may begin before the text does: one more row
        self.embedding = Embedding(vocab_size + start, embedding_size) if embedding_size else None
        if self.recurrent:
            self.recurrence = _recurrence(self.shape, carry, memory, time)
        else:
            self.window = Window(vocab_size, context, embedding_size, hidden_size, layers)
        if not tied:
            self.weight_hq = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.bias_q = nn.Parameter(torch.empty(vocab_size))
        self._initialise()

    @property
    def recurrent(self) -> bool:
        """Whether a hidden state is carried from token to token: not by an mlp."""
        return self.shape.recurrent

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that build this model again, as JSON can hold them."""
        return asdict(self.shape)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], carry: Carry | None = None, memory: Memory | None = None
    ) -> "LanguageModel":
        """Build the model that `config` describes, with fresh weights."""
        dropout = Dropout(**config["dropout"])
        return cls(**{**config, "dropout": dropout}, carry=carry, memory=memory)

    @torch.no_grad()
    def _initialise(self) -> None:
        """`default`: as torch.nn. `notes`: every weight N(0, 0.01), biases zero and one per cell.

        PyTorch's cells add two biases where the notes have one; with `notes` the second is held at
        zero, so that a step of gradient descent is the step of the notes.
        """
        bound = 1 / math.sqrt(self.hidden_size)
        if not self.shape.tied:
            self.weight_hq.uniform_(-bound, bound)
        self.bias_q.uniform_(-bound, bound)
        if self.shape.tied and self.embedding is not None:
            self.embedding.weight.mul_(bound)
        if self.shape.init == "notes":
            for name, parameter in self.named_parameters():
                if "bias" in name:
                    parameter.zero_().requires_grad_("bias_hh" not in name)
                else:
                    parameter.normal_(0, 0.01)

    def draw_masks(self, batch: int) -> Masks:
        """Draw the masks of one window; pass them to several calls to treat those as one window."""
        drop = self.shape.dropout
        if not (drop.inputs or drop.outputs or drop.recurrent):
            return NO_MASKS
        like, inputs, outputs = self.bias_q, None, None
        if drop.inputs:
            inputs = self.noise.keep(
                (batch, cast(int, self.shape.embedding_size)), drop.inputs, like
            )
        if drop.outputs:
            outputs = self.noise.keep((batch, self.hidden_size), drop.outputs, like)
        recurrent = {}
        if drop.recurrent:
            for name in getattr(self.recurrence, "parametrizations", ()):
                if name.startswith("weight_hh"):
                    raise UserError(
                        f"dropout of recurrent {drop.recurrent} hides entries of {name}, which is "
                        "parametrized",
                        hint="leave one of the two out; dropout of updates and zoneout go with it",
                    )
            for name, W_hh in self.recurrence.named_parameters():
                if name.startswith("weight_hh"):
                    recurrent[name] = self.noise.keep(tuple(W_hh.shape), drop.recurrent, like)
        return Masks(inputs, outputs, recurrent)

    def hide_tokens(self, ids: Tensor, lanes: int | None = None, first: int = 0) -> Tensor:
        """Read each token as `<unk>` with probability `dropout.tokens`.

        Where the ids are rows of a batch of `lanes`, from `first` on, it is drawn for all of them.
        """
        if not self.shape.dropout.tokens:
            return ids
        rows = len(ids) if lanes is None else lanes
        kept = self.noise.keep((rows, ids.shape[1]), self.shape.dropout.tokens, self.bias_q)
        return torch.where(kept[first : first + len(ids)] > 0, ids, 0)

    def forward(
        self, ids: Ids, state: ModelState = None, masks: Masks | None = None
    ) -> tuple[Tensor, ModelState]:
        """Logits (batch, time, vocabulary) of the token after each id, and the state at the end.

        In training mode the masks of `dropout` are drawn afresh for each call, unless given.
        """
        ids = self._checked(ids)
        if masks is None:
            masks = self.draw_masks(len(ids)) if self.training else NO_MASKS
        if self.training:
            ids = self.hide_tokens(ids)
        hs, state = self.states(ids, state, masks)
        if self.vocab_size <= self.hidden_size:
            return self.project(hs, masks).transpose(0, 1), state
        hs = _shown(hs, masks).transpose(0, 1).contiguous()  # or a loss would copy the logits
        return self.project(hs, NO_MASKS), state

    def states(
        self, ids: Ids, state: ModelState = None, masks: Masks | None = None
    ) -> tuple[Tensor, ModelState]:
        """h_1 … h_T, time first, and the state after the last step.

        Without masks nothing is hidden, in training mode neither.
        """
        if masks is None:
            ids, masks = self._checked(ids), NO_MASKS
        ids = cast(Tensor, ids)
        if not self.recurrent:
            return self.window(ids, self.embedding, cast("Tensor | None", state), masks.inputs)
        return self.recur(self.inputs(ids.T, masks), state, masks)

    def inputs(self, ids: Tensor, masks: Masks) -> Tensor:
        """What the recurrence reads, time first: the ids themselves (one-hot), or embeddings."""
        if self.embedding is None:
            return ids
        xs = self.embedding(ids)
        return xs if masks.inputs is None else xs * masks.inputs

    def recur(self, xs: Tensor, state: ModelState, masks: Masks) -> tuple[Tensor, ModelState]:
        """Run the recurrence, with W_hh thinned out where there is a mask for it."""
        if not masks.recurrent:
            return self.recurrence(xs, state)
        return functional_call(self.recurrence, self._thinned(masks), (xs, state))

    def recur_back(
        self, xs: Tensor, state: ModelState, masks: Masks, loss: Callable[[Tensor, int], Tensor]
    ) -> tuple[Tensor, ModelState]:
        """Run the recurrence and carry its losses back: `gradients.backward_through_time`."""
        thinned = {f"rnn.{name}": W_hh for name, W_hh in self._thinned(masks).items()}
        return functional_call(_Back(self.recurrence), thinned, (xs, loss, state))

    def _thinned(self, masks: Masks) -> dict[str, Tensor]:
        return {n: self.recurrence.get_parameter(n) * mask for n, mask in masks.recurrent.items()}

    def project(self, hs: Tensor, masks: Masks) -> Tensor:
        """o_t = h_t W_hqᵀ + b_q, time first like `hs`."""
        return F.linear(_shown(hs, masks), self.output_weight, self.bias_q)

    def mean_nats(self, hs: Tensor, targets: Tensor, masks: Masks) -> Tensor:
        """The mean of -log softmax(o_t)[target_t], both time first: the loss, logits unseen."""
        hs = _shown(hs, masks)
        return linear_cross_entropy(hs, self.output_weight, self.bias_q, targets)

    def each_nats(self, hs: Tensor, targets: Tensor) -> Tensor:
        """-log softmax(o_t)[target_t] of each target, both time first, without a gradient."""
        return nats_of_each(hs, self.output_weight, self.bias_q, targets)

    def read_in_chunks(self, chunks: int, tolerance: float = 1e-5) -> None:
        """From now on, run so many stretches of a text side by side (`gradients.Chunked`)."""
        if not self.recurrent:
            raise UserError(
                f"chunks={chunks} with an mlp: it has no recurrence to cut in time",
                hint="leave chunks out: an mlp reads all positions at once as it is",
            )
        self.recurrence.time = Chunked(chunks, tolerance=tolerance)

    def stepper(self, state: ModelState = None, rows: int = 1) -> Stepper | None:
        """What reads one id per row at a time, from `state` on, fast; None where nothing is faster.

        Nothing is hidden from it, in training mode neither. On a CPU an embedding and the input
        weights are one table, x_t W_ihᵀ = (E W_ihᵀ)[id], if that takes no more than `TABLE`: it is
        worked out here, from the weights as they are now.
        """
        if not self.recurrent or self.bias_q.device.type not in ("cpu", "cuda"):
            return None
        rows_of_W = cells.of_model(self.cell).gates * self.hidden_size
        products = self.vocab_size * rows_of_W * (self.shape.embedding_size or 0)
        rnn, out, E = self.stepped(in_table=self.bias_q.is_cpu and 0 < products <= TABLE)
        return Stepper(rnn, out, state, rows, E)

    def stepped(self, in_table: bool = False) -> tuple[Any, nn.Linear, Tensor | None]:
        """What runs in a step: the recurrence, the output layer, and the embedding, if any.

        They have the model's own weights, where these are plain parameters; `in_table` makes new
        ones of the embedding and the input weights.
        """
        own, V = self.recurrence, self.vocab_size
        E = None if self.embedding is None else self.embedding.weight.detach()[:V]
        width = V if E is None or in_table else E.shape[1]
        rnn = of(
            *(own.cell, width, self.hidden_size, self.shape.layers),
            zoneout=own.zoneout,
            device="meta",
        ).eval()
        weights = weights_of(own, dict(rnn.named_parameters()))
        if E is not None and in_table:
            weights["weight_ih_l0"] = weights["weight_ih_l0"] @ E.T
        rnn.load_state_dict(weights, assign=True)
        rnn.repeatable = True
        out = _Undrawn(self.hidden_size, V, device="meta")
        # detached: of a parameter itself torch would change requires_grad, and thaw a frozen one
        output = {"weight": self.output_weight.detach(), "bias": self.bias_q.detach()}
        out.load_state_dict(output, assign=True)
        return rnn, out, None if in_table else E

    @property
    def output_weight(self) -> Tensor:
        """W_hq: of its own, or the embedding's (tied)."""
        if self.embedding is not None and self.shape.tied:
            return self.embedding.weight[: self.vocab_size]
        return self.weight_hq

    def _checked(self, ids: Ids) -> Tensor:
        """The ids as a tensor, integers of shape (batch, time) that name tokens."""
        if isinstance(ids, np.ndarray):
            whole = ids.astype(np.int64) if ids.dtype.kind in "iu" else ids
            ids = torch.from_numpy(whole).to(self.bias_q.device)
        if not isinstance(ids, Tensor):
            raise UserError(
                f"ids are a {type(ids).__name__}, not a tensor or an array of shape (batch, time)",
                hint="a list of ids is read as torch.tensor([ids])",
            )
        if ids.dim() != 2 or ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise UserError(
                f"ids of shape {tuple(ids.shape)} and type {ids.dtype} must be integers of shape "
                "(batch, time)",
                hint="one text is ids[None, :]",
            )
        if ids.device != self.bias_q.device:  # torch looks up nonsense for ids without memory
            raise UserError(
                f"the input is on {ids.device}, the model on {self.bias_q.device}",
                hint="move both to one device, with .to(device)",
            )
        whole = self.recurrent and torch.compiler.is_compiling() and not compiling.may_break()
        if not (listening() or whole) and ids.device.type == "cpu" and ids.numel():
            self.check_range(int(ids.min()), int(ids.max()))  # whole: numbers break a graph
        return ids

    def check_range(self, low: int, high: int) -> None:
        """Refuse ids from `low` to `high` that name no token."""
        known_range(low, high, self.vocab_size)

    # ------------------------------------------------------------------ what a training asks

    @property
    def lane_dim(self) -> int:
        """Which dimension of a state's tensors counts the rows of the batch."""
        return 1 if self.recurrent else 0

    @property
    def draws_globally(self) -> bool:
        """What is drawn for each step comes from PyTorch's global generators."""
        drop = self.shape.dropout
        return drop.layers > 0 or drop.zoneout > 0 or drop.updates > 0

    def refusal(self, carry: Carry, memory: Memory | None) -> tuple[str, str] | None:
        """Why it cannot be trained so, and what to try; None if it can."""
        if made := [n for n in ("weight_hq", "bias_q") if isinstance(vars(self).get(n), Tensor)]:
            why = f"a model whose {made[0]} is made by a hook, as by pruning: an update never calls"
            return f"{why} the model, only its parts", "train it as a part of a module of your own"
        if self.recurrent or (carry.windows and memory is None):
            return None
        why = "an mlp: it has no state to carry a gradient through time, nor to keep"
        return why, "carry=truncated memory=0, or a recurrent cell, such as cell=gru"

    def irregular(self) -> str | None:
        """Why two of its windows are not the same work on the same shapes; None if they are."""
        rnn = self.recurrence
        if rnn is None:
            return f"the model, a {self.cell}, has no recurrence"
        if not rnn.carry.exact or not rnn.memory.keeps_all:
            return "the model has a carry or a memory of its own"
        if rnn.time.in_chunks:
            return "chunks of time run as often as it takes them to meet"
        return hears(self)

    @contextmanager
    def lent(
        self, xi: Tensor | None, memory: Memory | None, until: Tensor | None = None
    ) -> Iterator[None]:
        """Inside this block it carries by ξ (None: all) and keeps by `memory` (None: its own).

        Rows end after as many steps as `until` says (None: with what they read).
        """
        recurrence = self.recurrence
        if recurrence is None:
            yield
            return
        before = recurrence.carry, recurrence.memory
        if xi is None:
            recurrence.carry = Full()
        else:
            recurrence.carry = Given(tuple(xi.tolist())) if xi.is_cpu else InTensor(xi)
        recurrence.memory = memory or recurrence.memory
        try:
            with recurrence.ended_at(until):
                yield
        finally:
            recurrence.carry, recurrence.memory = before

    def read_back(
        self, ids: Tensor, masks: Masks, loss: Callable[[Tensor, int], Tensor]
    ) -> tuple[Tensor, ModelState]:
        """Read whole lanes from the beginning and carry all losses back, piece by piece."""
        if is_hooked(self.recurrence):  # its own call, then, which has no pieces
            hs, state = self.states(ids, None, masks)
            total = loss(hs, 0)
            total.backward()
            return total.detach(), state
        return self.recur_back(self.inputs(ids.T, masks), None, masks, loss)

    def computed(self, ids: Tensor, state: ModelState, masks: Masks) -> list[tuple[str, Tensor]]:
        """What an update computes before its loss, by name and in order."""
        hs, _ = self.states(ids, state, masks)
        return [("the hidden states h_t", hs), ("the logits o_t", self.project(hs, masks))]


def _recurrence(shape: Shape, carry: Carry | None, memory: Memory | None, time: Time | None) -> Any:
    """The layers of a recurrent model: from embeddings, or one-hot rows, to h_t."""
    dropout = shape.dropout
    layers = of(
        cells.of_model(shape.cell).name,
        shape.embedding_size or shape.vocab_size,
        shape.hidden_size,
        shape.layers,
        dropout=dropout.layers,
        zoneout=dropout.zoneout,
        update_dropout=dropout.updates,
        carry=carry or Full(),
        memory=memory or Stored(),
        time=time or Stepped(),
    )
    layers.repeatable = True  # an update is the same captured or not
    return layers


@final
class _Undrawn(nn.Linear):
    """A layer whose numbers come from elsewhere."""

    def reset_parameters(self) -> None:
        return


def _shown(hs: Tensor, masks: Masks) -> Tensor:
    """What the output layer sees of h_t, time first: what dropout leaves."""
    return hs if masks.outputs is None else hs * masks.outputs


def known_labels(ids: Tensor, vocab_size: int) -> None:
    """Refuse ids to be predicted that name no token: of the last of a text no model is asked."""
    if ids.numel():
        labels = ids.long()  # torch knows no least of some types
        known_range(int(labels.min()), int(labels.max()), vocab_size)


def known_range(low: int, high: int, vocab_size: int) -> None:
    """Refuse ids from `low` to `high` that name no token of the vocabulary."""
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"token ids {low} to {high} must lie in 0 to {vocab_size - 1}",
            hint="encode the text with the vocabulary the model was built for",
        )


def both_ways() -> UserError:
    """Why a language model reads in one direction only."""
    return UserError(
        "a language model cannot be bidirectional: read backwards, the text before a position "
        "contains the very token that is to be predicted",
        hint="elman.nn has bidirectional layers for tasks where the whole text is known",
    )


class _Back(nn.Module):
    """`backward_through_time` in the shape of a call, for `functional_call`."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, xs: Tensor, loss: Callable[[Tensor, int], Tensor], state: ModelState) -> Any:
        return backward_through_time(self.rnn, xs, loss, state)
