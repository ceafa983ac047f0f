"""Diagnostics: each quantity against its brute-force definition, and known answers."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from elman import cells
from elman import diagnostics as d
from elman.diagnostics.carries import carries
from elman.diagnostics.passage import shifted
from elman.errors import UserError
from elman.gradients import Full, Randomized, Sliding, Truncated
from elman.kernels import cpu
from elman.kernels.cpu import library
from elman.language_model import Dropout, LanguageModel
from elman.nn import GRU, LSTM, RNN, of

CELLS = ["elman", "gru", "lstm"]
IDS = torch.randint(0, 7, (24,), generator=torch.Generator().manual_seed(3))


def alive(cell, layers=2, **options):
    """A small model in float64 whose gradients do not vanish: orthogonal recurrent blocks."""
    torch.manual_seed(0)
    model = LanguageModel(7, cell=cell, hidden_size=5, layers=layers, **options).double()
    for name, p in model.recurrence.named_parameters():
        if name.startswith("weight_hh"):
            for block in p.data.split(5):
                torch.nn.init.orthogonal_(block)
    return model


def bare_loop(model, ids):
    """Losses L_t and the joint states S_0 … S_T, as leaves of one autograd graph."""
    rnn = model.recurrence
    pair = model.cell == "lstm"
    zero = torch.zeros(rnn.num_layers, 1, 5, dtype=torch.float64)
    joint = torch.cat([zero, zero], -1) if pair else zero
    states, losses = [joint.requires_grad_()], []
    for x, y in itertools.pairwise(ids):
        before = tuple(s.contiguous() for s in states[-1].chunk(2, -1)) if pair else states[-1]
        _, after = rnn(x.view(1, 1), before)
        after = torch.cat(after, -1) if pair else after
        states.append(after)
        top = after[-1, 0, :5]  # the loss sees the joint state, so that S_t is what it depends on
        logits = F.linear(top, model.output_weight, model.bias_q)
        losses.append(-torch.log_softmax(logits, -1)[y])
    return losses, states


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("embedding_size", [None, 3])
def test_by_lag_is_the_norm_of_autograds_gradient(cell, embedding_size):
    model, lags = alive(cell, embedding_size=embedding_size), 6
    if embedding_size:
        assert model.embedding is not None
        xs = model.embedding(IDS[:-1, None])
        plain = d.Passage.run(model.recurrence, xs.detach())
        assert len(d.by_lag(plain, lags).norms) == len(IDS) - 1 - lags
    measured = d.by_lag(d.Passage.read(model, IDS), lags)
    if embedding_size:
        return
    losses, states = bare_loop(model, IDS)
    for i, t in enumerate(range(lags, len(losses))):
        wanted = [states[t + 1 - k] for k in range(lags + 1)]
        grads = torch.autograd.grad(losses[t], wanted, retain_graph=True)
        norms = [float(g.norm()) for g in grads]
        assert min(norms) > 1e-6  # alive
        np.testing.assert_allclose(measured.norms[i], norms, rtol=1e-9)


@pytest.mark.parametrize("cell", CELLS)
def test_passage_losses_and_states_are_the_models(cell):
    model = alive(cell)
    passage = d.Passage.read(model, IDS)
    logits, _ = model.eval()(IDS[None, :-1])
    nats = F.cross_entropy(logits[0], IDS[1:], reduction="none")
    torch.testing.assert_close(passage.nats, nats.detach())
    _, states = bare_loop(model, IDS)
    last = states[-1][:, 0].flatten()
    torch.testing.assert_close(passage.states[-1], last.detach())


@pytest.mark.parametrize("cell", CELLS)
def test_total_gradient_by_step_and_unit_is_autograds(cell):
    model = alive(cell)
    measured = d.units(d.Passage.read(model, IDS)).gradient
    losses, states = bare_loop(model, IDS)
    grads = torch.autograd.grad(torch.stack(losses).sum(), states[1:])
    np.testing.assert_allclose(measured, torch.stack(grads)[:, :, 0].flatten(1).abs(), rtol=1e-9)


@pytest.mark.parametrize("cell", CELLS)
def test_jacobian_is_the_derivative_of_one_step(cell):
    passage = d.Passage.read(alive(cell), IDS)
    S = passage.states[4]
    expected = torch.autograd.functional.jacobian(
        lambda s: passage.step(torch.tensor([4]), s[None])[0], S
    )
    torch.testing.assert_close(d.jacobian(passage, 4), expected)
    torch.testing.assert_close(passage.step(torch.tensor([4]), S[None])[0], passage.states[5])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", list(cells.CELLS))
def test_a_pull_is_autograds_whatever_the_cell(name, layers):
    torch.manual_seed(4)
    module: Any = of(name, 3, 4, layers).double()
    for parameter in module.parameters():  # what starts at zero would hide its own derivative
        torch.nn.init.uniform_(parameter, -0.9, 0.9)
    passage = d.Passage.run(module, torch.randn(9, 1, 3, dtype=torch.float64))
    at = torch.tensor([1, 5, 5, 7])
    G = torch.randn(4, passage.states.shape[1], dtype=torch.float64)
    S = passage.states[at].requires_grad_()
    (wanted,) = torch.autograd.grad(passage.step(at, S), S, G)
    assert wanted.norm() > 0.1  # alive
    torch.testing.assert_close(passage.pull_back(at, G), wanted, rtol=1e-12, atol=1e-14)


def test_a_pull_through_a_projection_is_autograds():
    torch.manual_seed(4)
    rnn: Any = LSTM(3, 5, num_layers=2, proj_size=2, dtype=torch.float64)
    passage = d.Passage.run(rnn, torch.randn(9, 1, 3, dtype=torch.float64))
    at, G = torch.tensor([2, 6]), torch.randn(2, 14, dtype=torch.float64)
    S = passage.states[at].requires_grad_()
    (wanted,) = torch.autograd.grad(passage.step(at, S), S, G)
    torch.testing.assert_close(passage.pull_back(at, G), wanted, rtol=1e-12, atol=1e-14)


def test_a_cell_with_a_derivative_of_its_own_that_wants_weights_is_left_to_autograd(monkeypatch):
    passage = d.Passage.read(alive("gru"), IDS)
    at, G = torch.tensor([3]), torch.ones(1, 10, dtype=torch.float64)
    wanted = passage.pull_back(at, G)
    monkeypatch.setattr(type(passage.cell), "spares_weights", False)
    monkeypatch.setattr(type(passage.cell), "step_backward", None)
    torch.testing.assert_close(passage.pull_back(at, G), wanted, rtol=1e-12, atol=1e-14)


MIXES = "layer_norm_lstm"
"""A cell of which a unit's state depends on other units' gates."""


def lag_by_lag(passage, lags):
    """‖∂L_t/∂S_{t+1-k}‖ by pulling every loss back one step at a time."""
    at = slice(lags, len(passage))
    G = passage.on_state(passage.pulls[at])
    norms = [G.norm(dim=1)]
    for k in range(lags):
        G = passage.pull_back(shifted(at, -k), G)
        norms.append(G.norm(dim=1))
    return torch.stack(norms, 1)


@pytest.mark.skipif(cpu.KERNEL.library is None, reason="the native kernel was not built")
@pytest.mark.parametrize("level", [library.PORTABLE, library.AVX2, library.FASTEST])
@pytest.mark.parametrize("hidden", [4, 37])  # less than a vector; panels, and some left over
@pytest.mark.parametrize("name", [name for name in cells.CELLS if name != MIXES])
def test_losses_that_travel_together_go_where_each_would_go_alone(name, hidden, level, monkeypatch):
    torch.manual_seed(4)
    heads = max(1, cells.named(name).heads)
    hidden = -(-hidden // heads) * heads
    module: Any = of(name, 3, hidden).double()
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, -2 * hidden**-0.5, 2 * hidden**-0.5)
    xs = torch.randn(40, 1, 3, dtype=torch.float64)
    passage = d.Passage.run(module, xs, torch.randn(40, hidden, dtype=torch.float64))
    monkeypatch.setattr(cpu, "KERNEL", cpu.Cpu(level))
    for lags in (1, 17, 39):
        together, wanted = passage.norms_by_lag(lags), lag_by_lag(passage, lags)
        assert together is not None
        assert lags == 39 or wanted.mean(0)[: min(lags, 4) + 1].min() > 1e-3  # alive, on average
        torch.testing.assert_close(together, wanted, rtol=1e-11, atol=1e-13 * float(wanted.max()))


def test_losses_that_cannot_travel_together_are_followed_lag_by_lag(monkeypatch):
    xs = torch.randn(9, 1, 3, dtype=torch.float64)
    projecting = d.Passage.run(LSTM(3, 5, proj_size=2, dtype=torch.float64), xs)
    mixing = d.Passage.run(of(MIXES, 3, 5), xs)
    for passage in (d.Passage.read(alive("gru"), IDS), projecting, mixing):
        assert passage.norms_by_lag(4) is None
        assert np.array_equal(d.by_lag(passage, 4).norms, lag_by_lag(passage, 4).numpy())
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    assert d.Passage.read(alive("gru", layers=1), IDS).norms_by_lag(4) is None


def test_a_model_that_is_exact_already_is_read_as_it_is_and_left_alone():
    model = alive("lstm").eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    passage = d.Passage.read(model, IDS)
    assert passage.layers[0].W_hh.data_ptr() == model.recurrence.weight_hh_l0.data_ptr()
    torch.testing.assert_close(passage.states, d.Passage.read(model.train(), IDS).states)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("cell", CELLS)
def test_a_passage_is_the_same_without_native_code(cell, monkeypatch):
    fast = d.Passage.read(alive(cell), IDS)
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    monkeypatch.setattr(cpu.KERNEL, "forward", None)
    plain = d.Passage.read(alive(cell), IDS)
    torch.testing.assert_close(fast.states, plain.states, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(fast.pulls, plain.pulls, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("part", [0.01, 0.5, 0.9, 0.99, 0.999])
def test_the_recommended_window_is_the_first_that_keeps_enough(decay, part):
    found = d.ByLag(40, decay ** np.arange(41)[None])
    window = found.recommend(part)
    assert found.kept(window) >= part
    assert window == 1 or found.kept(window - 1) < part


def test_no_window_keeps_everything():
    with pytest.raises(UserError, match="part=1 must"):
        d.ByLag(40, np.ones((1, 41))).recommend(1)


# Known answers


def linear(W, steps=60):
    rnn: Any = RNN(2, len(W), nonlinearity="linear", bias=False, dtype=torch.float64)
    rnn.weight_hh_l0.data[:] = torch.as_tensor(W)
    return d.Passage.run(rnn, torch.randn(steps, 1, 2, dtype=torch.float64))


@pytest.mark.parametrize("scale", [0.8, 1.0, 1.1])
def test_decay_of_a_scaled_orthogonal_linear_network_is_log_of_the_scale(scale):
    Q = torch.nn.init.orthogonal_(torch.empty(4, 4, dtype=torch.float64))
    found = d.by_lag(linear(scale * Q), lags=20)
    assert found.decay == pytest.approx(math.log(scale), abs=1e-9)


def within(part, scale):
    """The smallest k with 1 - scaleᵏ⁺¹ ≥ part: where a gradient falling as scaleᵏ has so much."""
    return math.ceil(math.log(1 - part) / math.log(scale) - 1 - 1e-9)


@pytest.mark.parametrize("scale", [0.05, 0.5, 0.9, 0.97, 0.99])
def test_lags_are_followed_as_far_as_the_answer_needs(scale):
    Q = torch.nn.init.orthogonal_(torch.empty(4, 4, dtype=torch.float64))
    found = d.by_lag(linear(scale * Q, steps=2048))
    assert found.settled
    assert found.beyond == pytest.approx(scale ** (found.lags + 1), rel=1e-6)
    for part in (0.5, 0.9):  # less than a thousandth is missing, so the share is that much too high
        assert within(0.999 * part, scale) <= found.horizon(part) <= within(part, scale)
    window = 2 * found.horizon(0.9) + 2
    kept = 1 - scale * (1 - scale**window) / (window * (1 - scale))
    assert kept <= found.kept(window) <= kept / 0.999
    assert "at least" not in found.words(window)


def test_more_lags_do_not_change_what_has_settled():
    torch.manual_seed(0)
    rotated = torch.diag(torch.tensor([0.95, 0.8, 0.6, 0.3], dtype=torch.float64))
    passage = linear(rotated, steps=2048)
    found = d.by_lag(passage)
    for lags in (found.lags, 2 * found.lags, 1000):
        longer = d.by_lag(passage, lags)
        assert [longer.horizon(p) for p in (0.5, 0.9)] == [found.horizon(p) for p in (0.5, 0.9)]
        assert longer.recommend() == pytest.approx(found.recommend(), rel=0.02)


@pytest.mark.parametrize(("scale", "lags"), [(0.9, 10), (0.999, None), (1.0, None), (1.01, 30)])
def test_lags_that_end_too_early_say_at_least(scale, lags):
    found = d.by_lag(linear(scale * torch.eye(3, dtype=torch.float64), steps=200), lags)
    assert not found.settled
    assert found.beyond > 0.001
    said = found.words(8)
    assert f"within at least {found.horizon(0.5)} steps" in said
    assert "keeps at most" in said


def test_a_gradient_that_is_cut_off_ends_there():
    shift = torch.diag(torch.ones(5, dtype=torch.float64), diagonal=1)  # a delay line of six steps
    found = d.by_lag(linear(shift, steps=100))
    assert found.settled
    assert found.beyond == 0
    assert found.mean[6] == 0


def test_lyapunov_exponents_of_a_linear_network_are_log_eigenvalues():
    torch.manual_seed(1)
    V = torch.randn(4, 4, dtype=torch.float64)
    W = V @ torch.diag(torch.tensor([1.2, 0.9, 0.5, 0.1], dtype=torch.float64)) @ V.inverse()
    found = d.lyapunov_exponents(linear(W, steps=1000))
    np.testing.assert_allclose(found, np.log([1.2, 0.9, 0.5, 0.1]), atol=0.01)
    np.testing.assert_allclose(d.lyapunov_exponents(linear(W, 1000), 1), [math.log(1.2)], atol=0.01)


@pytest.mark.parametrize("cell", CELLS)
def test_all_lyapunov_exponents_together_are_the_growth_of_volumes(cell):
    passage = d.Passage.read(alive(cell), IDS)
    volumes = [torch.linalg.det(d.jacobian(passage, t)).abs().log() for t in range(len(passage))]
    wanted = torch.stack(volumes).mean().item()
    assert d.lyapunov_exponents(passage).sum() == pytest.approx(wanted, rel=1e-9)


def test_singular_values_of_a_linear_network_are_those_of_the_powers():
    torch.manual_seed(2)
    W = torch.randn(3, 3, dtype=torch.float64) * 0.6
    found = d.singular_values(linear(W), lags=(1, 3, 10), start=5)
    for k, values in zip(found.lags, found.values, strict=True):
        np.testing.assert_allclose(
            values, torch.linalg.svdvals(torch.matrix_power(W, k)), rtol=1e-9
        )
    assert d.spectral_radius(linear(W)) == pytest.approx(
        [float(torch.linalg.eigvals(W).abs().max())]
    )


def test_singular_values_look_as_far_as_a_short_passage_goes():
    assert d.singular_values(linear(np.eye(2), 40)).lags == (1, 2, 4, 8, 16, 32)
    assert d.singular_values(linear(np.eye(2), 9), start=1).lags == (1, 2, 4, 8)


@pytest.mark.parametrize("cell", CELLS)
def test_singular_values_are_those_of_autograds_jacobian(cell):
    """Of a cell whose Jacobian is another at every step."""
    passage = d.Passage.read(alive(cell), IDS)

    def later(s):
        for t in range(3, 7):
            s = passage.step(torch.tensor([t]), s[None])[0]
        return s

    wanted = torch.linalg.svdvals(torch.autograd.functional.jacobian(later, passage.states[3]))
    found = d.singular_values(passage, lags=(4, 1), start=3)
    assert found.lags == (1, 4)
    np.testing.assert_allclose(found.values[1], wanted, rtol=1e-9, atol=1e-12)


def test_the_spectral_radius_of_a_projected_lstm_is_that_of_the_product():
    torch.manual_seed(0)
    lstm = LSTM(3, 5, proj_size=2, dtype=torch.float64)
    passage = d.Passage.run(lstm, torch.randn(6, 1, 3, dtype=torch.float64))
    own = lstm.state_dict()
    weights = own["weight_hh_l0"] @ own["weight_hr_l0"]
    wanted = max(float(torch.linalg.eigvals(b).abs().max()) for b in weights.split(5))
    assert d.spectral_radius(passage) == pytest.approx([wanted])


def test_the_telling_moment_is_where_the_far_past_helps_most():
    model = alive("gru")
    ids = torch.randint(7, (60,), generator=torch.Generator().manual_seed(0))

    def probability(past, target):
        return model(past[None])[0][0, -1].softmax(-1)[target].item()

    gained = {
        t: probability(ids[t - 9 : t], ids[t]) - probability(ids[t - 4 : t], ids[t])
        for t in range(9, 60)
    }
    assert d.telling(model, ids, context=9, near=4) == max(gained, key=lambda t: gained[t])


def test_share_horizon_and_window_by_hand():
    found = d.ByLag(first=3, norms=np.array([[4.0, 2, 1, 1], [4.0, 2, 1, 1]]))
    assert found.share.tolist() == [0.5, 0.75, 0.875, 1]
    assert (found.horizon(0.5), found.horizon(0.9), found.horizon(1)) == (0, 3, 3)
    assert found.kept(1) == 0.5
    assert found.kept(2) == 0.625  # losses at its first step see lag 0, at its second lags 0 and 1
    assert found.kept(6) == pytest.approx((0.5 + 0.75 + 0.875 + 1 + 1 + 1) / 6)
    assert found.recommend(0.8) == 5  # 4 steps keep 0.78, 5 keep 0.825


def test_a_delayed_copy_puts_its_gradient_at_the_delay():
    torch.manual_seed(0)
    delay, steps = 4, 600
    bits = torch.randint(0, 2, (steps,))
    rnn, head = RNN(2, 16, dtype=torch.float64), torch.nn.Linear(16, 2, dtype=torch.float64)
    optimiser = torch.optim.Adam([*rnn.parameters(), *head.parameters()], 0.01)
    xs, target = bits.view(20, 30).T.contiguous(), bits.view(20, 30).T[:-delay]
    loss = torch.tensor(math.inf)
    for _ in range(200):
        hs, _ = rnn(xs)
        loss = F.cross_entropy(head(hs[delay:]).flatten(0, 1), target.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.05
    passage = d.Passage.run(rnn, xs[:, :1])
    inputs = torch.stack([_input_gradient(rnn, head, xs[:, 0], t) for t in range(10, 30)])
    assert inputs.mean(0).argmax() == delay
    assert d.by_lag(passage, 8).norms.shape == (22, 9)


def _input_gradient(rnn, head, bits, t):
    """|∂ log-odds of the copied bit at t / ∂x_{t-k}|, k = 0 … 9."""
    x = F.one_hot(bits, 2).double()[:, None].requires_grad_()
    said = head(rnn(x)[0][t, 0])
    (g,) = torch.autograd.grad(said[1] - said[0], x)
    return (g[:, 0, 1] - g[:, 0, 0]).abs().flip(0)[len(bits) - 1 - t :][:10]


# Units and gates


@pytest.mark.parametrize(
    ("module", "gates"), [(GRU, {"reset", "update"}), (LSTM, {"input", "forget", "output"})]
)
def test_gate_openness_follows_the_bias(module, gates):
    rnn: Any = module(2, 3, dtype=torch.float64)
    rnn.bias_ih_l0.data[:3] = 50.0  # the first gate (reset, input) stands open
    found = d.units(d.Passage.run(rnn, torch.randn(20, 1, 2, dtype=torch.float64))).openness[0]
    assert set(found) == gates
    first = "reset" if module is GRU else "input"
    assert (found[first] > 0.99).all()
    assert all((found[g] > 0.05).all() and (found[g] < 0.95).all() for g in gates - {first})


def test_saturated_and_dead_units_are_counted():
    rnn: Any = RNN(2, 4, dtype=torch.float64)
    with torch.no_grad():
        rnn.bias_ih_l0[0] = 50.0  # always +1: saturated, and it never moves
        for w in (rnn.weight_ih_l0, rnn.weight_hh_l0, rnn.bias_ih_l0, rnn.bias_hh_l0):
            w[1] = 0  # always 0: dead
    found = d.units(d.Passage.run(rnn, torch.randn(50, 1, 2, dtype=torch.float64)))
    assert (found.saturated, found.dead, found.total) == (1, 2, 4)


# Attribution


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("embedding_size", [None, 3])
def test_attribution_meets_its_definitions(cell, embedding_size):
    model = alive(cell, embedding_size=embedding_size).eval()
    found = d.attribute(model, IDS[:9])

    def log_p(past):
        return float(F.log_softmax(model(past[None])[0][0, -1].detach(), -1)[IDS[8]])

    assert found.log_probability == pytest.approx(log_p(IDS[:8]))
    for s in range(8):
        without = torch.cat([IDS[:s], IDS[s + 1 : 8]])
        assert found.left_out[s] == pytest.approx(log_p(IDS[:8]) - log_p(without))
    assert found.gradient.shape == (8,)
    if embedding_size is None:
        ones = F.one_hot(IDS[:8], 7).double()[:, None]
        nudged = ones * (1 + 1e-6 * (torch.arange(8) == 5).double()[:, None, None])
        logits = model.project(model.recurrence(nudged)[0][-1], _no_masks())
        moved = float(F.log_softmax(logits.detach(), -1)[0, IDS[8]])
        assert (moved - found.log_probability) / 1e-6 == pytest.approx(found.gradient[5], rel=1e-4)


def _no_masks():
    from elman.language_model import Masks

    return Masks(None, None, {})


# Carries


def test_carries_are_compared_with_the_exact_gradient():
    model = alive("elman", layers=1)
    ids = torch.randint(0, 7, (61,), generator=torch.Generator().manual_seed(0))
    scores = {str(s.carry): s for s in d.compare_carries(model, ids, window=6, draws=40)}
    full = scores[str(Full())]
    assert (full.cosine, full.norm_ratio) == (pytest.approx(1), pytest.approx(1))
    assert full.bias < 1e-12
    assert full.deviation == 0
    assert full.steps_kept == 60
    assert scores[str(Truncated(6))].bias > 0.05
    assert scores[str(Truncated(12))].bias < scores[str(Truncated(3))].bias
    assert (scores[str(Truncated(6))].steps_kept, scores[str(Sliding(3, 6))].steps_kept) == (6, 6)
    for score in scores.values():
        if isinstance(score.carry, Randomized):
            assert score.deviation > 0.01
            assert score.bias < 4 * score.deviation / math.sqrt(40)  # unbiased up to chance


def test_the_list_of_carries_grows_with_the_window():
    assert [repr(c) for c in carries(1)][:2] == [repr(Full()), repr(Truncated(1))]


@pytest.mark.parametrize("cell", CELLS)
def test_a_glance_sees_what_by_lag_sees_and_changes_nothing(cell):
    model = alive(cell, dropout=Dropout(outputs=0.5)).train()
    model(IDS[None])  # so that it has a generator of its own
    torch_before, own_before = torch.get_rng_state(), model.noise.state_dict()["cpu"]
    found = d.glance(model, IDS, window=6)
    full = d.by_lag(d.Passage.read(model, IDS), len(IDS) - 2)
    assert (found.half_within, found.window_keeps) == (full.horizon(0.5), full.kept(6))
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert torch.equal(model.noise.state_dict()["cpu"], own_before)
    assert model.training
    assert d.glance(LanguageModel(7, cell="mlp"), IDS, 6) is None


def test_clipping_counts_the_norms_above_the_threshold():
    found = d.clipping([0.5, 1.0, 1.5, 4.0], threshold=1.0)
    assert (found.updates, found.clipped, found.largest, found.median) == (4, 0.5, 4.0, 1.25)
    assert d.clipping([3.0], None).clipped == 0


# Refusals


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: d.Passage.read(LanguageModel(7, cell="mlp"), IDS),
            "'mlp' carries nothing through",
        ),
        (lambda: d.attribute(LanguageModel(7, cell="mlp"), IDS), "'mlp' carries nothing through"),
        (lambda: d.Passage.read(LanguageModel(7), IDS[:1]), "hold no step to diagnose"),
        (lambda: d.attribute(LanguageModel(7), IDS[:1]), "hold no step to explain"),
        (lambda: d.by_lag(d.Passage.read(LanguageModel(7), IDS), 23), "lags=23 .* 23 steps"),
        (lambda: d.by_lag(d.Passage.read(LanguageModel(7), IDS), 0), "lags=0 must be at least 1"),
        (lambda: d.singular_values(linear(np.eye(2), 5), (9,)), r"lags \(9,\) from step 0"),
        (lambda: d.singular_values(linear(np.eye(2), 5), ()), r"lags \(\) from step 0"),
        (lambda: d.lyapunov_exponents(linear(np.eye(2)), 3), "count=3 must be from 1 to 2"),
        (lambda: d.compare_carries(LanguageModel(7), IDS, window=20), "24 tokens are too few"),
        (
            lambda: d.compare_carries(LanguageModel(7), IDS[:1], window=1),
            "hold no step to diagnose",
        ),
        (lambda: d.telling(LanguageModel(7), IDS), "24 tokens hold no prediction from 40"),
        (lambda: d.attribute(LanguageModel(7), [1, 2, -1]), "token ids -1 to 2 must lie in 0 to 6"),
        (lambda: d.Passage.read(LanguageModel(7), [1, 7]), "token ids 1 to 7 must lie in 0 to 6"),
        (lambda: d.compare_carries(LanguageModel(7), [1, 2, -100], window=1), "must lie in 0 to 6"),
        (lambda: d.telling(LanguageModel(7), [1] * 50 + [7]), "must lie in 0 to 6"),
        (lambda: d.Passage.read(LanguageModel(7), torch.rand(9)), "integers, not 1-dimensional"),
        (lambda: d.clipping([], 1.0), "no gradient norms"),
        (lambda: d.ByLag(0, np.ones((1, 2))).kept(0), "window=0 must be at least 1"),
        (lambda: d.ByLag(0, np.ones((1, 2))).horizon(2), "part=2 must be above 0 and at most 1"),
        (
            lambda: d.Passage.run(RNN(2, 3, bidirectional=True), torch.zeros(4, 1, 2)),
            "no one direction through time",
        ),
    ],
)
def test_refusals_say_what_and_why(wrong, message):
    with pytest.raises(UserError, match=message):
        wrong()
