"""Does the CUDA kernel compute the recurrence? `python tests/cuda_check.py` on a GPU says.

Random jobs (cells, dtypes, shapes, carries, lengths), each run twice and asked for the same bits.
What else is asked follows from how numbers are rounded, not from what was seen:

Rounding. A kernel that stores in a dtype of unit roundoff u changes what it stores by a factor of
at most 1 ± u, and in every step meets a state, gates and gradients so changed. How much of that
reaches an array depends on the job, and can be measured: `Shaken` is the reference in float64 in
which every operand of every step is changed by a factor 1 ± u, the sign at random. A rounding is
off by u at most and by 0.4 u in the root mean square, a shaken operand always by the whole of u;
so a correct kernel stays within the largest error, ‖found - exact‖ / ‖exact‖, of a few shaken
runs: on long sequences, few units and ill-conditioned jobs alike. There is no other tolerance.
(A relu's derivative jumps at 0, where any rounding may fall on either side: its gradients are
compared with those of the function that was computed, that is at the kernel's own h.)

cuDNN. Single arrays are nearer or farther by chance, so errors are compared over many jobs: for
each cell, dtype and array the geometric mean of our error over cuDNN's must be 1.0 or less, that is
not above 1.05 by more than three standard errors of that mean. Needs torch alone.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import sys
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from elman import cells
from elman.cells import Cell, Gradients, State, Weights
from elman.cells.described import Described
from elman.cells.noisy import noisy
from elman.cells.twins import TWINS
from elman.kernels import Kernel, Piece, Pull, Trace, cuda, fused, reference
from elman.kernels.cuda import KERNEL, arithmetic, compiled
from elman.kernels.cuda.equations import CELLS as BUILT_IN

SHIPPED = [c.name for c in cells.CELLS.values() if isinstance(c, Described) and not c.is_users]
TWIN = {f"described {name}": name for name in TWINS}
"""Built-in cells by their equations; the built-in one says what they must compute."""
NOISY = {
    "noisy lstm": noisy(cells.named("lstm"), zoneout=0.25, updates=0.5),
    "noisy slstm": noisy(cells.named("slstm"), zoneout=0.25),
    "noisy mgu": noisy(cells.named("mgu"), updates=0.5),
}
RELU = ("relu", "described relu", "indrnn")


def cell_of(name: str) -> Cell:
    """The cell that a kernel runs under this name."""
    return NOISY.get(name) or (TWINS[TWIN[name]] if name in TWIN else cells.named(name))


def plain_cell(name: str) -> Cell:
    """The same by the reference's own code, where it has one."""
    return (
        cells.named("relu" if name in RELU else TWIN[name])
        if name in (*TWIN, "indrnn")
        else cell_of(name)
    )


ROUNDOFF = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-10}
"""u: half the distance from 1 to the next number; of TF32 the whole, as products may cut."""
ROUNDOFF_OF_THREE = 2**-22  # float32 without TF32: the three products keep 22 bits of an operand
CERTAIN = 3.0  # standard errors beyond which a mean is no chance


@dataclass(frozen=True)
class Case:
    """One random problem, rebuilt from its seed."""

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
    tf32: bool = True  # whether torch's switch allows float32 layers TF32
    seed: int = 0

    @property
    def plain(self) -> bool:
        """Float32 without TF32."""
        return self.dtype == torch.float32 and not self.tf32

    @property
    def roundoff(self) -> float:
        """Of an operand; and of a sum of n products in float32, √n 2⁻²⁴ (Higham and Mary 2019)."""
        operand = ROUNDOFF_OF_THREE if self.plain else ROUNDOFF[self.dtype]
        return math.hypot(operand, self.size**0.5 * 2**-24)

    @property
    def arithmetic(self) -> str:
        return str(self.dtype)[6:] + (" without TF32" if self.plain else "")

    @contextlib.contextmanager
    def switched(self) -> Iterator[None]:
        """torch's switch as the job wants it."""
        rnn = torch.backends.cudnn.rnn
        before, rnn.fp32_precision = rnn.fp32_precision, "tf32" if self.tf32 else "ieee"  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            rnn.fp32_precision = before  # pyright: ignore[reportAttributeAccessIssue]


def jobs(
    count: int, seed: int, sizes: tuple[int, ...], of: Iterable[str] = tuple(BUILT_IN)
) -> list[Case]:
    """`count` random jobs with hidden sizes around `sizes`."""
    chance, names = random.Random(seed), list(of)
    return [
        Case(
            cell=chance.choice(names),
            dtype=chance.choice(list(ROUNDOFF)),
            steps=chance.choice((1, 2, 3, 5, 8, 13)),
            batch=chance.choice((1, 3, 8, 11, 16, 37)),
            size=chance.choice(sizes),
            inputs=chance.choice((1, 5, 16, 28, 64)),
            ids=chance.random() < 0.25,
            bias=chance.random() < 0.8,
            lengths=chance.random() < 0.3,
            xi=chance.choice((0, 0, 1, 2)),
            tf32=chance.random() < 0.5,
            seed=i,
        )
        for i in range(count)
    ]


@dataclass(frozen=True)
class Material:
    """The tensors of a job, on the CPU in float64 but with values its dtype can hold."""

    w: Weights
    xs: Tensor
    state: State
    dhs: Tensor
    dstate: State
    xi: Tensor | None
    lengths: Tensor | None
    noise: Tensor | None

    def piece(self, cell: Cell) -> Piece:
        """What a kernel's forward reads."""
        return Piece(cell, self.w, self.xs, self.state, self.lengths, self.noise)

    def pull(self) -> Pull:
        """What its backward gets."""
        return Pull(self.dhs, self.dstate, self.xi)

    def to(self, dtype: torch.dtype, device: str) -> Material:
        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, dtype if x.is_floating_point() else x.dtype)

        def moved(x: Tensor) -> Tensor:
            return x.to(device, dtype if x.is_floating_point() else x.dtype)

        return Material(
            Weights(*map(move, self.w)),  # pyright: ignore[reportArgumentType]
            moved(self.xs),
            tuple(map(moved, self.state)),
            moved(self.dhs),
            tuple(map(moved, self.dstate)),
            None if self.xi is None else self.xi.to(device),
            move(self.lengths),
            move(self.noise),
        )


def material(job: Case) -> Material:
    """Random tensors, W_hh with orthogonal blocks so that gradients live to the first step."""
    g = torch.Generator().manual_seed(job.seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        x = scale * torch.randn(*shape, generator=g, dtype=torch.float64)
        return x.to(job.dtype).double()

    cell, H, T, B = cell_of(job.cell), job.size, job.steps, job.batch
    gates, own = cell.gates, len(cell.parameters)
    W_hh = [orthogonal(normal(H, H), cell.heads) for _ in range(gates)]
    w = Weights(
        normal(gates * H, job.inputs, scale=0.5),
        torch.cat(W_hh).to(job.dtype).double(),
        normal(gates * H, scale=0.1) if job.bias else None,
        normal(gates * H, scale=0.1) if job.bias else None,
        own=normal(own, H, scale=0.5) if own else None,
    )
    ids = torch.randint(job.inputs, (T, B), generator=g)
    sizes = cell.state_sizes(H)
    xi = torch.rand(T, B, generator=g).mul(3).floor()  # 0, 1 or 2
    return Material(
        w,
        ids if job.ids else normal(T, B, job.inputs),
        tuple(normal(B, n) for n in sizes),
        normal(T, B, H),
        tuple(normal(B, n) for n in sizes),
        (None, xi[:, 0], xi)[job.xi],
        torch.randint(0, T + 1, (B,), generator=g) if job.lengths else None,
        _drawn(cell.noise, T, B, H, g),
    )


def orthogonal(drawn: Tensor, heads: int) -> Tensor:
    """An orthogonal matrix that falls into heads, where it can be cut into so many."""
    size = len(drawn) // (heads or len(drawn)) if heads == 0 or len(drawn) % heads == 0 else 0
    cuts = range(0, len(drawn), size or len(drawn))
    blocks = [drawn[i : i + size, i : i + size] if size else drawn for i in cuts]
    return torch.block_diag(*(torch.linalg.qr(block)[0] for block in blocks))


def _drawn(noise: tuple[float, ...], T: int, B: int, H: int, g: torch.Generator) -> Tensor | None:
    """0, or what keeps the mean: here a power of two, which every dtype can hold."""
    blocks = [(torch.rand(T, B, H, generator=g, dtype=torch.float64) >= p) * 2.0 for p in noise]
    return torch.cat(blocks, -1) if blocks else None


class Shaken:
    """The reference, every operand of every step changed by a factor 1 ± u (see above)."""

    name = "shaken"

    def __init__(self, u: float, seed: int, device: str) -> None:
        self.u = u
        self.random = torch.Generator(device).manual_seed(seed)

    def refuses(self, piece: Piece) -> str | None:
        return None

    def empty_gates(self, piece: Piece) -> Tensor | None:
        return reference.KERNEL.empty_gates(piece)

    def shake(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        signs = torch.randint(0, 2, x.shape, generator=self.random, device=x.device) * 2 - 1
        return x * (1 + self.u * signs)

    def forward(self, piece: Piece, needs_gates: bool = True) -> Trace:
        cell, w, xs, state, lengths, noise = piece
        steps: list[Trace] = []
        for t in range(len(xs)):
            ended, x = _at(lengths, t), self.shake(xs[t : t + 1])
            drawn = None if noise is None else noise[t : t + 1]
            now = Piece(cell, w.map(self.shake), x, state, ended, drawn)
            step = reference.KERNEL.forward(now)
            before, state = state, tuple(map(self.shake, step.state(1)))
            tracks = [torch.stack(pair) for pair in zip(before, state, strict=True)]
            steps.append(Trace(tracks[0], tracks[1] if len(tracks) > 1 else None, step.gates))
        return _joined(steps)

    def backward(
        self, piece: Piece, trace: Trace, pull: Pull
    ) -> tuple[Tensor | None, Gradients, State]:
        cell, w, xs, _, lengths, noise = piece
        dhs, dstate, xi, _, into = pull
        dw, dxs = w.zeros() if into is None else into, []
        for t in reversed(range(len(xs))):
            kept = (None if x is None else self.shake(x) for x in trace.between(t, t + 1))
            shaken = Trace(*kept)  # pyright: ignore[reportArgumentType]
            x, weights = self.shake(xs[t : t + 1]), w.map(self.shake)
            drawn = None if noise is None else noise[t : t + 1]
            step = Piece(cell, weights, x, shaken.state(0), _at(lengths, t), drawn)
            back = Pull(
                None if dhs is None else self.shake(dhs[t : t + 1]),
                tuple(map(self.shake, dstate)),
                None if xi is None else xi[t : t + 1],
                into=dw,
            )
            dx, _, dstate = reference.KERNEL.backward(step, shaken, back)
            dxs.append(dx)
        found = None if dxs[0] is None else self.shake(torch.cat(dxs[::-1]))
        return found, dw, tuple(map(self.shake, dstate))


def _at(lengths: Tensor | None, t: int) -> Tensor | None:
    """Lengths as step t alone meets them."""
    return None if lengths is None else (lengths - t).clamp(0, 1)


def _joined(steps: list[Trace]) -> Trace:
    """The traces of single steps as one."""
    hs, cs, gates = zip(*steps, strict=True)

    def track(states: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([states[0][:1], *(s[1:] for s in states)])

    return Trace(
        track(hs),
        None if cs[0] is None else track(cs),
        None if gates[0] is None else torch.cat(gates),
    )


Answers = dict[str, Tensor]


def answers(kernel: Kernel, job: Case, m: Material, at: Tensor | None = None) -> Answers:
    """Everything a kernel computes for a job, by name; gradients at the states `at` if given."""
    exact = isinstance(kernel, Shaken) or kernel is reference.KERNEL
    piece = m.piece(plain_cell(job.cell) if exact else cell_of(job.cell))
    trace = kernel.forward(piece)
    found = {"hs": trace.hs, "cs": trace.cs}
    trace = trace if at is None else trace._replace(hs=at.to(trace.hs))
    dxs, dw, dstate = kernel.backward(piece, trace, m.pull())
    found |= {"dxs": dxs, **dw._asdict()}
    found |= {f"dstate{i}": d for i, d in enumerate(dstate)}
    return {name: x for name, x in found.items() if x is not None}


def peer_answers(job: Case, m: Material) -> Answers:
    """The same from torch.nn, that is from cuDNN."""
    kind = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}.get(job.cell, torch.nn.RNN)
    extra = {} if job.cell in ("gru", "lstm") else {"nonlinearity": job.cell}
    rnn = kind(job.inputs, job.size, bias=job.bias, **extra, device=m.xs.device, dtype=job.dtype)
    with torch.no_grad():
        for p, value in zip(rnn.parameters(), (x for x in m.w if x is not None), strict=True):
            p.copy_(value)
    xs = m.xs.detach().requires_grad_()
    state = [s.detach()[None].requires_grad_() for s in m.state]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights")  # torch never flattens bf16
        ys, last = rnn(xs, tuple(state) if len(state) > 1 else state[0])
    last = last if isinstance(last, tuple) else (last,)
    torch.autograd.backward([ys, *last], [m.dhs, *(d[None] for d in m.dstate)])
    names = [n for n, x in zip(Weights._fields, m.w, strict=True) if x is not None]
    found = {n: p.grad for n, p in zip(names, rnn.parameters(), strict=True)}
    found |= {f"dstate{i}": None if s.grad is None else s.grad[0] for i, s in enumerate(state)}
    found |= {"hs": torch.cat([state[0], ys]), "dxs": xs.grad}
    return {n: x for n, x in found.items() if x is not None}


def errors(found: Answers, exact: Answers) -> dict[str, float]:
    """‖found - exact‖ / ‖exact‖ of each array."""
    return {
        name: float((x.detach().to(exact[name]) - exact[name]).norm() / _length(exact[name]))
        for name, x in found.items()
    }


def _length(x: Tensor) -> Tensor:
    return x.norm().clamp_min(1e-30)


@dataclass(frozen=True)
class Verdict:
    """A kernel's errors on a job, what rounding allows, and what cuDNN's are (if it runs it)."""

    job: Case
    ours: dict[str, float]
    limits: dict[str, float]
    theirs: dict[str, float]
    unequal: list[str]  # arrays that differ between two runs

    @property
    def faults(self) -> list[str]:
        """What is wrong with the kernel's answers to this job; an empty list where nothing is."""
        beyond = [(n, e, self.limits[n]) for n, e in self.ours.items() if not e <= self.limits[n]]
        return [f"{n} differs between two runs" for n in self.unequal] + [
            f"{n} is off by {e:.1e}, rounding explains {most:.1e}" for n, e, most in beyond
        ]


def faults(job: Case, kernel: Kernel = KERNEL, device: str = "cuda") -> list[str]:
    """What is wrong with the kernel's answers to this job; an empty list where nothing is."""
    made = material(job)
    reason = kernel.refuses(made.to(job.dtype, device).piece(cell_of(job.cell)))
    return [f"refused: {reason}"] if reason else judged(job, kernel, device, made=made).faults


def faulty(todo: Iterable[Case]) -> dict[Case, list[str]]:
    """The same of many jobs, where there is anything."""
    todo = list(todo)
    compile_ahead(todo)
    return {job: found for job in todo if (found := faults(job))}


def judged(
    job: Case, kernel: Kernel, device: str, peer: bool = False, made: Material | None = None
) -> Verdict:
    """Run a job twice, exactly, shaken, and where asked on cuDNN."""
    desk = device if job.size >= 64 else "cpu"  # where float64 is faster
    wide = (made or material(job)).to(torch.float64, desk)
    m = wide.to(job.dtype, device)
    with job.switched():
        first, second = answers(kernel, job, m), answers(kernel, job, m)
        theirs = peer_answers(job, m) if peer else {}

    def exactly(found: Answers) -> Answers:
        return answers(reference.KERNEL, job, wide, _place(job, found))

    exact, limits = exactly(first), dict.fromkeys(first, 0.0)
    for draw in range(
        max(8, 64 // job.size)
    ):  # the largest of a few is no measure of a single unit
        shaken = answers(Shaken(job.roundoff, draw, desk), job, wide, _place(job, first))
        limits = {n: max(limits[n], e) for n, e in errors(shaken, exact).items()}
    return Verdict(
        job,
        errors(first, exact),
        limits,
        errors(theirs, exactly(theirs)) if peer else {},
        [n for n in first if not torch.equal(first[n], second[n])],
    )


def _place(job: Case, found: Answers) -> Tensor | None:
    """Where gradients are taken: a relu's at the states that were found."""
    return found["hs"].detach() if job.cell in RELU else None


Ratios = dict[tuple[str, str, str], list[float]]
"""log(our error / cuDNN's), job by job, for each cell, arithmetic and array."""


def ratios(verdicts: Iterable[Verdict]) -> Ratios:
    """Jobs that cuDNN ran without the TF32 that it was allowed (small layers) do not count."""
    found: Ratios = {}
    for v in verdicts:
        if v.job.dtype == torch.float32 and v.job.tf32 and min(v.theirs.values()) < 1e-5:
            continue
        for name, e in v.theirs.items():
            logs = found.setdefault((v.job.cell, v.job.arithmetic, name), [])
            logs.append(math.log(v.ours[name] / e))
    return found


def worse(logs: list[float]) -> bool:
    """Whether the geometric mean rounds to more than 1.0, and not by chance."""
    chance = CERTAIN * statistics.stdev(logs) / len(logs) ** 0.5
    return statistics.mean(logs) > math.log(1.05) + chance


def peer_jobs(seeds: int) -> list[Case]:
    """Jobs that cuDNN runs too, enough of each cell and dtype for a mean."""
    return [
        Case(cell, dtype, 13, 37, size, size, tf32=tf32, seed=seed)
        for cell in BUILT_IN
        if cell != "linear"
        for dtype, tf32 in [*((dtype, True) for dtype in ROUNDOFF), (torch.float32, False)]
        for size in (64, 256, 512)
        for seed in range(seeds)
    ]


WIDE = [  # layers beyond a cluster
    Case("lstm", torch.bfloat16, 5, 64, 1024, 64),
    Case("gru", torch.float16, 5, 37, 1024, 28, lengths=True, xi=2),
    Case("tanh", torch.bfloat16, 8, 64, 2048, 16, xi=1),
    Case("lstm", torch.bfloat16, 3, 3, 1536, 28, lengths=True),
    Case("relu", torch.bfloat16, 4, 16, 2048, 5, ids=True),
    Case("lstm", torch.float32, 5, 16, 1024, 28, xi=2),
    Case("gru", torch.float32, 4, 8, 1000, 28, lengths=True, tf32=False),
    Case("lstm", torch.bfloat16, 3, 16, 2048, 28, xi=1),
    Case("gru", torch.bfloat16, 5, 1, 2048, 28),
    Case("tanh", torch.float32, 4, 64, 1536, 28),
    Case("lstm", torch.bfloat16, 4, 65, 1000, 28, lengths=True, xi=2),
    Case("linear", torch.bfloat16, 4, 20, 4096, 28),
    Case("gru", torch.bfloat16, 4, 64, 1024, 28, ids=True, xi=2),
    Case("lstm", torch.float16, 6, 16, 768, 28, lengths=True, xi=1),
    Case("gru", torch.float32, 4, 64, 1024, 28, xi=1),
    Case("lstm", torch.bfloat16, 3, 30, 1536, 28),
    Case("gru", torch.float16, 4, 64, 1536, 28, lengths=True, xi=2),
    Case("lstm", torch.bfloat16, 3, 64, 1536, 28, xi=1),
    Case("lstm", torch.float16, 3, 64, 2048, 28, lengths=True),
    Case("gru", torch.bfloat16, 3, 50, 2048, 28, xi=2),
    Case("tanh", torch.bfloat16, 3, 256, 2048, 28),
    Case("lstm", torch.bfloat16, 4, 33, 1135, 28, lengths=True, xi=2),  # rows of no whole 16 bytes
    Case("gru", torch.float16, 4, 70, 1501, 28, xi=1),
    Case("tanh", torch.float32, 4, 17, 1999, 28, ids=True),
    Case("gru", torch.bfloat16, 3, 200, 1536, 28, lengths=True),  # in several launches
]


DESCRIBED = [  # layers beyond a cluster, also by heads; gates read apart; numbers of the units' own
    Case("described lstm", torch.bfloat16, 5, 64, 1024, 64, xi=1),
    Case("described gru", torch.float16, 5, 37, 1024, 28, lengths=True, xi=2),
    Case("mgu", torch.bfloat16, 5, 64, 1024, 28, ids=True),
    Case("peephole", torch.bfloat16, 5, 16, 1000, 28, lengths=True, xi=2),
    Case("slstm", torch.float32, 4, 8, 1024, 28, xi=2, tf32=False),
    Case("slstm", torch.bfloat16, 4, 11, 3072, 28, lengths=True, xi=2),
    Case("indrnn", torch.bfloat16, 4, 20, 2048, 16, xi=1),
]


def described_jobs(each: int, seed: int) -> list[Case]:
    """Jobs of every shipped cell, built-in cells by their equations and cells with noise."""
    sizes = (1, 7, 33, 64, 100, 256, 300, 512)
    names = (*SHIPPED, *TWIN, *NOISY)
    return [job for i, name in enumerate(names) for job in jobs(each, seed + i, sizes, (name,))]


def compile_ahead(todo: Iterable[Case]) -> None:
    """Compile what the jobs will need, on all cores: of a test of many it is the longest part."""
    device, needed = torch.cuda.current_device(), set()
    for job in todo:
        with job.switched():
            code = arithmetic(job.dtype)
        for way in ("forward", "backward"):
            shape = job.size, job.dtype.itemsize, job.batch, device
            plan = cuda.plan_for(cell_of(job.cell), way, *shape)
            needed |= {(plan, code)} if plan else set()
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda need: compiled(*need), needed):
            pass


def check_rounding(todo: list[Case]) -> int:
    """Check many jobs, say which went wrong, and return how many."""
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
    return bad


def check_against_cudnn(seeds: int = 6) -> int:
    """Print the ratio of errors for each cell, dtype and array; return how many are too large."""
    todo = peer_jobs(seeds)
    compile_ahead(todo)
    found, bad = ratios(judged(job, KERNEL, "cuda", peer=True) for job in todo), 0
    print("our error / cuDNN's, geometric means")
    for cell, kind in dict.fromkeys(key[:2] for key in found):
        said = []
        for (c, k, name), logs in found.items():
            if (c, k) == (cell, kind):
                bad += worse(logs)
                ratio = math.exp(statistics.mean(logs))
                said.append(f"{name} {ratio:.2f}{' TOO LARGE' if worse(logs) else ''}")
        print(f"  {cell} {kind}: {', '.join(said)}", flush=True)
    return bad


def main() -> int:
    """Check rounding, of built-in and of described cells, then compare with cuDNN."""
    small, large = (1, 5, 16, 33, 64, 100), (128, 200, 256, 300, 384, 512)
    built_in = jobs(80, 0, small) + jobs(90, 1, large) + jobs(6, 2, (1024,)) + WIDE
    bad = check_rounding(built_in) + check_rounding(described_jobs(5, 60) + DESCRIBED)
    return 1 if bad + check_against_cudnn() else 0


if __name__ == "__main__":
    sys.exit(main())
