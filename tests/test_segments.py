"""Which stretch of text each update reads."""

import itertools
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elman.errors import UserError
from elman.gradients import Truncated
from elman.training.passes import Passes
from elman.training.segments import Cut, Reading, one_pass

IDS = np.arange(1000)


def readings():
    return st.builds(
        lambda batch_size, window, carry, history: Reading(
            batch_size=batch_size,
            window=window,
            carry=carry,
            history=history if carry == "sliding" else 0,
        ),
        st.integers(1, 5),
        st.integers(2, 40),
        st.sampled_from(["truncated", "sliding", "randomized", "polynomial", "full"]),
        st.integers(1, 50),
    )


@given(how=readings(), seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_lanes_are_read_in_order_and_every_loss_counts_once(how, seed, epoch):
    segments = one_pass(IDS, how, seed=seed, epoch=epoch)
    scored, start = [], None
    for segment in (segments[i] for i in range(len(segments))):
        assert torch.equal(segment.y, segment.x + 1)
        first = segment.x[0, 0].item()
        assert segment.fresh == (start is None)
        assert start is None or first == start, "it starts where the one before said"
        start = first + segment.advance
        assert 0 < segment.scored <= segment.x.shape[1]
        assert segment.x.shape[1] - segment.scored <= how.history
        scored += segment.x[0, -segment.scored :].tolist()
        steps = segment.x.shape[1]
        cut = segment.cut or Cut(scored=steps, advance=steps)
        assert (cut.scored, cut.advance) == (segment.scored, segment.advance)
        assert cut.xi is segment.xi
        assert (cut.xi is not None) == how.carry_used.random
    assert scored == list(range(scored[0], scored[0] + len(scored)))
    assert scored[0] <= how.window, "the pass starts at a random offset"


@given(seed=st.integers(0, 20))
def test_a_pass_is_a_pure_function_of_seed_and_epoch(seed):
    for how in (Reading(2, 9, carry="randomized"), Reading(2, 9, sampling="random")):
        first, again = (one_pass(IDS, how, seed=seed, epoch=1) for _ in range(2))
        assert len(first) == len(again)
        assert all(torch.equal(first[i].x, again[i].x) for i in reversed(range(len(first))))


@pytest.mark.parametrize("sampling", ["sequential", "random"])
def test_a_text_that_fills_one_batch_fills_one_in_every_pass(sampling):
    how = Reading(batch_size=2, window=9, sampling=sampling)
    for tokens in (19, 23):
        passes = [one_pass(IDS[:tokens], how, seed=0, epoch=e) for e in range(30)]
        assert all(len(segments) >= 1 for segments in passes)
    with pytest.raises(UserError, match="batch × window"):
        one_pass(IDS[:18], how, seed=0, epoch=0)


def test_passes_start_at_different_offsets():
    how = Reading(batch_size=2, window=35)
    starts = {one_pass(IDS, how, seed=0, epoch=e)[0].x[0, 0].item() for e in range(200)}
    assert starts == set(range(36)), "as in the notes, 0 to window"
    drawn = replace(how, sampling="random")
    passes = [one_pass(IDS, drawn, seed=0, epoch=e) for e in range(200)]
    starts = {p[i].x[0, 0].item() % 35 for p in passes for i in (0, len(p) - 1)}
    assert starts == set(range(35)), "0 to window - 1: the last would leave out a window"
    assert {len({p[i].x[0, 0].item() % 35 for i in range(len(p))}) for p in passes} == {1}


def test_random_sampling_starts_every_window_afresh():
    passed = one_pass(IDS, Reading(sampling="random", batch_size=4, window=7), seed=0, epoch=0)
    for segment in (passed[i] for i in range(len(passed))):
        assert segment.fresh
        assert segment.cut is None
        assert torch.equal(segment.y, segment.x + 1)


def test_what_was_cut_ahead_is_what_would_have_been_read():
    made = []

    def cut(epoch):
        made.append(epoch)
        return one_pass(IDS, Reading(batch_size=2, window=9), seed=0, epoch=epoch)

    passes = Passes(cut)
    last = len(passes.get(0, 0)) - 1
    for ahead, asked in [
        ((0, 3), (0, 3)),
        ((0, 3), (0, 5)),
        ((0, 0), (1, 0)),
        ((0, last + 1), (1, 0)),
    ]:
        passes.look_ahead(*ahead)
        reads = passes.get(asked[0], 0)
        assert torch.equal(passes.segment(reads, asked[1]).x, reads[asked[1]].x)
    assert made == [0, 1], "each pass is cut once"
    assert passes.get(1, 1) is passes.get(1, 0)
    passes.get(2, 1)
    assert set(passes.kept) == {1, 2}, "the one that is read, and the next"


@pytest.mark.parametrize("carry", ["randomized", "polynomial"])
def test_random_segments_are_a_window_long_on_average(carry):
    long = np.zeros(500_000, dtype=np.int8)
    how = Reading(batch_size=1, window=20, carry=carry)
    segments = cast("Any", one_pass(long, how, seed=0, epoch=0))
    assert 500_000 / len(segments) == pytest.approx(20, rel=0.03)
    lengths = {b - a for a, b in itertools.pairwise(segments.edges)}
    assert len(lengths) > 50


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"carry": "none"}, "truncated, sliding"),
        ({"sampling": "shuffled"}, "sequential, random"),
        ({"carry": "full", "sampling": "random"}, "no past"),
        ({"carry": "sliding"}, "history=0 with carry=sliding"),
        ({"history": 3}, "history=3 with carry=truncated"),
        ({"carry": "randomized", "window": 1}, "at least 2"),
        ({"memory": -1}, "memory=-1 must be at least 0"),
        ({"carry": Truncated(30), "window": 20}, "window=20 with carry=.*, whose window is 30"),
    ],
)
def test_refusals(options, said):
    with pytest.raises(UserError, match=said):
        Reading(**options)


def test_a_window_said_twice_is_one():
    assert Reading(carry=Truncated(20), window=20) == Reading(carry="truncated", window=20)


def test_too_little_text_is_refused():
    with pytest.raises(UserError, match="10 tokens"):
        one_pass(np.arange(10), Reading(), seed=0, epoch=0)


@pytest.mark.parametrize("carry", ["truncated", "sliding", "randomized", "polynomial", "full"])
@pytest.mark.parametrize("window", [3, 5, 8])
def test_a_pass_cut_otherwise_goes_on_after_the_last_loss_and_leaves_out_less_than_a_segment(
    carry, window
):
    ids = np.arange(400)
    old = one_pass(ids, Reading(batch_size=2, window=5), seed=1, epoch=2)
    history = {"history": window} if carry == "sliding" else {}
    new = one_pass(
        ids, Reading(batch_size=2, window=window, carry=carry, **history), seed=1, epoch=2
    )
    for index in range(len(old)):
        share = old.share(index)
        place = new.after(share)
        assert new.share(place) >= share
        assert place == 0 or new.share(place - 1) < share
        assert old.after(share) == index
