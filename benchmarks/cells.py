"""Described cells beside built-in ones and beside a module run step by step, both ways.

    python benchmarks/cells.py [--quick] [--threads 2] [--busy] [--json FILE]

One process, interleaved, best of many; `--busy` is for a machine with other work: one thread, and
processor time instead of the clock on the wall. `stepwise` is `elman.nn.Recurrent` on a module with
the same equations: what a cell of one's own costs without a description.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import elman


@elman.cell()
def described_tanh(a_x: Any, a_h: Any, h: Tensor) -> Tensor:
    return torch.tanh(a_x[0] + a_h[0])


@elman.cell(gates=3)
def described_gru(a_x: Any, a_h: Any, h: Tensor) -> Tensor:
    r, z = torch.sigmoid(a_x[0] + a_h[0]), torch.sigmoid(a_x[1] + a_h[1])
    n = torch.tanh(a_x[2] + r * a_h[2])
    return n + z * (h - n)


@elman.cell(gates=4, states=2)
def described_lstm(a_x: Any, a_h: Any, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (x + y for x, y in zip(a_x, a_h, strict=True))
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


CLOCK = [time.perf_counter]


class Stepwise(nn.Module):
    """The minimal gated unit as anybody would write it."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.from_x, self.from_h = nn.Linear(inputs, 2 * hidden), nn.Linear(hidden, 2 * hidden)

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, self.hidden)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        x_f, x_n = self.from_x(x).chunk(2, -1)
        h_f, h_n = self.from_h(h).chunk(2, -1)
        f = torch.sigmoid(x_f + h_f)
        return h + f * (torch.tanh(x_n + f * h_n) - h)


def modules(inputs: int, hidden: int) -> dict[str, nn.Module]:
    return {
        "tanh": elman.nn.RNN(inputs, hidden),
        "tanh, described": elman.nn.Layers("described_tanh", inputs, hidden),
        "gru": elman.nn.GRU(inputs, hidden),
        "gru, described": elman.nn.Layers("described_gru", inputs, hidden),
        "lstm": elman.nn.LSTM(inputs, hidden),
        "lstm, described": elman.nn.Layers("described_lstm", inputs, hidden),
        "mgu, stepwise": elman.nn.Recurrent(Stepwise(inputs, hidden)),
        "mgu, described": elman.nn.Layers("mgu", inputs, hidden),
    }


def seconds(hidden: int, rows: int, steps: int, repeats: int) -> dict[str, float]:
    """The best time of each, taken in turns."""
    best: dict[str, float] = {}
    xs, runs = torch.randn(steps, rows, 28), modules(28, hidden)
    for _ in range(repeats):
        for name, module in runs.items():
            began = CLOCK[0]()
            module(xs)[0].sum().backward()
            best[name] = min(best.get(name, float("inf")), CLOCK[0]() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the times here")
    parser.add_argument("--busy", action="store_true", help="one thread, processor time")
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.busy else arguments.threads)
    CLOCK[0] = time.process_time if arguments.busy else time.perf_counter
    done = []
    same = {f"{name}, described": name for name in ("tanh", "gru", "lstm")}
    pairs = {**same, "mgu, described": "mgu, stepwise"}
    for hidden, rows, steps in ((256, 32, 35), (64, 16, 100), (256, 1, 200)):
        best = seconds(hidden, rows, steps, 5 if arguments.quick else 40)
        print(f"H {hidden}, B {rows}, T {steps}")
        for mine, other in pairs.items():
            print(
                f"  {mine:16} {best[mine] * 1e3:8.2f} ms, {best[other] / best[mine]:5.2f}x {other}"
            )
        done.append({"hidden": hidden, "rows": rows, "steps": steps, "seconds": best})
    if arguments.json:
        arguments.json.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
