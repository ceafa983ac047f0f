"""Embeddings, whose gradient on a GPU is one small kernel where tokens are few.

    x_n = E[id_n],   dE[v] = Σ dx_n over the n with id_n = v

torch's own takes 40 to 50 µs for a window of characters on a GPU, a tenth of a small update.
"""

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from elman.kernels import allows
from elman.kernels.cuda import small
from elman.recurrence.traced import is_seen, listening


@final
class Embedding(nn.Embedding):
    """`torch.nn.Embedding`: the same rows, the same gradient to rounding."""

    def forward(self, input: Tensor) -> Tensor:
        """E[id] for ids of any shape."""
        if not self.weight.is_cuda or not self._suits(input):
            return super().forward(input)
        return _Rows.apply(self.weight, input)  # pyright: ignore[reportReturnType]

    def _suits(self, ids: Tensor) -> bool:
        weight = self.weight
        if not (weight.requires_grad and torch.is_grad_enabled() and ids.dtype == torch.int64):
            return False
        if torch.is_inference_mode_enabled():  # which records nothing, whatever is asked
            return False
        if torch.compiler.is_compiling() or listening() or is_seen():
            return False
        whole = weight.dtype == torch.float32 and weight.is_contiguous() and ids.is_cuda
        plain = self.padding_idx is None and self.max_norm is None
        plain = plain and not (self.sparse or self.scale_grad_by_freq)
        return (
            whole
            and plain
            and small.sums_tokens(weight, ids.numel(), len(weight))
            and allows("cuda")
        )


class _Rows(torch.autograd.Function):
    """Rows by torch, their gradient by a kernel."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.tokens = len(weight)
        return embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (ids,), dx = ctx.saved_tensors, grads[0]
        if torch.is_grad_enabled():  # create_graph=True: leave a graph behind
            backward = torch.ops.aten.embedding_dense_backward
            return backward(dx, ids, ctx.tokens, -1, False), None
        rows = dx.reshape(-1, dx.shape[-1]).contiguous()
        return small.rows_of_tokens(rows, ids.reshape(-1).contiguous(), ctx.tokens), None
