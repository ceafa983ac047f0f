"""The command line: verbs, versions, refusals."""

import json
import os
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer

import elman
from elman import __version__
from elman.cli import app, run, source
from elman.cli.console import emit, progress
from elman.cli.source import follow_up, read
from elman.forecasting.catalogue import FORECASTERS
from elman.text.levels import LEVELS
from elman.text.prepared import Data


def test_version_is_printed(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"elman {__version__}\n"


def test_unknown_verb_is_refused_with_a_hint(capsys):
    assert run(["fly"]) == 2
    said = capsys.readouterr().err
    assert "error: No such command 'fly'." in said
    assert "hint: elman --help" in said


@pytest.mark.parametrize(
    "typed",
    [
        "generate RUN --temperature -1",
        "generate RUN --length 99999999",
        "generate RUN --length ٣",
        "generate RUN --seed 1.5",
        "evaluate RUN --cache inf",
        "statistics a.txt --n 0",
        "statistics a.txt --n 1000",
        "train a.txt --epochs 1e3",
        "train a.txt --learning-rate fast",
        "lab --at-once 0",
    ],
)
def test_a_number_that_will_not_do_is_named_with_its_rule_and_what_it_is(typed, capsys):
    words = typed.split()
    assert run(words) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert words[-2] in error
    assert words[-1] in error
    assert "Input should" not in error
    assert hint.startswith((f"hint: try {words[-2]} ", f"hint: leave {words[-2]} out, or give it "))


def test_a_current_folder_that_is_gone_is_told(tmp_path):
    code = (
        "import os, sys; from elman.cli import run; gone = sys.argv[1]; os.mkdir(gone); "
        "os.chdir(gone); os.rmdir(gone); sys.exit(run(['runs']))"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "gone")]
    told = subprocess.run(words, capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (
        2,
        "error: the current folder was deleted\nhint: cd into another one\n",
    )


def test_the_home_folder_is_meant_where_the_shell_leaves_its_sign(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("a text to count, " * 9)
    assert run(["ngram", "~/a.txt", "--order", "1", "--out=~/counted"]) == 0
    assert (tmp_path / "counted").is_file()
    assert list((tmp_path / "here").iterdir()) == []


def test_a_name_that_begins_with_a_dash_can_be_typed_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-a.txt").write_text("a text to pack, " * 9)
    assert run(["compress", "./-a.txt", "--level", "fast"]) == 0
    [said] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("next: ")]
    assert run(shlex.split(said.removeprefix("next: elman "))) == 0
    assert (tmp_path / "-a.again.txt").read_bytes() == (tmp_path / "-a.txt").read_bytes()


@pytest.mark.parametrize("verb", ["compress", "forecast", "prepare --out out"])
def test_a_name_that_is_too_long_is_refused(verb, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run([*verb.split(), "x" * 300]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert "File name too long" in error
    assert hint == "hint: name something shorter"
    assert list(tmp_path.iterdir()) == []


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from elman.cli import run; run(['--help']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_datasets_are_listed_by_name_for_people(capsys, tmp_path, monkeypatch):
    (tmp_path / "timemachine.txt").write_text("here")
    monkeypatch.setenv("ELMAN_DATA", str(tmp_path))
    monkeypatch.setattr("elman.text.datasets.cache_folder", lambda: tmp_path / "empty")
    assert run(["datasets"]) == 0
    said = capsys.readouterr().out
    for name in ("python-reference", "time-machine", "tiny-shakespeare", "sine", "sunspots"):
        assert f"\n{name} " in "\n" + said
    assert "always here" in said
    assert f"here: {tmp_path / 'timemachine.txt'}" in said
    assert "downloaded when first used: http" in said


def test_datasets_are_listed_for_programs_with_where_they_lie(capsys, tmp_path, monkeypatch):
    (tmp_path / "timemachine.txt").write_text("here")
    monkeypatch.setenv("ELMAN_DATA", str(tmp_path))
    assert run(["datasets", "--json"]) == 0
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)["datasets"]}
    assert listed["time-machine"]["path"] == str(tmp_path / "timemachine.txt")
    assert listed["time-machine"]["sha1"].startswith("090b5e7e")
    assert listed["python-reference"] == {
        "name": "python-reference",
        "kind": "text",
        "about": listed["python-reference"]["about"],
        "path": None,
        "url": None,
        "sha1": None,
    }
    assert listed["airline"]["kind"] == "series"


def test_json_holds_any_text_even_what_has_no_utf8(capsys):
    emit({"token": "文 \ud800 \n"})
    said = capsys.readouterr().out
    assert said.encode("utf-8")
    assert "文" in said
    assert json.loads(said) == {"token": "文 \ud800 \n"}


def test_a_source_is_read_for_a_verb_as_the_library_reads_it(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("café".encode("latin-1"))
    latin, replaced = Data(str(path), encoding="latin-1"), Data(str(path), errors="replace")
    assert read(latin) == str(read(replaced))[:-1] + "é"
    assert read(Data(str(path), level="byte")) == b"caf\xe9"


def test_a_verb_ends_with_a_command_that_can_be_typed():
    assert follow_up("train", Data("time-machine")) == "elman train time-machine"
    data = Data("my book.txt", "word", "letters", validation=0.2, lower=True)
    assert follow_up("ngram", data, order="1-5") == (
        "elman ngram 'my book.txt' --level word --order 1-5 --clean letters --validation 0.2 "
        "--lower"
    )
    assert follow_up("train", Data("-")) == "cat TEXT | elman train -"


def test_modules_and_classes_are_found_under_elman_without_an_import_of_their_own():
    code = "import elman; elman.corpus.load, elman.tokens.tokenize, elman.Vocab, elman.cli.main"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'gradient_descent'"):
        elman.gradient_descent  # noqa: B018  # pyright: ignore


def test_a_download_shows_one_bar_that_fills():
    with progress() as bar:
        show = source._shown(bar, "new")
        assert bar.tasks == []
        for done in (3, 7):
            show(done, 7)
        (task,) = bar.tasks
        assert (task.completed, task.total) == (7, 7)


def test_a_broken_pipe_is_no_failure_to_speak_of():
    """Where typer leaves it to us, and where it shows only when the last of the text is flushed."""
    code = (
        "import sys; from elman import cli\n"
        "def app(*args, **options): {}\n"
        "cli.app = app; cli.main()"
    )
    buffered = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for body in ("print('x' * 10)", "raise BrokenPipeError", "print('x' * 10**6, flush=True)"):
        words = [sys.executable, "-c", code.format(body)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(words, env=buffered, **pipes) as process:
            process.stdout.close()
            said = process.stderr.read()
        assert (process.returncode, said) == (1, b"")


def test_no_help_is_taken_for_markup():
    """rich would read `[quick]` as a style and leave it out."""
    command: Any = typer.main.get_command(app)
    said = [
        (name, parameter.name, parameter.help or "")
        for name, verb in command.commands.items()
        for parameter in verb.params
        if hasattr(parameter, "help")
    ]
    assert len(said) > 60
    assert [where for *where, text in said if "[" in text] == []


@pytest.mark.parametrize(
    ("verbs", "option", "names"),
    [
        (("forecast",), "model", ("auto", *FORECASTERS)),
        (("ngram", "statistics", "prepare"), "level", tuple(LEVELS)),
    ],
)
def test_a_help_that_is_written_by_hand_names_all_there_is(verbs, option, names):
    command: Any = typer.main.get_command(app)
    for verb in verbs:
        (said,) = (p.help for p in command.commands[verb].params if p.name == option)
        assert set(names) <= set(re.findall(r"[\w-]+", said)), f"elman {verb} --help"
