"""What is kept, what is computed again, and how much of each."""

import functools
import re
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elman import nn
from elman.errors import UserError
from elman.gradients import Checkpointed, Full, Randomized, Sliding, Stored, Truncated
from elman.gradients.memory import Plan, Sizes, cost, reversed_pieces, split


@functools.cache
def least(pieces: int, slots: int) -> int:
    """The dynamic program itself, by trying every place for the next kept state."""
    if pieces == 1:
        return 0
    if slots == 0:
        return pieces * (pieces - 1) // 2
    return min(j + least(pieces - j, slots - 1) + least(j, slots) for j in range(1, pieces))


def test_the_closed_form_is_the_dynamic_programs_optimum():
    for pieces in range(1, 60):
        for slots in range(10):
            assert cost(pieces, slots) == least(pieces, slots)
            if slots > 0 and pieces > 1:
                j = split(pieces, slots)
                wanted = least(pieces, slots)
                assert j + least(pieces - j, slots - 1) + least(j, slots) == wanted


@given(pieces=st.integers(1, 80), slots=st.integers(0, 12))
def test_a_schedule_visits_every_piece_backwards_at_the_least_cost(pieces, slots):
    plan, ran, most = Plan(pieces, 1, slots), 0, 0
    kept = {piece: piece for piece in plan.kept()}  # the state at the start of a piece: its number
    ran += max(kept)

    def advance(state, piece, later):
        nonlocal ran
        assert state == piece
        ran += later - piece
        return later

    order = []
    for piece, state in reversed_pieces(plan, kept, advance):
        assert state == piece
        order.append(piece)
        most = max(most, len(kept))
    assert order == list(reversed(range(pieces)))
    assert ran == least(pieces, slots)
    assert most <= slots + 1


@given(
    steps=st.integers(1, 5000),
    state=st.integers(1, 2000),
    step=st.integers(1, 9000),
    spare=st.integers(0, 200_000),
)
def test_a_plan_fits_its_budget(steps, state, step, spare):
    budget = 2 * state + step + spare
    plan = Checkpointed(budget=budget).plan(steps, lambda: Sizes(state, step))
    assert (plan.slots + 2) * state + plan.piece * step <= budget
    assert plan.pieces * plan.piece >= steps
    more = Checkpointed(budget=2 * budget).plan(steps, lambda: Sizes(state, step))
    assert recomputed(more) <= recomputed(plan) * 1.1 + plan.piece  # lengths are 10 % apart


def recomputed(plan: Plan) -> int:
    return (cost(plan.pieces, plan.slots) - (plan.pieces - 1)) * plan.piece


@pytest.mark.parametrize("kind", ["tanh", "gru", "lstm", "mgu"])
def test_a_batch_of_no_rows_fits_any_budget(kind):
    rnn = nn.of(kind, 3, 4, num_layers=2, memory=Checkpointed(budget=1))
    ys, _ = rnn(torch.zeros(5, 0, 3))
    ys.sum().backward()
    assert ys.shape == (5, 0, 4)
    assert all(p.grad is not None and not p.grad.any() for p in rnn.parameters())


def test_a_budget_for_everything_recomputes_nothing():
    plan = Checkpointed(budget=10**9).plan(1000, lambda: Sizes(100, 1000))
    assert plan.pieces == 1


def test_a_million_steps_are_planned_and_ordered_in_seconds():
    began = time.process_time()
    plan = Checkpointed(budget=1 << 16).plan(10**6, lambda: Sizes(256, 1024))
    kept = {piece: piece for piece in plan.kept()}
    visited = sum(1 for _ in reversed_pieces(plan, kept, lambda state, piece, later: later))
    assert visited == plan.pieces
    assert time.process_time() - began < 20


MODULES = {
    "elman": lambda **o: nn.RNN(8, 16, 2, dtype=torch.float64, **o),
    "gru": lambda **o: nn.GRU(8, 16, bidirectional=True, num_layers=2, dtype=torch.float64, **o),
    "lstm": lambda **o: nn.LSTM(8, 16, 2, proj_size=8, dropout=0.3, dtype=torch.float64, **o),
}
CARRIES = [
    lambda: Full(),
    lambda: Truncated(window=5),
    lambda: Randomized(keep=0.8, seed=1),
    lambda: Sliding(every=3, steps=7),
]


def gradients(make, memory, carry=Full):
    torch.manual_seed(2)
    module = make(memory=memory, carry=carry())
    xs = torch.randn(23, 8, 8, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)  # the same dropout
    ys, _ = module(xs)
    weights = torch.linspace(-1, 1, ys.numel(), dtype=ys.dtype).view_as(ys)
    return torch.autograd.grad(ys, [xs, *module.parameters()], weights)


def smallest_budget(make) -> int:
    """The budget that a refusal names: enough for every layer of a stack, and no less is."""
    said = refusal(make, 1)
    assert said is not None
    assert "budget=1 bytes is too small: two states take" in said
    named = re.search(r"the smallest budget here is (\d+)", said)
    assert named is not None
    budget = int(named[1])
    assert refusal(make, budget) is None
    assert refusal(make, budget - 1) is not None
    return budget


def refusal(make, budget: int) -> str | None:
    try:
        gradients(make, Checkpointed(budget=budget))
    except UserError as refused:
        return str(refused)
    return None


@pytest.mark.parametrize("carry", CARRIES, ids=lambda c: type(c()).__name__)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_the_gradient_is_the_stored_one_to_the_last_bit(make, carry, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    wanted = gradients(make, Stored(), carry)
    least_bytes = smallest_budget(make)
    memories = [Checkpointed(every=k) for k in (1, 4, 23, 99)]
    memories += [Checkpointed(budget=b) for b in (least_bytes, 2 * least_bytes, 10**9)]
    for memory in memories:
        for w, g in zip(wanted, gradients(make, memory, carry), strict=True):
            assert torch.equal(w, g), memory


@pytest.mark.parametrize(
    ("kind", "budget"), [(nn.RNN, 450_000), (nn.GRU, 1_050_000), (nn.LSTM, 1_200_000)]
)
def test_a_budget_may_hold_a_narrow_layer_whole_and_not_the_wider_ones(kind, budget):
    """Both ways, layers above the first read two states at once."""

    def make(**options):
        return kind(8, 16, 3, bidirectional=True, dtype=torch.float64, **options)

    wanted = gradients(make, Stored())
    for each in (budget // 2, budget, 2 * budget):
        found = gradients(make, Checkpointed(budget=each))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def test_a_compiled_module_with_dropout_plans_as_it_runs():
    """Masks count in a budget, also while a compiler looks at shapes alone."""

    def make(**options):
        return nn.GRU(8, 8, 3, dropout=0.3, dtype=torch.float64, **options)

    def compiled(**options):
        module = make(**options)
        module.compile(backend="aot_eager")
        return module

    torch._dynamo.reset()
    memory = Checkpointed(budget=275_000)  # with masks that is too little to store everything
    found, wanted = gradients(compiled, memory), gradients(make, memory)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def narrow(**options):
    """Its first layer, which reads the most, takes the most."""
    return nn.GRU(8, 2, bidirectional=True, num_layers=2, dtype=torch.float64, **options)


@pytest.mark.parametrize("make", [*MODULES.values(), narrow], ids=[*MODULES, "narrow"])
def test_the_smallest_budget_named_in_a_refusal_is_accepted(make):
    budget = smallest_budget(make)
    with pytest.raises(UserError, match=f"budget={budget - 1} bytes is too small"):
        gradients(make, Checkpointed(budget=budget - 1))
    gradients(make, Checkpointed(budget=budget))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Checkpointed(), "takes one of the two"),
        (lambda: Checkpointed(every=3, budget=100), "takes one of the two"),
        (lambda: Checkpointed(every=0), "every=0 must be a whole number of steps"),
        (lambda: Checkpointed(budget=-5), "budget=-5 must be a whole number of bytes"),
        (lambda: Checkpointed(every=True), "every=True must be a whole .*; Checkpointed.every=100"),
        (lambda: Checkpointed(budget=1.5), "budget=1.5"),
    ],
)
def test_impossible_memories_are_refused(make, said):
    with pytest.raises(UserError, match=said):
        make()


LONG = """
import resource, sys, torch
from elman.gradients import Checkpointed, backward_through_time
from elman.nn import RNN
steps, budget = map(int, sys.argv[1:])
torch.manual_seed(0)
rnn, head = RNN(16, 64, memory=Checkpointed(budget=budget)), torch.nn.Linear(64, 16)
def loss(ys, start):
    next = ids[start + 1 : start + 1 + len(ys), 0]
    return torch.nn.functional.cross_entropy(head(ys)[:, 0], next, reduction="sum")
ids = torch.randint(16, (2049, 1))
backward_through_time(rnn, ids[:-1], loss)  # libraries and caches: not what is measured
ids = torch.randint(16, (steps + 1, 1))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
nats, h = backward_through_time(rnn, ids[:-1], loss)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, nats.item() / steps)
"""


def growth(steps: int, budget: int) -> tuple[int, float]:
    """Bytes by which the resident peak grows, and the mean loss, in a process of its own."""
    said = subprocess.run(
        [sys.executable, "-c", LONG, str(steps), str(budget)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return 1024 * int(said[0]), float(said[1])


def test_a_long_sequence_stays_within_its_budget():
    budget = 2 << 20
    grown, nats = growth(20_000, budget)
    assert grown <= budget + (4 << 20)  # 20,000 × 64 floats alone would be 5 MB, with gradients 15
    assert 2 < nats < 4


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("megabytes", [64, 4])
def test_a_million_steps_stay_within_their_budget(megabytes):
    grown, nats = growth(1_000_000, megabytes << 20)
    assert grown <= (megabytes + 16) << 20
    assert 2 < nats < 4
