"""How every verb speaks: results on stdout, everything else on stderr."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any

from elman import strict_json

LONGEST = 1000
"""Characters of a complaint."""


def complain(message: str, hint: str = "") -> None:
    """Say what is wrong and what to type instead; of what was typed too long, both ends."""
    if len(message) > LONGEST:
        message = f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


def emit(record: dict[str, Any]) -> None:
    """Print one strict JSON object on one line of stdout, at once: null for NaN and infinity."""
    line = strict_json.dumps(record, ascii_only=False)
    # A lone surrogate has no UTF-8; its backslash escape is what JSON writes for it.
    print(line.encode("utf-8", "backslashreplace").decode("utf-8"), flush=True)


def note(message: str) -> None:
    """Tell a person something that is not the result."""
    print(message, file=sys.stderr)


def silence(stream: IO[str]) -> None:
    """Discard what is still to be written there: its reader has left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def terminals() -> list[IO[str]]:
    """What of stdout and stderr someone may be looking at."""
    streams = (sys.__stdout__, sys.__stderr__)
    return [s for s in streams if s is not None and not s.closed and s.isatty()]


@contextmanager
def quiet(*, unless: bool) -> Iterator[None]:
    """Of several processes, only one prints; an error is printed outside of this block."""
    if unless:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def progress(*columns: Any) -> Any:
    """A rich progress bar on stderr, silent when stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(
        *(columns or Progress.get_default_columns()),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
