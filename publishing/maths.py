"""Equations as MathML: written in LaTeX in pages, in plain letters in docstrings.

Browsers draw MathML by themselves, so that the site needs neither a script nor a font for it.
"""

import html
import re
import textwrap
import unicodedata
from typing import Literal

from latex2mathml.converter import convert

_ARITHMATEX = re.compile(
    r'(?P<before>[(（“]*)<(?P<tag>span|div) class="arithmatex">'
    r"(?:\\\((?P<inline>.*?)\\\)|\\\[(?P<block>.*?)\\\])</(?P=tag)>(?P<after>[.,;:!?)，。；：！？、）”]*)",
    re.DOTALL,
)
"""An equation, and the punctuation that must not be torn from it at the end of a line."""


def render(page: str) -> str:
    """Every equation that Markdown has marked, as MathML."""
    return _ARITHMATEX.sub(_mathml, page)


def _mathml(found: re.Match[str]) -> str:
    inline = found["inline"]
    tex = html.unescape(found["block"] if inline is None else inline).strip()
    drawn = mathml(tex, "block" if inline is None else "inline")
    drawn = drawn.replace("<math ", '<math lang="en" ', 1)  # Chinese fonts raise the dots of "…"
    if inline is None:
        return f'<div class="equation">{drawn}</div>'
    whole = found["before"] + drawn + found["after"]
    return f'<span class="whole">{whole}</span>' if whole != drawn else drawn


def mathml(tex: str, display: Literal["block", "inline"]) -> str:
    """LaTeX as MathML; what the library does not know is refused rather than shown as typed."""
    drawn = convert(tex.replace("{aligned}", "{align*}"), display=display)
    if unknown := re.search(r"<m[io]>(\\\w+|&(?:amp;)?)</m[io]>", drawn):
        raise ValueError(f"{unknown[1]} cannot be drawn as MathML, in {tex}")
    return drawn


SYMBOLS = {
    "Σ": r"\sum ", "∏": r"\prod ", "Π": r"\prod ", "∂": r"\partial ", "∇": r"\nabla ",
    "ᵀ": r"^{\top}",
    "⊙": r"\odot ", "·": r"\cdot ", "×": r"\times ", "≤": r"\le ", "≥": r"\ge ", "≈": r"\approx ",
    "≠": r"\ne ", "∝": r"\propto ", "∈": r"\in ", "…": r"\ldots ", "←": r"\leftarrow ",
    "→": r"\to ",
    "‖": r"\Vert ", "²": "^{2}", "³": "^{3}", "⁻¹": "^{-1}", "√": r"\surd ", "∞": r"\infty ",
    "½": r"\tfrac{1}{2}", "%": r"\%", "&": r"\&", "#": r"\#",
}  # fmt: skip
GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "η": "eta", "θ": "theta",
    "λ": "lambda", "μ": "mu", "ξ": "xi", "π": "pi", "σ": "sigma", "τ": "tau", "φ": "phi",
    "ω": "omega",
    "Δ": "Delta", "Φ": "Phi", "ψ": "psi", "ρ": "rho", "κ": "kappa", "ζ": "zeta", "χ": "chi",
}  # fmt: skip
FUNCTIONS = {
    "tanh",
    "softmax",
    "exp",
    "log",
    "min",
    "max",
    "diag",
    "sigmoid",
    "relu",
    "argmax",
    "mean",
}
SHORT_WORDS = {"al", "at", "et", "if", "in", "of", "or", "to"}
ACCENTS = {"\u0302": "hat", "\u0304": "bar", "\u0303": "tilde"}
RELATIONS = "=≤≥≈∝←<"
MARKS = set(SYMBOLS) | set(GREEK) | set("_^=") | set("₀₁₂₃₄₅₆₇₈₉")

_TOKEN = re.compile(
    r"(?P<script>[_^]\{[^{}]*\})|(?P<group>[_^]\([^()]*\))|(?P<short>[_^]-?[0-9A-Za-zα-ω]+)"
    r"|(?P<word>[A-Za-z]{2,})|(?P<gap> {2,})|(?P<accented>\w[\u0302\u0303\u0304])|(?P<other>.)"
)


# x^(t)ᵀ has two superscripts, which LaTeX takes only from two things
_TWO_WORDS = re.compile(r" \} \\text\{ ")
_TWO_SCRIPTS = re.compile(r"(\^\{(?:[^{}]|\{[^{}]*\})*\})(?=\^)")


def latex(line: str) -> str:
    r"""One line of a docstring's equation as LaTeX.

    >>> latex("h_{t-1} = tanh(x_t W_xh) + Σ_i ξ_i")
    'h_{t-1} = \\operatorname{tanh}(x_{t} W_{xh}) + \\sum _{i} \\xi _{i}'
    """
    line = unicodedata.normalize("NFC", line)
    line = "".join(_decomposed(c) for c in line)
    tex = "".join(_token(found) for found in _TOKEN.finditer(line.strip()))
    return _TWO_SCRIPTS.sub(r"\1{}", _TWO_WORDS.sub(" ", tex))


def _decomposed(character: str) -> str:
    """ŷ as y and its hat; other letters as they are."""
    apart = unicodedata.normalize("NFD", character)
    return apart if len(apart) == 2 and apart[1] in ACCENTS else character


def _token(found: re.Match[str]) -> str:
    text = found[0]
    match found.lastgroup:
        case "script":
            return f"{text[0]}{{{latex(text[2:-1])}}}"
        case "group":
            return f"{text[0]}{{({latex(text[2:-1])})}}"
        case "short":
            return f"{text[0]}{{{_letters(text[1:])}}}"
        case "word":
            return _word(text)
        case "gap":
            return r"\quad "
        case "accented":
            return rf"\{ACCENTS[text[1]]}{{{text[0]}}}"
    return _letters(text)


def _word(text: str) -> str:
    if text in FUNCTIONS:
        return rf"\operatorname{{{text}}}"
    if len(text) <= 3 and text[0] == "d":  # dh, dW: the derivative of a letter
        return text
    return rf"\text{{ {text} }}" if len(text) > 2 or text in SHORT_WORDS else text


def _letters(text: str) -> str:
    return "".join(_letter(c) for c in text)


def _letter(c: str) -> str:
    if c in GREEK:
        return rf"\{GREEK[c]} "
    if c in "₀₁₂₃₄₅₆₇₈₉":
        return f"_{{{unicodedata.digit(c)}}}"
    return SYMBOLS.get(c, c)


def is_equation(paragraph: list[str]) -> bool:
    """Whether every line of a paragraph is mathematics rather than prose.

    >>> is_equation(["h_t = tanh(a_t)"]), is_equation(["The state h_t = 0 before any text."])
    (True, False)
    """
    return all(
        any(c in line for c in RELATIONS) and any(c in MARKS - {"="} for c in line)
        and len(_prose(line)) <= 2 and "`" not in line
        and not line.startswith((">>>", "-", "|")) and not line.endswith((".", ":"))
        for line in paragraph
    )  # fmt: skip


def _prose(line: str) -> list[str]:
    words = re.findall(r"(?<![_{^\w])[a-z]{3,}(?![\w(])", line.split("  (")[0])
    return [word for word in words if word not in FUNCTIONS]


def typeset(docstring: str) -> str:
    """A docstring with its equations marked for `render`, and its examples as examples."""
    paragraphs = re.split(r"\n[ \t]*\n", docstring)
    return "\n\n".join(_paragraph(p) for p in paragraphs)


_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+(?=\n|\Z)")


def typeset_page(markdown: str) -> str:
    """A page of the guide with the equations that stand indented in it marked for `render`."""
    parts = _FENCE.split(markdown)
    return "".join(part if i % 2 else _INDENTED.sub(_drawn, part) for i, part in enumerate(parts))


def _drawn(found: re.Match[str]) -> str:
    made = _paragraph(textwrap.dedent(found[0]).rstrip())
    return f"{made}\n" if made.startswith("$$") else found[0]


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    if lines[0].lstrip().startswith(">>>"):
        return f"```pycon\n{textwrap.dedent(text)}\n```"
    if not is_equation(lines):
        return text
    rows = r" \\ ".join(_aligned(latex(line)) for line in lines)
    equation = rf"\begin{{aligned}} {rows} \end{{aligned}}"
    try:
        mathml(equation, "block")
    except Exception:  # the library has a class for each way to be wrong, and no base of them
        return f"```text\n{textwrap.dedent(text)}\n```"  # as it was typed
    return f"$${equation}$$"


def _aligned(line: str) -> str:
    """An alignment mark before the first relation of a row."""
    return re.sub(r" (\+?=|\\leftarrow|\\le|\\ge|\\approx|\\propto) ", r" &\1 ", line, count=1)
