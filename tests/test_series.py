"""Numbers through time: named series, tables, gaps, refusals."""

import io

import numpy as np
import pytest
import torch

from elman import series
from elman.errors import MissingSource, UserError
from elman.forecasting import SeriesForecaster


def table(tmp_path, text, name="table.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_sine_is_the_notes_curve_plus_noise_from_a_seed():
    x, again, other = (series.sine(seed=s).values[:, 0] for s in (0, 0, 1))
    noise = x - np.sin(0.01 * np.arange(1, 1001))
    np.testing.assert_array_equal(x, again)
    assert np.abs(x - other).max() > 0.1
    assert (
        abs(noise.std() - 0.2) < 0.02
    )  # 4 standard errors of a standard deviation over 1000 draws
    assert abs(noise.mean()) < 0.026  # likewise of a mean


def test_named_series_have_the_lengths_and_totals_of_their_sources():
    [sunspots], [airline] = series.load("sunspots"), series.load("airline")
    assert (len(sunspots), sunspots.times[0], sunspots.times[-1]) == (309, "1700", "2008")
    assert (len(airline), airline.times[0], airline.times[-1]) == (144, "1949-01", "1960-12")
    assert airline.values.sum() == 40363
    assert (sunspots.season, airline.season) == (11, 12)


def test_columns_are_found_chosen_and_ordered_by_time(tmp_path):
    path = table(tmp_path, "day,city,a,b\n3,x,30,3\n1,x,10,1\n10,x,100,10\n")
    [both] = series.load(path, time="day")
    assert both.columns == ("a", "b")
    assert both.values.tolist() == [[10, 1], [30, 3], [100, 10]]  # 10 after 3: numbers, not text
    [only] = series.load(path, time="day", column=["b"])
    assert only.values.tolist() == [[1], [3], [10]]


@pytest.mark.parametrize("first", ["0\n1\n2", "2024-01-01\n2024-01-02\n2024-01-03"])
def test_the_index_that_pandas_writes_without_a_name_is_read(tmp_path, first):
    rows = zip(first.split("\n"), (5, 7, 6), strict=True)
    [s] = series.load(table(tmp_path, ",y\n" + "".join(f"{i},{y}\n" for i, y in rows)))
    assert s.columns == ("y",)
    assert s.values[:, 0].tolist() == [5, 7, 6]
    assert "-" not in first or s.times[0] == "2024-01-01"


def test_groups_become_series_of_their_own(tmp_path):
    path = table(tmp_path, "city,x\nparis,1\nrome,7\nparis,2\nrome,8\n")
    found = {s.name: s.values[:, 0].tolist() for s in series.load(path, group="city")}
    assert found == {"paris": [1, 2], "rome": [7, 8]}


SHOPS = "region,shop,ds,x\n" + "".join(
    f"{region},{shop},2024-01-0{day},{value}\n"
    for region, shop, value in (("north", 1, 5), ("north", 2, 6), ("south", 1, 7))
    for day in (1, 2)
)


def test_several_columns_together_tell_series_apart(tmp_path):
    path = table(tmp_path, SHOPS)
    found = series.load(path, group=["region", "shop"], column=["x"])
    assert {s.name: s.values[:, 0].tolist() for s in found} == {
        "north/1": [5, 5], "north/2": [6, 6], "south/1": [7, 7],
    }  # fmt: skip


def test_one_column_that_tells_series_apart_gives_back_its_own_cells():
    frame = {"shop": [10, 10, 2, 2], "x": [1.0, 2, 3, 4]}
    found = series.from_frame(frame, series.Reading(("x",), group=("shop",)))
    assert [s.id for s in found] == [10, 2]


def test_two_series_of_one_name_are_refused(tmp_path):
    path = table(tmp_path, "a,b,x\nn/1,2,5\nn,1/2,6\n")
    with pytest.raises(UserError, match=r"line 2 and line 3 .* both would be called 'n/1/2'"):
        series.load(path, group=["a", "b"], column=["x"])


def test_columns_that_tell_series_apart_together_are_named(tmp_path):
    path = table(tmp_path, SHOPS)
    with pytest.raises(UserError, match="the same ds") as refusal:
        series.load(path, column=["x"])
    assert "--group region --group shop tells several series apart" in (refusal.value.hint or "")
    with pytest.raises(UserError, match=r"series 1: .* the same ds") as refusal:
        series.load(path, column=["x"], group="shop")
    assert "another --group beside it" in (refusal.value.hint or "")


@pytest.mark.parametrize("dates", [True, False])
def test_series_that_end_before_others_are_named(tmp_path, dates):
    day = "2024-01-0{}" if dates else "{}"
    rows = [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("b", 3)]
    path = table(tmp_path, "id,ds,x\n" + "".join(f"{n},{day.format(d)},{d}\n" for n, d in rows))
    [early, _] = series.load(path, group="id", time="ds")
    ends = [day.format(d) for d in (3, 2)]
    said = f"forecast from where they end, before {ends[0]}: a ({ends[1]})"
    assert [n for n in early.notes if "where they end" in n] == [said]


def test_series_that_end_together_are_not_said_to_differ(tmp_path):
    rows = [("a", 2), ("a", 3), ("b", 1), ("b", 2), ("b", 3)]
    path = table(tmp_path, "id,ds,x\n" + "".join(f"{n},2024-01-0{d},{d}\n" for n, d in rows))
    for s in series.load(path, group="id", time="ds"):
        assert not [n for n in s.notes if "where they end" in n]


def test_columns_that_begin_or_end_apart_are_series_of_their_own(tmp_path):
    rows = "ds,a,b,c\n2024-01-01,1,,7\n2024-01-02,2,5,7\n2024-01-03,,6,7\n"
    found = series.load(table(tmp_path, rows))
    assert {s.name: s.values[:, 0].tolist() for s in found} == {
        "a": [1, 2], "b": [5, 6], "c": [7, 7, 7],
    }  # fmt: skip
    assert [s.time(len(s)) for s in found] == ["2024-01-03", "2024-01-04", "2024-01-04"]
    said = (
        "forecast from where they end, before 2024-01-03: a (2024-01-02) "
        "(if b is an input: --known b)"
    )
    assert all(said in s.notes for s in found)


def test_a_gap_inside_a_column_that_ends_early_is_still_a_gap(tmp_path):
    rows = "ds,a,b\n2024-01-01,1,5\n2024-01-02,,5\n2024-01-03,3,6\n2024-01-04,,6\n"
    with pytest.raises(UserError, match=r"series a: column 'a' has no finite number at line 3"):
        series.load(table(tmp_path, rows))


def test_columns_of_a_table_that_is_filled_stay_together(tmp_path):
    rows = "ds,a,b\n2024-01-01,1,5\n2024-01-02,2,5\n2024-01-03,,6\n"
    [both] = series.load(table(tmp_path, rows), fill="forward")
    assert both.values.tolist() == [[1, 5], [2, 5], [2, 6]]


def test_empty_rows_at_the_end_are_told_from_gaps(tmp_path):
    path = table(tmp_path, "ds,x,u\n2024-01-01,1,0\n2024-01-02,2,1\n2024-01-03,,1\n")
    with pytest.raises(UserError, match=r"'x' has no finite number at line 4") as refusal:
        series.load(path, column=["x"])
    assert "rows of the future are for --known inputs" in (refusal.value.hint or "")


def test_stdin_is_read_as_csv(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n1\n2\n"))
    [read] = series.load("-")
    assert (read.name, read.values.tolist()) == ("stdin", [[1], [2]])


def test_parquet_reads_like_csv(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow reads Parquet")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow reads Parquet")
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"day": [2, 1], "x": [20.5, 10.25]}), path)
    [read] = series.load(str(path), time="day")
    assert read.values.tolist() == [[10.25], [20.5]]


def test_gaps_are_named_by_line_or_bridged_when_asked(tmp_path):
    path = table(tmp_path, "x\n1\n\n3\nnone\ninf\n9\n".replace("\n\n", '\n""\n'))
    with pytest.raises(UserError, match=r"'x'.*line 3 \(''\), line 5 \('none'\), line 6 \('inf'\)"):
        series.load(path)
    [bridged] = series.load(path, missing="interpolate")
    assert bridged.values[:, 0].tolist() == [1, 2, 3, 5, 7, 9]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("x,y\n1,2\n", {"column": ["z"]}, r"^column='z' is not a column; the columns are x, y"),
        ("x,y\n1,2\n", {"time": "when"}, r"^time='when' is not a column"),
        ("x,y\n1,2\n", {"group": "who"}, r"^group='who' is not a column"),
        ("t,x\n1,2\n1,3\n", {"time": "t"}, r"lines 2 and 3 have the same t '1'"),
        ("x,y\n1\n", {}, r"line 2, column 'y' has no cell: the row does not have the 2 cells"),
        ("x\n", {}, r"no rows of data"),
        ("", {}, r"no rows of data"),
        ("x\nred\nblue\n", {}, r"no column holds numbers among x"),
        (
            "x,y\n2024-01-01,\n2024-01-02,NaN\n",
            {},
            r"no column .* x, y: every cell of 'y' is empty",
        ),
        ("x\nTrue\nFalse\n", {}, r"'True' is not a number; write 0 and 1"),
        (
            "t,x\n2024-01-01T01:00+01:00,1\n2024-01-01T02:00+02:00,2\n",
            {},
            r"the same t, written '2024-01-01T01:00\+01:00' and '2024-01-01T02:00\+02:00'",
        ),
    ],
)
def test_bad_tables_are_refused_with_what_is_wrong(tmp_path, text, options, message):
    with pytest.raises(UserError, match=message):
        series.load(table(tmp_path, text), **options)


def test_unknown_source_lists_the_known_ones():
    with pytest.raises(MissingSource, match="sine, sunspots, airline"):
        series.load("moonspots")


def test_bytes_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"x\n1\n\xff\n")
    with pytest.raises(UserError, match="not UTF-8 text"):
        series.load(str(path))


@pytest.mark.parametrize("separator", [";", "\t"])
def test_decimal_commas_are_read_and_said(tmp_path, separator):
    rows = [("Datum", "Umsatz", "Kunden"), ("30.01.2024", "1.234,56", "7"),
            ("31.01.2024", "-2.000", "8"), ("01.02.2024", "12,5", "9")]  # fmt: skip
    path = tmp_path / "umsatz.csv"
    path.write_text("".join(separator.join(row) + "\n" for row in rows))
    [umsatz] = series.load(str(path), column=["Umsatz"])
    assert umsatz.values[:, 0].tolist() == [1234.56, -2000.0, 12.5]
    assert umsatz.times == ("30.01.2024", "31.01.2024", "01.02.2024")
    assert "decimal commas: Umsatz" in umsatz.notes


def test_the_separator_is_the_one_that_cuts_every_row_alike(tmp_path):
    """Once the header alone decided: a comma in a name, or in every number, won."""
    path = tmp_path / "table.csv"
    path.write_text("day;sold, net, in euros\n2024-01-01;5.5\n2024-01-02;6.5\n")
    [sold] = series.load(str(path))
    assert (sold.columns, sold.values[:, 0].tolist()) == (("sold, net, in euros",), [5.5, 6.5])
    path.write_text("day;sold, net\n2024-01-01;5,5\n2024-01-02;\n2024-01-03;6,5\n")
    [sold] = series.load(str(path), fill="linear")
    assert sold.values[:, 0].tolist() == [5.5, 6.0, 6.5]
    path.write_text('"day|time","sold"\n2024-01-01,5.5\n2024-01-02,6.5\n')
    assert series.load(str(path))[0].columns == ("sold",)


def test_excel_may_name_its_separator_in_a_first_line(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("sep=;\nday;sold, net\n2024-01-01;5\n2024-01-02;six\n")
    with pytest.raises(UserError, match="line 4, column 'sold, net': 'six' is not a number"):
        series.load(str(path))
    path.write_text("sep=;\nday;sold, net\n2024-01-01;5\n2024-01-02;6\n")
    [sold] = series.load(str(path))
    assert sold.columns == ("sold, net",)
    assert sold.values[:, 0].tolist() == [5.0, 6.0]


def test_a_date_format_makes_a_column_the_time_without_naming_it(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("date,sold\n1/31/24,5\n2/1/24,6\n")
    [sold] = series.load(str(path), date_format="%m/%d/%y")
    assert sold.time(2) == "02/02/24"


def test_empty_cells_that_are_filled_are_named(tmp_path):
    path = table(tmp_path, "ds,x,u\n2024-01-01,1,0\n2024-01-02,,1\n2024-01-03,3,\n")
    [found] = series.load(path, column=["x"], known=["u"], fill="forward")
    assert found.values.tolist() == [[1], [1], [3]]
    assert "column 'x' has no finite number at line 3 (''): filled (forward)" in found.notes
    assert "column 'u' has no finite number at line 4 (''): filled (forward)" in found.notes


TWICE = "shop,ds,x\na,2024-01-01,1\na,2024-01-02,2\na,2024-01-02,{}\n"


@pytest.mark.parametrize(
    ("value", "group", "hint"),
    [
        ("2", None, "the two rows are the same: delete one"),
        ("2", "shop", "the two rows are the same: delete one"),
        ("5", "shop", "delete one, or tell them apart in 'shop'"),
        ("5", None, "--group COLUMN tells several series apart"),
    ],
)
def test_what_to_do_about_two_rows_at_one_time_depends_on_them(tmp_path, value, group, hint):
    with pytest.raises(UserError, match="lines 3 and 4 have the same ds") as refusal:
        series.load(table(tmp_path, TWICE.format(value)), group=group)
    assert hint in (refusal.value.hint or "")


@pytest.mark.parametrize(("yes", "no"), [("True", "False"), ("true", "FALSE"), ("1", "0")])
def test_an_input_may_be_true_or_false(tmp_path, yes, no):
    path = table(tmp_path, f"x,promo\n1,{yes}\n2,{no}\n3,{yes}\n")
    [found] = series.load(path, column=["x"], known=["promo"])
    assert found.known[:, 0].tolist() == [1, 0, 1]
    [typed] = series.from_frame(
        {"x": [1, 2], "promo": [True, False]}, series.Reading(("x",), known=("promo",))
    )
    assert typed.known[:, 0].tolist() == [1, 0]


def test_an_input_of_words_is_refused_with_what_to_do(tmp_path):
    path = table(tmp_path, "shop,x,size\na,1,small\na,2,small\n")
    with pytest.raises(UserError, match="'small' is not a number") as refusal:
        series.load(path, column=["x"], group="shop", static=["size"])
    assert (
        refusal.value.hint
        == "--static takes numbers: for words, a column of 0 and 1 for each of them"
    )


def test_a_table_with_two_times_is_read_in_its_order_and_says_so(tmp_path):
    rows = "".join(f"{2023 + k // 12},{k % 12 + 1},{k * k}\n" for k in range(24))
    [found] = series.load(table(tmp_path, "year,week,x\n" + rows))
    assert (found.columns, found.clock) == (("x",), None)
    assert any("each of year, week could be the time" in note for note in found.notes)


def test_months_in_digits_are_the_time_whatever_their_column_is_called(tmp_path):
    rows = "".join(f"{2023 + k // 12}{k % 12 + 1:02},{k * k}\n" for k in range(24))
    [found] = series.load(table(tmp_path, "Monat,x\n" + rows))
    assert (found.columns, found.season, found.time(24)) == (("x",), 12, "202501")


def test_whole_numbers_that_a_float_cannot_hold_are_rounded_and_said(tmp_path):
    path = tmp_path / "large.csv"
    rows = [f"{2**60 + k},{2**53 + k},{2**53 - k},{k}" for k in range(9)]
    path.write_text("\n".join(["t,x,exact,small", *rows]) + "\n")
    [found] = series.load(str(path), time="t", column=["x", "exact", "small"])
    said = "at line 3: whole numbers beyond 2^53 are rounded to about 16 digits"
    assert [n for n in found.notes if "2^53" in n] == [f"column 'x' has '{2**53 + 1}' {said}"]
    assert found.times[0] == str(2**60), "and times are told apart to the last digit"
    assert found.time(9) == str(2**60 + 9)


@pytest.mark.parametrize("said", [{"date_format": "%Y-%m-%d"}, {"timezone": "Europe/Berlin"}])
@pytest.mark.parametrize("asked", [{}, {"time": "none"}])
def test_how_times_are_written_means_nothing_without_times(tmp_path, said, asked):
    path = table(tmp_path, "x\n1\n2\n3\n")
    with pytest.raises(UserError, match="means nothing without a column of times"):
        series.load(path, **said, **asked)
    if not asked:
        with pytest.raises(UserError, match="means nothing without a column of times"):
            series.load("sine", **said)


def test_a_time_zone_means_nothing_to_steps_that_are_counted(tmp_path):
    path = table(tmp_path, "t,x\n1,1\n2,2\n3,4\n")
    with pytest.raises(UserError, match=r"timezone='Asia/Tokyo' means nothing"):
        series.load(path, timezone="Asia/Tokyo")


def test_a_column_of_truths_is_not_the_time():
    frame = {"open": [True, False] * 10, "x": np.sin(np.arange(20.0)).tolist()}
    [read] = series.from_frame(frame)
    assert read.columns == ("x",)
    assert read.clock is None
    assert "not forecast, as they hold no numbers: open" in read.notes


def test_numbers_whose_squares_vanish_are_refused():
    """Errors and the widths of intervals would be 0."""
    tiny = 1e-200 * np.sin(np.arange(20.0))
    with pytest.raises(UserError, match="no number beyond ±1e-100: squared errors would vanish"):
        series.from_frame({"x": tiny})
    [read] = series.from_frame({"x": [*tiny[:-1], 1.0]})  # beside others they are 0
    np.testing.assert_array_equal(read.values[:-1, 0], tiny[:-1])


def test_a_tensor_is_forecast_as_an_array_is():
    values = np.sin(np.arange(40.0))
    asked = SeriesForecaster("linear", steps=2, windows=2)
    expected = asked.fit(values).predict()
    assert asked.fit(torch.tensor(values, requires_grad=True)).predict() == expected
