"""The run that another one replaces: kept in RUN/.replaced until the new one has something to show.

Files move one by one, and a process can be killed between two of them. So config.json leaves last
and comes back first: while RUN/.replaced has one, all that lies beside it belongs to the new run.
"""

import shutil
from pathlib import Path

NAME = ".replaced"
_FIRST = "config.json"


def set_aside(folder: Path, keep: str) -> None:
    """Put the run in a folder aside; the file named `keep` stays where it is.

    Where one lies aside already, what has come in between had nothing to show, and goes.
    """
    put_back(folder, keep)
    aside = folder / NAME
    files = [file for file in _others(folder, keep) if file.name != _FIRST]
    if not (folder / _FIRST).exists():  # no run, only what is left of one
        clear(folder, keep)
        return
    aside.mkdir()
    for file in [*files, folder / _FIRST]:
        file.rename(aside / file.name)


def put_back(folder: Path, keep: str) -> bool:
    """Put the run that lies aside back, in place of all that has come since; False: none does."""
    aside = folder / NAME
    if not aside.is_dir():
        return False
    if (aside / _FIRST).exists():  # or this was begun before, and what is here is of the old run
        for file in _others(folder, keep):
            _delete(file)
        (aside / _FIRST).rename(folder / _FIRST)
    for file in list(aside.iterdir()):
        file.rename(folder / file.name)
    aside.rmdir()
    return True


def forget(folder: Path) -> None:
    """Delete the run that lies aside, if there is one."""
    if (folder / NAME).is_dir():
        shutil.rmtree(folder / NAME)


def clear(folder: Path, keep: str) -> None:
    """Delete everything in a folder but what lies aside and the file named `keep`."""
    for file in _others(folder, keep):
        _delete(file)


def _others(folder: Path, keep: str) -> list[Path]:
    return [file for file in folder.iterdir() if file.name not in (NAME, keep)]


def _delete(file: Path) -> None:
    shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
