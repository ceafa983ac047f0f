"""How soon a training begins, and what it costs it to be looked at.

    OMP_NUM_THREADS=1 python benchmarks/lab.py             # three minutes, on a quiet machine
    OMP_NUM_THREADS=1 python benchmarks/lab.py --browser   # chromium looks, with the page itself

A server trains a small gru. Within that one training turns of two seconds alternate: nobody looks,
somebody asks for a picture as often as the page does, nobody looks … Each watched turn is compared
with the mean of the two beside it, so that whatever drifts falls out; what is left is a mean with
its standard error. A turn begins and ends with an update that was told.

On a machine with other work, tokens per second of the clock tell little: beside them stand tokens
per second of processor time of the training's process, and the processor time that the server (and
the browser) take for a picture. `begins` are the seconds from the request to the first record: of a
server that has just been started, and of the two trainings after that.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SETTLE = 0.3
"""Seconds between two turns: the last picture that was asked for has been drawn."""


class Client:
    """The page, without a browser; the server closes what it has not heard of for a while."""

    def __init__(self, address: str, *, stays: bool = False) -> None:
        self.address, self.stays = address, stays
        self.home, query = address.split("/?")
        self.connection = http.client.HTTPConnection(self.home.removeprefix("http://"), timeout=600)
        self.cookie = ""
        self.cookie = self._request("GET", f"/?{query}")[1]["set-cookie"].split(";")[0]

    def _request(self, method: str, path: str, body: str | None = None):
        headers = {"Origin": self.home, "Cookie": self.cookie}
        self.connection.request(method, path, body, headers)
        response = self.connection.getresponse()
        data = response.read()
        if not self.stays:
            self.connection.close()
        return data, {name.lower(): value for name, value in response.getheaders()}

    def ask(self, method: str, path: str, body: object = None):
        """A question in JSON, and its answer."""
        sent = None if body is None else json.dumps(body)
        return json.loads(self._request(method, path, sent)[0])


# ---------------------------------------------------------------------- who looks


class Asking:
    """Somebody who asks for the next picture as soon as there may be one, as the page does."""

    def __init__(self, client: Client, id: str) -> None:
        self.address, self.id, self.pictures = client.address, id, 0
        self.wait = time.sleep

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        self.looks = True
        thread = threading.Thread(target=self._ask)
        thread.start()
        yield
        self.looks = False
        thread.join()

    def _ask(self) -> None:
        client, last = Client(self.address, stays=True), ""
        while self.looks:
            asked, every = time.perf_counter(), 0.1
            picture = client.ask("GET", f"/api/runs/{self.id}/frame?after={last}")
            if "step" in picture:  # else there are no weights yet
                self.pictures += picture["step"] != last
                last, every = picture["step"], picture["every"]
            time.sleep(max(0.0, every - (time.perf_counter() - asked)))

    def count(self) -> int:
        """Pictures so far."""
        return self.pictures


class Page:
    """The page itself, in chromium without a window."""

    def __init__(self, client: Client, id: str, play: Any) -> None:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        self.page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
        self.page.goto(client.address)
        self.view = f"{client.home}/#run={id}&view=microscope"
        self.wait = lambda seconds: self.page.wait_for_timeout(1000 * seconds)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        self.page.goto(self.view)
        self.page.evaluate("performance.setResourceTimingBufferSize(100000)")
        self.page.wait_for_selector("#heat", state="visible")
        yield
        self.page.goto("about:blank")

    def count(self) -> int:
        """Pictures of this look so far; with none, 0."""
        asked = "performance.getEntriesByType('resource').filter(e => e.name.includes('/frame'))"
        return self.page.evaluate(f"{asked}.length")


# ---------------------------------------------------------------------- measuring


def tokens(metrics: Path, start: int = 0) -> tuple[int, int]:
    """Tokens that were learnt from, as told after a place in the file; and the place after that."""
    with open(metrics, "rb") as log:
        log.seek(start)
        whole, end, _ = log.read().rpartition(b"\n")
    updates = (line for line in whole.split(b"\n") if line.startswith(b'{"kind": "update"'))
    return sum(json.loads(line)["tokens"] for line in updates), start + len(whole) + len(end)


def used(processes: set[int]) -> float:
    """Seconds of processor time, of all their threads."""
    total = 0
    for task in (task for p in processes for task in _listed(Path(f"/proc/{p}/task"))):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            total += int((task / "schedstat").read_text().split()[0])
    return 1e-9 * total


def family(process: int) -> set[int]:
    """A process, its children and theirs."""
    found = {process}
    for task in _listed(Path(f"/proc/{process}/task")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in (task / "children").read_text().split():
                found |= family(int(child))
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


class Moment(NamedTuple):
    """What there is to compare, right after an update was told."""

    clock: float
    tokens: int
    training: float  # seconds of processor time
    server: float
    browser: float


class Turn(NamedTuple):
    """What happened between two updates."""

    by_clock: float  # tokens per second
    by_processor: float  # tokens per second of processor time
    seconds: float
    pictures: int
    server: float  # seconds of processor time
    browser: float


class Watch:
    """A training that is measured from outside."""

    def __init__(self, metrics: Path, training: int, server: int) -> None:
        self.metrics, self.training, self.server = metrics, training, server
        self.learnt, self.place = tokens(metrics)

    def moment(self) -> Moment:
        """The next one at which an update is told."""
        before = self.learnt
        while self.learnt == before:
            time.sleep(0.0005)
            if self.metrics.stat().st_size > self.place:
                more, self.place = tokens(self.metrics, self.place)
                self.learnt += more
        browser = family(os.getpid()) - family(self.server) - {os.getpid()}
        times = map(used, ({self.training}, {self.server}, browser))
        return Moment(time.perf_counter(), self.learnt, *times)

    def turn(self, seconds: float, who: Asking | Page) -> Turn:
        """So many seconds, and what happened in them."""
        began, seen = self.moment(), who.count()
        who.wait(seconds)
        pictures, ended = who.count() - seen, self.moment()
        clock, done, *times = (b - a for a, b in zip(began, ended, strict=True))
        training, server, browser = times
        return Turn(done / clock, done / training, clock, pictures, server, browser)


def compared(alone: list[Turn], watched: list[Turn], name: str) -> tuple[float, float]:
    """By what part it is slower when watched, and the standard error of that.

    There is one turn alone more: before, between and after the watched ones.
    """
    speeds = [getattr(turn, name) for turn in alone]
    beside = [(a + b) / 2 for a, b in itertools.pairwise(speeds)]
    slower = [1 - getattr(w, name) / b for w, b in zip(watched, beside, strict=True)]
    error = statistics.stdev(slower) / len(slower) ** 0.5 if len(slower) > 1 else float("nan")
    return statistics.mean(slower), error


# ---------------------------------------------------------------------- trainings


def begin(client: Client, root: Path, **options: object) -> tuple[str, float]:
    """Ask for a training; its id, and the seconds until it has told something."""
    began = time.perf_counter()
    asked = {"corpus": "python-reference", "options": options}
    id = client.ask("POST", "/api/runs", asked)["id"]
    metrics = root / id / "metrics.jsonl"
    while not metrics.exists() or not tokens(metrics)[0]:
        time.sleep(0.01)
    return id, time.perf_counter() - began


def stop(client: Client, id: str) -> None:
    """Stop a training, and wait for that."""
    client.ask("POST", f"/api/runs/{id}/tell", {"do": "stop"})
    while client.ask("GET", f"/api/runs/{id}")["state"] not in ("stopped", "ended"):
        time.sleep(0.1)


@contextlib.contextmanager
def looker(client: Client, id: str, *, browser: bool) -> Iterator[Asking | Page]:
    """Who will look."""
    if not browser:
        yield Asking(client, id)
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        yield Page(client, id, play)


def measure(watch: Watch, who: Asking | Page, turns: int, seconds: float):
    """Turns alone, one more than watched ones, and these."""
    alone, watched = [], []
    for _ in range(turns):
        who.wait(SETTLE)
        alone.append(watch.turn(seconds, who))
        with who.looking():
            who.wait(SETTLE)
            watched.append(watch.turn(seconds, who))
    who.wait(SETTLE)
    return [*alone, watch.turn(seconds, who)], watched


def main() -> None:
    """Measure; print a table, and one line of JSON."""
    parser = argparse.ArgumentParser(description="What it costs to be looked at.")
    parser.add_argument("--turns", type=int, default=40, help="watched ones")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one turn")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--at-once", default="2", help="1: the training has all the cores")
    parser.add_argument("--browser", action="store_true", help="the page in chromium looks")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "elman", "lab", folder, "--no-browser"]
        command += ["--at-once", given.at_once]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        client, root = Client(server.stdout.readline().strip()), Path(folder)
        options = {"hidden_size": given.hidden_size, "epochs": 500, "validate_every": 10**6}
        id, seconds = begin(client, root, **options)
        begins = [seconds]
        while len(begins) < 3:
            stop(client, id)
            id, seconds = begin(client, root, **options)
            begins.append(seconds)
        training = client.ask("GET", f"/api/runs/{id}")["process"]
        watch = Watch(root / id / "metrics.jsonl", training, server.pid)
        with looker(client, id, browser=given.browser) as who:
            alone, watched = measure(watch, who, given.turns, given.seconds)
        stop(client, id)
        server.terminate()
        server.wait()
        server.stdout.close()
    result = summary(alone, watched) | {"begins": begins, "browser": given.browser}
    print(table(result))
    print(json.dumps(result))


def summary(alone: list[Turn], watched: list[Turn]) -> dict[str, Any]:
    """What the turns say."""
    pictures, seconds = sum(w.pictures for w in watched), sum(w.seconds for w in watched)
    found: dict[str, Any] = {"turns": len(watched)}
    for name in ("by_clock", "by_processor"):
        found[f"slower_{name}"], found[f"error_{name}"] = compared(alone, watched, name)
        for kind, turns in (("alone", alone), ("watched", watched)):
            found[f"{kind}_{name}"] = statistics.median(getattr(t, name) for t in turns)
    idle = sum(a.server for a in alone) / sum(a.seconds for a in alone)
    return found | {
        "pictures_per_second": pictures / seconds,
        "server_seconds_per_picture": sum(w.server for w in watched) / max(pictures, 1),
        "server_seconds_per_idle_second": idle,
        "browser_seconds_per_picture": sum(w.browser for w in watched) / max(pictures, 1),
    }


def table(found: dict[str, Any]) -> str:
    """The result, to be read."""
    lines = ["tokens per second of    alone  watched    slower by"]
    for name, words in (("by_clock", "the clock"), ("by_processor", "processor time")):
        alone, watched = found[f"alone_{name}"], found[f"watched_{name}"]
        part = f"{100 * found[f'slower_{name}']:.1f} ± {100 * found[f'error_{name}']:.1f} %"
        lines.append(f"{words:20} {alone:8,.0f} {watched:8,.0f} {part:>12}")
    page = (
        f", browser {1000 * found['browser_seconds_per_picture']:.1f}" if found["browser"] else ""
    )
    lines.append(
        f"{found['pictures_per_second']:.1f} pictures a second, "
        f"processor time of each: server {1000 * found['server_seconds_per_picture']:.1f}{page} ms"
    )
    lines.append("begins within " + ", ".join(f"{s:.2f}" for s in found["begins"]) + " s")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
