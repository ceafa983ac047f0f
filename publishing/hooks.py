"""What MkDocs calls while it builds the site: run the book, fill in tables, render equations.

`python -m mkdocs build` finds this package; the bare command does not have it on its path.
"""

import hashlib
import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from publishing import api, execute, languages, maths, results, search
from publishing.execute import Output
from publishing.pages import BLOCK, DOCS, ROOT, book_pages, is_book

_shown: dict[str, list[list[Output]]] = {}
_unexecuted: set[str] = set()
_UNEXECUTED = {
    "en": '!!! warning "Not executed"\n    The Time Machine was not on the machine that built this '
    "page (`ELMAN_DATA`), so that it has no outputs.\n\n",
    "zh": '!!! warning "未执行"\n    生成本页的机器上没有《时间机器》（`ELMAN_DATA`），'
    "所以本页没有输出。\n\n",
}


def on_startup(**_: Any) -> None:
    """Hear warnings, however quiet a build was asked to be: `--strict` counts those it hears.

    With `--quiet` alone a broken link passed.
    """
    heard = logging.getLogger("mkdocs")
    heard.setLevel(min(heard.getEffectiveLevel(), logging.WARNING))


def on_pre_build(config: MkDocsConfig) -> None:
    """Refuse an undocumented API; execute what the book's pages have that has changed."""
    if undocumented := api.undocumented():
        raise PluginError("these need a docstring:\n  " + "\n  ".join(undocumented))
    pages = book_pages()
    can_run = execute.can_run(pages)
    _unexecuted.update(p.relative_to(DOCS).as_posix() for p in pages if p not in can_run)
    try:
        outputs = execute.executed(can_run)
    except execute.PageFailed as error:
        raise PluginError(str(error)) from error
    _shown.update((path.relative_to(DOCS).as_posix(), shown) for path, shown in outputs.items())


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every figure of the book as a file."""
    figures = {
        figure_name(output): output.data
        for page in _shown.values() for block in page for output in block
        if output.kind == "figure"
    }  # fmt: skip
    for name, svg in sorted(figures.items()):
        files.append(File.generated(config, f"book/figures/{name}", content=svg))
    return files


def figure_name(output: Output) -> str:
    """A figure is named after its contents: the same figure of two pages is one file."""
    return f"{hashlib.sha256(output.data.encode()).hexdigest()[:16]}.svg"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put tables of results where a page asks for them, and below each block what it showed."""
    source = page.file.src_uri
    markdown = _OUTSIDE.sub(_named, results.fill(markdown))
    if not is_book(source):
        return BLOCK.sub(_fence, markdown)
    if source in _unexecuted:
        return _UNEXECUTED[languages.language(source)] + BLOCK.sub(_fence, markdown)
    outputs = iter(_shown[source])
    to_figures = ("../" * source.count("/")) + "book/figures/"

    def with_outputs(found: Any) -> str:
        if "no-run" in found["options"].split():
            return _fence(found)
        return "\n\n".join([_fence(found), *(_as_markdown(o, to_figures) for o in next(outputs))])

    return BLOCK.sub(with_outputs, markdown)


def _fence(found: re.Match[str]) -> str:
    """A block without our options, which Markdown would not take for a fence."""
    return f"```python\n{found['code']}```"


_OUTSIDE = re.compile(r"\[(?P<words>[^\]]+)\]\((?P<path>(?:\.\./)+[\w./-]+)\)")


def _named(found: re.Match[str]) -> str:
    """A link to a file of the repository, which the site does not have, as the file's name."""
    inside = found["path"].lstrip("./")
    is_elsewhere = not (DOCS / inside).exists() and (ROOT / inside).exists()
    return f"{found['words']} (`{inside}`)" if is_elsewhere else found[0]


def _as_markdown(output: Output, to_figures: str) -> str:
    if output.kind == "figure":
        words = output.words.replace("[", "(").replace("]", ")").replace("$", "")
        drawn = f"![{words}]({to_figures}{figure_name(output)}){{ .drawn }}"
        return f'<div class="figure" markdown>\n\n{drawn}\n\n</div>'
    return f"```{{ .text .shown }}\n{output.data.rstrip()}\n```"


def on_page_content(html: str, **_: Any) -> str:
    """Equations become MathML, which browsers draw by themselves."""
    return maths.render(html)


def on_page_context(context: Any, page: Page, config: MkDocsConfig, **_: Any) -> Any:
    """Frame a page in its own language, beside a switch to the same page in the other."""
    source = page.file.src_uri
    config.theme["language"] = languages.language(source)
    config.extra["alternate"] = languages.alternates(source)
    return context


_ALTERNATE = re.compile(r'\s*<link rel="alternate"[^>]*>')
_FETCHED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*>"""
                      r"""|<link\b[^>]*\bhref=["']?(?:https?:)?//[^>]*>""")  # fmt: skip


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Refuse a page that would fetch something from a network when it is read.

    For each alternate the theme's script would look for a sitemap, which a folder does not have.
    """
    output = _ALTERNATE.sub("", output)
    if found := _FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} would fetch {found[0]}")
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """Make the index of the search ready for Chinese, and for a reader without a server."""
    search.prepare(Path(config.site_dir) / "search")
