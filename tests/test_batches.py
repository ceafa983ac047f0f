"""Windows: what is covered, what continues what, and going on from anywhere."""

import json
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from elman import batches
from elman.errors import UserError

KINDS = [batches.streams, batches.shuffled]


@st.composite
def shapes(draw):
    """A shape, and a text of distinct ids that is long enough for it, sometimes only just."""
    batch, window = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    offset = draw(st.integers(0, window))
    tokens = offset + batch * window + 1 + draw(st.integers(0, 3 * batch * window))
    return torch.arange(100, 100 + tokens), {"batch": batch, "window": window, "offset": offset}


def listed(windows):
    return [(x.tolist(), y.tolist()) for x, y in windows]


@pytest.mark.parametrize("kind", KINDS)
@given(shape=shapes())
def test_every_label_is_the_next_token(kind, shape):
    ids, options = shape
    windows = kind(ids, **options)
    count = 0
    for x, y in windows:
        assert x.shape == y.shape == (options["batch"], options["window"])
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(y, x + 1)
        count += 1
    assert count == len(windows) > 0


@given(shape=shapes())
def test_rows_of_streams_continue_one_another(shape):
    ids, options = shape
    before = None
    for x, y in batches.streams(ids, **options):
        if before is not None:
            assert torch.equal(x[:, 0], before[:, -1])
        before = y


@given(shape=shapes())
def test_streams_use_each_token_once_and_leave_out_only_ends(shape):
    ids, options = shape
    batch, window, offset = options.values()
    lane = (len(ids) - offset - 1) // batch
    read = lane // window * window
    expected = [
        int(ids[offset + row * lane + step]) for row in range(batch) for step in range(read)
    ]
    used = torch.cat([x for x, _ in batches.streams(ids, **options)], dim=1)
    assert used.flatten().tolist() == expected


@given(shape=shapes(), seed=st.integers(0, 2**40))
def test_shuffled_deals_each_window_at_most_once_and_leaves_out_less_than_a_batch(shape, seed):
    ids, options = shape
    batch, window, offset = options.values()
    windows = [ids[s : s + window].tolist() for s in range(offset, len(ids) - window, window)]
    dealt = [row for x, _ in batches.shuffled(ids, **options, seed=seed) for row in x.tolist()]
    assert len({tuple(row) for row in dealt}) == len(dealt)
    assert all(row in windows for row in dealt)
    assert len(dealt) == len(windows) // batch * batch


def test_shuffled_reaches_every_order_and_leaves_out_other_windows_by_seed():
    firsts = {
        tuple(x[0, 0].item() for x, _ in batches.shuffled(range(8), batch=1, window=2, seed=seed))
        for seed in range(100)
    }
    assert firsts == {(a, b, c) for a in (0, 2, 4) for b in (0, 2, 4) for c in (0, 2, 4)
                      if len({a, b, c}) == 3}  # fmt: skip
    left_out = {
        ({0, 2, 4} - {r[0] for x, _ in batches.shuffled(range(8), batch=2, window=2, seed=seed)
                      for r in x.tolist()}).pop()
        for seed in range(100)
    }  # fmt: skip
    assert left_out == {0, 2, 4}


@given(shape=shapes(), seed=st.integers(0, 2**40))
def test_the_same_seed_gives_the_same_batches(shape, seed):
    ids, options = shape
    one, two = (batches.shuffled(ids, **options, seed=seed) for _ in range(2))
    assert listed(one) == listed(two)


@pytest.mark.parametrize("kind", KINDS)
@given(shape=shapes())
def test_a_restored_position_continues_with_the_same_batches(kind, shape):
    ids, options = shape
    whole = listed(kind(ids, **options))
    for read in range(len(whole) + 1):
        left = kind(ids, **options)
        assert listed(islice(left, read)) == whole[:read]
        state = json.loads(json.dumps(left.state()))
        again = kind(ids, **options)
        again.restore(state)
        assert listed(again) == whole[read:]
        assert listed(again) == whole  # and then from the start


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_was_left_goes_on_and_one_that_ended_starts_again(kind):
    whole = listed(kind(range(31), batch=2, window=3))
    windows = kind(range(31), batch=2, window=3)
    for _, _ in windows:
        break
    assert listed(windows) == whole[1:]
    assert listed(windows) == whole
    assert len(windows) == len(whole) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_any_batch_can_be_asked_for_without_moving(kind):
    windows = kind(range(31), batch=2, window=3)
    whole = listed(windows)
    assert listed(windows[i] for i in reversed(range(len(windows)))) == whole[::-1]
    assert windows.position == 0
    for outside in (-1, len(windows)):
        with pytest.raises(IndexError, match="batches run from 0 to 4"):
            windows[outside]


@pytest.mark.parametrize("kind", KINDS)
@given(shape=shapes(), world_size=st.integers(1, 3))
def test_ranks_partition_the_rows_and_share_the_position(kind, shape, world_size):
    ids, options = shape
    options["batch"] += world_size - 1
    assume(len(ids) > options["offset"] + options["batch"] * options["window"])
    ranks = [kind(ids, **options, rank=r, world_size=world_size) for r in range(world_size)]
    whole = kind(ids, **options)
    for (x, y), *shares in zip(whole, *ranks, strict=True):
        assert torch.equal(torch.cat([share[0] for share in shares]), x)
        assert torch.equal(torch.cat([share[1] for share in shares]), y)
        assert all(rank.state() == whole.state() for rank in ranks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda ids: np.array(ids, np.uint8),
        lambda ids: np.array(ids, np.uint64),
        lambda ids: np.repeat(np.array(ids, np.int32), 2)[::2],
        lambda ids: torch.tensor(ids, dtype=torch.uint8),
        lambda ids: torch.tensor(ids).repeat_interleave(2)[::2],
    ],
)
def test_ids_may_be_any_one_dimensional_integers(kind, make):
    ids = list(range(40))
    expected = listed(kind(torch.tensor(ids), batch=2, window=3))
    windows = kind(make(ids), batch=2, window=3)
    for x, y in windows:
        assert x.dtype == y.dtype == torch.int64
    assert listed(windows) == expected


@pytest.mark.parametrize(
    "made", [np.arange(9, dtype=np.int16)[::-1], np.arange(9, dtype=">i4"), np.arange(0)[::-1]]
)
def test_arrays_that_torch_cannot_read_become_some_that_it_can(made):
    assert torch.as_tensor(batches.flat_integers(made)).tolist() == made.tolist()


def test_arrays_that_torch_can_read_are_not_copied():
    ids = np.arange(9, dtype=np.uint8)
    assert np.shares_memory(batches.flat_integers(ids), ids)


def test_streams_over_an_int64_tensor_are_views():
    ids = torch.arange(40)
    for position, (x, y) in enumerate(batches.streams(ids, batch=2, window=3, offset=1)):
        assert x.data_ptr() == ids.data_ptr() + 8 * (1 + 3 * position)
        assert y.data_ptr() == ids.data_ptr() + 8 * (2 + 3 * position)
        assert x.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_is_not_a_view_of_ids_in_another_type(kind):
    ids = np.arange(40, dtype=np.uint16)
    for x, y in kind(ids, batch=2, window=3):
        x.zero_()
        y.zero_()
    assert ids.tolist() == list(range(40))


@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_map_is_read_only_where_it_is_yielded(kind, tmp_path):
    """A sparse file far larger than memory: to read it whole would fail."""
    path = tmp_path / "ids.bin"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    ids = np.memmap(path, dtype=np.uint16, mode="r")
    x, y = next(iter(kind(ids, batch=2, window=1 << 20)))
    assert x.shape == y.shape == (2, 1 << 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(4, 4, dtype=torch.int64), "not 2-dimensional torch.int64"),
        (torch.zeros(40), "not 1-dimensional torch.float32"),
        (torch.zeros(40, dtype=torch.bool), "not 1-dimensional torch.bool"),
        (torch.zeros(40, dtype=torch.complex64), "not 1-dimensional torch.complex64"),
        (np.zeros(40), "not 1-dimensional float64"),
        ([[1, 2], [3, 4]], "not 2-dimensional int64"),
        ([[1, 2], [3]], "not lines of different lengths"),
        (list("the time machine"), "vocab.encode"),
    ],
)
def test_ids_of_another_shape_or_type_are_refused(kind, ids, message):
    with pytest.raises(UserError, match=message):
        kind(ids, batch=2, window=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"offset": -1}, "offset=-1 must be from 0 to window=3"),
        ({"offset": 4}, "offset=4 must be from 0 to window=3"),
        ({"offset": 1.5}, "offset=1.5 must be a whole number"),
        ({"world_size": 0}, "world_size=0"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"rank": -1}, "rank=-1"),
        ({"rank": 0.5}, "rank=0.5 must be a whole number"),
        ({"world_size": 1.5}, "world_size=1.5 must be a whole number"),
        ({"world_size": 3}, "batch=2 rows are too few for world_size=3 ranks.*batch=3"),
    ],
)
def test_shapes_that_cannot_be_are_refused_at_the_call(kind, options, message):
    with pytest.raises(UserError, match=message):
        kind(range(40), **{"batch": 2, "window": 3, **options})


def test_too_little_text_is_refused_with_the_arithmetic():
    with pytest.raises(UserError) as refusal:
        batches.streams(range(13), batch=4, window=5)
    assert "13 tokens over batch=4 lanes leave 3 steps per lane" in str(refusal.value)
    assert "= 21 tokens are enough" in str(refusal.value)
    with pytest.raises(UserError) as refusal:
        batches.shuffled(range(13), batch=4, window=5, offset=1)
    assert "13 tokens after offset=1 make 2 windows of 5 steps" in str(refusal.value)
    assert "= 22 tokens are enough" in str(refusal.value)


@pytest.mark.parametrize("kind", KINDS)
@given(shape=shapes())
def test_the_tokens_said_to_be_enough_are_enough_and_one_less_is_not(kind, shape):
    ids, options = shape
    needed = options["offset"] + options["batch"] * options["window"] + 1
    assert len(kind(ids[:needed], **options)) == 1
    with pytest.raises(UserError, match=f"= {needed} tokens are enough"):
        kind(ids[: needed - 1], **options)
    with pytest.raises(UserError, match="0 tokens"):
        kind([], **options)


def test_a_negative_seed_is_refused():
    with pytest.raises(UserError, match="seed=-1 must be at least 0"):
        batches.shuffled(range(40), batch=2, window=3, seed=-1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"position": 7}, "position 7 must be an integer from 0 to 6"),
        ({"position": None}, "position None"),
        ({"tokens": 39}, "tokens=39, not tokens=40"),
        ({"batch": 4}, "batch=4, not batch=2"),
        ({"seed": 1}, "seed=1, not seed=0"),
        ({"sampling": "streams"}, "sampling='streams', not sampling='shuffled'"),
    ],
)
def test_a_position_in_something_else_is_refused(changed, message):
    windows = batches.shuffled(range(40), batch=2, window=3)
    with pytest.raises(UserError, match=message):
        windows.restore({**windows.state(), **changed})
    assert windows.position == 0
