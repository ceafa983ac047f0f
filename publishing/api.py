"""What the reference shows, and whether all of it says what it does."""

import re
from collections.abc import Iterator

import griffe

from publishing.pages import DOCS, ROOT


def modules() -> list[str]:
    """The modules that the pages of the reference name, `::: elman.text.vocab`."""
    pages = sorted((DOCS / "reference").glob("*.md"))
    return [
        name for p in pages for name in re.findall(r"^::: ([\w.]+)$", p.read_text("utf-8"), re.M)
    ]


def undocumented() -> list[str]:
    """Public functions, classes and methods of those modules that have no docstring.

    A method that answers a base class's question may leave the docstring to it.
    """
    package = griffe.load("elman", search_paths=[str(ROOT / "src")])
    return [path for name in modules() for path in _silent(package[name.removeprefix("elman.")])]


def _silent(parent: griffe.Object | griffe.Alias) -> Iterator[str]:
    for name, member in parent.members.items():
        if name.startswith("_") or member.is_alias or not _has_words(member):
            continue
        if not member.docstring and not _inherits_words(parent, name):
            yield member.path
        if member.is_class:
            yield from _silent(member)


def _has_words(member: griffe.Object | griffe.Alias) -> bool:
    return member.is_class or member.is_function or "property" in member.labels


def _inherits_words(parent: griffe.Object | griffe.Alias, name: str) -> bool:
    if not isinstance(parent, griffe.Class):
        return False
    return any(name in base.members and base.members[name].docstring for base in parent.mro())
