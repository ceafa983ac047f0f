"""The notes' own runs on The Time Machine, against plain PyTorch versions of the notes' code.

    python benchmarks/notes.py [--quick] [--only "scratch, sequential"] [--seeds 5] [--device cpu]

First 10,000 letters, 500 epochs, batch 32, window 35, learning rate 1, clipped to norm 1. Training
perplexity is the mean of the last ten epochs (at this learning rate it oscillates). Held-out
perplexity, which the notes never show, is that of the 10,000 letters that follow, read once with
the state carried on. Runs that are done are not done again; the table shows means over seeds, and
the lowest and highest training perplexity. Needs torch, numpy and safetensors.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elman import LanguageModel, Vocab, corpus, metrics
from elman.files import write_text
from elman.training import Optimisation, Reading, Settings, Training, Update

HERE = Path(__file__).parent
BATCH, WINDOW, EPOCHS = 32, 35, 500
UNITS: dict[str, dict[str, Any]] = {
    "scratch, sequential": {"hidden": 512, "scratch": True, "sampling": "sequential"},
    "scratch, random": {"hidden": 512, "scratch": True, "sampling": "random"},
    "concise, sequential": {"hidden": 256, "scratch": False, "sampling": "sequential"},
    "concise, 512 units": {"hidden": 512, "scratch": False, "sampling": "sequential"},
    "scratch, 256 units": {"hidden": 256, "scratch": True, "sampling": "sequential"},
}


class Scratch(nn.Module):
    """The model of 8.5: five tensors, N(0, 0.01), one-hot products, a loop over time."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.W_xh = nn.Parameter(torch.randn(vocab_size, hidden) * 0.01)
        self.W_hh = nn.Parameter(torch.randn(hidden, hidden) * 0.01)
        self.b_h = nn.Parameter(torch.zeros(hidden))
        self.W_hq = nn.Parameter(torch.randn(hidden, vocab_size) * 0.01)
        self.b_q = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, X: Tensor, H: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if H is None:
            H = torch.zeros(len(X), len(self.b_h), device=X.device)
        outputs = []
        for x in F.one_hot(X.T, self.vocab_size).float():
            H = torch.tanh(x @ self.W_xh + H @ self.W_hh + self.b_h)
            outputs.append(H @ self.W_hq + self.b_q)
        return torch.stack(outputs, 1), H


class Concise(nn.Module):
    """The model of 8.6: torch.nn.RNN on one-hot rows, and a linear layer."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.rnn = nn.RNN(vocab_size, hidden)
        self.linear = nn.Linear(hidden, vocab_size)

    def forward(self, X: Tensor, H: Tensor | None = None) -> tuple[Tensor, Tensor]:
        Y, H_T = self.rnn(F.one_hot(X.T, self.vocab_size).float(), H)
        return self.linear(Y).transpose(0, 1), H_T


def batches(ids: Tensor, sampling: str, chance: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """The two iterators of 8.3, from a random offset."""
    if sampling == "sequential":
        offset = chance.randint(0, WINDOW)
        lane = (len(ids) - offset - 1) // BATCH
        xs = ids[offset : offset + lane * BATCH].view(BATCH, -1)
        ys = ids[offset + 1 : offset + 1 + lane * BATCH].view(BATCH, -1)
        for i in range(0, lane // WINDOW * WINDOW, WINDOW):
            yield xs[:, i : i + WINDOW], ys[:, i : i + WINDOW]
        return
    ids = ids[chance.randint(0, WINDOW - 1) :]
    starts = list(range(0, (len(ids) - 1) // WINDOW * WINDOW, WINDOW))
    chance.shuffle(starts)
    for i in range(0, len(starts) // BATCH * BATCH, BATCH):
        chosen = starts[i : i + BATCH]
        yield (
            torch.stack([ids[s : s + WINDOW] for s in chosen]),
            torch.stack([ids[s + 1 : s + 1 + WINDOW] for s in chosen]),
        )


def train_plain(
    unit: dict[str, Any], ids: Tensor, vocab_size: int, seed: int, epochs: int
) -> tuple[nn.Module, list[float]]:
    """`train_ch8`: gradient descent, clipped, the state carried or reset; nats of every epoch."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    kind = Scratch if unit["scratch"] else Concise
    model = kind(vocab_size, unit["hidden"]).to(ids.device)
    updater = torch.optim.SGD(model.parameters(), lr=1.0)
    history = []
    for _ in range(epochs):
        state, total, count = None, 0.0, 0
        for X, Y in batches(ids, unit["sampling"], chance):
            state = None if unit["sampling"] == "random" or state is None else state.detach()
            logits, state = model(X, state)
            loss = F.cross_entropy(logits.flatten(0, 1), Y.flatten())
            updater.zero_grad()
            loss.backward()
            norm = torch.sqrt(sum(torch.sum(p.grad**2) for p in model.parameters()))  # type: ignore
            if norm > 1:
                for p in model.parameters():
                    p.grad[:] *= 1 / norm  # type: ignore[index]
            updater.step()
            total, count = total + loss.item() * Y.numel(), count + Y.numel()
        history.append(total / count)
    return model, history


def train_elman(
    unit: dict[str, Any], ids: Tensor, vocab_size: int, seed: int, epochs: int
) -> tuple[nn.Module, list[float]]:
    """The same with elman."""
    torch.manual_seed(seed)
    init = "notes" if unit["scratch"] else "default"
    model = LanguageModel(vocab_size, cell="elman", hidden_size=unit["hidden"], init=init)
    settings = Settings(
        epochs=epochs,
        seed=seed,
        reading=Reading(BATCH, WINDOW, sampling=unit["sampling"]),
        optimisation=Optimisation(optimizer="sgd", learning_rate=1.0, clip=1.0),
    )
    training = Training(model.to(ids.device), ids, None, settings)
    totals = [[0.0, 0] for _ in range(epochs)]
    for record in training.records():
        if isinstance(record, Update):
            totals[record.epoch][0] += record.nats * record.tokens
            totals[record.epoch][1] += record.tokens
    return model, [total / count for total, count in totals]


def run(unit: dict[str, Any], by: str, seed: int, epochs: int, device: str) -> dict[str, Any]:
    """Train one model one way; perplexity at the end, on the training text and after it."""
    text = "".join(corpus.letters(corpus.load("time-machine")))
    vocab = Vocab(text)
    ids = torch.from_numpy(vocab.encode(text).astype("i8")).to(device)
    began = time.monotonic()
    train = train_elman if by == "elman" else train_plain
    model, history = train(unit, ids[:10_000], len(vocab), seed, epochs)
    seconds = time.monotonic() - began
    held_out = metrics.evaluate(model, ids[10_000:20_000].cpu())  # type: ignore[arg-type]
    last = [math.exp(nats) for nats in history[-10:]]
    return {
        "training_perplexity": statistics.mean(last),
        "best_of_the_last_ten": min(last),
        "held_out_perplexity": held_out.perplexity,
        "seconds": round(seconds, 1),
        "device": device,
    }


def show(done: list[dict[str, Any]]) -> None:
    """Means over seeds; training perplexity with its lowest and highest."""
    print(f"{'run':20} {'by':8} {'epochs':>6} {'seeds':>5} {'training':>24} {'held out':>9}")
    for run, by, epochs in dict.fromkeys((d["run"], d["by"], d["epochs"]) for d in done):
        same = [d for d in done if (d["run"], d["by"], d["epochs"]) == (run, by, epochs)]
        training = [d["training_perplexity"] for d in same]
        spread = f"{statistics.mean(training):.3f} ({min(training):.3f} to {max(training):.3f})"
        held_out = statistics.mean(d["held_out_perplexity"] for d in same)
        print(f"{run:20} {by:8} {epochs:6} {len(same):5} {spread:>24} {held_out:9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=UNITS)
    parser.add_argument("--by", choices=("elman", "pytorch"))
    parser.add_argument("--seeds", type=int, default=5, help="0, 1, … up to this many")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "notes.json")
    parser.add_argument("--quick", action="store_true", help="10 epochs instead of 500")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    epochs = 10 if arguments.quick else EPOCHS
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    done = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    names = [arguments.only] if arguments.only else list(UNITS)
    sides = [arguments.by] if arguments.by else ["elman", "pytorch"]
    seeds = range(arguments.seeds) if arguments.seed is None else [arguments.seed]
    for name, by, seed in itertools.product(names, sides, seeds):
        unit = {"run": name, "by": by, "seed": seed, "epochs": epochs}
        if not any(all(d[k] == v for k, v in unit.items()) for d in done):
            done.append(unit | run(UNITS[name], by, seed, epochs, arguments.device))
            write_text(arguments.out, json.dumps(done, indent=1) + "\n")
            show(done[-1:])
    show(done)
    if arguments.json:
        print(json.dumps(done))


if __name__ == "__main__":
    main()
