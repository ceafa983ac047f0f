"""A disk that is full, or fails, at any moment: an error in words, no half file, and a way on.

Two disks are imitated. `failing` lets every step of a write go wrong in turn (half of the bytes
written, the flush, the rename); a limit on the size of files does what a full disk does to a file
that grows, metrics.jsonl.
"""

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elman import NgramModel, Vocab, files
from elman.cli import run as elman
from elman.files import seal_holds, write_text
from elman.forecasting import saving
from elman.runs import Run, checkpoints
from elman.session import RunOptions, Session

pytestmark = pytest.mark.usefixtures("without_pictures")

STEPS = ("write", "fsync", "replace")
OPTIONS = (
    "--preset quick --hidden-size 6 --embedding-size 3 --batch-size 2 --window 6 --epochs 1 "
    "--max-tokens 400 --device cpu --checkpoint-every 10 --diagnose 0 --threads 1"
)
SMALL = OPTIONS.split()


class Disk:
    """Counts what is asked of it, and fails at number `at`."""

    def __init__(self, at: int, code: int) -> None:
        self.at, self.code, self.asked, self.renamed = at, code, 0, False

    def ask(self) -> bool:
        self.asked += 1
        return self.asked == self.at

    def error(self) -> OSError:
        return OSError(self.code, os.strerror(self.code))


@contextmanager
def failing(at: int, code: int = errno.ENOSPC) -> Iterator[Disk]:
    """The at-th step of all writing fails; a write that does has written half."""
    disk = Disk(at, code)
    write, flush, rename = Path.write_bytes, os.fsync, os.replace

    def write_bytes(path, data):
        if disk.ask():
            write(path, data[: len(data) // 2])
            raise disk.error()
        return write(path, data)

    def fsync(file):
        if disk.ask():
            raise disk.error()
        flush(file)

    def replace(old, new):
        if disk.ask():
            raise disk.error()
        rename(old, new)
        disk.renamed = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_bytes)
        patch.setattr(
            Path, "write_text", lambda path, text, **how: write_bytes(path, text.encode())
        )
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "replace", replace)
        yield disk


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes, as on a disk with that much room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text("the cat sat on the mat, and the dog sat by the sea.\n" * 30)
    return path


def train(book, out) -> int:
    return elman(["train", str(book), "--out", str(out), *SMALL])


@pytest.fixture(scope="module")
def unbroken(book, tmp_path_factory) -> tuple[bytes, int]:
    """The weights of a training that nothing happens to, and how many steps its writing takes."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    with failing(at=0) as disk:
        assert train(book, out) == 0
    return (out / "model.safetensors").read_bytes(), disk.asked


def check_whole(folder: Path) -> None:
    """Every file in a run folder is whole, and nothing else is left; or there is no folder."""
    assert not folder.exists() or (folder / "config.json").exists()
    assert not list(folder.glob(".*"))
    for name in ("model", "state"):
        if (folder / f"{name}.safetensors").exists():
            checkpoints.read(folder / f"{name}.safetensors", name)
    for name in ("config.json", "vocab.json"):
        if (folder / name).exists():
            assert seal_holds((folder / name).read_bytes())


def go_on(book, out) -> None:
    """As a user would: resume what is a run, begin again what never became one."""
    if (out / "config.json").exists():
        Run.open(out).records()
        assert elman(["train", "--resume", str(out)]) == 0
    else:
        assert train(book, out) == 0


EVERY = pytest.param(errno.ENOSPC, 1, marks=pytest.mark.slow, id="full at every step")
SOME = pytest.param(errno.ENOSPC, 9, id="full")
BROKEN = pytest.param(errno.EIO, 17, id="broken")


@pytest.mark.parametrize(("code", "stride"), [SOME, BROKEN, EVERY])
def test_a_training_survives_a_disk_that_fails(code, stride, book, unbroken, tmp_path, capsys):
    weights, steps = unbroken
    assert steps > 30
    for at in range(1, steps + 1, stride):
        out = tmp_path / f"run-{at}"
        with failing(at, code) as disk:
            status = train(book, out)
        said = capsys.readouterr().err
        assert disk.asked >= at
        assert (status, "Traceback" in said) == (1, False), f"step {at}: {said}"
        assert f"{os.strerror(code)}" in said.split("error: ")[1]
        assert str(out) in said.split("error: ")[1], f"step {at} names no file: {said}"
        check_whole(out)
        go_on(book, out)
        assert (out / "model.safetensors").read_bytes() == weights, f"step {at}"
        shutil.rmtree(out)


def test_a_folder_that_could_not_be_made_can_be_made_in_the_same_process(book, tmp_path):
    """As in a notebook: the failed attempt must not go on owning the folder."""
    options = {"source": str(book), "hidden_size": 6, "epochs": 1}
    kept = RunOptions(out=tmp_path / "run", device="cpu")
    with failing(at=3), pytest.raises(OSError, match="No space left"):
        Session.begin(options, kept=kept)
    assert not (tmp_path / "run").exists()
    Session.begin(options, kept=kept).run.release()


@pytest.mark.parametrize("size", [0, 50, 1000, 2000, 3000, 5000, 6000])
def test_a_training_survives_a_file_that_cannot_grow(size, book, unbroken, tmp_path, capsys):
    with small_files(size):
        assert train(book, tmp_path / "run") == 1
    said = capsys.readouterr().err
    assert "error: " in said
    assert "Traceback" not in said
    assert "hint: make room" in said
    check_whole(tmp_path / "run")
    go_on(book, tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == unbroken[0]


def saves(tmp_path, tiny_run) -> dict:
    """Everything else that writes a file: its name, a function that writes, one that reads."""
    text = "the cat sat on the mat, and the dog sat by the cat.\n" * 8
    arpa, figure = str(tmp_path / "a.arpa"), str(tmp_path / "f.png")
    book = tmp_path / "text.txt"
    book.write_text(text)
    report = tmp_path / "run" / "report.html"
    shutil.copytree(tiny_run(), tmp_path / "run")
    return {
        tmp_path / "ngrams": lambda: NgramModel.fit(text, 3).save(tmp_path / "ngrams"),
        tmp_path / "vocab": lambda: Vocab(list(text)).save(tmp_path / "vocab"),
        tmp_path / "text": lambda: write_text(tmp_path / "text", text),
        Path(arpa): lambda: elman(["ngram", str(book), "--order", "2", "--arpa", arpa]),
        Path(figure): lambda: elman(["statistics", str(book), "--figure", figure]),
        report: lambda: elman(["report", str(tmp_path / "run")]),
    }


def test_every_other_file_is_whole_or_as_it_was(tmp_path, tiny_run, capsys):
    for path, write in saves(tmp_path, tiny_run).items():
        for at, step in enumerate(STEPS, start=1):
            path.write_bytes(b"as it was")
            with failing(at) as disk:
                try:
                    status = write()
                except OSError as problem:
                    status = f"error: {problem}"
            said = capsys.readouterr().err if status == 1 else str(status)
            assert "error: " in said, f"{path}, {step}: {said}"
            assert "No space left on device" in said
            assert str(path) in said
            assert (path.read_bytes() == b"as it was") != disk.renamed
            assert not list(path.parent.glob(".*.partial"))


def test_a_forecaster_that_was_half_replaced_is_refused_not_mixed(tmp_path, capsys):
    """Two files cannot be renamed at once: new weights beside the old config.json are noticed."""
    out = tmp_path / "forecaster"
    words = ["forecast", "sunspots", "--steps", "3", "--out", str(out), "--force", "--model"]
    with failing(at=5):
        assert elman([*words, "drift"]) == 1
    with pytest.raises(files.UserError):
        saving.load_ensemble(out)  # half a forecaster is none
    assert elman(["forecast", "--resume", str(out)]) == 0, "what was asked for is kept"
    for at in range(1, 9):  # files, each written, flushed, renamed, its folder flushed
        with failing(at):
            assert elman([*words, "mean"]) == 1
        try:
            saving.load_ensemble(out)
        except files.UserError as refusal:
            assert "does not belong" in refusal.message  # noqa: PT017, one or the other
    assert elman([*words, "mean"]) == 0
    assert saving.load_ensemble(out)


# ---------------------------------------------------------------------- prepare, compress, forecast


def whole(path: Path) -> dict[str, bytes] | bytes | None:
    """What lies at a path; drafts and locks, too."""
    if path.is_dir():
        return {p.name: p.read_bytes() for p in sorted(path.iterdir()) if p.is_file()}
    return path.read_bytes() if path.exists() else None


def verbs(book: Path, place: Path) -> dict[str, tuple[list[str], Path, list[str]]]:
    """The words to type, where that writes, and the words to type after it has failed."""
    prepare = ["prepare", str(book), "--shard-tokens", "400", "--out", str(place / "p")]
    compress = ["compress", str(book), "--level", "fast", "-o", str(place / "b.elm")]
    back = ["decompress", str(place / "given.elm"), "-o", str(place / "b.txt")]
    forecast = ["forecast", "sunspots", "--model", "drift", "--steps", "3", "--windows", "2"]
    out = place / "f"
    return {
        "prepare": (prepare, place / "p", prepare),
        "compress": (compress, place / "b.elm", compress),
        "decompress": (back, place / "b.txt", back),
        "forecast": ([*forecast, "--out", str(out)], out, ["forecast", "--resume", str(out)]),
    }


EVERY_STEP = [("prepare", 1), ("compress", 1), ("decompress", 1), ("forecast", 9)]


@pytest.mark.parametrize(
    ("verb", "stride"), [*EVERY_STEP, pytest.param("forecast", 1, marks=pytest.mark.slow)]
)
def test_a_verb_survives_a_disk_that_fails(verb, stride, book, tmp_path, capsys):
    packed = ["compress", str(book), "--level", "fast", "-o", str(tmp_path / "given.elm")]
    assert elman(packed) == 0
    words, target, again = verbs(book, tmp_path)[verb]
    with failing(at=0) as disk:
        assert elman(words) == 0
    expected = whole(target)
    for at in range(1, disk.asked + 1, stride):
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        capsys.readouterr()
        with failing(at):
            status = elman(words)
        said = capsys.readouterr().err
        assert (status, "Traceback" in said) == (1, False), f"step {at}: {said}"
        assert "No space left on device" in said.split("error: ")[1]
        assert str(tmp_path) in said.split("error: ")[1], f"step {at} names no file: {said}"
        assert not list(tmp_path.rglob(".*"))
        done = target / {"prepare": "index.json", "forecast": "report.html"}.get(verb, "")
        if target.is_file():  # it was the folder's flush that failed, after the rename
            assert whole(target) == expected
        go = [*words, "--force"] if done.exists() else again if target.exists() else words
        if (target / "request.json").exists():
            go = again
        assert elman(go) == 0, (at, capsys.readouterr().err)
        found = whole(target)
        if verb == "forecast":
            assert isinstance(found, dict)
            assert isinstance(expected, dict)
            assert found["model.safetensors"] == expected["model.safetensors"]
        else:
            assert found == expected


@pytest.mark.parametrize("verb", ["prepare", "compress", "decompress", "forecast"])
@pytest.mark.parametrize("size", [0, 100, 300])
def test_a_verb_survives_a_file_that_cannot_grow(verb, size, book, tmp_path, capsys):
    packed = ["compress", str(book), "--level", "fast", "-o", str(tmp_path / "given.elm")]
    assert elman(packed) == 0
    words, target, again = verbs(book, tmp_path)[verb]
    if verb == "compress" and size:
        pytest.skip("it is small")
    with small_files(size):
        status = elman(words)
    said = capsys.readouterr().err
    assert (status, "Traceback" in said) == (1, False), said
    assert "File too large" in said.split("error: ")[1]
    assert str(target) in said.split("error: ")[1]
    assert "make room" in said
    begun = (target / "request.json").exists() or verb != "forecast"
    assert elman(again if begun else words) == 0, capsys.readouterr().err


def test_a_shard_that_fits_in_part_says_why_it_is_not_whole(tmp_path, capsys):
    (tmp_path / "long.txt").write_text("the quick brown fox\n" * 5_000)
    words = ["prepare", str(tmp_path / "long.txt"), "--out", str(tmp_path / "p")]
    with small_files(60_000):
        assert elman(words) == 1
    said = capsys.readouterr().err
    assert f"error: {tmp_path / 'p' / '00000.ids'}: File too large" in said
    assert "hint: make room and type it again" in said
    assert elman(words) == 0


def test_a_prepared_text_outlives_a_full_disk_under_force(book, tmp_path, capsys):
    out = tmp_path / "p"
    assert elman(["prepare", str(book), "--level", "word", "--out", str(out)]) == 0
    before = whole(out)
    words = ["prepare", str(book), "--shard-tokens", "400", "--out", str(out), "--force"]
    with failing(at=0) as disk:
        shutil.copytree(out, tmp_path / "q")
        assert elman([*words[:-2], str(tmp_path / "q"), "--force"]) == 0
    for at in range(1, disk.asked + 1):
        with failing(at):
            assert elman(words) == 1
        assert whole(out) == before, at
        assert not (out / ".replaced").exists()
