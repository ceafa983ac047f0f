"""Language models as people use them, beside the same by torch.nn: any size, any vocabulary.

    python benchmarks/models.py [--device cpu] [--random 24 --seed 1] [--only WORD] [--busy]
                                [--seconds S] [--json FILE]

Cell, units, layers, embedding and the size of the vocabulary are drawn; then each model is

    trained      in a loop of one's own: cross-entropy, backward, clipping, AdamW
    scored       held-out text, 16 lanes side by side, no gradient
    written      a token at a time: greedy, with a temperature, top-k or top-p; 1 to 64 texts
    searched     the most probable text of 20 tokens, by a beam of 1 to 16
    adapted      dynamic evaluation: windows of 20 tokens, scored and then learnt from

in turns with the loop that people write for torch.nn. The peer's embedding is torch's (or one-hot
rows), its sampling torch.multinomial on the device. Times are medians of five rounds; with
`--busy`, for a CPU that has other work, processor time of one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from elman import LanguageModel, generation
from elman.scoring import dynamic, metrics

KINDS = {"gru": nn.GRU, "lstm": nn.LSTM, "elman": nn.RNN}
ROUNDS, SECONDS = 5, 0.15
CLOCKS = {False: time.perf_counter, True: time.process_time}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.9},
}

Use = tuple[Callable[[], object], Callable[[], object]]
"""elman's way and torch.nn's, each to be called again and again."""


@dataclass(frozen=True)
class Sizes:
    """What is drawn of a model and its use."""

    cell: str
    hidden: int
    layers: int
    embedding: int | None
    vocabulary: int
    batch: int
    window: int
    rows: int
    choice: str
    beam: int


def drawn(chance: random.Random) -> Sizes:
    """A model that somebody might have."""

    def between(least: int, most: int) -> int:
        return round(math.exp(chance.uniform(math.log(least), math.log(most))))

    vocabulary = chance.choice([between(20, 200), between(200, 5000), between(5000, 60_000)])
    hidden = between(16, 1024)
    wide = vocabulary > 500 or chance.random() < 0.5
    return Sizes(
        cell=chance.choice([*KINDS]),
        hidden=hidden,
        layers=chance.choice([1, 1, 2, 3]),
        embedding=between(16, 512) if wide else None,
        vocabulary=vocabulary,
        batch=between(1, 64),
        window=between(8, 128),
        rows=chance.choice([1, 1, 1, between(2, 64)]),
        choice=chance.choice([*CHOICES]),
        beam=2 ** (hidden % 5),  # of its own: what is drawn after it stays as it was
    )


class Peer(nn.Module):
    """The same network by torch.nn, with the same weights."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.embedding
        self.embedding = nn.Embedding(sizes.vocabulary, width) if width else None
        self.recurrence = KINDS[sizes.cell](width or sizes.vocabulary, sizes.hidden, sizes.layers)
        self.output = nn.Linear(sizes.hidden, sizes.vocabulary)

    def forward(self, ids: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        if self.embedding is None:
            xs = one_hot(ids, self.sizes.vocabulary).float()
        else:
            xs = self.embedding(ids)
        hs, state = self.recurrence(xs, state)
        return self.output(hs), state


def detached(state: Any) -> Any:
    return tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()


def training(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    """An update of a loop of one's own, over ids in the model's order of dimensions."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    state = None
    time_first = isinstance(model, Peer)
    x, y = (ids[:-1], ids[1:]) if time_first else (ids.T[:, :-1], ids.T[:, 1:])
    x, y = x.contiguous(), y.contiguous()

    def update() -> None:
        nonlocal state
        logits, after = model(x, state)
        state = detached(after)
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


def scoring(model: nn.Module, ids: Any) -> Callable[[], object]:
    """The nats of a text in 16 lanes, read 256 steps at a time."""
    if isinstance(model, LanguageModel):
        return lambda: metrics.evaluate(model, ids, lanes=16, warm_up=0)
    lanes = 16 if len(ids) > 16 * 2 else 1
    steps = (len(ids) - 1) // lanes
    x, y = (ids[a : a + lanes * steps].view(lanes, steps).T.contiguous() for a in (0, 1))

    def score() -> float:
        with torch.no_grad():
            total, state = 0.0, None
            for start in range(0, steps, 256):
                logits, state = model(x[start : start + 256], state)
                labels = y[start : start + 256].flatten()
                total += cross_entropy(logits.flatten(0, 1), labels, reduction="sum").item()
        return total

    return score


def drawing(logits: Tensor, choice: str) -> Tensor:
    """The next token of every row, as people write it."""
    if choice == "greedy":
        return logits.argmax(-1)
    if choice == "temperature":
        return torch.multinomial((logits / 0.8).softmax(-1), 1)[:, 0]
    if choice == "top-k":
        top = logits.topk(min(20, logits.shape[-1]))
        at = torch.multinomial(top.values.softmax(-1), 1)
        return top.indices.gather(-1, at)[:, 0]
    p, order = logits.softmax(-1).sort(descending=True)
    p[p.cumsum(-1) - p >= 0.9] = 0
    return order.gather(-1, torch.multinomial(p, 1))[:, 0]


def writing(model: nn.Module, sizes: Sizes, length: int) -> Callable[[], object]:
    rows = sizes.rows
    if isinstance(model, LanguageModel):
        options = CHOICES[sizes.choice]
        return lambda: list(generation.generate_batch(model, [[1]] * rows, length, **options))
    device = next(model.parameters()).device

    def write() -> list[list[int]]:
        found = []
        with torch.no_grad():
            tokens, state = torch.ones(rows, dtype=torch.int64, device=device), None
            for _ in range(length):
                logits, state = model(tokens[None], state)
                tokens = drawing(logits[0], sizes.choice)
                found.append(tokens.tolist())
        return found

    return write


def searching(model: nn.Module, sizes: Sizes, length: int) -> Callable[[], object]:
    if isinstance(model, LanguageModel):
        return lambda: generation.beam_search(model, [1], length, width=sizes.beam)
    device = next(model.parameters()).device

    def search() -> list[list[int]]:
        with torch.no_grad():
            logits, state = model(torch.ones(1, 1, dtype=torch.int64, device=device))
            scores, texts = torch.zeros(1, device=device), [list[int]()]
            for _ in range(length):
                log_p = logits[0].log_softmax(-1)
                log_p[:, 0] = -math.inf
                scores, best = (scores[:, None] + log_p).flatten().topk(sizes.beam)
                rows, tokens = best // sizes.vocabulary, best % sizes.vocabulary
                both = zip(rows.tolist(), tokens.tolist(), strict=True)
                texts = [[*texts[row], token] for row, token in both]
                if isinstance(state, tuple):
                    state = tuple(s[:, rows] for s in state)
                else:
                    state = state[:, rows]
                logits, state = model(tokens[None], state)
        return texts

    return search


def adapting(model: nn.Module, ids: Any, sigma: dynamic.Sigma) -> Callable[[], object]:
    settings = dynamic.Adaptation()
    if isinstance(model, LanguageModel):
        return lambda: dynamic.adapted_scores(model, ids, sigma, settings)
    weights = list(model.parameters())
    scale = [torch.full_like(w, 1e-3) for w in weights]
    trained = [w.detach().clone() for w in weights]

    def adapt() -> np.ndarray:
        found, state = [], None
        for start in range(0, len(ids) - 1, settings.window):
            y = ids[start + 1 : start + 1 + settings.window]
            logits, state = model(ids[start : start + len(y), None], state)
            state = detached(state)
            log_p = logits[:, 0].log_softmax(-1).gather(-1, y[:, None])
            found.append(log_p.detach()[:, 0].cpu().double().numpy())
            gradients = torch.autograd.grad(-log_p.mean(), weights)
            with torch.no_grad():
                for w, g, s, w0 in zip(weights, gradients, scale, trained, strict=True):
                    w.sub_(s * g).add_(s * (w0 - w))
        return np.concatenate(found)

    return adapt


def uses(sizes: Sizes, device: str) -> dict[str, Use]:
    torch.manual_seed(0)
    own = LanguageModel(
        sizes.vocabulary,
        cell=sizes.cell,
        hidden_size=sizes.hidden,
        layers=sizes.layers,
        embedding_size=sizes.embedding,
    ).to(device)
    peer = Peer(sizes).to(device)

    def some(*shape: int) -> Tensor:
        return torch.randint(sizes.vocabulary, shape, device=device)

    window, text = some(sizes.window + 1, sizes.batch), some(2 * 16 * 256 + 1)
    short = some(25 * dynamic.Adaptation.window + 1)
    sigma = {name: torch.full_like(p, 1e-3) for name, p in own.named_parameters()}
    own_text, own_short = text.cpu().numpy(), short.cpu().numpy()
    length = 40
    rows = f"written ({sizes.choice}, {sizes.rows} text{'s' * (sizes.rows > 1)})"
    return {
        "trained": (training(own, window), training(peer, window)),
        "scored": (scoring(own, own_text), scoring(peer, text)),
        rows: (writing(own, sizes, length), writing(peer, sizes, length)),
        f"searched (beam of {sizes.beam})": (
            searching(own, sizes, length // 2),
            searching(peer, sizes, length // 2),
        ),
        "adapted": (adapting(own, own_short, sigma), adapting(peer, short, sigma)),
    }


def timed(work: Callable[[], object], count: int, device: str, busy: bool) -> float:
    """Milliseconds a call."""
    clock = CLOCKS[busy]
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    for _ in range(count):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (clock() - start) / count


def measured(use: Use, device: str, busy: bool) -> dict[str, float]:
    """Both in turns, and the median of the ratios of rounds."""
    counts = []
    for work in use:
        timed(work, 8 if device == "cuda" else 1, device, busy)
        each = timed(work, 3 if device == "cuda" else 1, device, busy)
        counts.append(max(1, min(500, round(1e3 * SECONDS / max(each, 1e-3)))))
    rounds = [
        [timed(work, count, device, busy) for work, count in zip(use, counts, strict=True)]
        for _ in range(ROUNDS)
    ]
    own, other = (statistics.median(r[i] for r in rounds) for i in range(2))
    ratio = statistics.median(theirs / ours for ours, theirs in rounds)
    return {"elman_ms": round(own, 3), "torch_nn_ms": round(other, 3), "ratio": round(ratio, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--random", type=int, default=24, help="so many models, drawn")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--only", default="", help="uses whose words have this")
    parser.add_argument("--busy", action="store_true", help="one thread, in processor time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after these")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if given.busy:
        torch.set_num_threads(1)
    chance, start, found = random.Random(given.seed), time.monotonic(), []
    for sizes in [drawn(chance) for _ in range(given.random)]:
        for name, use in uses(sizes, device).items():
            if given.only not in name or time.monotonic() - start > given.seconds:
                continue
            row = {"use": name, **asdict(sizes), **measured(use, device, given.busy)}
            found.append(row)
            print(
                f"{row['ratio']:6.2f}x {row['elman_ms']:9.2f} ms, torch.nn "
                f"{row['torch_nn_ms']:9.2f}: {name}: {sizes.cell} H {sizes.hidden} "
                f"layers {sizes.layers} E {sizes.embedding} V {sizes.vocabulary} "
                f"B {sizes.batch} T {sizes.window}",
                flush=True,
            )
    for kind in ("trained", "scored", "written", "searched", "adapted", ""):
        ratios = [row["ratio"] for row in found if row["use"].startswith(kind)]
        if ratios:
            print(
                f"{kind or 'all'}: {len(ratios)} cases, geometric mean "
                f"{statistics.geometric_mean(ratios):.2f}, least {min(ratios):.2f}, "
                f"{sum(r < 0.97 for r in ratios)} below 0.97"
            )
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    result = {"device": name, "torch": torch.__version__, "seed": given.seed, "cases": found}
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
