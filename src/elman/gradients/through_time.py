"""The one recurrence through time: forwards through a cell, and back with a carry ξ.

    dh_t = dhs_t + ξ_{t+1} (∂h_{t+1}/∂h_t)ᵀ dh_{t+1}

Every carry is a choice of ξ, every memory a choice of which piece of time is run when; both use
this loop. It is handed a cell and never asks which one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elman.cells import Cell, Gradients, State, Weights
from elman.errors import UserError


class Trace(NamedTuple):
    """What the backward pass needs to know of the forward pass, over a piece of T steps."""

    hs: Tensor  # (T+1, B, hidden or projection): h_0 … h_T
    cs: Tensor | None = None  # (T+1, B, hidden): an lstm's memory
    gates: Tensor | None = None  # whatever the kernel likes to keep

    def state(self, t: int) -> State:
        """The state after t steps: (h_t,) or (h_t, c_t)."""
        return (self.hs[t],) if self.cs is None else (self.hs[t], self.cs[t])

    def between(self, start: int, stop: int) -> Trace:
        """The trace of steps start … stop-1 alone, sharing memory."""
        cs = None if self.cs is None else self.cs[start : stop + 1]
        gates = None if self.gates is None else self.gates[start:stop]
        return Trace(self.hs[start : stop + 1], cs, gates)


def forward(
    cell: Cell,
    w: Weights,
    xs: Tensor,
    state: State,
    lengths: Tensor | None = None,
    gates: Tensor | None = None,
    noise: Tensor | None = None,
) -> Trace:
    """Run a cell over a piece of time; a row that has ended (t ≥ its length) holds its state.

    `gates`, where given, is filled with what the cell's backward step needs; `noise` is what was
    drawn for a cell that wants it.
    """

    def step(t: int, before: State) -> tuple[State, Tensor | None]:
        now = cell if noise is None else cell.given(noise[t])
        return now.step(w, xs[t], before)

    return forward_by(step, len(xs), state, lengths, gates)


def forward_by(
    step: Callable[[int, State], tuple[State, Tensor | None]],
    steps: int,
    state: State,
    lengths: Tensor | None = None,
    gates: Tensor | None = None,
) -> Trace:
    """The same, where `step(t, before)` gives the state after step t and what is kept of it."""
    states = [s.new_empty(steps + 1, *s.shape) for s in state]
    for track, s in zip(states, state, strict=True):
        track[0] = s
    for t in range(steps):
        after, kept_t = step(t, state)
        if lengths is not None:
            runs = (t < lengths)[:, None]
            after = tuple(torch.where(runs, a, s) for a, s in zip(after, state, strict=True))
        for track, s in zip(states, after, strict=True):
            track[t + 1] = s
        if gates is not None and kept_t is not None:
            gates[t] = kept_t
        state = after
    return Trace(states[0], states[1] if len(states) > 1 else None, gates)


def backward(
    cell: Cell,
    w: Weights,
    xs: Tensor,
    trace: Trace,
    dhs: Tensor | None,
    dstate: State,
    xi: Tensor | None,
    lengths: Tensor | None,
    dxs: Tensor | None,
    dw: Gradients,
    noise: Tensor | None = None,
) -> State:
    """Carry every loss back through time: dh_t = dhs_t + ξ_{t+1} (∂h_{t+1}/∂h_t)ᵀ dh_{t+1}.

    Adds to the weight gradients `dw` step by step, last step first, so that cutting time into
    pieces changes no bit of the result; fills `dxs`; returns the pull on the state before the
    piece. `xi[t]` multiplies what step t hands back (None: 1 everywhere).
    """

    def step_back(t: int, pull: State) -> State:
        gates = None if trace.gates is None else trace.gates[t]
        dx = None if dxs is None else dxs[t]
        now = cell if noise is None else cell.given(noise[t])
        return now.step_backward(w, xs[t], trace.state(t), trace.state(t + 1), gates, pull, dw, dx)

    weights = xi.tolist() if xi is not None and xi.dim() == 1 else xi
    return backward_by(step_back, len(xs), dhs, dstate, weights, lengths)


def backward_by(
    step_back: Callable[[int, State], State],
    steps: int,
    dhs: Tensor | None,
    dstate: State,
    xi: Sequence[float] | Tensor | None,
    lengths: Tensor | None,
) -> State:
    """The same, where `step_back(t, pull)` carries the pull on the state after step t back over it.

    `xi` is a number for each step, or a tensor (T, B).
    """
    for t in reversed(range(steps)):
        if dhs is not None:
            dstate = (dstate[0] + dhs[t], *dstate[1:])
        held = None if lengths is None else (t >= lengths)[:, None]
        pull = dstate if held is None else tuple(d.masked_fill(held, 0) for d in dstate)
        before = step_back(t, pull)
        if xi is not None:
            before = tuple(scale(d, xi[t]) for d in before)
        if held is not None:
            before = tuple(torch.where(held, d, b) for d, b in zip(dstate, before, strict=True))
        dstate = before
    return dstate


def scale(d: Tensor, xi: float | Tensor) -> Tensor:
    """ξ d, for one ξ or one per row; a cut (ξ = 0) gives 0 even where d has overflowed."""
    if isinstance(xi, Tensor):
        xi = xi[:, None]
        return torch.where(xi == 0, 0, (xi * d).to(d.dtype))  # ξ is wider than half precision
    return d if xi == 1 else torch.zeros_like(d) if xi == 0 else xi * d


def backward_through_time(
    rnn: Any, xs: Tensor, loss: Callable[[Tensor, int], Tensor], h0: Any = None
) -> tuple[Tensor, Any]:
    """Forward and backward through a sequence whose outputs are too many to hold.

    `loss(ys, start)` is called once on each of the consecutive pieces of the output (in the layout
    the module would return; `start` is the step a piece starts at) and returns a number; the
    numbers are summed. Gradients are accumulated in `.grad` of every parameter involved, the
    loss's own too, and of `xs` and `h0` where they ask for one. The module's `carry` and `memory`
    apply; nothing of size T × hidden is held beyond what the memory allows. As the gradient is
    needed at the end of time first, pieces come from the last to the first (with `Sliding`, from
    the first to the last).

    Returns the summed loss and the last state, both detached.
    """
    if not hasattr(rnn, "backward_through_time"):
        raise UserError(
            f"rnn is a {type(rnn).__name__}, which cannot be run piece by piece",
            hint="pass an elman.nn.RNN, GRU or LSTM",
        )
    return rnn.backward_through_time(xs, loss, h0)
