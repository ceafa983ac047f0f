"""What lies under the root that the lab was started with: runs by id, and texts.

A page never names a path. An id is the name of a folder that is there, found by looking, not by
joining; a text gets its name here, from letters and digits of the one it came with and a hash.
Letters are those of any script.
"""

import hashlib
import re
import threading
import unicodedata
from pathlib import Path
from typing import final

from elman.errors import UserError
from elman.files import atomic, check_new_folder
from elman.runs import comparison
from elman.text.datasets import DATASETS

LARGEST_TEXT = 32 << 20
"""Bytes of a text that is pasted or dropped."""


class NotHere(UserError):
    """An id that names nothing."""


@final
class Shelf:
    """The root folder."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).resolve()
        self.jobs = self.root / ".lab"
        self.texts = self.root / "texts"
        self._writing = threading.Lock()

    def runs(self) -> dict[str, Path]:
        """Every run under the root by its id; a link that leads elsewhere is left out."""
        if not self.root.is_dir():
            return {}
        inside = comparison.below(self.root)
        return {p.name: p for p in inside if p.resolve().parent == self.root}

    def run(self, id: str) -> Path:
        """The folder of a run."""
        runs = self.runs()
        if id not in runs:
            raise NotHere(f"there is no run {id!r} here", hint="it may have been moved or deleted")
        return runs[id]

    def free_id(self, name: str) -> str:
        """An id that no run and no training asked for has: NAME, NAME-2, …"""
        base, number = slug(name), 1
        id = base
        while (self.root / id).exists() or (self.jobs / id).exists():
            number += 1
            id = f"{base}-{number}"
        return id

    def make(self, folder: Path) -> None:
        """Have a folder under the root to write into."""
        check_new_folder(folder, "elman lab FOLDER")
        folder.mkdir(parents=True, exist_ok=True)

    def keep_text(self, name: str, data: bytes) -> str:
        """Keep a text that came from the page; returns its id. What is not text is refused."""
        if len(data) > LARGEST_TEXT:
            raise UserError(
                f"a text of {len(data):,} bytes is too large for the page: at most "
                f"{LARGEST_TEXT >> 20} MiB",
                hint="elman train FILE takes texts of any size; its run opens here, too",
            )
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as problem:
            raise UserError(
                f"that is not text in UTF-8: byte {problem.start:,} is 0x{data[problem.start]:02x}",
                hint="save it as UTF-8, or elman train FILE --encoding latin-1",
            ) from problem
        if "\0" in text:
            raise UserError("that is not text: it has zero bytes in it", hint="give a text file")
        if not text.strip():
            raise UserError("there is no text in it", hint="paste some lines, or drop a file")
        id = f"{slug(name)}-{hashlib.sha256(data).hexdigest()[:8]}"
        with self._writing:  # two tabs may send the same text
            self.make(self.texts)
            with atomic(self.texts / f"{id}.txt") as draft:
                draft.write_bytes(data)
        return id

    def source(self, corpus: str | None, text: str | None) -> str:
        """What a training reads: a corpus that has a name, or a text that was kept."""
        if (corpus is None) == (text is None):
            raise UserError("say which text", hint="paste one, drop a file, or pick a corpus")
        if corpus is not None:
            if corpus not in corpora():
                raise NotHere(f"unknown corpus {corpus!r}", hint=f"one of {', '.join(corpora())}")
            return corpus
        kept = {p.stem: p for p in self.texts.glob("*.txt")} if self.texts.is_dir() else {}
        if text not in kept:
            raise NotHere(f"there is no text {text!r} here", hint="send it again")
        return str(kept[text])


def is_forecast(path: Path) -> bool:
    """Whether a folder was written by `elman forecast --out`."""
    from elman.forecasting import saving  # not loaded by a process that trains

    return saving.is_saved(path)


def corpora() -> list[str]:
    """The texts that have names."""
    return [name for name, dataset in DATASETS.items() if dataset.kind == "text"]


def slug(name: str) -> str:
    """Letters, digits and dashes of a name, and nothing that means something to a file system.

    >>> slug("../../My Böok.txt"), slug("红楼梦.txt"), slug("<script>"), slug("...")
    ('my-böok', '红楼梦', 'script', 'text')
    """
    stem = re.sub(r"\.[A-Za-z0-9]{1,8}$", "", name.strip().replace("\\", "/").split("/")[-1])
    letters = unicodedata.normalize("NFKC", stem).lower()
    return re.sub(r"[\W_]+", "-", letters).strip("-")[:40].strip("-") or "text"
