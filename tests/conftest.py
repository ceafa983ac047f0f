"""What every test shares: a quiet hypothesis, and The Time Machine where it can be found."""

import io
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import register_random, settings

# Before torch is loaded: tests run beside one another, and a thread that waits should give way at
# once. Where each process has as many threads as there are cores, most of what one waits for has
# no core, and waiting awake takes longer than all that the tests compute.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

settings.register_profile("elman", deadline=None, print_blob=True)
# CI decides about a change, not about luck: there the same examples are tried every time.
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "elman")
# ELMAN_EXAMPLES=1000 with --hypothesis-seed=N: is a law true, or has it been lucky?
if EXAMPLES := os.environ.get("ELMAN_EXAMPLES"):
    settings.register_profile("many", deadline=None, print_blob=True, max_examples=int(EXAMPLES))
    settings.load_profile("many")


class Chance:
    """Torch's generator as hypothesis knows Python's: an example draws the same numbers again."""

    def __init__(self) -> None:
        import torch

        self.seed = torch.manual_seed
        self.getstate, self.setstate = torch.get_rng_state, torch.set_rng_state


CHANCE = Chance()  # hypothesis remembers only what someone else holds
register_random(CHANCE)


@pytest.fixture(scope="session")
def time_machine_file() -> Path:
    """The notes' text, looked up in the folders of ELMAN_DATA."""
    for folder in filter(None, os.environ.get("ELMAN_DATA", "").split(os.pathsep)):
        path = Path(folder) / "timemachine.txt"
        if path.exists():
            return path
    pytest.skip("timemachine.txt is in no folder of ELMAN_DATA")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For long tests of small work: on a busy machine threads wait for one another for ages."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["device", "dtype"])
def another_default(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Change torch's defaults: what forgets to say where it lies, or what it is, is found out.

    A device that holds nothing stands for the GPU of `torch.set_default_device("cuda")` where there
    is none.
    """
    import torch

    def ask() -> None:
        if request.param == "device":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(torch.float64)

    yield ask
    usual_again()


def usual_again() -> None:
    """Torch's defaults as they were."""
    import torch

    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def small_text() -> str:
    """Some lines a model can learn something from, with accents and with markup in them."""
    choose = random.Random(0).choice
    subjects = ("the naïve cat", "a dog", "<script>alert(1)</script>", "the time & the traveller")
    verbs, places = ("sat", "slept", "ran", "read"), ("on the mat", "in a café", "by the sea")
    return "".join(f"{choose(subjects)} {choose(verbs)} {choose(places)}.\n" for _ in range(120))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Give the folder of a run trained for a second, made once for each set of options."""
    from elman.cli import run

    made: dict[tuple[str, ...], Path] = {}

    def trained(*options: str, level: str = "char") -> Path:
        options = options if level == "char" else ("--level", level, *options)
        if options not in made:
            folder = tmp_path_factory.mktemp("tiny")
            (folder / "book.txt").write_text(small_text(), encoding="utf-8")
            size = "--hidden-size 24 --embedding-size 8 --batch-size 4 --window 20 --epochs 2"
            words = ["train", str(folder / "book.txt"), "--out", str(folder / "run")]
            words += ["--preset", "quick"]
            words += [*size.split(), "--learning-rate", "0.02"]
            words += [] if "--validation" in options else ["--validate-every", "25"]
            quiet = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())
            with quiet[0], quiet[1], pytest.MonkeyPatch.context() as patch:
                patch.setattr("sys.argv", ["elman", *words, *options])  # the run remembers them
                assert run() == 0
            made[options] = folder / "run"
        return made[options]

    return trained


@pytest.fixture
def hastily(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile cells without optimisation, in two seconds each, not six.

    For tests of what is asked of a cell, or of how its equations are written down; what the
    compiler makes of them with every optimisation is held by all shipped cells in both types.
    """
    from elman.kernels import described

    flags = ["-O0" if flag.startswith("-O") else flag for flag in described.FLAGS]
    monkeypatch.setattr(described, "FLAGS", flags)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports whose pictures are empty, for tests of runs: drawing takes longer than the training.

    The figures are made, but not written as SVG; `test_report.py` and the figures' own tests do.
    """
    from elman.reports import page

    monkeypatch.setattr(page, "inline_svg", lambda drawing, name: "<svg ></svg>")


class Killed(BaseException):
    """As if the process had ended here; nothing of ours may catch it."""


@pytest.fixture
def killed_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], bool]:
    """Do some work, but only so many renames and deletions of it; whether it was ended by that."""

    def work_on(moves: int, work: Callable[[], object]) -> bool:
        left = moves
        real = {name: getattr(os, name) for name in ("rename", "replace", "unlink", "rmdir")}

        def counted(name: str) -> Callable[..., None]:
            def move(*which: Any, **how: Any) -> None:
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1
                real[name](*which, **how)

            return move

        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, counted(name))
            try:
                work()
            except Killed:
                return True
        return False

    return work_on


@pytest.fixture
def open_files() -> Callable[[], int]:
    """How many files and folders this process has open: of sockets others may have some, too."""

    def is_file(number: str) -> bool:
        try:
            mode = os.fstat(int(number)).st_mode
        except OSError:  # that with which the folder was read
            return False
        return stat.S_ISREG(mode) or stat.S_ISDIR(mode)

    return lambda: sum(map(is_file, os.listdir("/dev/fd")))
