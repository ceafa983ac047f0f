"""The process that trains: it reads which job from standard input, and does it.

    python -m elman.lab.worker < (the job's folder)

It is `elman train` with orders read between two updates. A change is a stop and an
`elman train --resume RUN --option value` in the same process, so that whatever is done on the page
can be done without it, to the last bit. Everything is imported before the job is known: the server
keeps one such process ready, and each job is a fork of it. Until then it has one thread: what
computes with several would not survive the fork.
"""

import os
import signal
import sys
import time
import traceback
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch

from elman import strict_json
from elman.errors import UserError, WorkFailed
from elman.folders.lock import Lock
from elman.lab import again, jobs, moment
from elman.lab.moment import Moment, Place
from elman.session import RunOptions, Session
from elman.training import Record, Update

LOOK_FOR = 0.01
"""Seconds between two looks at whether someone looks."""
LOOK_SHARE = 0.01
"""The part of the time that copying them may take."""
WATCHED_FOR = 3.0
"""Seconds after which a look is over."""
SAVE_EVERY = 10.0
"""Seconds between two checkpoints: what one looks into and writes with should not be old."""
THERE_EVERY = 1.0
"""Seconds between two looks at whether the run's folder is still there."""
LONGEST_PAUSE = 3600.0
"""Seconds that a paused training keeps its process."""
PATIENCE = 5.0
"""Seconds to wait for the process before this one to let go of the job."""


@final
class Worker:
    """One job, from its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder.parent.parent / folder.name
        self.asked = jobs.read_json(folder / "asked.json")
        threads = self.asked["threads"]
        self.kept = RunOptions(out=self.path, threads=threads, checkpoint_seconds=SAVE_EVERY)
        self.read = 0  # bytes of orders.jsonl
        self.orders: list[dict[str, Any]] = []
        self.refused: dict[str, str] = {}  # why the last change was not made
        self.last: Record | None = None
        self.next_check = 0.0
        self.next_look = 0.0
        self.last_look = 0.0  # when the last one whose wish was granted looked
        self.moment = Moment(jobs.weights(folder))
        self.copied: deque[float] = deque(maxlen=8)  # seconds that copies of the weights took

    def work(self) -> None:
        """Train to the end, or until told to stop."""
        lock = _held(self.folder)
        signal.signal(signal.SIGTERM, lambda *_: self.orders.append({"do": "stop"}))
        try:
            self._work()
        except BaseException as problem:
            self._say_why(problem)
            if not isinstance(problem, UserError | WorkFailed):
                raise
        finally:
            self.moment.close()
            lock.release()

    def _say_why(self, problem: BaseException) -> None:
        """Why it does not go on."""
        if self.last is not None and not self.path.exists():
            self._say("stopped", message="its folder was moved or deleted")
        elif isinstance(problem, UserError | WorkFailed):
            self._say("failed", message=problem.message, hint=problem.hint)
        else:
            self._say("failed", message="the process broke down; its log says how")

    def _work(self) -> None:
        session = self._session()
        while True:
            self._say("running")
            for record in session.records(stop=self._is_told):
                self.last = record
                self._let_look(session)
            if not self.orders:
                break
            session = self._obey(session, self.orders.pop(0))
            if session is None:
                self._say("stopped")
                return
        self._say("scoring")
        session.conclude()
        session.report()
        self._say("ended")

    def _session(self) -> Session:
        if (self.path / "config.json").exists():
            return self._changed(self.path, self.asked.get("changes", {}))
        given, preset = self.asked["given"], self.asked["preset"]
        command = again.training(given, preset, self.path)
        return Session.begin(jobs.typed(given), preset, self.kept, command)

    def _obey(self, session: Session, order: dict[str, Any]) -> Session | None:
        """The session to go on with; None: none."""
        if order["do"] == "change":
            return self._changed(session.run.path, order["options"])
        while order["do"] == "pause":
            self._say("paused")
            self._wait()
            order = self.orders.pop(0)
            if order["do"] == "change":
                session = self._changed(session.run.path, order["options"])
                order = {"do": "pause"}
        return None if order["do"] == "stop" else session

    def _changed(self, path: Path, options: dict[str, Any]) -> Session:
        kept, self.refused = replace(self.kept, out=None), {}
        try:
            return Session.resume(path, options, kept=kept)
        except UserError as refusal:
            if not options:
                raise
            self.refused = {"message": f"not changed: {refusal.message}", "hint": refusal.hint}
            return Session.resume(path, kept=kept)  # nothing has changed; it goes on as it was

    # ------------------------------------------------------------------ orders

    def _is_told(self) -> bool:
        """Whether there is an order; they are followed right after an update, and nowhere else."""
        if not isinstance(self.last, Update):
            return False
        self._insist_on_folder()
        self._read_orders()
        return bool(self.orders)

    def _insist_on_folder(self) -> None:
        """A training whose folder was taken away would learn for nobody until it is to be saved."""
        now = time.monotonic()
        if now >= self.next_check:
            self.next_check = now + THERE_EVERY
            if not self.path.exists():
                raise UserError(f"{self.path} was moved or deleted", hint="train a new run")

    def _wait(self) -> None:
        """For the next order; a training that everybody forgot stops, and can go on later."""
        until = time.monotonic() + LONGEST_PAUSE
        while not self.orders:
            time.sleep(0.05)
            self._read_orders()
            if time.monotonic() > until:
                self.orders.append({"do": "stop"})

    def _read_orders(self) -> None:
        path = self.folder / "orders.jsonl"
        if not path.exists() or path.stat().st_size == self.read:
            return
        with open(path, "rb") as orders:
            orders.seek(self.read)
            for line in orders:
                if line.endswith(b"\n"):
                    self.read += len(line)
                    told = strict_json.loads(line)
                    self.orders += [told] if "do" in told else []

    # ------------------------------------------------------------------ telling

    def _say(self, state: str, **more: Any) -> None:
        jobs.say(self.folder, state, **self.refused | {"process": os.getpid(), **more})

    def _let_look(self, session: Session) -> None:
        """A copy of the weights for the views, once for each look, ten a second at most.

        Copies keep a beat: one that had to wait for the end of an update does not delay the next.
        """
        now = time.monotonic()
        if now < self.next_look:
            return
        looked = self._looked()
        if looked == self.last_look or time.time() - looked > WATCHED_FOR:
            self.next_look = now + LOOK_FOR
            return
        self.last_look = looked
        self._leave_weights(session)
        self.copied.append(time.monotonic() - now)  # the least of some: others may have been busy
        every = max(moment.EVERY, min(self.copied) / LOOK_SHARE)
        self.next_look = max(now, self.next_look + every)

    def _leave_weights(self, session: Session) -> None:
        training = session.training
        place = Place(training.step, training.epoch, training.index)
        self.moment.leave(dict(training.model.named_parameters()), place)

    def _looked(self) -> float:
        """When somebody asked for a picture, the last time."""
        try:
            return (self.folder / "watched").stat().st_mtime
        except FileNotFoundError:
            return 0.0


def _held(folder: Path) -> Lock:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return Lock(folder)
        except UserError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def main() -> None:
    """Wait for jobs until the server has gone; each is done by a process of its own."""
    if jobs.FORKS:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for how a training ends
    for line in sys.stdin.buffer:
        if not jobs.FORKS or os.fork() == 0:
            _do(Path(os.fsdecode(line.rstrip(b"\n"))))
            return


def _do(folder: Path) -> None:
    """The job of this folder, in a session of its own: what ends others does not end it."""
    if jobs.FORKS:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), 2)
    try:
        Worker(folder).work()
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
