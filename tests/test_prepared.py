"""Calls that are prepared once do what the long way does, forwards, back, and back again."""

import copy
import functools
import io
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import paper_gpu
from elman import nn
from elman.cells import named
from elman.kernels import cuda, products
from elman.kernels.cuda import calls, widths
from elman.nn import settling
from elman.nn.long_way import as_hx
from elman.recurrence import operator, packed, prepared
from elman.recurrence.prepared import Call

KINDS = [nn.RNN, nn.GRU, nn.LSTM]
DESCRIBED = ["mgu", "peephole", "slstm", "indrnn"]
MORE = (0, 3)
CASES = [
    (layers, *flags, MORE[(layers // 2 + sum(flags)) % 2])
    for layers, *flags in itertools.product((1, 3), (False, True), (False, True), (False, True))
]
"""Half of all there are, so that any four of the five options meet in every way."""


@pytest.fixture(params=MORE)
def more(request, monkeypatch):
    """Units that are added to a layer, as if its rows were no whole 16 bytes."""

    def width(cell, size, *_):
        return size + (request.param if cell.name in widths.STAY_ZERO else 0)

    monkeypatch.setattr(cuda, "width_for", width)


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


@pytest.mark.usefixtures("more")
@pytest.mark.parametrize("kind", [*KINDS, *DESCRIBED])
@pytest.mark.parametrize(
    ("layers", "batch_first", "bias", "given", "more"), CASES, indirect=["more"]
)
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


@pytest.mark.usefixtures("more")
@pytest.mark.parametrize("kind", [*KINDS, "mgu", "slstm"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_a_prepared_call_casts_what_it_is_given(kind, batch_first, turned, monkeypatch):
    """As under autocast: here from float64 to float32. The weights' gradients are not rounded."""
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    torch.manual_seed(0)
    make = functools.partial(nn.Layers, kind) if isinstance(kind, str) else kind
    rnn = make(4, 8, 2, batch_first=batch_first).double()
    narrow = copy.deepcopy(rnn).float()
    x = torch.randn(*((3, 5) if batch_first else (5, 3)), 4, dtype=torch.float64)
    state = [torch.randn(2, 3, n).double() for n in named(rnn.cell).state_sizes(8)]

    def plain(x, state):
        return as_pair(narrow(x.float(), as_hx(tuple(s.float() for s in state))))

    if turned:
        for name in ("weight_ih_l0", "weight_hh_l1"):
            p = rnn.get_parameter(name)
            p.data = p.data.T.contiguous().T
    with paper_gpu.launches_prepared():
        inputs = narrow._inputs(*narrow._time_first(x.float(), None))
        call = Call(narrow._recipe(), inputs, batch_first)
        weights = [rnn.get_parameter(name) for name in rnn._flat_weights_names]
        assert call.suits(weights)
        assert not call.suits(weights[:-1])
        assert not call.suits([weights[0][1:], *weights[1:]])
        exact = answers(plain, narrow, x, state, True)
        found = answers(lambda x, s: call(x, s, weights), rnn, x, state, True)
        with torch.no_grad():
            ys, last = call(x, state, weights)
        again = twice(lambda x: call(x, state, weights)[0].double(), x)
    outs = 1 + len(last)
    assert all(t.dtype == torch.float32 for t in found[:outs])
    assert all(t.dtype == torch.float64 for t in found[outs:])
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.float(), b.float())
    torch.testing.assert_close([ys, *last], exact[:outs])
    theirs = twice(lambda x: plain(x, state)[0].double(), x)
    torch.testing.assert_close(again, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def _autocast_as_it_was():
    """`torch.autocast` puts back what `torch.get_autocast_dtype` says, even a patched one."""
    before = torch.get_autocast_dtype("cpu")
    yield
    torch.set_autocast_dtype("cpu", before)


@pytest.mark.usefixtures("_autocast_as_it_was")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stated", [False, True])
def test_what_autocast_casts_at_every_call_is_prepared(kind, stated, monkeypatch):
    """On a GPU; here the CPU is taken for one, and its autocast makes float32 of bfloat16."""
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    torch.manual_seed(0)
    rnn = kind(4, 8, 2).bfloat16()
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.float32)
    monkeypatch.setattr(settling, "runs_whole", lambda *_: False)
    monkeypatch.setattr(prepared, "selected", lambda *_: prepared.KERNEL)
    wide = copy.deepcopy(rnn).float()
    state = [torch.randn(2, 3, n) for n in named(rnn.cell).state_sizes(8)] * stated

    def cast(x, state):
        with torch.autocast("cpu", torch.bfloat16):
            done = rnn._cast_call(x, state or None)
            assert torch.is_autocast_enabled("cpu")
        return done

    def plain(x, state):
        return as_pair(wide(x, as_hx(tuple(state)) if stated else None))

    for steps in (5, 5, 2):
        x = torch.randn(steps, 3, 4)
        with paper_gpu.launches_prepared():
            found = answers(cast, rnn, x, state, True)
        exact = answers(plain, wide, x, state, True)
        rounded = len(found) - len([*rnn.parameters()])
        for a, b in zip(found[:rounded], exact[:rounded], strict=True):
            torch.testing.assert_close(a, b)
        for a, b in zip(found[rounded:], exact[rounded:], strict=True):
            torch.testing.assert_close(a, b.bfloat16(), rtol=0.01, atol=1e-5)
    assert [type(settled.by) for settled in rnn._settled.values()] == [Call, Call]
    with torch.autocast("cpu", torch.bfloat16):
        assert rnn._cast_call(torch.randint(4, (5, 3)), None) is None  # ids are the long way's
        assert rnn._cast_call(torch.randn(5, 4), None) is None


@pytest.mark.parametrize("kind", KINDS)
def test_prepared_calls_read_what_the_loop_adds_up(kind, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    torch.manual_seed(0)
    rnn, x = kind(4, 8, 2), torch.randn(5, 3, 4)
    exact = answers(lambda x, _: as_pair(rnn(x)), rnn, x, [], True)
    weights = [rnn.get_parameter(name) for name in rnn._flat_weights_names]
    with paper_gpu.launches_prepared(), paper_gpu.sums_in_the_loop():
        call = Call(rnn._recipe(), rnn._inputs(*rnn._time_first(x, None)), False)
        found = answers(lambda x, s: call(x, s, weights), rnn, x, [], True)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b)


def as_pair(result):
    ys, last = result
    return ys, last if isinstance(last, tuple) else (last,)


def test_the_first_product_is_queued_once_and_before_autograd_is_told(monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    rnn, x, seen = nn.GRU(4, 8, 2), torch.randn(5, 3, 4), []
    told, product = prepared._Node.forward, calls.linear

    def forward(*given):
        seen.append("autograd")
        return told(*given)

    def linear(*given):
        seen.append("product")
        return product(*given)

    monkeypatch.setattr(prepared._Node, "forward", forward)
    monkeypatch.setattr(calls, "linear", linear)
    with paper_gpu.launches_prepared():
        call = Call(rnn._recipe(), rnn._inputs(*rnn._time_first(x, None)), False)
        ys, _ = call(x, (), [rnn.get_parameter(name) for name in rnn._flat_weights_names])
    assert ys.requires_grad
    assert seen == ["product", "autograd", "product"]


@pytest.mark.usefixtures("more")
@pytest.mark.parametrize("kind", [*KINDS, "mgu"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_prepared_call_has_the_masks_of_the_long_way(kind, batch_first, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    torch.manual_seed(0)
    make = functools.partial(nn.Layers, kind) if isinstance(kind, str) else kind
    rnn = make(4, 8, 3, batch_first=batch_first, dropout=0.4)
    x = torch.randn(*((3, 21) if batch_first else (21, 3)), 4)
    state = [torch.randn(3, 3, n) for n in named(rnn.cell).state_sizes(8)]
    weights = [rnn.get_parameter(name) for name in rnn._flat_weights_names]

    def plain(x, state):
        torch.manual_seed(1)
        ys, last = rnn(x, tuple(state) if len(state) > 1 else state[0])
        return ys, last if isinstance(last, tuple) else (last,)

    with paper_gpu.launches_prepared():
        inputs = rnn._inputs(*rnn._time_first(x, None))
        assert prepared.is_plain(rnn._recipe(), inputs)
        call = Call(rnn._recipe(), inputs, batch_first)

        def run(x, state):
            torch.manual_seed(1)
            return call(x, state, weights)

        exact = answers(plain, rnn, x, state, True)
        for a, b in zip(answers(run, rnn, x, state, True), exact, strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            ys, last = run(x, state)
            torch.testing.assert_close([ys, *last], exact[: 1 + len(last)])
            assert not torch.equal(ys, call(x, state, weights)[0])  # drawn anew
        again = twice(lambda x: run(x, state)[0], x)
    torch.testing.assert_close(again, twice(lambda x: plain(x, state)[0], x))
    rnn.eval()
    with paper_gpu.launches_prepared():
        assert not Call(rnn._recipe(), rnn._inputs(*rnn._time_first(x, None)), False).drops


def twice(run, x):
    """The gradient of a gradient."""
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(dx.square().sum(), x)[0]


@pytest.mark.usefixtures("more")
@pytest.mark.parametrize("kind", [*KINDS, "mgu"])
@pytest.mark.parametrize(
    ("dropout", "stated", "more"),
    [(0.0, False, 0), (0.0, True, 3), (0.4, False, 3), (0.4, True, 0)],  # each pair meets
    indirect=["more"],
)
def test_packed_rows_are_prepared_too(kind, dropout, stated, monkeypatch):
    """On a GPU; here the CPU is taken for one."""
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    torch.manual_seed(0)
    make = functools.partial(nn.Layers, kind) if isinstance(kind, str) else kind
    plain = make(4, 8, 3, dropout=dropout)
    rnn = copy.deepcopy(plain)
    monkeypatch.setattr(rnn, "_packed_key", lambda *_: "packed")
    monkeypatch.setattr(rnn, "_packed_whole", lambda *_: None)
    monkeypatch.setattr(prepared, "selected", lambda *_: prepared.KERNEL)
    state = [torch.randn(3, 4, n) for n in named(rnn.cell).state_sizes(8)] * stated

    def run(module, lengths):
        def ran(x, state):
            torch.manual_seed(1)
            rows = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
            first = (tuple(state) if len(state) > 1 else state[0]) if stated else None
            ys, last = module(rows, first)
            return ys.data, last if isinstance(last, tuple) else (last,)

        return ran

    for lengths in ([3, 9, 1, 9], [9, 2, 2, 7], [9, 9, 9, 9]):  # one settled call for all
        x = torch.randn(9, 4, 4)
        exact = answers(run(plain, lengths), plain, x, state, True)
        with paper_gpu.launches_prepared():
            found = answers(run(rnn, lengths), rnn, x, state, True)
            again = twice(lambda x, at=lengths: every(run(rnn, at)(x, state)), x)
        for a, b in zip(found, exact, strict=True):
            torch.testing.assert_close(a, b)
        twofold = twice(lambda x, at=lengths: every(run(plain, at)(x, state)), x)
        torch.testing.assert_close(again, twofold)
    (settled,) = rnn._settled.values()
    assert isinstance(settled.by, Call)


def every(outputs):
    """All numbers of outputs and last states."""
    ys, last = outputs
    return torch.cat([t.flatten() for t in (ys, *last)])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=7), st.booleans())
def test_packed_rows_are_padded_as_torch_pads_them(lengths, ids):
    x = torch.randn(max(lengths), len(lengths), 3, dtype=torch.float64)
    x = x[:, :, 0].long() if ids else x
    rows = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    where = packed.places(rows.batch_sizes, len(rows.data), x.device)
    wanted, ends = pad_packed_sequence(rows._replace(sorted_indices=None, unsorted_indices=None))
    assert torch.equal(where.padded(rows.data), wanted)
    assert torch.equal(where.lengths, ends)
    assert torch.equal(where.packed(where.padded(rows.data)), rows.data)
    if not ids:
        data = rows.data.clone().requires_grad_()
        assert torch.autograd.gradcheck(where.padded, data)
        assert torch.autograd.gradgradcheck(where.padded, data)
        assert torch.autograd.gradcheck(where.packed, wanted.clone().requires_grad_())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_dropout_is_the_long_ways_to_the_bit(kind, dtype, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "cuda")
    torch.manual_seed(0)
    rnn = kind(24, 40, 3, dropout=0.3, device="cuda", dtype=dtype)
    x = torch.randn(37, 5, 24, device="cuda", dtype=dtype)
    state = rnn._zeros(5, dtype, x.device)

    def short(x, state):
        torch.manual_seed(1)
        ys, last = rnn(x, tuple(state) if len(state) > 1 else state[0])
        return ys, last if isinstance(last, tuple) else (last,)

    def long(x, state):
        torch.manual_seed(1)
        return operator.recurrence(rnn._recipe(), rnn._inputs(x, state).drawn())

    check_bits(rnn, short, long, x, state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_packed_rows_are_the_long_ways_to_the_bit(kind, dtype, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "cuda")
    torch.manual_seed(0)
    rnn = kind(24, 40, 3, dropout=0.3, device="cuda", dtype=dtype)
    x = torch.randn(37, 5, 24, device="cuda", dtype=dtype)
    state = rnn._zeros(5, dtype, x.device)

    def short(x, state):
        torch.manual_seed(1)
        rows = pack_padded_sequence(x, torch.tensor([37, 30, 30, 2, 1]))
        ys, last = rnn(rows, tuple(state) if len(state) > 1 else state[0])
        return pad_packed_sequence(ys)[0], last if isinstance(last, tuple) else (last,)

    def long(x, state):
        torch.manual_seed(1)
        lengths = torch.tensor([37, 30, 30, 2, 1], device="cuda")
        inside = (torch.arange(37, device="cuda")[:, None] < lengths)[..., None]
        given = rnn._inputs(x * inside, state, lengths).drawn()
        ys, last = operator.recurrence(rnn._recipe(), given)
        return ys * inside, last

    check_bits(rnn, short, long, x, state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("hidden", [40, 1499])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_a_cast_call_is_the_narrow_modules(kind, hidden, monkeypatch):
    """The same bits, but for gradients of weights and states, which are not rounded."""
    torch.manual_seed(0)
    rnn = kind(24, hidden, device="cuda")
    monkeypatch.setattr(rnn, "_stays_in_float32", lambda *_: False)
    monkeypatch.setenv("ELMAN_KERNELS", "cuda")
    narrow = copy.deepcopy(rnn).bfloat16()
    x = torch.randn(9, 70, 24, device="cuda").bfloat16().float()
    state = [s + 0.5 for s in rnn._zeros(70, torch.float32, x.device)]

    def cast(x, state):
        with torch.autocast("cuda", torch.bfloat16):
            return as_pair(rnn(x, as_hx(tuple(state))))

    def plain(x, state):
        return as_pair(narrow(x.bfloat16(), as_hx(tuple(s.bfloat16() for s in state))))

    found, exact = answers(cast, rnn, x, state, True), answers(plain, narrow, x, state, True)
    assert any(isinstance(settled.by, Call) for settled in rnn._settled.values())
    same = 2 + len(state)  # outputs, last states, and the pull on x
    for a, b in zip(found[:same], exact[:same], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(found[same:], exact[same:], strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a.bfloat16(), b.bfloat16())
        assert not torch.equal(a, b.float())


def check_bits(rnn, short, long, x, state):
    found = answers(short, rnn, x, state, True)
    (settled,) = rnn._settled.values()
    assert isinstance(settled.by, Call)
    for a, b in zip(found, answers(long, rnn, x, state, True), strict=True):
        assert torch.equal(a, b)


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
    noisy = nn.GRU(4, 6, zoneout=0.1)
    x = noisy._inputs(*noisy._time_first(torch.randn(5, 3, 4), None))
    assert not prepared.is_plain(noisy._recipe(), x)


def test_a_table_is_the_same_with_and_without_autograd():
    W, b = torch.randn(6, 4), torch.randn(6)
    with torch.no_grad():
        table = products._table(W, b)
    assert table.is_contiguous()
    assert torch.equal(table, products._table(W, b))
