"""The gradient through time, for every cell, carry, memory, depth and direction, against autograd
through a bare loop (`bare_loop.py`) in float64; and against finite differences."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import bare_loop
from elman import nn
from elman.gradients import Checkpointed, Full, Randomized, Sliding, Stored, Truncated

STEPS, BATCH, INPUT, HIDDEN, PROJECTION = 11, 3, 4, 6, 5

CELLS = {
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "linear": (nn.RNN, {"nonlinearity": "linear"}),
    "gru": (nn.GRU, {}),
    "lstm": (nn.LSTM, {}),
    "projected": (nn.LSTM, {"proj_size": PROJECTION}),
    "unbiased": (nn.LSTM, {"bias": False}),
}
CARRIES = [
    Full(),
    Truncated(window=4),
    Randomized(keep=0.7, seed=3),
    Randomized(keep=[0.3, *torch.linspace(0.5, 1, STEPS - 1).tolist()], seed=5, per_row=True),
    Randomized.polynomial(mean=3, alpha=2, seed=4),
    Sliding(every=1, steps=3),
    Sliding(every=3, steps=5),
]
MEMORIES = [
    Stored(),
    Checkpointed(every=1),
    Checkpointed(every=4),
    Checkpointed(budget=2**15),
]
SHAPES = [(1, 1), (3, 1), (1, 2), (2, 2)]


@dataclass
class Problem:
    """A module, its inputs, and the loss's pull on each of its outputs."""

    module: Any
    xs: Tensor
    stacked: tuple[Tensor, ...]
    dys: Tensor
    dlast: tuple[Tensor, ...]
    lengths: Tensor | None = None

    @property
    def inputs(self) -> list[Tensor]:
        xs = [self.xs] if self.xs.is_floating_point() else []
        return [*xs, *self.stacked, *self.module.parameters()]

    def gradients(self) -> list[Tensor]:
        state = self.stacked if self.module.cell == "lstm" else self.stacked[0]
        ys, last = self.module(self.xs, state)
        last = last if self.module.cell == "lstm" else (last,)
        return gradients([ys, *last], self.inputs, [self.dys, *self.dlast])

    def by_loop(self, carry) -> list[Tensor]:
        """What the carry promises, by autograd through a bare loop."""
        if isinstance(carry, Sliding):
            return self._sliding(carry)
        again = type(carry)(**_fields(carry))  # the same seed draws the same ξ
        xi = again.weights(len(self.xs), self.xs.shape[1])
        ys, last = self.loop(lambda moment: xi[moment])
        return gradients([ys, *last], self.inputs, [self.dys, *self.dlast])

    def _sliding(self, carry: Sliding) -> list[Tensor]:
        """For each block of losses a whole pass, detached at both edges of its window."""
        steps, both = len(self.xs), self.module.bidirectional
        total = [torch.zeros_like(p) for p in self.inputs]
        for first in range(0, steps, carry.every):
            last = min(first + carry.every, steps)
            edges = (max(0, last - carry.steps), min(steps, first + carry.steps))
            ys, ends = self.loop(lambda moment, edges=edges: 0.0 if moment in edges else 1.0)
            pull = torch.zeros_like(self.dys)
            pull[first:last] = self.dys[first:last]
            places = torch.arange(len(self.stacked[0]))[:, None, None]
            reverse = (places % 2 == 1) & both
            mine = torch.where(reverse, first == 0, last == steps)
            pulls = [d * mine for d in self.dlast]
            found = gradients([ys, *ends], self.inputs, [pull, *pulls])
            total = [t + f for t, f in zip(total, found, strict=True)]
        return total

    def loop(self, weight, masks=None):
        m = self.module
        names = m._flat_weights_names
        each = len(names) // len(self.stacked[0])
        weights = [getattr(m, name) for name in names]
        layers = [weights[i : i + each] for i in range(0, len(weights), each)]
        states = list(zip(*self.stacked, strict=True))
        xs = self.xs
        if not xs.is_floating_point():
            xs = torch.nn.functional.one_hot(xs, m.input_size).to(weights[0].dtype)
        directions = 2 if m.bidirectional else 1
        ys, last = bare_loop.run(
            m.cell, layers, directions, xs, states, weight, masks, self.lengths
        )
        return ys, [torch.stack(s) for s in zip(*last, strict=True)]


def _fields(carry) -> dict[str, Any]:
    return {k: v for k, v in vars(carry).items() if not k.startswith("_")}


def gradients(outs, inputs, pulls) -> list[Tensor]:
    found = torch.autograd.grad(outs, inputs, pulls, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(inputs, found, strict=True)]


def problem(cell, layers=1, directions=1, *, ids=False, steps=STEPS, **options) -> Problem:
    """Orthogonal recurrent weights, so that the gradient is alive when it reaches h_0."""
    torch.manual_seed(7)
    kind, extra = CELLS[cell]
    module = kind(
        INPUT,
        HIDDEN,
        layers,
        bidirectional=directions == 2,
        dtype=torch.float64,
        **extra,
        **options,
    )
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "weight_hh" in name:
                for gate in p.view(-1, HIDDEN, p.shape[1]):
                    torch.nn.init.orthogonal_(gate, gain=1.2)
            elif "weight" in name:
                p.normal_().div_(p.shape[1] ** 0.5)
    real = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    width = module.proj_size or HIDDEN
    xs = torch.randint(INPUT, (steps, BATCH)) if ids else real(steps, BATCH, INPUT).requires_grad_()
    sizes = [width, HIDDEN] if module.cell == "lstm" else [width]
    stacked = tuple(real(layers * directions, BATCH, n).requires_grad_() for n in sizes)
    dlast = tuple(torch.randn_like(s) for s in stacked)
    return Problem(module, xs, stacked, real(steps, BATCH, width * directions), dlast)


def agree(found, wanted, tolerance=1e-10) -> None:
    assert len(found) == len(wanted)
    for f, w in zip(found, wanted, strict=True):
        assert f.shape == w.shape
        assert (f - w).norm() <= tolerance * w.norm()


@pytest.mark.parametrize(("layers", "directions"), SHAPES)
@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
@pytest.mark.parametrize("carry", CARRIES, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_equal_autograd_through_a_bare_loop(cell, carry, memory, layers, directions):
    carry = type(carry)(**_fields(carry))
    p = problem(cell, layers, directions, carry=carry, memory=memory)
    wanted = p.by_loop(carry)
    assert all(w.norm() > 1e-3 for w in wanted), "vanished gradients make any two methods agree"
    agree(p.gradients(), wanted)
