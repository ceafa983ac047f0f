"""What is too large for a test: texts of gigabytes, large files, a checkpoint beyond one file.

    python benchmarks/large.py stream --level word --gigabytes 2   # the most memory it takes
    python benchmarks/large.py stream --level bpe --gigabytes 2
    python benchmarks/large.py compress --level fast --gigabytes 0.1
    python benchmarks/large.py checkpoint                          # a state of 1.35 GB, in pieces

`stream` makes a text of so many gigabytes whose words are as frequent as words are (the r-th 1/r as
frequent as the first, `--words` of them), compressed on the way to the disk, and prepares it in a
process of its own; most memory and processor time of that process are printed. With `--words`
of some millions most of them are counted on disk.

`compress` makes a file of what lies about, four parts of Python, three of compiled libraries, two
of text and one of random bytes, in turns of a tenth of 100 MB; compresses and decompresses it with
`elman`, each in a process of its own, compares, and prints sizes, seconds and the memory that both
have had at each tenth of their time, beside the sizes of xz and zstd.

`checkpoint` trains a model of 100 million weights for four updates in one go, and again with a stop
after the second and another process for the rest; both must end in the same bits. It takes about
5 GB of memory and 6 GB of disk.
"""

import argparse
import filecmp
import gzip
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
STATE_WORDS = 260_000


def main() -> None:
    """Do one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("stream", "compress", "checkpoint"))
    parser.add_argument("--level", help="of the text (word), or of the compression (fast)")
    parser.add_argument("--vocab-size", type=int, default=0)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--words", type=int, default=300_000)
    parser.add_argument("--folder", default=None, help="where there is room; else where files go")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.level = given.level or {"compress": "fast"}.get(given.what, "word")
    if given.worker:
        {"stream": _prepare, "checkpoint": _train}[given.what](given)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        work = {"stream": _stream, "compress": _compress, "checkpoint": _checkpoint}
        work[given.what](given, Path(folder))


def _again(given: argparse.Namespace, worker: str) -> dict:
    """This program in a process of its own; what it prints last, as JSON."""
    words = [given.what, "--level", given.level, "--vocab-size", str(given.vocab_size)]
    command = [sys.executable, __file__, *words, "--worker", worker]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _peak(process: int | str = "self") -> float:
    """Megabytes of memory that a process has had at most."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    assert found
    return int(found[1]) / 1024


# ---------------------------------------------------------------------- a text of gigabytes


def _spelled(rank: int) -> str:
    """A word of its own for each rank, the frequent ones short."""
    word, rest = "", rank + len(LETTERS)
    while rest:
        word, rest = word + LETTERS[rest % len(LETTERS)], rest // len(LETTERS)
    return word


def _stream(given: argparse.Namespace, folder: Path) -> None:
    words = np.array([_spelled(rank) for rank in range(given.words + 1)], dtype=object)
    rng, source, written = np.random.default_rng(0), folder / "text.txt.gz", 0
    with gzip.open(source, "wb", compresslevel=1) as file:
        while written < given.gigabytes * 1e9:
            ranks = np.exp(rng.random(200_000) * np.log(given.words)).astype(np.int64)
            lines = "\n".join(" ".join(line) for line in words[ranks].reshape(-1, 16))
            written += file.write(f"{lines}.\n".encode())
    result = _again(given, str(source))
    print(json.dumps({"level": given.level, "bytes": written, **result}))


def _prepare(given: argparse.Namespace) -> None:
    from elman.text.preparation import Request, prepare
    from elman.text.prepared import Data
    from elman.text.shards import Index

    source, began, before = Path(given.worker), time.process_time(), _peak()
    data = Data("-", given.level, vocab_size=given.vocab_size)
    out = source.with_name("prepared")
    for _ in prepare(Request((str(source),), data), out):
        pass
    index = Index.load(out)
    shutil.rmtree(out)
    told = {"tokens": index.tokens, "megabytes_before": before, "megabytes_at_most": _peak()}
    print(json.dumps(told | {"processor_seconds": time.process_time() - began}))


# ---------------------------------------------------------------------- a large file

MIXTURE = (
    (4, ("*.py",)),
    (3, ("*.so*",)),
    (2, ("*.txt", "*.md", "*.rst", "*.html", "*.json", "*.csv", "*.h")),
)
MILLION = 1_000_000


def _compress(given: argparse.Namespace, folder: Path) -> None:
    original, packed, again = folder / "mixed", folder / "mixed.elm", folder / "again"
    _write_mixture(original, int(given.gigabytes * 1e9))
    told = {
        "bytes": original.stat().st_size,
        "compress": _watched("compress", original, "-o", packed, "--level", given.level),
        "decompress": _watched("decompress", packed, "-o", again),
        "elman": packed.stat().st_size,
    }
    assert filecmp.cmp(original, again, shallow=False), "the same bytes"
    for command in (["xz", "-9", "-k", "-c"], ["zstd", "-19", "-q", "-k", "-c"]):
        began, size = time.monotonic(), 0
        with subprocess.Popen([*command, original], stdout=subprocess.PIPE) as peer:
            assert peer.stdout
            while block := peer.stdout.read(MILLION):
                size += len(block)
        assert peer.returncode == 0, command
        told[" ".join(command[:2])] = {"bytes": size, "seconds": time.monotonic() - began}
    print(json.dumps(told))


def _write_mixture(path: Path, size: int) -> None:
    """Files of this Python installation and noise, so that every tenth has some of each kind."""
    places = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    streams = [(_contents(places, patterns), parts * MILLION) for parts, patterns in MIXTURE]
    rng = np.random.default_rng(0)
    with open(path, "wb") as file:
        while file.tell() < size:
            for blocks, many in streams:
                file.write(_taken(blocks, many)[: size - file.tell()])
            file.write(rng.bytes(min(MILLION, size - file.tell())))


def _contents(places: list[Path], patterns: tuple[str, ...]) -> Iterator[bytes]:
    for place in places:
        for file in sorted(file for pattern in patterns for file in place.rglob(pattern)):
            if file.is_file() and not file.is_symlink():
                with open(file, "rb") as data:
                    while block := data.read(1 << 16):
                        yield block


def _taken(blocks: Iterator[bytes], size: int) -> bytes:
    taken = bytearray()
    for block in blocks:
        taken += block
        if len(taken) >= size:
            break
    return bytes(taken[:size])


def _watched(*arguments: object) -> dict:
    """Run elman in a process of its own; its seconds and megabytes, ten times on the way."""
    command = [sys.executable, "-m", "elman", *map(str, arguments), "--json"]
    began, peaks = time.monotonic(), []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            with suppress(OSError, AssertionError):  # it may have just ended
                peaks.append(_peak(process.pid))
            time.sleep(0.5)
    assert process.returncode == 0, command
    tenths = [peaks[len(peaks) * tenth // 10] for tenth in range(10)]
    return {"seconds": time.monotonic() - began, "megabytes": [*tenths, peaks[-1]]}


# ---------------------------------------------------------------------- a checkpoint in pieces


def _checkpoint(given: argparse.Namespace, folder: Path) -> None:
    words = [_spelled(rank) for rank in range(STATE_WORDS)]
    (folder / "text.txt").write_text("\n".join([" ".join(words)] * 2))
    straight = _again(given, f"{folder}/straight 0 4")
    first = _again(given, f"{folder}/stopped 0 2")
    second = _again(given, f"{folder}/stopped 2 4")
    assert straight["weights"] == second["weights"], "the same bits, stopped or not"
    assert first["pieces"] > 1, first
    print(json.dumps({"straight": straight, "stopped": first, "resumed": second}))


def _train(given: argparse.Namespace) -> None:
    import hashlib

    from elman.session import RunOptions, Session

    path, start, end = given.worker.split()
    kept = RunOptions(out=Path(path), threads=1, checkpoint_seconds=0, diagnose=0)
    shape = {"model": "gru", "hidden_size": 320, "embedding_size": 320, "level": "word"}
    reading = {"batch_size": 2, "window": 4, "validation": 0.0, "sample_every": 0}
    source = {"source": str(Path(path).with_name("text.txt"))}
    if start == "0":
        session = Session.begin(shape | reading | source, kept=kept)
    else:
        session = Session.resume(path)
    assert session.training.step == int(start)
    for _ in islice(session.records(stop=lambda: session.training.step >= int(end)), 100):
        pass
    digest = hashlib.sha256()
    for _, weight in sorted(session.training.model.named_parameters()):
        digest.update(weight.detach().numpy().tobytes())
    pieces = sorted(Path(path).glob("state-*.safetensors"))
    sizes = [file.stat().st_size for file in [*pieces, Path(path) / "state.safetensors"]]
    told = {"pieces": len(pieces), "bytes": sum(sizes), "largest": max(sizes)}
    print(json.dumps(told | {"megabytes_at_most": _peak(), "weights": digest.hexdigest()[:16]}))


if __name__ == "__main__":
    main()
