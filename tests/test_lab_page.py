"""The lab's page in a real browser: each thing one can do there, beside the library's own numbers.

Playwright drives Debian's chromium (`apt-get install chromium`, `pip install playwright`); without
either the tests skip. ELMAN_SHOTS=FOLDER keeps pictures of the views, for the documentation.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="elman[lab] is not installed")
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("there is no chromium here", allow_module_level=True)

import elman as library  # noqa: E402
from elman.cli import run as run_command  # noqa: E402
from elman.runs import Run, options_of  # noqa: E402
from elman.training import Change, Update  # noqa: E402

TEXT = "the time traveller said: “it is all true” (or nearly so).\n" * 60
HAS_BEGUN = "/[1-9]/.test(document.querySelector('[data-key=step] b')?.textContent)"
PATIENCE = 120_000
"""Milliseconds: CI is busy."""
REFUSALS = ("400", "404", "413")
"""Of what the browser complains about, answers in words."""
MARKS = {
    "train": "#loss canvas",
    "microscope": "[data-key=cut]",
    "inside": "#coloured span",
    "write": "#write",
}
"""What is there once a view has something to show."""


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny_run):
    folder = tmp_path_factory.mktemp("lab") / "runs"
    folder.mkdir()
    shutil.copytree(tiny_run("--model", "gru", "--window", "12"), folder / "book")
    shutil.copytree(tiny_run("--model", "mlp"), folder / "mlp")
    options = ("--model", "gru", "--level", "word", "--carry", "full")
    shutil.copytree(tiny_run(*options), folder / "words")
    command = ["forecast", "sunspots", "--model", "seasonal", "--steps", "6"]
    assert run_command([*command, "--out", str(folder / "sunspots")]) == 0
    return folder


SERVER = """
from elman.__main__ import main
from elman.lab import stream
stream.thinned = list
main()
"""
"""`elman`, but every update is sent: how many there will be is how long the browser takes."""


@pytest.fixture(scope="module")
def address(root):
    command = [sys.executable, "-c", SERVER, "lab", str(root), "--no-browser", "--at-once", "2"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.terminate()
    server.wait()
    server.stdout.close()


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser, address):
    """A fresh window that was let in; whatever it complains about fails the test."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, locale="en")
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE)
    problems = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    opened.goto(address)
    opened.wait_for_selector("#start")
    yield opened
    context.close()
    assert not [p for p in problems if not any(code in p for code in REFUSALS)], problems


def number_at(page, key):
    text = page.locator(f"[data-key={key}] b").inner_text()
    return float(re.sub(r"[^0-9.e-]", "", text.replace(",", "")))


def until(page, expression, arg=None):
    """Wait for something to be true; playwright's own way of it is what our policy forbids."""
    last = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(expression, arg):
        assert time.monotonic() < last, expression
        page.wait_for_timeout(50)


def draw(page):
    """Wait until what has been heard is drawn: 120 ms later at most, with the next frame."""
    page.evaluate("new Promise(done => setTimeout(() => requestAnimationFrame(done), 150))")


def visit(page, run, view):
    page.evaluate("hash => { location.hash = hash }", f"run={run}&view={view}")


def test_the_token_leaves_the_address_and_a_window_without_it_stays_outside(page, browser, address):
    assert "token" not in page.url
    stranger = browser.new_context().new_page()
    assert stranger.goto(address.split("?")[0]).status == 401
    stranger.context.close()


def test_a_pasted_text_trains_and_is_paused_changed_and_stopped(page, root):
    page.fill("textarea", TEXT)
    page.fill("label:has-text('hidden units') input", "12")
    page.fill("label:has-text('passes') input", "4000")
    page.click("#start")
    until(page, HAS_BEGUN)
    id = re.search(r"run=([\w-]+)", page.url)[1]
    page.wait_for_selector("#loss canvas")
    page.click("#pause")
    page.wait_for_selector("h1 + span:has-text('paused')")
    page.fill("input[name=learning_rate]", "0.003")
    page.fill("input[name=window]", "20")
    page.click("#pause")  # what is heard of that leaves alone what was typed
    page.wait_for_selector("h1 + span:has-text('running')")
    page.click("#pause")
    page.wait_for_selector("h1 + span:has-text('paused')")
    page.wait_for_timeout(300)
    page.click("#apply")
    page.wait_for_selector("text=--learning-rate 0.003")
    page.click("#pause")
    page.wait_for_selector("h1 + span:has-text('running')")
    until(
        page,
        "id => fetch(`/api/runs/${id}`).then(r => r.json()).then(r => r.options.window === 20)",
        arg=id,
    )
    page.click("#stop")
    page.wait_for_selector("h1 + span:has-text('stopped')")
    run = Run.open(root / id)
    records = run.records()
    changes = [r.options for r in records if isinstance(r, Change)]
    assert changes == [{"learning_rate": 0.003, "window": 20}]
    assert options_of(run.config)["window"] == 20
    last = [r for r in records if isinstance(r, Update)][-1]
    until(
        page,
        "step => document.querySelector('[data-key=step] b').textContent === step",
        arg=f"{last.step:,}",
    )
    assert number_at(page, "perplexity") == pytest.approx(last.perplexity, rel=5e-3)
    page.click("details.again summary")
    assert f"elman train --resume {root / id}" in page.locator("details.again").text_content()


def test_the_microscope_shows_what_the_library_measures(page, root):
    visit(page, "book", "microscope")
    page.wait_for_selector("[data-key=cut]")
    frame = page.evaluate("fetch('/api/runs/book/frame').then(r => r.json())")
    text = page.locator(".strip").inner_text().replace("\n", "")
    assert text.replace("␣", " ").replace("↵", "\n") == "".join(frame["tokens"])
    assert number_at(page, "keep90") == frame["keep90"]
    assert number_at(page, "cut") == pytest.approx(100 * frame["cut"], abs=0.51)
    heat = page.locator("#heat")
    box = heat.bounding_box()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 20)
    assert page.locator(".strip span.loss").count() == 1
    assert "nats" in page.locator("[role=status]").last.inner_text()
    heat.focus()
    before = int(page.locator("#cut").input_value())
    page.keyboard.press("ArrowUp")
    assert int(page.locator("#cut").input_value()) == before - 1
    assert number_at(page, "cut") == pytest.approx(100 * (1 - frame["kept"][before - 2]), abs=0.51)
    page.mouse.move(box["x"] + 200, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 50)
    page.mouse.up()
    assert int(page.locator("#cut").input_value()) != before - 1
    page.click("#compare")
    page.wait_for_selector("#carries")
    assert page.locator("#carries tbody tr").count() == 8
    page.click("#measure")
    page.wait_for_selector("text=spectral radius")


def test_the_microscope_of_words_that_nothing_truncates(page, root):
    visit(page, "words", "microscope")
    page.wait_for_selector("[data-key=cut]")
    assert "would be cut off" in page.locator("[data-key=cut]").inner_text()
    assert page.locator("text=Carry full does not cut").is_visible()
    boxes = page.locator(".strip span").evaluate_all(
        "cells => cells.map(c => c.getBoundingClientRect()).map(r => [r.left, r.right, r.top])"
    )
    pairs = [(a, b) for a, b in itertools.pairwise(boxes) if a[2] == b[2]]
    assert all(b[0] - a[1] > 2 for a, b in pairs)  # words do not run together


def test_a_model_that_carries_nothing_has_no_microscope(page):
    visit(page, "mlp", "train")
    page.wait_for_selector("#loss canvas")
    assert page.locator(".tabs a").all_inner_texts() == ["Train", "Inside", "Write"]
    visit(page, "mlp", "microscope")
    page.wait_for_selector("text=carries nothing through time")
    assert page.locator("#heat").count() == 0


def test_a_word_level_training_is_watched_and_told_of_what_cannot_be(page, root):
    page.fill("textarea", TEXT)
    page.select_option("label:has-text('tokens') select", "word")
    page.fill("label:has-text('hidden units') input", "8")
    page.fill("label:has-text('passes') input", "20000")
    page.click("#start")
    until(page, HAS_BEGUN)
    id = re.search(r"run=([\w-]+)", page.url)[1]
    assert options_of(Run.open(root / id).config)["level"] == "word"
    page.wait_for_selector("h1 + span:has-text('running')")
    page.fill("input[name=window]", "50000")
    page.click("#apply")
    page.wait_for_selector("text=not changed:")
    visit(page, id, "microscope")
    until(page, "document.querySelector('#rate')?.textContent.includes('picture')")
    visit(page, id, "train")
    page.wait_for_selector("h1 + span:has-text('running')")
    page.click("#stop")
    page.wait_for_selector("h1 + span:has-text('stopped')")
    page.fill("input[name=epochs]", "20001")
    page.click("text=Apply and go on")
    page.wait_for_selector("h1 + span:has-text('running')")
    page.click("#stop")
    page.wait_for_selector("h1 + span:has-text('stopped')")


def test_inside_colours_by_surprise_and_by_units_and_says_what_comes_next(page, root):
    visit(page, "book", "inside")
    page.wait_for_selector("#coloured span")
    text = "the cat <b>sat</b> on"
    page.fill("textarea", text)
    page.click("#surprise")
    until(page, "text => document.querySelector('#coloured').textContent === text", arg=text)
    trained = library.load(root / "book")
    titles = page.locator("#coloured span").evaluate_all("cells => cells.map(c => c.title)")
    shown = [float(title.split()[1]) for title in titles[1:]]
    assert shown == pytest.approx(trained.score(text).nats.tolist(), rel=6e-3)
    assert page.locator("#coloured b").count() == 0  # markup stays text
    page.locator("#coloured span").nth(3).click()
    page.wait_for_selector("text=Similar places")
    likeliest, p = next(iter(trained.next_token(text[:4]).items()))
    row = page.locator(".columns tr").first.inner_text()
    assert likeliest.strip() in row
    assert f"{100 * p:.0f}" in row or f"{100 * p:.1f}" in row
    page.select_option("select", "pattern")
    page.fill("input.short", "at")
    page.click("#search")
    page.wait_for_selector("text=r =")


def test_writing_streams_and_branches(page, root):
    visit(page, "book", "write")
    page.fill("textarea", "the ")
    page.fill("label:has-text('length') input", "60")
    page.click("#write")
    until(page, "document.querySelector('#write').textContent === 'Write'")
    written = page.locator("#written").inner_text()
    choices = {"length": 60, "temperature": 0.8, "seed": 0}
    assert written == "the " + library.load(root / "book").generate("the ", **choices)
    page.locator("#written span").nth(5).click()
    page.wait_for_selector("text=Instead of")
    page.locator(".choice").nth(1).click()
    page.wait_for_selector("text=Branches")
    assert page.locator("#written").inner_text()[:5] == written[:5]


def test_a_forecasting_run_shows_its_series_and_errors(page):
    page.click("a:has-text('sunspots')")
    page.wait_for_selector("#ahead canvas")
    page.wait_for_selector("#errors canvas")
    assert "elman forecast NEW.csv" in page.locator("details.again").text_content()


def test_bad_input_is_answered_in_words_on_the_page(page):
    page.fill("textarea", "   ")
    page.click("#start")
    page.wait_for_selector("#toast.on")
    assert "no text" in page.locator("#toast").inner_text()
    page.fill("textarea", TEXT)
    page.fill("label:has-text('window') input", "0")
    page.click("#start")
    until(page, "document.querySelector('#toast').textContent.includes('window')")


def test_chinese_dark_and_a_telephone(page):
    page.click("#language")
    assert "训练" in page.locator("#main").inner_text()
    page.click("#language")
    background = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(background)
    page.click("#theme")
    assert page.evaluate(background) != light
    for width in (390, 320, 240):  # 320: a laptop's window at four times its size
        page.set_viewport_size({"width": width, "height": 844})
        page.goto(page.url.split("#")[0] + "#")
        page.wait_for_selector("input[type=file]")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "start"
        for view, mark in MARKS.items():
            visit(page, "book", view)
            page.wait_for_selector(mark)
            draw(page)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, view


def test_every_control_can_be_reached_and_has_a_name(page):
    for view in ("train", "microscope", "inside", "write"):
        visit(page, "book", view)
        page.wait_for_selector("h1")
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, select, textarea")].filter(
                c => !c.textContent.trim() && !c.getAttribute("aria-label") && !c.closest("label")
            ).map(c => c.outerHTML)"""
        )
        assert nameless == []


# ---------------------------------------------------------------------- files that are dropped


def drop(page, *paths):
    """What a hand does: files of this machine are dragged over the page, and let go."""
    session = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(p) for p in paths], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": 400, "y": 300, "data": data})
    session.detach()


def said(page, *words):
    """Wait for what the page says at its foot; it must have all the words."""
    test = "words => words.every(w => document.querySelector('#toast.on')?.textContent.includes(w))"
    until(page, test, list(words))
    page.evaluate("document.querySelector('#toast').classList.remove('on')")


def opened(page):
    """The id of the run that is shown."""
    until(page, "location.hash.includes('run=')")
    return page.evaluate("new URLSearchParams(location.hash.slice(1)).get('run')")


def end(page, *ids):
    """Stop trainings, and wait for that."""
    for id in ids:
        page.evaluate(
            """id => fetch(`/api/runs/${id}/tell`, {method: "POST", body: '{"do": "stop"}'})""", id
        )
    for id in ids:
        has_ended = "id => fetch(`/api/runs/${id}`).then(r => r.json()).then(r => r.state)"
        last = time.monotonic() + 60
        while page.evaluate(has_ended, id) not in ("stopped", "ended", "failed"):
            assert time.monotonic() < last
            page.wait_for_timeout(50)


def test_a_dropped_file_trains_as_the_form_says_and_two_are_two_runs(page, root, tmp_path):
    one, two = tmp_path / "Moby Dick.txt", tmp_path / "红楼梦.txt"
    one.write_text(TEXT, encoding="utf-8")
    two.write_text("满纸荒唐言，一把辛酸泪。都云作者痴，谁解其中味？\n" * 60, encoding="utf-8")
    page.select_option("label:has-text('model') select", "elman")
    page.fill("label:has-text('hidden units') input", "8")
    page.fill("label:has-text('passes') input", "20000")
    drop(page, one, two)
    assert opened(page) == "moby-dick-elman"
    until(page, HAS_BEGUN)
    other = "红楼梦-elman"
    page.wait_for_selector(f".run a:has-text('{other}')")
    assert page.locator("#toast.on").count() == 0
    visit(page, other, "train")
    until(page, HAS_BEGUN)
    end(page, "moby-dick-elman", other)
    assert options_of(Run.open(root / other).config)["hidden_size"] == 8
    assert not page.evaluate("document.body.classList.contains('dropping')")


def test_what_cannot_be_trained_on_is_refused_in_words_when_it_is_dropped(page, tmp_path):
    folder, empty, binary = tmp_path / "folder", tmp_path / "empty.txt", tmp_path / "image.png"
    huge, good = tmp_path / "huge.txt", tmp_path / "good.txt"
    folder.mkdir()
    empty.touch()
    binary.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\xff\xfe" * 100)
    huge.write_bytes(b"a" * ((32 << 20) + 1))
    good.write_text(TEXT, encoding="utf-8")
    for path, words in {
        folder: ["“folder” is a folder"],
        empty: ["there is no text in it"],
        binary: ["not text in UTF-8: byte 0 is 0x89"],
        huge: ["“huge.txt” is too large", "32 MiB", "elman train FILE"],
    }.items():
        drop(page, path)
        said(page, *words)
        assert "run=" not in page.url
    page.fill("label:has-text('hidden units') input", "8")
    drop(page, binary, good)  # one of two
    said(page, "image.png: that is not text")
    assert opened(page) == "good-gru"
    end(page, "good-gru")


def test_a_file_is_chosen_where_nothing_can_be_dropped(page, tmp_path):
    chosen = tmp_path / "chosen.md"
    chosen.write_text(TEXT, encoding="utf-8")
    page.fill("label:has-text('hidden units') input", "8")
    page.set_input_files("input[type=file]", chosen)
    assert opened(page) == "chosen-gru"
    end(page, "chosen-gru")


def test_a_file_of_30_mb_begins_to_train(page, root, tmp_path):
    large = tmp_path / "large.txt"
    large.write_text((TEXT * 10)[:30_000] * 1000, encoding="utf-8")
    page.fill("label:has-text('hidden units') input", "8")
    drop(page, large)
    id = opened(page)
    until(page, HAS_BEGUN)
    end(page, id)
    shutil.rmtree(root / id)


def test_a_text_that_is_dragged_into_the_field_is_not_taken_for_a_file(page):
    page.evaluate(
        """() => {
            const given = new DataTransfer();
            given.setData("text/plain", "some words");
            const event = {bubbles: true, cancelable: true, dataTransfer: given};
            const text = document.querySelector("textarea");
            window.left = text.dispatchEvent(new DragEvent("drop", event));
        }"""
    )
    assert page.evaluate("window.left")  # to the browser, which puts it where it was dropped
    assert page.locator("#toast.on").count() == 0


# ---------------------------------------------------------------------- Chinese


def test_chinese_text_is_trained_coloured_and_written_in_both_languages(page, root):
    text = "话说天下大势，分久必合，合久必分。周末七国分争，并入于秦。\n" * 80
    page.click("#language")
    page.fill("textarea", text)
    page.fill("label:has-text('隐藏单元') input", "16")
    page.fill("label:has-text('遍数') input", "4000")
    page.click("#start")
    until(page, HAS_BEGUN)
    id = opened(page)
    assert id == "话说天下大势-分久必合-合久必分-gru"
    page.wait_for_selector("h1 + span:has-text('训练中')")
    until(page, "/[一-龥]{4}/.test(document.querySelector('.sample').textContent)")
    page.click("#stop")
    page.wait_for_selector("h1 + span:has-text('已停止')")
    trained, asked = library.load(root / id), "分久必合，合久必分"
    for language in ("zh", "en"):
        visit(page, id, "inside")
        page.fill("textarea", asked)
        page.click("#surprise")
        until(page, "t => document.querySelector('#coloured').textContent === t", asked)
        titles = page.locator("#coloured span").evaluate_all("cells => cells.map(c => c.title)")
        assert len(titles) == len(asked)
        assert titles[1].split()[0] == {"zh": "奈特", "en": "nats"}[language]
        shown = [float(title.split()[1]) for title in titles[1:]]
        assert shown == pytest.approx(trained.score(asked).nats.tolist(), rel=6e-3)
        visit(page, id, "write")
        page.fill("textarea", "天下")
        page.fill("input[type=number] >> nth=0", "40")
        page.click("#write")
        stops = {"zh": "写作", "en": "Write"}[language]
        until(page, "w => document.querySelector('#write').textContent === w", stops)
        written = trained.generate("天下", length=40, temperature=0.8, seed=0)
        assert page.locator("#written").text_content() == "天下" + written
        visit(page, id, "microscope")
        page.wait_for_selector("[data-key=cut]")
        assert "天" in page.locator(".strip").inner_text()
        page.click("#language")


# ---------------------------------------------------------------------- impatient hands


class Held:
    """The first question to an address is held back, whatever is asked after it."""

    def __init__(self, page, address):
        self.routes, self.first = [], True
        page.route(address, self._asked)

    def _asked(self, route):
        if self.first:
            self.first = False
            self.routes.append(route)
        else:
            route.continue_()

    def let_go(self, page):
        self.routes.pop().continue_()
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(300)


def test_a_text_without_a_single_space_begins_to_train_under_a_short_name(page, root):
    page.fill("textarea", "abcdefghij" * 40_000)
    page.fill("label:has-text('hidden units') input", "")  # as the form chooses
    page.click("#start")
    id = opened(page)
    until(page, HAS_BEGUN)
    end(page, id)
    assert id == ("abcdefghij" * 40)[:40]
    assert options_of(Run.open(root / id).config)["hidden_size"] == 128


def test_what_was_typed_and_written_survives_another_language_and_another_light(page):
    page.select_option("label:has-text('or a corpus') select", index=1)
    page.fill("textarea", TEXT)
    page.fill("label:has-text('hidden units') input", "17")
    for button in ("#theme", "#language", "#language"):
        page.click(button)
        assert page.locator("textarea").input_value() == TEXT
    assert page.locator("label:has-text('hidden units') input").input_value() == "17"
    assert page.locator("label:has-text('or a corpus') select").input_value() == ""  # typed after
    visit(page, "book", "write")
    page.fill("textarea", "the ")
    page.fill("label:has-text('length') input", "3000")
    page.click("#write")
    until(page, "document.querySelectorAll('#written span').length > 50")
    before = page.locator("#written").text_content()
    page.click("#language")
    page.wait_for_selector("#write:has-text('停止')")
    n = len(before)
    until(page, "n => document.querySelector('#written').textContent.length > n + 50", n)
    assert page.locator("#written").text_content()[:n] == before
    page.click("#write")
    visit(page, "book", "train")
    page.wait_for_selector(MARKS["train"])
    visit(page, "book", "write")
    page.wait_for_selector("#write:has-text('写作')")  # it does not go on by itself
    assert page.locator("#written").text_content()[:n] == before
    page.click("#language")


def test_an_answer_that_comes_late_does_not_replace_a_newer_one(page):
    visit(page, "book", "inside")
    page.wait_for_selector("#coloured span")
    held = Held(page, "**/inside/surprise")
    for text in ("the first", "and another"):
        page.fill("textarea", text)
        page.click("#surprise")
    until(page, "document.querySelector('#coloured').textContent === 'and another'")
    held.let_go(page)
    assert page.locator("#coloured").text_content() == "and another"
    held = Held(page, "**/inside/next")
    for i in (2, 5):
        page.locator("#coloured span").nth(i).click()
    page.wait_for_selector("text=Similar places")
    held.let_go(page)
    assert "…n" in page.locator("h3").first.inner_text()
    held = Held(page, "**/inside/unit")
    page.click("#unit")
    visit(page, "book", "train")
    page.wait_for_selector(MARKS["train"])
    held.let_go(page)
    assert "unit" not in page.url  # of a view that one has left


def test_a_text_that_is_too_long_for_the_page_is_said_to_be(page):
    visit(page, "book", "inside")
    page.wait_for_selector("#coloured span")
    page.evaluate("document.querySelector('textarea').value = 'the '.repeat(1_500_000)")
    page.click("#surprise")
    said(page, "were sent")
    page.fill("textarea", "the " * 6000)
    page.click("#surprise")
    said(page, "24,000 characters are too many")


def test_alternatives_are_those_of_the_text_that_was_written(page, root):
    visit(page, "book", "write")
    page.fill("textarea", "the ")
    page.fill("label:has-text('length') input", "60")
    page.click("#write")
    until(page, "document.querySelector('#write').textContent === 'Write'")
    written = page.locator("#written").text_content()
    page.fill("textarea", "something else")  # not yet written with
    page.locator("#written span").nth(5).click()
    page.wait_for_selector(".choice")
    likeliest, _ = next(iter(library.load(root / "book").next_token(written[:8]).items()))
    shown = page.locator(".choice").first.text_content()
    assert shown.startswith(likeliest.replace(" ", "␣"))
    page.locator(".choice").nth(1).click()
    page.wait_for_selector("text=Branches")
    until(page, "document.querySelector('#write').textContent === 'Write'")
    assert page.locator("#written").text_content()[:8] == written[:8]
    page.click("#write")
    assert page.locator(".choice").count() == 0  # they were another text's
    assert page.locator("text=Branches").count() == 0
    until(page, "document.querySelector('#write').textContent === 'Write'")
    assert page.locator("#written").text_content().startswith("something else")


def test_what_has_the_focus_in_the_list_of_runs_keeps_it(page):
    page.wait_for_selector(".run a:has-text('book')")
    page.focus(".run a:has-text('book')")
    kept = page.locator(".run a:has-text('book')").element_handle()
    page.wait_for_timeout(2500)  # it is asked for every 1.5 s
    assert kept.evaluate("link => link.isConnected && document.activeElement === link")
    page.keyboard.press("Enter")
    page.wait_for_selector(MARKS["train"])


def test_skipping_to_the_view_stays_in_the_view(page):
    visit(page, "book", "microscope")
    page.wait_for_selector(MARKS["microscope"])
    url = page.url
    page.focus(".skip")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.url == url
    page.wait_for_timeout(300)
    assert page.locator("#heat").count() == 1


def test_a_window_that_is_longer_than_the_picture_is_shown_as_it_is(page, root, tiny_run):
    shutil.copytree(tiny_run("--model", "gru", "--window", "150"), root / "long")
    visit(page, "long", "microscope")
    page.wait_for_selector("[data-key=cut]")
    frame = page.evaluate("fetch('/api/runs/long/frame').then(r => r.json())")
    assert page.locator("#cut").input_value() == "150"
    assert number_at(page, "cut") == pytest.approx(100 * frame["cut"], abs=0.51)
    assert page.locator("text=Train on with this window").is_disabled()
    assert "cut=" not in page.url
    shutil.rmtree(root / "long")


def test_letters_that_run_from_the_right_do_so_in_fields_and_in_colours(page):
    visit(page, "book", "inside")
    page.wait_for_selector("#coloured span")
    end_of = """() => {
        const [a, b] = [...document.querySelectorAll("#coloured span")].slice(-2);
        return [a, b].map(s => s.getBoundingClientRect().left);
    }"""
    for text, way in (("(שלום עולם).", "rtl"), ("(hello world).", "ltr")):
        page.fill("textarea", text)
        assert page.locator("textarea").get_attribute("dir") == way
        page.click("#surprise")
        until(page, "text => document.querySelector('#coloured').textContent === text", arg=text)
        bracket, stop = page.evaluate(end_of)
        assert (stop < bracket) == (way == "rtl")  # a full stop stands where the sentence ends


def test_a_line_of_five_megabytes_can_be_pasted(page):
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})  # whoever else computes
    page.evaluate(
        """() => {
            const text = document.querySelector("textarea");
            text.value = "the ".repeat(1_250_000);
            text.dispatchEvent(new Event("input"));
            return text.scrollHeight;
        }"""
    )
    worked = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
    assert 0 < worked["TaskDuration"] < 40  # seconds; it takes one


def test_what_cannot_be_seen_has_a_sign(page):
    show = "text => import('/dom.js').then(m => m.visible(text))"
    assert page.evaluate(show, "a b\r\n\t") == "a␣b␍↵⇥"
    assert page.evaluate(show, "\u200d\ufe0f\u00a0\u200f\0") == "◌◌◌◌◌"
    for letters in ("é", "e\u0301", "👩", "שלום", "分"):
        assert page.evaluate(show, letters) == letters


# ---------------------------------------------------------------------- other hands


@pytest.fixture
def elsewhere(root, tmp_path):
    """`elman train` in another process, under the same root."""
    source = tmp_path / "book.txt"
    source.write_text(TEXT * 10, encoding="utf-8")
    command = [sys.executable, "-m", "elman", "train", str(source), "--out", str(root / "other")]
    command += ["--hidden-size", "16", "--epochs", "100000", "--checkpoint-seconds", "1"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([*command, "--threads", "1"], stdout=log, stderr=log)
    yield process
    process.kill()
    process.wait()
    shutil.rmtree(root / "other", ignore_errors=True)


def test_a_run_that_another_process_trains_is_watched_and_left_alone(page, root, elsewhere):
    page.wait_for_selector(".run a:has-text('other')")
    page.click(".run a:has-text('other')")
    until(page, HAS_BEGUN)
    page.wait_for_selector("h1 + span:has-text('elsewhere')")
    before = number_at(page, "step")
    until(page, "n => +document.querySelector('#loss').dataset.updates > n", before + 5)
    assert f"Process {elsewhere.pid} trains it" in page.locator("[role=status]").first.inner_text()
    for button in ("#pause", "#stop", "#apply"):
        assert page.locator(button).is_disabled()
    refusal = page.evaluate(
        """() => fetch("/api/runs/other/tell", {method: "POST", body: '{"do": "stop"}'})
            .then(r => r.json()).then(r => r.error)"""
    )
    assert f"trained by process {elsewhere.pid}" in refusal
    visit(page, "other", "microscope")
    page.wait_for_selector("text=Another process trains this run")
    step = number_at(page, "step")
    until(
        page,
        "n => +document.querySelector('[data-key=step] b').textContent.replace(',', '') > n",
        step,
    )
    visit(page, "other", "train")
    page.wait_for_selector("h1 + span:has-text('elsewhere')")
    elsewhere.kill()
    page.wait_for_selector("text=The process that trained it is gone")
    page.wait_for_selector("h1 + span:has-text('stopped')")
    page.click("#pause")  # it goes on here
    page.wait_for_selector("h1 + span:has-text('running')")
    page.click("#stop")
    page.wait_for_selector("h1 + span:has-text('stopped')")


def test_a_folder_that_is_renamed_or_deleted_while_it_is_open_is_said_to_be_gone(page, root):
    for view, mark in MARKS.items():
        id = f"here-{view}"
        shutil.copytree(root / "book", root / id)
        visit(page, id, view)
        page.wait_for_selector(mark)
        if view == "train":
            (root / id).rename(root / "there")
            page.wait_for_selector("#gone")
            (root / "there").rename(root / id)
            page.wait_for_selector(mark)
        shutil.rmtree(root / id)
        page.wait_for_selector("#gone:has-text('moved, renamed or deleted')")
        assert page.locator("#toast.on").count() == 0
        assert page.locator(f".run a:has-text('{id}')").count() == 0


def long_training(page):
    """Train on until it is stopped; its id."""
    page.fill("textarea", TEXT)
    page.fill("label:has-text('hidden units') input", "64")
    page.fill("label:has-text('passes') input", "20000")
    page.click("#start")
    until(page, HAS_BEGUN)
    return opened(page)


class Cable:
    """Between the browser, which says [::1], and the server on 127.0.0.1: it can be cut."""

    def __init__(self, port):
        self.port, self.whole, self.ends, self.threads = port, True, [], []
        self.listening = socket.create_server(("::1", port), family=socket.AF_INET6)
        self._start(self._accept)

    def _start(self, work, *args):
        self.threads.append(threading.Thread(target=work, args=args, daemon=True))
        self.threads[-1].start()

    def _accept(self):
        while True:
            try:
                near, _ = self.listening.accept()
            except OSError:  # closed
                return
            if not self.whole:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self.port))
            self.ends += [near, far]
            for pair in ((near, far), (far, near)):
                self._start(self._copy, *pair)

    def _copy(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self):
        self.whole = False
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        """Wait for every thread, then close what it read: a collector that finds it complains."""
        with contextlib.suppress(OSError):  # some systems refuse it of what only listens
            self.listening.shutdown(socket.SHUT_RDWR)  # else accept() sleeps through the close
        self.listening.close()
        self.threads[0].join(PATIENCE / 1000)  # from here on nothing is added
        self.cut()
        for thread in self.threads:
            thread.join(PATIENCE / 1000)
            assert not thread.is_alive()
        for end in self.ends:
            end.close()


@pytest.fixture
def cable(address):
    port = int(re.search(r":(\d+)/", address)[1])
    try:
        made = Cable(port)
    except OSError as problem:
        pytest.skip(f"this machine has no [::1]: {problem}")
    yield made
    made.close()


def test_a_lid_that_was_closed_leaves_no_gap_in_the_curve(browser, address, root, cable):
    context = browser.new_context(viewport={"width": 1440, "height": 900}, locale="en")
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(address.replace("127.0.0.1", "[::1]"))
    page.wait_for_selector("#start")
    id = long_training(page)
    page.wait_for_selector("h1 + span:has-text('running')")
    cable.cut()
    page.wait_for_selector("#toast.on:has-text('lost its server')")
    draw(page)
    at = page.locator("#loss").get_attribute("data-updates")
    page.wait_for_timeout(1500)
    assert page.locator("#loss").get_attribute("data-updates") == at  # nothing comes through
    visit(page, id, "microscope")
    page.wait_for_selector("p:has-text('lost its server')")
    visit(page, id, "train")
    cable.whole = True
    until(page, "n => +document.querySelector('#loss').dataset.updates > n", int(at))
    page.wait_for_selector("#toast:not(.on)", state="attached")
    cable.cut()  # this time it is not the page that asks for all of it, but the stream that goes on
    page.wait_for_selector("#toast.on:has-text('lost its server')")
    cable.whole = True
    page.wait_for_selector("#toast:not(.on)", state="attached")
    page.click("#stop")
    page.wait_for_selector("h1 + span:has-text('stopped')")
    updates = [r for r in Run.open(root / id).records() if isinstance(r, Update)]
    assert int(at) < len(updates)
    until(page, "n => +document.querySelector('#loss').dataset.updates === n", len(updates))
    context.close()


def test_a_tab_that_nobody_sees_lets_go_and_goes_on_where_it_was(page, root):
    id = long_training(page)
    hide = """hidden => {
        Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    draw(page)
    at = page.locator("#loss").get_attribute("data-updates")
    page.wait_for_timeout(800)
    assert page.locator("#loss").get_attribute("data-updates") == at
    visit(page, id, "microscope")
    page.wait_for_selector("[data-key=step]")
    page.wait_for_timeout(300)
    step = number_at(page, "step")
    page.wait_for_timeout(800)
    assert number_at(page, "step") == step
    page.evaluate(hide, False)
    until(
        page,
        "n => +document.querySelector('[data-key=step] b').textContent.replace(',', '') > n",
        step,
    )
    visit(page, id, "train")
    end(page, id)
    updates = [r for r in Run.open(root / id).records() if isinstance(r, Update)]
    until(page, "n => +document.querySelector('#loss').dataset.updates === n", len(updates))


def test_two_tabs_change_the_learning_rate_at_once_and_both_show_what_came_of_it(page, root):
    id = long_training(page)
    other = page.context.new_page()
    other.set_default_timeout(PATIENCE)
    other.goto(page.url)
    other.wait_for_selector("h1 + span:has-text('running')")
    for tab, rate in ((page, "0.004"), (other, "0.002")):
        until(tab, "document.querySelector('input[name=learning_rate]').value !== ''")
        tab.fill("input[name=learning_rate]", rate)
    ask = "document.querySelector('#apply').click()"
    page.evaluate(ask)
    other.evaluate(ask)
    for tab in (page, other):
        tab.wait_for_selector("text=changed:")
        tab.focus("#apply")  # a field that someone types in is left alone
    last = time.monotonic() + 60
    while len(rates := _rates(root / id)) < 2:
        assert time.monotonic() < last
        page.wait_for_timeout(50)
    assert sorted(rates) == [0.002, 0.004]
    for tab in (page, other):
        shows = "v => document.querySelector('input[name=learning_rate]').value === v"
        until(tab, shows, str(rates[-1]))
    end(page, id)
    assert options_of(Run.open(root / id).config)["learning_rate"] == rates[-1]
    other.close()


def _rates(path):
    changes = [r for r in Run.open(path).records() if isinstance(r, Change)]
    return [c.options["learning_rate"] for c in changes]


# ---------------------------------------------------------------------- where one is


def test_back_forward_and_reload_lead_to_the_same_place_in_every_view(page):
    views, marks = list(MARKS), MARKS
    page.click(".run a:has-text('book')")
    for view in views:
        page.click(f".tabs a >> nth={views.index(view)}")
        page.wait_for_selector(marks[view])
    page.evaluate("document.querySelector('#top-k').value = 7")
    page.dispatch_event("#top-k", "change")
    page.fill("label:has-text('seed') input", "5")
    page.press("label:has-text('seed') input", "Enter")
    page.reload()
    page.wait_for_selector(marks["write"])
    assert page.locator("#top-k").input_value() == "7"
    assert page.locator("label:has-text('seed') input").input_value() == "5"
    for view in reversed(views[:3]):
        page.go_back()
        page.wait_for_selector(marks[view])
        assert page.locator(".tabs a[aria-current]").inner_text().lower() == view
        page.reload()
        page.wait_for_selector(marks[view])
    page.go_forward()
    page.wait_for_selector(marks["microscope"])
    page.focus("#heat")
    page.keyboard.press("ArrowUp")
    cut = page.locator("#cut").input_value()
    page.reload()
    page.wait_for_selector(marks["microscope"])
    assert page.locator("#cut").input_value() == cut
    page.go_forward()
    page.wait_for_selector(marks["inside"])
    page.fill("label:has-text('Unit') input", "3")
    page.click("#unit")
    page.wait_for_selector("[role=status]:has-text('Unit 3')")
    page.reload()
    page.wait_for_selector("[role=status]:has-text('Unit 3')")
    page.go_forward()
    page.wait_for_selector(marks["write"])
    assert page.locator("#top-k").input_value() == "7"


COVERED = """controls => controls.filter(c => c.checkVisibility() && !c.disabled).map(c => {
    c.scrollIntoView({block: "center"});
    const box = c.getBoundingClientRect(), label = c.closest("label");
    const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
    const hit = document.elementFromPoint(x, y);
    const reached = hit && (c === hit || c.contains(hit) || label?.contains(hit));
    const fits = box.left >= -1 && box.right <= innerWidth + 1;
    return reached && fits && box.height >= 18 ? "" : c.outerHTML.slice(0, 90);
}).filter(Boolean)"""


def test_on_a_telephone_every_control_can_be_reached_with_a_finger(browser, address):
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, locale="en"
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(address)
    page.wait_for_selector("#start")
    controls = "button, input, select, textarea, a[href]:not(.skip), summary"
    assert page.locator(controls).evaluate_all(COVERED) == []
    page.locator(".run a:has-text('book')").tap()
    for view, mark in MARKS.items():
        page.locator(f".tabs a:has-text('{view.title()}')").tap()
        page.wait_for_selector(mark)
        page.wait_for_timeout(300)
        assert page.locator(controls).evaluate_all(COVERED) == [], view
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        if view == "microscope":
            cut = page.locator("#cut").input_value()
            page.locator("#heat").tap(position={"x": 280, "y": 60})
            assert page.locator(".strip span.loss").count() == 1
            assert page.locator("#cut").input_value() == cut  # a finger chooses, the slider moves
    page.locator("#write").tap()
    until(page, "document.querySelectorAll('#written span').length > 20")
    page.locator("#written span").nth(5).tap()
    page.wait_for_selector(".choice")
    assert page.locator(".choice").evaluate_all(COVERED) == []
    context.close()


def ready_for_a_picture(page, view):
    """What a visitor would do first in each view."""
    if view == "microscope":
        page.wait_for_selector("#heat")
        page.click("#compare")
        page.click("#measure")
        page.wait_for_selector("#carries")
        page.wait_for_selector("text=/spectral radius|谱半径/")
        box = page.locator("#heat").bounding_box()
        page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 40)
    elif view == "inside":
        page.wait_for_selector("#coloured span")
        page.locator("#coloured span").nth(60).click()
        page.wait_for_selector("text=/Similar places|相似位置/")
        page.select_option("select", "line")
        page.click("#search")
        page.wait_for_selector("text=r =")
    elif view == "write":
        page.wait_for_timeout(1000)
        page.click("#write")
        until(page, "document.querySelectorAll('#written span').length > 400")
        page.locator("#written span").nth(120).click()
        page.wait_for_selector(".choice")
    page.wait_for_timeout(3000)
    page.evaluate("scrollTo(0, 0)")


@pytest.mark.skipif("ELMAN_SHOTS" not in os.environ, reason="ELMAN_SHOTS names no folder")
def test_pictures_for_the_documentation(browser, address):
    """Of a run here, or of ELMAN_SHOTS_RUN (JSON: its name) in the lab at ELMAN_SHOTS_AT."""
    folder = Path(os.environ["ELMAN_SHOTS"])
    run = json.loads(os.environ.get("ELMAN_SHOTS_RUN", '"book"'))
    sizes = {1440: 900, 390: 844, 3840: 2160}
    wanted = [(w, theme, "en") for w in (1440, 390) for theme in ("light", "dark")]
    for width, theme, language in [*wanted, (3840, "dark", "en"), (1440, "light", "zh-CN")]:
        context = browser.new_context(
            viewport={"width": width, "height": sizes[width]}, color_scheme=theme, locale=language
        )
        shot = context.new_page()
        shot.set_default_timeout(PATIENCE)
        shot.goto(os.environ.get("ELMAN_SHOTS_AT", address))
        shot.wait_for_selector("#start")
        for view in ("train", "microscope", "inside", "write"):
            visit(shot, run, view)
            ready_for_a_picture(shot, view)
            name = f"{view}-{width}-{theme}" + ("" if language == "en" else "-zh")
            shot.screenshot(path=folder / f"{name}.png", full_page=True)
        context.close()
