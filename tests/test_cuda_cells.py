"""Described cells on the CUDA kernels: what is written for them, and on a GPU what they compute."""

import copy
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import cuda_check as check
import elman
import paper_gpu
from elman import nn
from elman.cells import CELLS
from elman.cells.declaration import cell
from elman.cells.described import Described
from elman.gradients import Checkpointed, Randomized, Truncated
from elman.kernels import cuda, reference
from elman.kernels.cuda import driver
from elman.kernels.cuda.equations import OWN, body
from elman.kernels.cuda.plan import Layer, Machine, Plan, cheapest, pair_plans, single_plans
from elman.training.graphed import Graphed, tensors_of

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


def of_many_gates(gates):
    @cell(gates=gates, states=2)
    def of_many_gates(a_x, a_h, h, c):
        y = sum(torch.tanh(a_x[i] + a_h[i] * (i % 3)) for i in range(gates)) / gates
        return torch.tanh(2 * y + c), 0.5 * c + y * (1 + h)

    return of_many_gates


def that_divides():
    @cell(gates=1, parameters={"scale": 2.0})
    def that_divides(a_x, a_h, h, scale):
        return torch.tanh(a_x[0] + a_h[0]) / scale + 1 / (2 + torch.log(scale * scale))

    return that_divides


def of_everything():
    """Whatever an expression may be, in one equation."""

    @cell(gates=2, states=2)
    def of_everything(a_x, a_h, h, c):
        a, b = a_x[0] + a_h[0], a_x[1] * torch.sin(a_h[1])
        n = torch.erf(a) + torch.log1p(b * b) - torch.expm1(-a * a) + torch.sqrt(1 + a * a)
        n = torch.where(n > 1e30, float("inf"), n) * torch.cos(b) + F.softplus(a) + F.gelu(b)
        n = torch.minimum(torch.maximum(n, c), 2 - c.abs()) + torch.log(1 + c * c) / (1 + h * h)
        return torch.tanh(n) + torch.clamp(b, -0.5, 0.5), torch.exp(-a * a) * torch.tanh(c + n)

    return of_everything


def test_equal_equations_are_one_text_and_others_another():
    def in_two_lines(a_x, a_h, h):
        y = a_x[0] * a_h[1]
        return y + h

    one = Described(lambda a_x, a_h, h: a_x[0] * a_h[1] + h, "alike", gates=2)
    again = Described(in_two_lines, "*/ #include <x>\n", gates=2)  # whatever it is called
    other = Described(lambda a_x, a_h, h: a_x[0] * a_h[1] - h, "alike", gates=2)
    assert body(one) == body(again)
    assert body(one) != body(other)


@pytest.mark.parametrize("name", ["mgu", "peephole", "slstm", "noisy lstm"])
def test_a_plan_counts_what_a_described_cell_reads(name):
    own = check.cell_of(name)
    kept, states = body(own).kept, len(own.noise)
    plan = {
        way: cheapest(own, way, 100, 2, 11, paper_gpu.MACHINE) for way in ("forward", "backward")
    }
    for way, numbers in (("forward", body(own).numbers), ("backward", body(own).parameters)):
        chosen = plan[way]
        assert chosen is not None
        assert chosen.defines(0)["CELL"] == OWN
        fewer = replace(chosen, cell=CELLS["tanh"] if own.gates == 1 else CELLS["lstm"])
        assert chosen._numbers == numbers
        assert fewer._numbers == 0
    assert body(own).inputs == own.gates + states
    assert body(own).past >= 1 + kept + states


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("name", ["peephole", "slstm", "noisy mgu", "of_everything"])
def test_what_is_written_for_a_cell_compiles(name, way, tmp_path):
    own = of_everything() if name == "of_everything" else check.cell_of(name)
    plan = cheapest(own, way, 100, 2, 11, paper_gpu.MACHINE)
    assert plan is not None
    assert "warning" not in compiled(plan, tmp_path)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("name", ["relu", "described tanh"])
def test_turns_compile(name, way, tmp_path):
    layer, machine = Layer(check.cell_of(name), way, 608, 2), Machine({1: 132, 2: 66}, 232448, True)
    every = pair_plans(layer, 70, machine)
    compiled(next(p for p in every if p.turns == 2), tmp_path)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize(("name", "dtype"), [("gru", 1), ("lstm", 2), ("of_everything", 3)])
def test_layers_of_single_sms_compile(name, dtype, way, tmp_path):
    own = of_everything() if name == "of_everything" else check.cell_of(name)
    layer = Layer(own, way, 24, 2 if dtype < 2 else 4)
    for plan in single_plans(layer, paper_gpu.MACHINE):
        assert "warning" not in compiled(plan, tmp_path, dtype)


def compiled(plan: Plan, tmp_path: Path, dtype: int = 0) -> str:
    """What nvcc says of it."""
    (tmp_path / "own.cuh").write_text(body(plan.cell).header)
    macros = [f"-D{macro}={value}" for macro, value in plan.defines(dtype).items()]
    home = Path(driver.__file__).parent
    source, made = home / f"{plan.direction}.cu", tmp_path / "cell.ptx"
    architecture = "-arch=sm_90" + "a" * plan.hopper
    options = ["-ptx", architecture, "-std=c++17", f"-I{tmp_path}", f"-I{home}"]
    command = ["nvcc", *options, *macros, str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("name", [*check.SHIPPED, *check.TWIN, *check.NOISY])
def test_around_the_launches_every_array_of_a_described_cell_is_the_references(name, ids):
    job = check.Case(name, torch.float64, 4, 3, 8, 5, ids=ids, lengths=True, xi=2, seed=1)
    m = check.material(job)
    with paper_gpu.present():
        found = check.answers(cuda.KERNEL, job, m)
    exact = check.answers(reference.KERNEL, job, m)
    assert found.keys() == exact.keys()
    for array, x in exact.items():
        torch.testing.assert_close(found[array].double(), x, rtol=1e-5, atol=1e-5, msg=array)


PAPER = [
    replace(job, dtype=torch.bfloat16)
    for name in ("mgu", "coupled", "peephole", "slstm", "described gru", "described lstm")
    for job in check.jobs(2, 70, (7, 16), (name,))
]


@pytest.mark.parametrize("job", PAPER, ids=repr)
def test_what_is_kept_in_half_precision_is_within_rounding(job):
    with paper_gpu.present():
        assert check.judged(job, cuda.KERNEL, "cpu").faults == []


# ---------------------------------------------------------------------- on a GPU


EVERY = check.described_jobs(4, 60)


@pytest.fixture(scope="module")
def ready() -> None:
    check.compile_ahead(EVERY)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("job", EVERY, ids=repr)
def test_on_a_gpu_a_described_cell_is_the_reference_and_the_same_each_time(job):
    assert check.faults(job) == []


@pytest.mark.gpu
@on_a_gpu
def test_on_a_gpu_wide_layers_of_described_cells_are_right():
    assert check.faulty(check.DESCRIBED) == {}


def gradients(rnn, xs):
    ys, last = rnn(xs)
    data = ys.data if isinstance(ys, torch.nn.utils.rnn.PackedSequence) else ys
    last = last if isinstance(last, tuple) else (last,)
    pull = torch.linspace(-1, 1, data.numel(), dtype=torch.float64).sin().reshape(data.shape)
    loss = (data * pull.to(data)).sum() + sum((s * s).sum() for s in last)
    return [data.detach(), *torch.autograd.grad(loss, list(rnn.parameters()))]


def agree(mine, exact, eps):
    """To a few hundred roundings of the largest number, and alive."""
    for a, b in zip(mine, exact, strict=True):
        assert (a.cpu().double() - b).abs().max() <= 400 * eps * max(1, float(b.abs().max()))
        assert float(b.abs().max()) > 1e-3


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("carry", [Truncated(3), Randomized(0.6, seed=1)], ids=repr)
@pytest.mark.parametrize("memory", [None, Checkpointed(3)], ids=repr)
@pytest.mark.parametrize("name", check.SHIPPED)
def test_on_a_gpu_stacks_directions_lengths_and_memory_are_float64s(name, memory, carry):
    torch.manual_seed(2)
    rows = [torch.randn(n, 5, dtype=torch.float64) for n in (9, 7, 7, 2)]
    exact = nn.Layers(
        name, 5, 20, num_layers=2, bidirectional=True, carry=carry, dtype=torch.float64
    )
    if memory is not None:
        exact.memory = memory
    mine = copy.deepcopy(exact).to("cuda", torch.float32)
    packed = torch.nn.utils.rnn.pack_sequence(rows)
    there = torch.nn.utils.rnn.pack_sequence([r.float() for r in rows]).to("cuda")
    assert elman.kernels.explain(mine, there.data[:, None]).runs == "cuda"
    rnn = torch.backends.cudnn.rnn
    before, rnn.fp32_precision = rnn.fp32_precision, "ieee"  # pyright: ignore[reportAttributeAccessIssue]
    try:
        found = gradients(mine, there)
    finally:
        rnn.fp32_precision = before  # pyright: ignore[reportAttributeAccessIssue]
    agree(found, gradients(exact, packed), 2**-22)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("gates", [0, 1, 5, 8, 16])
def test_on_a_gpu_cells_of_ones_own_are_float64s(gates):
    """Many gates; and units that do not exist, whose equations give no number."""
    own = [that_divides, of_everything][gates]() if gates < 2 else of_many_gates(gates)
    for rows, hidden in ((1, 5), (3, 40), (33, 21)):
        torch.manual_seed(rows)
        exact = nn.Layers(own, 4, hidden, dtype=torch.float64)
        xs = torch.randn(6, rows, 4, dtype=torch.float64)
        mine = copy.deepcopy(exact).to("cuda", torch.float32)
        job = check.Case("mgu", torch.float32, 1, 1, 1, 1, tf32=False)
        with job.switched():
            agree(gradients(mine, xs.float().cuda()), gradients(exact, xs), 2**-22)


@pytest.mark.gpu
@on_a_gpu
def test_on_a_gpu_explain_names_the_cell_and_what_cannot_run_there():
    xs = torch.randn(4, 2, 8, device="cuda")
    for name in (*check.SHIPPED, that_divides().name):
        rnn = nn.Layers(name, 8, 12, device="cuda")
        said = str(elman.kernels.explain(rnn, xs))
        assert said == f"cuda: runs (compiled from {name}; captured after 4 calls)"
    normed = elman.kernels.explain(nn.Layers("layer_norm_lstm", 8, 12, device="cuda"), xs)
    assert normed.runs == "reference"
    assert normed.reasons["cuda"] == "it has no layer_norm_lstm cell"
    double = elman.kernels.explain(nn.Layers("mgu", 8, 12, device="cuda").double(), xs.double())
    assert double.reasons["cuda"] == "torch.float64 is none of float16, bfloat16, float32"


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", ["lstm", "mgu", "slstm"])
def test_on_a_gpu_noise_is_the_references(name, monkeypatch):
    def run(kernel, dtype):
        monkeypatch.setenv("ELMAN_KERNELS", kernel)
        torch.manual_seed(7)
        rnn = nn.Layers(name, 5, 24, zoneout=0.2, update_dropout=0.25, dtype=torch.float64)
        rnn.to("cuda", dtype)
        xs = torch.randn(9, 3, 5, dtype=torch.float64).to("cuda", dtype)
        torch.manual_seed(8)  # of the masks
        return gradients(rnn, xs)

    with check.Case("mgu", torch.float32, 1, 1, 1, 1, tf32=False).switched():
        mine, exact = run("cuda", torch.float32), run("reference", torch.float32)
    agree(mine, [x.cpu().double() for x in exact], 2**-22)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", ["peephole", "slstm"])
def test_on_a_gpu_an_update_of_a_described_cell_can_be_captured(name):
    windows, ends = torch.randint(5, (6, 7, 3), device="cuda"), []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Layers(name, 5, 16, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def update(x, model=model, optimizer=optimizer):
            optimizer.zero_grad(set_to_none=True)
            loss = model(x)[0].square().sum()
            loss.backward()
            optimizer.step()
            return (loss.detach(),)

        (loss,) = update(windows[0])
        step = (
            Graphed(update, (windows[1],), changes=tensors_of(model, optimizer))
            if graphed
            else update
        )
        for x in windows[1:]:
            (loss,) = step(x)
        ends.append([loss.clone(), *model.parameters()])
    for eager, replayed in zip(*ends, strict=True):
        torch.testing.assert_close(eager, replayed)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", ["mgu", "peephole", "slstm"])
def test_on_a_gpu_torch_compile_takes_a_described_cell(name):
    torch.manual_seed(3)
    rnn = nn.Layers(name, 5, 16, num_layers=2, device="cuda")
    xs = torch.randn(7, 3, 5, device="cuda")
    plain = gradients(rnn, xs)
    compiled = gradients(torch.compile(rnn, backend="aot_eager", fullgraph=True), xs)
    for a, b in zip(compiled, plain, strict=True):  # both in TF32, each with sums of its own
        torch.testing.assert_close(a, b, rtol=0, atol=8 * 2**-11 * float(b.abs().max()))
