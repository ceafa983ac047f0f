"""Sizes and speeds of `elman compress` beside xz, bzip2, zstd, brotli and PPMd, on whole files.

    python benchmarks/compression.py                       both books, every level
    python benchmarks/compression.py --made                also code, Chinese, a table, noise
    python benchmarks/compression.py --level fast --level default FILE …

Every size is that of a file that was decoded again and compared, and includes all that is needed to
decode but the program. The peers run at their strongest setting (PPMd at the best order of 4 to 16,
256 MB), those that are not installed are left out. Seconds are of the processor, one thread. With
--out every number is stored as soon as it is known, and one that is there is not measured again.
"""

import argparse
import bz2
import datetime
import hashlib
import importlib
import json
import lzma
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import elman
from elman import compression
from elman.files import write_text
from elman.text.datasets import DATASETS, path_of

HERE = Path(__file__).parent
BOOKS = ("time-machine", "tiny-shakespeare")
ORDERS = (4, 5, 6, 8, 12, 16)


def main() -> None:
    arguments = parsed()
    files = [Path(file) for file in arguments.files] or [book(name) for name in BOOKS]
    levels = arguments.level or list(compression.LEVELS)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.made:
            files += made(Path(folder))
        results = [measured(file, levels, arguments.out) for file in files]
    for result in results:
        show(result)


def book(name: str) -> Path:
    download = DATASETS[name].download
    assert download is not None
    return path_of(download)


def made(folder: Path) -> list[Path]:
    """Source code, Chinese, a table, machine code and noise: the package's own files, or drawn."""
    package = Path(elman.__file__).parent
    library = next((package / "compression").glob("_compressor.*"), None)
    contents = {
        "source.py": b"".join(file.read_bytes() for file in sorted(package.rglob("*.py"))),
        "chinese.md": b"".join(
            f.read_bytes() for f in sorted((HERE.parent / "docs/zh").rglob("*.md"))
        ),
        "table.csv": table(rows=6000),
        "library.so": b"" if library is None else library.read_bytes(),
        "noise": random.Random(1).randbytes(200_000),
        "zeros": bytes(100_000),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name, content in contents.items() if content]


def table(rows: int) -> bytes:
    """Days of a random walk, as prices are written down."""
    chance, day, price = random.Random(2), datetime.date(1990, 1, 1), 100.0
    lines = ["date,open,close,volume"]
    for i in range(rows):
        before, price = price, price * (1 + chance.gauss(0, 0.01))
        volume = int(chance.lognormvariate(10, 0.5))
        lines.append(f"{day + datetime.timedelta(i)},{before:.2f},{price:.2f},{volume}")
    return "\n".join(lines).encode()


def measured(file: Path, levels: list[str], out: Path | None) -> dict[str, Any]:
    """Every peer and every level on one file, but for what is stored of it already."""
    data = file.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    result = {"file": file.name, "bytes": len(data), "sha256": digest, "peers": {}, "elman": {}}
    for before in stored(out):
        if before["sha256"] == digest:
            result = before
    for name, pack in peers().items():
        if name not in result["peers"]:
            result["peers"][name] = len(pack(data))
            store(out, result)
    for level in levels:
        if level not in result["elman"]:
            result["elman"][level] = ours(file, data, level)
            store(out, result)
    return result


def stored(out: Path | None) -> list[dict[str, Any]]:
    return json.loads(out.read_text()) if out is not None and out.exists() else []


def store(out: Path | None, result: dict[str, Any]) -> None:
    """In the place of what was known of the same file."""
    if out is not None:
        others = [other for other in stored(out) if other["sha256"] != result["sha256"]]
        write_text(out, json.dumps([*others, result], indent=1) + "\n")


def ours(file: Path, data: bytes, level: str) -> dict[str, Any]:
    """There and back, with the time of each way."""
    with tempfile.TemporaryDirectory() as folder:
        packed, back = Path(folder) / "packed", Path(folder) / "back"
        began = time.process_time()
        size = compression.compress(file, packed, level).compressed
        middle = time.process_time()
        compression.decompress(packed, back)
        end = time.process_time()
        if back.read_bytes() != data:
            raise SystemExit(f"{file} came back changed from level {level}")
    speeds = (len(data) / 1000 / seconds for seconds in (middle - began, end - middle))
    there, again = (round(speed, 2) for speed in speeds)
    return {"bytes": size, "kB_per_second": there, "decoding_kB_per_second": again}


def peers() -> dict[str, Callable[[bytes], bytes]]:
    """What is installed, each at its strongest."""
    found: dict[str, Callable[[bytes], bytes]] = {
        "xz": lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
        "bzip2": lambda data: bz2.compress(data, 9),
    }
    if zstandard := module("zstandard"):
        found["zstd"] = lambda data: zstandard.ZstdCompressor(level=22).compress(data)
    if brotli := module("brotli"):
        found["brotli"] = lambda data: brotli.compress(data, quality=11, lgwin=24)
    if pyppmd := module("pyppmd"):
        found["ppmd"] = lambda data: min(
            (pyppmd.compress(data, max_order=k, mem_size=256 << 20) for k in ORDERS), key=len
        )
    return found


def module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def show(result: dict[str, Any]) -> None:
    print(f"{result['file']}: {result['bytes']:,} bytes")
    rows = [(name, size, "") for name, size in result["peers"].items()]
    for level, row in result["elman"].items():
        rows.append((f"elman {level}", row["bytes"], f"{row['kB_per_second']:.1f} kB/s"))
    best = result["peers"].get("ppmd")
    for name, size, speed in sorted(rows, key=lambda row: -row[1]):
        beside = "" if best is None else f"{100 * (size / best - 1):+6.1f} % of ppmd"
        bits = 8 * size / result["bytes"]
        print(f"  {name:14} {size:9,}  {bits:.4f} bits per byte  {beside}  {speed}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--made", action="store_true", help="also code, Chinese, a table, noise")
    parser.add_argument("--level", action="append", choices=list(compression.LEVELS))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
