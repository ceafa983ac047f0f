"""Described cells beside built-in ones and beside a module run step by step, both ways.

    python benchmarks/cells.py [--quick] [--threads 2] [--busy] [--json FILE]
    python benchmarks/cells.py --device cuda [--quick] [--flashrnn] [--json FILE]

One process, interleaved, best of many; `--busy` is for a machine with other work: one thread, and
processor time instead of the clock on the wall. `stepwise` is `elman.nn.Recurrent` on a module with
the same equations: what a cell of one's own costs without a description. On a GPU (H 512, B 64,
T 1024, bfloat16) also a loop over `torch.compile` of the step, JAX's scan where it is installed,
and how long a cell that nobody has run before takes to compile; with `--flashrnn`, where it can be
imported and nvcc is there, FlashRNN's own sLSTM.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import elman
from cuda_kernels import graphed, milliseconds, work
from cuda_peers import FlashRNN
from elman.cells import Cell, named
from elman.cells.described import Described
from elman.kernels.cuda import BF16, compiled, machine
from elman.kernels.cuda.plan import cheapest


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
        return self.from_h.weight.new_zeros(batch, self.hidden)

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


# ---------------------------------------------------------------------- on a GPU


class CompiledLoop(nn.Module):
    """A loop over time, one step of a described cell's own function under `torch.compile`.

    The input's share is one large product before it, and heads are multiplied by themselves.
    """

    def __init__(self, cell: Cell, inputs: int, hidden: int) -> None:
        super().__init__()
        assert isinstance(cell, Described)
        self.cell, self.heads, size = cell, max(cell.heads, 1), hidden // max(cell.heads, 1)
        self.W_ih = nn.Parameter(torch.randn(cell.gates * hidden, inputs) * hidden**-0.5)
        self.W_hh = nn.Parameter(torch.randn(self.heads, size, cell.gates * size) * size**-0.5)
        self.b_ih = nn.Parameter(torch.zeros(cell.gates * hidden))
        self.b_hh = nn.Parameter(torch.zeros(cell.gates * hidden))
        self.hidden = hidden
        torch._dynamo.reset()
        self.step = torch.compile(self._step)

    def _step(self, x: Tensor, *state: Tensor) -> Any:
        gates, h = self.cell.gates, state[0]
        if self.heads == 1:
            a_h = torch.addmm(self.b_hh, h, self.W_hh[0]).chunk(gates, -1)
        else:
            parts = torch.bmm(h.view(len(h), self.heads, -1).transpose(0, 1), self.W_hh)
            parts = parts.unflatten(-1, (gates, -1)).permute(2, 1, 0, 3).reshape(gates, len(h), -1)
            a_h = list(parts + self.b_hh.view(gates, 1, -1))
        after = self.cell.function(x.chunk(gates, -1), a_h, *state)
        return after if isinstance(after, tuple) else (after,)

    def forward(self, xs: Tensor) -> tuple[Tensor, Any]:
        shares = linear(xs, self.W_ih, self.b_ih)
        state = tuple(xs.new_zeros(xs.shape[1], self.hidden) for _ in range(self.cell.count))
        hs = []
        for x in shares.unbind(0):
            state = self.step(x, *state)
            hs.append(state[0])
        return torch.stack(hs), state


def jax_mgu(hidden: int, rows: int, steps: int) -> Callable[[], object] | None:
    """The minimal gated unit under JAX's scan, forward and backward; None without JAX."""
    try:
        import jax
        import jax.numpy as jnp
    except ModuleNotFoundError:
        return None

    def run(w: Any, xs: Any) -> Any:
        def one(h: Any, x: Any) -> Any:
            (x_f, x_n), (h_f, h_n) = jnp.split(x, 2, -1), jnp.split(h @ w[1] + w[2], 2, -1)
            f = jax.nn.sigmoid(x_f + h_f)
            h = h + f * (jnp.tanh(x_n + f * h_n) - h)
            return h, h

        return jax.lax.scan(one, jnp.zeros((rows, hidden), jnp.bfloat16), xs @ w[0], unroll=4)[1]

    def drawn(key: Any, *shape: int) -> Any:
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(hidden**-0.5)

    keys = jax.random.split(jax.random.PRNGKey(0), 5)
    w = [drawn(key, hidden, 2 * hidden) for key in keys[:2]] + [drawn(keys[2], 2 * hidden)]
    xs, dys = (drawn(key, steps, rows, hidden) for key in keys[3:])
    both = jax.jit(lambda w, xs, dys: jax.vjp(run, w, xs)[1](dys))
    return lambda: jax.block_until_ready(both(w, xs, dys))


def best_of(call: Callable[[], None], seconds: float) -> dict[str, float]:
    """Milliseconds of a call as it is, and captured in a CUDA graph where it can be."""
    took = {"eager": milliseconds(call, seconds)}
    try:
        took["graph"] = milliseconds(graphed(call), seconds)
    except RuntimeError as reason:  # a step at a time reads numbers back
        print(f"    no graph: {str(reason).splitlines()[0][:90]}")
        torch.cuda.synchronize()
    return took


def on_a_gpu(seconds: float, flashrnn: bool) -> dict[str, Any]:
    """All comparisons of H 512, B 64, T 1024 in bfloat16, each for so long."""
    hidden, rows, steps = 512, 64, 1024
    os.environ["ELMAN_KERNELS"] = "cuda"  # never cuDNN instead
    xs = torch.randn(steps, rows, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dys = torch.randn_like(xs)
    done: dict[str, Any] = {"hidden": hidden, "rows": rows, "steps": steps}

    def timed(name: str, module: nn.Module, backward: bool = True) -> float:
        took = best_of(work(module.to("cuda", torch.bfloat16), xs, dys, backward), seconds)
        what = "forward+backward" if backward else "forward"
        done.setdefault(what, {})[name] = took
        words = ", ".join(f"{how} {ms:8.3f} ms" for how, ms in took.items())
        print(f"{name:22} {what:16} {words}", flush=True)
        return min(took.values())

    for backward in (True, False):
        twins = {name: m for name, m in modules(hidden, hidden).items() if "mgu" not in name}
        best = {name: timed(name, module, backward) for name, module in twins.items()}
        for name in ("tanh", "gru", "lstm"):
            print(f"    {name}, described: {best[name] / best[f'{name}, described']:.3f}x as fast")
    done["compile seconds"] = new_cell_seconds(hidden, rows)
    for name in ("mgu", "slstm"):
        ours = timed(name, elman.nn.Layers(name, hidden, hidden))
        looped = timed(f"{name}, compiled loop", CompiledLoop(named(name), hidden, hidden))
        print(f"    {name}: {looped / ours:.2f}x the compiled loop", flush=True)
        if name == "mgu" and (scan := jax_mgu(hidden, rows, steps)):
            done["jax"] = took = milliseconds(scan, seconds, wall=True)
            print(f"    mgu: {took / ours:.2f}x JAX's scan, {took:.3f} ms", flush=True)
        if name == "mgu":
            alone = timed("mgu, stepwise", elman.nn.Recurrent(Stepwise(hidden, hidden)))
            print(f"    mgu: {alone / ours:.1f}x stepwise", flush=True)
        if name == "slstm" and flashrnn:
            peer = FlashRNN(name, hidden, torch.bfloat16, heads=4)  # never captured
            took = milliseconds(work(peer, xs, dys, True), seconds)
            done["forward+backward"]["slstm, FlashRNN"] = {"eager": took}
            print(f"    slstm: {took / ours:.2f}x FlashRNN, {took:.3f} ms", flush=True)
    return done


def new_cell_seconds(hidden: int, rows: int) -> dict[str, float]:
    """From a function that nobody has run before to both kernels' machine code."""
    odd = 1 + time.time_ns() % 997 / 1e4  # no cache has it

    @elman.cell(gates=2, name="never_seen")
    def never_seen(a_x: Any, a_h: Any, h: Tensor) -> Tensor:
        f = torch.sigmoid(odd * (a_x[0] + a_h[0]))
        return h + f * (torch.tanh(a_x[1] + f * a_h[1]) - h)

    took = {}
    for way in ("forward", "backward"):
        began = time.perf_counter()
        plan = cheapest(never_seen, way, hidden, 2, rows, machine(0))
        assert plan is not None
        compiled(plan, BF16)
        took[way] = time.perf_counter() - began
        print(f"a new cell, {way}: compiled in {took[way]:.2f} s", flush=True)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the times here")
    parser.add_argument("--busy", action="store_true", help="one thread, processor time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--flashrnn", action="store_true", help="also FlashRNN's sLSTM")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        found = on_a_gpu(0.2 if arguments.quick else 1.0, arguments.flashrnn)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        return
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
