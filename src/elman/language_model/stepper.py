"""One step at a time, for writing text: a recurrence and its output layer without ceremony.

A module call checks its input, asks for a kernel and allocates; for one token of one text that is
most of the time. A `Stepper` does all of it once and then only steps: in native code on a CPU, on a
GPU as a CUDA graph, which is captured once it is seen that many steps are wanted.
"""

import itertools
from typing import Any, final

import torch
from torch import Tensor

from elman import kernels
from elman.errors import UserError
from elman.kernels.cpu import KERNEL, Steps
from elman.language_model.captured import Captured, flat
from elman.nn import GRU, LSTM, RNN, Layers

FEW = 16
"""Steps on a GPU that are taken one by one: capturing one costs as much as some of these."""


@final
class Stepper:
    """`out(rnn(ids))`, the state carried from call to call; no gradient.

    `state` is what the module takes and returns, for `rows` texts side by side. With an `embedding`
    ids are its rows. The weights are read where they lie, so training on changes what a stepper
    does next.

    >>> _ = torch.manual_seed(0)
    >>> rnn, out = RNN(28, 16), torch.nn.Linear(16, 28)
    >>> step = Stepper(rnn, out)
    >>> step(torch.tensor([3])).shape
    torch.Size([1, 28])
    """

    def __init__(
        self,
        rnn: RNN | GRU | LSTM | Layers,
        out: torch.nn.Linear,
        state: Any = None,
        rows: int = 1,
        embedding: Tensor | None = None,
    ) -> None:
        self.rnn, self.out, self.rows, self._state = rnn, out, rows, state
        self.embedding = embedding
        fixed = not (rnn.bidirectional or rnn.training)
        self._steps: Steps | Captured | None = self._native(state) if fixed else None
        is_captured = fixed and rnn.weight_ih_l0.is_cuda
        self._before_capture = FEW if is_captured else -1

    def _native(self, state: Any) -> Steps | None:
        rnn, weight = self.rnn, self.rnn.weight_ih_l0
        if weight.device.type != "cpu" or weight.dtype == torch.bfloat16:
            return None
        with torch.no_grad():
            job = rnn.job(
                self._read(torch.zeros(self.rows, dtype=torch.int64, device="cpu")), state
            )
            if kernels.select(job) is not KERNEL or self.out.weight.dtype != weight.dtype:
                return None
            return Steps(KERNEL, job, self.out.weight, self.out.bias, self.embedding)

    def _read(self, ids: Tensor) -> Tensor:
        """What the recurrence reads in a step: ids or their embeddings."""
        xs = ids if self.embedding is None else torch.nn.functional.embedding(ids, self.embedding)
        return xs.unsqueeze(self._time)

    @property
    def _time(self) -> int:
        return 1 if self.rnn.batch_first else 0

    def __call__(self, ids: Tensor) -> Tensor:
        """The logits (rows, outputs) after reading one id per row."""
        if ids.shape != (self.rows,):
            raise UserError(f"ids of shape {tuple(ids.shape)} for {self.rows} rows: one id per row")
        if self._before_capture == 0:
            parts = self.rnn, self.out, self.embedding
            self._steps = Captured(*parts, self._state, self.rows)
        self._before_capture -= 1
        if self._steps is not None:
            return self._steps(ids)
        with torch.no_grad():
            xs = self._read(ids.to(self.out.weight.device))
            hs, self._state = self.rnn(xs, self._state)
            return self.out(hs).squeeze(self._time)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy goes on by itself from the same state."""
        return Stepper, (self.rnn, self.out, self.state, self.rows, self.embedding)

    @property
    def state(self) -> Any:
        """The state after the last step, as the module returns it: a copy, and may be set."""
        if self._steps is None:
            return self._state
        if isinstance(self._steps, Captured):
            return self._steps.state
        h, *c = (torch.stack([t[1] for t in s]) for s in zip(*self._steps.states, strict=True))
        return (h, *c) if c else h

    @state.setter
    def state(self, state: Any) -> None:
        if self._steps is None:
            self._state = state
            return
        states = self._checked(self._steps, state)
        if isinstance(self._steps, Captured):
            self._steps.state = states
            return
        for layer, tracks in zip(zip(*states, strict=True), self._steps.states, strict=True):
            for s, track in zip(layer, tracks, strict=True):
                track[1] = s

    @torch.no_grad()
    def take(self, rows: Tensor) -> None:
        """Go on from these of its rows, in this order, each as often as it is named: a beam."""
        if rows.shape != (self.rows,):
            raise UserError(
                f"{tuple(rows.shape)} rows to go on from, of {self.rows}: as many as there are",
                hint="another number takes another stepper: Stepper(rnn, out, step.state[:, rows])",
            )
        if self._steps is None:
            if self._state is not None:
                taken = [s.index_select(1, rows.to(s.device)) for s in flat(self._state)]
                self._state = tuple(taken) if len(taken) > 1 else taken[0]
        elif isinstance(self._steps, Captured):
            for s in self._steps.states:
                s.copy_(s.index_select(1, rows.to(s.device)))
        else:
            for track in itertools.chain(*self._steps.states):
                track[1] = track[1].index_select(0, rows)

    @property
    def writer(self) -> Steps | None:
        """The native steps, where each of their outputs can be read in the next one."""
        steps = self._steps
        return steps if isinstance(steps, Steps) and steps.inputs >= steps.shape[1] else None

    def _checked(self, steps: Steps | Captured, state: Any) -> tuple[Tensor, ...]:
        """The state's tensors, each of the shape that these steps have; None is zeros."""
        if isinstance(steps, Captured):
            shapes, like = [tuple(s.shape) for s in steps.states], steps.states[0]
        else:
            tracks = steps.states[0]
            shapes, like = [(len(steps.states), *t[1].shape) for t in tracks], tracks[0]
        if state is None:
            return tuple(like.new_zeros(shape) for shape in shapes)
        given = (state,) if isinstance(state, Tensor) else tuple(state)
        if [tuple(s.shape) for s in given] != shapes:
            found, wanted = (
                " and ".join(map(str, x)) for x in ([tuple(s.shape) for s in given], shapes)
            )
            raise UserError(
                f"a state of shape {found} is not {wanted}: (layers, rows, units)",
                hint=f"this stepper has {self.rows} rows; another number takes another stepper",
            )
        return given
