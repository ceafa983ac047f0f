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

    `again` says that metrics.jsonl has become shorter, as it does when a run goes on from an older
    checkpoint: what follows starts from the beginning. `gone`, the last one, that there is no such
    run any more.
    """
    place, said, file = start, None, path / "metrics.jsonl"
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
        if _size(file) < place:
            place = 0
            yield event("again", "{}")
        lines, place = await asyncio.to_thread(_since, file, place)
        if lines:
            yield event("records", "[" + ",".join(lines) + "]", place)
        await asyncio.sleep(EVERY)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _since(file: Path, place: int) -> tuple[list[str], int]:
    """The whole lines after a place, of many updates a few; and the place after them."""
    try:
        with open(file, "rb") as log:
            log.seek(place)
            data = log.read(MOST_BYTES)
    except FileNotFoundError:  # it has told nothing yet, or somebody took it away
        return [], place
    data = data[: data.rfind(b"\n") + 1]
    lines = data.decode("utf-8").split("\n")[:-1]  # a sample may hold U+2028
    return thinned(lines), place + len(data)


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
