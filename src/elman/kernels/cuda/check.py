"""Does the CUDA kernel compute the recurrence? `python -m elman.kernels.cuda.check` on a GPU says.

Random jobs (cells, dtypes, shapes, carries, lengths) against the reference kernel in float64, and,
where cuDNN runs the same job, against cuDNN's error in the same dtype. Needs torch alone.
"""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from elman.cells import Layer, State
from elman.kernels import Kernel, fused, reference
from elman.kernels.cuda import DTYPES, KERNEL, compiled, machine
from elman.kernels.cuda.plan import GATES, cheapest

TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 2e-3}
"""‖ours - exact‖ / ‖exact‖: what rounding in each dtype costs, with room for long sequences."""
SLACK = 1.25
"""How much worse than cuDNN, by chance of rounding alone, one array of one job may come out."""
KINK = 10
"""Where one activation decides a gradient, its rounding does: a relu near 0, a few units."""


@dataclass(frozen=True)
class Job:
    """One random job, rebuilt from its seed."""

    cell: str
    dtype: torch.dtype
    steps: int
    batch: int
    size: int
    inputs: int
    ids: bool = False
    bias: bool = True
    lengths: bool = False
    xi: int = 0  # 0: none, 1: (T,), 2: (T, B)
    seed: int = 0

    @property
    def has_peer(self) -> bool:
        """Whether cuDNN runs this job."""
        return self.cell != "linear" and not (self.ids or self.lengths or self.xi)


def jobs(count: int, seed: int, sizes: tuple[int, ...]) -> list[Job]:
    """`count` random jobs with hidden sizes around `sizes`."""
    chance = random.Random(seed)
    return [
        Job(
            cell=chance.choice(list(GATES)),
            dtype=chance.choice(list(TOLERANCE)),
            steps=chance.choice((1, 2, 3, 5, 8, 13)),
            batch=chance.choice((1, 3, 8, 11, 16, 37)),
            size=chance.choice(sizes),
            inputs=chance.choice((1, 5, 16, 28, 64)),
            ids=chance.random() < 0.25,
            bias=chance.random() < 0.8,
            lengths=chance.random() < 0.3,
            xi=chance.choice((0, 0, 1, 2)),
            seed=i,
        )
        for i in range(count)
    ]


@dataclass(frozen=True)
class Material:
    """The tensors of a job, on the CPU in float64 but with values its dtype can hold."""

    w: Layer
    xs: Tensor
    state: State
    dhs: Tensor
    dstate: State
    xi: Tensor | None
    lengths: Tensor | None

    def to(self, dtype: torch.dtype, device: str) -> Material:
        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, dtype if x.is_floating_point() else x.dtype)

        def moved(x: Tensor) -> Tensor:
            return x.to(device, dtype if x.is_floating_point() else x.dtype)

        return Material(
            Layer(*map(move, self.w)),  # pyright: ignore[reportArgumentType]
            moved(self.xs),
            tuple(map(moved, self.state)),
            moved(self.dhs),
            tuple(map(moved, self.dstate)),
            None if self.xi is None else self.xi.to(device),
            move(self.lengths),
        )


def material(job: Job) -> Material:
    """Random tensors, W_hh with orthogonal blocks so that gradients live to the first step."""
    g = torch.Generator().manual_seed(job.seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        x = scale * torch.randn(*shape, generator=g, dtype=torch.float64)
        return x.to(job.dtype).double()

    gates, H, T, B = GATES[job.cell], job.size, job.steps, job.batch
    W_hh = [torch.linalg.qr(normal(H, H))[0] for _ in range(gates)]
    w = Layer(
        normal(gates * H, job.inputs, scale=0.5),
        torch.cat(W_hh).to(job.dtype).double(),
        normal(gates * H, scale=0.1) if job.bias else None,
        normal(gates * H, scale=0.1) if job.bias else None,
    )
    ids = torch.randint(job.inputs, (T, B), generator=g)
    states = 2 if job.cell == "lstm" else 1
    xi = torch.rand(T, B, generator=g).mul(3).floor()  # 0, 1 or 2
    return Material(
        w,
        ids if job.ids else normal(T, B, job.inputs),
        tuple(normal(B, H) for _ in range(states)),
        normal(T, B, H),
        tuple(normal(B, H) for _ in range(states)),
        (None, xi[:, 0], xi)[job.xi],
        torch.randint(0, T + 1, (B,), generator=g) if job.lengths else None,
    )


Answers = dict[str, Tensor]


def answers(kernel: Kernel, job: Job, m: Material) -> Answers:
    """Everything a kernel computes for a job, by name."""
    trace = kernel.forward(job.cell, m.w, m.xs, m.state, m.lengths)
    dxs, dw, dstate = kernel.backward(job.cell, m.w, m.xs, trace, m.dhs, m.dstate, m.xi, m.lengths)
    found = {"hs": trace.hs, "cs": trace.cs, "dxs": dxs, **dw._asdict()}
    found |= {f"dstate{i}": d for i, d in enumerate(dstate)}
    return {name: x for name, x in found.items() if x is not None}


def peer_answers(job: Job, m: Material) -> Answers:
    """The same from torch.nn, that is from cuDNN."""
    kind = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}.get(job.cell, torch.nn.RNN)
    extra = {} if job.cell in ("gru", "lstm") else {"nonlinearity": job.cell}
    rnn = kind(job.inputs, job.size, bias=job.bias, **extra, device=m.xs.device, dtype=job.dtype)
    with torch.no_grad():
        for p, value in zip(rnn.parameters(), (x for x in m.w if x is not None), strict=True):
            p.copy_(value)
    xs = m.xs.detach().requires_grad_()
    state = [s.detach()[None].requires_grad_() for s in m.state]
    ys, last = rnn(xs, tuple(state) if len(state) > 1 else state[0])
    last = last if isinstance(last, tuple) else (last,)
    torch.autograd.backward([ys, *last], [m.dhs, *(d[None] for d in m.dstate)])
    names = [n for n, x in zip(Layer._fields, m.w, strict=True) if x is not None]
    found = {n: p.grad for n, p in zip(names, rnn.parameters(), strict=True)}
    found |= {f"dstate{i}": None if s.grad is None else s.grad[0] for i, s in enumerate(state)}
    found |= {"hs": torch.cat([state[0], ys]), "dxs": xs.grad}
    return {n: x for n, x in found.items() if x is not None}


def errors(found: Answers, exact: Answers) -> dict[str, float]:
    """‖found - exact‖ / ‖exact‖ of each array."""
    return {
        name: float(
            (x.detach().cpu().double() - exact[name]).norm() / exact[name].norm().clamp_min(1e-30)
        )
        for name, x in found.items()
    }


def faults(job: Job, kernel: Kernel = KERNEL) -> list[str]:
    """What is wrong with the kernel's answers to this job; nothing, one hopes."""
    m = material(job)
    on_gpu = m.to(job.dtype, "cuda")
    if reason := kernel.refuses(job.cell, on_gpu.w, on_gpu.xs, on_gpu.state):
        return [f"refused: {reason}"]
    exact = answers(reference.KERNEL, job, m)
    first, second = answers(kernel, job, on_gpu), answers(kernel, job, on_gpu)
    wrong = [f"{n} differs between two runs" for n in first if not torch.equal(first[n], second[n])]
    ours = errors(first, exact)
    limit = TOLERANCE[job.dtype] * _leniency(job)
    wrong += [f"{n} is off by {e:.1e}" for n, e in ours.items() if not e <= limit]
    return wrong + (worse_than_peer(job, on_gpu, ours, exact) if job.has_peer else [])


def worse_than_peer(job: Job, m: Material, ours: dict[str, float], exact: Answers) -> list[str]:
    """Where cuDNN is clearly nearer, unless it ran in full float32, as it does on small layers."""
    theirs = errors(peer_answers(job, m), exact)
    if job.dtype == torch.float32 and min(theirs.values()) < 1e-5:
        return []
    slack = SLACK * _leniency(job)
    return [
        f"{n} is off by {ours[n]:.1e}, cuDNN by {e:.1e}"
        for n, e in theirs.items()
        if ours[n] > slack * e + TOLERANCE[job.dtype] / 50
    ]


def _leniency(job: Job) -> float:
    """Single activations decide at a relu's kink, and in a layer of a few units."""
    return (KINK if job.cell == "relu" else 1) * (KINK if job.size < 16 else 1)


def compile_ahead(todo: list[Job]) -> None:
    """Compile what the jobs will need, on all cores."""
    here = machine(torch.cuda.current_device())
    needed = {
        (plan, DTYPES[job.dtype])
        for job in todo
        for way in ("forward", "backward")
        if (plan := cheapest(job.cell, way, job.size, job.dtype.itemsize, job.batch, here))
    }
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda need: compiled(*need), needed):
            pass


def main() -> int:
    """Check many jobs and say which went wrong."""
    small, large = (1, 5, 16, 33, 64, 100), (128, 200, 256, 300, 384, 512)
    todo = jobs(80, 0, small) + jobs(90, 1, large) + jobs(6, 2, (1024,))
    compile_ahead(todo)
    bad = refused = 0
    for job in todo:
        wrong = faults(job)
        if wrong and wrong[0].startswith("refused"):
            refused += 1
            wrong = faults(job, fused.KERNEL)
        if wrong:
            bad += 1
            print(job, *wrong, sep="\n    ", flush=True)
    print(f"{len(todo) - bad} of {len(todo)} jobs right ({refused} of them on the fused kernel)")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
