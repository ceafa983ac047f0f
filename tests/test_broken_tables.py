"""Broken tables, forty kinds and more: each is refused with the line, the column and what to do."""

import re

import pytest

from elman import series
from elman.errors import UserError

GOOD = "day,sold\n2024-01-01,5\n2024-01-02,6\n2024-01-03,7\n2024-01-04,5\n"

BROKEN = {
    # the file
    "empty file": (b"", {}, "no rows of data"),
    "header only": (b"day,sold\n", {}, "no rows of data"),
    "blank lines only": (b"\n\n\n", {}, "no rows of data"),
    "an Excel workbook": (b"PK\x03\x04rest", {}, "Excel workbook.*save the sheet as CSV"),
    "an old workbook": (b"\xd0\xcf\x11\xe0rest", {}, "old Excel workbook"),
    "compressed": (b"\x1f\x8b\x08rest", {}, "compressed with gzip.*gunzip"),
    "UTF-16": ("day,sold\n".encode("utf-16")[:-1], {}, "not UTF-16 text"),
    "Chinese": ("日期,sold\n1,2\n".encode("gbk"), {}, "not UTF-8 text.*iconv -f gb18030"),
    "Latin-1": (b"day,caf\xe9\n2024-01-01,5\n", {}, r"not UTF-8 text \(byte 7, line 1\)"),
    "JSON": (b'{"day": 1}', {}, "is JSON, not CSV"),
    "a web page": (b"<html></html>", {}, "a web page or XML"),
    "a NUL byte": (b"day,sold\n2024-01-01,5\n2024\0,6\n", {}, "line 3, column 1 holds a NUL"),
    "an open quote": (b'day,sold\n2024-01-01,"5\n2024-01-02,6\n', {}, "line 3: unexpected end"),
    "text after a quote": (b'day,sold\n2024-01-01,"5"x\n', {}, "line 2: .*expected after"),
    # the header
    "no header": (b"1,2\n3,4\n", {}, "line 1: the header 1, 2 is all numbers"),
    "no header but a row": (
        b"2024-01-01,5\n2024-01-02,6\n", {}, "header 2024-01-01, 5 is all numbers and dates"),
    "no header, decimal commas": (
        b"01.12.1999;500,42\n02.12.1999;501,17\n", {}, "header 01.12.1999, 500,42 is all numbers"),
    "no header, quoted commas": (
        b'"Mar 01, 2023"|"5,03"\n"Mar 02, 2023"|"5,48"\n', {}, "is all numbers and dates"),
    "no header, commas in dates": (
        b"Mar 01, 2023|5,03\nMar 02, 2023|5,48\n", {}, "is all numbers and dates"),
    "no header, names of months": (
        b"01-Dec-2019\t5,07\n08-Dec-2019\t5,58\n", {}, "is all numbers and dates"),
    "no header beside words": (
        b"2024-01-01,5,north\n2024-01-02,6,south\n", {}, "'2024-01-01' above '2024-01-02'"),
    "no header, quarters beside words": (
        b"2024Q1,5,n\n2024Q2,6,s\n", {}, "'2024Q1' above '2024Q2'"),
    "no header, months beside words": (
        b"n;Jan 2024;5\ns;Feb 2024;6\n", {}, "'Jan 2024' above 'Feb 2024': it is a row of data"),
    "no header but prices": (b"$5.10\n$6.20\n", {}, "'.5.10' above '.6.20'"),
    "no header but seconds": (
        b"1700000000,5,n\n1700003600,6,s\n", {}, "'1700000000' above '1700003600'"),
    "UTF-16 without a mark": ("day,sold\n1,2\n".encode("utf-16-le"), {}, "iconv -f utf-16le"),
    "UTF-16 without a mark, the other way": (
        "day,sold\n1,é\n".encode("utf-16-be"), {}, "UTF-16 text without the mark.*-f utf-16be"),
    "no header but days": (b"1.2.2024;5\n2.2.2024;6\n", {}, "all numbers and dates"),
    "a name twice": (b"x,x\n1,2\n", {}, "line 1: the header names 'x' twice .columns 1 and 2"),
    "a column without a name": (b"day,,sold\n1,2,3\n", {}, "line 1: column 2 .* has no name"),
    # the rows
    "a short row": (b"day,sold\n2024-01-01\n", {}, "line 2, column 'sold' has no cell.* but 1"),
    "a long row": (b"day,sold\n2024-01-01,1,234\n", {}, "line 2, column 3 has a cell.* but 3"),
    "a blank row inside": (
        b"day,sold\n2024-01-01,5\n\n2024-01-02,6\n", {}, "line 3 is blank"),
    "a blank value inside": (b"sold\n1\n2\n\n4\n", {}, r"'sold' has no finite number at line 4"),
    # the numbers
    "a word": (GOOD.replace(",6", ",six"), {}, "line 3, column 'sold': 'six' is not a number"),
    "a unit": (GOOD.replace(",6", ",$6"), {}, "line 3, column 'sold': '.6'.*without its unit"),
    "a percent": (GOOD.replace(",6", ",6%"), {}, "line 3, column 'sold'.*without its unit"),
    "a title": (b"Sales,\nday,sold\n1,2\n", {}, "line 2, column 2 .*delete line 1 if it is a"),
    "two currencies": (
        GOOD.replace(",5", ",$5").replace(",6", ",€6"), {}, "line 2, column 'sold': '.5'"),
    "a total": (GOOD + "Total,23\n", {}, "line 6, column 'day': 'Total'.*if it is a total"),
    "a total below words": (
        "region,sold\nnorth,5\nsouth,6\nTotal,11\n", {},
        "line 4, column 'region': 'Total' looks like a sum"),
    "a total below dates that cannot be read": (
        "when,sold\n31.12.23,5\n30.12.23,6\nTotal,11\n", {},
        "line 2, column 'when': '31.12.23' is not a date.*'%d.%m.%y'"),
    "dates of two-digit years under a name of any kind": (
        "when,sold\n31.12.23,5\n30.12.23,6\n", {}, "line 2, column 'when'.*'%d.%m.%y'"),
    "dates with names of zones": (
        "when,sold\n2024-01-02 00:00 CET,5\n2024-01-01 00:00 CET,6\n", {},
        "line 2, column 'when': '2024-01-02 00:00 CET' is not a date"),
    "long dates": (
        "when,sold\nTuesday 2 January 2024,5\nMonday 1 January 2024,6\n", {},
        "line 2, column 'when': 'Tuesday 2 January 2024' is not a date"),
    "months with a point": (
        "date;sold\n01.2023;5\n02.2023;6\n01.2024;7\n", {}, "line 2, column 'date'.*'%m.%Y'"),
    "months with a point under a name of any kind": (
        "when;sold\n01.2023;5\n02.2023;6\n01.2024;7\n", {}, "line 2, column 'when'.*'%m.%Y'"),
    "months of short years with a point": (
        "date;sold\n01.23;5\n02.23;6\n01.24;7\n", {}, "line 2, column 'date'.*'%m.%y'"),
    "a month of a year that may be a day": (
        "month,sold\nJan-24,5\nFeb-24,6\n", {}, "line 2, column 'month'.*--date-format '%b-%y'"),
    "a comma that may part thousands": (
        "day;sold\n2024-01-01;5\n2024-01-02;6\n2024-01-03;7,500\n", {},
        "line 4, column 'sold': '7,500'.*decimal point"),
    "commas and points": (
        "day;sold\n2024-01-01;5,1\n2024-01-02;6.25\n", {}, "line 2, column 'sold': '5,1'"),
    "two series in one": (
        "day,sold,shop\n2024-01-01,5,a\n2024-01-01,6,b\n2024-01-02,7,a\n2024-01-02,8,b\n", {},
        "column 'day': lines 2 and 3 have the same day.*--group shop tells"),
    "times across the top": (
        "product,2024-01,2024-02,2024-03\na,1,2,3\nb,4,5,6\n", {},
        "the header of .* names times .2024-01, 2024-02, 2024-03.*melt"),
    "a year of two digits": (
        "date,sold\n1/31/24,5\n2/1/24,6\n", {},
        "line 2, column 'date': '1/31/24' is not a date.*--date-format"),
    "an hour that clocks skipped": (
        "hour,sold\n" + "".join(f"2024-03-31 0{h}:00,{h}\n" for h in (0, 1, 3, 4)), {},
        "1 time has no row .hourly data.: 2024-03-31 02:00 .after line 3.*--timezone"),
    "no day of Excel's": (
        "day,sold\n45000,5\n145001,6\n45002,7\n", {"date_format": "excel"},
        "line 3, column 'day': '145001' is not a date as --date-format excel"),
    "brackets": (GOOD.replace(",6", ",(6)"), {}, "line 3, column 'sold'.*minus sign"),
    "a space inside": (GOOD.replace(",6", ",6 00"), {}, "line 3, column 'sold'.*without spaces"),
    "an underscore": (GOOD.replace(",6", ",6_0"), {}, "line 3, column 'sold'.*underscores"),
    "far too large": (GOOD.replace(",6", ",6e300"), {}, "line 3, column 'sold'.*beyond ±1e.100"),
    "infinite": (GOOD.replace(",6", ",inf"), {}, r"'sold' has no finite number at line 3 \('inf'"),
    "missing": (GOOD.replace(",6", ","), {}, r"'sold' has no finite number at line 3 \(''"),
    "no value at all": ("day,a,sold\n2024-01-01,1,\n2024-01-02,2,\n", {"column": ["sold"]},
        "'sold' has no finite number at all"),
    "a gap at the start": (
        "sold\nna\n2\n3\n", {"fill": "forward"}, r"'sold' begins with a gap \(line 2\)"),
    "words only": (b"sold\nred\nblue\n", {}, "no column holds numbers among sold"),
    "only an index": (b"year\n2001\n2002\n", {}, "only columns that look like an index.*year"),
    # the times
    "no such day": (GOOD.replace("01-03", "02-30"), {}, "line 4, column 'day': '2024-02-30'"),
    "an empty time": (GOOD.replace("2024-01-03", ""), {}, "line 4, column 'day' has no time"),
    "two ways to read": (
        "day,sold\n1/2/2024,5\n2/2/2024,6\n", {}, r"two ways: is '1/2/2024' \(line 2\)"),
    "two orders": (
        "day,sold\n13/2/2024,5\n2/14/2024,6\n", {}, "line 2 has '13/2/2024' .*line 3 has"),
    "two ways of writing": (
        "day,sold\n2024-01-01,5\n2 Jan 2024,6\n", {}, "line 3, column 'day': '2 Jan 2024'"),
    "another format": (GOOD, {"date_format": "%d/%m/%Y"}, "line 2, column 'day'.*--date-format"),
    "a day twice": (GOOD.replace("01-03", "01-02"), {}, "column 'day': lines 3 and 4 have"),
    "a day missing": (GOOD.replace("2024-01-02,6\n", ""), {}, r"1 time .* \(after line 2\)"),
    "off the beat": (
        "t,x\n2024-01-01 00:00,1\n2024-01-01 01:00,2\n2024-01-01 02:00,3\n2024-01-01 02:59,4\n",
        {}, "line 5, column 't': 2024-01-01 02:59:00 is off the beat: the data is hourly"),
    "some with a zone": (
        "t,x\n2024-01-01 00:00Z,1\n2024-01-01 01:00,2\n", {},
        "line 3, column 't'.*lacks a time zone"),
    "no such hour": (
        "t,x\n2024-03-31 01:00,1\n2024-03-31 02:00,2\n", {"timezone": "Europe/Berlin", "time": "t"},
        "line 3, column 't'.*does not exist in Europe/Berlin"),
    "no such zone": (GOOD, {"timezone": "Mars/Olympus"}, "--timezone 'Mars/Olympus' is unknown"),
    # cells of every kind
    "yes or no": (GOOD.replace(",6", ",TRUE"), {}, "line 3, column 'sold': 'TRUE'"),
    "two points": (GOOD.replace(",6", ",1.2.3"), {}, "line 3, column 'sold': '1.2.3'"),
    "hexadecimal": (GOOD.replace(",6", ",0x1F"), {}, "line 3, column 'sold': '0x1F'"),
    "two signs": (GOOD.replace(",6", ",--6"), {}, "line 3, column 'sold': '--6'"),
    "an open exponent": (GOOD.replace(",6", ",6e"), {}, "line 3, column 'sold': '6e'"),
    "a fraction": (GOOD.replace(",6", ",1/2"), {}, "line 3, column 'sold': '1/2'"),
    "a unit behind": (GOOD.replace(",6", ",6 kg"), {}, "line 3, column 'sold': '6 kg'"),
    "an apostrophe": (GOOD.replace(",6", ",'6"), {}, """line 3, column 'sold': "'6" is not"""),
    "a date for a number": (GOOD.replace(",6", ",2024-01-02"), {}, "line 3, column 'sold'"),
    "a range": (GOOD.replace(",6", ",5-6"), {}, "line 3, column 'sold': '5-6'"),
    "minus infinity": (GOOD.replace(",6", ",-inf"), {}, "'sold' has no finite .* line 3"),
    "a failed formula": (GOOD.replace(",6", ",#DIV/0!"), {}, "line 3, column 'sold': '#DIV/0!'"),
    "month thirteen": (GOOD.replace("01-03", "13-03"), {}, "line 4, column 'day': '2024-13-03'"),
    "day zero": (GOOD.replace("01-03", "01-00"), {}, "line 4, column 'day': '2024-01-00'"),
    "hour twenty-five": (
        "t,x\n2024-01-01 23:00,1\n2024-01-01 25:00,2\n", {}, "line 3, column 't': '2024-01-01 25"),
    "a word for a date": (GOOD.replace("2024-01-03", "soon"), {}, "line 4, column 'day': 'soon'"),
    "an input that is a word": (
        "day,sold,promo\n2024-01-01,5,1\n2024-01-02,6,yes\n2024-01-03,7,0\n",
        {"known": ["promo"], "column": ["sold"]}, "line 3, column 'promo': 'yes'"),
    "an input that is missing": (
        "day,sold,promo\n2024-01-01,5,1\n2024-01-02,6,\n2024-01-03,7,0\n",
        {"known": ["promo"], "column": ["sold"]}, "column 'promo' has no finite .* line 3"),
    "an input that ends too soon": (
        "day,sold,rain\n2024-01-01,5,1\n2024-01-02,6,2\n2024-01-03,7,\n",
        {"past": ["rain"], "column": ["sold"]}, "column 'rain' has no finite .* line 4"),
    # the series
    "nameless series": (
        "shop,day,sold\na,2024-01-01,5\n,2024-01-01,6\n", {"group": "shop"},
        "line 3, column 'shop' does not say which series"),
    "a static value that changes": (
        "day,sold,size\n2024-01-01,5,1\n2024-01-02,6,2\n", {"static": ["size"], "column": ["sold"]},
        "static column 'size' must have one value a series, .* 1 at line 2 and 2 at line 3"),
}  # fmt: skip


WHOLE = frozenset({
    # the file itself, a line that cannot be cut into cells, a column without a value: no one cell
    "empty file", "header only", "blank lines only", "an Excel workbook", "an old workbook",
    "compressed", "UTF-16", "Latin-1", "Chinese", "JSON", "a web page", "an open quote",
    "text after a quote",
    "no header", "no header but a row", "no header but days", "no header, decimal commas",
    "no header, quoted commas", "no header, commas in dates",
    "no header, names of months", "a blank row inside",
    "no header beside words", "no header, quarters beside words", "no header, months beside words",
    "no header but prices", "no header but seconds", "UTF-16 without a mark",
    "UTF-16 without a mark, the other way",
    "no value at all", "only an index", "a day missing",
    "no such zone", "times across the top", "an hour that clocks skipped",
})  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_table_is_refused_with_its_place(kind, tmp_path):
    content, options, message = BROKEN[kind]
    path = tmp_path / "table.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as refusal:
        series.load(str(path), **options)
    assert refusal.value.hint
    assert re.search(message, f"{refusal.value.message}; {refusal.value.hint}", re.DOTALL)
    if kind not in WHOLE:
        assert re.search(r"\blines? \d+", refusal.value.message)
        assert re.search(r"\bcolumns? ('|\d)", refusal.value.message)


def test_at_least_forty_kinds_name_line_and_column():
    assert len(BROKEN.keys() - WHOLE) >= 40


def test_the_table_they_are_broken_from_is_whole(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(GOOD)
    [read] = series.load(str(path))
    assert read.values[:, 0].tolist() == [5, 6, 7, 5]
