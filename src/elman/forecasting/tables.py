"""A table of cells with names above and line numbers beside: CSV, Parquet, or a data frame.

Nothing is interpreted here; `series` and `dates` read cells as numbers and as times. What a file
gets wrong as a file (its encoding, quotes, ragged rows, repeated names) is refused here, by line.
"""

import codecs
import csv
import io
import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from elman.errors import MissingSource, UserError
from elman.files import as_path, drained, read_bytes
from elman.forecasting.written import has_unit, plainly

Cell = Any
"""Text from a CSV file; whatever a frame holds; None where nothing is."""

_DELIMITERS = (",", ";", "\t", "|")
_SIGNATURES = {
    b"PK\x03\x04": ("an Excel workbook or another zip file", "save the sheet as CSV"),
    b"\xd0\xcf\x11\xe0": ("an old Excel workbook", "save the sheet as CSV"),
    b"\x1f\x8b": ("compressed with gzip", "gunzip -c FILE | elman forecast -"),
    b"%PDF": ("a PDF document", "save the table as CSV"),
    b"{": ("JSON", "save the table as CSV or Parquet"),
    b"[": ("JSON", "save the table as CSV or Parquet"),
    b"<": ("a web page or XML", "save the table itself as CSV"),
}
"""How files begin that people take for CSV, what they are, and what to do."""


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length by name, and where in the source each row stands."""

    name: str
    columns: dict[str, list[Cell]]
    rows: list[int]
    unit: str = "line"
    notes: tuple[str, ...] = ()
    """What was decided in reading it."""

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, row: int) -> str:
        """The place of a row in the words of its source: "line 7"."""
        return f"{self.unit} {self.rows[row]}"

    def take(self, rows: Sequence[int]) -> "Table":
        """Some of the rows, in this order."""
        columns = {name: [cells[i] for i in rows] for name, cells in self.columns.items()}
        return Table(self.name, columns, [self.rows[i] for i in rows], self.unit, self.notes)

    def column(self, name: str, flag: str) -> list[Cell]:
        """The cells of a column that the user named with `flag`."""
        if name not in self.columns:
            raise UserError(
                f"{flag} {name!r} is not a column",
                hint=f"the columns are {', '.join(self.columns)}",
            )
        return self.columns[name]


def is_empty(cell: Cell) -> bool:
    """Whether a cell says nothing: absent, blank, NaN, NaT, or one of the words for it."""
    if cell is None:
        return True
    if isinstance(cell, str):
        return cell.strip().lower() in ("", "na", "n/a", "nan", "null", "none", "-", "#n/a", ".")
    unlike = cell != cell  # as NaN and NaT are; pandas' NA cannot say
    return unlike is not False and (type(unlike).__name__ == "NAType" or bool(unlike))


def read(source: str) -> Table:
    """A table from a .csv or .parquet file, or from CSV on stdin ("-")."""
    if source == "-":
        return read_csv(_stdin_bytes(), "stdin", "stdin")
    if not source:
        raise UserError("an empty name names no table", hint="name a .csv or .parquet file")
    path = as_path(source)
    if path.is_dir():
        raise UserError(f"{source} is a folder, not a table", hint="name one .csv or .parquet file")
    if not path.exists():
        raise MissingSource(
            f"no series or file named {source!r}", hint="a .csv or .parquet file, or - for stdin"
        )
    if path.suffix.lower() in (".parquet", ".pq"):
        return _read_parquet(path)
    return read_csv(read_bytes(path), path.stem, source)


def _stdin_bytes() -> bytes:
    stream = cast("BinaryIO | None", getattr(sys.stdin, "buffer", None))
    return drained(stream, "stdin") if stream is not None else sys.stdin.read().encode()


def read_csv(content: bytes, name: str, source: str) -> Table:
    """A CSV table; commas, semicolons, tabs or bars between the cells, as its header has them."""
    lines = io.StringIO(_decoded(content, source), newline="")
    delimiter = _delimiter(lines)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    has_separator = _SEPARATOR.match(lines.getvalue()) is not None
    try:
        header, title = _first_row(reader, has_separator, source)
        rows = _rows_below(header, title, reader, source)
    except csv.Error as wrong:
        raise UserError(
            f"{source}, line {reader.line_num}: {wrong}", hint="correct that line"
        ) from wrong
    while rows and rows[-1][1] == [""]:  # blank lines after the last value of a one-column table
        rows.pop()
    if not rows:
        raise UserError(
            f"{source} holds no rows of data", hint="a header line, then one row a step"
        )
    columns = {column: [row[j] for _, row in rows] for j, column in enumerate(header)}
    columns, notes = plainly(columns, delimiter)
    return Table(name, columns, [line for line, _ in rows], notes=notes)


def _first_row(reader: Any, has_separator: bool, source: str) -> tuple[list[str], int]:
    """The header and its line; Excel's "sep=;" before it is not the header."""
    for row in reader:
        row = _trimmed(row, 0)
        if row and not (has_separator and reader.line_num == 1):
            return _header(row, source, reader.line_num), reader.line_num
    return [], 0


def _rows_below(
    header: list[str], title: int, reader: Any, source: str
) -> list[tuple[int, list[str]]]:
    """Every row with the line it stands on; `title` is the header's."""
    rows: list[tuple[int, list[str]]] = []
    blank = 0  # the first line that says nothing
    for row in reader:
        row = _trimmed(row, len(header))
        if len(header) > 1 and not any(c.strip() for c in row):
            blank = blank or reader.line_num
            continue
        if blank:
            raise UserError(
                f"{source}, line {blank} is blank, and data follows it",
                hint="delete the line, or fill in its time and leave the other cells empty",
            )
        row = row or [""]
        if len(row) != len(header):
            mend = f"; delete line {title} if it is a title" if not rows else ""
            raise _wrong_width(header, row, f"{source}, line {reader.line_num}", mend)
        if not rows:
            _check_names(header, row, source, title)
        rows.append((reader.line_num, row))
    return rows


def _wrong_width(header: list[str], row: list[str], where: str, mend: str) -> UserError:
    short = len(row) < len(header)
    place = f"column {header[len(row)]!r}" if short else f"column {len(header) + 1}"
    why = "has no cell" if short else "has a cell and no name"
    return UserError(
        f"{where}, {place} {why}: the row does not have the "
        f"{len(header)} cells that the header names, but {len(row)}",
        hint=f"correct that line; a cell that holds a comma needs quotes{mend}",
    )


def _trimmed(row: list[str], cells: int) -> list[str]:
    """A row without the blank cells beyond so many: Excel writes them where a sheet once was."""
    while len(row) > cells and not row[-1].strip():
        row = row[:-1]
    return row


_DATED = re.compile(
    r"(\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T ].*)?|\d{4}[-/](\d{1,2}|W\d\d?(-\d)?)"
    r"|([A-Z][a-z]+, )?\d{1,2}[-. ]+[A-Z][a-z]+[-., ]+\d{2,4}( .*)?"
    r"|([A-Z][a-z]+,? )?[A-Z][a-z]+ \d{1,2},? \d{4}( .*)?"
    r"|(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*[- ]\d{2,4}|\d{4}年.*"
    r"|\d{4}[ /-]?Q[1-4]|Q[1-4][ /-]?\d{4}|\d{4}M\d\d|\d{8}T\d{4,6}Z?)$"
)
"""A date, or a month: what a row begins with, and no column is called."""
_COUNTED = re.compile(r"\d{8,}$")
"""A day in digits, or seconds since 1970: too long for the number of a column."""
_NUMBER = re.compile(r"[-+]?\d[\d.,'\u00a0\u202f ]*")
"""A number as anyone may write it."""
_SEPARATOR = re.compile(r"sep=([,;|\t])\r?\n", re.IGNORECASE)


def _decoded(content: bytes, source: str) -> str:
    bracketed = re.match(rb"<\w+>[,;|\t]", content)  # <DATE>,<CLOSE>: names, as traders' have them
    for start, (what, hint) in _SIGNATURES.items():
        if content.startswith(start) and not bracketed:
            raise UserError(f"{source} is {what}, not CSV", hint=hint)
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # Excel's Unicode text
    encoding = "utf-16" if wide else "utf-8-sig"
    file = "FILE" if source == "stdin" else shlex.quote(source)
    if not wide and (code := _unmarked(content)):
        raise UserError(
            f"{source} is UTF-16 text without the mark that says so",
            hint=f"iconv -f {code} -t utf-8 {file} makes it UTF-8",
        )
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as wrong:
        line = content[: wrong.start].count(b"\n") + 1
        code, named = ("gb18030", "Chinese") if _is_chinese(content) else ("latin1", "Latin-1")
        raise UserError(
            f"{source} is not {'UTF-16' if wide else 'UTF-8'} text (byte {wrong.start}, line "
            f"{line})",
            hint=f"iconv -f {code} -t utf-8 {file} makes it so, if it is {named}",
        ) from wrong
    if "\0" in text:
        before = text[: text.index("\0")]
        line = before.count("\n") + 1
        column = sum(before.rpartition("\n")[2].count(c) for c in ",;\t") + 1
        raise UserError(
            f"{source}, line {line}, column {column} holds a NUL character",
            hint="correct that cell",
        )
    return text


def _unmarked(content: bytes) -> str:
    """The kind of UTF-16 whose every second byte is mostly 0, as it is of Latin letters."""
    first = content[:400]
    for code, high in (("utf-16le", first[1::2]), ("utf-16be", first[::2])):
        if 2 * high.count(0) > len(high) > 1:
            return code
    return ""


def _is_chinese(content: bytes) -> bool:
    """Whether bytes that are not UTF-8 come in pairs, and pairs in words: as GBK has Chinese."""
    words = [len(word) for word in re.findall(rb"[\x80-\xff]+", content)]
    return all(length % 2 == 0 for length in words) and max(words, default=0) >= 4


def _delimiter(lines: io.StringIO) -> str:
    """The separator that cuts the first rows into as many cells each.

    Where a comma does so and another, too, the comma is one inside of numbers or dates. Excel may
    name the separator in a line before the header.
    """
    text = lines.getvalue()
    if named := _SEPARATOR.match(text):
        return named[1]

    def fits(delimiter: str) -> tuple[bool, bool, int, bool]:
        header, *rows = _first_rows(text, delimiter) or [[]]
        width = len(_trimmed(header, 0))
        alike = width > 1 and all(len(_trimmed(row, width)) == width for row in rows)
        return alike, alike and delimiter != ",", width, delimiter == ","

    return max(_DELIMITERS, key=fits)


def _first_rows(text: str, delimiter: str) -> list[list[str]]:
    """The first rows that are not blank, cut in this way."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows = (row for row in reader if any(cell.strip() for cell in row))
    try:
        return list(islice(rows, 20))
    except csv.Error:  # said, with its line, by whoever reads on
        return []


def _header(row: list[str], source: str, line: int) -> list[str]:
    names = [cell.strip() for cell in row]
    if len(names) > 1 and not names[0] and "index" not in names:  # as pandas writes a frame
        names[0] = "index"
    for j, name in enumerate(names):
        if not name:
            raise UserError(
                f"{source}, line {line}: column {j + 1} of the header has no name",
                hint="name every column",
            )
        if name in names[:j]:
            raise UserError(
                f"{source}, line {line}: the header names {name!r} twice "
                f"(columns {names.index(name) + 1} and {j + 1})",
                hint="rename one of them",
            )
    if all(_is_number(name) or _NUMBER.fullmatch(name) or _DATED.match(name) for name in names):
        shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        dates = "" if all(_is_number(name) for name in names) else " and dates"
        raise UserError(
            f"{source}, line {line}: the header {shown} is all numbers{dates}",
            hint="put a line with the columns' names first",
        )
    return names


def _check_names(header: list[str], row: list[str], source: str, line: int) -> None:
    """Refuse a header that is a row of data: a date above a date, $5 above $6, a long number.

    Unless a word stands above a number or a date: then long numbers are names, of articles say.
    """
    kinds = (_DATED.match, has_unit, _COUNTED.match)
    pairs = [(name, cell.strip()) for name, cell in zip(header, row, strict=True)]
    if any(not _is_data(name) and _is_data(below) for name, below in pairs):
        return
    for name, below in pairs:
        if any(kind(name) and kind(below) for kind in kinds):
            raise UserError(
                f"{source}, line {line}: the header has {name!r} above {below!r}: it is a row of "
                "data",
                hint="put a line with the columns' names first",
            )


def _is_data(text: str) -> bool:
    """Whether a cell is a number or a date as anyone may write it."""
    return bool(_NUMBER.fullmatch(text) or _DATED.match(text) or has_unit(text) or _is_number(text))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_parquet(path: Path) -> Table:
    try:
        import pyarrow.parquet as parquet
    except ImportError as absent:
        raise UserError(
            f"reading {path.name} needs pyarrow",
            hint="pip install 'elman[forecast]', or save it as .csv",
        ) from absent
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as wrong:
        raise UserError(f"{path} is not a Parquet file: {wrong}", hint="check the file") from wrong
    return from_frame(table, path.stem)


def from_frame(frame: Any, name: str = "frame") -> Table:
    """A pandas, polars or pyarrow table, or a mapping of names to columns. No copy of the library.

    A pandas frame indexed by dates keeps them, as a column called by the index's name or `ds`, and
    so does one whose index has a name or holds no numbers (`index`, or `level_0` … of several); a
    pandas series gives its own name.
    """
    if hasattr(frame, "to_pydict"):  # pyarrow
        columns = frame.to_pydict()
    elif hasattr(frame, "to_dicts"):  # polars
        columns = frame.to_dict(as_series=False)
    elif hasattr(frame, "iloc"):  # pandas
        name = str(getattr(frame, "name", None) or name)
        columns = _pandas_columns(frame)
    elif isinstance(frame, Mapping):
        columns = {k: list(v) for k, v in frame.items()}
    else:
        raise UserError(
            f"a {type(frame).__name__} is not a table",
            hint="a pandas or polars frame, a pyarrow table, or a mapping of names to columns",
        )
    names = [str(k) for k in columns]
    if repeated := [k for j, k in enumerate(names) if k in names[:j]]:
        raise UserError(f"the frame has two columns {repeated[0]!r}", hint="rename one of them")
    columns = {str(k): [_plain(cell) for cell in v] for k, v in columns.items()}
    lengths = {k: len(v) for k, v in columns.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"columns differ in length: {lengths}", hint="one value a row in each")
    rows = next(iter(lengths.values()), 0)
    if not rows:
        raise UserError(f"{name} holds no rows of data", hint="one row a step")
    return Table(name, columns, list(range(1, rows + 1)), "row")


def _plain(cell: Cell) -> Cell:
    """A cell of an array as Python has it: a number, a truth value, a date."""
    if isinstance(cell, np.datetime64):
        days = np.datetime_data(cell)[0] == "D"
        return cell.item() if days else cell.astype("datetime64[us]").item()
    return cell.item() if isinstance(cell, np.generic) else cell


def _pandas_columns(frame: Any) -> dict[Any, list[Cell]]:
    if frame.ndim == 1:
        frame = frame.to_frame(frame.name if frame.name is not None else "y")
    repeated = [c for c in frame.columns if list(frame.columns).count(c) > 1]
    if repeated:
        raise UserError(f"the frame has two columns {repeated[0]!r}", hint="rename one of them")
    columns = {c: frame[c].tolist() for c in frame.columns}
    index = frame.index
    if type(index).__name__ == "PeriodIndex":
        return {str(index.name or "ds"): [str(t) for t in index], **columns}
    if type(index).__name__ == "DatetimeIndex":
        return {str(index.name or "ds"): index.tolist(), **columns}
    kept: dict[Any, list[Cell]] = {}
    for j in range(index.nlevels):
        level = index.get_level_values(j)
        if level.name is not None:
            kept[level.name] = level.tolist()
        elif _says(level):
            kept[f"level_{j}" if index.nlevels > 1 else "index"] = level.tolist()
    return kept | columns


def _says(index: Any) -> bool:
    """Whether an index without a name holds more than the numbers of its rows."""
    return index.dtype.kind not in "iufb"


def numbers(table: Table, name: str, flag: str = "--column") -> np.ndarray:
    """A column as float64, NaN where a cell is empty or infinite; what is not a number is refused.

    Python's `float` reads "1_000" and "infinity" too; people who type those mean something else.
    Of an input, true is 1 and false is 0.
    """
    cells = table.column(name, flag)
    values = np.empty(len(cells))
    for i, cell in enumerate(cells):
        try:
            values[i] = np.nan if is_empty(cell) else _number(cell, flag)
        except UserError as wrong:
            place = f"{table.where(i)}, column {name!r}: {_shown(cell)}"
            raise UserError(f"{place} {wrong.message}", hint=wrong.hint) from None
    largest = np.abs(values[~np.isnan(values)]).max(initial=0.0)
    if 0 < largest < 1 / _LARGEST:
        raise UserError(
            f"column {name!r} has no number beyond ±{1 / _LARGEST:g}: squared errors would vanish",
            hint="write the column in smaller units",
        )
    return values


def rounded(table: Table, name: str) -> list[str]:
    """A note on a column of whole numbers that float64 cannot hold; none if it holds them all."""
    for row, cell in enumerate(table.columns[name]):
        if isinstance(cell, str | int) and len(text := str(cell).strip()) > _EXACT:
            whole = text.removeprefix("-").removeprefix("+")
            if whole.isdecimal() and len(whole) < 300 and int(text) != int(float(text)):
                place = f"column {name!r} has {_shown(text)} at {table.where(row)}"
                return [f"{place}: whole numbers beyond 2^53 are rounded to about 16 digits"]
    return []


def _number(cell: Cell, flag: str) -> float:
    """What one cell says; a UserError says what is wrong with it."""
    if isinstance(cell, bool):
        if flag == "--column":
            raise UserError("is a truth value, not a number", hint="write 0 and 1")
        return float(cell)
    try:
        value = float(cell)
    except (TypeError, ValueError):
        return _word(str(cell), flag)
    if isinstance(cell, str) and "_" in cell:
        raise UserError("is not a number", hint="write it without underscores")
    if math.isinf(value):
        return math.nan
    if abs(value) > _LARGEST:
        raise UserError(
            f"is beyond ±{_LARGEST:g}: squared errors would overflow",
            hint="write the column in larger units",
        )
    return value


def _word(text: str, flag: str) -> float:
    """What a word means as an input: true or false."""
    truth = _TRUTH.get(text.strip().lower())
    if flag != "--column" and truth is not None:
        return truth
    hint = "write 0 and 1" if truth is not None else _number_hint(text)
    if flag != "--column" and not any(c.isdigit() for c in text):
        hint = f"{flag} takes numbers: for words, a column of 0 and 1 for each of them"
    raise UserError("is not a number", hint=hint)


_LARGEST = 1e100
_EXACT = 15
"""As many digits of a whole number are never rounded."""
_TRUTH = {"true": 1.0, "false": 0.0}


def _shown(cell: Cell) -> str:
    text = str(cell)
    return repr(text if len(text) <= 40 else text[:39] + "…")


def _number_hint(text: str) -> str:
    bare = text.strip()
    if "," in bare and _is_number(bare.replace(",", "")):
        return "write a decimal point, and no separator between thousands"
    if _is_number(re.sub(r"[^\d.]*$", "", bare.strip("$€£¥% "))) and not bare.startswith("("):
        return "write the number alone, without its unit"
    if _is_number(bare.replace(" ", "").replace("\u00a0", "")):
        return "write it without spaces"
    if bare.startswith("(") and _is_number(bare.strip("()")):
        return "write negative numbers with a minus sign"
    return "correct the cell, or leave it empty and choose --fill"


def looks_numeric(cells: Iterable[Cell]) -> bool:
    """Whether a column is meant as numbers: at least one is, and most of what is there."""
    known = [c for c in cells if not is_empty(c)]
    readable = sum(not isinstance(c, bool) and _is_number_cell(c) for c in known)
    return readable > 0 and 2 * readable >= len(known)


def _is_number_cell(cell: Cell) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True
