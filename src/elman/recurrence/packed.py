"""Packed rows laid out side by side, (T, B, …), and packed again: one launch each.

torch's own functions copy rows of one length at a time, and their backward passes step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """Where the packed rows of a batch lie once they are padded."""

    where: Tensor  # (N,): of each packed row, among steps · rows
    lengths: Tensor  # (rows,), longest first
    steps: int
    rows: int

    def padded(self, data: Tensor) -> Tensor:
        """(N, …) as (steps, rows, …), zeros where a row has ended."""
        both = _Padded.apply(data, self.where, self.steps * self.rows)
        assert isinstance(both, Tensor)
        return both.unflatten(0, (self.steps, self.rows))

    def packed(self, xs: Tensor) -> Tensor:
        """(steps, rows, …) as (N, …)."""
        data = _Packed.apply(xs.flatten(0, 1), self.where)
        assert isinstance(data, Tensor)
        return data


def places(batch_sizes: Tensor, count: int, device: torch.device) -> Places:
    """Those of `count` rows, the first `batch_sizes[t]` of which go on at step t.

    >>> places(torch.tensor([2, 2, 1]), 5, torch.device("cpu")).where
    tensor([0, 1, 2, 3, 4])
    >>> places(torch.tensor([3, 1]), 4, torch.device("cpu"))[:2]
    (tensor([0, 1, 2, 3]), tensor([2, 1, 1]))
    """
    steps, rows = len(batch_sizes), int(batch_sizes[0])
    begins = batch_sizes.cumsum(0).sub_(batch_sizes)
    starts = torch.arange(0, steps * rows, rows, device=batch_sizes.device)
    ended = starts.sub_(begins)  # places left out before step t
    each = torch.arange(rows, device=batch_sizes.device)
    ends = torch.searchsorted(batch_sizes.flip(0), each, right=True)
    there = torch.cat((batch_sizes, ended, steps - ends)).to(device)  # in one copy
    sizes, ended, lengths = there.split((steps, steps, rows))
    where = ended.repeat_interleave(sizes, output_size=count)
    where += torch.arange(count, device=device)
    return Places(where, lengths, steps, rows)


def picked(states: Sequence[Any], order: Tensor | None) -> list[Any]:
    """Stacked states, where there are any, with their rows in this order."""
    if order is None:
        return [*states]
    return [None if s is None else s.index_select(1, order) for s in states]


class _Padded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, where: Tensor, places: int) -> Tensor:
        ctx.save_for_backward(where)
        return data.new_zeros(places, *data.shape[1:]).index_copy_(0, where, data)

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor) -> Any:
        return _Packed.apply(*pulls, *ctx.saved_tensors), None, None


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, xs: Tensor, where: Tensor) -> Tensor:
        ctx.save_for_backward(where)
        ctx.places = len(xs)
        return xs.index_select(0, where)

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor) -> Any:
        return _Padded.apply(*pulls, *ctx.saved_tensors, ctx.places), None
