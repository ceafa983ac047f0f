"""Calls that are captured do what they do uncaptured, to the bit, whatever comes between."""

import contextlib
import copy
import gc
import io
import itertools
import random
import subprocess
import sys
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from elman import kernels, nn
from elman.cells import named
from elman.errors import UserError, WorkFailed
from elman.gradients import Checkpointed, Randomized, Truncated
from elman.kernels import choice, cudnn, reference, torchs
from elman.kernels.cuda import graphs
from elman.recurrence import captured
from elman.recurrence.captured import FEW, Repeated
from elman.recurrence.operator import known_ids
from elman.recurrence.settled import LONG_WAY, Settled
from elman.recurrence.ways import ByCudnn, ByStack

KINDS = [nn.RNN, nn.GRU, nn.LSTM]
EVERY = FEW + 3  # calls, some of them captured


@pytest.fixture(autouse=True)
def worth_it(request, monkeypatch):
    """On a GPU bits are asked for, and a busy one would time most calls as not worth capturing."""
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(captured.Recording, "pays", lambda _: True)


# ---------------------------------------------------------------------- on paper


class PaperGraph:
    """Runs the work again and puts its results where they were."""

    def __init__(self, work, result):
        self.work, self.result, self.launches = work, result, 0

    def launch(self, stream):
        assert stream in (7, 8)  # the caller's, or aside
        self.launches += 1
        for old, new in zip(leaves(self.result), leaves(self.work()), strict=True):
            old.copy_(new)


def leaves(tree):
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor)]


class PaperRecorder:
    fails, number = False, 8

    times, gpu = (200.0, 100.0), 0.0

    def microseconds(self, *works):
        for work, _ in works:
            work()
        pairs = zip(works, self.times, strict=True)
        return [max(host + before, self.gpu + host / 10) for (_, before), host in pairs]

    def aside(self):
        return contextlib.nullcontext()

    def memory(self):
        return mock.Mock(used=contextlib.nullcontext, nbytes=2)

    def record(self, work, memory):
        if self.fails:
            raise RuntimeError("a recording failed\nand more")
        result = work()
        return PaperGraph(work, result), result


@pytest.fixture
def paper(monkeypatch):
    """A recorder without a GPU."""
    recorder = PaperRecorder()
    monkeypatch.setattr(graphs, "recorder", lambda *_: recorder)
    monkeypatch.setattr(captured, "current_stream", lambda _: 7)
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    return recorder


class Twin:
    """A module, and its calls as they are on a GPU."""

    def __init__(self, kind=nn.LSTM, batch_first=False, bidirectional=True):
        torch.manual_seed(0)
        self.rnn: Any = kind(4, 5, batch_first=batch_first, bidirectional=bidirectional)
        sizes = named(self.rnn.cell).state_sizes(5)
        way = ByStack(self.rnn._recipe(), reference.KERNEL, batch_first, sizes)
        self.calls = Repeated(way, torchs.Whole(self.rnn._network(), 6, 3, torch.float32), 0)

    def __call__(self, x, state=()):
        done = self.calls(x, state, list(self.rnn.parameters()))
        if done is None:
            ys, last = self.rnn(x, (state if len(state) > 1 else state[0]) if state else None)
            return ys, last if isinstance(last, tuple) else (last,)
        return done

    def plain(self, x, state=()):
        ys, last = self.rnn(x, (state if len(state) > 1 else state[0]) if state else None)
        return ys, last if isinstance(last, tuple) else (last,)

    @property
    def made(self) -> list[Any]:
        return [r for some in self.calls.kinds.values() for r in some.made]


def answers(run, module, x, state=(), ends=None):
    """Outputs, last states, and the gradients of everything but ids."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    state = tuple(s.detach().clone().requires_grad_() for s in state)
    ys, last = run(x, state)
    outs = [ys, *last]
    torch.manual_seed(3)
    pulls = [torch.randn(t.shape, device=t.device).to(t.dtype) for t in outs]
    which = range(len(outs)) if ends is None else ends
    torch.autograd.backward([outs[i] for i in which], [pulls[i] for i in which])
    return [*outs, *(t.grad for t in (x, *state, *module.parameters()))]


def agree(found, exact):
    for a, b in zip(found, exact, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_captured_call_is_the_call(kind, batch_first, given, paper):
    twin = Twin(kind, batch_first)
    for i in range(2 * EVERY):
        x = torch.randn(3, 6, 4) if batch_first else torch.randn(6, 3, 4)
        state = tuple(torch.randn(2, 3, n) for n in named(twin.rnn.cell).state_sizes(5)) * given
        ends = (None, (0,), (1,))[i % 3]
        exact = answers(twin.plain, twin.rnn, x, state, ends)
        agree(answers(twin, twin.rnn, x, state, ends), exact)
        with torch.no_grad():
            ys, last = twin(x, state)
            agree([ys, *last], exact[: 1 + len(last)])
            for p in twin.rnn.parameters():  # an update
                p.add_(0.01 * torch.randn_like(p))
    assert len(twin.made) == 2  # with a gradient and without: each was there again when asked for
    assert twin.made[0].graph.launches > EVERY
    assert {tuple(back.places) for r in twin.made for back in r.backs.values()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_captured_call_with_ids_is_the_call(kind, batch_first, given, dtype, paper):
    twin = Twin(kind, batch_first)
    for i in range(2 * EVERY):
        x = torch.randint(4, (3, 6) if batch_first else (6, 3)).to(dtype)
        x = x if i % 2 else x.T.contiguous().T  # however they lie
        state = tuple(torch.randn(2, 3, n) for n in named(twin.rnn.cell).state_sizes(5)) * given
        exact = answers(twin.plain, twin.rnn, x, state)
        agree(answers(twin, twin.rnn, x, state), exact)
    assert len(twin.made) == 1
    assert twin.made[0].graph.launches > EVERY


def test_ids_that_were_not_looked_at_are_recorded_apart(paper):
    """A recording made where ids are known leaves out the look that others need."""
    twin, x = Twin(), torch.randint(4, (6, 3))
    for _ in range(EVERY):
        with known_ids():
            twin(x)[0].sum().backward()
    assert len(twin.made) == 1
    for _ in range(EVERY):
        twin(x)[0].sum().backward()
    assert len(twin.made) == 2


def two_calls(twin):
    xs = [torch.randn(6, 3, 4) for _ in range(2)]
    for _ in range(3 * FEW):  # and a recording for each of two that wait
        (twin(xs[0])[0].sum() + twin(xs[1])[0].sum()).backward()
    return xs


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forward_passes_before_two_backward_ones(order, paper):
    twin = Twin()
    xs = two_calls(twin)
    assert len(twin.made) == 2
    exact = [answers(twin.plain, twin.rnn, x, (), (0,))[3:] for x in xs]
    twin.rnn.zero_grad()
    leaves = [x.clone().requires_grad_() for x in xs]
    ys = [twin(x)[0] for x in leaves]
    for i in order:
        torch.manual_seed(3)
        found = torch.autograd.grad(
            ys[i], [leaves[i], *twin.rnn.parameters()], torch.randn_like(ys[i])
        )
        agree(found, exact[i])


def test_a_retained_graph_keeps_its_recording_until_it_is_gone(paper):
    twin = Twin()
    xs = two_calls(twin)
    assert not any(r.lent.locked() for r in twin.made)
    ys = twin(xs[0])[0]
    weight = twin.rnn.weight_hh_l0
    first = torch.autograd.grad(ys.square().sum(), weight, retain_graph=True)
    assert [r.lent.locked() for r in twin.made] == [True, False]
    twin(xs[1])[0].sum().backward()  # elsewhere
    again = torch.autograd.grad(ys.square().sum(), weight, retain_graph=True)
    assert torch.equal(*first, *again)
    del ys
    assert not any(r.lent.locked() for r in twin.made)


def test_an_output_that_nobody_keeps_frees_its_recording(paper):
    twin = Twin()
    xs = two_calls(twin)
    for _ in range(3):
        twin(xs[0])  # and no backward pass
        assert not any(r.lent.locked() for r in twin.made)
    kept = [twin(x) for x in xs * 4]  # more than there are recordings, all wanted
    assert all(r.lent.locked() for r in twin.made)
    for x, (ys, last) in zip(xs * 4, kept, strict=True):
        agree([ys, *last], [twin.plain(x)[0], *twin.plain(x)[1]])
    assert len(twin.made) <= captured.SIDE_BY_SIDE


def test_the_second_pass_through_a_graph_that_is_gone_is_refused_as_ever(paper):
    twin = Twin()
    (x, _), weight = two_calls(twin), twin.rnn.weight_hh_l0
    ys = twin(x)[0]
    torch.autograd.grad(ys.sum(), weight)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(ys.sum(), weight)
    ys = twin(x)[0]
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ys.sum().backward()


def test_gradients_of_gradients_are_those_of_the_call(paper):
    twin, x = Twin(), torch.randn(6, 3, 4)
    for _ in range(EVERY):
        answers(twin, twin.rnn, x)
    assert twin.made

    def twice(run):
        given = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(run(given)[0].square().sum(), given, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [given, *twin.rnn.parameters()])

    for a, b in zip(twice(twin), twice(twin.plain), strict=True):
        torch.testing.assert_close(a, b)


def test_a_gradient_is_its_own_memory(paper):
    twin = Twin(nn.RNN)
    for _ in range(EVERY):
        answers(twin, twin.rnn, torch.randn(6, 3, 4))
    twin.rnn.zero_grad()
    x = torch.randn(6, 3, 4)
    twin(x)[0].sum().backward()
    once = [p.grad.clone() for p in twin.rnn.parameters()]
    twin(x)[0].sum().backward()
    for p, g in zip(twin.rnn.parameters(), once, strict=True):
        assert torch.equal(p.grad, 2 * g)
    twin.rnn.bias_ih_l0.grad.zero_()  # whose pull is that on b_hh
    assert twin.rnn.bias_hh_l0.grad.abs().sum() > 0
    places = [p.grad.untyped_storage().data_ptr() for p in twin.rnn.parameters()]
    assert len(set(places)) == len(places)


def test_what_fails_to_be_recorded_runs_as_it_is_and_says_why(paper):
    paper.fails = True
    twin = Twin()
    for _ in range(EVERY):
        x = torch.randn(6, 3, 4)
        agree(answers(twin, twin.rnn, x), answers(twin.plain, twin.rnn, x))
    assert not twin.made
    assert twin.calls.words() == "not captured: a recording failed"
    assert not graphs.ONE_AT_A_TIME.locked()


def test_a_backward_pass_that_fails_to_be_recorded_still_runs(paper):
    twin = Twin()
    for _ in range(FEW + 1):
        twin(torch.randn(6, 3, 4, requires_grad=True))
    paper.fails = True
    for _ in range(3):
        x = torch.randn(6, 3, 4)
        agree(answers(twin, twin.rnn, x), answers(twin.plain, twin.rnn, x))
    assert twin.calls.words() == "not captured: a recording failed"


def test_what_takes_longer_captured_is_not(paper):
    paper.times = (200.0, 199.0)
    twin, x = Twin(), torch.randn(6, 3, 4)
    with torch.no_grad():
        for _ in range(2 * EVERY):
            twin(x)
    assert not twin.made
    assert twin.calls.given_up
    assert twin.calls.words() == "not captured: it takes 234 µs then, 220 as it is"
    for _ in range(EVERY):  # where autograd takes longer than either
        twin(x)
    assert twin.made
    assert twin.made[0].kind.keep


@pytest.mark.parametrize(
    ("calls", "gives_up"), [(EVERY + 2, True), (EVERY + captured.WORTH, False)]
)
@pytest.mark.usefixtures("paper")
def test_weights_that_move_every_few_calls_are_not_recorded_for_ever(calls, gives_up):
    """To record a call costs as much as it saves in many."""
    twin, x, held = Twin(), torch.randn(6, 3, 4), []
    with torch.no_grad():
        for _ in range(captured.PATIENCE * captured.SIDE_BY_SIDE + 1):
            held += [p.data for p in twin.rnn.parameters()]  # so that none lies where one was
            for p in twin.rnn.parameters():
                p.data = p.data.clone()
            for _ in range(calls):
                assert torch.equal(twin(x)[0], twin.plain(x)[0])
    assert twin.calls.given_up == gives_up
    assert (captured.MOVING in twin.calls.words()) == gives_up


def test_what_keeps_the_gpu_busy_for_longer_than_autograd_takes_is_not_captured(paper):
    paper.times, paper.gpu = (200.0, 210.0), 1000.0
    twin, x = Twin(), torch.randn(6, 3, 4)
    for _ in range(2 * EVERY):
        twin(x)[0].sum().backward()
    assert not twin.made
    assert twin.calls.words() == "not captured: it takes 1021 µs then, 1020 as it is"


@pytest.mark.parametrize(("host", "gpu", "expected"), [(100, 60, 120), (30, 60, 60), (50, 60, 70)])
def test_what_python_takes_before_a_call_counts_where_the_gpu_waits_for_it(
    host, gpu, expected, monkeypatch
):
    clock, busy_until = [0.0], [0.0]

    def work():
        clock[0] += host * 1e-6
        busy_until[0] = max(busy_until[0], clock[0]) + gpu * 1e-6

    def synchronize():
        clock[0] = max(clock[0], busy_until[0])

    monkeypatch.setattr(graphs.time, "perf_counter", lambda: clock[0])
    recorder = mock.Mock(stream=mock.Mock(synchronize=synchronize))
    found, alike = graphs.Recorder.microseconds(recorder, (work, 20), (work, 20))
    tail = max(host, gpu) / graphs.CALLS  # until the last of few calls is done
    assert expected - 0.1 <= found <= expected + tail + 0.1
    assert alike == pytest.approx(found)


def off(launch):
    """A launch whose first result is a little wrong."""

    def launched(self, stream):
        launch(self, stream)
        leaves(self.result)[0].mul_(1 + 1e-6)

    return launched


def test_a_graph_that_gives_other_bits_is_not_used(paper, monkeypatch):
    monkeypatch.setattr(PaperGraph, "launch", off(PaperGraph.launch))
    twin = Twin()
    for _ in range(EVERY):
        x = torch.randn(6, 3, 4)
        agree(answers(twin, twin.rnn, x), answers(twin.plain, twin.rnn, x))
    assert twin.calls.words() == "not captured: a CUDA graph of it gives other bits"


def test_a_backward_graph_that_gives_other_bits_is_not_used(paper, monkeypatch):
    twin, right = Twin(), PaperGraph.launch
    for _ in range(FEW + 4):
        x = torch.randn(6, 3, 4, requires_grad=True)
        monkeypatch.setattr(PaperGraph, "launch", right)
        ys = twin(x)[0]
        monkeypatch.setattr(PaperGraph, "launch", off(right))
        (found,) = torch.autograd.grad(ys.sum(), x)
        (exact,) = torch.autograd.grad(twin.plain(x)[0].sum(), x)
        assert torch.equal(found, exact)
    assert twin.made
    assert not twin.made[0].backs
    assert twin.calls.words() == "not captured: a CUDA graph of it gives other bits"


def test_the_least_recently_used_give_way_and_come_back_late(paper, monkeypatch):
    monkeypatch.setattr(captured, "_ALL", set())
    monkeypatch.setattr(captured, "MOST", 3)
    twins = [Twin(bidirectional=True) for _ in range(5)]
    x = torch.randn(6, 3, 4)
    with torch.no_grad():
        for twin in twins:
            for _ in range(EVERY):
                twin(x)
        assert [len(twin.made) for twin in twins] == [0, 0, 1, 1, 1]
        for _ in range(FEW + 1):
            twins[0](x)
        assert not twins[0].made  # as many calls as at first are not enough
        for _ in range(4 * FEW):
            twins[0](x)
        assert [len(twin.made) for twin in twins] == [1, 0, 0, 1, 1]
        monkeypatch.setattr(captured, "MOST_LARGE", 0)
        captured._make_room(next(iter(twins[0].calls.kinds.values())))
    assert [len(twin.made) for twin in twins] == [1, 0, 0, 0, 0]


def test_memory_of_recordings_is_counted_without_asking_for_snapshots(monkeypatch):
    """They free Python's memory twice (torch's own mistake): see `graphs.Memory`."""
    reserved = [100]
    pool = mock.Mock(snapshot=mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved[0])
    memory = graphs.Memory(0)
    for now, expected in ((130, 30), (130, 30), (90, 30), (100, 40)):  # another thread gives back
        with memory.used():
            reserved[0] = now
        assert memory.nbytes == expected


def test_a_gpu_with_more_memory_holds_larger_recordings(monkeypatch):
    memory = mock.Mock(total_memory=2**34)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    choice.largest.cache_clear()
    assert kernels.largest(torch.device("cuda", 0)) == 2**26  # as on a small one
    memory.total_memory = 140 * 2**30
    choice.largest.cache_clear()
    assert kernels.largest(torch.device("cuda", 0)) == 140 * 2**20
    choice.largest.cache_clear()
    assert kernels.largest(torch.device("cpu")) == 2**26


def test_another_place_flag_or_switch_is_another_recording(paper, monkeypatch):
    twin = Twin(nn.RNN)
    x = torch.randn(6, 3, 4)

    def called():
        with torch.no_grad():
            agree([twin(x)[0]], [twin.plain(x)[0]])

    for _ in range(EVERY):
        called()
    (made,) = twin.made
    kept = twin.rnn.weight_hh_l0.data
    twin.rnn.weight_hh_l0.data = kept.T  # the same place, turned round
    called()
    twin.rnn.weight_hh_l0.data = kept * 2
    called()
    twin.rnn.weight_hh_l0.requires_grad_(False)
    called()
    monkeypatch.setattr(torch._C, "_get_deterministic_algorithms", lambda: True)
    called()
    assert made.graph.launches == EVERY - FEW + 2  # and twice to be timed and looked at


def test_who_looks_inside_is_not_shown_a_recording(paper):
    twin = Twin()
    x = torch.randn(6, 3, 4)
    for _ in range(EVERY):
        twin(x)
    (made,) = twin.made
    before = made.graph.launches

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    for inside in (Counted(), Seen(), hooks, torch.autograd.forward_ad.dual_level()):
        with inside:
            agree([twin(x)[0]], [twin.plain(x)[0]])
    assert made.graph.launches == before
    with torch.device("cpu"):  # which only says where new tensors are made
        twin(x)
    assert made.graph.launches == before + 1


def test_threads_do_not_read_each_others_inputs(paper):
    twin = Twin()
    with torch.no_grad():
        for _ in range(EVERY):
            twin(torch.randn(6, 3, 4))
    wrong = []

    def work():
        with torch.no_grad():
            for _ in range(40):
                x = torch.randn(6, 3, 4)
                if not torch.equal(twin(x)[0], twin.plain(x)[0]):
                    wrong.append(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_copied_module_records_its_own(paper):
    twin = Twin()
    assert copy.deepcopy(twin.calls) is None
    twin.rnn._settled["any"] = Settled(LONG_WAY, twin.calls)
    torch.save(twin.rnn, io.BytesIO())
    assert copy.deepcopy(twin.rnn)._settled == {}


def refusal(rnn, x, kernel="cudnn"):
    inputs = rnn._inputs(*rnn._time_first(x, None))
    stack = rnn._whole(inputs)
    return captured.refuses(rnn._recipe(len(x)), inputs, stack, kernel)


def test_what_is_not_captured_says_why(monkeypatch):
    x = torch.zeros(6, 3, 4)
    assert refusal(nn.LSTM(4, 5), x) is None
    assert refusal(nn.LSTM(4, 5), x, "cuda") is None
    assert refusal(nn.LSTM(4, 5), torch.zeros(6, 3, dtype=torch.int64), "cuda") is None
    assert "of one length" in str(refusal(nn.LSTM(4, 5), x, "fused"))
    assert "chance" in str(refusal(nn.LSTM(4, 5, 2, dropout=0.5), x))
    assert refusal(nn.LSTM(4, 5, 2, dropout=0.5).eval(), x) is None
    assert "chance" in str(refusal(nn.LSTM(4, 5, zoneout=0.1), x, "cuda"))
    assert "not the plain one" in str(refusal(nn.RNN(4, 5, carry=Truncated(2)), x))
    assert refusal(nn.RNN(4, 5, carry=Truncated(9)), x) is None  # nothing is cut
    drawn = nn.RNN(4, 5, carry=Randomized(0.5, seed=1))
    assert "not the plain one" in str(refusal(drawn, x, "cuda"))
    kept = nn.RNN(4, 5, memory=Checkpointed(every=2))
    assert "not the plain one" in str(refusal(kept, x, "cuda"))
    both = nn.Layers("slstm", 4, 8, bidirectional=True)
    assert "heads" in str(refusal(both, x, "cuda"))
    one, ids = nn.Layers("slstm", 4, 8), torch.zeros(6, 3, dtype=torch.int64)
    assert refusal(one, x, "cuda") is None
    assert "heads" in str(refusal(one, ids, "cuda"))
    assert "MiB" in str(refusal(nn.LSTM(4, 512), torch.zeros(50, 200, 4)))
    assert "longer than Python" in str(refusal(nn.LSTM(4, 512), torch.zeros(900, 1, 4), "cuda"))
    monkeypatch.setenv("ELMAN_CAPTURE", "off")
    assert refusal(nn.LSTM(4, 5), x) == "ELMAN_CAPTURE=off"
    with kernels.capturing(True):
        assert refusal(nn.LSTM(4, 5), x) is None
    assert not kernels.captures()
    monkeypatch.setenv("ELMAN_CAPTURE", "perhaps")
    with pytest.raises(UserError, match="neither auto nor off"):
        kernels.captures()


def test_a_choice_is_made_anew_where_the_environment_has_changed(monkeypatch):
    for name in ("ELMAN_KERNELS", "ELMAN_CAPTURE"):
        monkeypatch.delenv(name, raising=False)
    met = [choice.settings(torch.float32)]
    for name, value in (("ELMAN_KERNELS", "cudnn"), ("ELMAN_CAPTURE", "off")):
        monkeypatch.setenv(name, value)
        met.append(choice.settings(torch.float32))
    assert len(set(met)) == 3


def test_cudnns_arguments_there_and_back(monkeypatch):
    """By torch's layers on a CPU in its place: the order of what goes in and comes out."""
    net = nn.LSTM(4, 5, 2, bidirectional=True)._network()
    way, seen = ByCudnn(torchs.Whole(net, 6, 3, torch.float32), True, True), {}

    def forward(*given):
        seen["forward"] = given
        ys = torch.zeros(3, 6, 10)
        return ys, *[torch.zeros(4, 3, 5)] * 2, torch.ones(7), torch.ones(8)

    def backward(*given):
        seen["backward"] = given
        return "dx", "dh", "dc", ["dw"] * 16

    monkeypatch.setattr(torch, "_cudnn_rnn", forward)
    monkeypatch.setattr(cudnn, "all_weights", lambda *_: "block")
    monkeypatch.setattr(torch.ops.aten, "_cudnn_rnn_backward", backward)
    x, weights = torch.zeros(3, 6, 4), [torch.zeros(1)] * 16
    first = way.first(x)
    assert [s.shape for s in first] == [(4, 3, 5)] * 2
    ys, last, kept = way.forward(x, first, weights, True)
    assert len(last) == 2
    assert seen["forward"][6:] == (2, 5, 0, 2, True, 0.0, True, True, [], None)
    needs = [True, False, True] + [False] * 15 + [True]
    found = way.backward(x, first, weights, kept, [ys, None, last[1]], needs)
    assert found == ["dx", "dh", "dc", *["dw"] * 16]
    assert seen["backward"][7:10] == (ys, None, last[1])
    assert seen["backward"][-1] == [True, False, True, True]
    assert seen["backward"][0] is x
    assert torch.equal(seen["backward"][-2], kept[2])
    assert seen["backward"][-2] is not kept[2]
    ids = torch.tensor([[0, 3, 2, 1, 1, 0]] * 3, dtype=torch.int32)
    _, _, kept = way.forward(ids, way.first(ids), weights, True)
    rows = seen["forward"][0]
    assert rows.dtype == torch.float32
    assert torch.equal(rows.argmax(-1), ids)
    assert [s.dtype for s in way.first(ids)] == [torch.float32] * 2
    way.backward(ids, first, weights, kept, [ys, None, None], [False] * 19)
    assert seen["backward"][0] is rows


class Driver:
    """Notes what the CUDA driver is asked, and whether Python may collect garbage meanwhile."""

    def __init__(self, fails=""):
        self.asked, self.fails = [], fails

    def __call__(self, name, *arguments):
        self.asked.append((name, gc.isenabled()))
        if name == self.fails:
            raise WorkFailed(f"{name} failed")
        if name == "cuThreadExchangeStreamCaptureMode":  # the thread's mode for the one passed
            self.mode, arguments[0]._obj.value = arguments[0]._obj.value, self.mode


def recorder_on_paper(monkeypatch, driver):
    monkeypatch.setattr(graphs.driver, "call", driver)
    monkeypatch.setattr(graphs.driver, "end_capture", lambda *_: driver("end"))
    recorder = object.__new__(graphs.Recorder)
    recorder.handle = graphs.ctypes.c_void_p()
    return recorder, mock.Mock(used=contextlib.nullcontext)


def test_no_garbage_is_collected_from_before_a_recording_begins_until_it_has_ended(monkeypatch):
    driver = Driver()
    recorder, memory = recorder_on_paper(monkeypatch, driver)
    graph, result = recorder.record(lambda: driver("work") or "done", memory)
    assert result == "done"
    whole = ["cuStreamBeginCapture_v2", "work", "cuStreamEndCapture"]
    assert driver.asked[:3] == [(name, False) for name in whole]
    assert gc.isenabled()
    driver.mode = 0
    del graph
    assert [name for name, _ in driver.asked[-3:]] == [
        "cuThreadExchangeStreamCaptureMode",
        "cuGraphExecDestroy",
        "cuThreadExchangeStreamCaptureMode",
    ]
    assert driver.mode == 0, "as it was before"


def test_a_recording_that_fails_has_ended_before_garbage_is_collected_again(monkeypatch):
    driver = Driver(fails="work")
    recorder, memory = recorder_on_paper(monkeypatch, driver)
    with pytest.raises(WorkFailed, match="work failed"):
        recorder.record(lambda: driver("work"), memory)
    assert driver.asked[-1] == ("end", False)
    assert gc.isenabled()


def test_a_kernel_that_cannot_be_kept_is_compiled_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(graphs.driver, "_fingerprint", lambda *_: "1")
    monkeypatch.setattr(graphs.driver, "_compile", lambda *_: b"code")
    with pytest.warns(UserWarning, match=r"cannot be kept in .*file.*ELMAN_CACHE names another"):
        assert graphs.driver.compiled("update.cu", {}, "sm_90a") == b"code"
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path / "folder"))
    assert graphs.driver.compiled("update.cu", {}, "sm_90a") == b"code"
    monkeypatch.delattr(graphs.driver, "_compile")  # found where it was kept
    assert graphs.driver.compiled("update.cu", {}, "sm_90a") == b"code"


# ---------------------------------------------------------------------- on a GPU

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def gpu(test):
    for mark in on_gpu:
        test = mark(test)
    return test


def launches():
    """Count launches of recordings."""
    real, counted = graphs.Graph.launch, mock.Mock()

    def launch(self, stream):
        counted()
        real(self, stream)

    return mock.patch.object(graphs.Graph, "launch", launch), counted


def module_call(rnn):
    def call(x, state=()):
        ys, last = rnn(x, (state if len(state) > 1 else state[0]) if state else None)
        return ys, last if isinstance(last, tuple) else (last,)

    return call


def drawn(draw, kernel):
    """A module, its input's shape, and the shapes of its states."""
    kind, H = draw.choice(KINDS), draw.choice((1, 7, 33, 64, 130))
    options = {"num_layers": draw.choice((1, 1, 2)), "bias": draw.random() < 0.8}
    options |= {"bidirectional": draw.random() < 0.3, "batch_first": draw.random() < 0.3}
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    rnn = kind(draw.choice((1, 5, 40)), H, device="cuda", dtype=dtype, **options)
    T, B = draw.choice((1, 2, 9, 30)), draw.choice((1, 3, 17, 64))
    shape = (B, T) if options["batch_first"] else (T, B)
    places = options["num_layers"] * (2 if options["bidirectional"] else 1)
    return rnn, (*shape, rnn.input_size), (places, B, H)


@gpu
@pytest.mark.parametrize("kernel", ["cuda", "cudnn"])
@pytest.mark.parametrize("seed", range(12))
def test_on_a_gpu_captured_calls_are_uncaptured_ones_to_the_bit(kernel, seed, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", kernel)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rnn, shape, states = drawn(draw, kernel)
    two = len(named(rnn.cell).state_sizes(1))
    like = {"device": "cuda", "dtype": rnn.weight_ih_l0.dtype}
    patched, counted = launches()
    said = kernels.explain(rnn, torch.zeros(shape, **like))
    assert said.repeated == captured.WILL_BE
    for given, ids in itertools.product((False, True), repeat=2):
        for i in range(EVERY + 2):
            x = torch.randn(shape, **like)
            if ids:
                x = torch.randint(rnn.input_size, shape[:2], device="cuda")
            state = tuple(torch.randn(states, **like) for _ in range(two)) * given
            with kernels.capturing(False):
                exact = answers(module_call(rnn), rnn, x, state, (0,) if i % 2 else None)
                with torch.no_grad():
                    still = module_call(rnn)(x, state)
            with patched:
                agree(answers(module_call(rnn), rnn, x, state, (0,) if i % 2 else None), exact)
                with torch.no_grad():
                    ys, last = module_call(rnn)(x, state)
                agree([ys, *last], [still[0], *still[1]])
    assert counted.call_count >= 20


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_weights_of_another_dtype_are_followed_by_ids(kind):
    """Whose own dtype says nothing about that of the numbers."""
    rnn, x = kind(5, 19, device="cuda"), torch.randint(5, (6, 7), device="cuda")
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float16):
        rnn.to(dtype)
        for _ in range(EVERY):
            ys = rnn(x)[0]
            assert ys.dtype == dtype
            agree([ys], [uncaptured(rnn, x)[0]])
            ys.sum().backward()


@gpu
def test_on_a_gpu_captured_ids_outside_the_vocabulary_are_refused():
    """In a process of its own: an assertion on a GPU ends all work there."""
    script = """
import torch
from elman import nn
rnn, x = nn.GRU(5, 19, device="cuda"), torch.randint(5, (6, 7), device="cuda")
for _ in range(12):
    rnn(x)[0].sum().backward()
torch.cuda.synchronize()
assert any(some.made for how in rnn._settled.values() for some in how.again.kinds.values())
x[3, 2] = 5
try:
    rnn(x)
    torch.cuda.synchronize()
except Exception as refused:
    print("refused", type(refused).__name__)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "refused" in done.stdout, done.stdout + done.stderr[-2000:]


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_repeated_calls_with_ids_under_autocast_are_captured(kind):
    module, x = kind(5, 19, 2, device="cuda"), torch.randint(5, (6, 7), device="cuda")
    found, (patched, counted) = [], launches()
    for _ in range(EVERY):
        module.zero_grad()
        with patched, torch.autocast("cuda", torch.bfloat16):
            ys = module(x)[0]
        assert ys.dtype == torch.bfloat16
        ys.float().square().sum().backward()
        found.append([ys.detach(), *(p.grad.clone() for p in module.parameters())])
    for again in found[1:]:
        agree(found[0], again)
    assert counted.call_count > 0


def warm(rnn, x, grad=True):
    for _ in range(EVERY):
        with torch.set_grad_enabled(grad):
            ys, _ = rnn(x)
            if grad:
                ys.sum().backward()
    rnn.zero_grad()


@pytest.fixture
def small():
    """A module whose calls are captured already, its twin that is never, and an input."""
    torch.manual_seed(0)
    rnn = nn.GRU(9, 40, device="cuda")
    x = torch.randn(12, 6, 9, device="cuda")
    warm(rnn, x)
    return rnn, x


def uncaptured(rnn, x):
    with kernels.capturing(False):
        return rnn(x)


@gpu
def test_on_a_gpu_updates_in_place_are_followed(small):
    rnn, x = small
    optimizer = torch.optim.Adam(rnn.parameters(), 0.01)
    patched, counted = launches()
    with patched:
        for _ in range(5):
            optimizer.zero_grad()
            ys, _ = rnn(x)
            agree([ys], [uncaptured(rnn, x)[0]])
            ys.square().sum().backward()
            optimizer.step()
    assert counted.call_count == 10


@gpu
@pytest.mark.filterwarnings("ignore:RNN module weights")  # torch's, of weights that were moved
def test_on_a_gpu_other_weights_types_and_copies_are_followed(small):
    rnn, x = small
    rnn.weight_hh_l0.data = torch.randn_like(rnn.weight_hh_l0)
    agree([rnn(x)[0]], [uncaptured(rnn, x)[0]])
    other = copy.deepcopy(rnn)
    with torch.no_grad():
        other.weight_hh_l0.mul_(0.5)
    for _ in range(EVERY):
        agree([other(x)[0]], [uncaptured(other, x)[0]])
        agree([rnn(x)[0]], [uncaptured(rnn, x)[0]])
    rnn.bfloat16()
    for _ in range(EVERY):
        agree([rnn(x.bfloat16())[0]], [uncaptured(rnn, x.bfloat16())[0]])
    keys = set(torch.nn.GRU(9, 40).state_dict())
    assert set(rnn.state_dict()) == keys
    torch.save(rnn, io.BytesIO())


@gpu
def test_on_a_gpu_accumulated_gradients_add_up(small):
    rnn, x = small
    with kernels.capturing(False):
        rnn(x)[0].square().sum().backward()
    exact = [p.grad.clone() for p in rnn.parameters()]
    rnn.zero_grad()
    for _ in range(2):
        rnn(x)[0].square().sum().backward()
    for p, g in zip(rnn.parameters(), exact, strict=True):
        assert torch.equal(p.grad, 2 * g)


@gpu
def test_on_a_gpu_gradless_and_inference_calls(small):
    rnn, x = small
    exact = uncaptured(rnn, x)[0].detach()
    for inside in (torch.no_grad, torch.inference_mode, torch.no_grad):
        for _ in range(EVERY):
            with inside():
                ys, _ = rnn(x)
            assert torch.equal(ys, exact)
            assert not ys.requires_grad
            assert ys.is_inference() == (inside is torch.inference_mode)
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(rnn(turned)[0], exact)
    x.requires_grad_()
    for _ in range(EVERY):
        rnn(x)[0].sum().backward()
    assert x.grad is not None


@gpu
def test_on_a_gpu_outputs_are_memory_of_their_own(small):
    rnn, x = small
    with torch.no_grad():
        seen = [rnn(x * i)[0] for i in range(EVERY)]
        for i, ys in enumerate(seen):
            assert torch.equal(ys, uncaptured(rnn, x * i)[0])


@gpu
def test_on_a_gpu_another_stream_has_its_own(small):
    rnn, x = small
    side = torch.cuda.Stream()
    exact = uncaptured(rnn, x)[0].detach()
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.no_grad():
            here = rnn(x)[0]
            with torch.cuda.stream(side):
                there = rnn(x)[0]
        torch.cuda.synchronize()
        agree([here, there], [exact, exact])


@gpu
def test_on_a_gpu_a_graph_of_the_users_own_holds_the_call_itself(small):
    rnn, x = small
    patched, counted = launches()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        rnn(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with patched, torch.no_grad(), torch.cuda.graph(graph):
        ys, _ = rnn(x)
    assert counted.call_count == 0
    x.mul_(0.5)
    graph.replay()
    torch.testing.assert_close(ys, uncaptured(rnn, x)[0], rtol=1e-3, atol=1e-3)  # TF32


@gpu
def test_on_a_gpu_threads_at_once(small):
    rnn, x = small
    exact, wrong = [uncaptured(rnn, x * i)[0].detach() for i in range(4)], []
    torch.cuda.synchronize()

    def work(i):
        for _ in range(100):
            with torch.no_grad():
                ys = rnn(x * i)[0]
            rnn(x * i)[0].sum().backward()
            if not torch.equal(ys, exact[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@gpu
def test_on_a_gpu_torch_compile_around_a_module(small):
    rnn, x = small
    exact = uncaptured(rnn, x)[0]
    compiled = torch.compile(rnn, backend="aot_eager", fullgraph=True)
    for _ in range(EVERY):
        torch.testing.assert_close(compiled(x)[0], exact, rtol=1e-3, atol=1e-3)  # TF32


@gpu
def test_on_a_gpu_checkpointed_by_torch(small):
    rnn, x = small
    x = x.requires_grad_()
    (exact,) = torch.autograd.grad(uncaptured(rnn, x)[0].square().sum(), x)
    for _ in range(3):
        ys = checkpoint(lambda x: rnn(x)[0], x, use_reentrant=False)
        (found,) = torch.autograd.grad(ys.square().sum(), x)
        assert torch.equal(found, exact)


@gpu
def test_on_a_gpu_memory_is_bounded_over_shapes_and_calls():
    rnn, draw = nn.LSTM(16, 64, device="cuda"), random.Random(1)
    sizes = []
    for i in range(200):
        x = torch.randn(draw.randint(1, 60), draw.randint(1, 64), 16, device="cuda")
        warm(rnn, x)
        del x
        if i % 20 == 19:
            torch.cuda.synchronize()
            sizes.append(torch.cuda.memory_allocated())
    assert len([r for some in captured._ALL for r in some.made]) <= captured.MOST
    largest = kernels.largest(torch.device("cuda", 0))
    assert max(sizes[3:]) < (captured.MOST_LARGE + 1) * largest + sizes[0]
    assert max(sizes[5:]) < 1.5 * max(sizes[:5])
    x = torch.randn(20, 8, 16, device="cuda")
    warm(rnn, x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10_000):
        with torch.no_grad():
            rnn(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    del rnn
    gc.collect()
    assert torch.cuda.memory_allocated() < before


@gpu
def test_on_a_gpu_explain_says_what_became_of_it(monkeypatch):
    rnn, x = nn.GRU(9, 40, device="cuda"), torch.randn(12, 6, 9, device="cuda")
    assert str(kernels.explain(rnn, x)).endswith(": runs (captured after 4 calls)")
    monkeypatch.setattr(graphs.Recorder, "record", mock.Mock(side_effect=RuntimeError("no\nway")))
    warm(rnn, x)
    assert str(kernels.explain(rnn, x)).endswith(": runs (not captured: no)")
    with kernels.capturing(False):
        assert kernels.explain(rnn, x).repeated == "not captured: ELMAN_CAPTURE=off"


@gpu
def test_on_a_gpu_a_recording_that_fails_leaves_nothing_behind(small):
    _, x = small
    recorder = graphs.recorder(0, torch.cuda.current_stream().cuda_stream)

    def fails():
        x.sum().item()  # which waits for the GPU, and that cannot be recorded

    with recorder.aside(), pytest.raises(RuntimeError):
        recorder.record(fails, recorder.memory())
    torch.randn(3, device="cuda")
    torch.cuda.synchronize()
    fresh = nn.GRU(9, 40, device="cuda")
    for _ in range(EVERY):
        agree([fresh(x)[0]], [uncaptured(fresh, x)[0]])


@gpu
def test_on_a_gpu_random_numbers_are_not_touched(small):
    rnn, x = small
    torch.cuda.manual_seed(5)
    exact = torch.randn(3, device="cuda")
    torch.cuda.manual_seed(5)
    other = nn.GRU(9, 40, device="cuda").requires_grad_(False)
    torch.cuda.manual_seed(5)
    for _ in range(EVERY):
        other(x)
        rnn(x)
    assert torch.equal(torch.randn(3, device="cuda"), exact)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_repeated_calls_under_autocast_are_captured(kind, dtype):
    """In float32: only what comes out is cast."""
    module, x = kind(5, 19, 2, device="cuda"), torch.randn(6, 7, 5, device="cuda")
    found = []
    for _ in range(EVERY):
        module.zero_grad()
        with torch.autocast("cuda", dtype):
            ys = module(x)[0]
            assert kernels.explain(module, x).runs in ("cuda", "cudnn")
        assert ys.dtype == dtype
        ys.float().square().sum().backward()
        found.append([ys.detach(), *(p.grad.clone() for p in module.parameters())])
    for again in found[1:]:
        for a, b in zip(found[0], again, strict=True):
            assert torch.equal(a, b)
    assert torch.equal(found[0][0], module(x)[0].to(dtype))
    assert any(settled.again for settled in module._settled.values())


@gpu
def test_on_a_gpu_a_graph_may_die_while_another_is_recorded():
    x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    recorder = graphs.recorder(0, torch.cuda.current_stream().cuda_stream)
    with recorder.aside():
        _ = x + 1
        graph, _ = recorder.record(lambda: x + 1, recorder.memory())
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):
        del graph
        y.add_(1)
    other.replay()
    assert y.tolist() == [1] * 4
