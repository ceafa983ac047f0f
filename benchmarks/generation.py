"""Writing text: `elman.generation` beside the same model stepped through its module, in one run.

    python benchmarks/generation.py [--quick] [--json FILE]

Contestants write the same text (the seed is the same) in turns; the table gives the median of the
rounds in tokens per second, and elman as a multiple of each. `module` calls the whole model for
every token; `torch.nn` is the loop people write, with `torch.multinomial`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elman import LanguageModel, generation

VOCAB = 100
SHAPES: dict[str, dict[str, Any]] = {
    "elman 256, one-hot": {"cell": "elman", "hidden_size": 256},
    "gru 512, one-hot": {"cell": "gru", "hidden_size": 512},
    "lstm 256, embedding 64 (quick)": {"cell": "lstm", "hidden_size": 256, "embedding_size": 64},
    "lstm 384, embedding 128 (best)": {"cell": "lstm", "hidden_size": 384, "embedding_size": 128},
    "2 × lstm 256, tied": {
        "cell": "lstm",
        "hidden_size": 256,
        "embedding_size": 256,
        "layers": 2,
        "tied": True,
    },
}
COLUMNS = ("elman", "module", "torch.nn")
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top-k, top-p": {"top_k": 20, "top_p": 0.9},
    "8 texts": {},
}


class Module(nn.Module):
    """The model, out of reach of its stepper."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, state: Any = None) -> Any:
        return self.model(ids, state)


def writer(model: nn.Module, length: int, rows: int, choices: dict[str, Any]) -> Callable[[], int]:
    def write() -> int:
        return rows * len(list(generation.generate_batch(model, [[1]] * rows, length, **choices)))

    return write


def torch_loop(shape: dict[str, Any], length: int, temperature: float) -> Callable[[], int]:
    """What people write with torch.nn: embedding, recurrence, linear layer, multinomial."""
    hidden, inputs = shape["hidden_size"], shape.get("embedding_size", shape["hidden_size"])
    kind = {"elman": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[shape["cell"]]
    embedding, out = nn.Embedding(VOCAB, inputs), nn.Linear(hidden, VOCAB)
    rnn = kind(inputs, hidden, shape.get("layers", 1), batch_first=True)

    @torch.inference_mode()
    def write() -> int:
        token, state = torch.tensor([[1]]), None
        for _ in range(length):
            hs, state = rnn(embedding(token), state)
            p = (out(hs[:, -1]) / temperature).softmax(-1)
            token = torch.multinomial(p, 1)
            token.item()
        return length

    return write


def rates(contestants: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Tokens per second, the median of rounds in which everybody takes a turn."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for write in contestants.values():
        write()
    for _ in range(rounds):
        for name, write in contestants.items():
            begun = time.perf_counter()
            tokens = write()
            taken[name].append(tokens / (time.perf_counter() - begun))
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Writing text, timed")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    length, rounds = (200, 3) if options.quick else (1000, 7)
    found = []
    print(f"{'tokens/s':32}{'':14}{'elman':>10}{'module':>10}{'torch.nn':>10}{'ratios':>14}")
    for title, shape in SHAPES.items():
        torch.manual_seed(0)
        model = LanguageModel(VOCAB, **shape).eval()
        for how, choices in CHOICES.items():
            rows = 8 if how == "8 texts" else 1
            contestants = {
                "elman": writer(model, length, rows, choices),
                "module": writer(Module(model), length, rows, choices),
            }
            if how == "temperature":
                contestants["torch.nn"] = torch_loop(shape, length, 0.8)
            rate = rates(contestants, rounds)
            ratios = {name: rate["elman"] / r for name, r in rate.items() if name != "elman"}
            said = "".join(f"{rate[n]:10,.0f}" if n in rate else f"{'':10}" for n in COLUMNS)
            times = " ".join(f"{ratio:.1f}×" for ratio in ratios.values())
            print(f"{title:32}{how:14}{said}{times:>14}", flush=True)
            found.append({"model": title, "how": how, "tokens_per_second": rate, "ratios": ratios})
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
