"""Tables of the results page, made from the files that the benchmarks wrote.

A page asks for a table with a line `<!-- results: NAME -->`. `TABLES` has one function for each
file of `benchmarks/results` whose rows mean something to a reader as they stand or averaged; a file
without one is shown row by row under `<!-- results: others -->`.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from publishing.pages import ROOT

FOLDER = ROOT / "benchmarks" / "results"
_PLACE = re.compile(r"^<!-- results: ([\w-]+) -->$", re.MULTILINE)
_MOST_COLUMNS = 8


def fill(markdown: str) -> str:
    """The page with every table it asks for."""
    return _PLACE.sub(lambda found: made(found[1]), markdown)


def made(name: str) -> str:
    """One table, as Markdown."""
    if name == "others":
        return "\n\n".join(f"### `{name}`\n\n{rows_of(read(name))}" for name in others())
    return TABLES[name](read(name))


def others() -> list[str]:
    """Files of results without a table of their own."""
    return sorted(path.stem for path in FOLDER.glob("*.json") if path.stem not in TABLES)


def read(name: str) -> Any:
    """One file of results."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown; numbers to four digits.

    >>> print(table(["a", "b"], [["x", 1.23456]]))
    | a | b |
    |---|---|
    | x | 1.235 |
    """
    lines = ["| " + " | ".join(map(cell, line)) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def cell(value: Any) -> str:
    """One cell: a number to four digits, thousands apart; words as they are, pipes escaped."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def groups(rows: Iterable[Mapping[str, Any]], *names: str) -> dict[tuple[Any, ...], list[Any]]:
    """Rows that agree in some columns, together, in first-seen order."""
    found: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for row in rows:
        found[tuple(row[name] for name in names)].append(row)
    return found


def mean(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """Mean ± standard deviation over rows."""
    values = [row[name] for row in rows]
    return f"{fmean(values):.4g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")


def notes(rows: list[dict[str, Any]]) -> str:
    """The notes' own runs: training and held-out perplexity over seeds."""
    head = ["run", "by", "seeds", "training perplexity", "held-out perplexity", "devices"]
    return table(
        head,
        (
            [
                run, by, len(same), mean(same, "training_perplexity"),
                mean(same, "held_out_perplexity"), ", ".join(sorted({r["device"] for r in same})),
            ]
            for (run, by), same in groups(rows, "run", "by").items()
        ),
    )  # fmt: skip


SHAPE = {
    "model": "model",
    "layers": "layers",
    "hidden": "hidden_size",
    "embedding": "embedding_size",
}
SCORES = {
    "nats per token": "nats",
    "mixed with Kneser–Ney": "mixed_nats",
    "adapting": "adapted_nats",
    "adapting, with counts": "adapted_counts_nats",
}


def texts(rows: list[dict[str, Any]]) -> str:
    """Held-out scores of trained models, the seeds of one setting together."""
    held_out = [
        {**row, **{name: row["options"].get(option, 1) for name, option in SHAPE.items()}}
        for row in rows
        if row["part"] == "held-out"
    ]

    def score(same: list[dict[str, Any]], name: str) -> str:
        known = [row for row in same if name in row]
        return mean(known, name) if known else "–"

    return table(
        [*SHAPE, "device", "seeds", *SCORES],
        (
            [*name, len(same), *(score(same, column) for column in SCORES.values())]
            for name, rows in groups(held_out, *SHAPE, "device").items()
            for same in [list({row["seed"]: row for row in rows}.values())]  # the newest of each
        ),
    )


def carries(found: dict[str, Any]) -> str:
    """What each carry does to a gradient."""
    return table(
        ["carry", "bias", "noise", "cosine", "time over Full()"],
        (
            [f"`{r['carry']}`", f"{r['bias']:.2f} ± {r['bias_error']:.2f}", f"{r['noise']:.2f}",
             f"{r['cosine']:.2f}", f"{r['cost']:.1f}"]
            for r in found["rows"]
        ),
    )  # fmt: skip


def cpu(rows: list[dict[str, Any]]) -> str:
    """Tokens per second of every contender, one job per row."""
    names = list(dict.fromkeys(name for row in rows for name in row["median"]))
    return table(
        ["job", *names],
        ([row["job"], *(row["median"].get(name, "–") for name in names)] for row in rows),
    )


def cuda(found: dict[str, Any]) -> str:
    """The best time per step, forward and backward, of each contender."""
    shapes = found["shapes"]
    best = {shape: _best_times(of["results"]) for shape, of in shapes.items()}
    names = list(dict.fromkeys(name for times in best.values() for name in times))
    return table(
        ["cell, batch, steps, hidden", *names],
        ([shape, *(times.get(n, "–") for n in names)] for shape, times in best.items()),
    )


def _best_times(results: list[dict[str, Any]]) -> dict[str, float]:
    times: dict[str, float] = {}
    for row in results:
        if row["what"] == "forward+backward" and row.get("us_per_step") is not None:
            name = row["contender"]
            times[name] = min(times.get(name, float("inf")), row["us_per_step"])
    return times


def grid(found: dict[str, Any]) -> str:
    """The ratio to torch.nn over all shapes, and the slowest of them."""
    summary = table(["over all shapes", "value"], found["summary"].items())
    columns = ["cell", "B", "T", "H", "layers", "dtype", "job", "kernel", "ratio"]
    worst = sorted(found["rows"], key=lambda row: row["ratio"])[:12]
    return f"{summary}\n\n{table(columns, ([row[c] for c in columns] for row in worst))}"


def forecasting(found: dict[str, Any]) -> str:
    """MASE and CRPS of every forecaster on every set that it finished."""
    names = list(dict.fromkeys(name for rows in found["results"].values() for name in rows))
    return table(
        ["series", *names],
        (
            [
                series,
                *(f"{r['mase']:.3f}, {r['crps']:.3f}" if "mase" in r else "–" for r in rows),
            ]
            for series, of in found["results"].items()
            for rows in [[of.get(name, {}) for name in names]]
        ),
    )


def origins(found: dict[str, Any]) -> str:
    """MASE from every origin, by the part of the series that was fitted on."""
    rows = [(series, row) for series, of in found["results"].items() for row in of]
    models = list(dict.fromkeys(row["model"] for _, row in rows))
    mase = {(series, row["train"], row["model"]): row["mase"] for series, row in rows}
    return table(
        ["series", "fitted on", *models],
        (
            [series, f"{part:.0%}", *(f"{mase[series, part, m]:.3f}" for m in models)]
            for series, part in dict.fromkeys((series, row["train"]) for series, row in rows)
        ),
    )


def compression(rows: list[dict[str, Any]]) -> str:
    """Bytes of every compressor on every text, and elman's default against PPMd's."""
    peers, levels = list(rows[0]["peers"]), list(rows[0]["elman"])
    return table(
        ["file", "bytes", *peers, *(f"elman, {level}" for level in levels), "default over ppmd"],
        (
            [
                row["file"], row["bytes"], *(row["peers"].get(peer, "–") for peer in peers),
                *(row["elman"].get(level, {}).get("bytes", "–") for level in levels),
                f"{row['elman']['default']['bytes'] / row['peers']['ppmd'] - 1:+.1%}",
            ]
            for row in rows
        ),
    )  # fmt: skip


def defaults(rows: list[dict[str, Any]]) -> str:
    """What `elman train` reaches when nothing is chosen, beside counting."""
    head = ["text", "characters", "level", "seconds", "elman", "Kneser–Ney", "its order", "unigram"]
    columns = ["text", "characters", "level", "seconds", "nats", "kneser_ney", "order", "unigram"]
    return table([*head, "machine"], ([row[c] for c in [*columns, "machine"]] for row in rows))


def kinds(rows: list[dict[str, Any]]) -> str:
    """`elman train` on many kinds of text, those first where it falls most behind counting."""
    names = ["text", "characters", "level", "vocabulary", "seconds", "nats", "kneser_ney", "order"]
    head = ["text", "characters", "level", "vocabulary", "seconds", "elman", "Kneser–Ney",
            "its order", "both mixed", "elman over counting"]  # fmt: skip
    behind = sorted(rows, key=lambda row: row["kneser_ney"] - row["nats"])
    return table(
        head,
        (
            [*(row[n] for n in names), row["mixture"], f"{row['nats'] - row['kneser_ney']:+.3f}"]
            for row in behind
        ),
    )


def chunked(found: dict[str, Any]) -> str:
    """Chunks against step after step, where the certificate held: seconds and errors."""
    return table(
        ["cell", "hidden", "steps", "dtype", "chunks", "at the seams", "bound", "gradient",
         "in sequence", "chunked", "torch.nn"],
        (
            [
                *(row[name] for name in ("cell", "hidden", "steps", "dtype")),
                row["chunks"][0], max(row["difference"]), max(row["bound"]),
                *(row.get(name, "–") for name in ("error", "stepped_s", "chunked_s", "torch_s")),
            ]
            for row in found["rows"] if "chunks" in row
        ),
    )  # fmt: skip


def described_cells(found: dict[str, Any]) -> str:
    """Milliseconds of cells of one's own, forward and backward, in the newest of the runs."""
    [runs] = found.values()
    times = runs[-1]["forward+backward"]
    return table(
        ["cell", "called", "replayed as a CUDA graph"],
        ([cell, of.get("eager", "–"), of.get("graph", "–")] for cell, of in times.items()),
    )


def rows_of(found: Any) -> str:
    """Any list of flat records, as it stands; of anything else, its outermost values."""
    if isinstance(found, dict):
        inner = next((v for v in found.values() if isinstance(v, list) and v), None)
        if inner is None or not isinstance(inner[0], dict):
            plain = {k: v for k, v in found.items() if not isinstance(v, dict | list)}
            return table(["", "value"], plain.items()) if plain else "(see the file)"
        found = inner
    flat = [{k: v for k, v in r.items() if not isinstance(v, dict | list)} for r in found]
    names = list(dict.fromkeys(name for row in flat for name in row))[:_MOST_COLUMNS]
    return table(names, ([row.get(name, "–") for name in names] for row in flat[:60]))


TABLES: dict[str, Callable[[Any], str]] = {
    "notes": notes,
    "time-machine": texts,
    "tiny-shakespeare": texts,
    "carries": carries,
    "cpu": cpu,
    "cuda-h200": cuda,
    "cuda-notes-job-h200": rows_of,
    "grid-cuda": grid,
    "grid-cpu": grid,
    "cells-h200": described_cells,
    "chunked-h200": chunked,
    "chunked-cpu": chunked,
    "forecasting": forecasting,
    "forecasting-cutoffs": forecasting,
    "forecasting-origins": origins,
    "compression": compression,
    "defaults": defaults,
    "kinds": kinds,
}
