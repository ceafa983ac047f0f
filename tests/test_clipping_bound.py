"""The Lipschitz bound behind clipping: |f(w) - f(w - ηg)| ≤ L η ‖g‖, measured."""

import pytest
import torch

from elman import LanguageModel
from elman.diagnostics import step_bound
from elman.errors import UserError


def test_on_a_plane_the_bound_is_met_exactly():
    slope = torch.tensor([3.0, 4.0], dtype=torch.float64)
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    found = step_bound(lambda: (slope * w).sum(), [w], rate=0.1)
    assert found.norm == pytest.approx(5)
    assert found.length == pytest.approx(0.5)
    assert found.change == pytest.approx(found.bound) == pytest.approx(2.5)
    clipped = step_bound(lambda: (slope * w).sum(), [w], rate=0.1, theta=1.0)
    assert clipped.norm == pytest.approx(5)
    assert clipped.change == pytest.approx(0.5)
    assert w.tolist() == [1.0, 2.0]


def test_on_a_bowl_the_steepest_point_of_the_way_counts():
    """f = w²/2 from 1 with rate 3 lands at -2, where the slope is steepest."""
    w = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    found = step_bound(lambda: (w * w / 2).sum(), [w], rate=3.0)
    assert found.constant == pytest.approx(2)
    assert found.change == pytest.approx(1.5)
    assert found.length == pytest.approx(3)
    assert found.change < found.bound


def test_a_cliff_in_the_middle_of_the_way_is_found():
    """f = w + 5 tanh(5w - 2.5): as gentle at both ends, 0 and 1, as it is steep between them."""
    w = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)

    def loss():
        return (w + 5 * torch.tanh(5 * w - 2.5)).sum()

    (slope,) = torch.autograd.grad(loss(), [w])
    found = step_bound(loss, [w], rate=1 / slope.item())
    assert found.norm == pytest.approx(slope.item())
    assert found.constant == pytest.approx(26)  # at 0.5
    assert found.norm * found.length < found.change < found.bound


@pytest.mark.parametrize("rate", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("theta", [None, 0.1])
def test_no_step_of_a_network_exceeds_it(rate, theta):
    torch.manual_seed(0)
    model = LanguageModel(7, cell="elman", hidden_size=8).double()
    with torch.no_grad():
        model.recurrence.weight_hh_l0.mul_(6)  # far from flat
    ids = torch.randint(7, (1, 31))

    def loss():
        logits, _ = model(ids[:, :-1])
        return torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])

    before = {name: p.clone() for name, p in model.named_parameters()}
    found = step_bound(loss, list(model.parameters()), rate, theta, points=129)
    assert 0 < found.change <= found.bound
    assert found.length <= rate * (theta or found.norm) * (1 + 1e-12)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_parameters_come_back_even_when_the_loss_fails_on_the_way():
    w = torch.tensor([1.0], requires_grad=True)
    calls = []

    def loss():
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("no more")
        return (w * w).sum()

    with pytest.raises(RuntimeError, match="no more"):
        step_bound(loss, [w], 0.1)
    assert w.item() == 1.0


@pytest.mark.parametrize("change", [{"rate": 0.0}, {"points": 1}, {"theta": 0.0}])
def test_refusals(change):
    w = torch.ones(1, requires_grad=True)
    ((name, value),) = change.items()
    with pytest.raises(UserError, match=f"{name}={value} must be"):
        step_bound(lambda: w.sum(), [w], **{"rate": 0.1, **change})


def test_frozen_parameters_stay_and_what_has_no_part_in_the_loss_has_no_gradient():
    w, frozen, idle = torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(2)
    idle.requires_grad_()
    alone = step_bound(lambda: (w * frozen).square().sum(), [w], 0.1)
    among = step_bound(lambda: (w * frozen).square().sum(), iter([frozen, w, idle]), 0.1)
    assert among == alone
    assert torch.equal(frozen, torch.ones(2))
    with pytest.raises(UserError, match="no step can be taken"):
        step_bound(lambda: frozen.sum(), [frozen], 0.1)
