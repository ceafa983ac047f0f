"""The book as Jupyter notebooks: the same pages, the same blocks, with what they showed."""

import re
import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from publishing import execute
from publishing.execute import Output
from publishing.pages import BLOCK, DOCS, ROOT, book_pages

FOLDER = ROOT / "build" / "notebooks"
SETUP = "%matplotlib inline"
"""Before anything is drawn: the first figure that a cell returns is shown, too."""
_LINK = re.compile(r"\[(?P<words>[^\]]+)\]\((?P<to>[^)\s]+?)\.md(?P<anchor>#[^)]*)?\)")


def notebook(page: str, outputs: list[list[Output]]) -> nbformat.NotebookNode:
    """A page as cells: prose as Markdown, blocks as code with their outputs.

    `outputs` has one list for each block that runs, or is empty for a page that was not executed.
    """
    made, before, cells = iter(outputs), 0, [new_code_cell(SETUP)]
    for found in BLOCK.finditer(page):
        if "no-run" in found["options"].split():
            continue  # stays in the prose, as a fence
        cells += _prose(page[before : found.start()])
        shown = [_output(item) for item in next(made, [])]
        cells.append(new_code_cell(found["code"].rstrip(), outputs=shown))
        before = found.end()
    cells += _prose(page[before:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # not drawn: the same page gives the same file
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def _prose(text: str) -> list[nbformat.NotebookNode]:
    linked = _LINK.sub(_to_notebook, text.strip())
    return [new_markdown_cell(linked)] if linked else []


def _to_notebook(found: re.Match[str]) -> str:
    """Other chapters are notebooks beside this one; other pages are named, not linked."""
    chapter = "/" not in found["to"]
    return f"[{found['words']}]({found['to']}.ipynb)" if chapter else found["words"]


def _output(output: Output) -> nbformat.NotebookNode:
    if output.kind == "text":
        return new_output("stream", text=output.data)
    data = {"image/svg+xml": output.data, "text/plain": output.words}
    return new_output("display_data", data=data)


def write(folder: Path = FOLDER) -> list[Path]:
    """Every page of the book as a notebook; its languages in folders of their own.

    Executed, but for pages whose text is not on this machine: Jupyter will look for it.
    """
    pages = book_pages()
    outputs = execute.executed(execute.can_run(pages))
    written = []
    for page in pages:
        where = folder / page.relative_to(DOCS).with_suffix(".ipynb")
        where.parent.mkdir(parents=True, exist_ok=True)
        made = notebook(page.read_text(encoding="utf-8"), outputs.get(page, []))
        nbformat.validate(made)
        nbformat.write(made, where)
        written.append(where)
    return written


if __name__ == "__main__":
    sys.stdout.write("".join(f"{path.relative_to(ROOT)}\n" for path in write()))
