"""What `elman train TEXT` gives when nobody sets anything, against counting.

    python benchmarks/defaults.py                                  every built-in text that is here
    python benchmarks/defaults.py book.txt other.txt --json FILE   texts of one's own
    python benchmarks/defaults.py --level word

One row for each text: the seconds of the command as a user types it, start and scoring included;
nats per token of its test part, of Kneser–Ney of the best order from 2 to 13 counted on the same
training part, of both mixed, and of frequencies alone. The counting's order is chosen on the test
part, in its favour; the mixture's weight is not. Timed, it wants a machine with nothing else to do.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from elman import corpus
from elman.errors import UserError
from elman.files import write_text
from elman.runs import presets
from elman.scoring import evaluation
from elman.text import prepared

FEW, MANY = range(2, 6), range(2, 14)
ORDERS = {"char": MANY, "byte": MANY, "word": FEW, "spaced": FEW, "bpe": FEW}


def here() -> list[str]:
    """The built-in texts that this machine has."""
    found = []
    for name in ("time-machine", "tiny-shakespeare", "python-reference"):
        try:
            corpus.load(name)
        except UserError as absent:
            print(f"{name}: {absent}", file=sys.stderr)
        else:
            found.append(name)
    return found


def trained(text: str, level: str, folder: Path) -> dict[str, Any]:
    """One default run, in a process of its own, and what counting makes of the same parts."""
    command = [sys.executable, "-m", "elman", "train", text, "--level", level, "--out", str(folder)]
    began = time.monotonic()
    subprocess.run([*command, "--json"], check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    parts = parts_of(folder)
    order, counted = best_counting(parts, ORDERS[level])
    command = [sys.executable, "-m", "elman", "evaluate", str(folder), "--json"]
    command += ["--mix", f"kneser-ney:{order}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    scored = json.loads(done.stdout)
    return {
        "text": Path(text).stem,
        "characters": len(corpus.load(text)),
        "level": level,
        "vocabulary": len(parts.vocab),
        "seconds": round(seconds, 1),
        "nats": scored["nats_per_token"],
        "kneser_ney": counted,
        "order": order,
        "mixture": scored["mixture"]["nats_per_token"],
        "seen": scored["seen_in_training"],
        "unigram": scored["baselines"]["unigram"]["nats_per_token"],
    }


def parts_of(folder: Path) -> prepared.Splits:
    """The parts of a run's text."""
    data = presets.data(json.loads((folder / "config.json").read_text())["data"])
    return prepared.prepare(data, prepared.read(data))


def best_counting(parts: prepared.Splits, orders: range) -> tuple[int, float]:
    """The order of Kneser–Ney that is best on the test part, and its nats there."""
    nats = {}
    for order in orders:
        model = evaluation.kneser_ney(parts.train, len(parts.vocab), order)
        nats[order] = evaluation.counting(model, parts.reported).nats_per_token
    order = min(nats, key=lambda k: nats[k])
    return order, nats[order]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("texts", nargs="*", help="files or built-in names")
    parser.add_argument("--level", choices=ORDERS, default="char")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows are added to this file")
    arguments = parser.parse_args()
    print(f"{'text':18} characters seconds    nats  Kneser–Ney (order)   mixed  unigram")
    for text in arguments.texts or here():
        with tempfile.TemporaryDirectory() as folder:
            row = trained(text, arguments.level, Path(folder) / "run")
        print(
            f"{row['text']:18} {row['characters']:10,} {row['seconds']:7.0f} {row['nats']:7.4f} "
            f"{row['kneser_ney']:10.4f} ({row['order']:2}) {row['mixture']:12.4f} "
            f"{row['unigram']:8.4f}",
            flush=True,
        )
        if arguments.json:
            before = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
            write_text(arguments.json, json.dumps([*before, row], indent=1) + "\n")


if __name__ == "__main__":
    main()
