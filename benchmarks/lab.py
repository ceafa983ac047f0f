"""How soon a training begins, and what it costs it to be looked at.

    python benchmarks/lab.py                # turns alternate within one training, medians are shown

A server trains a small gru; in turns of a few seconds nobody looks, or somebody asks for a picture
as often as the page does. On a machine with other work, tokens per second of the clock tell little:
beside them stand tokens per second of processor time of the training's process, and the processor
time that the server takes for a picture. `begins` are the seconds from the request to the first
record: of a server that has just been started, and of the two trainings after that.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TURN = 4.0
"""Seconds of one turn."""
FORGET = 3.5
"""Seconds until a training knows that nobody looks any more."""


class Client:
    """The page, without a browser."""

    def __init__(self, address: str) -> None:
        self.home, query = address.split("/?")
        self.host = self.home.removeprefix("http://")
        answer = self._request("GET", f"/?{query}")
        self.cookie = answer[1]["set-cookie"].split(";")[0]

    def _request(self, method: str, path: str, body: str | None = None, cookie: str = ""):
        connection = http.client.HTTPConnection(self.host, timeout=600)
        connection.request(method, path, body, {"Origin": self.home, "Cookie": cookie})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return data, {name.lower(): value for name, value in response.getheaders()}

    def ask(self, method: str, path: str, body: object = None):
        """A question in JSON, and its answer."""
        sent = None if body is None else json.dumps(body)
        return json.loads(self._request(method, path, sent, self.cookie)[0])


def tokens(metrics: Path) -> int:
    """Tokens that were learnt from so far."""
    lines = metrics.read_bytes().split(b"\n")
    return sum(
        json.loads(line)["tokens"] for line in lines if line.startswith(b'{"kind": "update"')
    )


def used(process: int) -> float:
    """Seconds of processor time of a process, all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Turn(NamedTuple):
    """What happened in a few seconds."""

    by_clock: float  # tokens per second
    by_processor: float  # tokens per second of processor time
    pictures: int
    drawing: float  # seconds of processor time of the server


def turn(client: Client, id: str, metrics: Path, server: int, look: bool) -> Turn:
    """A few seconds in which somebody looks, or nobody."""
    training = client.ask("GET", f"/api/runs/{id}")["process"]
    began, before, seen, last = time.perf_counter(), tokens(metrics), set(), ""
    works, draws = used(training), used(server)
    while time.perf_counter() - began < TURN:
        asked, every = time.perf_counter(), 0.1
        if look:
            picture = client.ask("GET", f"/api/runs/{id}/frame?after={last}")
            if "step" in picture:  # else there are no weights yet
                last, every = picture["step"], picture["every"]
                seen.add(last)
        time.sleep(max(0.0, every - (time.perf_counter() - asked)))
    done = tokens(metrics) - before
    works, draws = used(training) - works, used(server) - draws
    return Turn(done / (time.perf_counter() - began), done / works, len(seen), draws)


def begin(client: Client, root: Path, **options: object) -> tuple[str, float]:
    """Ask for a training; its id, and the seconds until it has told something."""
    began = time.perf_counter()
    asked = {"corpus": "python-reference", "options": options}
    id = client.ask("POST", "/api/runs", asked)["id"]
    metrics = root / id / "metrics.jsonl"
    while not metrics.exists() or not tokens(metrics):
        time.sleep(0.01)
    return id, time.perf_counter() - began


def stop(client: Client, id: str) -> None:
    """Stop a training, and wait for that."""
    client.ask("POST", f"/api/runs/{id}/tell", {"do": "stop"})
    while client.ask("GET", f"/api/runs/{id}")["state"] not in ("stopped", "ended"):
        time.sleep(0.1)


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description="What it costs to be looked at.")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--at-once", default="2", help="1: the training has all the cores")
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
        metrics = root / id / "metrics.jsonl"
        alone, watched = [], []
        for _ in range(given.turns):
            time.sleep(FORGET)
            alone.append(turn(client, id, metrics, server.pid, look=False))
            turn(client, id, metrics, server.pid, look=True)  # warm
            watched.append(turn(client, id, metrics, server.pid, look=True))
        stop(client, id)
        server.terminate()
        server.wait()

    def slower(name: str) -> float:
        pairs = zip(watched, alone, strict=True)
        return 1 - statistics.median(getattr(w, name) / getattr(a, name) for w, a in pairs)

    pictures = sum(w.pictures for w in watched)
    result = {
        "begins": begins,
        "alone": statistics.median(a.by_clock for a in alone),
        "watched": statistics.median(w.by_clock for w in watched),
        "slower_by_clock": slower("by_clock"),
        "slower_by_processor_time": slower("by_processor"),
        "pictures_per_second": pictures / (given.turns * TURN),
        "processor_seconds_per_picture": sum(w.drawing for w in watched) / pictures,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
