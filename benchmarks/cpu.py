"""The whole training step of the notes' model on a CPU, against every peer, in one run.

    python benchmarks/cpu.py [--quick] [--busy] [--json FILE] [--only WORD]
    python benchmarks/cpu.py --busy --only preset      the presets of `elman train` by themselves

Contestants take turns, a few steps each, for several rounds; the table gives the median of the
rounds with their spread, as tokens per second. Ratios are medians of the rounds' own ratios, since
a slow moment slows all who take their turn in it: to the best peer, and to the floor, which is what
the step's multiply-adds would take at the rate of one large float32 product, taking its turn
like everybody else. `--busy` is for a machine with other work: one thread, and processor time
instead of the clock on the wall.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

import elman.nn
from elman import LanguageModel
from elman.kernels import cpu
from elman.language_model.stepper import Stepper
from elman.runs import presets
from elman.runs.effort import Size
from elman.training import Optimisation, Reading, Settings, Training

VOCAB = 28
MODULES = {"elman": "RNN", "gru": "GRU", "lstm": "LSTM"}
GATES = {"elman": 1, "gru": 3, "lstm": 4}
OURS = ("elman cpu", "elman bfloat16", "elman reference")


class Shape(NamedTuple):
    cell: str
    B: int
    T: int
    H: int

    def __str__(self) -> str:
        return f"{self.cell} B={self.B} T={self.T} H={self.H}"

    def multiply_adds(self) -> int:
        """Of one token's step: forwards, and twice that back; ids are looked up, not multiplied."""
        return 3 * (GATES[self.cell] * self.H * self.H + VOCAB * self.H)


def data(shape: Shape) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (shape.T + 1, shape.B), generator=random)
    return ids[:-1], ids[1:]


def training_step(model: torch.nn.Module, loss: Callable[[], Tensor]) -> Callable[[], object]:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimiser.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    return step


class Model(torch.nn.Module):
    """The notes' concise model: one-hot rows, recurrence, output layer."""

    def __init__(self, rnn: torch.nn.Module, H: int) -> None:
        super().__init__()
        self.rnn, self.out = rnn, torch.nn.Linear(H, VOCAB)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hs, _ = self.rnn(one_hots(x))
        return cross_entropy(self.out(hs).flatten(0, 1), y.flatten())


def one_hots(x: Tensor) -> Tensor:
    return one_hot(x, VOCAB).float()


def torch_nn(shape: Shape, compiled: bool = False) -> Callable[[], object]:
    torch.manual_seed(0)
    model = Model(getattr(torch.nn, MODULES[shape.cell])(VOCAB, shape.H), shape.H)
    x, y = data(shape)
    run = torch.compile(model) if compiled else model
    return training_step(model, lambda: run(x, y))


def ours(shape: Shape, kernel: str, bfloat16: bool = False) -> Callable[[], object]:
    """An update of elman's trainer, which also cuts out its window and makes a record."""
    os.environ["ELMAN_KERNELS"] = kernel
    torch.manual_seed(0)
    model = LanguageModel(VOCAB, cell=shape.cell, hidden_size=shape.H)
    ids = torch.randint(VOCAB, (100 * shape.B * shape.T + 1,))
    settings = Settings(
        epochs=10**6,
        precision="bfloat16" if bfloat16 else "float32",
        reading=Reading(shape.B, shape.T),
        optimisation=Optimisation(optimizer="sgd", learning_rate=0.1, clip=1.0),
    )
    training = Training(model, ids, None, settings)

    def run() -> None:
        os.environ["ELMAN_KERNELS"] = kernel
        training.update()

    return run


def from_scratch(shape: Shape) -> Callable[[], object]:
    """The notes' loop over time, on the autograd tape, with its own clipping and update."""
    torch.manual_seed(0)
    H = shape.H
    shapes = [(VOCAB, H), (H, H), (H,), (H, VOCAB), (VOCAB,)]
    weights = [(torch.randn(s) * 0.01).requires_grad_() for s in shapes]
    x, y = data(shape)

    def step() -> None:
        W_xh, W_hh, b_h, W_hq, b_q = weights
        h, outs = torch.zeros(shape.B, H), []
        for x_t in one_hots(x):
            h = torch.tanh(x_t @ W_xh + h @ W_hh + b_h)
            outs.append(h @ W_hq + b_q)
        cross_entropy(torch.cat(outs), y.flatten()).backward()
        with torch.no_grad():
            grads = [w.grad for w in weights if w.grad is not None]
            norm = torch.sqrt(torch.stack([(g**2).sum() for g in grads]).sum())
            for w, g in zip(weights, grads, strict=True):
                w -= 0.1 * (g if norm < 1 else g / norm)
                g.zero_()

    return step


def jax_scan(shape: Shape) -> Callable[[], object]:
    """`lax.scan` over the cell, the whole step under one jit."""
    import jax
    import jax.numpy as jnp

    G, H = GATES[shape.cell], shape.H
    keys = jax.random.split(jax.random.key(0), 4)
    w = {
        "W_xh": jax.random.normal(keys[0], (VOCAB, G * H)) * 0.05,
        "W_hh": jax.random.normal(keys[1], (H, G * H)) * 0.05,
        "b": jnp.zeros(2 * G * H),
        "W_hq": jax.random.normal(keys[2], (H, VOCAB)) * 0.05,
        "b_q": jnp.zeros(VOCAB),
    }
    x, y = (jnp.asarray(t.numpy()) for t in data(shape))

    def cell(w, state, x_t):
        a = w["W_xh"][x_t] + w["b"][: G * H]
        b = state[0] @ w["W_hh"] + w["b"][G * H :]
        if shape.cell == "elman":
            return (jnp.tanh(a + b),)
        if shape.cell == "gru":
            r, z = jnp.split(jax.nn.sigmoid(a[:, : 2 * H] + b[:, : 2 * H]), 2, 1)
            n = jnp.tanh(a[:, 2 * H :] + r * b[:, 2 * H :])
            return ((1 - z) * n + z * state[0],)
        i, f, g, o = jnp.split(a + b, 4, 1)
        c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    def loss(w):
        state = tuple(jnp.zeros((shape.B, H)) for _ in range(2 if shape.cell == "lstm" else 1))

        def step(state, x_t):
            state = cell(w, state, x_t)
            return state, state[0]

        _, hs = jax.lax.scan(step, state, x)
        logits = hs @ w["W_hq"] + w["b_q"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1).mean()

    @jax.jit
    def update(w):
        g = jax.grad(loss)(w)
        norm = jnp.sqrt(sum((d**2).sum() for d in jax.tree.leaves(g)))
        return jax.tree.map(lambda p, d: p - 0.1 * d / jnp.maximum(norm, 1), w, g)

    def run() -> None:
        nonlocal w
        w = jax.block_until_ready(update(w))

    return run


def recurrence_only(shape: Shape, home: object, backwards: bool) -> Callable[[], object]:
    rnn = getattr(home, MODULES[shape.cell])(VOCAB, shape.H)
    x, _ = data(shape)
    x = x if home is elman.nn else one_hots(x)
    pull = torch.randn(shape.T, shape.B, shape.H)

    def run() -> None:
        os.environ["ELMAN_KERNELS"] = "auto"
        with torch.set_grad_enabled(backwards):
            ys, _ = rnn(x)
        if backwards:
            ys.backward(pull)

    return run


def writer(shape: Shape, home: object) -> Callable[[], object]:
    """The likeliest token, read back in, T times over: one text, one token at a time."""
    rnn, out = getattr(home, MODULES[shape.cell])(VOCAB, shape.H), torch.nn.Linear(shape.H, VOCAB)
    rnn.eval()

    @torch.no_grad()
    def theirs() -> None:
        x, h = torch.zeros(1, 1, dtype=torch.int64), None
        for _ in range(shape.T):
            ys, h = rnn(one_hots(x), h)
            x = out(ys).argmax(-1)

    def ours() -> None:
        os.environ["ELMAN_KERNELS"] = "auto"
        step, x = Stepper(rnn, out), torch.zeros(1, dtype=torch.int64)
        for _ in range(shape.T):
            x = step(x).argmax(-1)

    return ours if home is elman.nn else theirs


def large_product(shape: Shape) -> Callable[[], object]:
    """One large product, as many multiply-adds as the shape's step."""
    n = 1024
    rows = max(1, round(shape.B * shape.T * shape.multiply_adds() / n**2))
    a, b = torch.randn(rows, n), torch.randn(n, n)
    return lambda: a @ b


PRESETS = {
    "quick": ("quick", Size(200_000, 80)),
    "best": ("best", Size(200_000, 80)),
    "auto, a short text": ("auto", Size(180_000, 80)),
    "auto, a long text": ("auto", Size(900_000, 80)),
    "auto, words": ("auto", Size(200_000, 5_000)),
}
"""Presets, and the size of the text that they are for."""


def of_preset(name: str, size: Size) -> tuple[dict[str, Callable[[], object]], int]:
    """A preset's update natively and in pieces, beside the floor; and the tokens it reads.

    The floor multiplies the embedding at every step, which a native update may not have to.
    """
    options = presets.expand(name, {"source": ""}, size)
    cell, B, T, H = (options[key] for key in ("model", "batch_size", "window", "hidden_size"))
    ids = torch.randint(size.vocab_size, (100_000,))

    def training() -> Training:
        torch.manual_seed(0)
        model = LanguageModel.from_config(presets.model(options, size.vocab_size))
        return Training(model, ids, None, presets.settings(options))

    pieces, whole = training(), training()
    pieces._choice = pieces._choice._replace(update=None)
    work = 3 * (GATES[cell] * H * (H + options["embedding_size"]) + size.vocab_size * H)
    a, b = torch.randn(round(B * T * work / 1024**2), 1024), torch.randn(1024, 1024)
    runs = {"in pieces": pieces.update, "elman cpu": whole.update, "floor": lambda: a @ b}
    return runs, B * T


def contestants(shape: Shape, quick: bool) -> dict[str, Callable[[], object]]:
    every = {
        "from scratch": lambda: from_scratch(shape),
        "torch.nn": lambda: torch_nn(shape),
        "torch.compile": lambda: torch_nn(shape, compiled=True),
        "jax scan": lambda: jax_scan(shape),
        "elman reference": lambda: ours(shape, "reference"),
        "elman cpu": lambda: ours(shape, "cpu"),
        "elman bfloat16": lambda: ours(shape, "cpu", bfloat16=True),
        "floor": lambda: large_product(shape),
    }
    if shape.cell != "elman":
        del every["from scratch"]
    if cpu.KERNEL.variant(cpu.HALF) is None:
        del every["elman bfloat16"]
    if quick:
        del every["torch.compile"], every["jax scan"]
    return {name: made for name, make in every.items() if (made := tried(name, make))}


def tried(name: str, make: Callable[[], Callable[[], object]]) -> Callable[[], object] | None:
    """A contestant, warmed up; a peer that is not installed stays away and says so."""
    try:
        run = make()
        for _ in range(3):
            run()
    except ModuleNotFoundError as missing:
        print(f"  {name}: absent, {missing}")
        return None
    return run


def measure(
    runs: dict[str, Callable[[], object]],
    tokens: int,
    rounds: int,
    seconds: float,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Tokens per second of every contestant in every round."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run()  # the caches and threads are the contestant's own again
            start, steps = clock(), 0
            while (taken := clock() - start) < seconds:
                run()
                steps += 1
            rates[name].append(steps * tokens / taken)
    return rates


def over(rates: dict[str, list[float]], one: str, other: str) -> float:
    """How many times as fast, in the median round."""
    return statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True))


def report(title: str, rates: dict[str, list[float]]) -> dict[str, object]:
    medians = {name: statistics.median(r) for name, r in rates.items()}
    peers = {name: m for name, m in medians.items() if name not in (*OURS, "elman", "floor")}
    best = max(peers, key=lambda name: peers[name])
    print(f"\n{title}: tokens/s, median of {len(next(iter(rates.values())))} rounds")
    for name, median in medians.items():
        low, high = min(rates[name]), max(rates[name])
        ratio = f"{over(rates, name, best):5.2f} × {best}" if name != best else ""
        floor = f"{100 * over(rates, name, 'floor'):4.0f} % of floor" if "floor" in rates else ""
        print(f"  {name:16} {median:10,.0f}  ({low:,.0f} to {high:,.0f})  {floor:14} {ratio}")
    return {"job": title, "best_peer": best, "median": medians, "rounds": rates}


def jobs(quick: bool) -> list[Shape]:
    sizes = [(32, 35, 256)] if quick else [(32, 35, 256), (32, 35, 512), (64, 256, 128)]
    return [Shape(cell, *size) for size in sizes for cell in MODULES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--quick", action="store_true", help="one size, fewer peers and rounds")
    parser.add_argument("--json", metavar="FILE", help="write every round here as well")
    parser.add_argument("--only", metavar="WORD", default="", help="jobs whose title has WORD")
    parser.add_argument("--busy", action="store_true", help="one thread, in processor time")
    options = parser.parse_args()
    if options.busy:
        torch.set_num_threads(1)
    clock = time.process_time if options.busy else time.perf_counter
    rounds, seconds = (5, 0.1) if options.quick else (9, 0.25)
    how = "processor time" if options.busy else "wall clock"
    threads, variant = torch.get_num_threads(), cpu.KERNEL.variant()
    print(f"torch {torch.__version__}, {threads} threads, {variant}, {how}")
    found = []

    def run(title: str, make: Callable[[], dict[str, Callable[[], object]]], tokens: int) -> None:
        if options.only in title:
            found.append(report(title, measure(make(), tokens, rounds, seconds, clock)))

    for shape in jobs(options.quick):
        tokens = shape.B * shape.T
        run(f"training {shape}", lambda s=shape: contestants(s, options.quick), tokens)
        for name, backwards in (("forward", False), ("forward and backward", True)):
            make = {"torch.nn": torch.nn, "elman": elman.nn}
            run(
                f"{name} {shape}",
                lambda s=shape, b=backwards, m=make: {
                    who: recurrence_only(s, home, b) for who, home in m.items()
                },
                tokens,
            )
    for title, preset in PRESETS.items():
        if options.only in f"preset {title}":
            runs, tokens = of_preset(*preset)
            run(f"preset {title}", lambda r=runs: r, tokens)
    for cell in MODULES:
        shape = Shape(cell, 1, 256, 256)
        run(
            f"generation {shape}",
            lambda s=shape: {
                "torch.nn": writer(s, torch.nn),
                "elman": writer(s, elman.nn),
            },
            shape.T,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
