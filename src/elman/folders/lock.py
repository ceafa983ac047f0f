"""Who writes into a folder: one process at a time.

The lock is the operating system's (`flock` on FOLDER/.lock), so it ends with the process that holds
it, however that ends: there is nothing stale to clean up after a crash. The file says who holds it.
"""

import json
import os
import socket
from pathlib import Path
from typing import final

from elman.errors import UserError

try:
    import fcntl
except ModuleNotFoundError:  # not a Unix: as on a file system without locks
    fcntl = None

NAME = ".lock"


@final
class Lock:
    """The right to write into one folder, until released, forgotten, or the process ends.

    `work` is what its owner does there, as a refusal says it: "trained", "prepared".
    """

    def __init__(self, folder: Path, work: str = "trained") -> None:
        self.path, self.work = folder / NAME, work
        self._file = self._locked()
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(_owner()).encode(), 0)
        except OSError as full:
            self.release()
            full.filename = str(self.path)
            raise

    def _locked(self) -> int:
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            if fcntl is None:
                return file
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as held:
                refusal = self._refusal(os.pread(file, 1000, 0))
                os.close(file)
                raise refusal from held
            except OSError:  # a file system without locks: one writer is the user's promise
                return file
            if self._is_at_its_path(file):
                return file
            os.close(file)  # its owner removed it between our two calls

    def _is_at_its_path(self, file: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(file))
        except FileNotFoundError:
            return False

    def _refusal(self, written: bytes) -> UserError:
        folder = self.path.parent
        try:
            owner = json.loads(written)
            who = f"process {owner['process']} on {owner['host']}"
        except (ValueError, KeyError, TypeError):  # it has not written its name yet
            owner, who = {}, "another process"
        if owner == _owner():
            return UserError(
                f"{folder} is being {self.work} already, in this very process",
                hint="go on with that, or let it end first",
            )
        return UserError(
            f"{folder} is being {self.work} already, by {who}",
            hint="wait for it, stop it with Ctrl-C, or name another folder with --out",
        )

    def release(self) -> None:
        """Let others write; again is harmless."""
        if self._file >= 0:
            if self._is_at_its_path(self._file):
                self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)


def is_held(folder: Path) -> bool:
    """Whether a process writes there now; nothing is made or changed by asking."""
    try:
        file = os.open(folder / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: who holds it is not known
        return False
    finally:
        os.close(file)
    return False


def holder(folder: Path) -> dict[str, str | int]:
    """Which `process` on which `host` writes there now, as it has said; else nothing."""
    if not is_held(folder):
        return {}
    try:
        return json.loads((folder / NAME).read_bytes())
    except (FileNotFoundError, ValueError):  # it has ended, or not written its name yet
        return {}


def _owner() -> dict[str, str | int]:
    return {"process": os.getpid(), "host": socket.gethostname()}
