"""Several processes train one model: how many, and which, changes nothing."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import several_processes
from elman.errors import UserError
from elman.text.batches import shares
from elman.training import Settings, Training
from elman.training.processes import ALONE, LaneGroups, Node, Processes, Tree, _met, nodes_of

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
GROUPED = st.tuples(st.integers(1, 20), st.integers(1, 20)).filter(lambda p: p[1] <= p[0])


def torchrun(count, *arguments, timeout=600, options=(), **environment):
    """The exit status, stdout and stderr of so many processes.

    Those that wait for one that is gone would do so for half an hour: it is not waited for here.
    """
    started = subprocess.Popen(
        [*TORCHRUN, str(count), *options, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = started.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        started.terminate()  # and not kill: it ends its processes first
        started.communicate()
        raise
    return started.returncode, out, err


# ---------------------------------------------------------------------- one process, many groups


def in_one_go(values, start, size):
    """The definition: a node is the sum of its halves; what is left is added from the right."""
    if size == 1:
        return values[start]
    half = 1 << (size - 1).bit_length() - 1
    if half == size:
        half //= 2
    return in_one_go(values, start, half) + in_one_go(values, start + half, size - half)


@given(counts=GROUPED, seed=st.integers(0, 1000))
def test_the_sum_of_groups_does_not_depend_on_who_has_them(counts, seed):
    groups, processes = counts
    values = list(torch.randn(groups, 3, generator=torch.Generator().manual_seed(seed)) * 1e3)
    whole = Tree()
    for owner in shares(groups, processes):
        own = Tree()
        for group in range(owner.start, owner.stop):
            own.add(Node(group, 1), values[group].clone())
        assert [node for node, _ in own.nodes] == nodes_of(range(owner.start, owner.stop))
        for node, value in own.nodes:
            whole.add(node, value)
    assert torch.equal(whole.total(), in_one_go(values, 0, groups))


@given(batch=st.integers(1, 50), counts=GROUPED)
def test_every_lane_has_one_group_and_every_group_one_process(batch, counts):
    groups, size = counts
    if groups > batch:
        with pytest.raises(UserError, match=r"cannot be cut into \d+ groups of lanes"):
            LaneGroups(batch, groups, ALONE)
        return
    seats = [LaneGroups(batch, groups, Processes(rank, size)) for rank in range(size)]
    lanes = [i for seat in seats for i in range(batch)[seat.rows]]
    assert lanes == list(range(batch))
    assert [g.group for seat in seats for g in seat.own] == list(range(groups))
    assert sum(g.part for seat in seats for g in seat.own) == pytest.approx(1)
    assert [len(range(batch)[seat.rows]) for seat in seats] == seats[0].sizes


def test_more_processes_than_groups_are_refused():
    with pytest.raises(UserError, match="lane_groups=2 cannot be shared by 3 processes"):
        LaneGroups(10, 2, Processes(0, 3))


SAME_CHANCE = [n for n in several_processes.CASES if n not in ("masks", "plain")]


@pytest.mark.parametrize("name", SAME_CHANCE)
def test_groups_give_the_gradient_of_the_whole_batch(name):
    """Dropout between layers is drawn for each group, so the cases with it are left out."""
    weights = []
    for groups in (0, 3):
        model, settings = several_processes.CASES[name]
        torch.manual_seed(1)
        options = {**vars(settings), "lane_groups": groups, "validate_every": 4}
        train = Training(
            model().double(), several_processes.IDS, several_processes.HELD_OUT, Settings(**options)
        )
        records = train.records()
        nats = [record.nats for record, _ in zip(records, range(6), strict=False)]
        weights.append([*(p.detach() for p in train.model.parameters()), torch.tensor(nats)])
    for whole, grouped in zip(*weights, strict=True):
        torch.testing.assert_close(grouped, whole, rtol=1e-9, atol=1e-9)


def test_groups_are_read_natively_with_the_same_bits(monkeypatch):
    native = several_processes.training("native", ALONE)
    assert native.explain().runs == "native"
    monkeypatch.setattr("elman.training.loop.choose", _piecewise)
    pieces = several_processes.training("native", ALONE)
    assert pieces.explain().runs == "piecewise"
    for train in (native, pieces):
        for _ in range(4):
            train.update()
    assert several_processes.digest(native) == several_processes.digest(pieces)


def _piecewise(training):
    from elman.kernels import Explanation
    from elman.training.update import Choice

    return Choice(None, Explanation("piecewise", {}))


def test_processes_meet_without_the_dead():
    """torchrun's store outlives a restart, with all that the processes before it have written."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))
    for rank in (1, 2):
        store.set(f"elman-here-{rank}", f"dead-{rank}")
    with ThreadPoolExecutor(3) as pool:
        for told in (b"once", b"again"):
            met = list(pool.map(lambda rank: _met(store, rank, 3), range(3)))
            assert not any(part.check(["told"]) for part in met)
            met[0].set("told", told)
            assert [part.get("told") for part in met] == [told] * 3


# ---------------------------------------------------------------------- real processes


def test_two_processes_compute_what_one_does_to_the_last_bit(one_thread):
    names = list(several_processes.CASES)
    status, out, err = torchrun(2, HERE / "several_processes.py", *names)
    assert status == 0, err
    found = json.loads(out.splitlines()[-1])
    errors, captured = found.pop("modules"), found.pop("captured")
    assert found.pop("threads") == []  # one of them, late, would abort a process that is done
    assert captured == pytest.approx(several_processes.captured(ALONE), rel=1e-5)
    assert found == {name: several_processes.trained(name, ALONE) for name in names}
    assert max(errors.values()) < 1e-5, errors  # DDP and FSDP2 around elman.nn, float32


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_three_and_four_processes_do_so_too(count, one_thread):
    names = list(several_processes.CASES)
    status, out, err = torchrun(count, HERE / "several_processes.py", *names)
    assert status == 0, err
    alone = {name: several_processes.trained(name, ALONE) for name in names}
    assert json.loads(out.splitlines()[-1]) == {**alone, "threads": []}


FAILING = """
import os, resource, signal, sys
import elman.training.loop as loop
from elman.errors import UserError
update, kind, rank = loop.Training.update, os.environ["FAILS"], os.environ["RANK"]
def broken(self):
    if self.step == 2 and rank == "1":
        if kind == "refusal":
            raise UserError("rank one has had enough", hint="let it rest")
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "nan":
            next(self.model.parameters()).data[0] = float("nan")
    return update(self)
loop.Training.update = broken
if kind == "unreadable" and rank == "1":
    os.chdir("elsewhere")
if kind == "full" and rank == "0":  # files of rank 0 do not grow beyond this
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
from elman.cli import main
main(sys.argv[1:])
"""
FAILURES = {
    "refusal": "error: rank one has had enough",
    "option": "error: No such option: --hiden-size",
    "unreadable": "error: there is no file or text dataset 'text.txt'",
    "nan": "error: the loss became nan",
    "killed": "error: another process of this training is gone",
    "full": "error: cannot write to",
}


@pytest.mark.parametrize(
    "kind", [k if k == "refusal" else pytest.param(k, marks=pytest.mark.slow) for k in FAILURES]
)
def test_an_error_of_one_process_ends_all_and_is_said_once(kind, tmp_path, monkeypatch):
    text, script, out = tmp_path / "text.txt", tmp_path / "failing.py", tmp_path / "run"
    text.write_text("one two three four five\n" * 100)
    script.write_text(FAILING)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    options = ["--preset", "quick", "--hidden-size", 8, "--epochs", 3, "--device", "cpu"]
    options += ["--hiden-size", 9] if kind == "option" else []
    status, _, err = torchrun(2, script, "train", "text.txt", "--out", out, *options, FAILS=kind)
    assert status != 0
    assert err.count("error: ") == 1, err
    assert FAILURES[kind] in err
    assert err.count("Traceback") == err.count("ChildFailedError:") == 1  # torchrun's own
    assert out.exists() == (kind not in ("option", "unreadable"))


@pytest.mark.slow
def test_evaluating_is_shared_out(tmp_path, text):
    run = tmp_path / "run"
    tiny = ["--preset", "quick", "--hidden-size", "8", "--epochs", "1", "--validation", "0.5"]
    train = [sys.executable, "-m", "elman", "train", text, "--out", run, *tiny]
    subprocess.run(train, check=True, capture_output=True)
    scored = ["-m", "elman", "evaluate", run, "--json", "--no-baselines", "--device", "cpu"]
    alone = subprocess.run([sys.executable, *scored], check=True, capture_output=True).stdout
    status, found, err = torchrun(2, *scored)
    assert status == 0, err
    assert "2 stretches side by side" in err
    (plain, shared) = json.loads(alone), json.loads(found)
    assert shared["tokens"] == plain["tokens"]
    assert shared["nats_per_token"] == pytest.approx(plain["nats_per_token"], rel=1e-3)


# ---------------------------------------------------------------------- killed, and restarted


def weights_of(run):
    from safetensors.numpy import load_file

    return load_file(run / "model.safetensors"), load_file(run / "state.safetensors")


def same(a, b):
    return all(
        mine.keys() == theirs.keys() and all(np.array_equal(mine[k], theirs[k]) for k in mine)
        for mine, theirs in zip(weights_of(a), weights_of(b), strict=True)
    )


OPTIONS = """
    --model lstm --layers 2 --hidden-size 16 --embedding-size 8 --batch-size 10 --window 8
    --epochs 4 --validate-every 40 --checkpoint-every 7 --checkpoint-seconds 0 --lane-groups 4
    --dropout-tokens 0.1 --dropout-inputs 0.1 --dropout-layers 0.1 --dropout-outputs 0.2
    --dropout-recurrent 0.2 --average ema --device cpu --threads 1 --diagnose 0 --preset quick
"""


@pytest.fixture
def text(tmp_path):
    chance, words = np.random.default_rng(0), ["the", "time", "traveller", "will", "be", "here"]
    path = tmp_path / "text.txt"
    path.write_text(" ".join(chance.choice(words, 1500)))
    return path


KILLED = """
import os, signal, sys, time
import elman.training.loop as loop
from elman.runs import checkpoints
checkpoints.LARGE = int(os.environ.get("LARGE", checkpoints.LARGE))
update = loop.Training.update
def until(self):
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    here = os.environ["RANK"] == os.environ["KILL"]
    if first and here and self.step == int(os.environ["KILL_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self)
loop.Training.update = until
from elman.cli import main
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_one_four_three_one_processes_with_kills_end_in_the_same_weights(tmp_path, text):
    script, whole, run = tmp_path / "killed.py", tmp_path / "whole", tmp_path / "run"
    script.write_text(KILLED)
    alone = [sys.executable, "-m", "elman", "train"]
    subprocess.run(
        [*alone, text, "--out", whole, *OPTIONS.split()], check=True, capture_output=True
    )
    environment = {**os.environ, "RANK": "0", "KILL": "0", "KILL_AT": "60"}
    begun = [sys.executable, str(script), "train", text, "--out", run, *OPTIONS.split()]
    assert subprocess.run(begun, env=environment, capture_output=True).returncode == -9
    for count, rank, step in ((4, "2", "150"), (3, "0", "251")):
        status, _, err = torchrun(
            count, script, "train", "--resume", run, KILL=rank, KILL_AT=step, LARGE="5000"
        )
        assert status != 0, err
        assert len(list(run.glob("state-*.safetensors"))) > 4
    subprocess.run([*alone, "--resume", run], check=True, capture_output=True)
    assert not list(run.glob("state-*.safetensors"))
    assert same(whole, run)


def test_two_processes_go_on_with_other_options_as_one_does(tmp_path, text):
    """All of them take part in the checkpoint that has the change."""
    run, shared = tmp_path / "run", tmp_path / "shared"
    begun = ["-m", "elman", "train", text, "--out", run, *OPTIONS.split(), "--epochs", "1"]
    subprocess.run([sys.executable, *begun], check=True, capture_output=True)
    shutil.copytree(run, shared)
    changed = ["--epochs", "2", "--learning-rate", "0.003"]
    again = ["-m", "elman", "train", "--resume", run, *changed]
    subprocess.run([sys.executable, *again], check=True, capture_output=True)
    status, _, err = torchrun(2, "-m", "elman", "train", "--resume", shared, *changed, timeout=120)
    assert status == 0, err
    assert same(run, shared)


@pytest.mark.slow
def test_torchrun_restarts_a_killed_process_and_training_goes_on_exactly(tmp_path, text):
    script, whole, run = tmp_path / "killed.py", tmp_path / "whole", tmp_path / "run"
    script.write_text(KILLED)
    plain = [sys.executable, "-m", "elman", "train", text, "--out", whole, *OPTIONS.split()]
    subprocess.run(plain, check=True, capture_output=True)
    status, _, err = torchrun(
        3,
        script,
        "train",
        text,
        "--out",
        run,
        *OPTIONS.split(),
        options=("--max-restarts", "1"),
        KILL="1",
        KILL_AT="100",
    )
    assert status == 0, err
    assert "continuing" in err
    assert same(whole, run)
