"""Every Python block of README.md and docs/ runs, page by page, and prints what it says.

The pages of the book are executed when the site is built, and left to that. The blocks of a page
share one namespace and run in order in an empty folder. A block written as a session (`>>>`) is
checked like a doctest. A block opened with "```python no-run" is left alone.
"""

import doctest
from typing import Any

import pytest

from publishing.pages import DOCS, ROOT, Block, blocks, book_pages

PAGES = [ROOT / "README.md", *(p for p in sorted(DOCS.glob("**/*.md")) if p not in book_pages())]


def run(block: Block, page: str, namespace: dict[str, Any]) -> None:
    if block.code.lstrip().startswith(">>>"):
        session = doctest.DocTestParser().get_doctest(
            block.code, namespace, page, page, block.line - 1
        )
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        said: list[str] = []
        outcome = runner.run(session, out=said.append, clear_globs=False)
        assert outcome.failed == 0, "".join(said)
        namespace.update(session.globs)
    else:  # blank lines in front, so that a traceback points into the page
        exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)


@pytest.mark.usefixtures("hastily")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page.read_text(encoding="utf-8")):
        run(block, str(page), namespace)


def test_blocks_are_found_run_checked_and_left_alone():
    page = (
        "# a\n```python\nx = 1\n```\n```python no-run\nx = 1 / 0\n```\n```python\n>>> x\n1\n```\n"
    )
    found = blocks(page)
    assert found == [Block(3, "x = 1\n"), Block(9, ">>> x\n1\n")]
    namespace: dict[str, Any] = {}
    for block in found:
        run(block, "page", namespace)
    with pytest.raises(AssertionError, match="Expected"):
        run(Block(1, ">>> x\n2\n"), "page", namespace)
    with pytest.raises(ZeroDivisionError):
        run(Block(1, "x / 0\n"), "page", namespace)
