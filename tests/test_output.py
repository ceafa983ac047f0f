"""The fused output layer: `linear` and `cross_entropy`, to rounding."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, linear

from elman.errors import OutOfRange, UserError
from elman.kernels.cpu import KERNEL
from elman.kernels.cpu.library import HALF
from elman.language_model import loss as output
from elman.language_model.loss import linear_cross_entropy, nats_of_each


@st.composite
def problems(draw, dtype=torch.float64):
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = draw(st.sampled_from([(1,), (7,), (5, 3), (35, 32), (67, 2), (2, 3, 4)]))
    H, V = draw(st.integers(1, 70)), draw(st.sampled_from([1, 2, 15, 28, 33, 100]))

    def normal(*size):
        return torch.randn(*size, generator=random, dtype=dtype).requires_grad_()

    b_q = normal(V) if draw(st.booleans()) else None
    return normal(*shape, H), normal(V, H), b_q, torch.randint(V, shape, generator=random)


def torchs(hs, W_hq, b_q, targets):
    return cross_entropy(linear(hs, W_hq, b_q).flatten(0, -2), targets.flatten())


def gradients(loss, hs, W_hq, b_q, scale):
    wanted = [t for t in (hs, W_hq, b_q) if t is not None]
    return torch.autograd.grad(loss, wanted, torch.tensor(scale, dtype=loss.dtype))


@given(problem=problems(), scale=st.sampled_from([1.0, -0.3]))
@settings(max_examples=60)
def test_loss_and_gradients_are_those_of_torch(problem, scale):
    *inputs, _ = problem
    ours, theirs = linear_cross_entropy(*problem), torchs(*problem)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    for a, b in zip(
        gradients(ours, *inputs, scale), gradients(theirs, *inputs, scale), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("piece", [1, 60, 10**6], ids="{} logits at a time".format)
@given(problem=problems(), scale=st.sampled_from([1.0, -0.3]))
@settings(max_examples=20)
def test_many_logits_a_piece_at_a_time_give_the_same(piece, problem, scale):
    *inputs, _ = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "LARGE", 0)
        patch.setattr(output, "PIECE", piece)
        patch.setattr(output, "_is_native", lambda *_: False)
        ours, theirs = linear_cross_entropy(*problem), torchs(*problem)
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
        pairs = zip(gradients(ours, *inputs, scale), gradients(theirs, *inputs, scale), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("half", [False, True])
def test_pieces_under_autocast_are_as_close_as_torch(monkeypatch, half):
    monkeypatch.setattr(output, "LARGE", 0)
    monkeypatch.setattr(output, "PIECE", 28 * 50)
    monkeypatch.setattr(output, "_is_native", lambda *_: False)
    torch.manual_seed(0)
    exact = [torch.randn(35, 32, 64), torch.randn(28, 64) / 8, torch.randn(28)]
    targets = torch.randint(28, (35, 32))
    wide = [t.double().requires_grad_() for t in exact]
    truth = gradients(torchs(*wide, targets), *wide, 1.0)
    errors = []
    for loss in (linear_cross_entropy, torchs):
        narrow = [t.clone().requires_grad_() for t in exact]
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            found = loss(*narrow, targets)
        pulls = gradients(found, *narrow, 1.0)
        errors.append([(f - e).norm() / e.norm() for f, e in zip(pulls, truth, strict=True)])
    sums = (35 * 32 / 50) ** 0.5 * 2**-24  # each piece rounds the sum so far once more, at random
    assert all(ours <= 1.2 * theirs + sums for ours, theirs in zip(*errors, strict=True))


def test_many_logits_are_a_piece_at_a_time_in_native_code_too():
    random = torch.Generator().manual_seed(0)
    hs, W_hq, b_q = (
        torch.randn(*shape, generator=random, dtype=torch.float64, requires_grad=True)
        for shape in ((7, 60, 3), (20_011, 3), (20_011,))
    )
    targets = torch.randint(20_011, (7, 60), generator=random)
    problem = hs, W_hq, b_q, targets
    ours, theirs = linear_cross_entropy(*problem), torchs(*problem)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    pairs = zip(
        gradients(ours, *problem[:3], 1.0), gradients(theirs, *problem[:3], 1.0), strict=True
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@given(problem=problems())
@settings(max_examples=40)
def test_the_nats_of_each_target_are_torchs(native, problem):
    hs, W_hq, b_q, targets = (None if t is None else t.detach() for t in problem)
    rows = linear(hs, W_hq, b_q).flatten(0, -2)
    theirs = cross_entropy(rows, targets.flatten(), reduction="none").view(targets.shape)
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(output, "_is_native", lambda *_: False)
            patch.setattr(output, "PIECE", 60)
        ours = nats_of_each(hs, W_hq, b_q, targets)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def resident(name):
    """Bytes of this process: VmRSS now, VmHWM at most."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", status)[1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells and resets it")
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_memory_does_not_grow_with_the_vocabulary_times_the_rows(native, monkeypatch):
    """Rows × vocabulary is 67 million logits, 268 MB; the gradient itself has 2 MB."""
    if not native:
        monkeypatch.setattr(output, "_is_native", lambda *_: False)
    hs = torch.randn(4096, 16, requires_grad=True)
    W_hq = torch.randn(16384, 16, requires_grad=True)
    targets, grown = torch.randint(16384, (4096,)), 0
    for _ in range(2):  # once for what torch keeps from its first products on
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        before = resident("VmRSS")
        linear_cross_entropy(hs, W_hq, None, targets).backward()
        grown = resident("VmHWM") - before
    assert grown < 134 << 20, "half of the logits"


def test_float32_is_as_close_to_float64_as_torch_is():
    torch.manual_seed(0)
    exact = [torch.randn(35, 32, 64), torch.randn(28, 64), torch.randn(28)]
    targets = torch.randint(28, (35, 32))
    wide = [t.double().requires_grad_() for t in exact]
    narrow = [t.clone().requires_grad_() for t in exact]
    truth = gradients(torchs(*wide, targets), *wide, 1.0)
    ours = gradients(linear_cross_entropy(*narrow, targets), *narrow, 1.0)
    theirs = gradients(torchs(*narrow, targets), *narrow, 1.0)
    for o, t, e in zip(ours, theirs, truth, strict=True):
        assert (o - e).norm() < 1.2 * (t - e).norm()


@pytest.mark.parametrize("outputs", [3, 16, 41])
def test_one_logit_may_tower_above_the_others_wherever_it_is(outputs):
    hs, targets = torch.eye(outputs), torch.arange(outputs).roll(1)
    W_hq = (1e4 * hs).requires_grad_()
    ours, theirs = (f(hs, W_hq, None, targets) for f in (linear_cross_entropy, torchs))
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(nats, W_hq) for nats in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_extreme_logits_stay_finite_and_nan_is_seen():
    hs, targets = torch.eye(3), torch.tensor([0, 1, 2])
    W_hq = torch.tensor([[1e4, -1e4, 0.0], [0.0, 1e4, -1e4], [-1e4, 0.0, 1e4]])
    torch.testing.assert_close(
        linear_cross_entropy(hs, W_hq, None, targets), torchs(hs, W_hq, None, targets)
    )
    torch.testing.assert_close(
        linear_cross_entropy(hs, -W_hq, None, targets), torchs(hs, -W_hq, None, targets)
    )
    W_hq[1, 1] = torch.nan
    assert linear_cross_entropy(hs, W_hq, None, targets).isnan()


def test_its_gradient_can_be_differentiated_again():
    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (5, 3), 5)]
    targets = torch.tensor([0, 4, 2, 2])
    assert torch.autograd.gradgradcheck(lambda *t: linear_cross_entropy(*t, targets), inputs)


@pytest.mark.parametrize("create_graph", [False, True])
def test_states_may_be_made_of_its_own_weights(create_graph):
    """As with tied embeddings: what they pull was found twice where the gradient left a graph."""
    W_hq = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    ids, targets = torch.randint(7, (2, 4, 3))
    losses = [f(W_hq[ids].tanh(), W_hq, None, targets) for f in (linear_cross_entropy, torchs)]
    found, wanted = [torch.autograd.grad(x, W_hq, create_graph=create_graph) for x in losses]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_compiled_and_autocast_calls_are_torchs_own():
    torch.manual_seed(0)
    hs, W_hq, targets = torch.randn(6, 3), torch.randn(5, 3), torch.randint(5, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(
            linear_cross_entropy(hs, W_hq, None, targets), torchs(hs, W_hq, None, targets)
        )
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(hs, W_hq, None, targets), torchs(hs, W_hq, None, targets))


@pytest.mark.skipif(
    KERNEL.library is None or KERNEL.variant(HALF) is None, reason="no bfloat16 products"
)
def test_bfloat16_states_under_autocast_are_closer_to_float64_than_torchs():
    """torch rounds the logits themselves to bfloat16."""
    torch.manual_seed(0)
    exact = [torch.randn(35, 32, 64).bfloat16(), torch.randn(28, 64) / 8, torch.randn(28)]
    targets = torch.randint(28, (35, 32))
    wide = [t.double().requires_grad_() for t in exact]
    truth = torchs(*wide, targets)
    errors = []
    for loss in (linear_cross_entropy, torchs):
        narrow = [t.clone().requires_grad_() for t in exact]
        with torch.autocast("cpu", torch.bfloat16):
            found = loss(*narrow, targets)
        assert found.dtype == torch.float32
        pairs = zip(gradients(found, *narrow, 2.0), gradients(truth, *wide, 2.0), strict=True)
        errors.append([abs(found - truth), *((f - e).norm() / e.norm() for f, e in pairs)])
        truth = torchs(*wide, targets)
    assert all(ours <= theirs for ours, theirs in zip(*errors, strict=True))
    assert max(errors[0]) < 0.01


@pytest.mark.parametrize("half", [False, True])
def test_a_graph_that_is_kept_gives_the_gradient_again(half):
    torch.manual_seed(0)
    hs = torch.randn(6, 3, dtype=torch.bfloat16 if half else torch.float32).requires_grad_()
    W_hq, targets = torch.randn(5, 3, requires_grad=True), torch.randint(5, (6,))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = linear_cross_entropy(hs, W_hq, None, targets)
    once = torch.autograd.grad(loss, (hs, W_hq), retain_graph=True)
    again = torch.autograd.grad(loss, (hs, W_hq))
    for a, b in zip(once, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05 if half else 1e-5, atol=0.01 if half else 1e-6)


def test_states_without_targets_are_refused():
    with pytest.raises(UserError, match="no targets"):
        linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 4), None, torch.zeros(2).long())


@pytest.mark.parametrize("wrong", [7, 5, -1])
@pytest.mark.parametrize("large", [output.LARGE, 0], ids=["at once", "a piece at a time"])
def test_wrong_targets_are_refused(large, wrong, monkeypatch):
    monkeypatch.setattr(output, "LARGE", large)
    said = f"targets from {wrong} to {wrong} index 5 outputs; they lie between 0 and 4"
    with pytest.raises(OutOfRange, match=said):
        linear_cross_entropy(torch.zeros(1, 4), torch.zeros(5, 4), None, torch.tensor([wrong]))
