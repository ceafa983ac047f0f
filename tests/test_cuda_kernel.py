"""The CUDA kernel: its plans and its arrays anywhere, its arithmetic where there is a GPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paper_gpu
from elman.errors import WorkFailed
from elman.kernels import cuda, fused, reference
from elman.kernels.cuda import check, driver, plan

cells = st.sampled_from(sorted(plan.GATES))
jobs = st.builds(
    check.Job,
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


@given(job=jobs)
def test_around_the_launches_every_array_is_where_the_reference_has_it(job):
    m = check.material(job)
    with paper_gpu.present():
        found = check.answers(cuda.KERNEL, job, m)
    exact = check.answers(reference.KERNEL, job, m)
    assert found.keys() == exact.keys()
    for name, x in exact.items():
        torch.testing.assert_close(found[name].double(), x, rtol=1e-5, atol=1e-5, msg=name)


@given(job=jobs)
def test_pieces_add_into_gradients_already_found(job):
    m = check.material(job)
    with paper_gpu.present():
        trace = cuda.KERNEL.forward(job.cell, m.w, m.xs, m.state, m.lengths)
        rest = (trace, m.dhs, m.dstate, m.xi, m.lengths)
        _, once, _ = cuda.KERNEL.backward(job.cell, m.w, m.xs, *rest)
        total = once.map(torch.clone)
        _, fresh, _ = cuda.KERNEL.backward(job.cell, m.w, m.xs, *rest)
        _, twice, _ = cuda.KERNEL.backward(job.cell, m.w, m.xs, *rest, into=fresh)
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
        chosen = plan.cheapest(cell, direction, size, 2, batch, paper_gpu.MACHINE)
        assert chosen is not None
        assert chosen.hidden >= size
        assert chosen.m % 16 == 0
        assert chosen.m_tiles * plan.WARPS * 16 >= chosen.m * chosen.warps_k
        if chosen.gathers:  # else a tile of units has one owner
            assert chosen.m_tiles * plan.WARPS * 16 == chosen.m * chosen.warps_k
        else:
            assert chosen.units % 16 == 0
        assert chosen.groups(batch) * chosen.rows >= batch
        assert chosen.shared_bytes <= paper_gpu.MACHINE.shared_bytes
        assert chosen.register_tiles <= plan.REGISTER_TILES


def test_a_matrix_too_large_for_a_cluster_has_no_plan():
    assert plan.cheapest("tanh", "forward", 4096, 2, 64, paper_gpu.MACHINE) is None


def test_a_gpu_without_clusters_runs_what_fits_one_sm():
    old = plan.Machine({1: 108}, 166912)
    chosen = plan.cheapest("tanh", "forward", 256, 2, 64, old)
    assert chosen is not None
    assert chosen.cluster == 1
    assert plan.cheapest("tanh", "forward", 1024, 2, 64, old) is None


def refusal(dtype=torch.bfloat16, cell="tanh", device="cpu", **layer):
    w = cuda.Layer(torch.zeros(8, 3), torch.zeros(8, 8), **layer)
    w = w.map(lambda p: p.to(device, dtype))
    xs = torch.zeros(2, 1, 3, dtype=dtype, device=device)
    return cuda.KERNEL.refuses(cell, w, xs, (torch.zeros(1, 8, dtype=dtype, device=device),))


def test_tensors_on_a_cpu_are_refused():
    assert refusal() == "the tensors are on cpu, not on a CUDA GPU"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is here")
def test_a_missing_driver_is_named():
    with pytest.raises((WorkFailed, OSError, AssertionError, RuntimeError)):
        driver.call("cuInit", 0)


@pytest.mark.parametrize("job", check.jobs(20, 4, (1, 7, 33)), ids=repr)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_torchs_cells_step_by_step_are_the_reference(job):
    assert check.faults(job, fused.KERNEL) == []


@pytest.mark.parametrize("job", check.jobs(40, 3, (1, 7, 33, 64, 100, 256, 300, 512)), ids=repr)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_answers_are_the_references_and_the_same_each_time(job):
    assert check.faults(job) == []
