"""`elman forecast`: tables, JSON, saved forecasters, pictures, refusals."""

import json

import numpy as np
import pytest

from elman.cli import run


def answer(capsys, *arguments):
    assert run(["forecast", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_holds_scores_beside_baselines_and_the_steps_ahead(capsys):
    said = answer(capsys, "sunspots", "--model", "linear", "--tau", "9", "--steps", "11")
    assert set(said["scores"]) == {"linear", "linear, direct", "last", "mean", "drift", "seasonal"}
    assert said["parts"]["sunspots"] == {"train": 185, "validation": 62, "test": 62}
    assert said["scores"]["linear"]["rmse"][0] < said["scores"]["last"]["rmse"][0]
    path = said["forecast"]["sunspots"]["sunspots"]
    assert len(path["mean"]) == len(path["low"]) == len(path["high"]) == 11
    assert all(
        low < mean < high
        for low, mean, high in zip(*map(path.get, ("low", "mean", "high")), strict=True)
    )


def test_a_saved_forecaster_continues_from_new_data(capsys, tmp_path):
    folder, table = tmp_path / "run", tmp_path / "new.csv"
    answer(capsys, "airline", "--model", "linear", "--tau", "12", "--out", str(folder))
    written = (folder / "report.html").read_text()
    assert written.count("<svg") == 1
    assert "Error by horizon" in written
    assert f"elman forecast NEW.csv --run {folder}" in written
    values = np.arange(100, 130)
    table.write_text("passengers\n" + "\n".join(map(str, values)) + "\n")
    said = answer(capsys, str(table), "--run", str(folder), "--steps", "3")
    assert len(said["forecast"]["new"]["passengers"]["mean"]) == 3
    table.write_text("visitors\n" + "\n".join(map(str, values)) + "\n")
    assert run(["forecast", str(table), "--run", str(folder)]) == 2
    assert "hint: --column passengers" in capsys.readouterr().err


def test_table_backtest_and_figure_for_a_person(capsys, tmp_path):
    picture = tmp_path / "sine.svg"
    assert (
        run(["forecast", "sine", "--steps", "4", "--backtest", "2", "--figure", str(picture)]) == 0
    )
    said = capsys.readouterr().out
    assert "held-out RMSE by steps ahead" in said
    assert "backtest of sine: RMSE" in said
    assert "k steps ahead, over the whole series" in picture.read_text()


def test_gaussian_models_report_crps_below_their_absolute_error(capsys):
    scores = answer(capsys, "sine", "--gaussian", "--steps", "2")["scores"]["window"]
    assert scores["crps"][0] < scores["mae"][0]


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
        (["sine", "--test", "0.9"], "leave some to train on"),
        (["airline", "--steps", "40"], "test part has 29 steps"),
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


def test_a_place_that_cannot_be_written_to_is_an_error_without_a_traceback(capsys, tmp_path):
    nowhere = tmp_path / "missing" / "a.svg"
    assert run(["forecast", "airline", "--model", "last", "--figure", str(nowhere)]) == 1
    assert "No such file or directory" in capsys.readouterr().err
