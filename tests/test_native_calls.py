"""Calls with a gradient, two native calls in all: the bits of the long way, whatever happens."""

from __future__ import annotations

import contextlib

import pytest
import torch

from elman import nn
from elman.errors import UserError
from elman.gradients.carry import Truncated
from elman.gradients.memory import Checkpointed
from elman.kernels.cpu import KERNEL
from elman.recurrence import native

pytestmark = pytest.mark.skipif(KERNEL.library is None, reason="the cpu kernel was not built")

MODULES = [nn.RNN, nn.GRU, nn.LSTM]
SHAPES = [(1, 1), (1, 7), (3, 2), (14, 3), (20, 33)]


@pytest.fixture
def long_way(monkeypatch):
    """A context in which no such call is made."""

    @contextlib.contextmanager
    def inside():
        with monkeypatch.context() as patch:
            patch.setattr(native, "takes", lambda recipe: False)
            yield

    return inside


@pytest.fixture
def nodes(monkeypatch):
    """How many such calls were made."""
    made, apply = [], native._Node.apply
    monkeypatch.setattr(native._Node, "apply", lambda *args: made.append(1) or apply(*args))
    return made


def state_of(module, rows, dtype=torch.float32):
    places = module.num_layers * (2 if module.bidirectional else 1)
    h, c = (torch.randn(places, rows, module.hidden_size, dtype=dtype) for _ in range(2))
    return (h, c) if isinstance(module, nn.LSTM) else (h,)


def everything(module, x, state=None, *, pulls=(True, True)):
    """Outputs, last states and every gradient, the loss pulling on outputs and last states."""
    module.zero_grad()
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    state = None if state is None else tuple(s.clone().requires_grad_() for s in state)
    given = state[0] if state and len(state) == 1 else state
    ys, last = module(x) if given is None else module(x, given)
    last = last if isinstance(last, tuple) else (last,)
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=ys.dtype)
    for wanted, outs in zip(pulls, ((ys,), last), strict=True):
        for out in outs:
            pull = torch.randn(out.shape, generator=generator, dtype=out.dtype)
            loss = loss + ((out * pull).sum() if wanted else 0.0)
    loss.backward()
    grads = [x.grad, *(s.grad for s in state or ()), *(p.grad for p in module.parameters())]
    return [ys.detach(), *(s.detach() for s in last), *(g for g in grads if g is not None)]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("T", "B"), SHAPES)
def test_the_bits_of_the_long_way(kind, layers, bidirectional, T, B, long_way, nodes):
    module = kind(5, 19, layers, bidirectional=bidirectional, bias=layers != 2)
    for x in (torch.randn(T, B, 5), torch.randint(5, (T, B))):
        for state in (None, state_of(module, B)):
            found = everything(module, x, state)
            with long_way():
                assert same(found, everything(module, x, state))
    assert len(nodes) == 4


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("pulls", [(True, False), (False, True)])
def test_a_loss_of_the_outputs_or_of_the_last_states_alone(kind, pulls, long_way):
    module, x = kind(5, 19, 2, bidirectional=True), torch.randn(6, 3, 5)
    state = state_of(module, 3)
    found = everything(module, x, state, pulls=pulls)
    with long_way():
        assert same(found, everything(module, x, state, pulls=pulls))


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_float64_gradients_are_autograds(kind, bidirectional):
    module = kind(3, 4, 2, bidirectional=bidirectional, dtype=torch.float64)
    x, state = torch.randn(4, 2, 3, dtype=torch.float64), state_of(module, 2, torch.float64)
    inputs = [t.requires_grad_() for t in (x, *state)]

    def run(x, *state):
        ys, last = module(x, state if len(state) > 1 else next(iter(state)))
        return ys, *(last if isinstance(last, tuple) else (last,))

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("kind", MODULES)
def test_two_threads_take_a_direction_each_and_change_no_bit(kind):
    module, x = kind(40, 70, 2, bidirectional=True), torch.randn(30, 5, 40)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(everything(module, x))
            with torch.no_grad():
                assert torch.equal(module(x)[0], found[0][0])
    finally:
        torch.set_num_threads(before)
    assert same(found[0], found[1])
    assert same(found[0], found[2])


@pytest.mark.parametrize("kind", MODULES)
def test_the_batch_may_come_first(kind, long_way):
    module = kind(5, 19, batch_first=True)
    for x in (torch.randn(3, 4, 5), torch.randn(1, 1, 5), torch.randint(5, (3, 4))):
        found = everything(module, x)
        with long_way():
            assert same(found, everything(module, x))


def test_weights_that_autograd_brings_back_from_elsewhere(long_way):
    """`saved_tensors_hooks` may hand over copies, in memory of any layout."""
    module, x = nn.LSTM(5, 19, 2), torch.randn(6, 3, 5)
    with long_way():
        expected = everything(module, x)

    def copied(t):
        return t.t().contiguous().t() if t.dim() == 2 else t.clone()

    with torch.autograd.graph.saved_tensors_hooks(copied, lambda t: t):
        assert same(everything(module, x), expected)


def test_weights_put_elsewhere_before_the_backward_pass(long_way):
    def run(module):
        ys = module(x)[0]
        module.weight_hh_l0.data = 2 * module.weight_hh_l0.data
        module.weight_ih_l0.data = module.weight_ih_l0.data.t().contiguous().t()
        ys.sum().backward()
        return [p.grad for p in module.parameters()]

    x, module = torch.randn(6, 3, 5), nn.GRU(5, 19)
    twin = nn.GRU(5, 19)
    twin.load_state_dict(module.state_dict())
    found = run(module)
    with long_way():
        assert same(found, run(twin))


def test_what_was_changed_in_place_is_refused():
    module, x = nn.LSTM(5, 19), torch.randn(6, 3, 5)
    ys = module(x)[0]
    with torch.no_grad():
        module.weight_hh_l0.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ys.sum().backward()
    ys = module(x)[0]
    with pytest.raises(RuntimeError, match="inplace"):
        ys.add_(1)


def test_outputs_that_nothing_else_reads_may_be_changed_in_place():
    module, x = nn.LSTM(5, 19, bidirectional=True), torch.randn(6, 3, 5)
    (2 * module(x)[0]).sum().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(x)[0].mul_(2).sum().backward()
    assert same([p.grad for p in module.parameters()], expected)


def test_a_backward_pass_may_be_repeated():
    module, x = nn.LSTM(5, 19, bidirectional=True), torch.randn(6, 3, 5)
    loss = module(x)[0].square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in module.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(module.parameters(), once, strict=True))


def test_frozen_weights_get_no_gradient(long_way):
    module, x = nn.GRU(5, 19, 2), torch.randn(6, 3, 5)
    module.weight_hh_l0.requires_grad_(False)
    found = everything(module, x)
    assert module.weight_hh_l0.grad is None
    with long_way():
        assert same(found, everything(module, x))
    for p in module.parameters():
        p.requires_grad_(False)
    assert not module(x)[0].requires_grad


def test_ids_out_of_range_are_refused_in_words():
    module = nn.GRU(5, 19)
    module(torch.randint(5, (3, 2)))
    with pytest.raises(UserError, match="ids from 0 to 5"):
        module(torch.tensor([[0, 5], [1, 2], [3, 4]]))


def test_ids_changed_before_the_backward_pass_are_refused():
    module, ids = nn.GRU(5, 19), torch.randint(5, (3, 2))
    ys = module(ids)[0]
    ids.data[0] = 7  # autograd's count does not see it
    with pytest.raises(IndexError, match="ids of this call were changed"):
        ys.sum().backward()


def test_other_kinds_of_calls_take_the_long_way(nodes):
    x = torch.randn(6, 3, 5)
    for options in ({"carry": Truncated(2)}, {"memory": Checkpointed(2)}, {"zoneout": 0.1}):
        nn.GRU(5, 19, **options)(x)[0].sum().backward()
    nn.LSTM(5, 19, proj_size=4)(x)[0].sum().backward()
    nn.GRU(5, 19, 2, dropout=0.5)(x)[0].sum().backward()
    assert not nodes
    nn.GRU(5, 19, 2, dropout=0.5).eval()(x)[0].sum().backward()
    assert len(nodes) == 1
