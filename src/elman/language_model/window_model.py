"""The model without a hidden state: what it knows of the past is a window of tokens."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elman.errors import Misfit, UserError


class Window(nn.Module):
    """The body of the model without hidden state: h_t = tanh(Σ_k W_k x_{t-k} + b), k < context.

    Before the text begins, x is the row after the last of the vocabulary, learned like any other.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int,
        embedding_size: int | None,
        hidden_size: int,
        layers: int,
    ) -> None:
        super().__init__()
        self.start, self.context = vocab_size, context
        inputs = context * (embedding_size or vocab_size + 1)
        self.weight_xh = nn.Parameter(torch.empty(inputs, hidden_size))
        self.bias_h = nn.Parameter(torch.empty(hidden_size))
        bound = 1 / math.sqrt(context * (embedding_size or 1))
        nn.init.uniform_(self.weight_xh, -bound, bound)
        nn.init.uniform_(self.bias_h, -bound, bound)
        self.deeper = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(layers - 1))

    def forward(
        self,
        ids: Tensor,
        embedding: nn.Embedding | None,
        before: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(time, batch, hidden), and the last `context` ids, (batch, context)."""
        if not torch.jit.is_tracing():  # which would hold on to the sizes of its example
            self._check(ids, before)
        if before is None:
            before = ids.new_full((ids.shape[0], self.context), self.start)
        read = torch.cat([before, ids], dim=1)
        steps = ids.shape[1]  # not `unfold`, which ONNX has for one length only
        columns = [read[:, k : k + steps] for k in range(1, self.context + 1)]
        windows = torch.stack(columns, 2).transpose(0, 1)  # (T, B, context)
        h = torch.tanh(self._sum(windows, embedding, mask) + self.bias_h)
        for layer in self.deeper:
            h = torch.tanh(layer(h))
        return h, read[:, read.shape[1] - self.context :]

    def _check(self, ids: Tensor, before: Tensor | None) -> None:
        """Some time steps; and the state of this model is the last ids that it read."""
        if ids.shape[1] == 0:
            raise Misfit(f"ids have shape {tuple(ids.shape)}: no time steps")
        right = (ids.shape[0], self.context)
        zero = "leave it out to begin before the text"
        if before is not None and not isinstance(before, Tensor):
            raise UserError("the state of an mlp must be one tensor of ids", hint=zero)
        if before is not None and (before.is_floating_point() or tuple(before.shape) != right):
            raise Misfit(
                f"the state of an mlp has shape {tuple(before.shape)} and type {before.dtype}; it "
                f"must be ids of shape {right}: (batch, context)",
                hint=zero,
            )

    def _sum(self, windows: Tensor, embedding: nn.Embedding | None, mask: Tensor | None) -> Tensor:
        if embedding is None:  # one-hot: the sum of one row of each W_k
            rows = windows + torch.arange(self.context, device=windows.device) * (self.start + 1)
            summed = F.embedding_bag(rows.flatten(0, 1), self.weight_xh, mode="sum")
            return summed.view(*windows.shape[:2], self.weight_xh.shape[1])
        xs = embedding(windows)
        if mask is not None:
            xs = xs * mask[:, None]
        return xs.flatten(2) @ self.weight_xh
