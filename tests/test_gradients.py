"""The gradient through time, for every cell, carry, memory, depth and direction, against autograd
through a bare loop (`bare_loop.py`) in float64; and against finite differences."""

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import bare_loop
from elman import nn
from elman.errors import UserError
from elman.gradients import (
    Carry,
    Checkpointed,
    Full,
    Randomized,
    Sliding,
    Stored,
    Truncated,
    backward_through_time,
)
from elman.kernels import reference
from elman.kernels.bare import Bare
from elman.recurrence import operator
from elman.recurrence.strand import Dropout

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
    Checkpointed(budget=2**15),  # pieces of several steps, kept sparsely, for the larger cells
]
SHAPES = [(1, 1), (3, 1), (2, 2)]


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

    def packed_gradients(self) -> list[Tensor]:
        assert self.lengths is not None
        state = self.stacked if self.module.cell == "lstm" else self.stacked[0]
        packed = pack_padded_sequence(self.xs, self.lengths, enforce_sorted=False)
        ys, last = self.module(packed, state)
        ys, _ = pad_packed_sequence(ys)
        last = last if self.module.cell == "lstm" else (last,)
        return gradients([ys, *last], self.inputs, [self.dys, *self.dlast])

    def by_loop(self, carry) -> list[Tensor]:
        """What the carry promises, by autograd through a bare loop."""
        if isinstance(carry, Sliding):
            return self._sliding(carry)
        carry, places, shape = fresh(carry), len(self.stacked[0]), self.xs.shape[:2]
        apart = carry.random and self.module.bidirectional and places > 2
        each = [carry.weights(*shape) for _ in range(places if apart else 1)]
        ys, last = self.loop(lambda moment, place: each[place % len(each)][moment])
        return gradients([ys, *last], self.inputs, [self.dys, *self.dlast])

    def _sliding(self, carry: Sliding) -> list[Tensor]:
        """For each block of losses a whole pass, detached at both edges of its window."""
        steps, both = len(self.xs), self.module.bidirectional
        total = [torch.zeros_like(p) for p in self.inputs]
        for first in range(0, steps, carry.every):
            last = min(first + carry.every, steps)
            edges = (max(0, last - carry.steps), min(steps, first + carry.steps))
            ys, ends = self.loop(lambda moment, _, edges=edges: 0.0 if moment in edges else 1.0)
            pull = torch.zeros_like(self.dys)
            pull[first:last] = self.dys[first:last]
            reverse = (torch.arange(len(self.stacked[0])) % 2 == 1)[:, None, None] & both
            ended = torch.full((BATCH,), steps) if self.lengths is None else self.lengths
            ends_here = ((first < ended) & (ended <= last))[:, None]
            pulls = [d * torch.where(reverse, first == 0, ends_here) for d in self.dlast]
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


def fresh(carry):
    """The same carry with all its draws before it."""
    return type(carry)(**{k: v for k, v in vars(carry).items() if not k.startswith("_")})


WATCHED = [False]


@contextmanager
def create_graph():
    """Gradients found inside can be differentiated again."""
    WATCHED[0] = True
    try:
        yield
    finally:
        WATCHED[0] = False


def gradients(outs, inputs, pulls) -> list[Tensor]:
    found = torch.autograd.grad(outs, inputs, pulls, allow_unused=True, create_graph=WATCHED[0])
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
@pytest.mark.parametrize("carry", CARRIES, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_equal_autograd_through_a_bare_loop(cell, carry, layers, directions):
    wanted = problem(cell, layers, directions).by_loop(carry)
    assert all(w.norm() > 1e-3 for w in wanted), "vanished gradients make any two methods agree"
    for memory in MEMORIES:
        carry = fresh(carry)
        agree(problem(cell, layers, directions, carry=carry, memory=memory).gradients(), wanted)


@pytest.mark.parametrize("carry", CARRIES, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("cell", ["tanh", "gru", "lstm"])
def test_ids_are_one_hot_rows(cell, carry):
    p = problem(cell, 2, ids=True, carry=fresh(carry), memory=Checkpointed(every=3))
    agree(p.gradients(), p.by_loop(carry))


@pytest.mark.parametrize("carry", CARRIES, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("cell", ["tanh", "gru", "projected"])
def test_rows_that_end_early_hold_their_state(cell, directions, carry):
    p = problem(cell, 2, directions, carry=fresh(carry), memory=Checkpointed(every=4))
    p.lengths = torch.tensor([STEPS, 7, 4])
    p.dys = p.dys * (torch.arange(STEPS)[:, None] < p.lengths)[..., None]  # no output after its end
    wanted = p.by_loop(carry)
    agree(p.packed_gradients(), wanted)
    p.module.carry, p.module.memory = fresh(carry), Stored()
    agree(p.packed_gradients(), wanted)


@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
@pytest.mark.parametrize("directions", [1, 2])
def test_dropout_between_layers_is_part_of_the_gradient(directions, memory):
    p = problem("gru", 3, directions, dropout=0.4, memory=memory)
    width = HIDDEN * directions
    dropout = Dropout(0.4, seed=11)
    masks = [dropout.mask(torch.zeros(STEPS, BATCH, width).double(), i, 0) for i in range(2)]
    assert {round(v, 9) for v in masks[0].unique().tolist()} == {0, round(1 / 0.6, 9)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", lambda *_, **__: torch.tensor(11))
        found = p.gradients()
    ys, last = p.loop(None, masks)
    agree(found, gradients([ys, *last], p.inputs, [p.dys, *p.dlast]))


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_pass_pytorchs_own_check(cell, directions):
    """Finite differences of the outputs, and of the gradients."""
    p = problem(cell, 3 - directions, directions, steps=3)
    names = [name for name, _ in p.module.named_parameters()]
    inputs = [t.detach()[:, :2].clone().requires_grad_() for t in (p.xs, *p.stacked)]
    inputs += [w.detach().clone().requires_grad_() for w in p.module.parameters()]

    def run(xs, *rest):
        stacked, weights = rest[: len(p.stacked)], rest[len(p.stacked) :]
        state = stacked if p.module.cell == "lstm" else stacked[0]
        weights = dict(zip(names, weights, strict=True))
        ys, last = torch.func.functional_call(p.module, weights, (xs, state))
        return ys, *(last if p.module.cell == "lstm" else (last,))

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("carry", CARRIES, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("directions", [1, 2])
def test_gradients_of_gradients_equal_autograds(directions, carry):
    def second(first):
        return gradients(
            [sum(g.square().sum() for g in first)], p.inputs, [torch.ones(()).double()]
        )

    p = problem("gru", 2, directions, carry=fresh(carry))
    with create_graph():
        found, wanted = second(p.gradients()), second(p.by_loop(carry))
    assert all(w.norm() > 1e-6 for w in wanted)
    agree(found, wanted)


def repeated(carry, draws: int = 1, layers: int = 1, directions: int = 1) -> Tensor:
    """dW_hh of many backward passes through one forward pass."""
    p = problem("tanh", layers, directions, carry=carry)
    ys, _ = p.module(p.xs, p.stacked[0])
    weight = p.module.weight_hh_l0
    return torch.stack(
        [torch.autograd.grad(ys, weight, p.dys, retain_graph=True)[0] for _ in range(draws)]
    )


@pytest.mark.parametrize(
    "carry",
    [
        Randomized(keep=0.8, seed=1),
        Randomized(keep=0.8, seed=1, per_row=True),
        Randomized.polynomial(mean=5, alpha=3, seed=2),
    ],
    ids=["constant", "per row", "polynomial"],
)
def test_a_randomized_gradient_is_right_on_average_where_a_truncated_one_is_not(carry):
    # 36 entries, each within five standard errors: false alarms at 36 × 6e-7 per seed; and the
    # mean comes ever closer: its distance is about what its own standard error says.
    exact, found = repeated(Full())[0], repeated(carry, 1500)
    mean, error = found.mean(0), found.std(0) / len(found) ** 0.5
    assert bool(((mean - exact).abs() <= 5 * error).all())
    assert (mean - exact).norm() <= 1.5 * error.norm()
    assert (repeated(Truncated(window=5))[0] - exact).norm() > 4 * error.norm()


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("layers", "directions"), [(3, 1), (1, 2), (3, 2)])
def test_a_randomized_gradient_is_right_on_average_in_any_stack(layers, directions, per_row):
    """Both ways and in several layers a path crosses a moment more than once."""
    shape = {"layers": layers, "directions": directions}
    carry = Randomized(keep=0.8, seed=1, per_row=per_row)
    exact, found = repeated(Full(), **shape)[0], repeated(carry, 600, **shape)
    mean, error = found.mean(0), found.std(0) / len(found) ** 0.5
    assert bool(((mean - exact).abs() <= 5 * error).all())
    assert (mean - exact).norm() <= 1.5 * error.norm()


@pytest.mark.parametrize("directions", [1, 2])
def test_a_window_longer_than_the_text_cuts_nothing(directions):
    exact = problem("lstm", 2, directions).gradients()
    for carry in (Truncated(STEPS), Sliding(STEPS, STEPS), Sliding(2, 2 * STEPS), Randomized(1.0)):
        agree(problem("lstm", 2, directions, carry=carry).gradients(), exact, 1e-12)


def test_a_window_that_slides_by_its_own_length_is_truncation():
    truncated = problem("gru", 2, steps=12, carry=Truncated(4)).gradients()
    sliding = problem("gru", 2, steps=12, carry=Sliding(every=4, steps=4)).gradients()
    agree(sliding, truncated, 1e-12)


@dataclass(frozen=True)
class FirstRowCut(Carry):
    """The first row is cut before step 5, the others nowhere."""

    def weights(self, steps, rows=1):
        xi = torch.ones(steps, rows, dtype=torch.float64)
        xi[5, 0] = 0
        return xi


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("carry", [Truncated(window=5), FirstRowCut()], ids=["all", "a row"])
@pytest.mark.parametrize("cell", ["linear", "gru", "lstm"])
def test_a_cut_stops_a_gradient_that_has_overflowed(cell, carry, kernels, monkeypatch):
    """Every state rests at 0, and what comes back through the candidate grows 10³⁰-fold a step."""
    monkeypatch.setenv("ELMAN_KERNELS", kernels)
    rnn = nn.of(cell, 1, 1, carry=carry)
    with torch.no_grad():
        for p in rnn.parameters():
            p.zero_()
        rnn.weight_ih_l0.fill_(1)
        rnn.weight_hh_l0[0 if cell == "linear" else 2] = 1e30
    xs = torch.zeros(10, 2, 1, requires_grad=True)
    rnn(xs)[0][-1].sum().backward()
    assert xs.grad is not None
    assert not bool(xs.grad[5].isfinite().any())
    assert xs.grad[:5, 0].flatten().tolist() == [0.0] * 5
    assert bool(xs.grad[0, 1].isfinite()) == isinstance(carry, Truncated)


@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
@pytest.mark.parametrize("carry", [Full(), Truncated(4), Sliding(3, 5)], ids=repr)
def test_a_loss_may_be_of_the_last_states_alone(carry, memory):
    p = problem("lstm", 2, carry=carry, memory=memory)
    _, last = p.module(p.xs, p.stacked)
    p.dys = torch.zeros_like(p.dys)
    agree(gradients(last, p.inputs, p.dlast), p.by_loop(carry))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
@pytest.mark.parametrize("carry", CARRIES, ids=lambda c: type(c).__name__)
def test_backward_through_time_is_the_modules_own_gradient(carry, memory, batch_first):
    p = problem("lstm", 2, carry=fresh(carry), memory=memory, batch_first=batch_first)
    head = torch.nn.Linear(HIDDEN, 3, dtype=torch.float64)
    xs = p.xs.detach().transpose(0, 1) if batch_first else p.xs.detach()
    time = 1 if batch_first else 0
    xs.requires_grad_()
    pieces = []

    def loss(ys, start):
        pieces.append((start, start + ys.shape[time]))
        weight = torch.arange(start, start + ys.shape[time]).view(
            (1, -1, 1) if batch_first else (-1, 1, 1)
        )
        return (weight * head(ys).square()).sum()

    leaves = [xs, *p.stacked, *p.module.parameters(), *head.parameters()]
    total, last = backward_through_time(p.module, xs, loss, p.stacked)
    found = [leaf.grad for leaf in leaves]
    assert [t for piece in sorted(pieces) for t in range(*piece)] == list(range(STEPS))

    p.module.carry = fresh(carry)
    ys, wanted_last = p.module(xs, p.stacked)
    wanted = loss(ys, 0)
    torch.testing.assert_close(total, wanted.detach())
    torch.testing.assert_close(last, wanted_last)
    assert not any(s.requires_grad for s in last)
    agree(found, torch.autograd.grad(wanted, leaves))


def test_backward_through_time_adds_to_the_gradients_that_are_there():
    p = problem("gru", 2, memory=Checkpointed(every=4))
    for _ in range(2):
        backward_through_time(p.module, p.xs, lambda ys, start: ys.sum(), p.stacked[0])
    twice = p.module.weight_hh_l0.grad.clone()
    p.module.zero_grad()
    p.module.weight_ih_l0.requires_grad_(False)
    backward_through_time(p.module, p.xs, lambda ys, start: ys.sum(), p.stacked[0])
    torch.testing.assert_close(twice, 2 * p.module.weight_hh_l0.grad)
    assert p.module.weight_ih_l0.grad is None


def test_checkpointed_equals_stored_over_thousands_of_steps():
    def run(memory):
        torch.manual_seed(0)
        rnn = nn.RNN(16, 64, memory=memory, dtype=torch.float64)
        ids = torch.randint(16, (4096, 1))
        backward_through_time(rnn, ids, lambda ys, start: ys.square().sum())
        return [p.grad for p in rnn.parameters()]

    agree(run(Checkpointed(budget=1 << 20)), run(Stored()), 1e-12)


@pytest.mark.parametrize(
    ("rnn", "loss", "said"),
    [
        (nn.RNN(4, 5, bidirectional=True), lambda ys, start: ys.sum(), "both ends of the sequence"),
        (nn.RNN(4, 5), lambda ys, start: ys, "it must return one number"),
        (nn.RNN(4, 5), lambda ys, start: 3.0, "loss.* returned a float"),
        (torch.nn.RNN(4, 5), lambda ys, start: ys.sum(), "rnn is a RNN"),
    ],
)
def test_what_cannot_be_taken_piece_by_piece_is_refused(rnn, loss, said):
    with pytest.raises(UserError, match=said):
        backward_through_time(rnn, torch.zeros(6, 2, 4), loss)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM, partial(nn.LSTM, proj_size=2)])
@pytest.mark.parametrize(("layers", "both", "bias"), [(1, False, True), (2, True, False)])
def test_rows_of_different_lengths_are_the_same_by_torchs_layers(kind, layers, both, bias):
    """As a GPU runs them where a gradient is to be differentiated; outputs end where rows do."""
    torch.manual_seed(0)
    module = kind(4, 5, layers, bias=bias, bidirectional=both, dtype=torch.float64)
    lengths = torch.tensor([6, 4, 4, 1])
    xs = torch.randn(6, 4, 4, dtype=torch.float64)
    x = module._inputs(*module._time_first(xs, None), lengths)
    x = x._replace(stacked=[torch.randn_like(s) for s in x.stacked])
    stack = module._recipe().stack(x, reference.KERNEL)
    loops = stack.replaced(kernels=[Bare(None)] * len(stack.layers))
    ys, last, _ = loops.forward(xs, operator.unstack(x.stacked), keep=False)
    rows = operator._rows_that_run(lengths, len(xs))
    found, ends = operator._by_torch(stack, xs, rows, operator.unstack(x.stacked))
    torch.testing.assert_close(found, pack_padded_sequence(ys, lengths).data)
    torch.testing.assert_close(operator.restack(ends), operator.restack(last))


@pytest.mark.parametrize("layers", [1, 2])
def test_a_gradient_of_x_alone_costs_none_of_the_weights(layers, monkeypatch):
    """Where it is to be differentiated again, and every gradient leaves a graph behind."""
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    module, asked = nn.GRU(3, 4, layers, dtype=torch.float64), []
    bare = operator._bare

    def watched(*args):
        asked.append(args[-1])
        return bare(*args)

    monkeypatch.setattr(operator, "_bare", watched)
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    for wanted in ([x], [x, module.weight_hh_l0], [module.bias_ih_l0]):
        loss = module(x)[0].sin().sum()
        pulls = torch.autograd.grad(loss, wanted, create_graph=True)
        (found,) = torch.autograd.grad(torch.stack([p.sin().sum() for p in pulls]).sum(), x)
        assert found.abs().amax() > 1e-3
    assert asked == [False, True, True]
