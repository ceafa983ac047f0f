"""Numbers and dates as people write them: read as what they say, or refused, and told."""

import pytest

from elman import series
from elman.forecasting.written import plainly


@pytest.mark.parametrize(
    ("cells", "separator", "values", "notes"),
    [
        (["1,200.50", "950.25", ""], ";", ["1200.50", "950.25", ""], ["thousands apart: x"]),
        (["12,345", "950"], ",", ["12345", "950"], ["thousands apart: x"]),
        (["1,234,567", "950"], ";", ["1234567", "950"], ["thousands apart: x"]),
        (["12,34,567.5", "950"], ";", ["1234567.5", "950"], ["thousands apart: x"]),
        (["12,345", "950"], ";", ["12,345", "950"], []),  # 12345 or 12.345: refused later
        (["0,345", "950"], ",", ["0.345", "950"], ["decimal commas: x"]),
        (["1234,567", "7,500"], ";", ["1234.567", "7.500"], ["decimal commas: x"]),
        (["1.234,567", "12"], ";", ["1234.567", "12"], ["decimal commas: x"]),
        (["1 234,5", "2,5"], ";", ["1234.5", "2.5"], ["thousands apart: x", "decimal commas: x"]),
        (["1\u202f234", "2"], ";", ["1234", "2"], ["thousands apart: x"]),
        (["1'234.50", "2"], ";", ["1234.50", "2"], ["thousands apart: x"]),
        (["1.234.567", "12"], ";", ["1234567", "12"], ["decimal commas: x"]),
        (["1.234,56", "12,5"], ";", ["1234.56", "12.5"], ["decimal commas: x"]),
        (["1.234", "12.500"], ";", ["1.234", "12.500"], ["decimal points: x (1.234 is not 1234)"]),
        (["1.234", "12.500"], ",", ["1.234", "12.500"], []),
        (["567", "1.234", "-12.500"], ",", ["567", "1.234", "-12.500"],
         ["decimal points: x (1.234 is not 1234)"]),
        (["567", "1.234", "0.5"], ";", ["567", "1.234", "0.5"], []),
        (["5670", "1.234"], ";", ["5670", "1.234"], []),
        (["5%", "-6.5 %"], ",", ["5", "-6.5"], ["units left out: x (%)"]),
        (["5%", "0.06"], ",", ["5%", "0.06"], []),
        (["$5", "€6"], ",", ["$5", "€6"], []),
        (["-$1,000.00", "$5.10"], ",", ["-1000.00", "5.10"],
         ["units left out: x ($)", "thousands apart: x"]),
        (["5,50 €", "n/a"], ";", ["5.50", "n/a"], ["units left out: x (€)", "decimal commas: x"]),
        (["\u22125", "6"], ",", ["-5", "6"], ["minus signs: x"]),
        (["A001", "B2"], ",", ["A001", "B2"], []),
        (["2024-01-01", "01.02.2024"], ",", ["2024-01-01", "01.02.2024"], []),
    ],
)  # fmt: skip
def test_a_column_is_read_in_the_one_way_its_cells_can_be_meant(cells, separator, values, notes):
    columns, told = plainly({"x": cells}, separator)
    assert columns == {"x": values}
    assert list(told) == notes


def loaded(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "table.csv"
    path.write_bytes(text.encode(encoding))
    [read] = series.load(str(path))
    return read


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_tables_are_read_as_excel_saves_them(tmp_path, encoding):
    """A byte-order mark or two bytes a character; cells that once held something; blank rows."""
    rows = "".join(f"2024-01-0{d},{d}.5,,\r\n" for d in range(1, 6))
    read = loaded(tmp_path, f"Day,Größe,,\r\n{rows},,,\r\n,,,\r\n", encoding)
    assert read.columns == ("Größe",)
    assert read.values[:, 0].tolist() == [1.5, 2.5, 3.5, 4.5, 5.5]


@pytest.mark.parametrize(
    ("days", "next_one", "season"),
    [
        (["2023年11月1日", "2023年12月1日"], "2024年01月01日", 12),
        (["2023年11月", "2023年12月"], "2024年01月", 12),
        (["Q3 2023", "Q4 2023"], "Q1 2024", 4),
        (["Q3/2023", "Q4/2023"], "Q1/2024", 4),
    ],
)
def test_dates_are_read_and_written_as_the_table_has_them(tmp_path, days, next_one, season):
    read = loaded(tmp_path, f"when,sold\n{days[0]},5\n{days[1]},6\n")
    assert read.clock is not None
    assert read.clock.label(2) == next_one
    assert read.season == season


@pytest.mark.parametrize(
    ("header", "rows", "next_one"),
    [
        ("Year,Month,sold", ["2023,11,5", "2023,12,6"], "2024-01"),
        ("sold,year,quarter", ["5,2023,3", "6,2023,4"], "2024-Q1"),
        ("year,month,day,sold", ["2024,2,28,5", "2024,2,29,6"], "2024-03-01"),
    ],
)
def test_a_year_and_what_stands_beside_it_are_one_date(tmp_path, header, rows, next_one):
    read = loaded(tmp_path, "\n".join([header, *rows, ""]))
    assert read.columns == ("sold",)
    assert read.clock is not None
    assert read.clock.label(2) == next_one


def test_a_month_that_is_asked_for_stays_a_column(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("year,month,sold\n2023,11,5\n2023,12,6\n2024,1,7\n")
    [read] = series.load(str(path), known=["month"], column=["sold"], time="none")
    assert read.clock is None


def test_seconds_that_no_column_is_called_by_are_offered_as_times(tmp_path):
    read = loaded(tmp_path, "stamp,sold\n1700000000,5\n1700003600,6\n1700007200,9\n")
    assert "if stamp holds dates: --time stamp --date-format unix" in read.notes
