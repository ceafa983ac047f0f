"""One step at a time, for writing text: a recurrence and its output layer without ceremony.

A module call checks its input, asks for a kernel and allocates; for one token of one text that is
most of the time. A `Stepper` does all of it once and then only steps.
"""

from typing import Any, final

import torch
from torch import Tensor

from elman import kernels
from elman.kernels.cpu import KERNEL, Steps
from elman.nn import GRU, LSTM, RNN


@final
class Stepper:
    """`out(rnn(ids))`, the state carried from call to call; no gradient.

    `state` is what the module takes and returns, for `rows` texts side by side. The weights are
    read where they lie, so training on changes what a stepper does next.

    >>> _ = torch.manual_seed(0)
    >>> rnn, out = RNN(28, 16), torch.nn.Linear(16, 28)
    >>> step = Stepper(rnn, out)
    >>> step(torch.tensor([3])).shape
    torch.Size([1, 28])
    """

    def __init__(
        self, rnn: RNN | GRU | LSTM, out: torch.nn.Linear, state: Any = None, rows: int = 1
    ) -> None:
        self.rnn, self.out, self._state = rnn, out, state
        self._W_hq, self._b_q = out.weight.detach(), None if out.bias is None else out.bias.detach()
        x = torch.zeros(*((rows, 1) if rnn.batch_first else (1, rows)), dtype=torch.int64)
        self._steps = None if rnn.bidirectional or rnn.training else self._native(x, state)

    def _native(self, x: Tensor, state: Any) -> Steps | None:
        weight = self.rnn.weight_ih_l0
        if weight.device.type != "cpu" or weight.dtype == torch.bfloat16:
            return None
        job = self.rnn.job(x, state)
        return KERNEL.steps(job) if kernels.select(job) is KERNEL else None

    def __call__(self, ids: Tensor) -> Tensor:
        """The logits (rows, outputs) after reading one id per row."""
        if self._steps is not None:
            self._steps(ids)
            return self._steps.logits(self._W_hq, self._b_q)
        time = 1 if self.rnn.batch_first else 0
        with torch.no_grad():
            hs, self._state = self.rnn(ids.unsqueeze(time), self._state)
            return self.out(hs).squeeze(time)

    @property
    def state(self) -> Any:
        """The state after the last step, as the module returns it."""
        if self._steps is None:
            return self._state
        h, *c = (torch.stack(s) for s in zip(*self._steps.states(), strict=True))
        return (h, *c) if c else h
