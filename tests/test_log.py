"""metrics.jsonl: records in their order, each once it is known, and no line that is not whole."""

import json
import os

import pytest

from elman.errors import UserError
from elman.files import checked_line
from elman.runs import log
from elman.runs.log import NAME, latest, records, shorten, writing
from elman.training.records import Epoch, Validation


def score(step):
    return Validation(step, epoch=0, nats=1.0, perplexity=2.5, improved=True)


def late(step, ready):
    numbers = score(step).json()
    del numbers["kind"], numbers["step"]
    return Validation.late({"step": step}, lambda: numbers, lambda: step in ready)


def test_records_stand_in_their_order_each_once_it_is_known(tmp_path, monkeypatch):
    now, ready = [0.0], set()
    monkeypatch.setattr(log.time, "monotonic", lambda: now[0])
    with writing(tmp_path, True) as written:
        written.append(late(1, ready))
        written.append(score(2))
        assert records(tmp_path) == []
        ready.add(1)
        written.append(late(3, ready))
        assert records(tmp_path) == [score(1), score(2)]
        now[0] += log.LATE
        written.append()
        assert len(records(tmp_path)) == 2
        now[0] += 0.01
        written.append(late(4, ready))
        assert records(tmp_path) == [score(1), score(2), score(3)], "nobody waits longer"
        assert written.write_all() == (tmp_path / NAME).stat().st_size
        assert records(tmp_path)[-1] == score(4)


def test_a_failed_training_leaves_what_is_known(tmp_path):
    ready = set()

    def fail():
        with writing(tmp_path, True) as written:
            written.append(late(1, ready), late(2, set()))
            ready.add(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert records(tmp_path) == [score(1)]


@pytest.mark.parametrize("writes", [True, False])
def test_before_a_checkpoint_the_records_are_on_the_disk(tmp_path, monkeypatch, writes):
    flushed, flush = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(file) or flush(file))
    with writing(tmp_path, writes) as written:
        written.append(score(1))
        written.write_all()
        assert len(flushed) == writes
    assert (tmp_path / NAME).exists() == writes, "another process writes nothing"


def test_a_line_that_is_not_as_it_was_written_is_named(tmp_path):
    path, lines = tmp_path / NAME, [checked_line(json.dumps(score(i).json())) for i in (1, 2)]
    assert records(tmp_path) == []
    older = [json.dumps(score(i).json()).encode() + b"\n" for i in (1, 2)]
    path.write_bytes(b"".join([*older, *lines, lines[0][:-5]]))
    assert [r.step for r in records(tmp_path)] == [1, 2, 1, 2], "a last line that was cut short"
    for broken in (lines[1].replace(b"2.5", b"3.5"), older[1]):
        path.write_bytes(b"".join([older[0], lines[0], broken]))
        with pytest.raises(UserError, match="damaged at line 3"):
            records(tmp_path)
    path.write_bytes(b"".join([lines[0], lines[1].replace(b"2.5", b"3.5")]))
    with pytest.raises(UserError, match="damaged at line 2"):
        latest(tmp_path, Validation)


def test_the_latest_of_a_kind_is_found_from_the_end(tmp_path):
    assert latest(tmp_path, Validation) is None
    epoch = Epoch(2, epoch=1, nats=1.0, perplexity=2.5, tokens=3, tokens_per_second=4.0)
    with writing(tmp_path, True) as written:
        written.append(epoch)
        assert latest(tmp_path, Validation) is None
        written.append(score(1), score(2), epoch)
    assert latest(tmp_path, Validation) == score(2)
    assert latest(tmp_path, Epoch) == epoch


def test_a_file_goes_back_to_its_last_checkpoint(tmp_path):
    path = tmp_path / NAME
    assert not shorten(tmp_path, 0), "there was nothing, and there is nothing"
    assert shorten(tmp_path, 5), "it is gone, and begins again"
    assert not path.exists()
    path.write_bytes(b"12345678")
    assert not shorten(tmp_path, 5)
    assert path.read_bytes() == b"12345"
    assert not shorten(tmp_path, 5)
    assert path.read_bytes() == b"12345"
    with pytest.raises(UserError, match="has 5 bytes, fewer than the 6"):
        shorten(tmp_path, 6)
    assert not shorten(tmp_path, 0)
    assert path.read_bytes() == b""
