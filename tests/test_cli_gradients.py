"""`elman gradients`: a verdict, numbers, pictures, refusals; and the pictures themselves."""

import json
import re

import pytest
import torch

from elman import diagnostics as d
from elman.cli import run
from elman.cli.gradients import carries_picture
from elman.figures import diagrams
from elman.figures import gradients as pictures
from elman.language_model import LanguageModel
from elman.runs import Run

TINY = ["--hidden-size", "6", "--epochs", "1", "--max-tokens", "3000", "--window", "8"]
TINY += ["--batch-size", "4", "--diagnose", "20"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "gru"
    assert run(["train", "--model", "gru", "--out", str(folder), *TINY]) == 0
    return folder


def test_verdict_first_then_numbers(trained, capsys):
    assert run(["gradients", str(trained), "--draws", "2"]) == 0
    said, noted = capsys.readouterr()
    horizons = r"half of the gradient lies within \d+ steps?, 90 % within \d+"
    assert re.match(rf"{horizons}; a window of 8 keeps \d+ %\n", said)
    assert "followed 16 steps back" in said
    assert "largest Lyapunov exponent" in said
    assert "truncated, window 8" in said
    assert noted.endswith(f"next: elman gradients {trained} --figure {trained}/pictures\n")


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(trained, capsys, monkeypatch):
    monkeypatch.setattr(d.Passage, "read", None)  # never called
    place = trained / "config.json" / "pictures"
    assert run(["gradients", str(trained), "--figure", str(place)]) == 2
    said = capsys.readouterr().err
    assert f"cannot make the folder {place}: {trained / 'config.json'} is not a folder" in said
    assert "hint: name another with --figure" in said


def test_lags_cut_short_give_bounds(trained, capsys):
    short = ["--steps", "60", "--lags", "2", "--draws", "2"]
    assert run(["gradients", str(trained), *short]) == 0
    assert "90 % within at least 2; a window of 8 keeps at most" in capsys.readouterr().out
    assert run(["gradients", str(trained), "--json", *short]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["settled"], said["lags"]) == (False, 2)
    assert said["share_beyond"] > 0.001


def test_json_and_every_picture(trained, capsys, tmp_path):
    pictured = ["--figure", str(tmp_path / "figures"), "--json"]
    asked = ["gradients", str(trained), "--steps", "60", "--lags", "10", "--draws", "2", *pictured]
    assert run(asked) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["mean_norm_by_lag"]) == 11
    assert said["units"] == 6
    assert len(said["figures"]) == 8
    pictures = [p.read_bytes().rstrip() for p in (tmp_path / "figures").iterdir()]
    assert all(picture.endswith(b"</svg>") for picture in pictures)


def test_another_text_can_be_read(trained, capsys, tmp_path):
    text = tmp_path / "other.txt"
    text.write_text("a class is a statement about names " * 3)
    assert run(["gradients", str(trained), str(text), "--lags", "5", "--draws", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 104


def test_training_looks_at_the_gradient_and_the_report_shows_it(trained):
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    looks = [r for r in records if r["kind"] == "diagnosis"]
    assert [r["step"] for r in looks] == list(range(20, looks[-1]["step"] + 1, 20))
    assert all(0 < r["window_keeps"] <= 1 for r in looks)
    assert "How far back the gradient reaches" in (trained / "report.html").read_text("utf-8")


def test_refusals(trained, capsys, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("abc")
    for asked, message in (
        ([str(tmp_path / "nowhere")], "is not a run folder"),
        ([str(trained), str(short)], "3 tokens are too few"),
        ([str(trained), "--lags", "0"], "--lags"),
    ):
        assert run(["gradients", *asked]) == 2
        assert message in capsys.readouterr().err


def test_a_model_without_a_state_has_nothing_to_show(capsys, tmp_path):
    folder = tmp_path / "mlp"
    assert run(["train", "--model", "mlp", "--out", str(folder), *TINY]) == 0
    capsys.readouterr()
    assert run(["gradients", str(folder)]) == 2
    assert "'mlp' carries nothing through time" in capsys.readouterr().err


# The pictures


def model(cell="elman", layers=1):
    torch.manual_seed(0)
    return LanguageModel(7, cell=cell, hidden_size=5, layers=layers)


def labels(figure):
    return [t.get_text() for axes in figure.axes for t in axes.texts]


def test_lags_mark_the_horizons_and_the_window():
    passage = d.Passage.read(model(), torch.arange(40) % 7)
    found = d.by_lag(passage, 10)
    said = labels(pictures.lags(found, window=4))
    assert f"50 % within {found.horizon(0.5)}" in said
    assert f"window 4 keeps {100 * found.kept(4):.0f} %" in said
    assert labels(pictures.lags(found, window=4, narrow=True)) == said


def test_units_are_few_and_named():
    passage = d.Passage.read(model("lstm"), torch.arange(30) % 7)
    found = d.units(passage)
    assert found.names[:6] == ("h 0", "h 1", "h 2", "h 3", "h 4", "c 0")
    whole, each = pictures.units(found, list("abcdefg" * 5)[:29]).axes[:2]
    assert whole.get_title() == "The gradient that reaches all 10 units of the state, step by step"
    rows = [t.get_text() for t in each.get_yticklabels()]
    assert sorted(rows) == sorted(found.names)
    strongest = found.names[int(found.gradient.sum(0).argmax())]
    assert rows[0] == strongest
    wide = d.units(
        d.Passage.read(LanguageModel(7, cell="gru", hidden_size=99, layers=2), [1, 2, 3])
    )
    assert (wide.names[0], wide.names[99]) == ("h1.0", "h2.0")
    shown = pictures.units(wide).axes[1]
    assert len(shown.get_yticklabels()) == pictures.STRONGEST
    assert f"The {pictures.STRONGEST} that receive most" in shown.get_title()


def test_the_picture_of_carries_takes_windows_that_fit_its_text(trained):
    opened = Run.open(trained)
    ids = opened.splits().validation[:200]
    figure = carries_picture(opened.load_model(), ids, opened, window=500)
    axes = figure.axes[0]
    assert "over 72 characters, so with windows of 9 to 36 (this run trained with 500)" in (
        axes.get_title()
    )
    bars = [p.get_bbox().width for p in axes.patches]
    assert len(bars) >= 1 + 8 + 4 + 2 + 1


def test_carries_draw_one_row_each_over_the_text():
    ids = torch.arange(31) % 7
    scores = d.compare_carries(model(), ids, window=5, draws=2)
    figure = pictures.carries(scores, list("abcdefghij klmnopqrs"))
    ticks = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert ticks == [s.name for s in scores]
    bars = len(figure.axes[0].patches)
    assert bars >= 1 + 10 + 4 + 2 + 1  # full, windows of 2, 5 and 10, sliding; then the random ones


def test_graph_shows_the_gradient_of_every_copy_of_the_weights():
    network = model().double()
    ids = [1, 2, 3, 4]
    found = diagrams.graph_gradients(network, ids)
    logits, _ = network(torch.tensor([ids[:-1]]))
    torch.nn.functional.cross_entropy(logits[0], torch.tensor(ids[1:])).backward()
    assert len(found.state_to_state) == 2
    # The steps read different tokens, so they pull on different columns: norms add in squares.
    total = float(network.recurrence.weight_ih_l0.grad.square().sum())
    assert sum(n**2 for n in found.weights["weight_ih_l0"]) == pytest.approx(total)
    assert found.weights["weight_hh_l0"][0] == 0  # h_0 = 0 hands W_hh nothing
    drawn = labels(diagrams.graph(network, ids))
    assert f"{found.state_to_state[0]:.2g}" in drawn


def test_graph_shows_each_steps_loss_and_label_and_its_share_of_the_average():
    network = model().double()
    with torch.no_grad():
        network.bias_q[2] = 9.0  # nearly certain, and right at the first step alone
    found = diagrams.graph_gradients(network, [1, 2, 3, 4])
    drawn = labels(diagrams.graph(network, [1, 2, 3, 4]))
    assert {"l$_1$", "l$_2$", "l$_3$", "y$_1$", "y$_2$", "y$_3$", "L"} <= set(drawn)
    assert drawn.count("0.33") == 3  # ∂L/∂l_t = 1/T, whatever the softmax says
    assert {f"{pull:.2g}" for pull in found.loss_to_output} <= set(drawn)


def test_graph_shows_the_memory_and_the_embedding():
    torch.manual_seed(0)
    network = LanguageModel(7, cell="lstm", hidden_size=5, embedding_size=3).double()
    ids = torch.tensor([1, 2, 3, 4])
    found = diagrams.graph_gradients(network, ids)
    e = network.inputs(ids[:-1, None], diagrams.NONE).detach().requires_grad_()
    h = c = torch.zeros(1, 1, 5, dtype=torch.float64)
    carried, outs = [], []
    for t in range(3):
        carried.append(c.clone().requires_grad_())  # what the step before hands on, and no more
        _, (h, c) = network.recurrence(e[t : t + 1], (h, carried[-1]))
        outs.append(torch.nn.functional.linear(h[0], network.output_weight, network.bias_q))
    loss = torch.nn.functional.cross_entropy(torch.cat(outs), ids[1:])
    pulls = torch.autograd.grad(loss, [e, *carried[1:]])
    assert found.state_to_embedding == pytest.approx([float(g.norm()) for g in pulls[0]])
    assert found.memory_to_memory == pytest.approx([float(g.norm()) for g in pulls[1:]])
    drawn = labels(diagrams.graph(network, ids.tolist()))
    assert {"c$_1$", "e$_1$", "W$_{xh}$", "W$_{hq}$", "W$_{xe}$"} <= set(drawn)
    assert not {"W$_{hx}$", "W$_{qh}$"} & set(drawn)


@pytest.mark.parametrize("cell", ["elman", "gru", "lstm"])
def test_diagrams_show_shapes_and_predictions(cell):
    shapes = labels(diagrams.unrolled(model(cell), batch=9))
    assert any("9 × 7" in s for s in shapes)
    assert any("1 × 9 × 5" in s for s in shapes)
    assert any(s.startswith("c$_") for s in shapes) == (cell == "lstm")
    assert any("gates" in s for s in shapes) == (cell != "elman")
    assert {"W$_{xh}$", "W$_{hh}$", "W$_{hq}$"} <= set(shapes)
    assert "W$_{xe}$" not in shapes
    embedded = LanguageModel(7, cell=cell, hidden_size=5, embedding_size=3)
    shapes = labels(diagrams.unrolled(embedded, batch=9))
    assert "W$_{xe}$" in shapes
    assert any("9 × 3" in s for s in shapes)
    said = labels(diagrams.character_model(model(cell), [1, 2, 3], list("abcdefg")))
    assert {"b", "c", "d"} <= set(said)
    assert sum(s.startswith(("a ", "b ", "c ", "d ", "e ", "f ", "g ")) for s in said) == 6
