"""`elman lab`: train and watch the gradient in a browser, on this machine."""

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elman.cli.console import note
from elman.cli.limits import a_path
from elman.errors import UserError

if TYPE_CHECKING:
    from elman.lab.serve import Opened


def lab(
    root: Annotated[
        Path,
        typer.Argument(
            help="Folder of runs: those there are shown, new ones are kept there",
            parser=a_path,
            metavar="ROOT",
            show_default="runs",
        ),
    ] = Path("runs"),
    port: Annotated[int, typer.Option(help="0: a free one")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page")] = True,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than this machine's needs --token")
    ] = "127.0.0.1",
    token: Annotated[
        str, typer.Option(help="What the address must bring along", show_default="a random one")
    ] = "",
    at_once: Annotated[int, typer.Option(min=1, help="Trainings at a time; more are queued")] = 2,
) -> None:
    """Open a page on this machine: runs, live training, and the gradient under a microscope.

    Ctrl-C ends the page; trainings that are running go on, and the next `elman lab` shows them.
    """
    from elman.lab import loaded

    process = loaded.process()  # loads while this one does
    try:
        opened = _opened(root, process, browser, host=host, port=port, token=token, at_once=at_once)
    except BaseException:
        loaded.end(process)
        raise
    if opened.warning:
        note(f"warning: {opened.warning}")
    opened.run()


def _opened(root: Path, process: Any, browser: bool, **options: Any) -> "Opened":
    try:
        from elman.lab.serve import open_lab
    except ModuleNotFoundError as missing:
        if missing.name not in ("starlette", "uvicorn", "anyio"):
            raise
        raise UserError(f"the lab needs {missing.name}", hint="pip install 'elman[lab]'") from None

    def ready() -> None:
        typer.echo(opened.address)
        note("Ctrl-C ends the page; trainings go on")
        if browser:
            webbrowser.open(opened.address)

    opened = open_lab(root, process=process, ready=ready, **options)
    return opened
