"""What docs/reliability.md promises of runs: who owns a folder, what is sealed, what is refused."""

import errno
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from elman import LanguageModel, NgramModel, files, runs, strict_json
from elman.cli import run as elman
from elman.errors import Unreadable, UserError, WorkFailed
from elman.folders import replaced
from elman.folders.lock import Lock
from elman.forecasting import saving
from elman.language_model.model import Shape, kinds
from elman.runs import Run, checkpoints
from elman.runs.config import check_fits
from elman.session import RunOptions, Session
from elman.text.vocab import Vocab
from elman.training import Optimisation, Reading, Settings, Update
from elman.training.records import from_json

ALL_CELLS = [
    {"cell": cell, "embedding_size": e, "layers": layers, "tied": tied}
    for cell in kinds()
    for e, tied in ((None, False), (5, False), (8, True))
    for layers in (1, 3)
]


@pytest.fixture
def run(tiny_run, tmp_path) -> Run:
    return Run.open(shutil.copytree(tiny_run(), tmp_path / "run"))


# ---------------------------------------------------------------------- a folder is owned


def test_a_second_training_in_a_folder_is_refused_by_the_owners_name(run):
    held = Lock(run.path)
    with pytest.raises(UserError, match="being trained already, in this very process"):
        Session.resume(run.path)
    with pytest.raises(UserError, match="being trained already"):
        Run.create(run.path, run.config, run.vocab, force=True)
    assert run.metrics(), "nothing was touched"
    held.release()
    assert Session.resume(run.path).training.finished


HOLD = """
import sys
from pathlib import Path
from elman.folders.lock import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_killed_process_is_nobodys(run, capsys):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", HOLD, str(run.path)]
    with subprocess.Popen(command, text=True, **pipes) as other:
        assert other.stdout.readline() == "held\n"
        assert elman(["train", "--resume", str(run.path), "--epochs", "3"]) == 2
        assert f"by process {other.pid} on {os.uname().nodename}" in capsys.readouterr().err
        other.kill()
    assert (run.path / ".lock").exists(), "it had no time to clean up"
    assert elman(["train", "--resume", str(run.path), "--epochs", "3"]) == 0
    assert not (run.path / ".lock").exists()


def test_a_session_that_another_has_overtaken_does_not_go_on(run):
    session = Session.resume(run.path, {"epochs": 3})
    next(iter(session.records()))
    other = Session.resume(run.path, {"epochs": 4})
    list(other.records())
    with pytest.raises(UserError, match="trained further by another process"):
        list(session.records())


def test_force_replaces_a_run_and_nothing_else(run, tmp_path, capsys):
    foreign = tmp_path / "forecaster"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"format": "elman-forecaster-1"}')
    (foreign / "model.safetensors").write_bytes(b"weeks of work")
    source = run.config.data.source
    for folder in (foreign, tmp_path / "damaged"):
        assert elman(["train", source, "--out", str(folder), "--force", "--epochs", "1"]) == 2
        assert "something other than a run" in capsys.readouterr().err
        assert (folder / "model.safetensors").read_bytes() == b"weeks of work"
        shutil.copytree(foreign, tmp_path / "damaged", dirs_exist_ok=True)
        (tmp_path / "damaged" / "config.json").write_text("{")


def test_force_of_every_verb_replaces_its_own_kind_alone(run, tmp_path, capsys):
    source = run.config.data.source
    forecast = ["forecast", "sunspots", "--model", "drift", "--windows", "1", "--steps", "2"]
    verbs = {
        "run": ["train", source, "--epochs", "1"],
        "forecaster": forecast,
        "prepared": ["prepare", source],
    }
    for kind in ("forecaster", "prepared"):
        assert elman([*verbs[kind], "--out", str(tmp_path / kind)]) == 0
    for kind in verbs:
        before = contents(tmp_path / kind)
        for other in verbs.keys() - {kind}:
            assert elman([*verbs[other], "--out", str(tmp_path / kind), "--force"]) == 2
            assert "hint: " in capsys.readouterr().err
            assert contents(tmp_path / kind) == before, (other, kind)


def test_what_arrives_while_a_folder_is_being_made_is_left_alone(run, tmp_path, monkeypatch):
    def late(self):
        (self.path / "thesis.tex").write_text("years of work")

    monkeypatch.setattr(Run, "own", late)
    for folder, force in ((tmp_path / "new", False), (run.path, True)):
        with pytest.raises(UserError, match=r"holds thesis\.tex"):
            Run.create(folder, run.config, run.vocab, force=force)
        assert (folder / "thesis.tex").read_text() == "years of work"
    assert Run.open(run.path).load_model() is not None


def contents(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def replacing(run, **options) -> Session:
    """A new training in the run's folder."""
    given = {"source": run.config.data.source, "hidden_size": 4, "epochs": 1, "window": 4}
    kept = RunOptions(out=run.path, force=True, device="cpu", diagnose=0)
    return Session.begin(given | {"batch_size": 2, "max_tokens": 400} | options, kept=kept)


def test_a_run_is_replaced_once_the_new_one_has_something_to_show(run):
    before, aside = contents(run.path), run.path / ".replaced"
    session = replacing(run)
    assert contents(aside) == before
    for record in session.records():
        if isinstance(record, Update):
            assert aside.exists() == ((run.path / "state.safetensors").exists() is False)
    assert not aside.exists()
    assert Run.open(run.path).load_model().hidden_size == 4


def test_a_new_training_that_fails_leaves_the_run_as_it_was(run, capsys):
    before = contents(run.path)
    session = replacing(run, learning_rate=1e300, optimizer="sgd", clip=0.0)
    with pytest.raises(WorkFailed):
        list(session.records())
    assert contents(run.path) == before
    with pytest.raises(UserError, match="is the run before it again"):
        list(session.records())
    assert contents(run.path) == before
    words = ["--optimizer", "sgd", "--learning-rate", "1e300", "--clip", "0", "--force"]
    assert elman(["train", run.config.data.source, "--out", str(run.path), *words]) == 1
    assert "is still the run that it was before" in capsys.readouterr().err
    assert contents(run.path) == before


def test_a_new_training_that_is_stopped_at_once_keeps_the_run_beside_it(run):
    before, aside = contents(run.path), run.path / ".replaced"
    list(replacing(run).records(stop=lambda: True))
    assert contents(aside) == before
    list(replacing(run).records(stop=lambda: True))  # and again: still the one worth keeping
    assert contents(aside) == before
    list(Session.resume(run.path).records())
    assert not aside.exists()


def test_a_run_is_put_aside_and_back_whole_wherever_the_process_is_killed(run, killed_after):
    """Each rename and each deletion of putting aside, and of putting back, is the last in turn."""
    before = contents(run.path)
    for way in (replaced.set_aside, replaced.put_back):
        moves = 0
        while True:
            if way is replaced.put_back:
                replaced.set_aside(run.path, "config.json")
                begin_another(run.path)
            ended = not killed_after(moves, lambda way=way: way(run.path, "config.json"))
            replaced.put_back(run.path, "config.json")
            assert contents(run.path) == before, (way, moves)
            moves += 1
            if ended:
                break
        assert moves > 5


def begin_another(path: Path) -> dict[str, bytes]:
    (path / "config.json").write_text("{}")
    (path / "metrics.jsonl").write_text("of the new run")
    return {name: (path / name).read_bytes() for name in ("config.json", "metrics.jsonl")}


def test_what_is_forgotten_never_comes_back_in_parts(run, killed_after):
    """Killed while it deletes the old run, which once left files that the next --force mixed in."""
    before, moves = contents(run.path), 0
    while True:
        replaced.set_aside(run.path, "config.json")
        new = begin_another(run.path)
        ended = not killed_after(moves, lambda: replaced.forget(run.path))
        replaced.set_aside(run.path, "config.json")  # as the next --force does
        replaced.put_back(run.path, "config.json")  # as it does when it fails
        assert contents(run.path) == (new if moves else before), moves
        if ended:
            break
        if moves:
            replaced.clear(run.path)
            for name, data in before.items():
                (run.path / name).write_bytes(data)
        moves += 1
    assert moves > 5


def test_a_run_whose_replacement_cannot_be_written_is_as_it_was(run, monkeypatch):
    before = contents(run.path)
    monkeypatch.setattr(Vocab, "save", lambda self, path: path.write_text("half") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Run.create(run.path, run.config, run.vocab, force=True)
    assert contents(run.path) == before


@pytest.mark.slow
def test_newer_verbs_survive_kills_and_each_other(tmp_path):
    script = Path(__file__).with_name("killed_verbs.py")
    command = [sys.executable, str(script), str(tmp_path), "6", "3", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    for verb in ("prepare", "compress", "decompress", "forecast", "evaluate"):
        assert report[verb]["kills"] >= 6
    for verb in ("train", "resume", "prepare", "forecast"):
        assert any(2 in ends for ends in report["at once"][verb]), "they did not meet"


# ---------------------------------------------------------------------- seals


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors"])
def test_every_byte_of_a_checkpoint_is_sealed(run, name):
    path, kind = run.path / name, name.split(".")[0]
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for at in [*range(0, header, 7), *range(header, len(data), 997)]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(UserError):
            checkpoints.read(path, kind)


def test_every_byte_of_the_metrics_is_checked(run):
    """A flip is refused; where it hits the end of the lines the last is taken for one cut short."""
    path, whole = run.path / "metrics.jsonl", run.metrics()
    data = path.read_bytes()
    for at in [*range(400), *range(400, len(data), 41), *range(len(data) - 60, len(data))]:
        for bit in (1, 4):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            assert metrics_or_refusal(run) in (None, whole, whole[:-1]), f"bit {bit} of byte {at}"


def metrics_or_refusal(run) -> list | None:
    try:
        return run.metrics()
    except UserError:
        return None


def test_metrics_of_older_runs_have_no_checksum_and_are_read(run):
    """Old lines first; once there is a line with a checksum, every later one must have one."""
    path, whole = run.path / "metrics.jsonl", run.metrics()
    lines = path.read_bytes().splitlines(keepends=True)
    old = [strict_json.dumps(record).encode() + b"\n" for record in whole]
    for mixed in (old, old[:5] + lines[5:]):
        path.write_bytes(b"".join(mixed))
        assert run.metrics() == whole
    path.write_bytes(b"".join(lines[:5] + old[5:]))
    with pytest.raises(UserError, match="damaged at line 6: it is not as it was written"):
        run.metrics()


def as_older_elman_wrote_it(path: Path, kind: str, **changed: int) -> None:
    """A checkpoint with a CRC of its tensors, as before there were seals."""
    tensors, numbers = checkpoints.read(path, kind)
    record = {"kind": kind, "crc32": checkpoints._crc32(tensors), "numbers": numbers | changed}
    save_file(tensors, path, {"elman": json.dumps(record)})


def test_older_checkpoints_are_read_and_impossible_numbers_in_them_refused(run):
    as_older_elman_wrote_it(run.path / "model.safetensors", "model")
    as_older_elman_wrote_it(run.path / "state.safetensors", "state")
    assert run.load_model() is not None
    assert Session.resume(run.path).training.finished
    for wrong in (
        {"epoch": 2**63},
        {"epoch": "2"},
        {"index": 10**9},
        {"step": -1},
        {"best": []},
        {"worse": True},
    ):
        shutil.copy(run.path / "state.safetensors", run.path.parent / "state")
        as_older_elman_wrote_it(run.path / "state.safetensors", "state", **wrong)
        with pytest.raises(UserError, match="does not fit"):
            Session.resume(run.path)
        shutil.copy(run.path.parent / "state", run.path / "state.safetensors")


def test_an_edited_configuration_is_used_and_said(run, capsys):
    path = run.path / "config.json"
    path.write_text(path.read_text().replace('"clip": 1.0', '"clip": 2.0'))
    opened = Run.open(run.path)
    assert opened.edited
    assert opened.config.training.optimisation.clip == 2.0
    assert not run.edited
    assert elman(["train", "--resume", str(run.path)]) == 0
    assert "config.json is not as elman wrote it" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_not_called_damaged(run):
    (run.path / "model.safetensors").chmod(0)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        run.load_model()


def test_what_fails_to_be_read_is_called_that_of_every_kind(run, tmp_path, monkeypatch):
    """A disk that fails, for a reader of every kind of file we save: never damage, no traceback."""
    NgramModel.fit("the cat sat on the mat", 2).save(tmp_path / "ngrams")
    words = ["forecast", "sunspots", "--model", "drift", "--windows", "1", "--steps", "2"]
    assert elman([*words, "--out", str(tmp_path / "drift")]) == 0
    readers = {
        "config.json": lambda: Run.open(run.path),
        "vocab.json": lambda: Run.open(run.path),
        "model.safetensors": run.load_model,
        "state.safetensors": lambda: run.load_model(which="last"),
        "metrics.jsonl": run.metrics,
        "ngrams": lambda: NgramModel.load(tmp_path / "ngrams"),
        "drift/model.safetensors": lambda: saving.load_ensemble(tmp_path / "drift"),
        "drift/config.json": lambda: saving.load_ensemble(tmp_path / "drift"),
    }
    whole = Path.read_bytes
    for name, read in readers.items():

        def broken(path, name=name):
            if str(path).endswith(name):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return whole(path)

        monkeypatch.setattr(Path, "read_bytes", broken)
        with pytest.raises(Unreadable, match="cannot be read: Input/output error"):
            read()


def test_what_cannot_be_read_is_not_called_damaged(run):
    (run.path / "model.safetensors").unlink()
    (run.path / "model.safetensors").mkdir()
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        run.load_model()


# ---------------------------------------------------------------------- exactness


def test_a_resume_under_another_kernel_says_so(run, monkeypatch, capsys):
    assert not Session.resume(run.path).caveats
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    assert elman(["train", "--resume", str(run.path)]) == 0
    said = capsys.readouterr().err
    assert "reference kernel" in said
    assert "to rounding, not to the last bit" in said


def test_a_resume_of_an_older_run_knows_what_it_said_of_its_kernel(run, monkeypatch):
    """Older config.json have `arithmetic` beside a shorter `ran`, or neither."""
    record = json.loads((run.path / "config.json").read_text())
    before = record["ran"].split(", native")[0]
    for old in ({"ran": before, "arithmetic": "cpu, native cpu recurrence"}, {"ran": before}, {}):
        kept = {k: v for k, v in record.items() if k not in ("ran", "seal")} | old
        (run.path / "config.json").write_text(json.dumps(kept))
        assert not Session.resume(run.path).caveats
        assert Run.open(run.path).config.ran == record["ran"]
        assert "arithmetic" not in json.loads((run.path / "config.json").read_text())
    (run.path / "config.json").write_text(json.dumps(record | {"ran": before}))
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    assert "rounding" in Session.resume(run.path).caveats[-1]


def test_json_is_strict_everywhere(run):
    assert (
        strict_json.dumps({"a": [float("nan"), {"b": float("inf")}]})
        == '{"a": [null, {"b": null}]}'
    )
    for path in (run.path / "config.json", *run.path.glob("*.jsonl")):
        for text in [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines():
            json.loads(text, parse_constant=lambda name: pytest.fail(name))
    training = runs.fresh_training(run.config, run.splits(), "cpu")
    assert training.best == float("inf")
    run.save_state(training, 0)
    assert b"Infinity" not in (run.path / "state.safetensors").read_bytes()
    again = runs.fresh_training(run.config, run.splits(), "cpu")
    again.load_state_dict(*checkpoints.read(run.path / "state.safetensors", "state"))
    assert again.best == float("inf")


def test_a_record_with_another_type_or_without_a_number_is_refused(run, capsys):
    line = next(r for r in run.records() if r.kind == "update").json()
    assert math.isnan(from_json(line | {"perplexity": None}).json()["perplexity"])
    for wrong in ({**line, "step": "1"}, {**line, "nats": []}, {"kind": "update"}, [], 3, None):
        with pytest.raises(UserError, match="is not a record"):
            from_json(wrong)
    (run.path / "metrics.jsonl").write_text("[" * 100_000 + "\n")
    assert elman(["report", str(run.path)]) == 2
    assert "metrics.jsonl is damaged at line 1" in capsys.readouterr().err


# ---------------------------------------------------------------------- before work begins


@pytest.mark.parametrize("made", ALL_CELLS, ids=str)
def test_the_number_of_weights_is_known_before_there_are_any(made):
    more = {"context": 3} if made["cell"] == "mlp" else {}
    model = LanguageModel(7, hidden_size=8, **made, **more)
    assert model.shape.weights == sum(p.numel() for p in model.parameters())


def test_a_model_beyond_memory_is_refused_with_the_sum():
    with pytest.raises(UserError, match=r"weights × 4 bytes need .* of memory, and .* available"):
        LanguageModel(28, hidden_size=10**9)
    Shape(28, hidden_size=10**9)  # a description costs nothing


@pytest.mark.parametrize(
    ("changed", "copies", "states"),
    [
        (Settings(reading=Reading(3, 8)), 4, 4 * 3 * 8 * 24 * 2),
        (Settings(reading=Reading(3, 8), optimisation=Optimisation("sgd")), 2, 4 * 3 * 8 * 24 * 2),
        (Settings(reading=Reading(3, 8, memory=8192)), 4, 0),
        (Settings(reading=Reading(3, 8, carry="full")), 4, 0),
        (Settings(optimisation=Optimisation("adamw", average="ema")), 5, 4 * 32 * 35 * 24 * 2),
    ],
    ids=["adam", "sgd", "memory", "full", "average"],
)
def test_a_training_is_affordable_with_all_that_it_keeps(changed, copies, states, run, monkeypatch):
    """Weights, gradients, m and v, an average; and the states of a window that is kept whole."""
    asked = []
    monkeypatch.setattr(Shape, "check_affordable", lambda shape, *given: asked.append(given[:2]))
    config = replace(run.config, training=changed, model=run.config.model | {"layers": 2})
    check_fits(config, run.splits())
    assert asked == [(copies, states)]


REFUSED = {
    "--hidden-size 10000000": "PB of memory",
    "--hidden-size 99999999999999999999999": "64 bits",
    "--layers 100000": "at most 1,000",
    "--threads 1000000": "from 0 to 1,024",
    "--threads 99999999999": "from 0 to 1,024",
    "--seed -1": "at least 0",
    "--seed 18446744073709551616": "64 bits",
    "--weight-decay nan": "--weight-decay nan",
    "--clip inf": "--clip inf",
    "--min-freq 1000000": "leaves no token",
    "--memory 1": "budget=1 bytes is too small",
    "--memory 99999999999999999999999G": "is not a size",
    "--out ''": "an empty path names nothing",
    "--out /dev/null/x": "is not a folder",
    "--learning-rate 0": "--learning-rate 0",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_written(
    typed, run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    words = ["train", run.config.data.source, "--out", "new", *shlex.split(typed)]
    assert elman(words) == 2
    said = capsys.readouterr().err
    assert REFUSED[typed] in said
    assert "held out" not in said, "it had begun"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "typed",
    ["--length 100000000", "--length 10000 --samples 100000", "--seed 9223372036854775808"],
)
def test_absurd_requests_of_generate_are_refused_at_once(typed, run, monkeypatch, capsys):
    monkeypatch.setattr(Run, "open", lambda _: pytest.fail("it had begun"))
    assert elman(["generate", str(run.path), *typed.split()]) == 2
    assert "error: " in capsys.readouterr().err


def test_commands_in_the_card_are_quoted(run, tmp_path):
    odd = shutil.copytree(run.path, tmp_path / "it's a run; rm x")
    opened = Run.open(odd)
    opened.save_config(opened.config)
    lines = (odd / "README.md").read_text().splitlines()
    typed = [shlex.split(line) for line in lines if line.startswith("elman ")]
    assert [words[-1] for words in typed] == [str(odd)] * 3


# ---------------------------------------------------------------------- streams and names


def outside(*words: str | bytes, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "elman", *words]
    return subprocess.run(command, capture_output=True, timeout=600, **options)


def test_closed_streams_are_no_traceback(run):
    close = {"stdout": lambda: os.close(1), "stderr": lambda: os.close(2)}
    seen = outside("report", str(run.path), preexec_fn=close["stdout"])
    assert seen.returncode == 2
    assert b"stdout is closed" in seen.stderr
    seen = outside("report", str(run.path), preexec_fn=close["stderr"])
    assert (seen.returncode, seen.stderr) == (0, b"")


SEVERAL = """
import sys
from elman.cli import run
words = [[]]
for word in sys.argv[1:]:
    words[-1].append(word) if word != "then" else words.append([])
sys.exit(next((status for command in words if (status := run(command))), 0))
"""
"""`elman`, several commands in turn: Python and torch are loaded once."""


def test_undecodable_names_and_prompts_are_served(tiny_run, tmp_path):
    odd = os.fsencode(tmp_path) + b"/odd-\xff"
    shutil.copytree(os.fsencode(tiny_run()), odd)
    words = [
        *(b"generate", odd, b"--prompt", b"the \xff", b"--length", b"5", b"then"),
        *(b"generate", odd, b"--json", b"--length", b"5", b"then"),
        *(b"report", odd, b"then"),
        *(b"train", b"--resume", odd, b"--epochs", b"3"),
    ]
    seen = subprocess.run([sys.executable, "-c", SEVERAL, *words], capture_output=True, timeout=600)
    assert seen.returncode == 0, seen.stderr
    assert b"/odd-" in seen.stdout
    config = replace(Run.open(Path(os.fsdecode(odd))).config)
    assert config.training.epochs == 3


def test_dollars_in_a_text_are_drawn_as_dollars(tmp_path, capsys):
    text = tmp_path / "dollars.txt"
    text.write_text("it costs $\\b$ or $x_$ today\n" * 40)
    small = "--hidden-size 6 --embedding-size 3 --batch-size 2 --window 8 --epochs 1 --device cpu"
    assert elman(["train", str(text), "--out", str(tmp_path / "run"), *small.split()]) == 0
    figures = str(tmp_path / "figures")
    assert elman(["gradients", str(tmp_path / "run"), "--figure", figures]) == 0, (
        capsys.readouterr()
    )


# ---------------------------------------------------------------------- paths

EMPTY = [
    *(["runs", ""], ["runs", "runs", ""], ["lab", ""], ["demo", "--out", ""]),
    *(
        ["prepare", "b.txt", "--out", ""],
        ["train", "b.txt", "--out", ""],
        ["train", "--resume", ""],
    ),
    *(["evaluate", ""], ["generate", ""], ["report", ""], ["gradients", ""]),
    *(
        ["forecast", "sunspots", option, ""]
        for option in ("--run", "--out", "--output", "--figure")
    ),
    *(["forecast", "--resume", ""], ["statistics", "b.txt", "--figure", ""]),
    *(["ngram", "b.txt", "--arpa", ""], ["ngram", "b.txt", "--out", ""]),
    *(["compress", ""], ["compress", "b.txt", "-o", ""], ["compress", "b.txt", "--run", ""]),
    *(["decompress", ""], ["decompress", "b.txt", "-o", ""]),
]


@pytest.mark.parametrize("words", EMPTY, ids=" ".join)
def test_an_empty_path_is_refused_and_not_taken_for_this_folder(
    words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("b.txt").write_text("the cat sat on the mat. " * 40)
    assert elman(words) == 2
    said = capsys.readouterr().err
    assert "empty path" in said or "does not end in .elm" in said, said
    assert [p.name for p in tmp_path.iterdir()] == ["b.txt"]


# ---------------------------------------------------------------------- sources without an end

ENDLESS = [
    *(["train", "/dev/zero", "--level", "byte"], ["ngram", "/dev/full"], ["statistics", "-"]),
    *(["forecast", "/dev/zero"], ["forecast", "-"]),
    ["train", "b.txt", "--level", "bpe", "--tokenizer", "/dev/zero"],
]


@pytest.mark.parametrize("words", ENDLESS, ids=" ".join)
def test_a_source_without_an_end_is_left_before_it_fills_the_memory(
    words, tmp_path, monkeypatch, capsys
):
    """`elman train /dev/full` once read until the system ended the process."""
    monkeypatch.chdir(tmp_path)
    Path("b.txt").write_text("the cat sat on the mat. " * 40)
    monkeypatch.setattr(files, "ENDLESS", 1 << 21)
    with open("/dev/zero") as zeros:
        monkeypatch.setattr(sys, "stdin", zeros)
        assert elman(words) == 2
    assert "bytes and has not ended" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["b.txt"]


def test_what_can_be_read_once_only_is_not_prepared(tmp_path, capsys):
    """A pipe, once measured, had nothing left to be counted; a device was measured for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for source in (pipe, "/dev/zero"):
        words = ["prepare", str(source), "--level", "byte", "--out", str(tmp_path / "out")]
        assert elman(words) == 2
        assert "is a pipe or a device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
