"""The lab's page in a real browser: each thing one can do there, beside the library's own numbers.

Playwright drives Debian's chromium (`apt-get install chromium`, `pip install playwright`); without
either the tests skip. ELMAN_SHOTS=FOLDER keeps pictures of the views, for the documentation.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
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


@pytest.fixture(scope="module")
def address(root):
    command = [sys.executable, "-m", "elman", "lab", str(root), "--no-browser", "--at-once", "2"]
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
    assert not [p for p in problems if "404" not in p and "400" not in p], problems


def number_at(page, key):
    text = page.locator(f"[data-key={key}] b").inner_text()
    return float(re.sub(r"[^0-9.e-]", "", text.replace(",", "")))


def until(page, expression, arg=None):
    """Wait for something to be true; playwright's own way of it is what our policy forbids."""
    last = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(expression, arg):
        assert time.monotonic() < last, expression
        page.wait_for_timeout(50)


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
    page.set_viewport_size({"width": 390, "height": 844})
    for view in ("train", "microscope", "inside", "write"):
        visit(page, "book", view)
        page.wait_for_selector("h1")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390, view


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
