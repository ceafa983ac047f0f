"""Under `torch.autocast` on a CPU: its dtype comes out, float32 is read as it lies."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from elman import kernels, nn
from elman.cells import named
from elman.errors import UserError
from elman.gradients.carry import Truncated
from elman.kernels import choice, torchs
from elman.kernels.cpu import KERNEL, calls, library
from elman.recurrence import native

pytestmark = pytest.mark.skipif(KERNEL.library is None, reason="the cpu kernel was not built")
needs_bfloat16 = pytest.mark.skipif(
    KERNEL.library is None or KERNEL.variant(library.HALF) is None,
    reason="this processor has no bfloat16 products",
)

MODULES = [nn.RNN, nn.GRU, nn.LSTM]
BFLOAT16 = torch.bfloat16


@pytest.fixture
def nodes(monkeypatch):
    """How many native calls were made."""
    made, apply = [], native._Node.apply
    monkeypatch.setattr(native._Node, "apply", lambda *args: made.append(1) or apply(*args))
    return made


def states_of(out):
    return out[1] if isinstance(out[1], tuple) else (out[1],)


def outputs(module, x, state=None, dtype: torch.dtype | None = BFLOAT16):
    """ys and the last states, under autocast to this dtype; None: without it."""
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        out = module(x, state)
    return [out[0], *states_of(out)]


def state_of(module, rows, dtype=torch.float32):
    places = module.num_layers * (2 if module.bidirectional else 1)
    h, c = (torch.randn(places, rows, module.hidden_size).to(dtype) for _ in range(2))
    return (h, c) if isinstance(module, nn.LSTM) else h


def widened(state):
    return tuple(s.float() for s in state) if isinstance(state, tuple) else state.float()


def rounded(module):
    """With weights that bfloat16 has."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(p.bfloat16())
    return module


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@needs_bfloat16
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize("batch_first", [False, True])
def test_what_bfloat16_has_is_multiplied_as_in_bfloat16(
    kind, layers, bidirectional, batch_first, monkeypatch, nodes
):
    """Where nothing is lost by rounding first, the bits are those of tensors cast beforehand."""
    module = kind(5, 19, layers, bidirectional=bidirectional, batch_first=batch_first)
    module = rounded(module)
    rows = 6 if batch_first else 7
    for x in (torch.randn(6, 7, 5).bfloat16(), torch.randint(5, (6, 7))):
        for dtype in (torch.float32, BFLOAT16):
            x = x.to(dtype) if x.is_floating_point() else x
            for state in (None, state_of(module, rows, BFLOAT16)):
                found = outputs(module, x, state)
                assert {t.dtype for t in found} == {BFLOAT16}
                with torch.no_grad():
                    assert same(outputs(module, x, state), found)
                with monkeypatch.context() as patch, kernels.using("cpu"):
                    patch.setattr(type(module), "_plain_call", lambda *_: None)
                    assert same(outputs(module, x, state), found)
    assert len(nodes) == 8


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(("steps", "rows"), [(1, 1), (1, 4), (2, 2)])
def test_few_rows_are_multiplied_in_float32(kind, steps, rows):
    module, x = kind(5, 19, 2), torch.randn(steps, rows, 5)
    exact = outputs(module, x, dtype=None)
    assert same(outputs(module, x), [t.bfloat16() for t in exact])


@needs_bfloat16
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_rows_are_multiplied_in_bfloat16_too(kind, bidirectional, monkeypatch, nodes):
    module, state = rounded(kind(5, 19, 2, bidirectional=bidirectional)), None
    for dtype in (torch.float32, BFLOAT16):
        x = torch.randn(6, 4, 5).bfloat16().to(dtype)
        pack = pack_padded_sequence(x, [2, 6, 1, 4], enforce_sorted=False)
        for first in (state, state_of(module, 4, BFLOAT16)):
            ys, *last = outputs(module, pack, first)
            assert {t.dtype for t in (ys.data, *last)} == {BFLOAT16}
            with monkeypatch.context() as patch, kernels.using("cpu"):
                patch.setattr(type(module), "_plain_call", lambda *_: None)
                expected, *ends = outputs(module, pack, first)
            assert same([ys.data, *last], [expected.data, *ends])
            ys.data.float().square().sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}
    assert len(nodes) == 4


@pytest.mark.parametrize("kind", MODULES)
def test_dropout_is_what_it_is_without_autocast(kind, nodes):
    module, x = kind(5, 19, 2, dropout=0.5), torch.randn(2, 2, 5)
    found = []
    for dtype in (BFLOAT16, None):
        torch.manual_seed(3)
        found.append([t.bfloat16() for t in outputs(module, x, dtype=dtype)])
    assert same(*found)
    assert len(nodes) == 2


@pytest.mark.parametrize("kind", MODULES)
def test_float16_is_what_comes_out_of_float32(kind, nodes):
    module, x = kind(5, 19, 2), torch.randn(6, 7, 5)
    found = outputs(module, x, dtype=torch.float16)
    assert same(found, [t.half() for t in outputs(module, x, dtype=None)])
    assert len(nodes) == 2
    with torch.autocast("cpu", torch.float16):
        assert kernels.explain(module, x).runs == "cpu"


def test_a_processor_without_bfloat16_multiplies_in_float32(monkeypatch):
    monkeypatch.setattr(type(KERNEL), "variant", lambda self, kind=library.FLOAT: None)
    module, x = nn.GRU(5, 19), torch.randn(6, 7, 5)
    exact = outputs(module, x, dtype=None)
    assert same(outputs(module, x), [t.bfloat16() for t in exact])
    with torch.autocast("cpu", BFLOAT16):
        assert kernels.explain(module, x).runs == "cpu"


def distances(module, exact, x, pulls):
    """How far outputs and gradients under autocast are from those of float64, each relatively."""
    found = []
    for m, dtype in ((module, torch.float32), (exact, torch.float64)):
        m.zero_grad()
        x_m = x.to(dtype, copy=True).requires_grad_()
        with torch.autocast("cpu", BFLOAT16, enabled=dtype == torch.float32):
            ys = m(x_m)[0]
        (ys.to(dtype) * pulls.to(dtype)).sum().backward()
        found.append([ys.detach(), x_m.grad, *(p.grad for p in m.parameters())])
    pairs = zip(*found, strict=True)
    return torch.stack([(f.double() - e).norm() / e.norm() for f, e in pairs])


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("rows", [1, 9])
def test_it_is_closer_to_float64_than_torch_is(kind, bidirectional, rows):
    ours, theirs = [], []
    for seed in range(6):
        torch.manual_seed(seed)
        module = kind(12, 40, 2, bidirectional=bidirectional)
        exact = copy.deepcopy(module).double()
        x = torch.randn(15, rows, 12)
        pulls = torch.randn(15, rows, 80 if bidirectional else 40)
        ours.append(distances(module, exact, x, pulls))
        theirs.append(distances(module.to_torch(), exact, x, pulls))
    ours, theirs = (torch.stack(d).mean(0) for d in (ours, theirs))
    assert (ours < theirs).all(), (ours / theirs).tolist()
    assert 1e-4 < ours.max() < 0.02


@pytest.mark.parametrize("kind", MODULES)
def test_gradients_are_of_the_dtype_of_what_they_belong_to(kind):
    module = kind(5, 19, 2)
    x = torch.randn(6, 7, 5, dtype=BFLOAT16, requires_grad=True)
    state = state_of(module, 7, BFLOAT16)
    first = state if isinstance(state, tuple) else (state,)
    for s in first:
        s.requires_grad_()
    ys, *last = outputs(module, x, state)
    (ys.float().square().sum() + sum(s.float().sum() for s in last)).backward()
    assert {t.grad.dtype for t in (x, *first)} == {BFLOAT16}
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("inside", [False, True])
def test_a_gradient_that_is_differentiated_again_is_found_in_float32(kind, inside):
    """By torch's own layers, so with their numbers; of a loss linear in the outputs, so that how
    these were rounded does not matter."""
    mine, peer, found = kind(5, 9, 2), getattr(torch.nn, kind.__name__)(5, 9, 2), []
    peer.load_state_dict(mine.state_dict())
    x, pulls = torch.randn(6, 7, 5).bfloat16(), torch.randn(6, 7, 9).bfloat16()
    for module, dtype in ((mine, BFLOAT16), (peer, None)):
        x_m = (x if dtype else x.float()).clone().requires_grad_()
        ys, *_ = outputs(module, x_m, dtype=dtype)
        with torch.autocast("cpu", BFLOAT16, enabled=inside and dtype is not None):
            loss = (ys.float() * pulls.float()).sum()
            grads = torch.autograd.grad(loss, [*module.parameters()], create_graph=True)
        torch.stack([g.square().sum() for g in grads]).sum().backward()
        found.append([*grads, *(p.grad for p in module.parameters())])
        assert x_m.grad is not None
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_it_may_be_switched_between_any_two_calls(nodes):
    module, x = nn.LSTM(5, 19), torch.randn(6, 7, 5)
    for dtype in (None, BFLOAT16, torch.float16, BFLOAT16, None):
        assert outputs(module, x, dtype=dtype)[0].dtype == (dtype or torch.float32)
    assert len(nodes) == 5


def test_weights_are_read_where_they_lie_also_after_an_update():
    """torch keeps what it has cast until the block ends."""
    module, x = nn.GRU(5, 19), torch.randn(6, 7, 5)
    with torch.autocast("cpu", BFLOAT16):
        before = module(x)[0]
        with torch.no_grad():
            module.weight_hh_l0.mul_(-1)
        assert not torch.equal(module(x)[0], before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.sum().backward()


def test_float64_stays_float64():
    module, x = nn.GRU(5, 19, dtype=torch.float64), torch.randn(6, 7, 5, dtype=torch.float64)
    assert same(outputs(module, x), outputs(module, x, dtype=None))


def test_pairs_of_bfloat16_only_where_they_are_faster():
    two = library.HALF if KERNEL.variant(library.HALF) else library.FLOAT
    assert calls.kind_of(torch.float32, 5, BFLOAT16) == two
    assert calls.kind_of(torch.float32, 4, BFLOAT16) == library.FLOAT
    assert calls.kind_of(torch.float32, 5, torch.float16) == library.FLOAT
    assert calls.kind_of(torch.float32, 5, None) == library.FLOAT
    assert calls.kind_of(torch.float64, 5, None) == library.DOUBLE


def test_a_wrong_state_is_refused_in_words():
    module, x = nn.LSTM(5, 19), torch.randn(6, 7, 5)
    for state in (torch.zeros(1, 7, 19), (torch.zeros(1, 7, 19), 3), (torch.zeros(1, 6, 19),) * 2):
        with torch.autocast("cpu", BFLOAT16), pytest.raises(UserError):
            module(x, state)


def test_other_calls_are_cast_beforehand(nodes):
    x = torch.randn(6, 7, 5)
    with torch.autocast("cpu", BFLOAT16):
        for module in (nn.GRU(5, 19, carry=Truncated(2)), nn.GRU(5, 19).bfloat16()):
            assert module(x)[0].dtype == BFLOAT16
    assert not nodes


def test_a_sequence_without_a_batch_is_read_as_it_lies(nodes):
    module, x = nn.GRU(5, 19), torch.randn(6, 7, 5)
    with torch.autocast("cpu", BFLOAT16):
        ys, h = module(x[:, 0])  # every seventh row
        batch, last = module(x[:, :1].contiguous())
    assert len(nodes) == 2
    assert torch.equal(ys, batch[:, 0])
    assert torch.equal(h, last[:, 0])
    assert ys.dtype == BFLOAT16


# ---------------------------------------------------------------------- on a GPU


def on_paper(module, steps, rows, dtype=BFLOAT16, *, keeps=True, **more):
    """Whether a stack would stay in float32, by the prices of an H200."""
    cell = mock.Mock(states=named(module.cell).states)
    each = len(module._flat_weights) // module.num_layers
    jobs = []
    for kind in (torch.float32, dtype):
        whole = torchs.Whole(module._network(), steps, rows, kind, keeps=keeps, **more)
        layers = [[torch.zeros(1)] * each] * module.num_layers
        jobs.append(mock.Mock(whole=whole, inputs=[torch.zeros(1)], layers=layers, cell=cell))
    return kernels.is_sooner(*jobs)


@pytest.fixture
def every_kernel(monkeypatch):
    """Kernels refuse nothing: what would be chosen on a GPU that has them all."""
    monkeypatch.setattr(choice, "_refusal", lambda *_: None)


@pytest.mark.usefixtures("every_kernel")
def test_small_jobs_stay_in_float32_on_a_gpu():
    """Those that were slower than torch.nn's, with all weights cast in every call."""
    assert on_paper(nn.RNN(114, 177, 3), 90, 352)
    assert on_paper(nn.RNN(357, 357, 3), 12, 16, keeps=False)
    assert on_paper(nn.RNN(17, 17, 2), 200, 12, keeps=False)
    assert on_paper(nn.RNN(1, 27), 5, 119)
    assert on_paper(nn.LSTM(64, 64), 35, 8, torch.float16)


def test_a_few_steps_that_would_be_cast_and_widened_stay_in_float32(monkeypatch):
    """On the GPU one step of an lstm took 148 µs in float32, 608 cast, 446 by torch.nn."""
    cuda = choice._load("cuda")
    monkeypatch.setattr(
        choice,
        "_refusal",
        lambda kernel, job: (
            "too wide" if (kernel, job.whole.dtype) == (cuda, torch.float32) else None
        ),
    )
    assert on_paper(nn.LSTM(2, 1529), 1, 390, keeps=False)
    assert on_paper(nn.GRU(2, 1529), 1, 390, keeps=False)
    assert on_paper(nn.LSTM(64, 1529), 3, 390, keeps=False)
    assert not on_paper(nn.GRU(8, 821), 12, 266, keeps=False)


@pytest.mark.usefixtures("every_kernel")
def test_large_jobs_are_cast_on_a_gpu():
    assert not on_paper(nn.LSTM(1024, 1024), 200, 256)
    assert not on_paper(nn.GRU(700, 700), 500, 64, torch.float16)


def test_launches_that_both_would_wait_for_decide_nothing(monkeypatch):
    """By prices; on the GPU float32 took 59 ms and bfloat16 48, 8.9 and 5.8."""
    cuda = choice._load("cuda")
    monkeypatch.setattr(
        choice, "_refusal", lambda kernel, _: "too wide" if kernel is cuda else None
    )
    assert not on_paper(nn.LSTM(340, 1135, 2), 817, 75, keeps=False)
    assert not on_paper(nn.LSTM(89, 968, 3), 25, 496)


@pytest.mark.usefixtures("every_kernel")
def test_what_is_not_captured_is_cast_on_a_gpu():
    small = nn.RNN(8, 16)
    assert on_paper(small, 5, 4)
    assert not on_paper(small, 5, 4, apart="its carry cuts")
    assert not on_paper(small, 5, 4, window=2)
    assert not on_paper(nn.RNN(8, 16, nonlinearity="linear"), 5, 4)


def test_nothing_stays_in_float32_where_no_gpu_kernel_runs():
    module, x = nn.GRU(5, 19), torch.randn(6, 7, 5)
    assert not kernels.is_sooner(module.job(x), module.job(x))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A call under autocast as a GPU's would be run, on a CPU."""

    def call(module, x, state=None):
        with monkeypatch.context() as patch, torch.autocast("cpu", BFLOAT16):
            patch.setattr(type(module), "_stays_in_float32", lambda *_: True)
            done = module._autocast_call(x, state)
            assert torch.is_autocast_enabled("cpu")
        return [done[0], *done[1]]

    return call


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_what_stays_in_float32_is_cast_when_it_comes_out(kind, dtype, as_on_a_gpu):
    module, x = kind(5, 19, 2, batch_first=True), torch.randn(6, 7, 5).to(dtype)
    first = state_of(module, 6, dtype)
    exact = outputs(module, x.float(), widened(first), dtype=None)
    found = as_on_a_gpu(module, x, first if isinstance(first, tuple) else (first,))
    assert same(found, [t.bfloat16() for t in exact])
    for outs in (found, exact):
        module.zero_grad()
        torch.stack([t.float().sum() for t in outs]).sum().backward()
        outs.append([p.grad.clone() for p in module.parameters()])
    assert same(found[-1], exact[-1])


def test_autocast_goes_on_after_an_error(as_on_a_gpu):
    with torch.autocast("cpu", BFLOAT16):
        with pytest.raises(UserError):
            as_on_a_gpu(nn.GRU(5, 19), torch.zeros(6, 7, 4))
        assert torch.is_autocast_enabled("cpu")
        assert torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == BFLOAT16


@pytest.mark.parametrize(("cannot", "sooner"), [("float32", False), ("bfloat16", True)])
def test_a_kernel_asked_for_by_name_runs_the_dtype_it_can(cannot, sooner, monkeypatch):
    """1528 units of float32 do not fit the GPU, but do in bfloat16, to which autocast goes."""
    monkeypatch.setenv("ELMAN_KERNELS", "cuda")
    dtype = getattr(torch, cannot)
    monkeypatch.setattr(
        choice, "_refusal", lambda _, job: "too wide" if job.whole.dtype is dtype else None
    )
    assert on_paper(nn.LSTM(8, 1528), 20, 64) is sooner
