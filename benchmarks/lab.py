"""What it costs a training to be looked at: tokens per second with and without the microscope.

    python benchmarks/lab.py                # periods alternate within one training, best of both

A server trains a small gru; in turns of a few seconds nobody looks, or somebody asks for a picture
ten times a second. The machine's other work falls on both alike; the median of the turns is shown.
"""

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


def turn(client: Client, id: str, metrics: Path, look: bool) -> tuple[float, int]:
    """Tokens per second over one turn, and the pictures seen in it."""
    began, before, pictures = time.perf_counter(), tokens(metrics), 0
    while time.perf_counter() - began < TURN:
        asked = time.perf_counter()
        if look:
            client.ask("GET", f"/api/runs/{id}/frame")
            pictures += 1
        time.sleep(max(0.0, 0.1 - (time.perf_counter() - asked)))
    return (tokens(metrics) - before) / (time.perf_counter() - began), pictures


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description="What it costs to be looked at.")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=128)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "elman", "lab", folder, "--no-browser", "--at-once", "1"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        client = Client(server.stdout.readline().strip())
        asked = {
            "corpus": "python-reference",
            "options": {"hidden_size": given.hidden_size, "epochs": 500, "validate_every": 10**6},
        }
        id = client.ask("POST", "/api/runs", asked)["id"]
        metrics = Path(folder) / id / "metrics.jsonl"
        while not metrics.exists() or not tokens(metrics):
            time.sleep(0.2)
        alone, watched, pictures = [], [], 0
        for _ in range(given.turns):
            time.sleep(FORGET)
            alone.append(turn(client, id, metrics, look=False)[0])
            turn(client, id, metrics, look=True)  # warm
            speed, seen = turn(client, id, metrics, look=True)
            watched.append(speed)
            pictures += seen
        client.ask("POST", f"/api/runs/{id}/tell", {"do": "stop"})
        while client.ask("GET", f"/api/runs/{id}")["state"] not in ("stopped", "ended"):
            time.sleep(0.2)
        server.terminate()
        server.wait()
    result = {
        "alone": statistics.median(alone),
        "watched": statistics.median(watched),
        "slower": 1 - statistics.median(w / a for w, a in zip(watched, alone, strict=True)),
        "pictures_per_second": pictures / (given.turns * TURN),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
