"""Kill real commands at random moments, and start two of them at once; print what became of them.

A script, not a test: it forks after importing torch, which a test process had better not do.
`test_reliability.py` runs it: `python killed_verbs.py FOLDER KILLS PAIRS SEED`, so many kills and
pairs of each verb. Each assertion is a promise of docs/reliability.md.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from elman.cli import run

TRAIN = """
    --preset quick --hidden-size 6 --embedding-size 3 --batch-size 2 --window 6 --epochs 2
    --max-tokens 900 --device cpu --threads 1 --diagnose 0 --checkpoint-every 9
"""
Words = list[str]


def start(words: Words, log: Path) -> int:
    """Run one command in a child of its own; what it says goes into `log`."""
    child = os.fork()
    if child == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os._exit(run(words))
    return child


def finish(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that is no draft and no lock."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.startswith(".")
    }


class Case:
    """One verb: how it is begun, how it goes on, and what must be true after a kill and at the end.

    `begin` makes what it needs in a new folder and returns the words to type; `go_on` the words
    after a kill.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[Path], Words],
        go_on: Callable[[Path], Words],
        check: Callable[[Path], None],
        result: Callable[[Path], object],
    ) -> None:
        self.name, self.begin, self.go_on = name, begin, go_on
        self.check, self.result = check, result


def unbroken(case: Case, place: Path) -> tuple[float, object]:
    """How long it takes, and what it ends with, if nothing happens to it."""
    place.mkdir()
    words = case.begin(place)
    began = time.monotonic()
    assert run(words) == 0, words
    return time.monotonic() - began, case.result(place)


def killed(case: Case, folder: Path, wanted: int, chance: random.Random) -> dict[str, float]:
    """Kill it so often, in as many folders as that takes; each must end as the unbroken one."""
    whole, log = folder / f"{case.name}-whole", folder / f"{case.name}.log"
    unbroken(case, whole)  # imports all that the verb needs
    shutil.rmtree(whole)
    seconds, expected = unbroken(case, whole)
    kills, ended = 0, 0
    while kills < wanted:
        place = folder / f"{case.name}-{ended}"
        place.mkdir()
        words, longest = case.begin(place), seconds
        while True:
            child = start(words, log)
            time.sleep(chance.uniform(0, longest))
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            status = finish(child)
            case.check(place)
            if status == 0:
                break
            assert status == -signal.SIGKILL, (case.name, status, log.read_text())
            kills, longest = kills + 1, longest * 1.1
            words = case.go_on(place)
        found = case.result(place)
        assert found == expected, (case.name, place)
        ended += 1
    return {"kills": kills, "ended": ended, "seconds": round(seconds, 2)}


def at_once(
    folder: Path, name: str, words: Words, wanted: int, chance: random.Random, check: Callable
) -> list[list[int]]:
    """Two processes with the same words, begun at nearly the same time: how both ended."""
    seen, logs = [], [folder / f"{name}-{i}.log" for i in (1, 2)]
    for number in range(wanted):
        typed = [word.replace("NUMBER", str(number)) for word in words]
        first = start(typed, logs[0])
        time.sleep(chance.choice([0, 0, 0.01, 0.1]))
        second = start(typed, logs[1])
        ends = [finish(first), finish(second)]
        said = "".join(log.read_text() for log in logs)
        assert "Traceback" not in said, said
        assert ends.count(0) >= 1, (name, ends, said)
        assert set(ends) <= {0, 2}, (name, ends, said)
        check(number, ends, said)
        seen.append(ends)
    return seen


def main(folder: Path, wanted: int, twice: int, seed: int) -> None:
    """Every verb in turn; prints one JSON object."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    text, other, table = folder / "a.txt", folder / "b.txt", folder / "t.csv"
    text.write_text("".join(chance.choices("abcdé \n", k=9000)))
    other.write_text("".join(chance.choices("xyz \n", k=5000)))
    table.write_text(
        "x\n" + "".join(f"{100 + 10 * (i % 7) + chance.random():.3f}\n" for i in range(80))
    )
    trained = folder / "trained"
    assert run(["train", str(text), "--out", str(trained), *TRAIN.split()]) == 0
    report: dict[str, object] = {"seed": seed}
    for case in cases(text, other, table, trained) if wanted else []:
        report[case.name] = killed(case, folder, wanted, chance)
    report["at once"] = pairs(folder, text, table, twice, chance)
    print(json.dumps(report))


def cases(text: Path, other: Path, table: Path, trained: Path) -> list[Case]:
    prepare = ["prepare", str(text), "--shard-tokens", "400", "--level", "byte", "--out"]

    def over_another(place: Path) -> Words:
        assert run(["prepare", str(other), "--out", str(place / "p")]) == 0
        return [*prepare, str(place / "p"), "--force"]

    def prepared_is_kept(place: Path) -> None:
        out = place / "p"
        whole = (out / "index.json").exists() or (out / ".replaced").is_dir()
        assert whole, sorted(out.iterdir())

    def go_on_preparing(place: Path) -> Words:
        out = place / "p"
        begun = (out / "progress.json").exists() and not (out / "index.json").exists()
        return [*prepare, str(out), *([] if begun else ["--force"])]

    compress = ["compress", str(text), "--level", "fast", "-o"]

    def packed_first(place: Path) -> Words:
        assert run([*compress, str(place / "x.elm")]) == 0
        return ["decompress", str(place / "x.elm")]

    def is_whole_or_absent(name: str) -> Callable[[Path], None]:
        def check(place: Path) -> None:
            if (place / name).exists():
                assert (
                    run(["decompress", str(place / name), "-o", str(place / "y"), "--force"]) == 0
                )
                assert (place / "y").read_bytes() == text.read_bytes()

        return check

    forecast = ["forecast", str(table), "--steps", "3", "--windows", "4", "--out"]
    before = contents(trained)

    def untouched(place: Path) -> None:
        assert contents(trained) == before

    evaluate = ["evaluate", str(trained), str(other), "--adapt"]
    return [
        Case(
            "prepare",
            over_another,
            go_on_preparing,
            prepared_is_kept,
            lambda place: contents(place / "p"),
        ),
        Case(
            "compress",
            lambda place: [*compress, str(place / "x.elm")],
            lambda place: [*compress, str(place / "x.elm"), "--force"],
            is_whole_or_absent("x.elm"),
            lambda place: (place / "x.elm").read_bytes(),
        ),
        Case(
            "decompress",
            packed_first,
            lambda place: ["decompress", str(place / "x.elm"), "--force"],
            lambda place: None if not (place / "x").exists() else _equal(place / "x", text),
            lambda place: (place / "x").read_bytes(),
        ),
        Case(
            "forecast",
            lambda place: [*forecast, str(place / "f")],
            lambda place: (
                ["forecast", "--resume", str(place / "f")]
                if (place / "f" / "request.json").exists()
                else [*forecast, str(place / "f"), "--force"]
            ),
            lambda place: None,
            lambda place: {
                name: data
                for name, data in contents(place / "f").items()
                if name in ("model.safetensors", "answer.json")
            },
        ),
        Case("evaluate", lambda place: evaluate, lambda place: evaluate, untouched, lambda p: None),
    ]


def _equal(one: Path, other: Path) -> None:
    assert one.read_bytes() == other.read_bytes()


def pairs(
    folder: Path, text: Path, table: Path, wanted: int, chance: random.Random
) -> dict[str, list[list[int]]]:
    """Two at once in one folder: one of them does the work, the other is refused in words."""

    def refused(name: str, whole: Callable[[Path], object]) -> Callable:
        expected: list[object] = []

        def check(number: int, ends: list[int], said: str) -> None:
            if 2 in ends:
                assert " already" in said or "nothing to resume" in said, said
            found = whole(folder / f"{name}-{number}")
            expected.append(found)
            assert found == expected[0], (name, number)

        return check

    def stopped(number: int) -> None:
        """A run with some epochs left."""
        out = folder / f"resume-{number}"
        assert run(["train", str(text), "--out", str(out), *TRAIN.split()]) == 0

    def weights(path: Path) -> object:
        names = [json.loads(line)["kind"] for line in (path / "metrics.jsonl").open()]
        return (path / "model.safetensors").read_bytes(), names

    found = {}
    words = ["train", str(text), "--out", str(folder / "train-NUMBER"), *TRAIN.split()]
    found["train"] = at_once(folder, "train", words, wanted, chance, refused("train", weights))
    for number in range(wanted):
        stopped(number)
    words = ["train", "--resume", str(folder / "resume-NUMBER"), "--epochs", "4"]
    found["resume"] = at_once(folder, "resume", words, wanted, chance, refused("resume", weights))
    words = ["prepare", str(text), "--out", str(folder / "prepared-NUMBER"), "--shard-tokens", "99"]
    found["prepare"] = at_once(
        folder, "prepared", words, wanted, chance, refused("prepared", contents)
    )
    words = ["forecast", str(table), "--steps", "3", "--windows", "4", "--out"]
    words += [str(folder / "forecasts-NUMBER")]

    def forecaster(path: Path) -> object:
        return contents(path)["model.safetensors"]

    found["forecast"] = at_once(
        folder, "forecasts", words, wanted, chance, refused("forecasts", forecaster)
    )
    words = ["compress", str(text), "--level", "fast", "-o", str(folder / "packed-NUMBER")]
    found["compress"] = at_once(
        folder, "packed", words, wanted, chance, refused("packed", Path.read_bytes)
    )
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
