"""The CPU kernel on another processor: cross-compiled for arm64, run by an emulator.

Needs `qemu-user-static` and `g++-aarch64-linux-gnu` (their names on Debian); skipped without them.
"""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, embedding, linear

from elman.cells import Weights, named
from elman.kernels import Piece, cpu
from elman.kernels.bare import Bare
from elman.kernels.cpu import library

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
SOURCES = sorted(Path(cpu.__file__).parent.glob("*.cpp"))
ROUNDING = {torch.float32: 5e-6, torch.float64: 2e-14}  # as in test_cpu_kernel.py


def missing():
    return [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]


class Job:
    """A layer, its inputs (0: numbers, 1: ids, 2: ids of an embedding), output layer and loss."""

    def __init__(self, dtype, cell, inputs, T=5, B=6, I=9, H=20, V=7):  # noqa: E741
        random = torch.Generator().manual_seed(T * B + inputs)

        def normal(*shape):
            return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype).double()

        M, states = named(cell).gates * H, len(named(cell).states)
        names = V if inputs == 2 else I
        self.dtype, self.cell, self.inputs = dtype, cell, inputs
        self.sizes = [dtype == torch.float64, library.CELLS.index(cell), T, B, I, H, inputs, V]
        self.ids = torch.randint(names, (T, B), generator=random)
        self.targets = torch.randint(names, (T, B), generator=random)
        self.xs = normal(*{0: (T, B, I), 1: (0,), 2: (V, I)}[inputs])
        self.w = Weights(normal(M, I) / 3, normal(M, H) / H**0.5, normal(M), normal(M))
        self.state = tuple(normal(B, H) for _ in range(states))
        self.dstate = tuple(torch.zeros(B, H).double() for _ in range(states))
        self.W, self.b = normal(names, H) / 4, normal(names)

    def written(self):
        """As tests/arm64.cpp reads it."""
        ids = [self.ids] if self.inputs else []
        parts = [*ids, self.xs, *self.w[:4], *self.state, *self.dstate, self.W, self.b]
        numbers = [torch.tensor([1.0, *self.sizes]), *parts, self.targets]
        return torch.cat([t.double().reshape(-1) for t in numbers]).numpy().tobytes()

    def expected(self):
        """Everything that comes out, by autograd through a bare loop in float64."""
        wanted = [self.xs, *self.w[:4], *self.state, self.W, self.b]
        leaves = [t.clone().requires_grad_(t.numel() > 0) for t in wanted]
        xs, *rest = leaves
        w, state, (W, b) = Weights(*rest[:4]), tuple(rest[4:-2]), rest[-2:]
        read = {0: xs, 1: self.ids, 2: embedding(self.ids, xs) if self.inputs == 2 else xs}
        trace = Bare(None).forward(Piece(named(self.cell), w, read[self.inputs], state))
        logits = linear(trace.hs[1:], W, b)
        nats = cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        used = [t for t in leaves if t.numel()]
        grads = iter(torch.autograd.grad(nats, used))
        pulls = [next(grads) if t.numel() else t for t in leaves]
        kept = [t for t in (trace.hs, trace.cs) if t is not None]
        return [t.detach() for t in (nats, *kept, *pulls) if t.numel()]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}")
def test_the_kernel_gives_the_references_results_on_arm64(tmp_path):
    program, given, found = (tmp_path / name for name in ("program", "given", "found"))
    flags = ["-std=c++17", "-O2", "-ffp-contract=fast", "-static", "-pthread"]
    source = Path(__file__).with_name("arm64.cpp")
    subprocess.run([COMPILER, *flags, "-o", program, source, *SOURCES], check=True)
    jobs = [
        Job(dtype, cell, inputs, B=rows)
        for dtype in ROUNDING
        for cell in library.CELLS
        for inputs in range(3)
        for rows in (3, 6)  # of up to four rows W_hh is read where it lies
    ]
    given.write_bytes(b"".join(job.written() for job in jobs))
    ran = subprocess.run([EMULATOR, program, given, found], check=True, capture_output=True)
    assert ran.stdout == b"portable\n"
    numbers = torch.from_numpy(np.fromfile(found))
    for job in jobs:
        for exact in job.expected():
            part, numbers = numbers[: exact.numel()].view(exact.shape), numbers[exact.numel() :]
            scale = max(exact.norm(), 0.1 * exact.numel() ** 0.5)
            assert (part - exact).norm() / scale < ROUNDING[job.dtype], (job.cell, job.inputs)
    assert not numbers.numel()
