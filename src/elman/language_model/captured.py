"""One step of a recurrence and its output layer as a CUDA graph: see `stepper`.

A step of a small model on a GPU is a dozen launches that take Python ten times as long as the GPU.
Captured once, they are one launch; ids and state have places of their own in the GPU's memory.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from elman.kernels.cuda.graphs import no_collection
from elman.nn import GRU, LSTM, RNN, Layers


@final
class Captured:
    """Reads one id per row and gives its logits, from `state` on; no gradient.

    The weights are read where they lie now, and stay there for as long as this lives, even if the
    module is moved or changes its type.
    """

    def __init__(
        self, rnn: RNN | GRU | LSTM | Layers, out: torch.nn.Linear, state: Any, rows: int
    ) -> None:
        device = out.weight.device
        self.rnn, self.out, self.time = rnn, out, 1 if rnn.batch_first else 0
        self.alive = [p.detach() for p in (*rnn.parameters(), *out.parameters())]
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(side):
            hs, after = rnn(self.ids.unsqueeze(self.time), state)  # what CUDA asks: once before
            out(hs)
            self.states = [s.clone() for s in _flat(after)]
            with no_collection(), torch.cuda.graph(self.graph, stream=side):
                self.logits = self._step()
        torch.cuda.current_stream(device).wait_stream(side)
        self.state = state

    def _step(self) -> Tensor:
        """The step that is captured: reads `ids` and `states`, and writes `states`."""
        state = tuple(self.states) if len(self.states) > 1 else self.states[0]
        hs, after = self.rnn(self.ids.unsqueeze(self.time), state)
        logits = self.out(hs).squeeze(self.time)
        for mine, new in zip(self.states, _flat(after), strict=True):
            mine.copy_(new)
        return logits

    def __call__(self, ids: Tensor) -> Tensor:
        """The logits (rows, outputs) after reading ids (rows,)."""
        self.ids.copy_(ids)
        self.graph.replay()
        return self.logits.clone()

    @property
    def state(self) -> Any:
        """The state after the last step, a copy."""
        copies = [s.clone() for s in self.states]
        return tuple(copies) if len(copies) > 1 else copies[0]

    @state.setter
    def state(self, state: Any) -> None:
        if state is None:
            for mine in self.states:
                mine.zero_()
            return
        for mine, new in zip(self.states, _flat(state), strict=True):
            mine.copy_(new)


def _flat(state: Any) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else tuple(state)
