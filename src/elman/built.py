"""Native libraries, built when elman is installed: each knows the sources that it was built from.

Beside other sources than its own (a checkout that was edited and not built again, a build that
failed and left the old one in place) a library computes something else than what is written there,
so it is not used. `setup.py` runs this file by itself: it needs nothing but Python.
"""

import ctypes
import hashlib
import importlib.machinery
from collections.abc import Callable
from pathlib import Path

NOT_BUILT = "it was not built: the installation found no working C++ compiler"
REBUILD = "build it again: in elman's checkout, python setup.py build_ext --inplace --force"


def digest(folder: Path | str) -> str:
    """The SHA-256 of the C++ in a folder, names and contents: what a library is built from."""
    found = hashlib.sha256()
    for file in sorted(p for p in Path(folder).iterdir() if p.suffix in (".cpp", ".h")):
        data = file.read_bytes()
        found.update(f"{file.name} {len(data)}\n".encode() + data)
    return found.hexdigest()


def path(folder: Path, name: str) -> Path | None:
    """Where the build put a library; None where it built none."""
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    return next((f for suffix in suffixes if (f := folder / (name + suffix)).exists()), None)


def load(file: Path) -> ctypes.CDLL:
    """A library that was built from the sources beside it; an OSError, in words, for any other."""
    library = ctypes.CDLL(str(file))  # raises an OSError if the file is not a library
    sources = getattr(library, "elman_sources", None)
    if sources is None:
        raise OSError("it has no elman_sources")
    sources.restype = ctypes.c_char_p
    if sources().decode() != digest(file.parent):
        raise OSError("the C++ beside it has changed since")
    return library


def find(
    folder: Path, name: str, load: Callable[[Path], ctypes.CDLL]
) -> tuple[ctypes.CDLL | None, str]:
    """The library of this name, opened by `load`; or why there is none and what to do."""
    file = path(folder, name)
    if file is None:
        return None, NOT_BUILT
    try:
        return load(file), ""
    except OSError as problem:
        why = str(problem).removeprefix(f"{file}: ")
        return None, f"{file.name} was built for another version or machine ({why}); {REBUILD}"
