"""Run the Python of a page as a notebook would, and keep what it prints and draws.

The blocks of a page share one namespace and run in order, in an empty folder, in a process of their
own. What a block shows: its prints, the value of its last line, the figures it left open. Results
are kept in `build/book` under the hash of the page's code, with the hashes of the files that the
code used (every module of elman it imported, and what those read), so that a page is executed again
only when one of these has changed, and pages with the same code share one execution.
"""

import ast
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from publishing.pages import ROOT, Block, blocks

CACHE = ROOT / "build" / "book"
BESIDE = {
    "elman.kernels.cpu": "src/elman/kernels/cpu/*.[ch]*",
    "elman.forecasting.series": "src/elman/data/*.csv",
    "elman.notes": "src/elman/data/*.json",
}
"""Files that a module reads or was built from, beside its own."""


class Output(NamedTuple):
    """Something that a block showed: text, or a figure as SVG with words for who cannot see it."""

    kind: Literal["text", "figure"]
    data: str
    words: str = ""


class PageFailed(RuntimeError):
    """A block of a page raised; the message has its traceback."""


def needs_text(page: str) -> bool:
    """Whether a block reads The Time Machine, by elman's name for it or by the notes'.

    >>> needs_text("```python\\nd2l.load_data_time_machine(32, 35)\\n```\\n")
    True
    """
    return any(re.search("time[-_]machine", block.code) for block in blocks(page))


def can_run(pages: list[Path]) -> list[Path]:
    """The pages whose text lies on this machine: nothing is fetched for a build."""
    from elman.text.datasets import DATASETS, present

    download = DATASETS["time-machine"].download
    assert download is not None
    has_text = present(download) is not None
    return [page for page in pages if has_text or not needs_text(page.read_text("utf-8"))]


def executed(paths: list[Path], workers: int = 2) -> dict[Path, list[list[Output]]]:
    """The outputs of every block of every page, from the cache or from an execution now."""
    keys = {path: key(path) for path in paths}
    wanted = {keys[path]: path for path in reversed(paths)}  # one page for each different code
    CACHE.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(workers) as pool:
        found = dict(zip(wanted, pool.map(_from_cache, wanted, wanted.values()), strict=True))
    return {path: found[keys[path]] for path in paths}


def key(path: Path) -> str:
    """The name under which this page's outputs are kept: its code, and the versions below elman."""
    codes = [block.code for block in blocks(path.read_text(encoding="utf-8"))]
    below = [f"{package} {version(package)}" for package in ("torch", "numpy", "matplotlib")]
    told = json.dumps([codes, below, sys.version_info[:2]])
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def used() -> dict[str, str | None]:
    """The hash of every file of this repository that this process has used for a page, by path."""
    modules = [name for name in sys.modules if name.partition(".")[0] == "elman"]
    files = [getattr(sys.modules[name], "__file__", None) for name in modules]
    patterns = ["publishing/execute.py", *(BESIDE[name] for name in BESIDE if name in modules)]
    beside = [path for pattern in patterns for path in ROOT.glob(pattern)]
    paths = {Path(file).resolve() for file in files if file} | {p.resolve() for p in beside}
    inside = sorted(path for path in paths if path.is_relative_to(ROOT) and path.suffix != ".so")
    return {path.relative_to(ROOT).as_posix(): _hash(path) for path in inside}


def _hash(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _from_cache(name: str, path: Path) -> list[list[Output]]:
    kept = CACHE / f"{name}.json"
    if not _is_fresh(kept):
        _in_a_process(path, kept)
    shown = json.loads(kept.read_text("utf-8"))["shown"]
    return [[Output(*item) for item in block] for block in shown]


def _is_fresh(kept: Path) -> bool:
    if not kept.exists():
        return False
    files = json.loads(kept.read_text("utf-8"))["used"]
    return all(_hash(ROOT / file) == was for file, was in files.items())


def _in_a_process(path: Path, out: Path) -> None:
    draft = out.with_suffix(f".{os.getpid()}.draft")
    python_path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {
        "OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": python_path, "MPLBACKEND": "agg"
    }  # fmt: skip
    command = [sys.executable, "-m", "publishing.execute", str(path.resolve()), str(draft)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, env=environment, text=True, stderr=subprocess.PIPE, check=False
        )
    if done.returncode:
        raise PageFailed(f"{path.relative_to(ROOT)} failed:\n{done.stderr}")
    draft.replace(out)


def run(page: str, name: str) -> list[list[Output]]:
    """Execute the blocks of a page here, in this process."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    return [show(block, name, namespace) for block in blocks(page)]


def show(block: Block, name: str, namespace: dict[str, Any]) -> list[Output]:
    """Run one block; blank lines in front make a traceback point into the page."""
    tree = ast.parse("\n" * (block.line - 1) + block.code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    said, value = io.StringIO(), None
    with contextlib.redirect_stdout(said):
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return [*_texts(said.getvalue(), value), *_figures(value)]


def _texts(said: str, value: Any) -> list[Output]:
    from matplotlib.figure import Figure

    if value is not None and not isinstance(value, Figure):
        said += f"{value!r}\n"
    return [Output("text", said)] if said.strip() else []


def _figures(value: Any) -> list[Output]:
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    figures = [plt.figure(number) for number in plt.get_fignums()]
    if isinstance(value, Figure) and value not in figures:
        figures.append(value)
    drawn = [Output("figure", as_svg(figure), in_words(figure)) for figure in figures]
    plt.close("all")
    return drawn


def as_svg(figure: Any) -> str:
    """The figure as SVG; same figure, same bytes."""
    from elman.figures.style import house

    drawing = io.StringIO()
    with house():
        figure.savefig(drawing, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return drawing.getvalue()


def in_words(figure: Any) -> str:
    """The titles of a figure, or what its axes are, for who cannot see it."""
    titles = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    spoken = [" ".join(title.split()) for title in titles if title]
    sides = [f"{axes.get_ylabel()} over {axes.get_xlabel()}" for axes in figure.axes]
    return "; ".join(spoken or sides)


def main() -> None:
    """`python -m publishing.execute PAGE OUT`: what the build runs for each page."""
    page, out = map(Path, sys.argv[1:])
    text = page.read_text(encoding="utf-8")
    shown = run(text, str(page))
    out.write_text(json.dumps({"shown": shown, "used": used()}), encoding="utf-8")


if __name__ == "__main__":
    main()
