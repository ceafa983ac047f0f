"""How much memory there is, and saying no to what cannot fit into it, before it is tried."""

import os
from pathlib import Path

from elman.errors import UserError

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_bytes() -> int:
    """The memory that this process could still get: the machine's, or its container's if less."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limits = [int(line) for path in _LIMITS for line in _lines(path) if line.strip().isdigit()]
    return min([free, *limits])


def _lines(path: str) -> list[str]:
    """A file of the kernel's, where there is one."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def check_memory(needed: int, what: str, hint: str, available: int | None = None) -> None:
    """Refuse what needs more memory than there is, with the sum in words.

    >>> check_memory(10**13, "3 weights", "fewer", available=8 * 10**9)
    Traceback (most recent call last):
    elman.errors.UserError: 3 weights need 10 TB of memory, and 8 GB are available; fewer
    """
    available = available_bytes() if available is None else available
    if needed > available:
        raise UserError(
            f"{what} need {in_words(needed)} of memory, and {in_words(available)} are available",
            hint=hint,
        )


def in_words(number: int) -> str:
    """
    >>> in_words(1_500), in_words(20_000_000), in_words(10**40)
    ('1.5 kB', '20 MB', '1e+22 EB')
    """
    units = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")
    power = min((len(str(number)) - 1) // 3, len(units) - 1)
    return f"{number / 1000**power:.3g} {units[power]}"
