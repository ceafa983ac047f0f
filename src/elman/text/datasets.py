"""What can be loaded by name, and where its file is found.

`DATASETS` is the one table of names, texts and series alike. Most come with the package or with
Python; a `Download` is looked for in the folders of the environment variable `ELMAN_DATA`, then in
the user's cache, and otherwise fetched into that cache. Wherever it lay, its SHA-1 is checked.
"""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, final

from elman.errors import MissingSource, UserError
from elman.files import atomic, check_target

Progress = Callable[[int, int | None], None]
"""Told the bytes received so far, and the bytes expected if the server said."""

_TIMEOUT_SECONDS = 30
_BLOCK = 1 << 16


@final
@dataclass(frozen=True)
class Download:
    """A file on the web: what it is called here, where it is, and what it must contain."""

    file: str
    url: str
    sha1: str


@final
@dataclass(frozen=True)
class Dataset:
    """Something that can be loaded by name."""

    name: str
    kind: Literal["text", "series"]
    about: str
    download: Download | None = None


DATASETS = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            "python-reference",
            "text",
            "the language reference inside every Python, so it differs between versions",
        ),
        Dataset(
            "time-machine",
            "text",
            "H. G. Wells, The Time Machine (1895), the text of the notes",
            Download(
                "timemachine.txt",
                "http://d2l-data.s3-accelerate.amazonaws.com/timemachine.txt",
                "090b5e7e70c295757f55df93cb0a180b9691891a",
            ),
        ),
        Dataset(
            "tiny-shakespeare",
            "text",
            "a million characters of Shakespeare's plays",
            Download(
                "tinyshakespeare.txt",
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                "04486597058d11dcc2c556b1d0433891eb639d2e",
            ),
        ),
        Dataset("sine", "series", "the notes' sin(0.01 t) + N(0, 0.2), t = 1…1000, from a seed"),
        Dataset("sunspots", "series", "yearly mean sunspot numbers, 1700–2008 (NOAA)"),
        Dataset("airline", "series", "monthly airline passengers, 1949–1960 (Box and Jenkins)"),
    )
}


def named(name: str, kind: str) -> Dataset:
    """The dataset of that name and kind, or a refusal that lists what there is."""
    dataset = DATASETS.get(name)
    known = [d.name for d in DATASETS.values() if d.kind == kind]
    if dataset is None:
        near = get_close_matches(name, known, n=1)
        raise MissingSource(
            f"there is no file or {kind} dataset {name!r}",
            hint=(f"did you mean {near[0]}? " if near else "") + f"datasets are {', '.join(known)}",
        )
    if dataset.kind != kind:
        raise UserError(
            f"{name} is a dataset of kind {dataset.kind}, not {kind}",
            hint=f"{kind} datasets are {', '.join(known)}",
        )
    return dataset


def path_of(download: Download, progress: Progress | None = None) -> Path:
    """The file, found or fetched, with the contents it must have."""
    path = present(download) or _fetch(download, cache_folder() / download.file, progress)
    _check(path.read_bytes(), download, path)
    return path


def present(download: Download) -> Path | None:
    """Where the file lies already, if it does."""
    places = (folder / download.file for folder in folders())
    return next((path for path in places if path.is_file()), None)


def folders() -> Iterator[Path]:
    """Where files are looked for: the folders of ELMAN_DATA, then the user's cache."""
    for folder in filter(None, os.environ.get("ELMAN_DATA", "").split(os.pathsep)):
        yield Path(folder).expanduser()
    yield cache_folder()


def cache_folder() -> Path:
    """Where downloads are kept."""
    import platformdirs  # here, so that texts found elsewhere need no more than numpy

    return platformdirs.user_cache_path("elman")


def _fetch(download: Download, path: Path, progress: Progress | None) -> Path:
    """Download into `path`: whole and with the right contents, or not at all."""
    _check_cache(path)
    try:
        with atomic(path) as draft:
            data = b"".join(_blocks(download.url, progress))
            _check(data, download, download.url)
            draft.write_bytes(data)
    except (OSError, http.client.HTTPException) as problem:
        if isinstance(problem, UserError):
            raise
        if isinstance(problem, urllib.error.HTTPError):
            problem.close()
        raise UserError(
            f"could not download {download.url}: {problem}",
            hint=f"put {download.file} in a folder and name the folder in ELMAN_DATA, "
            "or give the path of any text; python-reference needs no network",
        ) from problem
    return path


def _check_cache(path: Path) -> None:
    """Refuse a cache that cannot be written to: a download could not be kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_target(path)
    except (OSError, UserError) as problem:
        why = problem.message if isinstance(problem, UserError) else problem
        raise UserError(
            f"{path.name} cannot be kept in the cache: {why}",
            hint="name another place in XDG_CACHE_HOME, "
            f"or in ELMAN_DATA a folder that has {path.name}",
        ) from problem


def _blocks(url: str, progress: Progress | None) -> Iterator[bytes]:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
        length = response.headers.get("Content-Length")
        total = int(length) if length else None
        done = 0
        while block := response.read(_BLOCK):
            done += len(block)
            if progress:
                progress(done, total)
            yield block


def _check(data: bytes, download: Download, where: Path | str) -> None:
    sha1 = hashlib.sha1(data, usedforsecurity=False).hexdigest()
    if sha1 != download.sha1:
        raise UserError(
            f"{where} has SHA-1 {sha1}, but {download.file} should have {download.sha1}",
            hint="remove the file to have it found elsewhere or downloaded again, "
            "or load it by its path if it is what you want",
        )
