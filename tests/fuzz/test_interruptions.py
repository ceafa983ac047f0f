"""Trainings that are interrupted at any moment, and then go on to the same bits."""

import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest
from harness import cases

from elman import cli
from elman.cli import run as elman
from elman.runs import Run

pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
]

OPTIONS = (
    "--preset quick --hidden-size 8 --embedding-size 4 --batch-size 2 --window 6 --epochs 2 "
    "--max-tokens 900 --device cpu --checkpoint-every 7 --threads 1 --diagnose 0"
)
SMALL = OPTIONS.split()
ENDS = {"SIGINT": (130,), "SIGTERM": (143, -15), "SIGKILL": (-9,), "closed pipe": (1,)}
"""How each ends a command that it finds at work; what has ended before is 0."""


EARLY = {signal.SIGINT}
"""What waits until the command has begun: before that, Ctrl-C would end this test's own code."""


def begun(check=cli.check_streams) -> None:
    """The first thing that a command does."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, EARLY)
    check()


def forked(words: list[str], log: str, closed_pipe: bool) -> int:
    """The command in a child of this process, which has loaded torch already; returns its id."""
    signal.pthread_sigmask(signal.SIG_BLOCK, EARLY)
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, EARLY)
        return child
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.check_streams = begun
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 2)
        read, write = os.pipe()
        os.dup2(write if closed_pipe else file, 1)
        os.close(read)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        status = elman(words)
        sys.stderr.flush()
        os._exit(status)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os._exit(99)


def ended(child: int, seconds: float = 60.0) -> int:
    """The exit status, or minus the signal."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"a hang over {seconds:.0f} s")


def test_interruptions(tmp_path, tiny_run):
    book = tiny_run().parent / "book.txt"
    began = time.monotonic()
    assert elman(["train", str(book), "--out", str(tmp_path / "whole"), *SMALL]) == 0
    lasts = time.monotonic() - began
    weights = (tmp_path / "whole" / "model.safetensors").read_bytes()
    stopped = 0
    for chance in cases(3):
        out, log = tmp_path / "run", str(tmp_path / "log")
        how = chance.choice(list(ENDS))
        words = ["train", str(book), "--out", str(out), "--json", *SMALL]
        for attempt in range(3):
            child = forked(words, log, closed_pipe=how == "closed pipe")
            time.sleep(chance.random() * lasts * 1.2)
            if how != "closed pipe":
                os.kill(child, getattr(signal, how))
            status = ended(child)
            said = Path(log).read_text(errors="replace")
            assert "Traceback" not in said, said
            assert status in (0, *ENDS[how]), f"{how} ended with {status}: {said[-500:]}"
            stopped += status != 0
            if (out / "config.json").exists():
                Run.open(out).records()
                words = ["train", "--resume", str(out), "--json"]
            else:
                shutil.rmtree(out, ignore_errors=True)
            if attempt == 1:
                how = "SIGKILL"
        if out.exists():
            assert elman(["train", "--resume", str(out)]) == 0
            assert (out / "model.safetensors").read_bytes() == weights
            shutil.rmtree(out)
    assert stopped
