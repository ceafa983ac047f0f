"""Whether a text that is scored was held out: against a search for every stretch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from elman.cli import app
from elman.scoring import overlap
from elman.scoring.overlap import share_seen


def plainly(ids, train, span):
    """The share of tokens in some stretch of `ids` that `train` has, looked for one by one."""
    known = {tuple(train[i : i + span]) for i in range(len(train) - span + 1)}
    seen = np.zeros(len(ids), bool)
    for i in range(len(ids) - span + 1):
        if tuple(ids[i : i + span]) in known:
            seen[i : i + span] = True
    return float(seen.mean()) if len(ids) >= span else 0.0


few = st.lists(st.integers(0, 2), max_size=60)


@settings(deadline=None)
@given(few, few, st.sampled_from([1, 2, 4, 8]), st.integers(1, 20))
def test_it_is_what_a_plain_search_finds(ids, train, span, piece):
    before, overlap.PIECE = overlap.PIECE, piece  # a stretch may lie across two pieces
    try:
        assert share_seen(ids, train, span) == plainly(ids, train, span)
    finally:
        overlap.PIECE = before


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int64])
def test_ids_of_any_type_and_texts_of_any_length(kind):
    text = np.random.default_rng(3).integers(0, 200, 5000).astype(kind)
    assert share_seen(text, text) == 1.0
    assert share_seen(text[:2500], text[2500:]) == 0.0
    assert share_seen(text[2000:3000], text[:2500]) == 0.5
    assert share_seen(text[:31], text) == 0.0 == share_seen(text, text[:31])


def test_evaluate_says_what_was_trained_on(tmp_path):
    words = np.random.default_rng(5).integers(0, 26, 9000)
    text = "".join(chr(97 + w) for w in words)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(text[::-1])
    runner, run = CliRunner(), str(tmp_path / "run")
    made = runner.invoke(
        app, ["train", str(tmp_path / "a.txt"), "--out", run, "--epochs", "1", "--hidden-size", "8"]
    )
    assert made.exit_code == 0, made.output
    again = runner.invoke(app, ["evaluate", run, str(tmp_path / "a.txt")])
    assert again.exit_code == 0, again.output
    assert "90% of this text stands in the training text" in again.output
    assert f"elman evaluate {run} scores what was held out" in " ".join(again.output.split())
    for held_out in ([], [str(tmp_path / "b.txt")]):
        result = runner.invoke(app, ["evaluate", run, *held_out])
        assert result.exit_code == 0, result.output
        assert "stands in the training text" not in result.output


def test_a_run_that_held_nothing_out_is_not_named_for_it(tmp_path):
    (tmp_path / "a.txt").write_text("the time traveller for so it will be convenient " * 40)
    runner, run = CliRunner(), str(tmp_path / "run")
    options = ["--validation", "0", "--epochs", "1", "--hidden-size", "8"]
    made = runner.invoke(app, ["train", str(tmp_path / "a.txt"), "--out", run, *options])
    assert made.exit_code == 0, made.output
    again = runner.invoke(app, ["evaluate", run, str(tmp_path / "a.txt")])
    assert "100% of this text stands in the training text" in again.output
    assert "held out" not in again.output
