"""Times: how they are read, how they tick, how they go on."""

import datetime as dt
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from elman.errors import UserError
from elman.forecasting import dates, series, tables
from elman.forecasting.dates import Clock, Frequency
from elman.forecasting.reading import FILLS


def load(times, **options):
    rows = "".join(f'"{t}",{k * k}\n' for k, t in enumerate(times))
    content = ("when,x\n" + rows).encode()
    [found] = series.from_table(
        tables.read_csv(content, "t", "t.csv"), series.Reading(time="when", **options)
    )
    return found


@pytest.mark.parametrize(
    ("times", "name", "season", "after"),
    [
        (["2024-01-01", "2024-01-02", "2024-01-03"], "daily", 7, "2024-01-04"),
        (["2024-01-01", "2024-01-08", "2024-01-15"], "weekly", 52, "2024-01-22"),
        (["2024-01", "2024-02", "2024-03"], "monthly", 12, "2024-04"),
        (["2024-01-31", "2024-02-29", "2024-03-31"], "monthly", 12, "2024-04-30"),
        (["2024-01-15", "2024-02-15", "2024-03-15"], "monthly", 12, "2024-04-15"),
        (["2023Q3", "2023Q4", "2024Q1"], "quarterly", 4, "2024Q2"),
        (["2023-06-30", "2023-09-30", "2023-12-31"], "quarterly", 4, "2024-03-31"),
        (["2021-01-01", "2022-01-01", "2023-01-01"], "yearly", None, "2024-01-01"),
        (["2021", "2022", "2023"], "in single steps", None, "2024"),
        (["10", "20", "30"], "every 10 steps", None, "40"),
        (["2024-01-01 00:00", "2024-01-01 01:00"], "hourly", 24, "2024-01-01 02:00"),
        (["2024-01-01 00:00", "2024-01-01 00:15"], "every 15 minutes", 96, "2024-01-01 00:30"),
        (["20240101", "20240102", "20240103"], "daily", 7, "20240104"),
        (["20991230", "20991231", "21000101"], "daily", 7, "21000102"),
        (["189911", "189912", "190001"], "monthly", 12, "190002"),
        (["202311", "202312", "202401"], "monthly", 12, "202402"),
        (["202351", "202352", "202401"], "weekly", 52, "202402"),
        (["1/30/2024", "1/31/2024", "2/1/2024"], "daily", 7, "02/02/2024"),
        (["30.1.2024", "31.1.2024", "1.2.2024"], "daily", 7, "02.02.2024"),
        (["Jan 2024", "Feb 2024", "Mar 2024"], "monthly", 12, "Apr 2024"),
        (["2024/01/01", "2024/01/02"], "daily", 7, "2024/01/03"),
        (["2024-01-01T00:00Z", "2024-01-01T01:00Z"], "hourly", 24, "2024-01-01T02:00Z"),
        (["2024-01-01 00:00:00", "2024-01-02 00:00:00"], "daily", 7, "2024-01-03 00:00:00"),
        (
            ["2024-01-01 00:00+02:00", "2024-01-02 00:00+02:00"],
            "daily",
            7,
            "2024-01-03 00:00+02:00",
        ),
    ],
)
def test_the_frequency_is_inferred_and_continued(times, name, season, after):
    found = load(times)
    assert found.clock.frequency.name == name
    assert found.season == season
    assert found.times == tuple(times)
    assert found.time(len(times)) == after


def test_times_in_utc_are_written_with_the_offset_of_the_zone_that_was_asked_for():
    found = load(["2024-06-01T00:00Z", "2024-06-01T01:00Z"], timezone="Europe/Berlin")
    assert found.time(2) == "2024-06-01T04:00+02:00"


def test_numbers_that_only_count_are_not_taken_for_months_or_weeks():
    assert load(["202011", "202012", "202013"]).time(3) == "202014"


def test_how_a_series_ticks_and_repeats_is_said():
    assert "when: monthly, a season of 12 steps" in load(["2024-01", "2024-02", "2024-03"]).notes
    assert "when: in single steps, no season" in load(["1", "2", "3"]).notes
    assert "when: daily, a season of 3 steps" in load(["2024-01-01", "2024-01-02"], season=3).notes


def test_business_days_skip_weekends_without_a_gap():
    days = [dt.date(2024, 1, 1) + dt.timedelta(days=k) for k in range(14)]
    working = [d for d in days if d.weekday() < 5]
    found = load(working)
    assert (found.clock.frequency.name, found.season) == ("every business day", 5)
    assert found.time(10) == "2024-01-15"  # the Monday after


def test_rows_are_ordered_by_time_whatever_their_order():
    found = load(["2024-01-03", "2024-01-01", "2024-01-02"])
    assert found.values[:, 0].tolist() == [1, 4, 0]


def test_gaps_are_named_and_filled_as_asked():
    times = ["2024-01-01", "2024-01-02", "2024-01-04", "2024-01-05"]
    with pytest.raises(UserError, match=r"1 time has no row \(daily data\): 2024-01-03"):
        load(times)
    filled = {fill: load(times, fill=fill).values[:, 0].tolist() for fill in FILLS}
    assert filled == {
        "forward": [0, 1, 1, 4, 9],
        "linear": [0, 1, 2.5, 4, 9],
        "zero": [0, 1, 0, 4, 9],
    }
    assert load(times, fill="linear").times[2] == "2024-01-03"


def test_the_day_the_clocks_change_has_its_own_hours():
    autumn = ["2024-10-27 01:00", "2024-10-27 02:00", "2024-10-27 02:00", "2024-10-27 03:00"]
    with pytest.raises(UserError, match="lines 3 and 4 have the same when"):
        load(autumn)
    found = load(autumn, timezone="Europe/Berlin")
    assert found.clock.frequency.name == "hourly"
    assert found.time(4) == "2024-10-27 04:00:00+01:00"
    spring = load(["2024-03-31 01:00", "2024-03-31 03:00"], timezone="Europe/Berlin")
    assert spring.clock.frequency.name == "hourly"  # 02:00 was skipped


@pytest.mark.parametrize("newest_first", [False, True])
def test_quarters_of_the_doubled_hour_are_told_apart_in_either_order(newest_first):
    hours = [1, 2, 2, 3]
    times = [f"2024-10-27 0{h}:{m:02}" for h in hours for m in (0, 15, 30, 45)]
    found = load(times[::-1] if newest_first else times, timezone="Europe/Berlin")
    assert found.clock.frequency.name == "every 15 minutes"
    assert (len(found), found.time(16)) == (16, "2024-10-27 04:00:00+01:00")
    squares = [k * k for k in range(16)]
    assert found.values[:, 0].tolist() == (squares[::-1] if newest_first else squares)


def test_offsets_are_one_time_line():
    found = load(["2024-03-31T00:00+01:00", "2024-03-31T01:00+01:00", "2024-03-31T03:00+02:00"])
    assert found.clock.frequency.name == "hourly"
    assert found.time(3) == "2024-03-31T02:00+00:00"


def test_daily_data_in_a_zone_keeps_its_wall_clock_when_the_clocks_change():
    found = load(["2024-03-30 06:00", "2024-03-31 06:00"], timezone="Europe/Berlin")
    assert found.clock.frequency.name == "daily"
    assert found.time(2) == "2024-04-01 06:00:00+02:00"


@pytest.mark.parametrize(
    "frequency",
    [Frequency("step", 3), Frequency("second", 900), Frequency("day"), Frequency("business day"),
     Frequency("month"), Frequency("month", 3, month_end=True)],
    ids=lambda f: f.name,
)  # fmt: skip
def test_a_clock_and_its_positions_are_inverse(frequency):
    start = 7 if frequency.unit == "step" else dt.datetime(2024, 1, 31)
    clock = Clock(start, frequency)
    moments = [clock.at(k) for k in range(40)]
    assert dates.positions(moments, frequency) == list(range(40))


def test_calendar_features_turn_once_a_cycle_and_leave_out_what_cannot_vary():
    hourly, names = dates.calendar_features(
        Clock(dt.datetime(2024, 1, 1), Frequency("second", 3600)), 0, 48
    )
    assert names[:2] == ("day sine", "day cosine")
    np.testing.assert_allclose(hourly[:24, :2], hourly[24:, :2], atol=1e-12)
    _, monthly = dates.calendar_features(Clock(dt.datetime(2024, 1, 1), Frequency("month")), 0, 24)
    assert monthly == ("year sine", "year cosine")
    assert dates.calendar_features(Clock(3, Frequency("step")), 0, 5)[1] == ()


# Data frames


def long_frame():
    days = [dt.datetime(2024, 1, 1) + dt.timedelta(days=k) for k in range(4)]
    return {
        "unique_id": ["a"] * 4 + ["b"] * 4, "ds": days * 2, "y": [1.0, 2, 3, 4, 10, 20, 30, 40],
    }  # fmt: skip


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow", "dict"])
def test_long_frames_of_every_library_read_the_same(library):
    columns = long_frame()
    if library == "dict":
        frame = columns
    else:
        module = pytest.importorskip(library)
        frame = {"pandas": "DataFrame", "polars": "DataFrame", "pyarrow": "table"}[library]
        frame = getattr(module, frame)(columns)
    a, b = series.from_frame(frame)
    assert (a.name, a.values[:, 0].tolist()) == ("a", [1, 2, 3, 4])
    assert b.values[:, 0].tolist() == [10, 20, 30, 40]
    assert (a.clock.frequency.name, a.season, a.time(4)) == ("daily", 7, "2024-01-05")


def test_a_wide_frame_has_its_dates_in_its_index():
    pd = pytest.importorskip("pandas")
    index = pd.date_range("2024-01-31", periods=3, freq="ME")
    [wide] = series.from_frame(pd.DataFrame({"a": [1, 2, 4], "b": [3, 5, 4.0]}, index=index))
    assert wide.columns == ("a", "b")
    assert wide.clock.frequency == Frequency("month", 1, month_end=True)
    assert [c.columns for c in wide.each_column()] == [("a",), ("b",)]


def test_parquet_keeps_dates_and_nulls(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = long_frame() | {"y": [1.0, None, 3, 4, 10, 20, 30, 40]}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"series a: column 'y' has no finite number at row 2"):
        series.load(str(tmp_path / "t.parquet"))
    a, _ = series.load(str(tmp_path / "t.parquet"), fill="linear")
    assert a.values[:, 0].tolist() == [1, 2, 3, 4]


def test_rows_without_a_target_are_the_future_of_known_inputs():
    rows = "day,sold,promo\n2024-01-01,5,0\n2024-01-02,9,1\n2024-01-03,,1\n2024-01-04,,0\n"
    table = tables.read_csv(rows.encode(), "t", "t.csv")
    [found] = series.from_table(table, series.Reading(("sold",), known=("promo",)))
    assert found.values[:, 0].tolist() == [5, 9]
    assert found.known[:, 0].tolist() == [0, 1, 1, 0]
    assert found.until(1).known[:, 0].tolist() == [0, 1, 1, 0]


def test_a_counter_beside_numbers_is_not_forecast():
    rows = "n,sold\n" + "".join(f"{k},{k * k % 7}\n" for k in range(9))
    [found] = series.from_table(tables.read_csv(rows.encode(), "t", "t"), series.Reading())
    assert found.columns == ("sold",)
    assert any("look like an index: n" in note for note in found.notes)


def test_columns_without_numbers_are_named_as_left_out():
    rows = "day,shop,sold,empty\n" + "".join(f"{k},a,{k * k % 7},\n" for k in range(9))
    [found] = series.from_table(tables.read_csv(rows.encode(), "t", "t"), series.Reading())
    assert found.columns == ("sold",)
    assert "not forecast, as they hold no numbers: shop, empty" in found.notes


@pytest.mark.parametrize(
    ("cells", "date_format", "after"),
    [
        (["44927", "44928", "44929"], "excel", "2023-01-04"),
        (["44927.25", "44927.5", "44927.75"], "excel", "2023-01-02 00:00:00"),
        (["1700000000", "1700003600"], "unix", "2023-11-15 00:13:20"),
        (["1700000000000", "1700003600000"], "unix-ms", "2023-11-15 00:13:20"),
        (["2020-W52", "2020-W53", "2021-W01"], None, "2021-W02"),
        (["1/30/2024 11:00 PM", "1/31/2024 12:00 AM"], None, "01/31/2024 01:00 AM"),
        (["30.01.2024 1:00:00AM", "30.01.2024 2:00:00AM"], None, "30.01.2024 03:00:00AM"),
    ],
)
def test_dates_as_spreadsheets_and_programs_count_them(cells, date_format, after):
    rows = {"date": cells, "x": list(range(len(cells)))}
    [s] = series.from_frame(rows, series.Reading(column=("x",), date_format=date_format))
    assert s.time(len(cells)) == after


def test_numbers_that_look_like_dates_are_pointed_out():
    for cells, kind in ((["44927", "44928"], "excel"), ([1700000000, 1700003600], "unix")):
        [s] = series.from_frame({"date": cells, "x": [1, 2]}, series.Reading(column=("x",)))
        assert any(f"--date-format {kind}" in note for note in s.notes)
    [years] = series.from_frame({"year": [1999, 2000], "x": [1, 2]}, series.Reading(column=("x",)))
    assert not any("--date-format" in note for note in years.notes)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_days_of_a_frame_with_a_zone_stay_days_when_its_clocks_change(library):
    frames = pytest.importorskip(library, reason=f"{library} frames")
    berlin = ZoneInfo("Europe/Berlin")
    days = [dt.datetime(2024, 3, 29, tzinfo=berlin) + dt.timedelta(days=k) for k in range(4)]
    frame = frames.DataFrame({"ds": days, "y": [1.0, 3.0, 2.0, 5.0]})
    [found] = series.from_frame(frame)
    assert found.clock.frequency.name == "daily"
    assert found.clock.at(4) == dt.datetime(2024, 4, 2, tzinfo=berlin)


def test_days_with_changing_offsets_ask_for_the_place():
    days = ["2024-03-30 00:00+01:00", "2024-03-31 00:00+01:00", "2024-04-01 00:00+02:00"]
    with pytest.raises(UserError, match="off the beat") as refusal:
        load(days)
    assert "--timezone Europe/Berlin" in (refusal.value.hint or "")
    assert load(days, timezone="Europe/Berlin").time(3) == "2024-04-02 00:00+02:00"


def test_a_doubled_hour_among_rows_in_no_order_is_refused():
    hours = ["2024-10-27 03:00", "2024-10-27 02:00", "2024-10-27 01:00", "2024-10-27 02:00"]
    with pytest.raises(UserError, match=r"line 3, column 'when': .* came twice in Europe/Berlin"):
        load(hours, timezone="Europe/Berlin")
    days = ["2024-06-03 02:00", "2024-06-01 02:00", "2024-06-02 02:00"]
    assert load(days, timezone="Europe/Berlin").values[:, 0].tolist() == [1, 4, 0]


@pytest.mark.parametrize(
    ("times", "date_format", "after"),
    [
        (["1711846800", "1711850400"], "unix", "2024-03-31 05:00:00+02:00"),
        (["1711846800000", "1711850400000"], "unix-ms", "2024-03-31 05:00:00+02:00"),
        (["31.03.2024 01:00Z", "31.03.2024 02:00Z"], "%d.%m.%Y %H:%MZ", "31.03.2024 05:00+02:00"),
        (["2024-03-31 01:00 UTC", "2024-03-31 02:00 UTC"], None, "2024-03-31 05:00+02:00"),
    ],
)
def test_times_that_are_utc_are_moved_into_the_zone_not_read_as_its_clock(
    times, date_format, after
):
    found = load(times, date_format=date_format, timezone="Europe/Berlin")
    assert found.clock.at(0) == dt.datetime(2024, 3, 31, 1, tzinfo=dt.UTC)
    assert found.time(2) == after


def test_utc_after_a_time_is_written_again():
    found = load(["2024-01-01 22:00:00 UTC", "2024-01-01 23:00:00 UTC"])
    assert found.clock.at(0) == dt.datetime(2024, 1, 1, 22, tzinfo=dt.UTC)
    assert found.time(2) == "2024-01-02 00:00:00 UTC"


@pytest.mark.parametrize("day", ["2024-01-0{}+02:00", "2024-01-0{}-05:00"])
def test_the_offset_of_a_day_is_not_taken_for_its_time(day):
    times = [day.format(k) for k in (1, 2, 3)]
    with pytest.raises(UserError, match="is not a date"):
        load(times)
    first = load(times, date_format="%Y-%m-%d%z").clock.at(0)
    assert isinstance(first, dt.datetime)
    assert first.utcoffset() is not None


@pytest.mark.parametrize(
    ("date_format", "times", "place"),
    [
        ("%H:%M", [f"{h % 24:02}:00" for h in range(12, 36)], "line 14, .*'00:00' stands after"),
        ("%b", ["Nov", "Dec", "Jan"], "line 4, .*'Jan' stands after 'Dec'"),
    ],
)
def test_times_without_a_year_do_not_put_rows_in_another_order(date_format, times, place):
    with pytest.raises(UserError, match=place):
        load(times, date_format=date_format)
    rising = sorted(times, key=lambda t: dt.datetime.strptime(t, date_format))
    for ordered in (rising, rising[::-1]):
        read = load(ordered, date_format=date_format, fill="linear")
        assert set(read.times) >= set(times)


def test_names_of_zones_are_not_read_and_ignored():
    with pytest.raises(UserError, match="%Z") as refusal:
        load(["2024-01-01 00:00 UTC", "2024-01-01 01:00 UTC"], date_format="%Y-%m-%d %H:%M %Z")
    assert "%Y-%m-%d %H:%M UTC" in (refusal.value.hint or "")


@pytest.mark.parametrize("fill", [None, "linear"])
@pytest.mark.parametrize(
    "times",
    [["1", "2", "3", "1000000000000"],
     ["2020-01-01 00:00:00", "2020-01-01 00:00:01", "2020-01-01 00:00:02", "2045-01-01 00:00:00"]],
)  # fmt: skip
def test_a_time_far_from_all_others_is_named_and_no_table_of_all_steps_is_made(times, fill):
    with pytest.raises(UserError, match=r"line 5, column 'when': .* steps after .* has 4 rows"):
        load(times, fill=fill)


@pytest.mark.parametrize(
    ("frequency", "zone"),
    [(Frequency("month"), None), (Frequency("day"), None), (Frequency("business day"), None),
     (Frequency("second", 3600), None), (Frequency("second", 3600), dt.UTC)],
)  # fmt: skip
def test_steps_after_the_year_9999_are_refused(frequency, zone):
    clock = Clock(dt.datetime(9999, 12, 1, tzinfo=zone), frequency, zone)
    assert clock.at(0) == clock.start
    with pytest.raises(UserError, match=r"step 1001 from 9999-12-01 .* within the years 1 to 9999"):
        clock.at(1000)


def read(text, **options):
    [found] = series.from_table(
        tables.read_csv(text.encode(), "t", "t.csv"), series.Reading(**options)
    )
    return found


def test_times_are_found_under_the_names_other_languages_have_for_them():
    found = read("Jahr;Umsatz\n2023;5\n2022;7\n2021;6\n")
    assert found.values[:, 0].tolist() == [6, 7, 5]
    assert found.time(3) == "2024"


def test_columns_that_may_order_the_rows_are_pointed_out():
    down = read("nr,a,b\n3,5,1\n2,7,4\n1,6,2\n", time="none").notes
    assert not any("counts down" in note for note in down)  # nr is called like an index
    down = read("step,a\n3,5\n2,7\n1,6\n").notes
    assert "step counts down: if the newest row stands first, --time step" in down
    seconds = read("when,a\n1700003600,5\n1700000000,7\n1700007200,6\n", column="a").notes
    assert not seconds  # what to forecast was said
    seconds = read("when,a\n1700003600,5\n1700000000,7\n1700009000,6\n").notes
    assert "if when holds dates: --time when --date-format unix" in seconds


def test_a_column_of_few_numbers_is_not_taken_for_the_time():
    rows = "day,sold\n20240102,69.5\n20240101,(3.2)\n20240103,(4.1)\n"
    with pytest.raises(UserError, match=r"line 3, column 'sold': '\(3.2\)' is not a number"):
        read(rows.replace("day", "when"))


def test_the_index_of_a_frame_orders_it_though_it_has_no_name():
    pandas = pytest.importorskip("pandas")
    days = [dt.date(2024, 1, 3), dt.date(2024, 1, 2), dt.date(2024, 1, 1)]
    for index in (days, list(map(str, days)), pandas.MultiIndex.from_product([["a"], days])):
        [found] = series.from_frame(pandas.DataFrame({"y": [1.0, 2.0, 4.0]}, index=index))
        assert found.values[:, 0].tolist() == [4, 2, 1]
        assert found.time(3) == "2024-01-04"
    [found] = series.from_frame(pandas.DataFrame({"y": [1.0, 2.0, 4.0]}, index=[7, 5, 9]))
    assert found.values[:, 0].tolist() == [1, 2, 4]
    with pytest.raises(UserError, match="two columns '0'"):
        series.from_frame(pandas.DataFrame({0: [1.0, 2.0], "0": [3.0, 4.0]}))


@pytest.mark.parametrize("unit", ["D", "h", "s", "us", "ns"])
def test_dates_of_arrays_are_dates_whatever_they_count(unit):
    days = np.array(["2024-01-03", "2024-01-02", "2024-01-01"], dtype=f"datetime64[{unit}]")
    for column in (days, list(days)):
        [found] = series.from_frame({"ds": column, "y": np.array([1.0, 2.0, 4.0])})
        assert found.values[:, 0].tolist() == [4, 2, 1]
        assert found.clock.at(3) == dt.datetime(2024, 1, 4)
    with pytest.raises(UserError, match="truth value"):
        series.from_frame({"y": np.array([True, False])}, series.Reading(column=("y",)))


def test_names_in_angle_brackets_are_not_a_web_page():
    assert read("<DATE>,<CLOSE>\n20240102,5\n20240101,7\n").values[:, 0].tolist() == [7, 5]
    with pytest.raises(UserError, match="web page"):
        read("<html><body>,</body></html>\n")


def test_columns_begin_and_end_in_time_not_in_the_order_of_the_rows():
    rows = ["2024-01-03,3,30", "2024-01-01,,10", "2024-01-04,4,", "2024-01-02,2,20"]
    table = tables.read_csv("\n".join(["day,a,b", *rows]).encode(), "t", "t.csv")
    found = {s.name: s for s in series.from_table(table, series.Reading())}
    assert found["a"].values[:, 0].tolist() == [2, 3, 4]
    assert found["b"].values[:, 0].tolist() == [10, 20, 30]
    assert (found["a"].time(3), found["b"].time(3)) == ("2024-01-05", "2024-01-04")


def test_long_numbers_may_be_names_where_a_word_stands_above_a_date():
    """A sheet with the numbers of articles across the top, and sums as long below them."""
    sold = 12345671, 23456789, 19876543
    rows = "\n".join(f"2024-01-0{k},{v},{2 * v}" for k, v in enumerate(sold, 1))
    table = tables.read_csv(f"date,40012345,40012346\n{rows}\n".encode(), "t", "t")
    [found] = series.from_table(table, series.Reading())
    assert found.columns == ("40012345", "40012346")
    assert found.values[:, 0].tolist() == [*sold]
