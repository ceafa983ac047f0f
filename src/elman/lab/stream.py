"""What a run tells, as it tells it: the lines of metrics.jsonl, and what its training does now."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from elman import strict_json
from elman.lab.shelf import NotHere

EVERY = 0.1
"""Seconds between two looks at the file."""
STATUS_EVERY = 3
"""Looks at the file between two at what the training does."""
MOST_UPDATES = 3000
"""Updates of the past that are sent, spread evenly; a curve has no more points than that."""
MOST_BYTES = 8 << 20
"""Of the file, read at a time."""


def event(name: str, data: str, id: int | None = None) -> str:
    """One server-sent event."""
    number = "" if id is None else f"id: {id}\n"
    return f"event: {name}\n{number}data: {data}\n\n"


async def follow(
    path: Path,
    status: Callable[[], dict[str, Any]],
    start: int = 0,
    is_ending: Callable[[], bool] = lambda: False,
) -> AsyncIterator[str]:
    """Events of a run for as long as someone listens: `records`, `status`, `again`, `gone`.

    `again` says that metrics.jsonl is not what was read of it, as when a run went on from an older
    checkpoint (it may be longer again by now): what follows starts from the beginning. `gone`, the
    last one, that there is no such run any more.
    """
    place, said, file = start, None, path / "metrics.jsonl"
    last = b"\n" if start else b""  # the line before that place, as far as it is known
    for turn in itertools.count():
        if is_ending():
            return
        if turn % STATUS_EVERY == 0:
            try:
                now = strict_json.dumps(await asyncio.to_thread(status))
            except NotHere:
                yield event("gone", "{}")
                return
            if now != said:
                said = now
                yield event("status", now)
        read = await asyncio.to_thread(_since, file, place, last)
        if read is None:
            place, last = 0, b""
            yield event("again", "{}")
            continue
        lines, place, last = read
        if lines:
            yield event("records", "[" + ",".join(lines) + "]", place)
        await asyncio.sleep(EVERY)


def _since(file: Path, place: int, last: bytes) -> tuple[list[str], int, bytes] | None:
    """The whole lines after a place, of many updates a few; the place after them; the last line.

    None if the line before the place is no longer the last one that was read.
    """
    try:
        with open(file, "rb") as log:
            log.seek(place - len(last))
            data = log.read(len(last) + MOST_BYTES)
    except FileNotFoundError:  # it has told nothing yet, or somebody took it away
        data = b""
    if not data.startswith(last):
        return None
    data = data[len(last) : data.rfind(b"\n") + 1]
    lines = data.decode("utf-8").split("\n")[:-1]  # a sample may hold U+2028
    return thinned(lines), place + len(data), data[data.rfind(b"\n", 0, -1) + 1 :] or last


def thinned(lines: list[str], most: int = MOST_UPDATES) -> list[str]:
    """Of more than `most` updates every k-th and the last; all of anything else.

    >>> thinned(['{"kind": "update", "step": %d}' % i for i in range(1, 6)], most=2)[0][-10:]
    '"step": 3}'
    """
    updates = [i for i, line in enumerate(lines) if _is_update(line)]
    if len(updates) <= most:
        return lines
    stride = -(-len(updates) // most)
    kept = {*updates[stride - 1 :: stride], updates[-1]}
    return [line for i, line in enumerate(lines) if i in kept or not _is_update(line)]


def _is_update(line: str) -> bool:
    return line.startswith('{"kind": "update"')
