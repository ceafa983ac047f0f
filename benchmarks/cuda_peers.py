"""Other ways to run a recurrent layer on a GPU, for cuda_kernels.py to time.

A loop over time under `torch.compile`, JAX's `lax.scan`, and FlashRNN. In all of them the input's
share of the gates is one large product before the loop, as in elman.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GATES = {"tanh": 1, "gru": 3, "lstm": 4, "slstm": 4}


def step(lib: Any, cell: str, x: Any, u: Any, h: Any, c: Any) -> tuple[Any, Any]:
    """New h and c from the input's share x and u = W_hh h + b_hh, in torch or in JAX."""
    tanh, sigmoid = lib.tanh, lib.sigmoid
    if cell == "tanh":
        return tanh(x + u), c
    x, u = (lib.chunks(a, GATES[cell]) for a in (x, u))
    if cell == "gru":
        r, z = sigmoid(x[0] + u[0]), sigmoid(x[1] + u[1])
        n = tanh(x[2] + r * u[2])
        return n + z * (h - n), c
    i, f, g, o = (a + b for a, b in zip(x, u, strict=True))
    c = sigmoid(f) * c + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c


class InTorch:
    """What `step` needs of torch."""

    tanh, sigmoid = torch.tanh, torch.sigmoid

    @staticmethod
    def chunks(a: Tensor, n: int) -> tuple[Tensor, ...]:
        return a.chunk(n, -1)


class CompiledLoop(torch.nn.Module):
    """A loop over time, one step a compiled function."""

    def __init__(self, cell: str, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        cells = {"tanh": torch.nn.RNNCell, "gru": torch.nn.GRUCell, "lstm": torch.nn.LSTMCell}
        self.p = cells[cell](hidden, hidden, device="cuda", dtype=dtype)
        self.cell = cell
        torch._dynamo.reset()  # else a second shape is compiled for all shapes, which is slower
        self.step = torch.compile(self._step)

    def _step(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        u = torch.nn.functional.linear(h, self.p.weight_hh, self.p.bias_hh)
        return step(InTorch, self.cell, x, u, h, c)

    def forward(self, xs: Tensor) -> tuple[Tensor, Tensor]:
        shares = torch.nn.functional.linear(xs, self.p.weight_ih, self.p.bias_ih)
        h, hs = xs.new_zeros(xs.shape[1], self.p.hidden_size), []
        c = h
        for x in shares.unbind(0):
            h, c = self.step(x, h, c)
            hs.append(h)
        return torch.stack(hs), h


def jax_calls(cell: str, batch: int, steps: int, hidden: int) -> dict[str, Callable[[], object]]:
    """`lax.scan` in bf16, jitted: forward, and forward with the gradients of weights and inputs."""
    import jax
    import jax.numpy as jnp

    class InJax:
        tanh, sigmoid = jnp.tanh, jax.nn.sigmoid

        @staticmethod
        def chunks(a: Any, n: int) -> Any:
            return jnp.split(a, n, -1)

    def run(w: Any, xs: Any) -> Any:
        def one(state: Any, x: Any) -> Any:
            h, c = step(InJax, cell, x, state[0] @ w[1] + w[3], *state)
            return (h, c), h

        zero = jnp.zeros((batch, hidden), jnp.bfloat16)
        return jax.lax.scan(one, (zero, zero), xs @ w[0] + w[2], unroll=4)[1]

    def drawn(key: Any, *shape: int, scale: float = 1.0) -> Any:
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(scale)

    keys, gates = jax.random.split(jax.random.PRNGKey(0), 6), GATES[cell]
    w = [drawn(key, hidden, gates * hidden, scale=hidden**-0.5) for key in keys[:2]]
    w += [drawn(key, gates * hidden, scale=hidden**-0.5) for key in keys[2:4]]
    xs, dys = (drawn(key, steps, batch, hidden) for key in keys[4:])
    forward = jax.jit(run)
    both = jax.jit(lambda w, xs, dys: jax.vjp(run, w, xs)[1](dys))
    return {
        "forward": lambda: jax.block_until_ready(forward(w, xs)),
        "forward+backward": lambda: jax.block_until_ready(both(w, xs, dys)),
    }


class FlashRNN(torch.nn.Module):
    """FlashRNN's fused CUDA kernels (elman, lstm, slstm); `flashrnn` must be importable."""

    def __init__(self, cell: str, hidden: int, dtype: torch.dtype, heads: int = 1) -> None:
        super().__init__()
        gates, each = GATES[cell], hidden // heads
        self.run, self.function = _flashrnn(), {"tanh": "elman"}.get(cell, cell)

        def parameter(*shape: int) -> torch.nn.Parameter:
            x = torch.randn(*shape, device="cuda", dtype=dtype)
            return torch.nn.Parameter(x * hidden**-0.5)

        self.W_ih = parameter(gates * hidden, hidden)
        self.R = parameter(gates, heads, each, each)
        self.b = parameter(gates, heads, each)

    def forward(self, xs: Tensor) -> tuple[Tensor, Tensor]:
        shares = torch.nn.functional.linear(xs, self.W_ih)
        shares = shares.unflatten(-1, (*self.R.shape[:2], -1)).transpose(0, 1)
        states, last = self.run(shares, self.R, self.b, function=self.function)
        return states[0].flatten(2).transpose(0, 1), last


def _flashrnn() -> Callable[..., tuple[Tensor, Tensor]]:
    """FlashRNN's entry, its reader of the GPU's limits (not for CUDA 13) replaced by torch's."""
    home: Any = importlib.import_module("flashrnn.flashrnn.flashrnn")
    gpu = torch.cuda.get_device_properties(0)
    home.get_gpu_info = lambda device_id: {
        "maxThreadsPerBlock": 1024,
        "regsPerMultiprocessor": gpu.regs_per_multiprocessor,
        "multiProcessorCount": gpu.multi_processor_count,
        "sharedMemPerBlockOptin": gpu.shared_memory_per_block_optin,
    }
    return home.flashrnn
