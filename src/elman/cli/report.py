"""`elman report`: write the page that tells how a run went."""

import shlex
from typing import Annotated

import typer

from elman.cli.console import emit, note
from elman.cli.limits import RunFolder


def report(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Write RUN/report.html: curves, samples, settings, commands; of a stopped run, too."""
    from elman.reports import report
    from elman.runs import Run

    path = report.write(Run.open(run))
    if as_json:
        emit({"run": str(run), "report": str(path)})
        return
    typer.echo(str(path))
    note(f"next: open it in a browser, or elman generate {shlex.quote(str(run))}")
