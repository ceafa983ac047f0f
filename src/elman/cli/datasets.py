"""`elman datasets`: what can be loaded by name, and where it comes from."""

from typing import TYPE_CHECKING, Annotated

import typer

from elman.cli.console import emit, note
from elman.cli.source import printable

if TYPE_CHECKING:
    from elman.text.datasets import Dataset


def datasets(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List what can be loaded by name, and where from."""
    from elman.text.datasets import DATASETS

    rows = [_row(dataset) for dataset in DATASETS.values()]
    if json:
        emit({"datasets": rows})
    else:
        for row in rows:
            where = printable(_where(row))
            typer.echo(f"{row['name']:<18}{row['kind']:<8}{row['about']}\n{'':26}{where}")
    note("next: elman train NAME for a text, elman forecast NAME for a series")


def _row(dataset: "Dataset") -> dict[str, str | None]:
    """One dataset: where its file lies now, if it has one and it is here, and where to get it."""
    from elman.text.datasets import present

    download = dataset.download
    path = present(download) if download else None
    return {
        "name": dataset.name,
        "kind": dataset.kind,
        "about": dataset.about,
        "path": str(path) if path else None,
        "url": download.url if download else None,
        "sha1": download.sha1 if download else None,
    }


def _where(row: dict[str, str | None]) -> str:
    if row["url"] is None:
        return "always here"
    return f"here: {row['path']}" if row["path"] else f"downloaded when first used: {row['url']}"
