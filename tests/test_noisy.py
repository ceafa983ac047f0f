"""Zoneout and recurrent dropout: any cell, a plain loop with the same masks, no noise at rest."""

import copy

import pytest
import torch

import elman
from elman import LanguageModel, nn
from elman.cells import CELLS, Weights, named
from elman.cells.base import Cell
from elman.cells.described import Described
from elman.cells.noisy import noisy
from elman.cells.twins import TWINS
from elman.errors import UserError
from elman.gradients import Checkpointed, Chunked, Full, Sliding, Truncated, backward_through_time
from elman.gradients.forward_accumulation import forward_accumulation
from elman.language_model import Dropout
from elman.recurrence.strand import Noise
from elman.training import Training
from elman.training.native_update import NativeUpdate

ZONE, DROP = 0.3, 0.4


@pytest.fixture(autouse=True)
def _reference(request, monkeypatch):
    """Compiling each of these cells takes seconds; the tests that compare kernels do compile."""
    if "kernel" not in request.node.name and "explain" not in request.node.name:
        monkeypatch.setenv("ELMAN_KERNELS", "reference")


def lstm(a_x, a_h, h, c, d):
    i, f, g, o = (a_x + a_h).chunk(4, -1)
    c = torch.sigmoid(f) * c + d * torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru(a_x, a_h, h, _, d):
    (x_r, x_z, x_n), (h_r, h_z, h_n) = a_x.chunk(3, -1), a_h.chunk(3, -1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    return z * h + d * (1 - z) * torch.tanh(x_n + r * h_n), None


def tanh(a_x, a_h, h, _, d):
    return d * torch.tanh(a_x + a_h), None


def peephole(a_x, a_h, h, c, d, own):
    (i, f, g, o), (p_i, p_f, p_o) = (a_x + a_h).chunk(4, -1), own
    i, f = torch.sigmoid(i + p_i * c), torch.sigmoid(f + p_f * c)
    c = f * c + d * i * torch.tanh(g)
    return torch.sigmoid(o + p_o * c) * torch.tanh(c), c


PLAIN = {"lstm": lstm, "gru": gru, "tanh": tanh, "peephole": peephole}


def plain_loop(name, rnn, xs, seed):
    """The papers' equations, one layer, with the masks that the module draws from this seed."""
    W_ih, W_hh, b_ih, b_hh, *own = (getattr(rnn, n) for n in rnn._flat_weights_names)
    T, B, H = *xs.shape[:2], rnn.hidden_size
    h = c = xs.new_zeros(B, H)
    ones = xs.new_ones(T, B, H)
    d, m_h, m_c = (ones,) * 3
    if rnn.training:
        noise = Noise(named(rnn.running_cell).noise, seed)(h, 0, 0, T)
        d, m_h, *rest = noise.chunk(noise.shape[-1] // H, -1)
        m_c = rest[0] if rest else ones
    p = 0 if rnn.training else ZONE
    ys = []
    for t, x in enumerate(xs):
        a_x, a_h = x @ W_ih.T + b_ih, h @ W_hh.T + b_hh
        h_new, c_new = PLAIN[name](a_x, a_h, h, c, d[t], *own)
        if c_new is not None:
            c = torch.where(m_c[t] > 0, p * c + (1 - p) * c_new, c)
        h = torch.where(m_h[t] > 0, p * h + (1 - p) * h_new, h)
        ys.append(h)
    return torch.stack(ys), (h, c) if c is not h else (h,)


def gradients(rnn, xs, run):
    xs = xs.detach().requires_grad_()
    ys, _ = run(xs)
    pull = (
        torch.linspace(0, 20, ys.numel(), dtype=ys.dtype, device=ys.device).reshape(ys.shape).cos()
    )
    total = (ys * pull).sum() + (ys[-1] ** 2).sum()
    return [ys.detach(), *torch.autograd.grad(total, [xs, *rnn.parameters()])]


def agree(mine, theirs, eps=2**-52):
    for a, b in zip(mine, theirs, strict=True):
        assert b.abs().max() > 1e-3, "a gradient that is alive"
        assert (a - b).abs().max() <= 400 * eps * max(1, float(b.abs().max()))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", PLAIN)
def test_a_noisy_cell_is_the_papers_loop_with_the_same_masks(name, training):
    torch.manual_seed(5)
    rnn = nn.Layers(name, 4, 11, zoneout=ZONE, update_dropout=DROP, dtype=torch.float64)
    rnn.train(training)
    xs = torch.randn(21, 3, 4, dtype=torch.float64)
    torch.manual_seed(6)
    seed = int(torch.randint(2**62, ()))
    torch.manual_seed(6)
    mine = gradients(rnn, xs, rnn)
    agree(mine, gradients(rnn, xs, lambda xs: plain_loop(name, rnn, xs, seed)))


WRITTEN = {
    "memory first": lambda s, h, n: h * s + n * (1 - s),
    "memory last": lambda s, h, n: (1 - s) * n + s * h,
    "what is left": lambda s, h, n: h - (1 - s) * h + (1 - s) * n,
    "signs": lambda s, h, n: -((s - 1) * n - s * h),
    "halves": lambda s, h, n: (h * s) / 2 + (1 - s) * n + 0.5 * (s * h),
    "a quotient": lambda s, h, n: h / (1 / s) + n - s * n,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_step_adds_is_dropped_however_it_is_written(name):
    def step(a_x, a_h, h):
        return WRITTEN[name](torch.sigmoid(a_x[0] + a_h[0]), h, torch.tanh(a_x[1] + a_h[1]))

    cell = noisy(Described(step, name, gates=2), updates=0.5)
    drawn = torch.Generator().manual_seed(0)
    w = Weights(*(torch.randn(8, 4, generator=drawn, dtype=torch.float64) for _ in "ih"))
    x, h = (torch.randn(3, 4, generator=drawn, dtype=torch.float64) for _ in "xh")
    noise = torch.tensor([0.0, 2.0, 2.0, 0.0], dtype=torch.float64).expand(3, 4)
    (found,) = cell.given(noise).step(w, x, (h,))[0]
    a_s, a_n = (x @ w.W_ih.T + h @ w.W_hh.T).chunk(2, -1)
    s = torch.sigmoid(a_s)
    torch.testing.assert_close(found, s * h + noise * (1 - s) * torch.tanh(a_n))


@pytest.mark.parametrize("name", ["lstm", "slstm", "mgu"])
@pytest.mark.usefixtures("hastily")
def test_every_kernel_memory_and_order_of_time_draws_the_same(name, monkeypatch):
    torch.manual_seed(7)
    options = {"num_layers": 2, "zoneout": 0.2, "update_dropout": 0.2, "dtype": torch.float64}
    rnn = nn.Layers(name, 4, 8, bidirectional=True, dropout=0.1, carry=Truncated(5), **options)
    xs = torch.randn(40, 2, 4, dtype=torch.float64)

    def run():
        torch.manual_seed(8)
        return gradients(rnn, xs, rnn)

    mine = run()
    rnn.memory = Checkpointed(7)
    agree(run(), mine)
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    agree(run(), mine)


def test_a_carry_in_blocks_and_losses_in_pieces_meet_the_same_masks():
    torch.manual_seed(9)
    rnn = nn.LSTM(3, 6, zoneout=0.3, update_dropout=0.2, dtype=torch.float64)
    xs = torch.randn(12, 2, 3, dtype=torch.float64)

    def run(carry):
        rnn.carry = carry
        torch.manual_seed(10)
        return gradients(rnn, xs, rnn)

    full = run(elman.gradients.Full())
    agree(run(Sliding(every=4, steps=12)), full)
    torch.manual_seed(10)
    total, _ = backward_through_time(rnn, xs, lambda ys, start: (ys**2).sum())
    torch.manual_seed(10)
    assert torch.allclose(total, (rnn(xs)[0] ** 2).sum())
    with pytest.raises(UserError, match="in both directions do not go with Sliding"):
        nn.LSTM(3, 6, bidirectional=True, zoneout=0.3, carry=Sliding(every=1, steps=2))


def test_the_gradient_of_the_gradient_and_compile_draw_the_same():
    torch.manual_seed(11)
    rnn = nn.GRU(3, 5, zoneout=0.3, update_dropout=0.2, dtype=torch.float64)
    xs = torch.randn(9, 2, 3, dtype=torch.float64, requires_grad=True)

    def first(create_graph):
        torch.manual_seed(12)
        return torch.autograd.grad((rnn(xs)[0] ** 2).sum(), xs, create_graph=create_graph)[0]

    torch.testing.assert_close(first(True), first(False))
    torch.manual_seed(12)
    expected = rnn(xs)[0]
    torch.manual_seed(12)
    compiled = torch.compile(rnn, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(xs)[0], expected)


def test_chunks_of_time_have_the_noise_of_their_own_steps():
    torch.manual_seed(13)
    rnn = nn.GRU(3, 8, zoneout=0.1, update_dropout=0.1, dtype=torch.float64)
    xs = torch.randn(2400, 1, 3, dtype=torch.float64)

    def run():
        torch.manual_seed(14)
        return gradients(rnn, xs, rnn)

    expected = run()
    rnn.time = Chunked(chunks=8, overlap=100, tolerance=1e-9)
    mine = run()
    assert rnn.seams.forward is not None
    assert rnn.seams.forward.chunks > 1, rnn.seams
    for a, b in zip(mine, expected, strict=True):
        assert (a - b).abs().max() <= 1e-7 * b.abs().max()


@pytest.mark.parametrize("name", TWINS)
def test_a_built_in_cell_and_its_description_are_one(name):
    torch.manual_seed(15)
    twin, built_in = TWINS[name], nn.Layers(name, 3, 7, dtype=torch.float64)
    xs = torch.randn(8, 2, 3, dtype=torch.float64)
    expected = gradients(built_in, xs, built_in)
    CELLS["twin"] = twin.derived("twin", twin.equations.after)
    described = nn.Layers("twin", 3, 7, dtype=torch.float64)
    described.load_state_dict(built_in.state_dict())
    agree(gradients(described, xs, described), expected)
    assert (twin.gates, twin.states) == (CELLS[name].gates, CELLS[name].states)


def test_without_a_probability_nothing_is_drawn_and_no_bit_changes():
    torch.manual_seed(16)
    rnn, plain = nn.LSTM(3, 5, zoneout=0.0), nn.LSTM(3, 5)
    plain.load_state_dict(rnn.state_dict())
    xs, before = torch.randn(4, 2, 3), torch.get_rng_state()
    assert torch.equal(rnn(xs)[0], plain(xs)[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert rnn.running_cell == "lstm"


def test_the_share_of_units_that_stay_is_the_probability():
    torch.manual_seed(17)
    rnn = nn.RNN(3, 500, zoneout=0.25)
    ys, _ = rnn(torch.randn(2, 40, 3))
    stayed = (ys[1] == ys[0]).double().mean()
    assert abs(stayed - 0.25) < 5 * (0.25 * 0.75 / 20_000) ** 0.5
    assert "zoneout=0.25" in repr(rnn)


@pytest.mark.usefixtures("hastily")
def test_explain_names_the_cell_that_runs_and_copies_keep_it():
    rnn = copy.deepcopy(nn.LSTM(3, 8, zoneout=0.1))
    explained = elman.kernels.explain(rnn, torch.randn(2, 2, 3))
    assert explained.runs in ("described", "reference")
    assert explained.reasons["cpu"] == "it has no lstm with zoneout 0.1 cell"
    assert "expectation" in elman.kernels.explain(rnn.eval(), torch.randn(2, 2, 3)).reasons["cpu"]


@pytest.mark.parametrize("cell", ["elman", "gru", "lstm", "mgu"])
def test_a_language_model_trains_with_both_and_is_measured_without_noise(cell):
    torch.manual_seed(18)
    dropout = Dropout(zoneout=0.1, updates=0.1)
    model = LanguageModel(9, cell=cell, hidden_size=8, dropout=dropout)
    ids = torch.randint(9, (2, 6))
    assert not torch.equal(model(ids)[0], model(ids)[0])
    assert model.draws_globally
    training = Training(model, ids.flatten().repeat(99))
    assert "drawn for each step" in str(NativeUpdate.refuses(training))
    model.eval()
    assert torch.equal(model(ids)[0], model(ids)[0])
    again = LanguageModel.from_config(model.config)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(ids)[0], model(ids)[0])
    with pytest.raises(UserError, match="an mlp has no state"):
        LanguageModel(9, cell="mlp", dropout=dropout)


def test_forward_accumulation_has_the_expectation_or_says_no():
    torch.manual_seed(19)
    rnn = nn.GRU(2, 3, zoneout=0.2, dtype=torch.float64)
    xs = torch.randn(5, 1, 2, dtype=torch.float64)
    with pytest.raises(UserError, match="draws numbers for every step"):
        forward_accumulation(rnn, xs, lambda y, t: (y**2).sum())
    rnn.eval()
    (rnn(xs)[0] ** 2).sum().backward()
    found = forward_accumulation(rnn, xs, lambda y, t: (y**2).sum())
    name = "weight_hh_l0"
    torch.testing.assert_close(found.gradient.weights[name], rnn.get_parameter(name).grad)


@pytest.mark.parametrize("options", [{"zoneout": 1.0}, {"update_dropout": -0.1}, {"zoneout": "x"}])
def test_what_is_no_probability_is_refused(options):
    with pytest.raises(UserError, match="must be a probability"):
        nn.GRU(2, 3, **options)


def test_a_cell_that_is_code_and_a_projection_are_refused():
    class Mine(Cell):
        name = "mine_in_code"

        def step(self, w, x, state):
            return state, None

    CELLS["mine_in_code"] = Mine()
    with pytest.raises(UserError, match="need the equations of a cell, and mine_in_code has code"):
        nn.Layers("mine_in_code", 2, 3, zoneout=0.1)
    with pytest.raises(UserError, match="do not go with proj_size"):
        nn.LSTM(2, 3, proj_size=2, zoneout=0.1)
    with pytest.raises(UserError, match=r"torch\.nn has no gru with zoneout"):
        nn.GRU(2, 3, zoneout=0.1).to_torch()


def test_a_refused_probability_changes_nothing_and_near_ones_are_apart():
    m = nn.GRU(3, 4, zoneout=0.1)
    for name in ("zoneout", "update_dropout"):
        with pytest.raises(UserError, match="must be a probability"):
            setattr(m, name, 1.5)
    assert (m.zoneout, m.update_dropout) == (0.1, 0.0)
    near = nn.GRU(3, 4, zoneout=0.1 + 1e-9)
    assert near.running_cell != m.running_cell


def test_a_carry_that_noise_does_not_go_with_is_refused_later_too():
    m = nn.GRU(3, 4, bidirectional=True, zoneout=0.1)
    with pytest.raises(UserError, match=r"in both directions do not go with Sliding"):
        m.carry = Sliding(2, 3)
    assert m.carry == Full()
    m.zoneout = 0.0
    m.carry = Sliding(2, 3)
    with pytest.raises(UserError, match=r"in both directions do not go with Sliding"):
        m.zoneout = 0.1
