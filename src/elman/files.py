"""Writing a file so that a reader, or a crash, never sees half of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic(path: Path | str) -> Iterator[Path]:
    """Lend a temporary path beside `path`; on success flush it to disk and rename it into place.

    On any error, Ctrl-C included, the temporary file is removed and `path` is as it was before.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic(folder / "a.txt") as draft:
    ...     _ = draft.write_text("whole")
    >>> [p.name for p in folder.iterdir()]
    ['a.txt']
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield draft
        with open(draft, "rb") as written:
            os.fsync(written.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the new name, too, survives a power cut
    finally:
        os.close(folder)


def write_text(path: Path | str, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic(path) as draft:
        draft.write_text(text, encoding="utf-8")
