"""How pages become a site and notebooks: what a block shows, equations, tables, notebooks."""

import importlib
import json
import os
import re
import subprocess
import sys

import pytest

from publishing import execute, results
from publishing.execute import Output
from publishing.pages import DOCS, ROOT, Block, blocks, book_pages, is_book

PAGE = """# A page

Words, [the next](02-next.md), [the guide](../guide.md).

```python
x = 20
print("said", x)
x + 1
```

```python no-run
never()
```

```python
import matplotlib.pyplot as plt

figure, axes = plt.subplots()
axes.set_title("a line")
_ = axes.plot([1, 2])
```
"""


def test_a_block_shows_its_prints_its_last_value_and_its_figures():
    first, second = execute.run(PAGE, "page")
    assert first == [Output("text", "said 20\n21\n")]
    [figure] = second
    assert figure.kind == "figure"
    assert figure.data.startswith("<?xml")
    assert figure.words == "a line"


def test_a_figure_that_was_closed_and_returned_is_shown_once():
    code = "import matplotlib.pyplot as plt\nf, _ = plt.subplots()\n{}f\n"
    for closing in ("", "plt.close(f)\n"):
        [shown] = execute.show(Block(1, code.format(closing)), "page", {})
        assert shown.kind == "figure"


def test_a_figure_without_a_title_is_told_by_its_axes():
    code = (
        "import matplotlib.pyplot as plt\nf, a = plt.subplots()\na.set(xlabel='t', ylabel='x')\nf\n"
    )
    [shown] = execute.show(Block(1, code), "page", {})
    assert shown.words == "x over t"


def test_a_failing_block_points_into_the_page(tmp_path, monkeypatch):
    page = ROOT / "docs" / "book" / "unwritten.md"
    with pytest.raises(ZeroDivisionError) as failed:
        execute.run("# a\n\n```python\n1 / 0\n```\n", str(page))
    assert failed.traceback[-1].lineno == 3  # counted from 0: the fourth line of the page


def test_executions_are_kept_by_code_and_shared_by_pages_with_the_same_code(tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "CACHE", tmp_path)
    monkeypatch.setattr(execute, "ROOT", tmp_path)
    runs: list[str] = []
    source = tmp_path / "module.py"
    source.write_text("x = 1")

    def pretend(path, out):
        runs.append(path.name)
        files = {"module.py": execute._hash(source)}
        out.write_text(json.dumps({"shown": [[Output("text", "1\n")]], "used": files}))

    monkeypatch.setattr(execute, "_in_a_process", pretend)
    english, chinese, other = (tmp_path / f"{name}.md" for name in ("en", "zh", "other"))
    english.write_text("Words\n```python\n1\n```\n", encoding="utf-8")
    chinese.write_text("文字\n\n```python\n1\n```\n", encoding="utf-8")
    other.write_text("```python\n2\n```\n", encoding="utf-8")
    shown = execute.executed([english, chinese, other])
    assert sorted(runs) == ["en.md", "other.md"]
    assert shown[english] == shown[chinese] == [[Output("text", "1\n")]]
    execute.executed([english, chinese, other])
    assert len(runs) == 2  # from the cache
    english.write_text("```python\n3\n```\n", encoding="utf-8")
    execute.executed([english, chinese])
    assert sorted(runs) == ["en.md", "en.md", "other.md"]
    source.write_text("x = 2")
    execute.executed([chinese])
    assert runs[-1] == "zh.md"


def test_a_page_depends_on_what_it_imported_and_on_results_that_it_reads(tmp_path):
    page, out = tmp_path / "page.md", tmp_path / "out.json"
    page.write_text("```python\nfrom elman import corpus\n\n1 + 1\n```\n", encoding="utf-8")
    execute._in_a_process(page, out)
    made = json.loads(out.read_text("utf-8"))
    assert made["shown"] == [[["text", "2\n", ""]]]
    assert "src/elman/text/corpus.py" in made["used"]
    assert "src/elman/data/notes.json" not in made["used"]
    assert "src/elman/nn/__init__.py" not in made["used"]  # nothing on that page needed it


def test_a_page_that_fails_is_named_with_its_traceback():
    page = ROOT / "build" / "failing.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text("```python\n1 / 0\n```\n", encoding="utf-8")
    with pytest.raises(execute.PageFailed, match=r"(?s)build/failing.md failed.*ZeroDivision"):
        execute._in_a_process(page, page.with_suffix(".json"))
    page.unlink()


def test_pages_that_need_the_text_are_known_by_either_name_of_it():
    """Six chapters load it by the notes' name only, and would have fetched it while building."""
    pages = {path: execute.needs_text(path.read_text("utf-8")) for path in book_pages()}
    assert {path.name[:2] for path, needs in pages.items() if not needs} == {"01", "in"}
    assert sum(pages.values()) == 2 * 7
    assert not execute.needs_text("The Time Machine, time-machine\n```python\n1\n```\n")


@pytest.mark.parametrize(("file", "run"), [("timemachine.txt", 18), ("other.txt", 4)])
def test_without_the_text_its_pages_are_left_out_and_nothing_is_fetched(
    file, run, tmp_path, monkeypatch
):
    for name in ("ELMAN_DATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / file).write_text("the time machine")
    assert len(execute.can_run(book_pages())) == run


def test_a_page_without_outputs_says_so_in_its_language(monkeypatch):
    pytest.importorskip("mkdocs")
    from types import SimpleNamespace
    from typing import Any

    from publishing import hooks

    monkeypatch.setattr(hooks, "_unexecuted", {"zh/book/a.md"})
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="zh/book/a.md"))
    assert hooks.on_page_markdown(PAGE, page=page).startswith('!!! warning "未执行"')


def test_pages_of_the_book_are_known_by_their_place():
    assert is_book("book/01-a.md")
    assert is_book("zh/book/01-a.md")
    assert not is_book("text.md")
    assert not is_book("zh/index.md")


def test_a_table_fills_its_place_and_a_missing_one_is_an_error():
    page = "before\n\n<!-- results: notes -->\n\nafter"
    filled = results.fill(page)
    assert filled.startswith("before\n\n| run | by | seeds |")
    assert "scratch, sequential | elman | 5 | 1.034 ± 0.0021 | 107.6" in filled
    with pytest.raises(KeyError):
        results.fill("<!-- results: unheard-of -->")


def test_every_file_of_results_is_on_the_page():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert "<!-- results: others -->" in page
    assert "| 45,766 | -9.1% |" in results.made("compression")  # what README.md says
    for name in results.TABLES:
        assert f"<!-- results: {name} -->" in page
        assert results.made(name).count("\n") >= 2


def test_equations_of_docstrings_become_latex_and_prose_does_not():
    pytest.importorskip("latex2mathml")
    from publishing import maths

    docstring = "Carry it.\n\ndh_t = dhs_t + ξ_{t+1} x^(t)ᵀ\nb_t += Σ_i β²\n\nA sentence: h_t = 0."
    typeset = maths.typeset(docstring)
    assert typeset.startswith("Carry it.\n\n$$\\begin{aligned} dh_{t} &= dhs_{t} + \\xi _{t+1} ")
    assert "x^{(t)}{}^{\\top}" in typeset
    assert r"b_{t} &+= \sum _{i} \beta ^{2}" in typeset
    assert typeset.endswith("A sentence: h_t = 0.")
    assert "```pycon\n>>> 1 + 1\n2\n```" in maths.typeset("One.\n\n    >>> 1 + 1\n    2")


def test_indented_equations_of_a_page_are_drawn_and_code_is_not():
    pytest.importorskip("latex2mathml")
    from publishing import maths

    page = "So\n\n    h_t = tanh(a_t)\n\nand\n\n    elman train book.txt\n\n"
    code = "```python\ndef f():\n\n    h_t = tanh(a_t)\n\n```\n"
    drawn = r"$$\begin{aligned} h_{t} &= \operatorname{tanh}(a_{t}) \end{aligned}$$"
    assert maths.typeset_page(page + code) == page.replace("    h_t = tanh(a_t)", drawn) + code


def test_equations_become_mathml_and_unknown_commands_are_refused():
    pytest.importorskip("latex2mathml")
    from publishing import maths

    marked = r'<span class="arithmatex">\(h_t &lt; 1\)</span>'
    assert maths.render(marked).startswith('<math lang="en" ')
    torn = maths.render(f"（{marked}，其中")
    assert torn.startswith('<span class="whole">（<math')
    assert torn.endswith("</math>，</span>其中")
    two = (
        r'<div class="arithmatex">\[\begin{aligned} a &amp;= b \\ c &amp;= d \end{aligned}\]</div>'
    )
    assert maths.render(two).count("<mtr>") == 2
    with pytest.raises(ValueError, match="unheard"):
        maths.mathml(r"\unheard x", "inline")


def test_a_notebook_has_the_blocks_their_outputs_and_links_between_chapters():
    nbformat = pytest.importorskip("nbformat")
    from publishing.notebooks import notebook

    made = notebook(PAGE, execute.run(PAGE, "page"))
    nbformat.validate(made)
    code = [cell.source + "\n" for cell in made.cells if cell.cell_type == "code"]
    assert code == ["%matplotlib inline\n", *(block.code for block in blocks(PAGE))]
    assert "[the next](02-next.ipynb), the guide." in made.cells[1].source
    assert any("never()" in cell.source for cell in made.cells if cell.cell_type == "markdown")
    assert made.cells[2].outputs[0].text == "said 20\n21\n"
    assert "image/svg+xml" in made.cells[-1].outputs[0].data


def test_every_function_that_the_reference_shows_says_what_it_does():
    pytest.importorskip("griffe")
    from publishing import api

    assert len(api.modules()) > 40
    assert api.undocumented() == []


def imported(module: str, name: str):
    try:
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


def test_what_the_pages_import_is_in_the_reference():
    pytest.importorskip("griffe")
    from publishing import api

    shown = set(api.modules())
    for path in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        text = "\n".join(block.code for block in blocks(path.read_text("utf-8")))
        for module, names in re.findall(
            r"^(?:>>> )?from (elman[\w.]*) import ([\w, ]+)", text, re.M
        ):
            for name in re.findall(r"(\w+)(?: as \w+)?", names):
                found = imported(module, name)
                home = getattr(found, "__module__", None) or getattr(found, "__name__", module)
                is_package = hasattr(found, "__path__")
                assert is_package or home in shown or home in ("builtins", "typing"), (
                    f"{path.name} imports {name} of {home}, which no page of the reference shows"
                )


@pytest.mark.parametrize(
    ("html", "fetches"),
    [
        ('<script src="https://unpkg.com/x.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/css">', True),
        ('<script src="../assets/x.js"></script><link rel="icon" href="assets/i.png">', False),
        ('<a href="https://pytorch.org">a link that a reader may follow</a>', False),
    ],
)
def test_a_page_that_would_fetch_something_is_refused(html, fetches):
    pytest.importorskip("mkdocs")
    from types import SimpleNamespace
    from typing import Any

    from mkdocs.exceptions import PluginError

    from publishing import hooks

    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    if fetches:
        with pytest.raises(PluginError, match="would fetch"):
            hooks.on_post_page(html, page=page)
    else:
        assert hooks.on_post_page(html, page=page) == html


@pytest.mark.parametrize(("page", "passes"), [("# a\n", True), ("# a\n[b](b.md)\n", False)])
def test_a_broken_link_fails_a_strict_build_however_quiet(page, passes, tmp_path):
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(page)
    (tmp_path / "hook.py").write_text("from publishing.hooks import on_startup\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: a\ntheme: mkdocs\nhooks: [hook.py]\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == passes, done.stderr
    assert passes or "b.md" in done.stderr


def test_outputs_stand_below_their_blocks_and_links_out_of_the_site_become_names(monkeypatch):
    pytest.importorskip("mkdocs")
    from types import SimpleNamespace
    from typing import Any

    from publishing import hooks

    figure = Output("figure", "<svg/>", "a [line] of $x$")
    monkeypatch.setattr(hooks, "_shown", {"zh/book/a.md": [[Output("text", "21\n")], [figure]]})
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="zh/book/a.md"))
    made = hooks.on_page_markdown(
        PAGE + "\n[results](../benchmarks/results/notes.json)\n", page=page
    )
    assert "x + 1\n```\n\n```{ .text .shown }\n21\n```" in made
    drawn = f"![a (line) of x](../../book/figures/{hooks.figure_name(figure)}){{ .drawn }}"
    assert f'<div class="figure" markdown>\n\n{drawn}\n\n</div>' in made
    assert "results (`benchmarks/results/notes.json`)" in made
    assert "```python\nnever()\n```" in made


@pytest.mark.parametrize("source", ["python.md", "book/a.md"])
def test_a_block_that_is_not_run_is_a_block_on_every_page(source, monkeypatch):
    """Markdown takes "```python no-run" for prose: fences of the guide were shown as typed."""
    pytest.importorskip("mkdocs")
    from types import SimpleNamespace
    from typing import Any

    from publishing import hooks

    monkeypatch.setattr(hooks, "_unexecuted", {"book/a.md"})
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri=source))
    made = hooks.on_page_markdown("```python no-run lightning\nnever()\n```\n", page=page)
    assert made.endswith("```python\nnever()\n```\n")


@pytest.mark.parametrize(
    ("source", "english", "chinese"),
    [
        ("book/02-text.md", "book/02-text.html", "zh/book/02-text.html"),
        ("zh/concordance.md", "concordance.html", "zh/concordance.html"),
        ("text.md", "text.html", "zh/index.html"),
    ],
)
def test_the_switch_of_languages_leads_to_the_same_page(source, english, chinese):
    from publishing.languages import alternates, language

    assert [(a["lang"], a["link"]) for a in alternates(source)] == [
        ("en", english),
        ("zh", chinese),
    ]
    assert language(source) == ("zh" if source.startswith("zh/") else "en")


def test_pages_speak_their_language_and_ask_for_no_sitemap():
    pytest.importorskip("mkdocs")
    from types import SimpleNamespace
    from typing import Any

    from publishing import hooks

    config: Any = SimpleNamespace(theme={"language": "en"}, extra={})
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="zh/index.md"))
    hooks.on_page_context({}, page=page, config=config)
    assert config.theme["language"] == "zh"
    assert config.extra["alternate"][0]["link"] == "index.html"
    head = '<head>\n  <link rel="alternate" href="../index.html" hreflang="en">\n</head>'
    assert hooks.on_post_page(head, page=page) == "<head>\n</head>"


def test_chinese_is_searched_character_by_character_and_without_a_server(tmp_path):
    from publishing.search import prepare

    entry = {"location": "a.html", "title": "困惑度", "text": "<p>RNN的perplexity, 两个词。</p>"}
    (tmp_path / "search_index.json").write_text(json.dumps({"config": {}, "docs": [entry]}))
    prepare(tmp_path)
    told = (tmp_path / "search_index.json").read_text("utf-8")
    [found] = json.loads(told)["docs"]
    assert found["title"].split("\u200b") == ["困", "惑", "度"]
    assert found["text"] == "<p>RNN\u200b的\u200bperplexity, 两\u200b个\u200b词。</p>"
    assert found["location"] == "a.html"
    assert (tmp_path / "search_index.js").read_text("utf-8") == f"var __index = {told}"


def test_the_search_takes_no_query_apart_until_it_matches_everything():
    """lunr tests each character of a query against the separator: it must consume something."""
    configuration = (ROOT / "mkdocs.yml").read_text("utf-8")
    [written] = re.findall(r"^ +separator: '(.*)'$", configuration, re.M)
    separator = re.compile(written.replace(r"\u200b", "\u200b"))
    for character in "困a8é":
        assert not separator.search(character)
    assert separator.split("困惑，3.5 nats。why?") == ["困惑", "3.5", "nats", "why", ""]
    assert re.findall(r"^ +pipeline: (.*)$", configuration, re.M) == ["[stopWordFilter]"]
