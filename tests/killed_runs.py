"""Kill real trainings at random moments, resume them, and print what became of them as JSON.

A script, not a test: it forks after importing torch, which a test process had better not do.
`test_runs.py` runs it: `python killed_runs.py FOLDER KILLS SEED`.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from elman import generation
from elman.cli import run
from elman.reports import report

OPTIONS = """
    --model lstm --layers 2 --hidden-size 6 --embedding-size 4 --batch-size 4 --window 8
    --epochs 6 --validate-every 11 --checkpoint-every 3 --checkpoint-seconds 0 --validation 0.2
    --dropout-tokens 0.1 --dropout-inputs 0.1 --dropout-layers 0.1 --dropout-outputs 0.2
    --dropout-recurrent 0.2 --optimizer adamw --weight-decay 0.1 --schedule cosine --average ema
    --device cpu
"""


def start(arguments: list[str]) -> int:
    """Run one command in a child of its own, in silence."""
    child = os.fork()
    if child == 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        os._exit(run(arguments))
    return child


def finish(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(text: Path, out: Path, seconds: float, chance: random.Random) -> int:
    """Train with interruptions until it is done; returns how often it was killed.

    Where a process was killed before it got anywhere, the next may live half as long again, so that
    the training comes to its end however slowly a process starts.
    """
    kills, longest = 0, seconds / 8
    while True:
        before = saved(out)
        begin = ["train", str(text), "--out", str(out), "--force", *OPTIONS.split()]
        whole = (out / "config.json").exists()
        child = start(["train", "--resume", str(out)] if whole else begin)
        time.sleep(chance.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        status = finish(child)
        if status == 0:
            return kills
        assert status == -signal.SIGKILL, status
        kills += 1
        longest *= 1.0 if saved(out) != before else 1.5


def saved(out: Path) -> int:
    """When the training last saved its state; 0 where it has not yet."""
    state = out / "state.safetensors"
    return state.stat().st_mtime_ns if state.exists() else 0


def spare_the_trimmings() -> None:
    """Short samples and no report, so that the time goes into training and its checkpoints.

    Called by the script alone: pytest imports this file to look for doctests.
    """
    specimen = generation.specimen
    generation.specimen = lambda model, vocab, **_: specimen(model, vocab, length=10)
    report.write = lambda run: run.path / "report.html"


def main(folder: Path, wanted: int, seed: int) -> None:
    """Train once without interruption and often with; say how often each was killed."""
    torch.set_num_threads(1)
    spare_the_trimmings()
    chance = random.Random(seed)
    text = folder / "text.txt"
    text.write_text("".join(chance.choices("abcde \n", k=900)))
    assert (
        run(["train", str(text), "--out", str(folder / "first"), *OPTIONS.split()]) == 0
    )  # imports all
    began = time.monotonic()
    assert (
        finish(start(["train", str(text), "--out", str(folder / "unbroken"), *OPTIONS.split()]))
        == 0
    )
    seconds = time.monotonic() - began
    kills: list[int] = []
    while sum(kills) < wanted:
        kills.append(killed(text, folder / f"broken-{len(kills)}", seconds, chance))
    print(json.dumps({"kills": kills, "seconds": seconds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
