"""Calls that are prepared once do what the long way does, forwards, back, and back again."""

import copy
import functools
import io
import itertools

import pytest
import torch

import paper_gpu
from elman import nn
from elman.cells import named
from elman.kernels import products
from elman.recurrence import prepared
from elman.recurrence.prepared import Call

KINDS = [nn.RNN, nn.GRU, nn.LSTM]
DESCRIBED = ["mgu", "peephole", "slstm", "indrnn"]
CASES = list(itertools.product((1, 3), (False, True), (False, True), (False, True)))


def answers(run, module, x, state, with_last):
    """Outputs, last states, and the gradients of everything."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    state = [s.clone().requires_grad_() for s in state]
    ys, last = run(x, state)
    torch.manual_seed(3)
    ends = [ys, *last] if with_last else [ys]
    torch.autograd.backward(ends, [torch.randn_like(t) for t in ends])
    leaves = [x, *state, *module.parameters()]
    return [ys, *last, *(t.grad for t in leaves)]


@pytest.mark.parametrize("kind", [*KINDS, *DESCRIBED])
@pytest.mark.parametrize(("layers", "batch_first", "bias", "given"), CASES)
def test_a_prepared_call_is_the_reference(kind, layers, batch_first, bias, given, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    torch.manual_seed(0)
    make = functools.partial(nn.Layers, kind) if isinstance(kind, str) else kind
    rnn = make(4, 8, layers, bias=bias, batch_first=batch_first)
    x = torch.randn(*((3, 5) if batch_first else (5, 3)), 4)
    state = [torch.randn(layers, 3, n) for n in named(rnn.cell).state_sizes(8)] * given

    def plain(x, state):
        ys, last = rnn(x, (tuple(state) if len(state) > 1 else state[0]) if given else None)
        return ys, last if isinstance(last, tuple) else (last,)

    with paper_gpu.launches_prepared():
        inputs = rnn._inputs(*rnn._time_first(x, None))
        call = Call(rnn._recipe(), inputs, batch_first)
        weights = [rnn.get_parameter(name) for name in rnn._flat_weights_names]
        assert call.prepared.suits(weights)
        for with_last in (False, True):
            exact = answers(plain, rnn, x, state, with_last)
            found = answers(lambda x, s: call(x, s, weights), rnn, x, state, with_last)
            for a, b in zip(found, exact, strict=True):
                torch.testing.assert_close(a, b)
        with torch.no_grad():
            ys, last = call(x, state, weights)
        torch.testing.assert_close([ys, *last], exact[: 1 + len(last)])
        again = twice(lambda x: call(x, state, weights)[0], x)
    torch.testing.assert_close(again, twice(lambda x: plain(x, state)[0], x))


def twice(run, x):
    """The gradient of a gradient."""
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(dx.square().sum(), x)[0]


def test_other_weights_and_copies_are_not_read_by_their_addresses():
    rnn = nn.LSTM(4, 6)
    x = rnn._inputs(*rnn._time_first(torch.randn(5, 3, 4), None))
    with paper_gpu.launches_prepared():
        call = Call(rnn._recipe(), x, False)
    weights = list(rnn.parameters())
    assert call.prepared.suits(weights)
    for other in (weights[0][:, :3], weights[0].T.contiguous().T, weights[0].double()):
        assert not call.prepared.suits([other, *weights[1:]])
    assert not call.prepared.suits(weights[:2])
    assert copy.deepcopy(call) is None
    rnn._settled["any"] = call
    torch.save(rnn, io.BytesIO())
    assert copy.deepcopy(rnn)._settled == {}


def test_what_is_not_plain_takes_the_long_way():
    rnn = nn.GRU(4, 6, bidirectional=True)
    x = rnn._inputs(*rnn._time_first(torch.randn(5, 3, 4), None))
    assert prepared.prepare(rnn._recipe(), x, False) is None


def test_a_table_is_the_same_with_and_without_autograd():
    W, b = torch.randn(6, 4), torch.randn(6)
    with torch.no_grad():
        table = products._table(W, b)
    assert table.is_contiguous()
    assert torch.equal(table, products._table(W, b))
