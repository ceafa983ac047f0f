"""A cell that elman has never seen: its own file, one line in the table, and it trains."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from elman import cells, kernels, nn
from elman.cells import Cell, Weights, read
from elman.cli import run
from elman.errors import UserError
from elman.forecasting import Recurrent
from elman.gradients import Checkpointed, Sliding, Truncated
from elman.kernels import choice, cpu, cuda, fused
from elman.language_model import LanguageModel


class Mgu(Cell):
    """The minimal gated unit of Zhou et al. (2016): f = σ(·), n = tanh(· + f ⊙ ·)."""

    name = "mine"
    gates = 2
    apart = (1,)

    def step(self, w, x, state):
        (h,) = state
        (i_f, i_n) = read(w.W_ih, x, w.b_ih).chunk(2, -1)
        (h_f, h_n) = linear(h, w.W_hh, w.b_hh).chunk(2, -1)
        f = torch.sigmoid(i_f + h_f)
        return (h + f * (torch.tanh(i_n + f * h_n) - h),), None


class Leaky(Cell):
    """Two states: a tanh layer and its slow average."""

    name = "leaky"
    states = ("h", "c")

    def step(self, w, x, state):
        h, c = state
        c = 0.9 * c + 0.1 * torch.tanh(read(w.W_ih, x, w.b_ih) + linear(h, w.W_hh, w.b_hh))
        return (torch.tanh(2 * c), c), None


@pytest.fixture(autouse=True, params=[Mgu(), Leaky()], ids=lambda cell: cell.name)
def cell(request, monkeypatch):
    monkeypatch.setitem(cells.CELLS, request.param.name, request.param)
    return request.param


def by_hand(cell, layers, xs, states):
    """The layers as a plain loop that autograd sees."""
    ys = []
    for x in xs:
        for i, w in enumerate(layers):
            states[i], _ = cell.step(w, x, states[i])
            x = states[i][0]
        ys.append(x)
    return torch.stack(ys)


@pytest.mark.parametrize("memory", [None, Checkpointed(every=3)])
@pytest.mark.parametrize("ids", [False, True])
def test_its_gradient_is_autograds(cell, ids, memory):
    torch.manual_seed(0)
    options = {} if memory is None else {"memory": memory}
    rnn = nn.of(cell.name, 5, 4, 2, dtype=torch.float64, **options)
    assert isinstance(rnn, nn.Layers)
    xs = torch.randint(5, (7, 3)) if ids else torch.randn(7, 3, 5, dtype=torch.float64)
    pull = torch.randn(7, 3, 4, dtype=torch.float64)
    wanted = [*rnn.parameters()]
    if not ids:
        wanted.append(xs.requires_grad_())
    ys, _ = rnn(xs)
    found = torch.autograd.grad(ys, wanted, pull)
    weights = list(rnn.parameters())
    layers = [Weights(*weights[i : i + 4]) for i in (0, 4)]
    zero = torch.zeros(3, 4, dtype=torch.float64)
    exact = by_hand(cell, layers, xs, [(zero,) * len(cell.states)] * 2)
    torch.testing.assert_close(ys, exact, rtol=1e-12, atol=1e-12)
    for a, b in zip(found, torch.autograd.grad(exact, wanted, pull), strict=True):
        assert b.norm() > 1e-3
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("carry", [Truncated(3), Sliding(every=2, steps=4)], ids=repr)
def test_it_takes_every_carry_and_both_directions(cell, carry):
    rnn = nn.Layers(cell.name, 5, 4, bidirectional=True, batch_first=True, carry=carry)
    ys, last = rnn(torch.randn(2, 6, 5))
    ys.sum().backward()
    assert ys.shape == (2, 6, 8)
    assert isinstance(last, tuple) == (len(cell.states) > 1)
    assert all(p.grad.abs().sum() > 0 for p in rnn.parameters())


def test_the_reference_runs_it_and_the_others_say_that_they_do_not_have_it(cell, monkeypatch):
    rnn, xs = nn.Layers(cell.name, 5, 4), torch.zeros(3, 2, 5)
    said = kernels.explain(rnn, xs)
    assert said.runs == "reference"
    asked = {name: why for name, why in said.reasons.items() if name not in choice.WHOLE}
    undescribed = asked.pop("described")
    assert undescribed == f"{cell.name} is not described by its equations"
    assert set(asked.values()) == {f"it has no {cell.name} cell"}
    (piece,) = rnn.job(xs).pieces()
    for kernel in (cpu.KERNEL, cuda.KERNEL, fused.KERNEL):
        assert kernel.refuses(piece) == f"it has no {cell.name} cell"
    monkeypatch.setenv("ELMAN_KERNELS", "cpu")
    with pytest.raises(UserError, match=f"it has no {cell.name} cell"):
        rnn(xs)


def test_a_language_model_writes_with_it_as_it_reads(cell):
    torch.manual_seed(0)
    model = LanguageModel(7, cell=cell.name, hidden_size=6, embedding_size=3).eval()
    ids = torch.randint(7, (1, 5))
    step, logits = model.stepper(), model(ids)[0]
    assert step is not None
    for t in range(5):
        torch.testing.assert_close(step(ids[:, t]), logits[:, t])


def test_the_forecasters_learn_with_it(cell):
    wave = np.sin(np.arange(120) / 4)[:, None]
    model = Recurrent(cell=cell.name, tau=8, hidden=8, epochs=40, learning_rate=0.03, seed=1).fit(
        [wave]
    )
    ahead = model.predict(wave, 1)
    assert abs(float(ahead[0, 0]) - np.sin(120 / 4)) < 0.4


def test_the_command_line_trains_it_and_forecasts_with_it(cell, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 40)
    out = tmp_path / "run"
    options = ["--hidden-size", "8", "--batch-size", "2", "--window", "8", "--epochs", "2"]
    code = run(
        ["train", str(text), "--model", cell.name, *options, "--out", str(out), "--seed", "1"]
    )
    assert code == 0, capsys.readouterr().err
    assert json.loads((out / "config.json").read_text())["model"]["cell"] == cell.name
    wave = tmp_path / "wave.csv"
    wave.write_text("\n".join(["y", *(str(math.sin(t / 4)) for t in range(60))]))
    code = run(["forecast", str(wave), "--model", cell.name, "--epochs", "1", "--json"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert cell.name in shown.out


def test_an_unknown_cell_is_refused_with_the_names_there_are(cell):
    with pytest.raises(UserError, match=f"unknown cell 'tanhh'; one of .*{cell.name}"):
        nn.Layers("tanhh", 3, 4)
    with pytest.raises(UserError, match=f"unknown cell 'tanhh'; one of .*{cell.name}, mlp"):
        LanguageModel(7, cell="tanhh")


@pytest.mark.parametrize("name", ["elman", "relu", "linear", "gru", "lstm"])
def test_every_cell_of_the_table_makes_a_language_model(name):
    torch.manual_seed(0)
    model = LanguageModel(7, cell=name, hidden_size=6)
    logits, _ = model(torch.randint(7, (2, 5)))
    logits.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
