"""A carry from outside: one class, and one line in the table for a name."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

from conftest import small_text
from elman import LanguageModel, nn
from elman.cli import run
from elman.diagnostics.carries import CarryScore
from elman.errors import UserError
from elman.forecasting.catalogue import carry_of
from elman.gradients import Carry, Checkpointed, Given, Memory, Stored, carry
from elman.gradients.memory import Plan
from elman.runs.config import Config
from elman.text.prepared import Data
from elman.training import Optimisation, Reading, Settings, Training, piecewise

DOUBLE = {"dtype": torch.float64}


@dataclass(frozen=True)
class Fading(Carry):
    """ξ_t = decay, and 0 where a later window of `window` steps begins."""

    window: int
    decay: float = 0.5

    def weights(self, steps, rows=1):
        xi = torch.full((steps,), self.decay, dtype=torch.float64)
        xi[:: self.window] = 0
        xi[0] = 1
        return xi


def gradients(module):
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("memory", [Stored(), Checkpointed(every=3)], ids=repr)
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_modules_carry_by_its_weights(make, memory):
    torch.manual_seed(0)
    mine = make(3, 4, 2, carry=Fading(5), memory=memory, **DOUBLE)
    given = make(3, 4, 2, carry=Given(tuple(Fading(5).weights(13).tolist())), **DOUBLE)
    full = make(3, 4, 2, **DOUBLE)
    given.load_state_dict(mine.state_dict())
    full.load_state_dict(mine.state_dict())
    xs = torch.randn(13, 2, 3, **DOUBLE)
    for module in (mine, given, full):
        module(xs)[0].sin().sum().backward()
    for found, wanted, exact in zip(*map(gradients, (mine, given, full)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert exact.norm() > 1e-3
    far = [m.weight_hh_l0.grad for m in (mine, full)]
    assert (far[0] - far[1]).norm() > 1e-3 * far[1].norm(), "it is not the full gradient"


def test_a_training_cuts_the_text_where_it_cuts_and_weighs_what_is_between():
    """By hand: segments from cut to cut, ξ inside, each an update's own mean loss."""
    ids = torch.randint(7, (42,), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = LanguageModel(7, hidden_size=5, cell="gru").double()
    reading = Reading(batch_size=1, window=8, carry=Fading(9))
    train = Training(model, ids, None, Settings(reading=reading))
    reads = train.reads()
    assert [reads[i].scored for i in range(len(reads))][:-1] == [9] * (len(reads) - 1)
    for index in range(len(reads)):
        piecewise.read(train, reads[index], *train.prepare(reads[index]), 1.0, train.carried)
    found = gradients(model)
    model.zero_grad()
    state = None
    for segment in (reads[i] for i in range(len(reads))):
        model.recurrence.carry = Given((1.0, *[0.5] * (segment.scored - 1)))
        logits, state = model(segment.x, state)
        F.cross_entropy(logits[0], segment.y[0]).backward()
        state = state.detach()
    for mine, by_hand in zip(found, gradients(model), strict=True):
        torch.testing.assert_close(mine, by_hand, rtol=1e-12, atol=1e-12)


def test_a_model_and_its_training_may_share_it():
    torch.manual_seed(0)
    model = LanguageModel(7, hidden_size=16, cell="gru", carry=Fading(9))
    ids = torch.arange(800) % 7
    how = Settings(
        epochs=3,
        reading=Reading(4, 9, carry=Fading(9)),
        optimisation=Optimisation("adam", 0.02),
    )
    nats = [record.nats for record in Training(model, ids, None, how).records()]
    assert nats[-1] < 0.5 * nats[0]
    assert model.recurrence.carry == Fading(9)


def test_one_line_gives_it_a_name_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(carry.CARRIES, "fading", carry.Named(lambda window, _: Fading(window)))
    (tmp_path / "book.txt").write_text(small_text(), encoding="utf-8")
    size = "--hidden-size 8 --embedding-size 4 --batch-size 4 --window 20 --epochs 1"
    words = f"train {tmp_path / 'book.txt'} --out {tmp_path / 'run'} --carry fading {size}"
    monkeypatch.setattr("sys.argv", ["elman", *words.split()])
    assert run() == 0
    reading = json.loads((tmp_path / "run" / "config.json").read_text())["training"]["reading"]
    assert (reading["carry"], reading["window"]) == ("fading", 20)
    assert Reading(**reading).carry_used == Fading(20)
    monkeypatch.setattr("sys.argv", ["elman", "evaluate", str(tmp_path / "run")])
    assert run() == 0


def test_without_a_name_it_trains_but_is_not_written_down():
    for reading, said in (
        (Reading(carry=Fading(9)), r"Fading\(window=9, decay=0.5\) has no name"),
        (Reading(memory=Checkpointed(every=3)), r"Checkpointed\(every=3.*is not a number of bytes"),
    ):
        with pytest.raises(UserError, match=said):
            Config(Data("book.txt"), {}, Settings(reading=reading), sha256="").json()


def test_figures_and_tables_have_words_for_it():
    score = CarryScore(Fading(9), 1.0, 1.0, 0.0, 0.0, 0.1, 9)
    assert score.name == "Fading(window=9, decay=0.5)"
    assert Fading(4).stretches(10) == [(0, 4), (4, 8), (8, 10)]


def test_what_answers_nothing_is_no_carry():
    with pytest.raises(TypeError, match="abstract"):
        type("Silent", (Carry,), {})()  # pyright: ignore


def test_a_memory_from_outside_runs_too():
    @dataclass(frozen=True)
    class Halves(Memory):
        """Two pieces, the state between them kept."""

        def plan(self, steps, sizes, strands=1):
            return Plan(steps, -(-steps // 2), 1)

    torch.manual_seed(0)
    mine = nn.GRU(3, 4, memory=Halves(), **DOUBLE)
    stored = nn.GRU(3, 4, **DOUBLE)
    stored.load_state_dict(mine.state_dict())
    xs = torch.randn(9, 2, 3, **DOUBLE)
    for module in (mine, stored):
        module(xs)[0].sin().sum().backward()
    for found, wanted in zip(gradients(mine), gradients(stored), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_forecaster_asks_the_table_which_carries_have_steps_between_cuts(monkeypatch):
    monkeypatch.setitem(carry.CARRIES, "fading", carry.Named(lambda window, _: Fading(window)))
    whole = carry.Named(lambda window, _: Fading(10**6), whole=True)
    monkeypatch.setitem(carry.CARRIES, "fading-on", whole)
    assert carry_of("fading:7") == Fading(7)
    assert carry_of("fading-on") == Fading(10**6)
    for said in ("fading", "fading-on:7"):
        with pytest.raises(UserError, match=r"full, fading-on, or one of .* fading with the steps"):
            carry_of(said)
