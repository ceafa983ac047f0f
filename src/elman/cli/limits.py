"""What every verb refuses alike: whole numbers beyond 64 bits, NaN, empty paths, closed streams."""

import functools
import io
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from elman.errors import UserError
from elman.options import LARGEST, flag

LONGEST = 10**7
"""The longest text that a command writes, in tokens: at 50,000 a second, three minutes."""


def a_path(text: str) -> Path:
    """A path as it was typed; an empty one is refused, which `Path` would take for this folder."""
    if not text:
        raise typer.BadParameter("an empty path names nothing; . is this folder")
    return Path(text)


RunFolder = Annotated[
    Path, typer.Argument(help="Folder written by `elman train`", parser=a_path, metavar="RUN")
]


def guarded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb, refusing numbers that no part of it could count with."""

    @functools.wraps(verb)
    def called(*positional: Any, **options: Any) -> Any:
        for name, value in options.items():
            if isinstance(value, int) and abs(value) > LARGEST:
                raise UserError(f"{flag(name)} must fit into 64 bits", hint=f"at most {LARGEST:,}")
            if isinstance(value, float) and math.isnan(value):
                raise UserError(f"{flag(name)} nan is not a number", hint="leave it out")
        return verb(*positional, **options)

    return called


def check_streams() -> None:
    """Refuse a closed stdout; make sure that no file is opened in a closed stream's place.

    A file opened while stderr is closed becomes stderr, and is written into by whoever complains.
    """
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:
        continue
    os.close(nowhere)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, until the process ends
    if sys.stdout is None:
        raise UserError(
            "stdout is closed, so the result has nowhere to go", hint="> /dev/null discards it"
        )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # what has no code there, an odd file name, is shown
            stream.reconfigure(errors="backslashreplace")
