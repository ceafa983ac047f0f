"""Every address of the lab: small JSON in, small JSON out, the library in between."""

import asyncio
import contextlib
import functools
import math
import os
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from elman import __version__, strict_json
from elman.errors import UserError, WorkFailed
from elman.forecasting import saving
from elman.lab import again, microscope, moment, pictures, stream, writing
from elman.lab.guard import Guard
from elman.lab.inside import Inside
from elman.lab.jobs import ALIVE, Jobs, typed
from elman.lab.microscope import Slide
from elman.lab.pace import Pace
from elman.lab.shelf import LARGEST_TEXT, NotHere, Shelf, corpora, is_forecast, slug
from elman.runs import Run, comparison, options_of, presets

PAGE = Path(__file__).parent / "page"
LARGEST_QUESTION = 1 << 20
"""Bytes of anything that is asked, a text to keep excepted."""
KEPT = 4
"""Runs whose texts and weights are kept at hand."""
SMALL = {"model": "gru", "hidden_size": 128, "sample_every": 1}
"""What a training on the page is, unless it is asked to be something else: small and quick."""
TEND_EVERY = 0.2
LOOKS = ("baselines", "excerpt", "spectrum", "carries")
NEXT = 0.5
"""Seconds that someone who has seen a picture of the microscope waits for the next at most."""
LOOK_FOR = 0.01
"""Seconds between two looks at whether there are new weights."""
EARLY = 0.8
"""The part of a training's beat after which they may come: one waits for the end of an update, and
the next does not."""


class Frame(NamedTuple):
    """A picture of the microscope, of what it was drawn, and when there may be another."""

    id: str
    stamp: Any
    due: float
    picture: dict[str, Any]


@final
class Lab:
    """What the addresses share: the shelf, the jobs, what is kept at hand, and who computes."""

    def __init__(
        self,
        root: Path,
        at_once: int = 2,
        threads: int = 0,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.shelf = Shelf(root)
        self.jobs = Jobs(self.shelf, at_once, threads, process)
        self.slide = functools.lru_cache(KEPT)(Slide)
        self.inside = functools.lru_cache(KEPT)(Inside)
        self.pool = ThreadPoolExecutor(2, "lab", _give_way)
        self.counting = ThreadPoolExecutor(1, "counting", _give_way)  # a while, of a large text
        self.summaries: dict[Path, tuple[Any, comparison.Summary]] = {}
        self._frame: Frame | None = None
        self._pace = Pace()
        self._mutex = threading.Lock()
        self.is_ending = False
        """Whether the page is being ended: what streams then comes to its end."""

    async def compute(self, work: Callable[..., Any], *given: Any) -> Any:
        """Somewhere that gives way to trainings."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *given)

    async def count(self, work: Callable[..., Any]) -> Any:
        """The same, where whatever takes less time does not have to wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self.counting, work)

    def frame(self, id: str) -> dict[str, Any]:
        """The microscope's picture of now; those who ask at once, or too often, get the same one.

        `every` says when there will be another: as soon as it can be drawn where a core is free,
        and so seldom that trainings do not notice where it is not.
        """
        path, published = self.shelf.run(id), self.jobs.published(id)
        with self._mutex:
            stamp = self._weights(path)
            last, now = self._frame, time.monotonic()
            if last is None or last.id != id or (last.stamp != stamp and now >= last.due):
                with self._pace.drawing():
                    picture = microscope.frame(self.slide(path), published)
                all_busy = self.jobs.busy_threads >= _cores()
                every = self._pace.every(trainings_have_all=all_busy)
                last = self._frame = Frame(id, stamp, now + every, picture | {"every": every})
            return last.picture

    async def next_frame(self, id: str, seen: str) -> str:
        """The picture after that of step `seen`, as JSON: a training leaves its weights for it.

        Where none comes for a while, the same one again.
        """
        path, until = self.shelf.run(id), time.monotonic() + NEXT
        self.jobs.watch(id)
        while self._is_last(path, seen) and time.monotonic() < until:
            await asyncio.sleep(self._rest(path))
        return await self.compute(lambda: strict_json.dumps(self.frame(id)))

    def _rest(self, path: Path) -> float:
        """Seconds until it is worth looking for new weights: a training leaves them on a beat."""
        left = 1e-9 * _stamp(self.jobs.published(path.name))[0]
        soon = left + EARLY * moment.EVERY - time.time()
        return soon if LOOK_FOR < soon < moment.EVERY else LOOK_FOR

    def _is_last(self, path: Path, seen: str) -> bool:
        """Whether there is no newer picture than that of step `seen`, nor one to be drawn now."""
        last = self._frame
        if last is None or last.id != path.name or str(last.picture["step"]) != seen:
            return False
        return time.monotonic() < last.due or self._weights(path) == last.stamp

    def _weights(self, path: Path) -> list[tuple[int, int]]:
        """What a picture is drawn of: changed, there is another one to draw."""
        published = self.jobs.published(path.name)
        return [_stamp(p) for p in (published, path / "state.safetensors", path / "config.json")]

    def summary(self, path: Path) -> comparison.Summary:
        """A run at a glance, read again only when it has told something new."""
        stamp = _stamp(path / "metrics.jsonl"), _stamp(path / "config.json")
        before = self.summaries.get(path)
        if before is None or before[0] != stamp:
            self.summaries[path] = stamp, comparison.summary(path)
        return self.summaries[path][1]


def _give_way() -> None:
    """This thread takes what trainings leave: the least urgent there is, and one core."""
    torch.set_num_threads(1)
    with contextlib.suppress(OSError, AttributeError):  # not a Linux: threads have no niceness
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _stamp(path: Path) -> tuple[int, int]:
    try:
        seen = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return seen.st_mtime_ns, seen.st_size


# ---------------------------------------------------------------------- reading what is asked


async def _body(request: Request, most: int) -> bytes:
    """What was sent, refused as soon as it is too much, whatever its header says."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > most:
            raise TooMuch(f"more than {most:,} bytes were sent", hint="send less")
    return bytes(data)


class TooMuch(UserError):
    """A request that is larger than it may be."""


async def _asked(request: Request, **fields: Any) -> dict[str, Any]:
    """A JSON object with these fields and no others, each of the type of its default.

    A type instead of a default: the field must be there.
    """
    data = await _body(request, LARGEST_QUESTION)
    try:
        given = strict_json.loads(data)
    except ValueError as problem:
        raise UserError(f"that is not JSON: {problem}", hint="send an object") from problem
    if not isinstance(given, dict):
        raise UserError("a JSON object is expected", hint="{…}")
    if unknown := sorted(given.keys() - fields.keys()):
        raise UserError(f"unknown field {unknown[0]!r}", hint=f"one of {', '.join(fields)}")
    values = {}
    for name, default in fields.items():
        kind = default if isinstance(default, type) else type(default)
        if name not in given:
            if isinstance(default, type):
                raise UserError(f"{name} is missing", hint=f"{name}: {kind.__name__}")
            values[name] = default
            continue
        value = given[name]
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{name}={str(value)[:40]!r} must be a {kind.__name__}")
        values[name] = value
    return values


def _answer(value: Any) -> Response:
    return Response(strict_json.dumps(value), media_type="application/json")


async def _refused(_: Request, problem: Exception) -> Response:
    """What is wrong, in words."""
    assert isinstance(problem, (UserError, WorkFailed))
    kinds = {NotHere: 404, TooMuch: 413, WorkFailed: 500}
    status = next((code for kind, code in kinds.items() if isinstance(problem, kind)), 400)
    return JSONResponse({"error": problem.message, "hint": problem.hint}, status)


# ---------------------------------------------------------------------- the addresses


@final
class Addresses:
    """One method for each thing that the page can ask."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    async def about(self, _: Request) -> Response:
        """What the page needs to know before anything else."""
        options = {
            name: {"help": presets.OPTIONS[name].option.help}
            | ({"choices": list(known)} if (known := presets.OPTIONS[name].option.known) else {})
            for name in ("model", "level", "clean", "carry", "optimizer", "schedule")
        }
        about = {"elman": __version__, "corpora": corpora(), "presets": list(presets.PRESETS)}
        about |= {"small": SMALL, "options": options, "largest_text": LARGEST_TEXT}
        return _answer(about | {"root": str(self.lab.shelf.root), "at_once": self.lab.jobs.at_once})

    async def runs(self, _: Request) -> Response:
        """Every run and every training that was asked for, newest first."""
        return _answer(await asyncio.to_thread(self._runs))

    def _runs(self) -> list[dict[str, Any]]:
        paths, asked = self.lab.shelf.runs(), self.lab.jobs.asked()
        listed = []
        for id in {*paths, *asked}:
            with contextlib.suppress(NotHere):  # moved or deleted a moment ago
                listed.append(self._row(id, paths.get(id)))
        return sorted(listed, key=lambda row: (-row["changed"], row["id"]))

    def _row(self, id: str, path: Path | None) -> dict[str, Any]:
        if path is None:
            folder = self.lab.shelf.jobs / id
            status = self.lab.jobs.status(id)
            return {"id": id, "kind": "text", **status, "changed": _stamp(folder)[0]}
        changed = max(_stamp(path / "metrics.jsonl")[0], _stamp(path / "config.json")[0])
        if is_forecast(path):
            return {"id": id, "kind": "forecast", "state": "ended", "changed": changed}
        status = self.lab.jobs.status(id)
        if status["state"] in (
            *ALIVE,
            "elsewhere",
        ):  # two that train would change places all the time
            changed = _stamp(path / "config.json")[0] or changed
        if not (path / "config.json").exists() and status["state"] in (*ALIVE, "elsewhere"):
            row = {}  # it is being made at this moment
        else:
            row = self.lab.summary(path).json()
            row.pop("run")
        return {"id": id, "kind": "text", **status, "changed": changed, **row}

    async def run(self, request: Request) -> Response:
        """One run: its options, how to make it again, how to go on with it."""
        return _answer(await asyncio.to_thread(self._run, request.path_params["id"]))

    def _run(self, id: str) -> dict[str, Any]:
        row = self._row(id, self.lab.shelf.runs().get(id))
        if "options" not in row:
            return row
        path = self.lab.shelf.run(id)
        run, asked = Run.open(path), self.lab.jobs.asked().get(id, {})
        known = {"command": run.config.command, "resume": again.resuming(path)}
        if "given" in asked:
            known["python"] = again.whole(run, asked)
        return row | {"options": options_of(run.config), "again": known, "ran": run.config.ran}

    async def text(self, request: Request) -> Response:
        """Keep a text that was pasted or dropped; its name is only a hint for what to call it."""
        data = await _body(request, LARGEST_TEXT)
        name = request.query_params.get("name", "text")
        return _answer({"text": await asyncio.to_thread(self.lab.shelf.keep_text, name, data)})

    async def begin(self, request: Request) -> Response:
        """Ask for a training."""
        asked = await _asked(
            request, corpus="", text="", name="", preset=presets.DEFAULT, options={}
        )
        source = self.lab.shelf.source(asked["corpus"] or None, asked["text"] or None)
        given = SMALL | typed(asked["options"])
        if refused := sorted(given.keys() & {"source", "encoding", "errors"}):
            raise UserError(f"{refused[0]} is not an option here", hint="send the text itself")
        name = slug(asked["name"] or asked["corpus"] or asked["text"].rsplit("-", 1)[0])
        begin = self.lab.jobs.begin
        id = await asyncio.to_thread(
            begin, source, f"{name}-{given['model']}", given, asked["preset"]
        )
        await asyncio.to_thread(self.lab.jobs.tend)
        return _answer({"id": id})

    async def tell(self, request: Request) -> Response:
        """Pause, go on, stop."""
        asked = await _asked(request, do=str)
        await asyncio.to_thread(self.lab.jobs.tell, request.path_params["id"], asked["do"])
        await asyncio.to_thread(self.lab.jobs.tend)
        return _answer({"told": asked["do"]})

    async def change(self, request: Request) -> Response:
        """Train on with other options."""
        asked, id = await _asked(request, options=dict), request.path_params["id"]
        changes = await asyncio.to_thread(self.lab.jobs.change, id, asked["options"])
        shell = again.resuming(self.lab.shelf.run(id), **changes)
        return _answer({"changes": changes, "again": shell})

    async def stream(self, request: Request) -> Response:
        """What the run tells, as it tells it (server-sent events); `from`: after that event."""
        id = request.path_params["id"]
        self.lab.jobs.status(id)  # an id that names nothing is refused
        place = request.headers.get("last-event-id") or request.query_params.get("from", "0")
        events = stream.follow(
            self.lab.shelf.root / id,
            lambda: self.lab.jobs.status(id),
            int(place) if place.isdecimal() and len(place) < 16 else 0,
            is_ending=lambda: self.lab.is_ending,
        )
        return StreamingResponse(events, media_type="text/event-stream")

    async def frame(self, request: Request) -> Response:
        """The microscope's picture of now; `after=STEP`: the next one after that."""
        seen = request.query_params.get("after", "")
        picture = await self.lab.next_frame(request.path_params["id"], seen)
        return Response(picture, media_type="application/json")

    async def look(self, request: Request) -> Response:
        """The dearer looks: spectrum, carries, baselines; and some of the text."""
        id, what = request.path_params["id"], request.path_params["what"]
        path, published = self.lab.shelf.run(id), self.lab.jobs.watch(id)

        if what == "baselines":
            return _answer(await self.lab.count(self.lab.inside(path).rivals))

        def found() -> dict[str, Any]:
            if what == "excerpt":
                return self.lab.inside(path).excerpt()
            if what == "spectrum":
                return microscope.spectrum(self.lab.slide(path), published)
            return microscope.carries(self.lab.slide(path), published)

        if what not in LOOKS:
            raise NotHere(f"there is nothing called {what!r}", hint=", ".join(LOOKS))
        return _answer(await self.lab.compute(found))

    async def inside(self, request: Request) -> Response:
        """Surprise, units, what comes next, similar places."""
        what = request.path_params["what"]
        inside = self.lab.inside(self.lab.shelf.run(request.path_params["id"]))
        questions: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
            "surprise": (inside.surprise, {"text": str}),
            "unit": (inside.unit, {"text": str, "unit": int}),
            "following": (inside.following, {"text": str, "what": str, "pattern": ""}),
            "next": (inside.expects, {"text": str}),
            "similar": (inside.similar, {"text": str, "at": int}),
        }
        if what not in questions:
            raise NotHere(f"there is nothing called {what!r}", hint=", ".join(questions))
        work, fields = questions[what]
        asked = await _asked(request, **fields)
        return _answer(await self.lab.compute(functools.partial(work, **asked)))

    async def write(self, request: Request) -> Response:
        """Text that streams, a line of JSON for each token."""
        asked = await _asked(
            request, prompt="", length=300, seed=0, temperature=1.0, top_k=0, top_p=1.0
        )
        asked |= {
            "top_k": asked["top_k"] or None,
            "top_p": asked["top_p"] if asked["top_p"] < 1 else None,
        }
        if not math.isfinite(asked["temperature"]):
            raise UserError("temperature must be a number", hint="1")
        path = self.lab.shelf.run(request.path_params["id"])
        lines = await self.lab.compute(functools.partial(writing.write, path, **asked))
        return StreamingResponse(self._in_time(lines), media_type="application/x-ndjson")

    async def _in_time(self, lines: Any) -> AsyncIterator[str]:
        """Tokens as they are drawn, some at a time, on whatever thread there is."""
        done = object()

        def some() -> list[Any]:
            return [next(lines, done) for _ in range(4)]

        while not self.lab.is_ending:
            batch = await asyncio.to_thread(some)
            yield "".join(line for line in batch if line is not done)
            if done in batch:
                return

    async def picture(self, request: Request) -> Response:
        """A figure as SVG, to be kept."""
        id, name = request.path_params["id"], request.path_params["name"]
        path = self.lab.shelf.run(id)
        svg = await self.lab.compute(pictures.draw, path, name, self.lab.jobs.watch(id))
        keep = {"content-disposition": f'attachment; filename="{name}.svg"'}
        return Response(svg, media_type="image/svg+xml", headers=keep)

    async def forecast(self, request: Request) -> Response:
        """A forecasting run: series, forecasts with intervals, errors of past forecasts."""
        path = self.lab.shelf.run(request.path_params["id"])
        told = await asyncio.to_thread(saving.read_answer, path)
        steps = told["windows"]["steps"]
        return _answer(told | {"again": again.forecasting(path, steps)})


def application(lab: Lab) -> Starlette:
    """The lab without its door."""
    at = Addresses(lab)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await asyncio.to_thread(lab.jobs.recover)
        tending = asyncio.create_task(_tend(lab.jobs))
        yield
        tending.cancel()
        await asyncio.to_thread(lab.jobs.close)
        lab.pool.shutdown(wait=False, cancel_futures=True)
        lab.counting.shutdown(wait=False, cancel_futures=True)

    routes = [
        Route("/api/about", at.about),
        Route("/api/runs", at.runs),
        Route("/api/runs", at.begin, methods=["POST"]),
        Route("/api/texts", at.text, methods=["POST"]),
        Route("/api/runs/{id}", at.run),
        Route("/api/runs/{id}/tell", at.tell, methods=["POST"]),
        Route("/api/runs/{id}/change", at.change, methods=["POST"]),
        Route("/api/runs/{id}/stream", at.stream),
        Route("/api/runs/{id}/frame", at.frame),
        Route("/api/runs/{id}/look/{what}", at.look),
        Route("/api/runs/{id}/inside/{what}", at.inside, methods=["POST"]),
        Route("/api/runs/{id}/write", at.write, methods=["POST"]),
        Route("/api/runs/{id}/pictures/{name}.svg", at.picture),
        Route("/api/runs/{id}/forecast", at.forecast),
        Mount("/", StaticFiles(directory=PAGE, html=True)),
    ]
    handlers: Any = {UserError: _refused, WorkFailed: _refused}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


async def _tend(jobs: Jobs) -> None:
    while True:
        await asyncio.to_thread(jobs.tend)
        await asyncio.sleep(TEND_EVERY)


def guarded(lab: Lab, token: str, names: list[str]) -> Guard:
    """The lab behind its door."""
    return Guard(application(lab), token, names)
