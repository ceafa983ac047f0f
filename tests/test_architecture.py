"""Imports point one way, along the life of a token, and the pages about it name what there is."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import elman

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "elman"

STAGES = (
    "errors",
    "built",
    "files",
    "folders",
    "strict_json",
    "resources",
    "options",
    "defaults",
    "text",
    "counting",
    "cells",
    "gradients",
    "kernels",
    "recurrence",
    "nn",
    "language_model",
    "scoring",
    "generation",
    "training",
    "runs",
    "compression",
    "forecasting",
    "diagnostics",
    "figures",
    "notes",
    "reports",
    "session",
    "lab",
    "cli",
)
"""Every folder and module at the package's root; each may import from those before it."""

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """The dotted name below `elman`: "text.vocab", "text" for its __init__, "" for the root's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Everything inside, late imports too; not what only a type checker reads."""
    yield node
    for child in ast.iter_child_nodes(node):
        typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not typing_only:
            yield from statements(child)


def imports(path: Path) -> Iterator[str]:
    """Modules of the package that this one imports, at the top or late, below `elman`."""
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name.removeprefix("elman.") for a in node.names if "elman." in a.name)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            package, _, inner = node.module.partition(".")
            if package == "elman":
                for alias in node.names:
                    deeper = f"{inner}.{alias.name}".lstrip(".")
                    yield deeper if deeper in NAMES else inner


def stage(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: name_of(path) or "elman")
def test_a_module_imports_only_from_stages_before_its_own(path):
    here = name_of(path)
    if here in ("", "__main__"):
        pytest.skip("the package's front page knows all its rooms")
    later = [
        other
        for other in imports(path)
        if other and STAGES.index(stage(other)) > STAGES.index(stage(here))
    ]
    assert not later, f"{here} imports from later stages: {later}"


def test_no_modules_import_each_other_even_late():
    """A package's __init__ collects its modules, so it is their front page, not one of them."""
    graph = {name_of(p): {n for n in imports(p) if n in NAMES} for p in MODULES}
    fronts = {name_of(p) for p in MODULES if p.name == "__init__.py"}
    edges = {
        name: {n for n in targets if n not in fronts or not name.startswith(f"{n}.")} - {name}
        for name, targets in graph.items()
        if name not in fronts
    }

    def cycle(name: str, path: tuple[str, ...]) -> tuple[str, ...] | None:
        if name in path:
            return (*path[path.index(name) :], name)
        if name in done:
            return None
        for other in sorted(edges.get(name, ())):
            if found := cycle(other, (*path, name)):
                return found
        done.add(name)
        return None

    done: set[str] = set()
    for name in sorted(edges):
        assert (found := cycle(name, ())) is None, " → ".join(found or ())


def test_every_stage_of_the_tree_is_in_the_list_and_in_the_docs():
    present = {stage(name) for name in NAMES} - {"", "__main__"}
    assert present <= set(STAGES), "a new folder or root module needs its place in STAGES"
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+)(?:/|\.py)`", page)
    missing = [s for s in STAGES if s in present and s not in named]
    assert not missing, f"docs/architecture.md does not mention {missing}"


def prose(page: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)


def named_in(text: str) -> list[str]:
    """What stands in backquotes, less what stands for a name (`NAME`)."""
    return [name for name in re.findall(r"`([^`\n]+)`", text) if "NAME" not in name]


def is_path(name: str) -> bool:
    """Whether it is spelled as a file or folder of the repository, and no output of `make`."""
    spelled = re.fullmatch(r"[\w/-]+(?:\.(?:py|h|md)|/)|\w+(?:/\w+)+", name)
    return spelled is not None and not name.startswith("build/")


STAGE_ROW = re.compile(r"^\| [\w' ]+ \| (`[^|]+) \| ([^|]+) \|$", re.M)
"""Where a stage lives, and what it owns."""


def is_there(name: str, *folders: Path) -> bool:
    return any((folder / name).exists() for folder in folders)


def resolves(name: str) -> bool:
    """Whether `elman.errors.UserError`, or `errors.UserError`, is a module or in one."""
    try:
        pkgutil.resolve_name(f"elman.{name.removeprefix('elman.')}")
    except (ImportError, AttributeError):
        return False
    return True


def test_files_in_the_table_of_stages_lie_in_the_folders_of_their_stage():
    rows = STAGE_ROW.findall(prose("docs/architecture.md"))
    assert len(rows) > 15
    for homes, owned in rows:
        folders = [PACKAGE / home for home in named_in(homes)]
        assert all(folder.exists() for folder in folders), homes
        lost = [n for n in named_in(owned) if is_path(n) and not is_there(n, *folders)]
        assert not lost, f"{homes} has no {lost}"


def test_the_page_names_every_file_of_more_than_a_hundred_lines_or_its_folder():
    page = prose("docs/architecture.md")
    inside = page[page.index("## Inside the stages") : page.index("## Adding a variant")]
    folders = {name.rstrip("/") for name in named_in(inside) if name.endswith("/")}
    lost = [
        path
        for path in (str(module.relative_to(PACKAGE)) for module in MODULES if is_long(module))
        if f"`{path}`" not in page and path.rpartition("/")[0] not in folders
    ]
    assert not lost, f"docs/architecture.md does not name {lost}"


def is_long(module: Path) -> bool:
    return len(module.read_text(encoding="utf-8").splitlines()) > 100


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_paths_names_and_targets_on_a_page_are_real(page):
    text = STAGE_ROW.sub("", prose(page))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", makefile, re.M)
    checked = 0
    for name in named_in(text):
        if name.startswith("make "):
            assert name.removeprefix("make ") in targets, name
        elif is_path(name):
            assert is_there(name, ROOT, PACKAGE, PACKAGE.parent), f"there is no {name}"
        elif re.fullmatch(r"\w+(\.\w+)+", name) and stage(name) in ("elman", *STAGES):
            assert resolves(name), f"there is no {name}"
        else:
            continue
        checked += 1
    assert checked > 10


def test_every_table_of_variants_is_where_the_page_says():
    rows = re.findall(r"`([A-Z_]+)`, `([\w/]+)\.py`", prose("docs/architecture.md"))
    assert len(rows) > 6
    for table, path in rows:
        home = path.removesuffix("/__init__").replace("/", ".")
        assert resolves(f"{home}.{table}"), f"{path}.py has no {table}"


def test_the_contract_of_a_kernel_has_the_fields_that_the_page_shows():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    kernels = importlib.import_module("elman.kernels")
    shown = re.findall(r"^class (\w+)\(NamedTuple\):.*\n((?:    .+\n)+)", page, re.M)
    assert {name for name, _ in shown} == {"Weights", "Piece", "Trace", "Pull"}
    for name, body in shown:
        assert tuple(re.findall(r"^    (\w+):", body, re.M)) == getattr(kernels, name)._fields


def test_short_names_are_the_modules_themselves():
    for short, home in {
        "corpus": "text",
        "vocab": "text",
        "batches": "text",
        "statistics": "counting",
        "ngram.arpa": "counting",
        "metrics": "scoring",
        "mixture": "scoring",
        "series": "forecasting",
    }.items():
        module = importlib.import_module(f"elman.{short}")
        assert module is importlib.import_module(f"elman.{home}.{short}")
        assert module.__name__ == module.__spec__.name == f"elman.{home}.{short}"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("elman.corpora")


def test_a_star_gives_the_public_names():
    given: dict[str, object] = {}
    exec("from elman import *", given)
    assert set(given) - {"__builtins__"} == set(elman._PUBLIC)
