"""Calls that want no gradient: the bits of the ordinary call, whatever happens in between."""

from __future__ import annotations

import copy
import io
import threading
import weakref
from functools import partial

import pytest
import torch
from torch.nn.utils import parametrize

from elman import nn
from elman.errors import UserError
from elman.gradients.carry import Full, Truncated
from elman.gradients.memory import Checkpointed
from elman.kernels.cpu import KERNEL, calls, library
from elman.recurrence import native

pytestmark = pytest.mark.skipif(KERNEL.library is None, reason="the cpu kernel was not built")

MODULES = [nn.RNN, nn.GRU, nn.LSTM]


def outputs(found) -> list[torch.Tensor]:
    ys, last = found
    return [ys, *(last if isinstance(last, tuple) else (last,))]


def ordinary(module, *args):
    """The long way, as of a call that `native` does not take."""
    with pytest.MonkeyPatch.context() as patch, torch.enable_grad():
        patch.setattr(native, "takes", lambda recipe: False)
        return [t.detach() for t in outputs(module(*args))]


def plain(module, *args):
    with torch.no_grad():
        found = outputs(module(*args))
    assert module._prepared is not None
    return found


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def own_step(*sizes):
    return nn.Recurrent(torch.nn.GRUCell(*sizes))


def state_of(kind, layers, rows, hidden):
    h = torch.randn(layers, rows, hidden)
    return (h, torch.randn(layers, rows, hidden)) if kind is nn.LSTM else h


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("T", "B"), [(1, 1), (1, 7), (3, 2), (20, 33)])
def test_the_bits_of_the_ordinary_call(kind, layers, bidirectional, T, B):
    module = kind(5, 19, layers, bidirectional=bidirectional)
    for _ in range(2):  # prepared for the first, at hand for the second
        x, state = torch.randn(T, B, 5), state_of(kind, layers * (1 + bidirectional), B, 19)
        assert same(plain(module, x, state), ordinary(module, x, state))
        assert same(plain(module, x), ordinary(module, x))
    ids = torch.randint(5, (T, B))
    assert same(plain(module, ids), ordinary(module, ids))


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(
    ("B", "inputs", "hidden"), [(2, 5, 19), (7, 5, 19), (9, 40, 19), (33, 130, 65), (150, 300, 170)]
)
def test_steps_one_by_one_have_the_bits_of_all_at_once(kind, B, inputs, hidden):
    """A single step multiplies inputs beside states or before them, by how much memory both are."""
    module, xs, state = kind(inputs, hidden), torch.randn(3, B, inputs), None
    whole, ys = plain(module, xs), []
    with torch.no_grad():
        for x in xs:
            y, state = module(x[None], state)
            ys.append(y)
    assert same(outputs((torch.cat(ys), state)), whole)


@pytest.mark.parametrize("kind", MODULES)
def test_the_batch_may_come_first(kind):
    module = kind(5, 19, batch_first=True)
    for x in (torch.randn(3, 4, 5), torch.randn(1, 1, 5), torch.randint(5, (3, 4))):
        assert same(plain(module, x), ordinary(module, x))


@pytest.mark.parametrize("kind", MODULES)
def test_weights_may_change_move_and_turn(kind):
    module, x, state = kind(6, 6), torch.randn(1, 2, 6), state_of(kind, 1, 2, 6)
    plain(module, x, state)
    with torch.no_grad():
        module.weight_hh_l0.mul_(0.5)
    assert same(plain(module, x, state), ordinary(module, x, state))
    module.weight_hh_l0.data = torch.randn_like(module.weight_hh_l0)
    assert same(plain(module, x, state), ordinary(module, x, state))
    if kind is nn.RNN:
        module.weight_hh_l0.data = module.weight_hh_l0.data.t()
        with torch.no_grad():
            assert same(outputs(module(x, state)), ordinary(module, x, state))
        module.weight_hh_l0.data = module.weight_hh_l0.data.contiguous()
    module.double()
    assert same(plain(module, x.double()), ordinary(module, x.double()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_weights_that_have_moved_choose_no_kernel_again(bias, grad, monkeypatch):
    module, x = nn.GRU(4, 8, 2, bias=bias), torch.randn(5, 3, 4)
    expected, _ = module(x)
    monkeypatch.setattr(calls.choice, "select", None)
    for p in module.parameters():
        p.data = p.data.clone()
    with torch.set_grad_enabled(grad):
        ys, _ = module(x)
    assert torch.equal(ys, expected)
    for p in module.parameters():
        p.data = torch.zeros_like(p)
    with torch.set_grad_enabled(grad):
        ys, _ = module(x[:3])  # fewer steps, too
    assert ys.shape == (3, 3, 8)
    assert not ys.any()


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("grad", [False, True])
def test_shapes_in_turn_are_prepared_once(kind, grad, monkeypatch):
    """Each was prepared anew: 0.87 times as fast as torch.nn; 0.45 with autocast every other."""
    module, x = kind(4, 8, 2), torch.randn(5, 3, 4)
    shapes = [(5, 3), (5, 2), (1, 3), (5, 1)]

    def results():
        found = []
        for T, B in shapes:
            for cast in (False, True):
                with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=cast):
                    found += outputs(module(x[:T, :B].contiguous()))
        return found

    first = results()
    monkeypatch.setattr(native, "prepared", None)
    assert same(results(), first)
    module.weight_hh_l0.data.mul_(0.5)
    assert not same(results(), first)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("grad", [False, True])
def test_another_module_of_a_kind_chooses_no_kernel_again(kind, grad, monkeypatch):
    """A module made for every call was 0.5 times as fast as torch.nn's."""
    x = torch.randn(5, 3, 4)
    kind(4, 8)(x)
    monkeypatch.setattr(calls.choice, "select", None)
    module = kind(4, 8)
    with torch.set_grad_enabled(grad):
        found = outputs(module(x[:3]))
    monkeypatch.undo()
    assert same(found, ordinary(module, x[:3]))


def test_a_module_of_another_kind_is_not_taken_for_it():
    x = torch.randn(5, 3, 4)
    for options in ({}, {"nonlinearity": "relu"}, {"nonlinearity": "linear"}, {"bias": False}):
        module = nn.RNN(4, 4, **options)
        assert same(plain(module, x), ordinary(module, x))
    for module in (nn.RNN(4, 4, 2), nn.RNN(4, 4, bidirectional=True)):
        assert same(plain(module, x), ordinary(module, x))


def test_weights_that_were_replaced_are_let_go():
    module, x = nn.GRU(4, 8), torch.randn(5, 3, 4)
    for T in (5, 4, 3):
        plain(module, x[:T])
    gone = weakref.ref(module.weight_hh_l0)
    module.weight_hh_l0 = torch.nn.Parameter(torch.zeros(24, 8))
    plain(module, x)
    assert gone() is None


class Halved(torch.nn.Module):
    def forward(self, W):
        return 0.5 * W


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("how", ["parametrized", "turned", "weight_norm"])
def test_weights_made_for_one_call_take_the_short_way(kind, grad, cast, how, monkeypatch):
    """They took the long one: 0.81 (turned) and 0.93 (parametrized) times as fast as torch.nn."""
    module, x = kind(4, 8, 2), torch.randn(5, 3, 4)
    if how == "parametrized":
        parametrize.register_parametrization(module, "weight_hh_l0", Halved())
    elif how == "weight_norm":
        torch.nn.utils.parametrizations.weight_norm(module, "weight_ih_l1")
    else:
        module.weight_hh_l1.data = module.weight_hh_l1.data.t().contiguous().t()
    wanted = [*module.parameters()]

    def results():
        with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=cast):
            found = outputs(module(x))
        if not grad:
            return found
        loss = sum((t * torch.arange(t.numel()).view_as(t)).sum() for t in found)
        return [*found, *torch.autograd.grad(loss, wanted)]

    with monkeypatch.context() as patch:
        patch.setattr(module, "_run_settled", None)  # the longer ways
        found = [results() for _ in range(2)]
        with torch.no_grad():
            wanted[0].mul_(0.9)
        moved = results()
        monkeypatch.setattr(module, "_plain_call", lambda *_: None)
    expected = results()
    assert same(*found)
    for a, b in zip(moved, expected, strict=True):  # autocast rounds to eight bits
        scale = float(b.detach().abs().max())
        tolerance = (
            {"rtol": 0.0, "atol": scale / 50} if cast else {"rtol": 1e-5, "atol": scale / 1e5}
        )
        torch.testing.assert_close(a, b, **tolerance)


def test_other_weights_for_one_call_are_used():
    module, x = nn.GRU(4, 8), torch.randn(1, 1, 4)
    plain(module, x)
    other = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    with torch.no_grad():
        got = torch.func.functional_call(module, other, (x,))
    fresh = nn.GRU(4, 8)
    fresh.load_state_dict(other)
    assert same(outputs(got), ordinary(fresh, x))
    assert same(plain(module, x), ordinary(module, x))


def test_a_copy_prepares_its_own():
    module, x = nn.LSTM(4, 8), torch.randn(2, 1, 4)
    before = plain(module, x)
    twin = copy.deepcopy(module)
    assert twin._prepared is None
    with torch.no_grad():
        module.weight_hh_l0.zero_()
    assert same(plain(twin, x), before)
    buffer = io.BytesIO()
    torch.save(twin, buffer)
    buffer.seek(0)
    assert same(plain(torch.load(buffer, weights_only=False), x), before)


def test_what_is_refused_is_refused_as_before():
    module = nn.RNN(4, 8)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    plain(module, ids)
    with torch.no_grad():
        with pytest.raises(UserError, match="ids from 9 to 9"):
            module(ids + 9)
        with pytest.raises(UserError, match="h0 has shape"):
            module(ids, torch.zeros(1, 2, 8))
        with pytest.raises(UserError, match="h0 has dtype"):
            module(ids, torch.zeros(1, 1, 8, dtype=torch.float64))
        with pytest.raises(UserError, match="last size must be 4"):
            module(torch.zeros(1, 1, 5))


def shortened(t, size):
    t.untyped_storage().resize_(size)
    return t


NO_STATES = {
    "no tensor": (lambda h: 3, "must be one tensor h0"),
    "freed": (lambda h: shortened(h, 0), "has lost its memory|out of bounds for storage"),
    "too short": (lambda h: shortened(h, 28), "has lost its memory|out of bounds for storage"),
    "elsewhere": (lambda h: h.to("meta"), "h0 is on meta"),
    "of other numbers": (lambda h: h.int(), "h0 has dtype"),
    "of other rows": (lambda h: torch.zeros(1, 2, 8), "h0 has shape"),
}


@pytest.mark.parametrize("what", NO_STATES)
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_no_state_is_refused_in_words_at_every_call(what, grad):
    make, words = NO_STATES[what]
    module, x = nn.RNN(4, 8), torch.randn(1, 1, 4)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            with pytest.raises((UserError, RuntimeError), match=words):
                module(x, make(torch.zeros(1, 1, 8)))
            module(x, torch.zeros(1, 1, 8))


ODD = {
    "negated": torch._neg_view,
    "turned": lambda t: t.transpose(0, 2).clone().transpose(0, 2),
    "every other": lambda t: torch.stack([t, t], -1)[..., 0],
    "a parameter": torch.nn.Parameter,
    "a part": lambda t: torch.cat([t, t])[1:],
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("odd", ODD)
def test_inputs_and_states_may_lie_anyhow(kind, odd):
    module, x = kind(4, 8), torch.randn(1, 3, 4)
    state = state_of(kind, 1, 3, 8)
    expected = plain(module, x, state)
    odd = ODD[odd]
    twist = (lambda t: odd(-t)) if odd is torch._neg_view else odd
    states = tuple(map(twist, state)) if isinstance(state, tuple) else twist(state)
    with torch.no_grad():
        assert same(outputs(module(twist(x), state)), expected)
        plain(module, x, state)
        assert same(outputs(module(x, states)), expected)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("odd", ["turned", "every other", "expanded"])
def test_what_lies_anyhow_takes_the_short_way(kind, grad, odd, monkeypatch):
    """It took the long one: 0.39 times as fast as torch.nn, a turned batch of two rows."""
    ways = {**ODD, "expanded": lambda t: t[:1, :1].expand(t.shape)}
    module, x, state = kind(4, 8), torch.randn(2, 3, 4), state_of(kind, 1, 3, 8)
    state = state if isinstance(state, tuple) else (state,)
    monkeypatch.setattr(module, "_run_settled", None)  # the longer ways

    def results(x, *state):
        leaves = [t.detach().clone().requires_grad_() for t in (x, *state)]
        with torch.set_grad_enabled(grad):
            odd_x, *first = [ways[odd](t) for t in leaves]
            found = outputs(module(odd_x, tuple(first) if kind is nn.LSTM else first[0]))
        if not grad:
            return found
        loss = sum((t * torch.arange(t.numel()).view_as(t)).sum() for t in found)
        return [*found, *torch.autograd.grad(loss, [*leaves, *module.parameters()])]

    found = results(x, *state)
    ways[odd] = lambda t: t  # the same numbers, row by row
    if odd == "expanded":
        ways[odd] = lambda t: t[:1, :1].repeat(
            *[a // b for a, b in zip(t.shape, (1, 1, t.shape[2]), strict=True)]
        )
    for a, b in zip(found, results(x, *state), strict=True):
        torch.testing.assert_close(a, b)
        assert a.abs().max() > 0


@pytest.mark.parametrize("odd", ["turned", "expanded"])
def test_what_lies_anyhow_and_has_lost_its_memory_is_refused(odd):
    module, whole = nn.GRU(4, 8), torch.randn(3, 2, 4)
    x = whole.transpose(0, 1) if odd == "turned" else whole[:1].expand(5, -1, -1)
    whole.untyped_storage().resize_(0)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(UserError, match="lost its memory"):
            module(x)


@pytest.mark.parametrize("kind", MODULES)
def test_torch_need_not_say_what_its_tensors_are(kind, monkeypatch):
    """By DLPack's C exchange, which a torch of another major version may not have."""
    monkeypatch.setattr(library, "DESCRIBING", None)
    module, x = kind(4, 8), torch.randn(1, 2, 4)
    for _ in range(2):
        assert same(plain(module, x), ordinary(module, x))
    assert module._prepared.seen is None
    module.weight_hh_l0.data = module.weight_hh_l0.data.clone() + 1
    assert same(plain(module, x), ordinary(module, x))


@pytest.mark.parametrize("how", [{"zoneout": 0.5}, {"update_dropout": 0.5}, {"dropout": 0.5}])
@pytest.mark.usefixtures("hastily")
def test_noise_may_be_added_after_a_call(how):
    module, x = nn.RNN(4, 64, num_layers=2), torch.randn(5, 1, 4)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            module(x)
    for name, value in how.items():
        setattr(module, name, value)
    with torch.no_grad():
        assert not torch.equal(module(x)[0], module(x)[0])


def test_a_carry_and_a_memory_may_be_changed_after_a_call():
    module, x = nn.GRU(4, 8), torch.randn(6, 2, 4)
    module(x)[0].sum().backward()
    exact = module.weight_hh_l0.grad.clone()
    module.carry = Truncated(2)
    module.zero_grad()
    module(x)[0].sum().backward()
    assert not torch.allclose(module.weight_hh_l0.grad, exact)
    module.carry, module.memory = Full(), Checkpointed(every=2)
    module.zero_grad()
    module(x)[0].sum().backward()
    torch.testing.assert_close(module.weight_hh_l0.grad, exact)


def test_calls_in_and_out_of_inference_mode():
    module, x = nn.LSTM(4, 8), torch.randn(3, 2, 4)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            ys = module(x)[0]
        assert ys.is_inference() == mode
    module(x)[0].sum().backward()
    assert module.weight_hh_l0.grad is not None


def test_no_room_is_asked_for_what_a_backward_pass_would_read():
    """A long sequence without a gradient failed at it, where its outputs fitted into memory."""
    module = nn.GRU(4, 8)
    for steps in (3, 5):  # the second is made of the first
        x = torch.randn(steps, 2, 4)
        plain(module, x)
        assert "kept" not in vars(module._prepared)
        module(x)[0].sum().backward()
        assert len(module._prepared.kept) >= 3 * steps * 2 * 8


@pytest.mark.parametrize("make", [nn.LSTM, partial(nn.Layers, "mgu"), own_step])
def test_a_gradient_asked_for_in_inference_mode_is_recorded_no_more_than_by_torch(make):
    module, x = make(4, 8), torch.randn(3, 2, 4)
    with torch.inference_mode(), torch.enable_grad():
        ys = module(x)[0]
    assert ys.is_inference()
    assert not ys.requires_grad
    assert torch.equal(ys, module(x)[0])


def test_dropout_between_layers_is_still_drawn():
    module, x = nn.RNN(4, 64, num_layers=2, dropout=0.5), torch.randn(1, 1, 4)
    module.eval()
    calm = plain(module, x)
    module.train()
    with torch.no_grad():
        assert not torch.equal(module(x)[0], calm[0])


def test_a_kernel_asked_for_by_name_runs(monkeypatch):
    module, x = nn.GRU(4, 8), torch.randn(1, 1, 4)
    plain(module, x)
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    with torch.no_grad():
        assert same(outputs(module(x)), ordinary(module, x))
    assert module._prepared is None


def test_threads_may_share_a_module():
    module = nn.GRU(5, 33)
    xs = [torch.randn(T, B, 5) for T, B in ((1, 1), (2, 3), (1, 8), (4, 4))]
    expected, wrong = [ordinary(module, x) for x in xs], []

    def work(i: int) -> None:
        with torch.no_grad():
            found = [outputs(module(xs[i])) for _ in range(200)]
        wrong.extend(i for ys in found if not same(ys, expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_it_can_be_compiled_around():
    module, x = nn.GRU(4, 8), torch.randn(1, 2, 4)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert same(outputs(compiled(x)), ordinary(module, x))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_sequence_without_a_batch_takes_the_short_way_of_a_batch_of_one(kind, given, batch_first):
    torch.manual_seed(0)
    rnn = getattr(nn, kind)(3, 5, 2, batch_first=batch_first)
    x, h = torch.randn(4, 3, requires_grad=True), torch.randn(2, 5)
    state = None if not given else (h, h.clone()) if kind == "LSTM" else h
    ys, last = rnn(x, state)
    assert rnn._prepared is not None
    row = 0 if batch_first else 1
    many = [s.unsqueeze(1) for s in (state if isinstance(state, tuple) else [h])]
    batch = None if not given else tuple(many) if kind == "LSTM" else many[0]
    expected, ends = rnn(x.unsqueeze(row), batch)
    assert torch.equal(ys, expected.squeeze(row))
    firsts, seconds = (s if isinstance(s, tuple) else (s,) for s in (last, ends))
    for a, b in zip(firsts, seconds, strict=True):
        assert torch.equal(a, b.squeeze(1))
    (dx,) = torch.autograd.grad(ys.square().sum(), x)
    (dx_of_batch,) = torch.autograd.grad(expected.square().sum(), x)
    assert torch.equal(dx, dx_of_batch)
