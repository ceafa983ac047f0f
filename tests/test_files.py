"""Files are whole or absent, links are followed, devices survive, and a flipped bit is noticed."""

import errno
import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman import files
from elman.errors import MissingSource, UserError

# Where a file goes


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def interrupted() -> None:
        with files.atomic(path) as draft:
            draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_files: Callable[[], int]
) -> None:
    """After a power cut there is the old file or the new one, never a name without contents."""
    done: list[str] = []
    flush, rename = os.fsync, os.replace

    def fsync(file: int) -> None:
        flush(file)
        done.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")

    def replace(old: Path, new: Path) -> None:
        rename(old, new)
        done.append("renamed")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    opened = open_files()
    files.write_text(tmp_path / "a", "whole")
    assert done == ["file", "renamed", "folder"]
    assert open_files() == opened


def test_a_failure_of_another_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as failure, files.atomic(tmp_path / "a"):
        (tmp_path / "b").read_text()
    assert failure.value.filename == str(tmp_path / "b")


def test_a_disk_that_takes_no_writing_is_named_with_the_file_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a disk refuses to delete what is not there, too."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    with (
        pytest.raises(OSError, match="Read-only") as refused,
        files.atomic(tmp_path / "a") as draft,
    ):
        draft.write_bytes(b"")
    assert refused.value.filename == str(tmp_path / "a")


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_may_not_be_written_to_is_refused_before_the_work(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        (tmp_path / "a").write_text("old")
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
    with pytest.raises(UserError, match=f"the folder {tmp_path} may not be written to"):
        files.check_target(tmp_path / "a")


def test_the_file_that_is_read_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    book, link = tmp_path / "book", tmp_path / "link"
    book.write_text("read")
    link.symlink_to(book)
    for target in (book, link):
        with pytest.raises(UserError, match="is what is to be read, and would be lost"):
            files.check_target(target, source=str(book))
        with pytest.raises(UserError, match="would be lost"):
            files.check_target(target, source="~/book")
    for other in ("a dataset", "\0"):
        assert files.check_target(book, source=other)


def test_two_threads_that_write_one_file_do_not_mix(tmp_path: Path) -> None:
    path, both = tmp_path / "a", threading.Barrier(2)

    def write(letter: str) -> None:
        with files.atomic(path) as draft, open(draft, "w") as file:
            both.wait()
            file.write(letter * 100_000)
            file.flush()
            both.wait()

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in ("x" * 100_000, "y" * 100_000)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed_not_replaced(tmp_path: Path, exists: bool) -> None:
    target, first, second = tmp_path / "there" / "file", tmp_path / "first", tmp_path / "second"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
    second.symlink_to("there/file")
    first.symlink_to(second)
    files.write_text(first, "new")
    assert target.read_text() == "new"
    assert first.is_symlink()
    assert second.is_symlink()
    assert os.listdir(target.parent) == ["file"]


def test_a_character_device_stays_one(tmp_path: Path) -> None:
    device, link = Path(os.devnull), tmp_path / "link"
    if os.geteuid() == 0:  # who could replace the machine's own, were this broken
        device = tmp_path / "null"
        os.mknod(device, stat.S_IFCHR | 0o666, os.stat(os.devnull).st_rdev)
    link.symlink_to(device)
    files.write_text(link, "gone")
    assert stat.S_ISCHR(device.stat().st_mode)


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    files.write_text(pipe, "through")
    reader.join()
    assert read == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_output_that_a_shell_sent_into_a_file_goes_to_that_file(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb", buffering=0) as log:
        files.write_text(f"/dev/fd/{log.fileno()}", "first ")
        log.seek(0, os.SEEK_END)
        log.write(b"second")
    assert (tmp_path / "log").read_text() == "first second"


def test_what_is_open_already_needs_no_folder_that_may_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with open(tmp_path / "log", "wb") as log:
        files.check_target(f"/dev/fd/{log.fileno()}")


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    files.write_text(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_folders_and_sockets_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
        for place in (tmp_path, tmp_path / "socket"):
            with pytest.raises(UserError, match="not a file"):
                files.write_text(place, "x")
        assert stat.S_ISSOCK((tmp_path / "socket").stat().st_mode)


@pytest.mark.parametrize("name", ["", "missing/a", "\0", "x" * 300, "loop"])
def test_a_path_that_cannot_be_a_file_is_refused_before_work_begins(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(UserError):
        files.check_target(name)


def test_the_longest_name_a_file_may_have_can_be_written(tmp_path: Path) -> None:
    for letter in "x", "é":
        name = letter * (255 // len(letter.encode()))
        files.write_text(tmp_path / name, "whole")
        assert (tmp_path / name).read_text() == "whole"


# Seals


def contents(payload: bytes) -> bytes:
    return b"header " + files.BLANK_SEAL.encode() + payload


@given(st.binary(max_size=200))
def test_what_was_sealed_passes(payload: bytes) -> None:
    files.check_seal(files.sealed(contents(payload)), "file")


def test_text_that_looks_like_a_seal_is_only_text() -> None:
    for decoy in (files.BLANK_SEAL.encode(), files.sealed(contents(b""))[7:]):
        data = files.sealed(decoy + contents(decoy))
        files.check_seal(data, "file")


@given(st.binary(min_size=1, max_size=60), st.data())
def test_every_flipped_bit_is_noticed(payload: bytes, data: st.DataObject) -> None:
    damaged = bytearray(files.sealed(contents(payload)))
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(UserError, match="damaged"):
        files.check_seal(bytes(damaged), "file")


def test_a_missing_end_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "sealed"
    files.write_sealed(path, contents(b"payload"))
    for named in (path, str(path)):
        assert files.read_sealed(named) == files.sealed(contents(b"payload"))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(UserError, match="damaged"):
        files.read_sealed(path)


def test_a_safetensors_file_and_a_json_file_can_be_sealed(tmp_path: Path) -> None:
    from safetensors.numpy import load, save

    tensors = {"x": np.arange(3.0)}
    files.write_sealed(tmp_path / "t", save(tensors, {"seal": files.BLANK_SEAL}))
    assert load(files.read_sealed(tmp_path / "t"))["x"].tolist() == [0, 1, 2]
    files.write_sealed(tmp_path / "j", json.dumps({"seal": files.BLANK_SEAL}).encode())
    assert files.has_seal(json.loads(files.read_sealed(tmp_path / "j"))["seal"].encode())


def test_data_without_a_place_for_the_seal_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="BLANK_SEAL"):
        files.sealed(b"nothing")


def test_unreadable_is_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(MissingSource, match="there is no file"):
        files.read_sealed(tmp_path / "missing")
    for path in (tmp_path, "\0"):
        with pytest.raises(UserError, match="cannot be read"):
            files.read_sealed(path)


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="no /dev/fd here")
def test_what_is_open_already_is_written_to_where_it_stands(tmp_path, monkeypatch):
    """`elman compress a -o - >> log` replaced the log by what it wrote."""
    log = tmp_path / "log"
    log.write_bytes(b"before ")
    with open(log, "ab") as opened, files.atomic(f"/dev/fd/{opened.fileno()}") as draft:
        draft.write_bytes(b"written ")
    with open(log, "ab") as opened:
        opened.write(b"after")
    assert log.read_bytes() == b"before written after"
    monkeypatch.chdir(tmp_path)  # a file whose name is a number is a file
    Path("1").write_bytes(b"old")
    with files.atomic("1") as draft:
        draft.write_bytes(b"new")
    assert Path("1").read_bytes() == b"new"
