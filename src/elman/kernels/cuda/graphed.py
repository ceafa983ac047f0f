"""Work on a GPU as one CUDA graph, through autograd too: `elman.training.graphed`.

Torch's own recording is used, which sees what autograd's threads do. See `graphs` for work that
asks for no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from elman.errors import UserError
from elman.kernels.cuda.graphs import no_collection

Update = Callable[..., tuple[Tensor, ...]]
Pool = Any
"""As torch names memory that graphs share."""
ALONE = "thread_local"
"""What other threads do meanwhile, fetching the next batch say, is their own affair."""


@final
class Graphed:
    """`update(*inputs)`, captured at construction; calling it copies the inputs in and replays.

    `update` is run three times before the capture, as CUDA asks, and `changes` (weights, optimizer
    state) are then put back, so constructing leaves a training where it was. `warm_up=0` will do
    for an update that has just been run on inputs like these. The results are the same tensors at
    every call, overwritten by the next: clone what must last. Graphs of one `pool`
    (`torch.cuda.graph_pool_handle()`) use the same memory, one after the other.
    """

    def __init__(
        self,
        update: Update,
        inputs: Sequence[Tensor],
        *,
        changes: Sequence[Tensor] = (),
        warm_up: int = 3,
        pool: Pool | None = None,
    ) -> None:
        off = [x.device.type for x in inputs if not x.is_cuda]
        if off:
            raise UserError(
                f"an input is on {off[0]}, and only work on a CUDA GPU can be captured",
                hint="move model and inputs there, or call the update itself",
            )
        self.inputs = [x.detach().clone() for x in inputs]
        self.graph = torch.cuda.CUDAGraph()
        before = [t.detach().clone() for t in changes]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm_up):
                update(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with no_collection(), torch.cuda.graph(self.graph, pool=pool, capture_error_mode=ALONE):
            self.results = update(*self.inputs)
        with torch.no_grad():
            for tensor, value in zip(changes, before, strict=True):
                tensor.copy_(value)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for mine, given in zip(self.inputs, inputs, strict=True):
            if given.shape != mine.shape or given.dtype != mine.dtype:
                raise UserError(
                    f"an input is {tuple(given.shape)} {given.dtype}, but the graph was captured "
                    f"for {tuple(mine.shape)} {mine.dtype}",
                    hint="run windows of another shape with the update itself",
                )
            if given is not mine:
                mine.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.results
