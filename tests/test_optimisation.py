"""A step taken directly is torch's to the last bit; native clipping is the notes' projection."""

import math
from contextlib import suppress

import pytest
import torch
from torch import nn

from elman.errors import UserError
from elman.kernels.cpu import KERNEL
from elman.training import optimisation
from elman.training.optimisation import (
    ENOUGH,
    Optimisation,
    Optimizer,
    _worthwhile_threads,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    take_step,
)

TORCHS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 130), nn.Tanh(), nn.Linear(130, 3))


def descend(model, optimizer, steps=4, take=take_step):
    x = torch.randn(9, 7, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        take(optimizer)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("name", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0), ("adamw", 0.0)]
)
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_steps_are_torchs_to_the_last_bit(name, momentum, decay):
    ours, theirs = network(), network()
    how = Optimisation(name, 0.01, momentum=momentum, weight_decay=decay)
    biases = [p for p in theirs.parameters() if p.dim() < 2]
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": decay},
        {"params": biases, "weight_decay": 0.0},
    ]
    options = {"momentum": momentum} if name == "sgd" else {}
    torchs = TORCHS[name](groups, 0.01, fused=True, **options)
    found = descend(ours, build_optimizer(ours, how))
    for a, b in zip(found, descend(theirs, torchs, take=TORCHS[name].step), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", TORCHS)
def test_a_saved_optimiser_goes_on_where_it_stopped(name):
    whole, first = network(), network()
    expected = descend(whole, build_optimizer(whole, Optimisation(name, 0.01)), 6)
    before = build_optimizer(first, Optimisation(name, 0.01))
    descend(first, before, 3)
    second = network()
    second.load_state_dict(first.state_dict())
    after = build_optimizer(second, Optimisation(name, 0.01))
    after.load_state_dict(before.state_dict())
    for a, b in zip(descend(second, after, 3), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 16384, 50_001])
def test_clipping_scales_everything_to_the_norm(dtype, size):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (size, 3, 40)]
    for p in parameters:
        p.grad = torch.randn(p.shape).to(dtype)
    before = [p.grad.double().clone() for p in parameters]
    norm = torch.cat(before).norm().item()
    close = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 0.02}[dtype]
    assert clip_gradients(parameters, None) == pytest.approx(norm, rel=close)
    assert clip_gradients(parameters, 2 * norm) == pytest.approx(norm, rel=close)
    assert all(torch.equal(p.grad.double(), b) for p, b in zip(parameters, before, strict=True))
    clip_gradients(parameters, norm / 3)
    for p, b in zip(parameters, before, strict=True):
        torch.testing.assert_close(p.grad.double(), b / 3, rtol=close, atol=0)


def test_a_norm_is_the_same_on_any_number_of_threads_and_not_finite_where_a_gradient_is_not():
    torch.manual_seed(0)
    p, before = nn.Parameter(torch.zeros(300_001)), torch.get_num_threads()
    p.grad = torch.randn(300_001) * 1e20  # whose squares float32 cannot hold
    norms = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            norms.add(clip_gradients([p], None))
    finally:
        torch.set_num_threads(before)
    assert len(norms) == 1
    if KERNEL.library is not None:
        assert norms.pop() == pytest.approx(p.grad.double().norm().item())
    p.grad[7] = math.inf
    assert clip_gradients([p], 1.0) == math.inf
    p.grad[7] = math.nan
    assert math.isnan(clip_gradients([p], 1.0))


@pytest.mark.parametrize(
    ("sizes", "busy", "used"),
    [((5, 5), False, 1), ((ENOUGH - 1, 1), False, 2), ((ENOUGH,), True, 1)],
    ids=["few", "many", "beside others"],
)
def test_threads_are_woken_where_they_are_worth_it_and_are_as_before_after_it(
    sizes, busy, used, monkeypatch
):
    monkeypatch.setattr(type(KERNEL), "is_machine_busy", lambda kernel: busy)
    before, seen = torch.get_num_threads(), []
    weights = [torch.zeros(n) for n in sizes]
    try:
        torch.set_num_threads(2)
        with suppress(ZeroDivisionError), _worthwhile_threads(weights):
            seen.append(torch.get_num_threads())
            raise ZeroDivisionError
        seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert seen == [used, 2]


def test_gradients_that_lie_scattered_are_clipped_too():
    p = nn.Parameter(torch.zeros(4, 6))
    p.grad = torch.ones(6, 4).T
    assert clip_gradients([p], 1.0) == pytest.approx(24**0.5)
    torch.testing.assert_close(p.grad.norm(), torch.tensor(1.0))


@pytest.mark.parametrize("theta", [0.0, -1.0, math.nan])
def test_a_gradient_is_clipped_to_a_length_above_zero(theta):
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.ones(4)
    with pytest.raises(UserError, match="must be above 0; theta=None never clips"):
        clip_gradients([p], theta)
    assert p.grad.tolist() == [1.0] * 4  # nothing was turned around


def test_clipping_comes_after_the_backward_pass():
    with pytest.raises(UserError, match=r"no parameter has a gradient to clip; loss.backward\(\)"):
        clip_gradients([nn.Parameter(torch.zeros(4))], 1.0)


@pytest.mark.parametrize(
    "build",
    [
        lambda groups: torch.optim.Adam(groups, 0.01, amsgrad=True, fused=True),
        lambda groups: torch.optim.AdamW(groups, 0.01, maximize=True, fused=True),
        lambda groups: torch.optim.Adam(groups, 0.01, foreach=False),
        lambda groups: torch.optim.SGD(groups, 0.01, momentum=0.9, nesterov=True, fused=True),
        lambda groups: torch.optim.SGD(groups, 0.01, maximize=True, fused=True),
        lambda groups: torch.optim.RMSprop(groups, 0.01),
        lambda groups: torch.optim.NAdam(groups, 0.01),
    ],
)
def test_what_the_direct_step_does_not_do_is_left_to_torch(build):
    ours, theirs = network(), network()
    found = descend(ours, build(ours.parameters()), 6)
    expected = descend(
        theirs, build(theirs.parameters()), 6, take=lambda optimizer: optimizer.step()
    )
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_a_norm_is_of_the_gradients_that_there_are():
    with_one, without = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    with_one.grad = torch.tensor([3.0, 4.0])
    assert gradient_norm([without, with_one]).item() == 5
    assert clip_gradients([without, with_one], 1.0) == 5
    assert without.grad is None
    torch.testing.assert_close(with_one.grad, torch.tensor([0.6, 0.8]))


def test_a_new_optimizer_is_one_entry_in_the_table(monkeypatch):
    monkeypatch.setitem(optimisation.OPTIMIZERS, "rmsprop", Optimizer(torch.optim.RMSprop))
    ours, theirs = network(), network()
    found = descend(ours, build_optimizer(ours, Optimisation("rmsprop", 0.01)))
    for a, b in zip(
        found,
        descend(
            theirs, torch.optim.RMSprop(theirs.parameters(), 0.01), take=torch.optim.RMSprop.step
        ),
        strict=True,
    ):
        assert torch.equal(a, b)
    with pytest.raises(UserError, match=r"momentum=0.9 means nothing with optimizer=rmsprop"):
        Optimisation("rmsprop", momentum=0.9)
