"""Training figures: what is drawn where, and labels that can be read."""

import io
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman.figures import save, training
from elman.figures.training import Curve, binned, spread

BASELINES = {"uniform": 50.0, "unigram": 20.0, "Kneser–Ney order 5": 5.2, "hopeless": math.inf}


def words(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def levels(figure):
    """Heights of the lines that run across the whole axes."""
    (axes,) = figure.axes
    return [
        float(line.get_ydata()[0])
        for line in axes.lines
        if list(line.get_xdata()) == [0, 1] and line.get_transform() != axes.transAxes
    ]


def test_perplexity_has_both_curves_and_a_line_for_each_baseline():
    train = Curve(range(1, 101), np.linspace(50, 4, 100))
    figure = training.perplexity(train, Curve([50, 100], [9.0, 6.0]), BASELINES)
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    assert axes.get_xlabel() == "update"
    assert levels(figure) == [50.0, 20.0, 5.2]  # what has no place on the scale is left out
    assert words(figure) == [
        "uniform: 50",
        "unigram: 20",
        "Kneser–Ney order 5: 5.2",
        "training: 4",
        "validation: 6",
    ]
    points = [np.asarray(line.get_xydata()) for line in axes.lines]
    assert any(p.shape == (2, 2) and np.allclose(p, [[50, 9], [100, 6]]) for p in points)


def test_a_validation_that_was_better_once_says_so():
    figure = training.perplexity(Curve([], []), Curve([1, 2, 3], [9.0, 6.0, 7.0]), {})
    assert words(figure) == ["validation: 7\n(best 6)"]


def test_gradient_norms_stand_beside_the_threshold():
    figure = training.gradient_norms(Curve([1, 2, 3, 4], [0.5, 4.0, 2.0, 1.0]), 1.0)
    assert levels(figure) == [1.0]
    assert words(figure) == ["θ = 1\n50 % clipped"]
    assert words(training.gradient_norms(Curve([1, 2], [0.5, 4.0]), None)) == []


def test_figures_of_an_empty_run_have_axes_and_threshold_but_no_curve():
    perplexity = training.perplexity(Curve([], []), Curve([], []), {})
    norms = training.gradient_norms(Curve([], []), 1.0)
    for figure, quantity, across in ((perplexity, "perplexity", []), (norms, "‖g‖", [1.0])):
        page = io.BytesIO()
        figure.savefig(page, format="svg")
        assert page.getvalue().rstrip().endswith(b"</svg>")
        (axes,) = figure.axes
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("update", quantity)
        assert levels(figure) == across
        assert len(axes.lines) == 2 * len(across), "a threshold and the stroke to its label"
        assert not axes.collections, "no band either"
    assert words(perplexity) == []
    assert words(norms) == ["θ = 1\n0 % clipped"]


@given(values=st.lists(st.floats(0.01, 1e6), min_size=1, max_size=400), points=st.integers(1, 50))
def test_binning_keeps_the_geometric_mean_and_the_extremes(values, points):
    bins = binned(Curve(range(len(values)), values), points)
    assert len(bins.steps) == min(points, len(values))
    assert bins.low.min() == min(values)
    assert bins.high.max() == max(values)
    tight = 1 + 1e-12
    assert (bins.low <= bins.middle * tight).all()
    assert (bins.middle <= bins.high * tight).all()
    assert (np.diff(bins.steps) > 0).all()
    if len(values) % len(bins.steps) == 0:  # bins of one size: their mean is the mean
        assert np.log(bins.middle).mean() == pytest.approx(np.log(values).mean())


def test_binning_leaves_out_what_a_logarithm_cannot_show():
    assert binned(Curve([1, 2, 3, 4], [math.nan, 0.0, math.inf, 2.0])).steps.tolist() == [4.0]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("lost", [[math.inf] * 2, [math.nan] * 2, [1e307, 1e308], [0.0, 5e-324]])
def test_what_no_scale_can_show_is_left_out_of_every_figure(lost, narrow):
    curve = Curve([1, 2], lost)
    empty = training.perplexity(curve, curve, {"uniform": 50.0, "huge": 1e308}, narrow=narrow)
    assert words(empty) == ["uniform: 50"]
    norms = training.gradient_norms(Curve([1, 2], [0.5, 2.0]), 1e308, narrow=narrow)
    assert words(norms) == []
    for figure in (empty, norms, training.gradient_norms(curve, 1.0, narrow=narrow)):
        figure.savefig(io.BytesIO())


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.05, 0.15)), max_size=6))
def test_labels_never_overlap_and_stay_in_order_and_in_sight(wishes):
    heights, rows = [h for h, _ in wishes], [r for _, r in wishes]
    placed = spread(heights, rows)
    order = sorted(range(len(wishes)), key=lambda i: (heights[i], i))
    for below, above in itertools.pairwise(order):
        assert placed[above] - placed[below] >= (rows[above] + rows[below]) / 2 - 1e-6
    for y, row in zip(placed, rows, strict=True):
        assert row / 2 - 1e-6 <= y <= 1 - row / 2 + 1e-6


def test_labels_with_room_stay_where_they_are():
    assert spread([0.2, 0.8, 0.5], [0.1, 0.1, 0.1]) == pytest.approx([0.2, 0.8, 0.5])


def test_narrow_figures_say_the_same_below_their_axes():
    norms = Curve([1, 2, 3, 4], [0.5, 4.0, 2.0, 1.0])
    figure = training.gradient_norms(norms, 1.0, narrow=True)
    assert words(figure) == ["θ = 1, 50 % clipped"]
    assert figure.get_figwidth() == training.NARROW
    axes = figure.axes[0]
    assert all(text.get_position()[1] < 0 for text in axes.texts)
    curves = training.perplexity(norms, norms, {"uniform": 3.0}, narrow=True)
    assert words(curves) == ["uniform: 3", "training: 1", "validation: 1 (best 0.5)"]
    assert words(training.horizons(norms, norms, narrow=True)) == ["half within 1", "90 % within 1"]


def test_the_same_figure_has_the_same_bytes(tmp_path):
    paths = [
        save(training.gradient_norms(Curve([1, 2], [1.0, 2.0]), 1.0), tmp_path / name)
        for name in ("a.svg", "b.svg")
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()
