"""What `elman forecast` can be told, one option a line, in the panels that its help shows."""

import functools
from pathlib import Path
from typing import Annotated, Any

import typer

from elman.cli.limits import a_path
from elman.options import Beside

MODELS = (
    "auto (tries the others and keeps the best), last, seasonal, mean, drift, ets, linear, "
    "regression, window, or a cell: elman, gru, lstm …, global-gru, global-lstm …"
)
"""The names of `forecasting.catalogue`, which imports torch: a help does not wait for that."""


def _panel(name: str, *, path: bool = False) -> Any:
    """Options of one panel; paths are typed as they are."""
    facts: dict[str, Any] = {"parser": a_path, "metavar": "PATH"} if path else {}
    return functools.partial(typer.Option, rich_help_panel=name, **facts)


_table, _model, _measure = _panel("Table"), _panel("Model"), _panel("Looking back and ahead")
_kept, _place = _panel("What is kept"), _panel("What is kept", path=True)

Words = list[str] | None

Source = Annotated[
    str | None,
    typer.Argument(help="sine, sunspots, airline, a .csv or .parquet file, or - for stdin"),
]
Column = Annotated[Words, _table(help="Column to forecast; repeatable")]
Time = Annotated[str | None, _table(help="Column that orders the steps; none: rows are in order")]
Group = Annotated[Words, _table(help="Column that tells series apart; repeatable")]
Known = Annotated[Words, _table(help="Input whose future is in the table; repeatable")]
Past = Annotated[Words, _table(help="Input known only with hindsight; repeatable")]
Static = Annotated[Words, _table(help="Input with one value a series; repeatable")]
Calendar = Annotated[bool, _table(help="Add the time of day, week and year as inputs")]
Filling = Annotated[
    str | None, _table(help="Fill gaps: forward, linear or zero; otherwise they stop")
]
Missing = Annotated[str, _table(help="error, or interpolate (--fill linear)")]
DateFormat = Annotated[str | None, _table(help="How dates are written: %d/%m/%Y; or excel, unix")]
Timezone = Annotated[str | None, _table(help="Zone of times that name none: Europe/Berlin")]
Season = Annotated[int | None, _table(help="Steps in one season; from the dates if not given")]

Model = Annotated[str, _model(help=f"One of {MODELS}")]
Tau = Annotated[int | None, _model(help="Past values one forecast reads")]
Difference = Annotated[int, _model(help="Model changes since this many steps ago")]
HiddenSize = Annotated[int | None, _model(help="Hidden units of a network")]
Epochs = Annotated[int | None, _model(help="Passes over the training part")]
Updates = Annotated[int | None, _model(help="Updates of a global network")]
LearningRate = Annotated[float | None, _model(help="Step size of Adam")]
Gaussian = Annotated[bool, _model(help="Train a network by likelihood")]
CarryBack = Annotated[
    str | None,
    _model(help="How far back a network's loss goes: full, truncated:12, randomized:12"),
]
Memory = Annotated[str | None, _model(help="stored, or a budget of a network's states: 64M")]
Kernel = Annotated[str | None, _model(help="What trains a network: auto, cpu, reference …")]
Minutes = Annotated[
    float,
    _model(min=0, help="Time that auto may take; 0: no limit, and no networks"),
    Beside("model", "auto"),
]
Seed = Annotated[int, _model(min=0, help="Same seed, same forecast")]
Threads = Annotated[int, _model(min=0, help="Threads; 0: as many as there are")]

Steps = Annotated[int, _measure(help="How many steps to look ahead")]
Level = Annotated[Words, _measure(help="Percent that intervals should hold: 80,95")]
Windows = Annotated[
    int, _measure("--windows", "--backtest", help="Look back at this many rolling origins")
]

Saved = Annotated[Path | None, _place(help="Use the forecaster saved in this folder")]
Resume = Annotated[Path | None, _place(help="Go on with what was stopped in this --out folder")]
Out = Annotated[Path | None, _place(help="Save the fitted forecaster here")]
Force = Annotated[
    bool, _kept(help="Replace the forecaster in --out"), Beside("out", such_as="FOLDER")
]
Output = Annotated[Path | None, _place(help="Write the forecast to this .csv, .parquet or .json")]
Figure = Annotated[Path | None, _place(help="Draw to this .svg, .png or .pdf")]
Json = Annotated[bool, _kept("--json", help="One JSON object on stdout")]
