"""What each carry does to the gradient: bias, noise, direction and cost, beside the exact one.

One problem for all: a tanh network with orthogonal recurrent weights, whose gradient is still alive
after a hundred steps, must name its input of some steps ago, at each of T steps. The exact gradient
is that of Full(). For every other carry, over many draws g of the gradient:

    bias    ‖mean(g) - full‖ / ‖full‖         for a random carry, ± its own standard error
    noise   sqrt(mean ‖g - mean(g)‖²) / ‖full‖
    cosine  mean of cos(g, full)
    cost    time of forward and backward, in units of Full()'s

    python benchmarks/carries.py [--quick] [--json [FILE]]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from elman.gradients import Carry, Full, Randomized, Sliding, Truncated
from elman.nn import RNN

CARRIES = [
    Full(),
    Truncated(window=4),
    Truncated(window=16),
    Truncated(window=64),
    Sliding(every=1, steps=16),
    Sliding(every=8, steps=16),
    Sliding(every=8, steps=64),
    Randomized(keep=0.75, seed=0),
    Randomized(keep=0.9375, seed=0),
    Randomized(keep=0.984375, seed=0),
    Randomized(keep=0.984375, seed=0, per_row=True),
    Randomized.polynomial(mean=4, seed=0),
    Randomized.polynomial(mean=16, seed=0),
    Randomized.polynomial(mean=64, seed=0),
    Randomized.polynomial(mean=64, seed=0, per_row=True),
]


class Sizes(NamedTuple):
    steps: int
    batch: int
    hidden: int
    lag: int
    draws: int
    timings: int


FULL_SIZE = Sizes(steps=256, batch=16, hidden=64, lag=24, draws=1000, timings=9)
QUICK = Sizes(steps=96, batch=4, hidden=16, lag=24, draws=50, timings=3)


class Row(NamedTuple):
    carry: str
    bias: float
    bias_error: float
    noise: float
    cosine: float
    cost: float


class Problem:
    """The network, its input and its loss, in float64 so that rounding plays no part."""

    def __init__(self, sizes: Sizes) -> None:
        torch.manual_seed(0)
        self.rnn = RNN(1, sizes.hidden, bias=False, dtype=torch.float64)
        self.readout = torch.nn.Linear(sizes.hidden, 1, dtype=torch.float64)
        self.W_hh = self.rnn.get_parameter("weight_hh_l0")
        torch.nn.init.orthogonal_(self.W_hh)
        self.xs = torch.randn(sizes.steps, sizes.batch, 1, dtype=torch.float64) / 4
        self.targets = torch.cat([torch.zeros_like(self.xs[: sizes.lag]), self.xs[: -sizes.lag]])

    def loss(self) -> Tensor:
        ys, _ = self.rnn(self.xs)
        return (self.readout(ys) - self.targets).square().mean()

    def gradient(self, carry: Carry) -> Tensor:
        """The recurrent weights' gradient under a carry, as one vector."""
        self.rnn.carry = carry
        (dW_hh,) = torch.autograd.grad(self.loss(), [self.W_hh])
        return dW_hh.flatten()


def measure(problem: Problem, carry: Carry, full: Tensor, draws: int, cost: float) -> Row:
    """Bias, noise and direction of a carry, over its draws."""
    count = draws if isinstance(carry, Randomized) else 1
    found = torch.stack([problem.gradient(carry) for _ in range(count)])
    mean = found.mean(0)
    noise = (found - mean).square().sum(1).mean().sqrt() / full.norm()
    return Row(
        name(carry),
        bias=float((mean - full).norm() / full.norm()),
        bias_error=float(noise) / (count - 1) ** 0.5 if count > 1 else 0.0,
        noise=float(noise),
        cosine=float(torch.cosine_similarity(found, full[None]).mean()),
        cost=cost,
    )


def costs(problem: Problem, timings: int) -> list[float]:
    """Median time of forward and backward of each carry, in turns, over that of Full()."""
    taken: list[list[float]] = [[] for _ in CARRIES]
    for _ in range(timings):
        for times, carry in zip(taken, CARRIES, strict=True):
            start = time.perf_counter()
            problem.gradient(carry)
            times.append(time.perf_counter() - start)
    medians = [statistics.median(times) for times in taken]
    return [m / medians[0] for m in medians]


def name(carry: Carry) -> str:
    said = repr(carry).replace("keep=Polynomial(", "polynomial(").replace(", seed=0", "")
    return said.replace(", per_row=False", "")


def table(rows: list[Row]) -> str:
    width = max(len(row.carry) for row in rows)
    lines = [f"{'carry':<{width}}  {'bias':>15}  {'noise':>8}  {'cosine':>7}  {'cost':>6}"]
    for row in rows:
        error = f" ± {row.bias_error:.3f}" if row.bias_error else " " * 8
        lines.append(
            f"{row.carry:<{width}}  {row.bias:>7.3f}{error:<8}  {row.noise:>8.3g}"
            f"  {row.cosine:>7.3f}  {row.cost:>6.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a smaller problem, fewer draws")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL_SIZE
    problem = Problem(sizes)
    full = problem.gradient(Full())
    cost = costs(problem, sizes.timings)
    rows = [
        measure(problem, carry, full, sizes.draws, c)
        for carry, c in zip(CARRIES, cost, strict=True)
    ]
    report = {
        "sizes": sizes._asdict(),
        "torch": torch.__version__,
        "rows": [row._asdict() for row in rows],
    }
    if options.json == "-":
        json.dump(report, sys.stdout, indent=2)
        return
    print(f"T={sizes.steps}, batch {sizes.batch}, hidden {sizes.hidden}, {sizes.draws} draws\n")
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
