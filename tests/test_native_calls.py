"""Calls with a gradient, two native calls in all: the bits of the long way, whatever happens."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.autograd.functional import hessian, jacobian
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from elman import nn
from elman.errors import UserError
from elman.gradients.carry import Truncated
from elman.gradients.memory import Checkpointed
from elman.kernels.cpu import KERNEL
from elman.kernels.cpu.calls import Prepared
from elman.nn.module import Module
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
            patch.setattr(Module, "_plain_call", lambda *_: None)
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


def everything(module, x, state=None, *, pulls=(True, True), lengths=None):
    """Outputs, last states and every gradient, the loss pulling on outputs and last states."""
    module.zero_grad()
    torch.manual_seed(3)
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    state = None if state is None else tuple(s.clone().requires_grad_() for s in state)
    given = state[0] if state and len(state) == 1 else state
    ys, last = module(x if lengths is None else packed(x, lengths), given)
    ys = ys if lengths is None else ys.data
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


def packed(x, lengths):
    return pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)


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


NAMED = {
    "x": lambda x, state, weights: [x],
    "a state": lambda x, state, weights: state[-1:],
    "one weight": lambda x, state, weights: weights[1:2],
    "x, which is no leaf, and the weights": lambda x, state, weights: [x, *weights],
    "everything": lambda x, state, weights: [x, *state, *weights],
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("named", NAMED)
def test_gradients_of_gradients_that_were_asked_for_alone_are_torchs(kind, named, nodes):
    """The first pass finds what it is asked for; the second, everything behind that."""
    mine = kind(3, 7, 2, dtype=torch.float64)
    peer = getattr(torch.nn, kind.__name__)(3, 7, 2, dtype=torch.float64)
    peer.load_state_dict(mine.state_dict())
    x, state = torch.randn(4, 2, 3, dtype=torch.float64), state_of(mine, 2, torch.float64)
    found = []
    for module in (mine, peer):
        leaves = [t.clone().requires_grad_() for t in (x, *state)]
        leaves += [*module.parameters()]
        read = [2 * leaf for leaf in leaves[: 1 + len(state)]] if "no leaf" in named else leaves
        given = read[1 : 1 + len(state)]
        ys = module(read[0], tuple(given) if len(state) > 1 else given[0])[0]
        wanted = NAMED[named](read[0], given, leaves[1 + len(state) :])
        first = torch.autograd.grad((ys - 1).pow(3).sum(), wanted, create_graph=True)
        loss = sum(g.square().sum() for g in first)
        found.append([*first, *torch.autograd.grad(loss, leaves)])
    assert len(nodes) == 1
    for a, b in zip(*found, strict=True):
        assert b.abs().amax() > 1e-4
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


WAYS = {
    "plain": lambda module: {},
    "packed": lambda module: {"lengths": [4, 2]},
    "the long way": lambda module: setattr(module, "memory", Checkpointed(every=2)) or {},
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_gradients_of_what_was_made_of_the_same_weights(kind, way):
    """A module that reads its own output and its own last state: each backward pass counts once."""
    mine = kind(6, 6, dtype=torch.float64)
    peer = getattr(torch.nn, kind.__name__)(6, 6, dtype=torch.float64)
    peer.load_state_dict(mine.state_dict())
    x, more = torch.randn(4, 2, 6, dtype=torch.float64), WAYS[way](mine)
    found = []
    for module in (mine, peer):
        leaves = [x.clone().requires_grad_(), *module.parameters()]
        ys, last = module(leaves[0])
        ys = module(packed(ys, more["lengths"]) if more else ys, last)[0]
        loss = ((ys.data if more else ys) - 1).pow(3).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        found.append([*first, *second])
    for a, b in zip(*found, strict=True):
        assert b.abs().amax() > 1e-3
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layers", [1, 2])
def test_many_pulls_go_back_at_once(kind, way, layers):
    """`vectorize=True`: tensors without memory of their own, which no kernel can read."""
    module = kind(3, 4, layers, dtype=torch.float64)
    x, more = torch.randn(4, 2, 3, dtype=torch.float64), WAYS[way](module)
    given = [x, *state_of(module, 2, torch.float64)]

    def outputs(x, *state):
        hx = state[0] if len(state) == 1 else state
        ys = module(packed(x, more["lengths"]) if more else x, hx)[0]
        return (ys.data if more else ys).pow(2)

    def loss(*given):
        return outputs(*given).sum()

    for find, f in ((jacobian, outputs), (hessian, loss)):
        one_by_one, at_once = (find(f, (*given,), vectorize=v) for v in (False, True))
        torch.testing.assert_close(at_once, one_by_one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("lengths", [None, [6, 2, 4]])
def test_frozen_weights_change_no_other_gradient(kind, lengths, monkeypatch):
    """Nor are gradients found that nobody can have."""
    module, x, found, made = kind(5, 19, 2, bidirectional=True), torch.randn(6, 3, 5), [], []
    backward = Prepared.backward

    def watched(*args):
        pulls = backward(*args)
        made.append(pulls[2])
        return pulls

    monkeypatch.setattr(Prepared, "backward", watched)
    for frozen in (False, True):
        module.requires_grad_(not frozen)
        inputs = x.clone().requires_grad_()
        ys = module(inputs if lengths is None else packed(inputs, lengths))[0]
        (ys if lengths is None else ys.data).pow(2).sum().backward()
        found.append(inputs.grad)
    assert torch.equal(*found)
    assert found[0].abs().amax() > 1e-3
    assert [[dw is None for dw in dws] for dws in made] == [[False] * 16, [True] * 16]


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 300), (1, 20, 9), (2, 2, 300), (9, 5, 33)])
@pytest.mark.parametrize("ragged", [False, True])
def test_first_states_that_nobody_asks_about_change_no_other_gradient(
    kind, bidirectional, shape, ragged
):
    T, B, H = shape
    module = kind(6, H, num_layers=2, bidirectional=bidirectional)
    x, state = torch.randn(T, B, 6), state_of(module, B)
    lengths = [max(1, T - b) for b in range(B)] if ragged else None
    found = []
    for threads in (1, 2):
        for asked in (True, False):
            given = [s.clone().requires_grad_(asked) for s in state]
            with using(threads):
                found.append(gradients_beside(module, x, given, lengths))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def gradients_beside(module, x, state, lengths):
    """Of inputs and weights, from a loss of all outputs."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    hx = tuple(state) if len(state) > 1 else state[0]
    ys, last = module(x if lengths is None else packed(x, lengths), hx)
    last = last if isinstance(last, tuple) else (last,)
    outs = (ys if lengths is None else ys.data, *last)
    torch.stack([t.sin().sum() for t in outs]).sum().backward()
    assert all((s.grad is None) != s.requires_grad for s in state)
    return [x.grad, *(p.grad for p in module.parameters())]


@contextlib.contextmanager
def using(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


@pytest.mark.usefixtures("hastily")
def test_other_kinds_of_calls_take_the_long_way(nodes):
    x = torch.randn(6, 3, 5)
    for options in ({"carry": Truncated(2)}, {"memory": Checkpointed(2)}, {"zoneout": 0.1}):
        nn.GRU(5, 19, **options)(x)[0].sum().backward()
    nn.LSTM(5, 19, proj_size=4)(x)[0].sum().backward()
    assert not nodes


# Dropout between layers: the masks of the long way, drawn in native code.


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("T", "B"), [(1, 1), (3, 2), (16, 9), (37, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_has_the_bits_of_the_long_way(kind, bidirectional, T, B, dtype, long_way, nodes):
    module = kind(5, 19, 3, dropout=0.3, bidirectional=bidirectional, dtype=dtype)
    x, state = torch.randn(T, B, 5, dtype=dtype), state_of(module, B, dtype)
    found = everything(module, x, state)
    after = torch.get_rng_state()
    with long_way():
        assert same(found, everything(module, x, state))
    assert torch.equal(after, torch.get_rng_state())
    with torch.no_grad():
        torch.manual_seed(3)
        ys, _ = module(x, state if len(state) > 1 else state[0])
    assert torch.equal(ys, found[0])
    assert len(nodes) == 1


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 1 / 3, 0.9, 1 - 1e-9, 1.0])
def test_any_probability(p, long_way):
    module, x = nn.GRU(5, 19, 2, dropout=p), torch.randn(18, 3, 5)
    found = everything(module, x)
    with long_way():
        assert same(found, everything(module, x))


def test_dropout_keeps_what_torch_keeps_on_average():
    module = nn.RNN(8, 64, 2, nonlinearity="linear", bias=False, dropout=0.25)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.zero_() if "hh" in name else p.copy_(torch.eye(*p.shape))
        ys, _ = module(torch.ones(50, 40, 8))
    units = ys[..., :8]
    assert set(units.unique().tolist()) == {0.0, torch.tensor(1.0).div(0.75).item()}
    kept = (units > 0).double().mean().item()
    assert abs(kept - 0.75) < 4 * (0.75 * 0.25 / units.numel()) ** 0.5


def test_dropout_differs_from_call_to_call_and_is_off_in_evaluation(nodes):
    module, x = nn.LSTM(5, 19, 2, dropout=0.5), torch.randn(6, 3, 5)
    assert not torch.equal(module(x)[0], module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])
    module.dropout = 0.0
    assert torch.equal(module(x)[0], module.train()(x)[0])
    assert len(nodes) == 6


@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradients_through_dropout_are_autograds(bidirectional):
    module = nn.GRU(3, 4, 2, dropout=0.4, bidirectional=bidirectional, dtype=torch.float64)
    x, h = torch.randn(18, 2, 3, dtype=torch.float64), state_of(module, 2, torch.float64)[0]

    def run(x, h):
        torch.manual_seed(5)
        return module(x, h)

    inputs = [x.requires_grad_(), h.requires_grad_()]
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, [x[:2].detach().requires_grad_(), h])


def test_masks_are_the_same_whatever_torchs_defaults(another_default, long_way):
    module, x = nn.GRU(5, 19, 2, dropout=0.5), torch.randn(6, 3, 5)

    def called():
        torch.manual_seed(3)
        return [module(x)[0].detach()]

    wanted = called()
    another_default()
    assert same(called(), wanted)
    with long_way():
        assert same(called(), wanted)


def test_threads_draw_the_same_masks():
    module, x = nn.LSTM(20, 150, 2, dropout=0.5), torch.randn(70, 20, 20)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(everything(module, x))
    finally:
        torch.set_num_threads(before)
    assert same(found[0], found[1])
    assert same(found[0], found[2])


# Packed sequences.

LENGTHS = [[3], [4, 4, 4], [1, 1], [2, 7, 1, 7, 3], [9, 8, 2], [20, *range(1, 20)]]


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_packed_rows_have_the_bits_of_the_long_way(
    kind, bidirectional, lengths, dropout, long_way, nodes
):
    module = kind(5, 19, 2, dropout=dropout, bidirectional=bidirectional)
    T, B = max(lengths), len(lengths)
    for x in (torch.randn(T, B, 5), torch.randint(5, (T, B))):
        for state in (None, state_of(module, B)):
            found = everything(module, x, state, lengths=lengths)
            with long_way():
                assert same(found, everything(module, x, state, lengths=lengths))
    assert len(nodes) == 4
    with torch.no_grad():
        torch.manual_seed(3)
        given = state if len(state) > 1 else state[0]
        ys, last = module(packed(x, lengths), given)
    assert torch.equal(ys.data, found[0])
    assert same(list(last) if isinstance(last, tuple) else [last], found[1 : 1 + len(state)])


def test_the_first_call_of_parametrized_weights_may_be_checkpointed():
    """They are computed whenever they are asked for, also to choose what runs."""
    module = nn.LSTM(5, 8, 2, proj_size=3)
    torch.nn.utils.parametrizations.weight_norm(module, "weight_hh_l0")
    x = torch.randn(4, 3, 5, requires_grad=True)
    found = checkpoint(module, x, use_reentrant=False)[0]
    found, wanted = (
        torch.autograd.grad(ys.square().sum(), [x, *module.parameters()])
        for ys in (found, module(x)[0])
    )
    assert same(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_call_of_a_cell_with_heads_may_be_checkpointed(dtype):
    """Its W_hh is multiplied by a mask to choose what runs, and then to run."""
    module = nn.Layers("slstm", 5, 8, dtype=dtype)
    x = torch.randn(4, 3, 5, dtype=dtype)
    found, wanted = (
        torch.autograd.grad(ys.sum(), module.parameters())
        for ys in (checkpoint(module, x, use_reentrant=False)[0], module(x)[0])
    )
    assert same(found, wanted)


class Drops(torch.nn.Module):
    """Another weight whenever it is asked for: DropConnect."""

    times = 0

    def forward(self, w):
        self.times += 1
        return torch.nn.functional.dropout(w, 0.5)


ONCE = {
    "native": {},
    "torch's": {"proj_size": 3},
    "half": {"dtype": torch.bfloat16},
    "cut": {"carry": Truncated(2)},
    "kept in part": {"memory": Checkpointed(every=2)},
}


@pytest.mark.parametrize("options", ONCE.values(), ids=ONCE)
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0"])
@pytest.mark.parametrize("lengths", [None, [2, 4, 1]], ids=["batch", "pack"])
def test_parametrized_weights_are_computed_once_a_call(options, name, lengths):
    """The first call computed some of them five times, and ran by others than its recomputation."""
    module = nn.LSTM(5, 9, 2, **options)
    drops = Drops()
    torch.nn.utils.parametrize.register_parametrization(module, name, drops)
    x = torch.randn(4, 3, 5, dtype=module.weight_hh_l1.dtype)
    x = x if lengths is None else packed(x, lengths)

    def gradients():
        torch.manual_seed(1)
        drops.times = 0
        ys = checkpoint(module, x, use_reentrant=False)[0]
        assert drops.times == 1
        return torch.autograd.grad((ys if lengths is None else ys.data).sum(), module.parameters())

    first = gradients()
    assert same(first, gradients())


@pytest.mark.parametrize("options", [{}, {"proj_size": 3}])
def test_the_first_packed_call_of_a_module_may_be_checkpointed(options):
    """torch.utils.checkpoint counts what is kept: to choose a kernel must keep nothing."""
    module = nn.LSTM(5, 8, 2, **options)
    x = torch.randn(4, 3, 5, requires_grad=True)
    rows = packed(x, [2, 4, 1])
    ys, _ = checkpoint(module, rows, use_reentrant=False)
    found = torch.autograd.grad(ys.data.square().sum(), [x, *module.parameters()])
    plain = module(packed(x, [2, 4, 1]))[0].data.square().sum()
    assert same(found, torch.autograd.grad(plain, [x, *module.parameters()]))


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("rows", [9, 70, 140])  # in one block of rows, or several
def test_many_rows_that_end_early(kind, bidirectional, rows, long_way):
    """Inputs projected some steps ahead, the backward pass in several pieces, threads or none."""
    module, T = kind(50, 40, 2, bidirectional=bidirectional, dropout=0.2), 40
    lengths = [T, *(1 + 7 * i % T // (1 + i % 5) for i in range(rows - 1))]
    before = torch.get_num_threads()
    for x in (torch.randn(T, rows, 50), torch.randint(50, (T, rows))):
        with long_way():
            expected = everything(module, x, lengths=lengths)
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                assert same(everything(module, x, lengths=lengths), expected)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_rows_are_torchs(kind, bidirectional):
    options = {"bidirectional": bidirectional, "dtype": torch.float64}
    peer, mine = getattr(torch.nn, kind)(5, 9, 2, **options), getattr(nn, kind)(5, 9, 2, **options)
    mine.load_state_dict(peer.state_dict())
    lengths, x = [2, 7, 1, 7, 3], torch.randn(7, 5, 5, dtype=torch.float64)
    state = state_of(mine, 5, torch.float64)
    for a, b in zip(
        everything(mine, x, state, lengths=lengths),
        everything(peer, x, state, lengths=lengths),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradients_of_packed_rows_are_autograds(kind, bidirectional):
    module = kind(3, 4, 2, bidirectional=bidirectional, dtype=torch.float64)
    x, state = torch.randn(4, 3, 3, dtype=torch.float64), state_of(module, 3, torch.float64)

    def run(x, *state):
        ys, last = module(packed(x, [2, 4, 3]), state if len(state) > 1 else next(iter(state)))
        return ys.data, *(last if isinstance(last, tuple) else (last,))

    inputs = [t.requires_grad_() for t in (x, *state)]
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("pulls", [(True, False), (False, True)])
def test_a_loss_of_packed_outputs_or_last_states_alone(pulls, long_way):
    module, x = nn.LSTM(5, 19, 2, bidirectional=True), torch.randn(6, 3, 5)
    found = everything(module, x, pulls=pulls, lengths=[2, 6, 4])
    with long_way():
        assert same(found, everything(module, x, pulls=pulls, lengths=[2, 6, 4]))


def test_frozen_weights_of_packed_and_dropped_calls(long_way):
    module, x = nn.GRU(5, 19, 2, dropout=0.4), torch.randn(6, 3, 5)
    module.weight_hh_l0.requires_grad_(False)
    module.bias_ih_l1.requires_grad_(False)
    found = everything(module, x, lengths=[2, 6, 4])
    with long_way():
        assert same(found, everything(module, x, lengths=[2, 6, 4]))
    for p in module.parameters():
        p.requires_grad_(False)
    assert not module(packed(x, [2, 6, 4]))[0].data.requires_grad


@pytest.mark.parametrize("kind", MODULES)
def test_other_lengths_choose_no_kernel_again(kind, monkeypatch, long_way):
    module, asked = kind(5, 19, 2), []
    monkeypatch.setattr(native, "_KNOWN", {})
    job = Module._asked
    monkeypatch.setattr(Module, "_asked", lambda *args: asked.append(1) or job(*args))
    x = torch.randn(9, 4, 5)
    shapes = [(9, 4), (1, 4), (3, 2), (9, 1), (1, 1), (3, 2)]
    found = [everything(module, x[:T, :B]) for T, B in shapes]
    found += [everything(module, x, lengths=lengths) for lengths in ([9, 1, 4, 4], [9, 9, 9, 9])]
    assert len(asked) == 1
    with long_way():
        for (T, B), f in zip(shapes, found[: len(shapes)], strict=True):
            assert same(everything(module, x[:T, :B]), f)
        for lengths, f in zip(([9, 1, 4, 4], [9, 9, 9, 9]), found[len(shapes) :], strict=True):
            assert same(everything(module, x, lengths=lengths), f)
    with pytest.raises(UserError, match="no time steps"):
        module(x[:0])
    assert module(x[:, :0])[0].shape == (9, 0, 19)


def test_a_call_of_other_lengths_leaves_earlier_ones_as_they_were(long_way):
    module, x = nn.LSTM(5, 19), torch.randn(9, 4, 5)
    with long_way():
        expected = torch.autograd.grad(module(x)[0].square().sum(), module.weight_hh_l0)
    loss = module(x)[0].square().sum()
    module(x[:2, :1])
    assert same(torch.autograd.grad(loss, module.weight_hh_l0), expected)


def test_packs_of_one_shape_share_what_was_prepared():
    module, x = nn.GRU(5, 19), torch.randn(6, 3, 5)
    module(packed(x, [2, 6, 4]))
    call = module._prepared
    module(packed(x, [6, 1, 1]))
    assert module._prepared is call


def test_what_is_no_pack_is_refused_in_words(nodes):
    """torch itself would read and write beyond its memory."""
    module, data = nn.GRU(5, 19), torch.randn(5, 5)
    assert module(PackedSequence(data, torch.tensor([2, 2, 1])))[0].data.shape == (5, 19)
    for sizes in ([2, 2, 2], [1, 2, 2], [5, 0], [6, -1], [2, 2]):
        with pytest.raises(UserError, match="has batch_sizes"):
            module(PackedSequence(data, torch.tensor(sizes)))
    assert len(nodes) == 1


def test_orders_that_are_none_take_the_long_way(nodes):
    module, data, sizes = nn.GRU(5, 19), torch.randn(5, 5), torch.tensor([2, 2, 1])
    for order in ([0, 2], [0, -1], [0, 1, 2]):
        bad = PackedSequence(data, sizes, torch.tensor(order), torch.tensor(order))
        with pytest.raises((RuntimeError, IndexError, UserError)):
            module(bad)
    twice = torch.tensor([1, 1])  # no order, but what `index_select` takes
    h = module(PackedSequence(data, sizes, twice, twice))[1]
    assert torch.equal(h[0, 0], h[0, 1])
    assert not nodes


def test_orders_changed_before_the_backward_pass_are_refused():
    module, pack = nn.GRU(5, 19), packed(torch.randn(6, 3, 5), [2, 6, 4])
    ys = module(pack)[0].data
    pack.sorted_indices.data[0] = 7  # autograd's count does not see it
    with pytest.raises(UserError, match="changed before its backward pass"):
        ys.sum().backward()
    pack = packed(torch.randn(6, 3, 5), [2, 6, 4])
    ys = module(pack)[0].data
    pack.batch_sizes[0] = 2
    with pytest.raises(RuntimeError, match="inplace"):
        ys.sum().backward()
