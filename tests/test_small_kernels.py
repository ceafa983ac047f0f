"""The small kernels of an update on a GPU: the loss, gradients of tokens, the judge of a step."""

import math

import pytest
import torch

from elman.cells import Weights
from elman.kernels import products
from elman.kernels.cuda import small
from elman.language_model.loss import linear_cross_entropy, nats_of_each

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def distance(found, exact):
    """‖found - exact‖ / ‖exact‖."""
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize(
    ("steps", "batch", "size"),
    [(1, 1, 1), (35, 32, 28), (7, 3, 1000), (5, 3, 2049), (2, 2, 40_001)],
)
def test_the_loss_and_its_gradient_are_torchs(dtype, steps, batch, size):
    torch.manual_seed(0)
    logits = (3 * torch.randn(steps * batch, size, device="cuda")).to(dtype)
    targets = torch.randint(size, (batch, steps), device="cuda").T  # not in one piece
    targets[0, 0] = -100  # torch's mark of a row that does not count
    wide = logits.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(wide, targets.flatten())
    found = small.nats(logits, targets)
    if steps * batch == 1:  # nothing counts
        assert math.isnan(found.out[0])
        assert math.isnan(exact.detach())
        return
    exact.backward(torch.tensor(2.5, device="cuda", dtype=torch.float64))
    pull = small.nats_back(logits, targets, found, torch.tensor(2.5, device="cuda"))
    # exp, log and a sum of `size` numbers in float32, each a few roundings; then one to the dtype
    bound = 8 * (1 + math.sqrt(size)) * 2.0**-24
    nats = float(exact.detach())
    assert abs(float(found.out[0]) - nats) <= bound * (1 + nats)
    assert distance(pull, wide.grad) <= bound * 4 + ROUNDOFF[dtype]
    again = small.nats(logits, targets)
    assert torch.equal(found.out, again.out)


@pytest.mark.parametrize("size", [50, 3000])
def test_logits_without_bounds_are_summed_as_torch_sums_them(size):
    rows = torch.randn(6, size, device="cuda")
    rows[0, : size // 2 + 1100] = -math.inf
    rows[0, 7] = 1.5
    rows[1, 1:] = -math.inf
    rows[2] += 1e30
    rows[3, 5] = math.nan
    rows[4, 5] = math.inf
    found = small.nats(rows, torch.zeros(6, 1, dtype=torch.int64, device="cuda")).lse[:6]
    exact = rows.double().logsumexp(1)
    torch.testing.assert_close(found[:3].double(), exact[:3], rtol=1e-6, atol=0)
    assert found[3].isnan()
    assert not found[4].isfinite()
    torch.testing.assert_close(found[5].double(), exact[5], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize("cell_gates", [1, 4])
@pytest.mark.parametrize("vocabulary", [2, 28, 250])
def test_gradients_of_tokens_are_sums_of_rows(dtype, cell_gates, vocabulary):
    torch.manual_seed(0)
    das = torch.randn(1120, cell_gates * 72, device="cuda").to(dtype)
    ids = torch.randint(vocabulary, (1120,), device="cuda")
    found = small.columns(das, ids, vocabulary)
    assert found is not None
    dW, db = found
    one_hot = torch.nn.functional.one_hot(ids, vocabulary).double()
    bound = math.sqrt(1120) * 2.0**-24  # a sum of 1120 numbers in float32
    assert distance(dW, das.double().T @ one_hot) <= bound
    assert distance(db, das.double().sum(0)) <= 4 * bound
    part = small.columns(das[:, :40], ids, vocabulary)
    assert part is not None
    assert torch.equal(part[0], dW[:40])
    assert small.columns(das, ids, small.FEW_TOKENS + 1) is None
    assert torch.equal(small.rows_of_tokens(das, ids, vocabulary), found[0].T)


def test_the_judge_sums_every_gradient_and_remembers_a_failure():
    torch.manual_seed(0)
    gradients = [torch.randn(n, device="cuda") for n in (1, 70_000, 256, 3)]
    exact = torch.cat(gradients).double().norm()
    judge = small.Judge(torch.device("cuda", 0), clip=1.0, places=4)

    def judged(loss):
        judge(gradients, torch.tensor(loss, device="cuda"))
        torch.cuda.synchronize()
        return float(judge.scale), float(judge.refuse), bool(judge.broken)

    scale, refuse, broken = judged(3.0)
    assert scale == pytest.approx(float(exact), rel=1e-7)
    assert (refuse, broken) == (0, False)
    assert judge.told[0].tolist() == [3.0, pytest.approx(float(exact), rel=1e-7)]
    assert judged(math.nan)[1:] == (1, True)
    assert judged(2.0)[1:] == (1, True)  # an update after one that failed
    assert judge.told[2][0] == 2.0
    judge.forgive()
    gradients[1][69_999] = math.inf
    assert judged(2.0)[1:] == (1, True)
    gradients[1][69_999] = 0.0
    judge.forgive()
    assert judged(1.0)[1:] == (0, False)
    assert judge.told[0][0] == 1.0  # the fifth update takes the place of the first
    unclipped = small.Judge(torch.device("cuda", 0), clip=None, places=1)
    unclipped(gradients, torch.zeros((), device="cuda"))
    assert float(unclipped.scale) == 1


@pytest.mark.parametrize("share", [1.0, 0.5, 0.499, 0.001, 0.0])
def test_an_average_takes_weights_in_as_torchs_lerp_does(share):
    torch.manual_seed(0)
    sizes = [(1,), (1024,), (1025,), (700, 900), (3, 5)]
    weights = [torch.randn(s, device="cuda") for s in sizes]
    averages = [torch.randn(s, device="cuda") for s in sizes]
    before, expected = ([a.clone() for a in averages] for _ in range(2))
    torch._foreach_lerp_(expected, weights, share)
    told, broken = (torch.tensor(x, device="cuda") for x in (share, True))
    small.take_in(averages, weights, told, broken)
    assert all(map(torch.equal, averages, before)), "the step was refused"
    small.take_in(averages, weights, told, ~broken)
    assert all(map(torch.equal, averages, expected))


@pytest.mark.parametrize("cast", [False, True])
def test_the_output_layer_has_torchs_gradients(cast):
    torch.manual_seed(0)
    hs = torch.randn(35, 8, 64, device="cuda", requires_grad=True)
    W, b = torch.randn(28, 64, device="cuda"), torch.randn(28, device="cuda")
    W, b = (t.requires_grad_() for t in (0.2 * W, b))
    targets = torch.randint(28, (35, 8), device="cuda")
    wide = [t.detach().double().requires_grad_() for t in (hs, W, b)]
    logits = torch.nn.functional.linear(*wide)
    exact = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    with torch.autocast("cuda", torch.bfloat16, enabled=cast):
        found = linear_cross_entropy(hs, W, b, targets)
    wanted = torch.autograd.grad(exact, wide)
    u = 2.0**-8 if cast else 2.0**-11 * 2  # products of float32 may be in TF32
    assert found.dtype == torch.float32
    for d, e in zip(torch.autograd.grad(found, [hs, W, b]), wanted, strict=True):
        assert distance(d, e) <= 4 * u
    seen = linear_cross_entropy(hs, W, b, targets)
    (dh,) = torch.autograd.grad(seen, hs, create_graph=True)
    assert torch.autograd.grad(dh.square().sum(), W)[0].abs().sum() > 0


def test_weight_pulls_take_what_was_summed_already():
    das, hs = torch.randn(12, 3, 8), torch.randn(12, 3, 8)
    ids = torch.randint(5, (12, 3))
    w = Weights(torch.zeros(8, 5), torch.zeros(8, 8), torch.zeros(8), torch.zeros(8))
    plain = products.weight_pulls(w, ids, hs, das, [das])
    read = products.weight_pulls(w, ids, hs, das, [das], (plain.W_ih, plain.b_ih))
    for a, b in zip(plain, read, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("size", [1, 2, 31, 1000, 1024, 1025, 60_001])
@pytest.mark.parametrize("rows", [1, 5])
def test_running_sums_are_right_and_the_same_twice(size, rows):
    torch.manual_seed(0)
    x = torch.rand(rows, size, dtype=torch.float64, device="cuda").pow_(8)
    found = small.running(x)
    torch.testing.assert_close(found.cpu(), x.cpu().cumsum(-1), rtol=1e-13, atol=0)
    assert all(torch.equal(found, small.running(x)) for _ in range(20))


@pytest.mark.parametrize("dtype", ROUNDOFF)
def test_the_nats_of_each_target_are_torchs(dtype):
    torch.manual_seed(0)
    hs, W = torch.randn(9, 4, 32, device="cuda"), torch.randn(700, 32, device="cuda")
    b, targets = torch.randn(700, device="cuda"), torch.randint(700, (9, 4), device="cuda")
    hs, W, b = hs.to(dtype), W.to(dtype), b.to(dtype)
    logits = torch.nn.functional.linear(hs, W, b).double()
    exact = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    found = nats_of_each(hs, W, b, targets)
    torch.testing.assert_close(found.flatten().double(), exact, rtol=1e-5, atol=1e-5)
