"""Trainings that were asked for on the page: queued, started, told what to do.

Each is a folder ROOT/.lab/ID of small files, so that it outlives any server:

    asked.json      what to train, or which run to go on with
    status.json     queued, starting, running, paused, stopping, stopped, ended, failed
    orders.jsonl    what the page told the training: a line for each order, read between two updates
    weights         of a moment ago (`moment`), while someone looks (`watched`)
    .lock           held by the process that trains, however it ends
    log             whatever that process said

The training itself is a run folder ROOT/ID like any other.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, final

from elman import strict_json
from elman.errors import UserError
from elman.files import write_text
from elman.folders.lock import holder, is_held
from elman.lab import loaded
from elman.lab.shelf import NotHere, Shelf
from elman.runs import Run, check_fits, options_of, presets, with_options
from elman.session import planned

ALIVE = ("starting", "running", "paused", "scoring")
CHANGES = ("learning_rate", "clip", "window", "carry", "history", "memory", "epochs", "patience")
"""What the page may change while a training runs."""
FORKS = sys.platform == "linux"
"""Whether a process with everything loaded can be had again and again; elsewhere torch's and the
system's libraries do not promise to work after a fork, and each training loads its own."""
STARTS_WITHIN = 60.0
"""Seconds after which a training that does not hold its job is taken to be gone."""


def read_json(path: Path) -> dict[str, Any]:
    """One of the small files; nothing where it is not there yet."""
    try:
        return strict_json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}


def say(folder: Path, state: str, **more: Any) -> None:
    """Write status.json."""
    write_text(folder / "status.json", strict_json.dumps({"state": state, **more}))


def order(folder: Path, **what: Any) -> None:
    """Tell a training what to do next."""
    with open(folder / "orders.jsonl", "ab") as orders:
        orders.write(strict_json.dumps(what).encode() + b"\n")


def weights(folder: Path) -> Path:
    """Where a training leaves its weights for the views."""
    return folder / "weights"


@final
class Jobs:
    """The queue, and the processes that this server has started.

    One process waits with everything loaded, and a training is a fork of it: it begins when it is
    asked for and not two seconds later. It ends when nobody holds its standard input any more.
    """

    def __init__(
        self,
        shelf: Shelf,
        at_once: int = 2,
        threads: int = 0,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """`process`: one of `loaded.process`, if there is one already."""
        self.shelf, self.at_once = shelf, at_once
        self.threads = threads or max(1, (os.cpu_count() or 1) // at_once)
        self._mutex = threading.RLock()
        self._loaded = process
        self._started: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self._open = True
        self.busy_threads = 0
        """Threads of all trainings, at the last look."""

    # ------------------------------------------------------------------ asking

    def begin(self, source: str, name: str, given: dict[str, Any], preset: str) -> str:
        """Ask for a training; what is wrong with it is said now. Returns its id."""
        options = presets.expand(preset, given | {"source": source})
        presets.check_used(given, options)
        presets.data(options)
        presets.settings(options)
        if not _is_long(source):
            config, parts, _ = planned(given | {"source": source}, preset)
            check_fits(config, parts)
        with self._mutex:
            id = self.shelf.free_id(name)
            folder = self.shelf.jobs / id
            self.shelf.make(folder)
            asked = {"given": given | {"source": source}, "preset": preset, "asked": time.time()}
            self._queue(folder, asked | {"threads": self.threads})
        return id

    def go_on(self, id: str, changes: dict[str, Any] | None = None) -> None:
        """Ask that a run which has stopped goes on, with these options changed."""
        with self._mutex:
            folder = self.shelf.jobs / id
            asked = read_json(folder / "asked.json") if _is_name(id) else {}
            if id in self.shelf.runs() or "given" not in asked:  # else it had not begun
                asked |= {"threads": Run.open(self.shelf.run(id)).config.threads}
            self.shelf.make(folder)
            self._queue(folder, asked | {"asked": time.time(), "changes": changes or {}})

    def _queue(self, folder: Path, asked: dict[str, Any]) -> None:
        (folder / "orders.jsonl").unlink(missing_ok=True)
        write_text(folder / "asked.json", strict_json.dumps(asked))
        say(folder, "queued")

    # ------------------------------------------------------------------ telling

    def tell(self, id: str, what: str) -> None:
        """pause, go or stop."""
        if what not in ("pause", "go", "stop"):
            raise UserError(f"a training cannot {what!r}", hint="pause, go or stop")
        with self._mutex:
            state = self.status(id)["state"]
            if state == "queued" and what == "stop":
                say(self.shelf.jobs / id, "stopped", message="it had not begun")
            elif state in ALIVE:
                order(self.shelf.jobs / id, do=what)
            elif state == "elsewhere":
                raise self._not_ours(id)
            elif what == "go":
                self.go_on(id)
            else:
                raise UserError(f"{id} is not being trained: it is {state}", hint="resume it first")

    def change(self, id: str, given: dict[str, Any]) -> dict[str, Any]:
        """Train on with other options; what is wrong with them is said now.

        Returns those that will change, as far as is known now.
        """
        if unknown := sorted(given.keys() - set(CHANGES)):
            raise UserError(
                f"{unknown[0]!r} cannot be changed while a training runs",
                hint=f"one of {', '.join(CHANGES)}",
            )
        run = Run.open(self.shelf.run(id))
        before = options_of(run.config)
        asked = typed(given)
        changes = presets.changed(before, asked)
        with_options(run.config, before | changes)
        state = self.status(id)["state"]
        if state == "elsewhere":
            raise self._not_ours(id)
        if state in ("queued", "scoring"):
            raise UserError(f"{id} cannot be changed now: it is {state}", hint="wait a moment")
        if state in ALIVE:
            changes |= asked  # another change may be on its way: the last word counts
            order(self.shelf.jobs / id, do="change", options=asked)
        elif changes:
            self.go_on(id, changes)
        return changes

    def _not_ours(self, id: str) -> UserError:
        process = holder(self.shelf.root / id).get("process", "?")
        return UserError(
            f"{id} is trained by process {process}, which this page did not start",
            hint="stop it there, with Ctrl-C; then it can go on here",
        )

    def watch(self, id: str) -> Path:
        """Say that someone looks; returns where the weights of a moment ago will be.

        Somebody else's folder cannot be told: then the weights that were saved last are shown.
        """
        folder = self.shelf.jobs / id
        if folder.is_dir():
            with contextlib.suppress(OSError):
                (folder / "watched").touch()
        return self.published(id)

    def published(self, id: str) -> Path:
        """Where a training leaves the weights of a moment ago, for the views."""
        return weights(self.shelf.jobs / id)

    # ------------------------------------------------------------------ looking

    def status(self, id: str) -> dict[str, Any]:
        """What a training does now; of one whose process is gone, that it has stopped."""
        status = self._said(id)
        if (not status or self._is_gone(id, status)) and id not in self.shelf.runs():
            raise NotHere(f"there is no run {id!r} here", hint="it may have been moved or deleted")
        status = status or {"state": "stopped"}
        if status["state"] in ALIVE and not self._is_alive(id, status):
            status = self._said(id)  # its last words come before it lets go of its job
            if status.get("state", ALIVE[0]) in ALIVE:
                status = {"state": "stopped", "message": "its process is gone; it can go on"}
        if status["state"] in (*ALIVE, "queued"):
            return status
        path = self.shelf.root / id
        if is_held(path):  # by a process that nobody here has started
            return {"state": "elsewhere", **holder(path)}
        return {"state": "ended"} if _has_ended(path) else status

    def _said(self, id: str) -> dict[str, Any]:
        return read_json(self.shelf.jobs / id / "status.json") if _is_name(id) else {}

    def _state(self, id: str) -> str:
        try:
            return self.status(id)["state"]
        except NotHere:  # its folder was taken away a moment ago
            return "gone"

    def asked(self) -> dict[str, dict[str, Any]]:
        """What was asked for, by id; runs that nobody asked for here are not among them."""
        if not self.shelf.jobs.is_dir():
            return {}
        folders = [p for p in self.shelf.jobs.iterdir() if (p / "asked.json").exists()]
        here = [p for p in folders if not self._is_gone(p.name, read_json(p / "status.json"))]
        return {p.name: read_json(p / "asked.json") for p in sorted(here)}

    def _is_gone(self, id: str, status: dict[str, Any]) -> bool:
        """Whether a training had begun, and somebody has taken its folder away."""
        begun = status.get("state") in ("running", "paused", "scoring", "stopped", "ended")
        begun = begun and "process" in status  # else it was stopped while it waited
        return begun and not (self.shelf.root / id).exists()

    def _is_alive(self, id: str, status: dict[str, Any]) -> bool:
        """Whether a process holds its job, as it does before it says more than that it starts."""
        if is_held(self.shelf.jobs / id):
            return True
        return status["state"] == "starting" and self._begins(id)

    def _begins(self, id: str) -> bool:
        """Whether it was started a moment ago, and may hold its job in another."""
        process, since = self._started.get(id, (None, 0.0))
        soon = time.monotonic() < since + STARTS_WITHIN
        return process is not None and process.poll() is None and (soon or not FORKS)

    # ------------------------------------------------------------------ starting

    def recover(self) -> None:
        """Queue again what a server that was killed had only begun to start."""
        for id in self.asked():
            status = read_json(self.shelf.jobs / id / "status.json")
            if status.get("state") == "starting" and not self._is_alive(id, status):
                say(self.shelf.jobs / id, "queued")

    def tend(self) -> None:
        """Start what waits, first come first served, while there is room; have one loaded."""
        with self._mutex:
            if not self._open:
                return
            asked = self.asked()
            states = {id: self._state(id) for id in asked}
            busy = sum(state in ("starting", "running", "scoring") for state in states.values())
            waiting = sorted(
                (id for id, state in states.items() if state == "queued"),
                key=lambda id: asked[id]["asked"],
            )
            for id in waiting[: max(0, self.at_once - busy)]:
                self._start(id)
            working = (id for id, state in states.items() if state in ("running", "scoring"))
            self.busy_threads = sum(asked[id]["threads"] for id in working)
            self._ready()

    def _ready(self) -> subprocess.Popen[bytes]:
        """The process that has everything loaded, or will have in a moment."""
        if self._loaded is not None and self._loaded.poll() is not None:
            if self._loaded.stdin is not None:
                self._loaded.stdin.close()
            self._loaded = None
        if self._loaded is None:
            self._loaded = loaded.process()
        return self._loaded

    def _start(self, id: str) -> None:
        process = self._ready()
        say(self.shelf.jobs / id, "starting")
        assert process.stdin is not None
        process.stdin.write(os.fsencode(self.shelf.jobs / id) + b"\n")
        process.stdin.flush()
        self._started[id] = process, time.monotonic()
        if not FORKS:
            process.stdin.close()
            self._loaded = None

    def close(self) -> None:
        """Let the loaded process go, once it has begun what it was told; trainings go on."""
        with self._mutex:
            self._open = False
            if self._loaded is not None and self._loaded.stdin is not None:
                self._loaded.stdin.close()  # it has nothing more to do
            for process in {self._loaded, *(process for process, _ in self._started.values())}:
                if process is not None and process.poll() is None:
                    process.returncode = 0  # not ours any more: nobody waits for it here
            self._loaded = None


def _has_ended(path: Path) -> bool:
    """Whether the last thing that a run told is its result."""
    try:
        with open(path / "metrics.jsonl", "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - (1 << 16)))
            lines = log.read().splitlines()
    except FileNotFoundError:
        return False
    return bool(lines) and lines[-1].startswith(b'{"kind": "result"')


LONG = 2**20
"""Bytes of a text that is surely long enough, and takes a while to be cut into tokens."""


def _is_long(source: str) -> bool:
    try:
        return Path(source).stat().st_size > LONG
    except OSError:  # the name of a text that comes along
        return False


def _is_name(id: str) -> bool:
    """Whether an id can be the name of a folder right below another."""
    is_short = len(os.fsencode(id)) < 256  # as file systems have them
    return is_short and id not in ("", ".", "..") and not set("/\\\0") & set(id)


def typed(given: dict[str, Any]) -> dict[str, Any]:
    """Options as a page sends them, as the library reads them: `memory` may be "64M"."""
    values = {}
    for name, value in given.items():
        if name not in presets.OPTIONS:
            raise UserError(f"there is no option {name!r}", hint="elman train --help lists them")
        described = presets.OPTIONS[name]
        if described.option.read and isinstance(value, str):
            value = described.option.read(value)
        if described.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        kinds = (described.type, type(None))
        as_stored, default = described.as_stored(value), described.default
        described.option.refuse_outside(name, as_stored, kinds, default=default)
        values[name] = value
    return values
