"""The notes' own figures: windows at every offset, the computational graph, step 604."""

import numpy as np
import pytest
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

from elman import forecasting, series
from elman.errors import UserError
from elman.figures import dependencies, diagrams, forecast, partitions

TITLE = "the time machine by h g wells"


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_five_offsets_cut_the_text_in_five_ways():
    figure = partitions.offsets(TITLE)
    [axes] = figure.axes
    boxes = [p for p in axes.patches if isinstance(p, Rectangle)]
    assert len(boxes) == sum(len(partitions.windows(TITLE, 5, k)) for k in range(5)) == 25
    assert [label.get_text() for label in axes.get_yticklabels()][-1] == "offset 4"
    assert len(texts(figure)) == 5 * len(TITLE)


@pytest.mark.parametrize("offset", range(5))
def test_the_windows_of_an_offset_join_to_the_text_behind_it(offset):
    cut = partitions.windows(TITLE, 5, offset)
    joined = "".join(cut)
    assert TITLE[offset:].startswith(joined)
    assert len(TITLE) - offset - len(joined) < 5
    assert {len(window) for window in cut} == {5}


def test_a_text_without_two_windows_is_refused():
    with pytest.raises(UserError, match="no two windows of 5"):
        partitions.offsets("the time")


def test_every_parameter_reaches_every_step_and_the_notes_example_holds():
    found = dependencies.edges(3)
    for t in (1, 2, 3):
        read = {edge.source for edge in found if edge.target == f"+{t}"}
        assert read == {f"x{t}", f"h{t - 1}", "W_hx", "W_hh"}  # the notes say so of h_3
        assert {e.source for e in found if e.target == f"·{t}"} == {f"h{t}", "W_qh"}
        assert {e.source for e in found if e.target == f"l{t}"} == {f"o{t}", f"y{t}"}
    assert {e.source for e in found if e.target == "L"} == {"l1", "l2", "l3"}


def test_the_graph_shades_parameters_and_circles_operations():
    figure = dependencies.computational_graph(3)
    patches = figure.axes[0].patches
    boxes = [p for p in patches if isinstance(p, FancyBboxPatch)]
    shaded = [p for p in boxes if p.get_facecolor()[:3] != (1, 1, 1)]
    assert len(shaded) == 3
    assert len(boxes) - len(shaded) == 3 * 4 + 2  # x, h, o, y of each step, h_0 and L
    assert sum(isinstance(p, Circle) for p in patches) == 3 * 3
    said = texts(figure)
    assert {"h$_{0}$", "y$_{3}$", "W$_{hx}$", "W$_{hh}$", "W$_{qh}$", "L"} <= set(said)
    assert len(patches) == len(boxes) + 9 + len(dependencies.edges(3))


def test_the_latent_model_reads_the_value_before_and_says_the_next():
    figure = diagrams.latent_autoregressive()
    [axes] = figure.axes
    boxes = [p for p in axes.patches if isinstance(p, FancyBboxPatch)]
    arrows = [p for p in axes.patches if isinstance(p, FancyArrowPatch)]
    assert len(boxes) == 3 * 3  # x, h and x̂ of three steps
    assert len(arrows) == 3 * 3 + 2  # h from h and x before, x̂ from h; and on from the last
    assert {"x$_{t}$", "h$_{t+1}$", r"$\hat{x}$$_{t-1}$"} <= set(texts(figure))


@pytest.mark.parametrize("steps", [0, 9])
def test_a_graph_that_nobody_could_read_is_refused(steps):
    with pytest.raises(UserError, match=f"steps={steps}"):
        dependencies.computational_graph(steps)


def test_the_figure_from_604_shows_the_models_own_numbers():
    [sine] = series.load("sine")
    x = sine.values
    model = forecasting.Window(tau=4, hidden=10, epochs=1).fit(x[:604])
    figure = forecast.from_origin(x, model)
    above, below = figure.axes
    curves = {
        line.get_label(): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata()))
        for line in (*above.lines, *below.lines)
    }
    at, fed_back = curves["fed back from 604"]
    assert at[0] == 605  # the first value that 604 do not contain
    assert np.allclose(fed_back, model.predict(x[:604], 396)[:, 0])
    at, one_step = curves["1 step ahead"]
    assert at[0] == 5
    assert one_step[600] == pytest.approx(model.predict(x[:604], 1)[0, 0])
    for k in (1, 4, 16, 64):
        at, path = curves[f"k = {k}"]
        assert path[at == 604 + k].item() == pytest.approx(model.predict(x[:604], k)[-1, 0])


@pytest.mark.parametrize("origin", [4, 940])
def test_an_origin_without_past_or_future_is_refused(origin):
    x = np.sin(np.arange(1000.0))
    with pytest.raises(UserError, match=f"origin={origin}"):
        forecast.from_origin(x, forecasting.Linear(4).fit(x), origin)
