"""A training session from Python: begun, sampled, diagnosed, stopped, continued, reported."""

import itertools
import math
import signal
from contextlib import nullcontext

import pytest
import torch

from conftest import usual_again
from elman import load as elman_load
from elman import runs
from elman.cli import run as elman
from elman.errors import UserError
from elman.runs import Run, checkpoints
from elman.scoring.dynamic import Adaptation
from elman.scoring.evaluation import evaluate
from elman.session import RunOptions, Session
from elman.training import (
    Change,
    Diagnosis,
    Epoch,
    Result,
    Sample,
    Training,
    Update,
    Validation,
    interrupts,
    pending,
)
from elman.training.records import KINDS, from_json
from elman.training.segments import one_pass

pytestmark = pytest.mark.usefixtures("without_pictures")

TEXT = "the time traveller for so it will be convenient to speak of him " * 15
SMALL = {
    "model": "gru",
    "hidden_size": 6,
    "embedding_size": 0,
    "batch_size": 4,
    "window": 8,
    "epochs": 2,
    "validate_every": 10,
}


def begin(folder, **kept):
    folder.mkdir(exist_ok=True)
    text = folder / "text.txt"
    text.write_text(TEXT)
    options = RunOptions(out=folder / "run", device="cpu", diagnose=7, **kept)
    return Session.begin(SMALL | {"source": str(text)}, kept=options)


def test_a_run_that_is_scored_meanwhile_is_still_the_sessions_own(tmp_path):
    whole = begin(tmp_path / "whole")
    unbroken = [*whole.records()]
    session = begin(tmp_path / "looked at")
    records = session.records()
    first = [*itertools.islice(records, 12)]
    assert session.conclude() is not None
    with pytest.raises(UserError, match="is being trained already, in this very process"):
        Session.resume(tmp_path / "looked at" / "run")
    more = [*itertools.islice(records, 5)]
    del records  # which ends the loop
    rest = [*session.records()]  # and nobody else has trained it further
    nats = [r.nats for r in (*first, *more, *rest) if isinstance(r, Update)]
    assert nats == [r.nats for r in unbroken if isinstance(r, Update)]
    assert session.conclude() == whole.conclude()
    assert not (tmp_path / "looked at" / "run" / ".lock").exists()


def test_what_is_yielded_is_what_the_folder_keeps(tmp_path):
    session = begin(tmp_path)
    records = list(session.records())
    assert {type(r) for r in records} == {Update, Epoch, Validation, Sample, Diagnosis}
    assert [r.step for r in records if isinstance(r, Diagnosis)] == [*range(7, 53, 7)]
    assert session.run.records() == records
    result = session.conclude()
    assert isinstance(result, Result)
    assert session.run.records() == [*records, result]
    assert session.report().read_text().count('class="sample"') > 1


def test_the_options_of_a_run_that_holds_nothing_out_make_it_again(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    given = {**SMALL, "source": str(tmp_path / "text.txt"), "validation": 0.0, "validate_every": 0}
    first = Session.begin(given, kept=RunOptions(out=tmp_path / "one")).run.config
    assert Run.open(tmp_path / "one").config == first
    again = Session.begin(runs.options_of(first), kept=RunOptions(out=tmp_path / "two"))
    assert again.run.config == first


def everything_of(session):
    """All that a session has to say, but for how fast it was."""
    records = [r.json() | {"tokens_per_second": 0} for r in session.records()]
    page = session.report().read_text().count("<svg")
    return records, session.sample(), session.diagnose(), session.conclude(), page


def test_a_session_is_the_same_whatever_torchs_defaults(tmp_path, another_default):
    wanted = everything_of(begin(tmp_path / "one"))
    another_default()
    assert everything_of(begin(tmp_path / "other")) == wanted
    trained = elman_load(tmp_path / "other" / "run")
    parts = trained.run.splits()

    def scored():
        texts = {"train": parts.train, "validation": parts.validation}
        found = evaluate(trained.model, trained.vocab, parts.test, **texts, adapt=True, cache=9)
        return found.json(), trained.generate("the ", 20), trained.hidden("the").tolist()

    found = scored()
    usual_again()
    assert found == scored()


@pytest.fixture
def heeded():
    """Ctrl-C as Python has it: a job in the background may have been started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_notebook_that_is_interrupted_anywhere_goes_on_to_the_same_bits(
    tmp_path, monkeypatch, heeded
):
    whole, other = begin(tmp_path / "one"), begin(tmp_path / "other")
    wanted = [r.json() | {"tokens_per_second": 0} for r in whole.records()]
    moments = itertools.count(1)

    def interrupted(method):
        def called(*given):
            if next(moments) % 17 == 0:  # before: nothing is done yet, or after: all but the notes
                signal.raise_signal(signal.SIGINT)
            return method(*given)

        return called

    for owner, name in (
        (Training, "_advance"),
        (pending, "update_record"),
        (Training, "validate"),
        (Run, "save_best"),
        (Run, "save_state"),
    ):
        monkeypatch.setattr(owner, name, interrupted(getattr(owner, name)))
    times = 0
    for _ in range(100):
        try:
            list(other.records())
            break
        except KeyboardInterrupt:
            times += 1
    assert times >= 5
    assert [r.json() | {"tokens_per_second": 0} for r in other.run.records()] == wanted
    assert other.conclude() == whole.conclude()


def test_a_second_interrupt_does_not_wait(heeded):
    def work():
        yield 1
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        yield 2

    seen = []
    with pytest.raises(KeyboardInterrupt):
        seen.extend(record for record in interrupts.whole(work()))
    assert seen == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hiden_size": 7}, "unknown option 'hiden_size'; hidden_size"),
        ({"out": "here"}, r"unknown option 'out'; .*RunOptions"),
        ("text.txt", "options are a mapping of names to values, not 'text.txt'"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_and_nothing_is_written(given, said, tmp_path):
    if isinstance(given, dict):
        given = SMALL | given
    with pytest.raises(UserError, match=said):
        Session.begin(given, kept=RunOptions(out=tmp_path / "run", device="cpu"))
    assert not (tmp_path / "run").exists()


def test_where_a_run_is_kept_may_be_said_by_names(tmp_path):
    kept = {"out": str(tmp_path / "run"), "device": "cpu", "diagnose": 7}
    session = Session.begin(SMALL, kept=kept)
    assert session.run.path == tmp_path / "run"
    assert session.kept == RunOptions(**kept)


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ("runs/book", "kept must be RunOptions or a mapping of its names to values, got 'runs/bo"),
        ({"folder": "here"}, "kept has an unknown option 'folder'; one of out, force, device"),
        ({"threads": -1}, "threads=-1 must be"),
    ],
)
def test_wrong_run_options_are_refused_in_words(kept, said, tmp_path):
    session = begin(tmp_path)
    with pytest.raises(UserError, match=said):
        Session.begin(SMALL, kept=kept)
    with pytest.raises(UserError, match=said):
        Session.resume(session.run.path, kept=kept)


@pytest.mark.parametrize("ended", [False, True])
def test_without_its_record_a_training_goes_on_to_the_same_bits(ended, tmp_path):
    whole, other = begin(tmp_path / "one"), begin(tmp_path / "other")
    list(whole.records())
    list(other.records(stop=lambda: not ended and other.training.step >= 8))
    (other.run.path / "metrics.jsonl").unlink()
    again = Session.resume(other.run.path)
    assert again.caveats == [
        "metrics.jsonl is gone: the training goes on, and its record begins here"
    ]
    again.run.release()
    again = Session.resume(other.run.path)  # the one before it was killed at once
    assert again.caveats == []
    list(again.records())
    for name in ("model", "state"):
        one, two = (
            checkpoints.read(s.run.path / f"{name}.safetensors", name) for s in (whole, again)
        )
        torch.testing.assert_close(one[0], two[0], rtol=0, atol=0)
    assert again.conclude() == whole.conclude()
    assert again.report().exists()
    assert [r.step for r in again.run.records() if isinstance(r, Update)] == (
        [] if ended else [*range(again.training.step + 1)][9:]
    )


def test_a_record_that_lost_its_end_is_refused(tmp_path):
    session = begin(tmp_path)
    list(session.records(stop=lambda: session.training.step >= 8))
    path = session.run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"has 100 bytes, fewer than .* or delete it"):
        Session.resume(session.run.path)


def test_samples_follow_validations_one_two_four_and_the_last(tmp_path):
    session = begin(tmp_path)
    records = list(session.records())
    steps = [r.step for r in records if isinstance(r, Sample)]
    assert steps == [10, 20, 40, session.training.step]
    assert all(len(r.text) == 240 for r in records if isinstance(r, Sample))


def test_a_session_can_be_asked_at_any_time_and_goes_on_the_same(tmp_path):
    one, other = begin(tmp_path / "one"), begin(tmp_path / "other")
    for _ in zip(range(5), one.records(), strict=False):
        assert isinstance(one.sample(), Sample)
        assert isinstance(one.diagnose(), Diagnosis)
    rest, whole = list(one.records()), list(other.records())
    assert [r.nats for r in rest if isinstance(r, Validation)] == [
        r.nats for r in whole if isinstance(r, Validation)
    ]


def test_a_resumed_run_is_saved_and_looked_at_as_often_as_before(tmp_path):
    stopped, whole = begin(tmp_path / "one", checkpoint_every=5), begin(tmp_path / "other")
    list(stopped.records(stop=lambda: stopped.training.step >= 8))
    again = Session.resume(stopped.run.path, kept={"checkpoint_seconds": 5.0})
    assert again.kept.rhythm == {"checkpoint_every": 5, "checkpoint_seconds": 5.0, "diagnose": 7}
    list(again.records())
    list(whole.records())
    steps = [
        [r.step for r in session.run.records() if isinstance(r, Diagnosis)]
        for session in (again, whole)
    ]
    assert steps[0] == steps[1] == [*range(7, 53, 7)]
    assert Session.resume(stopped.run.path).kept.rhythm == again.kept.rhythm, "and from now on"
    assert elman(["train", "--resume", str(stopped.run.path), "--diagnose", "3"]) == 0
    said = Run.open(stopped.run.path).config.rhythm
    assert said == {"checkpoint_every": 5, "checkpoint_seconds": 5.0, "diagnose": 3}


def test_a_stopped_session_continues_where_it_was(tmp_path):
    stopped, whole = begin(tmp_path / "one"), begin(tmp_path / "other")
    list(stopped.records(stop=lambda: stopped.training.step >= 8))
    assert stopped.training.step == 8
    again = Session.resume(stopped.run.path)
    list(again.records())
    list(whole.records())
    weights = [(s.run.path / "model.safetensors").read_bytes() for s in (stopped, whole)]
    assert weights[0] == weights[1]
    longer = Session.resume(stopped.run.path, {"epochs": 3})
    assert not longer.training.finished
    assert Run.open(longer.run.path).config.training.epochs == 3
    with pytest.raises(UserError, match=r"hidden_size=7 cannot be changed"):
        Session.resume(stopped.run.path, {"hidden_size": 7})


@pytest.mark.parametrize("left", [0, 7, 20, -3, -1])
def test_leaving_the_loop_saves_as_stopping_does(left, tmp_path):
    """Also at the last record: the result is then of what was trained, not of what lay there."""
    whole = begin(tmp_path / "whole", checkpoint_seconds=0.0)
    records = list(whole.records())
    session = begin(tmp_path / "left", checkpoint_seconds=0.0)
    for number, _ in enumerate(session.records()):
        if number == range(len(records))[left]:
            break
    saved, _ = checkpoints.read(session.run.path / "state.safetensors", "state")
    now, _ = session.training.state_dict()
    assert saved.keys() == now.keys()
    assert all(torch.equal(saved[name], now[name]) for name in now)
    if left != -1:
        session = Session.resume(session.run.path)
        list(session.records())
    assert session.conclude() == whole.conclude()
    end, wanted = (
        checkpoints.read(s.run.path / "state.safetensors", "state")[0] for s in (session, whole)
    )
    assert all(torch.equal(end[name], wanted[name]) for name in wanted)


def test_every_kind_of_record_comes_back_from_its_line(tmp_path):
    session = begin(tmp_path)
    records = list(session.records(stop=lambda: session.training.step >= 8))
    session = Session.resume(session.run.path, {"clip": 0.5})
    records += [session.run.records()[-1], *session.records(), session.conclude()]
    assert {r.kind for r in records} == set(KINDS)
    for record in records:
        assert from_json(record.json()) == record
    with pytest.raises(UserError, match="is not a record of a training"):
        from_json({"kind": "poem", "step": 1})
    with pytest.raises(UserError, match="is not a record of a training"):
        from_json({"kind": "sample", "step": 1})


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("grows", [False, True])
def test_a_text_that_changes_or_goes_while_it_is_learned_costs_no_result(resumed, grows, tmp_path):
    session = begin(tmp_path)
    if resumed:
        next(iter(session.records()))
        session = Session.resume(tmp_path / "run")
    expected, text = begin(tmp_path / "other"), tmp_path / "text.txt"
    list(expected.records())
    for record in session.records():
        if record.step == 3 and text.exists() and not grows:
            text.unlink()
        elif record.step == 3 and grows:
            text.write_text(TEXT * 2)
    assert session.conclude() == expected.conclude()
    assert session.report().exists()
    with pytest.raises(UserError, match="has changed" if grows else "no longer there"):
        Run.open(tmp_path / "run").splits()


@pytest.mark.parametrize("name", ["config.json", "vocab.json"])
def test_a_file_that_is_deleted_while_it_is_trained_is_written_again(name, tmp_path):
    session = begin(tmp_path)
    before = (tmp_path / "run" / name).read_bytes()
    for record in session.records():
        if record.step == 3:
            (tmp_path / "run" / name).unlink(missing_ok=True)
    session.conclude()
    assert (tmp_path / "run" / name).read_bytes() == before
    assert Run.open(tmp_path / "run").load_model() is not None


def test_an_epoch_is_the_mean_of_its_updates_also_after_a_stop_within_it(tmp_path):
    session = begin(tmp_path)
    list(session.records(stop=lambda: session.training.step >= 8))
    list(Session.resume(session.run.path).records())
    records = session.run.records()
    epochs = [r for r in records if isinstance(r, Epoch)]
    assert [r.epoch for r in epochs] == [1, 2]
    for epoch in epochs:
        made = [r for r in records if isinstance(r, Update) and r.epoch == epoch.epoch - 1]
        assert epoch.step == made[-1].step
        assert epoch.tokens == sum(r.tokens for r in made)
        nats = sum(r.nats * r.tokens for r in made) / epoch.tokens
        assert epoch.nats == pytest.approx(nats, rel=1e-12)
        assert epoch.perplexity == pytest.approx(math.exp(nats), rel=1e-12)
        seconds = sum(r.tokens / r.tokens_per_second for r in made)
        assert epoch.tokens_per_second == pytest.approx(epoch.tokens / seconds, rel=1e-9)


def test_threads_are_kept_in_the_run_and_change_no_bit(tmp_path):
    before = torch.get_num_threads()
    try:
        one, two = begin(tmp_path / "one", threads=1), begin(tmp_path / "two", threads=2)
        assert (one.run.config.threads, two.run.config.threads) == (1, 2)
        losses = []
        for session, threads in ((one, 1), (two, 2)):
            torch.set_num_threads(threads)
            losses.append([r.nats for r in session.records() if isinstance(r, Update)])
        assert losses[0] == losses[1]
        Session.resume(tmp_path / "one" / "run")
        assert torch.get_num_threads() == 1
        Session.resume(tmp_path / "one" / "run", kept=RunOptions(threads=2))
        assert torch.get_num_threads() == Run.open(tmp_path / "one" / "run").config.threads == 2
        with pytest.raises(UserError, match="threads=-1"):
            RunOptions(threads=-1)
    finally:
        torch.set_num_threads(before)


def place(session: Session) -> float:
    """Passes made, and the part of this one whose losses have been taken."""
    training = session.training
    settings = training.settings
    reads = one_pass(training.train_ids, settings.reading, seed=settings.seed, epoch=training.epoch)
    return training.epoch + reads.share(training.index)


CHANGES = [
    {"learning_rate": 1e-3, "clip": 0.0},
    {"window": 3},
    {"window": 11},
    {"carry": "sliding"},
    {"carry": "randomized"},
    {"carry": "full"},
    {"memory": 1 << 20},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_change_on_the_way_is_a_record_and_the_run_resumes_bit_for_bit(tmp_path, change):
    def changed(name: str) -> Session:
        session = begin(tmp_path / name)
        list(session.records(stop=lambda: session.training.step >= 8))
        resumed = Session.resume(session.run.path, change)
        assert place(resumed) >= place(session)  # no loss is taken twice
        return resumed

    whole, stopped = changed("whole"), changed("stopped")
    marks = [r for r in whole.run.records() if isinstance(r, Change)]
    assert [m.step for m in marks] == [8]
    assert change.items() <= marks[0].options.items()
    list(whole.records())
    list(stopped.records(stop=lambda: stopped.training.step >= 9))
    again = Session.resume(stopped.run.path)
    assert {name: runs.options_of(again.run.config)[name] for name in change} == change
    list(again.records())
    for name in ("model.safetensors", "state.safetensors"):
        files = [(s.run.path / name) for s in (whole, stopped)]
        one, other = (checkpoints.read(f, name.split(".")[0]) for f in files)
        assert one[0].keys() == other[0].keys()
        assert all(torch.equal(one[0][n], other[0][n]) for n in one[0])
    assert len([r for r in again.run.records() if isinstance(r, Change)]) == 1


def test_a_change_that_a_crash_cut_short_is_told_by_the_next_resume(tmp_path, monkeypatch):
    session = begin(tmp_path)
    list(session.records(stop=lambda: session.training.step >= 8))

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:  # after config.json has changed, before state.safetensors has
        m.setattr(runs, "tell", crash)
        with pytest.raises(KeyboardInterrupt):
            Session.resume(session.run.path, {"window": 3})
    again = Session.resume(session.run.path)
    marks = [r for r in again.run.records() if isinstance(r, Change)]
    assert [(m.step, m.options) for m in marks] == [(8, {"window": 3})]
    straight = begin(tmp_path / "other")
    list(straight.records(stop=lambda: straight.training.step >= 8))
    straight = Session.resume(straight.run.path, {"window": 3})
    assert again.training.index == straight.training.index


def test_another_carry_brings_what_it_wants_and_takes_it_along(tmp_path):
    session = begin(tmp_path)
    list(session.records(stop=lambda: session.training.step >= 2))
    sliding = Session.resume(session.run.path, {"carry": "sliding"})
    assert sliding.training.settings.reading.history == 8
    back = Session.resume(session.run.path, {"carry": "truncated"})
    assert back.training.settings.reading.history == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"carry": "full", "average": "ema"}, {"carry": "sliding", "history": 3}],
    ids=str,
)
def test_a_run_learns_the_same_where_its_caller_has_switched_gradients_off(tmp_path, options):
    """Under no_grad parts of the gradient were missing, or an update ended in a traceback."""
    book = tmp_path / "book.txt"
    book.write_text("the time traveller for so it will be convenient to speak of him " * 20)
    given = {"source": book, "hidden_size": 8, "epochs": 1, "window": 10, "batch_size": 4}
    given |= {"max_tokens": 1000, "embedding_size": 4} | options
    weights = []
    for name, off in (("on", nullcontext), ("no", torch.no_grad), ("in", torch.inference_mode)):
        out = tmp_path / name
        with off():
            session = Session.begin(given, kept=RunOptions(out=out, threads=1))
            next(iter(session.records()))
            session = Session.resume(out)
            for _ in session.records():
                pass
            session.conclude()
            trained = elman_load(out)
        assert elman_load(out).score("the time", adapt=Adaptation()).total.nats_per_token > 0
        assert not any(p.is_inference() for p in trained.model.parameters())
        weights.append(trained.model.state_dict())
    for other in weights[1:]:
        for name, w in weights[0].items():
            assert torch.equal(w, other[name]), name
