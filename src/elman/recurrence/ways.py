"""How a stack runs on a GPU without autograd, forwards and back: what `captured` records.

By cuDNN as a whole, by our kernel with its launches prepared, or by our kernel strand after strand:
the same functions that run where nothing is recorded, so the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

from elman.kernels import Kernel, cudnn
from elman.kernels.cuda.calls import Kept
from elman.kernels.torchs import Whole, as_torch
from elman.recurrence import operator
from elman.recurrence.operator import Inputs, Recipe
from elman.recurrence.prepared import Call

Outputs = tuple[Tensor, tuple[Tensor, ...]]
"""ys and the last states."""
Pulls = list[Tensor | None]
"""The loss's pull on the input, the first states and the weights, where they want it."""


class Way(Protocol):
    """How a stack runs, forwards and back, in the caller's layout and without autograd."""

    batch_first: bool

    def first(self, x: Tensor) -> list[Tensor]:
        """The states before the first step where the caller passes none."""
        ...

    def forward(
        self, x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor], keep: bool
    ) -> tuple[Tensor, Sequence[Tensor], Any]:
        """ys, the last states, and what `backward` reads of this."""
        ...

    def backward(
        self,
        x: Tensor,
        first: Sequence[Tensor],
        weights: Sequence[Tensor],
        kept: Any,
        pulls: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> Pulls:
        """The pulls on x, first and weights, each in its dtype, from those on ys and last."""
        ...

    def uncaptured_call(
        self, x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Outputs:
        """The call as it is when it is not captured."""
        ...


@final
class ByCudnn:
    """By cuDNN, the whole stack at once."""

    def __init__(self, stack: Whole, batch_first: bool, together: bool) -> None:
        self.network, self.dtype, self.batch_first = stack.network, stack.dtype, batch_first
        self.together = together  # whether the weights lie as cuDNN wants them

    def first(self, x: Tensor) -> list[Tensor]:
        return self.network.zeros(x.shape[0 if self.batch_first else 1], self.dtype, x.device)

    def _rows(self, x: Tensor) -> Tensor:
        """The input as cuDNN reads it: of ids, one-hot rows."""
        if x.is_floating_point():
            return x
        with operator.Careful(x, self.network.inputs):
            return cudnn.one_hot(x, self.network.inputs, self.dtype)

    def forward(
        self, x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor], keep: bool
    ) -> tuple[Tensor, Sequence[Tensor], Any]:
        rows, block = self._rows(x), cudnn.all_weights(self.network, weights)
        h, c = self._pair(first)
        ys, *last, reserve, block = torch._cudnn_rnn(  # pyright: ignore[reportAttributeAccessIssue]
            rows, list(weights), self.network.each, block, h, c, *self._how(keep)
        )
        return ys, last[: len(first)], (rows, ys, reserve, block)

    def _pair(self, first: Sequence[Any]) -> tuple[Any, Any]:
        """h and c, or None for those that there are not."""
        h, *c = [None if s is None else s.contiguous() for s in first]
        return h, c[0] if c else None

    def _how(self, keep: bool) -> tuple[Any, ...]:
        both = self.network.directions == 2
        return *self.network.sizes(), self.batch_first, 0.0, keep, both, [], None

    def backward(
        self,
        x: Tensor,
        first: Sequence[Tensor],
        weights: Sequence[Tensor],
        kept: Any,
        pulls: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> Pulls:
        (rows, ys, reserve, block), n = kept, len(first)
        h, c = self._pair(first)
        dys, dlast = pulls[0], self._pair(pulls[1:])
        mask = [needs[0], needs[1], n > 1 and needs[2], any(needs[1 + n :])]
        dx, dh, dc, dws = torch.ops.aten._cudnn_rnn_backward(
            rows,
            list(weights),
            self.network.each,
            block,
            h,
            c,
            ys,
            dys,
            *dlast,
            *self._how(True),
            reserve.clone(),  # which cuDNN writes into, and a second pass back reads again
            mask,
        )
        return [dx, *[dh, dc][:n], *(dws if mask[3] else [None] * len(weights))]

    def uncaptured_call(
        self, x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Outputs:
        first = first or self.first(x)
        if self.together:
            return as_torch(self.network, self.batch_first, self._rows(x), first, [*weights])
        ys, last, _ = self.forward(x, first, weights, True)
        return ys, tuple(last)


@final
class ByCall:
    """By our kernel, its launches prepared."""

    def __init__(self, call: Call) -> None:
        self.call, self.batch_first = call, call.batch_first

    def first(self, x: Tensor) -> list[Tensor]:
        return []  # the kernel begins with zeros by itself

    def forward(
        self, x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor], keep: bool
    ) -> tuple[Tensor, Sequence[Tensor], Any]:
        xs, weights = self.call.read(x).contiguous(), self._read(weights)
        ys, last, kept = self.call.prepared.forward(xs, first, weights, keep)
        return self.call.time_first(ys), last, (xs, [t for trace in kept for t in trace])

    def backward(
        self,
        x: Tensor,
        first: Sequence[Tensor],
        weights: Sequence[Tensor],
        kept: Any,
        pulls: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> Pulls:
        (xs, flat), (dys, *dlast) = kept, pulls
        n, call = len(first), self.call
        traces = [Kept(*flat[i : i + 3]) for i in range(0, len(flat), 3)]
        dxs, dstate, dws = call.prepared.backward(
            xs,
            self._read(weights),
            traces,
            None if dys is None else call.time_first(dys),
            dlast,
            needs[0],
            any(needs[1 : 1 + n]),
        )
        dxs = None if dxs is None else call.time_first(dxs)
        dws = call.in_heads(_as(weights, dws))
        return [dxs, *(_as(first, dstate) if dstate else [None] * n), *dws]

    def uncaptured_call(
        self, x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Outputs:
        return self.call(x, first, weights)

    def _read(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.call.prepared.read(self.call.in_heads(weights))


@final
class ByStack:
    """By a kernel strand after strand: both directions."""

    def __init__(self, recipe: Recipe, kernel: Kernel, batch_first: bool, sizes: Sequence[int]):
        self.recipe, self.kernel, self.batch_first, self.sizes = recipe, kernel, batch_first, sizes

    def _inputs(self, x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor]) -> Inputs:
        xs = self._turned(x if x.is_floating_point() else x.to(torch.int64))
        return Inputs(xs, first or self._zeros(x, weights), weights, None, None)

    def _turned(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.batch_first else x

    def _zeros(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        places, rows = len(weights) // self.recipe.each, x.shape[0 if self.batch_first else 1]
        return [weights[0].new_zeros(places, rows, n) for n in self.sizes]

    def first(self, x: Tensor) -> list[Tensor]:
        return []  # made anew, with the rest

    def forward(
        self, x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor], keep: bool
    ) -> tuple[Tensor, Sequence[Tensor], Any]:
        given = self._inputs(x, first, weights)
        stack = self.recipe.stack(given, self.kernel)
        ys, last, kept = operator.forward(self.recipe, given, stack, keep)
        return self._turned(ys), last, (given.stacked, kept)

    def backward(
        self,
        x: Tensor,
        first: Sequence[Tensor],
        weights: Sequence[Tensor],
        kept: Any,
        pulls: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> Pulls:
        (stacked, held), (dys, *dlast) = kept, pulls
        given = self._inputs(x, stacked, weights)
        stack = self.recipe.stack(given, self.kernel)
        dys = None if dys is None else self._turned(dys)
        dxs, dstate, dws = operator.backward(stack, given, list(held), dys, dlast, needs[0])
        return [None if dxs is None else self._turned(dxs), *dstate[: len(first)], *dws]

    def uncaptured_call(
        self, x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Outputs:
        ys, last = operator.recurrence(self.recipe, self._inputs(x, first, weights))
        return self._turned(ys), last


def _as(like: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.to(a.dtype) for a, t in zip(like, tensors, strict=True)]
