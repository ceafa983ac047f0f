"""Sizes and speeds of `elman compress` beside xz, bzip2, zstd, brotli and PPMd, on whole files.

    python benchmarks/compression.py                       both books, every level
    python benchmarks/compression.py --level fast --level default FILE …

Every size is that of a file that was decoded again and compared, and includes all that is needed to
decode but the program. The peers run at their strongest setting (PPMd at the best order of 4 to 16,
256 MB), those that are not installed are left out. Seconds are of the processor, one thread.
"""

import argparse
import bz2
import importlib
import json
import lzma
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elman import compression
from elman.files import write_text
from elman.text.datasets import DATASETS, path_of

HERE = Path(__file__).parent
BOOKS = ("time-machine", "tiny-shakespeare")
ORDERS = (4, 5, 6, 8, 12, 16)


def main() -> None:
    arguments = parsed()
    files = arguments.files or [book(name) for name in BOOKS]
    levels = arguments.level or list(compression.LEVELS)
    results = [measured(Path(file), levels) for file in files]
    for result in results:
        show(result)
    if arguments.out:
        write_text(arguments.out, json.dumps(results, indent=1) + "\n")


def book(name: str) -> Path:
    download = DATASETS[name].download
    assert download is not None
    return path_of(download)


def measured(file: Path, levels: list[str]) -> dict[str, Any]:
    """Every peer and every level on one file."""
    data = file.read_bytes()
    sizes = {name: len(pack(data)) for name, pack in peers().items()}
    return {
        "file": file.name,
        "bytes": len(data),
        "peers": sizes,
        "elman": {level: ours(file, data, level) for level in levels},
    }


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
    parser.add_argument("--level", action="append", choices=list(compression.LEVELS))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
