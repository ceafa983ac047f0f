"""The gradient run forwards equals the gradient run back, and forgets the past."""

import resource
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import elman.nn
from elman import cells
from elman.cells import Weights
from elman.errors import UserError
from elman.gradients.forward_accumulation import forward_accumulation, online

BATCH, INPUT, HIDDEN, PROJECTION = 2, 3, 4, 5
CELLS = ["tanh", "relu", "linear", "gru", "lstm", "lstm projected", "tanh without bias"]


def normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def orthogonal(g: torch.Generator, gates: int, size: int) -> Tensor:
    """One orthogonal block a gate, so that the gradient is alive when it reaches the first step."""
    return torch.cat([torch.linalg.qr(normal(g, HIDDEN, HIDDEN)).Q[:, :size] for _ in range(gates)])


def layer(kind: str, g: torch.Generator) -> tuple[str, Weights, tuple[Tensor, ...]]:
    name, _, option = kind.partition(" ")
    gates = cells.named(name).gates
    size = 2 if option == "projected" else HIDDEN
    lift = 0.3 if name == "relu" else 0  # relu units seldom dead
    biases = [normal(g, gates * HIDDEN) / 4 + lift for _ in "ih"]
    if option == "without bias":
        biases = [None, None]
    W_hh = orthogonal(g, gates, size)
    if name == "relu":
        W_hh = torch.eye(HIDDEN, dtype=torch.float64).roll(1, 0)
    W_hr = torch.linalg.qr(normal(g, HIDDEN, size)).Q.T if option == "projected" else None
    w = Weights(normal(g, gates * HIDDEN, INPUT) / 4, W_hh, *biases, W_hr)
    h, c = normal(g, BATCH, size) / 4, normal(g, BATCH, HIDDEN) / 4
    return name, w, (h, c) if name == "lstm" else (h,)


def late_loss(ys: Tensor, start: int) -> Tensor:
    """A loss that differs from step to step and grows late, so the far past matters.

    Every term is at least t + 1, so that their sum never cancels to nothing.
    """
    t = torch.arange(start, start + len(ys), dtype=ys.dtype)[:, None, None]
    return ((t + 1) * (2 + torch.sin(ys + t))).sum()


def agree(got: Tensor, want: Tensor | None) -> None:
    assert want is not None
    assert got.shape == want.shape
    assert want.norm() > 1e-6, "a vanished gradient proves nothing"
    assert (got - want).norm() <= 1e-10 * want.norm()


def by_autograd(name: str, w: Weights, xs: Tensor, state: tuple[Tensor, ...], steps: int):
    leaves = Weights(*(None if p is None else p.clone().requires_grad_() for p in w))
    first = tuple(s.clone().requires_grad_() for s in state)
    s, total = first, torch.zeros((), dtype=torch.float64)
    for t in range(steps):
        s, _ = cells.named(name).step(leaves, xs[t], s)
        total = total + late_loss(s[0][None], t)
    total.backward()
    return total.detach(), leaves, first


@pytest.mark.parametrize("kind", CELLS)
@given(steps=st.integers(1, 7), seed=st.integers(0, 2**31))
def test_the_gradient_so_far_equals_autograd_after_every_step(kind: str, steps: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    name, w, state = layer(kind, g)
    xs = normal(g, steps, BATCH, INPUT)
    records = list(online((name, w), xs, late_loss, state))
    assert len(records) == steps
    for t, now in enumerate(records, 1):
        if t in (1, steps):
            total, weights, first = by_autograd(name, w, xs, state, t)
            agree(now.loss, total)
            for field, dw in now.gradient.weights.items():
                agree(dw, getattr(weights, field).grad)
            for ds, s in zip(now.gradient.state, first, strict=True):
                agree(ds, s.grad)


def test_the_newest_gradients_add_up_to_the_gradient():
    g = torch.Generator().manual_seed(0)
    name, w, state = layer("gru", g)
    records = list(online((name, w), normal(g, 5, BATCH, INPUT), late_loss, state))
    summed = pytree.tree_map(lambda *parts: sum(parts), *[r.newest for r in records])
    pytree.tree_map(agree, summed, records[-1].gradient)


MODULES = [nn.RNN, nn.GRU, nn.LSTM, elman.nn.RNN, elman.nn.GRU, elman.nn.LSTM]


@pytest.mark.parametrize("build", [*MODULES, partial(elman.nn.RNN, nonlinearity="linear")])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_module_of_one_layer_serves_as_it_is(build, batch_first: bool):
    torch.manual_seed(0)
    module = build(INPUT, HIDDEN, batch_first=batch_first, dtype=torch.float64)
    xs = torch.randn(6, BATCH, INPUT, dtype=torch.float64)
    got = forward_accumulation(module, xs.transpose(0, 1) if batch_first else xs, late_loss)
    ys, _ = module(xs.transpose(0, 1) if batch_first else xs)
    late_loss(ys.transpose(0, 1) if batch_first else ys, 0).backward()
    assert set(got.gradient.weights) == {name for name, _ in module.named_parameters()}
    for name, p in module.named_parameters():
        agree(got.gradient.weights[name], p.grad)


def test_ids_are_one_hot_rows():
    g = torch.Generator().manual_seed(0)
    name, w, state = layer("lstm", g)
    ids = torch.tensor([[0, 2], [1, 1], [2, 0]])
    rows = torch.nn.functional.one_hot(ids, INPUT).double()
    got = forward_accumulation((name, w), ids, late_loss, state)
    want = forward_accumulation((name, w), rows, late_loss, state)
    pytree.tree_map(agree, got.gradient, want.gradient)


class Noisy(nn.Module):
    """A cell of one's own: its state a dict, its output apart, its noise drawn at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(INPUT + HIDDEN, HIDDEN, dtype=torch.float64)
        self.write = nn.Linear(HIDDEN, PROJECTION, dtype=torch.float64)

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        h = torch.tanh(self.read(torch.cat([x, state["h"]], 1)) + state["slow"])
        slow = 0.9 * state["slow"] + 0.1 * torch.nn.functional.dropout(h, 0.5, self.training)
        return self.write(h), {"h": h, "slow": slow}

    def initial_state(self, batch: int) -> dict[str, Tensor]:
        zeros = torch.zeros(batch, HIDDEN, dtype=torch.float64)
        return {"h": zeros, "slow": zeros + 0.1}


def test_a_cell_of_ones_own_serves_too():
    torch.manual_seed(0)
    cell = Noisy().eval()
    xs = torch.randn(6, BATCH, INPUT, dtype=torch.float64)
    got = forward_accumulation(cell, xs, late_loss)
    wrapped = forward_accumulation(elman.nn.Recurrent(cell), xs, late_loss)
    assert [*wrapped.gradient.weights] == ["cell." + name for name in got.gradient.weights]
    state, total = cell.initial_state(BATCH), torch.zeros((), dtype=torch.float64)
    for t, x in enumerate(xs):
        output, state = cell(x, state)
        total = total + late_loss(output[None], t)
    total.backward()
    agree(got.loss, total.detach())
    for name, p in cell.named_parameters():
        agree(got.gradient.weights[name], p.grad)


def test_a_random_cell_is_differentiated_at_the_noise_it_drew():
    torch.manual_seed(0)
    cell = Noisy()
    xs = torch.randn(3, BATCH, INPUT, dtype=torch.float64)
    *_, before, last = online(cell, xs, lambda ys, start: ys.sum())
    h = last.state["h"]
    agree(last.newest.weights["write.weight"], h.sum(0).expand(PROJECTION, -1))
    kept = (last.state["slow"] - 0.9 * before.state["slow"]) / 0.1
    assert torch.all(torch.isclose(kept, 2 * h) | torch.isclose(kept, 0 * h, atol=1e-12))
    assert not torch.equal(kept[0].abs() < 1e-9, kept[1].abs() < 1e-9), "rows share their noise"


def test_the_parameters_of_the_loss_get_their_gradient():
    g = torch.Generator().manual_seed(0)
    name, w, state = layer("tanh", g)
    readout = nn.Linear(HIDDEN, 1, dtype=torch.float64)
    xs = normal(g, 4, BATCH, INPUT)
    forward_accumulation((name, w), xs, lambda ys, start: readout(ys).square().sum(), state)
    got, readout.weight.grad = readout.weight.grad, None
    hs, s = [], state
    for x in xs:
        s, _ = cells.named(name).step(w, x, s)
        hs.append(s[0])
    readout(torch.stack(hs)).square().sum().backward()
    assert got is not None
    agree(got, readout.weight.grad)


def test_learning_online_changes_the_weights_under_way():
    torch.manual_seed(0)
    module = nn.RNN(1, 6, dtype=torch.float64)
    readout = nn.Linear(6, 1, dtype=torch.float64)
    wave = torch.sin(torch.arange(601, dtype=torch.float64) / 5)

    def loss(ys: Tensor, start: int) -> Tensor:
        return (readout(ys)[0, 0, 0] - wave[start + 1]).square()

    optimiser = torch.optim.SGD([*module.parameters(), *readout.parameters()], lr=0.05)
    losses, before = [], 0.0
    for now in online(module, wave[:-1, None, None], loss):
        for name, p in module.named_parameters():
            p.grad = now.newest.weights[name]
        optimiser.step()
        optimiser.zero_grad()
        losses.append(now.loss.item() - before)
        before = now.loss.item()
    assert sum(losses[-100:]) < 0.05 * sum(losses[:100])


def test_memory_does_not_grow_with_time():
    """Keeping anything of one step, J (4 MB) or what made it, would show 40 times over."""
    torch.manual_seed(0)
    module = nn.RNN(INPUT, 96)
    stream = (torch.randn(1, INPUT, requires_grad=True) for _ in range(60))
    peaks = []
    for t, _ in enumerate(online(module, stream, late_loss)):
        if t in (19, 59):
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    assert peaks[1] - peaks[0] < 8e6


def test_what_cannot_be_served_is_refused_at_the_call():
    with pytest.raises(UserError, match="this module has 2"):
        online(nn.GRU(2, 3, num_layers=2), [], late_loss)
    with pytest.raises(UserError, match="xs has no steps"):
        forward_accumulation(nn.GRU(2, 3), torch.zeros(0, 1, 2), late_loss)
    with pytest.raises(UserError, match="no initial_state"):
        forward_accumulation(nn.Linear(2, 3), torch.zeros(1, 1, 2), late_loss)
