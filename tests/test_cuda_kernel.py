"""The CUDA kernel: its plans and its arrays anywhere, its arithmetic where there is a GPU."""

import functools
import itertools
import threading
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cuda_check as check
import elman
import paper_gpu
from elman import kernels, nn
from elman.cells import named
from elman.errors import WorkFailed
from elman.gradients import Checkpointed, Full, Stored, Truncated
from elman.kernels import Piece, cuda, fused, reference
from elman.kernels.cuda import driver, plan, widths
from elman.kernels.cuda.plan import Layer

cells = st.sampled_from(sorted(check.BUILT_IN))
own_cells = st.sampled_from([*check.SHIPPED, *check.TWIN, *check.NOISY])
jobs = st.builds(
    check.Case,
    cell=cells,
    dtype=st.just(torch.float64),
    steps=st.integers(1, 4),
    batch=st.integers(1, 4),
    size=st.integers(1, 5),
    inputs=st.integers(1, 4),
    ids=st.booleans(),
    bias=st.booleans(),
    lengths=st.booleans(),
    xi=st.integers(0, 2),
    seed=st.integers(0, 99),
)


own_jobs = st.builds(replace, jobs, cell=own_cells)


WAYS = ("forward", "backward")
HOPPER = plan.Machine({1: 132, 2: 66, 3: 39, 4: 30, 8: 15}, 232448, True)


@given(job=jobs | own_jobs)
def test_around_the_launches_every_array_is_where_the_reference_has_it(job):
    m = check.material(job)
    with paper_gpu.present():
        found = check.answers(cuda.KERNEL, job, m)
    exact = check.answers(reference.KERNEL, job, m)
    assert found.keys() == exact.keys()
    for name, x in exact.items():
        torch.testing.assert_close(found[name].double(), x, rtol=1e-5, atol=1e-5, msg=name)


@given(job=jobs.filter(lambda job: not job.ids))
def test_what_the_loop_adds_up_over_time_is_the_gradient_of_the_biases(job):
    m = check.material(job)
    with paper_gpu.present(), paper_gpu.sums_in_the_loop():
        found = check.answers(cuda.KERNEL, job, m)
    exact = check.answers(reference.KERNEL, job, m)
    for name, x in exact.items():
        torch.testing.assert_close(found[name].double(), x, rtol=1e-5, atol=1e-5, msg=name)


def test_teams_add_up_da_where_a_thread_has_registers_for_it():
    def sums(cell, size, batch):
        chosen = plan.cheapest(check.cell_of(cell), "backward", size, 2, batch, HOPPER)
        return chosen is not None and chosen.sums_da

    assert all(sums(cell, size, 64) for cell in ("lstm", "gru") for size in (1024, 1536, 2048))
    assert not sums("lstm", 1024, 256)  # eight values of a thread
    assert not sums("lstm", 512, 64)  # a cluster
    assert not sums("peephole", 1024, 64)


@given(job=jobs.filter(lambda job: job.cell in widths.STAY_ZERO), more=st.integers(1, 7))
def test_a_layer_run_as_a_wider_one_is_the_reference(job, more):
    """Units are added where the rows of a wide layer are no whole 16 bytes."""
    m = check.material(job)
    wider = mock.patch.object(cuda, "width_for", lambda cell, size, *_: size + more)
    with paper_gpu.present(), wider:
        found = check.answers(cuda.KERNEL, job, m)
    exact = check.answers(reference.KERNEL, job, m)
    assert found.keys() == exact.keys()
    for name, x in exact.items():
        assert found[name].shape == x.shape
        assert found[name].is_contiguous() or name not in ("hs", "cs")
        torch.testing.assert_close(found[name].double(), x, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("cell", widths.STAY_ZERO)
def test_units_that_are_not_the_layers_own_read_nothing_of_an_infinite_input(cell):
    """0 times infinity would be a NaN, which W_hh would hand to all others."""
    m, launch = check.material(check.Case(cell, torch.float64, 3, 2, 3, 2)), mock.Mock()
    m.xs[1, 0, 1] = torch.inf
    wider = mock.patch.object(cuda, "width_for", lambda cell, size, *_: size + 5)
    with paper_gpu.present(), wider, mock.patch.object(cuda, "_launch", launch):
        cuda.KERNEL.forward(m.piece(named(cell)))
    shares = launch.call_args.args[3].unflatten(-1, (-1, 8))
    assert shares[1, 0, :, :3].isinf().all()
    assert not shares[..., 3:].any()


@pytest.mark.parametrize(("cell", "size"), [("lstm", 1135), ("gru", 1501), ("tanh", 1999)])
@pytest.mark.parametrize("element", [2, 4])
def test_only_a_wide_layer_of_broken_rows_is_run_wider(cell, size, element):
    with paper_gpu.present():
        wide, apart = (cuda.width_for(named(c), size, element, 16, 0) for c in (cell, "relu"))
        assert wide * element % 16 == 0
        assert size < wide < size + 16 // element
        assert cuda.width_for(named(cell), 8 * (size // 8), element, 16, 0) == 8 * (size // 8)
        assert cuda.width_for(named(cell), 117, element, 16, 0) == 117
        assert apart == size


@given(job=jobs | own_jobs)
def test_pieces_add_into_gradients_already_found(job):
    m = check.material(job)
    with paper_gpu.present():
        piece, pull = m.piece(check.cell_of(job.cell)), m.pull()
        trace = cuda.KERNEL.forward(piece)
        _, once, _ = cuda.KERNEL.backward(piece, trace, pull)
        total = once.map(torch.clone)
        _, fresh, _ = cuda.KERNEL.backward(piece, trace, pull)
        _, twice, _ = cuda.KERNEL.backward(piece, trace, pull._replace(into=fresh))
    assert all(a is b for a, b in zip(twice, fresh, strict=True))
    for one, two in zip(total, twice, strict=True):
        if one is not None:
            torch.testing.assert_close(two, 2 * one, rtol=1e-5, atol=1e-5)


@given(job=jobs.filter(lambda job: job.cell not in ("gru", "lstm")))  # whose cells are CUDA's alone
def test_torchs_cells_step_by_step_are_the_reference(job):
    m = check.material(job)
    found, exact = (check.answers(k, job, m) for k in (fused.KERNEL, reference.KERNEL))
    assert found.keys() == exact.keys()
    for name, x in exact.items():
        torch.testing.assert_close(found[name], x, msg=name)


@given(cell=cells, size=st.integers(1, 512), batch=st.integers(1, 600))
def test_every_bf16_elman_layer_up_to_512_units_has_plans_that_fit(cell, size, batch):
    for direction in ("forward", "backward"):
        chosen = plan.cheapest(check.cell_of(cell), direction, size, 2, batch, paper_gpu.MACHINE)
        assert chosen is not None
        assert chosen.hidden >= size
        assert chosen.groups(batch) * chosen.rows >= batch
        assert chosen.shared_bytes <= paper_gpu.MACHINE.shared_bytes
        if chosen.single:
            continue
        assert chosen.m % 16 == 0 or chosen.straight
        assert chosen.m_tiles * plan.WARPS * 16 >= chosen.m * chosen.warps_k
        if chosen.straight:
            assert chosen.warps_k == plan.WARPS
        elif chosen.gathers:  # else a tile of units has one owner
            assert chosen.m_tiles * plan.WARPS * 16 == chosen.m * chosen.warps_k
        elif not chosen.spread:
            assert chosen.units % 16 == 0
        assert chosen.register_tiles <= plan.REGISTER_TILES


@given(
    cell=cells | own_cells,
    direction=st.sampled_from(WAYS),
    size=st.integers(1, 300),
    element=st.sampled_from([2, 4]),
)
def test_a_single_sm_has_whole_layers_that_fit_it(cell, direction, size, element):
    for heads in plan.cuts_along_the_diagonal(check.cell_of(cell).heads, size):
        layer = Layer(check.cell_of(cell), direction, size, element, heads)
        for p in plan.single_plans(layer, HOPPER):
            assert size // heads <= p.hidden == p.units == p.each * p.warps
            assert p.cluster == p.neighbours == 1
            assert (p.size * element) % 4 == 0  # whole words can be copied
            assert p.threads > 32 * p.warps >= 32  # carriers besides
            assert p.threads * 4 * p.register_tiles < 65536
            assert p.shared_bytes <= HOPPER.shared_bytes
            assert p.m_tiles * 16 >= p.each * (p.cell.gates if p.forward else 1)
            assert p.k_tiles * 32 >= p.summed * element


@pytest.mark.parametrize(
    ("cell", "size", "element"), [("tanh", 128, 2), ("gru", 64, 2), ("lstm", 32, 4), ("gru", 17, 4)]
)
def test_small_layers_are_run_by_single_sms(cell, size, element):
    for direction in WAYS:
        chosen = plan.cheapest(named(cell), direction, size, element, 16, HOPPER)
        assert chosen is not None
        assert chosen.single
        wide = plan.cheapest(named(cell), direction, 256, element, 16, HOPPER)
        assert wide is not None
        assert not wide.single


def test_a_matrix_too_large_for_a_cluster_is_spread_over_blocks_that_are_all_there_at_once():
    for batch in (1, 16, 64):
        for direction in ("forward", "backward"):
            chosen = plan.cheapest(named("lstm"), direction, 1024, 2, batch, paper_gpu.MACHINE)
            assert chosen is not None
            assert chosen.far
            assert chosen.spread == (direction == "backward")  # which reads a quarter of the bytes
            assert chosen.hidden >= 1024
            assert chosen.groups(batch) * chosen.cluster <= paper_gpu.MACHINE.clusters[1]
            assert chosen.straight or chosen.m * chosen.warps_k % (16 * plan.WARPS) == 0
            assert chosen.shared_bytes <= paper_gpu.MACHINE.shared_bytes


@given(
    cell=st.sampled_from(["gru", "lstm", "tanh", "slstm"]),
    size=st.integers(17, 260),
    data=st.data(),
)
def test_groups_that_read_straight_are_all_there_at_once_and_read_the_whole_vector(
    cell, size, data
):
    element, batch = data.draw(st.sampled_from([2, 4])), data.draw(st.integers(1, 200))
    directions = ["forward", "backward"] if cell == "tanh" else ["forward"]
    direction, heads = data.draw(st.sampled_from(directions)), 4 if cell == "slstm" else 1
    machine, size = paper_gpu.MACHINE, 8 * heads * size
    every = plan.straight_plans(Layer(named(cell), direction, size, element, heads), batch, machine)
    for p in itertools.islice(every, 20):
        assert p.straight
        assert p.far
        assert not p.spread
        assert p.neighbours == 1
        assert p.groups(batch) * p.cluster <= machine.clusters[1]
        assert p.groups(batch) * p.rows >= batch * heads
        assert p.hidden >= size // heads > p.hidden - p.units  # no SM without units
        assert plan.WARPS * p.k_tiles * 32 >= size // heads * element  # 64 bytes to a read
        assert p.k_tiles % 2 == 0
        assert 16 * p.m_tiles >= p.m
        assert 0 < p.register_tiles <= p.m_tiles * p.k_tiles
        assert p.shared_bytes <= machine.shared_bytes


def test_backward_a_gated_cell_reads_nothing_straight():
    """da of all gates would be four vectors; teams share it."""
    found = plan.straight_plans(Layer(named("lstm"), "backward", 1024, 2), 16, paper_gpu.MACHINE)
    assert list(found) == []


def test_a_gate_whose_two_das_lie_side_by_side_is_read_neither_straight_nor_in_pairs():
    """Rows of das are twice as long then, and W_hh' meets the second half."""

    @elman.cell(gates=1)
    def scaled(a_x, a_h, h):
        return torch.tanh(a_x[0] + h * a_h[0])

    for kind in (plan.straight_plans, plan.pair_plans):
        assert list(kind(Layer(named("tanh"), "backward", 1024, 2), 16, HOPPER))
        assert list(kind(Layer(scaled, "forward", 1024, 2), 16, HOPPER))
        assert list(kind(Layer(scaled, "backward", 1024, 2), 16, HOPPER)) == []
    assert plan.cheapest(scaled, "backward", 1024, 2, 64, HOPPER) is not None


@pytest.mark.parametrize(("cell", "size"), [("lstm", 768), ("lstm", 1024), ("gru", 1024)])
def test_wide_layers_of_few_rows_are_read_straight(cell, size):
    chosen = plan.cheapest(named(cell), "forward", size, 2, 16, HOPPER)
    assert chosen is not None
    assert chosen.straight
    assert chosen.rows == 8  # half the vector to an SM, whose SMs are half as many


@given(cell=st.sampled_from(["gru", "lstm", "tanh"]), size=st.integers(17, 260), data=st.data())
def test_teams_are_whole_clusters_that_are_all_there_at_once(cell, size, data):
    element, batch = data.draw(st.sampled_from([2, 4])), data.draw(st.integers(1, 200))
    machine, size = plan.Machine({1: 132, 2: 66, 3: 39, 4: 30, 8: 15}, 232448), 8 * size
    layer = Layer(named(cell), "backward", size, element)
    for p in itertools.islice(plan.spread_plans(layer, batch, machine), 20):
        teams, rest = divmod(p.cluster, p.partners)
        assert rest == 0
        assert p.groups(batch) * teams <= machine.clusters[p.partners]
        assert p.hidden >= size > (teams - 1) * p.partners * p.units  # no team without units
        assert p.partners * p.m >= size  # every unit is in one partner's share
        assert p.cell.gates * p.units * element % 16 == 0
        assert p.shared_bytes <= machine.shared_bytes
        assert 4 * p.share_words(batch) >= 2 * teams * size * batch * element


@given(cell=st.sampled_from(["gru", "lstm", "tanh"]), size=st.integers(17, 260), data=st.data())
def test_pairs_read_the_whole_vector_and_are_all_there_at_once(cell, size, data):
    size, batch = 8 * size, data.draw(st.integers(1, 200))
    direction = "forward" if cell != "tanh" else data.draw(st.sampled_from(["forward", "backward"]))
    every = plan.pair_plans(Layer(named(cell), direction, size, 2), batch, HOPPER)
    turns = data.draw(st.sampled_from([1, 2, 4]))
    for p in itertools.islice((p for p in every if p.turns == turns), 20):
        assert p.paired
        assert not p.spread
        assert p.neighbours == 2
        assert p.groups(batch) * p.cluster <= 2 * HOPPER.clusters[2]
        assert p.groups(batch) * p.rows * p.turns >= batch
        assert p.threads == 128 * (p.warpgroups + 2 * (turns > 1))
        if turns > 1:
            assert p.stages == p.k_tiles // 4 or (p.stages >= 5 and p.k_tiles // 4 % p.stages == 0)
            assert p.warps == 4
            assert p.warpgroups <= 2
        assert p.hidden >= size > p.hidden - 2 * p.units  # no pair without units
        assert 2 * p.k_tiles * 16 >= size  # the halves are all of it
        assert 0 < p.held <= p.k_tiles // 4
        if p.joined:
            assert p.direction == "forward"
            assert p.warpgroups == 2
            assert 64 * p.m_tiles >= p.m
            assert p.stages == 2 * p.k_tiles // 4 <= 32  # of both halves, a lane for each
            assert size > p.hidden - p.units  # no block without units
        else:
            assert 64 * p.warpgroups * p.m_tiles >= 2 * p.m  # and so are the rows of both
            assert p.stages <= p.k_tiles // 4 <= 32
        assert p.shared_bytes <= HOPPER.shared_bytes


def test_partners_share_the_vector_where_it_fits_both():
    for cell, size, joined in (("lstm", 1024, True), ("gru", 1024, True), ("lstm", 2048, False)):
        chosen = plan.cheapest(named(cell), "forward", size, 2, 64, HOPPER)
        assert chosen is not None
        assert chosen.paired
        assert chosen.joined == joined
    every = [*plan.pair_plans(Layer(named("tanh"), "forward", 1024, 2), 64, HOPPER)]
    assert not any(p.joined for p in every)  # one gate alone: others are faster


@given(cell=st.sampled_from(["gru", "lstm", "tanh"]), size=st.integers(17, 260), data=st.data())
def test_teams_by_wgmma_are_whole_clusters_too(cell, size, data):
    size, batch = 8 * size, data.draw(st.integers(1, 200))
    layer = Layer(named(cell), "backward", size, 2)
    for p in itertools.islice(plan.team_plans(layer, batch, HOPPER), 20):
        teams, rest = divmod(p.cluster, p.partners)
        assert rest == 0
        assert p.spread
        assert p.hopper
        assert p.groups(batch) * teams <= HOPPER.clusters[p.partners]
        assert p.hidden >= size > (teams - 1) * p.partners * p.units
        assert p.partners * p.m >= size
        assert p.warpgroups * p.m_tiles * 64 >= p.m
        assert p.units % 4 == 0
        assert p.cell.gates * p.units % 8 == 0
        assert p.register_tiles + p.shared_tiles == p.m_tiles * p.k_tiles
        assert p.shared_bytes <= HOPPER.shared_bytes
        assert 4 * p.share_words(batch) >= 2 * teams * size * batch * 2


@given(cell=st.sampled_from(["gru", "lstm", "mgu"]), size=st.integers(6, 32), data=st.data())
def test_teams_that_are_no_clusters_have_whole_chunks_and_are_all_there_at_once(cell, size, data):
    size, batch = 64 * size, data.draw(st.integers(1, 200))
    layer = Layer(named(cell), "backward", size, 2)
    for p in itertools.islice(plan.crowd_plans(layer, batch, HOPPER), 20):
        assert p.spread
        assert p.hopper
        assert p.crowded
        assert not p.paired
        assert p.neighbours == 1
        assert p.groups(batch) * p.cluster <= HOPPER.clusters[1]
        assert p.groups(batch) * p.rows >= batch
        assert p.hidden == size
        assert p.cluster % p.partners == 0
        assert p.partners * p.units % 64 == 0  # a chunk is one team's
        assert p.k_tiles * 16 == p.cell.gates * p.partners * p.units <= 32 * 64  # a lane for each
        assert p.partners * p.m >= size  # every unit is in one member's share
        assert p.warpgroups * p.m_tiles * 64 == p.m
        assert p.register_tiles + p.shared_tiles == p.m_tiles * p.k_tiles
        assert p.shared_bytes <= HOPPER.shared_bytes
        teams = p.cluster // p.partners
        assert 4 * p.share_words(batch) >= 2 * teams * size * batch * 2


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("batch", [64, 128, 256])
def test_the_widest_layers_go_back_in_teams_that_are_no_clusters(cell, batch):
    chosen = plan.cheapest(named(cell), "backward", 2048, 2, batch, HOPPER)
    assert chosen is not None
    assert chosen.crowded
    narrower = plan.cheapest(named(cell), "backward", 1024, 2, batch, HOPPER)
    assert narrower is not None
    assert not narrower.crowded


def test_what_is_waited_for_is_not_there_before():
    chosen = plan.cheapest(named("lstm"), "backward", 2048, 2, 64, HOPPER)
    das = torch.zeros(2, 4, dtype=torch.bfloat16)
    assert (cuda.awaited(chosen, das).view(torch.int32) == cuda.EMPTY).all()
    teams = next(plan.team_plans(Layer(named("lstm"), "backward", 1024, 2), 64, HOPPER))
    assert not cuda.awaited(teams, torch.zeros(2, 4)).any()  # whose da is sent, not waited for


def test_only_a_hopper_gpu_has_pairs_and_only_in_half_precision():
    for machine, element in ((paper_gpu.MACHINE, 2), (HOPPER, 4)):
        there, back = (Layer(named("lstm"), way, 1024, element) for way in WAYS)
        assert list(plan.pair_plans(there, 64, machine)) == []
        assert list(plan.team_plans(back, 64, machine)) == []
        assert list(plan.crowd_plans(back, 64, machine)) == []
    gated, one_gate = (Layer(named(cell), "backward", 1024, 2) for cell in ("lstm", "tanh"))
    assert list(plan.crowd_plans(one_gate, 64, HOPPER)) == []  # which reads da whole
    assert list(plan.pair_plans(gated, 64, HOPPER)) == []


@pytest.mark.parametrize(
    ("cell", "size"),
    [("lstm", 1536), ("lstm", 2048), ("gru", 1536), ("gru", 2048), ("tanh", 2048)],
)
def test_wide_layers_of_a_hopper_gpu_run_in_pairs_forward(cell, size):
    chosen = plan.cheapest(named(cell), "forward", size, 2, 64, HOPPER)
    assert chosen is not None
    assert chosen.paired


@given(
    cell=st.sampled_from(["gru", "lstm", "tanh"]),
    size=st.integers(97, 256),
    batch=st.integers(1, 1100),
    direction=st.sampled_from(["forward", "backward"]),
)
def test_groups_that_find_no_room_beside_the_others_are_launched_after_them(
    cell, size, batch, direction
):
    chosen = plan.cheapest(named(cell), direction, 8 * size, 2, batch, HOPPER)
    if chosen is None or not chosen.far:
        return
    launches = chosen.launches(batch)
    assert [block for blocks in launches for block in blocks] == [
        *range(chosen.groups(batch) * chosen.cluster)
    ]
    for blocks in launches:
        assert len(blocks) % chosen.cluster == 0
        assert len(blocks) // chosen.neighbours <= HOPPER.clusters[chosen.neighbours]


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("size", [1024, 1536, 2048])
def test_a_wide_layer_of_many_rows_has_a_plan(cell, size):
    for direction in ("forward", "backward"):
        chosen = plan.cheapest(named(cell), direction, size, 2, 256, HOPPER)
        assert chosen is not None
        few = plan.cheapest(named(cell), direction, size, 2, 64, HOPPER)
        assert few is not None
        assert chosen.batch_microseconds(256, HOPPER) <= 4.01 * few.batch_microseconds(64, HOPPER)


@pytest.mark.parametrize(
    ("cell", "direction", "size", "batch", "turns"),
    [
        ("lstm", "forward", 1024, 64, 1),
        ("lstm", "forward", 2048, 64, 2),
        ("gru", "forward", 2048, 96, 4),
        ("lstm", "forward", 1024, 256, 4),
        ("tanh", "forward", 2048, 256, 2),
        ("tanh", "backward", 2048, 256, 2),
    ],
)
def test_where_multiplying_takes_longest_a_group_takes_turns(cell, direction, size, batch, turns):
    chosen = plan.cheapest(named(cell), direction, size, 2, batch, HOPPER)
    assert chosen is not None
    assert chosen.paired
    assert chosen.turns == turns
    assert chosen.groups(batch) * chosen.rows * turns >= batch
    assert chosen.groups(batch) * chosen.cluster <= 2 * HOPPER.clusters[2]


def test_without_clusters_a_team_is_one_block():
    old = plan.Machine({1: 108}, 166912)
    found = list(plan.spread_plans(Layer(named("lstm"), "backward", 1024, 2), 16, old))
    assert found
    assert {p.partners for p in found} == {1}


def test_a_matrix_too_large_for_the_gpu_has_no_plan():
    assert plan.cheapest(named("tanh"), "forward", 8192, 2, 64, paper_gpu.MACHINE) is None
    assert (
        plan.cheapest(named("lstm"), "forward", 1024, 2, 64, plan.Machine({1: 16}, 232448)) is None
    )


@given(size=st.integers(1, 300), batch=st.integers(1, 70))
def test_heads_have_groups_of_their_own(size, batch):
    for name, direction in itertools.product(("slstm", "indrnn"), ("forward", "backward")):
        chosen = plan.cheapest(named(name), direction, size, 2, batch, paper_gpu.MACHINE)
        assert chosen is not None
        assert chosen.heads * chosen.size == size
        assert chosen.groups(batch) * chosen.rows >= batch * chosen.heads
        if name == "slstm" and chosen.heads > 1:
            assert 4 % chosen.heads == 0
            assert size % 4 == 0


def test_heads_are_cheaper_apart():
    for direction in ("forward", "backward"):
        headed, diagonal, dense = (
            plan.cheapest(named(name), direction, 512, 2, 64, paper_gpu.MACHINE)
            for name in ("slstm", "indrnn", "lstm")
        )
        assert headed is not None
        assert diagonal is not None
        assert dense is not None
        assert (headed.heads, headed.size) == (4, 128)
        assert (diagonal.single, diagonal.size) == (True, 32)
        assert headed.microseconds(64) < dense.microseconds(64)


def test_a_gpu_without_clusters_runs_what_fits_one_sm_or_many_that_meet_in_memory():
    old = plan.Machine({1: 108}, 166912)
    chosen = plan.cheapest(named("tanh"), "forward", 256, 2, 64, old)
    assert chosen is not None
    assert chosen.cluster == 1
    chosen = plan.cheapest(named("tanh"), "forward", 1024, 2, 64, old)
    assert chosen is not None
    assert chosen.far


@pytest.mark.parametrize("tf32", [True, False])
def test_float32_obeys_torchs_switch_for_recurrent_layers(tf32):
    with replace(check.jobs(1, 0, (1,))[0], tf32=tf32).switched():
        assert cuda.arithmetic(torch.float32) == (cuda.TF32 if tf32 else cuda.FP32)
        assert cuda.arithmetic(torch.float16) == cuda.FP16
        before = torch.backends.cuda.matmul.fp32_precision
        with cuda.large_products(torch.float32):
            assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if tf32 else "ieee")
        assert torch.backends.cuda.matmul.fp32_precision == before


def test_an_interrupt_leaves_the_switch_to_other_threads(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cuda, "precision", interrupted)
    with pytest.raises(KeyboardInterrupt), cuda.large_products(torch.float32):
        pass
    taken = []

    def take() -> None:
        taken.append(cuda._ONE_SWITCH.acquire(timeout=1))
        if taken[0]:
            cuda._ONE_SWITCH.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert taken == [True]


def test_threads_never_see_the_switch_that_another_has_set_for_its_products(monkeypatch):
    monkeypatch.setattr(cuda, "precision", lambda: "tf32")
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    seen: dict[str, set[str]] = {"tf32": set(), "ieee": set()}

    def products(wanted: str) -> None:
        there = mock.Mock(is_cuda=True, dtype=torch.float32)
        for _ in range(300):
            with (
                cuda.large_products(torch.float32) if wanted == "tf32" else cuda.as_switched(there)
            ):
                time.sleep(0)  # others run
                seen[wanted].add(matmul.fp32_precision)

    threads = [threading.Thread(target=products, args=(wanted,)) for wanted in (*seen, *seen)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == {wanted: {wanted} for wanted in seen}
        assert matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision = before


def refusal(dtype=torch.bfloat16, cell="tanh", device="cpu", **layer):
    w = cuda.Weights(torch.zeros(8, 3), torch.zeros(8, 8), **layer)
    w = w.map(lambda p: p.to(device, dtype))
    xs = torch.zeros(2, 1, 3, dtype=dtype, device=device)
    state = (torch.zeros(1, 8, dtype=dtype, device=device),)
    return cuda.KERNEL.refuses(Piece(named(cell), w, xs, state))


def test_tensors_on_a_cpu_are_refused():
    assert refusal() == "the tensors are on cpu, not on a CUDA GPU"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is here")
def test_a_missing_driver_is_named():
    with pytest.raises((WorkFailed, OSError, AssertionError, RuntimeError)):
        driver.call("cuInit", 0)


# ---------------------------------------------------------------------- the check itself


@given(job=jobs)
def test_the_reference_shaken_by_nothing_is_the_reference(job):
    m = check.material(job)
    found, exact = (
        check.answers(kernel, job, m) for kernel in (check.Shaken(0.0, 0, "cpu"), reference.KERNEL)
    )
    assert found.keys() == exact.keys()
    for name, x in exact.items():
        torch.testing.assert_close(found[name], x, msg=name)


class Wrong:
    """The reference, one of its arrays changed by `change`."""

    def __init__(self, array, change):
        self.array, self.change = array, change

    def refuses(self, piece):
        return None

    def forward(self, piece):
        trace = reference.KERNEL.forward(piece)
        return trace._replace(hs=self.change(trace.hs)) if self.array == "hs" else trace

    def backward(self, *arguments):
        dxs, dw, dstate = reference.KERNEL.backward(*arguments)
        if self.array in dw._fields:
            return dxs, dw._replace(**{self.array: self.change(getattr(dw, self.array))}), dstate
        return self.change(dxs) if self.array == "dxs" else dxs, dw, dstate


small_jobs = check.jobs(12, 5, (1, 3, 16))


@pytest.mark.parametrize("array", ["hs", "dxs", "W_ih", "W_hh"])
def test_the_check_passes_what_is_right_and_finds_what_is_wrong(array):
    seen = 0
    for job in (replace(job, dtype=torch.float32, tf32=True, ids=False) for job in small_jobs):
        m = check.material(job)
        if all(x.norm() > 0 for x in check.answers(reference.KERNEL, job, m).values()):
            assert check.faults(job, Wrong(array, lambda x: x), "cpu") == []
            found = check.faults(job, Wrong(array, lambda x: 1.05 * x), "cpu")
            assert any(fault.startswith(f"{array} is off by") for fault in found), found
            seen += 1
    assert seen > 4


def test_the_check_finds_what_differs_from_run_to_run():
    noisy = Wrong("dxs", lambda x: x + 1e-6 * torch.randn_like(x))
    job = replace(small_jobs[0], dtype=torch.float32, ids=False)
    assert "dxs differs between two runs" in check.faults(job, noisy, "cpu")


def test_errors_are_compared_over_many_jobs_not_one_by_one():
    def verdict(dtype, ours, theirs):
        return check.Verdict(
            replace(small_jobs[0], dtype=dtype, tf32=True), {"hs": ours}, {}, theirs, []
        )

    near = {"hs": 1e-3}
    for over, worse in (((1.3, 0.8, 1.2, 0.7), False), ((1.09, 1.1, 1.11, 1.1), True)):
        found = check.ratios(verdict(torch.float16, 1e-3 * ratio, near) for ratio in over)
        assert [check.worse(logs) for logs in found.values()] == [worse]
    assert check.ratios([verdict(torch.float32, 1e-4, {"hs": 1e-7})]) == {}  # cuDNN without TF32


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.parametrize("job", check.jobs(20, 4, (1, 7, 33)), ids=repr)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_torchs_cells_step_by_step_are_the_reference(job):
    assert check.faults(job, fused.KERNEL) == []


EVERY = check.jobs(40, 3, (1, 7, 33, 64, 100, 256, 300, 512))


@pytest.fixture(scope="module")
def ready() -> None:
    check.compile_ahead(EVERY)


@pytest.mark.parametrize("job", EVERY, ids=repr)
@pytest.mark.usefixtures("ready")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_answers_are_the_references_and_the_same_each_time(job):
    assert check.faults(job) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_wide_layers_are_right():
    assert check.faulty(check.WIDE) == {}


def far_plan(
    monkeypatch,
    rows: int,
    partners: int,
    hopper: bool = False,
    straight: bool = False,
    turns: int = 1,
    joined: bool = False,
    crowded: bool = False,
) -> None:
    """Have layers that would fit a cluster run by far groups, in teams of `partners` backward.

    As many rows, and turns of a group, as that; or the nearest that fit and are wanted.
    """

    def distance(p):
        return p.joined != joined, abs(p.turns - turns), abs(p.rows - rows)

    def chosen(cell, direction, size, element, batch, device):
        here, heads = cuda.machine(max(device, 0)), max(cell.heads, 1)
        layer = Layer(cell, direction, size, element)
        headed = layer._replace(heads=heads)
        if crowded and direction == "backward":
            every = plan.crowd_plans(layer, batch, here)
        elif partners and direction == "backward":
            kind = plan.team_plans if hopper else plan.spread_plans
            every = kind(headed, batch, here)
        elif hopper:
            every = plan.pair_plans(layer, batch, here)
        elif straight and (direction == "forward" or cell.gates == 1):
            every = plan.straight_plans(headed, batch, here)
        elif straight:  # what a gated cell goes back by is not the point
            return plan.cheapest(cell, direction, size, element, batch, here)
        else:
            every = plan.far_plans(headed, batch, here)
        found = [p for p in every if p.partners == partners or not p.spread]
        return min(found, key=distance)

    monkeypatch.setattr(cuda, "plan_for", chosen)


@pytest.mark.parametrize("each", [8, 16])
@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_every_kind_of_single_sm_is_right(each, rows, monkeypatch):
    def chosen(cell, direction, size, element, batch, device):
        here, heads = cuda.machine(max(device, 0)), max(cell.heads, 1)
        every = [*plan.single_plans(Layer(cell, direction, size, element, heads), here)]
        return min(every, key=lambda p: (p.each != each, p.rows != rows))

    monkeypatch.setattr(cuda, "plan_for", chosen)
    cuda.width_for.cache_clear()
    todo = [
        check.Case("lstm", torch.bfloat16, 33, 37, 24, 16, lengths=True, xi=2),
        check.Case("lstm", torch.float32, 20, 5, 33, 16, ids=True, xi=1),
        check.Case("gru", torch.float16, 40, 9, 40, 16, xi=1),
        check.Case("gru", torch.float32, 16, 11, 31, 16, lengths=True, ids=True, tf32=False),
        check.Case("relu", torch.float32, 9, 3, 50, 5, ids=True, tf32=False),
        check.Case("tanh", torch.bfloat16, 18, 70, 96, 16, lengths=True, xi=2),
        check.Case("linear", torch.float32, 1, 1, 7, 3, bias=False),
        check.Case("mgu", torch.bfloat16, 8, 40, 18, 16, lengths=True, xi=2),
        check.Case("peephole", torch.float32, 9, 8, 21, 16, xi=2),
        check.Case("slstm", torch.float16, 10, 3, 64, 16, xi=2),
        check.Case("noisy lstm", torch.float32, 11, 12, 20, 16, lengths=True),
    ]
    assert check.faulty(todo) == {}
    cuda.width_for.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_odd_rows_of_float32_are_copied_word_by_word():
    todo = [
        check.Case("gru", torch.float32, 9, 7, 131, 16, xi=2),
        check.Case("lstm", torch.float32, 7, 19, 203, 16, lengths=True, tf32=False),
        check.Case("tanh", torch.float32, 8, 33, 301, 16, ids=True, xi=1),
    ]
    assert check.faulty(todo) == {}


@pytest.mark.parametrize("partners", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("rows", [8, 32, 64])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_every_kind_of_far_group_is_right(partners, rows, monkeypatch):
    far_plan(monkeypatch, rows, partners)
    todo = [
        check.Case("lstm", torch.bfloat16, 7, 37, 384, 16, lengths=True, xi=2),
        check.Case("gru", torch.float16, 6, 9, 400, 16, xi=1),
        check.Case("gru", torch.float32, 5, 11, 384, 16, lengths=True),
        check.Case("relu", torch.float32, 5, 3, 512, 5, ids=True, tf32=False),
        check.Case("mgu", torch.bfloat16, 6, 40, 384, 16, lengths=True, xi=2),
        check.Case("peephole", torch.bfloat16, 5, 8, 384, 16, xi=2),
        check.Case("noisy lstm", torch.float32, 5, 12, 384, 16, lengths=True),
    ]
    assert check.faulty(todo) == {}


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_groups_that_read_straight_are_right(rows, monkeypatch):
    far_plan(monkeypatch, rows, 0, straight=True)
    todo = [
        check.Case("lstm", torch.bfloat16, 7, 37, 384, 16, lengths=True, xi=2),
        check.Case("gru", torch.float16, 6, 9, 400, 16, xi=1),
        check.Case("gru", torch.float32, 5, 11, 384, 16, lengths=True),
        check.Case("relu", torch.float32, 5, 3, 512, 5, ids=True, tf32=False),
        check.Case("tanh", torch.bfloat16, 7, 12, 1152, 16, lengths=True, xi=2),
        check.Case("mgu", torch.bfloat16, 6, 40, 384, 16, lengths=True, xi=2),
        check.Case("slstm", torch.float16, 5, 3, 1024, 16, xi=2),
        check.Case("noisy lstm", torch.float32, 5, 12, 384, 16, lengths=True),
    ]
    assert check.faulty(todo) == {}


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize(
    ("rows", "partners", "turns", "joined"),
    [
        (8, 8, 1, False),
        (16, 1, 1, False),
        (32, 2, 1, False),
        (64, 3, 1, False),
        (32, 2, 2, False),
        (64, 2, 2, False),
        (32, 2, 4, False),
        (16, 4, 1, True),
        (32, 2, 1, True),
        (64, 2, 1, True),
    ],
)
@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="no Hopper GPU")
def test_on_a_hopper_gpu_pairs_and_teams_are_right(partners, rows, turns, joined, monkeypatch):
    far_plan(monkeypatch, rows, partners, hopper=True, turns=turns, joined=joined)
    todo = [
        check.Case("lstm", torch.bfloat16, 7, 37, 384, 16, lengths=True, xi=2),
        check.Case("gru", torch.float16, 6, 9, 400, 16, xi=1),
        check.Case("gru", torch.bfloat16, 5, 70, 384, 16, ids=True, lengths=True),
        check.Case("relu", torch.float16, 5, 3, 1152, 5, ids=True),
        check.Case("mgu", torch.bfloat16, 6, 40, 512, 16, lengths=True, xi=2),
        check.Case("peephole", torch.bfloat16, 5, 8, 392, 16, xi=2),
        check.Case("noisy lstm", torch.float16, 5, 12, 384, 16, lengths=True),
    ]
    assert check.faulty(todo) == {}


@pytest.mark.parametrize(
    ("rows", "partners", "size"),
    [(16, 8, 768), (32, 4, 1024), (32, 6, 768), (64, 8, 768), (64, 4, 1024)],
)
@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="no Hopper GPU")
def test_on_a_hopper_gpu_teams_that_are_no_clusters_are_right(rows, partners, size, monkeypatch):
    far_plan(monkeypatch, rows, partners, hopper=True, crowded=True)
    todo = [
        check.Case("lstm", torch.bfloat16, 7, rows + 5, size, 16, lengths=True, xi=2),
        check.Case("gru", torch.float16, 6, 9, size, 16, xi=1),
        check.Case("gru", torch.bfloat16, 5, rows, size, 16, ids=True, lengths=True),
        check.Case("mgu", torch.bfloat16, 6, 40, size, 16, lengths=True, xi=2),
        check.Case("noisy lstm", torch.float16, 5, 12, size, 16, lengths=True),
    ]
    for job in todo:
        p = cuda.plan_for(check.cell_of(job.cell), "backward", job.size, 2, job.batch, 0)
        assert (p.crowded, p.rows, p.partners) == (True, rows, partners)
    assert {job: wrong for job in todo if (wrong := check.faults(job))} == {}


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="no Hopper GPU")
def test_on_a_hopper_gpu_no_number_among_gates_gradients_stays_in_its_row(monkeypatch):
    """da that is NaN looks as if it were not there yet: it is waited for once, and multiplied."""
    far_plan(monkeypatch, 32, 8, hopper=True, crowded=True)
    job = check.Case("lstm", torch.bfloat16, 5, 60, 768, 16)
    m = check.material(job).to(torch.bfloat16, "cuda")
    assert cuda.plan_for(named("lstm"), "backward", 768, 2, 60, 0).crowded
    clean = check.answers(cuda.KERNEL, job, m)
    dhs = m.dhs.clone()
    dhs[3, 5], dhs[2, 40], dhs[4, 59] = torch.nan, torch.inf, -torch.inf
    found = check.answers(cuda.KERNEL, job, replace(m, dhs=dhs))
    broken, others = [5, 40, 59], [row for row in range(60) if row not in (5, 40, 59)]
    assert not found["dstate0"][broken].isfinite().any()
    assert torch.equal(found["dstate0"][others], clean["dstate0"][others])
    assert torch.equal(found["dxs"][:, others], clean["dxs"][:, others])
    assert torch.equal(found["dxs"][4, 5], clean["dxs"][4, 5])  # what came later is not touched


@pytest.mark.parametrize(("rows", "turns"), [(8, 1), (64, 1), (32, 2), (64, 2), (32, 4), (64, 4)])
@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="no Hopper GPU")
def test_on_a_hopper_gpu_a_one_gate_layer_goes_back_in_pairs(rows, turns, monkeypatch):
    far_plan(monkeypatch, rows, 0, hopper=True, turns=turns)
    group = rows * turns
    todo = [
        check.Case("tanh", torch.bfloat16, 7, group + 6, 1152, 16, lengths=True, xi=2),
        check.Case("relu", torch.float16, 5, group - 5, 1152, 5, ids=True),
        check.Case("linear", torch.bfloat16, 4, group, 1000, 16, xi=1),
        check.Case("described tanh", torch.bfloat16, 1, group, 1104, 16, lengths=True),
    ]
    for job in todo:
        p = cuda.plan_for(check.cell_of(job.cell), "backward", job.size, 2, job.batch, 0)
        assert (p.turns, p.rows) == (turns, rows)
    assert check.faulty(todo) == {}


@pytest.mark.parametrize("batch", [70, 150])
@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="no Hopper GPU")
def test_on_a_hopper_gpu_whatever_the_turns_the_bits_are_the_same(batch, monkeypatch):
    job = check.Case("tanh", torch.bfloat16, 6, batch, 1152, 16, lengths=True, xi=2)
    m, found = check.material(job).to(torch.bfloat16, "cuda"), list[dict[str, torch.Tensor]]()
    for rows, turns in ((32, 1), (32, 2), (64, 2), (32, 4)):
        far_plan(monkeypatch, rows, 0, hopper=True, turns=turns)
        chosen = [cuda.plan_for(named("tanh"), way, 1152, 2, batch, 0) for way in WAYS]
        assert [p.turns for p in chosen] == [turns, turns]
        found.append(check.answers(cuda.KERNEL, job, m))
    for other in found[1:]:
        assert {name for name, x in found[0].items() if not torch.equal(x, other[name])} == set()


@pytest.mark.parametrize("turns", [1, 2, 4])
@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="no Hopper GPU")
def test_on_a_hopper_gpu_no_number_among_gradients_stays_in_its_row_and_hangs_nothing(
    turns, monkeypatch
):
    far_plan(monkeypatch, 32, 0, hopper=True, turns=turns)
    job = check.Case("tanh", torch.bfloat16, 5, 100, 1152, 16)
    m = check.material(job).to(torch.bfloat16, "cuda")
    assert cuda.plan_for(named("tanh"), "backward", 1152, 2, 100, 0).turns == turns
    clean = check.answers(cuda.KERNEL, job, m)
    dhs = m.dhs.clone()
    dhs[3, 5], dhs[2, 40], dhs[4, 99] = torch.nan, torch.inf, -torch.inf
    found = check.answers(cuda.KERNEL, job, replace(m, dhs=dhs))
    broken, others = [5, 40, 99], [row for row in range(100) if row not in (5, 40, 99)]
    assert found["dstate0"][broken].isnan().all()
    assert found["dstate0"][others].isfinite().all()
    assert torch.equal(found["dstate0"][others], clean["dstate0"][others])
    assert torch.equal(found["dxs"][:, others], clean["dxs"][:, others])
    assert torch.equal(found["dxs"][4, 5], clean["dxs"][4, 5])  # what came later is not touched


@pytest.mark.parametrize(("turns", "joined"), [(1, False), (1, True), (2, False)])
@pytest.mark.parametrize("bits", [0x7FC0, 0xFFFF])  # 0xFFFF twice is what means "not stored yet"
@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="no Hopper GPU")
def test_on_a_hopper_gpu_a_users_nan_stays_in_its_row_and_hangs_nothing(
    bits, turns, joined, monkeypatch
):
    far_plan(monkeypatch, 32, 2, hopper=True, turns=turns, joined=joined)
    torch.manual_seed(0)
    rnn = nn.LSTM(16, 512, device="cuda", dtype=torch.bfloat16)
    xs = torch.randn(6, 33, 16, device="cuda").to(torch.bfloat16)
    h = torch.zeros(1, 33, 512, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setenv("ELMAN_KERNELS", "cuda")
    clean, _ = rnn(xs, (h, h.clone()))
    nan = h.clone()
    nan[0, 5] = torch.tensor(bits - (1 << 16 if bits > 0x7FFF else 0), dtype=torch.int16).view(
        torch.bfloat16
    )
    xs2 = xs.clone()
    xs2[2, 7] = torch.inf
    ys, _ = rnn(xs2, (nan, h.clone()))
    assert ys[:, 5].isnan().all()
    others = [row for row in range(33) if row not in (5, 7)]
    assert torch.equal(ys[:, others], clean[:, others])
    assert torch.equal(ys[:2, 7], clean[:2, 7])


SEVERAL = check.Case("lstm", torch.bfloat16, 5, 37, 384, 16)


@pytest.mark.parametrize("partners", [0, 1, 2])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_groups_that_are_not_all_there_at_once_are_refused(partners, monkeypatch):
    """They would wait for ever for those that are not."""
    far_plan(monkeypatch, 8, partners)
    chosen = cuda.plan_for(named("lstm"), "backward", 384, 2, 8, 0)
    assert chosen is not None
    most = 32  # blocks on one SM, however small they are
    groups = most * cuda.machine(0).clusters[1] // chosen.cluster + 1
    launch = cuda.prepared(chosen, cuda.BF16, chosen.rows * groups, 0, 17)
    with pytest.raises(WorkFailed, match="cooperative"):
        launch(torch.cuda.current_stream().cuda_stream, [0] * 17)


@pytest.mark.parametrize(
    ("job", "rows", "partners", "hopper", "straight", "turns", "crowded"),
    [
        (SEVERAL, 8, 0, False, False, 1, False),
        (SEVERAL, 8, 2, False, False, 1, False),
        (SEVERAL, 8, 0, False, True, 1, False),
        (SEVERAL, 8, 2, True, False, 1, False),
        (replace(SEVERAL, cell="tanh", size=608, batch=150), 32, 0, True, False, 2, False),
        (replace(SEVERAL, size=768), 16, 8, True, False, 1, True),
    ],
)
@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="no Hopper GPU")
def test_on_a_gpu_groups_after_each_other_compute_what_they_do_beside_each_other(
    job, rows, partners, hopper, straight, turns, crowded, monkeypatch
):
    far_plan(monkeypatch, rows, partners, hopper, straight, turns, crowded=crowded)
    m = check.material(job).to(torch.bfloat16, "cuda")
    beside = check.answers(cuda.KERNEL, job, m)
    every = cuda.plan_for
    monkeypatch.setattr(cuda, "plan_for", lambda *job: replace(every(*job), at_once=1))
    for way in WAYS:
        p = cuda.plan_for(named(job.cell), way, job.size, 2, job.batch, 0)
        assert p.turns == turns
        assert len(p.launches(job.batch)) > 2
    after = check.answers(cuda.KERNEL, job, m)
    assert beside.keys() == after.keys()
    for name, x in beside.items():
        assert torch.equal(x, after[name]), name


@pytest.mark.parametrize(("partners", "straight"), [(0, False), (2, False), (0, True)])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_far_groups_wait_for_no_number_that_is_there(partners, straight, monkeypatch):
    """Blocks wait for values; one that looks as if it had not been stored would be waited for."""
    far_plan(monkeypatch, 8, partners, straight=straight)
    job = check.Case("lstm", torch.float32, 4, 5, 384, 16)
    m = check.material(job).to(torch.float32, "cuda")
    m.state[0].view(torch.int32)[0] = cuda.EMPTY  # of a row that no step changes
    m.dstate[0][1] = torch.inf
    m = replace(m, lengths=torch.tensor([0, 4, 4, 4, 4], device="cuda"))
    found = check.answers(cuda.KERNEL, job, m)
    assert found["hs"][:, 0].isnan().all()
    assert found["hs"][:, 1:].isfinite().all()
    assert not found["dstate0"][1].isfinite().any()
    assert found["dstate0"][2:].isfinite().all()


def carried_back(dtype, change) -> torch.Tensor:
    """dL/dh_0 of a wide lstm after two steps, weights and pulls as `change` leaves them."""
    m = check.material(check.Case("lstm", dtype, 2, 9, 384, 16)).to(dtype, "cuda")
    m = replace(m, dstate=tuple(map(torch.zeros_like, m.dstate)))
    trace = cuda.KERNEL.forward(m.piece(named("lstm")))
    m = change(m)
    return cuda.KERNEL.backward(m.piece(named("lstm")), trace, m.pull())[2][0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="no Hopper GPU")
def test_on_a_hopper_gpu_shares_in_half_precision_keep_nan_and_infinity(hopper, dtype, monkeypatch):
    """One bit of four shares is not theirs: whichever of them is no number, it stays none."""
    far_plan(monkeypatch, 8, 2, hopper)
    whole = carried_back(dtype, lambda m: m)
    assert whole.isfinite().all()
    for unit, value in itertools.product((0, 1, 2, 3, 383), (torch.nan, torch.inf, -torch.inf)):

        def column(m, unit=unit, value=value):
            W_hh = m.w.W_hh.clone()
            W_hh[5, unit] = value  # which h_0 alone meets: xi = 0 cuts step 2 off
            xi = torch.tensor([1.0, 0.0], device="cuda")
            return replace(m, w=m.w._replace(W_hh=W_hh), xi=xi)

        found = carried_back(dtype, column)
        assert not found[:, unit].isfinite().any()
        assert value == value or found[:, unit].isnan().all()
        others = [u for u in range(384) if u != unit]
        assert found[:, others].isfinite().all()

    def row(m):
        dhs = m.dhs.clone()
        dhs[1, 3] = torch.inf
        return replace(m, dhs=dhs)

    found, others = carried_back(dtype, row), [0, 1, 2, 4, 5, 6, 7, 8]
    assert not found[3].isfinite().any()
    assert torch.equal(found[others], whole[others])


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="no Hopper GPU")
def test_on_a_hopper_gpu_shares_follow_gradients_of_any_size(hopper, monkeypatch):
    """bfloat16 reaches as far as float32: scaled by a power of two, the same bits; of 0, 0."""
    far_plan(monkeypatch, 8, 2, hopper)
    whole = carried_back(torch.bfloat16, lambda m: m)
    for power in (-90, 60):
        scaled = carried_back(torch.bfloat16, lambda m, p=power: replace(m, dhs=m.dhs * 2.0**p))
        assert torch.equal(scaled * 2.0**-power, whole)
    assert not carried_back(torch.bfloat16, lambda m: replace(m, dhs=m.dhs * 0)).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_errors_are_no_larger_than_cudnns():
    assert check.check_against_cudnn(seeds=3) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_on_a_gpu_a_checkpointed_token_layer_computes_what_a_stored_one_does(kind, dtype):
    torch.manual_seed(0)
    rnn = kind(28, 256, device="cuda", dtype=dtype)
    ids, dys = torch.randint(28, (37, 9), device="cuda"), torch.randn(37, 9, 256, device="cuda")
    found = []
    for memory in (Stored(), Checkpointed(every=5)):
        rnn.memory = memory
        rnn.zero_grad()
        h = torch.zeros(1, 9, 256, device="cuda", dtype=dtype, requires_grad=True)
        ys, _ = rnn(ids, h if kind is not nn.LSTM else (h, torch.zeros_like(h)))
        ys.backward(dys.to(dtype))
        found.append([ys, h.grad, *(p.grad for p in rnn.parameters())])
    whole, pieces = found
    exact = 0 if kind is nn.LSTM and dtype == torch.bfloat16 else 2  # whose c is rounded once more
    for a, b in zip(whole[:exact], pieces[:exact], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(whole, pieces, strict=True):  # weights' gradients are summed piece by piece
        assert (a - b).norm() <= 8 * check.ROUNDOFF[dtype] * a.norm()  # there are 8 pieces


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("carry", [Full(), Truncated(3)], ids=repr)
def test_on_a_gpu_gradients_may_begin_at_any_address(carry, monkeypatch):
    """A part of a longer tensor, as `torch.cat` hands back, is read 16 bytes at a time."""
    monkeypatch.setenv("ELMAN_KERNELS", "cuda")
    torch.manual_seed(0)
    rnn, xs = nn.LSTM(4, 16, device="cuda", carry=carry), torch.randn(5, 3, 4, device="cuda")
    weights = torch.randn(1 + 5 * 3 * 16, device="cuda")
    found = []
    for one in (torch.zeros(1, device="cuda"), torch.zeros(0, device="cuda")):
        ys, (h, _) = rnn(xs)
        joined = torch.cat([one, ys.flatten(), one, h.flatten()])
        pulls = torch.cat([one, weights[1:], one, weights[: h.numel()]])
        rnn.zero_grad()
        joined.backward(pulls)
        found.append([p.grad.clone() for p in rnn.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="no Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("hidden", [701, 1135])
def test_on_a_gpu_stacks_of_wider_layers_are_cudnns(hidden, kind, dtype):
    """Two layers: the second reads the first's units and none that were added."""
    if dtype == torch.float32 and kind is not nn.RNN and hidden == 1135:
        pytest.skip("no GPU holds so many gates of float32")
    torch.manual_seed(0)
    rnn = kind(12, hidden, 2, device="cuda", dtype=dtype)
    xs = torch.randn(7, 33, 12, device="cuda", dtype=dtype, requires_grad=True)
    found = []
    for kernel in ("cuda", "cudnn"):
        rnn.zero_grad()
        xs.grad = None
        with kernels.using(kernel):
            ys, last = rnn(xs)
        ends = [ys, *(last if isinstance(last, tuple) else (last,))]
        torch.manual_seed(1)
        torch.autograd.backward(ends, [torch.randn_like(t) for t in ends])
        assert all(t.is_contiguous() for t in ends)
        found.append([*ends, xs.grad, *(p.grad for p in rnn.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 16 * check.ROUNDOFF[dtype] * b.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM, "mgu", "peephole", "slstm"])
def test_on_a_gpu_prepared_calls_are_the_long_way_to_the_bit(kind, layers, dtype, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "cuda")
    make = functools.partial(nn.Layers, kind) if isinstance(kind, str) else kind
    found = []
    for hidden, long_way in itertools.product((36, 256, 1024), (False, True)):
        torch.manual_seed(0)
        rnn = make(12, hidden, layers, device="cuda", dtype=dtype)
        xs = torch.randn(7, 5, 12, device="cuda", dtype=dtype, requires_grad=True)
        if long_way:
            monkeypatch.setattr(rnn, "_key", lambda *_: None)
        ys, last = rnn(xs)
        last = last if isinstance(last, tuple) else (last,)
        ends = [ys, *last]
        torch.autograd.backward(ends, [torch.randn_like(t) for t in ends])
        assert long_way == (not rnn._settled)
        found.append([*ends, xs.grad, *(p.grad for p in rnn.parameters())])
    for i in range(0, len(found), 2):
        for a, b in zip(found[i], found[i + 1], strict=True):
            assert torch.equal(a, b)
