"""A page of Markdown as prose and Python blocks, in order.

A block opened with "```python no-run" is shown and never executed.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

BLOCK = re.compile(r"^```python *(?P<options>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """Python to execute, with the number of its first line in the page."""

    line: int
    code: str


def blocks(page: str) -> list[Block]:
    """The blocks to run.

    >>> blocks("# a\\n```python\\nx = 1\\n```\\n```python no-run\\n1 / 0\\n```\\n")
    [Block(line=3, code='x = 1\\n')]
    """
    return [
        Block(page.count("\n", 0, found.start("code")) + 1, found["code"])
        for found in BLOCK.finditer(page)
        if "no-run" not in found["options"].split()
    ]


def is_book(path: str) -> bool:
    """Whether a page, named from `docs/`, is executed when the site is built."""
    return path.removeprefix("zh/").startswith("book/")


def book_pages() -> list[Path]:
    """Every page whose blocks the build executes, in either language."""
    return [
        page for page in sorted(DOCS.glob("**/*.md")) if is_book(page.relative_to(DOCS).as_posix())
    ]
