"""Run folders: whole files, exact resume after any crash, clear refusals of anything damaged."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from elman import metrics, runs
from elman.errors import MissingSource, UserError, WorkFailed
from elman.files import checked_line
from elman.runs import Config, Run, checkpoints, presets
from elman.text import prepared
from elman.training import Result, Sample, Update, Validation
from elman.training.records import KINDS

TEXT = "the time traveller for so it will be convenient to speak of him " * 12


def options(source, **given):
    small = {"model": "gru", "hidden_size": 6, "batch_size": 4, "window": 8, "epochs": 2}
    return presets.expand("quick", small | {"embedding_size": 0, "source": str(source)} | given)


def begin(folder: Path, text: str = TEXT, **given):
    """A run folder with its training, not yet trained."""
    source = folder / "text.txt"
    source.write_text(text)
    chosen = options(source, **given)
    data = presets.data(chosen)
    parts = prepared.prepare(data, prepared.read(data))
    config = Config(
        data=data,
        model=presets.model(chosen, len(parts.vocab)),
        training=presets.settings(chosen, parts.train),
        sha256=parts.sha256,
    )
    run = Run.create(folder / "run", config, parts.vocab)
    return run, runs.fresh_training(config, parts, "cpu")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    run, training = begin(tmp_path_factory.mktemp("template"))
    list(runs.train(run, training))
    runs.conclude(run, training)
    return run.path


@pytest.fixture
def trained(template, tmp_path):
    """A finished run to read, or to damage."""
    return Run.open(shutil.copytree(template, tmp_path / template.name))


# ---------------------------------------------------------------------- what is in a folder


def test_a_run_holds_what_it_promises(trained):
    names = {p.name for p in trained.path.iterdir()}
    assert names == {
        "config.json",
        "vocab.json",
        "model.safetensors",
        "state.safetensors",
        "metrics.jsonl",
        "README.md",
    }
    kinds = [r["kind"] for r in trained.metrics()]
    assert set(kinds) == {"update", "epoch", "validation", "result"}
    assert kinds[-1] == "result"
    card = (trained.path / "README.md").read_text()
    assert f"perplexity {trained.metrics()[-1]['perplexity']:.3f}" in card
    assert "elman train --resume" in card


def test_the_configuration_comes_back_as_it_was(trained):
    again = Config.from_json(json.loads(json.dumps(trained.config.json())), Path("config.json"))
    assert again == trained.config


def test_the_best_weights_score_what_was_recorded(trained):
    validations = [r for r in trained.metrics() if r["kind"] == "validation"]
    best = min(r["nats"] for r in validations)
    found = trained.metrics()[-1]
    parts = trained.splits()
    chosen_by, reported = (
        metrics.evaluate(trained.load_model(), ids) for ids in (parts.validation, parts.test)
    )
    assert chosen_by.nats_per_token == pytest.approx(best, rel=1e-6), "too short for lanes"
    assert (found["part"], found["nats_per_token"]) == ("test", reported.nats_per_token)
    assert found["nats_per_token"] != pytest.approx(best, rel=1e-3), "another text"


def test_best_and_last_weights_differ_when_the_last_are_worse(tmp_path):
    run, training = begin(tmp_path)
    for record in runs.train(run, training):
        if isinstance(record, Validation):
            training.best = 0.0  # nothing after the first is better
    best, last = run.load_model(which="best"), run.load_model(which="last")
    assert not torch.equal(best.bias_q, last.bias_q)
    assert torch.equal(last.bias_q, training.model.bias_q)


def test_averaged_weights_are_what_is_used(tmp_path):
    run, training = begin(tmp_path, average="ema")
    list(runs.train(run, training))
    with training.average.applied():
        assert torch.equal(run.load_model(which="last").bias_q, training.model.bias_q)
    assert not torch.equal(run.load_model(which="last").bias_q, training.model.bias_q)


def test_splits_come_back_exactly(trained):
    data = trained.config.data
    expected = prepared.prepare(data, prepared.read(data))
    found = trained.splits()
    assert found.vocab == expected.vocab
    assert (found.train == expected.train).all()
    assert (found.validation == expected.validation).all()
    assert (found.test == expected.test).all()
    parts = (found.train, found.validation, found.test)
    assert "".join(map(trained.vocab.decode, parts)) == TEXT
    assert len(found.validation) == len(found.test) == round(0.05 * len(TEXT))


def test_words_bytes_and_letters_split_by_tokens():
    words = prepared.prepare(presets.data(options("x", level="word", max_tokens=20)), TEXT)
    assert len(words.train) + len(words.validation) + len(words.test) == 20
    assert words.vocab.decode(words.train).startswith("the time traveller")
    raw = prepared.prepare(presets.data(options("x", level="byte")), b"\x00\xff" * 50)
    assert raw.vocab.decode_bytes(raw.train) == b"\x00\xff" * 45
    letters = presets.data(options("x", clean="letters"))
    assert letters.level == "char"
    found = prepared.prepare(letters, "The Time, 1898!\nMachine " * 5)
    assert found.vocab.decode(found.train).startswith("the timemachine the")


def test_what_only_the_held_out_text_has_is_unknown():
    found = prepared.prepare(presets.data(options("x")), "a" * 90 + "b" * 10)
    assert found.validation.tolist() == found.test.tolist() == [0] * 5


def test_a_changed_text_is_reported(tmp_path):
    run, _ = begin(tmp_path)
    Path(run.config.data.source).write_text(TEXT + "!")
    with pytest.raises(UserError, match=r"has changed since this run was made"):
        run.splits()


def test_a_text_that_is_gone_is_asked_back_by_name(tmp_path):
    run, _ = begin(tmp_path)
    Path(run.config.data.source).rename(tmp_path / "elsewhere.txt")
    with pytest.raises(MissingSource, match=r"was trained on is no longer there: .*txt") as found:
        run.splits()
    assert "put it back" in str(found.value.hint)


def test_a_piped_text_is_kept_in_the_run(tmp_path):
    run, _ = begin(tmp_path)
    data = replace(run.config.data, source="-")
    piped = Run.create(tmp_path / "piped", replace(run.config, data=data), run.vocab, source=TEXT)
    assert (piped.splits().train == run.splits().train).all()


# ---------------------------------------------------------------------- exact resume


def comparable(path: Path):
    """All of a run that may not depend on when it was interrupted: no clocks."""
    tensors, numbers = checkpoints.read(path / "state.safetensors", "state")
    records = Run.open(path).metrics()
    for record in records:
        record.pop("tokens_per_second", None)
    numbers.pop("metrics_bytes")
    state = {name: t.numpy().tobytes() for name, t in tensors.items()}
    return (path / "model.safetensors").read_bytes(), state, numbers, records


def test_a_run_killed_at_random_moments_ends_as_if_it_never_was(tmp_path):
    script = Path(__file__).with_name("killed_runs.py")
    command = [sys.executable, str(script), str(tmp_path), "20", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    kills = json.loads(done.stdout.splitlines()[-1])["kills"]
    assert sum(kills) >= 20
    unbroken = comparable(tmp_path / "unbroken")
    assert unbroken == comparable(tmp_path / "first")
    for number in range(len(kills)):
        for found, expected in zip(
            comparable(tmp_path / f"broken-{number}"), unbroken, strict=True
        ):
            assert found == expected


def test_a_stopped_run_goes_on_where_it_stopped(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    run, training = begin(tmp_path / "one")
    steps = [r.step for r in runs.train(run, training) if isinstance(r, Update)]
    broken, training = begin(tmp_path / "two")
    list(runs.train(broken, training, stop=lambda: training.step == 5))
    again = runs.fresh_training(broken.config, broken.splits(), "cpu")
    broken.resume(again)
    assert again.step == training.step
    rest = [r.step for r in runs.train(broken, again) if isinstance(r, Update)]
    assert rest == steps[training.step :]
    assert comparable(run.path) == comparable(broken.path)


def test_resume_cuts_metrics_back_to_the_checkpoint(tmp_path):
    run, training = begin(tmp_path)
    list(runs.train(run, training))
    path = run.path / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b'{"kind": "update", "step": 999}\n{"kind": "upd')
    run.resume(runs.fresh_training(run.config, run.splits(), "cpu"))
    assert path.read_bytes() == before


def test_before_the_first_checkpoint_a_resume_begins_again(tmp_path):
    run, training = begin(tmp_path)
    (run.path / "metrics.jsonl").write_text('{"kind": "update", "step": 1}\n')
    (run.path / ".state.safetensors.1.partial").write_text("half")
    run.resume(training)
    assert training.step == 0
    assert run.metrics() == []
    assert not list(run.path.glob(".*.partial"))


# ---------------------------------------------------------------------- large states, in pieces


def everything(run):
    tensors, numbers = checkpoints.read(run.path / "state.safetensors", "state")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}, numbers


def pieces(run):
    return sorted(run.path.glob("state-*.safetensors"))


def test_a_large_state_lies_in_pieces_and_is_the_same(tmp_path, monkeypatch):
    run, training = begin(tmp_path)
    for record in runs.train(run, training, every_steps=3):
        if record.step == 6:
            break
    whole = everything(run)
    monkeypatch.setattr(checkpoints, "LARGE", 400)
    run.save_state(training, whole[1]["metrics_bytes"])
    first = pieces(run)
    assert len(first) > 5
    assert everything(run) == whole
    tensors, _ = training.state_dict()
    turned = dict(reversed(tensors.items()))  # files are read in any order, by each process
    assert checkpoints._in_pieces(turned) == checkpoints._in_pieces(tensors)
    names = [set(checkpoints._read(p, "state in pieces")[0]) for p in first]
    assert sum(map(len, names)) == len(set.union(*names)) == len(whole[0])

    again = runs.fresh_training(run.config, run.splits(), "cpu")
    Run.open(run.path).resume(again)
    assert again.step == training.step
    run.save_state(again, whole[1]["metrics_bytes"])
    assert not set(pieces(run)) & set(first)  # those of another moment, and no others
    assert everything(run) == whole
    monkeypatch.undo()
    run.save_state(again, whole[1]["metrics_bytes"])
    assert not pieces(run)


def test_a_killed_save_leaves_the_pieces_that_were(tmp_path, monkeypatch):
    run, training = begin(tmp_path)
    monkeypatch.setattr(checkpoints, "LARGE", 400)
    run.save_state(training, 0)
    before, write = everything(run), checkpoints.write
    list(zip(range(3), training.records(), strict=False))

    def killed(path, kind, tensors, numbers):
        if kind == "state":
            raise KeyboardInterrupt
        write(path, kind, tensors, numbers)

    monkeypatch.setattr(checkpoints, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        run.save_state(training, 0)
    assert everything(run) == before
    monkeypatch.setattr(checkpoints, "write", write)
    run.save_state(training, 0)
    assert everything(run) != before
    assert len({path.name.split("-")[1] for path in pieces(run)}) == 1


def test_pieces_that_are_replaced_while_they_are_read_are_read_again(tmp_path, monkeypatch):
    run, training = begin(tmp_path)
    monkeypatch.setattr(checkpoints, "LARGE", 400)
    run.save_state(training, 0)
    old, read, list_of = everything(run), checkpoints._read, [training]
    list(zip(range(3), training.records(), strict=False))

    def slowly(path, kind):
        if path == pieces(run)[1] and list_of:  # the training goes on in the meantime
            run.save_state(list_of.pop(), 0)
        return read(path, kind)

    monkeypatch.setattr(checkpoints, "_read", slowly)
    new = everything(run)
    monkeypatch.setattr(checkpoints, "_read", read)
    assert not list_of
    assert new == everything(run) != old
    pieces(run)[1].unlink()  # gone for good
    with pytest.raises(UserError, match="there is no"):
        everything(run)


def test_a_piece_that_is_not_as_it_was_is_refused_by_name(tmp_path, monkeypatch):
    run, training = begin(tmp_path)
    monkeypatch.setattr(checkpoints, "LARGE", 400)
    run.save_state(training, 0)
    one, other = pieces(run)[1:3]
    data = one.read_bytes()
    for damaged in (data[:-1], data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], other.read_bytes()):
        one.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{one.name} is damaged"):
            run.resume(training)
    one.unlink()
    with pytest.raises(MissingSource, match=one.name):
        run.resume(training)


def test_a_piece_holds_what_fits_and_no_more(monkeypatch):
    monkeypatch.setattr(checkpoints, "LARGE", 40)
    sizes = {"a": 30, "b": 10, "c": 1, "d": 90, "e": 20, "f": 19, "g": 2}
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    cut = [["a", "b"], ["c"], ["d"], ["e", "f"], ["g"]]
    assert checkpoints._in_pieces(tensors) == cut
    assert checkpoints._in_pieces({"d": tensors["d"]}) == [["d"]]


@pytest.mark.parametrize(
    "said",
    [
        *(7, {}, {"count": 2}, {"name": 7, "count": 2}, {"name": "../../etc", "count": 2}),
        *({"name": "0" * 32, "count": count} for count in (1, 2.0, 1e9, 10**5, "2", None)),
    ],
    ids=str,
)
def test_pieces_that_make_no_sense_are_refused(tmp_path, said):
    path = tmp_path / "state.safetensors"
    checkpoints.write(path, "state", {}, {"pieces": said})
    with pytest.raises(UserError, match="what it says of its pieces makes no sense"):
        checkpoints.read(path, "state")


# ---------------------------------------------------------------------- damage


DAMAGE = {
    "truncated": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "overwritten": lambda data: b"not a checkpoint at all " * 20,
    "one bit flipped": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "pickled": lambda data: b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.",
}


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_refused(trained, name, damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = trained.path / name
    path.write_bytes(damage(path.read_bytes()))
    which = "best" if name.startswith("model") else "last"
    with pytest.raises(UserError, match=f"{name} is damaged"):
        trained.load_model(which=which)
    if which == "last":
        with pytest.raises(UserError, match="is damaged"):
            trained.resume(runs.fresh_training(trained.config, trained.splits(), "cpu"))
    assert not (tmp_path / "owned").exists()


def test_a_foreign_checkpoint_is_refused(trained):
    save_file({"weight": torch.zeros(3)}, trained.path / "model.safetensors")
    with pytest.raises(UserError, match="not an elman model"):
        trained.load_model()
    checkpoints.write(trained.path / "model.safetensors", "model", {"weight": torch.zeros(3)}, {})
    with pytest.raises(UserError, match="do not fit"):
        trained.load_model()
    tensors, numbers = checkpoints.read(trained.path / "state.safetensors", "state")
    del tensors["weights/bias_q"]
    checkpoints.write(trained.path / "state.safetensors", "state", tensors, numbers)
    with pytest.raises(UserError, match="does not fit"):
        trained.resume(runs.fresh_training(trained.config, trained.splits(), "cpu"))


CONFIGS = {
    "not json": "{",
    "a list": "[]",
    "empty": "",
    "another format": '{"format": 99}',
    "no training": '{"format": 1, "data": {}, "model": {}}',
}


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_damaged_configuration_is_refused(trained, text):
    (trained.path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        Run.open(trained.path)


def test_a_configuration_with_other_contents_is_refused(trained):
    record = trained.config.json()
    for change in (
        {"model": {"cell": "gru"}},
        {"model": record["model"] | {"cell": "transformer"}},
    ):
        (trained.path / "config.json").write_text(json.dumps(record | change))
        with pytest.raises(UserError):
            Run.open(trained.path).load_model()


def test_damaged_metrics_and_vocabulary_are_refused(trained):
    path = trained.path / "metrics.jsonl"
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    with pytest.raises(UserError, match="line 1"):
        trained.metrics()
    path.write_bytes(b"")
    with pytest.raises(UserError, match="fewer than"):
        trained.resume(runs.fresh_training(trained.config, trained.splits(), "cpu"))
    (trained.path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match=r"vocab\.json"):
        Run.open(trained.path)


def test_missing_parts_are_named(trained, tmp_path):
    with pytest.raises(MissingSource, match="not a run folder"):
        Run.open(tmp_path / "nowhere")
    os.remove(trained.path / "model.safetensors")
    with pytest.raises(MissingSource, match=r"model\.safetensors"):
        trained.load_model()
    with pytest.raises(UserError, match="best or last"):
        trained.load_model(which="first")


def test_what_older_runs_wrote_down_and_nobody_heeded_is_read_as_usual(trained):
    record = json.loads(json.dumps(trained.config.json()))
    record["training"] |= {"accumulate": 3, "patience": 2}
    record["training"]["reading"] |= {"carry": "full", "history": 5, "tolerance": 0.1, "chunks": 0}
    record["training"]["optimisation"] |= {"average": "none", "average_decay": 0.5}
    record["data"] |= {"validation": 0.0}
    read = Config.from_json(record, Path("config.json")).training
    assert (read.accumulate, read.patience, read.reading.history) == (1, 0, 0)
    assert (read.reading.tolerance, read.optimisation.average_decay) == (1e-5, 0.999)


def test_what_nobody_heeds_any_more_once_another_option_is_as_usual_is_so_too(trained):
    record = json.loads(json.dumps(trained.config.json()))
    record["training"]["optimisation"] |= {"schedule": "plateau", "plateau_factor": 0.3}
    record["data"] |= {"validation": 0.0}
    record["model"] |= {"context": 4}
    read = Config.from_json(record, Path("config.json"))
    how = read.training.optimisation
    assert (how.schedule, how.plateau_factor, read.model["context"]) == ("constant", 0.5, 8)


# ---------------------------------------------------------------------- overwriting


def test_a_run_is_never_overwritten_unasked(trained):
    config, vocab = trained.config, trained.vocab
    with pytest.raises(UserError, match=r"is a run already.*with force"):
        Run.create(trained.path, config, vocab)
    assert Run.open(trained.path).metrics()
    fresh = Run.create(trained.path, config, vocab, force=True)
    assert fresh.metrics() == []
    assert not (fresh.path / "model.safetensors").exists()


def test_a_folder_with_other_things_is_never_overwritten(trained, tmp_path):
    (trained.path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis\.txt"):
        Run.create(trained.path, trained.config, trained.vocab, force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="not a folder"):
        Run.create(tmp_path / "file", trained.config, trained.vocab, force=True)


# ---------------------------------------------------------------------- the end of the record


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_latest_record_of_a_kind_is_the_last_one_that_there_is(kind, trained):
    of_the_kind = [record for record in trained.records() if type(record) is kind]
    assert trained.latest(kind) == (of_the_kind[-1] if of_the_kind else None)


def test_a_record_that_has_the_name_of_a_kind_in_it_is_not_of_that_kind(trained):
    last, path = trained.latest(Result), trained.path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(checked_line(json.dumps(Sample(9, "result").json())))
    assert trained.latest(Result) == last
    assert trained.latest(Sample) == Sample(9, "result")


def test_a_latest_record_that_is_damaged_is_refused(trained):
    path = trained.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"result", "step": ', b'"result", "step": 1'))
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged at line \d+"):
        trained.latest(Result)


# ---------------------------------------------------------------------- numbers that come late

LATE = 9
NOTHING_HELD_OUT = {"validation": 0.0, "test": 0.0}  # a validation waits for all


def begin_as_on_a_gpu(folder: Path, **given):
    """A training whose numbers are known some updates later, as those of a GPU are."""
    run, training = begin(folder, average="none", **given)
    update = training._choice.update
    if update is None:
        pytest.skip("without the CPU kernel every update waits")
    update.late = LATE
    return run, training


def lines(path: Path) -> list:
    """What is in metrics.jsonl, but for the time it took."""
    told = [json.loads(line) for line in (path / "metrics.jsonl").read_bytes().splitlines()]
    return [
        {k: v for k, v in one.items() if k not in ("tokens_per_second", "crc32")} for one in told
    ]


def test_records_are_written_once_their_numbers_are_known_and_in_their_order(tmp_path):
    (tmp_path / "late").mkdir()
    (tmp_path / "soon").mkdir()
    run, training = begin_as_on_a_gpu(tmp_path / "late", **NOTHING_HELD_OUT)
    behind, told = [], []
    for record in runs.train(run, training):
        told.append(record)
        behind.append(len(told) - len(lines(run.path)))
    assert max(behind) >= LATE
    other, alike = begin(tmp_path / "soon", average="none", **NOTHING_HELD_OUT)
    list(runs.train(other, alike))
    assert lines(run.path) == lines(other.path)
    assert [record.json()["kind"] for record in told] == [line["kind"] for line in lines(run.path)]


def test_records_of_slow_updates_are_waited_for_in_time(tmp_path, monkeypatch):
    run, training = begin_as_on_a_gpu(tmp_path, **NOTHING_HELD_OUT)
    clock = itertools.count(step=1.0)  # a second passes between any two questions
    monkeypatch.setattr("elman.runs.training.time.monotonic", lambda: next(clock))
    behind = []
    for count, _ in enumerate(runs.train(run, training, every_seconds=0), 1):
        behind.append(count - len(lines(run.path)))
    assert max(behind) == 1


@pytest.mark.parametrize("killed", [7, 12, 14, 31])
def test_a_run_that_is_killed_while_numbers_are_on_their_way_goes_on_exactly(killed, tmp_path):
    run, training = begin_as_on_a_gpu(tmp_path, validate_every=7)
    for count, _ in enumerate(runs.train(run, training, every_steps=5), 1):
        if count == killed:
            shutil.copytree(run.path, tmp_path / "killed")
    again = Run.open(tmp_path / "killed")
    fresh = runs.fresh_training(again.config, again.splits(), "cpu")
    again.resume(fresh)
    fresh._choice.update.late = LATE
    list(runs.train(again, fresh, every_steps=5))
    assert lines(again.path) == lines(run.path)


def test_of_a_training_that_diverges_late_all_that_is_known_is_written(tmp_path):
    run, training = begin_as_on_a_gpu(tmp_path, **NOTHING_HELD_OUT)
    seen, records = [], runs.train(run, training, every_seconds=0)
    seen += itertools.islice(records, 5)
    with torch.no_grad():
        training.model.weight_hq[2, 3] = torch.inf
    with pytest.raises(WorkFailed, match="at step 6"):
        seen.extend(records)
    assert len(seen) == 5 + LATE
    assert lines(run.path) == [
        {k: v for k, v in record.json().items() if k != "tokens_per_second"} for record in seen[:5]
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
def test_runs_move_between_cpu_and_cuda(trained):
    ids = torch.from_numpy(trained.splits().validation.astype("i8"))[None]
    there, here = trained.load_model("cuda"), trained.load_model("cpu")
    found = there(ids.cuda())[0].cpu()
    torch.testing.assert_close(found, here(ids)[0], rtol=1e-3, atol=1e-3)
    longer = replace(trained.config, training=replace(trained.config.training, epochs=3))
    training = runs.fresh_training(longer, trained.splits(), "cuda")
    trained.resume(training)
    list(runs.train(trained, training))
    back = runs.fresh_training(longer, trained.splits(), "cpu")
    trained.resume(back)
    assert back.finished


def test_asking_who_writes_into_a_folder_changes_nothing_there(tmp_path):
    from elman.folders.lock import Lock, is_held

    assert not is_held(tmp_path)
    assert list(tmp_path.iterdir()) == []
    lock = Lock(tmp_path)
    assert is_held(tmp_path)
    lock.release()
    assert not is_held(tmp_path)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({}, (0.05, 0.05)),
        ({"validation": 0.2}, (0.2, 0.05)),
        ({"validation": 0.01}, (0.01, 0.01)),
        ({"validation": 0.0}, (0.0, 0.0)),
        ({"validation": 0.1, "test": 0.0}, (0.1, 0.0)),
        ({"validation": 0.0, "test": 0.1}, (0.0, 0.1)),
    ],
)
def test_a_run_holds_out_two_parts_unless_told_otherwise(given, parts):
    found = presets.data(presets.expand("quick", given))
    assert (found.validation, found.test) == parts
    assert presets.data(presets.expand("notes", {})).test == 0


def test_a_run_of_before_there_was_a_test_part_is_read_as_it_was(trained, tmp_path):
    path = shutil.copytree(trained.path, tmp_path / "old")
    config = json.loads((path / "config.json").read_text())
    del config["data"]["test"]
    config["data"]["validation"] = 0.1
    (path / "config.json").write_text(json.dumps(config))
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    del lines[-1]["part"]
    for line in lines:
        del line["crc32"]  # lines of then had no checksum either
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    old = Run.open(path)
    assert old.splits().part == "validation"
    assert len(old.splits().validation) == round(0.1 * len(TEXT))
    assert old.metrics()[-1]["part"] == "validation"


def test_a_test_part_alone_is_scored_with_the_last_weights(tmp_path):
    run, training = begin(tmp_path, validation=0.0, test=0.1)
    list(runs.train(run, training))
    result = runs.conclude(run, training)
    assert (result.part, result.step) == ("test", training.step)
    (tmp_path / "short").mkdir()
    with pytest.raises(UserError, match="60 characters, too few to hold out 2 %"):
        begin(tmp_path / "short", max_tokens=60, test=0.02)
