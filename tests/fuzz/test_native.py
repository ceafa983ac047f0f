"""Every native entry, handed tensors of which one is wrong in one property.

The rule: the numbers of plain PyTorch on the same tensors, or an exception in words; never a
signal, never other numbers. ELMAN_FUZZ_CASES sets how many cases each entry gets (default 60).
"""

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from elman import nn
from elman.cells import Weights, named
from elman.errors import UserError
from elman.kernels import Piece, Pull, reference
from elman.kernels.cpu import FLOAT, KERNEL, Steps, Windows, clip_norm, head

CASES = int(os.environ.get("ELMAN_FUZZ_CASES", "60"))
REFUSALS = (UserError, RuntimeError, ValueError, IndexError, TypeError)
pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.skipif(KERNEL.library is None, reason="the cpu kernel was not built"),
]


def wrongs(t: Tensor, chance: random.Random) -> Tensor:
    """The same tensor with one property changed: where it lies, its type, shape or layout."""
    kinds = [
        lambda: t.to("meta"),
        lambda: t.to(torch.float16 if t.is_floating_point() else torch.int32),
        lambda: t.to(torch.float64),
        lambda: t.to(torch.complex64),
        lambda: t[:0],
        lambda: t[..., :1],
        lambda: t[None],
        lambda: t.flatten(),
        lambda: torch.cat([t, t]),
        lambda: torch.stack([t, t], -1)[..., 0],
        lambda: t.transpose(0, -1),
        lambda: t.flatten()[:1].expand(t.shape),
        lambda: torch._neg_view(t) if t.is_floating_point() else t.flip(0),
        lambda: t.to_sparse() if t.dim() else t,
        lambda: t.to_mkldnn() if t.dtype == torch.float32 and t.numel() else t,
        lambda: t if t.is_floating_point() else t + 1000,
        lambda: t if t.is_floating_point() else -t - 1,
    ]
    return chance.choice(kinds)()


def problem(chance: random.Random) -> tuple[Piece, Pull]:
    cell = named(chance.choice(["tanh", "relu", "linear", "gru", "lstm"]))
    T, B, inputs, H = (chance.randint(1, 5) for _ in range(4))
    g = torch.Generator().manual_seed(chance.randint(0, 2**31))
    normal = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    M = cell.gates * H
    w = Weights(normal(M, inputs), normal(M, H), normal(M), normal(M))
    ids = chance.random() < 0.4
    xs = torch.randint(inputs, (T, B), generator=g) if ids else normal(T, B, inputs)
    state = tuple(normal(B, H) for _ in cell.states)
    lengths = torch.randint(T + 1, (B,), generator=g) if chance.random() < 0.3 else None
    xi = chance.choice([None, normal(T), normal(T, B)])
    pull = Pull(normal(T, B, H), tuple(normal(B, H) for _ in state), xi)
    return Piece(cell, w, xs, state, lengths), pull


def spoil(structure, chance):
    """One tensor of a nest of named tuples and tuples, spoiled."""
    leaves = []

    def collect(x, path):
        if isinstance(x, Tensor):
            leaves.append(path)
        elif isinstance(x, tuple):
            for i, y in enumerate(x):
                collect(y, (*path, i))

    def rebuild(x, path):
        if not path:
            return wrongs(x, chance)
        items = list(x)
        items[path[0]] = rebuild(items[path[0]], path[1:])
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)

    collect(structure, ())
    return rebuild(structure, chance.choice(leaves))


def outcome(run):
    """What comes out, or None for a refusal."""
    try:
        return run()
    except REFUSALS:
        return None


def agree(found, exact) -> None:
    """Where the native code answered, the reference has the same numbers."""
    if found is None:
        return
    assert exact is not None, "native code answered what the reference refuses"
    for a, b in zip(found, exact, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("seed", range(CASES))
def test_forward(seed):
    chance = random.Random(seed)
    piece = spoil(problem(chance)[0], chance)
    if KERNEL.refuses(piece) is None:
        run = lambda kernel: kernel.forward(piece)[:2]  # noqa: E731
        agree(outcome(lambda: run(KERNEL)), outcome(lambda: run(reference.KERNEL)))


def backward(kernel, piece, trace, pull):
    dxs, dw, dstate = kernel.backward(piece, trace, pull)
    return [dxs, *dw[:4], *dstate]


@pytest.mark.parametrize("seed", range(CASES))
def test_backward(seed):
    chance = random.Random(seed)
    piece, pull = problem(chance)
    traces = [kernel.forward(piece) for kernel in (KERNEL, reference.KERNEL)]
    if chance.random() < 0.3:
        pull = pull._replace(into=piece.w.zeros())
    which = chance.randrange(3)
    if which == 0:
        piece = spoil(piece, chance)
    elif which == 1:
        pull = spoil(pull, chance)
    else:
        seen = chance.getstate()
        spoiled = []
        for trace in traces:
            chance.setstate(seen)
            spoiled.append(spoil(trace, chance))
        traces = spoiled
    if KERNEL.refuses(piece) is None:
        fresh: Any = pull
        if fresh.into is not None:
            fresh = fresh._replace(into=fresh.into.map(torch.clone))
        found = outcome(lambda: backward(KERNEL, piece, traces[0], pull))
        exact = outcome(lambda: backward(reference.KERNEL, piece, traces[1], fresh))
        if exact is None or which == 2:
            return  # the reference reads less of what is wrong, or refuses later
        agree(found, exact)


@pytest.mark.parametrize("seed", range(CASES))
def test_head(seed):
    chance = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    T, B, H, V = (chance.randint(1, 6) for _ in range(4))
    normal = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    bias = normal(V) if chance.random() < 0.7 else None
    tensors = (normal(T, B, H), normal(V, H), bias, torch.randint(V, (T, B), generator=g))
    hs, W, b, targets = spoil(tensors, chance)
    if not head.runs(KERNEL, hs, W, b):
        return
    native = outcome(lambda: [head.mean_nats(KERNEL, hs, W, b, targets, (True, True))[0]])
    plain = outcome(
        lambda: [cross_entropy(linear(hs, W, b).flatten(0, -2), targets.flatten().long())]
    )
    agree(native, plain)


@pytest.mark.parametrize("seed", range(CASES))
def test_clip(seed):
    chance = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    shapes = [(chance.randint(1, 6), chance.randint(1, 6)) for _ in range(3)]
    gradients = spoil(tuple(torch.randn(*s, generator=g) for s in shapes), chance)
    before = [t.clone() if t.layout == torch.strided else t for t in gradients]
    norm = outcome(lambda: clip_norm(KERNEL, gradients, 0.5))
    if norm is not None:
        exact = torch.stack([t.double().norm() for t in before]).norm()
        torch.testing.assert_close(norm, float(exact), rtol=1e-5, atol=1e-6)
        for t, old in zip(gradients, before, strict=True):
            torch.testing.assert_close(t, old * min(1.0, 0.5 / max(norm, 1e-9)))


@pytest.mark.parametrize("seed", range(CASES))
def test_steps(seed):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    kind = chance.choice([nn.RNN, nn.GRU, nn.LSTM])
    rnn, out = kind(5, 4, num_layers=chance.randint(1, 2)).eval(), torch.nn.Linear(4, 3)
    job = rnn.job(torch.zeros(1, 2, dtype=torch.int64))
    ids, W, b = torch.randint(5, (2,)), out.weight.detach(), out.bias.detach()
    if chance.random() < 0.5:
        ids, W, b = spoil((ids, W, b), chance)
    else:
        name = chance.choice([n for n, _ in rnn.named_parameters()])
        spoiled = outcome(lambda: wrongs(getattr(rnn, name).detach(), chance))
        if spoiled is None:
            return
        rnn._parameters[name] = torch.nn.Parameter(spoiled, requires_grad=False)
        job = outcome(lambda: rnn.job(torch.zeros(1, 2, dtype=torch.int64)))
    if job is None or any(KERNEL.refuses(piece) for piece in job.pieces()):
        return
    with torch.no_grad():
        native = outcome(lambda: [Steps(KERNEL, job, W, b)(ids)])
        plain = outcome(lambda: [linear(rnn(ids[None].long())[0], W, b)[0]])
    if plain is not None:
        agree(native, plain)


@pytest.mark.parametrize("seed", range(CASES))
def test_windows(seed):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    kind = chance.choice([nn.RNN, nn.GRU, nn.LSTM])
    rnn = kind(5, 4, num_layers=chance.randint(1, 2))
    W, b = torch.randn(5, 4), torch.randn(5)
    ids, targets = torch.randint(5, (3, 2)), torch.randint(5, (3, 2))
    job = rnn.job(ids)
    state = tuple(torch.zeros(rnn.num_layers, 2, 4) for _ in job.cell.states)
    when = chance.randrange(3)
    if when == 0:
        ids, targets = spoil((ids, targets), chance)
    elif when == 1:
        state, W, b = spoil((state, W, b), chance)
    windows = outcome(lambda: Windows(KERNEL, job, list(state), W, b, FLOAT))
    if windows is None:
        return
    if when == 2:
        p = chance.choice(windows.weights)
        spoiled = wrongs(p.detach(), chance)
        if outcome(lambda: setattr(p, "data", spoiled)) is None and p.shape != spoiled.shape:
            return
    nats = outcome(lambda: [torch.tensor(windows(ids, targets))])
    with torch.no_grad():
        plain = outcome(
            lambda: [
                cross_entropy(linear(rnn(ids)[0], W, b).flatten(0, 1), targets.flatten().long())
            ]
        )
    if plain is not None:
        agree(nats, plain)
