"""`elman demo`, made small: every act of it really happens."""

import json
import re
import shutil
import sys

import pytest

from elman.cli import demo, run
from elman.errors import MissingSource, UserError, WorkFailed
from elman.runs.folder import check_room

SMALL = """--model gru --hidden-size 16 --batch-size 8 --window 20 --epochs 1 --max-tokens 20000
    --average ema --average-decay 0.9"""


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The demo of the manual, with a network that learns for a second."""

    def nowhere(download, progress=None):
        raise MissingSource("no book, no network", hint="")

    monkeypatch.setattr("elman.text.datasets.path_of", nowhere)
    monkeypatch.setattr(demo, "RECIPES", {demo.MANUAL: SMALL})
    monkeypatch.setattr(demo, "VALIDATE_EVERY", 20)
    fewer = demo.KILLED.replace("--hidden-size 128", "--hidden-size 8").replace("60000", "30000")
    monkeypatch.setattr(demo, "KILLED", fewer)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "show"


@pytest.mark.slow  # six processes, each of which imports torch
def test_the_demo_shows_every_act(small, capsys):
    assert run(["demo", "--out", str(small)]) == 0
    said = capsys.readouterr().out
    assert "The notes' book is not here (no book, no network)" in said
    assert len(re.findall(r"update \d+, \d+ s: \d\.\d+ nats per character held out", said)) >= 3
    assert "the network and counting, mixed" in said
    assert re.search(r"half of the gradient lies within (at least )?\d+ steps?, 90 % within", said)
    assert re.search(r"lag  0  █+", said)
    hashes = re.findall(r"^ {4}(?:never stopped|killed and resumed) +([0-9a-f]{64})$", said, re.M)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert "The same, bit for bit." in said
    assert said.rstrip().endswith("--prompt 'The ' --length 400 --temperature 0.7")
    assert (small / "report.html").exists()
    assert (small / "pictures" / "lags.svg").exists()
    check_room(small, force=True)  # so that the next demo can take its place


def test_a_run_with_pictures_is_a_run_that_can_be_replaced(tiny_run, tmp_path):
    """Where the demo draws, and where `elman gradients` says that it could."""
    trained = shutil.copytree(tiny_run(), tmp_path / "run")
    assert run(["gradients", str(trained), "--figure", str(trained / "pictures")]) == 0
    assert (trained / "pictures" / "lags.svg").exists()
    check_room(trained, force=True)
    (trained / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds thesis"):
        check_room(trained, force=True)


@pytest.mark.parametrize("recipe", [*demo.RECIPES.values(), demo.KILLED])
def test_the_options_of_the_demo_are_options_of_train(recipe, tmp_path, capsys):
    small = ["--hidden-size", "4", "--max-tokens", "2000", "--epochs", "1", "--diagnose", "0"]
    asked = ["train", demo.MANUAL, *recipe.split(), *small, "--out", str(tmp_path / "run")]
    assert run(asked) == 0, capsys.readouterr().err


def test_fingerprints_tell_trainings_apart(tiny_run):
    one, other = tiny_run(), tiny_run("--seed", "1")
    assert demo.fingerprint(one) != demo.fingerprint(other)


def test_the_answer_is_json_too(small, monkeypatch, capsys):
    for act in ("learn", "compare", "kill"):
        monkeypatch.setattr(demo, act, lambda stage, text: [stage.prose, text])
    monkeypatch.setattr(demo, "look", lambda stage: {})
    assert run(["demo", "--out", str(small), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["text"] == demo.MANUAL
    assert said["scores"] == said["resume"] == [False, demo.MANUAL]


def test_a_command_that_fails_is_shown(small, monkeypatch, capsys):
    monkeypatch.setattr(demo, "RECIPES", {demo.MANUAL: "--hidden-size 0"})
    assert run(["demo", "--out", str(small)]) == 1
    assert "a command of the demo ended with status 2: error:" in capsys.readouterr().err


def test_a_training_that_ends_before_the_kill_is_no_proof(tmp_path):
    with pytest.raises(WorkFailed, match="ended before it could be killed"):
        demo.kill_on_the_way([sys.executable, "-c", "pass"], tmp_path)


def test_a_training_that_ends_before_the_kill_is_started_again(tmp_path):
    """As on a machine where nobody looked in time: the third try writes its updates slowly."""
    script = """
import json, pathlib, sys, time
out, tries = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1], "tries")
tries.write_text(tries.read_text() + "." if tries.exists() else ".")
for step in range(1, 10**6 if len(tries.read_text()) == 3 else 0):
    with (out / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": step}) + "\\n")
    time.sleep(0.002)
"""
    assert demo.kill_on_the_way([sys.executable, "-c", script, str(tmp_path)], tmp_path) >= 60
    assert (tmp_path / "tries").read_text() == "..."


def test_a_folder_that_is_not_the_demos_own_is_left_alone(tiny_run, tmp_path, capsys):
    """It once deleted a run's metrics.jsonl, then replaced the run, without being asked to."""
    copy = shutil.copytree(tiny_run(), tmp_path / "run")
    before = {p.name: p.read_bytes() for p in copy.iterdir()}
    for place, why in (
        (copy, "is a run already"),
        ("", "an empty path"),
        ("/dev/null", "/dev/null"),
    ):
        assert run(["demo", "--out", str(place)]) == 2
        assert why in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == before
