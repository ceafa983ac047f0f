"""Who writes into a folder: one at a time, until it says that it has ended or ends."""

import fcntl
import json
import os
import socket

import pytest

from elman.errors import UserError
from elman.folders.lock import NAME, Lock, holder, is_held


def myself():
    return {"process": os.getpid(), "host": socket.gethostname()}


def test_one_writes_at_a_time_and_says_who(tmp_path, open_files):
    assert not is_held(tmp_path)
    assert holder(tmp_path) == {}
    first = Lock(tmp_path, "prepared")
    assert is_held(tmp_path)
    assert holder(tmp_path) == myself()
    opened = open_files()
    with pytest.raises(UserError, match="is being trained already, in this very process"):
        Lock(tmp_path)
    assert is_held(tmp_path), "a refusal takes nothing from who writes"
    assert open_files() == opened
    first.release()
    first.release()
    assert os.listdir(tmp_path) == []
    assert not is_held(tmp_path)
    assert open_files() == opened - 1
    Lock(tmp_path).release()


def test_a_lock_that_is_forgotten_ends(tmp_path):
    lock = Lock(tmp_path)
    del lock
    assert not is_held(tmp_path)
    assert holder(tmp_path) == {}, "its file is still there"


@pytest.mark.parametrize(
    ("written", "who"),
    [
        (json.dumps({"process": 7, "host": "there"}), "process 7 on there"),
        ("", "another process"),
        ("{}", "another process"),
        ("null", "another process"),
    ],
)
def test_who_is_refused_reads_who_writes_there(tmp_path, written, who):
    (tmp_path / NAME).write_text(written)
    with open(tmp_path / NAME) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=f"already, by {who}; wait for it"):
            Lock(tmp_path)
    Lock(tmp_path).release()


def test_what_a_killed_process_has_left_is_written_over(tmp_path):
    (tmp_path / NAME).write_text("x" * 500)
    lock = Lock(tmp_path)
    assert holder(tmp_path) == myself()
    lock.release()


def test_a_lock_is_taken_where_it_can_be_found(tmp_path, monkeypatch, open_files):
    """Between opening the file and locking it its owner may have deleted it."""
    lock, real = fcntl.flock, []
    opened = open_files()

    def flock(file, how):
        if not real:
            (tmp_path / NAME).unlink()
        real.append(file)
        lock(file, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        taken = Lock(tmp_path)
    assert len(real) == 2
    assert is_held(tmp_path)
    taken.release()
    assert open_files() == opened


def test_only_its_own_file_is_deleted(tmp_path):
    first = Lock(tmp_path)
    (tmp_path / NAME).unlink()
    second = Lock(tmp_path)
    first.release()
    assert is_held(tmp_path)
    second.release()
    assert os.listdir(tmp_path) == []
