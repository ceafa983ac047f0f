"""Updates of the trainer beside the same network in a plain loop of torch.nn.

    python benchmarks/trainings.py [--device cpu] [--random 40 --seed 1] [--only WORD]
                                   [--seconds S] [--json FILE]

The presets of `elman train` and what people change about them; or, with `--random`, trainings whose
cell, sizes, level, dropout, precision, optimizer, carry and order are drawn. Both on the embedded
corpus, in turns, medians of five rounds.

The peer: an embedding (or one-hot vectors), torch.nn's recurrence and an output layer of the same
sizes, clipping, torch's fused optimizer, all of the dropout but that of W_hh, and an average of the
weights; one window in memory, read again and again, and nobody waits for its numbers. Where elman
reads segments of other lengths (a carry that is drawn, or reads steps again), times are per token.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, one_hot

from elman.errors import UserError
from elman.session import RunOptions, Session
from elman.training import Training

Options = dict[str, Any]

PRESETS: dict[str, Options] = {
    "auto": {},
    "quick": {"preset": "quick"},
    "best": {"preset": "best"},
    "best, bfloat16": {"preset": "best", "precision": "bfloat16"},
    "best, two layers": {"preset": "best", "layers": 2, "dropout_layers": 0.2},
    "quick, two windows an update": {"preset": "quick", "accumulate": 2},
    "quick, randomized carry": {"preset": "quick", "carry": "randomized"},
}
ROUNDS, SECONDS = 5, 0.2
WARM_UP = {"cpu": 5, "cuda": 60}
KINDS = {"gru": nn.GRU, "lstm": nn.LSTM, "elman": nn.RNN}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def drawn(chance: random.Random, device: str) -> Options:
    """A training that somebody might ask for."""

    def between(least: int, most: int) -> int:
        return round(math.exp(chance.uniform(math.log(least), math.log(most))))

    def maybe(value: float) -> float:
        return value if chance.random() < 0.25 else 0.0

    hidden = between(16, 1024 if device == "cuda" else 400)
    width = chance.choice([0, between(8, hidden), hidden])
    layers = chance.choice([1, 1, 2, 3])
    options: Options = {
        "model": chance.choice([*KINDS]),
        "hidden_size": hidden,
        "embedding_size": width,
        "tied": width == hidden and chance.random() < 0.5,
        "layers": layers,
        "batch_size": between(1, 128),
        "window": between(4, 256),
        "level": chance.choice(["char", "char", "byte", "word"]),
        "sampling": chance.choice(["sequential", "sequential", "random"]),
        "optimizer": chance.choice([*OPTIMIZERS]),
        "clip": chance.choice([0.0, 1.0]),
        "average": chance.choice(["none", "none", "ema"]),
        "average_decay": 0.999,
        "accumulate": chance.choice([1, 1, 1, 2]),
        "precision": chance.choice(["float32", "bfloat16"]) if device == "cuda" else "float32",
        "dropout_tokens": maybe(0.05),
        "dropout_inputs": maybe(0.2) if width else 0.0,
        "dropout_layers": maybe(0.2) if layers > 1 else 0.0,
        "dropout_outputs": maybe(0.3),
        "dropout_recurrent": maybe(0.3),
    }
    if options["sampling"] == "sequential" and options["accumulate"] == 1:
        options["carry"] = chance.choice(["truncated"] * 4 + ["randomized", "sliding"])
        if options["carry"] == "sliding":
            options["history"] = between(1, options["window"])
    return options


def words(options: Options) -> str:
    """What is drawn, on a line."""
    kept = {k: v for k, v in options.items() if v not in (0.0, False, "none", "sequential")}
    sizes = ("model", "hidden_size", "embedding_size", "layers", "batch_size", "window")
    head = "{} H {} E {} layers {} B {} T {}".format(*(options[k] for k in sizes))
    rest = [f"{k}={v}" for k, v in kept.items() if k not in (*sizes, "average_decay")]
    return f"{head} {' '.join(rest)}"


class Peer(nn.Module):
    """The same network by torch.nn."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        shape = training.model.shape
        self.drop, self.tokens = shape.dropout, shape.vocab_size
        width = shape.embedding_size
        self.embedding = nn.Embedding(shape.vocab_size, width) if width else None
        sizes = width or shape.vocab_size, shape.hidden_size, shape.layers
        self.recurrence = KINDS[training.model.cell](*sizes, dropout=self.drop.layers)
        self.output = nn.Linear(shape.hidden_size, shape.vocab_size)
        if shape.tied and self.embedding is not None:
            self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        if self.drop.tokens:
            hidden = torch.rand(ids.shape, device=ids.device) < self.drop.tokens
            ids = torch.where(hidden, 0, ids)
        xs = one_hot(ids, self.tokens).float() if self.embedding is None else self.embedding(ids)
        if self.drop.inputs:
            xs = xs * dropout(torch.ones_like(xs[0]), self.drop.inputs)
        hs, state = self.recurrence(xs, state)
        if self.drop.outputs:
            hs = hs * dropout(torch.ones_like(hs[0]), self.drop.outputs)
        return self.output(hs), state


def peer(training: Training) -> Callable[[], int]:
    """One update of the peer on windows of the training's size: how many tokens it read."""
    settings = training.settings
    reading, rule, device = settings.reading, settings.optimisation, training.device
    torch.manual_seed(0)
    model = Peer(training).to(device)
    kind = OPTIMIZERS[rule.optimizer]
    optimizer = kind(model.parameters(), rule.learning_rate, fused=True)
    average = [p.detach().clone() for p in model.parameters()] if rule.average != "none" else []
    ids = torch.randint(training.model.shape.vocab_size, (reading.window + 1, reading.batch_size))
    ids, state = ids.to(device), None
    keeps = reading.sampling == "sequential"

    def update() -> int:
        nonlocal state
        optimizer.zero_grad()
        for _ in range(settings.accumulate):
            with torch.autocast(device.type, torch.bfloat16, settings.precision == "bfloat16"):
                logits, after = model(ids[:-1], state)
            loss = cross_entropy(logits.flatten(0, 1).float(), ids[1:].flatten())
            (loss / settings.accumulate).backward()
            parts = after if isinstance(after, tuple) else (after,)
            parts = tuple(part.detach().float() for part in parts)
            state = (parts if isinstance(after, tuple) else parts[0]) if keeps else None
        if rule.clip:
            nn.utils.clip_grad_norm_(model.parameters(), rule.clip)
        optimizer.step()
        if average:
            torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.001)
        return reading.window * reading.batch_size * settings.accumulate

    return update


def timed(update: Callable[[], int], count: int, device: str) -> tuple[float, float]:
    """µs of an update, and of a token."""
    if device == "cuda":
        torch.cuda.synchronize()
    start, tokens = time.perf_counter(), 0
    for _ in range(count):
        tokens += update()
    if device == "cuda":
        torch.cuda.synchronize()
    taken = 1e6 * (time.perf_counter() - start)
    return taken / count, taken / tokens


def measured(options: Options, device: str) -> dict[str, Any]:
    """Both in turns; how the trainer's updates run."""
    with tempfile.TemporaryDirectory() as folder:
        kept = RunOptions(out=Path(folder) / "run", device=device, diagnose=0)
        asked = {"source": "python-reference", "epochs": 10_000, "validate_every": 10**9} | options
        preset = asked.pop("preset", "auto")
        training = Session.begin(asked, preset=preset, kept=kept).training
        contenders = (lambda: training.update().tokens), peer(training)
        counts = []
        for update in contenders:
            timed(update, WARM_UP[device], device)
            each = timed(update, 3, device)[0]
            counts.append(max(2, min(2000, round(1e6 * SECONDS / each))))
        rounds = [
            [timed(u, n, device) for u, n in zip(contenders, counts, strict=True)]
            for _ in range(ROUNDS)
        ]
    own, other = (statistics.median(r[i][0] for r in rounds) for i in range(2))
    each, peers = (statistics.median(r[i][1] for r in rounds) for i in range(2))
    return {
        "elman_us": round(own, 1),
        "torch_nn_us": round(other, 1),
        "ratio": round(peers / each, 2),
        "tokens_per_second": round(1e6 / each),
        "update": training.explain().runs,
    }


def cases(given: argparse.Namespace) -> dict[str, Options]:
    if not given.random:
        return {name: o for name, o in PRESETS.items() if given.only in name}
    chance = random.Random(given.seed)
    found = [drawn(chance, given.device) for _ in range(given.random)]
    return {words(o): o for o in found if given.only in words(o)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--random", type=int, default=0, help="so many trainings, drawn")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--only", default="", help="cases whose words have this")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after these")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    found, start = {}, time.monotonic()
    for name, options in cases(given).items():
        if time.monotonic() - start > given.seconds:
            break
        try:
            row = found[name] = measured(options, given.device)
        except UserError as refused:  # a draw may ask for more text than there is
            print(f"{name}: {refused}", flush=True)
            continue
        print(
            f"{row['ratio']:6.2f}x  {row['elman_us']:8.0f} µs an update, torch.nn "
            f"{row['torch_nn_us']:8.0f}, {row['tokens_per_second']:,} tokens/s, {row['update']}: "
            f"{name}",
            flush=True,
        )
    ratios = [row["ratio"] for row in found.values()]
    if ratios:
        print(
            f"{len(ratios)} trainings, geometric mean {statistics.geometric_mean(ratios):.2f}, "
            f"least {min(ratios):.2f}"
        )
    name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    result = {"device": name, "torch": torch.__version__, "cases": found}
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
