"""`elman forecast`: tables, JSON, saved forecasters, pictures, refusals."""

import datetime as dt
import io
import itertools
import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from elman.cli import run
from elman.forecasting.saving import load_ensemble


def refuse(word):
    raise AssertionError(f"{word} is not JSON")


def answer(capsys, *arguments):
    assert run(["forecast", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=refuse)


def table(folder, text, name="table.csv"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def daily(count, start=dt.date(2024, 1, 1)):
    return [start + dt.timedelta(days=k) for k in range(count)]


def test_json_holds_scores_beside_baselines_and_the_steps_ahead(capsys):
    said = answer(capsys, "sunspots", "--model", "linear", "--tau", "9", "--steps", "11")
    baselines = {"last", "mean", "drift", "seasonal", "ets"}
    assert set(said["scores"]) == {"linear", "linear, direct"} | baselines
    assert said["windows"]["series"]["sunspots"] == {"train": 254, "test": 55}
    assert said["scores"]["linear"]["rmse"][0] < said["scores"]["last"]["rmse"][0]
    path = said["forecast"]["sunspots"]["sunspots"]
    assert len(path["mean"]) == len(path["low"]) == len(path["high"]) == 11
    assert path["time"] == [str(year) for year in range(2009, 2020)]
    assert all(
        low < mean < high
        for low, mean, high in zip(*map(path.get, ("low", "mean", "high")), strict=True)
    )


def test_a_saved_forecaster_continues_from_new_data_and_asks_for_nothing_it_knows(capsys, tmp_path):
    folder = tmp_path / "run"
    rows = "".join(f"{d},{k % 7},{k}\n" for k, d in enumerate(daily(60)))
    old = table(tmp_path, "day,sold,noise\n" + rows)
    options = ["--column", "sold", "--time", "day", "--model", "linear", "--steps", "7"]
    answer(capsys, old, *options, "--out", str(folder))
    written = (folder / "report.html").read_text()
    assert written.count("<svg") == 1
    assert "Error by horizon" in written
    assert f"elman forecast NEW.csv --run {folder}" in written
    newer = "".join(f"{d},{k % 7},{-k}\n" for k, d in enumerate(daily(40, dt.date(2024, 2, 5))))
    new = table(tmp_path, "day,sold,noise\n" + newer, "new.csv")
    said = answer(capsys, new, "--run", str(folder), "--steps", "3")
    path = said["forecast"]["new"]["sold"]
    assert path["time"] == ["2024-03-16", "2024-03-17", "2024-03-18"]
    assert path["mean"] == pytest.approx([5, 6, 0], abs=1e-6)
    other = table(tmp_path, "day,visitors\n2024-01-01,1\n2024-01-02,2\n", "other.csv")
    assert run(["forecast", other, "--run", str(folder)]) == 2
    assert "fitted on sold" in capsys.readouterr().err
    assert run(["forecast", new, "--run", str(folder), "--season", "3"]) == 2
    assert "--season means nothing with --run" in capsys.readouterr().err


def test_table_windows_and_figure_for_a_person(capsys, tmp_path):
    picture = tmp_path / "sine.svg"
    words = ["sine", "--model", "window", "--steps", "4", "--backtest", "2"]
    assert run(["forecast", *words, "--figure", str(picture)]) == 0
    said = capsys.readouterr()
    assert "held-out RMSE by steps ahead" in said.out
    assert "in 2 windows of 4" in said.out
    assert "errors grow as ε_(k+1) = ε_1 + c ε_k with c = " in said.out
    assert "fitted on everything" in said.out
    assert "loss of window" in said.out
    assert "next: the same with --out runs/sine keeps this" in said.err  # its --model too
    drawn = picture.read_text()
    assert "k steps ahead, over the whole series" in drawn
    assert "What comes next" in drawn


def test_the_figure_shows_dates_and_reaches_into_the_future(tmp_path):
    from elman import forecasting as f
    from elman import series
    from elman.figures.forecast import overview

    settings = f.Settings("seasonal", steps=6)
    found = f.fit_and_measure(series.load("airline"), settings)
    future = overview(found).axes[0].lines[-1]
    months = [d.strftime("%Y-%m") for d in np.asarray(future.get_xdata())]
    assert months == [f"1961-{m:02}" for m in range(1, 7)]
    np.testing.assert_array_equal(future.get_ydata(), found.ahead[0].point)


def test_names_and_dates_of_a_figure_cover_nothing(tmp_path):
    from elman import forecasting as f
    from elman import series
    from elman.figures.forecast import overview

    hours = [f"2024-10-{20 + k // 24} {k % 24:02}:00" for k in range(240)]
    path = table(tmp_path, "hour,load\n" + "".join(f"{h},{k % 7}\n" for k, h in enumerate(hours)))
    found = f.fit_and_measure(series.load(path), f.Settings("linear", steps=24))
    figure = overview(found)
    figure.canvas.draw()
    for axes in figure.axes[:3]:
        highest = max(np.nanmax(np.asarray(line.get_ydata(), float)) for line in axes.lines)
        top = axes.transData.transform((0, highest))[1]
        assert axes.get_legend().get_window_extent().y0 > top
        labels = [t.get_window_extent() for t in axes.get_xticklabels() if t.get_text()]
        assert len(labels) > 2
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(labels))


def test_crps_is_below_the_absolute_error(capsys):
    words = ["sine", "--model", "window", "--gaussian", "--steps", "2"]
    scores = answer(capsys, *words)["scores"]["window"]
    assert scores["crps"][0] < 0.9 * scores["mae"][0]


# Forecasts that do no harm


def test_dates_written_month_first_are_ordered_as_dates(capsys, tmp_path):
    days = daily(40, dt.date(2012, 1, 20))
    rows = "".join(f"{d.month}/{d.day}/{d.year},{k}\n" for k, d in enumerate(days))
    path = table(tmp_path, "when,x\n" + rows)
    said = answer(capsys, path, "--time", "when", "--model", "drift", "--steps", "2")
    assert said["forecast"]["table"]["x"]["mean"] == pytest.approx([40, 41])
    assert said["forecast"]["table"]["x"]["time"] == ["02/29/2012", "03/01/2012"]


def test_a_column_of_years_is_the_time_and_not_what_is_forecast(capsys, tmp_path):
    rows = "".join(f"{1871 + k},{1000 + (k * 37) % 200}\n" for k in range(60))
    said = answer(capsys, table(tmp_path, "year,volume\n" + rows, "nile.csv"), "--steps", "3")
    assert list(said["forecast"]["nile"]) == ["volume"]
    assert said["forecast"]["nile"]["volume"]["time"] == ["1931", "1932", "1933"]


def test_columns_of_different_units_are_never_pooled_into_one_error(capsys, tmp_path):
    rng = np.random.default_rng(0)
    rows = "".join(f"{a},{1e6 * b}\n" for a, b in rng.normal(size=(80, 2)))
    said = answer(capsys, table(tmp_path, "a,b\n" + rows), "--model", "mean", "--steps", "3")
    assert said["scores"]["mean"]["rmse"] is None
    assert 0.3 < said["scores"]["mean"]["mase"][0] < 3
    by_column = said["scores_by_series"]
    assert by_column["a"]["mean"]["rmse"][0] < 10 < 1e5 < by_column["b"]["mean"]["rmse"][0]


def test_the_published_forecast_has_learned_from_everything(capsys, tmp_path):
    rows = "".join(f"{v}\n" for v in [0, 1] * 30 + [100, 101] * 2)
    said = answer(capsys, table(tmp_path, "x\n" + rows), "--model", "mean", "--steps", "2")
    assert said["forecast"]["table"]["x"]["mean"] == pytest.approx([6.75] * 2)  # 432 / 64


def test_intervals_reach_as_far_as_the_forecast_and_beyond_it_grow_with_a_word(capsys, tmp_path):
    folder = tmp_path / "run"
    answer(capsys, "airline", "--model", "last", "--steps", "12", "--out", str(folder))
    said = answer(capsys, "airline", "--run", str(folder), "--steps", "48")
    path = said["forecast"]["airline"]["passengers"]
    width = np.subtract(path["high"], path["low"])
    assert len(width) == 48
    assert width[47] == pytest.approx(2 * width[11])
    assert any("beyond that its intervals" in line for line in said["notes"])


def test_a_gap_in_the_dates_stops_and_is_filled_when_asked(capsys, tmp_path):
    days = [*daily(40), *daily(40, dt.date(2024, 2, 20))]
    path = table(tmp_path, "date,x\n" + "".join(f"{d},{k % 5}\n" for k, d in enumerate(days)))
    assert run(["forecast", path, "--steps", "3"]) == 2
    assert "10 times have no row (daily data): 2024-02-10 … 2024-02-19" in capsys.readouterr().err
    said = answer(capsys, path, "--steps", "3", "--model", "last", "--fill", "forward")
    assert any("filled (forward)" in line for line in said["notes"])


def test_the_default_is_not_worse_than_the_last_value_where_a_season_can_be_seen(capsys):
    said = answer(capsys, "airline", "--minutes", "0", "--steps", "12")
    scores = said["scores"]
    assert np.mean(scores["auto"]["mase"]) < 0.9 * np.mean(scores["seasonal"]["mase"])
    assert np.mean(scores["auto"]["mase"]) < 0.3 * np.mean(scores["last"]["mase"])
    assert said["warning"] is None
    assert max(said["forecast"]["airline"]["passengers"]["mean"]) > 600  # 622 the summer before


def test_a_model_worse_than_naive_is_published_with_a_warning_only(capsys):
    assert run(["forecast", "airline", "--model", "mean", "--steps", "12"]) == 0
    said = capsys.readouterr()
    assert "warning: --model mean did worse than" in said.err
    assert "--model auto" in said.err


def test_force_only_replaces_a_forecaster(capsys, tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    (place / "config.json").write_text('{"format": "elman-run-3"}')
    words = ["forecast", "airline", "--model", "last", "--out", str(place), "--force"]
    assert run(words) == 2
    assert "--force only replaces those" in capsys.readouterr().err
    assert (place / "config.json").read_text() == '{"format": "elman-run-3"}'
    (place / "config.json").unlink()
    assert run(words) == 0
    assert run(words) == 0


def test_values_far_out_are_refused_and_json_is_strict(capsys, tmp_path):
    rows = "".join(f"{k}e300\n" for k in range(1, 40))
    assert run(["forecast", table(tmp_path, "x\n" + rows), "--json"]) == 2
    assert "line 2, column 'x': '1e300' is beyond" in capsys.readouterr().err
    constant = table(tmp_path, "x\n" + "5\n" * 40)
    said = answer(capsys, constant, "--model", "last", "--steps", "2")  # MASE has no unit here
    assert said["scores"]["last"]["mase"] is None
    assert said["forecast"]["table"]["x"]["mean"] == [5, 5]


def test_a_byte_order_mark_on_stdin_hides_no_column(capsys, monkeypatch):
    text = "\ufeffday,x\n" + "".join(f"{d},{k % 3}\n" for k, d in enumerate(daily(30)))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8"))
    said = answer(capsys, "-", "--time", "day", "--model", "last", "--steps", "1")
    assert said["forecast"]["stdin"]["x"]["time"] == ["2024-01-31"]


def test_the_forecast_can_be_written_as_a_table(capsys, tmp_path):
    written = tmp_path / "ahead.csv"
    words = ["airline", "--model", "seasonal", "--steps", "2", "--level", "80,95"]
    answer(capsys, *words, "--output", str(written))
    head, first, *_ = written.read_text().splitlines()
    ends = "seasonal-lo-95,seasonal-lo-80,seasonal-hi-80,seasonal-hi-95"
    assert head == f"unique_id,ds,seasonal,{ends}"
    assert first.startswith("airline,1961-01,417.0,")
    numbers = [float(v) for v in first.split(",")[2:]]
    assert numbers[1] < numbers[2] < numbers[0] < numbers[3] < numbers[4]


# Inputs, as a user has them


def shops(folder, days=100, ahead=7):
    """Two shops, promotions known ahead, rain known with hindsight, a size that never changes."""
    rng = np.random.default_rng(0)
    rows = []
    for shop, size in (("north", 1), ("south", 4)):
        for k, day in enumerate(daily(days + ahead)):
            promo, rain = rng.integers(2), rng.normal()
            sold = 20 * size + 9 * promo + [0, 1, 2, 3, 4, 8, 9][day.weekday()] + rng.normal(0, 0.3)
            known_yet = k < days
            cells = [shop, day, f"{sold:.2f}" if known_yet else "", promo]
            rows.append([*cells, f"{rain:.2f}" if known_yet else "", size])
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    promo = [int(row[3]) for row in rows if row[0] == "north"][days:]
    return table(folder, "shop,day,sold,promo,rain,size\n" + text), np.array(promo)


ROLES = ["--group", "shop", "--time", "day", "--column", "sold", "--known", "promo", "--steps", "7"]


@pytest.mark.parametrize("model", ["auto --minutes 0", "regression", "linear"])
def test_promotions_that_are_known_ahead_move_the_forecast(capsys, tmp_path, model):
    path, promo = shops(tmp_path)
    said = answer(capsys, path, *ROLES, "--model", *model.split())
    mean = np.array(said["forecast"]["north"]["sold"]["mean"])
    days = [d.weekday() for d in daily(7, dt.date(2024, 4, 10))]
    week = np.array([0, 1, 2, 3, 4, 8, 9])[days]
    np.testing.assert_allclose(mean, 20 + 9 * promo + week, atol=1.5)


def test_two_columns_tell_series_apart_again_in_newer_data(capsys, tmp_path):
    rows = [(r, s, d, 9 * s + k % 7) for r in "ab" for s in (1, 2) for k, d in enumerate(daily(40))]
    text = "".join(f"{r},{s},{d},{x}\n" for r, s, d, x in rows)
    path = table(tmp_path, "region,shop,day,sold\n" + text)
    words = ["--group", "region", "--group", "shop", "--model", "seasonal", "--steps", "7"]
    said = answer(capsys, path, *words, "--out", str(tmp_path / "run"))
    assert list(said["forecast"]) == ["a/1", "a/2", "b/1", "b/2"]
    again = answer(capsys, path, "--run", str(tmp_path / "run"), "--steps", "7")
    assert again["forecast"] == said["forecast"]


def test_every_kind_of_input_at_once_and_a_parquet_file_with_dates(capsys, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    path, _ = shops(tmp_path)
    written = tmp_path / "ahead.parquet"
    words = [*ROLES, "--past", "rain", "--static", "size", "--calendar", "--level", "80,95"]
    words += ["--model", "global-gru", "--updates", "20", "--threads", "1"]
    said = answer(capsys, path, *words, "--output", str(written), "--out", str(tmp_path / "run"))
    assert said["losses"]["global-gru"]
    assert len(said["losses"]["global-gru"]) == 10
    rows = parquet.read_table(written)
    ends = [f"global-gru-{end}" for end in ("lo-95", "lo-80", "hi-80", "hi-95")]
    assert rows.column_names == ["unique_id", "ds", "global-gru", *ends]
    assert rows["unique_id"].to_pylist() == ["north"] * 7 + ["south"] * 7
    assert rows["ds"].to_pylist()[0] == dt.datetime(2024, 4, 10)
    again = answer(capsys, path, "--run", str(tmp_path / "run"), "--steps", "7")
    assert again["forecast"] == said["forecast"]


def test_a_parquet_table_is_read_as_the_same_csv_is(capsys, tmp_path):
    csv, parquet = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")
    path, _ = shops(tmp_path)
    parquet.write_table(csv.read_csv(path), tmp_path / "table.parquet")
    words = [*ROLES, "--model", "regression"]
    first, second = (answer(capsys, p, *words) for p in (path, str(tmp_path / "table.parquet")))
    assert first["forecast"] == second["forecast"]


@pytest.mark.parametrize(
    ("model", "option", "names"),
    [("ets", "--known", "promo"), ("regression", "--past", "rain"), ("linear", "--static", "size")],
)
def test_an_input_that_a_model_would_ignore_is_refused(capsys, tmp_path, model, option, names):
    path, _ = shops(tmp_path, ahead=0)
    words = ["--group", "shop", "--time", "day", "--column", "sold", option, names]
    assert run(["forecast", path, *words, "--model", model, "--steps", "7"]) == 2
    said = capsys.readouterr().err
    assert f"--model {model} does not read inputs of the kind {option}, and {names}" in said
    assert "global-gru" in said


# Stopped and resumed


def test_what_was_stopped_is_resumed_and_ends_as_it_would_have(capsys, tmp_path, monkeypatch):
    from elman.forecasting import panel

    words = ["airline", "--steps", "6", "--windows", "2", "--minutes", "0"]
    whole = answer(capsys, *words, "--out", str(tmp_path / "whole"))
    tried, fit = [], panel.cross_validate

    def stopping(method, *rest, **more):
        if len(tried) == 5:
            raise KeyboardInterrupt
        tried.append(method.label)
        return fit(method, *rest, **more)

    place = tmp_path / "run"
    monkeypatch.setattr("elman.forecasting.choice.cross_validate", stopping)
    assert run(["forecast", *words, "--out", str(place)]) == 130
    assert f"elman forecast --resume {place}" in capsys.readouterr().err
    assert run(["runs", str(tmp_path)]) == 0
    assert "run         auto (stopped)" in capsys.readouterr().out
    first, tried[:] = list(tried), []
    monkeypatch.setattr(
        "elman.forecasting.choice.cross_validate",
        lambda method, *rest, **more: tried.append(method.label) or fit(method, *rest, **more),
    )
    assert run(["forecast", "--resume", str(place), "--json"]) == 0
    resumed = json.loads(capsys.readouterr().out)
    assert len(first) == 5
    assert not set(first) & set(tried)
    for of in (whole, resumed):
        del of["run"], of["report"]
    assert resumed == whole
    assert sorted(p.name for p in place.iterdir()) == [
        "answer.json", "config.json", "model.safetensors", "report.html"
    ]  # fmt: skip
    assert run(["forecast", "--resume", str(place)]) == 2
    assert "its forecaster is finished" in capsys.readouterr().err


def test_a_run_of_a_language_model_is_no_forecaster_to_resume(tiny_run, capsys):
    assert run(["forecast", "--resume", str(tiny_run())]) == 2
    said = capsys.readouterr().err
    assert "has nothing to resume: it has no request.json" in said
    assert "--run" not in said


def test_nothing_is_resumed_on_other_numbers_or_with_other_options(capsys, tmp_path, monkeypatch):
    path = table(tmp_path, "x\n" + "".join(f"{k % 5}\n" for k in range(60)))
    place = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("elman.forecasting.experiment.refit", lambda *_: exec("raise SystemExit"))
        with pytest.raises(SystemExit):
            run(["forecast", path, "--steps", "3", "--model", "last", "--out", str(place)])
    assert run(["forecast", "--steps", "4", "--resume", str(place)]) == 2
    assert "--steps means nothing with --resume" in capsys.readouterr().err
    table(tmp_path, "x\n" + "".join(f"{k % 6}\n" for k in range(60)))
    assert run(["forecast", "--resume", str(place)]) == 2
    assert "the data has changed" in capsys.readouterr().err


def test_a_refused_request_leaves_no_folder_behind(capsys, tmp_path):
    assert run(["forecast", "airline", "--steps", "140", "--out", str(tmp_path / "run")]) == 2
    assert not (tmp_path / "run").exists()


def test_runs_lists_forecasters_with_their_kind_and_score(capsys, tmp_path):
    answer(capsys, "airline", "--model", "ets", "--steps", "3", "--out", str(tmp_path / "smooth"))
    assert run(["runs", str(tmp_path)]) == 0
    said = capsys.readouterr()
    head, row = said.out.splitlines()
    assert head.split() == ["forecaster", "model", "steps", "series", "MASE", "CRPS"]
    assert row.split()[:4] == ["smooth", "ets", "3", "1"]
    assert 0 < float(row.split()[5]) < float(row.split()[4]) < 2
    assert "--run" in said.err
    assert run(["runs", str(tmp_path), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["forecasters"]
    assert (found["kind"], found["model"]) == ("forecaster", "ets")
    text = (tmp_path / "smooth" / "config.json").read_text()
    (tmp_path / "smooth" / "config.json").write_text(text.replace('"steps": 3', '"steps": 4'))
    assert run(["runs", str(tmp_path)]) == 0
    assert "is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["moonspots"], "no series or file named 'moonspots'"),
        (["sine", "--model", "oracle"], "--model 'oracle' is unknown"),
        (["sine", "--model", "seasonal"], "needs to know the season"),
        (["sine", "--steps", "-2"], "--steps -2 must be at least 1"),
        (["sine", "--missing", "ignore"], "--missing 'ignore' is unknown"),
        (["sine", "--column", "y"], "--column 'y' is not a column"),
        (["sine", "--figure", "a.gif"], "cannot draw to 'a.gif'"),
        (["airline", "--steps", "140"], "too few to forecast 140 ahead"),
        (["airline", "--steps", "1000000"], "--steps 1000000 must be at least 1 and at most 10000"),
        (["airline", "--season", "0"], "--season 0 must be at least 1"),
        (["airline", "--level", "120"], "--level 120 must lie between 0 and 100"),
        (["airline", "--windows", "0"], "--windows 0 must be at least 1"),
        (["airline", "--fill", "glue"], "--fill 'glue' is unknown"),
        (["airline", "--output", "a.xlsx"], "cannot write a table to 'a.xlsx'"),
        (["airline", "--model", "linear", "--hidden-size", "4"], "--hidden-size means nothing to"),
        (["airline", "--model", "linear", "--epochs", "4"], "--epochs means nothing to"),
        (["airline", "--model", "linear", "--gaussian"], "--gaussian means nothing to"),
        (["airline", "--model", "last", "--minutes", "3"], "--minutes 3.0 means nothing with"),
        (["airline", "--model", "last", "--force"], "--force means nothing without --out"),
        (["airline", "--missing", "interpolate", "--fill", "zero"], "--missing interpolate is"),
        (["airline", "--tau", "4"], "--tau means nothing to --model auto"),
        (["airline", "--hidden-size", "4"], "--hidden-size means nothing to --model auto"),
        (["nowhere", "--model", "gru", "--hidden-size", "0"], "--hidden-size 0 must be at least 1"),
        ([""], "an empty name names no table"),
        (["airline", "--fill", ""], "--fill '' is unknown"),
        (["airline", "--past", "passengers"], "which leaves none to forecast"),
        (["airline", "--date-format", "unix"], "is not a date as --date-format unix counts them"),
        (["airline", "--date-format", "%d/%m"], "is not a date as --date-format says"),
        (["airline", "--model", "gru", "--hidden-size", "100000"], "is more than 4096"),
        (["airline", "--time", "month", "--known", "month"], "asked for twice"),
        (["airline", "--run", "nowhere"], "nowhere is not a forecaster's folder"),
    ],
)
def test_refusals_exit_two_with_a_hint(capsys, arguments, message):
    assert run(["forecast", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "hint:" in said


def test_an_existing_folder_is_not_overwritten(capsys, tmp_path):
    assert run(["forecast", "airline", "--model", "last", "--out", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--figure", "--output"])
def test_a_place_that_cannot_be_written_to_is_refused_before_any_work(capsys, tmp_path, option):
    nowhere = tmp_path / "missing" / ("a.svg" if option == "--figure" else "a.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elman.forecasting.experiment.fit_and_measure", None)  # never called
        assert run(["forecast", "airline", "--model", "last", option, str(nowhere)]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_forecast_is_not_written_over_its_table(capsys, tmp_path):
    table = tmp_path / "sales.csv"
    table.write_text(rows := "x\n" + "".join(f"{i}\n" for i in range(30)))
    assert run(["forecast", str(table), "--model", "last", "--output", str(table)]) == 2
    assert "sales.csv is what is to be read" in capsys.readouterr().err
    assert table.read_text() == rows


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(capsys, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for place in ("file/deep/er", "gone"):
        assert run(["forecast", "nowhere.csv", "--out", str(tmp_path / place)]) == 2
        assert f"cannot make the folder {tmp_path / place}" in capsys.readouterr().err


def test_a_table_that_may_not_be_read_is_refused(capsys, tmp_path, monkeypatch):
    def refuses(path):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.csv").write_text("y\n1\n2\n")
    monkeypatch.setattr("elman.files.contents", refuses)
    assert run(["forecast", str(tmp_path / "a.csv")]) == 2
    assert f"{tmp_path / 'a.csv'} cannot be read: Permission denied" in capsys.readouterr().err


def test_the_command_that_fits_again_reads_the_table_as_the_run_does(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{shop},{day},{day % 5},{day % 3}" for shop in "ab" for day in range(60)]
    Path("two shops.csv").write_text("\n".join(["shop,t,sold,rain", *rows]) + "\n")
    words = ["--model", "last", "--group", "shop", "--column", "sold", "--windows", "1"]
    assert run(["forecast", "two shops.csv", *words, "--steps", "3", "--out", "kept"]) == 0
    before = load_ensemble(Path("kept")).reading
    capsys.readouterr()
    assert run(["forecast", "two shops.csv", "--run", "kept", "--steps", "2"]) == 0
    [said] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("next: ")]
    again = shlex.split(said.removeprefix("next: elman ").removesuffix(" fits again"))
    assert run(again) == 0
    fitted = load_ensemble(Path("kept"))
    assert (fitted.reading, fitted.ensemble.steps) == (before, 3)
    assert [f.method.kind for f in fitted.ensemble.fitted.values()] == ["last"]


def test_how_far_back_and_with_what_a_network_learns_is_said_on_the_command_line(capsys, tmp_path):
    asked = ("sine", "--model", "gru", "--epochs", "1", "--tau", "6", "--steps", "2")

    def ahead(*more):
        said = answer(capsys, *asked, "--windows", "1", *more)
        return np.array(said["forecast"]["sine"]["x"]["mean"])

    plain = ahead("--carry", "full")
    assert (ahead("--carry", "truncated:7") == plain).all()  # longer than what is read
    assert np.abs(ahead("--carry", "truncated:1") - plain).max() > 1e-4
    fewer = ahead("--memory", "96K", "--kernel", "reference")
    np.testing.assert_allclose(fewer, plain, atol=1e-4)
    folder = tmp_path / "run"
    kept = ahead("--carry", "sliding:3", "--out", str(folder))
    assert answer(capsys, "sine", "--run", str(folder), "--steps", "2")["forecast"]["sine"]["x"][
        "mean"
    ] == pytest.approx(kept.tolist())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "gru", "--carry", "truncated"], "--carry 'truncated' is not a carry"),
        (["--model", "gru", "--carry", "full:3"], "--carry 'full:3' is not a carry"),
        (["--model", "gru", "--carry", "truncated:0"], "--carry 'truncated:0' is not a carry"),
        (["--model", "global-gru", "--memory", "soap"], "--memory soap is not a size"),
        (["--model", "lstm", "--kernel", "abacus"], "--kernel 'abacus' names no kernel"),
        (["--model", "linear", "--carry", "full"], "--carry means nothing to --model linear"),
        (["--model", "gru", "--memory", "4K"], "the smallest budget here is"),
        (["--memory", "4K"], "memory means nothing to --model auto"),
    ],
)
def test_a_carry_memory_or_kernel_that_cannot_be_is_refused_at_once(capsys, words, message):
    assert run(["forecast", "sine", *words]) == 2
    assert message in capsys.readouterr().err


def test_one_process_at_a_time_compares_in_a_folder(tmp_path, capsys, monkeypatch):
    """Two of them once mixed their files in one folder, and both succeeded."""
    from elman.forecasting.unfinished import Unfinished

    out = tmp_path / "out"
    words = ["forecast", "sunspots", "--steps", "2", "--windows", "1", "--out", str(out)]
    words += ["--model", "drift"]
    seen, keep = [], Unfinished.keep

    def meanwhile(*given):
        others = ([*words, "--force"], words, ["forecast", "--resume", str(out)])
        seen.extend((run(other), capsys.readouterr().err) for other in others)
        return keep(*given)

    monkeypatch.setattr(Unfinished, "keep", meanwhile)
    assert run(words) == 0
    assert seen
    assert {status for status, _ in seen} == {2}
    said = [err for _, err in seen]
    assert "is being written to already, in this very process" in said[0]
    assert "exists already" in said[1]
    assert "is being written to already, in this very process" in said[2]
    assert not (out / ".lock").exists()
    assert load_ensemble(out)


@pytest.mark.parametrize(
    ("table", "options", "short"),
    [
        ("a,b,c\n" + "1,,2\n3,,4\n2,,7\n" * 8 + "5,6,7\n8,9,7\n", [], "b"),
        ("shop,x\n" + "n,1\nn,5\ns,4\n" * 12 + "new,3\nnew,4\n", ["--group", "shop"], "new"),
    ],
)
def test_a_series_too_short_among_others_is_left_out_and_named(
    tmp_path, capsys, table, options, short
):
    (tmp_path / "t.csv").write_text(table)
    words = ["forecast", str(tmp_path / "t.csv"), "--steps", "3", "--model", "last"]
    assert run([*words, *options, "--out", str(tmp_path / "run")]) == 0
    note = f"left out, too short to forecast 3 ahead: {short} (2 steps)"
    assert note in capsys.readouterr().out
    again = ["forecast", str(tmp_path / "t.csv"), "--run", str(tmp_path / "run")]
    assert run([*again, "--json"]) == 0  # the same table, and what was fitted on the rest


def test_forecasters_that_a_short_table_leaves_out_are_told_in_one_line_each_reason(
    tmp_path, capsys
):
    rows = "".join(f"{2015 + i // 12}-{i % 12 + 1:02d},{100 + i % 5}\n" for i in range(14))
    (tmp_path / "t.csv").write_text("month,sales\n" + rows)
    words = ["forecast", str(tmp_path / "t.csv"), "--steps", "3"]
    assert run([*words, "--minutes", "0"]) == 0
    said = capsys.readouterr().err
    assert said.count("left out of the comparison: seasonal; mean, season removed; linear") == 1
    assert (
        "\n  why: the 8 steps before the first window are too few to learn from; a longer" in said
    )
    assert run([*words, "--model", "seasonal"]) == 2
    said = capsys.readouterr().err
    assert "error: --model seasonal needs 14 steps or more to learn from, and there are 8" in said
    assert "hint: a longer series, or smaller --steps or --windows" in said


def test_a_forecaster_and_a_run_are_told_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["forecast", "sine", "--model", "last", "--steps", "2"]
    assert run([*words, "--out", "fo/sine"]) == 0
    for verb in ("generate", "evaluate", "report"):
        capsys.readouterr()
        assert run([verb, "fo/sine"]) == 2
        said = capsys.readouterr().err
        assert "error: fo/sine is a forecaster, not a run of a language model" in said
        assert "hint: elman forecast NEW.csv --run fo/sine" in said
    (tmp_path / "book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    assert (
        run(["train", "book.txt", "--hidden-size", "4", "--epochs", "1", "--out", "lm/book"]) == 0
    )
    capsys.readouterr()
    assert run(["forecast", "sine", "--run", "lm/book"]) == 2
    assert "hint: elman generate lm/book uses it" in capsys.readouterr().err
    assert run(["generate", "lm"]) == 2
    assert "hint: it holds some: lm/book" in capsys.readouterr().err
