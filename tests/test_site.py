"""The built site in a real browser: nothing fetched, nothing wrong, nothing wider than a phone.

It needs what `make docs` built, and chromium; without them, or with a site older than its pages,
these tests skip and say so.
"""

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from publishing.pages import DOCS, ROOT

sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("there is no chromium here", allow_module_level=True)

SITE = ROOT / "build" / "site"
CHAPTERS = sorted((DOCS / "book").glob("0*.md"))
PAGES = [
    "index.html",
    "cuda.html",
    "equations.html",
    "results.html",
    "concordance.html",
    "reference/gradients.html",
    "zh/concordance.html",
    *(f"{folder}/{chapter.stem}.html" for folder in ("book", "zh/book") for chapter in CHAPTERS),
]
"""Every chapter, and one page of each other kind."""


def _why_not() -> str | None:
    if not (SITE / "search" / "search_index.js").exists():
        return "there is no build/site: make docs"
    sources = [*DOCS.rglob("*"), *(ROOT / "publishing").glob("*.py"), ROOT / "mkdocs.yml"]
    newest = max(path.stat().st_mtime for path in sources if path.is_file())
    older = newest > (SITE / "index.html").stat().st_mtime
    return "build/site is older than its pages: make docs" if older else None


if WHY_NOT := _why_not():
    pytest.skip(WHY_NOT, allow_module_level=True)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    served = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A phone, at night; whatever goes wrong or leaves this machine is an error at the end."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
    opened, wrong = context.new_page(), []

    def keep_inside(route: Any) -> None:
        url = route.request.url
        if url.startswith((address, SITE.as_uri(), "data:", "blob:")):
            route.continue_()
        else:
            wrong.append(f"would fetch {url}")
            route.abort()

    context.route("**/*", keep_inside)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    yield opened
    context.close()
    assert not wrong


def test_pages_of_every_kind_fit_a_phone_at_night_and_fetch_nothing(page, address):
    for name in PAGES:
        page.goto(address + name)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        language = "zh" if name.startswith("zh/") else "en"
        assert page.evaluate("document.documentElement.lang") == language
        assert "```" not in page.inner_text(".md-content"), name
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(map(int, background[4:-1].split(","))) < 60, "not dark"


QUERIES = {
    "perplexity": "6. Perplexity and clipping",
    "train_ch8": "The notes' names",
    "困惑度": "6. 困惑度与梯度裁剪",
    "随机截断": "7. 通过时间反向传播",
}
"""What is looked for, and the page that must come first."""


@pytest.mark.parametrize("served", [True, False], ids=["from a server", "from a folder"])
def test_search_finds_both_languages(served, page, address):
    page.goto((address if served else SITE.as_uri() + "/") + "zh/index.html")
    page.click("label.md-header__button[for=__search]")
    for query, first in QUERIES.items():
        page.fill(".md-search__input", query)
        page.dispatch_event(".md-search__input", "keyup")
        found = page.locator(".md-search-result__item").first
        sync_api.expect(found).to_contain_text("\u200b".join(_words(first)))
        assert page.locator(".md-search-result__item").count() < 55, "every page was found"


def _words(title: str) -> list[str]:
    """A title as the index has it, in pieces between its marks."""
    from publishing.search import MARK, marked

    return marked(title).split(MARK)
