"""One step of a recurrence and its output layer as a CUDA graph: see `stepper`.

A step of a small model on a GPU is a dozen launches that take Python ten times as long as the GPU.
Captured once, they are one launch; ids and state have places of their own in the GPU's memory.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from elman.kernels.cuda import as_switched
from elman.kernels.cuda.graphed import ALONE
from elman.kernels.cuda.graphs import no_collection


@final
class Step:
    """Reads one id per row and gives its logits, `states` carried on in place; no gradient."""

    def __init__(self, rnn: Any, out: nn.Linear, E: Tensor | None, state: Any, rows: int) -> None:
        self.rnn: Any = rnn
        self.out: Any = out
        self.embedding = E
        self.time = 1 if rnn.batch_first else 0
        with torch.no_grad():
            ids = torch.zeros(rows, dtype=torch.int64, device=out.weight.device)
            _, after = self._run(ids, state)
            self.states = [s.clone() for s in flat(after)]
        self.state = state

    def __call__(self, ids: Tensor) -> Tensor:
        """The logits (rows, outputs) after reading ids (rows,)."""
        state = tuple(self.states) if len(self.states) > 1 else self.states[0]
        hs, after = self._run(ids, state)
        with as_switched(hs):
            logits = self.out(hs).squeeze(self.time)
        for mine, new in zip(self.states, flat(after), strict=True):
            mine.copy_(new)
        return logits

    def _run(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        xs = ids if self.embedding is None else embedding(ids, self.embedding)
        return self.rnn(xs.unsqueeze(self.time), state)

    def forget(self) -> None:
        """Let the weights go, which whoever captured a step reads where they lie; not what the
        layers have made for their calls, which lies nowhere else."""
        for layers in (self.rnn, self.out):
            layers._parameters.clear()
            layers.__dict__.pop("_flat_weights", None)
        self.embedding = None

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
        for mine, new in zip(self.states, flat(state), strict=True):
            mine.copy_(new)


@final
class Captured:
    """A step as one launch, from a state on.

    The weights are read where they lie now, and stay there for as long as this lives, even if the
    module is moved or changes its type.
    """

    def __init__(self, rnn: Any, out: nn.Linear, E: Tensor | None, state: Any, rows: int) -> None:
        device = out.weight.device
        self.alive = [p.detach() for p in (*rnn.parameters(), *out.parameters())]
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(side):
            self.step = Step(rnn, out, E, state, rows)
            self.step(self.ids)  # what CUDA asks: once before
            with (
                no_collection(),
                torch.cuda.graph(self.graph, stream=side, capture_error_mode=ALONE),
            ):
                self.logits = self.step(self.ids)
        torch.cuda.current_stream(device).wait_stream(side)
        self.state = state

    def __call__(self, ids: Tensor) -> Tensor:
        """The logits (rows, outputs) after reading ids (rows,)."""
        self.ids.copy_(ids)
        self.graph.replay()
        return self.logits.clone()

    @property
    def states(self) -> list[Tensor]:
        """Where the state lies."""
        return self.step.states

    @property
    def state(self) -> Any:
        """The state after the last step, a copy."""
        return self.step.state

    @state.setter
    def state(self, state: Any) -> None:
        self.step.state = state


def flat(state: Any) -> tuple[Tensor, ...]:
    """The tensors of a state."""
    return (state,) if isinstance(state, Tensor) else tuple(state)
