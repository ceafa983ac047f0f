"""Time in chunks: within the tolerance of step after step, forward and backward; else it is that.

The oracle is the same module with `time=Stepped()`, which `test_gradients` holds against autograd
through a bare loop. Problems are float64, forget slowly (so that an overlap of a few steps is wrong
by far more than the tolerance, and gradients that cross a seam count), and pull on every output.
"""

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from elman import LanguageModel, kernels, nn
from elman.cli import run
from elman.diagnostics import Passage, forgetting, jacobian
from elman.errors import UserError
from elman.gradients import (
    Checkpointed,
    Chunked,
    Full,
    Randomized,
    Sliding,
    Stepped,
    Stored,
    Truncated,
    backward_through_time,
)
from elman.kernels import Pull
from elman.kernels.reference import KERNEL
from elman.recurrence import chunked
from elman.recurrence.sweeps import Cut, Forward
from elman.scoring import metrics
from elman.training import Reading, Settings, Training

STEPS, LONG, BATCH, INPUT, HIDDEN, PROJECTION = 103, 291, 2, 3, 5, 4
TOLERANCE = 1e-9
TIME = Chunked(chunks=4, overlap=6, tolerance=TOLERANCE)

CELLS = {
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "linear": (nn.RNN, {"nonlinearity": "linear"}),
    "gru": (nn.GRU, {}),
    "lstm": (nn.LSTM, {}),
    "projected": (nn.LSTM, {"proj_size": PROJECTION}),
}
CARRIES = [
    Full(),
    Truncated(window=30),
    Randomized(keep=0.95, seed=3),
    Randomized(keep=0.95, seed=5, per_row=True),
    Sliding(every=80, steps=150),
]
MEMORIES = [Stored(), Checkpointed(every=150)]
SHAPES = [(1, 1), (2, 1), (2, 2)]


@pytest.fixture(autouse=True)
def rows_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are worth it at any size, and run a few steps at a time."""
    monkeypatch.setattr(chunked, "_price", lambda kernel, piece, rows: 1.0)
    monkeypatch.setattr("elman.recurrence.sweeps.HELD_CPU", 1)


def module(cell: str, shape=(1, 1), gain=0.5, time=TIME, seed=0, **options):
    """A module that forgets by about `gain` a step; a gru and an lstm by their gates."""
    kind, own = CELLS[cell]
    layers, directions = shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        m = kind(
            INPUT,
            HIDDEN,
            layers,
            bidirectional=directions == 2,
            dtype=torch.float64,
            time=time,
            **own,
            **options,
        )
        with torch.no_grad():
            for name, p in m.named_parameters():
                if name.startswith("weight_hh") and cell in ("tanh", "relu", "linear"):
                    p.copy_(gain * torch.linalg.qr(torch.randn_like(p))[0])
    return m


def stepped(m):
    """The same module, step after step, all its draws before it."""
    twin = copy.deepcopy(m)
    twin.time = Stepped()
    return twin


def inputs(m, steps=STEPS, batch=BATCH, seed=1):
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=random)

    places = m.num_layers * (2 if m.bidirectional else 1)
    sizes = [m.proj_size or HIDDEN] + [HIDDEN] * (m.cell == "lstm")
    return draw(steps, batch, INPUT), tuple(draw(places, batch, n) for n in sizes)


def everything(m, xs, stacked, lengths=None) -> list[Tensor]:
    """Outputs, last states, and the gradient of a loss that pulls on all of them."""
    xs = xs.clone().requires_grad_(xs.is_floating_point())
    stacked = tuple(s.clone().requires_grad_() for s in stacked)
    given_xs = xs
    if lengths is not None:
        given_xs = pack_padded_sequence(xs, lengths, enforce_sorted=False)
    (first, *rest) = stacked
    ys, last = m(given_xs, stacked if rest else first)
    ys = ys.data if isinstance(ys, PackedSequence) else ys
    outs = [ys, *(last if isinstance(last, tuple) else (last,))]
    random = torch.Generator().manual_seed(2)
    pulls = [torch.randn(y.shape, dtype=y.dtype, generator=random).to(y.device) for y in outs]
    wanted = [*([xs] if xs.requires_grad else []), *stacked, *m.parameters()]
    return [*outs, *torch.autograd.grad(outs, wanted, pulls)]


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative difference of any of them."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)


def in_chunks(m) -> None:
    """The last call ran in chunks, both ways."""
    for side in m.seams:
        assert side is not None
        assert not side.stepped, str(m.seams)
        assert side.chunks > 1


# ---------------------------------------------------------------------- the same result


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_outputs_states_and_gradients_are_those_of_step_after_step(cell, shape):
    m = module(cell, shape)
    problem = inputs(m)
    assert distance(everything(m, *problem), everything(stepped(m), *problem)) < 20 * TOLERANCE
    in_chunks(m)
    assert max(side.sweeps for side in m.seams) > 1  # six steps are not enough, and it shows
    assert max(side.bound for side in m.seams) <= TOLERANCE


@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
@pytest.mark.parametrize("carry", CARRIES, ids=repr)
@pytest.mark.parametrize("cell", ["tanh", "lstm"])
def test_any_carry_and_memory(cell, carry, memory):
    m = module(cell, (2, 1), carry=carry, memory=memory)
    problem, twin = inputs(m, LONG), stepped(m)
    assert distance(everything(m, *problem), everything(twin, *problem)) < 20 * TOLERANCE
    in_chunks(m)


@pytest.mark.parametrize("carry", [Full(), Randomized(keep=0.95, seed=5, per_row=True)], ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_rows_of_different_lengths(cell, shape, carry):
    m = module(cell, shape, carry=carry)
    problem, twin = inputs(m, batch=6), stepped(m)
    lengths = torch.tensor([60, 103, 1, 28, 78, 77])  # in the head, at a seam, inside an overlap
    ours, theirs = everything(m, *problem, lengths), everything(twin, *problem, lengths)
    assert distance(ours, theirs) < 20 * TOLERANCE
    in_chunks(m)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("cell", ["tanh", "gru", "lstm"])
def test_ids_on_every_kernel(cell, kernel, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", kernel)
    m = module(cell)
    _, stacked = inputs(m)
    ids = torch.randint(INPUT, (STEPS, BATCH), generator=torch.Generator().manual_seed(0))
    ours, theirs = everything(m, ids, stacked), everything(stepped(m), ids, stacked)
    assert distance(ours, theirs) < 20 * TOLERANCE
    in_chunks(m)


def test_dropout_between_layers_draws_the_same_masks():
    m = module("lstm", (3, 1), dropout=0.4)
    problem, twin = inputs(m), stepped(m)
    torch.manual_seed(7)
    ours = everything(m, *problem)
    torch.manual_seed(7)
    assert distance(ours, everything(twin, *problem)) < 20 * TOLERANCE


def test_batch_first_and_unbatched():
    m = module("gru", batch_first=True)
    xs, _ = inputs(m)
    for x in (xs.transpose(0, 1), xs[:, 0]):
        ours, theirs = m(x)[0], stepped(m)(x)[0]
        assert distance([ours], [theirs]) < TOLERANCE
        assert not m.seams.forward.stepped


@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
@pytest.mark.parametrize("carry", [Full(), Sliding(every=80, steps=150)], ids=repr)
def test_losses_taken_piece_by_piece(carry, memory):
    m = module("lstm", (2, 1), carry=carry, memory=memory)
    xs, stacked = inputs(m, LONG)
    target = torch.randn(LONG, BATCH, HIDDEN, dtype=torch.float64)
    found = []
    for each in (m, stepped(m)):

        def loss(ys, start):
            return ((ys - target[start : start + len(ys)]) ** 2).sum()

        value, last = backward_through_time(each, xs, loss, stacked)
        found.append([value, *last, *(p.grad for p in each.parameters())])
    assert distance(*found) < 20 * TOLERANCE
    assert not m.seams.forward.stepped


def test_a_gradient_can_be_differentiated_again():
    m = module("tanh")
    problem = inputs(m)
    found = []
    for each in (m, stepped(m)):
        xs = problem[0].clone().requires_grad_()
        (dxs,) = torch.autograd.grad((each(xs, *problem[1])[0] ** 2).sum(), xs, create_graph=True)
        found.append(torch.autograd.grad((dxs**2).sum(), [xs, *each.parameters()]))
    assert distance(*found) < 20 * TOLERANCE


def test_a_loss_at_the_end_alone():
    m = module("lstm")
    problem = inputs(m)
    found = []
    for each in (m, stepped(m)):
        _, (h, c) = each(problem[0], problem[1])
        found.append(torch.autograd.grad(h.sum() + (c**2).sum(), list(each.parameters())))
    assert distance(*found) < 20 * TOLERANCE


def test_compiled():
    m = module("gru")
    xs, (h,) = inputs(m)
    compiled: Any = torch.compile(m, backend="aot_eager", fullgraph=True)
    found = []
    for each in (compiled, stepped(m)):
        parameters = list(each.parameters())
        found.append(torch.autograd.grad((each(xs, h)[0] ** 2).sum(), parameters))
    assert distance(*found) < 20 * TOLERANCE
    in_chunks(m)


# ---------------------------------------------------------------------- the certificate


@given(
    seed=st.integers(0, 10_000),
    cell=st.sampled_from(["tanh", "gru", "lstm"]),
    overlap=st.integers(1, 25),
    sweeps=st.integers(1, 3),
)
@torch.no_grad()
def test_the_error_of_every_chunks_first_state_is_within_the_bound(seed, cell, overlap, sweeps):
    m = module(cell, gain=0.9, seed=seed)
    xs, stacked = inputs(m, steps=100, batch=1, seed=seed)
    job, cut = m.job(xs, stacked), Cut(4, 25, 0, overlap)
    piece = next(job.pieces())
    run = Forward(KERNEL, piece, cut, needs_gates=False)
    gaps = run.first()
    for _ in range(sweeps - 1):
        gaps = run.again(gaps.rows_above(0))
    whole = KERNEL.forward(piece)
    errors = []
    for s, track in zip(run.start, (whole.hs, whole.cs), strict=False):
        exact = track[[25, 50, 75], 0]
        errors.append(float((s[1:] - exact).norm(dim=-1).max() / exact.norm(dim=-1).max()))
    assert max(errors) <= gaps.bound() * 1.001 + 1e-14  # it is relative to found, not exact states


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_every_sweep_measures_how_trajectories_come_closer(batch):
    """Of a single row the states at the seams were views: what came was compared with itself."""
    m = module("tanh", gain=0.9)
    xs, stacked = inputs(m, steps=100, batch=batch)
    piece = next(m.job(xs, stacked).pieces())
    run = Forward(KERNEL, piece, Cut(4, 25, 0, 3), needs_gates=False)
    first = run.first()
    assert 0 < run.again(first.rows_above(0)).contraction < 1


@torch.no_grad()
def test_the_bound_counts_what_earlier_seams_leave_behind():
    m = module("linear")
    m.weight_hh_l0.copy_(0.97 * torch.eye(HIDDEN))  # errors of all seams point the same way
    xs = torch.arange(100.0).double()[:, None, None].expand(100, 1, INPUT)
    piece = next(m.job(xs).pieces())
    run = Forward(KERNEL, piece, Cut(4, 25, 0, 10), needs_gates=False)
    gaps = run.first()
    exact = KERNEL.forward(piece).hs[[25, 50, 75], 0]
    error = (run.start[0][1:] - exact).norm(dim=-1).max() / exact.norm(dim=-1).max()
    assert gaps.largest < float(error) <= gaps.bound()


@pytest.mark.parametrize("overlap", [0, 3, 20])
@pytest.mark.parametrize("cell", ["tanh", "gru", "lstm"])
@torch.no_grad()
def test_what_is_pulled_at_after_a_rows_end_goes_back_to_it(cell, overlap):
    m = module(cell, time=Chunked(4, overlap, TOLERANCE))
    xs, stacked = inputs(m, batch=5)
    piece = next(m.job(xs, stacked).pieces())
    piece = piece._replace(lengths=torch.tensor([103, 30, 2, 77, 53]))
    trace = KERNEL.forward(piece)
    random = torch.Generator().manual_seed(0)
    draw = [torch.randn(s.shape, dtype=s.dtype, generator=random) for s in piece.state]
    pull = Pull(torch.randn(trace.hs[1:].shape, dtype=xs.dtype, generator=random), tuple(draw))
    run = chunked.InChunks(KERNEL, m._chunks)
    found = []
    for kernel in (run, KERNEL):
        dxs, dw, dstate = kernel.backward(piece, trace, pull)
        found.append([d for d in (dxs, *dw, *dstate) if d is not None])
    assert distance(*found) < 20 * TOLERANCE
    assert not m.seams.backward.stepped


def test_a_truncation_inside_the_overlap_makes_seams_exact():
    m = module("lstm", carry=Truncated(window=10), time=Chunked(4, 10, TOLERANCE))
    everything(m, *inputs(m))
    assert m.seams.backward.sweeps == 1
    assert m.seams.backward.difference == 0


def test_a_long_memory_takes_several_sweeps():
    m = module("gru", time=Chunked(8, 20, 1e-6))
    with torch.no_grad():
        m.bias_ih_l0[HIDDEN : 2 * HIDDEN] = 3.0  # z near 1: h_t ≈ h_{t-1}
    problem = inputs(m, steps=800)
    assert distance(everything(m, *problem), everything(stepped(m), *problem)) < 2e-5
    in_chunks(m)
    assert m.seams.forward.sweeps > 2
    assert m.seams.backward.sweeps > 2


def chaotic(gain=4.0, **options):
    return module("tanh", gain=gain, **options)


def test_a_network_that_does_not_forget_runs_step_after_step_and_says_so():
    m = chaotic()
    xs, stacked = inputs(m, steps=400)
    ours, theirs = everything(m, 0.1 * xs, stacked), everything(stepped(m), 0.1 * xs, stacked)
    assert torch.equal(ours[0], theirs[0])
    assert distance(ours, theirs) < 20 * TOLERANCE
    assert "come closer by a factor" in m.seams.forward.stepped
    assert "step after step" in str(m.seams)


def test_a_gradient_that_does_not_fade_is_carried_step_after_step():
    m = module("linear", gain=1.0)  # an orthogonal W_hh: what is pulled at stays
    problem = inputs(m, steps=400)
    ours, theirs = everything(m, *problem), everything(stepped(m), *problem)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert m.seams.forward.stepped
    assert m.seams.backward.stepped


def test_a_piece_too_short_for_chunks_is_named():
    m = module("lstm", memory=Checkpointed(every=100))
    everything(m, *inputs(m, steps=110))
    in_chunks(m)
    assert "in part step after step: 10 steps are too few" in str(m.seams.forward)


def test_what_overflows_runs_step_after_step():
    m = module("linear", gain=1e4)
    xs, stacked = inputs(m)
    ours, theirs = m(xs, *stacked)[0], stepped(m)(xs, *stacked)[0]
    assert torch.equal(ours, theirs) or torch.equal(ours.isfinite(), theirs.isfinite())
    assert m.seams.forward.stepped


def test_after_a_miss_chunks_are_tried_again_ever_more_seldom():
    m = chaotic(time=Chunked(4, tolerance=1e-6))
    xs, stacked = inputs(m, steps=400)
    tried = []
    with torch.no_grad():
        for _ in range(16):
            m(0.1 * xs, *stacked)
            tried.append("lately" not in m.seams.forward.stepped)
    assert [i for i, t in enumerate(tried) if t] == [0, 2, 5, 10]
    with torch.no_grad():  # training has made it forget
        m.weight_hh_l0.mul_(0.1)
        for _ in range(16):
            m(0.1 * xs, *stacked)
    assert not m.seams.forward.stepped


def test_half_precision_raises_a_tolerance_below_its_rounding():
    m = module("lstm", time=Chunked(4, 20, 1e-5)).to(torch.bfloat16)
    xs, stacked = inputs(m)
    xs, stacked = xs.bfloat16(), tuple(s.bfloat16() for s in stacked)
    ours, theirs = everything(m, xs, stacked), everything(stepped(m), xs, stacked)
    assert m.seams.forward.tolerance == torch.finfo(torch.bfloat16).eps
    assert distance(ours, theirs) < 0.1


# ---------------------------------------------------------------------- forgetting, looked at


def test_forgetting_of_a_linear_cell_is_a_power():
    m = module("linear")
    with torch.no_grad():
        m.weight_hh_l0.copy_(0.5 * torch.eye(HIDDEN))
    seen = forgetting(Passage.run(m, inputs(m, 80, batch=1)[0]), lags=30)
    powers = 0.5 ** np.arange(31)
    np.testing.assert_allclose(seen.distance[1:], powers[1:], atol=1e-14)
    assert seen.steps(1e-3) == 10
    assert abs(seen.rate - math.log(0.5)) < 1e-6
    assert (seen.norm >= powers).all()
    assert seen.norm[10] < 200 * powers[10]


@pytest.mark.parametrize("cell", ["tanh", "gru", "lstm"])
def test_forgetting_bounds_the_product_of_jacobians(cell):
    m = module(cell, gain=0.9)
    passage = Passage.run(m, inputs(m, 60, batch=1)[0])
    seen = forgetting(passage, lags=20)
    for end in (20, 40, 60):
        product = torch.eye(passage.states.shape[1], dtype=torch.float64)
        for k in range(1, 21):
            product = product @ jacobian(passage, end - k)
            assert float(torch.linalg.matrix_norm(product, 2)) <= seen.norm[k]
    assert seen.probability < 1e-3


def test_forgetting_that_never_comes():
    m = module("linear", gain=1.0)
    assert forgetting(Passage.run(m, inputs(m, 60, batch=1)[0]), lags=20).steps(0.1) is None


def test_forgetting_refuses_lags_beyond_the_passage():
    m = module("gru")
    with pytest.raises(UserError, match="lags=60 must be"):
        forgetting(Passage.run(m, inputs(m, 60, batch=1)[0]), lags=60)


def test_forgetting_looks_as_far_as_a_short_passage_goes():
    m = module("gru")
    passage = Passage.run(m, inputs(m, 60, batch=1)[0])
    assert (forgetting(passage).distance == forgetting(passage, lags=59).distance).all()


# ---------------------------------------------------------------------- the overlap


def test_an_automatic_overlap_becomes_what_is_needed():
    m = module("tanh", gain=0.95, time=Chunked(8, tolerance=1e-4))
    problem = inputs(m, steps=3000)
    seen = []
    for _ in range(12):
        everything(m, *problem)
        in_chunks(m)
        seen.append(m.seams)
    assert seen[-1].forward.sweeps == seen[-1].backward.sweeps == 1
    assert (
        seen[-1].forward.overlap < seen[0].forward.overlap
    )  # it forgets sooner than at first feared
    assert 0.05e-4 < seen[-1].forward.difference < 1e-4
    with torch.no_grad():  # training makes it remember for longer
        m.weight_hh_l0.mul_(1.04)
    for _ in range(12):
        everything(m, *problem)
    assert m.seams.forward.overlap > seen[-1].forward.overlap
    assert m.seams.forward.sweeps == 1


def test_what_was_measured_is_a_buffer_and_no_part_of_the_state_dict():
    m = module("gru", time=Chunked(4, tolerance=1e-6))
    assert list(m.state_dict()) == list(torch.nn.GRU(INPUT, HIDDEN).state_dict())
    everything(m, *inputs(m, steps=1200))
    (buffer,) = m.buffers()
    twin = module("gru", time=Chunked(4, tolerance=1e-6))
    twin.load_state_dict(m.state_dict())
    for a, b in zip(m.buffers(), twin.buffers(), strict=True):
        assert not torch.equal(a, b)
        b.copy_(a)
    problem = inputs(m, steps=1200, seed=5)
    for _ in range(3):  # the same bits from then on
        ours, theirs = everything(m, *problem), everything(twin, *problem)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(buffer, next(twin.buffers()))


def test_a_copy_learns_for_itself():
    m = module("gru", time=Chunked(4, tolerance=1e-6))
    twin = copy.deepcopy(m)
    everything(m, *inputs(m, steps=1200))
    assert twin.seams.forward is None
    assert not torch.equal(next(m.buffers()), next(twin.buffers()))


def test_the_overlap_follows_a_module_to_another_type():
    m = module("gru", time=Chunked(4, tolerance=1e-6)).float()
    assert m._chunks.state is next(m.buffers())


# ---------------------------------------------------------------------- the decision


def test_a_short_sequence_runs_step_after_step():
    m = module("gru", time=Chunked(64))
    xs, stacked = inputs(m, steps=50)
    m(xs, *stacked)
    assert "50 steps are too few" in m.seams.forward.stepped
    assert "step after step, 50 steps are too few" in str(kernels.explain(m, xs))


@torch.no_grad()
def test_a_few_steps_cost_what_they_cost_without_chunks():
    """One token at a time, as text is written, there is nothing to cut, and nothing to ask."""
    m = module("gru", batch_first=True)
    xs, (h,) = inputs(m, steps=15)
    for x in (xs.transpose(0, 1), xs[:, 0]):
        first = h if x.dim() == 3 else h[:, 0]
        assert torch.equal(m(x, first)[0], stepped(m)(x, first)[0])
    assert m._prepared is not None  # one native call
    assert m.seams.forward is None
    m(torch.cat([xs, xs]).transpose(0, 1), h)
    assert m.seams.forward is not None


def test_explain_shows_the_chunks():
    m = module("gru", time=Chunked(8, 20))
    assert "time: 8 chunks of 100 steps side by side" in str(kernels.explain(m, inputs(m, 800)[0]))
    assert not kernels.explain(stepped(m), inputs(m)[0]).time


def test_a_batch_that_keeps_the_kernel_busy_is_left_alone(monkeypatch):
    monkeypatch.undo()
    m = module("gru", time=Chunked(64, 20))
    assert "keep the cpu kernel busy" in kernels.explain(m, inputs(m, 4000, batch=64)[0]).time
    assert "side by side" in kernels.explain(m, inputs(m, 4000, batch=1)[0]).time


def test_representation():
    assert "time=Chunked(chunks=4" in repr(module("gru"))
    assert "time" not in repr(stepped(module("gru")))


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunks": 1}, "chunks=1 must be a whole number of at least 2"),
        ({"overlap": -1}, "overlap=-1 must be a whole number of at least 0"),
        ({"overlap": "some"}, "overlap='some' must be"),
        ({"tolerance": 0}, "tolerance=0 must be a number above 0"),
        ({"tolerance": float("nan")}, "tolerance=nan must be"),
        ({"sweeps": 0}, "sweeps=0 must be"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(UserError, match=words):
        Chunked(**options)


def test_a_time_must_be_a_time():
    with pytest.raises(UserError, match="time must be a Time, got 64"):
        nn.GRU(3, 4, time=64)  # pyright: ignore[reportArgumentType]
    assert nn.GRU(3, 4).seams == (None, None)


# ---------------------------------------------------------------------- language models


def reading_model(time=None, cell="lstm", seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LanguageModel(12, cell=cell, hidden_size=16, layers=2, time=time).double()


def some_ids(count: int) -> Tensor:
    return torch.randint(12, (count,), generator=torch.Generator().manual_seed(3))


def test_a_text_is_scored_in_one_lane_without_walking_it():
    plain, m = reading_model(), reading_model(Chunked(8, tolerance=1e-9))
    ids = some_ids(5000)
    exact, ours = metrics.evaluate(plain, ids), metrics.evaluate(m, ids)
    assert not m.recurrence.seams.forward.stepped
    assert ours.tokens == exact.tokens
    assert abs(ours.nats_per_token - exact.nats_per_token) < 1e-9
    assert ours.nats != exact.nats  # it did not walk


def test_a_training_through_a_whole_text_is_that_of_step_after_step():
    """Carry full: one update per pass, forward and backward through every lane in chunks."""
    ids = some_ids(4000)
    found = []
    for order in ({}, {"chunks": 8, "tolerance": 1e-9}):
        m = reading_model()
        reading = Reading(batch_size=2, carry="full", memory=0, **order)
        training = Training(m, ids, settings=Settings(epochs=3, reading=reading))
        records = list(training.records())
        found.append([torch.tensor([r.nats for r in records]), *m.parameters()])
    assert not m.recurrence.seams.forward.stepped
    assert not m.recurrence.seams.backward.stepped
    assert "chunks of time" in str(m.irregular())  # so no update is captured or native
    assert distance(*found) < 1e-6


def test_a_resumed_training_repeats_the_same_chunks_and_so_the_same_bits():
    ids = some_ids(4000)

    def training() -> Training:
        reading = Reading(batch_size=1, carry="full", memory=0, chunks=8, tolerance=1e-6)
        return Training(reading_model(), ids, settings=Settings(epochs=6, reading=reading))

    never_stopped, stopped = training(), training()
    for _ in never_stopped.records():
        pass
    for record in stopped.records():
        if record.step == 3:
            break
    saved = copy.deepcopy(stopped.state_dict())
    assert any("chunk_overlaps" in name for name in saved[0])
    resumed = training()
    resumed.load_state_dict(*saved)
    for _ in resumed.records():
        pass
    for a, b in zip(never_stopped.parameters, resumed.parameters, strict=True):
        assert torch.equal(a, b)
    overlaps = [t.model.recurrence.chunk_overlaps for t in (never_stopped, resumed, training())]
    assert torch.equal(overlaps[0], overlaps[1])
    assert not torch.equal(overlaps[0], overlaps[2])


def test_a_training_and_its_model_agree_about_time():
    reading = Reading(chunks=8)
    with pytest.raises(UserError, match="the model was given time=Chunked"):
        Training(reading_model(Chunked(4)), some_ids(4000), settings=Settings(reading=reading))
    with pytest.raises(UserError, match="chunks=8: this model has no recurrence"):
        Training(reading_model(cell="mlp"), some_ids(4000), settings=Settings(reading=reading))
    with pytest.raises(UserError, match="chunks=1 must be"):
        Reading(chunks=1)
    with pytest.raises(UserError, match="chunks=8 with an mlp"):
        reading_model(cell="mlp").read_in_chunks(8)


def test_from_the_command_line(tiny_run, capsys):
    folder = str(tiny_run("--carry", "full", "--chunks", "8", "--tolerance", "0.001"))
    nats = []
    for options in ([], ["--chunks", "8"]):
        assert run(["evaluate", folder, "--no-baselines", "--json", *options]) == 0
        nats.append(json.loads(capsys.readouterr().out)["nats_per_token"])
    assert abs(nats[0] - nats[1]) < 1e-5
    assert run(["evaluate", folder, "--no-baselines", "--chunks", "8"]) == 0
    assert "time: " in capsys.readouterr().err


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
@pytest.mark.parametrize("lengths", [None, torch.tensor([2000, 777])], ids=["all", "packed"])
@pytest.mark.parametrize("cell", ["tanh", "gru", "lstm"])
def test_on_a_gpu(cell, lengths, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee")
    m = module(cell, (2, 1), time=Chunked(16, tolerance=1e-5)).float().cuda()
    xs, stacked = inputs(m, steps=2000)
    problem = xs.float().cuda(), tuple(s.float().cuda() for s in stacked)
    assert (
        distance(everything(m, *problem, lengths), everything(stepped(m), *problem, lengths)) < 1e-4
    )
    in_chunks(m)
    assert m._chunks.state.is_cuda
