"""What a new run or text replaces: all of it is there, wherever the work was killed."""

import itertools
from functools import partial
from pathlib import Path

import pytest

from elman.folders.lock import NAME as LOCK
from elman.folders.replaced import clear, forget, lies_aside, put_back, set_aside

MARK = "config.json"
OLD = {MARK: "old", "a": "old", "parts/b": "old"}
NEW = {"a": "new", "parts/c": "new", MARK: "new"}


def write(folder: Path, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def tree(folder: Path):
    """All that lies in a folder but the lock, which is to stay there."""
    assert (folder / LOCK).exists()
    files = (path for path in folder.rglob("*") if path.is_file())
    found = {str(path.relative_to(folder)): path.read_text() for path in files}
    assert found.pop(LOCK) == "mine"
    return found


@pytest.fixture
def folders(tmp_path):
    """One folder after another in which something old lies."""

    def begun():
        for number in itertools.count():
            write(tmp_path / str(number), OLD | {LOCK: "mine"})
            yield tmp_path / str(number)

    return begun()


def test_what_was_there_comes_back_wherever_the_work_was_killed(folders, killed_after):
    def work(folder):
        set_aside(folder, MARK)
        assert lies_aside(folder, MARK)
        assert tree(folder) == {f".replaced/{name}": text for name, text in OLD.items()}
        write(folder, {"a": "new", "parts/c": "new"})
        set_aside(folder, MARK)  # begun again: what came in between goes
        assert tree(folder) == {f".replaced/{name}": text for name, text in OLD.items()}
        write(folder, NEW)
        assert put_back(folder, MARK)

    moves = 0
    for moves, folder in enumerate(folders):
        killed = killed_after(moves, partial(work, folder))
        put_back(folder, MARK)
        assert tree(folder) == OLD
        assert not put_back(folder, MARK)
        if not killed:
            break
    assert moves > 15


def test_what_is_forgotten_is_gone_wherever_that_was_killed(folders, killed_after):
    moves = 0
    for moves, folder in enumerate(folders):
        set_aside(folder, MARK)
        write(folder, NEW)
        killed = killed_after(moves, partial(forget, folder))
        kept = tree(folder)
        assert {name: kept[name] for name in NEW} == NEW
        forget(folder)
        assert tree(folder) == NEW
        assert not (folder / ".replaced").exists()
        if not killed:
            break
    assert moves > 3


def test_half_a_deletion_does_not_stand_in_the_way_of_the_next(folders, killed_after):
    folder = next(folders)
    set_aside(folder, MARK)
    write(folder, NEW)
    assert killed_after(2, partial(forget, folder))
    assert (folder / ".forgotten").is_dir()
    set_aside(folder, MARK)
    assert tree(folder) == {f".replaced/{name}": text for name, text in NEW.items()}


def test_what_is_no_whole_has_nothing_to_keep(folders):
    folder = next(folders)
    (folder / MARK).unlink()
    set_aside(folder, MARK)
    assert tree(folder) == {}
    assert not (folder / ".replaced").exists()


def test_a_link_is_deleted_and_not_what_it_leads_to(folders, tmp_path):
    write(tmp_path / "elsewhere", {"kept": "yes"})
    folder = next(folders)
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    clear(folder)
    assert tree(folder) == {}
    assert (tmp_path / "elsewhere" / "kept").read_text() == "yes"
