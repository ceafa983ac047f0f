"""What each carry's ξ is: where it cuts, that it averages to one, that its draws can be resumed."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elman import nn
from elman.errors import UserError
from elman.gradients import Full, Polynomial, Randomized, Sliding, Truncated

RANDOM = [
    Randomized(keep=0.6, seed=1),
    Randomized(keep=[1.0, 0.2, 0.5, 0.9, 1.0, 0.3, 0.7, 0.8], seed=2),
    Randomized.polynomial(mean=3, alpha=2.5, seed=3),
]


@given(steps=st.integers(1, 30), window=st.integers(1, 12))
def test_truncation_cuts_on_entering_each_later_window(steps, window):
    xi = Truncated(window).weights(steps).tolist()
    assert xi == [0.0 if t > 0 and t % window == 0 else 1.0 for t in range(steps)]


@pytest.mark.parametrize("carry", [Full(), Truncated(1), *RANDOM], ids=repr)
def test_the_callers_first_state_is_never_cut(carry):
    assert all(carry.weights(8)[0] == 1 for _ in range(20))


def test_full_carries_everything_and_takes_no_memory():
    xi = Full().weights(10**6)
    assert xi.shape == (10**6,)
    assert xi.untyped_storage().nbytes() == 8
    assert bool((xi == 1).all())


@pytest.mark.parametrize("carry", RANDOM, ids=repr)
def test_a_random_xi_and_every_product_of_them_average_to_one(carry):
    # Five standard errors, eight moments and seven products, three carries, seeded: false alarms
    # at 45 × 6e-7, were the seed not fixed.
    draws = torch.stack([carry.weights(8) for _ in range(6_000)])
    products = torch.cat([draws, draws[:, 1:].cumprod(1)], 1)
    error = products.std(0) / len(draws) ** 0.5
    assert bool(((products.mean(0) - 1).abs() <= 5 * error + 1e-12).all())
    assert bool((draws == 0).any())


def test_a_sequence_of_probabilities_is_one_per_step():
    carry = Randomized(keep=[0.5, 1.0, 0.25], seed=0)
    draws = torch.stack([carry.weights(3) for _ in range(200)])
    assert set(draws[:, 1].tolist()) == {1.0}
    assert set(draws[:, 2].tolist()) == {0.0, 4.0}
    with pytest.raises(UserError, match="keep has 3 probabilities for a sequence of 4 steps"):
        carry.weights(4)


def test_every_draw_is_fresh_and_a_seed_repeats_them():
    one, two = Randomized(0.5, seed=9), Randomized(0.5, seed=9)
    first = [one.weights(50) for _ in range(3)]
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(a, two.weights(50)) for a in first)


def test_without_a_seed_torchs_generator_gives_one():
    torch.manual_seed(3)
    one = Randomized(0.5)
    torch.manual_seed(3)
    assert one == Randomized(0.5)
    assert one != Randomized(0.5)


def test_draws_resume_from_a_saved_state_and_go_with_a_copy():
    carry = Randomized(0.5, seed=4)
    carry.weights(9)
    state, twin = carry.state(), copy.deepcopy(carry)
    wanted = [carry.weights(9) for _ in range(3)]
    assert all(torch.equal(w, twin.weights(9)) for w in wanted)
    other = Randomized(0.5, seed=77)
    other.restore(state)
    assert all(torch.equal(w, other.weights(9)) for w in wanted)


def test_rows_may_be_cut_together_or_each_by_itself():
    assert Randomized(0.5, seed=0).weights(20, rows=6).shape == (20,)
    xi = Randomized(0.5, seed=0, per_row=True).weights(20, rows=6)
    assert xi.shape == (20, 6)
    assert not torch.equal(xi[:, 0], xi[:, 1])


@pytest.mark.parametrize(("mean", "alpha"), [(1.5, 2), (2, 2.5), (7, 4), (30, 3)])
def test_polynomial_cuts_are_mean_steps_apart(mean, alpha):
    # by its definition, Σ_l P(distance > l), the tail beyond 2·10⁶ steps being below 10⁻⁴
    survival = torch.from_numpy(Polynomial(mean, alpha).keep(2_000_000)).cumprod(0)
    assert 1 + survival.sum().item() == pytest.approx(mean, rel=1e-4)


def test_polynomial_cuts_are_as_far_apart_when_drawn():
    draws = Randomized.polynomial(mean=7, alpha=4, seed=0).weights(400_000)
    cuts = int((draws == 0).sum())
    assert len(draws) / cuts == pytest.approx(7, rel=0.02)  # eight standard errors


def test_polynomial_weights_grow_polynomially():
    law = Polynomial(mean=10, alpha=3)
    weight = 1 / torch.from_numpy(law.keep(4000)).cumprod(0)
    assert (weight[3999] / weight[1999]).item() == pytest.approx(2**3, rel=0.05)


@given(steps=st.integers(1, 25), every=st.integers(1, 6), more=st.integers(0, 6))
def test_sliding_blocks_cover_every_loss_once_inside_their_windows(steps, every, more):
    for both_ways in (False, True):
        blocks = list(Sliding(every, every + more).blocks(steps, both_ways))
        losses = [t for b in blocks for t in range(b.first, b.last)]
        assert losses == list(range(steps))
        assert all(b.start <= b.first and b.last <= b.stop for b in blocks)
        assert all(b.last - b.start <= every + more for b in blocks)
        assert all(b.start == 0 or b.last - b.start == every + more for b in blocks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_xi_of_each_row_is_taken_in_half_precision_too(dtype, monkeypatch):
    """The float32 ξ once made a float32 pull of a half precision one, which then met no weights."""
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    torch.manual_seed(0)
    xs, grads = torch.randn(9, 2, 4, dtype=dtype), []
    wide = nn.GRU(4, 5, carry=Randomized(keep=0.5, seed=3, per_row=True), dtype=torch.float64)
    for kind in (dtype, torch.float64):
        gru = nn.GRU(4, 5, carry=Randomized(keep=0.5, seed=3, per_row=True), dtype=kind)
        gru.load_state_dict({n: p.to(dtype) for n, p in wide.state_dict().items()})
        gru(xs.to(kind))[0].sum().backward()
        grads.append(gru.weight_hh_l0.grad.double())
    error = (grads[0] - grads[1]).norm() / grads[1].norm()
    assert error < 18 * torch.finfo(dtype).eps  # a rounding or two in each of nine steps


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Truncated(window=0), "window=0 must be a whole number of at least 1"),
        (lambda: Truncated(window=-3), "window=-3"),
        (lambda: Truncated(window=2.5), "window=2.5"),
        (lambda: Truncated(window=True), "window=True"),
        (lambda: Sliding(every=0, steps=3), "every=0"),
        (lambda: Sliding(every=2, steps=2.5), "steps=2.5 must be a whole number"),
        (lambda: Sliding(every=4, steps=3), "steps=3 must be at least every=4"),
        (lambda: Randomized(keep=0.0), "keep=0.0 must be a probability above 0 and at most 1"),
        (lambda: Randomized(keep=1.1), "keep=1.1"),
        (lambda: Randomized(keep=[0.5, -0.1]), "keep=-0.1"),
        (lambda: Randomized(keep=[]), "keep is empty"),
        (lambda: Randomized(keep=float("nan")), "keep=nan"),
        (lambda: Randomized.polynomial(mean=1, alpha=3), "mean=1 must be above 1"),
        (lambda: Randomized.polynomial(mean=5, alpha=1), "alpha=1 must be above 1"),
        (lambda: Randomized.polynomial(mean=5, alpha=math.inf), "alpha=inf must be above 1"),
    ],
)
def test_impossible_carries_are_refused(make, said):
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        make()
