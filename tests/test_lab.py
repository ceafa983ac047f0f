"""The lab's server: who may come in, what may be asked, and trainings that outlive everything."""

import asyncio
import base64
import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("starlette", reason="elman[lab] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from starlette.testclient import TestClient  # noqa: E402
from starlette.websockets import WebSocketDisconnect  # noqa: E402

import elman as library  # noqa: E402
from elman.cli import run as elman  # noqa: E402
from elman.diagnostics import ByLag  # noqa: E402
from elman.errors import UserError  # noqa: E402
from elman.files import checked_line  # noqa: E402
from elman.folders import lock  # noqa: E402
from elman.lab import (  # noqa: E402
    app,
    inside,
    jobs,
    loaded,
    moment,
    pace,
    shelf,
    stream,
    worker,
    writing,
)
from elman.lab.app import Lab, guarded  # noqa: E402
from elman.lab.serve import open_lab  # noqa: E402
from elman.runs import Run, checkpoints, options_of  # noqa: E402
from elman.session import Session  # noqa: E402
from elman.training import Change, Update  # noqa: E402

TOKEN = "a-token-of-some-length"
NAMES = ["127.0.0.1:8123", "localhost:8123"]
HOME = "http://127.0.0.1:8123"
TEXT = "the time traveller for so it will be convenient to speak of him " * 15
TINY = {
    "hidden_size": 6,
    "embedding_size": 4,
    "batch_size": 4,
    "window": 8,
    "epochs": 2,
    "validate_every": 1000,
}
ENDLESS = 10**6
"""Passes of a training that ends when it is told to, however late the test comes to tell it."""


class Ready:
    """Gives a process with everything loaded: one for many labs, while no test has ended it."""

    def __init__(self):
        self.start, self.made = loaded.process, []

    def __call__(self):
        if not self.made or self.made[-1].poll() is not None or not jobs.FORKS:
            self.made.append(self.start())
        return self.made[-1]


@pytest.fixture(scope="module")
def ready():
    made = Ready()
    yield made
    for process in made.made:
        loaded.end(process)


@pytest.fixture
def lab(tmp_path, ready, monkeypatch):
    monkeypatch.setattr(loaded, "process", ready)
    made = Lab(tmp_path / "runs", threads=1)
    yield made
    for id in made.jobs.asked():  # what a test that failed has left
        if (status := made.jobs.status(id))["state"] in jobs.ALIVE and "process" in status:
            os.kill(status["process"], signal.SIGKILL)
    if made.jobs._loaded in ready.made:  # the next lab has it
        made.jobs._loaded = None
        made.jobs._started.clear()
    made.jobs.close()
    made.pool.shutdown()
    made.counting.shutdown()


@pytest.fixture
def door(lab):
    """The lab with nothing running behind it: no lifespan, so no queue is tended."""
    return TestClient(guarded(lab, TOKEN, NAMES), base_url=HOME, follow_redirects=False)


@pytest.fixture
def page(door):
    """The same, as the page that was let in sees it."""
    door.get(f"/?token={TOKEN}")
    door.headers["origin"] = HOME
    return door


@pytest.fixture
def finished(lab, tiny_run):
    """A run that `elman train` made, under the lab's root."""
    made = tiny_run("--model", "gru", "--window", "12")
    lab.shelf.root.mkdir(parents=True, exist_ok=True)
    target = lab.shelf.root / "book"
    subprocess.run(["cp", "-r", str(made), str(target)], check=True)
    return "book"


# ---------------------------------------------------------------------- who may come in

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
ADDRESSES = ("/", "/api/runs", "/api/texts", "/api/runs/book/stream", "/app.js")


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_never_see(door):
    answer = door.get(f"/?token={TOKEN}")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert door.get("/").status_code == 200


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("address", ADDRESSES)
def test_without_the_cookie_no_method_gets_anything(door, method, address):
    answer = door.request(method, address, headers={"origin": HOME})
    assert answer.status_code == 401
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", "é"])
def test_another_token_is_refused(door, token):
    answer = door.get("/", params={"token": token})
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8123", "127.0.0.1", "127.0.0.1:8124", "localhost:8123.evil.com"],
)
def test_another_host_is_refused_even_with_the_cookie(page, method, host):
    assert page.request(method, "/api/runs", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "https://127.0.0.1:8123", "http://127.0.0.1:9", HOME + "/"],
)
def test_another_origin_is_refused_even_with_the_cookie(page, method, origin):
    answer = page.request(method, "/api/runs", headers={"origin": origin})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("GET", "HEAD")])
def test_whatever_changes_something_must_say_where_it_comes_from(page, method):
    del page.headers["origin"]
    assert page.request(method, "/api/runs").status_code == 403
    assert page.get("/api/runs").status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "nonsense"])
def test_another_site_is_refused_also_where_it_hides_its_origin(page, site):
    del page.headers["origin"]
    assert page.get("/api/runs", headers={"sec-fetch-site": site}).status_code == 403
    assert page.get("/api/runs", headers={"sec-fetch-site": "same-origin"}).status_code == 200


def test_two_hosts_or_two_origins_are_refused(page):
    twice = [("origin", HOME), ("origin", "http://evil.example")]
    assert page.post("/api/runs", headers=twice).status_code == 403


@pytest.mark.parametrize("origin", [HOME, "http://evil.example"])
def test_there_are_no_websockets_for_anyone(page, origin):
    with (
        pytest.raises(WebSocketDisconnect) as refusal,
        page.websocket_connect("/api/runs", headers={"origin": origin}),
    ):
        pass
    assert refusal.value.code == 1008


def test_every_answer_forbids_inline_script_framing_and_guessing(page):
    for address in ("/", "/api/runs", "/api/runs/none", "/nothing"):
        headers = page.get(address).headers
        policy = dict(
            p.strip().split(" ", 1) for p in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_the_page_itself_has_no_inline_script_and_asks_nobody_else():
    for file in (p for p in (Path(shelf.__file__).parent / "page").glob("*") if p.is_file()):
        text = file.read_text(encoding="utf-8")
        assert "http://" not in text.replace("http://www.w3.org/", ""), file
        assert "https://" not in text, file
        for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert danger not in text, (file, danger)
        if file.suffix == ".html":
            assert "<script>" not in text
            assert "style=" not in text
            assert " on" not in " ".join(t for t in text.split("<") if "=" in t and " on" in t[:0])


# ---------------------------------------------------------------------- what may be asked


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../secret",
        "..%2fsecret",
        "%2e%2e",
        "/etc",
        "book/../../secret",
        "a\\b",
        "%00",
        ".lab",
        "a" * 256,
    ],
)
def test_no_name_leads_out_of_the_root(page, lab, finished, name, tmp_path):
    secret = tmp_path / "secret"
    subprocess.run(["cp", "-r", str(lab.shelf.root / finished), str(secret)], check=True)
    lab.shelf.jobs.mkdir(exist_ok=True)
    for rest in ("", "/stream", "/frame", "/pictures/perplexity.svg"):
        assert page.get(f"/api/runs/{name}{rest}").status_code in (403, 404), rest
    for rest in ("/write", "/inside/surprise", "/tell", "/change"):
        answer = page.post(f"/api/runs/{name}{rest}", json={"text": "x", "do": "go"})
        assert answer.status_code in (400, 404, 405), rest
    for address in ("/../app.py", "/..%2fapp.py", "/%2e%2e/app.py", "//etc/passwd"):
        assert page.get(address).status_code == 404


def test_a_link_out_of_the_root_is_not_a_run(page, lab, finished, tmp_path):
    outside = tmp_path / "outside"
    subprocess.run(["cp", "-r", str(lab.shelf.root / finished), str(outside)], check=True)
    (lab.shelf.root / "link").symlink_to(outside)
    assert [row["id"] for row in page.get("/api/runs").json()] == ["book"]
    assert page.get("/api/runs/link").status_code == 404


def test_a_text_lands_under_the_root_by_a_name_of_ours(page, lab):
    for name in (
        "../../x.txt",
        "/etc/passwd",
        "a/b\\c",
        "<script>alert(1)</script>",
        "\0",
        "." * 300,
    ):
        answer = page.post("/api/texts", params={"name": name}, content=TEXT.encode())
        assert answer.status_code == 200
        (kept,) = lab.shelf.texts.glob(f"{answer.json()['text']}.txt")
        assert kept.resolve().parent == lab.shelf.root / "texts"
        assert kept.read_text() == TEXT
    assert sorted(p.name for p in lab.shelf.root.iterdir()) == ["texts"]


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"abc\0def", b"", b"  \n", b"\x89PNG\r\n\x1a\n"])
def test_what_is_not_text_is_refused_in_words_and_leaves_nothing(page, lab, data):
    answer = page.post("/api/texts", content=data)
    assert answer.status_code == 400
    assert answer.json()["error"]
    assert not lab.shelf.texts.exists()


def test_more_than_the_limit_is_refused_while_it_comes(page, lab, monkeypatch):
    monkeypatch.setattr("elman.lab.app.LARGEST_TEXT", 1000)
    sent = []

    def endless():
        while len(sent) < 100:
            sent.append(1)
            yield b"x" * 500

    assert page.post("/api/texts", content=endless()).status_code == 413
    assert not lab.shelf.texts.exists()
    answer = page.post("/api/runs", content=b"[" * (1 << 20) + b"[")
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({}, "which text"),
        ({"corpus": "/etc/passwd"}, "unknown corpus"),
        ({"corpus": "sine"}, "unknown corpus"),
        ({"text": "../../etc/passwd"}, "no text"),
        ({"corpus": "python-reference", "options": {"source": "/etc/passwd"}}, "not an option"),
        ({"corpus": "python-reference", "options": {"out": "/tmp/x"}}, "no option"),
        ({"corpus": "python-reference", "options": {"window": 0}}, "window=0 must be"),
        ({"corpus": "python-reference", "options": {"carry": "far"}}, "unknown carry"),
        ({"corpus": "python-reference", "options": {"hidden_size": "wide"}}, "hidden_size"),
        ({"corpus": "python-reference", "preset": "none"}, "unknown preset"),
        ({"corpus": 3}, "corpus"),
        ({"poem": 3}, "unknown field"),
    ],
)
def test_a_bad_request_is_answered_in_words(page, lab, asked, word):
    answer = page.post("/api/runs", json=asked)
    assert answer.status_code in (400, 404)
    assert word in answer.json()["error"]
    assert not lab.shelf.jobs.exists()
    assert page.post("/api/runs", content=b"{nonsense").status_code == 400


def test_text_that_looks_like_html_stays_text(page, lab, finished):
    script = "<script>alert(1)</script>"
    answer = page.post(f"/api/runs/{finished}/inside/surprise", json={"text": script})
    assert answer.headers["content-type"] == "application/json"
    assert "".join(answer.json()["tokens"]) == script
    answer = page.get("/api/runs/%3Cscript%3E")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/json"
    picture = page.get(f"/api/runs/{finished}/pictures/perplexity.svg")
    assert picture.headers["content-disposition"].startswith("attachment")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2"])
def test_a_host_that_others_reach_needs_a_token(tmp_path, host, capsys):
    with pytest.raises(UserError):
        open_lab(tmp_path, host=host)
    assert elman(["lab", str(tmp_path), "--host", host, "--no-browser"]) == 2
    assert "error: --host" in capsys.readouterr().err


def test_a_host_that_others_reach_comes_with_a_warning(tmp_path):
    address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127."):
        pytest.skip("this machine has no other address")
    opened = open_lab(tmp_path, host=address, token=TOKEN)
    opened.socket.close()
    assert "unencrypted" in opened.warning
    assert opened.address.startswith(f"http://{address}:")


def test_answers_do_not_wait_for_the_browser_to_acknowledge_their_heads(tmp_path):
    """40 ms each, where the socket does not say that it is TCP: asyncio leaves Nagle's rule on."""
    opened = open_lab(tmp_path)
    assert opened.socket.proto == socket.IPPROTO_TCP
    opened.socket.close()


def test_a_port_that_is_taken_is_refused_in_words(tmp_path):
    opened = open_lab(tmp_path)
    with pytest.raises(UserError, match=r"cannot listen.*; another port; 0 takes a free one"):
        open_lab(tmp_path, port=opened.socket.getsockname()[1])
    assert opened.socket.getsockname()[0] == "127.0.0.1"
    opened.socket.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "1.2.3.4.5", "ä" * 70], ids=lambda h: h[:9])
def test_an_address_that_is_not_this_machines_is_not_answered_with_another_port(tmp_path, host):
    with pytest.raises(UserError, match=r"cannot listen on .*; host is an address of this machine"):
        open_lab(tmp_path, host=host, token=TOKEN)


def test_runs_whose_folder_may_not_be_written_to_are_shown(page, lab, finished, monkeypatch):
    """A colleague's, with what their own lab has left there."""
    (lab.shelf.jobs / finished).mkdir(parents=True)
    touch = Path.touch

    def refused(path, *args, **more):
        if path.name == "watched":
            raise PermissionError(13, "Permission denied", str(path))
        touch(path, *args, **more)

    monkeypatch.setattr(Path, "touch", refused)
    assert page.get(f"/api/runs/{finished}/look/excerpt").status_code == 200
    assert page.get(f"/api/runs/{finished}/frame").status_code == 200


@pytest.mark.parametrize("there", [False, True])
def test_what_cannot_be_kept_under_the_root_asks_for_another_root(
    page, lab, finished, monkeypatch, there
):
    if there:
        lab.shelf.texts.mkdir()
        (lab.shelf.jobs / finished).mkdir(parents=True)
    allowed = os.access

    def closed(path, mode, **more):
        inside = Path(path).is_relative_to(lab.shelf.root)
        return not (inside and mode & os.W_OK) and allowed(path, mode, **more)

    monkeypatch.setattr(os, "access", closed)
    for address, asked in (
        ("/api/texts", {"content": TEXT.encode()}),
        ("/api/runs", {"json": {"corpus": "python-reference"}}),
        (f"/api/runs/{finished}/tell", {"json": {"do": "go"}}),
    ):
        answer = page.post(address, **asked)
        assert answer.status_code == 400
        assert "may not be written to" in answer.json()["error"]
        assert answer.json()["hint"] == "name another with elman lab FOLDER"


# ---------------------------------------------------------------------- the numbers on the page


def test_a_run_is_shown_with_the_librarys_own_numbers(page, lab, finished):
    import elman as library
    from elman.diagnostics import Passage, by_lag

    path = lab.shelf.root / finished
    trained = library.load(path)
    (row,) = page.get("/api/runs").json()
    assert (
        row["perplexity"]
        == [r for r in trained.run.metrics() if r["kind"] == "result"][-1]["perplexity"]
    )
    text = "the naïve cat sat"
    shown = page.post(f"/api/runs/{finished}/inside/surprise", json={"text": text}).json()
    assert shown["nats"][1:] == pytest.approx(trained.score(text).nats.tolist(), rel=1e-3)
    unit = page.post(f"/api/runs/{finished}/inside/unit", json={"text": text, "unit": 2}).json()
    assert unit["values"] == pytest.approx(trained.hidden(text)[:, 2].tolist(), rel=1e-3)
    next_ = page.post(f"/api/runs/{finished}/inside/next", json={"text": text}).json()
    likeliest = list(trained.next_token(text).items())
    assert [(t["token"], t["p"]) for t in next_["model"]] == likeliest[:12]
    assert sum(t["p"] for t in next_["counting"]) <= 1 + 1e-9
    frame = page.get(f"/api/runs/{finished}/frame").json()
    model = trained.run.load_model(which="last")
    weights, numbers = checkpoints.read(path / "state.safetensors", "state")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[f"weights/{name}"])
    ids = trained.vocab.encode("".join(frame["tokens"]))
    shape = frame["norms"]["shape"]
    norms = np.frombuffer(base64.b64decode(frame["norms"]["float32"]), "<f4").reshape(shape)
    lags = by_lag(Passage.read(model, ids), shape[1] - 1)
    assert np.array_equal(norms, lags.norms.astype("f4"))
    assert frame["step"] == numbers["step"]
    assert frame["keep90"] == lags.recommend(0.9)
    assert frame["cut"] == pytest.approx(1 - lags.kept(12))
    assert frame["edges"] == sorted(frame["edges"])
    assert {b - a for a, b in zip(frame["edges"], frame["edges"][1:], strict=False)} == {12}


def test_the_first_text_to_look_at_has_none_that_the_model_cannot_read(tmp_path):
    source = tmp_path / "line.txt"
    source.write_text("The quick brown fox jumps over the lazy dog.", encoding="utf-8")
    assert elman(["train", str(source), "--out", str(tmp_path / "run"), "--epochs", "1"]) == 0
    excerpt = inside.Inside(tmp_path / "run").excerpt()
    assert "<" not in excerpt["text"] + excerpt["prompt"]


def test_what_a_window_longer_than_the_picture_keeps_is_the_librarys(page, lab, tiny_run):
    shutil.copytree(tiny_run("--model", "gru", "--window", "150"), lab.shelf.root / "long")
    frame = page.get("/api/runs/long/frame").json()
    norms = np.frombuffer(base64.b64decode(frame["norms"]["float32"]), "<f4")
    lags = ByLag(frame["first"], norms.reshape(frame["norms"]["shape"]).astype("f8"))
    assert len(frame["kept"]) == 150
    for window in (1, 64, 65, 66, 128, 150):
        assert frame["kept"][window - 1] == pytest.approx(lags.kept(window), rel=1e-3)


def test_two_trainings_do_not_change_places_in_the_list_all_the_time(page, lab, finished):
    first, second = (lab.shelf.root / name for name in ("first", "second"))
    for path in (first, second):
        shutil.copytree(lab.shelf.root / finished, path)
        os.utime(path / "config.json", ns=(time.time_ns(), time.time_ns()))
        time.sleep(0.02)
    held = [lock.Lock(first), lock.Lock(second)]  # both are trained
    for path in (first, second, first):
        (path / "metrics.jsonl").touch()
        time.sleep(0.02)
        ids = [row["id"] for row in page.get("/api/runs").json()]
        assert ids[:2] == ["second", "first"]
    for lock_ in held:
        lock_.release()


def test_the_dearer_looks_and_the_search_for_units(page, finished):
    spectrum = page.get(f"/api/runs/{finished}/look/spectrum").json()
    assert len(spectrum["values"]) == len(spectrum["lags"])
    carries = page.get(f"/api/runs/{finished}/look/carries").json()["carries"]
    assert carries[0]["bias"] == pytest.approx(0)
    assert carries[0]["cosine"] == pytest.approx(1)
    baselines = page.get(f"/api/runs/{finished}/look/baselines").json()
    assert next(iter(baselines)) == "uniform"
    assert baselines["uniform"]["nats"] > list(baselines.values())[-1]["nats"]
    text = 'he said "one" and (two).\n' * 4
    for what in ("quotes", "line", "brackets"):
        asked = {"text": text, "what": what}
        found = page.post(f"/api/runs/{finished}/inside/following", json=asked).json()
        sizes = [abs(u["r"]) for u in found["units"]]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) <= 1 + 1e-9
    asked = {"text": text, "what": "pattern", "pattern": "zzz"}
    assert page.post(f"/api/runs/{finished}/inside/following", json=asked).status_code == 400
    similar = page.post(
        f"/api/runs/{finished}/inside/similar", json={"text": text, "at": 30}
    ).json()
    assert similar["positions"][0]["cosine"] > 0.9


@pytest.mark.parametrize("temperature", [0.7, 0])
def test_what_the_page_writes_is_what_the_command_it_names_writes(
    page, finished, capsys, temperature
):
    import shlex

    asked = {"prompt": "the ", "length": 40, "seed": 3, "temperature": temperature, "top_k": 5}
    lines = page.post(f"/api/runs/{finished}/write", json=asked).text.splitlines()
    written = "".join(json.loads(line)["text"] for line in lines[1:])
    command = shlex.split(json.loads(lines[0])["again"])
    assert elman(command[1:]) == 0
    assert capsys.readouterr().out.rstrip("\n").endswith(written.rstrip("\n"))
    for wrong in ({"length": 0}, {"temperature": -1.0}, {"top_p": -1.0}, {"length": 10**9}):
        assert page.post(f"/api/runs/{finished}/write", json=wrong).status_code == 400


def test_a_forecasting_run_opens_too(page, lab, capsys):
    lab.shelf.root.mkdir(parents=True, exist_ok=True)
    out = lab.shelf.root / "sunspots"
    command = [
        "forecast",
        "sunspots",
        "--model",
        "seasonal",
        "--steps",
        "6",
        "--out",
        str(out),
        "--json",
    ]
    assert elman(command) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(r["id"], r["kind"]) for r in page.get("/api/runs").json()] == [
        ("sunspots", "forecast")
    ]
    told = page.get("/api/runs/sunspots/forecast").json()
    assert told["forecast"] == answer["forecast"]
    assert told["scores"] == answer["scores"]
    ((columns),) = told["series"].values()
    ((column),) = columns.values()
    assert len(column["time"]) == len(column["values"]) > 100
    assert page.get("/api/runs/nothing/forecast").status_code == 404
    (out / "answer.json").unlink()
    assert "older elman" in page.get("/api/runs/sunspots/forecast").json()["error"]


def shelved(lab, made, name):
    """A run of `elman train` under the lab's root."""
    lab.shelf.root.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-r", str(made), str(lab.shelf.root / name)], check=True)
    return name


@pytest.mark.parametrize("level", ["word", "bpe"])
def test_tokens_are_shown_as_the_text_they_add_and_each_has_its_own_nats(
    page, lab, tiny_run, level
):
    id = shelved(lab, tiny_run("--model", "gru", "--level", level), level)
    text = "The Traveller, it's said: “näher”.\n"
    told = page.post(f"/api/runs/{id}/inside/surprise", json={"text": text}).json()
    trained = library.load(lab.shelf.root / id)
    assert "".join(told["tokens"]) == text
    assert len(told["tokens"]) == len(told["nats"]) == len(trained.encode(text))
    assert told["nats"][1:] == pytest.approx(trained.score(text).nats.tolist(), rel=1e-3)
    unit = page.post(f"/api/runs/{id}/inside/unit", json={"text": text, "unit": 0}).json()
    assert unit["tokens"] == told["tokens"]
    expected = page.post(f"/api/runs/{id}/inside/next", json={"text": "the"}).json()
    shown = [row["token"] for row in expected["model"] + expected["counting"]]
    frame = page.get(f"/api/runs/{id}/frame").json()
    assert not any("Ġ" in token or "Ċ" in token for token in shown + frame["tokens"])
    lines = page.post(f"/api/runs/{id}/write", json={"prompt": "the", "length": 30}).text
    written = "".join(json.loads(line)["text"] for line in lines.splitlines()[1:])
    assert written.lstrip(" ") == trained.generate("the", length=30).lstrip(" ")


def test_bytes_that_are_written_become_characters(page, lab, tiny_run):
    id = shelved(lab, tiny_run("--model", "elman", "--level", "byte"), "bytes")
    asked = {"prompt": "“a", "length": 40, "temperature": 2.0}
    lines = page.post(f"/api/runs/{id}/write", json=asked).text.splitlines()
    written = "".join(json.loads(line)["text"] for line in lines[1:])
    trained = library.load(lab.shelf.root / id)
    assert written == trained.generate("“a", length=40, temperature=2.0)


def test_a_view_begins_with_text_that_the_run_has_held_out(page, lab, finished):
    told = page.get(f"/api/runs/{finished}/look/excerpt").json()
    run = Run.open(lab.shelf.root / finished)
    held_out = run.vocab.decode(run.splits().validation)
    assert len(told["text"]) > 20
    assert told["text"] in held_out
    assert told["text"].startswith(told["prompt"].rstrip())
    assert told["prompt"]


def test_a_carry_that_does_not_truncate_is_not_said_to_cut(page, lab, tiny_run, finished):
    id = shelved(lab, tiny_run("--model", "gru", "--carry", "full"), "full")
    assert page.get(f"/api/runs/{id}/frame").json()["truncates"] is False
    assert page.get(f"/api/runs/{finished}/frame").json()["truncates"] is True


def test_a_run_of_the_command_line_has_ended_when_its_result_is_there(lab, finished):
    assert lab.jobs.status(finished) == {"state": "ended"}
    log = lab.shelf.root / finished / "metrics.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    assert lab.jobs.status(finished) == {"state": "stopped"}
    held = lock.Lock(lab.shelf.root / finished)
    status = lab.jobs.status(finished)
    assert (status["state"], status["process"]) == ("elsewhere", os.getpid())
    for what in ("pause", "stop", "go"):
        with pytest.raises(UserError, match=f"trained by process {os.getpid()}"):
            lab.jobs.tell(finished, what)
    with pytest.raises(UserError, match="this page did not start"):
        lab.jobs.change(finished, {"epochs": 9})
    held.release()


def test_pictures_take_a_core_that_is_free_and_little_of_one_that_is_not(
    lab, finished, monkeypatch
):
    used, took = [0.0], [0.02]

    def processor_time():
        used[0] += took[0]
        return used[0], 0.0

    monkeypatch.setattr(pace, "processor_time", processor_time)
    first = lab.frame(finished)
    assert first["every"] == pytest.approx(0.02)
    assert lab.frame(finished) is first  # there is nothing new to see
    state = lab.shelf.root / finished / "state.safetensors"
    os.utime(state)
    time.sleep(first["every"])
    took[0], lab.jobs.busy_threads = 60.0, 10_000
    seldom = lab.frame(finished)
    assert seldom["every"] == pytest.approx(6000.0)  # a hundred times what a picture takes
    os.utime(state)
    assert lab.frame(finished) is seldom  # asked too soon


def test_pictures_that_wait_for_a_core_become_seldom_until_one_is_free(monkeypatch):
    clock = [0.0, 0.0]
    monkeypatch.setattr(pace, "processor_time", lambda: tuple(clock))
    drawn = pace.Pace()

    def draw(used, waited):
        with drawn.drawing():
            clock[:] = clock[0] + used, clock[1] + waited
        return drawn.every(trainings_have_all=False)

    assert draw(0.02, 0.0) == pytest.approx(0.02)  # as soon as it can be drawn
    assert draw(0.02, 0.01) == pytest.approx(0.02)  # a hesitation
    assert draw(0.02, 0.05) == pytest.approx(2.0)  # a hundredth of a core
    assert [draw(0.02, 0.0) for _ in range(2)] == pytest.approx([2.0, 0.02])
    assert drawn.every(trainings_have_all=True) == pytest.approx(2.0)


def test_whoever_has_seen_a_picture_gets_the_next_one_as_soon_as_there_are_weights(
    lab, finished, monkeypatch
):
    monkeypatch.setattr(pace, "processor_time", lambda: (0.0, 0.0))  # another is due at once
    state = lab.shelf.root / finished / "state.safetensors"
    rest, rests = lab._rest, []
    monkeypatch.setattr(lab, "_rest", lambda path: rests.append(path) or rest(path))

    def ask(seen):
        rests.clear()
        began = time.monotonic()
        picture = json.loads(asyncio.run(lab.next_frame(finished, str(seen))))
        return picture["step"], time.monotonic() - began

    step, _ = ask("")
    first = lab._frame
    again, waited = ask(step)
    assert again == step
    assert lab._frame is first
    assert waited >= app.NEXT
    ask("another")  # of that there may be a newer one
    assert not rests
    monkeypatch.setattr(lab, "_rest", lambda _: rests.append(os.utime(state)) or 0.0)
    ask(step)
    assert len(rests) == 1
    assert lab._frame is not first


def filled(value):
    """Weights of every kind that a format may put in another order."""
    shapes = {"b": (3,), "a.weight": (5, 4), "c": (0, 2), "scale": ()}
    weights = {n: torch.full(shape, float(value)) for n, shape in shapes.items()}
    return weights | {"half": torch.full((7,), value, dtype=torch.bfloat16)}


class Clock:
    """Time that passes for who sleeps, and between any two looks at it."""

    def __init__(self, between=0.0):
        self.now, self.between = 0.0, between

    def monotonic(self):
        self.now += self.between
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def writer():
    with contextlib.ExitStack() as opened:
        yield lambda path: opened.enter_context(contextlib.closing(moment.Moment(path)))


def test_weights_that_a_training_leaves_are_read_as_they_were(tmp_path, writer):
    path = tmp_path / "weights"
    assert moment.read(path) is None
    first, second = writer(path).leave, writer(path).leave  # which goes on after the first
    for value, leave in enumerate([first, first, first, second, second, second]):
        leave(filled(value), moment.Place(value, 2, 3))
        weights, place = moment.read(path) or pytest.fail("there is nothing")
        assert place == moment.Place(value, 2, 3)
        assert weights.keys() == filled(value).keys()
        assert all(torch.equal(t, weights[name]) for name, t in filled(value).items())
        assert all(t.dtype == weights[name].dtype for name, t in filled(value).items())
    writer(path).leave({"a": torch.ones(1)}, moment.Place(9, 9, 9))
    assert moment.read(path)[0] == {"a": torch.ones(1)}  # nothing is left of what was longer


def test_what_is_read_while_the_training_leaves_weights_is_of_one_moment(
    tmp_path, monkeypatch, writer
):
    """The reader is held up in the middle of the file, which is written over meanwhile."""
    path = tmp_path / "weights"
    leave, later = writer(path).leave, [2, 3]

    class Slow(io.FileIO):
        def read(self, size: int | None = -1):
            if size == -1 and later:
                half = super().read(100)
                value = later.pop(0)
                leave(filled(value), moment.Place(value, 0, 0))
                return half + super().read()
            return super().read(size)

    leave(filled(1), moment.Place(1, 0, 0))
    monkeypatch.setattr(moment, "open", lambda path, *_, **__: Slow(path), raising=False)
    weights, place = moment.read(path) or pytest.fail("there is nothing")
    assert later == []
    assert place.step == 3
    assert all(torch.equal(t, weights[name]) for name, t in filled(3).items())


def test_a_reader_that_hardly_ever_runs_still_reads_what_is_whole(tmp_path, monkeypatch, writer):
    """On a busy machine seconds pass between any two lines; older weights were shown instead."""
    path, clock = tmp_path / "weights", Clock(between=10 * moment.PATIENCE)
    leave = writer(path).leave
    leave(filled(1), moment.Place(1, 0, 0))
    monkeypatch.setattr(moment, "time", clock)
    assert moment.read(path)[1].step == 1
    whole = path.read_bytes()
    number, *place = moment.FRONT.unpack(whole[: moment.FRONT.size])
    path.write_bytes(moment.FRONT.pack(number + 1, *place) + whole[moment.FRONT.size :])
    monkeypatch.setattr(clock, "sleep", lambda _: leave(filled(2), moment.Place(2, 0, 0)))
    assert moment.read(path)[1].step == 2  # it was being written at the first look


def test_weights_that_stay_unfinished_are_done_without(tmp_path, monkeypatch, writer):
    path, tries = tmp_path / "weights", []
    leave, write = writer(path).leave, moment._write

    def killed(file, data):
        write(file, data)
        if len(tries) == 1 and len(data) > moment.FRONT.size:
            raise KeyboardInterrupt

    monkeypatch.setattr(moment, "_write", killed)
    for value in (1, 2):
        with contextlib.suppress(KeyboardInterrupt):
            leave(filled(value), moment.Place(value, 0, 0))
        tries.append(value)
    clock = Clock()
    monkeypatch.setattr(moment, "time", clock)
    assert moment.read(path) is None  # the one who wrote it is gone, it seems
    assert clock.now == pytest.approx(moment.PATIENCE, abs=0.01)
    writer(path).leave(filled(3), moment.Place(3, 0, 0))
    assert moment.read(path)[1].step == 3


def test_copies_of_the_weights_keep_their_beat(tmp_path, monkeypatch):
    """Ten a second on the average, though each waits for the end of an update."""
    clock, copies = [100.0], []
    monkeypatch.setattr(worker.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(worker.time, "time", lambda: clock[0])
    folder = tmp_path / "runs" / ".lab" / "book"
    folder.mkdir(parents=True)
    (folder / "asked.json").write_text('{"threads": 1}')
    training = worker.Worker(folder)
    monkeypatch.setattr(training, "_leave_weights", lambda _: copies.append(clock[0]))
    monkeypatch.setattr(training, "_looked", lambda: clock[0])  # somebody always looks
    while clock[0] < 110:
        clock[0] += 0.033
        training._let_look(None)
    assert len(copies) == pytest.approx(100, abs=1)
    monkeypatch.setattr(training, "_looked", lambda: 0.0)
    for _ in range(1000):
        clock[0] += 0.033
        training._let_look(None)
    assert len(copies) == pytest.approx(100, abs=1)
    monkeypatch.setattr(training, "_looked", lambda: clock[0])
    for _ in range(3):
        training._let_look(None)
    assert len(copies) == pytest.approx(101, abs=1)  # what was not asked for is not made up for


# ---------------------------------------------------------------------- trainings


def wait(lab, id, *states, seconds=180.0):
    until = time.monotonic() + seconds
    while (status := lab.jobs.status(id))["state"] not in states:
        assert time.monotonic() < until, status
        lab.jobs.tend()
        time.sleep(0.05)
    return status


def begin(lab, name="book", **options):
    text = lab.shelf.keep_text("book.txt", TEXT.encode())
    return lab.jobs.begin(lab.shelf.source(None, text), name, jobs.typed(TINY | options), "auto")


def order_at(lab, id, step, **what):
    """Tell a training something once it is at least at this step."""
    until = time.monotonic() + 180
    path = lab.shelf.root / id / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b'"kind": "update"') < step:
        assert time.monotonic() < until
        lab.jobs.tend()
        time.sleep(0.005)
    jobs.order(lab.shelf.jobs / id, **what)


def passes(lab, id):
    """Over the text that a training has begun."""
    updates = [r for r in Run.open(lab.shelf.root / id).records() if isinstance(r, Update)]
    return updates[-1].epoch


def train_to(session, step):
    """Train until the step before which a training was changed."""
    list(session.records(stop=lambda: session.training.step >= step))


def test_a_training_is_changed_paused_and_resumed_and_ends_as_the_python_it_names(lab):
    id = begin(lab, epochs=ENDLESS, name="changed")
    order_at(lab, id, 5, do="change", options={"learning_rate": 0.002})
    order_at(lab, id, 20, do="pause")
    wait(lab, id, "paused")
    assert lab.jobs.change(id, {"window": 5, "clip": 0.5}) == {"window": 5, "clip": 0.5}
    assert lab.jobs.change(id, {"carry": "sliding"})["history"] == 8
    lab.jobs.change(id, {"epochs": passes(lab, id) + 3})
    lab.jobs.tell(id, "go")
    assert wait(lab, id, "ended", "failed")["state"] == "ended"
    run = Run.open(lab.shelf.root / id)
    changes = [r for r in run.records() if isinstance(r, Change)]
    assert [sorted(c.options) for c in changes] == [
        ["learning_rate"],
        ["clip", "window"],
        ["carry", "history"],
        ["epochs"],
    ]
    assert options_of(run.config)["window"] == 5
    made = {}
    from elman.lab import again

    exec(again.whole(run, lab.jobs.asked()[id]), made)
    weights = [
        checkpoints.read(path / "state.safetensors", "state")[0]
        for path in (run.path, Path(f"{run.path}-again"))
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])


def test_a_killed_training_is_stopped_and_goes_on_from_the_command_line_bit_for_bit(lab):
    id = begin(lab, epochs=ENDLESS)
    order_at(lab, id, 12, do="change", options={"window": 4})
    order_at(lab, id, 40, do="pause")
    os.kill(wait(lab, id, "paused")["process"], signal.SIGKILL)
    assert "can go on" in wait(lab, id, "stopped", seconds=jobs.STARTS_WITHIN / 2)["message"]
    path, epochs = lab.shelf.root / id, passes(lab, id) + 3
    assert elman(["train", "--resume", str(path), "--epochs", str(epochs)]) == 0
    changes = [r for r in Run.open(path).records() if isinstance(r, Change)]
    assert [c.options for c in changes] == [{"window": 4}, {"epochs": epochs}]
    session = Session.begin(
        jobs.typed(lab.jobs.asked()[id]["given"]),
        kept=worker.RunOptions(out=path.with_name("straight"), threads=1),
    )
    for change in changes:
        train_to(session, change.step)
        session = Session.resume(session.run.path, change.options)
    list(session.records())
    weights = [(p / "model.safetensors").read_bytes() for p in (path, session.run.path)]
    assert weights[0] == weights[1]


def test_many_trainings_at_once_are_queued_and_none_is_lost_even_by_a_new_server(lab):
    ids = [begin(lab, name="many", epochs=1) for _ in range(6)]
    assert len(set(ids)) == 6
    lab.jobs.tend()
    states = [lab.jobs.status(id)["state"] for id in ids]
    assert states.count("queued") == 4
    lab.jobs.tell(ids[5], "stop")
    lab.jobs.close()
    later = Lab(lab.shelf.root, at_once=3, threads=1)
    later.jobs.recover()
    try:
        for id in ids[:5]:
            assert wait(later, id, "ended", "failed", seconds=240)["state"] == "ended"
        assert later.jobs.status(ids[5])["state"] == "stopped"
    finally:
        later.jobs.close()
        later.pool.shutdown()


@pytest.mark.skipif(not jobs.FORKS, reason="each training loads its own here")
def test_trainings_are_forks_of_one_loaded_process_which_none_of_them_needs(lab):
    ids = [begin(lab, name="forked", epochs=ENDLESS) for _ in range(2)]
    for id in ids:
        order_at(lab, id, 1)
    source = lab.jobs._loaded
    for id in ids:
        stat = Path(f"/proc/{wait(lab, id, 'running')['process']}/stat").read_text()
        assert int(stat.rsplit(")", 1)[1].split()[1]) == source.pid
    source.kill()
    source.wait()
    for id in ids:
        lab.jobs.tell(id, "stop")
        assert "message" not in wait(lab, id, "stopped")
    third = begin(lab, name="forked", epochs=1)
    assert wait(lab, third, "ended", "failed")["state"] == "ended"


def test_a_training_that_never_took_its_job_is_gone_after_a_while(lab, monkeypatch):
    id = begin(lab)
    deaf = lambda: subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # noqa: E731
    monkeypatch.setattr(loaded, "process", deaf)
    lab.jobs.tend()
    assert lab.jobs.status(id)["state"] == "starting"
    monkeypatch.setattr(jobs, "STARTS_WITHIN", 0.0)
    assert lab.jobs.status(id)["state"] == "stopped"


def test_a_change_that_cannot_be_is_refused_before_the_training_hears_of_it(lab):
    id = begin(lab, epochs=ENDLESS)
    order_at(lab, id, 1)
    for wrong in ({"window": 0}, {"carry": "far"}, {"hidden_size": 3}, {"learning_rate": "fast"}):
        with pytest.raises(UserError):
            lab.jobs.change(id, wrong)
    with pytest.raises(UserError):
        lab.jobs.tell(id, "dance")
    lab.jobs.tell(id, "stop")
    wait(lab, id, "stopped")
    with pytest.raises(UserError, match="not being trained"):
        lab.jobs.tell(id, "pause")


def test_a_change_that_only_the_text_forbids_is_told_and_the_training_goes_on(lab):
    id = begin(lab, epochs=ENDLESS)
    order_at(lab, id, 1)
    lab.jobs.change(id, {"window": 5000})
    until = time.monotonic() + 60
    while "message" not in (status := lab.jobs.status(id)):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert status["state"] == "running"
    assert "not changed" in status["message"]
    assert "window" in status["message"]
    assert status["hint"]
    lab.jobs.change(id, {"window": 4})
    while "message" in lab.jobs.status(id):
        assert time.monotonic() < until
        time.sleep(0.02)
    lab.jobs.tell(id, "stop")
    wait(lab, id, "stopped")
    assert options_of(Run.open(lab.shelf.root / id).config)["window"] == 4


def test_a_run_that_has_ended_goes_on_with_more_passes_bit_for_bit(lab):
    id = begin(lab, epochs=2)
    wait(lab, id, "ended", "failed")
    asked = lab.jobs.asked()[id]
    assert lab.jobs.change(id, {"epochs": 5}) == {"epochs": 5}
    assert lab.jobs.status(id)["state"] == "queued"
    assert wait(lab, id, "ended", "failed")["state"] == "ended"
    run = Run.open(lab.shelf.root / id)
    assert [r.options for r in run.records() if isinstance(r, Change)] == [{"epochs": 5}]
    assert lab.jobs.asked()[id]["given"] == asked["given"]  # so that Python can make it again
    kept = worker.RunOptions(out=run.path.with_name("straight"), threads=1)
    session = Session.begin(jobs.typed(asked["given"]), kept=kept)
    list(session.records())
    session.conclude()
    resumed = Session.resume(session.run.path, {"epochs": 5})
    list(resumed.records())
    weights = [
        checkpoints.read(path / "state.safetensors", "state")[0]
        for path in (run.path, session.run.path)
    ]
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])


def test_nothing_waits_for_the_counting_of_a_large_text(page, lab, finished, monkeypatch):
    begun, done, times = threading.Event(), threading.Event(), []

    def slow(*_):
        times.append(1)
        begun.set()
        assert done.wait(60)
        return {}

    monkeypatch.setattr(inside, "baselines", slow)
    path = f"/api/runs/{finished}"
    with ThreadPoolExecutor(3) as tabs:
        asked = [tabs.submit(page.get, f"{path}/look/baselines") for _ in range(3)]
        assert begun.wait(60)
        said = page.post(f"{path}/inside/surprise", json={"text": "the cat"}).json()
        assert len(said["nats"]) == 7
        assert page.get(f"{path}/frame").status_code == 200
        done.set()
        assert [answer.result().json() for answer in asked] == [{}, {}, {}]
    assert times == [1]


def test_a_run_that_is_being_made_has_no_problem(page, lab, finished):
    """Between its folder and its config.json there is a moment in which the page may ask."""
    (lab.shelf.root / finished / "config.json").rename(lab.shelf.root / "config.json")
    assert "no config.json" in page.get(f"/api/runs/{finished}").json()["problem"]
    held = lock.Lock(lab.shelf.root / finished)
    row = page.get(f"/api/runs/{finished}").json()
    held.release()
    assert row["state"] == "elsewhere"
    assert "problem" not in row


def test_of_two_changes_at_once_both_are_made_and_the_last_word_counts(lab):
    id = begin(lab, epochs=ENDLESS)
    order_at(lab, id, 1, do="pause")
    wait(lab, id, "paused")
    usual = options_of(Run.open(lab.shelf.root / id).config)["learning_rate"]
    os.kill(lab.jobs.status(id)["process"], signal.SIGSTOP)  # it hears of both at the same moment
    assert lab.jobs.change(id, {"learning_rate": 0.5}) == {"learning_rate": 0.5}
    assert lab.jobs.change(id, {"learning_rate": usual}) == {"learning_rate": usual}
    os.kill(lab.jobs.status(id)["process"], signal.SIGCONT)
    lab.jobs.tell(id, "stop")
    wait(lab, id, "stopped")
    run = Run.open(lab.shelf.root / id)
    assert options_of(run.config)["learning_rate"] == usual


def test_runs_that_are_taken_away_while_they_are_trained_are_gone(page, lab):
    deleted, renamed = (begin(lab, name, epochs=ENDLESS) for name in ("deleted", "renamed"))
    order_at(lab, deleted, 1)
    order_at(lab, renamed, 1)
    processes = [lab.jobs.status(id)["process"] for id in (deleted, renamed)]
    (lab.shelf.root / renamed).rename(lab.shelf.root / "moved")
    (lab.shelf.root / deleted).rename(lab.shelf.root.parent / "away")  # at once, whatever it writes
    until = time.monotonic() + 60
    while any(Path(f"/proc/{process}").exists() for process in processes):
        lab.jobs.tend()
        assert time.monotonic() < until
        time.sleep(0.05)
    for id in (deleted, renamed):
        assert page.get(f"/api/runs/{id}").status_code == 404
        assert page.get(f"/api/runs/{id}/stream").status_code == 404
    assert [row["id"] for row in page.get("/api/runs").json()] == ["moved"]


def test_the_stream_of_a_run_that_is_taken_away_says_so_and_ends(lab, finished):
    async def listen():
        path = lab.shelf.root / finished
        events = stream.follow(path, lambda: lab.jobs.status(finished))
        heard = [await anext(events), await anext(events)]
        shutil.rmtree(path)
        return heard + [event async for event in events]

    heard = [event.split("\n")[0] for event in asyncio.run(listen())]
    assert heard[:2] == ["event: status", "event: records"]
    assert heard[-1] == "event: gone"


def test_a_training_that_was_stopped_before_it_began_can_still_begin(lab):
    id = begin(lab, epochs=1)
    lab.jobs.tell(id, "stop")
    assert lab.jobs.status(id)["state"] == "stopped"
    lab.jobs.tell(id, "go")
    assert wait(lab, id, "ended", "failed")["state"] == "ended"


@pytest.mark.parametrize("text", [b"a", b"ab", b"a" * 15])
def test_a_training_that_cannot_be_is_refused_when_it_is_asked_for(lab, text):
    kept = lab.shelf.source(None, lab.shelf.keep_text("short.txt", text))
    before = sorted(lab.shelf.root.iterdir()), set(lab.jobs.asked())
    with pytest.raises(UserError, match="too few to hold out 5 %"):
        lab.jobs.begin(kept, "short", {}, "auto")
    assert (sorted(lab.shelf.root.iterdir()), set(lab.jobs.asked())) == before


def test_the_stream_tells_every_record_and_the_status(lab, finished):
    async def first(count):
        events = stream.follow(lab.shelf.root / finished, lambda: {"state": "ended"})
        return [await anext(events) for _ in range(count)]

    status, records = asyncio.run(first(2))
    assert status == 'event: status\ndata: {"state": "ended"}\n\n'
    lines = records.split("data: ")[1]
    told = [{k: v for k, v in r.items() if k != "crc32"} for r in json.loads(lines)]
    assert told == Run.open(lab.shelf.root / finished).metrics()
    size = (lab.shelf.root / finished / "metrics.jsonl").stat().st_size
    assert f"id: {size}\n" in records


def test_of_a_long_past_the_curve_gets_what_it_can_show():
    lines = [json.dumps({"kind": "update", "step": step}) for step in range(1, 10_001)]
    lines.insert(5000, '{"kind": "validation", "step": 5000}')
    thinned = stream.thinned(lines)
    assert len(thinned) <= stream.MOST_UPDATES + 2
    assert lines[5000] in thinned
    assert thinned[-1] == lines[-1]
    assert stream.thinned(lines[:100]) == lines[:100]


def test_a_record_stays_one_whatever_ends_lines_elsewhere(tmp_path):
    ends = ("\u2028", "\u2029", "\x85", "\r", "\n")
    told = [{"kind": "sample", "text": f"a{end}b"} for end in ends]
    log = tmp_path / "metrics.jsonl"
    with log.open("wb") as file:
        for record in told:
            file.write(checked_line(json.dumps(record, ensure_ascii=False)))
        file.write(b'{"kind": "upd')  # still being written

    async def first():
        async for said in stream.follow(tmp_path, dict):
            if said.startswith("event: records"):
                return said
        return ""

    data = next(line[6:] for line in asyncio.run(first()).split("\n") if line.startswith("data: "))
    assert [{k: r[k] for k in ("kind", "text")} for r in json.loads(data)] == told


def written(*steps):
    return b"".join(checked_line(json.dumps({"kind": "update", "step": n})) for n in steps)


def steps_of(event):
    assert event.startswith("event: records")
    lines = next(line for line in event.split("\n") if line.startswith("data: "))
    return [record["step"] for record in json.loads(lines.removeprefix("data: "))]


@pytest.mark.parametrize("since", [(100,), (1, 2, 300, 4, 5), ()])
def test_a_run_that_went_on_from_an_older_checkpoint_is_told_again(tmp_path, since):
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(written(1, 2, 3))

    async def listen():
        events = stream.follow(tmp_path, dict)
        heard = [await anext(events), await anext(events)]
        log.write_bytes(written(*since))  # shorter, or already longer than it was
        heard.append(await anext(events))
        if since:
            heard.append(await anext(events))
        return heard[1:]

    first, again, *rest = asyncio.run(asyncio.wait_for(listen(), 60))
    assert steps_of(first) == [1, 2, 3]
    assert again == "event: again\ndata: {}\n\n"
    assert [steps_of(event) for event in rest] == [list(since)][: len(since)]


def test_a_place_within_a_line_is_not_gone_on_from(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(written(1, 2, 3))
    line = len(written(1))

    async def from_place(place):
        events = stream.follow(tmp_path, dict, place)
        return [await anext(events) for _ in range(3 if place % line else 2)][1:]

    assert steps_of(asyncio.run(asyncio.wait_for(from_place(line), 60))[0]) == [2, 3]
    again, records = asyncio.run(asyncio.wait_for(from_place(line + 5), 60))
    assert again.startswith("event: again")
    assert steps_of(records) == [1, 2, 3]


def test_weights_are_left_only_while_someone_looks(lab):
    id = begin(lab, epochs=ENDLESS)
    order_at(lab, id, 1)
    published = lab.jobs.published(id)
    time.sleep(0.5)
    assert not published.exists()
    until = time.monotonic() + 180
    while (left := moment.read(published)) is None:
        assert time.monotonic() < until
        if looked_before(lab, id, worker.WATCHED_FOR + 1):  # that one is over: it was not seen
            lab.jobs.watch(id)
        time.sleep(0.05)
    frame = lab.frame(id)
    assert frame["window"] == 8
    time.sleep(0.5)
    order_at(lab, id, left[1].step + 300)  # of which none was asked for
    assert moment.read(published)[1] == left[1]
    lab.jobs.tell(id, "stop")
    wait(lab, id, "stopped")


def looked_before(lab, id, seconds):
    """Whether the last look at a training is so long ago, or there was none."""
    watched = lab.shelf.jobs / id / "watched"
    return not watched.exists() or time.time() - watched.stat().st_mtime > seconds


async def fifty_listen(home, cookie, id):
    """The first thing that each of fifty clients hears, all of them listening at once."""
    everyone, here = asyncio.Event(), []

    async def listen(client):
        async with client.stream("GET", f"/api/runs/{id}/stream") as answer:
            first = await anext(answer.aiter_lines())
            here.append(first)
            if len(here) == 50:
                everyone.set()
            await everyone.wait()

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=home, cookies=cookie, limits=limits, timeout=120
    ) as client:
        await asyncio.gather(*(listen(client) for _ in range(50)))
    return here


@pytest.mark.parametrize("asked", ["stream", "write"])
def test_ctrl_c_with_a_page_open_ends_what_it_hears_and_shows_no_traceback(
    tmp_path, tiny_run, asked
):
    root = tmp_path / "runs"
    shutil.copytree(tiny_run("--model", "gru", "--window", "12"), root / "book")
    command = [sys.executable, "-m", "elman", "lab", str(root), "--no-browser"]
    how = {"method": "GET"}
    if asked == "write":
        how = {"method": "POST", "json": {"length": writing.LONGEST}}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            home = address.split("/?")[0]
            with httpx.Client(base_url=home, headers={"origin": home}, timeout=60) as client:
                client.get(address, follow_redirects=True)
                with client.stream(url=f"/api/runs/book/{asked}", **how) as heard:
                    assert heard.status_code == 200
                    told = heard.iter_text()
                    next(told)
                    server.send_signal(signal.SIGINT)
                    list(told)  # to its end, which comes by itself: nothing is cut off
            _, said = server.communicate(timeout=60)
        finally:
            server.kill()
    assert said == "Ctrl-C ends the page; trainings go on\nerror: interrupted\n"
    assert server.returncode == 130


def test_a_server_that_is_killed_hurts_no_training(tmp_path):
    """A real server, a real address, SIGKILL; the training ends, and the next server shows it."""
    root = tmp_path / "runs"
    command = [sys.executable, "-m", "elman", "lab", str(root), "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        home = address.split("/?")[0]
        with httpx.Client(base_url=home, headers={"origin": home}, timeout=120) as client:
            assert client.get("/api/runs").status_code == 401
            assert client.get(address, follow_redirects=True).status_code == 200
            text = client.post("/api/texts", content=TEXT.encode()).json()["text"]
            options = TINY | {"epochs": 30}
            id = client.post("/api/runs", json={"text": text, "options": options}).json()["id"]
            until = time.monotonic() + 180
            while not (root / id / "metrics.jsonl").exists():
                assert time.monotonic() < until
                time.sleep(0.05)
            cookie = dict(client.cookies)
        heard = asyncio.run(fifty_listen(home, cookie, id))
        assert len(heard) == 50
        assert all(line.startswith("event: status") for line in heard)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    later = Lab(root, threads=1)
    try:
        assert wait(later, id, "ended", "failed")["state"] == "ended"
        updates = [r for r in Run.open(root / id).records() if isinstance(r, Update)]
        assert updates[-1].progress == 1
    finally:
        later.jobs.close()
        later.pool.shutdown()
