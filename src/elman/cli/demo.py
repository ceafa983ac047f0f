"""`elman demo`: in three minutes, what elman is: learn a book, beat counting, see the gradient.

Everything is done by the commands a visitor would type, each in a process of its own and shown
before it runs. One of them is killed on the way.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from elman.cli.console import emit
from elman.cli.limits import a_path

BOOK, MANUAL = "time-machine", "python-reference"
OUT = Path("runs/demo")

LSTM = """--model lstm --hidden-size 256 --embedding-size 0 --batch-size 16 --window 40
    --optimizer adamw --learning-rate 0.008 --weight-decay 0.01 --schedule cosine --warm-up 100
    --clip 1 --dropout-tokens 0.05 --average ema --average-decay 0.998 --seed 0
    --validation 0.1 --test 0"""
RECIPES = {
    BOOK: f"{LSTM} --epochs 28 --dropout-outputs 0.35 --dropout-recurrent 0.35",
    MANUAL: f"{LSTM} --epochs 10 --dropout-outputs 0.15 --dropout-recurrent 0.15",
}
VALIDATE_EVERY = 224
KILLED = """--model gru --hidden-size 128 --batch-size 16 --window 32 --epochs 2 --max-tokens 60000
    --weight-decay 0.05 --dropout-tokens 0.03 --dropout-outputs 0.2 --checkpoint-every 25
    --checkpoint-seconds 0 --diagnose 0 --seed 1"""
KILL_AT, TRIES = 60, 5
"""The update after which the training is killed, between two checkpoints; how often that is tried.
"""
MIX = "kneser-ney:7"
WIDTH = 84


@dataclass
class Stage:
    """Where the demo says what it does: in prose, or at the end in one JSON object."""

    out: Path
    prose: bool

    def say(self, *lines: str) -> None:
        if self.prose:
            print(*lines, sep="\n", flush=True)

    def command(self, *words: str) -> list[str]:
        """Show a command as a visitor types it; returns it as this Python runs it."""
        self.say("", f"$ {shlex.join(['elman', *words])}")
        return [sys.executable, "-m", "elman", *words]


def demo(
    out: Annotated[Path, typer.Option(help="Run folder to write", parser=a_path)] = OUT,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Learn a book, beat counting, see the gradient, survive a kill: three minutes on two cores."""
    began = time.monotonic()
    check_place(out)
    stage = Stage(out, prose=not as_json)
    text = choose(stage)
    samples = learn(stage, text)
    scores = compare(stage, text)
    reach = look(stage)
    survived = kill(stage, text)
    report = out / "report.html"
    seconds = round(time.monotonic() - began)
    if as_json:
        answer = {"text": text, "scores": scores, "gradient": reach, "resume": survived}
        emit(answer | {"samples": len(samples), "seconds": seconds, "report": str(report)})
        return
    quoted = shlex.quote(str(out))
    stage.say(
        "",
        f"That was {seconds} s. Curves, samples, lags, one prediction explained and every setting:",
        f"  {report.absolute()}",
        f"To watch a network learn, in a browser: elman lab {shlex.quote(str(out.parent))}",
        f"next: elman generate {quoted} --prompt 'The ' --length 400 --temperature 0.7",
    )


def check_place(out: Path) -> None:
    """Only the demo's own folder is written over; a place that anybody names must be free."""
    from elman.errors import UserError
    from elman.runs.folder import check_room

    try:
        check_room(out, force=out == OUT)
    except UserError as problem:
        raise UserError(problem.message, hint="name another folder with --out") from problem


# ---------------------------------------------------------------------- the text


def choose(stage: Stage) -> str:
    """The notes' own book where it can be had, checked by its hash; else the manual in Python."""
    from elman.errors import UserError
    from elman.text import datasets

    download = datasets.DATASETS[BOOK].download
    assert download is not None
    try:
        path = datasets.path_of(download)
    except UserError as problem:
        stage.say(
            f"The notes' book is not here ({problem.message}),",
            "so this is the manual inside every Python.",
        )
        return MANUAL
    stage.say(
        f"The Time Machine, by H. G. Wells: the book of the notes ({path}, SHA-1 "
        f"{download.sha1[:12]}… as it must be).",
        "The last tenth is held out; everything below is measured there.",
    )
    return BOOK


# ---------------------------------------------------------------------- learning


def learn(stage: Stage, text: str) -> list[dict[str, Any]]:
    """Train, and show what the network writes by then at several moments."""
    options = [*RECIPES[text].split(), "--validate-every", str(VALIDATE_EVERY)]
    where = ["--out", str(stage.out), "--force"]
    command = stage.command("train", text, *options, *where)
    stage.say("", "What it writes while it learns, each time from nothing with the same seed:")
    began, nats, samples = time.monotonic(), 0.0, []
    for record in records(command, stage.out):
        nats = record["nats"] if record["kind"] == "validation" else nats
        if record["kind"] == "sample":
            samples.append(record)
            stage.say(
                "",
                f"  update {record['step']:,}, {time.monotonic() - began:.0f} s: "
                f"{nats:.3f} nats per character held out",
                *quoted_lines(record["text"]),
            )
    return samples


def records(command: list[str], out: Path) -> Iterator[dict[str, Any]]:
    """What a training in a process of its own writes to metrics.jsonl, as it is written."""
    log, read = out / "metrics.jsonl", 0
    log.unlink(missing_ok=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        try:
            while True:
                ended = child.poll() is not None
                lines, read = new_lines(log, read)
                yield from map(json.loads, lines)
                if ended:
                    break
                time.sleep(0.05)
        finally:
            if child.poll() is None:
                child.kill()
        said = child.communicate()[0].decode(errors="replace")
        check(child.returncode, said)


def new_lines(path: Path, read: int) -> tuple[list[bytes], int]:
    """The whole lines after the first `read` bytes, and how many bytes have been read now."""
    if not path.exists():
        return [], read
    with path.open("rb") as log:
        log.seek(read)
        whole, end, _ = log.read().rpartition(b"\n")
    return whole.split(b"\n") if end else [], read + len(whole) + len(end)


def quoted_lines(text: str, lines: int = 3) -> list[str]:
    """The first lines of a text, indented and cut to the width of a page.

    >>> quoted_lines("one\\n\\ntwo\\nthree\\nfour", lines=2)
    ['    | one', '    | two']
    """
    words = [line for line in text.splitlines() if line.strip()]
    return [f"    | {line[:WIDTH]}" for line in words[:lines]]


# ---------------------------------------------------------------------- measuring


def compare(stage: Stage, text: str) -> dict[str, float]:
    """The network beside Kneser–Ney and both together, on the text that was held out."""
    scored = answer(stage.command("evaluate", str(stage.out), "--mix", MIX, "--json"))
    counting = {name: s["nats_per_token"] for name, s in scored["baselines"].items()}
    best = min((name for name in counting if name.startswith("kneser")), key=counting.__getitem__)
    scores = {
        "unigram": counting["unigram"],
        best: counting[best],
        "network": scored["nats_per_token"],
        "mixture": scored["mixture"]["nats_per_token"],
    }
    names = {
        "unigram": "guessing by frequency",
        best: f"counting ({best.replace('kneser-ney:', 'Kneser–Ney, order ')})",
        "network": "the network",
        "mixture": "the network and counting, mixed",
    }
    ranked = sorted(scores.items(), key=lambda pair: -pair[1])
    stage.say(*(f"  {names[name]:36} {nats:.4f} nats per character" for name, nats in ranked))
    if scores["network"] < scores[best]:
        stage.say("The network predicts what it never saw better than counting does.")
    elif text == MANUAL:
        stage.say(
            "The manual repeats itself word for word, which is what counting is best at; mixed, "
            "they beat either."
        )
    return scores


def look(stage: Stage) -> dict[str, Any]:
    """How far back the gradient reaches, in one line and in one picture."""
    pictures = stage.out / "pictures"
    shown = ["gradients", str(stage.out), "--figure", str(pictures), "--draws", "4"]
    seen = answer([*stage.command(*shown), "--json"])
    stage.say(f"  {seen['verdict'].splitlines()[0]}", "", *bars(seen["mean_norm_by_lag"]))
    stage.say(f"  drawn, with {len(seen['figures']) - 1} more pictures: {pictures / 'lags.svg'}")
    kept = ("half_within", "ninety_within", "window", "window_keeps", "settled")
    return {name: seen[name] for name in kept}


def bars(norms: list[float]) -> list[str]:
    """The gradient by lag as bars of text.

    >>> print("\\n".join(bars([1.0, 0.5, 0.25])))
      lag  0  ████████████████████████████████████████  57 %
      lag  1  ████████████████████                      29 %
      lag  2  ██████████                                14 %
    """
    total, high = sum(norms), max(norms)
    lags = [k for k in (0, 1, 2, 3, 5, 8, 13, 21) if k < len(norms)]
    return [
        f"  lag {k:2}  {'█' * round(40 * norms[k] / high):40}  {100 * norms[k] / total:.0f} %"
        for k in lags
    ]


# ---------------------------------------------------------------------- a kill


def kill(stage: Stage, text: str) -> dict[str, Any]:
    """Train twice, once killed on the way and resumed: the bits at the end must be the same."""
    stage.say("", "A training that is killed goes on as if nothing had happened:")
    unbroken, killed = (
        stage.out.with_name(f"{stage.out.name}-{name}") for name in ("unbroken", "killed")
    )
    options = [text, *KILLED.split(), "--force", "--out"]
    for _ in records(stage.command("train", *options, str(unbroken)), unbroken):
        pass
    stopped = kill_on_the_way(stage.command("train", *options, str(killed)), killed)
    stage.say(f"  killed (SIGKILL) after update {stopped}, with no time to save anything")
    resumed = subprocess.run(
        stage.command("train", "--resume", str(killed)), capture_output=True, text=True, check=False
    )
    check(resumed.returncode, resumed.stdout + resumed.stderr)
    stage.say(*(f"  {line}" for line in resumed.stderr.splitlines() if "continuing" in line))
    hashes = {"unbroken": fingerprint(unbroken), "killed": fingerprint(killed)}
    same = hashes["unbroken"] == hashes["killed"]
    stage.say(
        "  SHA-256 of weights, optimiser, state and random generators at the end:",
        f"    never stopped       {hashes['unbroken']}",
        f"    killed and resumed  {hashes['killed']}",
        "  The same, bit for bit." if same else "  They differ: please report this.",
    )
    return {"killed_after": stopped, **hashes, "same": same}


def kill_on_the_way(command: list[str], out: Path) -> int:
    """Kill a training, with no chance to save, after `KILL_AT` updates; returns the last one.

    Beside other programs a training of a second may end before anybody looks: then it is tried
    again.
    """
    from elman.errors import WorkFailed

    for _ in range(TRIES):
        step, was_killed = _killed(command, out)
        if was_killed:
            return step
    raise WorkFailed(
        f"the training ended before it could be killed, {TRIES} times",
        hint="let other programs end, then elman demo again",
    )


def _killed(command: list[str], out: Path) -> tuple[int, bool]:
    """The last update before a training was killed; False where it had ended by itself."""
    log, read, step = out / "metrics.jsonl", 0, 0
    log.unlink(missing_ok=True)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        while child.poll() is None and step < KILL_AT:
            lines, read = new_lines(log, read)
            step = max([step, *(json.loads(line).get("step", 0) for line in lines)])
            time.sleep(0.005)
        child.kill()
    return step, child.returncode != 0


def fingerprint(out: Path) -> str:
    """SHA-256 of every tensor of a training as it was last saved, in the order of their names."""
    from elman.runs import checkpoints

    tensors, _ = checkpoints.read(out / "state.safetensors", "state")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------- commands


def answer(command: list[str]) -> dict[str, Any]:
    """The JSON object that a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    check(done.returncode, done.stderr)
    return json.loads(done.stdout)


def check(status: int, said: str) -> None:
    """Stop with what a command said, where it failed."""
    from elman.errors import WorkFailed

    if status:
        raise WorkFailed(
            f"a command of the demo ended with status {status}: {said.strip()[-500:]}",
            hint="run the command above by itself",
        )
