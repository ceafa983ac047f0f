"""Described cells: read off a function, differentiated, compiled, and refused in words."""

import copy
import errno
import itertools
import json
import os
import pickle
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import elman
from elman import LanguageModel, generation, nn
from elman.cells import CELLS, Weights
from elman.cells.base import diagonal_blocks
from elman.cells.declaration import cell
from elman.cells.described import Described
from elman.cells.expressions import OPERATIONS, constant, evaluate, given, make, pulls
from elman.cells.noisy import noisy
from elman.cells.tracing import trace
from elman.cli import run
from elman.errors import UserError
from elman.forecasting import Recurrent as Forecaster
from elman.gradients import Checkpointed, Chunked, Randomized, Truncated
from elman.kernels import described
from elman.kernels.contract import Piece
from elman.reports import report

SHIPPED = [c for c in CELLS.values() if isinstance(c, Described) and not c.is_users]
needs_compiler = pytest.mark.skipif(
    described._compiler() is None or described.CPU.library is None, reason="no C++ compiler"
)


def by_autograd(c, rnn, xs, lengths=None):
    """The plainest loop over time through the cell's own function; one layer, one direction."""
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "own_l0")
    W_ih, W_hh, b_ih, b_hh, own = (getattr(rnn, name, None) for name in names)
    assert W_hh is not None
    if c.heads != 1:
        W_hh = W_hh * diagonal_blocks(W_hh, c.heads)
    w = Weights(W_ih, W_hh, b_ih, b_hh, None, own)
    state = tuple(xs.new_zeros(xs.shape[1], n) for n in c.state_sizes(rnn.hidden_size))
    ys = []
    for x in xs:
        state, _ = c.step(w, x, state)
        ys.append(state[0])
    return torch.stack(ys), state


def gradients(rnn, xs, run):
    for p in rnn.parameters():
        p.grad = None
    xs = xs.detach().requires_grad_()
    ys, state = run(xs)
    pull = torch.linspace(-1, 1, ys.numel(), dtype=ys.dtype, device=ys.device)
    pull = pull.reshape(ys.shape).sin()
    last = state if isinstance(state, tuple) else (state,)
    ((ys * pull).sum() + sum((s * s).sum() for s in last)).backward()
    return ys, [xs.grad, *(p.grad for p in rnn.parameters())]


def assert_close(mine, theirs, eps):
    """To a few hundred roundings of the largest number."""
    for a, b in zip(mine, theirs, strict=True):
        a, b = a.detach().cpu(), b.detach().cpu()
        assert (a - b).abs().max() <= 400 * eps * max(1, float(b.abs().max()))


# ---------------------------------------------------------------------- expressions


POINTWISE = {
    "arithmetic": lambda a, b: (a - 2 * b) / (3 + a * a) - (-b) + 1 / (2 + b * b) + (1 - a),
    "powers": lambda a, b: a**3 + (1 + b * b) ** 0.5 + torch.rsqrt(1 + a * a) + (a * a + 1) ** 1.5,
    "powers of negative numbers": lambda a, b: a**-1 + (1 + b * b) ** -2 + (a / 3) ** 17 + b**0,
    "exponents": lambda a, b: 2**a + (1 + b * b) ** a + torch.exp(a) ** -0.5,
    "squashing": lambda a, b: torch.tanh(a) * torch.sigmoid(b) + F.hardtanh(a) + F.hardsigmoid(b),
    "exponentials": lambda a, b: torch.exp(a / 3) + torch.log(1 + b * b) + torch.expm1(b / 4),
    "logarithms": lambda a, b: torch.log1p(a * a) + F.softplus(b) + F.logsigmoid(a),
    "rectifiers": lambda a, b: torch.relu(a) + F.leaky_relu(b) + F.elu(a) + F.selu(b) + F.silu(a),
    "gaussian": lambda a, b: F.gelu(a) + F.gelu(b, approximate="tanh") + torch.erf(a),
    "waves": lambda a, b: torch.sin(a) * torch.cos(b),
    "choices": lambda a, b: (
        torch.where(a > b, a, b * b) + torch.maximum(a, b) * torch.minimum(a, b)
    ),
    "bounds": lambda a, b: torch.clamp(a, -0.5, 0.5) + b.clamp(min=0) + torch.abs(a) * b.sign(),
    "others": lambda a, b: torch.lerp(a, b, 0.3) + torch.addcmul(a, a, b) + torch.square(b),
    "true or false": lambda a, b: (
        (a > b) * a + (a < 0).double() * b + torch.logical_not(a > 1).to(a.dtype) * b
    ),
    "chosen numbers": lambda a, b: (
        torch.where(a > b, 1.0, 0.1) * a + torch.where(a > 0, b, 0.1) + torch.where(b > 9, 2.5, b)
    ),
    "filled": lambda a, b: a.masked_fill(b > 0, 2.0) * b + torch.logaddexp(a, b),
    "held": lambda a, b: a * b.detach() + torch.ones_like(a) - torch.zeros_like(b) - b,
}


CORNERS = {
    "powers": lambda a, b: torch.relu(a) ** 1.5 + b**2 * a**0,
    "maximum": lambda a, b: torch.maximum(a, b) + torch.minimum(a, 2 * b),
    "clamp": lambda a, b: a.clamp(-1, 2) + b.clamp(min=0) * b.clamp(max=3),
    "clamp of tensors": lambda a, b: torch.clamp(a, min=b) + torch.clamp(2 * a, max=b),
    "rectifiers": lambda a, b: torch.relu(a) + F.leaky_relu(b) + F.elu(a, 2.0) + F.selu(b),
    "hard": lambda a, b: F.hardtanh(a) + F.relu6(b) + F.hardswish(a) + 3 * F.relu6(b + 3),
    "magnitudes": lambda a, b: torch.abs(a) * b.sign() + torch.where(a >= b, a, b * b),
    "softplus": lambda a, b: F.softplus(a, beta=2, threshold=4) + b,
}


def assert_is_torchs(f, name, a, b):
    found = trace(lambda a, b: f(a, b), name, lambda t: [t["a"], t["b"]], ["a", "b"], [], 1)
    a, b = a.requires_grad_(), b.requires_grad_()
    y = f(a, b)
    torch.testing.assert_close(evaluate(found, {"a": a, "b": b})[0], y)
    pull = torch.randn(len(a), dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    back = pulls(found, [given("d")], [given("a"), given("b")])
    mine = evaluate(back, {"a": a.detach(), "b": b.detach(), "d": pull})
    theirs = torch.autograd.grad(y, (a, b), pull)
    for m, t in zip(mine, theirs, strict=True):
        torch.testing.assert_close(m.expand_as(t), t, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", POINTWISE)
def test_an_expression_and_its_derivative_are_torchs(name):
    a, b = torch.randn(2, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert_is_torchs(POINTWISE[name], name, a, b)


@pytest.mark.parametrize("name", CORNERS)
def test_a_derivative_is_torchs_on_every_corner(name):
    """States begin at 0, and what was rectified is 0 again and again."""
    whole = torch.arange(-6, 7, dtype=torch.float64)
    assert_is_torchs(CORNERS[name], name, *torch.cartesian_prod(whole, whole).T.contiguous())


def test_what_is_known_beforehand_is_not_computed():
    a, zero, one = given("a"), constant(0), constant(1)
    less = -a
    assert a + zero is zero + a is a - zero is a * one is one * a is a / one is -less is a
    assert a * zero is zero * a is zero / a is zero
    assert zero - a is less
    assert make("where", make("gt", a, zero), a, a) is a
    assert constant(2) * constant(3) - constant(1) is constant(5)


# ---------------------------------------------------------------------- cells


@pytest.mark.parametrize("c", SHIPPED, ids=lambda c: c.name)
def test_a_shipped_cell_has_the_gradient_of_its_own_function(c, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    torch.manual_seed(1)
    rnn = nn.Layers(c, 3, 8, dtype=torch.float64)
    xs = torch.randn(6, 4, 3, dtype=torch.float64)
    ys, mine = gradients(rnn, xs, rnn)
    plain, theirs = gradients(rnn, xs, lambda xs: by_autograd(c, rnn, xs))
    assert_close([ys, *mine], [plain, *theirs], 2**-52)
    assert all(float(g.abs().max()) > 1e-3 for g in mine), "a gradient that is alive"


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("c", SHIPPED, ids=lambda c: c.name)
def test_the_compiled_cell_is_the_reference(c, dtype, monkeypatch):
    """Many rows and few, one step, units that fill no vector, ids."""
    eps = torch.finfo(dtype).eps
    shapes = [(5, 1, 12), (1, 3, 20), (7, 33, 12), (4, 9, 40)]
    for (steps, rows, hidden), ids in itertools.product(shapes, (False, True)):
        torch.manual_seed(steps)
        rnn = nn.Layers(c, 6, hidden).to(dtype)
        xs = torch.randint(6, (steps, rows)) if ids else torch.randn(steps, rows, 6, dtype=dtype)
        assert elman.kernels.explain(rnn, xs).runs == "described"

        def run(xs, rnn=rnn):
            ys, last = rnn(xs)
            return ys, torch.autograd.grad(
                (ys * ys.detach().cos()).sum() + sum(s.sum() for s in _tuple(last)),
                list(rnn.parameters()),
            )

        ys, mine = run(xs)
        with monkeypatch.context() as plain:
            plain.setenv("ELMAN_KERNELS", "reference")
            expected, theirs = run(xs)
        assert_close([ys, *mine], [expected, *theirs], eps)


def _tuple(state):
    return state if isinstance(state, tuple) else (state,)


@needs_compiler
@pytest.mark.parametrize("carry", [Truncated(3), Randomized(0.6, seed=1)], ids=repr)
@pytest.mark.parametrize("c", [CELLS["mgu"], CELLS["slstm"]], ids=lambda c: c.name)
def test_carry_memory_lengths_and_stacks_work_as_for_any_cell(c, carry, monkeypatch):
    torch.manual_seed(2)
    options = {"num_layers": 2, "bidirectional": True, "dtype": torch.float64}
    packed = torch.nn.utils.rnn.pack_sequence(
        [torch.randn(n, 3, dtype=torch.float64) for n in (9, 7, 7, 2)]
    )

    def run(memory):
        torch.manual_seed(3)
        rnn = nn.Layers(c, 3, 8, carry=copy.deepcopy(carry), **options)
        if memory is not None:
            rnn.memory = memory
        ys, last = rnn(packed)
        loss = (ys.data * ys.data.detach().sin()).sum() + sum(s.sum() for s in _tuple(last))
        return [ys.data, *torch.autograd.grad(loss, list(rnn.parameters()))]

    mine, again = run(None), run(Checkpointed(3))
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    assert_close(mine, run(None), 2**-52)
    assert_close(again, mine, 2**-52)


@needs_compiler
@pytest.mark.usefixtures("hastily")
def test_recurrent_takes_a_declared_cell_and_its_sizes():
    @cell(gates=2, states=1)
    def minimal_gated(a_x, a_h, h):
        f = torch.sigmoid(a_x[0] + a_h[0])
        n = torch.tanh(a_x[1] + f * a_h[1])
        return (1 - f) * h + f * n

    rnn = nn.Recurrent(minimal_gated, 6, 12, carry=Truncated(3))
    xs = torch.randn(7, 2, 6)
    said = str(elman.kernels.explain(rnn, xs))
    assert said.splitlines()[-1] == "described: runs (compiled from minimal_gated)"
    twin = nn.Layers("mgu", 6, 12, carry=Truncated(3))
    twin.load_state_dict(rnn.state_dict())
    (ys, mine), (expected, theirs) = gradients(rnn, xs, rnn), gradients(twin, xs, twin)
    assert_close([ys, *mine], [expected, *theirs], 2**-23)
    module = nn.Recurrent(torch.nn.GRUCell(6, 12), carry=Truncated(3))
    again = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    assert isinstance(again, nn.Recurrent)
    assert torch.equal(again(xs)[0], module(xs)[0])
    with pytest.raises(UserError, match="modules and cells, and was given 3"):
        nn.Recurrent(3)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_chunks_of_time_run_a_declared_cell_and_no_module():
    torch.manual_seed(5)
    rnn = nn.Recurrent("mgu", 3, 16, dtype=torch.float64)
    xs = torch.randn(2400, 1, 3, dtype=torch.float64)
    expected, theirs = gradients(rnn, xs, rnn)
    rnn.time = Chunked(chunks=8, overlap=150, tolerance=1e-9)
    ys, mine = gradients(rnn, xs, rnn)
    assert rnn.seams.forward is not None
    assert rnn.seams.forward.chunks > 1, rnn.seams
    for a, b in zip([ys, *mine], [expected, *theirs], strict=True):
        assert a is not None
        assert b is not None
        assert (a - b).abs().max() <= 1e-7 * b.abs().max()
    assert "side by side" in elman.kernels.explain(rnn, xs).time
    with pytest.raises(UserError, match="a module of your own runs a step at a time"):
        nn.Recurrent(torch.nn.GRUCell(3, 4), time=Chunked())


@needs_compiler
@pytest.mark.parametrize("gates", [5, 8, 16])
@pytest.mark.usefixtures("hastily")
def test_many_gates_run_in_the_kernel(gates, monkeypatch):
    @cell(gates=gates, states=2)
    def many(a_x, a_h, h, c):
        y = sum(torch.tanh(a_x[i] + a_h[i] * (i % 3)) for i in range(gates)) / gates
        return torch.tanh(2 * y + c), 0.5 * c + y * (1 + h)

    for rows, hidden in ((1, 5), (3, 40), (33, 24)):
        torch.manual_seed(rows)
        rnn, xs = nn.Layers(many, 4, hidden).double(), torch.randn(6, rows, 4).double()
        assert elman.kernels.explain(rnn, xs).runs == "described"
        mine = gradients(rnn, xs, rnn)
        with monkeypatch.context() as plain:
            plain.setenv("ELMAN_KERNELS", "reference")
            theirs = gradients(rnn, xs, rnn)
        assert_close([mine[0], *mine[1]], [theirs[0], *theirs[1]], 2**-52)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype):
    torch.manual_seed(4)
    half, full = nn.Layers("mgu", 5, 24).to(dtype), nn.Layers("mgu", 5, 24)
    full.load_state_dict(half.state_dict())
    xs = torch.randn(9, 3, 5).to(dtype)
    assert elman.kernels.explain(half, xs).runs == "described"
    ys, mine = gradients(half, xs, half)
    expected, theirs = gradients(full, xs.float(), full)
    eps = torch.finfo(dtype).eps
    assert ys.dtype == dtype
    assert torch.equal(ys, expected.to(dtype)), "states are rounded on their way out only"
    for a, b in zip(mine, theirs, strict=True):
        assert a is not None
        assert b is not None
        assert (a.float() - b).abs().max() <= 8 * eps * b.abs().max()


@pytest.mark.usefixtures("hastily")
def test_a_described_gru_is_the_gru():
    @cell(gates=3)
    def another(a_x, a_h, h):
        r, z = torch.sigmoid(a_x[0] + a_h[0]), torch.sigmoid(a_x[1] + a_h[1])
        n = torch.tanh(a_x[2] + r * a_h[2])
        return n + z * (h - n)

    rnn, gru = nn.Layers(another, 5, 20).double(), nn.GRU(5, 20).double()
    rnn.load_state_dict(gru.state_dict())
    xs = torch.randn(8, 6, 5, dtype=torch.float64)
    (ys, mine), (expected, theirs) = gradients(rnn, xs, rnn), gradients(gru, xs, gru)
    assert_close([ys, *mine], [expected, *theirs], 2**-52)


@pytest.mark.usefixtures("hastily")
def test_a_declared_cell_is_a_cell_like_any_other():
    @cell(gates=1, parameters={"decay": 0.9})
    def leaky(a_x, a_h, h, decay):
        return decay * h + (1 - decay) * torch.tanh(a_x[0] + a_h[0])

    model = LanguageModel(12, cell="leaky", hidden_size=16)
    logits, state = model(torch.randint(12, (3, 5)))
    assert logits.shape == (3, 5, 12)
    assert state is not None
    rnn = nn.Layers(leaky, 4, 6, num_layers=2, bidirectional=True)
    assert torch.equal(rnn.own_l1_reverse, torch.full((1, 6), 0.9))
    twin = nn.Layers("leaky", 4, 6, num_layers=2, bidirectional=True)
    twin.load_state_dict(rnn.state_dict())
    xs = torch.randn(5, 2, 4)
    assert torch.equal(rnn(xs)[0], twin(xs)[0])

    @cell(gates=1, name="leaky")  # again, as in a notebook
    def other(a_x, a_h, h):
        return 0.5 * h + 0.5 * torch.tanh(a_x[0] + a_h[0])

    assert not CELLS["leaky"].parameters
    with pytest.raises(UserError, match="leaky was declared again, with other equations"):
        rnn(xs)  # which would otherwise answer by equations that it was not made for


def test_heads_read_their_own_units_alone_and_stay_so():
    rnn = nn.Layers("slstm", 3, 16)
    W_hh = rnn.get_parameter("weight_hh_l0")
    blocks = diagonal_blocks(W_hh, 4)
    assert not (W_hh * (1 - blocks)).any()
    ys, _ = rnn(torch.randn(6, 2, 3))
    ys.sum().backward()
    assert W_hh.grad is not None
    assert not (W_hh.grad * (1 - blocks)).any()
    assert (W_hh.grad * blocks).any()
    with pytest.raises(UserError, match="does not fall into the 4 heads"):
        nn.Layers("slstm", 3, 18)


def test_equations_that_use_one_another_often_take_no_longer_for_it():
    """Each line uses the one before twice: 2⁶⁰ ways from the end to the beginning."""

    @cell(gates=1)
    def deep(a_x, a_h, h):
        y = a_x[0] + a_h[0]
        for _ in range(60):
            y = torch.tanh(y) * y + 0.5 * y
        return torch.tanh(y + h)

    assert len(deep.equations.back) == 3


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_norm_lstm_is_its_papers_loop(bias):
    torch.manual_seed(6)
    rnn = nn.Layers("layer_norm_lstm", 3, 7, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        rnn.own_l0.add_(torch.randn(10, 7, dtype=torch.float64) / 4)
    xs = torch.randn(6, 4, 3, dtype=torch.float64)
    assert elman.kernels.explain(rnn, xs).runs == "reference"

    def n(a):
        mean, variance = a.mean(-1, keepdim=True), a.var(-1, keepdim=True, correction=0)
        return (a - mean) / torch.sqrt(variance + 1e-5)

    def loop(xs):
        W_ih, W_hh, *biases, own = (getattr(rnn, name) for name in rnn._flat_weights_names)
        gain_x, gain_h = own[:4].flatten(), own[4:8].flatten()
        h = c = xs.new_zeros(4, 7)
        ys = []
        for x in xs:
            a = n(x @ W_ih.T) * gain_x + n(h @ W_hh.T) * gain_h + sum(biases)
            i, f, g, o = a.chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(n(c) * own[8] + own[9])
            ys.append(h)
        return torch.stack(ys), (h, c)

    (ys, mine), (expected, theirs) = gradients(rnn, xs, rnn), gradients(rnn, xs, loop)
    assert_close([ys, *mine], [expected, *theirs], 2**-52)
    assert all(float(g.abs().max()) > 1e-3 for g in mine), "a gradient that is alive"


@pytest.mark.usefixtures("hastily")
def test_a_derivative_may_be_given_and_takes_the_place_of_the_chain_rules():
    def by_hand(a_x, a_h, h, rate, dh):
        y = torch.tanh(a_x[0] + a_h[0])
        da = dh * rate * (1 - y * y)
        return [da], [da], dh * (1 - rate), dh * (y - h)

    @cell(gates=1, parameters={"rate": 0.3}, derivative=by_hand)
    def handy(a_x, a_h, h, rate):
        return h + rate * (torch.tanh(a_x[0] + a_h[0]) - h)

    torch.manual_seed(3)
    rnn = nn.Layers(handy, 3, 8, dtype=torch.float64)
    xs = torch.randn(6, 4, 3, dtype=torch.float64)
    ys, mine = gradients(rnn, xs, rnn)
    plain, theirs = gradients(rnn, xs, lambda xs: by_autograd(handy, rnn, xs))
    assert_close([ys, *mine], [plain, *theirs], 2**-52)
    assert handy.equations.back != handy.chain_rule(handy.equations.after)


def wrong_slope(a_x, a_h, h, dh):
    return [dh], [dh * 1.001], torch.zeros_like(h)


def too_few(a_x, a_h, h, dh):
    return [dh], [dh]


def wrong_state(a_x, a_h, h, dh):
    return [dh], [dh], torch.where(h > 1, dh, 0.0)


def sums(a_x, a_h, h, dh):
    return [dh], [dh], dh.sum(0)


@pytest.mark.parametrize(
    ("derivative", "words"),
    [
        (wrong_slope, r"its pull on a_h\[0\] is off by \d"),
        (wrong_state, "its pull on state 0 is off by"),
        (too_few, r"derivative returned 2 pulls; not 3"),
        (sums, r"derivative, line \d+ \(return.*torch.sum is not a pointwise"),
        (lambda a_x, a_h, h: [h], "is called with 4 arguments"),
    ],
)
def test_a_derivative_that_is_wrong_is_refused(derivative, words):
    with pytest.raises(UserError, match=words):
        cell(gates=1, name="linear_by_hand", derivative=derivative)(lambda x, a, h: x[0] + a[0])
    assert "linear_by_hand" not in CELLS


@pytest.mark.parametrize("name", [c.model for c in CELLS.values() if c.torch_mode is None])
def test_every_shipped_cell_trains_from_the_command_line_and_forecasts(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(report, "write", lambda run: run.path / "report.html")
    monkeypatch.setattr(generation, "specimen", lambda model, vocab, **_: "a sample")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 30)
    options = "--hidden-size 8 --window 8 --batch-size 4 --epochs 1 --diagnose 0 --device cpu"
    command = ["train", str(text), "--model", name, *options.split(), "--out", str(tmp_path / "r")]
    assert run(command) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "r" / "config.json").read_text())["model"]["cell"] == name
    wave = np.sin(np.arange(60) / 4)[:, None]
    forecaster = Forecaster(cell=name, tau=6, hidden=8, epochs=2, seed=1).fit([wave])
    assert np.isfinite(forecaster.predict(wave, 3)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
@pytest.mark.parametrize("c", SHIPPED, ids=lambda c: c.name)
def test_a_described_cell_runs_on_a_gpu_and_explain_says_how(c):
    torch.manual_seed(1)
    rnn = nn.Layers(c, 3, 8, zoneout=0.1, dtype=torch.float64).eval()
    xs = torch.randn(6, 4, 3, dtype=torch.float64)
    ys, mine = gradients(rnn, xs, rnn)
    rnn.cuda()
    explained = elman.kernels.explain(rnn, xs.cuda())
    assert explained.runs == "reference"
    assert "the input is on cuda" in explained.reasons["described"]
    there, theirs = gradients(rnn, xs.cuda(), rnn)
    moved = [g.cpu() for g in (*theirs, *mine)]  # the module took its gradients along
    assert_close([there.cpu(), *moved[: len(theirs)]], [ys, *moved[len(theirs) :]], 2**-52)


# ---------------------------------------------------------------------- refusals


def not_pointwise(a_x, a_h, h):
    return h / h.norm(dim=-1, keepdim=True)


def other_shape(a_x, a_h, h):
    return h[:, :1]


def draws(a_x, a_h, h):
    return h + torch.rand_like(h)


def reads_the_clock(a_x, a_h, h):
    return h * time.perf_counter_ns()


def looks(a_x, a_h, h):
    return h if float(h[0, 0]) > 0 else -h


def two_states(a_x, a_h, h):
    return h, h


def in_place(a_x, a_h, h):
    return h.mul_(2)


def from_outside(a_x, a_h, h):
    return h + OUTSIDE


OUTSIDE = torch.arange(5.0)
LEARNED = torch.nn.Parameter(torch.tensor(0.5))


def learns(a_x, a_h, h):
    return LEARNED * h


def truncates(a_x, a_h, h):
    return h.to(torch.int64)


def rounds(a_x, a_h, h):
    return (2 * h.half()).double()


def true_or_false(a_x, a_h, h):
    return h > 0


def assigns(a_x, a_h, h):
    h = h.clone()
    h[:, 0] = 0
    return h


def wants_two_gates(a_x, a_h, h):
    return a_x[1]


def returns_a_dict(a_x, a_h, h):
    return {"h": h}


def is_nan(a_x, a_h, h):
    return torch.sqrt(-1 - h * h)


def normalised(a_x, a_h, h):
    return F.layer_norm(h, h.shape[-1:])


def drops(a_x, a_h, h):
    return F.dropout(h)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (not_pointwise, r"not_pointwise, line \d+ \(return h / h.norm.*torch.*not a pointwise"),
        (other_shape, r"line \d+ \(return h\[:, :1\]\).*slice is not a pointwise"),
        (draws, r"draws, line \d+ .*rand_like is not a pointwise"),
        (
            reads_the_clock,
            r"clock, line \d+ \(return h \* time.*\) did not compute the same .* twice",
        ),
        (learns, r"learns, line \d+ .*shape \(\) that wants a gradient comes from outside"),
        (truncates, r"truncates, line \d+ .*makes torch.int64"),
        (rounds, r"rounds, line \d+ .*makes torch.float16"),
        (true_or_false, "is true or false, not a number"),
        (assigns, r"assigns, line \d+ \(h\[:, 0\] = 0\): it makes a tensor of values"),
        (wants_two_gates, "a_x and a_h have an entry for each gate"),
        (returns_a_dict, "returned is dict where"),
        (is_nan, "gave no finite number on 64 ordinary ones"),
        (normalised, r"normalised, line \d+ .*native_layer_norm is not a pointwise"),
        (drops, r"drops, line \d+ .*is not a pointwise"),
        (looks, r"looks, line \d+ "),
        (two_states, "returned 2 states; it was declared with states=1"),
        (in_place, r"mul_ is not a pointwise"),
        (from_outside, r"shape \(5,\) comes from outside"),
        (lambda a_x, a_h: a_x[0], r"is called with 3 arguments"),
        (abs, "must be a function"),
    ],
)
def test_what_is_no_cell_is_refused_when_it_is_declared(function, words):
    known = set(CELLS)
    with pytest.raises(UserError, match=words):
        cell(gates=1, name="refused_one" if function is abs else None)(function)
    assert set(CELLS) == known


def test_a_defect_of_the_table_of_operations_is_found_when_a_cell_is_declared(monkeypatch):
    wrong = replace(OPERATIONS["sin"], pulls=lambda y, a, d: (d,))
    monkeypatch.setitem(OPERATIONS, "sin", wrong)
    with pytest.raises(UserError, match=r"disagrees with a difference quotient by .*please report"):
        cell(gates=1, name="wave")(lambda a_x, a_h, h: torch.sin(a_x[0] + a_h[0]))
    assert "wave" not in CELLS


SIZES = [
    *({"gates": n} for n in (0, 17, 2.5, True)),
    *({"states": n} for n in (0, 9)),
    *({"heads": n} for n in (-1, 4097)),
]


@pytest.mark.parametrize("options", SIZES, ids=str)
def test_sizes_that_make_no_cell_are_refused(options):
    with pytest.raises(UserError, match="must be a whole number"):
        cell(**options)
    cell(gates=16, states=8, heads=0)
    cell(gates=np.int64(1), states=1, heads=4096)


@pytest.mark.parametrize("name", ["gru", "mgu"])
def test_a_cell_of_elmans_keeps_its_name(name):
    with pytest.raises(UserError, match=f"{name} is a cell of elman's"):
        cell(gates=1, name=name)(lambda a_x, a_h, h: h)


def test_a_cell_says_what_it_has():
    assert repr(CELLS["mgu"]) == "<cell mgu: 2 gates, 1 state>"
    assert repr(CELLS["peephole"]) == "<cell peephole: 4 gates, 2 states, 3 parameters>"


def test_without_a_compiler_the_reference_runs_and_explain_says_why(monkeypatch):
    described._made.cache_clear()
    monkeypatch.setattr(described, "_compiler", lambda: None)
    explained = elman.kernels.explain(nn.Layers("mgu", 3, 8), torch.randn(2, 2, 3))
    described._made.cache_clear()
    assert explained.runs == "reference"
    assert "no C++ compiler was found" in explained.reasons["described"]


@needs_compiler
@pytest.mark.usefixtures("hastily")
def test_a_cell_is_compiled_for_this_process_where_it_cannot_be_kept(tmp_path, monkeypatch):
    (tmp_path / "elman").write_text("no folder")
    monkeypatch.setattr(described.platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    described._made.cache_clear()
    rnn, xs = nn.Layers("mgu", 3, 8), torch.randn(2, 2, 3)
    with pytest.warns(UserWarning, match=r"cannot be kept in .*elman.cells .*XDG_CACHE_HOME names"):
        explained = elman.kernels.explain(rnn, xs)
    assert explained.runs == "described"
    found = rnn(xs)[0]
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    torch.testing.assert_close(found, rnn(xs)[0])
    described._made.cache_clear()
    monkeypatch.setenv("ELMAN_KERNELS", "")
    monkeypatch.setattr(described.tempfile, "tempdir", str(tmp_path / "nowhere"))
    reason = str(described.KERNEL.refuses(Piece(*next(rnn.job(xs).pieces()))))
    described._made.cache_clear()
    assert "cannot be compiled in a temporary folder: No such file or directory" in reason


@needs_compiler
@pytest.mark.usefixtures("hastily")
def test_a_cell_is_compiled_for_this_process_where_the_cache_is_full(tmp_path, monkeypatch):
    """The compiler itself met the full disk, and the cell ran by the reference without a word."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(described.platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    monkeypatch.setattr(described.shutil, "copyfile", full)
    described._made.cache_clear()
    with pytest.warns(UserWarning, match=r"cannot be kept in .*No space left on device"):
        explained = elman.kernels.explain(nn.Layers("mgu", 3, 8), torch.randn(2, 2, 3))
    described._made.cache_clear()
    assert explained.runs == "described"
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@needs_compiler
def test_a_broken_compiler_is_named_and_nothing_is_left_behind(tmp_path, monkeypatch):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'cannot today' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(described, "_compiler", lambda: str(broken))
    monkeypatch.setattr(described.platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    described._made.cache_clear()
    rnn, xs = nn.Layers("mgu", 3, 8), torch.randn(2, 2, 3)
    piece = next(rnn.job(xs).pieces())
    reason = described.KERNEL.refuses(Piece(*piece))
    described._made.cache_clear()
    assert "cannot today" in str(reason)
    assert not list((tmp_path / "elman").rglob("*.so"))


@needs_compiler
def test_what_is_left_of_a_compiled_cell_is_made_again(tmp_path, monkeypatch):
    """A file that a full disk cut short once ended in the loader's own traceback."""
    monkeypatch.setattr(described, "_compile", lambda text, compiler, file: "it was asked to")
    half = tmp_path / "half.so"
    half.write_bytes(b"\x7fELF, half of it")
    monkeypatch.setattr(described, "_cached", lambda text, compiler: half)
    described._made.cache_clear()
    made = described._made(SHIPPED[0], described.FLOAT)
    assert "could not compile it: it was asked to" in str(made)
    described._made.cache_clear()


@needs_compiler
@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_a_damaged_compiled_cell_is_made_again(how, tmp_path, monkeypatch):
    """The loader ends the process with SIGBUS over a library that was cut short."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    public = 'extern "C" __attribute__((visibility("default")))'
    empty = f"{public} void elman_forward() {{}} {public} void elman_backward() {{}}"
    monkeypatch.setattr(described, "source", lambda *of: empty)  # compiled twice, and never run
    described._made.cache_clear()
    assert not isinstance(described._made(SHIPPED[0], described.FLOAT), str)
    (file,) = (tmp_path / "elman" / "cells").iterdir()
    whole = file.read_bytes()
    at = 3 * len(whole) // 4
    cut, flipped = whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    file.unlink()  # this process has it open: a new file
    file.write_bytes(cut if how == "cut" else flipped)
    described._made.cache_clear()
    assert not isinstance(described._made(SHIPPED[0], described.FLOAT), str)
    described._made.cache_clear()
    assert file.read_bytes() == whole


@needs_compiler
def test_cells_with_the_same_equations_are_compiled_once():
    """A probability is in the name of a noisy cell, and in what is drawn for its steps."""
    sources = {
        described.source(noisy(CELLS["gru"], zoneout), described.FLOAT, "portable")
        for zoneout in (0.1, 0.2)
    }
    assert len(sources) == 1
