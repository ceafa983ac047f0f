"""The process that trainings are forks of, started before anything here is loaded.

This module imports nothing of elman, so that both load at the same time: when the page can be
reached, a training can begin a moment later.
"""

import subprocess
import sys


def process() -> subprocess.Popen[bytes]:
    """In a session of its own: what ends the server does not end what it has begun.

    Without a server, when nobody holds its standard input, it ends.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "elman.lab.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """End one that has not been told anything."""
    process.kill()
    if process.stdin is not None:
        process.stdin.close()
    process.wait()
