"""The rule of every fuzz test, and how long each goes on.

A command exits 0 with a result, or 2 or 1 with `error:` and no traceback; never a signal, never
other streams, never a hang. Case n of a test is a pure function of n: ELMAN_FUZZ_FIRST=n
ELMAN_FUZZ_CASES=1 runs that one again.

    ELMAN_FUZZ_CASES     cases of each test (default: what a few seconds allow)
    ELMAN_FUZZ_SECONDS   or so many seconds of each test
    ELMAN_FUZZ_FIRST     the number of the first case (default 0)
"""

import io
import json
import os
import random
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import NamedTuple

FIRST = int(os.environ.get("ELMAN_FUZZ_FIRST", "0"))
LONGEST = 60.0
"""Seconds that a case may take."""
LARGEST = 2 << 30
"""Bytes that a case may add to the memory of the process."""


def cases(default: int) -> Iterator[random.Random]:
    """A source of chance for each case; the budget is cases, or seconds, from the environment."""
    seconds = float(os.environ.get("ELMAN_FUZZ_SECONDS", "inf"))
    wanted = os.environ.get("ELMAN_FUZZ_CASES")
    count = int(wanted) if wanted else (default if seconds == float("inf") else 10**9)
    end = time.monotonic() + seconds
    number = FIRST
    while number < FIRST + count and time.monotonic() < end:
        chance = random.Random(number)
        yield chance
        number += 1
    print(f"{number - FIRST} cases, the first with seed {FIRST}")


class Outcome(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str


def run_in_process(arguments: list[str], stdin: bytes = b"") -> Outcome:
    """Run a command in this process; whatever breaks the rule is an assertion that shows it."""
    from elman.cli import run

    out, err = _stream(), _stream()
    began, size = time.monotonic(), _memory()
    try:
        with redirect_stdout(out), redirect_stderr(err), _stdin(stdin):
            status = run(arguments)
    except BaseException:
        raise AssertionError(f"{arguments!r}\n{traceback.format_exc()}") from None
    seen = Outcome(status, _written(out), _written(err))
    took = time.monotonic() - began
    assert took < LONGEST, f"{arguments!r} took {took:.0f} s"
    assert _memory() - size < LARGEST, f"{arguments!r} took {_memory() - size} bytes"
    check(arguments, seen)
    return seen


def check(arguments: list[str], seen: Outcome) -> None:
    """The rule."""
    said = f"{arguments!r}\nstatus {seen.status}\n{seen.out[-2000:]}\n{seen.err[-2000:]}"
    assert seen.status in (0, 1, 2), said
    assert "Traceback" not in seen.err, said
    assert "frame #" not in seen.err, f"a C++ stack: {said}"
    if seen.status:
        assert "error: " in seen.err, said
        message = seen.err.rsplit("error: ", 1)[1].split("hint: ")[0]
        assert 3 < len(message.strip()) < 3000, said
    elif "--json" in arguments and "--help" not in arguments:
        for line in filter(None, seen.out.split("\n")):  # U+2028 may stand inside a line
            json.loads(line, parse_constant=_not_json)


def _not_json(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def _stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _written(stream: io.TextIOWrapper) -> str:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode("utf-8", "replace")


@contextmanager
def _stdin(data: bytes) -> Iterator[None]:
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    try:
        yield
    finally:
        sys.stdin = before


def _memory() -> int:
    """The largest this process has been, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---------------------------------------------------------------------- mutations


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Flip a bit, cut, insert, repeat, overwrite, or empty."""
    if not data:
        return bytes(chance.randrange(256) for _ in range(chance.randrange(40)))
    at = chance.randrange(len(data))
    size = chance.choice([1, 1, 4, 64])
    kinds: list[Callable[[], bytes]] = [
        lambda: data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :],
        lambda: data[:at],
        lambda: data[:at] + data[at + size :],
        lambda: data[:at] + bytes(chance.randrange(256) for _ in range(size)) + data[at:],
        lambda: data[:at] + data[at : at + size] * 3 + data[at + size :],
        lambda: data[:at] + bytes(chance.randrange(256) for _ in range(size)) + data[at + size :],
        lambda: b"",
        lambda: data + data,
    ]
    weights = [8, 4, 4, 4, 2, 4, 1, 1]
    return chance.choices(kinds, weights)[0]()


WORDS = (
    "", "-1", "0", "1", "2", "3", "8", "100000", "1000000000", "9223372036854775807",
    "9223372036854775808", "18446744073709551616", "-9223372036854775809", "1" * 50, "1" * 5000,
    "0.5", "1.5", "-0.5", "nan", "inf", "-inf", "1e300", "1e-300", "²", "٣", "x", "auto", "cpu",
    "cuda", "best", "last", "char", "word", "byte", "lstm", "gru", "elman", "mlp", "sgd", "adam",
    "none", "full", "randomized", "sliding", "64M", "1", "stored", "0x10", "1_000", " 1", "~nouser",
    "/dev/null", "/dev/full", "/proc/x", "/proc/nowhere/at/all", "a\0b", "\udcff", "$\\b$", "{}",
    "é",
    "\u202e", "--json", "-", ".", "..", "a" * 300, "kneser-ney:3", "laplace:2", "kneser-ney:9999",
    "utf-8", "latin-1", "undefined", "punycode", "utf-16", "strict", "replace", "ignore",
)  # fmt: skip
"""What may stand where an option wants its value."""

ODD_VALUES = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 1.5, -0.5, 1e300,
    -1e300, float("nan"), float("inf"), "", "x", "nan", "-1", "²", "a" * 5000, "\ud800", "\0",
    [], [1], {}, {"a": 1}, [[[]]], "../..", "char", "lstm", "sgd", "cuda",
)  # fmt: skip
"""Values that a key of JSON may be given instead of its own."""


def mutate_json(value: object, chance: random.Random) -> object:
    """The same value with one key deleted, renamed, added or given another value, at any depth."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        kind = chance.randrange(6)
        if kind == 0:
            return {k: v for k, v in value.items() if k != key}
        if kind == 1:
            return {("odd" if k == key else k): v for k, v in value.items()}
        if kind == 2:
            return {**value, "odd": chance.choice(ODD_VALUES)}
        return {**value, key: mutate_json(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        kind = chance.randrange(4)
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return [*value, chance.choice(ODD_VALUES)]
        return [*value[:at], mutate_json(value[at], chance), *value[at + 1 :]]
    return chance.choice(ODD_VALUES)
