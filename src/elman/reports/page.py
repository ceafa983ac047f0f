"""One self-contained HTML page: the look of a run's report, no word of its content.

The page loads nothing and runs nothing (its own policy forbids both). It follows the reader's
light or dark setting; figures follow along, because their colours become variables of the page.
"""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from matplotlib.figure import Figure

from elman.figures.style import COLOURS, house

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_DARK = ("#4DA3DC", "#F0894A", "#35C296", "#E3A3C7", "#8CCBF2", "#F2C14E", "#EEEEEE")
"""The house colours on a dark ground, in the same order."""

_GREYS = {
    "#000000": "ink",
    "#333333": "ink",
    "#767676": "soft",
    "#dddddd": "rule",
    "#ffffff": "paper",
}

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #222; --soft: #666; --rule: #ddd;
  --panel: #f6f7f8; LIGHT }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e4e4e2; --soft: #a0a3a7;
  --rule: #3a3d42; --panel: #202327; DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2.2rem 1.4rem 3rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; }
p { max-width: 44rem; margin: .4rem 0 .8rem; }
.soft, figcaption, th, footer { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .7rem;
  margin: 1.4rem 0; }
.tile { background: var(--panel); border-radius: .5rem; padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.5rem; font-weight: 600; line-height: 1.25;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; display: block; }
.narrow { display: none; }
figcaption, .caption { font-size: .9rem; max-width: 44rem; margin-top: .3rem; }
table { border-collapse: collapse; font-size: .93rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .28rem 1.6rem .28rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
th { font-weight: 500; } td.number, th.number { text-align: right; }
tr.own td { font-weight: 600; }
.columns { columns: 2 22rem; column-gap: 2.4rem; }
.columns table { width: 100%; break-inside: avoid; margin-bottom: 1.1rem; }
.columns td:first-child { white-space: nowrap; }
.columns td:last-child { text-align: right; padding-right: 0; overflow-wrap: anywhere; }
pre { background: var(--panel); border-radius: .5rem; padding: .7rem .9rem; margin: .3rem 0 1rem;
  white-space: pre-wrap; overflow-wrap: anywhere; font: .86rem/1.5 ui-monospace, "SF Mono", Menlo,
  "DejaVu Sans Mono", monospace; }
h3 { font-size: 1rem; margin: 1.8rem 0 .5rem; }
.sample h3 { font-size: .9rem; font-weight: 500; margin: 1rem 0 .2rem; color: var(--soft); }
.scroll { overflow-x: auto; }
.marked { background: var(--panel); border-radius: .5rem; padding: .8rem .9rem; max-width: none;
  line-height: 2; overflow-wrap: anywhere; font-family: ui-monospace, "SF Mono", Menlo,
  "DejaVu Sans Mono", monospace; }
.marked span { padding: .25em .08em; border-radius: .2em; }
.for { background: color-mix(in srgb, var(--line0) var(--much), transparent); }
.against { background: color-mix(in srgb, var(--line1) var(--much), transparent); }
.marked b { padding: .2em .35em; border: 1.5px solid var(--ink); border-radius: .3em; }
footer { margin-top: 2.5rem; font-size: .85rem; }
@media (max-width: 40rem) {
  body { padding: 1.3rem 1rem 2.2rem; }
  h1 { font-size: 1.45rem; }
  .wide { display: none; } .narrow { display: block; }
  .tiles { grid-template-columns: repeat(2, 1fr); gap: .5rem; }
  .tile { padding: .55rem .7rem; } .tile b { font-size: 1.2rem; }
  table { width: 100%; } th, td { padding-right: .6rem; }
  .scroll td:first-child { min-width: 8.4rem; } .scroll table { font-size: .87rem; }
  th:last-child, td:last-child { padding-right: 0; }
  .columns td:first-child { white-space: normal; }
  footer, .soft, figcaption { overflow-wrap: anywhere; }
}
@media print { body { max-width: none; } .sample, figure, table { break-inside: avoid; } }
"""


def page(title: str, body: Iterable[str]) -> str:
    """The whole document around the parts of its body, which are HTML already."""
    light, dark = (
        " ".join(f"--line{i}: {colour};" for i, colour in enumerate(colours))
        for colours in (COLOURS, _DARK)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title>
<style>{_STYLE.replace("LIGHT", light).replace("DARK", dark)}</style>
</head>
<body>
{"".join(part + chr(10) for part in body)}</body>
</html>
"""


def text(words: object) -> str:
    """Anything as HTML text: markup escaped, control characters and lone surrogates shown.

    >>> text("<b> \\x1b")
    '&lt;b&gt; ␛'
    """
    shown = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda c: chr(0x2400 + ord(c.group())), str(words))
    return escape(re.sub("[\ud800-\udfff\x7f-\x9f]", "\ufffd", shown))


def tiles(facts: Mapping[str, str]) -> str:
    """The few numbers one looks for first."""
    cells = (
        f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>'
        for name, value in facts.items()
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], own: int = -1) -> str:
    """A table whose first column is words and whose others are numbers; row `own` stands out."""
    kinds = ["", *[' class="number"'] * (len(head) - 1)]
    heads = "".join(f"<th{kind}>{text(h)}</th>" for kind, h in zip(kinds, head, strict=True))
    lines = [f"<tr>{heads}</tr>"]
    for number, row in enumerate(rows):
        cells = "".join(f"<td{kind}>{text(c)}</td>" for kind, c in zip(kinds, row, strict=True))
        kind = ' class="own"' if number == own else ""
        lines.append(f"<tr{kind}>{cells}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def marked(words: Sequence[str], weights: Sequence[float], last: str) -> str:
    """A text whose words are shaded by weight, those above and below zero in two colours.

    >>> marked(["a"], [0.5], "b")
    '<p class="marked"><span class="for" style="--much: 80%">a</span> <b>b</b></p>'
    """
    most = max(map(abs, weights), default=0.0) or 1.0
    spans = (
        f'<span class="{"for" if weight >= 0 else "against"}" '
        f'style="--much: {80 * abs(weight) / most:.0f}%">{text(word)}</span>'
        for word, weight in zip(words, weights, strict=True)
    )
    return f'<p class="marked">{"".join(spans)} <b>{text(last)}</b></p>'


def settings(groups: Mapping[str, Mapping[str, object]]) -> str:
    """Names and values, group by group, in two columns where there is room."""
    tables = []
    for group, values in groups.items():
        rows = "".join(
            f"<tr><td>{text(name)}</td><td>{text(value)}</td></tr>"
            for name, value in values.items()
        )
        tables.append(f'<table><tr><th colspan="2">{text(group)}</th></tr>{rows}</table>')
    return f'<div class="columns">{"".join(tables)}</div>'


def figure(drawing: Figure, name: str, caption: str, narrow: Figure | None = None) -> str:
    """A matplotlib figure as inline SVG in the colours of the page, with words below it.

    `narrow` is the same drawn for the width of a telephone, shown there in its place.
    """
    label = f'role="img" aria-label="{text(caption)}"'
    if narrow is None:
        svg = inline_svg(drawing, name).replace("<svg ", f"<svg {label} ", 1)
    else:
        svg = "".join(
            inline_svg(each, f"{name}-{kind}").replace("<svg ", f'<svg class="{kind}" {label} ', 1)
            for each, kind in ((drawing, "wide"), (narrow, "narrow"))
        )
    return f"<figure>{svg}<figcaption>{text(caption)}</figcaption></figure>"


def inline_svg(drawing: Figure, name: str) -> str:
    """SVG to stand inside a page: no prologue, no fixed colours or size, ids unique by `name`."""
    buffer = io.StringIO()
    with house():
        drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?)width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for index, colour in enumerate(COLOURS[:-1]):  # the last is black, which is ink
        svg = re.sub(colour, f"var(--line{index})", svg, flags=re.IGNORECASE)
    for colour, role in _GREYS.items():
        svg = re.sub(colour, f"var(--{role})", svg, flags=re.IGNORECASE)
    # Text that matplotlib leaves black has no colour of its own.
    return svg.replace("<svg ", '<svg fill="var(--ink)" ', 1)
