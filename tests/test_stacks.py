"""Layers beside each other compute what layers one after the other do."""

import itertools
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paper_gpu
from elman import nn
from elman.cells import named
from elman.gradients import Full, Truncated
from elman.kernels import cuda
from elman.kernels.cuda import calls, wider
from elman.kernels.cuda.plan import cheapest
from elman.kernels.cuda.stacks import Schedule, Stack, schedule, slots
from elman.recurrence import prepared
from elman.recurrence.prepared import Call

KINDS = [nn.RNN, nn.GRU, nn.LSTM]
small = st.integers(1, 6)

# ---------------------------------------------------------------------- which piece runs when


@given(layers=small, pieces=small, lanes=small)
def test_every_piece_runs_once_after_what_it_needs(layers, pieces, lanes):
    done, expected = set(), set()
    for slot, meanwhile in slots(layers, pieces, lanes):
        assert 0 < len(slot) <= lanes
        assert expected <= {*slot}  # whose products ran meanwhile
        for layer, piece in slot:
            assert layer == 0 or (layer - 1, piece) in done
            assert piece == 0 or (layer, piece - 1) in done
        assert all(layer > 0 and (layer - 1, piece) in done for layer, piece in meanwhile)
        assert not done & {*slot}
        done, expected = done | {*slot}, {*meanwhile}
    assert done == {*itertools.product(range(layers), range(pieces))}


@given(layers=small, pieces=small, lanes=small)
def test_no_order_of_the_pieces_is_shorter_than_what_was_found(layers, pieces, lanes):
    lanes = min(layers, pieces, lanes)
    at_least = max(layers + pieces - 1, -(-layers * pieces // lanes))
    assert len(slots(layers, pieces, lanes)) <= at_least + lanes


def found(cell, steps, *, layers=4, hidden=512, rows=64, direction="forward"):
    stack = Stack(named(cell), hidden, 2, rows, layers, steps, paper_gpu.MACHINE)
    return schedule(stack, direction)


def test_layers_run_beside_each_other_where_sms_are_idle_and_time_is_long():
    assert found("tanh", 1024) is not None
    assert found("tanh", 1024, layers=1) is None
    assert found("tanh", 2) is None
    assert found("lstm", 1024, hidden=1024) is None  # one layer takes the whole GPU
    assert found("mgu", 1024) is None  # whose price nobody measured


def test_not_where_python_takes_longer_than_the_gpu():
    assert found("lstm", 128, hidden=256, rows=16, direction="backward") is None
    assert found("lstm", 1024, hidden=256, rows=16, direction="backward") is not None


@pytest.mark.parametrize("cell", ["tanh", "gru", "lstm"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("hidden", "rows"), [(64, 5), (256, 16), (512, 64), (768, 16)])
def test_all_layers_of_a_slot_are_on_the_gpu_at_once(cell, direction, hidden, rows):
    machine = paper_gpu.MACHINE
    every = [*Stack(named(cell), hidden, 2, rows, 4, 500, machine).schedules(direction)]
    assert every or hidden >= 512
    for s in every:
        assert s.lanes * s.plan.groups(rows) <= machine.clusters[s.plan.cluster]
        assert s.span(s.pieces - 1, 500)[1] == 500
        assert s.span(s.pieces - 1, 500)[0] < 500


# ---------------------------------------------------------------------- on paper


def forced(monkeypatch, pieces, lanes, machine=paper_gpu.MACHINE):
    """Every stack in these pieces, by the plan that it has anyway."""

    def force(cell, direction, w, batch, layers, steps):
        size, element = w.W_hh.shape[1], w.W_hh.element_size()
        plan = cheapest(cell, direction, size, element, batch, machine)
        each = -(-steps // pieces)
        count = -(-steps // each)
        return Schedule(plan, each, layers, count, lanes)

    monkeypatch.setattr(calls, "schedule_for", force)
    monkeypatch.setattr(wider, "_PREPARED", {})  # what was prepared before has its own schedule


def answers(run, module, x, state, with_last):
    """Outputs, last states, and the gradients of everything."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    state = [s.clone().requires_grad_() for s in state]
    ys, last = run(x, state)
    generator = torch.Generator(x.device).manual_seed(3)
    ends = [ys, *last] if with_last else [ys]
    pulls = [torch.randn(t.shape, generator=generator, device=t.device).to(t) for t in ends]
    torch.autograd.backward(ends, pulls)
    leaves = [x, *state, *module.parameters()]
    return [ys.detach(), *(t.detach() for t in last), *(t.grad for t in leaves)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layers", "pieces", "lanes"), [(2, 2, 2), (4, 6, 3), (3, 7, 2)])
@pytest.mark.parametrize("given", [False, True])
def test_layers_beside_each_other_are_the_reference(
    kind, layers, pieces, lanes, given, monkeypatch
):
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    torch.manual_seed(0)
    rnn = kind(4, 8, layers, batch_first=True)
    x = torch.randn(3, 7, 4)
    state = [torch.randn(layers, 3, n) for n in named(rnn.cell).state_sizes(8)] * given

    def plain(x, state):
        ys, last = rnn(x, (tuple(state) if len(state) > 1 else state[0]) if given else None)
        return ys, last if isinstance(last, tuple) else (last,)

    forced(monkeypatch, pieces, lanes)
    with paper_gpu.launches_prepared():
        call = Call(rnn._recipe(), rnn._inputs(*rnn._time_first(x, None)), True)
        assert isinstance(call.prepared, calls.Prepared)
        assert call.prepared.forward_launch.schedule is not None
        weights = [rnn.get_parameter(name) for name in rnn._flat_weights_names]
        for with_last in (False, True):
            exact = answers(plain, rnn, x, state, with_last)
            mine = answers(lambda x, s: call(x, s, weights), rnn, x, state, with_last)
            torch.testing.assert_close(mine, exact)
        with torch.no_grad():
            ys, last = call(x, state, weights)
        torch.testing.assert_close([ys, *last], exact[: 1 + len(last)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("steps", "inputs"), [(7, 4), (7, 40), (1, 4)])  # a table, or rows of it
@pytest.mark.parametrize("given", [False, True])
def test_layers_that_read_ids_run_beside_each_other_without_a_gradient(
    kind, steps, inputs, given, monkeypatch
):
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    rnn = kind(inputs, 8, 3, batch_first=True)
    ids = torch.randint(inputs, (3, steps))
    state = [torch.randn(3, 3, n) for n in named(rnn.cell).state_sizes(8)] * given
    hx: Any = tuple(state) if len(state) > 1 else next(iter(state), None)
    exact, after = rnn(ids, hx)
    after = after if isinstance(after, tuple) else (after,)
    forced(monkeypatch, 3, 2)
    with paper_gpu.launches_prepared(), torch.no_grad():
        call = Call(rnn._recipe(), rnn._inputs(*rnn._time_first(ids, None)), True)
        weights = [rnn.get_parameter(name) for name in rnn._flat_weights_names]
        for some in (ids, ids.int()):
            ys, last = call(some, state, weights)
            torch.testing.assert_close([ys, *last], [exact, *after])


def test_ids_are_looked_up_beforehand_only_where_layers_then_run_beside_each_other(monkeypatch):
    def pays(rnn, ids):
        return prepared.ids_pay(rnn._recipe(), rnn._inputs(*rnn._time_first(ids, None)))

    stack, one = nn.GRU(30, 256, 3), nn.GRU(30, 256)
    ids = torch.randint(30, (1024, 16))
    monkeypatch.setenv("ELMAN_KERNELS", "cuda")
    with paper_gpu.launches_prepared():
        monkeypatch.setattr(prepared, "selected", lambda *_: cuda.KERNEL)
        with torch.no_grad():
            assert pays(stack, ids)
            assert not pays(stack, ids[:3])
            assert not pays(one, ids)
            stack.carry = Truncated(5)
            assert not pays(stack, ids)
            stack.carry = Full()
        assert not pays(stack, ids), "a gradient is taken from ids"


# ---------------------------------------------------------------------- on a GPU


def gpu(test):
    test = pytest.mark.gpu(test)
    missing = not torch.cuda.is_available()
    return pytest.mark.skipif(missing, reason="needs a CUDA GPU")(test)


DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def step_by_step(product):
    """Every row of a product computed in the company of one step's rows, whatever the piece."""

    def by_steps(rows, *others):
        return torch.cat([product(part, *others) for part in rows.split(ROWS)])

    return by_steps


ROWS = 24


def prepared_call(rnn, x):
    return Call(rnn._recipe(), rnn._inputs(*rnn._time_first(x, None)), False)


def stack(kind, dtype, steps, layers=4, hidden=48):
    torch.manual_seed(0)
    rnn = kind(40, hidden, layers, device="cuda", dtype=dtype)
    for name, w in rnn.named_parameters():  # so that what is far away still counts
        if "weight_hh" in name:
            w.data.mul_(1.5)
    x = torch.randn(steps, ROWS, 40, device="cuda", dtype=dtype)
    sizes = named(rnn.cell).state_sizes(hidden)
    state = [torch.randn(layers, ROWS, n, device="cuda", dtype=dtype) / 2 for n in sizes]
    return rnn, x, state


def both_ways(monkeypatch, kind, dtype, steps, pieces, lanes, given):
    """The answers of layers one after the other, and beside each other; and what they are of."""
    rnn, x, state = stack(kind, dtype, steps)
    state, found = state * given, []
    weights = [*rnn.parameters()]
    with monkeypatch.context() as m:
        m.setattr(calls, "schedule_for", lambda *_: None)
        m.setattr(wider, "_PREPARED", {})
        ways = [prepared_call(rnn, x)]
        forced(m, pieces, lanes, cuda.machine(0))
        ways += [prepared_call(rnn, x)]
    for at in ("forward_launch", "backward_launch"):
        one, beside = (getattr(call.prepared, at).schedule for call in ways)
        assert one is None
        assert beside.pieces == -(-steps // -(-steps // pieces))
    for call in ways:
        found.append(answers(lambda x, s, c=call: c(x, s, weights), rnn, x, state, True))
        again = answers(lambda x, s, c=call: c(x, s, weights), rnn, x, state, True)
        assert all(map(torch.equal, found[-1], again))  # repeated bits
    return (*found, rnn, x, state)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pieces", "lanes", "given"), [(3, 4, True), (13, 2, False), (5, 3, True)])
def test_on_a_gpu_the_bits_are_those_of_one_layer_after_the_other(
    kind, dtype, pieces, lanes, given, monkeypatch
):
    monkeypatch.setattr(calls, "linear", step_by_step(calls.linear))
    monkeypatch.setattr(calls, "mm", step_by_step(calls.mm))
    one, beside, *_ = both_ways(monkeypatch, kind, dtype, 13, pieces, lanes, given)
    if kind is nn.LSTM and dtype != torch.float32:
        return  # c is rounded once more at the start of each piece
    for a, b in zip(one, beside, strict=True):
        assert torch.equal(a, b)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [48, 45])
def test_on_a_gpu_ids_without_a_gradient_have_the_bits_of_one_layer_after_the_other(
    kind, dtype, hidden, monkeypatch
):
    monkeypatch.setenv("ELMAN_KERNELS", "cuda")
    monkeypatch.setattr(calls, "linear", step_by_step(calls.linear))
    rnn, _, state = stack(kind, dtype, 13, hidden=hidden)
    ids = torch.randint(40, (13, ROWS), device="cuda")
    found, weights = [], [*rnn.parameters()]
    monkeypatch.setattr(calls, "schedule_for", lambda *_: None)
    monkeypatch.setattr(wider, "_PREPARED", {})
    with torch.no_grad():
        for force in (False, True):
            if force:
                forced(monkeypatch, 5, 3, cuda.machine(0))
            call = prepared_call(rnn, ids)
            inner: Any = getattr(call.prepared, "inner", call.prepared)
            assert (inner.forward_launch.schedule is not None) == force
            for first in ((), state):
                ys, last = call(ids, first, weights)
                assert torch.equal(ys, call(ids, first, weights)[0])
                found.append([ys, *last])
    if kind is nn.LSTM and dtype != torch.float32:
        return  # c is rounded once more at the start of each piece
    for one, beside in zip(found[:2], found[2:], strict=True):
        assert all(map(torch.equal, one, beside))


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_modules_that_read_ids_beside_each_other_are_near_the_loop(
    kind, dtype, monkeypatch
):
    """The module as users call it, captured later, against itself where gradients are asked for."""
    monkeypatch.setenv("ELMAN_KERNELS", "cuda")
    forced(monkeypatch, 5, 3, cuda.machine(0))
    rnn, *_ = stack(kind, dtype, 60, layers=3)
    rnn.repeatable = True
    ids = torch.randint(40, (60, ROWS), device="cuda")
    expected = rnn(ids)[0].detach()
    with torch.no_grad():
        first = rnn(ids)[0].clone()
        for form in (ids, ids.int()) * 8:  # the later ones are captured
            assert torch.equal(rnn(form)[0], first)
        assert "beside" in str(cuda_explained(rnn, ids))
    tolerance = 1e-2 if dtype == torch.float32 else 5e-2  # TF32, and states rounded at each step
    torch.testing.assert_close(first, expected, rtol=0, atol=tolerance)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_layers_beside_each_other_are_as_near_to_float64(kind, dtype, monkeypatch):
    one, beside, rnn, x, state = both_ways(monkeypatch, kind, dtype, 60, 7, 3, True)
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    exact_rnn = kind(40, 48, 4, dtype=torch.float64)
    exact_rnn.load_state_dict({k: v.double().cpu() for k, v in rnn.state_dict().items()})

    def plain(x, state):
        ys, last = exact_rnn(x, tuple(state) if len(state) > 1 else state[0])
        return ys, last if isinstance(last, tuple) else (last,)

    ends = one[: 1 + len(state)]
    generator = torch.Generator("cuda").manual_seed(3)
    pulls = [torch.randn(t.shape, generator=generator, device="cuda").to(t) for t in ends]
    leaves = [t.double().cpu().requires_grad_() for t in (x, *state)]
    ys, last = plain(leaves[0], leaves[1:])
    torch.autograd.backward([ys, *last], [p.double().cpu() for p in pulls])
    exact = [ys, *last, *(t.grad for t in (*leaves, *exact_rnn.parameters()))]
    ratios = [error(b, e) / error(a, e) for a, b, e in zip(one, beside, exact, strict=True)]
    mean = torch.tensor(ratios).log().mean().exp()
    # Where a product rounds float32 to TF32, one of another size may cut off: twice the error.
    assert mean < (2 if dtype == torch.float32 else 1.25), ratios


def error(found, exact):
    return float((found.double().cpu() - exact.detach()).norm() / exact.detach().norm())


def module_answers(rnn, x):
    x = x.clone().requires_grad_()
    rnn.zero_grad()
    ys, *_ = rnn(x)
    ys.square().sum().backward(retain_graph=True)
    first = [x.grad.clone(), *(p.grad.clone() for p in rnn.parameters())]
    x.grad = None
    rnn.zero_grad()
    ys.square().sum().backward()
    second = [x.grad, *(p.grad.clone() for p in rnn.parameters())]
    assert all(map(torch.equal, first, second))  # a graph that was kept gives the same again
    return [ys.detach().clone(), *first]


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_streams_threads_and_captures_change_nothing(kind, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "cuda")
    forced(monkeypatch, 5, 3, cuda.machine(0))
    rnn, x, _ = stack(kind, torch.bfloat16, 40)
    expected = module_answers(rnn, x)
    for _ in range(8):  # the later ones are captured
        assert all(map(torch.equal, expected, module_answers(rnn, x)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        junk = [torch.randn(2000, 2000, device="cuda") @ torch.randn(2000, 2000, device="cuda")]
        for _ in range(8):
            assert all(map(torch.equal, expected, module_answers(rnn, x)))
    torch.cuda.current_stream().wait_stream(side)
    del junk
    assert "beside" in str(cuda_explained(rnn, x))

    call, weights = prepared_call(rnn, x), [w.detach() for w in rnn.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        call(x, (), weights)
        with torch.cuda.graph(graph):
            ys, _ = call(x, (), weights)
    graph.replay()
    assert torch.equal(ys, expected[0])


def cuda_explained(rnn, x):
    from elman.kernels import explain

    return explain(rnn, x)


@gpu
def test_on_a_gpu_threads_do_not_share_lanes(monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "cuda")
    monkeypatch.setenv("ELMAN_CAPTURE", "off")
    forced(monkeypatch, 6, 4, cuda.machine(0))
    rnn, x, _ = stack(nn.GRU, torch.bfloat16, 120)
    with torch.no_grad():
        expected = rnn(x)[0].clone()
    torch.cuda.synchronize()
    wrong = []

    def many():
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                noise = torch.randn(500, 500, device="cuda")
                if not torch.equal(rnn(x)[0], expected):
                    wrong.append(noise)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@gpu
def test_on_a_gpu_gradients_of_gradients_are_those_of_one_layer_after_the_other(monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "cuda")
    rnn, x, _ = stack(nn.RNN, torch.float32, 20)
    found = []
    for pieces in (1, 4):
        forced(monkeypatch, pieces, 3, cuda.machine(0))
        rnn._settled.clear()
        y = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(rnn(y)[0].square().sum(), y, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), y)[0])
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2 * float(found[0].abs().max()))
