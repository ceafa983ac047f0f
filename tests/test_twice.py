"""Gradients of gradients on the CPU kernel: torch's own numbers, as often as asked."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from elman import nn
from elman.errors import UserError
from elman.gradients.memory import Checkpointed
from elman.kernels.cpu import KERNEL, library
from elman.kernels.cpu.calls import Prepared
from elman.recurrence import native, twice

pytestmark = pytest.mark.skipif(KERNEL.library is None, reason="the cpu kernel was not built")

CELLS = {
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "gru": (nn.GRU, {}),
    "lstm": (nn.LSTM, {}),
}
STACKS = {
    "one layer": {},
    "two layers, no bias": {"num_layers": 2, "bias": False},
    "both ways": {"num_layers": 2, "bidirectional": True},
}


@pytest.fixture
def passes(monkeypatch):
    """How many second backward passes were ours."""
    made, back = [], twice.Stack.back
    monkeypatch.setattr(twice.Stack, "back", lambda *args: made.append(1) or back(*args))
    return made


def pair(cell, inputs=3, hidden=7, dtype=torch.float64, **options):
    """Ours and torch's, the same weights: large ones, for gradients that are worth comparing."""
    kind, more = CELLS[cell]
    mine = kind(inputs, hidden, dtype=dtype, **options, **more)
    with torch.no_grad():
        for p in mine.parameters():
            p.copy_(torch.randn(p.shape, dtype=dtype) / (p.shape[-1] ** 0.5 if p.dim() > 1 else 2))
    peer = getattr(torch.nn, kind.__name__)(inputs, hidden, dtype=dtype, **options, **more)
    peer.load_state_dict(mine.state_dict())
    return mine, peer


def first_of(module, rows):
    places = module.num_layers * (2 if module.bidirectional else 1)
    shape, dtype = (places, rows, module.hidden_size), module.weight_hh_l0.dtype
    states = 2 if isinstance(module, torch.nn.LSTM | nn.LSTM) else 1
    return [torch.randn(shape, dtype=dtype) for _ in range(states)]


def outputs(module, x, state):
    ys, last = module(x, tuple(state) if len(state) > 1 else state[0]) if state else module(x)
    return [ys, *(last if isinstance(last, tuple) else [last])]


def derivatives(module, x, state, order=2):
    """Of a loss of all outputs by everything: first ones, and those of a sum of their squares."""
    leaves = [t.clone().requires_grad_() for t in (x, *state)]
    wanted = [*leaves, *module.parameters()]
    loss = sum((out - 0.5).pow(3).sum() for out in outputs(module, leaves[0], leaves[1:]))
    found = []
    for left in reversed(range(order)):
        grads = torch.autograd.grad(loss, wanted, create_graph=left > 0)
        loss = sum((i + 1) * g.pow(2).mean() for i, g in enumerate(grads))
        found += [g.detach() for g in grads]
    return found


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("T", "B"), [(1, 1), (5, 3), (9, 18)])
def test_all_second_derivatives_are_torchs(cell, stack, given, T, B, passes):
    mine, peer = pair(cell, **STACKS[stack])
    x = torch.randn(T, B, 3, dtype=torch.float64)
    state = first_of(mine, B) if given else []
    for a, b in zip(derivatives(mine, x, state), derivatives(peer, x, state), strict=True):
        assert T == 1 or b.abs().amax() > 1e-3
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9 * float(b.abs().amax()))
    assert len(passes) == 1


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("level", [library.PORTABLE, library.AVX2, library.AVX512])
def test_older_processors_find_the_same(cell, level, passes, monkeypatch):
    mine, peer = pair(cell, num_layers=2)
    x, state = torch.randn(4, 3, 3, dtype=torch.float64), first_of(mine, 3)
    expected = derivatives(peer, x, state)
    monkeypatch.setattr(KERNEL, "level", level)
    for a, b in zip(derivatives(mine, x, state), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9 * float(b.abs().amax()))
    assert passes


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("given", [True, False])
def test_third_and_fourth_derivatives_are_torchs(cell, given):
    mine, peer = pair(cell, num_layers=2)
    x, state = torch.randn(3, 2, 3, dtype=torch.float64), first_of(mine, 2) if given else []
    found = [derivatives(module, x, state, order=4) for module in (mine, peer)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9 * float(b.abs().amax()))


@pytest.mark.parametrize("cell", CELLS)
def test_second_derivatives_by_differences(cell, passes):
    mine, _ = pair(cell, 2, 3, num_layers=2, bidirectional=True)
    inputs = [torch.randn(3, 2, 2, dtype=torch.float64), *first_of(mine, 2)]
    inputs = [*inputs, *(p.detach() for p in mine.parameters())]
    names = [n for n, _ in mine.named_parameters()]

    def run(*given):
        states = len(inputs) - 1 - len(names)
        weights = dict(zip(names, given[1 + states :], strict=True))
        state = tuple(given[1 : 1 + states])
        hx = state if states > 1 else state[0]
        ys, last = torch.func.functional_call(mine, weights, (given[0], hx))
        return ys, *(last if isinstance(last, tuple) else (last,))

    inputs = [t.clone().requires_grad_() for t in inputs]
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)
    assert passes


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("asked", ["x", "state", "W_hh", "b_ih"])
def test_what_alone_is_asked_for(cell, asked):
    mine, peer = pair(cell)
    x, state, found = torch.randn(5, 3, 3, dtype=torch.float64), first_of(mine, 3), []
    for module in (mine, peer):
        leaves = [t.clone().requires_grad_() for t in (x, *state)]
        W_hh, b_ih = module.weight_hh_l0, module.bias_ih_l0
        wanted = {"x": leaves[0], "state": leaves[-1], "W_hh": W_hh, "b_ih": b_ih}[asked]
        _, *last = outputs(module, leaves[0], leaves[1:])
        (d,) = torch.autograd.grad((last[-1] - 1).pow(3).sum(), wanted, create_graph=True)
        every = [*leaves, *module.parameters()]
        found.append(torch.autograd.grad(d.pow(2).sum(), every, allow_unused=True))
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("cell", CELLS)
def test_dropout_draws_the_same_masks_again(cell, passes):
    """The long way has the same masks, and goes back by a bare loop that autograd sees."""
    mine, _ = pair(cell, num_layers=3, bidirectional=True, dropout=0.4)
    x, state, found = torch.randn(20, 2, 3, dtype=torch.float64), first_of(mine, 2), []
    for memory in (mine.memory, Checkpointed(every=4)):
        mine.memory = memory
        torch.manual_seed(5)
        found.append(derivatives(mine, x, state))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9 * float(b.abs().amax()))
    assert len(passes) == 1


@pytest.mark.parametrize("cell", CELLS)
def test_float32_is_as_close_to_float64_as_torchs_layers_run_once_more(cell, monkeypatch):
    """From the same outputs, whose own errors are most of it."""
    errors = {True: 0.0, False: 0.0}
    for seed in range(4):
        torch.manual_seed(seed)
        mine, peer = pair(cell, 20, 33, torch.float32, num_layers=2)
        x, state = torch.randn(12, 6, 20), first_of(mine, 6)
        right = derivatives(peer.double(), x.double(), [s.double() for s in state])
        for ours in errors:
            with monkeypatch.context() as patch:
                if not ours:
                    patch.setattr(Prepared, "has_derivative", False)
                found = derivatives(mine, x, state)
            pairs = zip(found, right, strict=True)
            errors[ours] += sum(float((a - r).norm() / r.norm()) for a, r in pairs)
    assert errors[True] < 1.1 * errors[False]


@pytest.mark.parametrize("cell", CELLS)
def test_threads_change_no_bit(cell):
    mine, _ = pair(cell, 40, 70, torch.float32, num_layers=2, bidirectional=True)
    x = torch.randn(30, 9, 40)
    on_any_number_of_threads(lambda: derivatives(mine, x, []))


def on_any_number_of_threads(find):
    """It must find the same bits."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(find())
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_a_graph_that_is_kept_is_gone_through_again():
    mine, _ = pair("gru")
    x = torch.randn(5, 3, 3, dtype=torch.float64).requires_grad_()
    (dx,) = torch.autograd.grad(mine(x)[0].pow(3).sum(), x, create_graph=True)
    weights = [*mine.parameters()]
    once = torch.autograd.grad(dx.pow(2).sum(), weights, retain_graph=True)
    twofold = torch.autograd.grad(2 * dx.pow(2).sum(), weights)
    assert all(torch.equal(2 * a, b) for a, b in zip(once, twofold, strict=True))


def test_weights_changed_between_the_two_passes_are_noticed():
    mine, _ = pair("lstm")
    x = torch.randn(5, 3, 3, dtype=torch.float64).requires_grad_()
    (dx,) = torch.autograd.grad(mine(x)[0].pow(3).sum(), x, create_graph=True)
    with torch.no_grad():
        mine.weight_hh_l0.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(dx.pow(2).sum(), [*mine.parameters()])


@pytest.mark.parametrize("which", ["x", "weight", "pull", "last"])
def test_what_has_another_shape_by_the_second_pass_is_refused(which):
    mine, _ = pair("gru")
    x = torch.randn(5, 3, 3, dtype=torch.float64).requires_grad_()
    outs = mine(x)
    pulls = [torch.ones_like(y).requires_grad_() for y in outs]
    (dx,) = torch.autograd.grad(outs, x, pulls, create_graph=True)
    changed = {"x": x, "weight": mine.weight_hh_l0, "pull": pulls[0], "last": pulls[1]}[which]
    changed.data = torch.zeros(1, 1, 3, dtype=torch.float64)
    with pytest.raises(UserError, match=r"before the backward pass|was of shape"):
        torch.autograd.grad(dx.pow(2).sum(), [mine.bias_ih_l0])


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("which", range(7))
def test_what_hooks_bring_back_in_another_shape_is_refused(order, which):
    mine, _ = pair("gru")
    x, packed = torch.randn(5, 3, 3, dtype=torch.float64).requires_grad_(), []

    def halved(number):
        return packed[number].flatten()[:1] if number == which else packed[number]

    def numbered(t):
        packed.append(t.detach())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(numbered, halved):
        ys = mine(x)[0]
    assert len(packed) == 7  # x, states, what else is kept, four weights
    with pytest.raises(UserError, match=r"before the backward pass|was of shape"):
        torch.autograd.grad(ys.pow(3).sum(), x, create_graph=order > 1)


def test_nothing_is_held_once_the_gradient_is_gone():
    mine, _ = pair("lstm")
    x = torch.randn(5, 3, 3, dtype=torch.float64).requires_grad_()
    ys = mine(x)[0]
    (dx,) = torch.autograd.grad(ys.pow(3).sum(), x, create_graph=True)
    alive = weakref.ref(ys)
    gc.disable()  # by counts alone: no cycle
    try:
        del ys, dx
        assert alive() is None
    finally:
        gc.enable()


def rows_of(*lengths):
    return [torch.randn(n, 3, dtype=torch.float64) for n in lengths]


def derivatives_of_packs(module, rows, state):
    """As `derivatives`, of rows of different lengths."""

    class Packs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.own = module

        def forward(self, x, *hx):
            sequences = [*x.split([len(row) for row in rows])]
            ys, last = module(pack_sequence(sequences, enforce_sorted=False), *hx)
            return ys.data, last

    return derivatives(Packs(), torch.cat(rows), state)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("lengths", [(2, 5, 1, 5), (3, 3), (1,), (1, 4, 2) * 7])
def test_packed_rows_are_torchs(cell, stack, given, lengths, passes):
    mine, peer = pair(cell, **STACKS[stack])
    rows, state = rows_of(*lengths), first_of(mine, len(lengths)) if given else []
    found = [derivatives_of_packs(module, rows, state) for module in (mine, peer)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9 * float(b.abs().amax()))
    assert len(passes) == 1


@pytest.mark.parametrize("cell", CELLS)
def test_threads_change_no_bit_of_packed_rows(cell):
    mine, _ = pair(cell, 40, 70, torch.float32, num_layers=2, bidirectional=True)
    rows = [torch.randn(n, 40) for n in (30, 2, 19, 30, 7, 1, 22, 13, 4)]
    on_any_number_of_threads(lambda: derivatives_of_packs(mine, rows, []))


@pytest.mark.parametrize("how", ["torch", "data"])
def test_batch_sizes_changed_between_the_two_passes_are_noticed(how):
    mine, _ = pair("gru")
    pack = pack_sequence([torch.randn(n, 3, dtype=torch.float64).requires_grad_() for n in (4, 2)])
    sizes, weights = pack.batch_sizes, [*mine.parameters()]
    ys = mine(pack)[0].data
    grads = torch.autograd.grad(ys.pow(3).sum(), weights, create_graph=True)
    (sizes if how == "torch" else sizes.data)[0] = 9  # autograd sees the first alone
    with pytest.raises((RuntimeError, UserError), match=r"modified by an inplace|were changed"):
        torch.autograd.grad(sum(g.pow(2).sum() for g in grads), weights)


@pytest.mark.parametrize("cell", CELLS)
def test_packed_rows_with_dropout_draw_the_same_masks_again(cell, passes):
    mine, _ = pair(cell, num_layers=3, bidirectional=True, dropout=0.4)
    rows, state, found = rows_of(2, 20, 1, 17), first_of(mine, 4), []
    for memory in (mine.memory, Checkpointed(every=4)):
        mine.memory = memory
        torch.manual_seed(5)
        found.append(derivatives_of_packs(mine, rows, state))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9 * float(b.abs().amax()))
    assert len(passes) == 1


def test_ids_go_back_by_autograd(passes, monkeypatch):
    seen, by_autograd = [], native._by_autograd
    monkeypatch.setattr(native, "_by_autograd", lambda *a: seen.append(1) or by_autograd(*a))
    module = nn.GRU(5, 7, dtype=torch.float64)
    weights = [*module.parameters()]
    ids = pack_sequence([torch.randint(5, (n,)) for n in (4, 2)])
    for x in (ids, torch.randint(5, (4, 2))):
        ys = module(x)[0]
        ys = ys.data if x is ids else ys
        grads = torch.autograd.grad(ys.pow(3).sum(), weights, create_graph=True)
        torch.autograd.grad(sum(g.pow(2).sum() for g in grads), weights)
    assert len(seen) == 2
    assert not passes
