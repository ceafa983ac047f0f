"""The notes' whole job on a GPU: 500 epochs of the first 10,000 characters of The Time Machine.

    ELMAN_DATA=folder python benchmarks/cuda_notes_job.py [--epochs 500] [--precision float32]

One layer of 256 tanh units over one-hot characters, batch 32, windows of 35 read in sequence from a
random offset each epoch, SGD with learning rate 1, gradients clipped at norm 1: the concise code of
the notes, run four ways: with torch.nn (cuDNN) as the notes do, with elman.nn in the same eager
loop, with elman.nn as one CUDA graph per update in that loop, and by elman's trainer, which makes
such a graph by itself and yields a record of every update. Needs torch and numpy, and the text.

The trainer is done in half a second, and its host may be slower from one second to the next: it is
run `TRAININGS` times, and the speed of Python itself is told beside each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import elman.nn
from elman import LanguageModel
from elman.training import Optimisation, Reading, Settings, Training
from elman.training.graphed import Graphed, tensors_of
from elman.training.records import Progress

BATCH, WINDOW, HIDDEN, TOKENS = 32, 35, 256, 10_000
TRAININGS = 9


def characters() -> tuple[Tensor, int]:
    """The notes' ids: letters only, lower case, commonest first, <unk> 0."""
    folders = os.environ.get("ELMAN_DATA", "").split(os.pathsep)
    path = next((p for f in folders if (p := Path(f) / "timemachine.txt").exists()), None)
    if path is None:
        raise SystemExit("error: timemachine.txt is in no folder of ELMAN_DATA")
    lines = re.sub("[^A-Za-z\n]+", " ", path.read_text(encoding="utf-8")).lower().split("\n")
    text = "".join(line.strip() for line in lines)
    order = [c for c, _ in Counter(text).most_common()]
    ids = {c: i + 1 for i, c in enumerate(order)}
    return torch.tensor([ids[c] for c in text[:TOKENS]], device="cuda"), len(ids) + 1


def windows(ids: Tensor, offset: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequential partitioning, time first."""
    lane = (len(ids) - offset - 1) // BATCH
    x = ids[offset : offset + BATCH * lane].view(BATCH, lane).T
    y = ids[offset + 1 : offset + 1 + BATCH * lane].view(BATCH, lane).T
    for start in range(0, lane // WINDOW * WINDOW, WINDOW):
        yield x[start : start + WINDOW], y[start : start + WINDOW]


class Model(nn.Module):
    """One-hot characters → recurrence → output."""

    def __init__(self, rnn: nn.Module, size: int, one_hot: bool) -> None:
        super().__init__()
        self.rnn, self.size, self.one_hot = rnn, size, one_hot
        self.output = nn.Linear(HIDDEN, size, device="cuda")

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        xs = nn.functional.one_hot(x, self.size).float() if self.one_hot else x
        hs, h = self.rnn(xs, h)
        return self.output(hs), h


def build(contender: str, size: int) -> Model:
    torch.manual_seed(0)
    home = torch.nn if contender == "torch.nn" else elman.nn
    return Model(home.RNN(size, HIDDEN, device="cuda"), size, one_hot=home is torch.nn)


def train_with_trainer(epochs: int, precision: str) -> dict[str, Any]:
    ids, size = characters()
    settings = Settings(
        epochs=epochs,
        precision=precision,
        reading=Reading(BATCH, WINDOW),
        optimisation=Optimisation(optimizer="sgd", learning_rate=1.0, clip=1.0),
    )

    def trained() -> tuple[float, Training, float]:
        torch.manual_seed(0)
        model = LanguageModel(size, cell="elman", hidden_size=HIDDEN).to("cuda")
        training = Training(model, ids, None, settings)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        last: list[Progress] = []  # their numbers are read at the end: that waits for the GPU
        for record in training.records():
            last = [*last[-7:], record]
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        return seconds, training, sum(record.nats for record in last) / len(last)

    _, training, nats = trained()  # kernels compiled and libraries loaded, then the clock
    runs = []
    for _ in range(TRAININGS):
        host = host_ns()
        seconds, _, _ = trained()
        runs.append({"seconds": seconds, "host_ns": (host + host_ns()) / 2})
    median = statistics.median(run["seconds"] for run in runs)
    found = figures("elman.training", precision, median, training.step, nats)
    return {**found, "runs": runs}


def host_ns() -> float:
    """Nanoseconds that a turn of a plain Python loop takes just now."""
    begin, total = time.perf_counter_ns(), 0
    for i in range(100_000):
        total += i * i
    return (time.perf_counter_ns() - begin) / 100_000


def figures(
    contender: str, precision: str, seconds: float, updates: int, nats: float
) -> dict[str, Any]:
    return {
        "contender": contender,
        "precision": precision,
        "seconds": seconds,
        "us_per_update": seconds / updates * 1e6,
        "tokens_per_s": updates * BATCH * WINDOW / seconds,
        "perplexity": math.exp(nats),
    }


def train(contender: str, epochs: int, precision: str) -> dict[str, Any]:
    if contender == "elman.training":
        return train_with_trainer(epochs, precision)
    ids, size = characters()
    model = build(contender, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    h = torch.zeros(1, BATCH, HIDDEN, device="cuda")
    half = precision == "bfloat16"

    def update(x: Tensor, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            logits, h = model(x, h)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), h.detach().float()

    chance = random.Random(0)
    step = update
    first = next(windows(ids, 0))
    for _ in range(3):  # kernels compiled and libraries loaded before the clock starts
        update(*first, h)
    model.load_state_dict(build(contender, size).state_dict())
    if contender == "elman.nn, graph":
        step = Graphed(update, (*first, h), changes=tensors_of(model, optimizer))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    nats = math.nan
    for epoch in range(epochs):
        state, total, count = h, torch.zeros((), device="cuda"), 0
        for x, y in windows(ids, chance.randrange(WINDOW)):
            loss, state = step(x, y, state)
            total += loss
            count += 1
        if epoch % 50 == 49 or epoch == epochs - 1:
            nats = total.item() / count
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    updates = epochs * sum(1 for _ in windows(ids, 0))
    return figures(contender, precision, seconds, updates, nats)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help="50 epochs")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), nargs="*")
    parser.add_argument("--only", help="one contender, by a word of its name")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing to measure")
        return
    epochs = 50 if options.quick else options.epochs
    precisions = options.precision or ["float32", "bfloat16"]
    results = [
        train(contender, epochs, precision)
        for precision in precisions
        for contender in ("torch.nn", "elman.nn", "elman.nn, graph", "elman.training")
        if (options.only or "") in contender
    ]
    print("| contender | precision | seconds | µs per update | tokens/s | perplexity |")
    print("|---|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r['contender']} | {r['precision']} | {r['seconds']:.2f} | "
            f"{r['us_per_update']:.0f} | {r['tokens_per_s']:,.0f} | {r['perplexity']:.2f} |"
        )
    for r in results:
        if "runs" in r:
            runs = [f"{run['seconds']:.2f} ({run['host_ns']:.0f})" for run in r["runs"]]
            print(f"{r['contender']}, {r['precision']}, each run: {', '.join(runs)}")
    print("in brackets: nanoseconds that the host took for a turn of a plain Python loop")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
