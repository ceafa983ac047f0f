"""The house style: colour-blind safe, legible, readable in black and white.

Curves differ in colour *and* in dash, so that a grey print still tells them apart.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure

from elman.errors import UserError
from elman.files import as_path, atomic

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""The colours of Okabe and Ito (2008), darkest contrasts first."""

STYLES = ("-", "--", "-.", ":", (0, (3, 1, 1, 1, 1, 1)), (0, (5, 1)), (0, (1, 1)))

FORMATS = (".svg", ".png", ".pdf")


@contextmanager
def house() -> Iterator[None]:
    """Draw in the house style inside this block, whatever the user's own matplotlib settings."""
    settings: dict[Any, Any] = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "figure.dpi": 110,
        "savefig.dpi": 160,
        "svg.fonttype": "none",
        "svg.hashsalt": "elman",
        "axes.prop_cycle": cycler(color=COLOURS, linestyle=STYLES),
    }
    with mpl.rc_context(settings):
        yield


def token_text(token: object) -> str:
    r"""A token, or any name, as a figure can show it: no mathematics between dollars.

    >>> print(token_text("\n"), token_text("$x$"), token_text("\udcff"))
    ↵ \$x\$ \udcff
    """
    text = {" ": "␣", "\n": "↵", "\t": "⇥"}.get(str(token), str(token)).replace("$", r"\$")
    return text.encode("utf-8", "backslashreplace").decode()


def check_format(path: Path) -> None:
    """Refuse, before any work, a name that no figure can be written to."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(
            f"cannot draw to {str(path)!r}: a figure ends in {', '.join(FORMATS)}",
            hint=f"--figure {path.stem or 'figure'}.svg",
        )


def save(figure: Figure, path: Path | str) -> Path:
    """Write a figure as SVG, PNG or PDF, by the ending of `path`; same figure, same bytes."""
    path = as_path(path)
    check_format(path)
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
    with house(), atomic(path) as draft:
        figure.savefig(
            draft, format=path.suffix[1:].lower(), metadata=metadata, bbox_inches="tight"
        )
    return path
