"""Numbers as people write them in tables: decimal commas, thousands set apart, units around them.

A column is read in one way, the same for all its cells, and what was decided is told. What could
mean two numbers is left as it is, to be refused by its line.
"""

import re
from collections.abc import Callable, Sequence

Way = Callable[[str], str]

_BLANKS = " \u00a0\u202f\u2009"
_UNITS = r"[$€£¥₹₩₽₺₪฿]|US\$|(?:USD|EUR|GBP|CHF|JPY|CNY|RMB|CAD|AUD|INR|SEK|NOK|DKK|PLN|CZK|BRL)"
_AROUND = re.compile(
    rf"(?P<sign>[+-]?)(?P<before>{_UNITS})?[{_BLANKS}]?(?P<inner>[+-]?)"
    rf"(?P<body>\d[\d.,'’{_BLANKS}]*)(?P<after>[{_BLANKS}]?(?:%|元|{_UNITS}))?"
)
"""A number with what may stand around it: -$1,234.50, 12,5 %, 1 200 €."""
_COMMA = re.compile(r"\s*[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?\s*")
"""A number as most of Europe writes it: 1.234,56."""
_POINT = re.compile(r"\s*[+-]?\d*\.(\d{1,2}|\d{4,})\s*")
"""A number that cannot be one: 1.5 (while 1.500 could be)."""
_COMMAS_APART = re.compile(r"[+-]?\d{1,3}(,\d{2,3})*,\d{3}(\.\d*)?")
"""1,234,567.89; 12,34,567 in India."""
_EITHER = re.compile(r"\s*[+-]?[1-9]\d{0,2},\d{3}\s*")
"""7,500, which is 7.5 in some countries and 7500 in others (while 0,500 and 1234,567 are not)."""
_THREE = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}")
"""1.234, which in some countries is 1234."""
_SHORT = re.compile(r"[+-]?\d{1,3}")
"""A whole number that no country sets apart."""


def plainly(
    columns: dict[str, list[str]], separator: str
) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """The columns with every number as Python writes it, and notes on what was decided.

    `separator` is what stands between the cells. Where it is a comma, 12,345 is taken for 12345:
    who means 12.345 by it would hardly write commas between cells, too. 7,5 is 7.5 everywhere.

    >>> plainly({"price": ["$1,200.50", "$950.00", ""]}, ",")
    ({'price': ['1200.50', '950.00', '']}, ('units left out: price ($)', 'thousands apart: price'))
    """
    read: dict[str, list[str]] = {}
    changed: dict[str, list[str]] = {}
    for name, cells in columns.items():
        for kind, decide in _WAYS.items():
            unit, way = decide(cells, separator)
            if way is not None:
                cells = [way(cell) for cell in cells]
                changed.setdefault(kind, []).append(name + (f" ({unit})" if unit else ""))
        read[name] = cells
    return read, tuple(f"{kind}: {', '.join(changed[kind])}" for kind in _WAYS if kind in changed)


def _numbers(cells: Sequence[str]) -> list[str]:
    """The cells that say a number, well or badly written."""
    return [c.strip() for c in cells if any(map(str.isdecimal, c)) and not c.startswith("#")]


def _same(cell: str) -> str:
    return cell


def _minus(cells: Sequence[str], separator: str) -> tuple[str, Way | None]:
    """The minus sign of typesetters, U+2212, for which Python has a hyphen."""
    signed = any(c.startswith("\u2212") for c in cells)
    return "", (lambda c: re.sub("^\\s*\u2212(?=\\S*\\d)", "-", c)) if signed else None


def _units(cells: Sequence[str], separator: str) -> tuple[str, Way | None]:
    """A currency or a percent sign, the same at every number."""
    around = [_AROUND.fullmatch(c) for c in _numbers(cells)]
    units = {((m["before"] or "") + (m["after"] or "").strip()) if m else "" for m in around}
    if len(units) != 1 or "" in units:
        return "", None
    return units.pop(), _bare


def has_unit(cell: str) -> bool:
    """Whether a cell is a number with a currency or a percent sign."""
    match = _AROUND.fullmatch(cell.strip())
    return match is not None and bool(match["before"] or match["after"])


def _bare(cell: str) -> str:
    match = _AROUND.fullmatch(cell.strip())
    return match["sign"] + match["inner"] + match["body"].strip() if match else cell


def _apart(cells: Sequence[str], separator: str) -> tuple[str, Way | None]:
    """Thousands set apart by a space, an apostrophe or a comma, as far as that is certain."""
    numbers = _numbers(cells)
    for mark in (*_BLANKS, "'", "’"):
        marked = [c for c in numbers if mark in c]
        groups = re.compile(rf"[+-]?\d{{1,3}}({mark}\d{{3}})+([.,]\d+)?")
        if marked and all(map(groups.fullmatch, marked)):
            return "", _without(mark, groups)
    marked = [c for c in numbers if "," in c]
    pointed = any(_POINT.fullmatch(c) for c in numbers)
    certain = separator == "," or pointed or any("." in c or c.count(",") > 1 for c in marked)
    zero = any(re.match("[+-]?0", c) for c in marked)
    if marked and certain and not zero and all(map(_COMMAS_APART.fullmatch, marked)):
        return "", _without(",", _COMMAS_APART)
    return "", None


def _without(mark: str, groups: re.Pattern[str]) -> Way:
    return lambda cell: cell.replace(mark, "") if groups.fullmatch(cell.strip()) else cell


def _decimal_commas(cells: Sequence[str], separator: str) -> tuple[str, Way | None]:
    """1.234,56 for 1234.56: some cell can mean nothing else, none refutes it.

    7,5 can mean nothing else; 7,500 could be thousands, and 7.5 has a decimal point.
    """
    commas = [c for c in cells if "," in c or c.count(".") > 1]
    certain = any(_COMMA.fullmatch(c) and not _EITHER.fullmatch(c) for c in commas)
    if not certain or any(_POINT.fullmatch(c) for c in cells if "." in c):
        return "", None
    return "", lambda c: c.replace(".", "").replace(",", ".") if _COMMA.fullmatch(c) else c


def _three_digits(cells: Sequence[str], separator: str) -> tuple[str, Way | None]:
    """1.234 throughout, in a table of a country that may mean 1234 by it: read as it stands.

    So is 1.234 beside 567, whatever the separator: three decimals or none may be thousands.
    """
    numbers = _numbers(cells)
    three = [c for c in numbers if _THREE.fullmatch(c)]
    rest = [c for c in numbers if not _THREE.fullmatch(c)]
    if not three or not (rest or separator == ";") or not all(map(_SHORT.fullmatch, rest)):
        return "", None
    return f"{three[0]} is not {three[0].replace('.', '')}", _same


_WAYS = {
    "minus signs": _minus,
    "units left out": _units,
    "thousands apart": _apart,
    "decimal commas": _decimal_commas,
    "decimal points": _three_digits,
}
