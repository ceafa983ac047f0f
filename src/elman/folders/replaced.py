"""What a new run or text replaces, kept in FOLDER/.replaced until there is something instead.

Files move one by one, and a process can be killed between two of them. So the file by which such a
folder is known (`mark`: a run's config.json, a prepared text's index.json) leaves last and comes
back first: while FOLDER/.replaced has one, all that lies beside it belongs to what is new. Nothing
is deleted under that name, for the same reason: it is renamed first.
"""

import shutil
from pathlib import Path

from elman.folders.lock import NAME as LOCK

NAME, FORGOTTEN = ".replaced", ".forgotten"


def set_aside(folder: Path, mark: str) -> None:
    """Put what is in a folder aside.

    Where something lies aside already, what has come in between had nothing to show, and goes.
    """
    put_back(folder, mark)
    _sweep(folder)
    aside = folder / NAME
    files = [file for file in _others(folder) if file.name != mark]
    if not (folder / mark).exists():  # nothing whole, only what is left of something
        clear(folder)
        return
    aside.mkdir()
    for file in [*files, folder / mark]:
        file.rename(aside / file.name)


def put_back(folder: Path, mark: str) -> bool:
    """Put what lies aside back, in place of all that has come since; False: nothing does."""
    aside = folder / NAME
    if not aside.is_dir():
        return False
    if lies_aside(folder, mark):  # or this was begun before, and what is here is the old
        clear(folder)
        (aside / mark).rename(folder / mark)
    for file in list(aside.iterdir()):
        file.rename(folder / file.name)
    aside.rmdir()
    return True


def lies_aside(folder: Path, mark: str) -> bool:
    """Whether all of what was there before lies aside, and all that lies beside it is new."""
    return (folder / NAME / mark).exists()


def forget(folder: Path) -> None:
    """Delete what lies aside, if there is something."""
    if (folder / NAME).is_dir():
        (folder / NAME).rename(folder / FORGOTTEN)  # free: what was to be put aside swept it
    _sweep(folder)


def clear(folder: Path) -> None:
    """Delete everything in a folder but what lies aside and the lock."""
    for file in _others(folder):
        _delete(file)


def _sweep(folder: Path) -> None:
    """Finish what a killed `forget` had begun."""
    if (folder / FORGOTTEN).is_dir():
        shutil.rmtree(folder / FORGOTTEN)


def _others(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.name not in (NAME, LOCK)]


def _delete(file: Path) -> None:
    shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
