"""What `elman train` does on a GPU with each preset, beside the same network in torch.nn.

    python benchmarks/cuda_presets.py [--updates 400] [--only WORD] [--json FILE]

The trainer with a preset's options on the embedded corpus: µs of an update, tokens a second, and
how updates run. The peer is a plain loop over an embedding, `torch.nn.LSTM` and an output layer of
the same sizes, with fused AdamW and clipping, all of the preset's dropout but that of W_hh, and its
average of the weights; nobody waits for its numbers. Both in turns, the medians of three rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from elman.session import RunOptions, Session
from elman.training import Training

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("auto", {}),
    "quick": ("quick", {}),
    "best": ("best", {}),
    "best, bfloat16": ("best", {"precision": "bfloat16"}),
    "best, two layers": ("best", {"layers": 2, "dropout_layers": 0.2}),
    "quick, two windows an update": ("quick", {"accumulate": 2}),
    "quick, randomized carry": ("quick", {"carry": "randomized"}),
}
WARM_UP, ROUNDS = 60, 3


class Peer(nn.Module):
    """The same network by torch.nn."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        shape = training.model.shape
        self.drop, width = shape.dropout, shape.embedding_size or shape.vocab_size
        self.embedding = nn.Embedding(shape.vocab_size, width)
        sizes = width, shape.hidden_size, shape.layers
        kinds = {"gru": nn.GRU, "lstm": nn.LSTM, "elman": nn.RNN}
        self.recurrence = kinds[training.model.cell](*sizes, dropout=self.drop.layers)
        self.output = nn.Linear(shape.hidden_size, shape.vocab_size)

    def forward(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        ids = torch.where(torch.rand(ids.shape, device=ids.device) < self.drop.tokens, 0, ids)
        xs = self.embedding(ids)
        if self.drop.inputs:
            xs = xs * dropout(torch.ones_like(xs[0]), self.drop.inputs)
        hs, state = self.recurrence(xs, state)
        if self.drop.outputs:
            hs = hs * dropout(torch.ones_like(hs[0]), self.drop.outputs)
        return self.output(hs), state


def peer(training: Training) -> Callable[[], None]:
    """One update of the peer, on windows of the training's size."""
    settings = training.settings
    reading, rule = settings.reading, settings.optimisation
    torch.manual_seed(0)
    model = Peer(training).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), rule.learning_rate, fused=True)
    average = [p.detach().clone() for p in model.parameters()] if rule.average != "none" else []
    ids = torch.randint(training.model.shape.vocab_size, (reading.window + 1, reading.batch_size))
    ids, state = ids.cuda(), None

    def update() -> None:
        nonlocal state
        optimizer.zero_grad()
        for _ in range(settings.accumulate):
            with torch.autocast("cuda", torch.bfloat16, settings.precision == "bfloat16"):
                logits, after = model(ids[:-1], state)
            loss = cross_entropy(logits.flatten(0, 1).float(), ids[1:].flatten())
            (loss / settings.accumulate).backward()
            parts = after if isinstance(after, tuple) else (after,)
            parts = tuple(part.detach().float() for part in parts)
            state = parts if isinstance(after, tuple) else parts[0]
        nn.utils.clip_grad_norm_(model.parameters(), rule.clip or float("inf"))
        optimizer.step()
        if average:
            torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.001)

    return update


def microseconds(update: Callable[[], object], count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        update()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / count


def measured(preset: str, options: dict[str, Any], count: int) -> dict[str, Any]:
    """Both in turns; how the trainer's updates run."""
    with tempfile.TemporaryDirectory() as folder:
        kept = RunOptions(out=Path(folder) / "run", device="cuda", diagnose=0)
        asked = {"source": "python-reference", "epochs": 10_000, "validate_every": 10**9}
        training = Session.begin(asked | options, preset=preset, kept=kept).training
        contenders = training.update, peer(training)
        for update in contenders:
            microseconds(update, WARM_UP)
        counts = count, max(1, count // 8)  # the peer takes longer
        rounds = [
            [microseconds(u, n) for u, n in zip(contenders, counts, strict=True)]
            for _ in range(ROUNDS)
        ]
    own, other = (statistics.median(times) for times in zip(*rounds, strict=True))
    reading = training.settings.reading
    tokens = reading.batch_size * reading.window * training.settings.accumulate
    return {
        "elman_us": round(own, 1),
        "torch_nn_us": round(other, 1),
        "ratio": round(other / own, 2),
        "tokens_per_second": round(1e6 * tokens / own),
        "update": training.explain().runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=400, help="of the trainer, in a round")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing to measure")
        return
    found = {}
    for name, (preset, options) in CASES.items():
        if given.only not in name:
            continue
        row = found[name] = measured(preset, options, given.updates)
        print(
            f"{name:30} {row['elman_us']:8.0f} µs an update, torch.nn {row['torch_nn_us']:8.0f} "
            f"({row['ratio']:.2f}x), {row['tokens_per_second']:,} tokens/s, {row['update']}",
            flush=True,
        )
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": found}
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
